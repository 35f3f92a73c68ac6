"""Chooses by measuring: what ``topology="auto"`` and ``ratio="auto"`` do. Neither takes more time than all-reduce.

In the first steps gradients are exchanged by all-reduce, until DDP has built its final buckets. Then every rank takes
part in trial exchanges of made-up gradients of those sizes, over the very links, and all know the slowest rank's times.
Nothing is compressed before the choice; what a checkpoint's residuals hold is delivered by all-reduce first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.build import make_codecs, make_endpoint, make_shape
from lightning_topk.config import SLACK, TopKConfig
from lightning_topk.core.exchange import exchange
from lightning_topk.runtime.drive import Meter, dense_cost, drive, finish
from lightning_topk.runtime.groups import Groups
from lightning_topk.saving import with_ratio
from lightning_topk.schedule import LATE

TRIALS = 4
"""Exchanges of each kind, of which the first is not counted."""
PROBE_BYTES = 1 << 20
"""Of the all-reduce from whose time longer ones are estimated: a quarter of a second at 100 Mbit/s."""
PATIENCE = 0.5
"""Seconds that an all-reduce may take, by that estimate, to be tried whole."""


@dataclass(frozen=True)
class Choice:
    """How each bucket is exchanged.

    Attributes:
        configs: The settings, bucket by bucket.
        words: The same for people.
    """

    configs: tuple[TopKConfig, ...]
    words: str


def choose(
    config: TopKConfig,
    buckets: Sequence[Sequence[Tensor]],
    uncompressed: Sequence[Sequence[int]],
    groups: Groups,
    meter: Meter,
) -> Choice:
    """Measures and chooses; a collective.

    Args:
        config: The settings, of which something is automatic.
        buckets: The parameters of each bucket.
        uncompressed: Which of them, by number, are not compressed.
        groups: The process groups.
        meter: Takes note of the bytes sent, as ``broadcast``: they are no gradients.

    Returns:
        The same choice on every rank.
    """
    world = dist.get_world_size(groups.all)
    ways = config.candidates(world, groups.local)
    device = buckets[0][0].device
    scratch = Meter()
    link = dense_cost(PROBE_BYTES, device, groups.all, scratch)
    seconds = []
    for bucket, some in zip(buckets, uncompressed, strict=True):
        tried = [trial(way.at(LATE, LATE), bucket, groups, scratch, some) for way in ways]
        dense = link.seconds(1, sum(p.nbytes for p in bucket))
        if dense < PATIENCE:
            dense = trial(config.dense, bucket, groups, scratch)
        seconds.append([*tried, dense])
    meter.bytes["broadcast"] += sum(scratch.bytes[kind] for kind in ("uplink", "downlink", "broadcast"))
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=groups.all)
    return judge(config, ways, [sum(p.numel() for p in bucket) for bucket in buckets], slowest.tolist())


def trial(
    config: TopKConfig,
    bucket: Sequence[Tensor],
    groups: Groups,
    meter: Meter,
    uncompressed: Sequence[int] = (),
) -> float:
    """Seconds of an exchange of a made-up gradient, the median of several.

    Args:
        config: The settings, with nothing automatic and no schedule.
        bucket: The parameters.
        groups: The process groups.
        meter: Takes note of the bytes sent.
        uncompressed: Which of the parameters, by number, are not compressed.
    """
    like, sizes = bucket[0], tuple(p.numel() for p in bucket)
    rank, world = dist.get_rank(groups.all), dist.get_world_size(groups.all)
    skipped = sum(sizes[number] for number in uncompressed)
    config = with_ratio(config, sizes, world, groups.local, like.itemsize, skipped)
    shape = make_shape(config, sizes, world, groups.local)
    end = make_endpoint(config, shape, rank, like.dtype, like.device, uncompressed)
    codecs = make_codecs(config, end, selector=end.uplink.selector)
    given = torch.randn(sum(sizes), device=like.device, dtype=like.dtype)
    took = []
    for _ in range(TRIALS):
        g = given.clone()
        dist.barrier(groups.all)
        _wait(like.device)
        begin = time.perf_counter()
        finish(drive(exchange(end, g, codecs), groups, meter, "an exchange that is timed"))
        _wait(like.device)
        took.append(time.perf_counter() - begin)
    return median(took[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def judge(
    config: TopKConfig,
    ways: Sequence[TopKConfig],
    sizes: Sequence[int],
    seconds: Sequence[Sequence[float]],
) -> Choice:
    """Chooses from what was measured.

    Args:
        config: The settings, of which something is automatic.
        ways: Those among which to choose, besides all-reduce.
        sizes: Elements of each bucket.
        seconds: For each bucket, those of each way, and of all-reduce.
    """
    found: dict[Any, list[tuple[float, TopKConfig]]] = {}
    for ratio in dict.fromkeys(way.ratio for way in ways):  # ascending
        found[ratio] = []
        for times in seconds:
            best, number = min(
                (t, n) for n, (t, way) in enumerate(zip(times, ways, strict=False)) if way.ratio == ratio
            )
            found[ratio].append((times[-1], config.dense) if times[-1] <= SLACK * best else (best, ways[number]))
    cost = {ratio: sum(took for took, _ in chosen) for ratio, chosen in found.items()}
    *_, largest = (ratio for ratio in cost if cost[ratio] <= SLACK * min(cost.values()))
    chosen = found[largest]
    return Choice(tuple(way for _, way in chosen), _in_words(chosen, sizes, seconds, len(ways)))


def _in_words(
    chosen: Sequence[tuple[float, TopKConfig]],
    sizes: Sequence[int],
    seconds: Sequence[Sequence[float]],
    ways: int,
) -> str:
    kinds: dict[str, list[int]] = {}
    for number, way in enumerate(way.at(LATE, LATE) for _, way in chosen):
        name = f"{way.topology} exchange at {_density(way)}" if way.compresses else "all-reduce"
        kinds.setdefault(name, []).append(number)
    parts = []
    for name, numbers in kinds.items():
        took = 1000 * sum(chosen[number][0] for number in numbers)
        other = [min(seconds[n][:ways]) if name == "all-reduce" else seconds[n][-1] for n in numbers]
        elements = sum(sizes[number] for number in numbers)
        parts.append(
            f"{name} for {len(numbers)} bucket{'s' * (len(numbers) > 1)} ({elements:,} elements), {took:.1f} ms "
            f"instead of {1000 * sum(other):.1f} ms {'compressed' if name == 'all-reduce' else 'by all-reduce'}"
        )
    return "lightning_topk measured and chose " + "; ".join(parts) + "."


def _density(config: TopKConfig) -> str:
    """How much of a bucket is sent, in words."""
    if config.saving is not None:
        return f"saving {config.saving:.3g}"
    return f"ratio {config.ratio:.3g}" if isinstance(config.ratio, float) else "a ratio by step"
