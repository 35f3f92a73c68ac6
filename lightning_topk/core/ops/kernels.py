"""Triton kernels that :mod:`.cuda` launches: one pass over memory, and the coding of payloads.

A payload row is ``[values | low parts | high bitmap | zeros | check]``, see :mod:`lightning_topk.core.wire`. Positions
have 32 bits. A slot is the index of a sent entry in its row.

If ``TRITON_INTERPRET=1`` is set before Triton is imported, the kernels run on CPU tensors. The tests use this.
"""
# ruff: noqa: N803, N806, SIM108, SIM300 constants are in capitals; a ternary of blocks is no branch

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

NAN16 = tl.constexpr(0x7FC0)  # in bf16
LARGEST = tl.constexpr(3.4028234663852886e38)
SIZES = {
    "begin", "begin_high", "check", "count", "each", "first", "k", "low", "nbytes", "numel", "part", "parts", "rank",
    "capacity", "rows", "shard_size", "size", "stride", "tiles", "turns", "universe", "value_bytes", "width",
}  # fmt: skip
"""Integers that change with the bucket, the density or the step."""


def launched(kernel: Callable[..., Any]) -> Any:
    """Compiles a kernel once for all sizes. By default, Triton recompiles for sizes that are 1 or a multiple of 16."""
    return triton.jit(kernel, do_not_specialize=sorted(SIZES.intersection(inspect.signature(kernel).parameters)))


@launched
def squares(sums, numel, TILE: tl.constexpr, x):
    """Stores each program's sum of squares of ``x``; a program takes every ``num_programs``-th tile."""
    total = tl.zeros((TILE,), tl.float32)
    for begin in range(tl.program_id(0).to(tl.int64) * TILE, numel, tl.num_programs(0) * TILE):
        at = begin + tl.arange(0, TILE)
        read = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
        total += read * read
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@launched
def survey(
    e, state, bins, sums, numel, count, stride, each, parts,
    SCALED: tl.constexpr, CLIPPED: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    PARTS: tl.constexpr, x, scale, fade, times, row,
):  # fmt: skip
    """Sets ``state[0]`` if ``x`` has a NaN or an infinity, and samples magnitudes of ``fade e + x``.

    If x is CLIPPED, its norm is the root of the total of ``sums[:parts]``, over the scale, times ``times``. The excess
    is the norm times the slope, ``row[1]``, at least 1. Then x is divided by the scale times the excess, which goes to
    ``row[0]``; the excess goes to ``row[2]``, and the norm over the excess to ``row[3]`` (:class:`.Clip`).

    The sample has one random entry of each of ``count`` windows of ``stride`` entries, drawn anew in each send by the
    number of earlier sends, ``state[3]``; a program takes ``each`` windows. ``bins`` counts magnitudes by the bits from
    SHIFT on: exponent and the first bits of the mantissa. The sample is small and there are 64 bins for a factor of
    two, so few of these atomic operations share an address.
    """
    program = tl.program_id(0).to(tl.int64)
    inverse = _inverse(scale, SCALED)
    if CLIPPED:
        part = tl.arange(0, PARTS)
        norm = tl.sqrt_rn(tl.sum(tl.load(sums + part, mask=part < parts, other=0.0), axis=0)) * inverse * times
        excess = norm * tl.load(row + 1)
        excess = tl.where(excess <= 1.0, 1.0, excess)  # NaN stays
        factor = excess * tl.load(scale).to(tl.float32) if SCALED else excess
        inverse = tl.div_rn(1.0, factor)
        if program == 0:
            tl.store(row, factor)
            tl.store(row + 2, excess)
            tl.store(row + 3, tl.div_rn(norm, excess))
    at = program * TILE + tl.arange(0, TILE)
    if (program + 1) * TILE <= numel:
        read = tl.load(x + at)
    else:
        read = tl.load(x + at, mask=at < numel, other=0.0)
    bad = ~(tl.abs(read.to(tl.float32) * inverse) <= LARGEST)
    tl.store(state, 1, mask=tl.max(bad.to(tl.int32), axis=0) != 0)
    end, salt = tl.minimum((program + 1) * each, count), tl.load(state + 3)
    for begin in range(0, each, LANES):
        window = program * each + begin + tl.arange(0, LANES)
        inside = window < end
        # A 32-bit hash: multiply, and mix the high bits into the low ones.
        key = ((window + salt).to(tl.uint32) * 0x9E3779B1).to(tl.uint32)
        key = ((key ^ (key >> 15)) * 0x85EBCA77).to(tl.uint32)
        place = window * stride + ((key ^ (key >> 13)) >> 1).to(tl.int32) % stride
        added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * inverse
        total = _clamped(fade * tl.load(e + place, mask=inside, other=0.0) + added)
        counted = inside & (total != 0)  # the many zeros of a server's mean would share one address
        tl.atomic_add(bins + (tl.abs(total).to(tl.int32, bitcast=True) >> SHIFT), 1, mask=counted, sem="relaxed")


