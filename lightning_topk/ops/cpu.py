"""Faster CPU versions of :mod:`lightning_topk.ops.reference`, with the same results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_topk.layout import Layout
from lightning_topk.ops import reference

SMALL = 1 << 16
"""Rows below this size go to the reference: sampling would not pay."""


def topk_index(rows: Tensor, k: int) -> Tensor:
    """The same as :func:`lightning_topk.ops.reference.topk_index`, in about one pass over the rows.

    A threshold that some more than k entries should pass is read off a sample; the exact choice is made among the entries
    that pass it, ties included. If fewer than k pass, the row goes to the reference.

    Args:
        rows: ``[R, S]`` on the CPU, finite.
        k: Entries to choose of each row, in [1, S].

    Returns:
        ``[R, k]`` int64, ascending in each row.
    """
    size = rows.shape[1]
    if size < SMALL or k > size // 8:
        return reference.topk_index(rows, k)
    # Of a sample of n, the entry of rank 1.3 k n / S, and at least 4 standard deviations of that rank beyond it.
    stride = max(1, min(size // SMALL, size // (400 * -(-size // k))))
    expected = k / stride
    rank = math.ceil(max(1.3 * expected, expected + 4 * math.sqrt(expected) + 4))
    chosen = torch.empty(rows.shape[0], k, dtype=torch.int64)
    for row, index in zip(rows, chosen, strict=True):
        magnitude = row.abs()
        sample = magnitude[::stride]
        threshold = sample.topk(min(rank, len(sample)), sorted=False).values.amin()
        found = _largest(magnitude, threshold, k)
        index.copy_(found if len(found) == k else reference.topk_index(row.unsqueeze(0), k)[0])
    return chosen


def over_threshold_index(rows: Tensor, threshold: Tensor, k: int) -> Tensor:
    """The same as :func:`lightning_topk.ops.reference.over_threshold_index`, in one pass over the rows.

    Args:
        rows: ``[R, S]`` on the CPU, finite.
        threshold: ``[R, 1]``, at least 0.
        k: Entries to choose of each row, at most; in [1, S].

    Returns:
        ``[R, k]`` int64, ascending in each row; where fewer reach the threshold, the row ends in -1.
    """
    chosen = torch.full((rows.shape[0], k), -1)
    for row, index, limit in zip(rows, chosen, threshold, strict=True):
        found = _largest(row.abs(), limit[0], k)
        index[: len(found)] = found
    return chosen


def _largest(magnitude: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Ascending positions of the entries of ``[S]`` that reach the threshold; of more than k, the k largest."""
    found = torch.from_numpy(np.flatnonzero(np.greater_equal(magnitude.numpy(), threshold.numpy())))
    return found if len(found) <= k else found[reference.topk_index(magnitude[found].unsqueeze(0), k)[0]]


CHUNK = 1 << 16
"""Elements that :func:`add_and_choose` takes at a time: a few arrays of them stay in a core's cache."""


