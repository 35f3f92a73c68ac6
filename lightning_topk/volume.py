"""What an exchange will send, before it runs: bytes by arithmetic, equal to what is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from lightning_topk.build import make_codecs, make_shape
from lightning_topk.config import TopKConfig
from lightning_topk.core import exchange
from lightning_topk.core.requests import AllReduce, Request, placeholder
from lightning_topk.saving import saving_of_compressed, with_ratio


@dataclass(frozen=True)
class Volume:
    """Bytes of a step.

    Attributes:
        uplink: Sent by this rank as a worker, to other ranks.
        downlink: Sent by this rank as a server.
        dense: By a ring all-reduce of the same gradients, for comparison.
        intra_node: Sent by the ranks of this rank's node together, to each other.
        inter_node: Sent by them to other nodes: what the node's network interface counts.
        dense_inter_node: Sent to other nodes by a ring all-reduce.
    """

    uplink: int
    downlink: int
    dense: int
    intra_node: int
    inter_node: int
    dense_inter_node: int

    def __add__(self, other: Volume) -> Volume:
        return Volume(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def saving(self) -> float:
        """Dense bytes over bytes sent; 1 where nothing is sent."""
        sent = self.uplink + self.downlink
        return self.dense / sent if sent else 1.0

    @property
    def node_saving(self) -> float:
        """The same of the bytes that leave a node."""
        return self.dense_inter_node / self.inter_node if self.inter_node else 1.0


def format_bytes(nbytes: float) -> str:
    """A number of bytes in words: ``1.23 MB``."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((power for power in range(len(units)) if nbytes < 1000 ** (power + 1)), len(units) - 1)
    value = nbytes / 1000**power
    return f"{value:.0f} {units[power]}" if power == 0 or value >= 100 else f"{value:.3g} {units[power]}"


Bucket = int | Sequence[int]
"""Elements of a bucket, or of each of its parameters."""


def volume(
    config: TopKConfig,
    buckets: Iterable[Bucket],
    world: int,
    rank: int = 0,
    itemsize: int = 4,
    parameters: Iterable[int] | None = None,
    step: int = 0,
    epoch: int = 0,
    local: int = 1,
    uncompressed: Iterable[int] = (),
) -> Volume:
    """Predicts the bytes of a step.

    Args:
        config: The settings.
        buckets: DDP's buckets, by their elements; one for a model that fits one bucket. With
            ``topology="hierarchical"`` the elements of each parameter matter, since the ranks of a node take a piece of
            each.
        world: Number of ranks.
        rank: The rank in question; with ``single_server`` rank 0 differs from the others.
        itemsize: Bytes of an element of the dense gradient.
        parameters: Parameters in each bucket, with ``find_unused_parameters`` only: the ranks then exchange one bit
            each.
        step: Gradients exchanged before this one, for schedules.
        epoch: Epochs completed, for schedules.
        local: Ranks of a node.
        uncompressed: Elements of each bucket that belong to ``dense_parameters``; none by default.
    """
    config, sizes = config.on(world, local), [_sizes(bucket) for bucket in buckets]
    counts, whole = list(parameters or ()), list(uncompressed) or [0] * len(sizes)
    config = saving_of_compressed(config, sum(map(sum, sizes)), sum(whole))
    asked: list[Request] = []
    for number, (each, skipped) in enumerate(zip(sizes, whole, strict=True)):
        if not sum(each):
            continue  # nothing is exchanged
        way = config.dense if skipped == sum(each) else config
        voters = counts[number] if counts else None
        asked += requests(way, each, world, local, itemsize, step, epoch, skipped, voters)
    sent = {"uplink": 0, "downlink": 0}
    inside = outside = dense = dense_outside = 0
    for request in asked:
        group = {"all": (rank, world), "node": (rank % local, local), "peers": (rank // local, world // local)}
        sent[request.direction] += request.sent_bytes(*group[request.among])
        near, far = request.node_bytes(rank, world, local)
        inside, outside = inside + near, outside + far
    for each in sizes:
        ring = AllReduce(placeholder(sum(each) * itemsize), "uplink")
        dense += ring.sent_bytes(rank, world)
        dense_outside += ring.node_bytes(rank, world, local)[1]
    return Volume(sent["uplink"], sent["downlink"], dense, inside, outside, dense_outside)


def requests(
    config: TopKConfig,
    sizes: Sequence[int],
    world: int,
    local: int = 1,
    itemsize: int = 4,
    step: int = 0,
    epoch: int = 0,
    uncompressed: int = 0,
    voters: int | None = None,
) -> list[Request]:
    """What the exchange of one bucket will ask for, with payloads of the right size and no content.

    Args:
        config: The settings.
        sizes: Elements of each parameter of the bucket.
        world: Number of ranks.
        local: Ranks of a node.
        itemsize: Bytes of an element of the gradient.
        step: Gradients exchanged before this one, for schedules.
        epoch: Epochs completed, for schedules.
        uncompressed: Elements that are not compressed.
        voters: Parameters of the bucket, with ``find_unused_parameters`` only.
    """
    config = with_ratio(config.on(world, local), sizes, world, local, itemsize, uncompressed)
    shape = make_shape(config, sizes, world, local)
    uncompressed = uncompressed if config.compresses else 0  # the topology sends all of the bucket uncompressed
    return exchange.requests(shape, make_codecs(config, shape, step, epoch), itemsize, uncompressed, voters)


def _sizes(bucket: Bucket) -> tuple[int, ...]:
    return (bucket,) if isinstance(bucket, int) else tuple(bucket)
