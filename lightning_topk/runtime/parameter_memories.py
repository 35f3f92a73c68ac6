"""What parameters kept of their gradients, while DDP regroups its buckets.

DDP's first bucket holds the whole model; later buckets come in the order in which gradients arrive, and every ``fit``
starts anew. A bucket of other parameters, or of the same in another order, gets links of its own, and what the
parameters' elements left in the old ones moves over without communication:

* a worker's residual is copied, element by element;
* of the server's residual a rank copies what it serves in the new bucket too. What it served and serves no more it
  adds, W-fold, to its own worker residual (to its next gradient, if workers keep nothing): as one of W workers it then
  sends it to the new server, and the mean undoes the factor. The sum of all mass is the same before and after.

Where the ranks of a node exchange as one worker, a rank's memories are of its piece of every parameter, whatever bucket
it is in (:class:`lightning_topk.core.layout.Parts`), and W is the number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_topk.core.endpoint import Endpoint
from lightning_topk.core.layout import Parts
from lightning_topk.core.memory import Leftover
from lightning_topk.core.ops import reference
from lightning_topk.runtime.forms import Form
from lightning_topk.runtime.skipped_steps import Undo

Memories = dict[Tensor, dict[str, Tensor]]
"""Tensors by parameter and name."""


class Pieces:
    """Which piece of each parameter this rank holds, where the ranks of a node exchange as one worker."""

    def __init__(self) -> None:
        self.rank = 0
        """This rank."""
        self.counts: dict[Tensor, int] = {}
        """Pieces into which the ranks of a node cut a parameter: this rank holds piece ``rank % count``. 1 if
        missing."""

    def layout(self, *parameters: Tensor) -> Parts:
        """How parameters that are exchanged together are cut."""
        count = self.counts.get(parameters[0], 1)
        return Parts(tuple(parameter.numel() for parameter in parameters), count)

    def whole(self, piece: Tensor, parameter: Tensor) -> Tensor:
        """A piece of a parameter at its place among ``[numel]``; zero elsewhere."""
        parts = self.layout(parameter)
        if parts.count == 1:
            return piece
        rows = piece.new_zeros(parts.count, len(piece))
        rows[self.rank % parts.count] = piece
        whole = piece.new_empty(parameter.numel())
        reference.join_parts(rows, parts, whole)
        return whole

    def piece(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This rank's piece of ``[numel]`` that belong to a parameter."""
        parts = self.layout(parameter)
        return reference.split_parts(whole, parts)[self.rank % parts.count]

    def scatter(
        self, memories: Memories, bucket: tuple[Tensor, ...], pieces: Sequence[int], memory: dict[str, Tensor]
    ) -> None:
        """Enters each parameter's piece of a bucket's tensors into ``memories``; ``pieces`` are their sizes."""
        for name, flat in memory.items():
            for parameter, piece in zip(bucket, flat.split(list(pieces)), strict=True):
                memories.setdefault(parameter, {})[name] = piece

    def gather(self, memories: Memories, bucket: tuple[Tensor, ...], name: str, like: Tensor) -> Tensor:
        """Undoes :meth:`scatter`: ``[pieces]``, dtype and device of ``like``; zero where nothing is known."""
        zero = torch.zeros((), dtype=like.dtype, device=like.device)  # not a whole model's zeros on the CPU
        found = [
            memories.get(parameter, {}).get(name, zero.expand(size))
            for parameter, size in zip(bucket, self.layout(*bucket).pieces, strict=True)
        ]
        return torch.cat([piece.to(like.device, like.dtype) for piece in found])


