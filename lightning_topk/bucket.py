"""From settings and sizes to the plan of each bucket: its ratio, its uncompressed parameters, its bytes.

``ratio=`` is used as given. ``saving=50`` requests a fiftieth of the bytes of a ring all-reduce. The bytes of a bucket
at a given ratio depend only on integers (its size, the topology, the ranks, positions, values and headers), so this
module finds the matching ratio before anything is sent. It is the same in every step.
"""

from __future__ import annotations

import copy
import fnmatch
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import BucketPlan
from lightning_topk.core.exchange import TOPOLOGIES
from lightning_topk.core.layout import Layout, NodeShards
from lightning_topk.core.requests import AllReduce, Request, placeholder
from lightning_topk.core.select import SELECTORS, Selector
from lightning_topk.core.wire import WIRES

TOLERANCE = 0.02
"""Relative shortfall from the requested saving that gives no warning."""
LARGEST = 2**31 - 1
"""Maximum number of elements in a shard: positions have 32 bits."""


class TooLargeError(ValueError):
    """A bucket has too many elements for a topology."""


Bucket = tuple[Tensor, ...]
"""The parameters whose gradients are exchanged together, in order."""


def plan_bucket(
    config: TopKConfig,
    sizes: Sequence[int],
    world: int,
    local: int = 1,
    itemsize: int = 4,
    uncompressed: Sequence[int] = (),
    tag: int = 0,
) -> BucketPlan:
    """Resolves the settings for one bucket.

    Args:
        config: The settings. With ``dense_parameters``, those for the compressed part, see :func:`for_compressed`.
        sizes: Elements of each parameter in the bucket. An empty bucket is not exchanged.
        world: Number of ranks.
        local: Ranks per node.
        itemsize: Bytes per gradient element.
        uncompressed: Indices of the uncompressed parameters. A bucket with no others is all-reduced.
        tag: Identifies the bucket on the wire.

    Returns:
        The plan. With ``saving``, its ratio gives the bytes nearest to the requested ones. A single rank, which sends
        nothing, gets the ratio for two ranks.
    """
    config, skipped = config.resolve(world, local), sum(sizes[number] for number in uncompressed)
    if skipped == sum(sizes):
        config, uncompressed = config.dense, ()
    if config.ratio is None:
        config = _with_ratio(config, sizes, max(2, world), local, itemsize, skipped)
    assert config.topology is not None
    topology = TOPOLOGIES[config.topology]
    parts = NodeShards(tuple(sizes), local if topology.by_node else 1)
    among, feedback = world // parts.count, {True: ("worker", "server"), "worker": ("worker",), False: ()}
    layout = Layout(max(1, parts.numel), topology.shards(among))
    if config.compresses and layout.shard_size > LARGEST:
        raise TooLargeError(
            f"a bucket of {sum(sizes):,} elements is too large: a server's shard of it would have "
            f"{layout.shard_size:,}, and positions have 32 bits. DDP puts the whole model into its first bucket unless "
            "find_unused_parameters=True; pass that, split a larger parameter, or use more ranks."
        )
    assert config.ratio is not None
    return BucketPlan(
        topology=topology,
        parts=parts,
        layout=layout,
        world=among,
        workers=world,
        local=local,
        itemsize=itemsize,
        ratio=config.ratio,
        server_ratio=None if not config.bidirectional else config.server_ratio or config.ratio,
        wire=WIRES[config.wire_name],
        selector=_selector(config.selector),
        feedback=feedback[config.error_feedback] if config.compresses else (),
        momentum=config.momentum,
        clip_norm=None if config.clip_norm is None else config.clip_norm / math.sqrt(world),
        uncompressed=tuple(uncompressed) if config.compresses else (),
        tag=tag,
    )


BucketSizes = tuple[Sequence[int], int, Sequence[int], int]
"""A bucket: elements of each parameter, bytes per element, indices of the uncompressed parameters, and its tag."""


