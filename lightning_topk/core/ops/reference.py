"""The compression's tensor operations in plain torch, on any device, without host synchronisation on a GPU.

Output shapes follow from input shapes and integer arguments alone. The ``R`` rows of an argument are independent: one
row per shard when sending, one row per sender when receiving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_topk.core.layout import DAMAGED, DamagedError, Layout, NodeShards


def shard_rows(x: Tensor, layout: Layout) -> Tensor:
    """Splits a bucket ``[numel]`` of any dtype into its shards: ``[shards, shard_size]``, padded with zeros.

    A view of ``x`` if there is one shard.
    """
    if layout.shards == 1:
        return x.view(1, -1)
    padding = -layout.numel % (layout.shards * layout.block)
    turns = torch.nn.functional.pad(x, (0, padding)).view(-1, layout.shards, layout.block)
    return turns.transpose(0, 1).reshape(layout.shards, -1)[:, : layout.shard_size].contiguous()


def flat_index(index: Tensor, layout: Layout, shard: Tensor | None = None) -> Tensor:
    """Converts positions in shards to positions in the bucket, both ``[R, K]`` int64: inverse of :func:`shard_rows`.

    ``shard`` ``[R, 1]`` int64 is the shard of each row; default: row r is shard r. Positions in the padding map to the
    bucket's last element; their values are zero, so adding them there changes nothing.
    """
    if layout.shards == 1:
        return index
    if shard is None:
        shard = torch.arange(layout.shards, device=index.device).unsqueeze(1)
    block = layout.block
    offset = index & (block - 1) if block.bit_count() == 1 else index % block  # a division costs ten times as much
    first = index - offset  # first element of the block
    flat = first.mul_(layout.shards).add_(offset.add_(shard * block))
    return flat.clamp_(max=layout.numel - 1)


def split_parts(x: Tensor, parts: NodeShards) -> Tensor:
    """Splits a bucket ``[numel]`` of any dtype among the ranks of a node: ``[count, parts.numel]``, padded with zeros.

    Row l is for local rank l.
    """
    padded = (torch.nn.functional.pad(each, (0, -len(each) % parts.count)) for each in x.split(parts.sizes))
    return torch.cat([each.view(parts.count, size) for each, size in zip(padded, parts.slices, strict=True)], dim=1)


def join_parts(rows: Tensor, parts: NodeShards, out: Tensor) -> None:
    """Inverse of :func:`split_parts`: overwrites ``out`` ``[numel]``."""
    columns = zip(parts.sizes, rows.split(parts.slices, dim=1), strict=True)
    torch.cat([column.reshape(-1)[:size] for size, column in columns], out=out)


def is_finite(x: Tensor) -> Tensor:
    """Whether every element of ``x``, of any nonempty shape, is finite: a scalar bool."""
    if x.device.type != "cpu":  # two launches, of which one reads x
        return torch.linalg.vector_norm(x, torch.inf) <= torch.finfo(x.dtype).max
    # The sum of squares, one read of x, is finite only if every element is. If it is not, it may have overflowed.
    squares = x.dim() == 1 and x.dtype in (torch.float32, torch.float64)
    if squares and math.isfinite(torch.dot(x, x)):
        return torch.tensor(True)
    return torch.stack(torch.aminmax(x)).isfinite().all()


def zero_unless_(x: Tensor, condition: Tensor) -> Tensor:
    """Sets ``x`` to zero in place unless the scalar ``condition`` holds, and returns it.

    On a GPU, reading the condition would synchronise the host, so the zeros are masked in.
    """
    if x.device.type == "cpu":
        return x if condition else x.zero_()
    return x.masked_fill_(~condition, 0)


def nan_unless_(g: Tensor, starts: Tensor, condition: Tensor) -> None:
    """Sets elements ``starts`` ``[n]`` int64 of ``g`` ``[numel]`` to NaN unless the scalar ``condition`` holds."""
    if g.device.type != "cpu" or not condition:
        poison = torch.zeros_like(g[:1]).masked_fill_(~condition, torch.nan)
        g.index_add_(0, starts, poison.expand(len(starts)))


def clamp_(x: Tensor) -> Tensor:
    """Clamps sums of finite numbers to the range of their dtype in place, and returns them: no residual overflows."""
    limit = torch.finfo(x.dtype).max
    return x.clamp_(-limit, limit)


def topk_index(rows: Tensor, k: int) -> Tensor:
    """Ascending positions ``[R, k]`` int64 of the k largest magnitudes of each row ``[R, S]``, finite.

    Of equal magnitudes, the first. Ties are common: a server's mean of values rounded to bf16 has many.
    """
    magnitude = rows.abs()
    threshold = magnitude.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, ties = magnitude > threshold, magnitude == threshold
    allowed = k - above.sum(dim=1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(dim=1, dtype=torch.int32) <= allowed))
    return torch.nonzero_static(chosen, size=rows.shape[0] * k)[:, 1].view(rows.shape[0], k)


@lru_cache(maxsize=4096)  # a schedule may change k in each step
def sample_of(layout: Layout, k: int, least: int) -> tuple[int, int]:
    """Plans a sample from which to estimate a magnitude that slightly more than k entries per shard reach.

    It has one random entry of each window: a fixed period may see only a few columns of a matrix. Returns the size of a
    window, for a sample of at least ``least`` entries, and the rank of the magnitude in the sample.
    """
    # If entries fall into shards and into the sample independently, counts are binomial: four standard deviations are
    # added for each, so that no shard gets fewer than k by chance.
    needed = layout.shards * (k + 4 * math.sqrt(k) + 4)
    stride = max(1, min(layout.numel // least, int(needed) // 32))
    expected = needed / stride
    return stride, math.ceil(expected + 4 * math.sqrt(expected) + 4)


def count_reaching(rows: Tensor, threshold: Tensor) -> Tensor:
    """Counts the entries of each row ``[R, S]`` whose magnitude reaches ``threshold`` ``[R, 1]``: ``[R, 1]`` int64."""
    return (rows.abs() >= threshold).sum(dim=1, keepdim=True)


def check(payloads: Tensor, expected: int) -> None:
    """Rejects payloads ``[R, P]`` uint8 whose words do not have the ``expected`` sum: damaged, or of another tag or k.

    A :class:`DamagedError` names the rows. On a GPU, a device-side assertion fails instead, without a host
    synchronisation.
    """
    intact = payloads.view(torch.int32).sum(dim=1, dtype=torch.int32) == expected
    if payloads.device.type != "cpu":
        torch._assert_async(intact.all(), f"lightning_topk: a payload {DAMAGED}")
    elif not intact.all():
        raise DamagedError((~intact).nonzero().flatten().tolist())


def pack_bits(bits: Tensor) -> Tensor:
    """Packs bits ``[R, n]``, bool or uint8, eight to a byte, the first lowest: ``[R, ceil(n / 8)]`` uint8."""
    padding = -bits.shape[1] % 8
    octets = torch.nn.functional.pad(bits.to(torch.uint8), (0, padding)).view(bits.shape[0], -1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets * weights).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Inverse of :func:`pack_bits`: ``[R, n]`` uint8 of 0 and 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.reshape(packed.shape[0], packed.shape[1] * 8)[:, :n]


@lru_cache(maxsize=4096)  # likewise
def elias_fano_low_width(universe: int, k: int) -> int:
    """Returns the ``low`` with which :func:`elias_fano_encode` is shortest for k positions below ``universe``."""
    widths = range(max(1, (universe - 1).bit_length() + 1))
    return min(widths, key=lambda low: elias_fano_bytes(universe, k, low))


def elias_fano_bytes(universe: int, k: int, low: int) -> int:
    """Size in bytes of k positions below ``universe`` with ``low`` low bits: the low parts and the high bitmap."""
    return -(-k * low // 8) + -(-_high_bits(universe, k, low) // 8)


def _high_bits(universe: int, k: int, low: int) -> int:
    """Size in bits of the high bitmap."""
    return k + ((universe - 1) >> low)


def elias_fano_encode(index: Tensor, universe: int, low: int) -> Tensor:
    """Encodes rows of ascending positions with the Elias-Fano code (Elias 1974, Fano 1971); rows have a fixed size.

    The ``low`` low bits of every position are stored verbatim; the high part h of the i-th position sets bit ``h + i``
    of a bitmap. Ascending positions set distinct bits, even where they are equal.

    ``index`` is ``[R, K]`` int64 in [0, universe); the result is ``[R, P]`` uint8, P as :func:`elias_fano_bytes`.
    """
    rows, k = index.shape
    place = torch.arange(low, device=index.device)
    lows = ((index.unsqueeze(-1) >> place) & 1).to(torch.uint8).view(rows, k * low)
    highs = torch.zeros(rows, _high_bits(universe, k, low), dtype=torch.uint8, device=index.device)
    highs.scatter_(1, (index >> low) + torch.arange(k, device=index.device), 1)
    return torch.cat([pack_bits(lows), pack_bits(highs)], dim=1)


def elias_fano_decode(code: Tensor, universe: int, k: int, low: int) -> Tensor:
    """Inverse of :func:`elias_fano_encode`: ``[R, k]`` int64."""
    rows, low_bytes = code.shape[0], -(-k * low // 8)
    place = torch.arange(low, device=code.device)
    lows = unpack_bits(code[:, :low_bytes], k * low).view(rows, k, low)
    lows = (lows.long() << place).sum(dim=-1)
    highs = unpack_bits(code[:, low_bytes:], _high_bits(universe, k, low))
    # The i-th set bit is at position h_i + i. Every set bit writes its position to the slot of its rank among the set
    # bits; clear bits write to a spare slot k, so no shape depends on the data.
    rank = highs.cumsum(dim=1, dtype=torch.int64) - 1
    slot = torch.where(highs.bool(), rank, k).clamp_(0, k)
    position = torch.arange(highs.shape[1], device=code.device).expand(rows, -1)
    placed = torch.zeros(rows, k + 1, dtype=torch.int64, device=code.device).scatter_(1, slot, position)
    high = placed[:, :k] - torch.arange(k, device=code.device)
    return (high << low) + lows


class Rule(NamedTuple):
    """How the optimizer of a parameter steps, see :mod:`lightning_topk.optim.momentum`.

    A number may be a scalar tensor. Comparisons do not read it, which would wait for its device.
    """

    momentum: float | Tensor  # m, in (0, 1)
    weight: float | Tensor  # a, the factor of a gradient when the optimizer adds it to its momentum buffer
    sign: int = 1  # -1 if the optimizer maximizes
    decay: float | Tensor = 0.0  # w, the factor of the parameter that is part of the gradient
    # What the optimizer's own step needs in the buffer, as a factor of the parameter, to decay an entry by as much as
    # dense training does in the long run; 0 if decay waits for the gradient.
    steady: float | Tensor = 0.0
    waits: bool = False  # whether the decay of all steps comes with the gradient
    squares: float | Tensor = 1.0  # n, the optimizer's factor of its mean of squares in each step; 1 if it has none
    eps: float | Tensor = 0.0  # what the optimizer adds to the root of that mean

    @property
    def decays(self) -> bool:
        """Whether the step reads the parameter."""
        return isinstance(self.decay, Tensor) or self.decay != 0

    @property
    def has_squares(self) -> bool:
        """Whether the optimizer divides by a mean of squares."""
        return isinstance(self.squares, Tensor) or self.squares != 1

    @property
    def replaces(self) -> bool:
        """Whether the optimizer's own step needs another gradient."""
        return self.waits or self.has_squares

    @property
    def unread(self) -> bool:
        """Whether a number is a scalar on a GPU, which the host does not read."""
        return len([each for each in self if isinstance(each, Tensor)]) > 0

    @property
    def form(self) -> tuple[bool, ...]:
        """What decides which tensors a step takes, and how."""
        return self.decays, self.waits, self.has_squares, self.unread