@triton.jit
def _inverse(scale, SCALED: tl.constexpr):
    """The factor that removes a loss scale: as a GradScaler does, by multiplication."""
    return tl.div_rn(1.0, tl.load(scale).to(tl.float32)) if SCALED else 1.0


@launched
def threshold(bins, state, rank, SHIFT: tl.constexpr, ROOT: tl.constexpr):
    """Stores the lower end of the bin with the entry of this ``rank`` in ``state[1]``, as bits.

    It is at least the smallest normal number. There are ROOT x ROOT bins. Also copies ``state[0]`` to ``state[2]``.
    """
    lane = tl.arange(0, ROOT)
    row, left = _digit(tl.sum(tl.load(bins + lane[:, None] * ROOT + lane[None, :]), axis=1), rank, ROOT)
    column, _ = _digit(tl.load(bins + row * ROOT + lane), left, ROOT)
    tl.store(state + 1, tl.maximum((row * ROOT + column) << SHIFT, 1 << 23))
    tl.store(state + 2, tl.load(state))


@triton.jit
def _digit(counts, rank, BINS: tl.constexpr):
    """Finds the entry of a rank, counted from the largest: returns its bin, and its rank in the bin."""
    bin = tl.arange(0, BINS)
    reached = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts >= rank  # counted from the top: descending
    digit = tl.maximum(tl.sum(reached.to(tl.int32), axis=0) - 1, 0)
    return digit, rank - tl.sum(tl.where(bin > digit, counts, 0), axis=0)


