"""Residuals by parameter, since DDP regroups its buckets.

DDP's first bucket holds the whole model; later buckets follow the order in which gradients arrive, and every ``fit``
starts anew. A bucket with other parameters, or with the same in another order, gets a new endpoint. The old memories
move to it without communication, as one memory per parameter: a worker's residual is copied element by element, and a
rank adds its server residual, times W, to its own worker residual. As one of W workers it then sends that to the new
server, and the mean cancels the factor. The total mass does not change.

If the ranks of a node exchange as one worker, a rank holds the memory of its slice of every parameter, whatever bucket
the parameter is in (:class:`lightning_topk.core.layout.NodeShards`), and W is the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_topk.core.endpoint import BucketPlan, Endpoint
from lightning_topk.core.layout import NodeShards
from lightning_topk.core.ops import reference

Memories = dict[Tensor, dict[str, Tensor]]
"""Tensors by parameter and name: ``residual``, and ``velocity`` with momentum on the workers."""


Form = tuple[tuple[int, ...], tuple[int, ...]]
"""A parameter's shape, and its dimensions in the order in which DDP flattens its gradient.

That is the order of memory, which ``channels_last`` changes, if memory has no gaps. Residuals have it too; checkpoints
use index order, which never changes.
"""


def form_of(parameter: Tensor) -> Form:
    """The current form of a parameter."""
    dims, shape = range(parameter.ndim), tuple(parameter.shape)
    long = sorted((dim for dim in dims if shape[dim] > 1), key=parameter.stride, reverse=True)
    order = [*(dim for dim in dims if shape[dim] <= 1), *long]  # strides of the others mean nothing
    return shape, tuple(order if parameter.permute(order).is_contiguous() else dims)


def by_index(flat: Tensor, form: Form) -> Tensor:
    """Reorders ``[numel]`` from the order of DDP's buckets to index order."""
    shape, order = form
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(inverse).reshape(-1)


def by_memory(flat: Tensor, form: Form) -> Tensor:
    """Inverse of :func:`by_index`."""
    shape, order = form
    return flat.view(shape).permute(order).reshape(-1)


