"""Timing: the least of several runs, on one device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


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
