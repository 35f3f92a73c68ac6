"""Triton versions of :mod:`lightning_topk.core.ops.reference` for GPUs, without host synchronisation.

Compensating and selecting reads the gradient and the residual once and writes both once, 16 bytes per element::

    threshold   from a sample of the sum, on the device
    _move       e <- e + x, x <- 0; a bit for every entry that reaches the threshold, a count for every block of 256
    cumsum      of the counts, shard by shard: the offset at which each block's entries are stored
    _gather     the entries that reach the threshold, in order, into a buffer for about twice the expected number
    top-k       exact, among these

Sizes follow from integers that the host knows. If fewer than k entries of a shard reach the threshold, fewer are sent;
if more reach it than the buffer holds, the last ones stay in the residual. Otherwise the selection equals the
reference's.

If ``TRITON_INTERPRET=1`` is set before Triton is imported, the kernels run on CPU tensors. The tests use this.
"""

from __future__ import annotations

import math
import random

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_topk.core.layout import BLOCK, Layout
from lightning_topk.core.ops import reference

TILE = 4096
"""Elements per Triton program, a multiple of the block size."""

SAMPLE = 1 << 14
"""Minimum size of a sample."""

_salts = random.Random()  # of samples; its own generator, so that the user's random state is unchanged


def suits(e: Tensor, layout: Layout, k: int) -> bool:
    """Whether :func:`add_and_select` supports this: many float32 elements in whole blocks, few of them selected."""
    whole = layout.shards == 1 or layout.block == BLOCK
    return whole and layout.numel >= SAMPLE and k * layout.shards <= layout.numel // 8 and e.dtype == torch.float32


def add_and_select(e: Tensor, x: Tensor, finite: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """The same as :func:`lightning_topk.core.ops.reference.add_and_select`, unless the sample misjudges (see above).

    Args:
        e: ``[numel]`` float32, contiguous.
        x: ``[numel]`` float32, contiguous.
        finite: Scalar bool on the same device, whether ``x`` is finite. If false, ``e`` is unchanged.
        layout: How the elements are dealt to shards; :func:`suits` must hold.
        k: Number of entries to select from each shard, in [1, shard_size).

    Returns:
        Positions in the shards, ``[shards, k]`` int64, not descending, and the sums there, ``[shards, k]``; rows in
        which fewer than k reach the threshold end in zeros.
    """
    numel, shards = layout.numel, layout.shards
    threshold, room = _threshold(e, x, finite, layout, k)
    tiles = triton.cdiv(numel, TILE)
    blocks = tiles * (TILE // BLOCK)
    bitmap = torch.empty(tiles * TILE // 32, dtype=torch.int32, device=e.device)
    counts = torch.zeros(-(-blocks // shards) * shards, dtype=torch.int32, device=e.device)
    with torch.cuda.device_of(e):
        _move[(tiles,)](e, x, finite, threshold, bitmap, counts, numel, TILE, BLOCK)
    turns = counts.view(-1, shards).t().contiguous()  # a scan along rows runs in parallel, one along columns does not
    base = (turns.cumsum(1, dtype=torch.int32) - turns).t().contiguous().view(-1)
    place = torch.full((shards, room), layout.shard_size - 1, dtype=torch.int64, device=e.device)
    value = torch.zeros(shards, room, dtype=e.dtype, device=e.device)
    with torch.cuda.device_of(e):
        _gather[(tiles,)](e, bitmap, base, place, value, shards, room, numel, TILE, BLOCK)
    slot = reference.topk_index(value, k)
    return place.gather(1, slot), value.gather(1, slot)


def _threshold(e: Tensor, x: Tensor, finite: Tensor, layout: Layout, k: int) -> tuple[Tensor, int]:
    """A magnitude ``[]`` that slightly more than k entries of each shard should reach, and room for twice as many."""
    # The same calculation as on the CPU: four standard deviations for the shards, four for the sample.
    needed = layout.shards * (k + 4 * math.sqrt(k) + 4)
    stride = max(1, min(layout.numel // SAMPLE, int(needed) // 32))
    # One random position in each window: a sample with a fixed period may see only a few columns of a matrix.
    count, salt = layout.numel // stride, _salts.getrandbits(31)
    window = torch.arange(count, device=e.device)
    place = window * stride + ((window + salt) * 0x9E3779B1 % 0xFFFFFFFB >> 8) % stride
    sample = e[place] + torch.where(finite, x[place], 0)
    expected = needed / stride
    rank = min(len(sample), math.ceil(expected + 4 * math.sqrt(expected) + 4))
    threshold = sample.abs_().topk(rank, sorted=False).values.amin()
    room = min(layout.shard_size, max(k, 2 * rank * stride // layout.shards) + 64)
    return threshold.clamp_(min=torch.finfo(e.dtype).tiny), room


@triton.jit
def _move(e, x, finite, threshold, bitmap, counts, numel, TILE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    given = tl.load(x + at, mask=inside, other=0.0)
    total = tl.load(e + at, mask=inside, other=0.0) + tl.where(tl.load(finite) != 0, given, 0.0)
    tl.store(e + at, total, mask=inside)
    tl.store(x + at, tl.zeros_like(given), mask=inside)
    reach = (tl.abs(total) >= tl.load(threshold)).to(tl.int32)  # False outside, where total is 0
    bits = tl.reshape(reach, (TILE // 32, 32)) << tl.arange(0, 32)[None, :]
    word = tile.to(tl.int64) * (TILE // 32) + tl.arange(0, TILE // 32)
    tl.store(bitmap + word, tl.sum(bits, axis=1))
    block = tile.to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    tl.store(counts + block, tl.sum(tl.reshape(reach, (TILE // BLOCK, BLOCK)), axis=1))


@triton.jit
def _gather(e, bitmap, base, place, value, shards, room, numel, TILE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    tile = tl.program_id(0)
    row = tl.arange(0, TILE // BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    block = tile.to(tl.int64) * (TILE // BLOCK) + row
    at = block * BLOCK + column
    reach = (tl.load(bitmap + at // 32) >> (at % 32).to(tl.int32)) & 1
    slot = tl.load(base + block) + tl.cumsum(reach, axis=1) - reach
    wanted = (reach != 0) & (slot < room) & (at < numel)
    out = (block % shards) * room + slot
    tl.store(place + out, block // shards * BLOCK + column, mask=wanted)
    tl.store(value + out, tl.load(e + at, mask=wanted, other=0.0), mask=wanted)
