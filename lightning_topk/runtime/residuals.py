"""Residuals belong to parameters, while DDP regroups its buckets.

DDP's first bucket holds the whole model; later buckets come in the order in which gradients arrive, and every ``fit``
starts anew. A bucket of other parameters, or of the same in another order, gets an endpoint of its own. What the old
ones held moves over without communication, as one memory for each parameter: a worker's residual is copied, element by
element; what a rank served it adds, W-fold, to its own worker residual. As one of W workers it then sends that to the
new server, and the mean undoes the factor. The sum of all mass is the same before and after.

Where the ranks of a node exchange as one worker, a rank's memory is of its piece of every parameter, whatever bucket it
is in (:class:`lightning_topk.core.layout.Parts`), and W is the number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Endpoint
from lightning_topk.core.layout import Parts
from lightning_topk.core.memory import Leftover
from lightning_topk.core.ops import reference
from lightning_topk.runtime.forms import Form
from lightning_topk.runtime.skipped_steps import Undo

Memories = dict[Tensor, dict[str, Tensor]]
"""Tensors by parameter and name: ``residual``, and ``velocity`` with momentum on the workers."""


@dataclass
class Progress:
    """How far a run has come; written between two backward passes.

    Attributes:
        steps: Gradients exchanged so far, for schedules and selectors.
        buckets: The parameters that were exchanged together in the last backward pass.
    """

    steps: int = 0
    buckets: tuple[tuple[Tensor, ...], ...] = ()


@dataclass
class _InUse:
    """An endpoint, the settings with which it was made and, with a GradScaler, what undoes skipped steps."""

    end: Endpoint
    config: TopKConfig
    undo: Undo | None = None

    def decide(self) -> None:
        """Restores the memories if the scaler skipped the last step."""
        if self.undo is not None:
            self.undo.decide()


class Residuals:
    """The memories of one rank: by parameter, and in the endpoints of the buckets in use.

    While an exchange is under way only the lane uses them; the caller's side does between two backward passes.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self.rank = 0
        """This rank."""
        self.counts: dict[Tensor, int] = {}
        """Pieces into which the ranks of a node cut a parameter: this rank holds piece ``rank % count``. 1 if
        missing."""
        self.reset = 0
        """Parameters whose residual was dropped, since their size or memory format changed."""
        self.stand_ins: dict[str, Tensor] = {}
        """What stands for parameters that are sharded, by name (:class:`lightning_topk.fsdp.param_groups.Unit`)."""
        self._kept: Memories = {}  # a view of its endpoint's, while a parameter has one
        self._before: Memories = {}  # of endpoints that were dropped, before a step that the scaler may still skip
        self._loaded: set[Tensor] = set()  # whose whole memory every rank has, from a checkpoint
        self._forms: dict[Tensor, Form] = {}
        self._live: dict[tuple[Tensor, ...], _InUse] = {}

    @property
    def endpoints(self) -> Iterable[Endpoint]:
        """The endpoints in use."""
        for each in self._live.values():
            each.decide()
        return [each.end for each in self._live.values()]

    # -------------------------------------------------------------------------------- endpoints

    def endpoint(
        self,
        parameters: tuple[Tensor, ...],
        config: TopKConfig,
        make: Callable[[], Endpoint],
        make_undo: Callable[[Endpoint], Undo] | None = None,
    ) -> Endpoint:
        """The endpoint of a bucket for its next exchange, with all that its parameters have left so far.

        Args:
            parameters: The bucket's parameters, in its order.
            config: The settings in force for the bucket.
            make: Makes an endpoint with empty memories, for a bucket that is new, or whose settings are.
            make_undo: Makes what undoes skipped steps of a new endpoint, if a scaler may skip some.
        """
        before: list[Tensor] = []
        if parameters not in self._live or self._live[parameters].config != config:
            self.drop_endpoints(set(parameters))
            end = make()
            before = self._fill(end, parameters)
            self._live[parameters] = _InUse(end, config)
        used = self._live[parameters]
        used.decide()
        if make_undo is not None:
            if used.undo is None:
                used.undo = make_undo(used.end)
                used.undo.before = before
            used.undo.begin()
        return used.end

    def drop_endpoints(self, parameters: set[Tensor]) -> None:
        """Takes apart the endpoints that hold any of these parameters; their next exchange makes new ones."""
        for bucket in [bucket for bucket in self._live if not parameters.isdisjoint(bucket)]:
            used = self._live.pop(bucket)
            used.decide()
            end, undo = used.end, used.undo
            for link in end.links:
                for tensor in link.memory.tensors().values():
                    if tensor.is_cuda:  # made on one stream, perhaps, and still in use on this one when it is freed
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
            if undo is not None and undo.open:
                self._scatter(self._before, bucket, end, _folded(end, iter(undo.before)))
            if isinstance(end.uplink.memory, Leftover) and not end.uplink.memory.residual.any():  # it was delivered
                self._kept.update({parameter: {} for parameter in bucket})
            elif end.downlink is not None and end.downlink.memory.tensors():
                held = (kept for link in end.links for kept in link.memory.tensors().values())
                self._scatter(self._kept, bucket, end, _folded(end, held))

    def _fill(self, end: Endpoint, parameters: tuple[Tensor, ...]) -> list[Tensor]:
        """Moves what the parameters left into the memories of their new endpoint.

        Returns:
            The memories as they were before a step that the scaler may still skip; empty if there is no such step.
        """
        self.forget_changed(parameters)
        self._cut(parameters, end.parts.count)
        known = [
            kept for memories in (self._kept, self._before) for p in parameters for kept in memories.get(p, {}).values()
        ]
        if not end.uplink.memory.tensors() and any(bool(kept.any()) for kept in known):
            end.uplink.memory = Leftover(end.layout.numel, end.dtype, end.sizes.device)
        mine, before = end.uplink.memory.tensors(), []
        if any(parameter in self._before for parameter in parameters):
            both = self._kept | self._before
            before = [self._gather(both, parameters, name, like) for name, like in mine.items()]
            if end.downlink is not None:
                before += [torch.zeros_like(served) for served in end.downlink.memory.tensors().values()]
        for name, flat in mine.items():
            flat.copy_(self._gather(self._kept, parameters, name, flat))
        for parameter in parameters:
            self._before.pop(parameter, None)
            self._kept[parameter] = {}  # what the new settings keep no more would be stale
        self._scatter(self._kept, parameters, end, mine)
        return before

    def _cut(self, parameters: Iterable[Tensor], count: int) -> None:
        """Cuts what parameters left into another number of pieces.

        Raises:
            ValueError: Other ranks hold the rest of this rank's new piece.
        """
        for p in parameters:
            was = self.counts.get(p, 1)
            for memories in (self._kept, self._before) if was != count else ():
                kept = memories.get(p, {})
                if count != 1 and p not in self._loaded and any(bool(part.any()) for part in kept.values()):
                    raise ValueError(
                        f"the residuals of a parameter are cut into {was} pieces, one a rank, and would have to be "
                        f"cut into {count}, for which ranks would need each other's. Save them with state_dict, and "
                        "load them with load_state_dict, which converts them."
                    )
                if kept and count == 1:  # each rank is a worker of its own now, one of `was` times as many
                    memories[p] = {name: self._whole(piece, p) * was for name, piece in kept.items()}
                elif kept:
                    parts = Parts((p.numel(),), count)
                    memories[p] = {
                        name: reference.split_parts(part, parts)[self.rank % count] for name, part in kept.items()
                    }
            self.counts[p] = count
            self._loaded.discard(p)

    # -------------------------------------------------------------------------------- all parameters

    def forget_steps(self) -> None:
        """Undoes the last step if it was skipped, and drops the copies: the next optimizers get new ones."""
        for each in self._live.values():
            each.decide()
            each.undo = None

    def forget_copies(self) -> None:
        """Forgets copies of parameters whose endpoint was taken apart in the last pass, and has not come again."""
        self._before.clear()

    def offload_to_cpu(self) -> None:
        """Takes all endpoints apart and moves what they held to the CPU, until their parameters come again."""
        self.drop_endpoints({parameter for bucket in self._live for parameter in bucket})
        for kept in self._kept.values():
            kept.update({name: part.cpu() for name, part in kept.items()})

    def keep_only(self, parameters: Iterable[Tensor]) -> None:
        """Forgets all parameters but these: another model has no use for the residuals of the last, and begins anew."""
        keep, progress = set(parameters), self.progress
        known = {*self._kept, *self._forms, *(parameter for bucket in progress.buckets for parameter in bucket)}
        if known and keep.isdisjoint(known):
            progress = self.progress = Progress()
            self._live.clear()
        self.drop_endpoints({parameter for bucket in self._live for parameter in bucket} - keep)
        progress.buckets = tuple(bucket for bucket in progress.buckets if keep.issuperset(bucket))
        for parameter in known - keep:
            self._forget(parameter)

    def forget_changed(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Drops the residuals of parameters whose size or memory format changed; none of them may have an endpoint."""
        for parameter in [*self._forms] if parameters is None else parameters:
            now = Form.of(parameter)
            if self._forms.get(parameter, now) != now:
                self.reset += any(bool(part.any()) for part in self._kept.get(parameter, {}).values())
                self._forget(parameter)
            self._forms[parameter] = now

    def _forget(self, parameter: Tensor) -> None:
        self._loaded.discard(parameter)
        for known in (self._kept, self._before, self._forms, self.counts):
            known.pop(parameter, None)

    def restore(self, memories: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Replaces all that there is by the memories of a checkpoint: the mean over the workers, on every rank.

        Args:
            memories: By parameter and name, each ``[numel]``.
        """
        self._live.clear()
        self._before.clear()
        self.counts.clear()
        self._kept = {parameter: dict(kept) for parameter, kept in memories.items()}
        self._forms = {parameter: Form.of(parameter) for parameter in memories}
        self._loaded = set(memories)

    # -------------------------------------------------------------------------------- what is held

    def held(self, name: str = "residual") -> dict[Tensor, tuple[Tensor, Tensor]]:
        """What this rank holds of each parameter that was exchanged: as a worker and as a server.

        Args:
            name: Which memory.

        Returns:
            Two tensors ``[numel]`` for each parameter; the server's is zero where another rank serves. The mean over
            the ranks of the first plus the sum of the second is the gradient that is still to be delivered. So a rank
            that holds a piece for its node shows it times the ranks of a node, and zero elsewhere.
        """
        server: Memories = {}
        for bucket, used in self._live.items():
            used.decide()
            memory = {} if used.end.downlink is None else used.end.downlink.memory.tensors()
            served = {each: _to_bucket(kept, used.end) for each, kept in memory.items()}
            self._scatter(server, bucket, used.end, served)
        found = {}
        for p, kept in self._kept.items():
            count, nothing = self.counts.get(p, 1), torch.zeros(()).expand(p.numel())
            worker = self._whole(kept[name], p) * count if name in kept and count > 1 else kept.get(name, nothing)
            mine = server.get(p, {})
            found[p] = worker, self._whole(mine[name], p) if name in mine else nothing
        return found

    def form(self, parameter: Tensor) -> Form:
        """The form in which the residuals of a parameter are."""
        return self._forms[parameter] if parameter in self._forms else Form.of(parameter)

    def energy(self) -> Tensor:
        """``[2]`` float64: the sums of squares of this rank's worker and server residuals.

        The mean over the ranks of the first is the mean over the workers, also where the ranks of a node are one
        worker.
        """
        energy = torch.zeros(2, dtype=torch.float64)
        for end in self.endpoints:
            for side, link in enumerate(end.links):
                kept = link.memory.tensors().get("residual")
                if kept is not None:
                    shared = 1 if side else end.parts.count
                    energy[side] += shared * torch.linalg.vector_norm(kept, dtype=torch.float64).square().cpu()
        return energy

    # -------------------------------------------------------------------------------- pieces

    def _whole(self, piece: Tensor, parameter: Tensor) -> Tensor:
        """A piece of a parameter at its place among ``[numel]``; zero elsewhere."""
        parts = Parts((parameter.numel(),), self.counts.get(parameter, 1))
        if parts.count == 1:
            return piece
        rows = piece.new_zeros(parts.count, len(piece))
        rows[self.rank % parts.count] = piece
        whole = piece.new_empty(parameter.numel())
        reference.join_parts(rows, parts, whole)
        return whole

    def _scatter(
        self, memories: Memories, bucket: tuple[Tensor, ...], end: Endpoint, memory: Mapping[str, Tensor]
    ) -> None:
        """Enters each parameter's piece of a bucket's tensors ``[pieces]`` into ``memories``."""
        for name, flat in memory.items():
            for parameter, piece in zip(bucket, flat.split(list(end.parts.pieces)), strict=True):
                memories.setdefault(parameter, {})[name] = piece

    def _gather(self, memories: Memories, bucket: tuple[Tensor, ...], name: str, like: Tensor) -> Tensor:
        """Undoes :meth:`_scatter`: ``[pieces]``, dtype and device of ``like``; zero where nothing is known."""
        zero = torch.zeros((), dtype=like.dtype, device=like.device)  # not a whole model's zeros on the CPU
        pieces = Parts(tuple(p.numel() for p in bucket), self.counts.get(bucket[0], 1)).pieces
        found = [
            memories.get(parameter, {}).get(name, zero.expand(size))
            for parameter, size in zip(bucket, pieces, strict=True)
        ]
        for piece in found:
            if piece.is_cuda:  # made on another stream, perhaps, such as a checkpoint's, and freed after this
                piece.record_stream(torch.cuda.current_stream(piece.device))
        return torch.cat([piece.to(like.device, like.dtype) for piece in found])


def _folded(end: Endpoint, memories: Iterable[Tensor]) -> dict[str, Tensor]:
    """One memory of all that an endpoint's links hold: ``[parts.numel]`` by name, what it serves W-fold.

    Args:
        end: The endpoint.
        memories: The tensors of its links, or copies of them, in order.
    """
    tensors = iter(memories)
    found = {name: next(tensors).clone() for name in end.uplink.memory.tensors()}
    for name in end.downlink.memory.tensors() if end.downlink is not None else ():
        found[name] += _to_bucket(next(tensors), end) * end.world
    return found


def _to_bucket(served: Tensor, end: Endpoint) -> Tensor:
    """What a server holds, ``[shard_size]``, at its places in the bucket, or this rank's part of it; zero elsewhere."""
    places = reference.flat_index(
        torch.arange(len(served), device=served.device).unsqueeze(0),
        end.layout,
        torch.tensor([[end.shard]], device=served.device),
    )[0]
    return served.new_zeros(end.layout.numel).index_add_(0, places, served)
