"""Undoes what was exchanged for an optimizer step that was not taken.

With a GradScaler, a step whose gradients hold an infinity or a NaN is skipped. What the exchange had sent for it, from any
worker or server, in any bucket, reached nobody: the residuals must be again what they were before. So they are copied
when gradients for a step begin to come, and copied back when the scaler has skipped it. It is the scaler who knows: a
gradient that was finite is skipped too if another one of the same optimizer was not.

A *pass* is one backward pass. Several may make up one step; the copy is renewed only when the optimizer has stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_topk.core.exchange import Endpoint
from lightning_topk.core.ops import reference

Outcome = bool | Tensor
"""Whether a step was skipped: known to the host, or, with a fused optimizer, a scalar bool on the device."""


class Steps:
    """Tells endpoints what became of the optimizers' steps. There is one for each GradScaler: :meth:`of`.

    Args:
        scaler: Its ``step`` is replaced by one that takes note of what it did.
    """

    _known: ClassVar[WeakKeyDictionary[torch.amp.GradScaler, Steps]] = WeakKeyDictionary()

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.guarded: WeakSet[Undo] = WeakSet()
        """Those who want to know."""
        self._hooked: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._stepped = False
        scaler.step = self._noting(scaler.step)  # type: ignore[method-assign]  # there is no hook for skipped steps

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler) -> Steps:
        """The steps that a scaler guards."""
        if scaler not in cls._known:
            cls._known[scaler] = cls(scaler)
        return cls._known[scaler]

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Takes note of the steps of optimizers from now on."""
        for optimizer in optimizers:
            if optimizer not in self._hooked:
                self._hooked[optimizer] = optimizer.register_step_post_hook(self._after_step)

    def _noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def noting(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._stepped = False
            result = step(optimizer, *args, **kwargs)
            if not self._stepped:
                self._tell(optimizer, True)
            return result

        return noting

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # A fused optimizer is called even if its kernel is to skip; the scaler lends it the flag for the call.
        self._stepped = True
        found = getattr(optimizer, "found_inf", None)
        self._tell(optimizer, False if found is None else found.bool().any())

    def _tell(self, optimizer: Optimizer, skipped: Outcome) -> None:
        for undo in self.guarded:
            undo.outcomes.setdefault(optimizer, skipped)


class Undo:
    """The memories of one endpoint as they were before the step under way.

    Args:
        end: The endpoint.
        parameters: Those of its bucket.
        steps: The optimizers' steps.
        optimizers: All optimizers.
    """

    def __init__(
        self, end: Endpoint, parameters: Sequence[Tensor], steps: Steps, optimizers: Sequence[Optimizer]
    ) -> None:
        self._begun = False
        self.outcomes: dict[Optimizer, Outcome] = {}
        """What became of the first step of each optimizer since the last decision."""
        steps.guarded.add(self)
        self._now = [tensor for link in end.links for tensor in link.memory.tensors().values()]
        self._before: list[Tensor] = []
        owner = {p: number for number, o in enumerate(optimizers) for group in o.param_groups for p in group["params"]}
        owners = [owner.get(parameter, 0) for parameter in parameters]
        self._masks: dict[Optimizer, Sequence[Tensor | None]] = {}
        for number in sorted(set(owners)):
            self._masks[optimizers[number]] = [None] * len(self._now)
            if len(set(owners)) > 1:
                owned = torch.tensor(owners, device=end.sizes.device) == number
                self._masks[optimizers[number]] = _masks(end, end.spread(owned))

    @property
    def open(self) -> bool:
        """Whether a pass has begun whose step is still to come."""
        return self._begun and not self.outcomes.keys() >= self._masks.keys()

    def begin(self, renew: bool) -> None:
        """Begins a pass, after :meth:`decide`.

        Args:
            renew: Whether the memories were changed meanwhile, by something that stays.
        """
        self._begun = True
        if not self._before:
            self._before = [now.clone() for now in self._now]
        elif renew:
            for now, before in zip(self._now, self._before, strict=True):
                before.copy_(now)

    def decide(self) -> None:
        """Puts back what belongs to a step that was skipped, and keeps what belongs to one that was taken."""
        self._begun = self.open
        for optimizer, masks in self._masks.items():
            skipped = self.outcomes.get(optimizer)
            if skipped is None:
                continue  # no step yet: more passes for it may come
            for now, before, mask in zip(self._now, self._before, masks, strict=True):
                if isinstance(skipped, Tensor):
                    reference.replace_(now, before, skipped if mask is None else skipped & mask)
                elif skipped:
                    reference.replace_(now, before, mask)
                if skipped is not True:
                    reference.replace_(before, now, mask)
        self.outcomes.clear()


def _masks(end: Endpoint, owned: Tensor) -> list[Tensor]:
    """For each memory tensor of an endpoint, which of its elements belong to ``owned`` ``[parts.numel]`` bool."""
    masks = [owned] * len(end.uplink.memory.tensors())
    if end.downlink is not None:
        served = reference.shard_rows(owned, end.layout)[end.shard]
        masks += [served] * len(end.downlink.memory.tensors())
    return masks
