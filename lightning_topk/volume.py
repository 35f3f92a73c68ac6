"""The bytes of a step, predicted by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_topk.bucket import BucketSizes, elements, plan_step
from lightning_topk.config import TopKConfig, check_config, check_integer
from lightning_topk.core.endpoint import BucketPlan
from lightning_topk.core.requests import Volume

__all__ = ["Volume", "format_bytes", "volume"]


def format_bytes(nbytes: float) -> str:
    """Formats a number of bytes, such as ``1.23 MB``."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((power for power in range(len(units)) if round(nbytes / 1000**power) < 1000), len(units) - 1)
    value = nbytes / 1000**power
    return f"{value:.0f} {units[power]}" if power == 0 or value >= 100 else f"{value:.3g} {units[power]}"


def volume(
    config: TopKConfig,
    buckets: Iterable[int | Sequence[int]],
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
    """Predicts the bytes that one of ``world`` ranks, with ``local`` ranks per node, sends in a step.

    ``buckets`` lists the elements of each DDP bucket, or of each parameter in it; the latter matter with
    ``topology="hierarchical"``, where the ranks of a node slice each parameter. With ``single_server`` rank 0 differs
    from the others. ``itemsize`` is in bytes. ``uncompressed`` lists, for each bucket, the indices of the parameters
    that ``dense_parameters`` matches. ``parameters`` lists the number of parameters in each bucket, only with
    ``find_unused_parameters``: ranks then exchange one bit per parameter. ``settled`` says whether the ranks know all
    buckets of the step: with ``find_unused_parameters`` from the start, else once the previous step exchanged the same.
    Until then they plan small buckets like others (:func:`lightning_topk.bucket.plan_step`).
    """
    plans = plans_of(config, buckets, world, itemsize, local, uncompressed, settled)
    rank = check_integer("rank", rank, 0, world - 1)
    voters = _of_each("parameters", () if parameters is None else parameters, len(plans))
    counts = (_integers("parameters", each) for each in voters)
    predicted = (plan.volume(rank, step, epoch, *each) for plan, each in zip(plans, counts, strict=True))
    return sum(predicted, Volume())


def plans_of(
    config: TopKConfig,
    buckets: Iterable[int | Sequence[int]],
    world: int,
    itemsize: int = 4,
    local: int = 1,
    uncompressed: Iterable[Sequence[int]] = (),
    settled: bool = True,
) -> list[BucketPlan]:
    """Plans the buckets of a step; see :func:`volume`."""
    check_config(volume, config)
    counts = {"world": world, "itemsize": itemsize, "local": local}
    world, itemsize, local = (check_integer(name, count) for name, count in counts.items())
    sizes = [_integers("buckets: size", bucket) for bucket in buckets]
    skipped = zip(sizes, _of_each("uncompressed", uncompressed, len(sizes)), strict=True)
    known: list[BucketSizes] = [
        (each, itemsize, sorted({*_integers("uncompressed: index", numbers, len(each) - 1)}), 0)
        for each, numbers in skipped
    ]
    config, model = config.resolve(world, local), elements(known)
    together = [known] if settled else [[each] for each in known]
    return [plan for each in together for plan in plan_step(config, each, world, local, model)]


def _integers(name: str, found: Any, most: float = math.inf) -> tuple[int, ...]:
    """Checks one integer from 0 to ``most``, or several."""
    several = found if isinstance(found, Iterable) else (found,)
    return tuple(check_integer(name, each, 0, most) for each in several)


def _of_each(name: str, found: Iterable[Any], buckets: int) -> list[Any]:
    """Returns one item per bucket, empty ones if ``found`` is empty; refuses another number of items."""
    each = list(found) or [()] * buckets
    if len(each) != buckets:
        raise ValueError(f"{name}={each} has {len(each)} items, but one is needed for each of {buckets} buckets.")
    return each
