"""Adapts the momentum of torch's optimizers to gradients that are delivered entry by entry.

Problem. An entry that is not delivered in a step has no gradient in that step, but the optimizer's momentum still moves
it, for many steps and on old information. Its next gradient is a sum of gradients measured along the way. Error
feedback and momentum each add a delay; together they are stable only at a much smaller learning rate. Weight decay that
is part of the gradient moves it too, and Adam divides by a second moment that then holds nothing else: each step moves
the entry by the learning rate, however small the decay.

Rule. An entry stands still until it is delivered. Then it takes all the steps since its last delivery at once: the
first with the delivered gradient, the others with a gradient of zero. With the optimizer's momentum m and momentum
buffer b, the gradient g, its weight a (1 - dampening for SGD, 1 - m for Adam), D steps since the last delivery, and
weight decay w of the parameter x if it is part of the gradient (not AdamW's)::

    delivered       v = m b + a (g + D w x)
                    the optimizer moves the entry by (1 + m + ... + m^(D-1)) v instead of v
                    b = m^(D-1) v
    not delivered   b and the entry stay; only AdamW's weight decay moves it

If D is 1, this is the optimizer's own step. In the end each gradient moves the entry by as much as in dense training,
whatever the D before and after it, and b is the velocity of the movement to come. So a checkpoint of the optimizer
holds true velocities, and a run can continue from it with DDP.

Method. The optimizer's own ``step()`` runs on a temporary momentum buffer, and with weight decay on a temporary
gradient, that make it do this; its own buffer is updated, and both are restored afterwards. So all options of the
optimizers keep working. On a CPU, torch's fused Adam takes a third of the time of its default; it steps where the user
left the choice to torch.

Related: ``torch.optim.SparseAdam`` leaves rows without a gradient alone (lazily); Deep Gradient Compression (Lin et al.
2018) zeroes the workers' momentum where an entry is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.optim import SGD, Adam, NAdam, Optimizer

from lightning_topk.core import ops

_BUFFERS: dict[type[Optimizer], str] = {SGD: "momentum_buffer", Adam: "exp_avg", NAdam: "exp_avg"}
_STEPS = {inspect.unwrap(kind.step): name for kind, name in _BUFFERS.items()}
"""Supported steps (AdamW shares Adam's) and the names of their momentum buffers."""


class AdaptedMomentum:
    """Adapts the momentum of one SGD, Adam, AdamW or NAdam. Use :meth:`of`: there is one instance per optimizer.

    It holds one byte per entry: the steps since the entry was delivered, up to 255. An entry that waits longer takes
    255 steps; the rest of the movement, m^255 of it, follows with later deliveries. A resumed run treats all entries as
    delivered in the step before, which only shifts movement to their next delivery.
    """

    _known: ClassVar[WeakKeyDictionary[Optimizer, AdaptedMomentum]] = WeakKeyDictionary()

    def __init__(self, optimizer: Optimizer) -> None:
        self.requests: WeakKeyDictionary[Any, Collection[Tensor] | None] = WeakKeyDictionary()
        """The compressed parameters of each exchange, as long as it lives; None for all parameters."""
        self._waited: dict[Tensor, Tensor] = {}  # D - 1 of each entry, uint8
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []  # states and groups, names, and the own values
        self._gradients: dict[Tensor, Tensor | None] = {}  # the own gradients of parameters, where others are lent
        _before_update(optimizer, self._adapt)
        restore = optimizer.register_step_post_hook(self._restore)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(restore.id, last=False)  # before users' hooks, which see the true state
        optimizer.register_state_dict_pre_hook(self._restore_state)
        optimizer.register_load_state_dict_post_hook(lambda _: self._waited.clear())

    @classmethod
    def of(cls, optimizer: Optimizer) -> AdaptedMomentum:
        """Returns the instance of an optimizer, and creates it if needed."""
        if optimizer not in cls._known:
            cls._known[optimizer] = cls(optimizer)
        return cls._known[optimizer]

    @classmethod
    def release(cls, optimizers: Iterable[Optimizer], requester: Any) -> None:
        """Withdraws the request of an exchange."""
        for optimizer in optimizers:
            if optimizer in cls._known:
                cls._known[optimizer].requests.pop(requester, None)

    @_disable_dynamo  # for torch.compile(optimizer.step); torch.compiler.disable imports dynamo at once
    @torch.no_grad()
    def _adapt(self, optimizer: Optimizer) -> None:
        """Prepares a step, once gradients are ready and before parameters change."""
        self._restore_state()  # if the step before failed; its gradients are obsolete
        self._gradients.clear()
        wanted = [*self.requests.values()]
        waited: dict[Tensor, Tensor] = {}  # without removed parameters
        for group in optimizer.param_groups:
            parameters = group["params"] if wanted and _momentum(group) else ()
            adapted = {p for p in parameters if any(each is None or p in each for each in wanted)}
            decay = 0.0 if group.get("decoupled_weight_decay", False) else group["weight_decay"]
            if adapted and decay:
                self._replaced.append((group, "weight_decay", decay))
                group["weight_decay"] = 0.0  # decay is in the gradients of this step
            for p in parameters:
                if p.grad is not None and p in adapted:
                    self._adapt_parameter(optimizer, group, p, decay)
                elif p.grad is not None and adapted and decay:
                    scale = getattr(optimizer, "grad_scale", None)  # by which a fused step divides gradients
                    scaled = p if scale is None else p * scale
                    self._lend_gradient(p, p.grad.add(scaled, alpha=-decay if group["maximize"] else decay))
            # The step of other parameters must keep its bits.
            if adapted and len(adapted) == len(parameters) and _may_fuse(optimizer, group):
                self._replaced.append((group, "fused", None))
                group["fused"] = True
            waited |= {p: self._waited[p] for p in adapted if p in self._waited}
        self._waited = waited

    def _adapt_parameter(self, optimizer: Optimizer, group: dict[str, Any], p: Tensor, decay: float) -> None:
        state, name, gradient = optimizer.state.get(p, {}), _buffer_name(optimizer) or "", p.grad
        assert gradient is not None
        own = state.get(name)
        if gradient.is_sparse:  # with nesterov, torch adds the buffer to it
            gradient = gradient.to_dense()
            self._lend_gradient(p, gradient)
        given, x = local_part(gradient), local_part(p)
        waited = self._waited.get(p)
        if own is None or waited is None or waited.shape != given.shape or waited.device != given.device:
            waited = self._waited[p] = torch.zeros_like(given, dtype=torch.uint8)
        scale, skipped = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if decay:  # that of all the steps that an entry waited comes with its gradient
            owed = (waited.to(x.dtype) + 1).mul_(x).mul_(-decay if group["maximize"] else decay)
            owed = owed if scale is None else owed * scale
            lent = torch.empty_like(gradient)
            local_part(lent).copy_(torch.where(given != 0, given + owed, 0))
            self._lend_gradient(p, lent)
            given = local_part(lent)
        if own is None:  # in its first step an optimizer has no momentum yet
            del self._waited[p]
            return
        if own.is_sparse:  # SGD's first buffer is a copy of the gradient
            own = state[name] = own.to_dense()
        momentum = _momentum(group)
        weight = 1 - group.get("dampening", momentum)  # SGD's or Adam's
        given = given if scale is None else given / scale
        buffer = torch.empty_like(own)
        ops.catch_up_(
            local_part(own),
            waited,
            -given if group["maximize"] else given,
            momentum,
            weight,
            skipped,
            out=local_part(buffer),
        )
        self._replaced.append((state, name, own))
        state[name] = buffer

    def _lend_gradient(self, p: Tensor, gradient: Tensor) -> None:
        """Replaces a parameter's gradient during the step."""
        if p not in self._gradients:
            self._gradients[p] = p.grad
        p.grad = gradient

    def _restore(self, *_: Any) -> None:
        """Restores the optimizer's state and the gradients."""
        self._restore_state()
        for p, gradient in self._gradients.items():
            p.grad = gradient
        self._gradients.clear()

    def _restore_state(self, *_: Any) -> None:
        for options, name, own in self._replaced:
            options[name] = own
        self._replaced.clear()


def adapt_momentum(
    optimizers: Iterable[Optimizer], requester: Any, parameters: Collection[Tensor] | None = None
) -> tuple[list[str], list[str]]:
    """Adapts the momentum of optimizers, until :meth:`AdaptedMomentum.release` is called or the requester is gone.

    Args:
        optimizers: The optimizers.
        requester: The object that exchanges their gradients; it identifies this request.
        parameters: The compressed parameters. Default: all.

    Returns:
        Messages for the user: information about adapted momentum, and warnings about momentum that is not.
    """
    notes, warnings = [], []
    for optimizer in optimizers:
        name, has_momentum = type(optimizer).__name__, any(map(_momentum, optimizer.param_groups))
        if _buffer_name(optimizer):
            AdaptedMomentum.of(optimizer).requests[requester] = parameters
            if has_momentum:
                notes.append(
                    f"lightning_topk: the momentum of {name} is adapted to compression: an entry moves only when it is "
                    "delivered, then for all the steps that it waited; adapt_momentum=False leaves the optimizer "
                    "unchanged."
                )
        elif has_momentum:
            warnings.append(
                f"lightning_topk: {name} keeps its own momentum: only torch's SGD, Adam, AdamW and NAdam are adapted. "
                f"If {name} wraps one of them, pass the inner optimizer."
            )
    return notes, warnings


def _buffer_name(optimizer: Optimizer) -> str | None:
    """The name of an optimizer's momentum buffer; None if its ``step`` cannot be adapted."""
    return _STEPS.get(inspect.unwrap(type(optimizer).step))


def _momentum(group: Mapping[str, Any]) -> Any:
    """The momentum of a parameter group, a number or a scalar tensor; 0 if it is not in (0, 1)."""
    momentum: Any = group.get("momentum") or (group.get("betas") or (0.0,))[0]
    return momentum if 0 < momentum < 1 else 0.0


def local_part(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x.detach()


def _may_fuse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether Adam's fused step may replace torch's default here; on a CPU it checks neither shapes nor strides."""
    options = [group.get(name, 0) for name in ("fused", "foreach", "differentiable")]
    if "betas" not in group or options != [None, None, False]:
        return False
    for p in group["params"]:
        state = {**optimizer.state.get(p, {}), "parameter": p, "gradient": p if p.grad is None else p.grad}
        if not (
            {*map(type, state.values())} <= {Tensor, Parameter}
            and {(x.device.type, x.dtype, x.layout) for x in state.values()} == {("cpu", torch.float32, torch.strided)}
            and {x.shape for name, x in state.items() if name != "step"} == {p.shape}
            and all(x.is_contiguous() for x in state.values())
        ):
            return False
    return True


def _before_update(optimizer: Optimizer, prepare: Callable[[Optimizer], None]) -> None:
    """Calls ``prepare`` in each ``optimizer.step()``: after all pre-hooks, and after its closure if it has one."""

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def closure() -> Any:
            loss = given() if callable(given) else None
            prepare(optimizer)
            return loss

        return (args[:1], {**kwargs, "closure": closure})

    optimizer.register_step_pre_hook(hook)
