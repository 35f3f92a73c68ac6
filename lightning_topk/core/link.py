"""One lossy direction: the sender compresses a vector, and the receivers decode its payloads.

Sending is steps 1-4 of :mod:`lightning_topk.core.exchange`; receiving is :func:`aggregate` at a server (step 6) and
:func:`deliver` at a worker (step 9). Residuals have no scale: it is removed where a gradient enters the uplink, and put
back once, where the result is delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk.core import ops
from lightning_topk.core.layout import Layout
from lightning_topk.core.memory import Memory, Residual
from lightning_topk.core.ops import reference
from lightning_topk.core.select import Selector, TopK
from lightning_topk.core.wire import Codec


@dataclass(frozen=True)
class Measure:
    """Statistics to measure: the compression error, and that of each parameter, on the uplink only.

    Each costs several more passes over the bucket.
    """

    error: bool = False
    per_layer: bool = False


NOTHING = Measure()


@dataclass(frozen=True)
class Step:
    """What an exchange depends on, besides its plan and density."""

    number: int = 0  # exchanges of this gradient before this one; the same on every rank
    scale_in: Tensor | None = None  # scalar scale of the gradient that enters the uplink; None: 1
    scale_out: Tensor | None = None  # scalar scale of the gradient that is delivered, the same on every rank; None: 1
    measure: Measure = NOTHING


FIRST = Step()


@dataclass(frozen=True)
class LinkStats:
    """Statistics of one vector that a link sent; None where not measured."""

    error: Tensor | None = None  # [2] float64: ‖a‖² and ‖a - C(a)‖²
    per_layer: Tensor | None = None  # [3, parameters] float64: ‖a‖², ‖a - C(a)‖² and entries sent, by parameter


Sent = tuple[Tensor, LinkStats]
"""Payloads ``[shards, P]`` uint8, and their statistics."""


@dataclass(eq=False)
class Link:
    """One lossy direction, at its sending end: compensate, select, encode, keep.

    A server's link has the dtype of its receivers' output, ``delivered``: the residual includes their rounding error.
    With a scale they round products, by errors whose mean is 0, and the residual includes none.
    """

    layout: Layout
    selector: Selector
    memory: Memory
    delivered: torch.dtype | None = None
    sizes: tuple[int, ...] = ()  # elements of each parameter, for statistics per layer
    sent: tuple[Tensor, Codec] | None = field(default=None, init=False)  # payloads of an exchange in progress

    def send(self, x: Tensor, codec: Codec, step: Step = FIRST, scale: Tensor | None = None) -> Sent:
        """Compresses ``x`` ``[numel]``, floating, and keeps the rest in the memory; ``x`` becomes zero.

        The scalar ``scale`` of ``x`` is removed first. If the vector has a NaN or an infinity, every value in the
        payloads is NaN, so that every receiver notices, and the memory is unchanged.
        """
        memory, measure, sizes = self.memory, step.measure, self.sizes
        if scale is not None:  # by multiplication, as a GradScaler does
            given, x = x, x.to(memory.dtype).mul_(scale.reciprocal())  # in place, or in a copy: 16 bits may underflow
            if x is not given:
                given.zero_()
        finite = reference.is_finite(x)
        a = memory.compensate(reference.zero_unless_(x, finite), finite)
        index, value = self.selector.select(a, self.layout, codec.k, step.number)
        payloads, arrives = codec.encode(index, value, None if step.scale_out is not None else self.delivered, finite)
        flat, arrives = reference.flat_index(index, self.layout).view(-1), arrives.view(-1)
        error = per_layer = None
        if measure.error:
            rest = a.index_add(0, flat, arrives, alpha=-1)
            error = _energies([a, rest])
            if measure.per_layer and sizes:
                count = torch.stack([changed.count_nonzero() for changed in (a != rest).split(sizes)]).double()
                per_layer = torch.stack([_energies(a.split(sizes)), _energies(rest.split(sizes)), count])
        memory.keep(flat, arrives)
        self.sent = payloads, codec
        return payloads, LinkStats(error, per_layer)

    def take_back(self) -> None:
        """Returns to the memory what was sent and did not arrive, to the receivers' rounding."""
        if self.sent is not None:
            payloads, codec = self.sent
            index, value = codec.read(payloads, self.memory.dtype)
            value = reference.zero_unless_(value, reference.is_finite(value))
            self.memory.keep(reference.flat_index(index, self.layout).view(-1), -value.view(-1))


