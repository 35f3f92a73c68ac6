"""From settings to what exchanges: the shape of a bucket, the codecs of a step, the links of a rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Codecs, Endpoint, Shape
from lightning_topk.core.exchange import TOPOLOGIES
from lightning_topk.core.layout import Layout, Parts, kept_count
from lightning_topk.core.link import FusedLink, Link
from lightning_topk.core.memory import Memory, MomentumResidual, NoMemory, Residual
from lightning_topk.core.select import SELECTORS, RandK, Selector, TopK
from lightning_topk.core.wire import WIRES, Codec
from lightning_topk.schedule import ratio_at


def make_shape(config: TopKConfig, sizes: Sequence[int], world: int, local: int = 1) -> Shape:
    """How a bucket is dealt to nodes, ranks and servers.

    Args:
        config: The settings, on these nodes (:meth:`lightning_topk.TopKConfig.on`).
        sizes: Elements of each parameter of the bucket; one element at least.
        world: Number of ranks.
        local: Ranks of a node.
    """
    topology = TOPOLOGIES[config.topology]
    parts = Parts(tuple(sizes), local if topology.by_node else 1)
    among = world // parts.count
    return Shape(topology, parts, Layout(parts.numel, topology.shards(among)), among, world)


def make_codecs(
    config: TopKConfig,
    shape: Shape,
    step: int = 0,
    epoch: int = 0,
    selector: Selector | None = None,
    tag: int = 0,
) -> Codecs:
    """How the payloads of a step are written.

    Args:
        config: The settings.
        shape: The bucket.
        step: Gradients exchanged before this one, for schedules.
        epoch: Epochs completed, for schedules.
        selector: The selector whose selections are written. Default: a new one, if only sizes are wanted.
        tag: Of whose entries they are, see :class:`lightning_topk.core.wire.Codec`.

    Returns:
        The codecs. A server that does not compress has room for all that the workers can send it.
    """
    layout, world = shape.layout, shape.world
    if not shape.topology.compresses:
        whole = Codec(WIRES["fp32"], layout.numel, layout.numel)
        return Codecs(whole, whole)
    selector = selector or make_selector(config)
    shared = selector if isinstance(selector, RandK) else None
    assert config.ratio is not None
    ratio = ratio_at(config.ratio, step, epoch)
    up = layout.kept_per_shard(kept_count(layout.numel, ratio))
    if config.bidirectional:
        server_ratio = ratio if config.server_ratio is None else ratio_at(config.server_ratio, step, epoch)
        down = layout.kept_per_shard(kept_count(layout.numel, server_ratio))
    else:
        # Workers that draw the same positions send nothing else.
        down = up if shared is not None else min(layout.shard_size, world * up)
    wire = WIRES[config.wire_name]
    return Codecs(Codec(wire, layout.shard_size, up, shared, tag), Codec(wire, layout.shard_size, down, shared, tag))


def make_endpoint(
    config: TopKConfig,
    shape: Shape,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    uncompressed: Sequence[int] = (),
) -> Endpoint:
    """The links of one rank for one bucket, with empty memories.

    Args:
        config: The settings.
        shape: The bucket.
        rank: The rank, counted among all.
        dtype: dtype of the bucket. Residuals are float64 for float64 and float32 otherwise.
        device: Where the residuals live.
        uncompressed: Which of the parameters, by number, are not compressed.
    """
    selector, layout = make_selector(config), shape.layout
    rank = rank // shape.parts.count
    whole = torch.promote_types(dtype, torch.float32)
    given = whole if shape.topology.by_node else dtype  # the sum of a node is not rounded

    def link(
        side: str, layout: Layout, selector: Selector, given: torch.dtype, delivered: torch.dtype | None = None
    ) -> Link:
        memory = _make_memory(config, side, layout.numel, whole, device)
        # On a GPU the one pass sends what a threshold lets pass; a server that does not compress sends all that is
        # nonzero.
        everything = side == "server" and not config.bidirectional and device.type != "cpu"
        kind = FusedLink if FusedLink.suits(selector, memory, given) and not everything else Link
        return kind(layout, selector, memory, delivered, shape.parts.pieces if side == "worker" else ())

    downlink = None
    serves = shape.topology.has_servers and (layout.shards == shape.world or rank == 0)
    if serves:
        # What a server that does not compress has to send are sums of selections: it takes the largest exactly.
        choice = selector if config.bidirectional or isinstance(selector, RandK) else TopK()
        downlink = link("server", Layout(layout.shard_size), choice, whole, dtype)
    ends = list(accumulate(shape.parts.sizes))
    return Endpoint(
        **vars(shape),
        rank=rank,
        dtype=whole,
        uplink=link("worker", layout, selector, given),
        downlink=downlink,
        sizes=torch.tensor(shape.parts.sizes, device=device),
        clip_norm=None if config.clip_norm is None else config.clip_norm / math.sqrt(shape.workers),
        uncompressed=[(ends[number] - shape.parts.sizes[number], ends[number]) for number in uncompressed],
    )


def make_selector(config: TopKConfig) -> Selector:
    """A selector with a step count of its own."""
    return SELECTORS[config.selector]() if isinstance(config.selector, str) else copy.deepcopy(config.selector)


def _make_memory(config: TopKConfig, side: str, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
    """What one end of a link keeps."""
    if config.error_feedback not in (True, side) or not config.compresses:
        return NoMemory(dtype)
    if side == "worker" and config.momentum:
        return MomentumResidual(numel, dtype, device, config.momentum)
    return Residual(numel, dtype, device)
