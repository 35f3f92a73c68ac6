"""Warns of steps that silently miss gradients, and of gradients that silently miss a step.

Each warning names a case that trained badly without an error:

- ``check_bypass``: training calls another module than the attached one, so nothing is exchanged.
- ``check_others``: an optimizer made after attach takes the steps, and is not adapted.
- ``check_scaler``: a GradScaler that was not passed scales the loss.
- ``warn_of_drift``: a step takes a gradient that was not exchanged, though others were.
- ``warn_of_loss``: a gradient is zeroed after its exchange, such as a GAN discriminator's in the generator's turn.

The last two follow the gradient of one parameter of each optimizer (:class:`_Watched`)::

    state       event                                            next state
    any         backward computes the parameter's gradient       computed; if it was delivered and is None, a warning
    computed    the backward pass ends: it will be delivered     delivered
    any         a step of an optimizer that has the parameter    nothing; if it was computed, a warning
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from typing import Any, Literal, Protocol
from weakref import WeakMethod, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_topk.config import TopKConfig
from lightning_topk.messages import WarnOnce
from lightning_topk.optim.momentum import all_parameters, local_part


class Passes(Protocol):
    """Records of earlier backward passes: :class:`lightning_topk.runtime.telemetry.Telemetry`."""

    def collect(self) -> None:
        """Folds the last pass, if all its exchanges have ended."""

    @property
    def nonfinite_steps(self) -> int:
        """Passes that delivered a gradient with a NaN or an infinity."""


class Watch:
    """Watches the steps of the user's optimizers. ``passed``: whether the user passed any; ``scaled``: a GradScaler.

    Calls :meth:`stepped` after the first step of each watched optimizer since a backward pass began. Further calls are
    no steps with exchanged gradients: loading a checkpoint may initialise an optimizer by a step at rate 0, and torch
    calls the hook twice for a step that calls a base class's step.
    """

    def __init__(self, config: TopKConfig, say: WarnOnce, passes: Passes, passed: bool, scaled: bool) -> None:
        self._config, self._say, self._passes, self._scaled = config, say, passes, scaled
        self.compressed: Collection[Tensor] = ()
        """Parameters that may be compressed."""
        self.exchanged = False
        """Whether any backward pass has begun."""
        self.watched: list[_Watched] = []
        self._sees_all = passed  # whether optimizers are known and torch calls hooks after their steps
        self._pending = False  # whether a backward pass has begun since the last step of the compressed parameters
        self._by_others = 0  # steps of other optimizers since the last one of a known optimizer
        self._bypassed = 0  # steps with gradients before any exchange, up to 2
        living = ref(self)

        @_disable_dynamo
        def hook(optimizer: Optimizer, *_: Any) -> None:
            if (owner := living()) is not None:
                owner.after_step(optimizer)

        self._hook = register_optimizer_step_post_hook(hook)

    def stepped(self, optimizer: Optimizer) -> None:
        """Called after a step of an optimizer that is watched."""

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Watches these optimizers instead of earlier ones."""
        self._unwatch()
        self._sees_all = all(hasattr(each, "_optimizer_step_post_hooks") for each in optimizers)
        checks = self._config.compresses and not self._scaled  # a GradScaler may skip the step of a gradient
        for each in optimizers:
            learning = (p for p in all_parameters(each) if checks and p.requires_grad and p in self.compressed)
            self.watched.append(_Watched(each, next(learning, None), self))

    def _unwatch(self) -> None:
        while self.watched:
            self.watched.pop().stop()

    def close(self) -> None:
        """Removes all hooks."""
        self._unwatch()
        self._hook.remove()

    # -------------------------------------------------------------------------------- events

    def end_pass(self) -> None:
        """Ends a backward pass, which delivers its gradients."""
        for alive in _watched.valuerefs():  # also those of other states, whose models share parameters with this one
            if (each := alive()) and each.state == "computed" and each.parameter in self.compressed:
                each.state = "delivered"

    def after_step(self, optimizer: Optimizer) -> None:
        """Checks a step of any of torch's optimizers."""
        known = next((each for each in self.watched if each.optimizer() is optimizer), None)
        if known is not None:
            if known.state == "computed" and self.exchanged:
                self.warn_of_drift(optimizer)
            known.steps, known.state = known.steps + 1, "nothing"
            if known.due:
                known.due = False
                self.stepped(optimizer)
            if known.steps == 1:
                self.check_scaler()
        if self.exchanged:
            self.check_others(optimizer, known)
        elif known is not None:
            self.check_bypass(optimizer)

    # -------------------------------------------------------------------------------- warnings

    def check_others(self, optimizer: Optimizer, known: _Watched | None) -> None:
        """Warns if an unknown optimizer takes the steps, unless a known one, which may wrap it, steps too."""
        if known is None:
            moved = (p for p in all_parameters(optimizer) if p.grad is not None)
            if not self._pending or frozenset(self.compressed).isdisjoint(moved):
                return
        self._pending, self._by_others = False, 0 if known else self._by_others + 1
        for each in self.watched:
            p = each.parameter
            waits = each.state != "nothing" and p is not None and p.grad is not None
            if waits and any(map(operator.is_, all_parameters(optimizer), repeat(p))):
                each.state = "nothing"
        adapts = self._config.adapts_momentum or self._config.momentum
        if self._by_others == 2 and adapts and self._sees_all:
            self._say(
                f"lightning_topk: {type(optimizer).__name__} takes steps, but was not passed as optimizer=: its "
                "momentum is not adapted to compression, and training may end behind DDP's. Pass it to attach, or a "
                "function that returns the optimizers in use; or close the state and attach again. In Lightning, "
                "return it from configure_optimizers."
            )

    def check_bypass(self, optimizer: Optimizer) -> None:
        """Warns at the second step without an exchange: first, DDP's forward pass may raise for unused parameters."""
        gradients = (p.grad for p in all_parameters(optimizer) if p.grad is not None and p in self.compressed)
        values = (each._values() if each.is_sparse else local_part(each) for each in gradients)
        # torch's get_state_dict takes a step with zeros. This waits for the device, but nothing is exchanged anyway.
        if self._bypassed < 2 and any(each.any() for each in values):
            self._bypassed += 1
            if self._bypassed == 2:
                self._say(
                    f"lightning_topk: {type(optimizer).__name__} took a step, but no gradient was exchanged since "
                    "attach: training does not call the attached model. If it calls the module inside, nothing is "
                    "exchanged and the ranks drift apart, as with DDP: call the wrapper. If it calls another wrapper, "
                    "that one exchanges whole gradients: attach it instead (with Hugging Face's Trainer it is "
                    "trainer.model_wrapped)."
                )

    @_disable_dynamo
    def check_scaler(self) -> None:
        """Warns if a GradScaler that the user did not pass takes this step: it is in a frame above the step's hooks."""
        frame = sys._getframe() if (self._config.waits or self._config.clip_norm) and not self._scaled else None
        while frame is not None:
            # f_locals keeps a frame's variables alive: read it only for a scaler's own step.
            if frame.f_code is torch.amp.GradScaler.step.__code__ and frame.f_locals["self"].is_enabled():
                self._say(
                    "lightning_topk: a GradScaler scales the loss, but attach got no scaler=. Residuals then count too "
                    "much or too little whenever the scale changes, and clip_norm= clips scaled gradients. Pass the "
                    "scaler to attach."
                )
                return
            frame = frame.f_back

    def warn_of_drift(self, optimizer: Optimizer) -> None:
        """Warns of a step with the gradient of a backward pass that was not exchanged."""
        self._say(
            f"lightning_topk: {type(optimizer).__name__} took a step with gradients that were not exchanged: the ranks "
            "drift apart, as with DDP. no_sync() and require_backward_grad_sync apply from the forward pass on: set "
            "them before it, and exchange the last backward pass before each step."
        )

    def warn_of_loss(self, watched: _Watched) -> None:
        """Warns once of an exchanged gradient that was zeroed before its step.

        Not once any gradient was not finite: a GradScaler or the user may have skipped its step. Waits for the device.
        """
        if not self._passes.nonfinite_steps:
            watched.stop()
            self._say(
                "lightning_topk: a gradient was zeroed after its exchange and before its optimizer's step: the "
                "delivered part is lost, unless you kept a copy, and the rest arrives in a later step. Keep such a "
                "backward pass out of the exchange with toggle_optimizer, requires_grad_(False) or no_sync(); see "
                "examples/guides/troubleshooting.md."
            )


