"""Shares of a step's bytes: buckets with more energy in their gradients send more of their entries.

In one bucket all entries compete for the same payload, and where the gradient is large, more of them are sent. Each of
several buckets sends its own largest entries. If all had the same density, a bucket of large gradients would deliver
them late: a GPT in three buckets, whose embedding and first layers have nine tenths of the energy, ends training 5 to
10 % behind dense training. So with ``saving=`` the bytes of a bucket follow the energy of an entry of it, the mean
square of what it delivers, to the power 5/8: as many as it gets in one bucket, where 54 times the energy got 12 times
the entries. The bytes of a step stay the same (:func:`lightning_topk.bucket.share_out`).

All ranks must decide alike. They know the same delivered values, but not always times the same loss scale: that of a
rank that has run out of data stays behind. So rank 0 decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

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


class Shares:
    """Measures the energies of buckets, and decides about their shares.

    ``shards`` is the group of all ranks that exchange a shard of the same gradients on this ``device``, if there are
    several.
    """

    def __init__(self, device: torch.device = CPU, shards: dist.ProcessGroup | None = None) -> None:
        self._device, self._shards = device, shards
        self._reset()

    def _reset(self) -> None:
        self._passes, self._next = 0, FIRST
        self._measured: list[tuple[Sequence[Bucket], Tensor]] = []  # of each pass, buckets and energies [buckets]

    @property
    def measures(self) -> bool:
        """Whether the next pass should be measured."""
        return self._next - self._passes <= WINDOW

    def end_pass(self, same: bool) -> None:
        """Counts a pass, and begins again if its buckets are not the ``same`` as those of the pass before."""
        if not same:
            self._reset()
        self._passes += 1

    def fold(self, buckets: Sequence[Bucket], energies: Sequence[Tensor]) -> None:
        """Takes the energies of the buckets of a pass."""
        self._measured.append((buckets, torch.stack([*energies])))

    @property
    def due(self) -> bool:
        """Whether it is time to decide."""
        return self._passes >= self._next

    def decide(self, numels: Mapping[Bucket, int]) -> list[float]:
        """The weight of each bucket's bytes, for buckets of ``numels`` compressed elements; empty without any energy.

        A bucket counts with the passes that used it; if none did, its weight is 1. Waits for the device.
        """
        rows = [dict(zip(buckets, energies.tolist(), strict=True)) for buckets, energies in self._measured]
        rows = [row for row in rows if all(map(math.isfinite, row.values()))]
        self._next, self._measured = self._next + min(self._next, LAST), []
        used = [[energy for row in rows if (energy := row.get(bucket, 0.0))] for bucket in numels]
        mine = [fmean(each) if each else 0.0 for each in used]
        shards = [mine] if self._shards is None else gathered(mine, self._device, self._shards)
        pairs = [*zip(map(sum, zip(*shards, strict=True)), numels.values(), strict=True)]
        total, count = sum(energy for energy, numel in pairs if numel), sum(numels.values())
        if not total:
            return []
        densities = [energy / numel * (count / total) if energy * numel else 1.0 for energy, numel in pairs]
        return [min(MOST, max(LEAST, density ** (5 / 8))) for density in densities]


def energy(g: Tensor) -> Tensor:
    """The sum of squares of ``g`` ``[numel]``, scalar float64, estimated from elements at equal distances."""
    some = g[:: g.numel() // SAMPLE | 1]  # an odd distance meets all columns of most matrices
    return torch.linalg.vector_norm(some, dtype=torch.float64).square() * (g.numel() / some.numel())
