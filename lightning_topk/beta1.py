"""The first beta of Adam while it steps.

What is kept back arrives as a sum of gradients: error feedback averages over the 1 / density steps that an entry waits. Adam's beta1
averages once more, over 1 / (1 - beta1) steps, and what arrives in bursts then arrives later still. So the default recipe has Adam step
with a beta1 of zero. The optimizer is left as it is: outside of its update its groups say what they said.
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
        self.wanted: WeakKeyDictionary[Any, tuple[float, Collection[Tensor]]] = WeakKeyDictionary()
        """By whom: what beta1, and for which parameters not."""
        self._own: list[Any] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_post_hook(self._saved)

    @classmethod
    def of(cls, optimizer: Optimizer) -> Beta1:
        """What lends to an optimizer."""
        if optimizer not in cls._known:
            cls._known[optimizer] = cls(optimizer)
        return cls._known[optimizer]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lends when the update begins: after the closure, in which whole training steps run and may fail."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._lend(optimizer)
            return None

        def lending() -> Any:
            loss = closure()
            self._lend(optimizer)
            return loss

        return (optimizer, lending, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _lend(self, optimizer: Optimizer) -> None:
        if not self.wanted or self._own:  # a subclass that calls its parent's step comes here twice
            return
        self._own = [group["betas"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            own, other = group["betas"]
            for beta1, spared in self.wanted.values():
                if any(parameter not in spared for parameter in group["params"]):
                    group["betas"] = (torch.full_like(own, beta1) if isinstance(own, Tensor) else beta1, other)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for group, own in zip(optimizer.param_groups, self._own, strict=False):
            group["betas"] = own
        self._own = []

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """An update that failed gives nothing back; a checkpoint of then holds the optimizer's own."""
        for group, own in zip(state["param_groups"], self._own, strict=False):
            group["betas"] = own


def lend_beta1(
    optimizers: Iterable[Optimizer], beta1: float, lender: Any, spared: Collection[Tensor] = ()
) -> list[Optimizer]:
    """Has those of the optimizers that are torch's Adam or AdamW step with another first beta, until ``lender`` takes it back.

    Args:
        optimizers: The optimizers.
        beta1: In [0, 1).
        lender: Who exchanges their gradients.
        spared: Parameters that are not compressed. A group of only such keeps its own.

    Returns:
        Those that have another.
    """
    found = [optimizer for optimizer in optimizers if isinstance(optimizer, Adam)]
    for optimizer in found:
        Beta1.of(optimizer).wanted[lender] = (beta1, spared)
    return [optimizer for optimizer in found if any(float(g["betas"][0]) != beta1 for g in optimizer.param_groups)]


def take_back_beta1(optimizers: Iterable[Optimizer], lender: Any) -> None:
    """Has optimizers step with their own first beta again, unless others lend them one."""
    for optimizer in optimizers:
        if isinstance(optimizer, Adam):
            Beta1.of(optimizer).wanted.pop(lender, None)
