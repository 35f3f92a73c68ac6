"""How the user clips gradients: by ``max_norm=`` or in a strategy; and a hint if they are clipped elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_topk.messages import WarnOnce
from lightning_topk.optim.applied import Clipping
from lightning_topk.optim.momentum import all_parameters, local_part
from lightning_topk.schedule import as_float

MaxNorm = float | Sequence[float | None] | None
"""The norm to which the user clips the gradients of all parameters together, or one for each optimizer's."""
READ = (20, 100)
"""Numbers of steps after which an optimizer's gradient norms are read, to see whether the user clips them."""
ENDED = [torch.zeros(2)] * READ[-1]
"""Stands in for an optimizer's norms when no more are measured."""


def check_max_norm(max_norm: Any) -> MaxNorm:
    """Returns ``max_norm``; refuses anything but a norm, a list of norms, or None."""
    several = max_norm if isinstance(max_norm, list | tuple) else [max_norm]
    if not all(each is None or (isinstance(each, Real) and not isinstance(each, bool)) for each in several):
        raise TypeError(f"max_norm={max_norm!r} must be a number, a list with one for each optimizer, or None.")
    if not all(each is None or as_float(each) > 0 for each in several):
        raise ValueError(f"max_norm={max_norm!r:.50} must be a float above 0. Leave it out unless you clip gradients.")
    return max_norm


