"""Wires: encode a selection as bytes and decode it.

A payload row is ``[values | Elias-Fano positions | check]``: k values in the wire's dtype, k ascending positions at
about ``log2(S / k) + 2`` bits each (5 % above their entropy), zeros up to a multiple of the word size, and a check word
that makes the sum of all words equal a constant. The size follows from (S, k, wire) alone, so sizes are not exchanged.
Positions that both ends know are not sent: when k = S, and with a selector that draws the same positions on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk.core import ops
from lightning_topk.core.layout import Layout, PayloadFormat
from lightning_topk.core.ops import reference

GROUP = 64  # values that share a scale


@dataclass(frozen=True)
class Wire:
    """Format of the values in a payload. The rounding error stays in the sender's residual."""

    name: str  # in the settings
    value_dtype: torch.dtype  # of the values on the wire
    bits: int = 0  # per value, if the fused functions of `core.ops` write and read this wire; else 0

    @property
    def largest(self) -> float:
        """The largest magnitude that is decoded as finite."""
        return torch.finfo(self.value_dtype).max

    def nbytes(self, k: int) -> int:
        """Size of k values in bytes."""
        return k * self.value_dtype.itemsize

    def write(self, value: Tensor) -> Tensor:
        """Encodes values ``[R, k]``, at most :attr:`largest` in magnitude, as uint8 ``[R, nbytes(k)]``; keeps NaN."""
        return value.to(self.value_dtype).view(torch.uint8)

    def read(self, written: Tensor, k: int) -> Tensor:
        """Decodes the result of :meth:`write` to floating values ``[R, k]``: the original values, rounded."""
        return written.contiguous().view(self.value_dtype)