class ParameterMemories:
    """The memories of one rank by parameter: what an endpoint that is taken apart leaves, the next one takes up."""

    def __init__(self) -> None:
        self.pieces = Pieces()
        self.worker: Memories = {}
        """The worker's memory of each parameter: a view of its endpoint's, while it has one."""
        self.server: Memories = {}
        """What this rank serves of parameters that have no endpoint."""
        self._copies: tuple[Memories, Memories] = {}, {}
        """The same two from before a step that may still be skipped, until their parameters are in a bucket again."""
        self._forms: dict[Tensor, Form] = {}
        """The form that each parameter had when its endpoint was made."""

    @property
    def known(self) -> set[Tensor]:
        """The parameters of which there is anything."""
        return {*self.worker, *self.server, *self._forms}

    def take(self, bucket: tuple[Tensor, ...], end: Endpoint, undo: Undo | None) -> None:
        """Takes what an endpoint holds, which is taken apart.

        Args:
            bucket: Its parameters.
            end: The endpoint.
            undo: The copies that restore it if the last step was skipped; None without a GradScaler.
        """
        for link in end.links:
            for tensor in link.memory.tensors().values():
                if tensor.is_cuda:  # made on one stream, perhaps, and still in use on this one when it is freed
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            if isinstance(link.memory, Leftover) and not link.memory.residual.any():  # it was delivered
                self.worker.update({parameter: {} for parameter in bucket})
        if undo is not None and undo.open:
            before = iter(undo.before)
            for copies, link in zip(self._copies, end.links, strict=False):
                kept = {name: next(before) for name in link.memory.tensors()}
                if link is end.downlink:
                    kept = {name: _to_bucket(served, end) for name, served in kept.items()}
                self.pieces.scatter(copies, bucket, end.parts.pieces, kept)
        self.pieces.scatter(self.server, bucket, end.parts.pieces, server_memory(end))

    def forget_copies(self) -> None:
        """Forgets copies of parameters whose endpoint was taken apart in the last pass, and has not come again."""
        for copies in self._copies:
            copies.clear()

    def fill(self, end: Endpoint, parameters: tuple[Tensor, ...]) -> list[Tensor]:
        """Moves what the parameters left into the memories of their new endpoint.

        Returns:
            The memories as they were before a step that the scaler may still skip; empty if there is no such step.
        """
        self._follow_forms(parameters)
        self.convert(parameters, end.parts.count)
        sides = self.worker, self.server
        known = [side.get(p, {}) for side in (*sides, *self._copies) for p in parameters]
        if not end.uplink.memory.tensors() and any(bool(kept.any()) for each in known for kept in each.values()):
            end.uplink.memory = Leftover(end.layout.numel, end.dtype, end.sizes.device)
        before: list[Tensor] = []
        if any(parameter in copies for copies in self._copies for parameter in parameters):
            self._copy_into(end, parameters, *(side | copies for side, copies in zip(sides, self._copies, strict=True)))
            filled = [tensor for link in end.links for tensor in link.memory.tensors().values()]
            before = [tensor.clone() for tensor in filled]
            for tensor in filled:
                tensor.zero_()
        self._copy_into(end, parameters, *sides)
        for parameter in parameters:
            for memories in (self.server, *self._copies):
                memories.pop(parameter, None)
            self.worker[parameter] = {}  # what the new settings keep no more would be stale
        self.pieces.scatter(self.worker, parameters, end.parts.pieces, end.uplink.memory.tensors())
        return before

    def _copy_into(self, end: Endpoint, parameters: tuple[Tensor, ...], worker: Memories, server: Memories) -> None:
        """Copies what workers and servers kept of parameters into the empty memories of their endpoint."""
        kept = end.uplink.memory.tensors()
        for name, flat in kept.items():
            flat.copy_(self.pieces.gather(worker, parameters, name, flat))
        if any(parameter in server for parameter in parameters):
            like = torch.zeros((), dtype=end.dtype, device=end.sizes.device)
            left = self.pieces.gather(server, parameters, "residual", like)
            for served in [] if end.downlink is None else end.downlink.memory.tensors().values():
                served.copy_(reference.shard_rows(left, end.layout)[end.shard])
                left -= _to_bucket(served, end)
            if kept:
                end.uplink.memory.add_(left.mul_(end.world))

    def restore(
        self,
        ends: Mapping[tuple[Tensor, ...], Endpoint],
        worker: Callable[[Tensor, int], dict[str, Tensor]],
        server: Memories,
    ) -> None:
        """Replaces all that there is by the memories of a checkpoint, and fills new endpoints with them.

        Args:
            ends: The empty endpoint of each bucket.
            worker: Gives this worker's memory of a parameter that is cut into a number of pieces, each ``[numel]``.
            server: The whole servers' memory of each parameter; the same on every rank.
        """
        self.worker, self.server, self._copies = {}, {}, ({}, {})
        for bucket, end in ends.items():
            self.convert(bucket, end.parts.count)
            for p in bucket:
                kept = worker(p, end.parts.count)
                self.worker[p] = {name: self.pieces.piece(whole, p) for name, whole in kept.items()}
                server[p] = {name: self.pieces.piece(whole, p) for name, whole in server[p].items()}
                if not end.servers_keep:  # the mean over the workers is the whole again
                    mine = self.worker[p]
                    mine["residual"] = server[p]["residual"] + mine.get("residual", 0)
        for bucket, end in ends.items():
            self.fill(end, bucket)
            if end.servers_keep and end.downlink is not None:
                like = torch.zeros((), dtype=end.dtype, device=end.sizes.device)
                whole = self.pieces.gather(server, bucket, "residual", like)
                for served in end.downlink.memory.tensors().values():
                    served.copy_(reference.shard_rows(whole, end.layout)[end.shard])

    def convert(self, parameters: Iterable[Tensor], count: int) -> None:
        """Converts what parameters left to another number of pieces.

        Args:
            parameters: The parameters.
            count: Pieces of each, the ranks of a node; 1 if each rank exchanges for itself.

        Raises:
            ValueError: Existing residuals belong to other ranks' pieces.
        """
        for p in parameters:
            before = self.pieces.counts.get(p, 1)
            if before != count:
                for copies in self._copies:  # zeros convert to zeros, and are made again
                    if not any(bool(kept.any()) for kept in copies.get(p, {}).values()):
                        copies.pop(p, None)
            sides = (self.worker, before), (self.server, 1), (self._copies[0], before), (self._copies[1], 1)
            if before != count and any(memory.get(p) for memory, _ in sides):
                if count != 1:
                    raise ValueError(
                        f"the residuals of a parameter are cut into {before} pieces, one a rank, and would have to be "
                        f"cut into {count}, for which ranks would need each other's. Save them with state_dict, and "
                        "load them with load_state_dict, which converts them."
                    )
                # Each rank is a worker of its own now, one of `before` times as many.
                for memory, factor in sides:
                    if p in memory:
                        memory[p] = {name: self.pieces.whole(piece, p) * factor for name, piece in memory[p].items()}
            self.pieces.counts[p] = count

    def follow_parameters(self) -> int:
        """Follows changes of the parameters' memory format and size; none of them may have an endpoint.

        Returns:
            How many parameters have another size now; their residuals are forgotten.

        Raises:
            ValueError: The order of a parameter's elements changed, and this rank holds only a piece of its residual.
        """
        resized = [parameter for parameter, form in self._forms.items() if form.numel != parameter.numel()]
        for parameter in resized:
            self.forget(parameter)
        self._follow_forms([*self._forms])
        return len(resized)

    def form(self, parameter: Tensor) -> Form:
        """The form in which the residuals of a parameter are."""
        return self._forms[parameter] if parameter in self._forms else Form.of(parameter)

    def _follow_forms(self, parameters: Iterable[Tensor]) -> None:
        """Brings the residuals of parameters that have no endpoint into the form that the parameters have now."""
        for parameter in parameters:
            before, now = self.form(parameter), Form.of(parameter)
            moves = before != now and not (before.by_indices and now.by_indices)
            if moves and self.pieces.counts.get(parameter, 1) > 1:
                raise ValueError(
                    f"a parameter of shape {now.shape} has another memory format than before, and each rank of a node "
                    "holds a piece of its residual. Save the residuals with state_dict before the change, and load "
                    "them with load_state_dict after it."
                )
            self._forms[parameter] = now
            for memories in (self.worker, self.server, *self._copies) if moves else ():
                if parameter in memories:
                    memories[parameter] = {
                        name: now.by_memory(before.by_index(part)) for name, part in memories[parameter].items()
                    }

    def forget(self, parameter: Tensor) -> None:
        """Drops all that a parameter kept."""
        for known in (self.worker, self.server, *self._copies, self._forms, self.pieces.counts):
            known.pop(parameter, None)


def server_memory(end: Endpoint) -> dict[str, Tensor]:
    """The server's memory of an endpoint, in the order of its bucket; empty where it serves nothing."""
    memory = {} if end.downlink is None else end.downlink.memory.tensors()
    return {name: _to_bucket(served, end) for name, served in memory.items()}


def _to_bucket(served: Tensor, end: Endpoint) -> Tensor:
    """What a server holds, ``[shard_size]``, at its places in the bucket, or this rank's part of it; zero elsewhere."""
    places = reference.flat_index(
        torch.arange(len(served), device=served.device).unsqueeze(0),
        end.layout,
        torch.tensor([[end.shard]], device=served.device),
    )[0]
    return served.new_zeros(end.layout.numel).index_add_(0, places, served)
