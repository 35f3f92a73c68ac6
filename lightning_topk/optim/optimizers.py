"""The user's optimizers, as the exchange uses them: their momentum, steps, learning rates and clipping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topk.bucket import Bucket, Buckets
from lightning_topk.config import TopKConfig, check_function
from lightning_topk.consensus import check_agreement, gathered
from lightning_topk.messages import WarnOnce
from lightning_topk.optim.applied import Rates, rate_of
from lightning_topk.optim.clips import UserClipping
from lightning_topk.optim.momentum import AdaptedMomentum, adapt_momentum, all_parameters, momentum_of
from lightning_topk.optim.watch import Passes, Watch

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
    if optimizer is not None:
        check_function("optimizer", optimizer)
        found: Any = []
        with suppress(Exception):  # the function may fail until they exist
            found = optimizer()
        _listed(found)
    return optimizer


def _listed(found: Any) -> list[Optimizer]:
    """Returns what a user's function returned as a list; refuses anything but optimizers."""
    several: list[Any] = [*found] if isinstance(found, Iterable) else [found]
    if not all(map(_is_optimizer, several)):
        raise TypeError(
            f"the function optimizer= returned {found!r:.200}, but must return a list of torch optimizers, empty until "
            "they exist."
        )
    return several


def _is_optimizer(x: Any) -> bool:
    """Whether ``x`` is a torch optimizer, or acts like one."""
    return isinstance(x, Optimizer) or (hasattr(x, "param_groups") and hasattr(x, "step"))


def unwrapped(optimizer: Any) -> Any:
    """Returns the torch optimizer in a wrapper without hooks of its own: Accelerate's, Lightning's, schedule-free's."""
    while True:
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "base", None)
        hooks, inside = [getattr(each, "_optimizer_step_post_hooks", None) for each in (optimizer, inner)]
        if inner is optimizer or not hasattr(inner, "param_groups") or (hooks is not None and hooks is not inside):
            return optimizer
        optimizer = inner


