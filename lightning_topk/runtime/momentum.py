"""Adapts the momentum of torch's optimizers to gradients that are delivered entry by entry.

Problem. An entry that is not delivered in a step has no gradient in that step, but the optimizer's momentum still moves
it, for many steps and on old information. Its next gradient is a sum of gradients measured along the way. Error
feedback and momentum each add a delay; together they are stable only at a much smaller learning rate. Adam also divides
weight decay in the gradient by a second moment that then holds nothing else, and moves the entry by the learning rate.

Rule. An entry stands still until it is delivered. Then it takes all the steps since its last delivery at once: the
first with the delivered gradient, the others with a gradient of zero. With the optimizer's momentum m and momentum
buffer b, the gradient g, its weight a (1 - dampening for SGD, 1 - m for Adam), and D steps since the last delivery, the
first step of the parameter included::

    delivered       v = m b + a g
                    the optimizer moves the entry by (1 + m + ... + m^(D-1)) v instead of v
                    b = m^(D-1) v
    not delivered   b and the entry stay

If D is 1, this is the optimizer's own step. In the end each gradient moves the entry by as much as in dense training,
whatever the D before and after it, and b is the velocity of the movement to come. So a checkpoint of the optimizer
holds true velocities, and a run can continue from it with DDP.

Adam's second moment q fades by its factor n in each step, and is largest right after a delivery, when Adam divides by
it: the larger, the longer the entry has waited, and the shorter its memory 1 / (1 - n) is. So a delivered gradient
counts in it as D gradients of the same energy in all, one in each of the D steps, of squares g^2 / D::

    q = n^D q + (1 - n^D) g^2 / D    instead of    n^D q + (1 - n) g^2

If n is near 1, or D is 1, both are the same. Adamax, whose q is no mean, steps as in torch; NAdam also moves an entry
by a part of the gradient itself, and takes that of the one of the D gradients.

Weight decay w of the parameter x. AdamW's is apart from the gradient, and stays. If it is part of the gradient:

- Adam, NAdam, RAdam and Adamax take that of D steps with the gradient: v = m b + a (g + D w x).
- SGD is linear, so its decay need not wait. If D is 1, v = m b + a (g + w x), as in torch. Any other step multiplies
  the entry by r, whether it is delivered or not. r is how much dense training keeps of a weight in each step once its
  momentum has settled, see :func:`kept`.

Method. The optimizer's own ``step()`` runs on a temporary momentum buffer, and Adam's on a temporary gradient, that
make it do this; its own buffer is updated, and both are restored afterwards. So all options of the optimizers keep
working. One launch prepares all parameters. On a CPU, torch's fused steps take a third of the time of
its default ones; they run where the user left the choice to torch.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer, RAdam

from lightning_topk.core import ops
from lightning_topk.core.ops.reference import Rule, Stepped

_BUFFERS: dict[type[Optimizer], str] = {SGD: "momentum_buffer"} | dict.fromkeys((Adam, NAdam, RAdam, Adamax), "exp_avg")
_STEPS = {inspect.unwrap(kind.step): name for kind, name in _BUFFERS.items()}
"""Supported steps (AdamW shares Adam's) and the names of their momentum buffers."""
ADAPTED = "SGD, Adam, AdamW, NAdam, RAdam and Adamax"
"""Their names, in messages."""


class AdaptedMomentum:
    """Adapts the momentum of one of torch's optimizers. Use :meth:`of`: there is one instance per optimizer.

    It holds one byte per entry: the steps since the entry was delivered, up to 255. An entry that waits longer takes
    255 steps; the rest of the movement, m^255 of it, follows with later deliveries. A resumed run treats all entries as
    delivered in the step before, which only shifts movement to their next delivery; ``load_state_dict`` in a running
    process keeps the bytes.
    """

    _known: ClassVar[WeakKeyDictionary[Optimizer, AdaptedMomentum]] = WeakKeyDictionary()

    def __init__(self, optimizer: Optimizer) -> None:
        self.requesters: WeakSet[Any] = WeakSet()
        """See :func:`adapt_momentum`."""
        self._members: dict[Tensor, _Member] = {}
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []  # states and groups, names, and the own values
        self._gradients: list[tuple[Tensor, Tensor | None]] = []  # parameters with a lent gradient, and their own
        self._first: list[tuple[Tensor, _Member]] = []  # parameters in their first step
        self._lent = _Temporary()  # momentum buffers and gradients
        self._tables: dict[ops.Kind, dict[str, Any]] = {}  # see ops.catch_up_
        self._name = _steps_as(type(optimizer)) or ""
        optimizer.register_step_pre_hook(self._before_step)
        restore = optimizer.register_step_post_hook(self._restore)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(restore.id, last=False)  # before users' hooks, which see the true state
        optimizer.register_state_dict_pre_hook(self._restore_state)

    @classmethod
    def of(cls, optimizer: Optimizer) -> AdaptedMomentum:
        """Returns the instance of an optimizer, and creates it if needed."""
        if optimizer not in cls._known:
            cls._known[optimizer] = cls(optimizer)
        return cls._known[optimizer]

    @classmethod
    def release(cls, requester: Any) -> None:
        """Ends what :func:`adapt_momentum` began."""
        for each in cls._known.values():
            each.requesters.discard(requester)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adapts the step after all pre-hooks, and after its closure if it has one: puts another closure in place."""
        theirs = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def closure() -> Any:
            loss = theirs() if callable(theirs) else None
            self._adapt(optimizer)
            return loss

        return (args[:1], {**kwargs, "closure": closure})

    @_disable_dynamo  # for torch.compile(optimizer.step); torch.compiler.disable imports dynamo at once
    @torch.no_grad()
    def _adapt(self, optimizer: Optimizer) -> None:
        """Prepares a step, once gradients are ready and before parameters change."""
        self._restore_state()  # if the step before failed
        if self._gradients:  # new gradients may have been added into those lent to it: do not free their memory
            self._gradients.clear()
            self._lent = _Temporary()
        self._first.clear()
        every = parameters_of(optimizer)
        scale, skipped = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        asked = set[Tensor]().union(*(getattr(each, "adapted", every) for each in self.requesters))
        steps: list[tuple[Tensor, _Member, Rule]] = []
        known: list[Tensor] = []
        for group in optimizer.param_groups:
            adapted = [p for p in group["params"] if p in asked] if _momentum(group) else []
            if not adapted:
                continue
            rule, alone = rule_of(group), len(adapted) == len(group["params"])
            if rule.waits:
                self._replace(group, "weight_decay", 0.0)  # it is in the gradients of this step
                for p in () if alone else group["params"]:
                    if p.grad is not None and p not in asked:
                        scaled = p if scale is None else p * scale  # a fused step divides gradients
                        self._lend_gradient(p, p.grad.add(scaled, alpha=rule.sign * rule.decay))
            steps += [(p, self._member(p, optimizer), rule) for p in adapted if p.grad is not None]
            known += adapted
            free = [group.get(name, 0) for name in ("fused", "foreach", "differentiable")] == [None, None, False]
            members = self._members
            if free and alone and all(p in members and members[p].may_fuse(p) for p in adapted):
                self._replace(group, "fused", True)  # not where others step too: they must keep their bits
        if len(self._members) > len(known):  # parameters were removed
            self._members = {p: self._members[p] for p in known if p in self._members}
        self._step_buffers(steps, scale, skipped)

    def _step_buffers(
        self, steps: Sequence[tuple[Tensor, _Member, Rule]], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """Steps the momentum buffers, and lends the optimizer others, and the gradients that its rule asks for."""
        own = [member.own for _, member, _ in steps]
        made = iter(self._lent.like(own + [p for p, _, rule in steps if rule.lends]))
        buffers, several = [next(made) for _ in steps], []
        for (p, member, rule), buffer in zip(steps, buffers, strict=True):
            lent = next(made) if rule.lends else None
            several.append(member.stepped(p, buffer, lent, rule))
            if lent is not None:
                self._lend_gradient(p, lent)
            if member.state is not None:
                self._replaced.append((member.state, self._name, member.own))
                member.state[self._name] = buffer
            else:
                self._first.append((p, member))
        ops.catch_up_(several, scale, skipped, self._tables)

    def _member(self, p: Tensor, optimizer: Optimizer) -> _Member:
        """The member of a parameter, in agreement with its gradient and its state in the optimizer."""
        member, state = self._members.get(p), optimizer.state.get(p, {})
        own = state.get(self._name)
        if p.grad is not None and p.grad.is_sparse:  # with nesterov, torch adds the buffer to it
            self._lend_gradient(p, p.grad.to_dense())
        if own is None:  # its first step; momentum is zero
            member = _Member(p, None, torch.zeros_like(p), None)
        elif member is None or state is not member.state or own is not member.own:
            if own.is_sparse:  # of steps before it was adapted
                own = state[self._name] = own.to_dense()
            member = _Member(p, state, own, member.waited if member else None)
        self._members[p] = member
        return member

    def _replace(self, options: dict[str, Any], name: str, value: Any) -> None:
        """Replaces a part of the optimizer or of its state during the step."""
        self._replaced.append((options, name, options[name]))
        options[name] = value

    def _lend_gradient(self, p: Tensor, gradient: Tensor) -> None:
        """Replaces a parameter's gradient during the step."""
        self._gradients.append((p, p.grad))
        p.grad = gradient

    @_disable_dynamo
    @torch.no_grad()
    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        """Restores the optimizer's state and the gradients."""
        self._restore_state()
        for p, member in self._first if isinstance(optimizer, SGD) else ():
            # SGD's first buffer is a copy of the gradient, and has decay also where nothing was delivered.
            if (buffer := optimizer.state.get(p, {}).get(self._name)) is not None:
                local_part(buffer).masked_fill_(member.waited != 0, 0)
        self._first.clear()
        for p, gradient in reversed(self._gradients):
            p.grad = gradient
        self._gradients.clear()
        self._lent.free()

    def _restore_state(self, *_: Any) -> None:
        for options, name, own in reversed(self._replaced):
            options[name] = own
        self._replaced.clear()


class _Member:
    """An adapted parameter: its state (None before its first step), its own momentum buffer, and its step counts.

    ``waited`` has the step counts so far, uint8 of the buffer's shape; they are not used if they do not fit it.
    """

    def __init__(self, p: Tensor, state: dict[str, Any] | None, own: Tensor, waited: Tensor | None) -> None:
        self.state, self.own = state, own
        local = local_part(own)
        if waited is None or waited.shape != local.shape or waited.device != local.device:
            waited = torch.zeros_like(local, dtype=torch.uint8)
        self.waited = waited  # D - 1 of each entry
        self._buffer, self._kind = local, ops.kind_of(local, waited, local_part(p))
        tensors = state or {}
        shapes = {x.shape for name, x in tensors.items() if name != "step"}
        self._fusible = shapes == {local.shape} and all(map(_fusible, tensors.values()))

    def stepped(self, p: Tensor, buffer: Tensor, lent: Tensor | None, rule: Rule) -> tuple[Stepped, ops.Kind | None]:
        """The arguments of a step for :func:`lightning_topk.core.ops.catch_up_`."""
        assert p.grad is not None
        x, gradient = p, p.grad
        if self.own is not self._buffer:  # DTensors
            x, gradient, buffer = local_part(p), local_part(p.grad), local_part(buffer)
            lent = None if lent is None else local_part(lent)
        alike = ops.alike(x, self._buffer) and ops.alike(gradient, self._buffer) and gradient.dtype == x.dtype
        return Stepped(self._buffer, self.waited, gradient, buffer, x, lent, rule), self._kind if alike else None

    def may_fuse(self, p: Tensor) -> bool:
        """Whether a fused step can take a parameter; on a CPU it checks neither shapes nor strides."""
        tensors = [p] if p.grad is None else [p, p.grad]
        return self._fusible and all(x.shape == self._buffer.shape and _fusible(x) for x in tensors)


def _fusible(x: Tensor) -> bool:
    plain = type(x) in (Tensor, Parameter) and x.dtype == torch.float32 and x.layout == torch.strided
    return plain and not x.is_cuda and x.is_contiguous()


ALIGNED = 64
"""Elements between whose multiples temporary tensors begin, so that kernels load several at once."""


class _Temporary:
    """Tensors for a step: one storage per device and dtype. A GPU's memory exists only during the step.

    A CPU's stays, since the system would map every page anew: that takes four times as long as all else here.
    """

    def __init__(self) -> None:
        self._models: Sequence[Tensor] = ()
        self._made: list[Tensor] = []
        self._sizes: dict[torch.UntypedStorage, int] = {}

    def like(self, models: Sequence[Tensor]) -> list[Tensor]:
        """Returns uninitialized tensors of the shapes and memory formats of ``models``."""
        if len(models) != len(self._models) or not all(map(operator.is_, models, self._models)):
            self._models, self._made = models, self._views(models)
        for storage, size in self._sizes.items():
            if storage.nbytes() != size:  # else torch would copy it
                storage.resize_(size)
        return self._made

    def _views(self, models: Sequence[Tensor]) -> list[Tensor]:
        parts, begins, ends = [*map(local_part, models)], list[int](), Counter[tuple[torch.device, torch.dtype]]()
        for part in parts:
            begins.append(ends[part.device, part.dtype])
            ends[part.device, part.dtype] += -(-part.numel() // ALIGNED) * ALIGNED
        flat = {kind: torch.empty(end, dtype=kind[1], device=kind[0]) for kind, end in ends.items()}
        self._sizes = {each.untyped_storage(): each.untyped_storage().nbytes() for each in flat.values()}
        made = []
        for model, part, begin in zip(models, parts, begins, strict=True):
            strides = torch.empty_like(part, device="meta").stride()
            made.append(_as_sharded(flat[part.device, part.dtype].as_strided(part.shape, strides, begin), model))
        return made

    def free(self) -> None:
        """Frees a GPU's memory."""
        for storage in self._sizes:
            if storage.device.type != "cpu":
                storage.resize_(0)


def adapt_momentum(optimizers: Iterable[Optimizer], requester: Any) -> tuple[list[str], list[str]]:
    """Adapts the momentum of optimizers, until :meth:`AdaptedMomentum.release` is called or the requester is gone.

    The requester exchanges their gradients. At each step, its ``adapted`` holds the compressed parameters; without such
    an attribute all are. Returns information about adapted momentum, and warnings about momentum that is not.
    """
    notes, warnings = [], []
    for optimizer in optimizers:
        name, has_momentum = type(optimizer).__name__, any(map(_momentum, optimizer.param_groups))
        adapts = _steps_as(type(optimizer)) is not None
        if adapts:
            AdaptedMomentum.of(optimizer).requesters.add(requester)
        if has_momentum and adapts:
            notes.append(
                f"lightning_topk: the momentum of {name} is adapted to compression: an entry moves only when it is "
                "delivered, then for all the steps that it waited; adapt_momentum=False leaves the optimizer unchanged."
            )
        elif has_momentum:
            torchs = type(optimizer).__module__.startswith("torch.optim.")
            remedy = (
                ""
                if torchs
                else (
                    f" If {name} overrides the step of one of them, use that one, with hooks (register_step_pre_hook, "
                    "register_step_post_hook) for the rest. If it wraps one, pass the inner optimizer."
                )
            )
            warnings.append(
                f"lightning_topk: {name} keeps its own momentum, and training may end behind DDP's: only torch's "
                f"{ADAPTED} are adapted.{remedy}"
            )
    return notes, warnings


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of torch inside a wrapper without hooks of its own: Accelerate's, Lightning's, schedule-free's."""
    while True:
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "base", None)
        hooks, inside = (getattr(each, "_optimizer_step_post_hooks", None) for each in (optimizer, inner))
        if inner is optimizer or not hasattr(inner, "param_groups") or (hooks is not None and hooks is not inside):
            return optimizer
        optimizer = inner


def _steps_as(kind: type) -> str | None:
    """The name of the momentum buffer of a class of optimizers; None if its ``step`` cannot be adapted."""
    return _STEPS.get(inspect.unwrap(getattr(kind, "step", object)))


def _momentum(group: Mapping[str, Any]) -> Any:
    """The momentum of a parameter group, a number or a scalar tensor; 0 if it is not in (0, 1)."""
    momentum: Any = group.get("momentum") or (group.get("betas") or (0.0,))[0]
    return momentum if 0 < momentum < 1 else 0.0


def rule_of(group: Mapping[str, Any]) -> Rule:
    """The rule for the parameters of a group."""
    m, sgd, decay = _number(_momentum(group)), "dampening" in group, _number(group["weight_decay"])
    a, sign = 1 - (_number(group["dampening"]) if sgd else m), -1 if group["maximize"] else 1
    n = (
        _number(group["betas"][1]) if "decoupled_weight_decay" in group else 1.0
    )  # SGD and Adamax have no mean of squares
    if group.get("decoupled_weight_decay") or not (isinstance(decay, Tensor) or decay):
        return Rule(m, a, sign, squares=n)
    if not sgd:
        return Rule(m, a, sign, decay, waits=True, squares=n)
    nesterov = group["nesterov"]
    lr = _number(group["lr"]) + 1e-6  # not 0; the rate hardly depends on so small a one
    rate = (1 - kept(lr, m, a, decay, nesterov)) / lr
    # SGD's own step adds its decay once more, with nesterov 1 + m times, and multiplies the buffer by m.
    settled = (rate - (1 + m) * decay) / m**2 if nesterov else (rate - a * decay) / m
    return Rule(m, a, sign, decay, settled)


def _number(x: Any) -> Any:
    """A scalar tensor on the CPU as a number, so that one launch can step it; on a GPU, reading it would wait."""
    return x.item() if isinstance(x, Tensor) and x.device.type == "cpu" else x


def kept(lr: Any, momentum: Any, weight: Any, decay: Any, nesterov: bool) -> Any:
    """The factor by which each step of SGD multiplies a weight that only decays, once its momentum has settled.

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


def local_part(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def _as_sharded(local: Tensor, like: Any) -> Tensor:
    """The DTensor of which ``local`` is this rank's shard, if ``like`` is a DTensor; else ``local``."""
    if not hasattr(like, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
