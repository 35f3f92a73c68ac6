"""Memories: what one end of a link keeps of what it did not send.

Error feedback (Stich et al. 2018; Alistarh et al. 2018): a link adds its residual to what it is given, sends a part of
the sum, and keeps the rest, the rounding of the wire included. So nothing is lost, only late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Memory(ABC):
    """The state of one end of a link, over the elements that it sends."""

    @abstractmethod
    def compensate(self, x: Tensor) -> Tensor:
        """``x`` ``[numel]`` with what was kept earlier. The result may be this memory's own storage."""

    @abstractmethod
    def keep(self, index: Tensor, sent: Tensor) -> None:
        """Takes note that ``sent`` ``[n]`` left from the positions ``index`` ``[n]`` int64 of the last sum."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What survives a step, by name, each ``[numel]``; the storage itself, not a copy."""

    @abstractmethod
    def hold(self, absent: Tensor) -> None:
        """Sets aside what belongs to the elements where ``absent`` ``[numel]`` bool is true, until ``release``."""

    @abstractmethod
    def release(self) -> None:
        """Puts back what :meth:`hold` set aside."""


class Residual(Memory):
    """Error feedback: ``a = x + e``, then ``e = a - sent``.

    Args:
        numel: Elements.
        dtype: dtype of the residual.
        device: Where it lives.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.residual = torch.zeros(numel, dtype=dtype, device=device)
        self._held: Tensor | None = None

    def compensate(self, x: Tensor) -> Tensor:
        """See :meth:`Memory.compensate`. In place: between this and ``keep`` the residual is the sum."""
        return self.residual.add_(x)

    def keep(self, index: Tensor, sent: Tensor) -> None:
        """See :meth:`Memory.keep`. Subtracts what will be decoded, so the wire's rounding is kept as well."""
        self.residual.index_add_(0, index, sent, alpha=-1)

    def tensors(self) -> dict[str, Tensor]:
        """See :meth:`Memory.tensors`."""
        return {"residual": self.residual}

    def hold(self, absent: Tensor) -> None:
        """See :meth:`Memory.hold`."""
        self._held = self.residual.masked_fill(~absent, 0)
        self.residual.masked_fill_(absent, 0)

    def release(self) -> None:
        """See :meth:`Memory.release`."""
        if self._held is not None:
            self.residual.add_(self._held)
            self._held = None


class NoMemory(Memory):
    """No error feedback: what is not sent is lost. For comparison with the papers.

    Args:
        dtype: dtype in which the sum is handed on.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compensate(self, x: Tensor) -> Tensor:
        """See :meth:`Memory.compensate`."""
        return x.to(self.dtype)

    def keep(self, index: Tensor, sent: Tensor) -> None:
        """See :meth:`Memory.keep`."""

    def tensors(self) -> dict[str, Tensor]:
        """See :meth:`Memory.tensors`."""
        return {}

    def hold(self, absent: Tensor) -> None:
        """See :meth:`Memory.hold`."""

    def release(self) -> None:
        """See :meth:`Memory.release`."""