class Optimizers(Watch):
    """The user's optimizers, which may be created later or replaced: their momentum, rates, clipping and loss scale.

    ``now`` returns the optimizers, or is None if the user passed none; ``held_by_optimizers`` maps members of buckets
    to the tensors that optimizers hold for them.
    """

    def __init__(
        self,
        now: GetOptimizers | None,
        scaler: torch.amp.GradScaler | None,
        config: TopKConfig,
        buckets: Buckets,
        held_by_optimizers: Callable[[Collection[Tensor]], Collection[Tensor]],
        passes: Passes,
        say: WarnOnce,
        clipping: UserClipping,
    ) -> None:
        self._getter, self._buckets, self._held_by_optimizers = now, buckets, held_by_optimizers
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        super().__init__(config, say, passes, now is not None, self._scaler is not None)
        self.clipping = clipping
        self.rates: Rates | None = None
        """The learning rates of this pass; None if no optimizer is known."""
        self._first_group: dict[int, int] = {}  # by id of an optimizer, the number of its first group in `rates`
        self._same = True  # whether the ranks' optimizers have the same parameters
        self.adapted: Collection[Tensor] = ()
        """Parameters that the last pass compressed, or will compress if it has not ended."""
        self._groups: list[list[int]] = []  # ids of the parameters in each group of the watched optimizers
        self._members: Collection[Tensor] = ()  # that the buckets may compress; for `compressed`
        self.renewed = False
        """Whether optimizers were replaced or got parameters; the adapter that reads it resets it."""
        self._unchecked = False  # whether that happened after the last pass began
        self._elsewhere: set[str] = set()  # parameters that only other ranks' optimizers had at attach

    def _now(self) -> list[Optimizer]:
        """The current optimizers."""
        return [] if self._getter is None else [*map(unwrapped, _listed(self._getter()))]

    def updated(self) -> set[Tensor]:
        """The parameters that the optimizers update."""
        return {p for each in self._now() for p in all_parameters(each)}

    @property
    def scale(self) -> Tensor | None:
        """The scalar by which the loss is multiplied; None without a GradScaler."""
        return None if self._scaler is None else self._scaler._scale

    def _names(self) -> dict[Tensor, str]:
        """The names of all parameters."""
        names = self._buckets.names
        return dict(zip(self._held_by_optimizers(names), names.values(), strict=True))

    def start(self, exist: bool, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Compares the optimizers of all ranks, and checks them if they ``exist`` already. A collective, at attach.

        If a function returns them, they are compared only if all ranks have some already. If a step were adapted on
        some ranks only, their weights would drift apart.
        """
        if self._config.compresses:
            now, names, where = list[Optimizer](), self._names(), (device, group)
            with nullcontext() if exist else suppress(Exception):  # the function may fail until they exist
                now = self._now()
            if not all(gathered(exist or bool(now), *where)) and not exist:
                now = []
            kinds = [type(each).__name__ for each in now] or ("missing" if exist else "a function")
            same = {"optimizer=": kinds, "max_norm=": self.clipping.max_norm}
            check_agreement(same, "Pass the same optimizer= and max_norm= on every rank.", *where)
            mine = {names[p]: type(each).__name__ for each in now for p in all_parameters(each) if p in names}
            rows = gathered([*mine], *where)
            every = set[str]().union(*rows)
            if sum(map(len, rows)) > len(every):  # ZeroRedundancyOptimizer's inner optimizers share the parameters
                steps = {f"the optimizer of {name!r}": kind for name, kind in mine.items()}
                check_agreement(steps, "Pass the same optimizer= on every rank.", *where)
            self._elsewhere, self._same = every - mine.keys(), all({*row} == every for row in rows)
            if not self._same and self._config.waits:
                self._say(
                    "lightning_topk: the ranks' optimizers have different parameters, as with ZeroRedundancyOptimizer. "
                    "So residuals do not follow changes of the learning rate, and training may end behind DDP's. If "
                    "memory allows, use an optimizer that has all parameters on every rank."
                )
        self._find_groups(self.sync() if exist else [])  # even if there are none, parameters may be clipped together

    def begin_pass(self) -> None:
        """Begins a backward pass that is exchanged."""
        optimizers = self.sync()
        self.exchanged = self._pending = True
        for each in self.watched:
            each.due = True
        self.adapted = self.compressed
        if self._unchecked:  # not in `sync`: Fabric sets up optimizers one after the other
            self._unchecked = False
            self._warn_of_idle(self.updated(), self.compressed)
        if self.rates is not None:
            now = tuple(rate_of(group) for each in optimizers for group in each.param_groups)
            if len(now) != len(self.rates.now):
                self._find_groups(optimizers)
            elif now != self.rates.now:
                self.rates = self.rates._replace(now=now)
        self.clipping.begin_pass(optimizers)

    def clip(self, optimizer: Any, max_norm: float, clip: Callable[[float], Tensor]) -> Tensor:
        """See :meth:`.UserClipping.clip`."""
        return self.clipping.clip(unwrapped(optimizer), max_norm, clip)

    def expect_all_of(self, bucket: Bucket) -> None:
        """Stops adapting a bucket that is delivered whole: with FSDP2, its step may come before the pass ends."""
        self.adapted = frozenset(self.adapted).difference(self._held_by_optimizers(bucket))

    @override
    def stepped(self, optimizer: Optimizer) -> None:
        """Notes the rates of a step, and whether its gradients were clipped."""
        self._passes.collect()  # now, in this stream: a user may read it before the next pass begins
        first = self._first_group.get(id(optimizer))
        if self.rates is not None and first is not None:
            last = [*self.rates.last]
            for number, group in enumerate(optimizer.param_groups[: len(last) - first], first):
                last[number] = rate_of(group)
            self.rates = self.rates._replace(last=tuple(last))
        self.clipping.stepped(optimizer)

    @override
    def end_pass(self) -> None:
        super().end_pass()
        several = [each for known in self.watched if (each := known.optimizer()) is not None]
        self.clipping.end_pass(several, self.scale)

    def _find_groups(self, optimizers: Sequence[Optimizer]) -> None:
        """Finds the parameter group of each member of the buckets."""
        names, numbers, count = self._buckets.names, dict[Tensor, int](), 0
        self._first_group.clear()
        for each in optimizers:
            self._first_group[id(each)] = first = count
            count += len(each.param_groups)
            for number, group in enumerate(each.param_groups, first):
                numbers |= dict.fromkeys(group["params"], number)
        held = self._held_by_optimizers(names)
        members = [*zip(names, held, strict=True)]
        known = {member: numbers[p] for member, p in members if p in numbers}
        if any(getattr(group.get("lr"), "is_cuda", False) for each in optimizers for group in each.param_groups):
            self._say.note(
                "lightning_topk: an optimizer's lr is a tensor on a GPU, and is not read, since that would synchronize "
                "with the GPU. So residuals do not follow changes of the lr. Use a float if they should."
            )
        rates = tuple(rate_of(group) for each in optimizers for group in each.param_groups)
        self.rates = Rates(known, rates, (None,) * len(rates)) if known and self._same else None
        self.clipping.find(optimizers, dict(members))

    def sync(self) -> list[Optimizer]:
        """Checks the optimizers before every backward pass; adapts the momentum and watches the steps of new ones.

        Returns the optimizers.
        """
        now, members = self._now(), self._buckets.compressed
        if members is not self._members:
            self._members, self.compressed = members, frozenset(self._held_by_optimizers(members))
        groups = [[*map(id, group["params"])] for each in now for group in each.param_groups]
        same = [*map(id, now)] == [id(each.optimizer()) for each in self.watched] and groups == self._groups
        if self._config.momentum or not same:
            check_optimizers(self._config, now)  # also known ones: checkpoints and schedulers set momentum
        if same:
            return now
        AdaptedMomentum.release(self)
        if self._config.adapts_momentum:
            ours = [each for each in now if not frozenset(self.compressed).isdisjoint(all_parameters(each))]
            notes, warnings = adapt_momentum(ours, self)
            self._say.note(*notes)
            self._say(*warnings)
        self.watch(now)
        self._groups, self.renewed, self._unchecked = groups, True, bool(now) and self._config.compresses
        self._find_groups(now)
        return now

    @override
    def close(self) -> None:
        """Stops adapting and watching the optimizers."""
        AdaptedMomentum.release(self)
        super().close()

    def _warn_of_idle(self, updated: set[Tensor], compressed: Collection[Tensor]) -> None:
        """Warns of trained parameters that no optimizer updates, or that optimizers update only as copies."""
        names = self._names()
        trained = [p for p in names if p.requires_grad and p in compressed]
        idle = [names[p] for p in trained if p not in updated and names[p] not in self._elsewhere]
        if not idle:
            return
        found = f"{len(idle)} of {len(trained)} trained parameters ({idle[0]!r} for one) are in no optimizer"
        remedy = "add them to an optimizer (attach takes a list of several), or freeze them with requires_grad_(False)"
        if updated.difference(names):
            self._say(
                f"lightning_topk: {found}, but optimizers have tensors outside the model. If these are copies, such as "
                "fp32 copies of bf16 parameters, their momentum is not adapted, and training may end behind DDP's: use "
                f"fp32 parameters and autocast (in Lightning precision='bf16-mixed'). If not, {remedy}."
            )
        else:
            self._say(
                f"lightning_topk: {found} that was passed to attach. Unless another one updates them and zeroes their "
                f"gradients, these grow in every step and displace others in the payloads: {remedy}. If fine-tuning "
                "has unfrozen them with train_bn=False, pass train_bn=True."
            )


def check_optimizers(config: TopKConfig, optimizers: Iterable[Optimizer]) -> None:
    """Refuses LBFGS, and momentum if the configuration applies it before compression."""
    for optimizer in optimizers:
        if config.compresses and isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates its closure several times per step and compares the gradients, but compression "
                "delivers a different part of the gradient each time, so training would diverge. Pass "
                "topology='dense', which sends whole gradients, or use another optimizer."
            )
        for group in optimizer.param_groups if config.momentum else ():
            if own := momentum_of(group):
                raise ValueError(
                    f"momentum={config.momentum!r} is applied on the workers, before compression, but "
                    f"{type(optimizer).__name__} has momentum {own!r} of its own and would apply it again. Use "
                    "torch.optim.SGD(..., momentum=0) or AdamW(..., betas=(0, 0.999)), or remove momentum= from the "
                    "strategy. If you made the optimizer without momentum, a checkpoint or a scheduler such as "
                    "OneCycleLR (cycle_momentum=False) has set it."
                )
