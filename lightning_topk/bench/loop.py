"""Times contenders in turns, so that noise of the machine and the network affects all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_topk.bench.peers import Backward, Peer
from lightning_topk.consensus import every_rank, gathered

TURN, LONGEST = 0.2, 5  # seconds of a turn, about; its most steps, since none waits for a GPU
SECONDS, FEWEST = 60.0, 3  # no turn starts later, except so many


class Contender:
    """A model of its own under one exchange.

    ``optimizer`` makes the optimizer; None takes no steps. ``settings`` are arguments of our ``attach``, ``ddp`` of
    DistributedDataParallel.
    """

    def __init__(
        self,
        peer: Peer,
        net: nn.Module,
        backward: Backward,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        settings: Mapping[str, Any] | None = None,
        **ddp: Any,
    ) -> None:
        self.peer, self._backward, self._device = peer, backward, next(net.parameters()).device
        gpu = self._device.type == "cuda"
        ids, cap = ([self._device], None) if gpu else (None, peer.bucket_mb)
        self.model = DistributedDataParallel(net, device_ids=ids, bucket_cap_mb=cap, **ddp)
        self._optimizer = None if optimizer is None else optimizer(self.model.parameters())
        self.state = peer.register(self.model, {**(settings or {}), "optimizer": self._optimizer})

    def take(self, count: int) -> float:
        """Takes ``count`` steps; returns the mean seconds of one."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(count):
            self.model.zero_grad()
            self._backward(self.model)
            if self._optimizer is not None:
                self._optimizer.step()
        self._wait()
        return (time.perf_counter() - begin) / count

    def warm_up(self) -> float:
        """Takes the untimed steps; returns the seconds of the last one."""
        self.take(self.peer.warmup - 1)
        return self.take(1)

    def watch(self) -> float:
        """Takes three steps of ours whose exchange is timed; returns the fraction of it that backward did not hide."""
        self.state.report()
        self.state.telemetry.timing = True
        self.take(3)
        seconds, exposed = self.state.report().times
        return float(exposed / max(seconds, 1e-9))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


Ask = Callable[[str, Callable[[Contender], float]], list[float]]
"""Makes all ranks do something with the contender of this name; returns their results."""


def gather(value: Any) -> list[Any]:
    """The values of all ranks, over gloo. A collective; raises RuntimeError if a rank is gone."""
    with every_rank(f"the bench on rank {dist.get_rank()}", "See that rank's own output."):
        return gathered(value, torch.device("cpu"))


def measure(ask: Ask, names: Sequence[str], steps: int) -> dict[str, list[float]]:
    """Times steps of contenders in turns; returns the seconds of a step by turn, a turn's mean on its slowest rank.

    A collective. Each contender takes about ``steps`` timed steps, fewer if they take long.
    """
    begin, quiet, times = time.perf_counter(), dist.get_rank() > 0, {name: list[float]() for name in names}
    warming = tqdm(names, desc="warming up", leave=False, disable=quiet)
    pace = min(max(ask(name, Contender.warm_up)) for name in warming)
    length, turns, late = max(1, min(LONGEST, math.ceil(steps / FEWEST), math.ceil(TURN / pace))), 0, False
    with tqdm(total=steps, desc="timing", unit="step", leave=False, disable=quiet) as bar:
        while turns < FEWEST or (turns * length < steps and not late):
            for name, each in times.items():
                each.append(max(ask(name, methodcaller("take", length))))
            turns += 1
            bar.update(length)
            late = gather(time.perf_counter() - begin > SECONDS)[0]
    return times
