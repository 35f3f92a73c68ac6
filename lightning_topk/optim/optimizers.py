"""The user's optimizers, as the exchange uses them: their momentum, steps, learning rates and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
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
from lightning_topk.optim.applied import Clipping, Rates, rate_of
from lightning_topk.optim.momentum import AdaptedMomentum, adapt_momentum, all_parameters, local_part
from lightning_topk.optim.watch import Passes, Watch

GetOptimizers = Callable[[], Sequence[Optimizer]]
"""Returns the optimizers, which may be created later or replaced."""
MaxNorm = float | Sequence[float | None] | None
"""The norm to which the user clips the gradients of all parameters together, or one for each optimizer's."""
READ = (20, 100)
"""Steps of an optimizer after which their gradients' norms are read, to see whether they are clipped."""
ENDED = [torch.zeros(2)] * READ[-1]
"""In place of norms, if no more are measured."""


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
        with suppress(Exception):  # of a function that fails until they exist
            found = optimizer()
        _listed(found)
    return optimizer


def _listed(found: Any) -> list[Optimizer]:
    """What a user's function returned, as a list of optimizers."""
    several: list[Any] = [found] if _is_optimizer(found) else [*found] if isinstance(found, Iterable) else [None]
    if not all(map(_is_optimizer, several)):
        raise TypeError(
            f"the function optimizer= returned {found!r:.200}, but must return a list of torch optimizers; an empty "
            "one until they exist."
        )
    return several


def _is_optimizer(x: Any) -> bool:
    """Whether it is an optimizer of torch, or acts as one."""
    return isinstance(x, Optimizer) or (hasattr(x, "param_groups") and hasattr(x, "step"))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of torch inside a wrapper without hooks of its own: Accelerate's, Lightning's, schedule-free's."""
    while True:
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "base", None)
        hooks, inside = (getattr(each, "_optimizer_step_post_hooks", None) for each in (optimizer, inner))
        if inner is optimizer or not hasattr(inner, "param_groups") or (hooks is not None and hooks is not inside):
            return optimizer
        optimizer = inner


def check_max_norm(max_norm: Any) -> MaxNorm:
    """Refuses what is no norm and no list of norms."""
    several = max_norm if isinstance(max_norm, list | tuple) else [max_norm]
    if not all(each is None or (isinstance(each, Real) and not isinstance(each, bool)) for each in several):
        raise TypeError(f"max_norm={max_norm!r} must be a number, a list with one for each optimizer, or None.")
    if not all(each is None or each > 0 for each in several):
        raise ValueError(f"max_norm={max_norm!r} must be above 0. Leave it out if you do not clip gradients.")
    return max_norm