@dataclass(eq=False)
class FusedLink(Link):
    """A link that sends in one pass over memory, unless it measures or its function cannot send the payload."""

    memory: Residual
    function: ops.Sender = field(kw_only=True)

    @override
    def send(self, x: Tensor, codec: Codec, step: Step = FIRST, scale: Tensor | None = None) -> Sent:
        if step.measure == NOTHING:
            to = None if step.scale_out is not None else self.delivered
            payloads = self.function(self.memory.residual, x, self.layout, codec.format(to), to, scale)
            if payloads is not None:
                self.sent = payloads, codec
                return payloads, LinkStats()
        return super().send(x, codec, step, scale)


def fused(link: Link, exact: bool = False) -> Link:
    """A link that does the same in one pass over memory, or itself if :func:`.ops.sender` has no function for that.

    On a GPU it may send fewer than the k largest entries (:mod:`.core.ops.cuda`), unless they must be ``exact``.
    """
    memory, layout, delivered = link.memory, link.layout, link.delivered
    if type(link.selector) is TopK and type(memory) is Residual:
        function = ops.sender(memory.residual, layout, delivered, exact)
        if function is not None:
            return FusedLink(layout, link.selector, memory, delivered, link.sizes, function=function)
    return link


def norm(g: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Norm of a gradient without the loss scale that it contains, a scalar of ``dtype``."""
    length: Tensor = torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, dtype)).to(dtype)
    return length if scale is None else length / scale


def _energies(vectors: Sequence[Tensor]) -> Tensor:
    """The squared norm of each vector: ``[vectors]`` float64."""
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in vectors]).square()


def aggregate(payloads: Tensor, codec: Codec, dtype: torch.dtype, scratch: Tensor, ordered: bool = False) -> Tensor:
    """Decodes payloads ``[W, P]`` uint8, one of each worker, all for the same shard, to their mean ``[shard_size]``.

    The mean has ``dtype``. It is built in ``scratch``, ``[numel]`` zeros, if dtype and size fit. If several ranks
    compute it, it must be ``ordered``, so that they get the same bits.
    """
    fits = scratch.dtype == dtype and len(scratch) >= codec.universe
    total = scratch[: codec.universe] if fits else scratch.new_zeros(codec.universe, dtype=dtype)
    workers = len(payloads)
    divisor = workers if workers.bit_count() == 1 else 1  # dividing by a power of two first gives the same bits
    if ops.receive(payloads, Layout(codec.universe), codec.form, divisor, total, ordered=ordered) is None:
        codec.check(payloads)
        index, value = codec.read(payloads, dtype)
        value = value / divisor
        if ops.on_cpu(total):  # scatter_add_ is sequential there
            total.scatter_add_(0, index.reshape(-1), value.reshape(-1))
        else:
            # One worker at a time fixes the order of additions: within a worker only padding zeros share a position.
            for worker in range(workers):
                total.scatter_add_(0, index[worker], value[worker])
    return total if divisor == workers else total.div_(workers)


def deliver(payloads: Tensor, codec: Codec, layout: Layout, out: Tensor, scale: Tensor | None = None) -> Tensor:
    """Writes the replies of all servers into the bucket, or into the parts of a node's ranks.

    Args:
        payloads: ``[parts shards, P]`` uint8, for each part a row of every server.
        codec: Codec of the payloads.
        layout: How a part is split among the servers.
        out: ``[numel]`` or ``[parts, numel]`` zeros, such as a bucket that was sent.
        scale: Scalar by which the values are multiplied; None: 1.

    Returns:
        Scalar bool: whether all delivered values are finite.
    """
    finite = ops.receive(payloads, layout, codec.form, 1, out, scale)
    if finite is not None:
        return finite
    codec.check(payloads)
    index, value = codec.read(payloads, torch.promote_types(out.dtype, torch.float32))
    value = (value if scale is None else value * scale).to(out.dtype).reshape(-1)
    row = torch.arange(len(payloads), device=out.device).unsqueeze(1)
    flat = reference.flat_index(index, layout, row % layout.shards) + row // layout.shards * layout.numel
    out.view(-1).scatter_add_(0, flat.view(-1), value)
    return reference.is_finite(value)
