"""Selectors: which entries of a vector are sent.

A selector sees a vector and its layout and chooses the same number of entries in every shard. To make one, subclass
:class:`Selector` and write :meth:`Selector.pick`; pass an instance as ``selector=``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_topk.layout import Layout
from lightning_topk.ops import cpu, reference


class Selector(ABC):
    """Chooses exactly k entries of every shard of a vector."""

    def select(self, a: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
        """Chooses k entries of each shard of ``a``.

        Args:
            a: ``[numel]``, what there is to send: gradient plus residual. Finite; not to be modified.
            layout: How its elements are dealt to shards.
            k: Entries to choose of each shard, in [1, shard_size].

        Returns:
            Positions in the shard, ``[shards, k]`` int64, ascending in each row, and the values there,
            ``[shards, k]`` of the dtype of ``a``.
        """
        rows = reference.shard_rows(a, layout)
        index = self.pick(rows, k)
        if index.shape != (layout.shards, k):
            raise ValueError(
                f"{type(self).__name__}.pick returned positions of shape {tuple(index.shape)} for "
                f"{layout.shards} shards and k={k}; it must return [shards, k] = ({layout.shards}, {k})."
            )
        return index, rows.gather(1, index)

    @abstractmethod
    def pick(self, rows: Tensor, k: int) -> Tensor:
        """Positions of the entries to send.

        Args:
            rows: ``[R, S]``, one shard a row, padded with zeros.
            k: How many entries to choose of each row, in [1, S].

        Returns:
            ``[R, k]`` int64 positions, distinct and ascending in each row, on the device of ``rows``. A shape
            that depends on the data would make the payload's size depend on it; it is refused.
        """


class TopK(Selector):
    """The k entries of largest magnitude, exactly."""

    def pick(self, rows: Tensor, k: int) -> Tensor:
        """See :meth:`Selector.pick`."""
        ops = cpu if rows.device.type == "cpu" else reference
        index: Tensor = ops.topk_index(rows, k)
        return index


SELECTORS: dict[str, type[Selector]] = {"topk": TopK}
"""Selectors that have a name."""
