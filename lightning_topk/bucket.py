"""From settings to one bucket's exchange: sizes, ratio, payload formats and links, resolved once.

``ratio=`` is used as given. ``saving=50`` requests a fiftieth of the bytes of a ring all-reduce. The bytes of a bucket
at a given ratio depend only on integers (its size, the topology, the ranks, positions, values and headers), so this
module finds the matching ratio before anything is sent. It is the same in every step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import BucketSpec, Codecs, Endpoint
from lightning_topk.core.exchange import TOPOLOGIES
from lightning_topk.core.layout import Layout, NodeShards, k_of
from lightning_topk.core.link import FusedLink, Link
from lightning_topk.core.memory import Memory, MomentumResidual, Residual
from lightning_topk.core.requests import AllGather, AllReduce, Request, placeholder
from lightning_topk.core.select import SELECTORS, RandK, Selector, TopK
from lightning_topk.core.wire import WIRES, Codec
from lightning_topk.schedule import Ratio, ratio_at

PIECE = 1 << 22
"""Approximate elements of a piece; one piece is compressed while another travels. Each piece is a separate message to
every rank, so pieces are larger if fewer than 1/64 of the entries are sent."""

TOLERANCE = 0.02
"""Relative shortfall from the requested saving that gives no warning."""


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """The exchange plan of one bucket. Created by :func:`plan_bucket`.

    Attributes:
        config: The settings, resolved for these nodes.
        shape: The bucket and its ranks.
        ratio: Fraction of entries that workers send; computed from ``saving`` if that was given.
        local: Ranks per node.
        itemsize: Bytes per gradient element.
        uncompressed: Indices of the uncompressed parameters.
        tag: Identifies the bucket on the wire, see :class:`lightning_topk.core.wire.Codec`.
    """

    config: TopKConfig
    shape: BucketSpec
    ratio: Ratio
    local: int = 1
    itemsize: int = 4
    uncompressed: tuple[int, ...] = ()
    tag: int = 0

    def codecs(self, step: int = 0, epoch: int = 0, selector: Selector | None = None) -> Codecs:
        """Returns the codecs for the payloads of a step.

        Args:
            step: Gradients exchanged before this one, for schedules.
            epoch: Epochs completed, for schedules.
            selector: The selector whose selections are encoded. Default: a new one, which is enough for sizes.

        Returns:
            The codecs. Payloads of a server that does not compress have room for all entries that its workers can send.
        """
        config, layout, world = self.config, self.shape.layout, self.shape.world
        if not self.shape.topology.compresses:
            whole = Codec(WIRES["fp32"], layout.numel, layout.numel)
            return Codecs(whole, whole)
        selector = selector or make_selector(config)
        shared = selector if isinstance(selector, RandK) else None
        up = layout.k_per_shard(k_of(layout.numel, ratio_at(self.ratio, step, epoch)))
        if config.bidirectional:
            server_ratio = self.ratio if config.server_ratio is None else config.server_ratio
            down = layout.k_per_shard(k_of(layout.numel, ratio_at(server_ratio, step, epoch)))
        else:
            # Workers that draw the same positions send no others.
            down = up if shared is not None else min(layout.shard_size, world * up)
        wire, size = WIRES[config.wire_name], layout.shard_size
        return Codecs(Codec(wire, size, up, shared, self.tag), Codec(wire, size, down, shared, self.tag))

    def requests(self, step: int = 0, epoch: int = 0, voters: int | None = None) -> list[Request]:
        """Predicts the requests of :func:`.exchange`, with payloads of the right size and no content.

        ``voters`` is the number of parameters in the bucket if some may be unused; else None.
        """
        asked: list[Request] = []
        if voters is not None:
            asked.append(AllGather(placeholder(-(-voters // 8)), "uplink"))
        if self.uncompressed:
            numel = sum(self.shape.parts.sizes[number] for number in self.uncompressed)
            asked.append(AllReduce(placeholder(numel * self.itemsize), "uplink"))
        return asked + self.shape.topology.requests(self.shape, self.codecs(step, epoch), self.itemsize)

    def endpoint(self, rank: int, dtype: torch.dtype, device: torch.device) -> Endpoint:
        """Creates the endpoint of one rank, with empty memories.

        Args:
            rank: The rank, among all ranks.
            dtype: dtype of the bucket. Residuals are float64 for float64 and float32 otherwise.
            device: Device of the residuals.
        """
        config, shape, layout = self.config, self.shape, self.shape.layout
        selector = make_selector(config)
        rank = rank // shape.parts.count
        whole = torch.promote_types(dtype, torch.float32)
        given = whole if shape.topology.by_node else dtype  # the sum of a node is not rounded

        def link(
            side: str,
            layout: Layout,
            selector: Selector,
            memory: Memory,
            given: torch.dtype,
            delivered: torch.dtype | None = None,
        ) -> Link:
            # On a GPU the fused pass sends the entries above a threshold, but a server that does not compress sends
            # every nonzero entry.
            everything = side == "server" and not config.bidirectional and device.type != "cpu"
            kind = FusedLink if FusedLink.suits(selector, memory, given) and not everything else Link
            return kind(layout, selector, memory, delivered, shape.parts.pieces if side == "worker" else ())

        memory = _make_memory(config, "worker", layout.numel, whole, device)
        uplinks = [link("worker", each, selector, memory, given) for each in layout.of_each_piece]
        downlinks = []
        if shape.topology.has_servers and (layout.shards == shape.world or rank == 0):
            # A server that does not compress sends sums of selections, so it needs exact top-k.
            choice, served = (
                selector if config.bidirectional or isinstance(selector, RandK) else TopK(),
                Layout(layout.shard_size),
            )
            for _ in range(layout.pieces):
                memory = _make_memory(config, "server", served.numel, whole, device)
                downlinks.append(link("server", served, choice, memory, whole, dtype))
        sizes = shape.parts.sizes
        ends = list(accumulate(sizes))
        return Endpoint(
            **vars(shape),
            rank=rank,
            dtype=whole,
            uplinks=tuple(uplinks),
            downlinks=tuple(downlinks),
            sizes=torch.tensor(sizes, device=device),
            clip_norm=None if config.clip_norm is None else config.clip_norm / math.sqrt(shape.workers),
            uncompressed=[(ends[number] - sizes[number], ends[number]) for number in self.uncompressed],
        )


def plan_bucket(
    config: TopKConfig,
    sizes: Sequence[int],
    world: int,
    local: int = 1,
    itemsize: int = 4,
    uncompressed: Sequence[int] = (),
    tag: int = 0,
    in_pieces: bool = True,
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
        in_pieces: Whether a large bucket may be exchanged in pieces: on a CPU, but not on a GPU, where one stream runs
            all work and nothing would overlap.

    Returns:
        The plan. With ``saving``, its ratio gives the bytes nearest to the requested ones. A single rank, which sends
        nothing, gets the ratio for two ranks.
    """
    config, skipped = config.resolve(world, local), sum(sizes[number] for number in uncompressed)
    if skipped == sum(sizes):
        config = config.dense
    if not config.compresses:
        return BucketPlan(config, _shape(config, sizes, world, local), 1.0, local, itemsize, (), tag)
    pieces = in_pieces and itemsize >= 4 and _fuses(config)
    ratio = config.ratio
    if ratio is None:
        shape = _shape(config, sizes, max(2, world), local, pieces)
        ratio = _ratio_for_saving(BucketPlan(config, shape, 1.0, local, itemsize), skipped)
    shape = _shape(config, sizes, world, local, pieces)
    return BucketPlan(config, shape, ratio, local, itemsize, tuple(uncompressed), tag)


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


