"""The bytes of an exchange: predicted by arithmetic, and counted in the same units as requests are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_topk.bucket import BucketSizes, for_compressed, plan_bucket, plan_step
from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import BucketPlan
from lightning_topk.core.requests import AllReduce, Request, placeholder


@dataclass(frozen=True)
class Volume:
    """Bytes sent, predicted or counted.

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
        return Volume(
            self.uplink + other.uplink,
            self.downlink + other.downlink,
            self.dense + other.dense,
            self.intra_node + other.intra_node,
            self.inter_node + other.inter_node,
            self.dense_inter_node + other.dense_inter_node,
        )

    def __getitem__(self, kind: str) -> int:
        """The bytes of a kind, by its name."""
        return int(getattr(self, kind))

    def of_shards(self, count: int) -> Volume:
        """The same if ``count`` ranks of the node each exchange a shard of the gradients like this one."""
        kinds = ("intra_node", "inter_node", "dense_inter_node")
        return replace(self, **{kind: count * self[kind] for kind in kinds})

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
    settled: bool = True,
) -> Volume:
    """Predicts the bytes of a step.

    Args:
        config: The settings.
        buckets: Elements of each DDP bucket. With ``topology="hierarchical"`` the elements of each parameter matter,
            since the ranks of a node take a slice of each.
        world: Number of ranks.
        rank: The rank to predict for; with ``single_server`` rank 0 differs from the others.
        itemsize: Bytes per element of the dense gradient.
        parameters: Number of parameters in each bucket; only with ``find_unused_parameters``: the ranks then exchange
            one bit per parameter.
        step: Gradients exchanged before this one, for schedules.
        epoch: Epochs completed, for schedules.
        local: Ranks per node.
        uncompressed: For each bucket, the indices of the parameters that ``dense_parameters`` matches. Default: none.
        settled: Whether the ranks exchanged the same buckets in the step before. Until then they do not know all
            buckets, and treat small ones like others (:func:`lightning_topk.bucket.plan_step`).
    """
    sizes = [(bucket,) if isinstance(bucket, int) else tuple(bucket) for bucket in buckets]
    voters: Sequence[int | None] = list(parameters or ()) or [None] * len(sizes)
    whole = list(uncompressed) or [()] * len(sizes)
    skipped = sum(each[number] for each, numbers in zip(sizes, whole, strict=True) for number in numbers)
    config = for_compressed(config, sum(map(sum, sizes)), skipped)
    given: list[BucketSizes] = [(each, itemsize, numbers, 0) for each, numbers in zip(sizes, whole, strict=True)]
    alone = (plan_bucket(config, each, world, local, itemsize, numbers) for each, itemsize, numbers, _ in given)
    plans, total = plan_step(config, given, world, local) if settled else list(alone), Volume()
    for plan, count in zip(plans, voters, strict=True):
        total += bucket_volume(plan, rank, step, epoch, count)
    return total


def bucket_volume(plan: BucketPlan, rank: int, step: int = 0, epoch: int = 0, voters: int | None = None) -> Volume:
    """Predicts the bytes of one bucket in a step."""
    if not plan.numel:
        return Volume()  # nothing is exchanged
    asked = plan.requests(step, epoch, voters)
    return sum((request_volume(each, rank, plan.workers, plan.local) for each in asked), dense_volume(plan, rank))


@lru_cache(maxsize=1024)  # for every bucket in every step
def dense_volume(plan: BucketPlan, rank: int) -> Volume:
    """The bytes of a ring all-reduce of the bucket."""
    ring = AllReduce(placeholder(plan.numel * plan.itemsize), "uplink")
    leaving = ring.node_bytes(rank, plan.workers, plan.local)[1]
    return Volume(dense=ring.sent_bytes(rank, plan.workers), dense_inter_node=leaving)


def request_volume(request: Request, rank: int, world: int, local: int) -> Volume:
    """The bytes of a request.

    Args:
        request: The request of one rank.
        rank: This rank.
        world: Number of all ranks.
        local: Ranks per node.
    """
    among = {"all": (rank, world), "node": (rank % local, local), "peers": (rank // local, world // local)}
    inside, outside = request.node_bytes(rank, world, local)
    sent = {request.direction: request.sent_bytes(*among[request.among])}
    return Volume(**sent, intra_node=inside, inter_node=outside)
