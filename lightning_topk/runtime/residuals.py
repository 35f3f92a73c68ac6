"""Residuals belong to parameters: they follow them when DDP regroups its buckets.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core.exchange import Endpoint
from lightning_topk.core.layout import Parts
from lightning_topk.core.memory import Leftover
from lightning_topk.core.ops import reference
from lightning_topk.runtime.forms import Form
from lightning_topk.runtime.skipped_steps import Undo

Memories = dict[Tensor, dict[str, Tensor]]
"""Tensors by parameter and name."""


@dataclass
class Progress:
    """How far a run has come, for what depends on it; written between two backward passes.

    Attributes:
        steps: Gradients exchanged so far, for schedules and selectors.
        learning_rates: The optimizers', in the last step, for residuals that follow them.
        buckets: The parameters that were exchanged together in the last backward pass.
        resumed: Backward passes in which DDP may not have built ``buckets``, which are those of a checkpoint, yet.
    """

    steps: int = 0
    learning_rates: list[float] = field(default_factory=list)
    buckets: tuple[tuple[Tensor, ...], ...] = ()
    resumed: int = 0


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


class Residuals:
    """The endpoints of one rank, found by the parameters of their bucket.

    While an exchange is under way only the lane uses them; the caller's side does between two backward passes.
    """

    def __init__(self) -> None:
        self.pieces = Pieces()
        self.progress = Progress()
        self.stand_ins: dict[str, Tensor] = {}
        """What stands for parameters that are sharded, by name (:class:`lightning_topk.fsdp.Unit`)."""
        self._live: dict[tuple[Tensor, ...], Endpoint] = {}
        self._settings: dict[tuple[Tensor, ...], TopKConfig] = {}
        """The settings with which each endpoint was made."""
        self._undo: dict[tuple[Tensor, ...], Undo] = {}
        """With a GradScaler: what brings back what was sent for skipped steps."""
        self._worker: Memories = {}
        """Each parameter's slice of its endpoint's worker memory: views."""
        self._server: Memories = {}
        """What this rank serves of parameters whose bucket was regrouped and has not come yet."""
        self._copies: tuple[Memories, Memories] = {}, {}
        """The same two as they were before a step that the scaler may still skip, until the new buckets have come."""
        self._forms: dict[Tensor, Form] = {}
        """The form that each parameter had when its endpoint was made."""

    @property
    def endpoints(self) -> Iterable[Endpoint]:
        """The endpoints in use."""
        for bucket in self._live:
            self._decide(bucket)
        return self._live.values()

    def endpoint(
        self,
        parameters: tuple[Tensor, ...],
        config: TopKConfig,
        make: Callable[[], Endpoint],
        lr_ratio: float = 1.0,
        guard: Callable[[Endpoint], Undo] | None = None,
    ) -> Endpoint:
        """The endpoint of a bucket for its next exchange, with all that its parameters have left so far.

        Args:
            parameters: The bucket's parameters, in its order.
            config: The settings in force for the bucket.
            make: Makes an endpoint with empty memories, for a bucket that is new, or whose settings are.
            lr_ratio: The last step's learning rate over this step's, by which residuals are scaled (Zheng et al. 2019).
            guard: Makes what undoes skipped steps of a new endpoint, if a scaler may skip some.
        """
        before: list[Tensor] = []
        if parameters not in self._live or self._settings[parameters] != config:
            self.dissolve(set(parameters))
            end = make()
            before = self._fill(end, parameters)
            self._live[parameters], self._settings[parameters] = end, config
        end = self._live[parameters]
        self._decide(parameters)
        if lr_ratio != 1:
            end.rescale_(lr_ratio)
        if guard is not None:
            if parameters not in self._undo:
                self._undo[parameters] = guard(end)
                self._undo[parameters].before = before
            self._undo[parameters].begin(renew=lr_ratio != 1)
        return end

    def begin_pass(self) -> None:
        """Forgets copies of parameters whose bucket was dissolved in the last pass, and has not come again."""
        for copies in self._copies:
            copies.clear()

    def forget_steps(self) -> None:
        """Decides what becomes of the last pass; from now on, other optimizers decide."""
        for undo in self._undo.values():
            undo.decide()
        self._undo.clear()

    def convert(self, parameters: Iterable[Tensor], count: int) -> None:
        """Has what parameters left be of another piece of them.

        Args:
            parameters: The parameters.
            count: Pieces of each, the ranks of a node; 1 if each rank exchanges for itself.

        Raises:
            ValueError: Existing residuals belong to other ranks' pieces.
        """
        for p in parameters:
            before = self.pieces.counts.get(p, 1)
            if before != count and (self._worker.get(p) or p in self._server):
                if count != 1:
                    raise ValueError(
                        f"the residuals of a parameter are cut into {before} pieces, one a rank, and would have to be "
                        f"cut into {count}, for which ranks would need each other's. Save them with state_dict, and "
                        "load them with load_state_dict, which converts them."
                    )
                # Each rank is a worker of its own now, one of `before` times as many.
                for memory, factor in ((self._worker, before), (self._server, 1)):
                    if p in memory:
                        memory[p] = {name: self.pieces.whole(piece, p) * factor for name, piece in memory[p].items()}
            self.pieces.counts[p] = count

    def settle(self) -> None:
        """Takes all endpoints apart and moves what they held to the CPU, until their parameters come again."""
        self.dissolve({parameter for bucket in self._live for parameter in bucket})
        for parts in (self._worker, self._server):
            for memory in parts.values():
                memory.update({name: part.cpu() for name, part in memory.items()})

    def follow_parameters(self) -> int:
        """Follows changes of the parameters' memory format and size, after :meth:`settle`.

        Returns:
            How many parameters have another size now; their residuals are forgotten.

        Raises:
            ValueError: This rank holds but a piece of a residual whose elements have another order now.
        """
        resized = [parameter for parameter, form in self._forms.items() if form.numel != parameter.numel()]
        for parameter in resized:
            self._forget(parameter)
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
            for memories in (self._worker, self._server, *self._copies) if moves else ():
                if parameter in memories:
                    memories[parameter] = {
                        name: now.by_memory(before.by_index(part)) for name, part in memories[parameter].items()
                    }

    def _forget(self, parameter: Tensor) -> None:
        for known in (self._worker, self._server, *self._copies, self._forms, self.pieces.counts):
            known.pop(parameter, None)

    def undelivered(self) -> bool:
        """Whether something that other settings left is not delivered yet, or would not be if the step is skipped."""
        kept: list[Tensor] = []
        for bucket, end in self._live.items():
            if isinstance(end.uplink.memory, Leftover):
                kept += [end.uplink.memory.residual, *(self._undo[bucket].before if bucket in self._undo else ())]
        return any(bool(each.any()) for each in kept)

    @property
    def undecided(self) -> bool:
        """Whether something was sent for a step of which the scaler has not said yet whether it is taken."""
        return any(undo.open for undo in self._undo.values())

    def _decide(self, bucket: tuple[Tensor, ...]) -> None:
        if bucket in self._undo:
            self._undo[bucket].decide()

    def held(self) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """What this rank holds of each parameter that was exchanged: as a worker and as a server.

        Returns:
            Two residuals ``[numel]`` for each parameter; the server's is zero where another rank serves. The mean over
            the ranks of the first plus the sum of the second is the gradient that is still to be delivered. So a rank
            that holds a piece for its node shows it times the ranks of a node, and zero elsewhere.
        """

        def residual(parts: dict[str, Tensor], parameter: Tensor, count: int) -> Tensor:
            kept = parts.get("residual", torch.zeros(()).expand(parameter.numel()))
            return kept if count == 1 else kept * count

        return {
            parameter: (
                residual(worker, parameter, self.pieces.counts.get(parameter, 1)),
                residual(server, parameter, 1),
            )
            for parameter, (worker, server) in self.memories().items()
        }

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

    def memories(self) -> dict[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """All memories by parameter: the worker's and the server's, each ``[numel]`` by name.

        They are views where they are in use. Every rank names a server's residual, whether it serves or not.
        """
        server = {parameter: dict(parts) for parameter, parts in self._server.items()}
        for bucket, end in self._live.items():
            self._decide(bucket)
            self.pieces.scatter(server, bucket, end.parts.pieces, server_memory(end))
        known = {*self._worker, *server, *(parameter for bucket in self._live for parameter in bucket)}
        for p in known:
            if not server.get(p):
                dtype = torch.promote_types(p.dtype, torch.float32)
                server[p] = {"residual": torch.zeros(self.pieces.layout(p).numel, dtype=dtype)}
        return {
            p: (
                {name: self.pieces.whole(piece, p) for name, piece in self._worker.get(p, {}).items()},
                {name: self.pieces.whole(piece, p) for name, piece in server[p].items()},
            )
            for p in known
        }

    def restore(
        self,
        buckets: Iterable[tuple[Tensor, ...]],
        worker: Callable[[Tensor, int], dict[str, Tensor]],
        server: Memories,
        make: Callable[[tuple[Tensor, ...]], tuple[TopKConfig, Endpoint]],
    ) -> None:
        """Replaces all that there is by the residuals of a checkpoint.

        Args:
            buckets: Parameters that were exchanged together.
            worker: Gives this worker's memory of a parameter that is cut into a number of pieces, each ``[numel]``.
            server: The whole servers' memory of each parameter; the same on every rank.
            make: Gives the settings in force for a bucket, and makes its endpoint.
        """
        self.dissolve({parameter for bucket in self._live for parameter in bucket})
        self._worker, self._server, self._copies = {}, {}, ({}, {})
        progress = self.progress
        progress.buckets, progress.resumed = tuple(buckets), 2  # with static_graph; else 1
        made = [make(bucket) for bucket in progress.buckets]
        for bucket, (_, end) in zip(progress.buckets, made, strict=True):
            self.convert(bucket, end.parts.count)
        for p in [p for bucket in progress.buckets for p in bucket]:
            kept = worker(p, self.pieces.counts[p])
            self._worker[p] = {name: self.pieces.piece(whole, p) for name, whole in kept.items()}
            server[p] = {name: self.pieces.piece(whole, p) for name, whole in server[p].items()}
        for bucket, (config, end) in zip(progress.buckets, made, strict=True):
            if not end.servers_keep:
                for p in bucket:  # the mean over the workers is the whole again
                    kept = self._worker[p]
                    kept["residual"] = server[p]["residual"] + kept.get("residual", 0)
            self._fill(end, bucket)
            if end.servers_keep and end.downlink is not None:
                like = torch.zeros((), dtype=end.dtype, device=end.sizes.device)
                whole = self.pieces.gather(server, bucket, "residual", like)
                for served in end.downlink.memory.tensors().values():
                    served.copy_(reference.shard_rows(whole, end.layout)[end.shard])
            self._live[bucket], self._settings[bucket] = end, config

    def retain(self, parameters: Iterable[Tensor]) -> None:
        """Forgets all parameters but these: another model has no use for the residuals of the last, and begins anew."""
        keep = set(parameters)
        known = {*self._worker, *self._server, *(parameter for bucket in self.progress.buckets for parameter in bucket)}
        if known and keep.isdisjoint(known):
            self.progress = Progress()
        self._live = {bucket: end for bucket, end in self._live.items() if keep.issuperset(bucket)}
        self._settings = {bucket: config for bucket, config in self._settings.items() if bucket in self._live}
        self._undo = {bucket: undo for bucket, undo in self._undo.items() if bucket in self._live}
        progress = self.progress
        progress.buckets = tuple(bucket for bucket in progress.buckets if keep.issuperset(bucket))
        for parameter in {*known, *self._forms} - keep:
            self._forget(parameter)

    def dissolve(self, parameters: set[Tensor]) -> None:
        """Takes apart the endpoints that hold any of these parameters; their next exchange makes new ones."""
        for bucket in [bucket for bucket in self._live if not parameters.isdisjoint(bucket)]:
            self._decide(bucket)
            for link in self._live[bucket].links:
                for tensor in link.memory.tensors().values():
                    if tensor.is_cuda:  # made on one stream, perhaps, and still in use on this one when it is freed
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
                if isinstance(link.memory, Leftover) and not link.memory.residual.any():  # it was delivered
                    self._worker.update({parameter: {} for parameter in bucket})
            del self._settings[bucket]
            end, undo = self._live.pop(bucket), self._undo.pop(bucket, None)
            if undo is not None and undo.open:
                before = iter(undo.before)
                for copies, link in zip(self._copies, end.links, strict=False):
                    kept = {name: next(before) for name in link.memory.tensors()}
                    if link is end.downlink:
                        kept = {name: _to_bucket(served, end) for name, served in kept.items()}
                    self.pieces.scatter(copies, bucket, end.parts.pieces, kept)
            self.pieces.scatter(self._server, bucket, end.parts.pieces, server_memory(end))

    def _fill(self, end: Endpoint, parameters: tuple[Tensor, ...]) -> list[Tensor]:
        """Moves what the parameters left into the memories of their new endpoint.

        Returns:
            The memories as they were before a step that the scaler may still skip; empty if there is no such step.
        """
        self._follow_forms(parameters)
        self.convert(parameters, end.parts.count)
        sides = self._worker, self._server
        known = [side.get(p, {}) for side in (*sides, *self._copies) for p in parameters]
        if not end.uplink.memory.tensors() and any(bool(kept.any()) for each in known for kept in each.values()):
            end.uplink.memory = Leftover(end.layout.numel, end.dtype, end.sizes.device)
        before: list[Tensor] = []
        if any(parameter in copies for copies in self._copies for parameter in parameters):
            self._pour(end, parameters, *(side | copies for side, copies in zip(sides, self._copies, strict=True)))
            filled = [tensor for link in end.links for tensor in link.memory.tensors().values()]
            before = [tensor.clone() for tensor in filled]
            for tensor in filled:
                tensor.zero_()
        self._pour(end, parameters, *sides)
        for parameter in parameters:
            for memories in (self._server, *self._copies):
                memories.pop(parameter, None)
            self._worker[parameter] = {}  # what the new settings keep no more would be stale
        self.pieces.scatter(self._worker, parameters, end.parts.pieces, end.uplink.memory.tensors())
        return before

    def _pour(self, end: Endpoint, parameters: tuple[Tensor, ...], worker: Memories, server: Memories) -> None:
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
