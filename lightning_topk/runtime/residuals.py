"""Residuals belong to parameters: they follow them when DDP regroups its buckets.

DDP's first bucket holds the whole model; later buckets come in the order in which gradients arrive, and every ``fit``
starts anew. A bucket of other parameters, or of the same in another order, gets links of its own, and what the parameters'
elements left in the old ones moves over without communication:

* a worker's residual is copied, element by element;
* of the server's residual a rank copies what it serves in the new bucket too. What it served and serves no more it adds,
  W-fold, to its own worker residual (to its next gradient, if workers keep nothing): as one of W workers it then sends it to
  the new server, and the mean undoes the factor. The sum of all mass is the same before and after.

Where the ranks of a node exchange as one worker, a rank's memories are of its piece of every parameter, whatever bucket it is
in (:class:`lightning_topk.core.layout.Parts`), and W is the number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_topk.core.exchange import Endpoint
from lightning_topk.core.layout import Parts
from lightning_topk.core.memory import Leftover
from lightning_topk.core.ops import reference
from lightning_topk.runtime.skipped_steps import Undo

Memories = dict[Tensor, dict[str, Tensor]]
"""Tensors by parameter and name."""


class Residuals:
    """The endpoints of one rank, found by the parameters of their bucket."""

    def __init__(self) -> None:
        self.rank = 0
        """This rank."""
        self.counts: dict[Tensor, int] = {}
        """Pieces into which the ranks of a node cut a parameter: this rank's memory is of piece ``rank % count``. Else 1."""
        self.steps = 0
        """Gradients exchanged so far, for schedules and selectors."""
        self.learning_rates: list[float] = []
        """The optimizers', in the last step, for residuals that follow them."""
        self.buckets: tuple[tuple[Tensor, ...], ...] = ()
        """The parameters that were exchanged together in the last backward pass."""
        self.resumed = 0
        """Backward passes in which DDP may not have built ``buckets``, which are those of a checkpoint, yet."""
        self._live: dict[tuple[Tensor, ...], Endpoint] = {}
        self._undo: dict[tuple[Tensor, ...], Undo] = {}
        """With a GradScaler: what brings back what was sent for skipped steps."""
        self._worker: Memories = {}
        """Each parameter's slice of its endpoint's worker memory: views."""
        self._server: Memories = {}
        """What this rank serves of parameters whose bucket was regrouped and has not come yet."""

    @property
    def endpoints(self) -> Iterable[Endpoint]:
        """The endpoints in use."""
        for bucket in self._live:
            self._decide(bucket)
        return self._live.values()

    def endpoint(
        self,
        parameters: tuple[Tensor, ...],
        make: Callable[[], Endpoint],
        device: torch.device,
        lr_ratio: float = 1.0,
        guard: Callable[[Endpoint], Undo] | None = None,
    ) -> Endpoint:
        """The endpoint of a bucket for its next exchange, with all that its parameters have left so far.

        Args:
            parameters: The bucket's parameters, in its order.
            make: Makes an endpoint with empty memories, for a bucket that was not seen before.
            device: Where the bucket lives.
            lr_ratio: The last step's learning rate over this step's, by which residuals are scaled (Zheng et al. 2019).
            guard: Makes what undoes skipped steps of a new endpoint, if a scaler may skip some.
        """
        if parameters not in self._live:
            self.dissolve(set(parameters))
            end = make()
            self._fill(end, parameters, device)
            self._live[parameters] = end
        end = self._live[parameters]
        self._decide(parameters)
        if lr_ratio != 1:
            end.rescale_(lr_ratio)
        if guard is not None:
            if parameters not in self._undo:
                self._undo[parameters] = guard(end)
            self._undo[parameters].begin(renew=lr_ratio != 1)
        return end

    def forget_steps(self) -> None:
        """Decides what becomes of the last pass, and undoes nothing that was sent before now: other optimizers have come."""
        for undo in self._undo.values():
            undo.decide()
        self._undo.clear()

    def convert(self, parameters: Iterable[Tensor], count: int) -> None:
        """Has what parameters left be of another piece of them.

        Args:
            parameters: The parameters.
            count: Pieces of each, the ranks of a node; 1 if each rank exchanges for itself.

        Raises:
            ValueError: What there is would have to go to other ranks.
        """
        for p in parameters:
            before = self.counts.get(p, 1)
            if before != count and (self._worker.get(p) or p in self._server):
                if count != 1:
                    raise ValueError(
                        f"the residuals of a parameter are of one piece of {before} and would now be of one of {count}, which other "
                        "ranks hold. Go on with them by state_dict and load_state_dict, which convert them."
                    )
                # Each rank is a worker of its own now, one of `before` times as many.
                for memory, factor in ((self._worker, before), (self._server, 1)):
                    if p in memory:
                        memory[p] = {name: self._whole(piece, p) * factor for name, piece in memory[p].items()}
            self.counts[p] = count

    def settle(self) -> None:
        """Takes all endpoints apart and moves what they held to the CPU, until buckets with these parameters come again."""
        self.dissolve({parameter for bucket in self._live for parameter in bucket})
        for parts in (self._worker, self._server):
            for memory in parts.values():
                memory.update({name: part.cpu() for name, part in memory.items()})

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
            Two residuals ``[numel]`` for each parameter; the server's is zero where another rank serves. The mean over the
            ranks of the first plus the sum of the second is the gradient that is still to be delivered. So a rank that holds a
            piece for its node shows it times the ranks of a node, and zero elsewhere.
        """

        def residual(parts: dict[str, Tensor], parameter: Tensor, count: int) -> Tensor:
            kept = parts.get("residual", torch.zeros(()).expand(parameter.numel()))
            return kept if count == 1 else kept * count

        return {
            parameter: (residual(worker, parameter, self.counts.get(parameter, 1)), residual(server, parameter, 1))
            for parameter, (worker, server) in self.parts().items()
        }

    def parts(self) -> dict[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """All memories by parameter: the worker's and the server's, each ``[numel]`` by name; views where they are in use.

        Every rank names a server's residual, whether it serves or not.
        """
        server = {parameter: dict(parts) for parameter, parts in self._server.items()}
        for bucket, end in self._live.items():
            self._decide(bucket)
            self._scatter(server, bucket, _served(end))
        known = {*self._worker, *server, *(parameter for bucket in self._live for parameter in bucket)}
        for p in known:
            if not server.get(p):
                dtype = torch.promote_types(p.dtype, torch.float32)
                server[p] = {"residual": torch.zeros(self._layout(p).numel, dtype=dtype)}
        return {
            p: (
                {name: self._whole(piece, p) for name, piece in self._worker.get(p, {}).items()},
                {name: self._whole(piece, p) for name, piece in server[p].items()},
            )
            for p in known
        }

    def _layout(self, *parameters: Tensor) -> Parts:
        count = self.counts.get(parameters[0], 1)
        return Parts(tuple(parameter.numel() for parameter in parameters), count)

    def _whole(self, piece: Tensor, parameter: Tensor) -> Tensor:
        """A piece of a parameter at its place among ``[numel]``; zero elsewhere."""
        parts = self._layout(parameter)
        if parts.count == 1:
            return piece
        rows = piece.new_zeros(parts.count, len(piece))
        rows[self.rank % parts.count] = piece
        whole = piece.new_empty(parameter.numel())
        reference.join_parts(rows, parts, whole)
        return whole

    def _piece(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This rank's piece of ``[numel]`` that belong to a parameter."""
        parts = self._layout(parameter)
        return reference.split_parts(whole, parts)[self.rank % parts.count]

    def restore(
        self,
        buckets: Iterable[tuple[Tensor, ...]],
        worker: Callable[[Tensor, int], dict[str, Tensor]],
        server: Memories,
        make: Callable[[tuple[Tensor, ...]], Endpoint],
    ) -> None:
        """Replaces all that there is by the residuals of a checkpoint.

        Args:
            buckets: Parameters that were exchanged together.
            worker: Gives this worker's memory of a parameter that is cut into a number of pieces, each ``[numel]``.
            server: The whole servers' memory of each parameter; the same on every rank.
            make: Makes the endpoint of a bucket.
        """
        self.dissolve({parameter for bucket in self._live for parameter in bucket})
        self._worker, self._server = {}, {}
        self.buckets, self.resumed = tuple(buckets), 2  # with static_graph; else 1
        ends = [make(bucket) for bucket in self.buckets]
        for bucket, end in zip(self.buckets, ends, strict=True):
            self.convert(bucket, end.parts.count)
        for p in [p for bucket in self.buckets for p in bucket]:
            kept = worker(p, self.counts[p])
            self._worker[p] = {name: self._piece(whole, p) for name, whole in kept.items()}
            server[p] = {name: self._piece(whole, p) for name, whole in server[p].items()}
        for bucket, end in zip(self.buckets, ends, strict=True):
            if not end.servers_keep:
                for p in bucket:  # the mean over the workers is the whole again
                    kept = self._worker[p]
                    kept["residual"] = server[p]["residual"] + kept.get("residual", 0)
            self._fill(end, bucket, end.sizes.device)
            if end.servers_keep and end.downlink is not None:
                like = torch.zeros((), dtype=end.dtype, device=end.sizes.device)
                whole = self._gather(server, bucket, "residual", like)
                for served in end.downlink.memory.tensors().values():
                    served.copy_(reference.shard_rows(whole, end.layout)[end.shard])
            self._live[bucket] = end

    def retain(self, parameters: Iterable[Tensor]) -> None:
        """Forgets all parameters but these: another model has no use for the residuals of the last."""
        keep = set(parameters)
        self._live = {bucket: end for bucket, end in self._live.items() if keep.issuperset(bucket)}
        self._undo = {bucket: undo for bucket, undo in self._undo.items() if bucket in self._live}
        self.buckets = tuple(bucket for bucket in self.buckets if keep.issuperset(bucket))
        for known in (self._worker, self._server, self.counts):
            for parameter in known.keys() - keep:
                del known[parameter]

    def dissolve(self, parameters: set[Tensor]) -> None:
        """Takes apart the endpoints that hold any of these parameters; their next exchange makes new ones."""
        for bucket in [bucket for bucket in self._live if not parameters.isdisjoint(bucket)]:
            self._decide(bucket)
            self._undo.pop(bucket, None)
            for link in self._live[bucket].links:
                for tensor in link.memory.tensors().values():
                    if tensor.is_cuda:  # made on one stream, perhaps, and still in use on this one when it is freed
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self._scatter(self._server, bucket, _served(self._live.pop(bucket)))

    def _fill(self, end: Endpoint, parameters: tuple[Tensor, ...], device: torch.device) -> None:
        """Moves what the parameters left into the memories of their new endpoint."""
        self.convert(parameters, end.parts.count)
        known = [side.get(p, {}) for side in (self._worker, self._server) for p in parameters]
        if not end.uplink.memory.tensors() and any(bool(kept.any()) for each in known for kept in each.values()):
            end.uplink.memory = Leftover(end.layout.numel, end.dtype, device)
        worker = end.uplink.memory.tensors()
        for name, flat in worker.items():
            flat.copy_(self._gather(self._worker, parameters, name, flat))
        like = torch.zeros((), dtype=end.dtype, device=device)
        for parameter in parameters:
            self._worker[parameter] = {}  # what the new settings keep no more would be stale
        self._scatter(self._worker, parameters, worker)
        if any(parameter in self._server for parameter in parameters):
            left = self._gather(self._server, parameters, "residual", like)
            for served in [] if end.downlink is None else end.downlink.memory.tensors().values():
                served.copy_(reference.shard_rows(left, end.layout)[end.shard])
                left -= _to_bucket(served, end)
            if worker:
                end.uplink.memory.add_(left.mul_(end.world))
        for parameter in parameters:
            self._server.pop(parameter, None)

    def _scatter(self, parts: Memories, parameters: tuple[Tensor, ...], memory: dict[str, Tensor]) -> None:
        """Enters each parameter's piece of tensors that are in the order of a bucket."""
        for name, flat in memory.items():
            for parameter, part in zip(parameters, flat.split(self._layout(*parameters).pieces), strict=True):
                parts.setdefault(parameter, {})[name] = part

    def _gather(self, parts: Memories, parameters: tuple[Tensor, ...], name: str, like: Tensor) -> Tensor:
        """``[pieces]`` in the order of the parameters, dtype and device of ``like``; zero where nothing is known."""
        zero = torch.zeros((), dtype=like.dtype)
        found = [
            parts.get(parameter, {}).get(name, zero.expand(size))
            for parameter, size in zip(parameters, self._layout(*parameters).pieces, strict=True)
        ]
        return torch.cat([part.to(like.device, like.dtype) for part in found])


def _served(end: Endpoint) -> dict[str, Tensor]:
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
