"""The first beta of Adam while it steps.

What is kept back arrives as a sum of gradients: error feedback averages over the 1 / density steps that an entry waits. Adam's beta1
averages once more, over 1 / (1 - beta1) steps, and what is late comes later still. So the default recipe has Adam step with a beta1 of
zero. The optimizer is left as it is: when it has stepped, its groups say what they said before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer


class Beta1:
    """Lends an optimizer another first beta for each update. There is one for each optimizer: :meth:`of`.

    Args:
        optimizer: An Adam or AdamW of torch.
    """

    _known: ClassVar[WeakKeyDictionary[Optimizer, Beta1]] = WeakKeyDictionary()

    def __init__(self, optimizer: Optimizer) -> None:
        self.wanted: WeakKeyDictionary[Any, tuple[float, Collection[Tensor] | None]] = WeakKeyDictionary()
        """By whom: what beta1, and for which parameters; None for all."""
        self._lent: list[tuple[dict[str, Any], Any, Any]] = []
        """Groups that have betas which are not their own: the group, its own, and those."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._give_back)
        optimizer.register_state_dict_post_hook(self._saved)

    @classmethod
    def of(cls, optimizer: Optimizer) -> Beta1:
        """What lends to an optimizer."""
        if optimizer not in cls._known:
            cls._known[optimizer] = cls(optimizer)
        return cls._known[optimizer]

    def _wanted(self, group: dict[str, Any]) -> float | None:
        """The beta1 that a parameter group steps with, if it is not its own."""
        return next((beta1 for beta1, parameters in self.wanted.values() if _changes(group, beta1, parameters)), None)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lends when the update begins: after the closure, in which whole training steps run and may fail."""
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(given):
            self._lend(optimizer)
            return None

        def closure() -> Any:
            self._give_back()
            loss = given()
            self._lend(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _lend(self, optimizer: Optimizer) -> None:
        self._give_back()  # an update that failed did not
        for group in optimizer.param_groups:
            beta1 = self._wanted(group)
            if beta1 is not None:
                own, *rest = betas = group["betas"]
                lent = (torch.full_like(own, beta1) if isinstance(own, Tensor) else beta1, *rest)
                group["betas"] = lent
                self._lent.append((group, betas, lent))

    def _give_back(self, *_: Any) -> None:
        for group, own, lent in self._lent:
            if group["betas"] is lent:
                group["betas"] = own
        self._lent.clear()

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """A checkpoint after an update that failed holds the optimizer's own."""
        for group in state["param_groups"]:
            for _, own, lent in self._lent:
                if group["betas"] is lent:
                    group["betas"] = own


def lend_beta1(
    optimizers: Iterable[Optimizer],
    beta1: float,
    lender: Any,
    parameters: Collection[Tensor] | None = None,
    asked: bool = False,
) -> list[str]:
    """Has those of the optimizers that are torch's Adam or AdamW step with another first beta, until ``lender`` takes it back.

    Args:
        optimizers: The optimizers.
        beta1: In [0, 1).
        lender: Who exchanges their gradients.
        parameters: Those that are compressed: a group that has one of them is lent. Default: all.
        asked: Whether the user asked for it, and wants to know rather where it has no effect than where it has.

    Returns:
        What a user should know.
    """
    words = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, Adam):
            Beta1.of(optimizer).wanted[lender] = (float(beta1), parameters)
            if not asked and any(_changes(group, beta1, parameters) for group in optimizer.param_groups):
                words.append(
                    f"lightning_topk: {name} steps with a beta1 of {beta1:g} instead of its own, since what is kept back arrives as an "
                    "average already (README, Adam). Pass beta1=, with your own, to keep that."
                )
        elif asked or any(group.get("betas", (0,))[0] for group in optimizer.param_groups):
            words.append(
                f"lightning_topk: a beta1 of {beta1:g} is for torch's Adam and AdamW; {name} steps as ever. If it wraps one of them, pass "
                "that one."
            )
    return words


def take_back_beta1(optimizers: Iterable[Optimizer], lender: Any) -> None:
    """Has optimizers step with their own first beta again, unless others lend them one."""
    for optimizer in optimizers:
        if optimizer in Beta1._known:
            Beta1.of(optimizer).wanted.pop(lender, None)


def _changes(group: dict[str, Any], beta1: float, parameters: Collection[Tensor] | None) -> bool:
    """Whether a parameter group has another beta1, and any of the parameters (None: all)."""
    concerned = parameters is None or any(parameter in parameters for parameter in group["params"])
    return concerned and float(group["betas"][0]) != beta1
