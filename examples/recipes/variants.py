"""What the rejected methods need: :class:`Tried`, and exchanges. Each of those stands where a Cluster does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk import TopKConfig
from lightning_topk.core.link import Measure
from lightning_topk.core.ops import reference
from lightning_topk.lab.papers.learning import Method, Task
from lightning_topk.lab.training import Optimizer
from lightning_topk.schedule import CosineWarmup, ExponentialWarmup, Schedule
from lightning_topk.simulate import Cluster

RATIO = 0.001
"""With which courses of the density end."""


@dataclass(frozen=True)
class Tried(Method):
    """A method with another course of the density, with other workers, or with another momentum of the optimizer.

    Args:
        course: The density over the steps of the task; None for the one that the settings say.
        workers: Makes the workers; called like :class:`lightning_topk.simulate.Cluster`.
        keeps_momentum: Whether the optimizer has momentum of its own (with AdamW: beta1).
        momentum: SGD's momentum, in the place of the task's, at the same lr / (1 - momentum).
    """

    course: Callable[[int], Schedule] | None = None
    workers: Callable[..., Cluster] = Cluster
    keeps_momentum: bool = True
    momentum: float | None = None

    @override
    def config(self, task: Task) -> TopKConfig:
        if self.course is None:
            return super().config(task)
        return TopKConfig(ratio=self.course(task.steps), beta1=0.0, **self.settings)

    @override
    def cluster(self, task: Task) -> Callable[..., Cluster]:
        return self.workers

    @override
    def optimizer(self, task: Task) -> Optimizer:
        given = task.optimizer
        if not self.keeps_momentum:
            return replace(given, momentum=0.0)
        if self.momentum is None or given.adamw:
            return given
        lr = given.lr * (1 - self.momentum) / (1 - given.momentum)
        return replace(given, lr=lr, momentum=self.momentum)


def cosine(start: float, steps: int) -> Schedule:
    """Half a cosine over the whole run."""
    return CosineWarmup(RATIO, start, steps=steps)


def geometric(start: float, share: float, steps: int) -> Schedule:
    """A geometric descent over the first part of the run, as DGC's."""
    return ExponentialWarmup(RATIO, start, steps=max(1, round(share * steps)))


class Decaying(Cluster):
    """Forgets a part of the residuals step by step.

    Args:
        *args: Arguments of :class:`lightning_topk.simulate.Cluster`.
        factor: By which residuals are multiplied before each step.
        **kwargs: Likewise.
    """

    def __init__(self, *args: Any, factor: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor

    @override
    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        return super().step(gradients, epoch, lr_ratio * self.factor)


class Differences(Cluster):
    """EF21-SGDM (Fatkhullin et al. 2023): every step applies all that is known of the workers' averaged gradients.

    A worker sends of ``v - h``, its averaged gradient less what the servers know of it. That is error feedback on how
    ``v`` changes, and the servers add up what they receive.

    Args:
        *args: Arguments of :class:`lightning_topk.simulate.Cluster`.
        new: Weight of the new gradient in the average, in (0, 1].
        **kwargs: Likewise.
    """

    def __init__(self, *args: Any, new: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.new = new
        self.averages: list[Tensor] = []
        self.known: list[Tensor] = []

    @override
    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        if not self.averages:
            self.averages = [torch.zeros_like(gradient) for gradient in gradients]
            self.known = [torch.zeros_like(gradient) for gradient in gradients]
        changes = [self.new * (g - v) for g, v in zip(gradients, self.averages, strict=True)]
        for v, change in zip(self.averages, changes, strict=True):
            v += change
        for h, change in zip(self.known, super().step(changes, epoch, lr_ratio), strict=True):
            h += change
        return [h.clone() for h in self.known]


class OwnShards(Cluster):
    """A rank hands its residual of the shard that it serves itself to its server: that crosses no wire."""

    @override
    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        for rank, end in enumerate(self.endpoints):
            assert end.downlink is not None
            mine, servers = end.uplink.memory.tensors()["residual"], end.downlink.memory.tensors()["residual"]
            place = torch.arange(1, len(mine) + 1)  # padding is zero
            own = reference.shard_rows(place, end.layout)[rank]
            real, flat = own > 0, own[own > 0] - 1
            servers[real] += mine[flat] / len(self.endpoints)
            mine[flat] = 0
        return super().step(gradients, epoch, lr_ratio)


class Adaptive(Cluster):
    """Follows a target of the measured uplink error by changing the ratio, within bounds.

    Args:
        config: The settings; their ratio is the least.
        *args: Arguments of :class:`lightning_topk.simulate.Cluster`.
        target: The error ‖a - C(a)‖² / ‖a‖² to reach.
        largest: The largest ratio.
        **kwargs: Likewise.
    """

    def __init__(self, config: TopKConfig, *args: Any, target: float, largest: float = 0.1, **kwargs: Any) -> None:
        assert isinstance(config.ratio, float)
        self.target, self.least, self.largest, self.ratio = target, config.ratio, largest, largest
        measure = Measure(error=True)
        super().__init__(TopKConfig(ratio=lambda step: self.ratio), *args, measure=measure, **kwargs)

    @override
    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        delivered = super().step(gradients, epoch, lr_ratio)
        whole, rest = torch.stack([outcome.uplink.error for outcome in self.outcomes]).sum(0)
        factor = 1.05 if rest > self.target * whole else 1 / 1.05
        self.ratio = min(self.largest, max(self.least, self.ratio * factor))
        return delivered
