"""Triton kernels that :mod:`.cuda` launches: one pass over memory, and the coding of payloads.

A payload row is ``[values | low parts | high bitmap | zeros | check]``, see :mod:`lightning_topk.core.wire`. Positions
have 32 bits. A slot is the index of a sent entry in its row.

If ``TRITON_INTERPRET=1`` is set before Triton is imported, the kernels run on CPU tensors. The tests use this.
"""
# ruff: noqa: N803, N806, SIM108 constants are in capitals; a ternary of blocks is no branch

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

NAN16 = tl.constexpr(0x7FC0)  # in bf16
LARGEST = tl.constexpr(3.4028234663852886e38)
TINY = tl.constexpr(1.1754943508222875e-38)
SIZES = {
    "begin", "begin_high", "count", "first", "k", "nbytes", "numel", "room", "salt", "shard_size", "size", "stride",
    "tiles", "turns", "value_bytes", "width",
}  # fmt: skip
"""Integers that change with the bucket, the density or the step."""


def launched(kernel: Callable[..., Any]) -> Any:
    """Compiles a kernel once for all sizes. By default, Triton recompiles for sizes that are 1 or a multiple of 16."""
    return triton.jit(kernel, do_not_specialize=sorted(SIZES.intersection(inspect.signature(kernel).parameters)))


@launched
def is_finite(x, finite, numel, TILE: tl.constexpr):
    """Clears ``finite`` if ``x`` has a NaN or an infinity."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    at = begin + tl.arange(0, TILE)
    if begin + TILE <= numel:
        given = tl.load(x + at)
    else:
        given = tl.load(x + at, mask=at < numel, other=0.0)
    bad = ~(tl.abs(given.to(tl.float32)) <= LARGEST)
    tl.store(finite, 0, mask=tl.max(bad.to(tl.int32), axis=0) != 0)


@launched
def sample(e, x, finite, sampled, count, stride, salt, TILE: tl.constexpr):
    """Samples the sum's magnitude at a random place in each window of ``stride`` entries; at least TINY."""
    window = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = window < count
    # A 32-bit hash: multiply, and mix the high bits into the low ones.
    key = ((window + salt).to(tl.uint32) * 0x9E3779B1).to(tl.uint32)
    key = ((key ^ (key >> 15)) * 0x85EBCA77).to(tl.uint32)
    at = window * stride + ((key ^ (key >> 13)) >> 1).to(tl.int32) % stride
    given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total = _clamped(tl.load(e + at, mask=inside, other=0.0) + tl.where(tl.load(finite) != 0, given, 0.0))
    tl.store(sampled + window, tl.maximum(tl.abs(total), TINY), mask=inside)


