"""Predicts the bytes of an exchange by arithmetic; they equal the measured bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from lightning_topk.bucket import BucketPlan, for_compressed, plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.requests import AllReduce, placeholder


@dataclass(frozen=True)
class Volume:
    """Bytes sent in a step.

    Attributes:
        uplink: Sent by this rank as a worker, to other ranks.
        downlink: Sent by this rank as a server.
        dense: Sent by this rank in a ring all-reduce of the same gradients, for comparison.
        intra_node: Sent between the ranks of this rank's node, in total.
        inter_node: Sent by these ranks to other nodes, in total: the count of the node's network interface.
        dense_inter_node: Sent by these ranks to other nodes in a ring all-reduce.
    """

    uplink: int = 0
    downlink: int = 0
    dense: int = 0
    intra_node: int = 0
    inter_node: int = 0
    dense_inter_node: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def sent(self) -> int:
        """All that this rank sends."""
        return self.uplink + self.downlink

    @property
    def saving(self) -> float:
        """Dense bytes over bytes sent; 1 where nothing is sent."""
        return self.dense / self.sent if self.sent else 1.0

    @property
    def node_saving(self) -> float:
        """The same for the bytes between nodes."""
        return self.dense_inter_node / self.inter_node if self.inter_node else 1.0


def format_bytes(nbytes: float) -> str:
    """Formats a number of bytes, such as ``1.23 MB``."""
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
    uncompressed: Iterable[Sequence[int]] = (),
) -> Volume:
    """Predicts the bytes of a step.

    Args:
        config: The settings.
        buckets: Elements of each DDP bucket. With ``topology="hierarchical"`` the elements of each parameter matter,
            since the ranks of a node take a piece of each.
        world: Number of ranks.
        rank: The rank to predict for; with ``single_server`` rank 0 differs from the others.
        itemsize: Bytes per element of the dense gradient.
        parameters: Number of parameters in each bucket; only with ``find_unused_parameters``: the ranks then exchange
            one bit per parameter.
        step: Gradients exchanged before this one, for schedules.
        epoch: Epochs completed, for schedules.
        local: Ranks per node.
        uncompressed: For each bucket, the indices of the parameters that ``dense_parameters`` matches. Default: none.
    """
    sizes = [(bucket,) if isinstance(bucket, int) else tuple(bucket) for bucket in buckets]
    voters: Sequence[int | None] = list(parameters or ()) or [None] * len(sizes)
    whole = list(uncompressed) or [()] * len(sizes)
    skipped = sum(each[number] for each, numbers in zip(sizes, whole, strict=True) for number in numbers)
    config, total = for_compressed(config, sum(map(sum, sizes)), skipped), Volume()
    for each, numbers, count in zip(sizes, whole, voters, strict=True):
        total += bucket_volume(plan_bucket(config, each, world, local, itemsize, numbers), rank, step, epoch, count)
    return total


def bucket_volume(plan: BucketPlan, rank: int, step: int = 0, epoch: int = 0, voters: int | None = None) -> Volume:
    """Predicts the bytes of one bucket in a step."""
    world, local, numel = plan.shape.workers, plan.local, sum(plan.shape.parts.sizes)
    if not numel:
        return Volume()  # nothing is exchanged
    group = {"all": (rank, world), "node": (rank % local, local), "peers": (rank // local, world // local)}
    sent, inside, outside = {"uplink": 0, "downlink": 0}, 0, 0
    for request in plan.requests(step, epoch, voters):
        sent[request.direction] += request.sent_bytes(*group[request.among])
        near, far = request.node_bytes(rank, world, local)
        inside, outside = inside + near, outside + far
    ring = AllReduce(placeholder(numel * plan.itemsize), "uplink")
    dense, dense_outside = ring.sent_bytes(rank, world), ring.node_bytes(rank, world, local)[1]
    return Volume(sent["uplink"], sent["downlink"], dense, inside, outside, dense_outside)
