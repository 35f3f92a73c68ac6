"""Shares of a step's bytes: which buckets, and which parameters of a bucket, send how many of their entries.

In one bucket all entries compete for the same payload, and where the gradient is large, more of them are sent. Each of
several buckets sends its own largest entries. If all had the same density, a bucket of large gradients would deliver
them late: a GPT in three buckets, whose embedding and first layers have nine tenths of the energy, ends training 5 to
10 % behind dense training. So with ``saving=`` the bytes of a bucket follow the energy of an entry of it, the mean
square of what it delivers, to the power 5/8: as many as it gets in one bucket, where 54 times the energy got 12 times
the entries. The bytes of a step stay the same (:func:`lightning_topk.bucket.share_out`).

Within a bucket, a parameter whose gradients are far smaller than the others' would hardly be sent: the layers of a loss
that counts little beside another one, of a critic beside its actor. So its gradient is *lifted* where it enters the
exchange, by a power of two that leaves it below half of the bucket's root mean square, and lowered where it is
delivered. One above a sixteenth of that is left alone (:func:`lifts_of`). Of two losses that count 1 and 100, the first
ends 16 % behind dense training then, and not 54 (``reproduce at-size --models "two losses"``).

All ranks must decide alike. They know the same delivered values, but not always times the same loss scale: that of a
rank that has run out of data stays behind. So rank 0 decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.consensus import gathered

FIRST, LAST = 8, 1024
"""Passes until the first decision; each later one comes after twice as many, at most after ``LAST``."""
WINDOW = 8
"""Passes that are measured before a decision."""
SAMPLE = 1 << 15
"""Elements of a bucket from which its energy is estimated, up to twice as many."""
CPU = torch.device("cpu")
LEAST, MOST = 0.1, 10.0
"""Bounds of a bucket's weight."""
LIFTED = 0.5
"""Root mean square of a parameter's lifted gradient over that of its bucket, at most."""
LOWEST, HIGHEST = 8.0, 1024.0
"""Bounds of a lift."""


Buckets = tuple[Bucket, ...]
"""All buckets of a pass."""


@dataclass
class _Passes:
    """The passes of the same buckets."""

    count: int = 0
    due: int = FIRST  # at which count it is time to decide
    measured: list[tuple[Sequence[Any], Tensor]] = field(
        default_factory=list
    )  # of a pass, what has energies, and these


class Shares:
    """Measures the energies of buckets, and decides about their shares. Networks may be trained in turn.

    ``shards`` is the group of all ranks that exchange a shard of the same gradients on this ``device``, if there are
    several.
    """

    def __init__(self, device: torch.device = CPU, shards: dist.ProcessGroup | None = None) -> None:
        self._device, self._shards = device, shards
        self._passes: dict[Buckets, _Passes] = {}
        self.measures = False
        """Whether the next pass should be measured."""
        self.due: list[Buckets] = []
        """The buckets about which it is time to decide."""

    def end_pass(self, buckets: Buckets) -> list[Bucket]:
        """Counts a pass. It ends what was decided about other buckets of the same parameters, which it returns."""
        ended: list[Buckets] = []
        if buckets and buckets not in self._passes:
            members = {p for bucket in buckets for p in bucket}
            ended = [each for each in self._passes if any(not members.isdisjoint(bucket) for bucket in each)]
            for each in ended:
                del self._passes[each]
            self._passes[buckets] = _Passes()
        if buckets:
            self._passes[buckets].count += 1
        self._plan()
        return [bucket for each in ended for bucket in each] if ended else []

    def _plan(self) -> None:
        self.measures, self.due = False, []
        for buckets, passes in self._passes.items():
            self.measures |= passes.due - passes.count <= WINDOW
            self.due += [buckets] * (passes.count >= passes.due)

    def fold(self, buckets: Buckets, energies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Takes the energies of the buckets of a pass: as delivered, a scalar, and by parameter as they entered."""
        if (passes := self._passes.get(buckets)) is None:
            return
        delivered, entered = zip(*energies, strict=True)
        members = [(bucket, number) for bucket, its in zip(buckets, entered, strict=True) for number in range(len(its))]
        passes.measured.append(([*buckets, *members], torch.cat([torch.stack(delivered), *entered])))

    def decide(self, sizes: Mapping[Bucket, Sequence[int]]) -> tuple[list[float], list[Sequence[float]]]:
        """The weight of each bucket's bytes, none without any energy; and the lifts of its parameters.

        ``sizes`` are the elements of each parameter of the buckets that are compressed. Buckets and parameters count
        with the passes that used them; a bucket that none used has the weight 1. Waits for the device.
        """
        rows: list[dict[Any, float]] = []
        passes = self._passes[tuple(sizes)]
        for places, values in ((places, energies.tolist()) for places, energies in passes.measured):
            rows += [dict(zip(places, values, strict=True))] if all(map(math.isfinite, values)) else []
        passes.due, passes.measured = passes.due + min(passes.due, LAST), []
        self._plan()

        def usual(place: Any) -> float:
            used = [energy for row in rows if (energy := row.get(place, 0.0))]
            return fmean(used) if used else 0.0

        numels = {bucket: sum(each) for bucket, each in sizes.items()}
        lifts = [lifts_of([usual((bucket, n)) for n in range(len(each))], each) for bucket, each in sizes.items()]
        return self._weights([*map(usual, numels)], numels), lifts

    def _weights(self, mine: list[float], numels: Mapping[Bucket, int]) -> list[float]:
        shards = [mine] if self._shards is None else gathered(mine, self._device, self._shards)
        pairs = [*zip(map(sum, zip(*shards, strict=True)), numels.values(), strict=True)]
        total, count = sum(energy for energy, numel in pairs if numel), sum(numels.values())
        if not total:
            return []
        densities = [energy / numel * (count / total) if energy * numel else 1.0 for energy, numel in pairs]
        return [min(MOST, max(LEAST, density ** (5 / 8))) for density in densities]


def lifts_of(energies: Sequence[float], sizes: Sequence[int]) -> Sequence[float]:
    """How much to lift the gradient of each parameter, from its energy in a worker and its compressed elements.

    See :attr:`.Link.lifts`.
    """
    pairs = [*zip(energies, sizes, strict=True)]
    square = sum(energy for energy, size in pairs if size) / max(1, sum(sizes))  # the mean of all
    ratios = [LIFTED * math.sqrt(square * size / energy) if energy * size else 1.0 for energy, size in pairs]
    lifts = [min(HIGHEST, 2.0 ** math.floor(math.log2(ratio))) if ratio >= LOWEST else 1.0 for ratio in ratios]
    return lifts if max(lifts, default=1.0) > 1 else ()


def energies_of(g: Tensor, sizes: Sequence[int]) -> Tensor:
    """The sum of squares of each parameter's elements of ``g`` ``[numel]``: ``[parameters]``, floating."""
    wide = torch.promote_types(g.dtype, torch.float32)
    return torch.stack(torch._foreach_norm(g.split([*sizes]), 2, wide)).square()


def energy(g: Tensor) -> Tensor:
    """The sum of squares of ``g`` ``[numel]``, scalar float64, estimated from elements at equal distances."""
    some = g[:: g.numel() // SAMPLE | 1]  # an odd distance meets all columns of most matrices
    return torch.linalg.vector_norm(some, dtype=torch.float64).square() * (g.numel() / some.numel())
