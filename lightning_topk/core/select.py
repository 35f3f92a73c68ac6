"""Selectors: which entries of a vector are sent.

A selector sees a vector and its layout and chooses at most k entries in every shard. All but :class:`TopK` and :class:`RandK` set
a threshold that should let about k entries pass. Where more pass, the k largest of them are sent and the rest stays in the
residual; where fewer pass, fewer are sent. So no selector ever sends more than k, and payloads keep their size; and where at least
k pass, a threshold selector chooses just what :class:`TopK` does.

To make one, subclass :class:`Selector` and write :meth:`Selector.pick`, or :class:`Threshold` and write
:meth:`Threshold.threshold`; pass an instance as ``selector=``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from statistics import NormalDist

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.layout import Layout
from lightning_topk.core.ops import reference


class Selector(ABC):
    """Chooses at most k entries of every shard of a vector."""

    step = 0
    """Exchanges before this one; the same on every rank."""

    def select(self, a: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses entries of each shard of ``a``.

        Args:
            a: ``[numel]``, what there is to send: gradient plus residual. Finite; not to be modified.
            layout: How its elements are dealt to shards.
            k: Entries to choose of each shard, at most; in [1, shard_size].

        Returns:
            Positions in the shard, ``[shards, k]`` int64, not descending in each row; the values there, ``[shards, k]`` of
            the dtype of ``a``; and how many of them are not zero, a scalar int64. Slots that were not needed have value 0.
        """
        rows = reference.shard_rows(a, layout)
        if k == layout.shard_size:
            index = torch.arange(k, device=a.device).expand(layout.shards, -1)
            return index, rows, rows.count_nonzero()
        index = self.pick(rows, k)
        if index.shape != (layout.shards, k):
            raise ValueError(
                f"{type(self).__name__}.pick returned positions of shape {tuple(index.shape)} for "
                f"{layout.shards} shards and k={k}; it must return [shards, k] = ({layout.shards}, {k})."
            )
        used = index >= 0
        value = rows.gather(1, index.clamp(min=0)).masked_fill_(~used, 0)
        index, order = torch.where(used, index, layout.shard_size - 1).sort(dim=1, stable=True)
        value = value.gather(1, order)
        return index, value, value.count_nonzero()

    @abstractmethod
    def pick(self, rows: Tensor, k: int) -> Tensor:
        """Positions of the entries to send.

        Args:
            rows: ``[R, S]``, one shard a row, padded with zeros.
            k: How many entries to choose of each row, at most; in [1, S].

        Returns:
            ``[R, k]`` int64 positions on the device of ``rows``, distinct in each row; to choose fewer, fill up with -1. A shape that depends on the data would make the payload's size depend on it; it is
            refused.
        """


class TopK(Selector):
    """The k entries of largest magnitude, exactly."""

    def pick(self, rows: Tensor, k: int) -> Tensor:
        """See :meth:`Selector.pick`."""
        return ops.topk_index(rows, k)


class RandK(Selector):
    """k random entries, the same on all ranks, so that no positions are sent.

    The positions of a shard are drawn from the seed, the step and the shard's size. A server that keeps fewer than the workers
    keeps a part of theirs.

    Args:
        seed: Of the positions.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._drawn: tuple[tuple[int, int], Tensor] | None = None

    def pick(self, rows: Tensor, k: int) -> Tensor:
        """See :meth:`Selector.pick`."""
        return self.shared_positions(rows.shape[1], k).to(rows.device).expand(rows.shape[0], -1)

    def shared_positions(self, universe: int, k: int) -> Tensor:
        """The positions of this step, which both ends of a link know.

        Args:
            universe: Elements of the shard.
            k: How many positions are drawn.

        Returns:
            ``[k]`` int64 on the CPU, distinct, ascending: a uniformly random subset, and a subset of that of any larger k.
        """
        if self._drawn is None or self._drawn[0] != (self.step, universe):
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.step + universe)
            self._drawn = (self.step, universe), torch.randperm(universe, generator=generator)
        return self._drawn[1][:k].sort().values


class Threshold(Selector):
    """Chooses the entries that reach a threshold in magnitude; the k largest of them if more than k do."""

    def pick(self, rows: Tensor, k: int) -> Tensor:
        """See :meth:`Selector.pick`."""
        return ops.over_threshold_index(rows, self.threshold(rows, k), k)

    @abstractmethod
    def threshold(self, rows: Tensor, k: int) -> Tensor:
        """The thresholds.

        Args:
            rows: ``[R, S]``, one shard a row, padded with zeros.
            k: How many entries of each row should pass.

        Returns:
            ``[R, 1]`` of the dtype of ``rows``, at least 0.
        """


def _none(condition: Tensor) -> bool:
    """Whether ``condition`` is known to hold nowhere: a GPU is not asked, since the host would wait for its answer."""
    return condition.device.type == "cpu" and not condition.any()


class GaussianK(Threshold):
    """Gaussian_k of Shi et al. 2019 (algorithm 1): the threshold that k of S normal entries would pass, corrected thrice.

    ``t = |mean + ppf(1 - k / 2S) std|``; if fewer than 2k/3 pass, t is halved; if more than 4k/3, it grows by half.
    """

    def threshold(self, rows: Tensor, k: int) -> Tensor:
        """See :meth:`Threshold.threshold`."""
        std, mean = torch.std_mean(rows, dim=1, keepdim=True, correction=0)
        quantile = NormalDist().inv_cdf(1 - k / rows.shape[1] / 2)
        threshold: Tensor = (mean + quantile * std).abs_()
        for _ in range(3):
            count = ops.count_reaching(rows, threshold)
            factor = torch.where(3 * count < 2 * k, 0.5, torch.where(3 * count > 4 * k, 1.5, 1.0))
            if _none(factor != 1):
                break
            threshold = threshold * factor.to(threshold.dtype)
        return threshold


class SampledK(Threshold):
    """DGC_k of Lin et al. 2018: the threshold is the one that the same fraction of a sample passes.

    If fewer than k pass, it is loosened by a fifth, at most ten times.

    Args:
        fraction: Of a shard's elements that are sampled, in (0, 1]; at least 100 of those that should pass.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"SampledK: fraction={fraction!r} must be in (0, 1].")
        self.fraction = fraction

    def threshold(self, rows: Tensor, k: int) -> Tensor:
        """See :meth:`Threshold.threshold`."""
        size = rows.shape[1]
        stride = max(1, min(int(1 / self.fraction), k // 100))
        sample = rows[:, self.step * 7919 % stride :: stride].abs()
        rank = max(1, min(sample.shape[1], round(sample.shape[1] * k / size)))
        threshold = sample.topk(rank, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        for _ in range(10):
            few = ops.count_reaching(rows, threshold) < k
            if _none(few):
                break
            threshold = torch.where(few, 0.8 * threshold, threshold)
        return threshold


class TrimmedK(Threshold):
    """Trimmed_topk of RedSync (Fang et al. 2019): ``t = mean + r (max - mean)`` of the magnitudes, r = .8, .6, .4, .2, 0.

    The first r at which at least k pass; the original has no upper limit.
    """

    def threshold(self, rows: Tensor, k: int) -> Tensor:
        """See :meth:`Threshold.threshold`."""
        mean = torch.linalg.vector_norm(rows, 1, dim=1, keepdim=True) / rows.shape[1]
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)
        threshold: Tensor = mean + 0.8 * (largest - mean)
        for r in (0.6, 0.4, 0.2, 0.0):
            few = ops.count_reaching(rows, threshold) < k
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
"""Selectors that have a name."""
