"""Many independent runs on all cores, one thread each."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

import torch
from tqdm import tqdm

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def run_all(
    jobs: Mapping[K, Callable[[], T]], title: str, note: Callable[[K, T], None] = lambda key, result: None
) -> dict[K, T]:
    """Runs jobs in processes of their own, as many at a time as this process may use cores.

    Args:
        jobs: What to run, by name; they travel by pickle, so use :func:`functools.partial`.
        title: Of the progress bar.
        note: Is called with each result as it comes, in this process.

    Returns:
        The results, by name, in the order of ``jobs``.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ProcessPoolExecutor(cores, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        pending = {pool.submit(job): name for name, job in jobs.items()}
        try:
            found = {}
            for done in tqdm(as_completed(pending), total=len(pending), desc=title, unit="run"):
                found[pending[done]] = done.result()
                note(pending[done], done.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: found[name] for name in jobs}
