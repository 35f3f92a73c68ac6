"""Element orders of flattened gradients. DDP flattens in the parameter's memory order, which ``channels_last`` changes.

Residuals use that order too. Checkpoints use index order, which never changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import Self


@dataclass(frozen=True)
class Form:
    """The shape of a parameter and the order of its memory.

    Attributes:
        shape: Its shape.
        order: Its dimensions in the order in which DDP flattens its gradient: memory order, if memory has no gaps.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> Self:
        """The current form of a parameter."""
        dims, shape = range(parameter.ndim), tuple(parameter.shape)
        long = sorted((dim for dim in dims if shape[dim] > 1), key=parameter.stride, reverse=True)
        order = [*(dim for dim in dims if shape[dim] <= 1), *long]  # strides of the others mean nothing
        return cls(shape, tuple(order if parameter.permute(order).is_contiguous() else dims))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def by_indices(self) -> bool:
        """Whether memory order is index order."""
        long = [dim for dim in self.order if self.shape[dim] > 1]
        return long == sorted(long)

    def by_index(self, flat: Tensor) -> Tensor:
        """Reorders ``[numel]`` from the order of DDP's buckets to index order."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view([self.shape[dim] for dim in self.order]).permute(inverse).reshape(-1)

    def by_memory(self, flat: Tensor) -> Tensor:
        """Inverse of :meth:`by_index`."""
        return flat.view(self.shape).permute(self.order).reshape(-1)
