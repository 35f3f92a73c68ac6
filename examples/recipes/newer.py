"""Newer ways to send less, to compare with: DeMo's decoupled momentum, pseudo-gradients of local steps, EF21-SGDM.

The first two take the place of the optimizer, so they have learning rates of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk import TopKConfig
from lightning_topk.lab.papers.learning import Method, Task, shapes_of
from lightning_topk.lab.training import Optimizer, Problem, Run
from lightning_topk.simulate import Cluster


class DecoupledMomentum(Cluster):
    """DeMo (Peng et al. 2024): each worker sends the largest DCT coefficients of its momentum, and keeps the rest.

    A parameter of more than one dimension counts as a matrix of its first by all others, in blocks of up to 64 x 64.
    What is delivered is the sign of the mean: a step of ``lr`` for every entry, to be applied by plain SGD. Payloads
    are gathered from all by all; an entry takes 16 bits and the bits of its place in the block.

    Args:
        *args: Arguments of :class:`lightning_topk.simulate.Cluster`.
        saving: How many times fewer bytes than a ring all-reduce to send, at least: a block sends one entry or more.
        shapes: Shapes of the parameters.
        decay: Of the momentum, in a step.
        **kwargs: Likewise.
    """

    def __init__(
        self, *args: Any, saving: float, shapes: Sequence[tuple[int, ...]], decay: float = 0.999, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.saving, self.shapes, self.decay = saving, shapes, decay
        self.sizes = [math.prod(shape) for shape in shapes]
        self.momenta: list[Tensor] = []

    @override
    def step(self, gradients: Sequence[Tensor], epoch: int = 0) -> list[Tensor]:
        world = len(gradients)
        if not self.momenta:
            self.momenta = [torch.zeros_like(gradient) for gradient in gradients]
        total, bits = torch.zeros_like(gradients[0]), 0
        for momentum, gradient in zip(self.momenta, gradients, strict=True):
            momentum.mul_(self.decay).add_(gradient)
            sent, bits = self._largest(momentum)
            momentum -= sent
            total += sent / world
        for rank in range(world):
            self.sent_bytes["uplink"][rank] += (world - 1) * bits // 8
        self.steps += 1
        return [total.sign() for _ in gradients]

    def _largest(self, momentum: Tensor) -> tuple[Tensor, int]:
        """What a worker sends of its momentum, and in how many bits."""
        parts, bits, world = [], 0, len(self.momenta)
        for part, shape in zip(momentum.split(self.sizes), self.shapes, strict=True):
            rows, columns = shape[0], part.numel() // shape[0]
            a, b = _block(rows), _block(columns)
            blocks = part.view(rows // a, a, columns // b, b).transpose(1, 2)
            found = (_dct(a) @ blocks @ _dct(b).T).reshape(-1, a * b)
            entry = 16 + max(1, math.ceil(math.log2(a * b)))
            # A ring all-reduce sends 2 (W - 1) / W x 32 bits an entry, this (W - 1) x entry.
            k = max(1, int(2 * 32 / world * a * b / self.saving / entry))
            kept = torch.zeros_like(found)
            places = found.abs().topk(k).indices
            kept.scatter_(1, places, found.gather(1, places))
            back = _dct(a).T @ kept.view_as(blocks) @ _dct(b)
            parts.append(back.transpose(1, 2).reshape(-1))
            bits += len(found) * k * entry
        return torch.cat(parts), bits


def _block(size: int) -> int:
    """The largest divisor of a size up to 64."""
    return next(each for each in range(min(64, size), 0, -1) if size % each == 0)


@cache
def _dct(size: int) -> Tensor:
    """The orthonormal discrete cosine transform of type II, ``[size, size]``."""
    frequency, place = torch.arange(size)[:, None], torch.arange(size)
    basis = torch.cos(math.pi * (place + 0.5) * frequency / size) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


@dataclass(frozen=True)
class DeMo(Method):
    """DeMo in the place of the optimizer.

    Args:
        saving: See :class:`DecoupledMomentum`.
        lr: Peak learning rate: the step of every entry.
    """

    saving: float = 50
    lr: float = 1e-3

    @override
    def config(self, task: Task) -> TopKConfig:
        return TopKConfig().dense

    @override
    def cluster(self, task: Task) -> Callable[..., Cluster]:
        return partial(DecoupledMomentum, saving=self.saving, shapes=shapes_of(task))

    @override
    def optimizer(self, task: Task) -> Optimizer:
        return Optimizer(self.lr, cosine=True)


@dataclass(frozen=True)
class LocalSteps(Method):
    """Local steps with sparse pseudo-gradients: DiLoCo (Douillard et al. 2023), SparseLoCo (Sarfi et al. 2025).

    Every worker trains by itself with the task's optimizer; now and then the changes of their parameters are
    exchanged, two-way with error feedback, and Nesterov's momentum steps with what is delivered, for all.

    Args:
        saving: Of all steps together: an exchange may send ``every`` times as much.
        every: Steps between two exchanges.
        lr: Learning rate of the outer optimizer.
        momentum: Its momentum.
    """

    saving: float = 50
    every: int = 15
    lr: float = 0.7
    momentum: float = 0.9

    @override
    def config(self, task: Task) -> TopKConfig:
        return TopKConfig(saving=max(1.0, self.saving / self.every), adapt_momentum=False)

    @override
    def train(self, task: Task, seed: int, data: Path | None) -> Run:
        problem = Problem(task.model, seed, data)
        theta, given = problem.start, self.optimizer(task)
        sizes = tuple(parameter.numel() for parameter in problem.parameters)
        cluster = Cluster(self.config(task), task.workers, len(theta), sizes=sizes)
        outer = torch.optim.SGD([theta], self.lr, self.momentum, nesterov=self.momentum > 0)
        copies = [theta.clone() for _ in range(task.workers)]
        inner = [given.make(copy) for copy in copies]
        generator, examples = torch.Generator().manual_seed(seed), len(problem.data.labels)
        for step in range(task.steps):
            batches = torch.randint(examples, (task.workers, task.batch), generator=generator)
            for copy, optimizer, batch in zip(copies, inner, batches, strict=True):
                (copy.grad,) = problem.gradients(copy, batch[None], generator)
                given.step(optimizer, copy, step, task.steps)
            if (step + 1) % self.every == 0 or step + 1 == task.steps:
                theta.grad = cluster.step([theta - copy for copy in copies])[0]
                outer.step()
                for copy in copies:
                    copy.copy_(theta)
        run = Run()
        run.conclude(problem, theta, cluster, task.steps)
        return run


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
    def step(self, gradients: Sequence[Tensor], epoch: int = 0) -> list[Tensor]:
        if not self.averages:
            self.averages = [torch.zeros_like(gradient) for gradient in gradients]
            self.known = [torch.zeros_like(gradient) for gradient in gradients]
        changes = [self.new * (g - v) for g, v in zip(gradients, self.averages, strict=True)]
        for v, change in zip(self.averages, changes, strict=True):
            v += change
        for h, change in zip(self.known, super().step(changes, epoch), strict=True):
            h += change
        return [h.clone() for h in self.known]


@dataclass(frozen=True)
class Averaged(Method):
    """EF21-SGDM in as many bytes as the default; the optimizer has no momentum of its own."""

    @override
    def cluster(self, task: Task) -> Callable[..., Cluster]:
        return partial(Differences, new=0.1)

    @override
    def optimizer(self, task: Task) -> Optimizer:
        return replace(task.optimizer, momentum=0.0)
