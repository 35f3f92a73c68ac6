"""One lossy direction: the sender compresses a vector, and the receivers decode its payloads.

Sending is steps 1-4 of :mod:`lightning_topk.core.exchange`; receiving is :func:`aggregate` at a server (step 6) and
:func:`deliver` at a worker (step 9). A gradient is divided by the loss scale, and clipped, where it enters the uplink.
The loss scale is put back once, where the result is delivered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.layout import Layout
from lightning_topk.core.memory import Memory, Residual
from lightning_topk.core.ops import reference
from lightning_topk.core.select import Selector, TopK
from lightning_topk.core.wire import Codec


@dataclass(frozen=True)
class Measure:
    """Statistics to measure: the compression error and, on the uplink only, the error of each parameter.

    Each costs several more passes over the bucket.
    """

    error: bool = False
    per_layer: bool = False


NOTHING = Measure()


FACTOR, SLOPE, EXCESS, ENTERED, DELIVERED = range(5)
"""Columns of :attr:`Clip.rows`."""
COLUMNS = 8  # including those of `optim.applied`; kernels assume that each row is aligned to 16 bytes


class Clip(NamedTuple):
    """The user's clipping of the mean gradient: one limit for all parameters, or several for some parameters each.

    A gradient is divided by its excess: its norm times the slope, at least 1.

    Attributes:
        rows: ``[limits, COLUMNS]`` float32, contiguous. SLOPE is an input. Exchanges write EXCESS; ENTERED, the norm of
            the clipped gradient as it enters; DELIVERED, the norm of the delivered gradient; and, where a kernel clips,
            FACTOR, the excess times the loss scale. No norm includes the loss scale.
        of: ``[parameters]`` int64, the number of each parameter's limit; None if there is only one limit.
    """

    rows: Tensor
    of: Tensor | None = None

    def norms(self, x: Tensor, sizes: Sequence[int], scale: Tensor | None) -> Tensor:
        """Norms ``[limits]`` float32 of a gradient ``[numel]`` without its loss scale; parameters have ``sizes``."""
        if self.of is None:
            return norm(x, scale, torch.float32).view(1)
        norms = lengths(x, sizes).float()
        squares = (norms if scale is None else norms / scale).square()
        return squares.new_zeros(len(self.rows)).index_add_(0, self.of, squares).sqrt()

    def enter(self, norms: Tensor) -> Tensor:
        """Records the norms ``[limits]`` of a gradient before clipping; returns its excess ``[limits]``."""
        excess = torch.clamp(norms * self.rows[:, SLOPE], min=1, out=self.rows[:, EXCESS])
        torch.div(norms, excess, out=self.rows[:, ENTERED])
        return excess

    def deliver(self, g: Tensor, sizes: Sequence[int], scale: Tensor | None) -> None:
        """Records the norms of the delivered gradient ``g`` ``[numel]``."""
        if self.of is None and g.dtype != torch.float64:  # in place: one launch less
            length = torch.linalg.vector_norm(g, dtype=torch.float32, out=self.rows[0, DELIVERED])
            if scale is not None:
                length.div_(scale)
        else:
            self.rows[:, DELIVERED] = self.norms(g, sizes, scale)

    def divide_(self, x: Tensor, sizes: Tensor) -> None:
        """Divides ``x`` ``[numel]`` by its excess; ``sizes`` ``[parameters]`` int64 are the parameters' sizes."""
        excess = self.rows[:, EXCESS]
        x.div_(excess[0] if self.of is None else excess[self.of].repeat_interleave(sizes, output_size=len(x)))

    def among(self, numbers: Tensor) -> Clip:
        """The same clipping for the parameters with these ``numbers``, ``[parameters]`` int64."""
        return self if self.of is None else Clip(self.rows, self.of[numbers])


@dataclass(frozen=True)
class Step:
    """What an exchange depends on, besides its plan and density."""

    number: int = 0  # exchanges of this gradient before this one; the same on every rank
    scale: Tensor | None = None  # scalar loss scale of the gradient and of the result, the same on every rank; None: 1
    measure: Measure = NOTHING
    fade: float = 1.0  # factor of the residual before the gradient is added, at most 1
    clip: Clip | None = None
    apart: Tensor | None = None  # [limits] norms of the gradients of uncompressed parameters, which are 0 in the vector


FIRST = Step()


