"""How DDP flattens a parameter's gradient: in the order of the parameter's memory, which ``channels_last`` changes.

Residuals are in that order too. Checkpoints hold them in the order of the indices, which never changes.
"""

from __future__ import annotations

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
        order = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
        dense = parameter.permute(order).is_contiguous()
        return cls(tuple(parameter.shape), tuple(order if dense else range(parameter.ndim)))

    def by_index(self, flat: Tensor) -> Tensor:
        """``[numel]`` in the order of DDP's buckets, in the order of the indices instead."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view([self.shape[dim] for dim in self.order]).permute(inverse).reshape(-1)

    def by_memory(self, flat: Tensor) -> Tensor:
        """Undoes :meth:`by_index`."""
        return flat.view(self.shape).permute(self.order).reshape(-1)
