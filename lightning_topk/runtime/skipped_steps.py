"""Restores the residuals when a GradScaler skips an optimizer step.

A GradScaler skips a step whose gradients contain an infinity or a NaN. Everything that was exchanged for that step, in
all buckets, by all workers and servers, is then discarded, so the residuals must return to their values before it. They
are copied when the first gradients of a step are exchanged, and restored after the scaler skipped it. Only the
GradScaler knows whether a step was skipped: finite gradients are skipped too if another gradient of the same optimizer
is not finite.

A *pass* is one backward pass. A step may consist of several passes; the copy is renewed only after the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_topk.core.endpoint import Endpoint
from lightning_topk.core.ops import reference

Skipped = bool | Tensor
"""Whether a step was skipped: a bool on the host or, with a fused optimizer, a scalar bool tensor on the device."""


class ScalerSteps:
    """Records which optimizer steps a GradScaler skipped. Use :meth:`of`: there is one instance per GradScaler.

    Args:
        scaler: The GradScaler; its ``step`` is wrapped.
    """

    _known: ClassVar[WeakKeyDictionary[torch.amp.GradScaler, ScalerSteps]] = WeakKeyDictionary()

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.undos: WeakSet[Undo] = WeakSet()
        """The objects that receive the outcomes."""
        self._hooked: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._stepped = False
        scaler.step = _Noting(self, scaler)  # type: ignore[method-assign]  # there is no hook for skipped steps

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler) -> ScalerSteps:
        """Returns the instance of a scaler, and creates it if needed."""
        if scaler not in cls._known:
            cls._known[scaler] = cls(scaler)
        return cls._known[scaler]

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Records the steps of these optimizers from now on."""
        for optimizer in optimizers:
            if optimizer not in self._hooked:
                self._hooked[optimizer] = optimizer.register_step_post_hook(self._after_step)

    def note(self, scaler: torch.amp.GradScaler, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Takes a step of the scaler, and tells what became of it."""
        self._stepped = False
        result = step()
        if not self._stepped:  # it was skipped, or the optimizer is of a kind that calls no hooks
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            self._tell(optimizer, any(bool(each) for each in found))
        return result

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # A fused optimizer is called for every step. During the call the scaler sets its found_inf, by which the kernel
        # skips the update.
        self._stepped = True
        found = getattr(optimizer, "found_inf", None)
        self._tell(optimizer, False if found is None else found.bool().any())

    def _tell(self, optimizer: Optimizer, skipped: Skipped) -> None:
        for undo in self.undos:
            undo.note(optimizer, skipped)


class _Noting:
    """Replaces a scaler's ``step``. Copies and pickles of the scaler get the plain method."""

    def __init__(self, steps: ScalerSteps, scaler: torch.amp.GradScaler) -> None:
        self._steps, self._scaler, self._step = steps, scaler, scaler.step

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return self._steps.note(self._scaler, optimizer, partial(self._step, optimizer, *args, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._scaler, "step")  # pickle and copy have the new scaler in its place


class Undo:
    """A copy of the memories of one endpoint as they were before the current step.

    Args:
        end: The endpoint.
        parameters: The parameters of its bucket.
        steps: Records which steps were skipped.
        optimizers: All optimizers.
    """

    def __init__(
        self, end: Endpoint, parameters: Sequence[Tensor], steps: ScalerSteps, optimizers: Sequence[Optimizer]
    ) -> None:
        self._begun = False
        self.outcomes: dict[Optimizer, Skipped] = {}
        """The outcome of each optimizer's first step since the last :meth:`decide`."""
        steps.undos.add(self)
        self._now = [tensor for link in end.links for tensor in link.memory.tensors().values()]
        self.before: list[Tensor] = []
        """The copy; empty before the first pass."""
        owner = {p: number for number, o in enumerate(optimizers) for group in o.param_groups for p in group["params"]}
        owners = [owner.get(parameter, 0) for parameter in parameters]
        self._masks: WeakKeyDictionary[Optimizer, Sequence[Tensor | None]] = WeakKeyDictionary()
        for number in sorted(set(owners)):
            self._masks[optimizers[number]] = [None] * len(self._now)
            if len(set(owners)) > 1:
                owned = torch.tensor(owners, device=end.sizes.device) == number
                self._masks[optimizers[number]] = _masks(end, end.spread(owned))

    @property
    def open(self) -> bool:
        """Whether a pass has begun whose optimizer step is neither taken nor skipped yet."""
        return self._begun and any(optimizer not in self.outcomes for optimizer in self._masks)

    def note(self, optimizer: Optimizer, skipped: Skipped) -> None:
        """Notes the outcome of a step of an optimizer, or of one that wraps it."""
        known = [optimizer]
        if optimizer not in self._masks:
            stepped = {p for group in optimizer.param_groups for p in group["params"]}
            known = [o for o in self._masks if any(p in stepped for group in o.param_groups for p in group["params"])]
        for each in known:
            self.outcomes.setdefault(each, skipped)

    def begin(self) -> None:
        """Begins a pass, after :meth:`decide`."""
        self._begun = True
        if not self.before:
            self.before = [now.clone() for now in self._now]

    def decide(self) -> None:
        """Restores the memories of parameters whose step was skipped; renews the copy of those whose step was taken."""
        self._begun = self.open
        for optimizer, masks in self._masks.items():
            skipped = self.outcomes.get(optimizer)
            if skipped is None:
                continue  # no step yet: more passes may follow
            if isinstance(skipped, Tensor) and skipped.is_cuda:
                # Made on the optimizer's stream, read on this one, and freed when it is forgotten below.
                skipped.record_stream(torch.cuda.current_stream(skipped.device))
            for now, before, mask in zip(self._now, self.before, masks, strict=True):
                if isinstance(skipped, Tensor):
                    reference.replace_(now, before, skipped if mask is None else skipped & mask)
                elif skipped:
                    reference.replace_(now, before, mask)
                if skipped is not True:
                    reference.replace_(before, now, mask)
        self.outcomes.clear()


def _masks(end: Endpoint, owned: Tensor) -> list[Tensor]:
    """For each memory tensor of an endpoint, a bool mask of its elements in ``owned`` ``[parts.numel]`` bool."""
    masks = [owned] * len(end.uplink.memory.tensors())
    if end.downlink is not None:
        served = reference.shard_rows(owned, end.layout)[end.shard]
        masks += [served] * len(end.downlink.memory.tensors())
    return masks
