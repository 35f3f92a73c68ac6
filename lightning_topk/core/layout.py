"""Where the elements of a bucket live: blocks, shards, and how many of them are kept.

A bucket of ``numel`` elements is cut into blocks of 256, and the blocks are dealt to the servers in turn, so
element ``i`` belongs to shard ``(i // block) % shards``. Layers are contiguous in a bucket; dealing blocks gives every
server a sample of every layer. The loads are then so even that each shard keeps the same count, and every
size on the wire follows from integers known in advance.

With several ranks a node that exchange gradients as one (``topology="hierarchical"``), each rank takes a *part* of the
bucket: a piece of every parameter, so that a rank's part stays the same whatever bucket the parameter is in.

Integers only: the tensor side of a layout is :mod:`lightning_topk.core.ops.reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

BLOCK = 256
"""Elements in a block. A bucket that cannot fill one block a shard uses smaller blocks."""


@dataclass(frozen=True)
class Layout:
    """How ``numel`` elements are dealt to ``shards`` servers, block by block.

    Args:
        numel: Elements of the bucket, at least 1.
        shards: Servers among which they are dealt, at least 1. One shard is the bucket as it stands.
    """

    numel: int
    shards: int = 1

    def __post_init__(self) -> None:
        if self.numel < 1 or self.shards < 1:
            raise ValueError(
                f"Layout(numel={self.numel}, shards={self.shards}): both must be at least 1; "
                "an empty bucket has nothing to exchange."
            )

    @cached_property
    def block(self) -> int:
        """Elements in a block."""
        return self.numel if self.shards == 1 else min(BLOCK, math.ceil(self.numel / self.shards))

    @cached_property
    def rounds(self) -> int:
        """Times that each shard is dealt a block; the last time some may get a part, or none."""
        return math.ceil(self.numel / (self.block * self.shards))

    @cached_property
    def shard_size(self) -> int:
        """Elements of shard 0, which has the most. The others are padded to it."""
        full = (self.rounds - 1) * self.block
        return full + min(self.block, self.numel - full * self.shards)

    def kept_per_shard(self, kept: int) -> int:
        """The share of one shard when ``kept`` elements of the bucket are kept: an equal part, rounded up.

        All of the largest shard when ``kept == numel``, so that a ratio of 1 keeps everything.
        """
        return self.shard_size if kept == self.numel else math.ceil(kept / self.shards)


@dataclass(frozen=True)
class Parts:
    """How a bucket is dealt to the ranks of a node: each parameter in equal pieces, the last one padded with zeros.

    Args:
        sizes: Elements of each parameter of the bucket.
        count: Ranks of the node; one takes the bucket as it stands.
    """

    sizes: tuple[int, ...]
    count: int = 1

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Elements of each parameter in one part."""
        return tuple(math.ceil(size / self.count) for size in self.sizes)

    @cached_property
    def numel(self) -> int:
        """Elements of one part."""
        return sum(self.pieces)


def kept_count(numel: int, ratio: float) -> int:
    """The papers' ``k = max(1, floor(ratio * d))``, safe from the binary rounding of a decimal ratio."""
    return min(numel, max(1, math.floor(ratio * numel + 1e-6)))