def add_and_choose(e: Tensor, x: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor] | None:
    """Adds ``x`` to ``e`` and chooses the k largest of the sum in every shard, in one pass over memory.

    The same as ``e.add_(x)`` and :func:`lightning_topk.ops.reference.topk_index` of its shards. A threshold that some more than k
    entries of each shard should reach is read off a sample of the sum; while the sum is made, chunk by chunk, the positions that
    reach it are noted; among them the choice is exact. A shard in which fewer than k do is chosen from as a whole.

    Args:
        e: ``[numel]`` float32 or float64 on the CPU; becomes the sum.
        x: ``[numel]`` of the same dtype.
        layout: How the elements are dealt to shards.
        k: Entries to choose of each shard, in [1, shard_size).

    Returns:
        Positions in the shards, ``[shards, k]`` int64, ascending, and the sums there. None if a sum is not finite; ``e`` is then
        what it was, to rounding.
    """
    kept = e.numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        threshold = _sampled_threshold(kept, x.numpy(), k * layout.shards)
        flat = _add_and_note(kept, x.numpy(), threshold)
    if flat is None:
        return None
    index = np.empty((layout.shards, k), np.int64)
    for shard, (places, candidates) in enumerate(_by_shard(flat, layout)):
        if len(places) >= k:
            index[shard] = places if len(places) == k else places[_largest_of(np.abs(kept[candidates]), k)]
        elif threshold == _least(kept.dtype):  # these are all that is not zero: the first zeros join them
            zeros = np.setdiff1d(np.arange(k), places, assume_unique=True)
            index[shard] = np.sort(np.concatenate([places, zeros[: k - len(places)]]))
        else:
            index[shard] = reference.topk_index(reference.shard_rows(e, layout)[shard : shard + 1], k)[0].numpy()
    positions = torch.from_numpy(index)
    value = e.index_select(0, reference.flat_index(positions, layout).view(-1)).view(layout.shards, k)
    if layout.numel < layout.shards * layout.shard_size:
        # flat_index lets a position in the padding stand for the last element; what is there is zero.
        row = torch.arange(layout.shards).unsqueeze(1)
        place = (positions // layout.block * layout.shards + row) * layout.block + positions % layout.block
        value.masked_fill_(place >= layout.numel, 0)
    return positions, value


def _add_and_note(kept: np.ndarray, given: np.ndarray, threshold: Any) -> np.ndarray | None:
    """Adds ``given`` to ``kept``; returns the ascending positions where the sum reaches a threshold in magnitude."""
    sums, magnitudes = np.empty((2, min(CHUNK, len(kept))), kept.dtype)
    found = []
    for start in range(0, len(kept), CHUNK):
        chunk = kept[start : start + CHUNK]
        total = np.add(chunk, given[start : start + CHUNK], out=sums[: len(chunk)])
        magnitude = np.abs(total, out=magnitudes[: len(chunk)])
        if not np.isfinite(magnitude.max()):
            kept[:start] -= given[:start]
            return None
        chunk[:] = total
        found.append(np.flatnonzero(magnitude >= threshold) + start)
    return np.concatenate(found)


def _sampled_threshold(kept: np.ndarray, given: np.ndarray, k: int) -> Any:
    """A magnitude that some more than k entries of the sum should reach; more than zero, since a server's sum is sparse."""
    numel = len(kept)
    stride = max(1, min(numel // SMALL, numel // (400 * -(-numel // k))))
    offset = numel // 3 % stride
    sample = np.abs(kept[offset::stride] + given[offset::stride])
    expected = k / stride
    rank = min(len(sample), math.ceil(max(1.3 * expected, expected + 4 * math.sqrt(expected) + 4)))
    return max(np.partition(sample, len(sample) - rank)[len(sample) - rank], _least(kept.dtype))


def _least(dtype: np.dtype[Any]) -> Any:
    """The least number above zero."""
    return np.finfo(dtype).smallest_subnormal


def _by_shard(flat: np.ndarray, layout: Layout) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of ascending positions in a bucket, those in each shard: as positions in the shard, and as they were."""
    if layout.shards == 1:
        yield flat, flat
        return
    block, offset = np.divmod(flat, layout.block)
    turn, shard = np.divmod(block, layout.shards)
    places = turn * layout.block + offset
    order = np.argsort(shard.astype(np.uint16), kind="stable")
    ends = np.cumsum(np.bincount(shard, minlength=layout.shards))
    for part in np.split(order, ends[:-1]):
        yield places[part], flat[part]


def _largest_of(magnitude: np.ndarray, k: int) -> np.ndarray:
    """Ascending positions of the k largest of ``[n]``, n > k; of equal ones, the first."""
    least = np.partition(magnitude, len(magnitude) - k)[len(magnitude) - k]
    above = magnitude > least
    ties = np.flatnonzero(magnitude == least)[: k - np.count_nonzero(above)]
    above[ties] = True
    return np.flatnonzero(above)


def elias_fano_encode(index: Tensor, universe: int, low: int) -> Tensor:
    """The same as :func:`lightning_topk.ops.reference.elias_fano_encode`, with NumPy's packed bits.

    Args:
        index: ``[R, K]`` int64 on the CPU, not descending in a row, in [0, universe).
        universe: Number of positions.
        low: Width of the low part, bits.

    Returns:
        ``[R, elias_fano_bytes(universe, K, low)]`` uint8.
    """
    positions = index.numpy()
    rows, k = positions.shape
    word = _low_word(low)
    lows = np.unpackbits(positions.astype(word).view(np.uint8).reshape(rows, k, -1), axis=2, bitorder="little")
    highs = np.zeros((rows, reference.elias_fano_high_bits(universe, k, low)), np.uint8)
    np.put_along_axis(highs, (positions >> low) + np.arange(k), 1, axis=1)
    parts = [np.packbits(bits, axis=1, bitorder="little") for bits in (lows[:, :, :low].reshape(rows, -1), highs)]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def elias_fano_decode(code: Tensor, universe: int, k: int, low: int) -> Tensor:
    """The same as :func:`lightning_topk.ops.reference.elias_fano_decode`, with NumPy's packed bits.

    Args:
        code: ``[R, elias_fano_bytes(universe, k, low)]`` uint8 on the CPU.
        universe: Number of positions.
        k: Positions in each row.
        low: Width of the low part, bits.

    Returns:
        ``[R, k]`` int64, ascending in each row.

    Raises:
        ValueError: The code does not hold k positions in each row: it was damaged on its way.
    """
    packed, word = code.numpy(), _low_word(low)
    rows, low_bytes = len(packed), -(-k * low // 8)
    high_bits = reference.elias_fano_high_bits(universe, k, low)
    highs = np.unpackbits(packed[:, low_bytes:], axis=1, count=high_bits, bitorder="little")
    places = np.flatnonzero(highs)
    if len(places) != rows * k:
        raise ValueError(f"{rows} payloads hold {len(places)} positions instead of {rows * k}: they were damaged.")
    high = places.reshape(rows, k) - np.arange(rows)[:, None] * high_bits - np.arange(k)
    bits = np.zeros((rows, k, 8 * word.itemsize), np.uint8)
    bits[:, :, :low] = np.unpackbits(packed[:, :low_bytes], axis=1, count=k * low, bitorder="little").reshape(
        rows, k, low
    )
    lows = np.packbits(bits, axis=2, bitorder="little").view(word)[:, :, 0]
    return torch.from_numpy((high << low) + lows)


def _low_word(low: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest little-endian unsigned integer of ``low`` bits or more."""
    return np.dtype("<u2" if low <= 16 else "<u4" if low <= 32 else "<u8")
