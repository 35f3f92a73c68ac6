"""What is done to an optimizer right before it updates the parameters: after its closure, which may be a whole step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle


def before_update(optimizer: Optimizer, prepare: Callable[[Optimizer], None]) -> RemovableHandle:
    """Calls ``prepare`` with the optimizer before each update, when gradients are there.

    Args:
        optimizer: The optimizer.
        prepare: Called in ``optimizer.step()``; if that was given a closure, after the closure.

    Returns:
        A handle; ``remove()`` ends it.
    """

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(given):
            prepare(optimizer)
            return None

        def closure() -> Any:
            loss = given()
            prepare(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    return optimizer.register_step_pre_hook(hook)


@torch.no_grad()
def mask_momentum(optimizer: Optimizer, parameters: Collection[Tensor] | None = None) -> None:
    """Zeroes SGD's momentum buffers where gradients are nonzero: what arrives now starts without momentum.

    Momentum goes on for about 1 / (1 - momentum) steps after an entry arrived. An entry that waits longer than that is
    not affected; one that arrives in every step has no momentum.

    Args:
        optimizer: A torch SGD, with the gradients that it is to apply.
        parameters: The compressed parameters, of which all gradients are sums of what waited. Default: all.

    Raises:
        ValueError: A gradient is sparse.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            buffer, gradient = optimizer.state.get(parameter, {}).get("momentum_buffer"), parameter.grad
            if buffer is None or gradient is None or not (parameters is None or parameter in parameters):
                continue
            if gradient.is_sparse:
                raise ValueError("momentum_masking=True needs dense gradients, and one is sparse. Leave it out.")
            buffer.mul_(gradient == 0)


def has_momentum(optimizer: Optimizer) -> bool:
    """Whether it is a torch SGD with momentum, which :func:`mask_momentum` can mask."""
    return isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups)
