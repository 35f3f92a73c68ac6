"""Records which optimizer steps a GradScaler skipped, so that their gradients return to the residuals.

A GradScaler skips a step whose gradients contain an infinity or a NaN. Everything exchanged for that step, in all
buckets, by all workers and servers, is then discarded, and :mod:`lightning_topk.core.undo` computes what returns. Only
the GradScaler knows whether a step was skipped: finite gradients are skipped too if another gradient of the same
optimizer is not finite.

A *pass* is one backward pass. A step may consist of several passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_topk.core.endpoint import TakenBack

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


@dataclass(frozen=True)
class Sent:
    """Record of one exchange, kept until the optimizers take or skip their step.

    Attributes:
        bucket: The parameters of the bucket.
        pieces: Elements of each of them in this rank's residual.
        undo: Computes what the residual takes back if the step is skipped.
        step: The outcome of the step.
    """

    bucket: tuple[Tensor, ...]
    pieces: Sequence[int]
    undo: Callable[[], TakenBack]
    step: StepOutcome


class OpenSteps:
    """The exchanges of steps that a GradScaler may still skip."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self._settled: set[Tensor] = set()  # parameters whose part of the step was taken or skipped

    def of_other_than(self, step: StepOutcome | None) -> bool:
        """Whether there are exchanges of earlier steps than this one."""
        return bool(self.sent) and self.sent[0].step is not step

    def settle(self, residual_of: Callable[[Tensor], Tensor | None]) -> None:
        """Adds the gradients delivered for skipped steps back to the residuals."""
        for step in dict.fromkeys(sent.step for sent in self.sent):
            decided = {p: skipped for p, skipped in step.skipped.items() if p not in self._settled}
            self._settled |= decided.keys()
            if any(skipped is not False for skipped in decided.values()):
                for parameter, piece in self._delivered(step).items():
                    _take_back(residual_of(parameter), piece, decided.get(parameter, False))
            if step.final or all(p in step.skipped for sent in self.sent if sent.step is step for p in sent.bucket):
                self.sent = [sent for sent in self.sent if sent.step is not step]
                self._settled.clear()

    def _delivered(self, step: StepOutcome) -> dict[Tensor, Tensor]:
        """The gradient that all exchanges of a step delivered, by parameter."""
        total: dict[Tensor, Tensor] = {}
        for sent in self.sent:
            if sent.step is not step:
                continue
            (value, absorbed), sizes = sent.undo(), list(sent.pieces)
            absorbed = absorbed.expand_as(value) & step.sums
            for parameter, piece, flags in zip(sent.bucket, *(x.split(sizes) for x in (value, absorbed)), strict=True):
                earlier = total.get(parameter, torch.zeros((), dtype=value.dtype, device=value.device))
                total[parameter] = torch.where(flags, piece, piece + earlier)
        return total


def _take_back(residual: Tensor | None, piece: Tensor, skipped: Skipped) -> None:
    """Adds the gradient delivered for a parameter back to its residual, if the step was skipped."""
    if residual is None or skipped is False:
        return
    if isinstance(skipped, Tensor):
        if skipped.is_cuda:  # created on the optimizer's stream, read on this one, and freed later
            skipped.record_stream(torch.cuda.current_stream(skipped.device))
        piece = torch.where(skipped.to(piece.device), piece, 0)
    residual.add_(piece.to(residual.device))


class ScalerSteps:
    """Records which optimizer steps a GradScaler skipped. Use :meth:`of`: there is one instance per GradScaler."""

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
