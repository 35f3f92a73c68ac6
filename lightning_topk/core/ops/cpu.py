"""Faster CPU versions of :mod:`lightning_topk.core.ops.reference`, with the same results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_topk.core.layout import Layout
from lightning_topk.core.ops import reference

SMALL = 1 << 16
"""Vectors below this size go to the reference: sampling would not pay off."""

CHUNK = 1 << 16
"""Elements processed at a time, few enough to stay in a core's cache."""

SAMPLE = 1 << 14
"""Minimum size of a sample. Each element costs a cache line of the residual and one of the gradient."""

_offsets = np.random.default_rng()  # of samples; the selection does not depend on them


def suits(numel: int, layout: Layout, k: int) -> bool:
    """Whether :func:`add_and_select` pays off: many elements, of which few are selected."""
    return numel >= SMALL and k * layout.shards <= numel // 8


def is_finite(x: Tensor) -> Tensor:
    """The same as :func:`lightning_topk.core.ops.reference.is_finite`, in one read of ``x``.

    The sum of squares is finite only if every element is. If it is not, it may have overflowed, so each element is
    checked.
    """
    if x.dim() == 1 and x.dtype in (torch.float32, torch.float64) and math.isfinite(torch.dot(x, x)):
        return torch.tensor(True)
    return reference.is_finite(x)


def topk_index(rows: Tensor, k: int) -> Tensor:
    """The same as :func:`lightning_topk.core.ops.reference.topk_index`, in about one pass over the rows.

    Args:
        rows: ``[R, S]`` on the CPU, finite.
        k: Number of entries to select from each row, in [1, S].

    Returns:
        ``[R, k]`` int64, ascending in each row.
    """
    layout = Layout(rows.shape[1])
    if not suits(layout.numel, layout, k) or rows.dtype not in (torch.float32, torch.float64):
        return reference.topk_index(rows, k)
    chosen = [_choose(row.contiguous().numpy(), None, layout, k)[0] for row in rows]
    return torch.from_numpy(np.concatenate(chosen))


def count_reaching(rows: Tensor, threshold: Tensor) -> Tensor:
    """The same as :func:`lightning_topk.core.ops.reference.count_reaching`, without a temporary of the rows' size.

    Args:
        rows: ``[R, S]`` on the CPU, finite.
        threshold: ``[R, 1]``, at least 0.

    Returns:
        ``[R, 1]`` int64.
    """
    counts = [
        sum(int(torch.count_nonzero(part.abs() >= limit)) for part in row.split(CHUNK))
        for row, limit in zip(rows, threshold, strict=True)
    ]
    return torch.tensor(counts).unsqueeze(1)


def over_threshold_index(rows: Tensor, threshold: Tensor, k: int) -> Tensor:
    """The same as :func:`lightning_topk.core.ops.reference.over_threshold_index`, in one pass over the rows.

    Args:
        rows: ``[R, S]`` on the CPU, finite.
        threshold: ``[R, 1]``, at least 0.
        k: Maximum number of entries to select from each row, in [1, S].

    Returns:
        ``[R, k]`` int64, ascending in each row; rows with fewer than k such entries end in -1.
    """
    chosen = torch.full((rows.shape[0], k), -1)
    for row, index, limit in zip(rows, chosen, threshold, strict=True):
        values = row.contiguous().numpy()
        found, there = _scan(values, None, limit.numpy())
        if len(found) > k:
            found = found[_largest(np.abs(there), k)]
        index[: len(found)] = torch.from_numpy(found)
    return chosen


