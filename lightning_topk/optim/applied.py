"""What dense training would apply of a gradient: as clipped by the user, at the learning rate of its step.

A residual adds up gradients of many steps and delivers them later, so that each should count as much as in dense
training. It is a gradient at today's rate: **what waits shrinks when the rate rises**, since dense training has applied
it at the lower one (:func:`faded`). And each gradient enters it as clipped to the norm C that the user has told.

A gradient of the norm n is divided by n / C, if that is above 1. But n is the norm of the mean gradient, over all
parameters that are clipped together, and no rank knows it before the exchange of the first bucket. It is estimated from
the norm of the worker's own bucket, and from running means of energies, without communication:

- averaging over the workers takes out noise, in the long run to the energy of what is delivered;
- the other buckets have their usual part of the energy. So a gradient a hundred times as large counts as one of a model
  whose gradients all are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core import ops
from lightning_topk.core.link import Clip

FALL = 0.99
"""Least rate of a pass over the one before that counts for what waits: rates of 0, and restarts, erase nothing."""
MEMORY = 0.9
"""Weight of the passes before in running means of energies."""


def faded(before: float, rate: float) -> tuple[float, float]:
    """The factor of what waits since a pass at the rate ``before``; and the rate at which it counts from now on."""
    now = max(rate, FALL * before)
    return min(1.0, before / now) if now else 1.0, now


class Rates(NamedTuple):
    """Learning rates of a pass, by parameter group; None where a group has none, or one that only the device knows."""

    group_of: Mapping[Tensor, int]  # by member of a bucket
    now: tuple[float | None, ...]
    last: tuple[float | None, ...]  # in the last step that was taken; None before the first

    def faded(self, group: int | None, before: float | None) -> tuple[float, float | None]:
        """As :func:`faded` for members of a group, whose rate ``before`` is that of the last step if it is None.

        A user may set the rate after backward. So the rate of the first pass counts only once a step has shown it.
        """
        now, last = (None, None) if group is None else (self.now[group], self.last[group])
        before = last if before is None else before
        return (1.0, None) if now is None or before is None else faded(before, now)


def rate_of(group: Mapping[str, object]) -> float | None:
    """The learning rate of a parameter group, unless reading it would wait for a GPU."""
    rate: Any = group.get("lr")
    if isinstance(rate, Tensor):
        rate = None if rate.is_cuda else float(rate)
    return float(rate) if isinstance(rate, int | float) and 0 <= rate < math.inf else None


@dataclass
class _OfBucket:
    """What is known of a bucket's clipping.

    Attributes:
        number_of: The numbers of all parameters' limits; with others, it begins again.
        number: The number of its limit, or ``[parameters]`` int64, that of each of its parameters'.
        energies: ``[2, limits]``, running means: as entered, and as delivered.
        slopes: ``[limits]``, of limits of 1.
    """

    number_of: Mapping[Tensor, int]
    number: int | Tensor
    energies: Tensor | None = None
    slopes: Tensor | None = None


class Clipping:
    """The user's clipping for each bucket, as :class:`.Clip`. Norms and energies stay on the device.

    ``workers`` exchange; ``shards`` is the group of all ranks that exchange a shard of the same gradients, if there are
    several.
    """

    def __init__(self, workers: int, shards: dist.ProcessGroup | None = None) -> None:
        self._workers = workers
        self._group, self._shards = shards, 1 if shards is None else dist.get_world_size(shards)
        self.limits: Sequence[float] = ()
        """The norms to which the user clips; infinite for parameters that are not clipped. Empty: nothing was told."""
        self._number_of: Mapping[Tensor, int] = {}  # of each member's limit
        self._reset()

    def _reset(self) -> None:
        self._inverses: Tensor | None = None  # [limits], of the limits
        self._folded: tuple[Sequence[Bucket], Tensor, Tensor] | None = None  # the last pass
        self._seen: dict[int, Tensor] = {}  # by number of a limit, see `note`
        self._changed: Tensor | float = 1.0  # [limits], the factor by which the user changes gradients before clipping

    def begin_pass(self, limits: Sequence[float], number_of: Mapping[Tensor, int]) -> None:
        """Sets the limits of a pass, and the numbers of those of all members of buckets."""
        if number_of is not self._number_of:
            self._reset()
        if limits != self.limits:
            self._inverses = None
        self.limits, self._number_of = limits, number_of
        if self._folded is not None:
            self._estimate(*self._folded)

    def note(self, number: int, norm: Tensor) -> None:
        """Takes the norm of the gradients that the user clips, before that: they may have been changed since backward.

        Some loops divide them by a number of tokens.
        """
        self._seen[number] = norm.float()

    @torch.no_grad()
    def fold(self, buckets: Sequence[Bucket], norms: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Takes the norms of all buckets of a pass, see :class:`.Outcome`."""
        known = [bucket.clipping for bucket in buckets]
        if any(each is None or each.number_of is not self._number_of for each in known):
            return  # of limits before these
        count, every = len(self.limits), []
        for each, pair in zip(known, norms, strict=True):
            alone = isinstance(each.number, int) and count > 1
            for found in pair:
                every.append(torch.nn.functional.pad(found, (each.number, count - 1 - each.number)) if alone else found)
        squares = torch.stack(every).view(-1, 2, count).square()
        none = torch.zeros_like(squares[0])
        energies = [none if each.energies is None else each.energies for each in known]
        ops.use_here(*energies)
        before = torch.stack(energies)
        means = torch.where(squares.isfinite().all(), MEMORY * before + (1 - MEMORY) * squares, before)
        for each, mean in zip(known, means, strict=True):
            each.energies = mean
        self._folded = buckets, means, squares[:, 1]

    @torch.no_grad()
    def _estimate(self, buckets: Sequence[Bucket], means: Tensor, delivered: Tensor) -> None:
        """Estimates the slopes of the buckets of the last pass."""
        self._folded = None
        ops.use_here(means, delivered)
        entered, arrived = means.unbind(1)
        mean = arrived.clamp(entered / self._workers, entered)  # of pure noise, and without any
        sums = torch.stack([mean.sum(0), delivered.sum(0)])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        total, last = sums.unbind()
        if self._seen:
            seen = [self._seen.get(number, norm) for number, norm in enumerate(last.sqrt())]
            # Offloaded gradients have their norm on the CPU.
            changed = torch.stack([each.to(last.device, non_blocking=True) for each in seen]) / last.sqrt()
            self._seen = {}
            self._changed = torch.where(changed.isfinite() & (changed > 0), changed, self._changed)
        slopes = (total / entered).sqrt().nan_to_num(1.0, posinf=1.0) * self._changed
        for bucket, slope in zip(buckets, slopes, strict=True):
            bucket.clipping.slopes = slope

    def of(self, bucket: Bucket, device: torch.device) -> Clip:
        """The clipping of a bucket's gradient in this pass, if any was told."""
        known: _OfBucket | None = bucket.clipping
        if known is None or known.number_of is not self._number_of:
            numbers = [self._number_of.get(p, len(self.limits) - 1) for p in bucket]
            number = numbers[0] if len({*numbers}) == 1 else ops.to_device(torch.tensor(numbers), device)
            known = bucket.clipping = _OfBucket(self._number_of, number)
        if self._inverses is None:
            self._inverses = ops.to_device(torch.tensor([1 / limit for limit in self.limits]), device)
        slopes, number = known.slopes, known.number
        if slopes is None:
            slopes = ops.to_device(torch.tensor(self._by_size(bucket)), device)
        slopes = slopes * self._inverses
        return Clip(slopes[number : number + 1]) if isinstance(number, int) else Clip(slopes, number)

    def _by_size(self, bucket: Bucket) -> list[float]:
        """Slopes ``[limits]`` of a bucket of unknown energy, as if all elements had the same."""
        total, own = Counter[int](), Counter[int]()
        for p, number in self._number_of.items():
            total[number] += p.numel() * p.requires_grad
        for p in bucket:
            own[self._number_of.get(p, len(self.limits) - 1)] += p.numel()
        ratios = [self._shards * total[number] / max(1, own[number]) for number in range(len(self.limits))]
        return [math.sqrt(max(1.0, ratio)) for ratio in ratios]
