"""Selectors: which entries of a vector are sent.

A selector takes a vector and its layout and selects at most k entries of every shard. All selectors but :class:`TopK`
and :class:`RandK` set a threshold that about k entries should reach. If more than k reach it, the k largest are sent
and the rest stays in the residual; if fewer reach it, fewer are sent. No selector sends more than k entries, so
payloads have a fixed size. If at least k entries reach the threshold, a threshold selector selects the same entries as
:class:`TopK`.

To add a selector, subclass :class:`Selector` and implement :meth:`Selector.pick`, or subclass :class:`Threshold` and
implement :meth:`Threshold.threshold`; pass an instance as ``selector=``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from statistics import NormalDist

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk.core import ops
from lightning_topk.core.layout import Layout
from lightning_topk.core.ops import reference


class Selector(ABC):
    """Selects at most k entries of every shard of a vector."""

    step = 0
    """The step of the selection in progress, for :meth:`pick`; see :meth:`select`."""

    def select(self, a: Tensor, layout: Layout, k: int, step: int = 0) -> tuple[Tensor, Tensor]:
        """Selects at most k entries of each shard of ``a`` ``[numel]``, gradient plus residual, finite.

        ``step`` is the number of exchanges before this one, the same on every rank.

        Returns:
            Positions in the shard, ``[shards, k]`` int64, non-descending in each row; and the values there, ``[shards,
            k]`` of the dtype of ``a``. Unused slots have value 0.
        """
        rows = reference.shard_rows(a, layout)
        if k == layout.shard_size:
            index = torch.arange(k, device=a.device).expand(layout.shards, -1)
            return index, rows
        self.step = step
        index = self.pick(rows, k)
        if index.shape != (layout.shards, k):
            raise ValueError(
                f"{type(self).__name__}.pick returned positions of shape {tuple(index.shape)} for "
                f"{layout.shards} shards and k={k}; it must return [shards, k] = ({layout.shards}, {k})."
            )
        if ops.on_cpu(index) and type(self).__module__ != __name__:  # a user's selector
            _check_positions(type(self).__name__, index, layout.shard_size)
        used = index >= 0
        value = rows.gather(1, index.clamp(min=0)).masked_fill_(~used, 0)
        index, order = torch.where(used, index, layout.shard_size).sort(dim=1, stable=True)
        return index.clamp_(max=layout.shard_size - 1), value.gather(1, order)

    @abstractmethod
    def pick(self, rows: Tensor, k: int) -> Tensor:
        """Returns the positions of the entries to send.

        Args:
            rows: ``[R, S]``, one shard per row, padded with zeros.
            k: Maximum number of entries to select from each row, in [1, S].

        Returns:
            ``[R, k]`` int64 positions on the device of ``rows``, distinct in each row; to select fewer, pad with -1.
            Any other shape is refused, since the payload size must not depend on the data.
        """


def _check_positions(name: str, index: Tensor, size: int) -> None:
    """Refuses positions ``[R, k]`` outside a shard of ``size`` elements, or repeated in a row. Reads them, on a CPU."""
    ordered = index.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any() or ordered[:, 0].min() < -1 or ordered[:, -1].max() >= size:
        raise ValueError(f"{name}.pick returned a position twice, or one that is not in [-1, {size}).")


class TopK(Selector):
    """Selects exactly the k entries of largest magnitude."""

    @override
    def pick(self, rows: Tensor, k: int) -> Tensor:
        return ops.separate(rows).topk_index(rows, k)


class RandK(Selector):
    """Selects k random entries, the same on all ranks, so no positions are sent.

    The positions depend only on the seed, the step and the shard's size, and are computed on the device without random
    state: a bijective hash gives every position a key, and the positions with the k smallest keys are drawn. A server
    that sends fewer entries than the workers sends a subset of their positions.
    """

    def __init__(self, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"RandK: seed={seed!r} must be an integer.")
        self.seed = seed
        self._drawn_at = -1
        self._drawn: dict[tuple[int, int, torch.device | None], Tensor] = {}  # at that step

    @override
    def pick(self, rows: Tensor, k: int) -> Tensor:
        return self.shared_positions(self.step, rows.shape[1], k, rows.device).expand(rows.shape[0], -1)

    def shared_positions(self, step: int, universe: int, k: int, device: torch.device | None = None) -> Tensor:
        """The positions of a step in a shard of ``universe`` elements, which both ends of a link compute.

        ``[k]`` int64, distinct and ascending: a uniformly random subset, contained in the subset of any larger k.
        """
        if step != self._drawn_at:
            self._drawn, self._drawn_at = {}, step
        if (universe, k, device) not in self._drawn:
            seed = (self.seed + _INCREMENT + 2**63) % 2**64 - 2**63  # a signed 64-bit integer
            begin = _mixed_(_mixed_(torch.tensor(seed, device="cpu")).add_(step + _INCREMENT))
            keys = _mixed_(torch.arange(universe, device=device).add_(begin))
            drawn = keys.topk(k, largest=False, sorted=False).indices.sort().values
            self._drawn[universe, k, device] = drawn
        return self._drawn[universe, k, device]


_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Increment, shifts and factors of splitmix64 (Steele et al. 2014): ``z = (z ^ z >> shift) * factor``, modulo 2^64."""