class UserClipping:
    """Knows to what norm the user clips the gradients of each optimizer, and tells the exchange, by ``estimate``.

    With ``hints``, it asks for ``max_norm`` if the first gradients are clipped and none was passed.
    """

    def __init__(self, max_norm: MaxNorm, estimate: Clipping, hints: bool, say: WarnOnce) -> None:
        self.max_norm, self.estimate, self._say = check_max_norm(max_norm), estimate, say
        self._hints = hints and max_norm is None and say.rank == 0
        self.first = math.inf
        """The norm to which gradients will be clipped in an optimizer's first step; infinite if unknown."""
        self.exchanged = False
        """Whether the last pass clipped gradients in the exchange."""
        self._ids: list[int] = []  # of the optimizers, in order
        self._limits = WeakKeyDictionary[Any, float]()  # by optimizer, the norm to which it was clipped last
        self._clipped = WeakSet[Any]()  # optimizers whose gradients were clipped since their last step
        self._number_of: Mapping[Tensor, int] = {}  # for each member of a bucket, which norm it has
        self._covered: Collection[int] = ()  # optimizers whose parameters are all exchanged here
        self._norms = WeakKeyDictionary[Any, list[Tensor]]()  # by optimizer, per step: of its gradients, as delivered
        self._delivered = WeakKeyDictionary[Any, Tensor]()  # by optimizer, the norm at the end of backward

    def find(self, optimizers: Sequence[Optimizer], held: Mapping[Tensor, Tensor]) -> None:
        """Finds which norm each member of a bucket has; ``held`` maps members to the tensors that optimizers hold."""
        if isinstance(self.max_norm, Sequence) and optimizers and len(optimizers) != len(self.max_norm):
            raise ValueError(
                f"max_norm={self.max_norm!r} must have one norm for each of {len(optimizers)} optimizers, or be one "
                "number, the norm to which the gradients of all are clipped together."
            )
        several = {p: number for number, each in enumerate(optimizers) for p in all_parameters(each)}
        one = isinstance(self.max_norm, Real)
        self._number_of = {p: 0 if one else several[its] for p, its in held.items() if one or its in several}
        every = {*held.values()}
        self._covered = {id(each) for each in optimizers if every.issuperset(all_parameters(each))}

    def begin_pass(self, optimizers: Sequence[Optimizer]) -> None:
        """Tells the exchange to what norms the gradients of this pass will be clipped."""
        told: Any = self.max_norm
        self._ids = [*map(id, optimizers)]
        if isinstance(told, Real):
            limits = [float(told)]
        else:
            known = told or [self._limits.get(each, self.first) for each in optimizers]
            limits = [*(limit or math.inf for limit in known), math.inf]  # the last is for all other parameters
        self.estimate.begin_pass(limits if min(limits) < math.inf else (), self._number_of)

    def clip(self, optimizer: Optimizer, max_norm: float, clip: Callable[[float], Tensor]) -> Tensor:
        """Clips an optimizer's gradients by the user's function ``clip``, which returns the norm before.

        If the exchange has clipped them, they are not clipped again: it delivers sums of clipped gradients.
        """
        its = id(optimizer)
        if its not in self._ids:
            return clip(max_norm)
        number, limits = self._ids.index(its), self.estimate.limits if self.exchanged else ()
        self._limits[optimizer] = max_norm
        self._clipped.add(optimizer)
        done = bool(limits) and limits[number] == max_norm and its in self._covered
        norm = clip(math.inf if done else max_norm)
        if limits:
            self.estimate.note(number, getattr(norm, "full_tensor", lambda: norm)())
        return norm

    def stepped(self, optimizer: Optimizer) -> None:
        """Notes whether the gradients of a step were clipped."""
        if optimizer not in self._clipped:
            self._limits[optimizer] = math.inf
            if (delivered := self._delivered.pop(optimizer, None)) is not None:
                self._look(optimizer, delivered)
        self._clipped.discard(optimizer)

    def end_pass(self, optimizers: Sequence[Optimizer], scale: Tensor | None) -> None:
        """In the first steps, notes the norms of gradients at the end of backward, before the user changes them."""
        looking = [each for each in optimizers if len(self._norms.setdefault(each, [])) < READ[-1]]
        if self._hints and looking and torch._C._current_graph_task_id() != -1:
            engine: Any = torch.autograd.Variable._execution_engine
            # Must run after the callback in which DDP writes the gradients, which DDP queues after this one.
            engine.queue_callback(lambda: engine.queue_callback(partial(self._note_delivered, looking, scale)))

    @torch.no_grad()
    def _note_delivered(self, optimizers: Sequence[Optimizer], scale: Tensor | None) -> None:
        for each in optimizers:
            gradients = _gradients(each)
            if any(g.is_sparse or local_part(g) is not g for g in gradients):
                self._norms[each] = ENDED  # a rank does not know the norm of all shards
                self._delivered.pop(each, None)
            elif gradients:
                norm = torch.nn.utils.get_total_norm(gradients).float()
                self._delivered[each] = norm if scale is None else norm / scale

    @torch.no_grad()
    def _look(self, optimizer: Optimizer, delivered: Tensor) -> None:
        """Asks for ``max_norm`` if the user shrinks the gradients of the first steps to the same norm again and again.

        ``delivered`` is their norm at the end of backward: gradients may have the same norm without being clipped.
        """
        gradients, norms = _gradients(optimizer), self._norms[optimizer]
        if not gradients or getattr(optimizer, "grad_scale", None) is not None:
            return
        norms.append(torch.stack([torch.nn.utils.get_total_norm(gradients).float(), delivered]))
        if len(norms) not in READ:
            return
        found, near = torch.stack(norms).tolist(), max(1e-3, torch.finfo(gradients[0].dtype).eps)
        most = max(norm for norm, _ in found)
        alike = [before > norm * (1 + near) for norm, before in found if norm > most * (1 - near)]
        if len(alike) >= READ[0] // 2:
            self._norms[optimizer] = ENDED
            if sum(alike) >= READ[0] // 2:
                self._say(
                    f"lightning_topk: your gradients are clipped to norm {most:.3g}: pass max_norm={most:.3g} to "
                    "attach, or residuals hold unclipped gradients. With a strategy, clip with gradient_clip_val=, "
                    "self.clip_gradients or fabric.clip_gradients."
                )


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's step."""
    return [p.grad for p in all_parameters(optimizer) if p.grad is not None]
