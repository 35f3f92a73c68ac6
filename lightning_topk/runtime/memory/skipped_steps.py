"""Records which optimizer steps a GradScaler skipped, so that their gradients return to the residuals.

A GradScaler skips a step whose gradients contain an infinity or a NaN. Everything exchanged for that step, in all
buckets, by all workers and servers, is then discarded, and :mod:`lightning_topk.core.undo` computes what returns. Only
the GradScaler knows whether a step was skipped: finite gradients are skipped too if another gradient of the same
optimizer is not finite.

A *pass* is one backward pass. A step may consist of several passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

Skipped = bool | Tensor
"""Whether a step was skipped: a bool on the host or, with a fused optimizer, a scalar bool tensor on the device."""


class StepOutcome:
    """Whether the optimizer step of some backward passes was skipped, by parameter.

    Args:
        sums: Whether each pass exchanges the sum of its gradient and the gradients that earlier passes delivered.
    """

    def __init__(self, sums: bool) -> None:
        self.sums = sums
        self.skipped: dict[Tensor, Skipped] = {}
        """By member of a bucket, once its optimizer has taken or skipped the step."""
        self.final = False
        """Whether the passes of the next step have begun: an optimizer without a step by then takes none."""
        self._members: dict[Tensor, Tensor] = {}

    def watch(self, members: Mapping[Tensor, Tensor]) -> None:
        """Adds parameters, as optimizers hold them, with the bucket members that represent them."""
        self._members.update(members)

    def note(self, optimizer: Optimizer, skipped: Skipped) -> None:
        """Records the outcome of an optimizer's step; only its first step counts."""
        for group in optimizer.param_groups if not self.final else ():
            for parameter in group["params"]:
                if parameter in self._members:
                    self.skipped.setdefault(self._members[parameter], skipped)


class ScalerSteps:
    """Records which optimizer steps a GradScaler skipped. Use :meth:`of`: there is one instance per GradScaler.

    Args:
        scaler: The GradScaler; its ``step`` is wrapped.
    """

    _known: ClassVar[WeakKeyDictionary[torch.amp.GradScaler, ScalerSteps]] = WeakKeyDictionary()

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.outcomes: WeakSet[StepOutcome] = WeakSet()
        """Outcomes of the current steps."""
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
        """Takes a step of the scaler, and records whether it was skipped."""
        self._stepped = False
        result = step()
        if not self._stepped:  # the step was skipped, or the optimizer calls no hooks
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            self._tell(optimizer, any(bool(each) for each in found))
        return result

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # A fused optimizer is called for every step. During the call the scaler sets its found_inf, which makes the
        # kernel skip the update.
        self._stepped = True
        found = getattr(optimizer, "found_inf", None)
        self._tell(optimizer, False if found is None else found.bool().any())

    def _tell(self, optimizer: Optimizer, skipped: Skipped) -> None:
        for outcome in [*self.outcomes]:
            outcome.note(optimizer, skipped)


class _Noting:
    """Replaces a scaler's ``step``. Copies and pickles of the scaler get the plain method."""

    def __init__(self, steps: ScalerSteps, scaler: torch.amp.GradScaler) -> None:
        self._steps, self._scaler, self._step = steps, scaler, scaler.step

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return self._steps.note(self._scaler, optimizer, partial(self._step, optimizer, *args, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._scaler, "step")  # pickle and copy substitute the new scaler
