"""Memories: what one end of a link keeps of what it did not send.

Error feedback (Stich et al. 2018; Alistarh et al. 2018): a link adds its residual to what it is given, sends a part of
the sum, and keeps the rest, the rounding of the wire included. So nothing is lost, only late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.ops import reference


class Memory(ABC):
    """The state of one end of a link, over the elements that it sends."""

    @abstractmethod
    def compensate(self, x: Tensor, finite: Tensor) -> Tensor:
        """Joins ``x`` with what was kept earlier.

        Args:
            x: ``[numel]``; zero if the input was not finite. It is moved: zero afterwards.
            finite: Scalar bool. If false, this step must leave the memory as it was.

        Returns:
            ``[numel]``, what there is to send; possibly this memory's own storage.
        """

    @abstractmethod
    def keep(self, index: Tensor, value: Tensor, sent: Tensor) -> None:
        """Takes note that of the last sum's entries ``value`` ``[n]``, at ``index`` ``[n]`` int64, ``sent`` ``[n]`` left."""

    @abstractmethod
    def add_(self, x: Tensor) -> None:
        """Adds ``x`` ``[numel]`` to what the next ``compensate`` joins."""

    @abstractmethod
    def scale_(self, factor: float) -> None:
        """Multiplies what is kept."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What survives a step, by name, each ``[numel]``; the storage itself, not a copy.

        What is still to be sent is named ``residual``.
        """

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
        self._held: dict[str, Tensor] = {}

    def compensate(self, x: Tensor, finite: Tensor) -> Tensor:
        """See :meth:`Memory.compensate`. In place: between this and ``keep`` the residual is the sum."""
        a = self.residual.add_(x)
        x.zero_()
        return a

    def keep(self, index: Tensor, value: Tensor, sent: Tensor) -> None:
        """See :meth:`Memory.keep`. Subtracts what will be decoded, so the wire's rounding is kept as well."""
        # The sum of finite parts may have left the range; the largest entries are selected, so it shows here. A GPU does not
        # stop to look, and mends what was selected.
        limit = torch.finfo(self.residual.dtype).max
        if value.device.type == "cpu":
            if not ops.is_finite(value):
                self.residual.clamp_(-limit, limit)
        else:
            self.residual.index_copy_(0, index, self.residual.index_select(0, index).clamp_(-limit, limit))
        self.residual.scatter_add_(0, index, sent.neg())

    def add_(self, x: Tensor) -> None:
        """See :meth:`Memory.add_`."""
        self.residual.add_(x)

    def scale_(self, factor: float) -> None:
        """See :meth:`Memory.scale_`."""
        self.residual.mul_(factor)

    def tensors(self) -> dict[str, Tensor]:
        """See :meth:`Memory.tensors`."""
        return {"residual": self.residual}

    def hold(self, absent: Tensor) -> None:
        """See :meth:`Memory.hold`."""
        for name, kept in self.tensors().items():
            self._held[name] = kept.masked_fill(~absent, 0)
            kept.masked_fill_(absent, 0)

    def release(self) -> None:
        """See :meth:`Memory.release`."""
        for name, kept in self.tensors().items():
            if name in self._held:
                kept.add_(self._held.pop(name))


class MomentumResidual(Residual):
    """Error feedback on velocities: the momentum correction of Deep Gradient Compression (Lin et al. 2018, section 3.2).

    ``u = m u + x``; ``a = v + u``; ``v = a - sent``. Momentum is applied on the worker, before compression, so the optimizer's
    own must be 0. With masking, ``u`` is zeroed where something was sent, which stops stale momentum.

    Args:
        numel: Elements.
        dtype: dtype of velocity and residual.
        device: Where they live.
        momentum: m, in (0, 1).
        masking: Momentum factor masking.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, momentum: float, masking: bool = True
    ) -> None:
        super().__init__(numel, dtype, device)
        self.velocity = torch.zeros_like(self.residual)
        self.momentum, self.masking = momentum, masking

    def compensate(self, x: Tensor, finite: Tensor) -> Tensor:
        """See :meth:`Memory.compensate`."""
        velocity = self.velocity * self.momentum
        velocity += x
        self.velocity.copy_(torch.where(finite, velocity, self.velocity))
        x.zero_()
        return self.residual.add_(reference.zero_unless_(velocity, finite))

    def keep(self, index: Tensor, value: Tensor, sent: Tensor) -> None:
        """See :meth:`Memory.keep`."""
        super().keep(index, value, sent)
        if self.masking:
            # Padding repeats positions with zeros: of several entries for one position, any that was sent counts.
            self.velocity.masked_fill_(torch.zeros_like(self.velocity).index_add_(0, index, sent.abs()) > 0, 0)

    def scale_(self, factor: float) -> None:
        """See :meth:`Memory.scale_`. The velocity is made of gradients and stays."""
        self.residual.mul_(factor)

    def tensors(self) -> dict[str, Tensor]:
        """See :meth:`Memory.tensors`."""
        return {"residual": self.residual, "velocity": self.velocity}


class Leftover(Residual):
    """What other settings have left, under settings that keep nothing: it joins the next vector, and no more is kept."""

    def compensate(self, x: Tensor, finite: Tensor) -> Tensor:
        """See :meth:`Memory.compensate`."""
        self._finite = finite
        return super().compensate(x, finite)

    def keep(self, index: Tensor, value: Tensor, sent: Tensor) -> None:
        """See :meth:`Memory.keep`. Forgets, unless nothing was sent."""
        self.residual.masked_fill_(self._finite, 0)


class NoMemory(Memory):
    """No error feedback: what is not sent is lost. For comparison with the papers.

    Args:
        dtype: dtype in which the sum is handed on.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compensate(self, x: Tensor, finite: Tensor) -> Tensor:
        """See :meth:`Memory.compensate`."""
        a = x.to(self.dtype, copy=True)
        x.zero_()
        return a

    def keep(self, index: Tensor, value: Tensor, sent: Tensor) -> None:
        """See :meth:`Memory.keep`."""

    def add_(self, x: Tensor) -> None:
        """See :meth:`Memory.add_`."""
        raise NotImplementedError("nothing is kept here; what other settings have left needs a Leftover.")

    def scale_(self, factor: float) -> None:
        """See :meth:`Memory.scale_`."""

    def tensors(self) -> dict[str, Tensor]:
        """See :meth:`Memory.tensors`."""
        return {}

    def hold(self, absent: Tensor) -> None:
        """See :meth:`Memory.hold`."""

    def release(self) -> None:
        """See :meth:`Memory.release`."""
