"""Faster CPU versions of :mod:`lightning_topk.ops.reference`, with the same results."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

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
