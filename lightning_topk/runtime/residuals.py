"""Keeps residuals by parameter, since DDP regroups its buckets.

DDP's first bucket holds the whole model; later buckets follow the order in which gradients arrive, and every ``fit``
starts anew. A bucket with other parameters, or with the same in another order, gets a new endpoint. The old memories
move to it without communication, as one memory per parameter: a worker's residual is copied element by element, and a
rank adds its server residual, times W, to its own worker residual. As one of W workers it then sends that to the new
server, and the mean cancels the factor. The total mass does not change.

If the ranks of a node exchange as one worker, a rank holds the memory of its slice of every parameter, whatever bucket
the parameter is in (:class:`lightning_topk.core.layout.NodeShards`), and W is the number of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core import ops
from lightning_topk.core.endpoint import BucketPlan, Endpoint
from lightning_topk.core.layout import NodeShards
from lightning_topk.core.link import multiply_
from lightning_topk.core.ops import reference
from lightning_topk.optim.applied import FALL, Rates

TOGETHER = 1 << 21
"""Elements that a checkpoint collects at once, from memories that are in no bucket."""
Form = tuple[tuple[int, ...], tuple[int, ...]]
"""A parameter's shape, and its dimensions in the order in which DDP flattens its gradient.

If memory has no gaps, that is the order of memory, which ``channels_last`` changes. Residuals have the same order;
checkpoints use index order, which never changes.
"""


def form_of(parameter: Tensor) -> Form:
    """The current form of a parameter."""
    dims, shape = range(parameter.ndim), tuple(parameter.shape)
    long = sorted((dim for dim in dims if shape[dim] > 1), key=parameter.stride, reverse=True)
    order = [*(dim for dim in dims if shape[dim] <= 1), *long]  # strides of dimensions with one element mean nothing
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


@dataclass(eq=False)
class _Alike:
    """Parameters of a bucket in the same parameter group (or in none, ``None``), whose rates were always the same.

    ``rate`` is the learning rate at which their memories count; None until the step after the first exchange.
    """

    group: int | None = None
    rate: float | None = None


@dataclass
class _Kept:
    """The memories of one parameter on a rank.

    Attributes:
        form: The form of the memories.
        parts: Memories by name, ``residual`` and, with momentum on the workers, ``velocity``: ``[numel]``, or a slice
            of it. While the parameter has an endpoint, they are views of the endpoint's memory.
        count: Slices of the parameter among the ranks of a node; this rank holds slice ``rank % count``.
        loaded: Whether every rank has the memories in full, from a checkpoint.
        alike: The parameters whose memories count at the same rate, including this one.
    """

    form: Form
    parts: dict[str, Tensor] = field(default_factory=dict)
    count: int = 1
    loaded: bool = False
    alike: _Alike = field(default_factory=_Alike)

    def is_zero(self) -> bool:
        """Whether nothing is left to deliver. Waits for the device."""
        return not any(part.any() for part in self.parts.values())

    def spread(self, part: Tensor, numel: int, rank: int, times: int = 1) -> Tensor:
        """Places this rank's slice, multiplied by ``times``, in a tensor ``[numel]`` that is zero elsewhere."""
        if self.count == 1:
            return part
        rows = part.new_zeros(self.count, len(part))
        rows[rank % self.count] = part * times
        return rows.view(-1)[:numel]


