"""One lossy direction: the sender compresses a vector, and the receivers decode its payloads.

Sending is compensate, select, encode, keep: steps 1-4 of :mod:`lightning_topk.core.exchange`. Receiving is
:func:`aggregate` at a server (step 6) and :func:`deliver` at a worker (step 9). The uplink and the downlink are two
instances of one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Optional statistics of an exchange. Each costs several more passes over the bucket.

    Attributes:
        error: Measure the compression error.
        per_layer: Measure it for each parameter too; on the uplink only.
    """

    error: bool = False
    per_layer: bool = False


NOTHING = Measure()


@dataclass(frozen=True)
class Step:
    """What an exchange depends on, besides its plan and density.

    Attributes:
        number: Number of exchanges of this gradient before this one; the same on every rank.
        scale: Scalar loss scale that gradients contain before and after the exchange. Residuals and payloads do not.
        measure: What to measure.
    """

    number: int = 0
    scale: Tensor | None = None
    measure: Measure = NOTHING


FIRST = Step()


@dataclass(frozen=True)
class LinkStats:
    """Statistics of one vector that a link sent.

    Attributes:
        selected: Scalar int64: number of nonzero entries sent. None in one pass over memory, and for all-reduce unless
            it is measured.
        error: ``[2]`` float64: ‖a‖² and ‖a - C(a)‖². None unless measured.
        per_layer: ``[3, parameters]`` float64: ‖a‖², ‖a - C(a)‖² and entries sent, by parameter. None unless
            measured.
    """

    selected: Tensor | None = None
    error: Tensor | None = None
    per_layer: Tensor | None = None


class Link:
    """One lossy direction, at its sending end: compensate, select, encode, keep.

    Top-k with a residual runs in one pass over memory if :func:`lightning_topk.core.ops.sender` has a fast version for
    it and nothing is measured. On a GPU that pass sends the entries above a threshold, which may be fewer than k
    (:mod:`lightning_topk.core.ops.cuda`).

    Args:
        layout: How the vector is split among its receivers.
        selector: Selects the entries to send.
        memory: Keeps the rest.
        delivered: Of a server's link, the dtype of the receivers' output: the residual includes its rounding error.
        sizes: Number of elements of each parameter, for statistics per layer; empty if unknown.
        exact: Whether to send exactly the k largest entries on a GPU too.
    """

    def __init__(
        self,
        layout: Layout,
        selector: Selector,
        memory: Memory,
        delivered: torch.dtype | None = None,
        sizes: tuple[int, ...] = (),
        exact: bool = False,
    ) -> None:
        self.layout, self.selector, self.memory, self.delivered = layout, selector, memory, delivered
        self.sizes = sizes
        self._send: ops.Sender | None = None
        if type(selector) is TopK and type(memory) is Residual:
            self._send = ops.sender(memory.residual, layout, delivered, exact)
        self._ends: Tensor | None = None  # of the parameters, on the vector's device: copied there once

    def send(self, x: Tensor, codec: Codec, step: Step = FIRST) -> tuple[Tensor, LinkStats]:
        """Compresses ``x`` and keeps the rest in the memory.

        If the vector has a NaN or an infinity, every value in the payloads is NaN, so that every receiver notices, and
        the memory is unchanged.

        Args:
            x: ``[numel]``, floating; zero afterwards. It contains the step's loss scale, unless ``delivered`` is set.
            codec: Codec of the payloads; sets their number of entries.
            step: Number and loss scale of the step, and what to measure.

        Returns:
            The payloads ``[shards, P]`` uint8, and their statistics.
        """
        memory, measure = self.memory, step.measure
        scale = step.scale if self.delivered is None else None  # of the input
        # A server's receivers multiply by the scale, and round the product if their dtype is narrower. If it is not
        # rounded, but overflows, they notice.
        rounds = self.delivered is not None and self.delivered.itemsize < memory.dtype.itemsize
        rescale = step.scale if rounds else None
        if scale is not None and ops.on_cpu(x):
            x, scale = _unscaled(x, memory.dtype, scale), None
        form = codec.format(self.delivered)
        if self._send is not None and form.compiled and measure == NOTHING:
            e = memory.residual  # type: ignore[attr-defined]
            sent = self._send(e, x, self.layout, form, self.delivered, scale, rescale)
            if sent is not None:
                return sent, LinkStats()
        if scale is not None:
            x = _unscaled(x, memory.dtype, scale)
        finite = reference.is_finite(x)
        a = memory.compensate(reference.zero_unless_(x, finite), finite)
        index, value, selected = self.selector.select(a, self.layout, codec.k, step.number)
        if rescale is not None and memory.tensors():
            # The residual keeps the excess. Without a residual, the scaler sees an infinity and backs off.
            limit = codec.largest(self.delivered) * (1 - 2**-7) * rescale.reciprocal()  # a wire rounds up by less
            value = value.clamp(-limit, limit)
        payloads, arrives = codec.encode(index, value, None if rescale is not None else self.delivered, finite)
        if rescale is not None:
            arrives = (arrives * rescale).to(self.delivered).to(arrives.dtype) * rescale.reciprocal()
        flat, arrives = reference.flat_index(index, self.layout).view(-1), arrives.view(-1)
        error = per_layer = None
        if measure.error:
            rest, sizes = a.index_add(0, flat, arrives, alpha=-1), self.sizes
            error = _energies([a, rest])
            if measure.per_layer and sizes:
                count = self._sent_per_layer(flat, arrives)
                per_layer = torch.stack([_energies(a.split(sizes)), _energies(rest.split(sizes)), count])
        memory.keep(flat, arrives)
        return payloads, LinkStats(selected, error, per_layer)

    def _sent_per_layer(self, flat: Tensor, sent: Tensor) -> Tensor:
        """Number of nonzero entries sent of each parameter: ``[parameters]`` float64."""
        if self._ends is None:
            self._ends = torch.tensor(self.sizes).cumsum(0).to(flat.device)
        count = torch.zeros(len(self.sizes), dtype=torch.float64, device=flat.device)
        layer = torch.bucketize(flat, self._ends, right=True).clamp_(max=len(self.sizes) - 1)
        return count.index_add_(0, layer, (sent != 0).double())


