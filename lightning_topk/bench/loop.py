"""Times contenders in turns, so that noise of the machine and of the network hits all alike.

All ranks agree after every turn, over a group of their own, on who failed: a contender that fails on one rank is left
out on all, and the others go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_topk.bench.peers import Backward, Peer
from lightning_topk.runtime.groups import gathered

TURN, LONGEST = 0.2, 5  # seconds that a turn should last; its steps at most: within a turn, nothing waits for a GPU
FEWEST = 3  # turns that are timed even if the time is up


class Contender:
    """A model of its own under one exchange.

    ``optimizer`` makes the optimizer; without one, no steps are taken. ``settings`` are ours beside it; ``ddp`` has
    arguments of DistributedDataParallel.
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
        self.seconds: list[float] = []  # of a step, the mean of a turn's, of the slowest rank; by turn

    def take(self, count: int) -> float:
        """Takes steps; returns the seconds of one."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(count):
            self.model.zero_grad()
            self._backward(self.model)
            if self._optimizer is not None:
                self._optimizer.step()
        self._wait()
        return (time.perf_counter() - begin) / count

    def watch(self) -> float:
        """Takes three steps of ours whose exchange is timed; returns the fraction of it that backward did not hide."""
        self.state.report()
        self.state.telemetry.timing = True
        self.take(3)
        seconds, exposed = self.state.report().times
        return float(exposed / max(seconds, 1e-9))

    def close(self) -> None:
        """Closes our state."""
        if hasattr(self.state, "close"):
            self.state.close()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, over gloo. A collective; raises RuntimeError if a rank is gone."""
    try:
        return gathered(value, torch.device("cpu"), group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} lost another rank, which has died or cannot be "
            f"reached; see that rank's own output. ({_first_line(error)})"
        ) from error


def attempt(name: str, work: Callable[[], float], group: dist.ProcessGroup, failed: dict[str, str]) -> float:
    """The largest result of ``work`` on all ranks. A collective.

    If it fails on a rank, ``failed`` gets the first failure in words, the same on all ranks.
    """
    begin, result, error = time.perf_counter(), 0.0, ""
    try:
        result = work()
    except Exception as raised:  # whatever a hook raises, the others are measured
        error = f"rank {dist.get_rank()}: {type(raised).__name__}: {_first_line(raised)}"
    ended = gather((time.perf_counter() - begin, error, result), group)
    if errors := sorted((late, error) for late, error, _ in ended if error):
        failed[name] = errors[0][1]
    return max(result for *_, result in ended)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


def measure(
    makers: Mapping[str, Callable[[], Contender]],
    group: dist.ProcessGroup,
    failed: dict[str, str],
    steps: int,
    seconds: float,
) -> dict[str, Contender]:
    """Makes contenders, and times their steps in turns; returns those that did not fail. A collective.

    ``group`` is a gloo group of all ranks, whose timeout is longer than that of the exchanges. Each takes about so many
    timed ``steps``; but for the first ``FEWEST`` turns, none starts after so many ``seconds``.
    """
    begin, made, pace, quiet = time.perf_counter(), dict[str, Contender](), TURN, dist.get_rank() > 0

    def start(name: str) -> float:
        made[name] = makers[name]()
        made[name].take(made[name].peer.warmup - 1)
        return made[name].take(1)

    for name in tqdm(makers, desc="warming up", leave=False, disable=quiet):
        took = attempt(name, partial(start, name), group, failed)
        pace = pace if name in failed else min(pace, took)
    length, turns, late = max(1, min(LONGEST, math.ceil(steps / FEWEST), math.ceil(TURN / pace))), 0, False
    bar = tqdm(total=steps, desc="timing", unit="step", leave=False, disable=quiet)
    while (alive := {name: made[name] for name in makers if name not in failed}) and (
        turns < FEWEST or (turns * length < steps and not late)
    ):
        for name, each in alive.items():
            gather(None, group)
            each.seconds.append(attempt(name, partial(each.take, length), group, failed))
        turns += 1
        bar.update(length)
        late = gather(time.perf_counter() - begin > seconds, group)[0]
    bar.close()
    return alive
