"""Divides the bytes of a step among its buckets, and the entries of a bucket among its parameters.

Within a bucket, all entries compete for the same payload, so parameters with large gradients send more of them. But
each bucket sends its own largest entries. If all had the same density, a bucket with large gradients would deliver them
late: a GPT in three buckets, whose embedding and first layers have nine tenths of the energy, ends training 5 to 10 %
behind dense training. So with ``saving=``, a bucket's bytes per element grow with its energy per element, the mean
square of what it delivers, to the power 5/8. A single bucket divides its entries in the same way: there, 54 times the
energy got 12 times the entries. The bytes of a step stay the same (:func:`lightning_topk.bucket.share_out`).

Within a bucket, a parameter with far smaller gradients than the others would hardly be sent: for example, the layers of
a loss with a small weight, or of a critic beside its actor. So its gradient is *lifted* where it enters the exchange,
by a power of two that leaves it at most half of the bucket's root mean square, and lowered where it is delivered.
Gradients above a 32nd of the bucket's are not lifted (:func:`lifts_of`). If two losses have weights 1 and 100, the
first ends 14 % behind dense training instead of 54 % (``reproduce at-size --models "two losses"``).

All ranks must decide alike. They see the same delivered values, but a rank that has run out of data has an outdated
loss scale. So rank 0 decides.
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
"""Passes before the first decision. The interval then doubles, up to ``LIFTS`` for lifts, and up to ``WEIGHTS`` for
weights, since another plan moves residuals."""
WINDOW = 8
"""Passes that are measured before a decision."""
CPU = torch.device("cpu")
LEAST, MOST = 0.1, 10.0
"""Bounds of a bucket's weight."""
LIFTED = 0.5
"""Largest root mean square of a lifted gradient, relative to its bucket's."""
LOWEST, HIGHEST = 16.0, 1024.0
"""Bounds of a lift."""
TURNS = 16
"""Largest number of passes with different buckets to remember."""
Buckets = tuple[Bucket, ...]
"""Buckets that are always exchanged in the same passes, in order."""
Energies = Mapping[Bucket, Tensor]
"""For each nonempty bucket, the energies of its parameters' gradients as they entered in this worker, and as delivered:
``[2, parameters]``, not finite if a delivered value is not."""


@dataclass
class _Passes:
    """Number of passes of some buckets, and the energies that were measured since the last decision."""

    count: int = 0
    due: int = FIRST  # the count at which to decide next
    measured: list[Energies] = field(default_factory=list)


class Shares:
    """Measures the energies of buckets, and decides their shares of the bytes.

    Networks, or heads of one network, may be trained in turn. Only buckets that are always exchanged in the same passes
    share bytes, so the bytes of every pass stay the same.

    ``shards`` is the group of the ranks that each exchange a shard of the same gradients, or None; ``device`` is this
    rank's.
    """

    def __init__(self, device: torch.device = CPU, shards: dist.ProcessGroup | None = None) -> None:
        self._device, self._shards = device, shards
        self.turns: list[tuple[Bucket, ...]] = []
        """All buckets of each different pass."""
        self._passes: dict[Buckets, _Passes] = {}
        self.due: list[Buckets] = []
        """Buckets that share bytes and whose shares are to be decided now."""

    def measures(self, first: Bucket) -> bool:
        """Whether the pass that begins with this bucket should be measured."""
        near = [each for each, passes in self._passes.items() if passes.due - passes.count <= WINDOW]
        return any(each[0] in turn for turn in self.turns if turn[0] is first for each in near)

    def end_pass(self, buckets: Buckets) -> list[Bucket]:
        """Counts a pass with all these buckets. Returns the buckets whose earlier decisions no longer hold."""
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
        """Records the energies of a pass with all these buckets."""
        for each, passes in self._passes.items():
            if each[0] in buckets:
                passes.measured.append({bucket: energies[bucket] for bucket in each if bucket in energies})

    def decide(self, sizes: Mapping[Bucket, Sequence[int]]) -> tuple[list[float], list[Sequence[float]]]:
        """Returns the weight of each bucket's bytes, or an empty list to keep them; and the lifts of its parameters.

        ``sizes`` has the number of compressed elements of each parameter of the buckets. Energies are means over the
        passes that used a bucket or a parameter. If none did, the bucket's weight is 1, and the parameter keeps its
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
    """The mean of the nonzero energies; 0 if there are none."""
    return fmean([*filter(None, energies)] or [0.0])


def lifts_of(energies: Sequence[float], sizes: Sequence[int], before: Sequence[float] = ()) -> Sequence[float]:
    """Returns the lift of each parameter, from the energy of a worker's gradient and the compressed elements.

    Empty if none is lifted, see :attr:`.Link.lifts`. A parameter without energy keeps its lift of ``before``.
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