def _unscaled(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Removes a loss scale in ``dtype``, by multiplication as a GradScaler does.

    In place, or in a copy, which zeroes ``x``, since 16 bits may underflow.
    """
    if x.dtype == dtype:
        return x.mul_(scale.reciprocal())
    wide = x.to(dtype).mul_(scale.reciprocal())
    x.zero_()
    return wide


def norm(g: Tensor, scale: Tensor | None) -> Tensor:
    """Norm of a gradient without the loss scale that it contains, a scalar float64."""
    length: Tensor = torch.linalg.vector_norm(g, dtype=torch.float64)
    return length if scale is None else length / scale


def _energies(vectors: Sequence[Tensor]) -> Tensor:
    """The squared norm of each vector: ``[vectors]`` float64."""
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in vectors]).square()


def aggregate(payloads: Tensor, codec: Codec, dtype: torch.dtype, scratch: Tensor) -> Tensor:
    """Decodes one payload of each worker, all for the same shard, and averages them.

    Args:
        payloads: ``[W, P]`` uint8, row w from worker w.
        codec: Codec of the payloads.
        dtype: dtype of the sum.
        scratch: ``[numel]`` zeros; the mean is built in it if dtype and size fit.

    Returns:
        ``[shard_size]``, the mean over the W workers.
    """
    fits = scratch.dtype == dtype and len(scratch) >= codec.universe
    total = scratch[: codec.universe] if fits else scratch.new_zeros(codec.universe, dtype=dtype)
    workers = len(payloads)
    exact = workers.bit_count() == 1  # a power of two: dividing first gives the same bits at no cost
    if ops.receive(payloads, Layout(codec.universe), codec.format(), workers if exact else 1, total) is not None:
        return total if exact else total.div_(workers)
    codec.check(payloads)
    index, value = codec.read(payloads, dtype)
    if exact:
        value = value / workers
    if total.device.type == "cpu":  # scatter_add_ is sequential there
        total.scatter_add_(0, index.reshape(-1), value.reshape(-1))
    else:
        # One worker at a time fixes the order of additions: within a worker only padding zeros share a position.
        for worker in range(workers):
            total.scatter_add_(0, index[worker], value[worker])
    if exact:
        return total
    # Divides the written positions only; a position that several workers wrote gets the same quotient each time.
    places = index.reshape(-1)
    return total.index_copy_(0, places, total.index_select(0, places).div_(workers))


def deliver(payloads: Tensor, codec: Codec, layout: Layout, out: Tensor, scale: Tensor | None = None) -> Tensor:
    """Writes the replies of all servers into the bucket, or into the parts of a node's ranks.

    Args:
        payloads: ``[parts shards, P]`` uint8, for each part a row of every server.
        codec: Codec of the payloads.
        layout: How a part is split among the servers.
        out: ``[numel]`` or ``[parts, numel]`` zeros, such as a bucket that was sent.
        scale: Scalar loss scale that ``out`` is to contain.

    Returns:
        Scalar bool: whether all delivered values are finite.
    """
    finite = ops.receive(payloads, layout, codec.format(), 1, out, scale)
    if finite is not None:
        return finite
    codec.check(payloads)
    index, value = codec.read(payloads, torch.promote_types(out.dtype, torch.float32))
    value = (value if scale is None else value * scale).to(out.dtype).reshape(-1)
    row = torch.arange(len(payloads), device=out.device).unsqueeze(1)
    flat = reference.flat_index(index, layout, row % layout.shards) + row // layout.shards * layout.numel
    out.view(-1).scatter_add_(0, flat.view(-1), value)
    return reference.is_finite(value)
