"""PowerSGD on simulated workers: a peer to compare with, not to be installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk.simulate import Cluster


class PowerSGD(Cluster):
    """PowerSGD with error feedback (Vogels et al. 2019, algorithms 1 and 2): the leading directions of matrices.

    A parameter with more than two dimensions counts as a matrix of its first by all others; vectors, and matrices that
    this would not make smaller, go by all-reduce. Bytes are those of ring all-reduces of float32.

    Args:
        *args: Arguments of :class:`lightning_topk.simulate.Cluster`.
        rank: Number of directions of a matrix.
        shapes: Shapes of the parameters.
        **kwargs: Likewise.
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

    @override
    def step(self, gradients: Sequence[Tensor], epoch: int = 0) -> list[Tensor]:
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