class Residuals:
    """The memories of one rank: by parameter, and in the endpoints of the buckets in use.

    During an exchange only the lane uses them; between two backward passes, the thread that runs backward does.
    """

    def __init__(self) -> None:
        self.state: Any = None
        """The state that uses them, or the last one that did."""
        self.rank = 0
        """This rank."""
        self.counts: dict[Tensor, int] = {}
        """Slices of a parameter among the ranks of a node; this rank holds slice ``rank % count``. 1 if missing."""
        self._reset = 0  # residuals dropped since the last warning: their parameter's size or memory format changed
        self._dropped = 0  # likewise, because their endpoint keeps none
        self._by_parameter: Memories = {}  # views of an endpoint's memory, while a parameter has an endpoint
        self._loaded: set[Tensor] = set()  # parameters whose memory every rank has in full, from a checkpoint
        self._forms: dict[Tensor, Form] = {}
        self._live: dict[tuple[Tensor, ...], Endpoint] = {}

    # -------------------------------------------------------------------------------- endpoints

    def endpoint(self, parameters: tuple[Tensor, ...], plan: BucketPlan) -> Endpoint:
        """Returns the endpoint for the next exchange of a bucket, with the memories of its parameters."""
        end = self._live.get(parameters)
        if end is None or end.plan is not plan:
            self.drop_endpoints(set(parameters))
            end = plan.endpoint(self.rank, parameters[0].dtype, parameters[0].device)
            self._fill(end, parameters)
            self._live[parameters] = end
        return end

    def drop_endpoints(self, parameters: set[Tensor]) -> None:
        """Drops the endpoints that hold any of these parameters; their next exchange creates new ones."""
        for bucket in [bucket for bucket in self._live if not parameters.isdisjoint(bucket)]:
            end = self._live.pop(bucket)
            for link in end.links:
                for tensor in link.memory.tensors().values():
                    if tensor.is_cuda:  # possibly created on another stream, and still in use on this one when freed
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
            for name, served in end.server_memory().items():  # `_by_parameter` has views of the worker's memory
                end.uplink.memory.tensors()[name] += served * end.plan.world

    def _fill(self, end: Endpoint, parameters: tuple[Tensor, ...]) -> None:
        """Moves the memories of the parameters into their new endpoint; drops those that it does not keep."""
        self.forget_changed(parameters)
        mine, nothing = end.uplink.memory.tensors(), {parameter: dict[str, Tensor]() for parameter in parameters}
        if not mine:
            self._dropped += sum(map(self._is_kept, parameters))
            self._by_parameter.update(nothing)
        self._cut(parameters, end.plan.parts.count)
        for name, flat in mine.items():
            flat.copy_(_gather(self._by_parameter, parameters, end.plan.parts.slices, name, flat))
        self._by_parameter.update(nothing)
        _scatter(self._by_parameter, parameters, end, mine)

    def _cut(self, parameters: Iterable[Tensor], count: int) -> None:
        """Cuts the memories of parameters into another number of slices."""
        for p in parameters:
            was, kept, parts = self.counts.get(p, 1), self._by_parameter.get(p, {}), NodeShards((p.numel(),), count)
            if was != count:
                if count != 1 and p not in self._loaded and self._is_kept(p):
                    raise ValueError(
                        f"the residuals of a parameter are cut into {was} slices, one per rank, and cutting them into "
                        f"{count} needs the slices of other ranks. Save them with state_dict, and load them with "
                        "load_state_dict, which converts them."
                    )
                for name, part in kept.items():
                    spread = self._spread(part, p)
                    # Without slices, each rank is its own worker, one of `was` times as many.
                    kept[name] = spread * was if count == 1 else reference.split_parts(spread, parts)[self.rank % count]
            self.counts[p] = count
            self._loaded.discard(p)

    def _is_kept(self, parameter: Tensor) -> bool:
        """Whether a parameter has a memory that is not zero."""
        return any(bool(part.any()) for part in self._by_parameter.get(parameter, {}).values())

    # -------------------------------------------------------------------------------- all parameters

    def move_to(self, state: Any, rank: int) -> None:
        """Prepares for the exchanges of another state, whose settings may differ."""
        self.offload_to_cpu()
        self.forget_changed()
        self.state, self.rank = state, rank

    def offload_to_cpu(self) -> None:
        """Drops all endpoints and moves their memories to the CPU, until the next exchange of their parameters."""
        self.drop_endpoints({*self._by_parameter})
        for kept in self._by_parameter.values():
            kept.update({name: part.cpu() for name, part in kept.items()})

    def keep_only(self, parameters: Iterable[Tensor]) -> None:
        """Forgets all parameters but these, such as those of a layer that was replaced."""
        gone = {*self._by_parameter, *self._forms} - {*parameters}
        self.drop_endpoints(gone)
        for parameter in gone:
            self._forget(parameter)

    def forget_changed(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Drops the residuals of parameters whose size or memory format changed; none of them may have an endpoint."""
        for parameter in [*self._forms] if parameters is None else parameters:
            now = form_of(parameter)
            if self._forms.get(parameter, now) != now:
                self._reset += self._is_kept(parameter)
                self._forget(parameter)
            self._forms[parameter] = now

    def _forget(self, parameter: Tensor) -> None:
        self._loaded.discard(parameter)
        for known in (self._by_parameter, self._forms, self.counts):
            known.pop(parameter, None)

    def restore(self, memories: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Replaces all memories by a checkpoint's ``[numel]``: the mean over the workers, on every rank."""
        self._live.clear()
        self.counts.clear()
        self._by_parameter = {parameter: dict(kept) for parameter, kept in memories.items()}
        self._forms = {parameter: form_of(parameter) for parameter in memories}
        self._loaded = set(memories)

    # -------------------------------------------------------------------------------- queries

    def take_warnings(self) -> list[str]:
        """Returns warnings about residuals that were dropped since the last call."""
        reset, dropped, self._reset, self._dropped, found = self._reset, self._dropped, 0, 0, []
        if reset:
            which = "1 parameter has" if reset == 1 else f"{reset} parameters have"
            found.append(f"lightning_topk: {which} a different size or memory format now; the residuals start at zero.")
        if dropped:
            found.append(
                f"lightning_topk: the residuals of {dropped} parameter{'s' * (dropped > 1)} from an earlier run were "
                "dropped, since this run keeps none: the gradients in them are lost."
            )
        return found

    def held(self, name: str = "residual") -> dict[Tensor, tuple[Tensor, Tensor]]:
        """Returns this rank's memory ``name`` of each exchanged parameter, as a worker and as a server.

        Each is ``[numel]``; the server's is zero where another rank serves. Over all ranks, the mean of the first plus
        the sum of the second is the gradient not yet delivered. So a rank that holds a slice for its node returns it
        times the ranks per node, and zero elsewhere.
        """
        server: Memories = {}
        for bucket, end in self._live.items():
            _scatter(server, bucket, end, end.server_memory())
        found = {}
        for p, kept in self._by_parameter.items():
            count, nothing = self.counts.get(p, 1), torch.zeros((), device=p.device).expand(p.numel())
            worker = self._spread(kept[name], p) * count if name in kept and count > 1 else kept.get(name, nothing)
            mine = server.get(p, {})
            found[p] = worker, self._spread(mine[name], p) if name in mine else nothing
        return found

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether a parameter was exchanged or restored."""
        return parameter in self._by_parameter

    def form(self, parameter: Tensor) -> Form:
        """The form of a parameter's residuals."""
        return self._forms[parameter] if parameter in self._forms else form_of(parameter)

    def energy(self) -> Tensor:
        """``[2]`` float64: the sums of squares of this rank's worker and server residuals.

        The mean of the first over the ranks is the mean over the workers, even if the ranks of a node are one worker.
        """
        energy = torch.zeros(2, dtype=torch.float64)
        for end in self._live.values():
            for side, link in enumerate(end.links):
                kept = link.memory.tensors().get("residual")
                if kept is not None:
                    shared = 1 if side else end.plan.parts.count
                    energy[side] += shared * torch.linalg.vector_norm(kept, dtype=torch.float64).square().cpu()
        return energy

    # -------------------------------------------------------------------------------- slices

    def _spread(self, part: Tensor, parameter: Tensor) -> Tensor:
        """Places a slice of a parameter in a tensor ``[numel]`` that is zero elsewhere."""
        count = self.counts.get(parameter, 1)
        if count == 1:
            return part
        rows = part.new_zeros(count, len(part))
        rows[self.rank % count] = part
        return rows.view(-1)[: parameter.numel()]


def _scatter(memories: Memories, bucket: tuple[Tensor, ...], end: Endpoint, memory: Mapping[str, Tensor]) -> None:
    """Splits a bucket's tensors ``[slices]`` into ``memories``, by parameter."""
    for name, flat in memory.items():
        for parameter, part in zip(bucket, flat.split(list(end.plan.parts.slices)), strict=True):
            memories.setdefault(parameter, {})[name] = part


def _gather(memories: Memories, bucket: tuple[Tensor, ...], sizes: Sequence[int], name: str, like: Tensor) -> Tensor:
    """Inverse of :func:`_scatter`: ``[sum of sizes]``, dtype and device of ``like``; zero for missing memories."""
    zero = torch.zeros((), dtype=like.dtype, device=like.device)  # not a whole model's zeros on the CPU
    found = [memories.get(p, {}).get(name, zero.expand(size)) for p, size in zip(bucket, sizes, strict=True)]
    for part in found:
        if part.is_cuda:  # possibly created on another stream, such as a checkpoint's, and freed after this
            part.record_stream(torch.cuda.current_stream(part.device))
    return torch.cat([part.to(like.device, like.dtype) for part in found])
