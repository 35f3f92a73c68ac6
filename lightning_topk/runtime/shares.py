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
delivered. One above a 32nd of that is left alone (:func:`lifts_of`). Of two losses that count 1 and 100, the first ends
14 % behind dense training then, and not 54 (``reproduce at-size --models "two losses"``).

All ranks must decide alike. They know the same delivered values, but not always times the same loss scale: that of a
rank that has run out of data stays behind. So rank 0 decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.consensus import gathered
from lightning_topk.core.link import lengths

FIRST, LIFTS, WEIGHTS = 8, 64, 1024
"""Passes until the first decision. Each later one comes after twice as many, about lifts at most after ``LIFTS``, and
about weights, since another plan moves residuals, after ``WEIGHTS``."""
WINDOW = 8
"""Passes that are measured before a decision."""
CPU = torch.device("cpu")
LEAST, MOST = 0.1, 10.0
"""Bounds of a bucket's weight."""
LIFTED = 0.5
"""Root mean square of a parameter's lifted gradient over that of its bucket, at most."""
LOWEST, HIGHEST = 16.0, 1024.0
"""Bounds of a lift."""
TURNS = 16
"""Passes with different buckets that are known at most."""
Buckets = tuple[Bucket, ...]
"""Buckets that are always exchanged in the same passes, in order."""
Energies = Mapping[Bucket, Tensor]
"""Of each bucket that is not empty, the energies of its parameters as they entered in this worker and as delivered:
``[2, parameters]``, not finite if what was delivered is not."""


@dataclass
class _Passes:
    """The passes of some buckets, and the energies of those that were measured since the last decision."""

    count: int = 0
    due: int = FIRST  # at which count it is time to decide
    measured: list[Energies] = field(default_factory=list)


class Shares:
    """Measures the energies of buckets, and decides about their shares.

    Networks, or heads of one, may be trained in turn. Buckets share bytes with those that are always exchanged in the
    same passes, so that the bytes of every pass stay the same.

    ``shards`` is the group of all ranks that exchange a shard of the same gradients on this ``device``, if there are
    several.
    """

    def __init__(self, device: torch.device = CPU, shards: dist.ProcessGroup | None = None) -> None:
        self._device, self._shards = device, shards
        self.turns: list[tuple[Bucket, ...]] = []
        """All buckets of the passes in turn."""
        self._passes: dict[Buckets, _Passes] = {}
        self.due: list[Buckets] = []
        """The buckets about which it is time to decide."""

    def measures(self, first: Bucket) -> bool:
        """Whether the pass that begins with this bucket should be measured."""
        near = [each for each, passes in self._passes.items() if passes.due - passes.count <= WINDOW]
        return any(each[0] in turn for turn in self.turns if turn[0] is first for each in near)

    def end_pass(self, buckets: Buckets) -> list[Bucket]:
        """Counts a pass of all these buckets. Returns those about which earlier decisions end, if there are others."""
        ended: list[Bucket] = []
        if buckets and buckets not in self.turns:
            members = {p for bucket in buckets for p in bucket}
            regrouped = {b for turn in self.turns for b in turn if b not in buckets and not members.isdisjoint(b)}
            self.turns = [*[turn for turn in self.turns if regrouped.isdisjoint(turn)][1 - TURNS :], buckets]
            groups = defaultdict[tuple[bool, ...], list[Bucket]](list)
            for bucket in dict.fromkeys(bucket for turn in self.turns for bucket in turn):
                groups[tuple(bucket in turn for turn in self.turns)].append(bucket)
            before, self._passes = self._passes, {(*each,): _Passes() for each in groups.values()}
            self._passes |= {each: passes for each, passes in before.items() if each in self._passes}
            ended = [bucket for each in before if each not in self._passes for bucket in each]
        for each, passes in self._passes.items():
            passes.count += each[0] in buckets
        self.due = [each for each, passes in self._passes.items() if passes.count >= passes.due]
        return ended

    def fold(self, buckets: Buckets, energies: Energies) -> None:
        """Takes the energies of a pass of all these buckets."""
        for each, passes in self._passes.items():
            if each[0] in buckets:
                passes.measured.append({bucket: energies[bucket] for bucket in each if bucket in energies})

    def decide(self, sizes: Mapping[Bucket, Sequence[int]]) -> tuple[list[float], list[Sequence[float]]]:
        """The weight of each bucket's bytes, none without energy or before their turn; and the lifts of its parameters.

        ``sizes`` are the elements of each parameter of the buckets that are compressed. Buckets and parameters count
        with the passes that used them. Of those that none used, a bucket has the weight 1, and a parameter keeps its
        lift. Waits for the device.
        """
        passes, self.due = self._passes[tuple(sizes)], [each for each in self.due if each != tuple(sizes)]
        turn = passes.due.bit_count() == 1 or passes.due % WEIGHTS == 0
        measured, passes.measured, passes.due = passes.measured, [], passes.due + min(passes.due, LIFTS)
        rows = [{bucket: energies.tolist() for bucket, energies in each.items()} for each in measured]
        rows = [row for row in rows if all(math.isfinite(sum(map(sum, pair))) for pair in row.values())]
        delivered, lifts = list[float](), list[Sequence[float]]()
        for bucket, its in sizes.items():
            found = [row[bucket] for row in rows if bucket in row]
            entered = [_usual(energies) for energies in zip(*(mine for mine, _ in found), strict=True)]
            lifts.append(lifts_of(entered or [0.0] * len(its), its, bucket.lifts))
            delivered.append(_usual(sum(compress(mean, its)) for _, mean in found))
        return self._weights(delivered, [*map(sum, sizes.values())]) if turn else [], lifts

    def _weights(self, mine: list[float], numels: Sequence[int]) -> list[float]:
        shards = [mine] if self._shards is None else gathered(mine, self._device, self._shards)
        pairs = [*zip(map(sum, zip(*shards, strict=True)), numels, strict=True)]
        total, count = sum(energy for energy, _ in pairs), sum(numels)
        if not total:
            return []
        densities = [energy / numel * (count / total) if energy * numel else 1.0 for energy, numel in pairs]
        return [min(MOST, max(LEAST, density ** (5 / 8))) for density in densities]


def _usual(energies: Iterable[float]) -> float:
    """The mean of those that are not 0; 0 if there are none."""
    return fmean([*filter(None, energies)] or [0.0])


def lifts_of(energies: Sequence[float], sizes: Sequence[int], before: Sequence[float] = ()) -> Sequence[float]:
    """How much to lift the gradient of each parameter, from its energy in a worker and its compressed elements.

    See :attr:`.Link.lifts`. A parameter without energy is lifted as ``before``.
    """
    pairs = [*zip(energies, sizes, strict=True)]
    square = sum(energy for energy, size in pairs if size) / max(1, sum(sizes))  # the mean of all
    lifts = [*before] or [1.0] * len(sizes)
    for number, (energy, size) in enumerate(pairs):
        if energy * size:
            ratio = min(HIGHEST, LIFTED * math.sqrt(square * size / energy))
            lifts[number] = 2.0 ** math.floor(math.log2(ratio)) if ratio >= LOWEST else 1.0
    return lifts if max(lifts, default=1.0) > 1 else ()


def energies_of(g: Tensor, sizes: Sequence[int]) -> Tensor:
    """The sum of squares of each parameter's elements of ``g`` ``[numel]``: ``[parameters]``, floating."""
    return lengths(g, sizes).square()
