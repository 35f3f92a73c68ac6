"""Ends SGD's momentum where gradients are delivered.

SGD's momentum repeats a gradient for about 1 / (1 - momentum) steps. An entry that is delivered less often than that is
not affected. One that is delivered more often moves less: in every step, it moves as without momentum. Deep Gradient
Compression (Lin et al. 2018) masks the workers' momentum in this way; this masks the optimizer's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_topk.runtime.updates import Prepared


class Masking(Prepared):
    """Zeroes an optimizer's momentum buffers where gradients are nonzero; requesters name their parameters."""

    @override
    def reset(self) -> None:
        """There is nothing to undo."""

    @override
    @torch.no_grad()
    def prepare(self, optimizer: Optimizer) -> None:
        for parameters in self.wanted.values():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameters is None or parameter in parameters:
                    self._mask(optimizer, parameter)

    def _mask(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Zeroes the buffer of a parameter, unless a GradScaler has the optimizer skip this update."""
        buffer, gradient = optimizer.state.get(parameter, {}).get("momentum_buffer"), parameter.grad
        if buffer is None or gradient is None:
            return
        if gradient.is_sparse:
            raise ValueError("momentum_masking=True needs dense gradients, and one is sparse. Leave it out.")
        buffer, gradient = (each.to_local() if hasattr(each, "to_local") else each for each in (buffer, gradient))
        delivered = gradient != 0
        skipped = getattr(optimizer, "found_inf", None)  # which fused optimizers look at themselves
        if skipped is not None:
            delivered &= skipped.to(delivered.device) == 0
        buffer.masked_fill_(delivered, 0)


def mask_momentum(
    optimizers: Iterable[Optimizer], requester: Any, parameters: Collection[Tensor] | None = None
) -> list[str]:
    """Ends the momentum of torch's SGD where entries are delivered, until ``Masking.withdraw`` is called.

    Args:
        optimizers: The optimizers. Only SGD is changed. It raises a ValueError in a step with a sparse gradient.
        requester: The object that exchanges their gradients; it identifies this request.
        parameters: The compressed parameters. Default: all.

    Returns:
        Messages for the user.
    """
    words = []
    for optimizer in optimizers:
        if not isinstance(optimizer, SGD):
            words.append(
                "lightning_topk: momentum_masking=True applies to torch's SGD only; "
                f"{type(optimizer).__name__} is unchanged. If it wraps SGD, pass the inner optimizer."
            )
            continue
        Masking.of(optimizer).wanted[requester] = parameters
        if not any(group["momentum"] for group in optimizer.param_groups):
            words.append("lightning_topk: momentum_masking=True has no effect while the momentum of SGD is 0.")
    return words
