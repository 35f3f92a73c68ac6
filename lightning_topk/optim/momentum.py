"""Adapts the momentum of torch's optimizers to gradients that are delivered entry by entry.

Problem. An entry that is not delivered in a step has no gradient in that step, but the optimizer's momentum still moves
it, for many steps and on old information. Its next gradient is a sum of gradients measured along the way. Error
feedback and momentum each add a delay; together they are stable only at a much smaller learning rate. If weight decay
is part of the gradient, Adam's second moment then holds nothing else, and Adam moves the entry by the learning rate.

Rule. An entry stands still until it is delivered. Then it takes all the steps since its last delivery at once: the
first with the delivered gradient, the others with a gradient of zero. Let m be the optimizer's momentum, b its momentum
buffer, g the delivered gradient, a the weight of g (1 - dampening for SGD, 1 - m for Adam), and D the number of steps
since the last delivery, or since the parameter's first step, including that step::

    delivered       v = m b + a g
                    the optimizer moves the entry by (1 + m + ... + m^(D-1)) v instead of v
                    b = m^(D-1) v
    not delivered   b and the entry stay

If D is 1, this is the optimizer's own step. In total, each gradient moves the entry by as much as in dense training,
however long the entry waits before and after it, and b is the velocity of the remaining movement. So a checkpoint of
the optimizer holds true velocities, and a run can continue from it with DDP.

Adam's second moment q decays by a factor n in each step, and Adam divides by it right after a delivery, when it is
largest. The longer the entry has waited and the shorter the memory 1 / (1 - n), the larger q is. So a delivered
gradient counts in q as D gradients with the same total energy, one in each of the D steps, with squares g^2 / D::

    q = n^D q + (1 - n^D) g^2 / D    instead of    n^D q + (1 - n) g^2

If n is near 1, or D is 1, both are the same. Adamax steps as in torch, since its q is not a mean. NAdam also moves an
entry by a part of the gradient itself; there it takes g sqrt((1 - n^D) / (D (1 - n))), the root of what enters q.

Agreement. This is right if the D gradients are noise: their sum is sqrt(D) times as large as one of them. Where they
agree, the sum is D times as large, and the entry would move only 1 / sqrt(D) as far as in dense training. If they have
mean mu and standard deviation sigma, and r = D mu^2 / sigma^2, the mean of their squares is
(g^2 / D) (1 + r / D) / (1 + r). So an entry moves further, by the root of g^2 / D over this mean::

    sqrt((1 + r) / (1 + r / D))    if g has the sign of b, else 1

Signs estimate r, with the same bits on all ranks. Among a parameter's deliveries with D in the same range (powers of
two), let s be the surplus of equal signs: the running mean of 1 if g has the sign of b, else -1. Then
r = pi artanh(s). If all entries have the same r, s = erf(sqrt(r / 2))^2, about 1 - exp(-2 r / pi). If a share p agrees
and the rest is noise, s = p, and of the entries whose signs are equal now, a share 2 p / (1 + p) agrees: with this in
place of s, the approximation gives pi artanh(p). q stays, so that early deliveries, made before any sign was known, do
not count too much later. Where eps is larger than sqrt(q), the step hardly depends on q, and the factor falls to 1.

Weight decay w of the parameter x. AdamW's is not part of the gradient, and stays. If it is part of the gradient:

- Adam, NAdam, RAdam and Adamax add the decay of all D steps to the delivered gradient: v = m b + a (g + D w x).
- SGD is linear, so its decay need not wait. If D is 1, v = m b + a (g + w x), as in torch. Any other step multiplies
  the entry by the factor :func:`kept`, whether it is delivered or not: what dense training keeps of a weight in each
  step once its momentum is steady.

Method. The optimizer's own ``step()`` runs on a temporary momentum buffer and, for Adam, a temporary gradient, which
make it do this. So all options of the optimizers keep working. One launch updates all own buffers. On a CPU, torch's
fused steps take a third of the time of its default ones; they are used where the user left the choice to torch.

Each change for a step pushes its inverse onto a stack, and the post-hook runs all of them. If the step fails, no hook
runs: then the next ``state_dict()`` or step runs all but the inverses meant for success only. The states of a step:

===================  ==========  =========  =============================  ===========================================
what                 before      during     after                          after a failure, once the stack is popped
===================  ==========  =========  =============================  ===========================================
momentum buffer      own         temporary  own                            own
SGD's first buffer   none        torch's    0 where nothing was delivered  as torch leaves it
gradient             own         temporary  own                            temporary: others may have been added to it
decay that waits     the user's  0          the user's                     the user's
choice of the step   the user's  fused      the user's                     the user's
temporary memory     idle        in use     idle; on a GPU freed           left to the gradients, replaced by new
===================  ==========  =========  =============================  ===========================================
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer, RAdam

from lightning_topk.core import ops
from lightning_topk.core.ops import reference
from lightning_topk.core.ops.reference import Rule, Stepped

_BUFFERS: dict[type[Optimizer], str] = {SGD: "momentum_buffer"} | dict.fromkeys((Adam, NAdam, RAdam, Adamax), "exp_avg")
_NO_STATE: dict[str, Any] = {}
_USER_CHOSE_NONE = {"fused": None, "foreach": None, "differentiable": False}.items()
"""Options of a group with which torch chooses the implementation of its step."""
_STEPS = {inspect.unwrap(kind.step): name for kind, name in _BUFFERS.items()}
"""Supported steps (AdamW shares Adam's) and the names of their momentum buffers."""
ADAPTED = "SGD, Adam, AdamW, NAdam, RAdam and Adamax"
"""Their names, in messages."""


class AdaptedMomentum:
    """Adapts the momentum of one of torch's optimizers. Use :meth:`of`: there is one instance per optimizer.

    It holds one byte per entry: the steps since the entry was delivered, up to 255. An entry that waits longer takes
    255 steps; the rest of its movement, a share of m^255, follows with later deliveries. A resumed run treats all
    entries as delivered in the step before, which only postpones movement to their next delivery; ``load_state_dict``
    in a running process keeps the bytes.
    """

    _instances: ClassVar[WeakKeyDictionary[Optimizer, AdaptedMomentum]] = WeakKeyDictionary()

    def __init__(self, optimizer: Optimizer) -> None:
        self.requesters: WeakSet[Any] = WeakSet()
        """See :func:`adapt_momentum`."""
        self.members: dict[Tensor, _Member] = {}
        """The adapted parameters that have had a gradient, each with its step counts, ``waited``."""
        self._inverses: list[tuple[Callable[[], None], bool]] = []  # undo a step's changes; whether only after success
        self._prepared: _Prepared | None = None  # valid until a step has other tensors, or fails
        self._agreements: dict[torch.device, list[_Agreements]] = {}
        self._name = _steps_as(type(optimizer)) or ""
        optimizer.register_step_pre_hook(self._before_step)
        restore = optimizer.register_step_post_hook(self._restore)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(restore.id, last=False)  # before users' hooks, which see the true state
        optimizer.register_state_dict_pre_hook(lambda _: self._restore(failed=True))

    @classmethod
    def of(cls, optimizer: Optimizer) -> AdaptedMomentum:
        """Returns the instance of an optimizer, and creates it if needed."""
        if optimizer not in cls._instances:
            cls._instances[optimizer] = cls(optimizer)
        return cls._instances[optimizer]

    @classmethod
    def release(cls, requester: Any) -> None:
        """Stops adapting momentum for a requester, see :func:`adapt_momentum`."""
        for each in cls._instances.values():
            each.requesters.discard(requester)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives the step a closure that adapts it: after all pre-hooks, and after the user's own closure if any."""
        theirs = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def closure() -> Any:
            loss = theirs() if callable(theirs) else None
            self._adapt(optimizer)
            return loss

        return (args[:1], {**kwargs, "closure": closure})

    @_disable_dynamo  # for torch.compile(optimizer.step); torch.compiler.disable imports dynamo at once
    @torch.no_grad()
    def _adapt(self, optimizer: Optimizer) -> None:
        """Changes a step when gradients are ready and before parameters change.

        The optimizer gets temporary momentum buffers and, where its rule needs them, temporary gradients.
        """
        self._undo(failed=True)  # if the previous step failed
        every, state = all_parameters(optimizer), optimizer.state
        scale, skipped = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        to_adapt = set[Tensor]().union(*(getattr(each, "adapted", every) for each in self.requesters))
        groups = list[_Group]()
        for options in optimizer.param_groups:
            adapted = [p for p in options["params"] if p in to_adapt] if momentum_of(options) else []
            if not adapted:
                continue
            rule, whole = rule_of(options), len(adapted) == len(options["params"])
            groups.append(_Group(options, rule, adapted, whole and options.items() >= _USER_CHOSE_NONE))
            if rule.waits:
                self._replace([options], "weight_decay", [0.0])  # the decay is in the gradients of this step
                for p in () if whole else options["params"]:
                    if p.grad is not None and p not in to_adapt:
                        scaled = p if scale is None else p * scale  # a fused step divides gradients by it
                        self._replace([p], "grad", [p.grad.add(scaled, alpha=rule.sign * rule.decay)])
        parameters = [p for group in groups for p in group.adapted]
        for p in parameters:
            if p.grad is not None and p.grad.is_sparse:  # with nesterov, torch adds the buffer to it
                self._replace([p], "grad", [p.grad.to_dense()])
        gradients, states = [local_part(p.grad) for p in parameters], [state.get(p, _NO_STATE) for p in parameters]
        objects = [*parameters, *states, *chain.from_iterable(map(dict.values, states))]
        formats = (
            [(len(group.adapted), group.free, group.rule.form) for group in groups],
            [None if g is None else (g.dtype, g.device, g.stride()) for g in gradients],
            [(x.dtype, x.device, x.stride(), x.data_ptr()) for x in map(local_part, parameters)],
        )
        if self._prepared is None or not self._prepared.is_for(objects, formats):
            self._prepared = None  # frees its memory before more is allocated
            self._prepared = self._prepare(groups, state, objects, formats)
        now, count = self._prepared, len(self._prepared.members)
        for table in chain.from_iterable(self._agreements.values()):
            ops.fold_signs_(*table.tensors)
        temporary = now.temporary.allocated()
        now.catch_up([g for g in gradients if g is not None], [group.rule for group in groups], scale, skipped)
        for number in now.fused:
            self._replace([groups[number].options], "fused", [True])
        self._replace(now.replaced, "grad", temporary[count:])
        self._replace([each.state for each in now.members], self._name, temporary[:count])
        first = [each for each in now.members if each.first]
        if first and isinstance(optimizer, SGD):
            self._inverses.append((partial(_forget_undelivered, state, first), True))

    def _prepare(
        self, groups: Sequence[_Group], state: Mapping[Tensor, Any], objects: list[Any], formats: Any
    ) -> _Prepared:
        """Prepares all steps that have these objects and formats."""
        members, replaced, fused = list[tuple[_Member, int]](), list[Tensor](), list[int]()
        for number, (_, rule, adapted, free) in enumerate(groups):
            for p in (each for each in adapted if each.grad is not None):
                self.members[p] = self._member(p, state.get(p, {}))
                members.append((self.members[p], number))
                replaced += [p] if rule.replaces else []
            if free and all(p in self.members and self.members[p].may_fuse() for p in adapted):
                fused.append(number)
        every = [p for group in groups for p in group.adapted]
        if len(self.members) > len(every):  # parameters were removed
            self.members = {p: self.members[p] for p in every if p in self.members}
        temporary, several = _Temporary([each.own for each, _ in members] + replaced), list[Stepped]()
        gradients = iter(temporary.tensors[len(members) :])
        for (each, number), out in zip(members, temporary.tensors, strict=False):
            rule = groups[number].rule
            x, gradient = each.p if rule.decays else None, next(gradients) if rule.replaces else None
            if rule.has_squares:
                each.agreement = each.agreement or self._agreement(each.waited.device)
            signs = each.agreement if rule.has_squares and each.agreement else (None, None)
            found = each.own, each.waited, each.p.grad, out, x, gradient, *signs, number
            several.append(Stepped._make(map(local_part, found)))
        catch_up = ops.CatchUp(several, [group.rule for group in groups])
        return _Prepared(objects, formats, [each for each, _ in members], replaced, fused, temporary, catch_up)

    def _member(self, p: Tensor, state: dict[str, Any]) -> _Member:
        """Returns the member of a parameter, made from its state in the optimizer."""
        own = state.get(self._name)
        if own is None:  # its first step; momentum is zero
            return _Member(p, None, torch.zeros_like(p), None)
        if own.is_sparse:  # from steps before it was adapted
            own = state[self._name] = own.to_dense()
        return _Member(p, state, own, self.members.get(p))

    def _agreement(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the rows of a table, r and counts of signs, for one more parameter on a device."""
        tables = self._agreements.setdefault(device, [])
        if not tables or not tables[-1].unused:
            tables.append(_Agreements(device))
        return tables[-1].unused.pop()

    def _replace(self, holders: Sequence[Any], name: str, values: Sequence[Any]) -> None:
        """Replaces an item of groups or states, or the ``grad`` of parameters, until the step ends."""
        gradients = name == "grad"
        own = [each.grad if gradients else each.get(name) for each in holders]
        self._inverses.append((partial(_put, holders, name, own), gradients))
        _put(holders, name, values)

    @_disable_dynamo
    @torch.no_grad()
    def _restore(self, *_: Any, failed: bool = False) -> None:
        self._undo(failed)

    def _undo(self, failed: bool) -> None:
        """Undoes the changes of a step, last first; with ``failed``, those that a failed step has left."""
        if failed and self._inverses:  # new gradients may have been added into temporary ones: keep their memory
            self._prepared = None
        while self._inverses:
            inverse, only_after_success = self._inverses.pop()
            if not (failed and only_after_success):
                inverse()
        if self._prepared is not None:
            self._prepared.temporary.free()


def _put(holders: Sequence[Any], name: str, values: Sequence[Any]) -> None:
    put = setattr if name == "grad" else operator.setitem
    for holder, value in zip(holders, values, strict=True):
        put(holder, name, value)


def _forget_undelivered(state: Mapping[Tensor, Any], members: Sequence[_Member]) -> None:
    """Zeroes SGD's first buffer where nothing was delivered: it is a copy of the gradient with weight decay."""
    for member in members:
        if (buffer := state.get(member.p, {}).get(_BUFFERS[SGD])) is not None:
            local_part(buffer).masked_fill_(member.waited != 0, 0)


class _Group(NamedTuple):
    """A parameter group in a step."""

    options: dict[str, Any]
    rule: Rule
    adapted: list[Tensor]
    free: bool  # whether its step may be fused: the user chose no form, and it has no unadapted parameters


class _Prepared(NamedTuple):
    """What all steps with the same tensors, formats of gradients and forms of rules have in common.

    ``replaced`` are the parameters that get a temporary gradient, ``fused`` the numbers of groups whose step is fused.
    """

    objects: list[Any]
    formats: tuple[Any, ...]
    members: list[_Member]
    replaced: list[Tensor]
    fused: list[int]
    temporary: _Temporary
    catch_up: ops.CatchUp

    def is_for(self, objects: Sequence[Any], formats: tuple[Any, ...]) -> bool:
        """Whether it fits a step with these objects and formats."""
        same = len(objects) == len(self.objects) and all(map(operator.is_, objects, self.objects))
        return same and formats == self.formats


class _Member:
    """An adapted parameter, its state in the optimizer (None before its first step), and its own momentum buffer.

    ``before`` is the parameter's previous member, whose step counts and agreement continue if they fit the buffer.
    """

    def __init__(self, p: Tensor, state: dict[str, Any] | None, own: Tensor, before: _Member | None) -> None:
        self.p, self.first, self.state, self.own = p, state is None, {} if state is None else state, own
        local = local_part(own)
        self.waited = torch.zeros_like(local, dtype=torch.uint8)  # D - 1 of each entry
        self.agreement: tuple[Tensor, Tensor] | None = None  # r and counts of signs, see `Stepped`
        if before and (before.waited.shape, before.waited.device) == (local.shape, local.device):
            self.waited, self.agreement = before.waited, before.agreement
        moments = [x for name, x in self.state.items() if name != "step"]
        steps = [x for name, x in self.state.items() if name == "step"]
        self._fusible = not self.first and _fusible(local.shape, *moments) and _fusible(torch.Size(), *steps)

    def may_fuse(self) -> bool:
        """Whether a fused step can take its tensors: torch's, on a CPU, checks neither shapes nor strides."""
        p, gradient = self.p, self.p.grad
        return self._fusible and _fusible(self.waited.shape, p, p if gradient is None else gradient)


class _Agreements:
    """How much the gradients of each parameter agree, in one table on a device: r, and running counts of signs.

    ``unused`` has the rows that no parameter uses yet: r and the counts of a step, as in :class:`.Stepped`.
    """

    SIZE = 256

    def __init__(self, device: torch.device) -> None:
        zeros = partial(torch.zeros, self.SIZE, device=device)  # with a dtype, since Lightning may change the default
        counts, fresh = (zeros(2 * reference.RANGES, dtype=dtype) for dtype in (torch.float32, torch.int32))
        ratio = zeros(reference.RANGES, dtype=torch.float32)
        self.tensors = counts, fresh, ratio  # see fold_signs_
        self.unused = [*zip(ratio, fresh, strict=True)]


def _fusible(shape: torch.Size, *several: Tensor) -> bool:
    for x in several:
        plain = type(x) in (Tensor, Parameter) and x.dtype == torch.float32 and x.layout == torch.strided
        if not plain or x.is_cuda or not x.is_contiguous() or x.shape != shape:
            return False
    return True


ALIGNED = 64
"""Temporary tensors begin at multiples of so many elements, so that kernels load several at once."""


class _Temporary:
    """Tensors for a step: one storage per device and dtype. GPU memory exists only during the step.

    CPU memory stays. Otherwise the system would map every page anew, which takes four times as long as all else here.
    """

    def __init__(self, models: Sequence[Tensor]) -> None:
        """Makes uninitialized ``tensors`` of the shapes and memory formats of ``models``."""
        parts, begins, ends = [*map(local_part, models)], list[int](), Counter[tuple[torch.device, torch.dtype]]()
        for part in parts:
            begins.append(ends[part.device, part.dtype])
            ends[part.device, part.dtype] += -(-part.numel() // ALIGNED) * ALIGNED
        flat = {kind: torch.empty(end, dtype=kind[1], device=kind[0]) for kind, end in ends.items()}
        self._sizes = {each.untyped_storage(): each.untyped_storage().nbytes() for each in flat.values()}
        self.tensors = list[Tensor]()
        for model, part, begin in zip(models, parts, begins, strict=True):
            strides = torch.empty_like(part, device="meta").stride()
            view = flat[part.device, part.dtype].as_strided(part.shape, strides, begin)
            self.tensors.append(_as_sharded(view, model))

    def allocated(self) -> list[Tensor]:
        """Returns the tensors, with their memory allocated."""
        for storage, size in self._sizes.items():
            if storage.nbytes() != size:  # else torch would copy it
                storage.resize_(size)
        return self.tensors

    def free(self) -> None:
        """Frees a GPU's memory."""
        for storage in self._sizes:
            if storage.device.type != "cpu":
                storage.resize_(0)


def adapt_momentum(optimizers: Iterable[Optimizer], requester: Any) -> tuple[list[str], list[str]]:
    """Adapts the momentum of optimizers, until :meth:`AdaptedMomentum.release` is called or the requester is gone.

    The requester exchanges their gradients. At each step, its ``adapted`` holds the compressed parameters; without such
    an attribute all are. Returns information about adapted momentum, and warnings about momentum that is not adapted,
    or that several requesters share.
    """
    notes, warnings = [], []
    for optimizer in optimizers:
        kind, has_momentum = type(optimizer), any(map(momentum_of, optimizer.param_groups))
        name, adapts = kind.__name__, _steps_as(kind) is not None
        if adapts:
            requesters = AdaptedMomentum.of(optimizer).requesters
            requesters.add(requester)
            if len(requesters) > 1:
                warnings.append(
                    f"lightning_topk: {name} steps several attached models, but each exchange knows only the gradients "
                    "of its own model. If you clip their joint norm, residuals count as clipped by the norm of one "
                    "model. Then put the models into one module under one wrapper, or give each its own optimizer."
                )
        if has_momentum and adapts:
            notes.append(
                f"lightning_topk: the momentum of {name} is adapted to compression. Keep the settings that you use "
                "with DDP: there is nothing to do. (adapt_momentum=False would leave the optimizer unchanged.)"
            )
        elif has_momentum:
            torchs = f"{kind.__module__}.".startswith("torch.optim.")  # Muon's is torch.optim
            remedy = (
                f" If {name} overrides the step of one of them, use that one, with hooks (register_step_pre_hook, "
                "register_step_post_hook) for the rest. If it wraps one, pass the inner optimizer."
            )
            warnings.append(
                f"lightning_topk: {name} keeps its own momentum, and training may end behind DDP's: only torch's "
                f"{ADAPTED} are adapted.{'' if torchs else remedy}"
            )
    return notes, warnings


def all_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _steps_as(kind: type) -> str | None:
    """The name of the momentum buffer of a class of optimizers; None if its ``step`` cannot be adapted."""
    return _STEPS.get(inspect.unwrap(getattr(kind, "step", object)))


def momentum_of(group: Mapping[str, Any]) -> Any:
    """The momentum of a parameter group, a number or a scalar tensor; 0 unless it is in (0, 1)."""
    betas = group.get("betas")
    momentum: Any = group.get("momentum") or (betas[0] if isinstance(betas, tuple | list) and betas else 0.0)
    number = isinstance(momentum, Real) or (isinstance(momentum, Tensor) and momentum.numel() == 1)
    return momentum if number and 0 < momentum < 1 else 0.0


def rule_of(group: Mapping[str, Any]) -> Rule:
    """The rule for the parameters of a group."""
    m, sgd, decay = _number(momentum_of(group)), "dampening" in group, _number(group["weight_decay"])
    a, sign = 1 - (_number(group["dampening"]) if sgd else m), -1 if group["maximize"] else 1
    n = _number(group["betas"][1]) if "decoupled_weight_decay" in group else 1.0  # 1 without a mean of squares
    eps = _number(group.get("eps", 0.0))
    if group.get("decoupled_weight_decay") or not (isinstance(decay, Tensor) or decay):
        return Rule(m, a, sign, squares=n, eps=eps)
    if not sgd:
        return Rule(m, a, sign, decay, waits=True, squares=n, eps=eps)
    nesterov = group["nesterov"]
    lr = _number(group["lr"]) + 1e-6  # not 0; so small an lr hardly changes the rate
    rate = (1 - kept(lr, m, a, decay, nesterov)) / lr
    # SGD's own step adds its decay once more (1 + m times with nesterov), and multiplies the buffer by m.
    steady = (rate - (1 + m) * decay) / m**2 if nesterov else (rate - a * decay) / m
    return Rule(m, a, sign, decay, steady)


def _number(x: Any) -> Any:
    """Converts a scalar tensor on the CPU to a number, which one launch can take; on a GPU, reading it would wait."""
    return x.item() if isinstance(x, Tensor) and x.device.type == "cpu" else x


def kept(lr: Any, momentum: Any, weight: Any, decay: Any, nesterov: bool) -> Any:
    """The factor by which each step of SGD multiplies a weight that only decays, once its momentum is steady.

    Each argument is a number or a scalar tensor. With momentum m, its buffer b, weight a of the gradient and decay w,
    decay alone is x' = x - lr b', b' = m b + a w x, so x'' = (1 + m - lr a w) x' - m x: the factor is the larger root
    of z^2 = (1 + m - lr a w) z - m. With nesterov, x' = x - lr (w x + m b') and a = 1, which gives
    z^2 = q ((1 + m) z - m), q = 1 - lr w. For small decay both are about 1 - lr a w / (1 - m). Where the roots are
    complex, dense training oscillates, and the factor is their magnitude.
    """
    lr, momentum, weight, decay = (
        each.to(torch.complex128) if isinstance(each, Tensor) else each for each in (lr, momentum, weight, decay)
    )
    q = 1 - lr * decay
    p, c = ((1 + momentum) * q, momentum * q) if nesterov else (1 + momentum - lr * weight * decay, momentum)
    return abs(p + (p * p - 4 * c) ** 0.5) / 2


def local_part(x: Any) -> Any:
    """This rank's shard of a DTensor; anything else itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def _as_sharded(local: Tensor, like: Any) -> Tensor:
    """Returns a DTensor with ``local`` as this rank's shard if ``like`` is a DTensor; else ``local``."""
    if not hasattr(like, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