@launched
def move(
    e, x, finite, threshold, bitmap, counts, numel, shards, turns, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``e += x; x = 0``; sets a bit for every entry that reaches the threshold.

    ``counts`` ``[shards, turns]`` is their number in every block of a shard.
    """
    begin = tl.program_id(0).to(tl.int64) * TILE
    # Without a mask, loads and stores have 16 bytes for any number of elements.
    if begin + TILE <= numel:
        _move_tile(e, x, finite, threshold, bitmap, counts, numel, shards, turns, begin, False, TILE, BLOCK)
    else:
        _move_tile(e, x, finite, threshold, bitmap, counts, numel, shards, turns, begin, True, TILE, BLOCK)


@triton.jit
def _move_tile(
    e, x, finite, threshold, bitmap, counts, numel, shards, turns, begin,
    LAST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = begin + tl.arange(0, TILE)
    if LAST:
        inside = at < numel
        given, kept = tl.load(x + at, mask=inside, other=0.0), tl.load(e + at, mask=inside, other=0.0)
    else:
        given, kept = tl.load(x + at), tl.load(e + at)
    total = _clamped(kept + tl.where(tl.load(finite) != 0, given.to(tl.float32), 0.0))
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
    block = (begin // BLOCK).to(tl.int32) + tl.arange(0, TILE // BLOCK)  # 32 bits hold the blocks of 2^39 elements
    row, turn = block % shards, block // shards
    tl.store(counts + row.to(tl.int64) * turns + turn, found, mask=turn < turns)


@launched
def gather(e, bitmap, counts, ends, place, value, shards, turns, room, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the entries whose bit is set, in order: candidates ``[shards, room]``.

    ``ends`` are the running sums of ``counts``, over all shards. Few bits are set, so every lane takes those of one
    word, one after the other.
    """
    WORDS: tl.constexpr = BLOCK // 32
    tile = tl.program_id(0)
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    row, turn = block % shards, block // shards
    at = row.to(tl.int64) * turns + turn
    known = turn < turns
    skipped = tl.load(ends + row.to(tl.int64) * turns - 1, mask=known & (row > 0), other=0)  # of earlier shards
    before = tl.load(ends + at, mask=known, other=0) - tl.load(counts + at, mask=known, other=0) - skipped
    column = tl.arange(0, WORDS)[None, :]
    left = tl.load(bitmap + (block.to(tl.int64) * WORDS)[:, None] + column).to(tl.uint32, bitcast=True)
    found = _set_bits(left)
    slot = before[:, None] + tl.cumsum(found, axis=1) - found
    source, out = e + block.to(tl.int64)[:, None] * BLOCK + column * 32, row.to(tl.int64)[:, None] * room
    first = turn[:, None] * BLOCK + column * 32
    while tl.max(tl.max(found, axis=1), axis=0) > 0:
        wanted = (found > 0) & (slot < room)  # beyond the last element no bit is set
        rest = left & (left - 1)
        bit = _set_bits((left ^ rest) - 1)  # the position of the lowest one
        tl.store(place + out + slot, first + bit, mask=wanted)
        tl.store(value + out + slot, tl.load(source + bit, mask=wanted, other=0.0), mask=wanted)
        left, slot, found = rest, slot + 1, found - 1


@triton.jit
def _set_bits(word):
    """Number of set bits of a uint32 (Warren, Hacker's Delight, figure 5-2), int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@launched
def count(value, threshold, counts, room, tiles, TILE: tl.constexpr):
    """Counts the candidates above the threshold, and those equal to it: ``[shards, 2, tiles]``."""
    tile, row = tl.program_id(0), tl.program_id(1)
    above, equal = _compared(value, threshold, row, tile, room, TILE)
    to = counts + row.to(tl.int64) * 2 * tiles + tile
    tl.store(to, tl.sum(above, axis=0))
    tl.store(to + tiles, tl.sum(equal, axis=0))


@launched
def choose(
    place, value, threshold, counts, ends, index, chosen, room, tiles, k, shard_size, TILE: tl.constexpr
):  # fmt: skip
    """Stores the k candidates of largest magnitude, in order; of equal ones, the first.

    ``ends`` are the running sums of ``counts``. A candidate of value 0 is padding.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    above, equal = _compared(value, threshold, row, tile, room, TILE)
    before = row.to(tl.int64) * 2 * tiles + tile
    larger = tl.load(ends + before) - tl.load(counts + before) + tl.cumsum(above, axis=0) - above
    same = tl.load(ends + before + tiles) - tl.load(counts + before + tiles) + tl.cumsum(equal, axis=0) - equal
    allowed = k - tl.load(ends + (row.to(tl.int64) * 2 + 1) * tiles - 1)  # entries equal to the threshold
    wanted = (above != 0) | ((equal != 0) & (same < allowed))
    slot = larger + tl.minimum(same, allowed)
    at = row.to(tl.int64) * room + tile * TILE + tl.arange(0, TILE)
    found = tl.load(value + at, mask=wanted, other=0.0)
    position = tl.load(place + at, mask=wanted & (found != 0), other=shard_size - 1)
    to = row.to(tl.int64) * k + slot
    tl.store(index + to, position, mask=wanted)
    tl.store(chosen + to, found, mask=wanted)


@triton.jit
def _compared(value, threshold, row, tile, room, TILE: tl.constexpr):
    at = tile * TILE + tl.arange(0, TILE)
    magnitude = tl.abs(tl.load(value + row.to(tl.int64) * room + at, mask=at < room, other=0.0))
    least = tl.load(threshold + row)
    return ((at < room) & (magnitude > least)).to(tl.int32), ((at < room) & (magnitude == least)).to(tl.int32)


@launched
def write(
    e, finite, index, value, payload, k, numel, shards, limit, value_bytes, begin_high, nbytes,
    BITS: tl.constexpr, LOW: tl.constexpr, DELIVERED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes values and low parts to the payloads, and leaves the residual in ``e``.

    If not ``finite``, all values on the wire are NaN, and ``e`` is unchanged. DELIVERED: code of the receiver's dtype,
    if the residual must include its rounding error: 16 for float16, 17 for bfloat16; else 0.
    """
    row, begin = tl.program_id(1).to(tl.int64), tl.program_id(0) * SLOTS
    slot = begin + tl.arange(0, SLOTS)
    inside = slot < k
    whole = tl.load(finite) != 0
    found = tl.load(value + row * k + slot, mask=inside, other=0.0)
    position = tl.load(index + row * k + slot, mask=inside, other=0)
    given = tl.minimum(tl.maximum(found, -limit), limit)
    to = payload + row * nbytes
    if BITS == 32:
        arrives = given
        bits = tl.where(whole, given, float("nan")).to(tl.int32, bitcast=True)
        for n in tl.static_range(4):
            tl.store(to + slot.to(tl.int64) * 4 + n, ((bits >> 8 * n) & 255).to(tl.uint8), mask=inside)
    elif BITS == 16:
        bits = _to_bf16(given)
        arrives = _from_bf16(bits)
        bits = tl.where(whole, bits, NAN16)
        for n in tl.static_range(2):
            tl.store(to + slot.to(tl.int64) * 2 + n, ((bits >> 8 * n) & 255).to(tl.uint8), mask=inside)
    else:
        arrives = _write_integers(given, whole, to, k, begin, BITS, SLOTS)
    if DELIVERED == 16:
        arrives = arrives.to(tl.float16).to(tl.float32)
    elif DELIVERED == 17:
        arrives = _from_bf16(_to_bf16(arrives))
    rest = found - arrives
    taken = tl.where(whole, found, 0.0) != 0  # padding is 0, and repeats a position
    tl.store(e + _flat(position, row, numel, shards, BLOCK), rest, mask=inside & taken)
    octet = tl.arange(0, SLOTS // 8)
    for n in tl.static_range(LOW):
        bit = (n * (SLOTS // 8) + octet)[:, None] * 8 + tl.arange(0, 8)[None, :]
        source = begin + bit // LOW
        low = tl.load(index + row * k + source, mask=source < k, other=0) >> bit % LOW
        at = value_bytes + begin.to(tl.int64) // 8 * LOW + n * (SLOTS // 8) + octet
        packed = tl.sum((low & 1) << tl.arange(0, 8)[None, :], axis=1)
        tl.store(to + at, packed.to(tl.uint8), mask=at < begin_high)


@triton.jit
def _write_integers(given, whole, to, k, begin, BITS: tl.constexpr, SLOTS: tl.constexpr):
    """Writes integers and scales, see :class:`lightning_topk.core.wire.BlockWire`; returns the decoded values."""
    top: tl.constexpr = (1 << BITS - 1) - 1
    groups = tl.reshape(given, (SLOTS // 64, 64))
    scale = _to_bf16(tl.div_rn(tl.max(tl.abs(groups), axis=1), tl.full((SLOTS // 64,), top, tl.float32)))
    unit = tl.broadcast_to(_from_bf16(scale)[:, None], (SLOTS // 64, 64))
    ratio = tl.where(unit > 0, tl.div_rn(groups, tl.where(unit > 0, unit, 1.0)), 0.0)
    # Adding and subtracting 1.5 x 2^23 rounds to the nearest integer, ties to even.
    rounded = tl.minimum(tl.maximum((ratio + 12582912.0) - 12582912.0, -top), top)
    integer = tl.where(whole, tl.reshape(rounded, (SLOTS,)).to(tl.int32), 0)
    scale = tl.where(whole, scale, NAN16)
    if BITS == 8:
        integers = k
        slot = begin + tl.arange(0, SLOTS)
        tl.store(to + slot, (integer & 255).to(tl.uint8), mask=slot < k)
    else:
        integers = (k + 1) // 2
        first, second = tl.split(tl.reshape(integer, (SLOTS // 2, 2)))
        pair = begin // 2 + tl.arange(0, SLOTS // 2)
        tl.store(to + pair, ((first & 15) | ((second & 15) << 4)).to(tl.uint8), mask=pair < integers)
    group = begin // 64 + tl.arange(0, SLOTS // 64)
    for n in tl.static_range(2):
        at = to + integers + group * 2 + n
        tl.store(at, ((scale >> 8 * n) & 255).to(tl.uint8), mask=group * 64 < k)
    return tl.reshape(rounded * unit, (SLOTS,))


@launched
def mark(index, words, k, width, begin, LOW: tl.constexpr, SLOTS: tl.constexpr):
    """Sets the bits of the high parts. ``words`` are payloads of ``width`` words, zero from bit ``begin`` on."""
    row, slot = tl.program_id(1).to(tl.int64), tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    position = tl.load(index + row * k + slot, mask=slot < k, other=0)
    bit = begin + (position >> LOW).to(tl.int64) + slot
    one = tl.full((SLOTS,), 1, tl.int32) << (bit & 31).to(tl.int32)
    tl.atomic_or(words + row * width + (bit >> 5), one, mask=slot < k, sem="relaxed")


@launched
def count_bits(payload, counts, begin, size, nbytes, tiles, TILE: tl.constexpr):
    """Counts the set bits of each tile of the high bitmaps: ``[rows, tiles]``."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    bits = _bits(payload + row * nbytes + begin, tile, size, TILE)
    tl.store(counts + row * tiles + tile, tl.sum(tl.sum(bits, axis=1), axis=0))


@launched
def add(
    payload, counts, ends, out, finite, first, k, numel, shards, scale, value_bytes, begin, size, nbytes, tiles,
    BITS: tl.constexpr, LOW: tl.constexpr, DEALT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds decoded values, times ``scale``, to ``out``; clears ``finite`` if a value is not finite.

    DEALT: whether row r belongs to shard r of ``out``; else row ``first`` covers all of it.
    """
    tile, row = tl.program_id(0), first + tl.program_id(1).to(tl.int64)
    source = payload + row * nbytes
    bits = _bits(source + begin, tile, size, TILE)
    found = tl.sum(bits, axis=1)
    at = row * tiles + tile
    before = tl.load(ends + at) - tl.load(counts + at) + tl.cumsum(found, axis=0) - found
    slot = before[:, None] + tl.cumsum(bits, axis=1) - bits
    wanted = (bits != 0) & (slot < k)
    octet = tile * TILE + tl.arange(0, TILE)
    high = octet[:, None] * 8 + tl.arange(0, 8)[None, :] - slot
    position = high << LOW
    if LOW > 0:
        bit = slot.to(tl.int64) * LOW
        low = tl.zeros_like(high)
        for n in tl.static_range((LOW + 14) // 8):
            # Bits from beyond the last low part, of other parts or the check word, are masked out.
            low |= tl.load(source + value_bytes + (bit >> 3) + n, mask=wanted, other=0).to(tl.int32) << 8 * n
        position |= (low >> (bit & 7).to(tl.int32)) & ((1 << LOW) - 1)
    if BITS == 32:
        read = tl.zeros_like(high)
        for n in tl.static_range(4):
            read |= tl.load(source + slot.to(tl.int64) * 4 + n, mask=wanted, other=0).to(tl.int32) << 8 * n
        value = read.to(tl.float32, bitcast=True)
    elif BITS == 16:
        value = _bf16_at(source, slot, wanted)
    elif BITS == 8:
        integer = tl.load(source + slot, mask=wanted, other=0).to(tl.int32)
        value = ((integer ^ 128) - 128).to(tl.float32) * _bf16_at(source + k, slot // 64, wanted)
    else:
        integer = (tl.load(source + slot // 2, mask=wanted, other=0).to(tl.int32) >> (slot & 1) * 4) & 15
        value = ((integer ^ 8) - 8).to(tl.float32) * _bf16_at(source + (k + 1) // 2, slot // 64, wanted)
    value *= scale
    if out.dtype.element_ty == tl.bfloat16:
        value = tl.where(value == value, _from_bf16(_to_bf16(value)), value)
    value = value.to(out.dtype.element_ty)
    bad = wanted & ~(tl.abs(value.to(tl.float32)) <= LARGEST)
    tl.store(finite, 0, mask=tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) != 0)
    to = out + (_flat(position, row, numel, shards, BLOCK) if DEALT else position.to(tl.int64))
    wanted = wanted & (value != 0)  # padding is 0, and repeats a position
    tl.store(to, tl.load(to, mask=wanted, other=0.0) + value, mask=wanted)


@triton.jit
def _bits(start, tile, size, TILE: tl.constexpr):
    octet = tile * TILE + tl.arange(0, TILE)
    return (tl.load(start + octet, mask=octet < size, other=0).to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1


@triton.jit
def _clamped(sums):
    """Clamps sums of finite numbers, which may have overflowed."""
    return tl.minimum(tl.maximum(sums, -LARGEST), LARGEST)


@triton.jit
def _flat(position, row, numel, shards, BLOCK: tl.constexpr):
    """Converts positions in shard ``row`` to positions in the bucket; padding maps to the last element."""
    turn = (position // BLOCK).to(tl.int64) * shards + row
    return tl.minimum(turn * BLOCK + position % BLOCK, numel - 1)


@triton.jit
def _to_bf16(value):
    """The bits of a finite float32, rounded to bfloat16, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _from_bf16(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_at(start, slot, wanted):
    at = start + slot.to(tl.int64) * 2
    first = tl.load(at, mask=wanted, other=0).to(tl.int32)
    return _from_bf16(first | tl.load(at + 1, mask=wanted, other=0).to(tl.int32) << 8)


@launched
def catch_up(
    table, owners, rules, scale, inverse, skipped,
    BUFFER: tl.constexpr, GRADIENT: tl.constexpr, SCALED: tl.constexpr, SKIPPABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Steps the momentum buffers of several parameters, see ``reference.catch_up_``.

    A row of ``table`` is one of ``reference.address_table``, and the number of its first tile. ``owners`` has the row
    of each tile. A row of ``rules`` is a Rule, and log2(m) and 1 / (1 - m). BUFFER and GRADIENT are dtypes. ``inverse``
    is 1 / ``scale``.
    """
    owner = tl.load(owners + tl.program_id(0))
    row = table + owner.to(tl.int64) * 9
    buffer = tl.load(row).to(tl.pointer_type(BUFFER))
    waited = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    gradient = tl.load(row + 2).to(tl.pointer_type(GRADIENT))
    out = tl.load(row + 3).to(tl.pointer_type(BUFFER))
    parameter = tl.load(row + 4).to(tl.pointer_type(GRADIENT))
    lent = tl.load(row + 5).to(tl.pointer_type(GRADIENT))
    decays, lends = tl.load(row + 4) != 0, tl.load(row + 5) != 0
    numel, rule = tl.load(row + 6), rules + tl.load(row + 7) * 8
    at = (tl.program_id(0) - tl.load(row + 8)) * TILE + tl.arange(0, TILE)
    inside = at < numel
    momentum, weight, sign = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2)
    decay, settled, waits = tl.load(rule + 3), tl.load(rule + 4), tl.load(rule + 5)
    log_momentum, reach = tl.load(rule + 6), tl.load(rule + 7)
    found = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(buffer + at, mask=inside, other=0.0).to(tl.float32)
    steps = tl.load(waited + at, mask=inside, other=0)
    x = tl.load(parameter + at, mask=inside & decays, other=0.0).to(tl.float32)
    here = inside & (found != 0)
    counted = steps + (steps < 254).to(tl.uint8)
    if SKIPPABLE:
        taken = tl.load(skipped) == 0
        here = tl.where(taken, here, False)
        counted = tl.where(taken, counted, steps)
    given = sign * found
    if SCALED:
        given *= tl.load(inverse)
    d = steps.to(tl.float32)
    given += decay * tl.where(waits != 0, d + 1.0, tl.where(d == 0, 1.0, 0.0)) * x
    v = momentum * b + weight * given
    faded = tl.exp2(d * log_momentum)
    shrinks = tl.where(here & (d == 0), 0.0, tl.where(settled == 0, 0.0, settled * x))
    moved = tl.where(here, b + (1.0 - faded) * reach * v, 0.0) + shrinks
    tl.store(out + at, moved, mask=inside)
    tl.store(buffer + at, faded * v, mask=here)
    tl.store(waited + at, tl.where(here, 0, counted).to(tl.uint8), mask=inside)
    if SCALED:
        given *= tl.load(scale)
    tl.store(lent + at, tl.where(here, sign * given, 0.0), mask=inside & lends)
