"""What the exchange needs of the user's optimizers: momentum, beta1, learning rates, and which steps are skipped."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from weakref import ref

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Endpoint
from lightning_topk.runtime.beta1 import Beta1, override_beta1
from lightning_topk.runtime.checks import check_momentum
from lightning_topk.runtime.masking import Masking, mask_momentum
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.skipped_steps import ScalerSteps, Undo

HEAVY = 0.9
"""SGD's momentum from which on a smaller one is advised."""
GetOptimizers = Callable[[], Sequence[Optimizer]]
"""Gives the optimizers, which may be made later, or be replaced."""


def getter(optimizer: GetOptimizers | Sequence[Optimizer] | Optimizer | None) -> GetOptimizers | None:
    """A function that gives the optimizers; None if they are not known.

    Args:
        optimizer: Such a function, an optimizer, or several.

    Raises:
        TypeError: It is something else.
    """
    several = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if isinstance(several, list | tuple) and all(isinstance(each, Optimizer) for each in several):
        return lambda: several
    if optimizer is not None and (isinstance(optimizer, Sequence) or not callable(optimizer)):
        raise TypeError(
            f"optimizer={optimizer!r} must be a torch optimizer, a list of them, or a function that returns a list."
        )
    return optimizer


class Optimizers:
    """The user's optimizers, which may be made later, or be replaced.

    Args:
        given: Gives them; None if they are not known.
        scaler: The GradScaler that may skip their steps; None if there is none.
        config: The settings.
        residuals: What the rank keeps.
        say: Tells the user something.
    """

    def __init__(
        self,
        given: GetOptimizers | None,
        scaler: torch.amp.GradScaler | None,
        config: TopKConfig,
        residuals: Residuals,
        say: Callable[[str], None],
    ) -> None:
        self._given, self._config, self._residuals, self._say = given, config, residuals, say
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._known: list[ref[Optimizer]] = []  # weakly: the user may drop one and make another
        self._parameters = 0  # that they update

    @property
    def _followed(self) -> list[Optimizer]:
        """The optimizers that are followed, as far as they are still in use."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    def _now(self) -> list[Optimizer]:
        """The optimizers as the user gives them now."""
        given = [] if self._given is None else self._given()
        return [given] if isinstance(given, Optimizer) else list(given)

    @property
    def scale(self) -> Tensor | None:
        """The scalar by which the loss is multiplied; None without a GradScaler."""
        scale: Tensor | None = None if self._scaler is None else self._scaler._scale
        return scale

    def follow(self, compressed: Collection[Tensor] | None) -> None:
        """Checks the optimizers. If they are new: overrides beta1, masks momentum, watches the scaler's steps.

        Args:
            compressed: The parameters that are compressed; None if they are not known.

        Raises:
            ValueError: An optimizer and the exchange would both apply momentum.
        """
        now = self._now()
        check_momentum(self._config, now)  # also of those that are known: checkpoints and schedulers set momentum
        parameters, known = sum(len(group["params"]) for each in now for group in each.param_groups), self._followed
        same = len(now) == len(self._known) == len(known) and all(map(operator.is_, now, known))
        if same and parameters == self._parameters:
            return
        self.release()
        beta1, asked = self._config.adam_beta1, self._config.beta1 is not None
        if beta1 is not None:
            for message in override_beta1(now, beta1, self, compressed, asked):
                self._say(message)
        elif self._config.averages and any(isinstance(each, Adam) and each.param_groups[0]["betas"][0] for each in now):
            when = "If gradients are compressed, " * self._config.automatic
            self._say(
                f"lightning_topk: {when}error feedback averages gradients over time, and Adam's beta1 averages them "
                "again. beta1=0 often learns better (the guide on learning). To keep the optimizer's own and silence "
                "this, pass it as beta1=."
            )
        if self._config.masks_momentum:
            for message in mask_momentum(now, self, compressed):
                self._say(message)
        elif self._config.averages and not self._config.automatic and self._config.momentum_masking is None:
            self._advise_on_momentum([*_with_momentum(now, compressed)])
        if self._scaler is not None:
            ScalerSteps.of(self._scaler).watch(now)
            self._residuals.forget_steps()
        self._known, self._parameters = [*map(ref, now)], parameters

    def _advise_on_momentum(self, stepped: Sequence[tuple[float, Tensor]]) -> None:
        """Says what learned better, where an SGD with much momentum updates parameters."""
        heavy = [parameter for momentum, parameter in stepped if momentum >= HEAVY]
        if any(parameter.ndim >= 4 for parameter in heavy):
            self._say(
                "lightning_topk: convolutional nets that SGD trains with a momentum of 0.9 learned better on CIFAR-10 "
                "with momentum_masking=True in runs of up to ten epochs, and with a momentum of 0.5 at the same "
                "lr / (1 - momentum) in longer runs (the guide on learning). momentum_masking=False silences this."
            )
        elif heavy:
            self._say(
                "lightning_topk: error feedback averages gradients over time, and SGD's momentum averages them again. "
                "A momentum of 0.5 at the same lr / (1 - momentum) often learns better (the guide on learning). "
                "momentum_masking=False silences this."
            )

    def advance_learning_rates(self) -> float:
        """Notes this step's learning rates; called once in a backward pass.

        Returns:
            The last step's learning rate over this step's; 1 while it is zero, and with ``lr_ratio=False``.

        Raises:
            ValueError: The learning rates of two parameter groups changed by different factors.
        """
        if not self._config.lr_ratio or self._given is None:
            return 1.0
        rates = [float(group["lr"]) for optimizer in self._now() for group in optimizer.param_groups]
        progress = self._residuals.progress
        last = progress.learning_rates
        pairs = [(before, now) for before, now in zip(last, rates, strict=False) if before and now]
        progress.learning_rates = [
            now or before for before, now in zip_longest(last[: len(rates)], rates, fillvalue=0.0)
        ]
        ratios = [before / now for before, now in pairs]
        if ratios and max(ratios) > min(ratios) * 1.001:
            raise ValueError(
                "lr_ratio=True scales all residuals by one factor, but the learning rates of the parameter groups "
                f"changed by different factors: {ratios}. Use one schedule for all groups, or lr_ratio=False."
            )
        return ratios[0] if ratios else 1.0

    def make_undo(self, bucket: Sequence[Tensor]) -> Callable[[Endpoint], Undo] | None:
        """Makes what undoes the steps that the scaler skips, for a bucket's endpoint; None if it skips none."""
        optimizers = self._followed
        if self._scaler is None or not optimizers:
            return None
        steps = ScalerSteps.of(self._scaler)
        return lambda end: Undo(end, bucket, steps, optimizers)

    def release(self) -> None:
        """Leaves the optimizers' momentum and beta1 to themselves again."""
        for requests in (Beta1, Masking):
            requests.withdraw(self._followed, self)


def _with_momentum(
    optimizers: Sequence[Optimizer], compressed: Collection[Tensor] | None
) -> Iterator[tuple[float, Tensor]]:
    """The compressed parameters that an SGD with momentum updates, and that momentum."""
    for optimizer in optimizers:
        for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
            for parameter in group["params"] if group["momentum"] else ():
                if compressed is None or parameter in compressed:
                    yield group["momentum"], parameter