class Stepped(NamedTuple):
    """The tensors of one parameter in an adapted step, all of its shape; None for what its rule does not need."""

    buffer: Tensor  # the optimizer's momentum buffer, b
    waited: Tensor  # uint8, how many steps each entry has waited since its last delivery, at most 254
    gradient: Tensor  # of any dtype, as the optimizer finds it
    out: Tensor  # of the buffer's dtype: becomes the buffer for the optimizer's own step
    parameter: Tensor | None  # x; with weight decay
    replacement: Tensor | None  # of the gradient's dtype: becomes the gradient for the optimizer's own step
    # With a mean of squares, see `fold_signs_`: r of each range of D, `[RANGES]` float32, and counts of signs,
    # `[2 RANGES]` int32, to which the step adds its own.
    ratio: Tensor | None = None
    counts: Tensor | None = None
    rule: int = 0  # its number in the rules of the step


RANGES = 8  # ranges of D, the number of steps in a delivered gradient: 1, 2 and 3, 4 to 7, ..., 128 to 255
PRIOR = 16  # deliveries of noise added to the counted ones, so that chance does not decide in a small parameter
CERTAIN = 0.9999  # the largest surplus of equal signs that is used
KEPT = 0.95  # factor of a range's earlier counts in each step that delivers gradients of that range


