"""From settings and sizes to the plan of each bucket: its k, its uncompressed parameters, its bytes.

``ratio=`` becomes a k directly. ``saving=50`` requests a fiftieth of the bytes of a ring all-reduce. The bytes of a
bucket depend only on k and other integers (its size, the topology, the ranks, positions, values and headers), so this
module finds the matching k before anything is sent. Only schedules and :func:`share_out` change it during training.
"""

from __future__ import annotations

import fnmatch
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import BucketPlan, Endpoint
from lightning_topk.core.exchange import TOPOLOGIES
from lightning_topk.core.layout import Layout, NodeShards, k_of
from lightning_topk.core.select import SELECTORS
from lightning_topk.core.wire import WIRES
from lightning_topk.schedule import Ratio, Varying

TOLERANCE = 0.02  # largest relative shortfall from ``saving=`` without a warning
LARGE = 1 << 22  # elements of a bucket in which headers are negligible
LARGEST = 2**31 - 1  # most elements in a shard: positions have 32 bits


class TooLargeError(ValueError):
    """A bucket has too many elements for a topology."""


class Bucket(tuple[Tensor, ...]):
    """The parameters whose gradients are exchanged together, in order, and what is kept about them between passes.

    A state has one object per bucket (:meth:`Buckets.find`), compared by identity, since hashing tensors is slow.
    """

    __hash__ = object.__hash__
    __eq__, __ne__ = object.__eq__, object.__ne__

    dtype: torch.dtype | None = None  # the plan's; a wrapper may change that of the parameters
    plan: BucketPlan | None = None
    weights: Mapping[Bucket, float] | None = None  # of all buckets that share their bytes, see `Buckets.share`
    lifts: Sequence[float] = ()  # one per parameter, see :class:`.Link`
    endpoint: Endpoint | None = None  # set only by `runtime.residuals`
    alike: Any = None  # see `Residuals.fade`; lives as long as the endpoint
    clipping: Any = None  # set only by `optim.applied.Clipping`


BucketSizes = tuple[Sequence[int], int, Sequence[int], int]
"""A bucket: elements of each parameter, bytes per element, indices of the uncompressed parameters, and its tag."""


def plan_bucket(
    config: TopKConfig,
    sizes: Sequence[int],
    world: int,
    local: int = 1,
    itemsize: int = 4,
    uncompressed: Sequence[int] = (),
) -> BucketPlan:
    """Plans the exchange of one bucket, with resolved settings for its compressed part (:func:`for_compressed`).

    With ``saving``, the plan's k gives the bytes nearest to the requested ones. A single rank, which sends nothing,
    selects as many entries as each of two ranks would. If all parameters are ``uncompressed``, all-reduces the bucket.
    The other arguments are as in :data:`BucketSizes`.
    """
    skipped = sum(sizes[number] for number in uncompressed)
    if skipped == sum(sizes):
        config, uncompressed = config.dense, ()
    topology = TOPOLOGIES[config.topology or "sharded"]
    parts = NodeShards(tuple(sizes), local if topology.by_node else 1)
    among, feedback = world // parts.count, {True: ("worker", "server"), "worker": ("worker",), False: ()}
    layout = Layout(max(1, parts.numel), among if topology.sharded else 1)
    if topology.compresses and layout.shard_size > LARGEST:
        raise TooLargeError(
            f"a bucket of {sum(sizes):,} elements is too large: a server's shard of it would have "
            f"{layout.shard_size:,}, but positions have 32 bits. DDP puts the whole model into its first bucket unless "
            "find_unused_parameters=True; pass that, split a larger parameter, or use more ranks."
        )
    plan = BucketPlan(
        topology=topology,
        parts=parts,
        layout=layout,
        world=among,
        workers=world,
        local=local,
        itemsize=itemsize,
        k=_k_of_ratio(layout, config.ratio),
        server_k=_k_of_ratio(layout, config.server_ratio or config.ratio) if config.bidirectional else None,
        wire=WIRES[config.wire_name],
        selector=SELECTORS[config.selector]() if isinstance(config.selector, str) else config.selector,
        feedback=feedback[config.error_feedback] if topology.compresses else (),
        momentum=config.momentum,
        clip_norm=None if config.clip_norm is None else config.clip_norm / math.sqrt(world),
        uncompressed=tuple(n for n in uncompressed if sizes[n]) if topology.compresses else (),
    )
    if config.saving is None or not topology.compresses:
        return plan
    pair = plan
    if world == 1:
        pair = replace(plan, layout=Layout(plan.numel, 2 if topology.sharded else 1), world=2, workers=2)
    budget = pair.dense_volume.dense * (1 - skipped / plan.numel) / config.saving
    return _sending(plan, k_for_saving(replace(pair, uncompressed=()), budget) * pair.layout.shards)