class Optimizers(Watch):
    """The user's optimizers, which may be created later or replaced: their momentum, rates, clipping and loss scale.

    ``now`` returns them, or is None if the user passed none; ``held_by_optimizers`` returns the parameters that
    optimizers hold of members of buckets.
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
        clipping: Clipping,
        max_norm: MaxNorm = None,
    ) -> None:
        self._getter, self._buckets, self._held_by_optimizers = now, buckets, held_by_optimizers
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        super().__init__(config, say, passes, now is not None, self._scaler is not None)
        self.clipping = clipping
        self._max_norm = max_norm
        self.first_limit = math.inf
        """The norm to which optimizers will be clipped in their first step, if that is known."""
        self._limits: dict[int, float] = {}  # by id of an optimizer, the norm to which it was clipped last
        self._clipped: set[int] = set()  # those that were clipped since their last step
        self._numbers: dict[Tensor, int] = {}  # of the optimizer of each member of a bucket, or 0 if one norm is of all
        self._covered: set[int] = set()  # those whose parameters are all exchanged here
        self._hints = config.compresses and config.error_feedback and max_norm is None and not say._rank
        self._norms: dict[int, list[Tensor]] = {}  # by id of an optimizer: in each step as stepped, and as delivered
        self._delivered: dict[int, Tensor] = {}  # by id of an optimizer, the norm when backward had ended
        self.clips = False
        """Whether the last pass clipped gradients in the exchange."""
        self.rates: Rates | None = None
        """The learning rates of this pass; None if no optimizer is known."""
        self._first_group: dict[int, int] = {}  # by id of an optimizer, the number of its first group in `rates`
        self._same = True  # whether the ranks' optimizers have the same parameters
        self.adapted: Collection[Tensor] = ()
        """Parameters that the last pass compressed, or will compress if it has not ended."""
        self._groups: list[list[int]] = []  # ids of the parameters in each group of the watched optimizers
        self._members: Collection[Tensor] = ()  # that the buckets may compress; `compressed` are theirs
        self.renewed = False
        """Whether they were replaced or got parameters; the adapter that reads it resets it."""
        self._elsewhere: set[str] = set()  # parameters that only other ranks' optimizers had at attach

    def _now(self) -> list[Optimizer]:
        """The user's optimizers now."""
        return [] if self._getter is None else [*map(unwrapped, _listed(self._getter()))]

    def updated(self) -> set[Tensor]:
        """The parameters that they update."""
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
        """Compares the optimizers on all ranks, and checks them if they exist by now. A collective, at attach.

        A step that is adapted on one rank only would move the ranks' weights apart.
        """
        if self._config.compresses:
            now, names, where = self._now() if exist else [], self._names(), (device, group)
            kinds = [type(each).__name__ for each in now] or ("missing" if exist else "a function")
            same = {"optimizer=": kinds, "max_norm=": self._max_norm}
            check_agreement(same, "Pass the same optimizer= and max_norm= on every rank.", *where)
            mine = {names[p]: type(each).__name__ for each in now for p in all_parameters(each) if p in names}
            rows = gathered([*mine], *where)
            every = set[str]().union(*rows)
            if sum(map(len, rows)) > len(every):  # ZeroRedundancyOptimizer's inner optimizers share the parameters
                steps = {f"the optimizer of {name!r}": kind for name, kind in mine.items()}
                check_agreement(steps, "Pass the same optimizer= on every rank.", *where)
            self._elsewhere, self._same = every - mine.keys(), all({*row} == every for row in rows)
            if not self._same and self._config.error_feedback:
                self._say(
                    "lightning_topk: the ranks' optimizers have different parameters, as ZeroRedundancyOptimizer's do. "
                    "So what waits does not follow changes of the learning rate, and training may end behind DDP's. "
                    "Use an optimizer that has all parameters on every rank, if memory allows."
                )
        if exist:
            self.sync()

    @override
    def begin_pass(self) -> None:
        optimizers = self.sync()
        super().begin_pass()
        self.adapted = self.compressed
        if self.rates is not None:
            now = tuple(rate_of(group) for each in optimizers for group in each.param_groups)
            if len(now) != len(self.rates.now):
                self._find_groups(optimizers)
            elif now != self.rates.now:
                self.rates = self.rates._replace(now=now)
        self._tell_clipping(optimizers)

    def _tell_clipping(self, optimizers: Sequence[Optimizer]) -> None:
        """Tells the exchange to what norms the gradients of this pass will be clipped."""
        several: Any = self._max_norm
        if isinstance(several, Real):
            self._numbers = self._numbers or dict.fromkeys(self._buckets.names, 0)
            limits = [float(several)]
        else:
            known = several or [self._limits.get(id(each), self.first_limit) for each in optimizers]
            limits = [*(limit or math.inf for limit in known), math.inf]  # the last is that of other parameters
        self.clipping.tell(limits if min(limits) < math.inf else (), self._numbers)
        self.clipping.begin_pass()

    def clip(self, optimizer: Optimizer, max_norm: float, clip: Callable[[float], Tensor]) -> Tensor:
        """The user's clipping of an optimizer's gradients to a norm, by a function that returns the norm before.

        If the exchange has clipped them, they are not clipped again: what it delivers is a sum of clipped gradients.
        """
        each, ids = unwrapped(optimizer), [id(known.optimizer()) for known in self.watched]
        if id(each) not in ids:
            return clip(max_norm)
        number, limits = ids.index(id(each)), self.clipping.limits if self.clips else ()
        self._limits[id(each)] = max_norm
        self._clipped.add(id(each))
        done = bool(limits) and limits[number] == max_norm and id(each) in self._covered
        norm = clip(math.inf if done else max_norm)
        if limits:
            self.clipping.note(number, getattr(norm, "full_tensor", lambda: norm)())
        return norm

    def expect_all_of(self, bucket: Bucket) -> None:
        """Expects all of a bucket: with FSDP2, an optimizer may step its parameters before the pass ends."""
        self.adapted = frozenset(self.adapted).difference(self._held_by_optimizers(bucket))

    @override
    def stepped(self, optimizer: Optimizer) -> None:
        """Notes the rates of a step, and whether its gradients were clipped."""
        self._passes.collect()  # in the stream in which a user may read it before the next pass does
        first = self._first_group.get(id(optimizer))
        if self.rates is not None and first is not None:
            last = [*self.rates.last]
            for number, group in enumerate(optimizer.param_groups[: len(last) - first], first):
                last[number] = rate_of(group)
            self.rates = self.rates._replace(last=tuple(last))
        if id(optimizer) not in self._clipped:
            self._limits[id(optimizer)] = math.inf
            if (delivered := self._delivered.pop(id(optimizer), None)) is not None:
                self._look_for_clipping(optimizer, delivered)
        self._clipped.discard(id(optimizer))

    @override
    def end_pass(self) -> None:
        super().end_pass()
        several = [each for known in self.watched if (each := known.optimizer()) is not None]
        looking = [each for each in several if len(self._norms.setdefault(id(each), [])) < READ[-1]]
        if self._hints and looking and torch._C._current_graph_task_id() != -1:
            engine: Any = torch.autograd.Variable._execution_engine
            # At the end of backward, after the callback in which DDP copies to the gradients; it queues that one later.
            engine.queue_callback(lambda: engine.queue_callback(partial(self._note_delivered, looking)))

    @torch.no_grad()
    def _note_delivered(self, optimizers: Sequence[Optimizer]) -> None:
        """Notes the norms of optimizers' gradients before the user changes them."""
        for each in optimizers:
            gradients = _gradients(each)
            if any(g.is_sparse or local_part(g) is not g for g in gradients):
                self._norms[id(each)] = ENDED  # a rank does not know the norm of all shards
                self._delivered.pop(id(each), None)
            elif gradients:
                norm = torch.nn.utils.get_total_norm(gradients).float()
                self._delivered[id(each)] = norm if self.scale is None else norm / self.scale

    @torch.no_grad()
    def _look_for_clipping(self, optimizer: Optimizer, delivered: Tensor) -> None:
        """Says so if the user makes the gradients of the first steps smaller, to one norm again and again.

        ``delivered`` is the norm of this step's gradients when backward had ended: they may all have one by themselves.
        """
        gradients, norms = _gradients(optimizer), self._norms[id(optimizer)]
        if not gradients or getattr(optimizer, "grad_scale", None) is not None:
            return
        norms.append(torch.stack([torch.nn.utils.get_total_norm(gradients).float(), delivered]))
        if len(norms) not in READ:
            return
        found, near = torch.stack(norms).tolist(), max(1e-3, torch.finfo(gradients[0].dtype).eps)
        most = max(norm for norm, _ in found)
        alike = [before > norm * (1 + near) for norm, before in found if norm > most * (1 - near)]
        if len(alike) >= READ[0] // 2:
            self._norms[id(optimizer)] = ENDED
            if sum(alike) >= READ[0] // 2:
                self._say(
                    f"lightning_topk: your gradients are clipped to norm {most:.3g}: pass max_norm={most:.3g} to "
                    "attach, or what waits counts unclipped. With a strategy, clip by gradient_clip_val=, by "
                    "self.clip_gradients or by fabric.clip_gradients."
                )

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
        several = {p: number for number, each in enumerate(optimizers) for p in all_parameters(each)}
        one = isinstance(self._max_norm, Real)
        self._numbers = {member: 0 if one else several.get(p, len(optimizers)) for member, p in members}
        self._covered = {id(each) for each in optimizers if {*held}.issuperset(all_parameters(each))}

    def sync(self) -> list[Optimizer]:
        """Checks the optimizers; adapts momentum, and watches the steps, of new ones. Before every backward pass.

        Returns them.
        """
        now, members = self._now(), self._buckets.compressed
        if members is not self._members:
            self._members, self.compressed = members, frozenset(self._held_by_optimizers(members))
        groups = [[*map(id, group["params"])] for each in now for group in each.param_groups]
        same = [*map(id, now)] == [id(each.optimizer()) for each in self.watched] and groups == self._groups
        if self._config.momentum or not same:
            check_optimizers(self._config, now)  # also known ones: checkpoints and schedulers set momentum
        if isinstance(self._max_norm, Sequence) and now and len(now) != len(self._max_norm):
            raise ValueError(
                f"max_norm={self._max_norm!r} must have one norm for each of {len(now)} optimizers, or be one number, "
                "the norm to which the gradients of all are clipped together."
            )
        if same:
            return now
        AdaptedMomentum.release(self)
        if self._config.adapts_momentum:
            ours = [each for each in now if not frozenset(self.compressed).isdisjoint(all_parameters(each))]
            notes, warnings = adapt_momentum(ours, self)
            self._say.note(*notes)
            self._say(*warnings)
        self.watch(now)
        self._groups, self.renewed = groups, True
        self._find_groups(now)
        if now and self._config.compresses:
            self._warn_of_idle(self.updated(), self.compressed)
        return now

    @override
    def close(self) -> None:
        """Stops adapting and watching the optimizers."""
        AdaptedMomentum.release(self)
        super().close()

    def _warn_of_idle(self, updated: set[Tensor], compressed: Collection[Tensor]) -> None:
        """Names trained parameters that no optimizer updates, or only as copies."""
        names = self._names()
        trained = [p for p in names if p.requires_grad and p in compressed]
        idle = [names[p] for p in trained if p not in updated and names[p] not in self._elsewhere]
        if not idle:
            return
        found = f"{len(idle)} of {len(trained)} trained parameters ({idle[0]!r} for one) are in no optimizer"
        remedy = "add them to an optimizer (attach takes a list of several), or freeze them with requires_grad_(False)"
        if updated.difference(names):
            self._say(
                f"lightning_topk: {found}, which steps others than the model's. If these are copies, such as fp32 "
                "copies of bf16 parameters, their momentum is not adapted, and training may end behind DDP's: use fp32 "
                f"parameters and autocast (in Lightning precision='bf16-mixed'). If not, {remedy}."
            )
        else:
            self._say(
                f"lightning_topk: {found}: nothing updates them. Unless something zeroes their gradients, these grow "
                f"in every step and take the place of others in the payloads: {remedy}. If fine-tuning has unfrozen "
                "them with train_bn=False, pass train_bn=True."
            )


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's step."""
    return [p.grad for p in all_parameters(optimizer) if p.grad is not None]


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
            own = group.get("momentum") or (group.get("betas") or (0,))[0]
            if own:
                raise ValueError(
                    f"momentum={config.momentum!r} is applied on the workers, before compression, but "
                    f"{type(optimizer).__name__} has momentum {own!r} of its own and would apply it again. Use "
                    "torch.optim.SGD(..., momentum=0) or AdamW(..., betas=(0, 0.999)), or remove momentum= from the "
                    "strategy. If you made the optimizer without momentum, a checkpoint or a scheduler such as "
                    "OneCycleLR (cycle_momentum=False) has set it."
                )