def fold_signs_(counts: Tensor, fresh: Tensor, ratio: Tensor) -> None:
    """Adds the signs that the last step has counted to the running counts, and estimates r of each range of D.

    For each range, counts have the deliveries whose gradient has another sign than the momentum, then those with the
    same sign. If the D gradients of an entry have mean mu and standard deviation sigma, r = D mu^2 / sigma^2. The
    formula is that of :mod:`lightning_topk.optim.momentum`.

    Args:
        counts: ``[parameters, 2 RANGES]`` float32, of earlier steps.
        fresh: ``[parameters, 2 RANGES]`` int32, of the last step; becomes zero. Integers, so that their sums are the
            same in any order.
        ratio: ``[parameters, RANGES]`` float32, becomes r.
    """
    counted = fresh.unflatten(1, (RANGES, 2)).any(2).repeat_interleave(2, 1)
    counts.copy_(torch.where(counted, KEPT * counts + fresh, counts))
    fresh.zero_()
    other, same = counts.unflatten(1, (RANGES, 2)).unbind(2)
    surplus = ((same - other) / (same + other + PRIOR)).clamp(0, CERTAIN)
    ratio.copy_(math.pi / 2 * ((1 + surplus) / (1 - surplus)).log())


def catch_up_(stepped: Stepped, rule: Rule, scale: Tensor | None = None, skipped: Tensor | None = None) -> None:
    """Steps a momentum buffer by the rule of :mod:`lightning_topk.optim.momentum`.

    Let an entry have waited d steps, its gradient g not be zero, and v = m b + a (g + decay). Its buffer becomes m^d v,
    and ``out`` becomes b + (1 + ... + m^(d-1)) v, so that the optimizer moves the entry by (1 + ... + m^d) v; or more,
    if ``replacement`` is less than g + decay, or the gradients that g sums agree. Other entries keep their buffer, and
    ``out`` is zero there. SGD's decay is then added to ``out``, unless g is not zero and d is 0. ``waited`` becomes
    zero or is incremented, and signs are counted in ``counts``.

    ``scale`` is the scalar by which the optimizer divides gradients. The scalar ``skipped`` is nonzero if it skips the
    step: then ``buffer``, ``waited`` and ``counts`` stay.
    """
    buffer, waited, gradient, out, parameter, replacement, ratio, counts, _ = stepped
    taken = torch.ones((), dtype=torch.bool, device=buffer.device) if skipped is None else skipped == 0
    delivered = (gradient != 0) & taken
    wide = torch.promote_types(buffer.dtype, torch.float32)
    b, d, first = buffer.to(wide), waited.to(wide), waited == 0
    x = 0.0 if parameter is None else parameter.to(wide)
    g = rule.sign * gradient.to(wide)
    if scale is not None:
        g = g / scale
    if rule.decays:
        g = g + rule.decay * ((d + 1) * x if rule.waits else torch.where(first, x, 0.0))
    v = rule.momentum * b + rule.weight * g
    faded = rule.momentum**d
    moved = b + (1 - faded) / (1 - rule.momentum) * v
    if replacement is not None:
        squares = (1 - rule.squares ** (d + 1)) / ((d + 1) * (1 - rule.squares))
        less = g if not rule.has_squares else torch.where(first, g, g * squares.sqrt())
        more: Tensor | float = 1.0  # factor by which an entry moves further if its gradients agree
        if ratio is not None and counts is not None:
            compared, same, steps = delivered & ~first & (b != 0), (g > 0) == (b > 0), d + 1
            place = torch.frexp(steps).exponent.long() - 1  # of the range of D
            counts.scatter_add_(0, (2 * place + same).reshape(-1), compared.reshape(-1).to(counts.dtype))
            r, typical = ratio.to(wide)[place], g.abs() / steps.sqrt()
            root = ((1 + r / steps) / (1 + r)).sqrt()
            more = torch.where(compared & same, (typical + rule.eps) / (typical * root + rule.eps), 1.0)
        moved = more * moved + rule.weight / rule.momentum * (more * g - less)
        less = rule.sign * less
        replacement.copy_(torch.where(delivered, less if scale is None else less * scale, 0.0))
    moved = torch.where(delivered, moved, 0.0)
    if isinstance(rule.steady, Tensor) or rule.steady != 0:
        moved = torch.where(delivered & first, moved, moved + rule.steady * x)
    out.copy_(moved)
    buffer.copy_(torch.where(delivered, faded * v, b))
    waited.add_((waited < 254) & taken).masked_fill_(delivered, 0)