@dataclass(eq=False)
class Link:
    """One lossy direction, at its sending end: compensate, select, encode, keep.

    Only a server's link has ``delivered``, the dtype of its receivers' output: its residual includes their rounding
    error. With a loss scale, receivers round scaled values; that error has mean 0, and the residual leaves it out.

    Attributes:
        sizes: Elements of each parameter in the vector, which may end in padding.
        lifts: Power of two by which each parameter's gradient is multiplied for the selection; empty: all 1. The memory
            is multiplied too.
        sent: Payloads ``[shards, P]`` uint8 of the exchange in progress, and their codec, until another rank has them.
        error: ``[2]`` float64, ‖a‖² and ‖a - C(a)‖²; if measured.
        per_layer: ``[3, parameters]`` float64, ‖a‖², ‖a - C(a)‖² and entries sent, by parameter; if measured.
    """

    layout: Layout
    selector: Selector
    memory: Memory
    delivered: torch.dtype | None = None
    sizes: Sequence[int] = ()
    count: int = 1  # ranks of a node, each of which sends a part of its bucket as a worker
    function: ops.Sender | None = field(default=None, init=False)  # does all steps in one pass over memory
    lifts: Sequence[float] = field(default=(), init=False)
    sent: tuple[Tensor, Codec] | None = field(default=None, init=False)
    error: Tensor | None = field(default=None, init=False)
    per_layer: Tensor | None = field(default=None, init=False)
    _sizes_there: Tensor | None = field(default=None, init=False)

    def sizes_on(self, device: torch.device) -> Tensor:
        """The sizes ``[parameters]`` int64 on the device of the vector; always the same tensor."""
        if self._sizes_there is None:
            self._sizes_there = ops.to_device(torch.tensor(self.sizes), device)
        return self._sizes_there

    def fuse(self, exact: bool = False, scratch: ops.Scratch | None = None) -> Link:
        """Sends in one pass over memory from now on, if :func:`.ops.sender` has a function for that; returns itself.

        On a GPU it may send fewer than the k largest entries (:mod:`.core.ops.cuda`), unless ``exact`` forbids it.
        """
        if type(self.selector) is TopK and type(self.memory) is Residual:
            self.function = ops.sender(self.memory.residual, self.layout, self.delivered, exact, scratch)
        return self

    def send(self, x: Tensor, codec: Codec, step: Step = FIRST) -> Tensor:
        """Compresses ``x`` ``[numel]``, floating, and keeps the rest in the memory; ``x`` becomes zero.

        A worker's ``x`` is a gradient: it is first divided by its loss scale and excess, and then lifted. If ``x`` has
        a NaN or an infinity, every value in the payloads is NaN, so that every receiver notices, and the memory only
        fades.

        Returns:
            Payloads ``[shards, P]`` uint8.
        """
        scale, clip = (step.scale, step.clip) if self.delivered is None else (None, None)
        to, limit, payloads = None if step.scale is not None else self.delivered, None, None
        if clip is not None and (ops.on_cpu(x) or clip.of is not None or step.apart is not None or self.lifts):
            scale, clip = self._clip(x, clip, step), None
        if self.lifts and self.delivered is None:
            multiply_(x, self.sizes, self.lifts)
        if self.function is not None and not step.measure.error:
            form = codec.form if to is None else codec.format(to)
            if clip is not None:
                limit = math.sqrt(self.count), clip.rows
            payloads = self.function(x, form, to, scale, step.fade, limit)
        if payloads is None:
            scale = scale if clip is None else self._clip(x, clip, step)
            payloads = self._send_by_steps(x, codec, step, scale, to)
        self.sent = payloads, codec
        return payloads

    def _clip(self, x: Tensor, clip: Clip, step: Step) -> Tensor | None:
        """Clips a gradient to its limits; returns the scalar by which the caller must still divide it, or None."""
        norms = clip.norms(x, self.sizes, step.scale) * math.sqrt(self.count)
        excess = clip.enter(norms if step.apart is None else norms.hypot(step.apart))
        if clip.of is not None:
            clip.divide_(x, self.sizes_on(x.device))
        elif not ops.on_cpu(x) or excess > 1:  # a CPU saves a pass over a gradient that is not clipped
            return excess[0] if step.scale is None else step.scale * excess[0]
        return step.scale

    def _send_by_steps(
        self, x: Tensor, codec: Codec, step: Step, scale: Tensor | None, delivered: torch.dtype | None
    ) -> Tensor:
        """Sends ``x``, divided by the scalar ``scale``."""
        memory, sizes = self.memory, self.sizes
        if scale is not None:  # by multiplication, as a GradScaler does
            given, x = x, x.to(memory.dtype).mul_(scale.reciprocal())  # in place, or in a copy: 16 bits may underflow
            if x is not given:
                given.zero_()
        finite = reference.is_finite(x)
        a = memory.compensate(reference.zero_unless_(x, finite), finite, step.fade)
        index, value = self.selector.select(a, self.layout, codec.k, step.number)
        payloads, arrives = codec.encode(index, value, delivered, finite)
        flat, arrives = reference.flat_index(index, self.layout).view(-1), arrives.view(-1)
        if step.measure.error:
            rest = a.index_add(0, flat, arrives, alpha=-1)
            if self.lifts:
                a, rest = (multiply_(each, sizes, [1 / lift for lift in self.lifts]) for each in (a.clone(), rest))
            self.error = _energies([a, rest])
            if step.measure.per_layer and self.delivered is None:
                count = torch.stack([changed.count_nonzero() for changed in (a != rest).split(sizes)]).double()
                self.per_layer = torch.stack([_energies(a.split(sizes)), _energies(rest.split(sizes)), count])
        memory.keep(flat, arrives)
        return payloads

    def take_back(self) -> None:
        """Puts entries that were sent but did not arrive back into the memory, up to the receivers' rounding."""
        if self.sent is not None:
            payloads, codec = self.sent
            index, value = codec.read(payloads, self.memory.dtype)
            value = reference.zero_unless_(value, reference.is_finite(value))
            self.memory.keep(reference.flat_index(index, self.layout).view(-1), -value.view(-1))


