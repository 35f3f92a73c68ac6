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

from lightning_topk.core import ops
from lightning_topk.core.ops import reference
from lightning_topk.core.select import RandK


@dataclass(frozen=True)
class Wire:
    """A format of values.

    Args:
        name: What users call it.
        value_dtype: dtype in which values travel. What its rounding loses stays in the sender's residual.
    """

    name: str
    value_dtype: torch.dtype

    @property
    def eps(self) -> float:
        """How much larger than itself the largest value may arrive, relatively, at most."""
        return torch.finfo(self.value_dtype).eps

    @property
    def rounding(self) -> float:
        """How far from itself a value may arrive, at most, over the largest magnitude around it."""
        return self.eps / 2

    @property
    def largest(self) -> float:
        """The largest magnitude that arrives finite."""
        return torch.finfo(self.value_dtype).max

    def nbytes(self, k: int) -> int:
        """Bytes of k values."""
        return k * self.value_dtype.itemsize

    def write(self, value: Tensor) -> Tensor:
        """Writes ``[R, k]`` floating values, at most :attr:`largest`, as ``[R, nbytes(k)]`` uint8. NaN stays NaN."""
        return value.to(self.value_dtype).view(torch.uint8)

    def read(self, written: Tensor, k: int) -> Tensor:
        """Undoes :meth:`write`, but for rounding: ``[R, k]`` floating."""
        return written.contiguous().view(self.value_dtype)


@dataclass(frozen=True)
class BlockWire(Wire):
    """Values as small integers, and a scale for every block of them: ``[k integers | ceil(k / 64) scales]``.

    Integers of b bits lie in ±(2^(b - 1) - 1); several share a byte, the first one lowest. A block's scale is its largest magnitude
    over the largest integer (Dettmers 2016 has such blocks); entries are in the order of their positions.

    Args:
        name: What users call it.
        value_dtype: dtype of the scales.
        bits: Of an integer, 8 or 4.
        block: Values that share a scale.
    """

    bits: int = 8
    block: int = 64

    @property
    def top(self) -> int:
        """The largest integer."""
        return (1 << self.bits - 1) - 1

    @property
    def rounding(self) -> float:
        """See :attr:`Wire.rounding`. Half a unit, whose scale is rounded too."""
        return (0.5 / self.top + self.eps / 2) * (1 + self.eps)

    @property
    def largest(self) -> float:
        """See :attr:`Wire.largest`. The scale may be rounded up."""
        return torch.finfo(self.value_dtype).max * (1 - self.eps)

    def nbytes(self, k: int) -> int:
        """See :meth:`Wire.nbytes`."""
        return self._integer_bytes(k) + -(-k // self.block) * self.value_dtype.itemsize

    def write(self, value: Tensor) -> Tensor:
        """See :meth:`Wire.write`."""
        rows, k = value.shape
        blocks = torch.nn.functional.pad(value, (0, -k % self.block)).view(rows, -1, self.block)
        scale = (blocks.abs().amax(dim=2) / self.top).to(self.value_dtype)
        unit = scale.to(value.dtype).unsqueeze(2)
        whole = torch.where(unit > 0, blocks / unit, 0).round_().clamp_(-self.top, self.top).to(torch.int8)
        return torch.cat(
            [self._pack(whole.view(rows, -1))[:, : self._integer_bytes(k)], scale.view(torch.uint8)], dim=1
        )

    def read(self, written: Tensor, k: int) -> Tensor:
        """See :meth:`Wire.read`. A product has at most 15 bits, so it is exact."""
        filled = self._integer_bytes(k)
        scale = written[:, filled:].clone(memory_format=torch.contiguous_format)
        scale = scale.view(self.value_dtype)  # a copy, since a view of two bytes must begin at an even one
        return self._unpack(written[:, :filled])[:, :k] * scale.float().repeat_interleave(self.block, dim=1)[:, :k]

    def _integer_bytes(self, k: int) -> int:
        """Bytes of k integers."""
        return -(-k * self.bits // 8)

    def _pack(self, whole: Tensor) -> Tensor:
        """int8 ``[R, n]``, n a multiple of a block, as uint8 ``[R, n bits / 8]``."""
        octets = whole.view(torch.uint8)
        if self.bits == 8:
            return octets
        low, high = octets.view(len(octets), -1, 2).unbind(2)
        return low & 15 | high << 4

    def _unpack(self, octets: Tensor) -> Tensor:
        """Undoes :meth:`_pack`: int8 ``[R, n]``."""
        if self.bits == 8:
            return octets.view(torch.int8)
        # A shift down keeps the sign of what stands at the upper end.
        return torch.stack([octets << 4, octets], dim=2).view(torch.int8).flatten(1) >> 4


WIRES: dict[str, Wire] = {
    "fp32": Wire("fp32", torch.float32),
    "bf16": Wire("bf16", torch.bfloat16),
    "int8": BlockWire("int8", torch.bfloat16),
    "int4": BlockWire("int4", torch.bfloat16, bits=4),
}
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
        return self.wire.nbytes(self.kept)

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

    def encode(
        self, index: Tensor, value: Tensor, delivered: torch.dtype | None = None, finite: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Writes selections as payloads.

        Args:
            index: ``[R, k]`` int64, ascending in each row, in [0, universe).
            value: ``[R, k]``, floating; clamped to what the wire can carry.
            delivered: dtype into which the receiver writes them, if its rounding counts too.
            finite: Scalar bool. If false, all values on the wire are NaN.

        Returns:
            The payloads, ``[R, P]`` uint8; and what will arrive of ``value``, of its shape and dtype: zero if not ``finite``.
        """
        limit = self.wire.largest
        if delivered is not None and torch.finfo(delivered).max < limit:
            # The largest value of the narrower dtype may round up on the wire, out of its range: stay below it.
            limit = torch.finfo(delivered).max * (1 - self.wire.eps)
        given = value.clamp(-limit, limit)
        if finite is not None:
            given.masked_fill_(~finite, torch.nan)
        written = self.wire.write(given)
        arrives = self.wire.read(written, self.kept)
        sent = (arrives if delivered is None else arrives.to(delivered)).to(value.dtype, copy=True)
        if finite is not None:
            reference.zero_unless_(sent, finite)
        payload = torch.empty(len(value), self.nbytes, dtype=torch.uint8, device=value.device)
        filled = self.value_bytes + self.index_bytes
        payload[:, : self.value_bytes] = written
        if self.index_bytes:
            payload[:, self.value_bytes : filled] = ops.elias_fano_encode(index, self.universe, self.low_width)
        payload[:, filled:] = 0
        words = payload.view(WORD)
        words[:, -1] = WORDS_SUM - words.sum(dim=1, dtype=WORD)
        return payload, sent

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
        value = self.wire.read(payload[:, : self.value_bytes], self.kept).to(dtype)
        known = self.known_index(payload.device)
        if known is not None:
            return known.expand(len(payload), -1), value
        code = payload[:, self.value_bytes : self.value_bytes + self.index_bytes]
        return ops.elias_fano_decode(code, self.universe, self.kept, self.low_width), value
