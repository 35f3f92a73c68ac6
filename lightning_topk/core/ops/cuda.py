"""GPU versions of :mod:`lightning_topk.core.ops.reference`: launch :mod:`.kernels` and never synchronise the host.

Compensating and selecting reads the gradient and the residual once and writes both once, 16 bytes per element::

    threshold   from a sample of the sum, on the device
    move        e <- e + x, x <- 0; a bit per entry that reaches the threshold, a count per block of 256
    cumsum      of the counts, shard by shard: the offset at which each block's entries are stored
    gather      the entries that reach the threshold, in order, into a buffer for about twice the expected number
    choose      the k largest among these
    write, mark the payloads, and the residual

Sizes follow from integers that the host knows. If fewer than k entries of a shard reach the threshold, fewer are sent;
if more reach it than the buffer holds, the last ones stay in the residual. Otherwise the selection equals the
reference's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_topk.core.layout import BLOCK, Layout, PayloadFormat
from lightning_topk.core.ops import kernels
from lightning_topk.core.ops.reference import Stepped, address_table

TILE = 4096
"""Elements per Triton program, a multiple of the block size."""
SLOTS = 1024
"""Entries per Triton program that writes payloads, a multiple of 64, since groups of values share a scale."""
OCTETS = 256
"""Bytes of a bitmap per Triton program that reads payloads."""
SAMPLE = 1 << 14
"""Minimum size of a sample."""
LOW = 24
"""The widest low part of a position that is read with 32 bits."""
EXACT = {"enable_fp_fusion": False}
"""Options of every launch: no fused multiply-add, which rounds only once."""
CATCHES_UP = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""dtypes of parameters and momentum buffers that :func:`catch_up_` supports, and Triton's names."""
ROUNDED = {None: 0, torch.float32: 0, torch.float16: 16, torch.bfloat16: 17}
"""Kernel constant for the dtype to which receivers round decoded values."""

_salts = random.Random()  # seeds of samples; its own generator, so that the user's random state is unchanged


def attempt(device: torch.device) -> None:
    """Compiles and runs kernels; raises an exception if Triton does not work."""
    e, x = torch.zeros(2, SAMPLE, dtype=torch.float32, device=device).unbind()
    add_and_select(e, x, torch.ones((), dtype=torch.bool, device=device), Layout(SAMPLE), 1)


def sends(
    e: Tensor, x: Tensor, finite: Tensor, layout: Layout, form: PayloadFormat, delivered: torch.dtype | None
) -> bool:
    """Whether :func:`send` supports these arguments: many elements in whole blocks, few of them selected."""
    whole = layout.shards == 1 or layout.block == BLOCK
    few = form.k * layout.shards <= layout.numel // 8 and layout.shard_size < 2**31 and form.low <= LOW
    dtypes = e.dtype == torch.float32 and x.dtype in ROUNDED and delivered in ROUNDED
    return whole and few and layout.numel >= SAMPLE and dtypes


