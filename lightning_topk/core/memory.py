"""Memories: the entries that one end of a link has not sent yet.

Error feedback (Stich et al. 2018; Alistarh et al. 2018): a link adds its residual to its input, sends some entries of
the sum, and keeps the rest, including the wire's rounding error. So nothing is lost, only delayed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk.core.ops import reference


class Memory:
    """The state of one end of a link. This class keeps nothing: entries that are not sent are lost, as in the papers.

    ``dtype`` is that of sums.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compensate(self, x: Tensor, finite: Tensor, fade: float = 1.0) -> Tensor:
        """Adds the residual, times the factor ``fade``, to ``x`` ``[numel]``, which becomes zero.

        If the scalar bool ``finite`` is false, ``x`` is zero, and the memory must only fade. Returns the sum
        ``[numel]``, finite, which may share this memory's storage.
        """
        a = x.to(self.dtype, copy=True)
        x.zero_()
        return a

    def keep(self, index: Tensor, sent: Tensor) -> None:
        """Keeps the unsent part of the sum that :meth:`compensate` returned.

        The receiver will decode the values ``sent`` ``[n]`` at the positions ``index`` ``[n]`` int64.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state between steps by name, each ``[numel]``; the storage itself, not a copy.

        The undelivered part is named ``residual``.
        """
        return {}


class Residual(Memory):
    """Error feedback: ``a = fade e + x``, then ``e = a - sent``; in between, the residual ``[numel]`` holds the sum."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype)
        self.residual = torch.zeros(numel, dtype=dtype, device=device)

    @override
    def compensate(self, x: Tensor, finite: Tensor, fade: float = 1.0) -> Tensor:
        a = reference.clamp_(self._faded(fade).add_(x))
        x.zero_()
        return a

    def _faded(self, fade: float) -> Tensor:
        return self.residual if fade == 1 else self.residual.mul_(fade)

    @override
    def keep(self, index: Tensor, sent: Tensor) -> None:
        self.residual.scatter_add_(0, index, sent.neg())

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"residual": self.residual}


class MomentumResidual(Residual):
    """Error feedback on velocities: momentum correction of Deep Gradient Compression (Lin et al. 2018, section 3.2).

    ``u = m u + x``; ``a = fade v + u``; ``v = a - sent``. Momentum is applied on the worker, before compression, so the
    optimizer's own momentum must be 0. ``u`` ``[numel]`` is zeroed at the sent positions (momentum factor masking),
    which stops stale momentum.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, momentum: float) -> None:
        super().__init__(numel, dtype, device)
        self.velocity = torch.zeros_like(self.residual)
        self.momentum = momentum

    @override
    def compensate(self, x: Tensor, finite: Tensor, fade: float = 1.0) -> Tensor:
        velocity = self.velocity * self.momentum
        velocity += x
        reference.clamp_(velocity)
        self.velocity.copy_(torch.where(finite, velocity, self.velocity))
        x.zero_()
        return reference.clamp_(self._faded(fade).add_(reference.zero_unless_(velocity, finite)))

    @override
    def keep(self, index: Tensor, sent: Tensor) -> None:
        super().keep(index, sent)
        # Padding repeats positions with value 0, so a position counts as sent if any of its entries is nonzero.
        self.velocity.masked_fill_(torch.zeros_like(self.velocity).index_add_(0, index, sent.abs()) > 0, 0)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"residual": self.residual, "velocity": self.velocity}
