"""Runs contenders beside the ranks that a launcher started, so that one that fails, hangs or dies ends no rank.

The ranks hold no model, and share a gloo group that no contender uses. Each rank starts a process. These processes join
the contenders' backend, make the contenders, and do with them what their rank asks. The ranks gather every answer: if
one is an error or late, all ranks know why, and end their processes, even those that wait in a collective, before
NCCL's watchdog does.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_topk.bench.loop import Contender, gather

TIMEOUT = timedelta(minutes=2)  # of a contender's collectives
LIMIT = 3 * TIMEOUT.total_seconds()  # of an answer; the ranks wait longer for each other
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}  # of the contenders
T = TypeVar("T")


class ContenderError(Exception):
    """A contender failed: its ``name``, and the first failure in words, the same on all ranks."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} failed on {reason}")
        self.name, self.reason = name, reason


class Runners:
    """A process for each rank, in which contenders run until one fails. Entered and asked by all ranks at once.

    ``make`` makes a contender by name, on ``device``; it is pickled. ``number`` must be new in the launcher's store.
    """

    def __init__(self, make: Callable[[str], Contender], device: torch.device, number: int) -> None:
        context = multiprocessing.get_context("forkserver")  # a fresh process; the next ones need not import torch
        context.set_forkserver_preload([__name__])
        self._store = _store(number)
        self._join = partial(_join, device, number, dist.get_rank(), dist.get_world_size())
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(os.environ), make), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Runners:
        _, reason = self._agree("", self._join)
        if reason:
            self.__exit__()
            raise RuntimeError(f"the contenders' processes cannot join: {reason}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def ask(self, name: str, work: Callable[[Contender], T]) -> list[T]:
        """Runs ``work``, pickled, on a contender on each rank; returns the results. The first call makes the contender.

        Raises ContenderError if it fails on a rank.
        """
        results, reason = self._agree(name, work)
        if reason:
            raise ContenderError(name, reason)
        return results

    def _agree(self, name: str, work: Callable[..., Any]) -> tuple[list[Any], str]:
        """The results of ``work`` in the processes of all ranks, and the first failure or an empty string.

        ``work`` gets the contender of that name, or nothing if the name is empty.
        """
        begin = time.perf_counter()
        with suppress(OSError):  # the process has died, which `_answer` reports
            self._pipe.send((name, work))
        result, error = self._answer()
        if error:
            self._store.set("failed", "")
            error = f"rank {dist.get_rank()}: {error}"
        answers = gather((time.perf_counter() - begin, error, result))
        errors = sorted((late, error) for late, error, _ in answers if error)
        return [result for *_, result in answers], errors[0][1] if errors else ""

    def _answer(self) -> tuple[Any, str]:
        """This rank's result, and its error or an empty string. Stops waiting if another rank has an error."""
        deadline = time.monotonic() + LIMIT
        while not self._pipe.poll(0.5):
            if self._store.check(["failed"]):
                return None, ""
            if time.monotonic() > deadline:
                return None, f"no answer in {LIMIT:g} s"
        try:
            result, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return None, f"its process ended with exit status {self._process.exitcode}"
        return result, error


def _store(number: int) -> Store:
    """A connection to the launcher's store."""
    store = dist.TCPStore(  # type: ignore[attr-defined]  # exported at run time
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT
    )
    return PrefixStore(f"runners {number}", store)


def _serve(pipe: Connection, environment: dict[str, str], make: Callable[[str], Contender]) -> None:
    """Does the work that the rank sends while it lives; answers with the result, and the error or an empty string."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= environment
    made = cache(make)
    with suppress(EOFError):
        while True:
            name, work = pipe.recv()
            try:
                answer = work(made(name)) if name else work(), ""
            except Exception as error:  # whatever a hook raises, the others are measured
                line, _, _ = str(error).strip().partition("\n")
                answer = None, f"{type(error).__name__}: {line[:300]}"
            pipe.send(answer)


def _join(device: torch.device, number: int, rank: int, world: int) -> None:
    """Joins the other ranks' processes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[device.type], None, TIMEOUT, world, rank, _store(number))


def _end_with_parent() -> None:
    """Ends this process when its rank ends, even within a collective."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
