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
        # 16 warps: with 8 elements a thread, addresses fit in registers.
        _gather[(tiles,)](e, bitmap, base, place, value, shards, room, TILE, BLOCK, num_warps=16)
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
    begin = tl.program_id(0).to(tl.int64) * TILE
    # Without a mask, loads and stores are of 16 bytes whatever the number of elements.
    if begin + TILE <= numel:
        _move_tile(e, x, finite, threshold, bitmap, counts, numel, begin, False, TILE, BLOCK)
    else:
        _move_tile(e, x, finite, threshold, bitmap, counts, numel, begin, True, TILE, BLOCK)


@triton.jit
def _move_tile(
    e, x, finite, threshold, bitmap, counts, numel, begin,
    LAST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    at = begin + tl.arange(0, TILE)
    if LAST:
        inside = at < numel
        given, kept = tl.load(x + at, mask=inside, other=0.0), tl.load(e + at, mask=inside, other=0.0)
    else:
        given, kept = tl.load(x + at), tl.load(e + at)
    total = kept + tl.where(tl.load(finite) != 0, given, 0.0)
    if LAST:
        tl.store(e + at, total, mask=inside)
        tl.store(x + at, tl.zeros_like(given), mask=inside)
    else:
        tl.store(e + at, total)
        tl.store(x + at, tl.zeros_like(given))
    reach = (tl.abs(total) >= tl.load(threshold)).to(tl.int32)  # False outside, where total is 0
    bits = tl.reshape(reach, (TILE // 32, 32)) << tl.arange(0, 32)[None, :]
    tl.store(bitmap + begin // 32 + tl.arange(0, TILE // 32), tl.sum(bits, axis=1))
    found = tl.sum(tl.reshape(reach, (TILE // BLOCK, BLOCK)), axis=1)
    tl.store(counts + begin // BLOCK + tl.arange(0, TILE // BLOCK), found)


@triton.jit
def _gather(e, bitmap, base, place, value, shards, room, TILE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    tile = tl.program_id(0)
    words = tl.load(bitmap + tile.to(tl.int64) * (TILE // 32) + tl.arange(0, TILE // 32))
    bits = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
    reach = tl.reshape(bits, (TILE // BLOCK, BLOCK))
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)  # 32 bits hold the blocks of 2^39 elements
    slot = tl.load(base + block)[:, None] + tl.cumsum(reach, axis=1) - reach
    wanted = (reach != 0) & (slot < room)  # beyond the last element no bit is set
    row, turn = block % shards, block // shards
    out = row.to(tl.int64)[:, None] * room + slot
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(place + out, turn.to(tl.int64)[:, None] * BLOCK + column, mask=wanted)
    at = block.to(tl.int64)[:, None] * BLOCK + column
    tl.store(value + out, tl.load(e + at, mask=wanted, other=0.0), mask=wanted)
