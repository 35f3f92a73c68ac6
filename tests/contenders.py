"""Models and exchanges for ``bench``, in a file that a contender's process imports fast."""

import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from lightning_topk.bench.command import Work
from lightning_topk.bench.peers import Peer, hook


class Tiny(nn.Sequential):
    """A user's model: two outputs, and batch norm's buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 200))

    def forward(self, x):
        y = super().forward(x)
        return {"all": y, "some": (y[:, :3], None)}


def never(name: str) -> None:
    """Makes no contender."""
    threading.Event().wait()


def raises() -> None:
    raise KeyError("this hook is broken\nin a second line")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watchdog() -> None:
    """Ends a process that waits in vain for another rank, as NCCL's does."""
    time.sleep(1)
    os._exit(6)


def fails(blow: Callable[[], object], step: int) -> Peer:
    """An exchange of nothing that fails on rank 1 in a step, in which rank 0 waits for it."""
    steps = count(1)

    def exchange(state, bucket):
        if next(steps) == step:
            (blow if dist.get_rank() == 1 else watchdog)()
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook(exchange, lambda model: None)


class Faulty(Work):
    """Between DDP and ours, exchanges that fail on one rank."""

    def exchanges(self, shapes):
        dense, *ours = super().exchanges(shapes).items()
        faulty = {
            "at set-up": Peer(lambda *_: raises() if dist.get_rank() == 0 else watchdog()),
            "in its first step": fails(raises, 1),
            "in its fifth step": fails(raises, 5),
            "dies": fails(dies, 1),
            "hangs": fails(threading.Event().wait, 1),
        }
        return dict([dense, *faulty.items(), *ours])


class Broken(Work):
    """An exchange that fails."""

    def exchanges(self, shapes):
        return {"dies": fails(dies, 1)}
