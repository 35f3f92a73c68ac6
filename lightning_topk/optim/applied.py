"""Makes residuals count as in dense training: clipped by the user, at the learning rate of each gradient's step.

A residual adds up gradients of many steps and delivers them later; each should count as much as in dense training. The
optimizer applies them at the current rate. So **residuals shrink when the rate rises**, since dense training has
applied them at the lower rate (:func:`faded`). And each gradient enters clipped to the norm C that the user passed.

A gradient of norm n is divided by n / C if that is above 1. Here n is the norm of the mean gradient over all parameters
that are clipped together, and no rank knows it before the exchange of the first bucket. So n is estimated from the norm
of the worker's own bucket and from running means of energies, without communication:

- averaging over the workers removes noise: in the long run, the energy falls to that of the delivered gradients;
- the other buckets have their usual share of the energy. So if one bucket's gradient is a hundred times as large as
  usual, it is clipped as if those of all buckets were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core import ops
from lightning_topk.core.link import COLUMNS, DELIVERED, ENTERED, SLOPE, Clip

FALL = 0.99
"""Least factor by which the rate that counts for residuals falls per pass: rates of 0, and restarts, erase nothing."""
MEMORY = 0.9
"""Weight of earlier passes in running means of energies."""
MEANS, RATIO = slice(DELIVERED + 1, DELIVERED + 3), DELIVERED + 3
"""More columns of :attr:`.Clip.rows`: running means of energies, entered and delivered; the slope of a limit of 1."""


def faded(before: float, rate: float) -> tuple[float, float]:
    """Returns the factor of a residual that counted at the rate ``before``, and the rate at which it counts now."""
    now = max(rate, FALL * before)
    return min(1.0, before / now) if now else 1.0, now


class Rates(NamedTuple):
    """Learning rates of a pass, by parameter group; None where a group has none, or only a GPU knows it."""

    group_of: Mapping[Tensor, int]  # by member of a bucket
    now: tuple[float | None, ...]
    last: tuple[float | None, ...]  # in the last step that was taken; None before the first

    def faded(self, group: int | None, before: float | None) -> tuple[float, float | None]:
        """Applies :func:`faded` to members of a group. If ``before`` is None, it is the rate of the last step.

        A user may set the rate after backward. So the rate of the first pass is only known after its step.
        """
        now, last = (None, None) if group is None else (self.now[group], self.last[group])
        before = last if before is None else before
        return (1.0, None) if now is None or before is None else faded(before, now)


def rate_of(group: Mapping[str, object]) -> float | None:
    """The learning rate of a parameter group, unless reading it would wait for a GPU."""
    rate: Any = group.get("lr")
    if isinstance(rate, Tensor):
        rate = None if rate.is_cuda else float(rate)
    return float(rate) if isinstance(rate, Real) and 0 <= float(rate) < math.inf else None


@dataclass
class _OfBucket:
    """The clipping of a bucket.

    Attributes:
        number_of: The number of every parameter's limit; when this mapping changes, the bucket starts anew.
        number: The number of the bucket's limit; or ``[parameters]`` int64, the number of each parameter's limit.
        rows: ``[limits, COLUMNS]`` for all limits, see :class:`.Clip`.
        limits: The limits for which the slopes were computed.
    """

    number_of: Mapping[Tensor, int]
    number: int | Tensor
    rows: Tensor
    limits: Sequence[float] = ()


class Clipping:
    """Estimates the user's clipping of each bucket, a :class:`.Clip`. A table has the rows of the last pass's buckets.

    ``workers`` is the number of workers; ``shards`` is the group of the ranks that each exchange a shard of the same
    gradients, or None.
    """

    def __init__(self, workers: int, shards: dist.ProcessGroup | None = None) -> None:
        self._workers = workers
        self._group, self._shards = shards, 1 if shards is None else dist.get_world_size(shards)
        self.limits: Sequence[float] = ()
        """The norms to which the user clips; infinite for parameters that are not clipped. Empty: none is known."""
        self._number_of: Mapping[Tensor, int] = {}  # of each member's limit
        self._reset()

    def _reset(self) -> None:
        self._inverses: Tensor | None = None  # [limits], 1 / limits
        self._buckets: Sequence[Bucket] = ()  # of the last pass
        self._table = torch.empty(0)  # [buckets, limits, COLUMNS], of these buckets
        self._folded = False  # whether no slopes were estimated since that pass
        self._seen: dict[int, Tensor] = {}  # by number of a limit, see `note`
        self._changed: Tensor | float = 1.0  # [limits], the factor by which the user changes gradients before clipping

    def begin_pass(self, limits: Sequence[float], number_of: Mapping[Tensor, int]) -> None:
        """Sets the limits of a pass, and the number of the limit of each member of a bucket."""
        if number_of is not self._number_of:
            self._reset()
        if limits != self.limits:
            self.limits, self._inverses = limits, None
        self._number_of = number_of
        if self._folded:
            self._estimate()

    def note(self, number: int, norm: Tensor) -> None:
        """Records the norm of gradients just before the user clips them: it may have changed since backward.

        For example, some loops divide gradients by a number of tokens.
        """
        self._seen[number] = norm.float()

    @torch.no_grad()
    def fold(self, buckets: Sequence[Bucket]) -> None:
        """Updates the running means of energies by the norms in the rows of all buckets of a pass."""
        buckets = [*dict.fromkeys(buckets)]
        if any(bucket.clipping.number_of is not self._number_of for bucket in buckets):
            return  # the rows are for earlier limits
        if buckets != self._buckets:
            self._buckets, self._table = buckets, torch.stack([bucket.clipping.rows for bucket in buckets])
            for bucket, rows in zip(buckets, self._table, strict=True):
                bucket.clipping.rows = rows
        means, squares = self._table[..., MEANS], self._table[..., ENTERED : DELIVERED + 1].square()
        means.copy_(torch.where(squares.isfinite().all(), MEMORY * means + (1 - MEMORY) * squares, means))
        self._folded = True

    @torch.no_grad()
    def _estimate(self) -> None:
        """Estimates the slopes of the buckets of the last pass."""
        self._folded, (entered, arrived) = False, self._table[..., MEANS].unbind(-1)
        mean = arrived.clamp(entered / self._workers, entered)  # bounds: for pure noise, and for none
        sums = torch.stack([mean.sum(0), self._table[..., DELIVERED].square().sum(0)])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        total, last = sums.unbind()
        if self._seen:
            seen = [self._seen.get(number, norm) for number, norm in enumerate(last.sqrt())]
            # Offloaded gradients have their norm on the CPU.
            changed = torch.stack([each.to(last.device, non_blocking=True) for each in seen]) / last.sqrt()
            self._seen = {}
            self._changed = torch.where(changed.isfinite() & (changed > 0), changed, self._changed)
        slopes = (total / entered).sqrt().nan_to_num(1.0, posinf=1.0)
        torch.mul(slopes, self._changed, out=self._table[..., RATIO])
        if self.limits:  # else the user has stopped clipping
            torch.mul(self._table[..., RATIO], self._inverse(last.device), out=self._table[..., SLOPE])
        for bucket in self._buckets:
            bucket.clipping.limits = self.limits

    def of(self, bucket: Bucket, device: torch.device) -> Clip:
        """Returns the clipping of a bucket's gradient in this pass; ``limits`` must not be empty."""
        known: _OfBucket | None = bucket.clipping
        if known is None or known.number_of is not self._number_of:
            numbers = [self._number_of.get(p, len(self.limits) - 1) for p in bucket]
            number = numbers[0] if len({*numbers}) == 1 else ops.to_device(torch.tensor(numbers), device)
            rows = torch.zeros(len(self.limits), COLUMNS, dtype=torch.float32)
            rows[:, RATIO] = torch.tensor(self._by_size(bucket), dtype=torch.float32)
            known = bucket.clipping = _OfBucket(self._number_of, number, ops.to_device(rows, device))
        number, rows = known.number, known.rows
        if known.limits is not self.limits:
            known.limits = self.limits
            torch.mul(rows[:, RATIO], self._inverse(device), out=rows[:, SLOPE])
        return Clip(rows[number : number + 1]) if isinstance(number, int) else Clip(rows, number)

    def _inverse(self, device: torch.device) -> Tensor:
        """The inverses ``[limits]`` of the limits."""
        if self._inverses is None:
            inverses = torch.tensor([1 / limit for limit in self.limits], dtype=torch.float32)
            self._inverses = ops.to_device(inverses, device)
        return self._inverses

    def _by_size(self, bucket: Bucket) -> list[float]:
        """Slopes ``[limits]`` for limits of 1, of a bucket of unknown energy: as if every element had the same."""
        total, own = Counter[int](), Counter[int]()
        for p, number in self._number_of.items():
            total[number] += p.numel() * p.requires_grad
        for p in bucket:
            own[self._number_of.get(p, len(self.limits) - 1)] += p.numel()
        ratios = [self._shards * total[number] / max(1, own[number]) for number in range(len(self.limits))]
        return [math.sqrt(max(1.0, ratio)) for ratio in ratios]
