"""Overrides Adam's beta1 during each step.

Error feedback delivers an entry as the sum of the gradients of the steps it waited, about 1 / density of them, which
already averages over time. Adam's beta1 averages again, over 1 / (1 - beta1) steps, and adds delay. So with ``saving=``
Adam steps with a beta1 of zero. ``param_groups`` are restored after each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from typing_extensions import override

from lightning_topk.runtime.updates import Prepared


class Beta1(Prepared):
    """Overrides an optimizer's beta1 during each update. A request is a beta1, and the parameters or None for all.

    Args:
        optimizer: A torch Adam or AdamW.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._overridden: list[tuple[dict[str, Any], Any, Any]] = []
        """Parameter groups whose betas are overridden: the group, its own betas, and the overriding ones."""
        super().__init__(optimizer)
        optimizer.register_step_post_hook(lambda *_: self.reset())
        optimizer.register_state_dict_post_hook(self._saved)

    def _wanted(self, group: dict[str, Any]) -> float | None:
        """The first requested beta1 that differs from a parameter group's own, or None."""
        return next((beta1 for beta1, parameters in self.wanted.values() if _changes(group, beta1, parameters)), None)

    @override
    def prepare(self, optimizer: Optimizer) -> None:
        """Overrides betas."""
        self.reset()  # a step inside a step prepares twice
        for group in optimizer.param_groups:
            beta1 = self._wanted(group)
            if beta1 is not None:
                own, *rest = betas = group["betas"]
                new = (torch.full_like(own, beta1) if isinstance(own, Tensor) else beta1, *rest)
                group["betas"] = new
                self._overridden.append((group, betas, new))

    @override
    def reset(self) -> None:
        """Restores the groups' own betas."""
        for group, own, new in self._overridden:
            if group["betas"] is new:
                group["betas"] = own
        self._overridden.clear()

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Saves the optimizer's own betas, even after an update that failed."""
        for group in state["param_groups"]:
            for _, own, new in self._overridden:
                if group["betas"] is new:
                    group["betas"] = own


def override_beta1(
    optimizers: Iterable[Optimizer],
    beta1: float,
    requester: Any,
    parameters: Collection[Tensor] | None = None,
    asked: bool = False,
) -> list[str]:
    """Makes torch's Adam and AdamW step with another beta1, until ``Beta1.withdraw`` is called.

    Args:
        optimizers: The optimizers. Only Adam and AdamW are changed.
        beta1: The beta1 to step with, in [0, 1).
        requester: The object that exchanges their gradients; it identifies this request.
        parameters: The compressed parameters; a parameter group with at least one of them is overridden. Default: all.
        asked: Whether the user set ``beta1``. If so, all optimizers that it does not apply to are reported; if not,
            those that it changes, and those with a nonzero beta1 that it does not apply to.

    Returns:
        Messages for the user.
    """
    words = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, Adam):
            Beta1.of(optimizer).wanted[requester] = (float(beta1), parameters)
            if not asked and any(_changes(group, beta1, parameters) for group in optimizer.param_groups):
                words.append(
                    f"lightning_topk: {name} steps with a beta1 of {beta1:g} instead of its own, since error feedback "
                    "already averages gradients over time (the guide on learning). To keep the optimizer's own beta1, "
                    "pass it as beta1=."
                )
        elif asked or any(group.get("betas", (0,))[0] for group in optimizer.param_groups):
            words.append(
                f"lightning_topk: a beta1 of {beta1:g} applies to torch's Adam and AdamW only; {name} is unchanged. "
                "If it wraps one of them, pass the inner optimizer."
            )
    return words


def _changes(group: dict[str, Any], beta1: float, parameters: Collection[Tensor] | None) -> bool:
    """Whether a parameter group has a different beta1 and at least one of the parameters (None: all)."""
    concerned = parameters is None or any(parameter in parameters for parameter in group["params"])
    return concerned and float(group["betas"][0]) != beta1
