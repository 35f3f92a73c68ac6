"""Shares of a step's bytes: buckets with more energy in their gradients send more of their entries.

In one bucket all entries compete for the same payload, and where the gradient is large, more of them are sent. Each of
several buckets sends its own largest entries. If all had the same density, a bucket of large gradients would deliver
them late: a GPT in three buckets, whose embedding and first layers have nine tenths of the energy, ends training 5 to
10 % behind dense training. So with ``saving=`` the bytes of a bucket follow the energy of an entry of it, the mean
square of what it delivers, to the power 5/8: as many as it gets in one bucket, where 54 times the energy got 12 times
the entries. The bytes of a step stay the same (:func:`lightning_topk.bucket.share_out`).

All ranks must decide alike, bit by bit. They know the same delivered values, and :func:`.reference.energy` adds them up
in integers, in which the order of additions does not matter. What follows has a fixed order, and only operations that
every processor rounds alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_topk.runtime.passes import Record

FIRST, LAST = 8, 1024
"""Passes until the first decision; each later one comes after twice as many, at most after ``LAST``."""
WINDOW = 8
"""Passes that are measured before a decision."""
LEAST, MOST = 0.1, 10.0
"""Bounds of a bucket's weight."""

Gather = Callable[[list[float]], list[list[float]]]
"""Returns the values of all ranks that exchange shards of the same gradients."""


class Shares:
    """Measures the energies of buckets, and decides about their shares."""

    def __init__(self, gather: Gather = lambda mine: [mine]) -> None:
        self._gather = gather
        self.reset()

    def reset(self) -> None:
        """Begins again, with other buckets."""
        self._passes, self._next = 0, FIRST
        self._energies: list[Tensor] = []  # of each measured pass, [buckets] float64

    @property
    def measures(self) -> bool:
        """Whether the next pass should be measured."""
        return self._next - self._passes <= WINDOW

    def fold(self, records: Sequence[Record]) -> None:
        """Takes the records of a pass."""
        self._passes += 1
        energies = [record.energy for record in records if record.energy is not None]
        if energies and len(energies) == len(records):
            self._energies.append(torch.stack(energies))

    def decide(self, numels: Sequence[int]) -> list[float] | None:
        """The weight of each bucket's bytes, for buckets of ``numels`` compressed elements; None if it is not time.

        The same on every rank. Waits for the device when it is time.
        """
        if self._passes < self._next:
            return None
        measured = [row for row in map(Tensor.tolist, self._energies) if all(map(math.isfinite, row))]
        self._next, self._energies = self._next + min(self._next, LAST), []
        if not measured:
            return None
        rows = self._gather([math.fsum(column) for column in zip(*measured, strict=True)])
        energies = [math.fsum(column) for column in zip(*rows, strict=True)]
        mean = math.fsum(energies) / sum(numels)
        if not mean:
            return None
        ratios = [energy / numel / mean if numel else 1.0 for energy, numel in zip(energies, numels, strict=True)]
        roots = [*map(math.sqrt, ratios)]
        return [min(MOST, max(LEAST, root * math.sqrt(math.sqrt(root)))) for root in roots]