@launched
def move(
    e, state, bins, bitmap, counts, numel, shards, turns,
    SCALED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, x, scale, fade,
):  # fmt: skip
    """``e = fade e + x; x = 0``; sets a bit for every entry that reaches the threshold.

    :func:`threshold` has set ``state``. ``counts`` ``[shards, turns]`` gets the number of these entries in every block.
    Clears what :func:`survey` will set in the next send, and counts this send.
    """
    begin = tl.program_id(0).to(tl.int64) * TILE
    for first in range(begin, BINS, tl.num_programs(0).to(tl.int64) * TILE):
        tl.store(bins + first + tl.arange(0, TILE), tl.zeros((TILE,), tl.int32))
    if tl.program_id(0) == 0:
        tl.store(state, 0)
        tl.store(state + 3, tl.load(state + 3) + 1)
    at, full = begin + tl.arange(0, TILE), begin + TILE <= numel
    if full:  # without a mask, loads and stores have 16 bytes for any number of elements
        read, kept = tl.load(x + at), tl.load(e + at)
    else:
        read, kept = tl.load(x + at, mask=at < numel, other=0.0), tl.load(e + at, mask=at < numel, other=0.0)
    added = read.to(tl.float32) * _inverse(scale, SCALED)
    total = _clamped(fade * kept + tl.where(tl.load(state + 2) == 0, added, 0.0))
    if full:
        tl.store(e + at, total)
        tl.store(x + at, tl.zeros_like(read))
    else:
        tl.store(e + at, total, mask=at < numel)
        tl.store(x + at, tl.zeros_like(read), mask=at < numel)
    least = tl.load(state + 1).to(tl.float32, bitcast=True)
    reach = (tl.abs(total) >= least).to(tl.int32)  # False outside, where total is 0
    bits = tl.reshape(reach, (TILE // 32, 32)) << tl.arange(0, 32)[None, :]
    tl.store(bitmap + begin // 32 + tl.arange(0, TILE // 32), tl.sum(bits, axis=1))
    found = tl.sum(tl.reshape(reach, (TILE // BLOCK, BLOCK)), axis=1)
    block = (begin // BLOCK).to(tl.int32) + tl.arange(0, TILE // BLOCK)  # 32 bits hold the blocks of 2^39 elements
    row, turn = block % shards, block // shards
    tl.store(counts + row.to(tl.int64) * turns + turn, found, mask=turn < turns)


@launched
def gather(e, bitmap, counts, ends, place, value, shards, turns, capacity, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the entries whose bit is set, in order: candidates ``[shards, capacity]``.

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
    source, out = e + block.to(tl.int64)[:, None] * BLOCK + column * 32, row.to(tl.int64)[:, None] * capacity
    first = turn[:, None] * BLOCK + column * 32
    while tl.max(tl.max(found, axis=1), axis=0) > 0:
        wanted = (found > 0) & (slot < capacity)  # beyond the last element no bit is set
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
def tally(value, ends, digits, kth, capacity, turns, k, LEVEL: tl.constexpr, TILE: tl.constexpr):
    """Counts the candidates that share the earlier digits of the k-th largest magnitude, by their next digit.

    Each program counts its own first: most candidates are near the threshold and would contend for few addresses.
    """
    BINS: tl.constexpr = 2048 if LEVEL == 0 else 1024
    tile, row = tl.program_id(0), tl.program_id(1)
    bits, inside, _ = _candidates(value, ends, row, tile, capacity, turns, TILE)
    to = digits + row.to(tl.int64) * 4096
    if LEVEL > 0:
        prefix, _ = _first_digits(to, kth, row, tile, k, LEVEL)
        inside = inside & (bits >> (30 - 10 * LEVEL) == prefix)
        to += 1024 + 1024 * LEVEL
    here = tl.histogram((bits >> (20 - 10 * LEVEL)) & (BINS - 1), BINS, mask=inside)
    tl.atomic_add(to + tl.arange(0, BINS), here, mask=here > 0, sem="relaxed")


@triton.jit
def _candidates(value, ends, row, tile, capacity, turns, TILE: tl.constexpr):
    """Bits of a tile's magnitudes, which of them are candidates, and the number of candidates in the row."""
    last = ends + (row.to(tl.int64) + 1) * turns - 1
    total = tl.minimum(tl.load(last) - tl.load(last - turns, mask=row > 0, other=0), capacity)
    at = tile * TILE + tl.arange(0, TILE)
    read = tl.load(value + row.to(tl.int64) * capacity + at, mask=at < total, other=0.0)
    return tl.abs(read).to(tl.int32, bitcast=True), at < total, total


@triton.jit
def _first_digits(digits, kth, row, tile, k, LEVEL: tl.constexpr):
    """The first LEVEL digits of the k-th largest magnitude, and its rank among those that share them.

    ``digits`` are the row's counts, of 11 bits and twice 10. All programs find the same; one keeps it in ``kth``
    ``[shards, 3, 2]`` for the kernels after this one.
    """
    BINS: tl.constexpr = 2048 if LEVEL == 1 else 1024
    to = kth + row * 6 + 2 * LEVEL - 2
    if LEVEL == 1:
        digit, rank = _digit(tl.load(digits + tl.arange(0, BINS)), k, BINS)
    else:
        digit, rank = _digit(tl.load(digits + 1024 * LEVEL + tl.arange(0, BINS)), tl.load(to - 1), BINS)
        digit += tl.load(to - 2) << 10
    if tile == 0:
        tl.store(to, digit)
        tl.store(to + 1, rank)
    return digit, rank


@launched
def count(value, ends, digits, kth, counts, words, capacity, turns, tiles, k, width, TILE: tl.constexpr):
    """Counts the candidates above the k-th largest, and those equal to it: ``[shards, 2, tiles]``.

    Also clears the payloads, of ``width`` words.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    for first in range(tile.to(tl.int64) * TILE, width, tiles.to(tl.int64) * TILE):
        at = first + tl.arange(0, TILE)
        tl.store(words + row.to(tl.int64) * width + at, tl.zeros((TILE,), tl.int32), mask=at < width)
    bits, inside, total = _candidates(value, ends, row, tile, capacity, turns, TILE)
    least, _ = _first_digits(digits + row.to(tl.int64) * 4096, kth, row, tile, k, 3)
    least = tl.where(total > k, least, 0)  # the candidates are not zero
    to = counts + row.to(tl.int64) * 2 * tiles + tile
    tl.store(to, tl.sum((inside & (bits > least)).to(tl.int32), axis=0))
    tl.store(to + tiles, tl.sum((inside & (bits == least)).to(tl.int32), axis=0))


@launched
def choose(
    place, value, ends, digits, kth, counts, index, chosen, words, capacity, turns, tiles, k, shard_size, width, begin,
    check, low, TILE: tl.constexpr,
):  # fmt: skip
    """Stores the k candidates of largest magnitude, in order; of equal ones, the first. Padding has value 0.

    Also sets the bits of their high parts: ``words`` are payloads of ``width`` words, zero from bit ``begin`` on.
    Their last word becomes ``check`` minus all words that are written. Clears the ``digits`` for the next send.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    bits, inside, total = _candidates(value, ends, row, tile, capacity, turns, TILE)
    least, allowed = tl.load(kth + row * 6 + 4), tl.load(kth + row * 6 + 5)
    least = tl.where(total > k, least, 0)
    earlier = counts + row.to(tl.int64) * 2 * tiles
    larger = tl.zeros((), tl.int32)
    same = tl.zeros((), tl.int32)
    for first in range(0, tile, TILE):
        other = first + tl.arange(0, TILE)
        larger += tl.sum(tl.load(earlier + other, mask=other < tile, other=0), axis=0)
        same += tl.sum(tl.load(earlier + tiles + other, mask=other < tile, other=0), axis=0)
    above, equal = (inside & (bits > least)).to(tl.int32), (inside & (bits == least)).to(tl.int32)
    larger += tl.cumsum(above, axis=0) - above
    same += tl.cumsum(equal, axis=0) - equal
    wanted = (above != 0) | ((equal != 0) & (same < allowed))
    here = tile * TILE + tl.arange(0, TILE)
    padding = (here >= total) & (here < k)
    slot = tl.where(padding, here, larger + tl.minimum(same, allowed))
    at = row.to(tl.int64) * capacity + here
    position = tl.load(place + at, mask=wanted, other=shard_size - 1)
    number = tl.load(value + at, mask=wanted, other=0.0)
    wanted = wanted | padding
    to = row.to(tl.int64) * k + slot
    tl.store(index + to, position, mask=wanted)
    tl.store(chosen + to, number, mask=wanted)
    bit = begin + (position >> low).to(tl.int64) + slot
    one = tl.full((TILE,), 1, tl.int32) << (bit & 31).to(tl.int32)
    line = words + row.to(tl.int64) * width
    tl.atomic_or(line + (bit >> 5), one, mask=wanted, sem="relaxed")
    written = tl.where(wanted, one, 0)  # the bits differ, so their sum is their union
    if tile == 0:
        tl.store(digits + row.to(tl.int64) * 4096 + tl.arange(0, 4096), tl.zeros((4096,), tl.int32))
        written = tl.where(tl.arange(0, TILE) == 0, written - check, written)
    tl.atomic_add(line + width - 1, _taken_off(written), sem="relaxed")


@triton.jit
def _taken_off(words):
    """Minus the sum of 32-bit words, modulo 2^32; summed in 64 bits, since the interpreter refuses to overflow."""
    return (-tl.sum(words.to(tl.int64), axis=0)).to(tl.int32)


@launched
def write(
    e, state, index, value, payload, words, k, numel, shards, limit, value_bytes, begin_high, nbytes,
    BITS: tl.constexpr, LOW: tl.constexpr, DELIVERED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes values and low parts to the payloads, takes them off the check words, and leaves the residual in ``e``.

    If ``x`` was not finite, all values on the wire are NaN, and ``e`` is unchanged. The residual includes the rounding
    error of DELIVERED, the receivers' dtype. ``words`` is the payload again.
    """
    row, begin = tl.program_id(1).to(tl.int64), tl.program_id(0) * SLOTS
    slot = begin + tl.arange(0, SLOTS)
    inside = slot < k
    finite = tl.load(state + 2) == 0
    found = tl.load(value + row * k + slot, mask=inside, other=0.0)
    position = tl.load(index + row * k + slot, mask=inside, other=0)
    bounded = tl.minimum(tl.maximum(found, -limit), limit)
    to = payload + row * nbytes
    if BITS == 32:
        arrives = bounded
        bits = tl.where(finite, bounded, float("nan")).to(tl.int32, bitcast=True)
        for n in tl.static_range(4):
            tl.store(to + slot.to(tl.int64) * 4 + n, ((bits >> 8 * n) & 255).to(tl.uint8), mask=inside)
        written = _taken_off(tl.where(inside, bits, 0))
    elif BITS == 16:
        bits = _to_bf16(bounded)
        arrives = _from_bf16(bits)
        bits = tl.where(finite, bits, NAN16)
        for n in tl.static_range(2):
            tl.store(to + slot.to(tl.int64) * 2 + n, ((bits >> 8 * n) & 255).to(tl.uint8), mask=inside)
        written = _taken_off(tl.where(inside, bits << 16 * (slot & 1), 0))
    else:
        arrives, written = _write_integers(bounded, finite, to, k, begin, BITS, SLOTS)
    if DELIVERED == tl.float16:
        arrives = arrives.to(tl.float16).to(tl.float32)
    elif DELIVERED == tl.bfloat16:
        arrives = _from_bf16(_to_bf16(arrives))
    taken = tl.where(finite, found, 0.0) != 0  # padding is 0, and repeats a position
    tl.store(e + _flat(position, row, numel, shards, BLOCK), found - arrives, mask=inside & taken)
    octet = tl.arange(0, SLOTS // 8)
    lows = tl.zeros((SLOTS // 8,), tl.int32)
    for n in tl.static_range(LOW):
        bit = (n * (SLOTS // 8) + octet)[:, None] * 8 + tl.arange(0, 8)[None, :]
        source = begin + bit // LOW
        low = tl.load(index + row * k + source, mask=source < k, other=0) >> bit % LOW
        at = value_bytes + begin.to(tl.int64) // 8 * LOW + n * (SLOTS // 8) + octet
        packed = tl.sum((low & 1) << tl.arange(0, 8)[None, :], axis=1)
        tl.store(to + at, packed.to(tl.uint8), mask=at < begin_high)
        lows += tl.where(at < begin_high, packed << 8 * (at & 3).to(tl.int32), 0)
    last = words + (row + 1) * (nbytes // 4) - 1
    tl.atomic_add(last, written, sem="relaxed")
    tl.atomic_add(last, _taken_off(lows), sem="relaxed")


@triton.jit
def _write_integers(bounded, finite, to, k, begin, BITS: tl.constexpr, SLOTS: tl.constexpr):
    """Writes integers and scales, see :class:`lightning_topk.core.wire.BlockWire`.

    Returns the decoded values, and minus the sum of what is written as words.
    """
    top: tl.constexpr = (1 << BITS - 1) - 1
    groups = tl.reshape(bounded, (SLOTS // 64, 64))
    scale = _to_bf16(tl.div_rn(tl.max(tl.abs(groups), axis=1), tl.full((SLOTS // 64,), top, tl.float32)))
    unit = tl.broadcast_to(_from_bf16(scale)[:, None], (SLOTS // 64, 64))
    ratio = tl.where(unit > 0, tl.div_rn(groups, tl.where(unit > 0, unit, 1.0)), 0.0)
    # Adding and subtracting 1.5 x 2^23 rounds to the nearest integer, ties to even.
    rounded = tl.minimum(tl.maximum((ratio + 12582912.0) - 12582912.0, -top), top)
    integer = tl.where(finite, tl.reshape(rounded, (SLOTS,)).to(tl.int32), 0)
    scale = tl.where(finite, scale, NAN16)
    integers = k if BITS == 8 else (k + 1) // 2  # their size in bytes
    if BITS == 8:
        octets, at = integer & 255, begin + tl.arange(0, SLOTS)
    else:
        first, second = tl.split(tl.reshape(integer, (SLOTS // 2, 2)))
        octets, at = (first & 15) | ((second & 15) << 4), begin // 2 + tl.arange(0, SLOTS // 2)
    tl.store(to + at, octets.to(tl.uint8), mask=at < integers)
    written = _taken_off(tl.where(at < integers, octets << 8 * (at & 3), 0))
    group = begin // 64 + tl.arange(0, SLOTS // 64)
    for n in tl.static_range(2):
        place, octet = integers + group * 2 + n, (scale >> 8 * n) & 255
        tl.store(to + place, octet.to(tl.uint8), mask=group * 64 < k)
        written += _taken_off(tl.where(group * 64 < k, octet << 8 * (place & 3), 0))
    return tl.reshape(rounded * unit, (SLOTS,)), written


@launched
def weigh(counts, begin, size, width, tiles, rows, GROUP: tl.constexpr, TILE: tl.constexpr, words, flags):
    """Sums the words of each tile of TILE words, and counts its bits in the high bitmap: ``[2, rows, tiles]``.

    ``words`` are payloads; a bitmap has the ``size`` octets from ``begin`` on. Sets both ``flags`` of :func:`add`.
    """
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * GROUP
    tile = first + tl.arange(0, GROUP)
    word = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    read = tl.load(words + row * width + word, mask=word < width, other=0)
    bits = tl.zeros_like(read)
    for n in tl.static_range(4):
        octet = word.to(tl.int64) * 4 + n
        bits |= tl.where((octet >= begin) & (octet - begin < size), ((read >> 8 * n) & 255) << 8 * n, 0)
    to = counts + row * tiles + tile
    tl.store(to, tl.sum(read.to(tl.int64), axis=1).to(tl.int32), mask=tile < tiles)
    to += rows.to(tl.int64) * tiles
    tl.store(to, tl.sum(_set_bits(bits.to(tl.uint32, bitcast=True)), axis=1), mask=tile < tiles)
    tl.store(flags + tl.arange(0, 2), 1, mask=(row == 0) & (first == 0))


@launched
def add(
    counts, ends, rows, k, universe, numel, shards, share, check, value_bytes, begin, size, nbytes, tiles,
    SCALED: tl.constexpr, BITS: tl.constexpr, LOW: tl.constexpr, BY_SHARD: tl.constexpr, SHARED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, payload, out, flags, scale, first,
):  # fmt: skip
    """Adds decoded values, times ``share`` and perhaps the loss ``scale``, to ``out``, for the rows from ``first`` on.

    ``ends`` are the running sums of ``counts``, over all rows. Clears ``flags[0]`` if the words of a row do not sum to
    ``check``, and adds none of it; clears ``flags[1]`` if a value is not finite. BY_SHARD: whether row r belongs to
    shard ``r % shards`` of part ``r // shards`` of ``out``, ``[parts, numel]``; else every row covers all of it.
    SHARED: whether other rows are added at the same time.
    """
    tile, number = begin // TILE + tl.program_id(0), first + tl.program_id(1)
    row = number.to(tl.int64)
    source = payload + row * nbytes
    last = ends + (row + 1) * tiles - 1
    intact = tl.load(last) - tl.load(last - tiles, mask=row > 0, other=0) == check
    tl.store(flags, 0, mask=~intact)
    octet = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    held = tl.load(source + octet, mask=(octet >= begin) & (octet - begin < size), other=0).to(tl.int32)
    bits = (held[:, None] >> tl.arange(0, 8)[None, :]) & 1
    found = tl.sum(bits, axis=1)
    at = (rows + row) * tiles  # the sum before it is the last of the row before, or of the words
    before = tl.load(ends + at + tile) - tl.load(counts + at + tile) - tl.load(ends + at - 1)
    before += tl.cumsum(found, axis=0) - found
    slot = before[:, None] + tl.cumsum(bits, axis=1) - bits
    high = (octet - begin).to(tl.int32)[:, None] * 8 + tl.arange(0, 8)[None, :] - slot
    position = high << LOW
    wanted = (bits != 0) & (slot < k) & intact
    if LOW > 0:
        bit = slot.to(tl.int64) * LOW
        low = tl.zeros_like(high)
        for n in tl.static_range((LOW + 14) // 8):
            # Bits from beyond the last low part, of other parts or the check word, are masked out.
            low |= tl.load(source + value_bytes + (bit >> 3) + n, mask=wanted, other=0).to(tl.int32) << 8 * n
        position |= (low >> (bit & 7).to(tl.int32)) & ((1 << LOW) - 1)
    if BITS == 32:
        value = _word_at(source, slot, wanted, 4).to(tl.float32, bitcast=True)
    elif BITS == 16:
        value = _from_bf16(_word_at(source, slot, wanted, 2))
    elif BITS == 8:
        integer = tl.load(source + slot, mask=wanted, other=0).to(tl.int32)
        value = ((integer ^ 128) - 128).to(tl.float32) * _from_bf16(_word_at(source + k, slot // 64, wanted, 2))
    else:
        integer = (tl.load(source + slot // 2, mask=wanted, other=0).to(tl.int32) >> (slot & 1) * 4) & 15
        scale16 = _word_at(source + (k + 1) // 2, slot // 64, wanted, 2)
        value = ((integer ^ 8) - 8).to(tl.float32) * _from_bf16(scale16)
    value *= share
    if SCALED:
        value *= tl.load(scale).to(tl.float32)
    if out.dtype.element_ty == tl.bfloat16:
        value = tl.where(value == value, _from_bf16(_to_bf16(value)), value)
    value = value.to(out.dtype.element_ty)
    wanted = wanted & (position >= 0) & (position < universe)  # always true unless two errors cancel in the sum
    bad = wanted & ~(tl.abs(value.to(tl.float32)) <= LARGEST)
    tl.store(flags + 1, 0, mask=tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) != 0)
    wanted = wanted & (value != 0)  # padding is 0, and repeats a position
    if BY_SHARD:
        to = out + (number // shards).to(tl.int64) * numel + _flat(position, number % shards, numel, shards, BLOCK)
    else:
        to = out + position.to(tl.int64)
    if SHARED:
        tl.atomic_add(to, value, mask=wanted, sem="relaxed")
    else:
        tl.store(to, tl.load(to, mask=wanted, other=0.0) + value, mask=wanted)


@launched
def copy_parts(bucket, rows, bad, owner, table, part, JOIN: tl.constexpr, TILE: tl.constexpr):
    """Copies a bucket to the rows ``[count, part]`` of a node's ranks, padded with zeros; or back, if JOIN.

    Every program copies a piece of one parameter's slice; see :meth:`lightning_topk.core.endpoint.Endpoint.pieces`.
    Sets ``bad`` if a value of the bucket is not finite.
    """
    piece, local = tl.program_id(0), tl.program_id(1).to(tl.int64)
    line = table + tl.load(owner + piece).to(tl.int64) * 5
    first, start, begin = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    size, slice = tl.load(line + 3), tl.load(line + 4)
    at = (piece - first) * TILE + tl.arange(0, TILE)
    place = local * slice + at
    inside = (at < slice) & (place < size)
    row, source = rows + local * part + start + at, bucket + begin + place
    if JOIN:
        tl.store(source, tl.load(row, mask=inside, other=0.0), mask=inside)
    else:
        read = tl.load(source, mask=inside, other=0.0)
        tl.store(row, read, mask=at < slice)
        found = ~(tl.abs(read.to(tl.float32)) <= LARGEST)
        tl.store(bad, 1, mask=tl.max(found.to(tl.int32), axis=0) != 0)


@launched
def nan_unless(out, index, condition, count, TILE: tl.constexpr):
    """Sets the elements of ``out`` at ``index`` ``[count]`` to NaN unless the scalar ``condition`` holds."""
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wanted = (slot < count) & (tl.load(condition) == 0)
    tl.store(out + tl.load(index + slot, mask=wanted, other=0), float("nan"), mask=wanted)


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
def _word_at(start, slot, wanted, BYTES: tl.constexpr):
    at = start + slot.to(tl.int64) * BYTES
    word = tl.load(at, mask=wanted, other=0).to(tl.int32)
    for n in tl.static_range(1, BYTES):
        word |= tl.load(at + n, mask=wanted, other=0).to(tl.int32) << 8 * n
    return word


@launched
def fold_signs(
    counts, fresh, ratio,
    RANGES: tl.constexpr, KEPT: tl.constexpr, PRIOR: tl.constexpr, CERTAIN: tl.constexpr, HALF_PI: tl.constexpr,
):  # fmt: skip
    """Adds the signs of the last step, see ``reference.fold_signs_``. Each program takes one parameter's row."""
    place = tl.program_id(0) * RANGES + tl.arange(0, RANGES)
    other, same = tl.load(counts + 2 * place), tl.load(counts + 2 * place + 1)
    new_other, new_same = tl.load(fresh + 2 * place), tl.load(fresh + 2 * place + 1)
    kept = tl.where(new_other + new_same > 0, KEPT, 1.0)
    other, same = kept * other + new_other.to(tl.float32), kept * same + new_same.to(tl.float32)
    surplus = tl.minimum(tl.maximum((same - other) / (same + other + PRIOR), 0.0), CERTAIN)
    tl.store(ratio + place, HALF_PI * tl.log((1.0 + surplus) / (1.0 - surplus)))
    tl.store(counts + 2 * place, other)
    tl.store(counts + 2 * place + 1, same)
    tl.store(fresh + 2 * place, tl.zeros_like(new_other))
    tl.store(fresh + 2 * place + 1, tl.zeros_like(new_same))


@launched
def catch_up(
    table, owners, rules, scale, inverse, skipped,
    BUFFER: tl.constexpr, GRADIENT: tl.constexpr, SCALED: tl.constexpr, SKIPPABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Steps the momentum buffers of several parameters, see ``reference.catch_up_``.

    A row of ``table`` is one of ``reference.AddressTable``, ending in the number of its first tile. ``owners`` has the
    row of each tile. A row of ``rules`` is a Rule, log2(m), 1 / (1 - m), a / m, log2(n) and 1 / (1 - n). BUFFER and
    GRADIENT are dtypes. ``inverse`` is 1 / ``scale``.
    """
    owner = tl.load(owners + tl.program_id(0))
    row = table + owner.to(tl.int64) * 11
    buffer = tl.load(row).to(tl.pointer_type(BUFFER))
    waited = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    gradient = tl.load(row + 2).to(tl.pointer_type(GRADIENT))
    out = tl.load(row + 3).to(tl.pointer_type(BUFFER))
    parameter = tl.load(row + 4).to(tl.pointer_type(GRADIENT))
    replacement = tl.load(row + 5).to(tl.pointer_type(GRADIENT))
    ratio, counts = tl.load(row + 6).to(tl.pointer_type(tl.float32)), tl.load(row + 7).to(tl.pointer_type(tl.int32))
    decays, replaces, compares = tl.load(row + 4) != 0, tl.load(row + 5) != 0, tl.load(row + 6) != 0
    numel, rule = tl.load(row + 8), rules + tl.load(row + 9) * 13
    at = (tl.program_id(0) - tl.load(row + 10)) * TILE + tl.arange(0, TILE)
    inside = at < numel
    momentum, weight, sign = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2)
    decay, steady, waits = tl.load(rule + 3), tl.load(rule + 4), tl.load(rule + 5)
    eps, log_momentum, reach = tl.load(rule + 7), tl.load(rule + 8), tl.load(rule + 9)
    over_momentum, log_squares, memory = tl.load(rule + 10), tl.load(rule + 11), tl.load(rule + 12)
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
    g = sign * found
    if SCALED:
        g *= tl.load(inverse)
    d = steps.to(tl.float32)
    g += decay * tl.where(waits != 0, d + 1.0, tl.where(d == 0, 1.0, 0.0)) * x
    v = momentum * b + weight * g
    faded = tl.exp2(d * log_momentum)
    shrinks = tl.where(here & (d == 0), 0.0, tl.where(steady == 0, 0.0, steady * x))
    share = (1.0 - tl.exp2((d + 1.0) * log_squares)) * memory / (d + 1.0)
    less = tl.where(d == 0, g, tl.where(memory == 0, g, g * tl.sqrt(share)))
    compared, same = here & compares & (d > 0) & (b != 0), (g > 0) == (b > 0)
    place = ((d + 1.0).to(tl.int32, bitcast=True) >> 23) - 127  # of the range of d + 1: the exponent
    # A histogram adds a tile's signs at once. Places 0 and 1, for d = 0, collect entries that are not compared.
    signs = tl.histogram(tl.where(compared, 2 * place + same.to(tl.int32), 0), 16)
    places = tl.arange(0, 16)
    tl.atomic_add(counts + places, signs, mask=compares & (places > 1) & (signs > 0), sem="relaxed")
    r = tl.load(ratio + place, mask=compared & same, other=0.0)
    typical = tl.where(here, tl.abs(g) * tl.rsqrt(d + 1.0), 1.0)
    root = tl.sqrt((1.0 + r / (d + 1.0)) / (1.0 + r))
    more = tl.where(r > 0, (typical + eps) / (typical * root + eps), 1.0)
    moved = tl.where(here, more * (b + (1.0 - faded) * reach * v) + over_momentum * (more * g - less), 0.0) + shrinks
    tl.store(out + at, moved, mask=inside)
    tl.store(buffer + at, faded * v, mask=here)
    tl.store(waited + at, tl.where(here, 0, counted).to(tl.uint8), mask=inside)
    if SCALED:
        less *= tl.load(scale)
    tl.store(replacement + at, tl.where(here, sign * less, 0.0), mask=inside & replaces)