def _k_of_ratio(layout: Layout, ratio: Ratio | None) -> int | Varying:
    """Entries per shard at a constant ratio, or all if it is None, as with ``saving``; schedules stay as they are."""
    if ratio is None or isinstance(ratio, int | float):
        return layout.k_per_shard(k_of(layout.numel, ratio or 1.0))
    return ratio


def _sending(plan: BucketPlan, entries: int) -> BucketPlan:
    """The same bucket's plan, with ``entries`` sent by each worker and by all servers together."""
    k = plan.layout.k_per_shard(entries)
    return replace(plan, k=k, server_k=None if plan.server_k is None else k)


def _counted(plan: BucketPlan) -> int:
    """Bytes that rank 0, the busiest, sends in the first step, as ``saving`` counts them."""
    return plan.volume().counted(plan.topology.by_node)


def k_for_saving(plan: BucketPlan, budget: float) -> int:
    """Entries per shard whose bytes, as ``saving`` counts them, are nearest to ``budget``."""
    size, shards = plan.layout.shard_size, plan.layout.shards

    def sent(k: int) -> int:
        return _counted(_sending(plan, k * shards))

    # Bytes grow with the number of entries, except at two points where positions are no longer sent: when a server
    # that does not compress sends all entries, and when all ranks do. For equal bytes, prefer more entries.
    starts = sorted({1, size if plan.server_k is not None else -(-size // plan.world), size})
    low = max((start for start in starts if sent(start) <= budget), default=1)
    high = min((start for start in starts if start > low), default=low + 1)
    low += bisect_right(range(low + 1, high), budget, key=sent)
    return min({low, min(low + 1, size)}, key=lambda k: abs(math.log(sent(k) / budget)))


def plan_step(
    config: TopKConfig, buckets: Sequence[BucketSizes], world: int, local: int = 1, model: tuple[int, int] | None = None
) -> list[BucketPlan]:
    """Plans the exchange of all buckets of a step, with settings that are resolved for these ranks.

    ``saving`` gives each bucket its share of the bytes. In a small bucket, headers would use most of its share. So the
    smallest buckets send all entries, without positions, as long as together they add no more than :data:`TOLERANCE` to
    the step; and no other bucket gets less density than a large one.

    ``model`` has the elements of all parameters and of the uncompressed ones, if the model has more buckets.
    """
    config = for_compressed(config, *(model or elements(buckets)))

    @cache  # many models repeat a layer
    def planned(sizes: tuple[int, ...], itemsize: int, uncompressed: tuple[int, ...] = ()) -> BucketPlan:
        return plan_bucket(config, sizes, world, local, itemsize, uncompressed)

    plans = [replace(planned((*sizes,), size, (*numbers,)), tag=tag) for sizes, size, numbers, tag in buckets]
    if config.saving is None or len(plans) < 2 or world < 2:
        return plans
    spare = TOLERANCE * sum(map(_counted, plans))
    for number in sorted(range(len(plans)), key=lambda number: plans[number].numel):
        plan = plans[number]
        if not plan.topology.compresses or not plan.numel:
            continue
        full = _sending(plan, plan.layout.numel)
        spare -= _counted(full) - _counted(plan)
        if spare >= 0:
            plans[number] = full
            continue
        least = planned((LARGE,), plan.itemsize).density()
        if plan.density() < least:
            plans[number] = _sending(plan, k_of(plan.layout.numel, least))
    return plans


def share_out(plans: Sequence[BucketPlan], weights: Sequence[float]) -> list[BucketPlan]:
    """Redistributes the bytes of a step: multiplies those of each bucket by its weight over the mean weight.

    The sum stays the same: a few zeros pad the last bucket's payloads. Buckets that send all entries, or are
    not compressed, keep their plans.
    """
    found = [*plans]
    shared = [
        number
        for number, plan in enumerate(plans)
        if isinstance(plan.k, int) and plan.k < plan.layout.shard_size and plan.topology.compresses and plan.numel
        if plan.server_k is not None or not plan.topology.has_servers  # else replies differ in size
    ]
    sizes = {number: plans[number].codecs().uplink.nbytes for number in shared}
    left = sum(sizes.values())
    shared.sort(key=lambda number: -weights[number])  # what a bucket cannot use goes to the others
    for place, number in enumerate(shared):
        rest = math.fsum(weights[each] * sizes[each] for each in shared[place:])  # the same bits in any Python
        plan = _filling(plans[number], int(left * weights[number] * sizes[number] / rest))
        left -= plan.codecs().uplink.nbytes
        found[number] = plan
    if left < 0:  # the buckets are too small to send less
        return [*plans]
    if shared:
        found[shared[-1]] = replace(found[shared[-1]], padding=left)
    return found


def _filling(plan: BucketPlan, nbytes: int) -> BucketPlan:
    """The plan with the most entries whose payloads have at most ``nbytes``, and at least one entry per shard."""
    layout = plan.layout

    def size(k: int) -> int:
        return _sending(plan, k * layout.shards).codecs().uplink.nbytes

    return _sending(plan, (1 + bisect_right(range(2, layout.shard_size), nbytes, key=size)) * layout.shards)


def elements(buckets: Sequence[BucketSizes]) -> tuple[int, int]:
    """Elements of all parameters in the buckets, and of the uncompressed ones."""
    return sum(sum(sizes) for sizes, *_ in buckets), sum(sizes[n] for sizes, _, numbers, _ in buckets for n in numbers)


def for_compressed(config: TopKConfig, numel: int, uncompressed: int) -> TopKConfig:
    """Returns the settings for the compressed part of a gradient: it saves more, so that the whole meets ``saving``.

    Refuses uncompressed elements that would use up the requested bytes.
    """
    saving = config.saving
    if saving is None and config.compresses and uncompressed == numel > 0:
        raise ValueError("dense_parameters match all parameters, so nothing is compressed. Pass fewer, or use DDP.")
    if saving is None or not uncompressed:
        return config
    rest = numel / saving - uncompressed
    if rest <= 0:
        most = numel / uncompressed
        remedy = f"saving= below {most:.3g}" if most > 1.01 else "topology='dense'"
        raise ValueError(
            f"dense_parameters match {uncompressed / numel:.2%} of the gradient, so it cannot be sent in 1 / "
            f"{saving:g} of the bytes. Pass {remedy}, or fewer dense_parameters."
        )
    return replace(config, saving=(numel - uncompressed) / rest)


WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\.")
"""Prefixes that activation checkpointing and torch.compile insert into parameter names."""


def names_of(module: torch.nn.Module) -> dict[Tensor, str]:
    """Names of a module's parameters, as without wrappers and pruning; tied weights have their first name."""
    return {parameter: names[0] for parameter, names in all_names_of(module).items()}


def all_names_of(module: torch.nn.Module) -> dict[Tensor, list[str]]:
    """As :func:`names_of`, but with all names of tied weights."""
    pruned = {name.removesuffix("_mask") + "_orig" for name, _ in module.named_buffers() if name.endswith("_mask")}
    found: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        plain = WRAPPERS.sub("", name.removesuffix("_orig") if name in pruned else name)
        found.setdefault(parameter, []).append(plain)
    return found


class Buckets:
    """Plans the buckets of a model, with settings that are resolved for these ranks."""

    def __init__(self, config: TopKConfig, world: int, local: int) -> None:
        self.config, self._world, self.local = config, world, local
        self._model = 1, 0  # elements of all parameters, and of the uncompressed ones
        self._known: dict[tuple[int, ...], Bucket] = {}  # by ids of their parameters
        self._together: dict[tuple[Bucket, ...], list[BucketPlan]] = {}  # plans of all buckets of a step
        self.names: Mapping[Tensor, str] = {}
        self.all_names: Mapping[Tensor, Sequence[str]] = {}  # of tied weights; `dense_parameters` may match any of them
        self.compressed: frozenset[Tensor] = frozenset()  # the parameters that may be compressed
        self._uncompressed: set[Tensor] = set()

    def learn_names(self, names: Mapping[Tensor, str], uncompressed: Iterable[Tensor] = ()) -> None:
        """Sets the parameters' names, and finds those that ``dense_parameters`` matches.

        Refuses a pattern that matches no parameter, and patterns that match too many for ``saving``.
        """
        self.names = names
        self._uncompressed |= set(uncompressed)
        every = {p: [name, *self.all_names.get(p, ())] for p, name in names.items()}
        for pattern in self.config.dense_parameters:
            found = {p for p, its in every.items() if pattern in its or fnmatch.filter(its, pattern)}
            if not found:
                known = ", ".join(sorted(names.values())[:20])
                raise ValueError(f"dense_parameters: no parameter's name matches {pattern!r}. The names are {known}.")
            self._uncompressed |= found
        self.compressed = frozenset(names.keys() - self._uncompressed)
        numel = sum(parameter.numel() for parameter in names if parameter.requires_grad)
        skipped = sum(parameter.numel() for parameter in self._uncompressed if parameter.requires_grad)
        self._model = numel, skipped
        for_compressed(self.config, numel, skipped)  # refuses too many uncompressed parameters
        self._forget_plans(self._known.values())

    def find(self, parameters: Sequence[Tensor]) -> Bucket:
        """Returns the bucket of these parameters, always the same object."""
        key = tuple(map(id, parameters))
        if key not in self._known:
            self._known[key] = Bucket(parameters)
        return self._known[key]

    def plan_of(self, bucket: Bucket) -> BucketPlan:
        """The exchange plan of a bucket."""
        if bucket.dtype != bucket[0].dtype:
            self._forget_plans([bucket])
            bucket.dtype = bucket[0].dtype
        if bucket.plan is None:
            (bucket.plan,) = self.planned([bucket])
        return bucket.plan

    def plan_together(self, buckets: Sequence[Bucket]) -> int:
        """Plans all buckets of a step together, see :func:`plan_step`; plans that stay the same keep their identity.

        Returns the number of plans that have changed.
        """
        step, changed = tuple(buckets), 0
        if step not in self._together:
            self._together[step] = self.planned(step)
        plans = self._together[step]
        for number, bucket in enumerate(step):
            known, plan = bucket.plan, plans[number]
            if known is not None and (known is plan or known.same_as(plan)):
                plans[number] = known
            else:
                bucket.plan, bucket.dtype, changed = plan, bucket[0].dtype, changed + (known is not None)
        return changed

    def share(self, weights: Mapping[Bucket, float], steps: Iterable[tuple[Bucket, ...]]) -> None:
        """Redistributes the bytes of these buckets by weight, see :func:`share_out`.

        ``steps`` lists all buckets of each step that exchanges any of these; such a step exchanges all of these.
        """
        for bucket in weights:
            bucket.weights = weights
        self._together.clear()
        for step in steps:
            self.plan_together(step)

    def forget_shares(self, buckets: Iterable[Bucket]) -> None:
        """Ends the sharing of bytes: the next exchange of these buckets plans them anew."""
        shared = [bucket for bucket in buckets if bucket.weights]
        self._forget_plans(shared)
        for bucket in shared:
            bucket.weights = None

    def _forget_plans(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            bucket.plan = None
            self._together.clear()

    def planned(self, buckets: Sequence[Bucket]) -> list[BucketPlan]:
        """Plans buckets that are exchanged in the same step."""
        known = []
        for bucket in buckets:
            tag = zlib.crc32(" ".join(self.names.get(parameter, "") for parameter in bucket).encode()) >> 8
            uncompressed = [number for number, parameter in enumerate(bucket) if parameter in self._uncompressed]
            known.append(([parameter.numel() for parameter in bucket], bucket[0].itemsize, uncompressed, tag))
        plans = plan_step(self.config, known, self._world, self.local, self._model)
        places = {bucket: place for place, bucket in enumerate(buckets)}
        sharing = {id(bucket.weights): bucket.weights for bucket in buckets if bucket.weights}
        for weights in sharing.values():
            if weights.keys() <= places.keys():  # else only some of them are planned, without shares
                shared = share_out([plans[places[bucket]] for bucket in weights], [*weights.values()])
                for bucket, plan in zip(weights, shared, strict=True):
                    plans[places[bucket]] = plan
        return plans
