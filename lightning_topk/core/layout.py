"""The layout of a bucket: its blocks, its shards, and how many entries each shard sends.

A bucket of ``numel`` elements is cut into blocks of 256, and the servers get the blocks in turn
(block-cyclic), so element ``i`` belongs to shard ``(i // block) % shards``. Layers are contiguous in a bucket, so every
server gets a sample of every layer. This balances the load well enough for every shard to send the same number of
entries, and all sizes on the wire follow from integers known in advance.

With ``topology="hierarchical"`` the ranks of a node exchange gradients as one worker. Each rank then owns a *part* of
the bucket: a slice of every parameter, the same whichever bucket the parameter is in.

This module holds integers only; the tensor operations are in :mod:`lightning_topk.core.ops.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

BLOCK = 256  # elements in a block; a bucket too small for one block per shard uses smaller blocks
PIECE = 2048  # elements of one parameter's slice that one GPU program copies to or from a rank's part


@dataclass(frozen=True)
class Layout:
    """How ``numel`` elements, at least 1, are split among ``shards`` servers, block by block.

    With one shard, the bucket is not rearranged.
    """

    numel: int
    shards: int = 1

    @cached_property
    def block(self) -> int:
        """Number of elements in a block."""
        return self.numel if self.shards == 1 else min(BLOCK, math.ceil(self.numel / self.shards))

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """What decides where the elements of shards are, as a tuple for compiled loops: numel, shards and block."""
        return self.numel, self.shards, self.block

    @cached_property
    def shard_size(self) -> int:
        """Number of elements in the first shard, the largest. The others are padded to this size."""
        return self.count_before(self.numel, 0)

    @cached_property
    def full_blocks(self) -> bool:
        """Whether every shard consists of blocks of ``BLOCK`` elements, or there is only one shard."""
        return self.shards == 1 or self.block == BLOCK

    def count_before(self, index: int, shard: int) -> int:
        """Number of elements of a shard before the ``index``-th of the bucket."""
        turns, rest = divmod(index, self.shards * self.block)
        return turns * self.block + min(max(rest - shard * self.block, 0), self.block)

    def k_per_shard(self, k: int) -> int:
        """Entries that each shard sends if the bucket sends ``k``: an equal share, rounded up.

        If ``k`` is ``numel`` or more, it is ``shard_size``, so a ratio of 1 sends everything.
        """
        return self.shard_size if k >= self.numel else math.ceil(k / self.shards)


@dataclass(frozen=True)
class NodeShards:
    """How a bucket is split among the ranks of a node: each parameter in equal slices, the last one padded with zeros.

    With one rank, the bucket is not rearranged.
    """

    sizes: tuple[int, ...]
    count: int = 1

    @cached_property
    def slices(self) -> tuple[int, ...]:
        """Number of elements of each parameter in one part."""
        return tuple(math.ceil(size / self.count) for size in self.sizes)

    @cached_property
    def numel(self) -> int:
        """Number of elements in one part."""
        return sum(self.slices)


DAMAGED = "is damaged, or was sent for another bucket, ratio or step than this rank expects"


class DamagedError(ValueError):
    """Payloads are damaged. ``senders`` are the ranks that sent them: rows, unless a topology maps rows to ranks."""

    def __init__(self, senders: Sequence[int]) -> None:
        super().__init__(f"the payload from rank {', '.join(map(str, senders))} {DAMAGED}.")
        self.senders = senders


class PayloadFormat(NamedTuple):
    """Byte layout of a payload: values, positions, zeros and a check word; see :mod:`lightning_topk.core.wire`."""

    universe: int  # elements in the shard, S
    k: int  # entries in the payload
    bits: int  # per value; below 16, groups of 64 share a scale. 0 if no fused function writes and reads the payload
    largest: float  # the largest magnitude that is decoded as finite
    value_bytes: int
    low: int  # width of the low part of a position in bits
    index_bytes: int  # size of the positions; 0 if they are not sent
    nbytes: int  # size of the payload, P
    check: int  # expected sum of the payload's 32-bit words, modulo 2^32


def k_of(numel: int, ratio: float) -> int:
    """``k = max(1, floor(ratio * d))`` as in the papers, robust to the binary rounding of a decimal ratio."""
    return min(numel, max(1, math.floor(ratio * numel + 1e-6)))