class _Watched:
    """An optimizer, and the state of one parameter's gradient, checked whenever backward adds to it.

    A tensor hook alone would also run in ``torch.autograd.grad``, which adds nothing to the gradient.
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor | None, owner: Watch) -> None:
        self.optimizer, self.parameter = ref(optimizer), parameter
        self.state: Literal["nothing", "computed", "delivered"] = "nothing"
        self.steps = 0  # stays 0 if the user takes the steps without the optimizer
        self.due = False  # whether a backward pass has begun since its last step
        self._was_none: bool | None = None  # the gradient, before backward adds to it; unknown with FSDP2
        self._owner, self._hooks = owner, []
        _watched[id(self)] = self
        if parameter is not None:
            self._hooks.append(parameter.register_hook(_weak(self._before_gradient)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_weak(self._after_gradient)))

    def _before_gradient(self, _: Tensor) -> None:
        assert self.parameter is not None
        self._was_none = self.parameter.grad is None

    def _after_gradient(self, _: Tensor) -> None:
        if self._was_none is None:
            return
        if self._was_none and self.state == "delivered" and self.steps:
            self._owner.warn_of_loss(self)
        self.state = "computed"

    def stop(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


_watched = WeakValueDictionary[int, _Watched]()
"""All instances in use, of every state."""


def _weak(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Calls a method only while its object lives: the garbage collector cannot see through a tensor's hooks."""
    living: Any = WeakMethod(method)

    def call(x: Tensor) -> None:
        if (found := living()) is not None:
            found(x)

    return call
