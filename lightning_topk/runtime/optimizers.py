"""The user's optimizers, as the exchange uses them: their momentum, their steps, and the loss scale."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Adam, Adamax, AdamW, NAdam, Optimizer, RAdam
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lightning_topk.config import TopKConfig
from lightning_topk.runtime.messages import WarnOnce
from lightning_topk.runtime.momentum import AdaptedMomentum, adapt_momentum, local_part, unwrapped

GetOptimizers = Callable[[], Sequence[Optimizer]]
"""Returns the optimizers, which may be created later or replaced."""


def getter(optimizer: GetOptimizers | Sequence[Optimizer] | Optimizer | None) -> GetOptimizers | None:
    """Returns a function that returns the optimizers; None if they are unknown."""
    several: Any = [optimizer] if _is_optimizer(optimizer) else optimizer
    if isinstance(several, list | tuple) and all(map(_is_optimizer, several)):
        return lambda: several
    if optimizer is not None and (isinstance(optimizer, Sequence) or not callable(optimizer)):
        raise TypeError(
            f"optimizer={optimizer!r} must be a torch optimizer, a list of them, or a function that returns a list."
        )
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_optimizer(x: Any) -> bool:
    """Whether it is an optimizer of torch, or acts as one."""
    return isinstance(x, Optimizer) or (hasattr(x, "param_groups") and hasattr(x, "step"))


class Optimizers:
    """The user's optimizers, which may be created later or replaced."""

    def __init__(
        self,
        given: GetOptimizers | None,
        scaler: torch.amp.GradScaler | None,
        config: TopKConfig,
        say: WarnOnce,
        delivers: Callable[[Tensor], tuple[Collection[Tensor], float]] = lambda parameter: ({parameter}, math.inf),
        nonfinite_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        self._nonfinite_steps = nonfinite_steps
        self.given, self._config, self.say, self._delivers = given, config, say, delivers
        self._adapted: Collection[Tensor] = ()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._known: list[ref[Optimizer]] = []  # weak references: the user may drop one and create another
        self._parameters = 0  # number of parameters that they update
        self.exchanged = False
        """Whether any backward pass has begun."""
        self._watched: list[_Watched] = []
        self._compressed: Collection[Tensor] = ()
        self._pending = False  # whether a backward pass has begun since the last step of the compressed parameters
        self._by_others = 0  # steps of other optimizers since the last one of a known optimizer
        self._any_step: RemovableHandle | None = None
        self._bypassed = 0  # steps with gradients before any exchange, up to 2
        self._hooked = True  # whether each known optimizer calls hooks after its step

    @property
    def _in_use(self) -> list[Optimizer]:
        """The known optimizers that still exist."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    def now(self) -> list[Optimizer]:
        """The optimizers that the user gives now."""
        given: Any = [] if self.given is None else self.given()
        return [*map(unwrapped, [given] if _is_optimizer(given) else given)]

    @property
    def scale(self) -> Tensor | None:
        """The scalar by which the loss is multiplied; None without a GradScaler."""
        return None if self._scaler is None else self._scaler._scale

    def sync(self, compressed: frozenset[Tensor], adapted: Collection[Tensor]) -> set[Tensor]:
        """Checks the optimizers; adapts momentum and watches the steps of new ones, and returns their parameters."""
        now, self._compressed = self.now(), compressed
        check_closures(self._config, now)
        check_momentum(self._config, now)  # also known ones: checkpoints and schedulers set momentum
        parameters, known = sum(len(parameters_of(each)) for each in now), self._in_use
        if [*map(id, now)] == [*map(id, known)] and parameters == self._parameters:
            return set()
        self.release()
        self._adapted = adapted
        if self._config.adapts_momentum:
            ours = [each for each in now if not compressed.isdisjoint(parameters_of(each))]
            notes, warnings = adapt_momentum(ours, self, adapted)
            for message in notes:
                self.say.note(message)
            for message in warnings:
                self.say(message)
        self._warn_of_decay(now)
        torchs = [each for each in now if hasattr(each, "_optimizer_step_post_hooks")]
        self._hooked = len(torchs) == len(now)
        self._watched = [_Watched(each, self._first_that_learns(each, compressed), self) for each in torchs]
        self._known, self._parameters = [*map(ref, now)], parameters
        return {p for each in now for p in parameters_of(each)}

    def _warn_of_decay(self, optimizers: Iterable[Optimizer]) -> None:
        """Names Adam with weight decay in the gradient where momentum is not adapted, or beta1 is zero."""
        for optimizer in optimizers if self._config.compresses else ():
            if not isinstance(optimizer, Adam | NAdam | RAdam | Adamax) or isinstance(optimizer, AdamW):
                continue
            adapts = self._config.adapts_momentum
            decaying = [group for group in optimizer.param_groups if group["weight_decay"]]
            coupled = [group for group in decaying if not group.get("decoupled_weight_decay")]
            if any(not adapts or not group["betas"][0] for group in coupled):
                self.say(
                    f"lightning_topk: {type(optimizer).__name__} adds weight_decay to the gradient; without adapted "
                    "momentum it moves entries that are not delivered by the learning rate in each step. Use AdamW, "
                    f"or {'a beta1 above 0' if adapts else 'adapt_momentum=True'}."
                )

    def check_delivered(self, optimizer: Optimizer) -> None:
        """Warns if a step's gradient has far more nonzero entries than exchanges deliver. Waits for the device."""
        given = [p for group in optimizer.param_groups for p in group["params"] if p in self._adapted]
        dense = [p for p in given if p.grad is not None and p.grad.numel() and not p.grad.is_sparse]
        if not dense or not self._config.adapts_momentum:
            return
        bucket, most = self._delivers(max(dense, key=Tensor.numel))
        gradients = [local_part(p.grad) for p in dense if p in bucket]
        numel = max(1, sum(map(Tensor.numel, gradients)))
        found, density = float(sum(map(Tensor.count_nonzero, gradients))) / numel, min(1.0, most / numel)
        if found > (1 + density) / 2:
            self.say(
                f"lightning_topk: {type(optimizer).__name__} steps with a gradient of which {found:.0%} is nonzero, "
                f"while exchanges deliver about {density:.2g} of its entries: something changes every entry between "
                "backward and the step, such as noise, centralisation or weight decay by hand. So momentum cannot be "
                "adapted to what was delivered, and training may end behind DDP's. Do this before the exchange, in a "
                "hook of the parameter, or pass adapt_momentum=False to silence this."
            )

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Warns if another optimizer than the known ones takes the steps; a known one may wrap it and step too."""
        known = any(optimizer is each for each in self._in_use)
        moved = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        if not known and (not self._pending or moved.isdisjoint(self._compressed)):
            return
        self._pending, self._by_others = False, 0 if known else self._by_others + 1
        for each in self._watched:
            each.forget(moved)
        if self._by_others == 2 and (self._config.adapts_momentum or self._config.momentum):
            self.say(
                f"lightning_topk: {type(optimizer).__name__} takes steps, but it is not among those that "
                "optimizer= gave: it is neither checked nor adapted to compression, and training may end behind DDP's. "
                "Pass it to attach, or a function that returns the optimizers in use; or close the state and attach "
                "again. In Lightning, return it from configure_optimizers."
            )

    def check_bypass(self, optimizer: Optimizer) -> None:
        """Warns at the second step without an exchange: DDP names unused parameters in the forward pass before it."""
        given = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        # get_state_dict takes a step with zeros. This waits for the device, but nothing is exchanged anyway.
        if self._bypassed < 2 and any(_values(gradient).any() for gradient in given):
            self._bypassed += 1
            if self._bypassed == 2:
                self.say(
                    f"lightning_topk: {type(optimizer).__name__} took a step, but no gradient was exchanged since "
                    "attach: training does not call the attached model. If it calls the module inside, nothing is "
                    "exchanged and the ranks drift apart, as with DDP: call the wrapper. If it calls another wrapper, "
                    "that exchanges whole gradients: attach that one; with Hugging Face's Trainer it is "
                    "trainer.model_wrapped."
                )

    @_disable_dynamo
    def check_scaler(self) -> None:
        """Warns if a GradScaler that the user did not pass takes this step: it is in a frame above the step's hooks."""
        frame = sys._getframe() if self._scaler is None and self._config.compresses else None
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
                self.say(
                    "lightning_topk: a GradScaler scales the loss. Pass the scaler to attach, as scaler=: residuals "
                    "are then unscaled. Without it they count too much or too little whenever the scale changes."
                )
                return
            frame = frame.f_back

    def warn_of_loss(self) -> None:
        """Warns of an exchanged gradient that was zeroed before its step. Waits for the device."""
        if self._nonfinite_steps():  # a step with it was skipped, by a GradScaler or by hand
            return
        self.say(
            "lightning_topk: a gradient was zeroed after its exchange and before its optimizer's step: the "
            "delivered part is lost, and the rest arrives in a later step. Keep such a backward pass out of the "
            "exchange with toggle_optimizer, requires_grad_(False) or no_sync(); see "
            "examples/guides/troubleshooting.md."
        )

    def begin_pass(self) -> None:
        """Begins a backward pass that is exchanged."""
        self.exchanged = self._pending = True
        if self._any_step is None and self._hooked and self.given is not None:
            self._any_step = _on_any_step(self)

    def end_pass(self) -> None:
        """Ends a backward pass, which delivers its gradients."""
        for each in self._watched:
            each.delivered, each.reached = each.delivered or each.reached, False

    def _first_that_learns(self, optimizer: Optimizer, compressed: Collection[Tensor]) -> Tensor | None:
        """The first trained, compressed parameter of an optimizer; None if there is none or a GradScaler is in use."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        known = (p for p in parameters if p.requires_grad and p in compressed)
        return next(known, None) if self._config.compresses and self._scaler is None else None

    def release(self) -> None:
        """Stops adapting and watching the optimizers."""
        AdaptedMomentum.release(self._in_use, self)
        if self._any_step is not None:
            self._any_step.remove()
            self._any_step = None
        while self._watched:
            self._watched.pop().stop()


def _values(gradient: Tensor) -> Tensor:
    """The stored values of a gradient on this rank."""
    return gradient._values() if gradient.is_sparse else local_part(gradient)


def _on_any_step(owner: Optimizers) -> RemovableHandle:
    """Calls ``owner.after_any_step`` after each step of any torch optimizer, as long as the owner lives."""
    living = ref(owner)

    @_disable_dynamo
    def hook(optimizer: Optimizer, *_: Any) -> None:
        if (owner := living()) is not None:
            owner.after_any_step(optimizer)

    return register_optimizer_step_post_hook(hook)


SETTLED = 5
"""The step whose gradient is checked: buckets are final, and there is momentum."""


class _Watched:
    """Detects steps without exchanged gradients, and exchanged gradients without a step.

    Args:
        optimizer: The optimizer.
        parameter: One of its parameters, whose gradient is checked before each backward pass adds to it; or None.
        owner: Receives the warnings.
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor | None, owner: Optimizers) -> None:
        self.reached = self.delivered = False
        """Whether the parameter got a gradient in this backward pass, and in an earlier one since the last step."""
        self._owner, self._parameter = owner, parameter
        self._warned = False
        self._steps = 0  # only if its step calls hooks at all
        self._hooks: list[RemovableHandle] = [optimizer.register_step_post_hook(self._after_step)]
        if parameter is not None:
            self._hooks.append(parameter.register_hook(self._before_gradient))

    def _before_gradient(self, _: Tensor) -> None:
        if self.delivered and self._steps and self._parameter is not None and self._parameter.grad is None:
            self.delivered = False
            if not self._warned:
                self._warned = True
                self._owner.warn_of_loss()
        self.reached = True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.reached = self.delivered = False
        self._steps += 1
        if self._steps == 1:
            self._owner.check_scaler()
        if self._steps == SETTLED and self._owner.exchanged:
            self._owner.check_delivered(optimizer)
        if not self._owner.exchanged:
            self._owner.check_bypass(optimizer)

    def forget(self, moved: Collection[Tensor]) -> None:
        """Notes that another optimizer has used the parameter's gradient, if it is among ``moved``."""
        if self._parameter in moved:
            self.reached = self.delivered = False

    def stop(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


def check_momentum(config: TopKConfig, optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers with momentum if the configuration applies momentum before compression."""
    if not config.momentum:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            own = group.get("momentum") or (group.get("betas") or (0,))[0]
            if own:
                raise ValueError(
                    f"momentum={config.momentum!r} is applied on the workers, before compression, but "
                    f"{type(optimizer).__name__} has momentum {own!r} of its own and would apply it again. Use "
                    "torch.optim.SGD(..., momentum=0) or AdamW(..., betas=(0, 0.999)), or remove momentum= from the "
                    "strategy. If you made the optimizer without momentum, a checkpoint or a scheduler such as "
                    "OneCycleLR (cycle_momentum=False) has set it."
                )


def check_closures(config: TopKConfig, optimizers: Iterable[Optimizer]) -> None:
    """Refuses LBFGS, which compares gradients of one batch, while each compressed pass delivers a different part."""
    if config.compresses and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS evaluates its closure several times per step and compares the gradients, but compression delivers "
            "a different part of the gradient each time, so training would diverge. Pass topology='dense', which sends "
            "whole gradients, or use another optimizer."
        )