def plan_step(config: TopKConfig, buckets: Sequence[BucketSizes], world: int, local: int = 1) -> list[BucketPlan]:
    """Resolves the settings for all buckets of a step.

    ``saving`` gives each bucket its share of the bytes. A small one would pay its fixed bytes out of a few dozen, and
    deliver next to nothing. So the smallest buckets are sent whole, without positions, as long as together they add no
    more than :data:`TOLERANCE` to the step; and no other bucket gets less density than a large one.

    Args:
        config: The settings, see :func:`plan_bucket`.
        buckets: All buckets that are exchanged in a step.
        world: Number of ranks.
        local: Ranks per node.
    """
    plans = [plan_bucket(config, sizes, world, local, size, whole, tag) for sizes, size, whole, tag in buckets]
    if config.saving is None or len(plans) < 2 or world < 2:
        return plans
    room = TOLERANCE * sum(map(busiest_bytes, plans))
    for number in sorted(range(len(plans)), key=lambda number: plans[number].numel):
        plan = plans[number]
        if not plan.topology.compresses or not plan.numel:
            continue
        whole = _at_ratio(plan, 1.0)
        room -= busiest_bytes(whole) - busiest_bytes(plan)
        if room >= 0:
            plans[number] = whole
            continue
        least = plan_bucket(config, [LARGE], world, local, plan.itemsize).ratio
        assert isinstance(plan.ratio, float)
        assert isinstance(least, float)
        if plan.ratio < least:
            plans[number] = _at_ratio(plan, least)
    return plans


LARGE = 1 << 22
"""Elements of a bucket whose fixed bytes do not matter."""


def _at_ratio(plan: BucketPlan, ratio: float) -> BucketPlan:
    """The plan of the same bucket at another ratio."""
    return replace(plan, ratio=ratio, server_ratio=None if plan.server_ratio is None else ratio)


def busiest_bytes(plan: BucketPlan) -> int:
    """Bytes of a step that ``saving`` counts: the busiest rank's or, if a node is one worker, those that leave it."""
    asked = plan.requests()
    if plan.parts.count > 1:
        return sum(request.node_bytes(0, plan.workers, plan.local)[1] for request in asked)
    return sum(request.sent_bytes(0, plan.workers) for request in asked)


def _selector(given: str | Selector) -> Selector:
    """A selector with its own step count."""
    return SELECTORS[given]() if isinstance(given, str) else copy.deepcopy(given)


def for_compressed(config: TopKConfig, numel: int, uncompressed: int) -> TopKConfig:
    """Returns the settings for the compressed part of a gradient, whose higher saving makes the whole meet ``saving``.

    Raises:
        ValueError: The uncompressed elements use up the requested bytes.
    """
    saving = config.saving
    if saving is None or not uncompressed:
        return config
    rest = numel / saving - uncompressed
    if rest <= 0:
        most = numel / uncompressed
        remedy = f"saving= below {most:.3g}" if most > 1.01 else "topology='dense'"
        raise ValueError(
            f"dense_parameters are {uncompressed / numel:.2%} of the gradient, so it cannot be sent in 1 / "
            f"{saving:g} of the bytes. Pass {remedy}, or fewer dense_parameters."
        )
    return replace(config, saving=(numel - uncompressed) / rest)


