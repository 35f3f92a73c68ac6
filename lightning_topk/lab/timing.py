"""Timing: the least of several runs on one device, and exchanges among ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.build import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.exchange import exchange
from lightning_topk.runtime.collectives import Meter, drive, finish
from lightning_topk.runtime.groups import Groups

TRIALS = 4
"""Exchanges that :func:`trial` times, of which the first is not counted."""


def best(
    work: Callable[[], object],
    device: torch.device,
    prepare: Callable[[], object] = lambda: None,
    repeats: int = 5,
    budget: float = 8.0,
) -> float:
    """Least seconds of several runs, after one that is not counted.

    Args:
        work: What is timed.
        device: Where it runs; a GPU is waited for.
        prepare: Called before each run, untimed.
        repeats: Most runs.
        budget: Seconds after which no further run begins.
    """

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    least, begin = float("inf"), time.perf_counter()
    for run in range(repeats + 1):
        prepare()
        start = now()
        work()
        seconds = now() - start
        if run:
            least = min(least, seconds)
        if run and time.perf_counter() - begin > budget:
            break
    return least


def trial(config: TopKConfig, like: Tensor, groups: Groups, meter: Meter) -> float:
    """Seconds of an exchange of a made-up gradient, the median of several.

    Args:
        config: The settings, without schedules.
        like: A gradient of that size, ``[numel]``, on the CPU.
        groups: The process groups.
        meter: Takes note of the bytes sent.
    """
    rank, world = dist.get_rank(groups.all), dist.get_world_size(groups.all)
    plan = plan_bucket(config, [len(like)], world, groups.local)
    end = plan.endpoint(rank, like.dtype, like.device)
    codecs = plan.codecs(selector=end.uplink.selector)
    given, took = torch.randn_like(like), []
    for _ in range(TRIALS):
        g = given.clone()
        dist.barrier(groups.all)
        begin = time.perf_counter()
        finish(drive(exchange(end, g, codecs), groups, meter, "an exchange that is timed"))
        took.append(time.perf_counter() - begin)
    return median(took[1:])