class Residuals:
    """The memories of one rank: by parameter, and in the endpoints of the buckets in use.

    During an exchange only the lane uses them; between two backward passes, the thread that runs backward does.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.state: Any = None
        """The state that uses them, or the last one that did."""
        self._kept: dict[Tensor, _Kept] = {}
        self._live: list[Bucket] = []  # buckets with an endpoint
        self._scratch = ops.Scratch()  # shared by the exchanges of a lane
        self.dropped = Counter[str]()  # parameters whose residuals were dropped since the last warning, by reason

    # -------------------------------------------------------------------------------- endpoints

    def endpoint(self, bucket: Bucket, plan: BucketPlan) -> Endpoint:
        """Returns the endpoint for the next exchange of a bucket, with the memories of its parameters."""
        end = bucket.endpoint
        if end is None or end.plan is not plan:
            self.drop_endpoints(set(bucket))
            end = plan.endpoint(self.rank, bucket[0].dtype, bucket[0].device, self._scratch)
            self._fill(end, bucket)
            bucket.endpoint = end
            self._live.append(bucket)
        end.lift(bucket.lifts)
        return end

    def _lower(self) -> None:
        """Undoes the lifts of all memories, so that they can be read; the next exchange of a bucket lifts again."""
        for bucket in self._live:
            assert bucket.endpoint is not None
            bucket.endpoint.lift()

    def fade(self, bucket: Bucket, rates: Rates) -> float:
        """Returns the factor of a bucket's residual in this pass, before its gradient is added.

        Parameter groups may need different factors. If all are within ``FALL`` of the largest, that one is returned,
        and the other groups catch up later. Otherwise each group's residual is multiplied by its own factor here.
        """
        group_of, several, reached = bucket.alike or (None, list[_Alike](), None)
        if group_of is not rates.group_of:
            several = self._alike(bucket, rates)
        elif reached is rates.now:
            return 1.0
        end = bucket.endpoint
        assert end is not None
        found = [rates.faded(each.group, each.rate) for each in several]
        factors = [factor for factor, _ in found]
        most = max(factors)
        apart = min(factors) < FALL * most
        there = most == min(factors) == 1.0
        for each, (factor, now) in zip(several, found, strict=True):
            each.rate = now if apart or now is None or factor == most else now * factor / most
            there &= each.group is None or each.rate == rates.now[each.group]
        bucket.alike = rates.group_of, several, rates.now if there else None
        if not apart:
            return most
        places = [several.index(self._kept[p].alike) for p in bucket]
        for link in end.links:
            if (residual := link.memory.tensors().get("residual")) is not None:
                multiply_(residual, link.sizes, [factors[place] for place in places])
        return 1.0

    def _alike(self, bucket: Bucket, rates: Rates) -> list[_Alike]:
        """Groups the parameters of a bucket that count at the same rate, now and in every later pass."""
        found: dict[tuple[int | None, float | None], _Alike] = {}
        for p in bucket:
            kept = self._kept[p]
            key = rates.group_of.get(p), kept.alike.rate
            kept.alike = found.setdefault(key, _Alike(*key))
        return [*found.values()]

    def drop_endpoints(self, parameters: set[Tensor]) -> None:
        """Drops the endpoints that hold any of these parameters; their next exchange creates new ones."""
        for bucket in [bucket for bucket in self._live if not parameters.isdisjoint(bucket)]:
            end = bucket.endpoint
            assert end is not None
            end.lift()
            self._forget_endpoint(bucket)
            for link in end.links:
                ops.use_here(*link.memory.tensors().values())
            for name, worker in end.uplink.memory.tensors().items():  # the parameters have views of it
                end.add_served(name, worker, end.plan.world)

    def _forget_endpoint(self, bucket: Bucket) -> None:
        self._live.remove(bucket)
        bucket.endpoint = bucket.alike = None

    def _fill(self, end: Endpoint, parameters: tuple[Tensor, ...]) -> None:
        """Moves the memories of the parameters into their new endpoint; drops those that the endpoint does not keep."""
        self._forget_changed(parameters)
        several = [self._kept.setdefault(p, _Kept(form_of(p))) for p in parameters]
        mine, slices = end.uplink.memory.tensors(), end.plan.parts.slices
        for p, kept in zip(parameters, several, strict=True):
            if not mine:
                self._drop(kept, "this run keeps none")
            self._cut(p, kept, end.plan.parts.count)
        for name, flat in mine.items():
            flat.copy_(_joined([kept.parts.get(name) for kept in several], slices, flat))
        views = {name: flat.split(list(slices)) for name, flat in mine.items()}
        for number, kept in enumerate(several):
            kept.parts = {name: parts[number] for name, parts in views.items()}

    def _cut(self, parameter: Tensor, kept: _Kept, count: int) -> None:
        """Cuts the memories of a parameter into another number of slices."""
        if kept.count != count:
            parts = NodeShards((parameter.numel(),), count)
            for name, part in kept.parts.items():
                # Without slices, each rank is a worker of its own, so there are kept.count times as many workers.
                full = kept.spread(part, parameter.numel(), self.rank, kept.count)
                kept.parts[name] = full if count == 1 else reference.split_parts(full, parts)[self.rank % count]
        kept.count, kept.loaded = count, False

    # -------------------------------------------------------------------------------- all parameters

    def move_to(self, state: Any, rank: int, count: int = 1) -> None:
        """Prepares for the exchanges of another state, in which ``count`` ranks of a node each hold a slice.

        Raises:
            ValueError: The slices need residuals of other ranks.
        """
        self.offload_to_cpu()  # adds what the servers keep
        differ = [each for each in self._kept.values() if each.count != count and not each.loaded]
        if count > 1 and not all(each.is_zero() for each in differ):
            raise ValueError(
                f"residuals= come from another topology. Here the {count} ranks of a node exchange as one worker, each "
                "with a slice of every parameter, and the slices need the other ranks' residuals. Leave residuals= "
                "out, and pass the earlier state's state_dict() to load_state_dict(), which converts them."
            )
        self._forget_changed(self._kept)
        self.state, self.rank, self._scratch = state, rank, ops.Scratch()

    def offload_to_cpu(self) -> None:
        """Drops all endpoints and moves their memories to the CPU, until the next exchange of their parameters."""
        self.drop_endpoints({*self._kept})
        for kept in self._kept.values():
            kept.parts = {name: part.cpu() for name, part in kept.parts.items()}

    def keep_only(self, parameters: Iterable[Tensor]) -> None:
        """Forgets all other parameters, such as those of a layer that was replaced."""
        gone = {*self._kept} - {*parameters}
        self.drop_endpoints(gone)
        for parameter in gone:
            self._drop(self._kept.pop(parameter), "the model has no such parameters any more")

    def restore(self, memories: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Replaces all memories by those of a checkpoint, ``[numel]`` each: the workers' mean, on every rank."""
        for bucket in [*self._live]:
            self._forget_endpoint(bucket)
        self._kept = {p: _Kept(form_of(p), dict(parts), loaded=True) for p, parts in memories.items()}

    def _forget_changed(self, parameters: Iterable[Tensor]) -> None:
        """Forgets parameters whose size or memory format changed; none of them may have an endpoint."""
        for p in [p for p in parameters if p in self._kept and self._kept[p].form != form_of(p)]:
            self._drop(self._kept.pop(p), "their size or memory format changed")

    def _drop(self, kept: _Kept, reason: str) -> None:
        self.dropped[reason] += not kept.is_zero()
        kept.parts = {}

    # -------------------------------------------------------------------------------- queries

    def take_warnings(self) -> list[str]:
        """Returns warnings about residuals that were dropped since the last call."""
        dropped, self.dropped = self.dropped, Counter()
        return [
            f"lightning_topk: the residuals of {count} parameter{'s' * (count > 1)} were dropped, since {reason}: the "
            "gradients in them are lost."
            for reason, count in (+dropped).items()
        ]

    def shares(
        self, name: str, parameters: Collection[Tensor], world: int, device: torch.device
    ) -> Iterator[tuple[Sequence[Tensor], Tensor, Iterator[Tensor]]]:
        """Yields this rank's share of the memory ``name``, bucket by bucket: the parameters, the share, an iterator.

        The shares of all ``world`` ranks sum to the gradient not yet delivered: the mean of the workers' memories, plus
        the servers'. When the share has become this sum, the iterator splits it into ``[numel]`` for each parameter,
        including others of the bucket. All shares of a dtype use the same memory, as large as a bucket, on the device.
        """
        self._lower()
        rest = {parameter: number for number, parameter in enumerate(parameters)}
        live = [(each, each.endpoint) for each in self._live if each.endpoint and not rest.keys().isdisjoint(each)]
        # The order in which lanes created the endpoints may differ by rank.
        live.sort(key=lambda each: min(rest[p] for p in each[0] if p in rest))
        for bucket, _ in live:
            for parameter in bucket:
                rest.pop(parameter, None)
        others, sizes = [*_by_size(rest)], Counter[torch.dtype]()
        for _, end in live:
            sizes[end.dtype] = max(sizes[end.dtype], end.plan.parts.count * end.plan.parts.numel)
        for several in others:
            sizes[_wide(several[0])] = max(sizes[_wide(several[0])], sum(p.numel() for p in several))
        memory = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        for bucket, end in live:
            parts, worker = end.plan.parts, end.uplink.memory.tensors().get(name)
            share = memory[end.dtype][: parts.count * parts.numel].zero_()
            mine = share.view(parts.count, parts.numel)[self.rank % parts.count]
            if worker is not None:
                torch.mul(worker, parts.count / world, out=mine)
            end.add_served(name, mine)
            columns = share.view(parts.count, parts.numel).split(parts.slices, dim=1)
            sums = (column.reshape(-1)[:size] for column, size in zip(columns, parts.sizes, strict=True))
            yield bucket, share, sums
        for several in others:
            share = memory[_wide(several[0])][: sum(p.numel() for p in several)].zero_()
            pieces = share.split([p.numel() for p in several])
            for p, piece in zip(several, pieces, strict=True):
                kept = self._kept.get(p)
                if kept is not None and name in kept.parts:
                    piece += kept.spread(kept.parts[name], p.numel(), self.rank, kept.count).to(device) / world
            yield several, share, iter(pieces)

    def worker_energies(self) -> dict[Tensor, Tensor]:
        """The sum of squares of this rank's residual of each parameter, a scalar float64 on the CPU."""
        self._lower()
        known = {p: (kept.parts["residual"], kept.count) for p, kept in self._kept.items() if "residual" in kept.parts}
        return {
            p: count * torch.linalg.vector_norm(part, dtype=torch.float64).square().cpu()
            for p, (part, count) in known.items()
        }

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether a parameter was exchanged or restored."""
        return parameter in self._kept

    def form(self, parameter: Tensor) -> Form:
        """The form of a parameter's residuals."""
        return self._kept[parameter].form if parameter in self._kept else form_of(parameter)

    def worker_energy(self) -> Tensor:
        """The sum of squares of this rank's worker residuals, a scalar float64 on the CPU.

        Its mean over the ranks is the mean over the workers, even if the ranks of a node are one worker.
        """
        self._lower()
        energy = torch.zeros((), dtype=torch.float64, device="cpu")
        for end in (bucket.endpoint for bucket in self._live):
            if end is not None and (kept := end.uplink.memory.tensors().get("residual")) is not None:
                energy += end.plan.parts.count * torch.linalg.vector_norm(kept, dtype=torch.float64).square().cpu()
        return energy


def _by_size(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups parameters of one dtype, in order, with at most ``TOGETHER`` elements unless one has more."""
    several: list[Tensor] = []
    for p in parameters:
        if several and (sum(each.numel() for each in several) + p.numel() > TOGETHER or p.dtype != several[0].dtype):
            yield several
            several = []
        several.append(p)
    if several:
        yield several


def _wide(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's memories."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _joined(parts: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> Tensor:
    """Joins the memories of parameters: ``[sum of sizes]``, dtype and device of ``like``; zero for missing ones."""
    zero = torch.zeros((), dtype=like.dtype, device=like.device)  # not a whole model's zeros on the CPU
    found = [zero.expand(size) if part is None else part for part, size in zip(parts, sizes, strict=True)]
    ops.use_here(*found)  # a checkpoint's were made on another stream; they are freed after this
    return torch.cat([part.to(like.device, like.dtype) for part in found])