def multiply_(x: Tensor, sizes: Sequence[int], factors: Sequence[float]) -> Tensor:
    """Multiplies each parameter in ``x`` ``[numel]``, which may end in padding, by its factor; returns ``x``."""
    parts = x[: sum(sizes)].split([*sizes])
    changed = [(part, factor) for part, factor in zip(parts, factors, strict=True) if factor != 1]
    if changed:
        torch._foreach_mul_(*zip(*changed, strict=True))
    return x


def norm(g: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Norm of a gradient without the loss scale that it contains, a scalar of ``dtype``."""
    length: Tensor = torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, dtype)).to(dtype)
    return length if scale is None else length / scale


def lengths(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The norm of each parameter's elements of ``x`` ``[numel]``: ``[parameters]``, floating."""
    wide = torch.promote_types(x.dtype, torch.float32)  # on a CPU, float64 sums of float32 take 20 times as long
    return torch.stack(torch._foreach_norm(x.split([*sizes]), 2, wide))


def _energies(vectors: Sequence[Tensor]) -> Tensor:
    """The squared norm of each vector: ``[vectors]`` float64."""
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in vectors]).square()


def aggregate(payloads: Tensor, codec: Codec, dtype: torch.dtype, scratch: Tensor, ordered: bool = False) -> Tensor:
    """Decodes payloads ``[W, P]`` uint8, one from each worker, all for the same shard, to their mean ``[shard_size]``.

    The mean has ``dtype``. It is built in ``scratch``, ``[numel]`` zeros, if dtype and size fit. If several ranks
    compute the same mean, pass ``ordered``, so that they get the same bits.
    """
    fits = scratch.dtype == dtype and scratch.numel() >= codec.universe
    total = scratch[: codec.universe] if fits else scratch.new_zeros(codec.universe, dtype=dtype)
    workers = payloads.shape[0]
    divisor = workers if workers.bit_count() == 1 else 1  # dividing by a power of two first gives the same bits
    deliver(payloads, codec, codec.layout, total, divisor=divisor, ordered=ordered)
    return total if divisor == workers else total.div_(workers)


def deliver(
    payloads: Tensor, codec: Codec, layout: Layout, out: Tensor,
    scale: Tensor | None = None, divisor: int = 1, ordered: bool = False,
) -> Tensor:  # fmt: skip
    """Writes the replies of all servers into the bucket, or into the parts of a node's ranks.

    Args:
        payloads: ``[parts shards, P]`` uint8: for each part, one row from every server. With one part and one shard,
            any number of rows, which are added up.
        codec: Codec of the payloads.
        layout: How a part is split among the servers.
        out: ``[numel]`` or ``[parts, numel]`` zeros, such as a bucket after it was sent.
        scale: Scalar by which the values are multiplied; None: 1.
        divisor: Power of two by which the values are divided first.
        ordered: Whether sums must have the same bits on every rank.

    Returns:
        Scalar bool: whether all delivered values are finite.
    """
    finite = ops.receive(payloads, layout, codec.form, divisor, out, scale, ordered, codec.bound)
    if finite is not None:
        return finite
    index, value = codec.read(payloads, torch.promote_types(out.dtype, torch.float32))
    value = value / divisor
    value = (value if scale is None else value * scale).to(out.dtype)
    parts, row = out.view(-1, layout.numel), torch.arange(len(payloads), device=out.device).unsqueeze(1)
    first = row // layout.shards % len(parts) * layout.numel
    flat = reference.flat_index(index, layout, row % layout.shards) + first
    if ops.on_cpu(out) or len(payloads) == len(parts) * layout.shards:  # scatter_add_ is sequential on a CPU
        flat, value = flat.view(1, -1), value.reshape(1, -1)
    for places, values in zip(flat, value, strict=True):  # one worker at a time fixes the order of additions
        out.view(-1).scatter_add_(0, places, values)
    return reference.is_finite(value)
