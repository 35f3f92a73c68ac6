"""Times contenders in turns, so that noise of the machine and of the network hits all alike.

All ranks agree after every turn, over a group of their own, on who failed: a contender that fails on one rank is left
out on all, and the others go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_topk.bench.peers import Register, Settings, bucket_cap
from lightning_topk.runtime.telemetry import Report

T = TypeVar("T")
WARMUP = 4
"""Untimed steps: DDP regroups its buckets after the first, PowerSGD starts with the third, residuals fill up."""
WARMUPS = {"no exchange": 2, "DDP": 2, "fp16 hook": 2, "16-bit hook": 2, "naive top-k": 2}
"""Peers that need fewer. On a slow link their steps take seconds."""
WATCHED = 3
"""Steps in which an exchange is timed by itself, after all turns."""
TURN, LONGEST = 0.2, 5
"""Seconds that a turn should last, and steps of a turn at most: within a turn, nothing waits for a GPU."""
FEWEST = 3
"""Turns that are timed even if the time is up."""


class Contender:
    """A model of its own under one exchange.

    Args:
        name: The exchange.
        register: Registers it.
        net: The model.
        backward: Runs forward and backward of the wrapped model.
        optimizer: Makes the optimizer; None takes no steps.
        settings: Of ours, beside the optimizer.
        **ddp: Arguments of DistributedDataParallel.
    """

    def __init__(
        self,
        name: str,
        register: Register,
        net: nn.Module,
        backward: Callable[[nn.Module], None],
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        settings: Settings | None = None,
        **ddp: Any,
    ) -> None:
        self.name, self._backward, self._device = name, backward, next(net.parameters()).device
        ids = [self._device] if self._device.type == "cuda" else None
        cap = bucket_cap(name, self._device.type)
        self.model = DistributedDataParallel(net, device_ids=ids, bucket_cap_mb=cap, **ddp)
        self._optimizer = None if optimizer is None else optimizer(self.model.parameters())
        own = {} if self._optimizer is None else {"optimizer": self._optimizer}
        self.state = register(self.model, {**(settings or {}), **own})
        self.seconds: list[float] = []
        """Seconds of a step, the mean of a turn's, of the slowest rank; by turn."""
        self.pace = 0.0
        """Seconds of the last untimed step."""

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

    def watch(self) -> list[Report]:
        """Takes steps of ours whose exchange is timed; returns their reports."""
        self.state.report()
        self.state.telemetry.timing, reports = True, []
        for _ in range(WATCHED):
            self.take(1)
            reports.append(self.state.report())
        return reports

    def close(self) -> None:
        """Closes our state."""
        if hasattr(self.state, "close"):
            self.state.close()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def hidden(reports: Sequence[Report]) -> float:
    """The fraction of the exchanges that passed while backward still ran."""
    seconds, exposed = zip(*(report.times for report in reports), strict=True)
    return float(1 - sum(exposed) / max(sum(seconds), 1e-9))


class Ranks:
    """All ranks, joined beside the exchanges.

    Args:
        group: A gloo group of all ranks, whose timeout is longer than that of the exchanges.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self.rank, self.world = group, dist.get_rank(), dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks. A collective.

        Raises:
            RuntimeError: A rank is gone.
        """
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.world} lost another rank, which has died or cannot be reached; see that "
                f"rank's own output. ({_first_line(error)})"
            ) from error
        return found

    def attempt(self, work: Callable[[], T]) -> tuple[list[T], str]:
        """Calls ``work`` on every rank. A collective.

        Returns:
            The results of all ranks; or none, and the first failure in words, the same on all ranks.
        """
        begin, result, error = time.perf_counter(), None, ""
        try:
            result = work()
        except Exception as raised:  # whatever a hook raises, the others are measured
            error = f"{type(raised).__name__}: {_first_line(raised)}"
        found = self.gather((time.perf_counter() - begin, error, result))
        failed = sorted((late, f"rank {rank}: {error}") for rank, (late, error, _) in enumerate(found) if error)
        return ([], failed[0][1]) if failed else ([each for *_, each in found], "")  # type: ignore[misc]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


Makers = Mapping[str, Callable[[], Contender]]
"""Makes a contender, by name."""


def made(makers: Makers, ranks: Ranks, failed: dict[str, str]) -> list[Contender]:
    """Makes the contenders and takes their untimed steps. Adds reasons to ``failed`` for those that cannot."""
    alive = []
    for name, make in tqdm(makers.items(), desc="warming up", leave=False, disable=ranks.rank > 0):
        kept: list[Contender] = []

        def warm(make: Callable[[], Contender] = make, name: str = name, kept: list[Contender] = kept) -> float:
            kept.append(make())
            kept[0].take(WARMUPS.get(name, WARMUP) - 1)
            return kept[0].take(1)

        took, reason = ranks.attempt(warm)
        if reason:
            failed[name] = reason
        else:
            kept[0].pace = max(took)
            alive += kept
    return alive


def measure(
    contenders: Sequence[Contender],
    ranks: Ranks,
    failed: dict[str, str],
    steps: int,
    seconds: float = math.inf,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    longest: int = LONGEST,
) -> list[Contender]:
    """Times steps of the contenders, in turns; returns those that did not fail. A collective.

    Args:
        contenders: The contenders.
        ranks: All ranks.
        failed: Gets the reasons of those that fail.
        steps: Timed steps of each, about.
        seconds: None starts later than this, but for a few.
        around: Entered on every rank before a turn, when all ranks are ready, and left when all have ended.
        longest: Steps of a turn, at most.
    """
    begin, alive, turns = time.perf_counter(), [*contenders], 0
    pace = min((each.pace for each in alive), default=TURN)
    length = max(1, min(longest, math.ceil(steps / FEWEST), math.ceil(TURN / pace)))
    bar = tqdm(total=steps, desc="timing", unit="step", leave=False, disable=ranks.rank > 0)
    while alive and (turns < FEWEST or turns * length < steps):
        for each in [*alive]:
            ranks.gather(None)
            with around():
                took, reason = ranks.attempt(partial(each.take, length))
            if reason:
                failed[each.name] = reason
                alive.remove(each)
            else:
                each.seconds.append(max(took))
        turns += 1
        bar.update(length)
        late = ranks.gather(time.perf_counter() - begin > seconds)[0]
        if late and turns >= FEWEST:
            break
    bar.close()
    return alive