class BlockWire(Wire):
    """Values as integers of 8 or 4 bits with a scale for every 64: ``[k integers | ceil(k / 64) scales]``.

    Integers of b bits lie in ±(2^(b - 1) - 1). 4-bit integers are packed two to a byte, the first in the low bits. A
    scale, of ``value_dtype``, is the largest magnitude of its values divided by the largest integer (Dettmers 2016).
    """

    @property
    @override
    def largest(self) -> float:
        """Below the scale's own limit, since the scale may be rounded up."""
        scale = torch.finfo(self.value_dtype)
        return scale.max * (1 - scale.eps)

    @override
    def nbytes(self, k: int) -> int:
        return self._integer_bytes(k) + -(-k // GROUP) * self.value_dtype.itemsize

    @override
    def write(self, value: Tensor) -> Tensor:
        (rows, k), top = value.shape, (1 << self.bits - 1) - 1
        blocks = torch.nn.functional.pad(value, (0, -k % GROUP)).view(rows, -1, GROUP)
        scale = (blocks.abs().amax(dim=2) / top).to(self.value_dtype)
        unit = scale.to(value.dtype).unsqueeze(2)
        integers = torch.where(unit > 0, blocks / unit, 0).round_().clamp_(-top, top).to(torch.int8)
        octets = integers.view(rows, -1).view(torch.uint8)
        if self.bits == 4:
            low, high = octets.view(rows, -1, 2).unbind(2)
            octets = low & 15 | high << 4
        return torch.cat([octets[:, : self._integer_bytes(k)], scale.view(torch.uint8)], dim=1)

    @override
    def read(self, written: Tensor, k: int) -> Tensor:
        """The product of integer and scale has at most 15 significant bits, so it is exact in float32."""
        filled = self._integer_bytes(k)
        copy = written[:, filled:].clone(memory_format=torch.contiguous_format)  # a 2-byte view needs an even offset
        scale = copy.view(self.value_dtype).float().repeat_interleave(GROUP, dim=1)
        octets = written[:, :filled]
        integers = octets.view(torch.int8)
        if self.bits == 4:  # the right shift of an int8 is arithmetic: it extends the sign of the upper four bits
            integers = torch.stack([octets << 4, octets], dim=2).view(torch.int8).flatten(1) >> 4
        return integers[:, :k] * scale[:, :k]

    def _integer_bytes(self, k: int) -> int:
        return -(-k * self.bits // 8)


WireName = Literal["fp32", "bf16", "int8", "int4"]
WIRES: dict[str, Wire] = {
    "fp32": Wire("fp32", torch.float32, 32),
    "bf16": Wire("bf16", torch.bfloat16, 16),
    "int8": BlockWire("int8", torch.bfloat16, 8),
    "int4": BlockWire("int4", torch.bfloat16, 4),
}


Shared = Callable[[int, int, torch.device], Tensor]
"""Computes the positions that every rank draws: ``[k]`` int64 below S, from S, k and a device."""
WORD = torch.int32
WORDS_SUM = 0x746F706B  # sum of the words of an undamaged payload, modulo 2^32, without the term for its bucket and k


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes selections of one size: k entries of a shard of ``universe`` elements."""

    wire: Wire
    universe: int  # S
    k: int
    shared: Shared | None = None  # computes the positions, if every rank draws the same; None if they are sent
    tag: int = 0  # of the bucket, in [0, 2^24): a receiver that expects another tag refuses the payload
    padding: int = 0  # zeros before the check word, bytes; a multiple of the word size
    bound: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # see `ops.receive`

    @property
    def nbytes(self) -> int:
        """Size of a payload in bytes, P; a multiple of the word size."""
        return self.form.nbytes

    def format(self, delivered: torch.dtype | None = None) -> PayloadFormat:
        """The byte layout; with ``delivered``, its largest magnitude is finite in that dtype too."""
        form = self.form
        if delivered is not None and torch.finfo(delivered).max < form.largest:
            # The wire may round the narrower dtype's largest value up, out of its range: stay below.
            limit = torch.finfo(delivered).max * (1 - torch.finfo(self.wire.value_dtype).eps)
            return form._replace(largest=limit)
        return form

    @cached_property
    def layout(self) -> Layout:
        """The layout of the shard alone."""
        return Layout(self.universe)

    @cached_property
    def form(self) -> PayloadFormat:
        """Byte layout of a payload."""
        wire, universe, k = self.wire, self.universe, self.k
        low = reference.elias_fano_low_width(universe, k)
        known = self.shared is not None or k == universe  # to both ends
        values, positions = wire.nbytes(k), 0 if known else reference.elias_fano_bytes(universe, k, low)
        nbytes = (-(-(values + positions) // WORD.itemsize) + 1) * WORD.itemsize + self.padding
        check = WORDS_SUM + (self.tag + 0x9E3779 * k) % 2**24  # different for each k of a tag
        bits = 0 if known else wire.bits
        return PayloadFormat(universe, k, bits, wire.largest, values, low, positions, nbytes, check)

    def encode(
        self, index: Tensor, value: Tensor, delivered: torch.dtype | None = None, finite: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encodes selections as payloads.

        Args:
            index: ``[R, k]`` int64, ascending in each row, in [0, universe).
            value: ``[R, k]``, floating; clamped to the range of the wire.
            delivered: dtype to which the receiver casts the values, if the residual must include that rounding error.
            finite: Scalar bool. If false, all values on the wire are NaN.

        Returns:
            The payloads, ``[R, P]`` uint8; and the values that the receiver will decode, in the shape and dtype of
            ``value``: zero if not ``finite``.
        """
        form = self.format(delivered)
        clamped = value.clamp(-form.largest, form.largest)
        if finite is not None:
            clamped.masked_fill_(~finite, torch.nan)
        written = self.wire.write(clamped)
        arrives = self.wire.read(written, self.k)
        sent = (arrives if delivered is None else arrives.to(delivered)).to(value.dtype, copy=True)
        if finite is not None:
            reference.zero_unless_(sent, finite)
        payload = torch.zeros(len(value), form.nbytes, dtype=torch.uint8, device=value.device)
        payload[:, : form.value_bytes] = written
        if form.index_bytes:
            code = ops.separate(index).elias_fano_encode(index, self.universe, form.low)
            payload[:, form.value_bytes : form.value_bytes + form.index_bytes] = code
        words = payload.view(WORD)
        words[:, -1] = form.check - words.sum(dim=1, dtype=WORD)
        return payload, sent

    def read(self, payload: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decodes payloads ``[R, P]`` uint8; rejects damaged ones, see :func:`.reference.check`.

        Returns:
            Positions ``[R, k]`` int64 and values ``[R, k]`` of ``dtype``.
        """
        form, universe, k = self.form, self.universe, self.k
        reference.check(payload, form.check)
        value = self.wire.read(payload[:, : form.value_bytes], k).to(dtype)
        if form.index_bytes:
            code = payload[:, form.value_bytes : form.value_bytes + form.index_bytes]
            return ops.separate(code).elias_fano_decode(code, universe, k, form.low), value
        if k == universe or self.shared is None:
            known = torch.arange(universe, device=payload.device)
        else:
            known = self.shared(universe, k, payload.device)
        return known.expand(len(payload), -1), value