def _mixed_(z: Tensor) -> Tensor:
    """Hashes int64 in place; the hash is bijective, as products of int64 are modulo 2^64."""
    for shift, factor in _MIX:
        z.bitwise_xor_(z.bitwise_right_shift(shift).bitwise_and_(2 ** (64 - shift) - 1))
        z.mul_(factor - 2**64 * (factor >= 2**63))
    return z


class Threshold(Selector):
    """Selects the entries whose magnitude reaches a threshold; the k largest of them if more than k do."""

    @override
    def pick(self, rows: Tensor, k: int) -> Tensor:
        index, threshold = ops.separate(rows).topk_index(rows, k), self.threshold(rows, k)
        return index.masked_fill_(~(rows.gather(1, index).abs() >= threshold), -1)

    @abstractmethod
    def threshold(self, rows: Tensor, k: int) -> Tensor:
        """Returns the threshold that about k entries of each row should reach.

        Args:
            rows: ``[R, S]``, one shard per row, padded with zeros.
            k: Number of entries.

        Returns:
            ``[R, 1]`` of the dtype of ``rows``, at least 0.
        """


def _none(condition: Tensor) -> bool:
    """Whether ``condition`` holds nowhere. Always False on a GPU, where reading it would synchronise the host."""
    return condition.device.type == "cpu" and not condition.any()


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude of each row ``[R, S]``: ``[R, 1]``."""
    return torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)


class GaussianK(Threshold):
    """Gaussian_k of Shi et al. 2019 (algorithm 1): the threshold that k of S normally distributed entries would reach.

    ``t = |mean + ppf(1 - k / 2S) std|``, then up to three corrections: t is halved if fewer than 2k/3 entries reach it,
    and multiplied by 1.5 if more than 4k/3 do.
    """

    @override
    def threshold(self, rows: Tensor, k: int) -> Tensor:
        std, mean = torch.std_mean(rows, dim=1, keepdim=True, correction=0)
        quantile = NormalDist().inv_cdf(1 - k / rows.shape[1] / 2)
        threshold: Tensor = (mean + quantile * std).abs_()
        overflowed = ~threshold.isfinite()  # the variance may overflow although every entry is finite
        if not _none(overflowed):
            threshold = torch.where(overflowed, _largest(rows), threshold)
        for _ in range(3):
            count = ops.separate(rows).count_reaching(rows, threshold)
            factor = torch.where(3 * count < 2 * k, 0.5, torch.where(3 * count > 4 * k, 1.5, 1.0))
            if _none(factor != 1):
                break
            threshold = reference.clamp_(threshold * factor.to(threshold.dtype))
        return threshold


class SampledK(Threshold):
    """DGC_k of Lin et al. 2018: estimates the threshold that a fraction k / S of a sample reaches.

    Lowers it by a fifth while fewer than k entries reach it, at most ten times.

    Args:
        fraction: Fraction of a shard's elements to sample, in (0, 1]. The sample is larger if needed to include about
            100 of the k largest.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        if isinstance(fraction, bool) or not (isinstance(fraction, int | float) and 0 < fraction <= 1):
            raise ValueError(f"SampledK: fraction={fraction!r} must be a number in (0, 1].")
        self.fraction = fraction

    @override
    def threshold(self, rows: Tensor, k: int) -> Tensor:
        size = rows.shape[1]
        stride = max(1, int(min(1 / self.fraction, k // 100)))
        sample = rows[:, self.step * 7919 % stride :: stride].abs()
        rank = max(1, min(sample.shape[1], round(sample.shape[1] * k / size)))
        threshold = sample.topk(rank, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        for _ in range(10):
            few = ops.separate(rows).count_reaching(rows, threshold) < k
            if _none(few):
                break
            threshold = torch.where(few, 0.8 * threshold, threshold)
        return threshold


class TrimmedK(Threshold):
    """Trimmed_topk of RedSync (Fang et al. 2019): ``t = mean + r (max - mean)`` of the magnitudes.

    r is the first of 0.8, 0.6, 0.4, 0.2 and 0 at which at least k entries reach t. The original has no upper limit.
    """

    @override
    def threshold(self, rows: Tensor, k: int) -> Tensor:
        largest = _largest(rows)
        mean = torch.linalg.vector_norm(rows, 1, dim=1, keepdim=True) / rows.shape[1]
        mean = torch.minimum(mean, largest)  # the sum may overflow
        threshold: Tensor = mean + 0.8 * (largest - mean)
        for r in (0.6, 0.4, 0.2, 0.0):
            few = ops.separate(rows).count_reaching(rows, threshold) < k
            if _none(few):
                break
            threshold = torch.where(few, mean + r * (largest - mean), threshold)
        return threshold


SELECTORS: dict[str, type[Selector]] = {
    "topk": TopK,
    "gaussiank": GaussianK,
    "dgc": SampledK,
    "trimmed": TrimmedK,
    "randk": RandK,
}