def _with_ratio(
    config: TopKConfig, sizes: Sequence[int], world: int, local: int, itemsize: int, uncompressed: int
) -> TopKConfig:
    """Replaces ``saving`` by the ratio whose bytes are nearest to the budget that it leaves for compressed elements.

    It counts the bytes of the busiest rank or, if the ranks of a node exchange as one worker and share the node's
    network, the bytes that leave the node. Arguments as in :func:`plan_bucket`; ``uncompressed`` counts elements.
    """
    assert config.saving is not None
    plan = plan_bucket(replace(config, ratio=1.0, saving=None), sizes, world, local, itemsize)
    layout, numel = plan.layout, plan.numel

    def nbytes(request: Request) -> float:
        if plan.parts.count > 1:
            return request.node_bytes(0, world, local)[1]
        return request.sent_bytes(0, world)

    def ratio(k: int) -> float:
        """The ratio that sends k entries of each shard."""
        return min(1.0, k * layout.shards / layout.numel)

    def sent(k: int) -> float:
        server_ratio = None if plan.server_ratio is None else ratio(k)
        return sum(map(nbytes, replace(plan, ratio=ratio(k), server_ratio=server_ratio).requests()))

    dense = nbytes(AllReduce(placeholder(numel * itemsize), "uplink"))
    budget = dense * (1 - uncompressed / max(1, numel)) / config.saving
    # Bytes grow with the number of entries, except at two points where positions are no longer sent: when a server
    # that does not compress sends all entries, and when all ranks do. For equal bytes, prefer more entries.
    whole = layout.shard_size if config.bidirectional else -(-layout.shard_size // plan.world)
    starts = sorted({1, whole, layout.shard_size})
    low = max((start for start in starts if sent(start) <= budget), default=1)
    high = min((start for start in starts if start > low), default=low + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sent(middle) <= budget else (low, middle)
    nearest = min({low, min(high, layout.shard_size)}, key=lambda k: abs(math.log(sent(k) / budget)))
    return replace(config, ratio=ratio(nearest), saving=None)


WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\.")
"""Prefixes that activation checkpointing and torch.compile insert into parameter names."""


def names_of(module: torch.nn.Module) -> dict[Tensor, str]:
    """Names of a module's parameters, the same for wrapped, pruned and plain layers; the first ones of tied weights."""
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
    """Resolves the settings for each bucket of a model's parameters."""

    def __init__(self, config: TopKConfig, world: int, local: int) -> None:
        self.config, self._world, self.local = config, world, local
        self._rest = config  # with the saving of the compressed part
        self._plans: dict[tuple[Bucket, torch.dtype], BucketPlan] = {}
        self.settled = False
        """Whether the plans are those of :func:`plan_step`: only when all buckets of a step are known."""
        self.names: Mapping[Tensor, str] = {}
        """The parameters' names."""
        self.all_names: Mapping[Tensor, Sequence[str]] = {}
        """All names of tied weights, which ``dense_parameters`` may match too."""
        self.compressed: frozenset[Tensor] = frozenset()
        """The parameters that may be compressed."""
        self._uncompressed: set[Tensor] = set()

    def learn_names(self, names: Mapping[Tensor, str], whole: Iterable[Tensor] = ()) -> None:
        """Sets the parameters' names, and finds those that ``dense_parameters`` matches.

        Raises:
            ValueError: A pattern of ``dense_parameters`` matches no parameter, or they match too many for ``saving``.
        """
        self.names = names
        self._uncompressed |= set(whole)
        for pattern in self.config.dense_parameters:
            found = {p for p, name in names.items() if fnmatch.filter([name, *self.all_names.get(p, ())], pattern)}
            if not found:
                known = ", ".join(sorted(names.values())[:20])
                raise ValueError(f"dense_parameters: no parameter's name matches {pattern!r}. The names are {known}.")
            self._uncompressed |= found
        self.compressed = frozenset(names.keys() - self._uncompressed)
        numel = sum(parameter.numel() for parameter in names if parameter.requires_grad)
        skipped = sum(parameter.numel() for parameter in self._uncompressed if parameter.requires_grad)
        self._rest = for_compressed(self.config, numel, skipped)
        self._plans.clear()
        self.settled = False

    def check_size(self, numel: int) -> None:
        """Refuses a bucket of ``numel`` elements that is too large, see :func:`plan_bucket`."""
        plan_bucket(replace(self._rest, saving=None, ratio=1.0), [numel], self._world, self.local)

    def delivers_everything(self, bucket: Bucket, step: int, epoch: int) -> bool:
        """Whether a step delivers every entry of a bucket in full precision, as an all-reduce does."""
        plan = self.plan_of(bucket)
        codecs = plan.codecs(step, epoch)
        whole = all(each.k == each.universe for each in (codecs.uplink, codecs.reply))
        return plan.topology.compresses and plan.wire.name == "fp32" and whole

    def plan_of(self, bucket: Bucket) -> BucketPlan:
        """The exchange plan of a bucket."""
        key = bucket, bucket[0].dtype  # a wrapper may change it
        if key not in self._plans:
            sizes, itemsize, uncompressed, tag = self._sizes_of(bucket)
            self._plans[key] = plan_bucket(self._rest, sizes, self._world, self.local, itemsize, uncompressed, tag)
        return self._plans[key]

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """Plans all buckets of a step together, see :func:`plan_step`; plans that stay the same keep their identity."""
        together = plan_step(self._rest, [self._sizes_of(bucket) for bucket in buckets], self._world, self.local)
        for bucket, plan in zip(buckets, together, strict=True):
            if self.plan_of(bucket).ratio != plan.ratio:
                self._plans[bucket, bucket[0].dtype] = plan
        self.settled = True

    def _sizes_of(self, bucket: Bucket) -> BucketSizes:
        names = " ".join(self.names.get(parameter, "") for parameter in bucket)
        uncompressed = [number for number, parameter in enumerate(bucket) if parameter in self._uncompressed]
        sizes = [parameter.numel() for parameter in bucket]
        return sizes, bucket[0].itemsize, uncompressed, zlib.crc32(names.encode()) >> 8
