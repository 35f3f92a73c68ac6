"""How DDP flattens a parameter's gradient: in the order of the parameter's memory, which ``channels_last`` changes.

Residuals are in that order too. Checkpoints hold them in the order of the indices, which never changes.
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
        order: Its dimensions in the order in which DDP flattens its gradient: that of its memory, if that has no gaps.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> Self:
        """The form that a parameter has now."""
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
        """Whether the two orders are the same."""
        long = [dim for dim in self.order if self.shape[dim] > 1]
        return long == sorted(long)

    def by_index(self, flat: Tensor) -> Tensor:
        """``[numel]`` in the order of DDP's buckets, in the order of the indices instead."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view([self.shape[dim] for dim in self.order]).permute(inverse).reshape(-1)

    def by_memory(self, flat: Tensor) -> Tensor:
        """Undoes :meth:`by_index`."""
        return flat.view(self.shape).permute(self.order).reshape(-1)
