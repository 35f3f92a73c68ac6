"""What the literature offers beside the exchanges of this package, on simulated workers: to be compared, not to be installed.

Each class stands where a :class:`lightning_topk.simulate.Cluster` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core.ops import reference
from lightning_topk.simulate import Cluster


class Decaying(Cluster):
    """Forgets a part of what is kept back, step by step.

    Args:
        *args: See :class:`Cluster`.
        factor: By which residuals are multiplied before each step.
        **kwargs: See :class:`Cluster`.
    """

    def __init__(self, *args: Any, factor: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor

    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        """See :meth:`Cluster.step`."""
        return super().step(gradients, epoch, lr_ratio * self.factor)


class Differences(Cluster):
    """EF21-SGDM (Fatkhullin et al. 2023): every step applies all that is known of the workers' averaged gradients.

    A worker sends of ``v - h``, its averaged gradient less what the servers know of it. That is error feedback on how ``v`` changes,
    and the servers add up what they are told.

    Args:
        *args: See :class:`Cluster`.
        new: Weight of the new gradient in the average, in (0, 1].
        **kwargs: See :class:`Cluster`.
    """

    def __init__(self, *args: Any, new: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.new = new
        self.averages: list[Tensor] = []
        self.known: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        """See :meth:`Cluster.step`."""
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
    """A rank hands what it kept back of the shard that it serves itself to its server: that crosses no wire."""

    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        """See :meth:`Cluster.step`."""
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
        *args: See :class:`Cluster`.
        target: ‖a - C(a)‖² / ‖a‖² to be reached.
        largest: The largest ratio.
        **kwargs: See :class:`Cluster`.
    """

    def __init__(self, config: TopKConfig, *args: Any, target: float, largest: float = 0.1, **kwargs: Any) -> None:
        assert isinstance(config.ratio, float)
        self.target, self.least, self.largest, self.ratio = target, config.ratio, largest, largest
        super().__init__(TopKConfig(ratio=lambda step: self.ratio), *args, **kwargs)
        for end in self.endpoints:
            end.uplink.measure = True

    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        """See :meth:`Cluster.step`."""
        delivered = super().step(gradients, epoch, lr_ratio)
        whole, rest = torch.stack([end.uplink.energy for end in self.endpoints if end.uplink.energy is not None]).sum(0)
        factor = 1.05 if rest > self.target * whole else 1 / 1.05
        self.ratio = min(self.largest, max(self.least, self.ratio * factor))
        return delivered


class PowerSGD(Cluster):
    """PowerSGD with error feedback (Vogels et al. 2019, algorithms 1 and 2): gradients of matrices by their leading directions.

    A parameter with more than two dimensions counts as a matrix of its first by all others; vectors, and matrices that this would
    not make smaller, go by all-reduce. Bytes are those of ring all-reduces of float32.

    Args:
        *args: See :class:`Cluster`.
        rank: Directions of a matrix.
        shapes: Of the parameters.
        **kwargs: See :class:`Cluster`.
    """

    def __init__(self, *args: Any, rank: int, shapes: Sequence[tuple[int, ...]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.residual = torch.zeros(len(self.endpoints), sum(torch.Size(shape).numel() for shape in shapes))
        generator = torch.Generator().manual_seed(0)
        self.sizes = [torch.Size(shape).numel() for shape in shapes]
        self.matrices: dict[int, tuple[int, int]] = {}
        self.right: dict[int, Tensor] = {}
        for number, shape in enumerate(shapes):
            rows, columns = shape[0], self.sizes[number] // shape[0]
            if len(shape) > 1 and rank * (rows + columns) < rows * columns:
                self.matrices[number] = (rows, columns)
                self.right[number] = torch.randn(columns, rank, generator=generator)

    def step(self, gradients: Sequence[Tensor], epoch: int = 0, lr_ratio: float = 1.0) -> list[Tensor]:
        """See :meth:`Cluster.step`."""
        wanted = torch.stack(list(gradients)) + self.residual
        parts, world, floats = [], len(gradients), 0
        for number, part in enumerate(wanted.split(self.sizes, dim=1)):
            if number not in self.matrices:
                parts.append(part.mean(dim=0))
                floats += part.shape[1]
                continue
            matrices = part.view(world, *self.matrices[number])
            left = torch.linalg.qr((matrices @ self.right[number]).mean(dim=0)).Q
            right = self.right[number] = (matrices.mT @ left).mean(dim=0)
            parts.append((left @ right.T).flatten())
            floats += left.numel() + right.numel()
        delivered = torch.cat(parts)
        for number, (kept, place) in enumerate(
            zip(wanted.split(self.sizes, dim=1), self.residual.split(self.sizes, dim=1), strict=True)
        ):
            place.copy_(kept - parts[number] if number in self.matrices else torch.zeros_like(kept))
        for rank in range(world):
            self.sent_bytes["uplink"][rank] += 2 * (world - 1) * 4 * floats // world
        self.steps += 1
        return [delivered.clone() for _ in gradients]