NOTHING = torch.empty(0)  # its address is 0


class AddressTable:
    """Parameters whose momentum buffers one compiled loop or kernel steps, and the addresses of their tensors.

    Attributes:
        rows: ``[parameters, 11]`` int64: addresses of the eight tensors of :class:`Stepped`, 0 for None; the number of
            elements; the index of the rule in ``rules``; and a column for the subclass.
        rules: The numbers, among the rules of a step, of those that the parameters use.
    """

    def __init__(self, several: Sequence[Stepped]) -> None:
        *columns, numbers = zip(*several, strict=True)
        columns[2] = ()  # the gradients of each step, which the user may free after it
        self._columns = [[NOTHING if x is None else x for x in column] for column in columns]
        self._addresses: list[int] = []
        self.rules = sorted({*numbers})
        self.rows = np.zeros((len(several), 11), np.int64)
        self.rows[:, 8] = [each.buffer.numel() for each in several]
        self.rows[:, 9] = [self.rules.index(number) for number in numbers]

    def find(self, gradients: Sequence[Tensor]) -> bool:
        """Enters the addresses of a step with these gradients; returns whether any has changed."""
        columns = *self._columns[:2], gradients, *self._columns[3:]
        addresses = [x.data_ptr() for column in columns for x in column]
        if changed := addresses != self._addresses:
            self._addresses, self.rows[:, :8] = addresses, np.array(addresses).reshape(8, -1).T
        return changed