def add_and_select(e: Tensor, x: Tensor, finite: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """The same as :func:`lightning_topk.core.ops.reference.add_and_select`, in one pass over memory.

    Args:
        e: ``[numel]`` float32 or float64 on the CPU, contiguous.
        x: ``[numel]`` of the same dtype, contiguous.
        finite: Scalar bool, whether ``x`` is finite. If false, ``e`` is unchanged.
        layout: How the elements are dealt to shards; :func:`suits` must hold.
        k: Number of entries to select from each shard, in [1, shard_size).

    Returns:
        Positions in the shards, ``[shards, k]`` int64, ascending, and the sums there.
    """
    given = reference.zero_unless_(x, finite).numpy()
    index, value = _choose(e.numpy(), given, layout, k)
    return torch.from_numpy(index), torch.from_numpy(value)


def _choose(kept: np.ndarray, given: np.ndarray | None, layout: Layout, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Adds ``given``, unless it is None, to ``kept`` in place, zeroes it, and selects the k largest of every shard.

    A sample of the sum gives a threshold that more than k entries of each shard should reach. While the sum is
    computed, chunk by chunk, the positions that reach it are recorded; top-k among these candidates is exact. If some
    shard has fewer than k candidates, the sum is scanned again with a lower threshold, the last of which all nonzero
    entries reach.

    Returns:
        Positions and values as :func:`add_and_select` returns them.
    """
    for threshold in _thresholds(kept, given, layout, k):
        shards = _by_shard(*_scan(kept, given, threshold), layout)
        given = None
        if threshold == _least(kept.dtype) or all(len(places) >= k for places, _ in shards):
            break
    index, value = np.empty((layout.shards, k), np.int64), np.empty((layout.shards, k), kept.dtype)
    for shard, (places, sums) in enumerate(shards):
        if len(places) < k:  # fewer than k are nonzero: fill up with the first zeros
            zeros = np.setdiff1d(np.arange(k), places, assume_unique=True)[: k - len(places)]
            places, sums = np.concatenate([places, zeros]), np.concatenate([sums, np.zeros(len(zeros), sums.dtype)])
            order = np.argsort(places)
        else:
            order = _largest(np.abs(sums), k)
        index[shard], value[shard] = places[order], sums[order]
    return index, value


def _thresholds(kept: np.ndarray, given: np.ndarray | None, layout: Layout, k: int) -> Iterator[Any]:
    """Yields descending thresholds above zero, each of which more than k entries of each shard should reach."""
    numel = len(kept)
    # If entries fall into shards and into the sample independently, counts are binomial: four standard deviations are
    # added for each, so that no shard gets fewer than k by chance.
    needed = layout.shards * (k + 4 * math.sqrt(k) + 4)
    stride = max(1, min(numel // SAMPLE, int(needed) // 32))
    offset = int(_offsets.integers(stride))
    with np.errstate(over="ignore"):  # overflow gives infinity, which is selected
        sample = np.abs(kept[offset::stride] + (0 if given is None else given[offset::stride]))
    expected = needed / stride
    least = _least(kept.dtype)
    last = math.inf
    # Shards may differ and the sample may misjudge them, so later thresholds are lower; but candidates take memory.
    for times, deviations in ((1, 4), (1, 16), (4, 64)):
        rank = times * expected + deviations * (math.sqrt(expected) + 1)
        place = len(sample) - min(len(sample), math.ceil(rank))
        threshold = np.partition(sample, place)[place]
        if least < threshold < last:
            yield threshold
            last = threshold
    yield least


def _least(dtype: np.dtype[Any]) -> Any:
    """The smallest number above zero."""
    return np.finfo(dtype).smallest_subnormal


def _scan(kept: np.ndarray, given: np.ndarray | None, threshold: Any) -> tuple[np.ndarray, np.ndarray]:
    """Adds ``given``, unless it is None, to ``kept`` in place, zeroes it, and finds what reaches a magnitude.

    Chunks are distributed over as many threads as torch uses; NumPy's loops release the GIL.

    Returns:
        Ascending positions where the magnitude of ``kept`` reaches ``threshold``, and the values there.
    """

    def scan(chunks: range) -> list[tuple[np.ndarray, np.ndarray]]:
        above, below = np.empty((2, CHUNK), bool)
        found = []
        for start in chunks:
            chunk = kept[start : start + CHUNK]
            if given is not None:
                source = given[start : start + CHUNK]
                with np.errstate(over="ignore"):
                    np.add(chunk, source, out=chunk)
                source.fill(0)
            high, low = above[: len(chunk)], below[: len(chunk)]
            np.greater_equal(chunk, threshold, out=high)
            np.less_equal(chunk, -threshold, out=low)
            places = np.flatnonzero(np.logical_or(high, low, out=high))
            found.append((places + start, chunk[places]))
        return found

    chunks = range(0, len(kept), CHUNK)
    threads = min(torch.get_num_threads(), len(chunks) // 8)
    if threads < 2:
        found = scan(chunks)
    else:
        part = -(-len(chunks) // threads)
        with ThreadPoolExecutor(threads) as pool:
            parts = pool.map(scan, [chunks[start : start + part] for start in range(0, len(chunks), part)])
            found = [each for part in parts for each in part]
    places, values = zip(*found, strict=True)
    return np.concatenate(places), np.concatenate(values)


def _by_shard(flat: np.ndarray, value: np.ndarray, layout: Layout) -> list[tuple[np.ndarray, np.ndarray]]:
    """Splits ascending positions in a bucket and their values by shard: positions in the shard and values of each."""
    if layout.shards == 1:
        return [(flat, value)]
    # NumPy's division by a scalar is fast, and twice as fast in narrow integers; its remainder is not.
    flat = flat.astype(np.uint32 if layout.numel <= 2**32 else np.uint64)
    block = flat // flat.dtype.type(layout.block)
    turn = block // flat.dtype.type(layout.shards)
    shard = (block - turn * flat.dtype.type(layout.shards)).astype(np.uint16 if layout.shards <= 1 << 16 else np.uint32)
    places = flat - (block - turn) * flat.dtype.type(layout.block)
    order = np.argsort(shard, kind="stable")
    ends = np.cumsum(np.bincount(shard, minlength=layout.shards))
    return [(places[part], value[part]) for part in np.split(order, ends[:-1])]


def _largest(magnitude: np.ndarray, k: int) -> np.ndarray:
    """Returns the ascending positions of the k largest of ``[n]``, n >= k; of equal ones, the first."""
    if len(magnitude) == k:
        return np.arange(k)
    least = np.partition(magnitude, len(magnitude) - k)[len(magnitude) - k]
    above = magnitude > least
    ties = np.flatnonzero(magnitude == least)[: k - np.count_nonzero(above)]
    above[ties] = True
    return np.flatnonzero(above)


def elias_fano_encode(index: Tensor, universe: int, low: int) -> Tensor:
    """The same as :func:`lightning_topk.core.ops.reference.elias_fano_encode`, with NumPy's packed bits.

    Args:
        index: ``[R, K]`` int64 on the CPU, not descending in a row, in [0, universe).
        universe: Number of possible positions.
        low: Width of the low part in bits.

    Returns:
        ``[R, elias_fano_bytes(universe, K, low)]`` uint8.
    """
    positions = index.numpy()
    rows, k = positions.shape
    highs = np.zeros((rows, reference.elias_fano_high_bits(universe, k, low)), bool)
    for high, row in zip(highs, positions, strict=True):
        high[(row >> low) + np.arange(k)] = True
    lows = _pack(positions & ((1 << low) - 1), low)
    return torch.from_numpy(np.concatenate([lows, np.packbits(highs, axis=1, bitorder="little")], axis=1))


def elias_fano_decode(code: Tensor, universe: int, k: int, low: int) -> Tensor:
    """The same as :func:`lightning_topk.core.ops.reference.elias_fano_decode`, with NumPy's packed bits.

    Args:
        code: ``[R, elias_fano_bytes(universe, k, low)]`` uint8 on the CPU.
        universe: Number of possible positions.
        k: Number of positions in each row.
        low: Width of the low part in bits.

    Returns:
        ``[R, k]`` int64, ascending in each row.

    Raises:
        ValueError: The code does not hold k positions in each row, so it was damaged in transit.
    """
    packed = code.numpy()
    rows, low_bytes = len(packed), -(-k * low // 8)
    high_bits = reference.elias_fano_high_bits(universe, k, low)
    highs = np.unpackbits(packed[:, low_bytes:], axis=1, count=high_bits, bitorder="little")
    places = np.flatnonzero(highs.view(bool))
    if len(places) != rows * k:
        raise ValueError(f"{rows} payloads hold {len(places)} positions instead of {rows * k}: they were damaged.")
    numbers = places.reshape(rows, k)
    for row, high in enumerate(numbers):
        high -= np.arange(row * high_bits, row * high_bits + k)
    numbers <<= low
    numbers += _unpack(packed[:, :low_bytes], k, low)
    return torch.from_numpy(numbers)


def _pack(numbers: np.ndarray, width: int) -> np.ndarray:
    """Packs numbers ``[R, n]`` below ``2**width``, width < 64, bit by bit: ``[R, ceil(n width / 8)]`` uint8.

    Eight numbers fill exactly ``width`` bytes. Each of the eight is shifted to its bit offset in the 64-bit words of a
    group.
    """
    rows, n = numbers.shape
    groups = -(-n // 8)
    eights = np.zeros((rows, groups * 8), np.uint64)
    eights[:, :n] = numbers
    words = np.zeros((width // 8 + 1, rows, groups), "<u8")
    for place in range(8):
        number = np.ascontiguousarray(eights[:, place::8])
        word, bit = divmod(place * width, 64)
        words[word] |= number << np.uint64(bit)
        if bit + width > 64:
            words[word + 1] |= number >> np.uint64(64 - bit)
    packed = np.ascontiguousarray(np.moveaxis(words, 0, 2)).view(np.uint8)
    return packed[:, :, :width].reshape(rows, -1)[:, : -(-n * width // 8)]


def _unpack(packed: np.ndarray, n: int, width: int) -> np.ndarray:
    """Inverse of :func:`_pack`: ``[R, n]`` int64."""
    rows, groups = len(packed), -(-n // 8)
    padded = np.zeros((rows, groups * width + 8), np.uint8)
    padded[:, : packed.shape[1]] = packed
    numbers = np.empty((rows, groups, 8), np.int64)
    for place in range(8):
        byte, bit = divmod(place * width, 8)
        # An unaligned 64-bit word from the number's first byte on contains all its bits.
        strides = (padded.strides[0], width)
        words = np.ndarray((rows, groups), "<u8", padded, offset=byte, strides=strides)
        numbers[:, :, place] = words >> np.uint64(bit) & np.uint64((1 << width) - 1)
    return numbers.reshape(rows, -1)[:, :n]