def send(
    e: Tensor, x: Tensor, finite: Tensor, layout: Layout, form: PayloadFormat, delivered: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """See :func:`lightning_topk.core.ops.send`, without waiting for the device.

    If ``x`` is not finite, ``e`` is unchanged, and all values in the payloads are NaN. Fewer than k may be sent.
    """
    shards, k = layout.shards, form.k
    index, value = add_and_select(e, x, finite, layout, k)
    payload = torch.zeros(shards, form.nbytes, dtype=torch.uint8, device=e.device)
    words, grid = payload.view(torch.int32), (triton.cdiv(k, SLOTS), shards)
    begin = form.value_bytes - (-k * form.low // 8)  # start of the high bitmap
    with torch.cuda.device_of(e):
        kernels.write[grid](
            e, finite, index, value, payload, k, layout.numel, shards, form.largest, form.value_bytes, begin,
            form.nbytes, form.bits, form.low, ROUNDED[delivered], SLOTS, BLOCK, num_warps=8, **EXACT,
        )  # fmt: skip
        kernels.mark[grid](index, words, k, form.nbytes // 4, 8 * begin, form.low, SLOTS, **EXACT)
    words[:, -1] = form.check - words.sum(dim=1, dtype=torch.int32)
    return payload, value.count_nonzero()


def receive(payloads: Tensor, layout: Layout, form: PayloadFormat, divisor: int, out: Tensor) -> Tensor | None:
    """See :func:`lightning_topk.core.ops.receive`; adds one payload of a shard at a time."""
    if out.dtype not in ROUNDED or form.low > LOW or not (layout.shards == 1 or layout.block == BLOCK):
        return None
    payloads, rows, dealt = payloads.contiguous(), len(payloads), layout.shards == len(payloads)
    begin = form.value_bytes - (-form.k * form.low // 8)
    size = form.value_bytes + form.index_bytes - begin
    tiles = triton.cdiv(size, OCTETS)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=out.device)
    finite = torch.ones((), dtype=torch.bool, device=out.device)
    with torch.cuda.device_of(out):
        kernels.count_bits[tiles, rows](payloads, counts, begin, size, form.nbytes, tiles, OCTETS, **EXACT)
    ends = counts.cumsum(1, dtype=torch.int32)
    with torch.cuda.device_of(out):
        for first in range(1 if dealt else rows):
            # One payload at a time: within a payload only the padding's zeros share a position, so the order of
            # additions is fixed.
            kernels.add[tiles, rows if dealt else 1](
                payloads, counts, ends, out, finite, first, form.k, layout.numel, layout.shards, 1 / divisor,
                form.value_bytes, begin, size, form.nbytes, tiles, form.bits, form.low, dealt, OCTETS, BLOCK, **EXACT,
            )  # fmt: skip
    return finite


def is_finite(x: Tensor) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.is_finite`, for contiguous tensors of :data:`ROUNDED`."""
    finite = torch.ones((), dtype=torch.bool, device=x.device)
    with torch.cuda.device_of(x):
        kernels.is_finite[(triton.cdiv(x.numel(), TILE),)](x, finite, x.numel(), TILE, **EXACT)
    return finite


def catch_up_(several: Sequence[Stepped], scale: Tensor | None, skipped: Tensor | None, tables: dict[str, Any]) -> None:
    """Same as :func:`lightning_topk.core.ops.reference.catch_up_` of each, in one launch.

    It moves 18 bytes per float32 entry, and 4 or 8 more with weight decay in the gradient. ``tables`` are copied to the
    device where they changed.
    """
    buffer, parameter, (rows, rules) = several[0].buffer, several[0].parameter, address_table(several)
    tiles = [triton.cdiv(row[6], SLOTS) for row in rows]
    firsts = [end - own for end, own in zip(accumulate(tiles), tiles, strict=True)]
    if not sum(tiles):
        return  # empty shards
    by_rule = [[*rule, math.log2(rule.momentum), 1 / (1 - rule.momentum)] for rule in rules]
    table = _on(buffer, tables, "table", [[*row, first] for row, first in zip(rows, firsts, strict=True)])
    owners = _on(buffer, tables, "owners", tiles)
    dtypes = CATCHES_UP[buffer.dtype], CATCHES_UP[parameter.dtype]
    with torch.cuda.device_of(buffer):
        kernels.catch_up[(sum(tiles),)](
            table, owners, _on(buffer, tables, "rules", by_rule), table if scale is None else scale,
            table if scale is None else scale.reciprocal(), table if skipped is None else skipped, *dtypes,
            scale is not None, skipped is not None, SLOTS, **EXACT,
        )  # fmt: skip


def _on(like: Tensor, tables: dict[str, Any], name: str, rows: list[Any]) -> Tensor:
    """A table on the device of ``like``, copied there if it changed; ``owners`` are given by the tiles of each row."""
    known = tables.get(name)
    if known is None or known[0] != rows:
        if name == "owners":
            made = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(
                torch.tensor(rows), output_size=sum(rows)
            )
        else:
            made = torch.tensor(rows, dtype=torch.float32 if name == "rules" else torch.int64)
        # An asynchronous copy: the host does not wait for the device.
        known = rows, (made.pin_memory() if like.is_cuda else made).to(like.device, non_blocking=True)
        tables[name] = known
    return known[1]


def add_and_select(e: Tensor, x: Tensor, finite: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """Same as :func:`lightning_topk.core.ops.reference.add_and_select`, unless the threshold is off (see above).

    Args:
        e: ``[numel]`` float32, contiguous.
        x: ``[numel]``, contiguous.
        finite: Scalar bool on the same device, whether ``x`` is finite. If false, ``e`` is unchanged.
        layout: How the elements are dealt to shards; :func:`sends` must hold.
        k: Number of entries to select from each shard, in [1, shard_size).

    Returns:
        Positions in the shards, ``[shards, k]`` int32, not descending, and the sums there, ``[shards, k]``; rows in
        which fewer than k reach the threshold end in zeros.
    """
    numel, shards = layout.numel, layout.shards
    threshold, room = _threshold(e, x, finite, layout, k)
    tiles, turns = triton.cdiv(numel, TILE), triton.cdiv(numel, BLOCK * shards)
    bitmap = torch.empty(tiles * TILE // 32, dtype=torch.int32, device=e.device)
    counts = torch.zeros(shards, turns, dtype=torch.int32, device=e.device)
    with torch.cuda.device_of(e):
        warps = 4 if x.dtype == e.dtype else 8  # conversion takes registers
        kernels.move[(tiles,)](
            e, x, finite, threshold, bitmap, counts, numel, shards, turns, TILE, BLOCK, num_warps=warps, **EXACT
        )
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)  # in one dimension, the scan is ten times as fast
    place = torch.empty(shards, room, dtype=torch.int32, device=e.device)
    value = torch.zeros(shards, room, dtype=e.dtype, device=e.device)
    with torch.cuda.device_of(e):
        kernels.gather[(tiles,)](e, bitmap, counts, ends, place, value, shards, turns, room, TILE, BLOCK, **EXACT)
    return _largest(place, value, layout, k)


def _largest(place: Tensor, value: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """The k candidates ``[shards, room]`` of largest magnitude, in order: positions, int32, and values."""
    shards, room = value.shape
    tiles = triton.cdiv(room, SLOTS)
    least = value.abs().topk(k, dim=1, sorted=False).values.amin(dim=1)
    counts = torch.empty(shards, 2, tiles, dtype=torch.int32, device=value.device)
    with torch.cuda.device_of(value):
        kernels.count[tiles, shards](value, least, counts, room, tiles, SLOTS, **EXACT)
    ends = counts.cumsum(2, dtype=torch.int32)
    index, chosen = place.new_empty(shards, k), value.new_empty(shards, k)
    with torch.cuda.device_of(value):
        kernels.choose[tiles, shards](
            place, value, least, counts, ends, index, chosen, room, tiles, k, layout.shard_size, SLOTS, **EXACT
        )
    return index, chosen


def _threshold(e: Tensor, x: Tensor, finite: Tensor, layout: Layout, k: int) -> tuple[Tensor, int]:
    """A magnitude ``[]`` that slightly more than k entries per shard should reach, and room for twice as many."""
    # The same calculation as on the CPU: four standard deviations for the shards, four for the sample.
    needed = layout.shards * (k + 4 * math.sqrt(k) + 4)
    stride = max(1, min(layout.numel // SAMPLE, int(needed) // 32))
    # One random position in each window: a sample with a fixed period may see only a few columns of a matrix.
    count = layout.numel // stride
    sampled = torch.empty(count, dtype=e.dtype, device=e.device)
    with torch.cuda.device_of(e):
        grid = (triton.cdiv(count, SLOTS),)
        kernels.sample[grid](e, x, finite, sampled, count, stride, _salts.getrandbits(30), SLOTS, **EXACT)
    expected = needed / stride
    rank = min(count, math.ceil(expected + 4 * math.sqrt(expected) + 4))
    room = min(layout.shard_size, max(k, 2 * rank * stride // layout.shards) + 64)
    return sampled.topk(rank, sorted=False).values.amin(), room
