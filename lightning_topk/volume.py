"""The bytes of an exchange: predicted by arithmetic, and counted in the same units as requests are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from lightning_topk.bucket import BucketSizes, elements, plan_step
from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import BucketPlan
from lightning_topk.core.requests import AllReduce, Volume, placeholder, request_volume

__all__ = ["Volume", "bucket_volume", "dense_volume", "format_bytes", "request_volume", "volume"]


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
    skipped = list(uncompressed) or [()] * len(sizes)
    known: list[BucketSizes] = [(each, itemsize, numbers, 0) for each, numbers in zip(sizes, skipped, strict=True)]
    config, model, total = config.resolve(world, local), elements(known), Volume()
    together = [known] if settled else [[each] for each in known]
    plans = (plan for each in together for plan in plan_step(config, each, world, local, model))
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
