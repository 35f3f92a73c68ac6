"""The wire: a selection as bytes, and bytes as a selection.

A payload row is ``[values | Elias-Fano positions | check]``: k values in the wire's dtype, then k ascending positions at about
``log2(S / k) + 2`` bits each (5 % above their entropy), zeros up to a whole word, and a word that makes the sum of all words
what both ends expect. Its size follows from (S, k, wire) alone, so no sizes travel. Positions that both ends know are not sent: all
of them when k = S, and those of a selector that draws the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_topk import ops
from lightning_topk.ops import reference
from lightning_topk.select import RandK


@dataclass(frozen=True)
class Wire:
    """A format of payloads.

    Args:
        name: What users call it.
        value_dtype: dtype in which values travel. What its rounding loses stays in the sender's residual.
    """

    name: str
    value_dtype: torch.dtype

    def round(self, value: Tensor, delivered: torch.dtype | None = None) -> Tensor:
        """What will arrive of ``value``: clamped to the wire's range and rounded.

        Args:
            value: Any shape, floating.
            delivered: dtype into which the receiver writes it, if that rounds too.

        Returns:
            The shape and dtype of ``value``.
        """
        limit = torch.finfo(self.value_dtype).max
        if delivered is not None and torch.finfo(delivered).max < limit:
            # The largest value of the narrower dtype may round up on the wire, out of its range: stay below it.
            limit = torch.finfo(delivered).max * (1 - torch.finfo(self.value_dtype).eps)
        arrived = value.clamp(-limit, limit).to(self.value_dtype)
        return (arrived if delivered is None else arrived.to(delivered)).to(value.dtype)


WIRES: dict[str, Wire] = {wire.name: wire for wire in (Wire("fp32", torch.float32), Wire("bf16", torch.bfloat16))}
"""Wires by name."""


WORD = torch.int32
WORDS_SUM = 0x746F706B
"""What the words of a payload add up to, modulo 2^32."""


@dataclass(frozen=True)
class Codec:
    """A wire for one size of selection: k entries of a shard of ``universe`` elements.

    Args:
        wire: The format.
        universe: Elements of the shard, S.
        kept: Entries a payload carries, k.
        shared: The selector, if it draws the same positions on every rank; else None.
    """

    wire: Wire
    universe: int
    kept: int
    shared: RandK | None = None

    def known_index(self, device: torch.device) -> Tensor | None:
        """The positions ``[k]`` int64, ascending, if both ends know them; else None."""
        if self.kept == self.universe:
            return torch.arange(self.universe, device=device)
        return None if self.shared is None else self.shared.shared_positions(self.universe, self.kept).to(device)

    @cached_property
    def low_width(self) -> int:
        """Low bits of a position in the Elias-Fano code."""
        return reference.elias_fano_low_width(self.universe, self.kept)

    @property
    def value_bytes(self) -> int:
        """Bytes of a payload's values."""
        return self.kept * self.wire.value_dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Bytes of a payload's positions."""
        if self.shared is not None or self.kept == self.universe:
            return 0
        return reference.elias_fano_bytes(self.universe, self.kept, self.low_width)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one payload, P; a multiple of a word's."""
        return (-(-(self.value_bytes + self.index_bytes) // WORD.itemsize) + 1) * WORD.itemsize

    def encode(self, index: Tensor, value: Tensor) -> Tensor:
        """Writes selections as payloads.

        Args:
            index: ``[R, k]`` int64, ascending in each row, in [0, universe).
            value: ``[R, k]``, floating.

        Returns:
            ``[R, P]`` uint8.
        """
        payload = torch.empty(len(value), self.nbytes, dtype=torch.uint8, device=value.device)
        filled = self.value_bytes + self.index_bytes
        payload[:, : self.value_bytes].view(self.wire.value_dtype).copy_(value)
        if self.index_bytes:
            payload[:, self.value_bytes : filled] = ops.elias_fano_encode(index, self.universe, self.low_width)
        payload[:, filled:] = 0
        words = payload.view(WORD)
        words[:, -1] = WORDS_SUM - words.sum(dim=1, dtype=WORD)
        return payload

    def decode(self, payload: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Reads payloads.

        Args:
            payload: ``[R, P]`` uint8.
            dtype: dtype in which the values are wanted.

        Returns:
            Positions ``[R, k]`` int64 and values ``[R, k]`` of ``dtype``.

        Raises:
            ValueError: A payload was damaged on its way. On a GPU, where the host does not wait to see it, a device-side
                assertion fails instead.
        """
        whole = payload.view(WORD).sum(dim=1, dtype=WORD) == WORDS_SUM
        if payload.device.type != "cpu":
            torch._assert_async(whole.all(), "a payload was damaged on its way")
        elif not whole.all():
            rows = (~whole).nonzero().flatten().tolist()
            raise ValueError(f"the payload from rank {', '.join(map(str, rows))} was damaged on its way.")
        value = payload[:, : self.value_bytes].view(self.wire.value_dtype).to(dtype).contiguous()
        known = self.known_index(payload.device)
        if known is not None:
            return known.expand(len(payload), -1), value
        code = payload[:, self.value_bytes : self.value_bytes + self.index_bytes]
        return ops.elias_fano_decode(code, self.universe, self.kept, self.low_width), value