def make_selector(config: TopKConfig) -> Selector:
    """Creates a selector with its own step count."""
    return SELECTORS[config.selector]() if isinstance(config.selector, str) else copy.deepcopy(config.selector)


def _fuses(config: TopKConfig) -> bool:
    """Whether both links compress float32 and float64 gradients in one fused pass, which can also handle a piece."""
    one_pass = config.selector == "topk" and config.error_feedback is True and not config.momentum and config.ratio != 1
    return one_pass and config.topology in ("sharded", "hierarchical")


def _shape(config: TopKConfig, sizes: Sequence[int], world: int, local: int, in_pieces: bool = False) -> BucketSpec:
    """Divides a bucket among nodes, ranks and servers."""
    topology = TOPOLOGIES[config.topology]
    parts = NodeShards(tuple(sizes), local if topology.by_node else 1)
    among = world // parts.count
    pieces = _pieces(config, parts.numel) if in_pieces else 1
    return BucketSpec(topology, parts, Layout(max(1, parts.numel), topology.shards(among), pieces), among, world)


def _pieces(config: TopKConfig, numel: int) -> int:
    """Number of pieces of a bucket; none has more than 2^30 elements."""
    sent = config.ratio if isinstance(config.ratio, float | int) else 3 / config.saving if config.saving else 1.0
    return max(1, round(min(1.0, 64 * sent) * numel / PIECE), math.ceil(numel / 2**30))


def _make_memory(config: TopKConfig, side: str, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
    """Creates the memory of one end of a link."""
    if config.error_feedback not in (True, side) or not config.compresses:
        return Memory(dtype)
    if side == "worker" and config.momentum:
        return MomentumResidual(numel, dtype, device, config.momentum)
    return Residual(numel, dtype, device)


def _ratio_for_saving(plan: BucketPlan, uncompressed: int) -> float:
    """Finds the ratio whose bytes are nearest to the budget that ``saving`` leaves for the compressed elements.

    It counts the bytes of the busiest rank or, if the ranks of a node exchange as one worker and share the node's
    network, the bytes that leave the node.

    Args:
        plan: The plan; its ratio is ignored.
        uncompressed: Number of uncompressed elements in the bucket.
    """
    config, shape, layout = plan.config, plan.shape, plan.shape.layout
    assert config.saving is not None

    def nbytes(request: Request) -> float:
        if shape.parts.count > 1:
            return request.node_bytes(0, shape.workers, plan.local)[1]
        return request.sent_bytes(0, shape.workers)

    def ratio(k: int) -> float:
        """The ratio that sends k entries of each shard."""
        return min(1.0, k * layout.shards * layout.pieces / layout.numel)

    def sent(k: int) -> float:
        codecs = replace(plan, ratio=ratio(k)).codecs()
        return sum(map(nbytes, shape.topology.requests(shape, codecs, plan.itemsize)))

    numel = sum(shape.parts.sizes)
    dense = nbytes(AllReduce(placeholder(numel * plan.itemsize), "uplink"))
    budget = dense * (1 - uncompressed / numel) / config.saving
    # Bytes grow with the number of entries, except at two points where positions are no longer sent: when a server
    # that does not compress sends all entries, and when all ranks do. For equal bytes, prefer more entries.
    whole = layout.shard_size if config.bidirectional else -(-layout.shard_size // shape.world)
    starts = sorted({1, whole, layout.shard_size})
    low = max((start for start in starts if sent(start) <= budget), default=1)
    high = min((start for start in starts if start > low), default=low + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sent(middle) <= budget else (low, middle)
    nearest = min({low, min(high, layout.shard_size)}, key=lambda k: abs(math.log(sent(k) / budget)))
    return ratio(nearest)
