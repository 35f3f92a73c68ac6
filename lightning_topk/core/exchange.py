"""The path of a gradient: what happens to one bucket between DDP's hook and the optimizer.

Problem. A data-parallel step must turn W local gradients into one that all ranks share, over links too slow for dense
gradients. Method: top-k with error feedback in both directions (Zou 2022; Tang et al. 2019; Zheng et al. 2019)::

    bucket g            [d]     the worker's gradient, from DDP
    1 compensate        a = g + e            the worker's residual e [d] is added; g is zeroed
    2 select            the k/W entries of largest |a| in each of the W shards
    3 encode            values + positions -> uint8 payload [W, P]; its size follows from (d, k, wire)
    4 keep              e = a - decoded payload: the residual includes the wire's rounding error
    5 uplink            all_to_all: shard s of every worker reaches server s
    6 aggregate         b = mean over the workers              [d/W]
    7 repeat 1-4        on the server's shard, with the server's residual E [d/W]
    8 downlink          all_gather: every worker gets every server's reply
    9 deliver           g <- the decoded replies; every rank holds the same bits

Start reading at :func:`exchange`. Steps 1-4 are :meth:`lightning_topk.core.link.Link.send`; a topology does steps 5-9.
:class:`Sharded` is the topology above; the others follow it. Each topology also predicts its requests by arithmetic.
An exchange does no I/O: it *yields* a request where bytes must leave and receives the reply. Process groups
(:mod:`lightning_topk.runtime.collectives`) and the in-memory simulator (:mod:`lightning_topk.simulate`) drive the same
code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk.core import ops
from lightning_topk.core.endpoint import BucketSpec, Codecs, Endpoint, Exchange, Outcome, TakenBack, Topology
from lightning_topk.core.link import NOTHING, LinkStats, Measure, aggregate, deliver
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Begin,
    Begun,
    Broadcast,
    Gather,
    Request,
    placeholder,
)
from lightning_topk.core.undo import take_back, take_back_from_all

# ------------------------------------------------------------------------------------------------ the exchange


def exchange(
    end: Endpoint,
    g: Tensor,
    codecs: Codecs,
    step: int = 0,
    scale: Tensor | None = None,
    used: Tensor | None = None,
    measure: Measure = NOTHING,
) -> Exchange:
    """Exchanges one bucket: replaces ``g`` by the mean that all ranks agree on.

    If the gradient is not finite on some rank, or overflows in the exchange, every rank sets the first element of each
    exchanged parameter to NaN, so that every optimizer and GradScaler notices.

    Args:
        end: This rank's links.
        g: ``[numel]``, this rank's gradient; overwritten.
        codecs: Codecs of this step.
        step: Number of exchanges of this gradient before this one; the same on every rank.
        scale: Scalar loss scale that ``g`` contains. Residuals are stored without it.
        used: ``[parameters]`` bool, the parameters that this rank used; None if no parameter may be unused.
        measure: What to measure.

    Yields:
        Requests; each expects its reply.

    Returns:
        The outcome.
    """
    for link in end.links:
        link.selector.step = step
    # If every entry is sent in full precision, undoing a skipped step restores the residual before it and discards its
    # gradient, as DDP does.
    lossless = all(each.k == each.universe and each.wire.name == "fp32" for each in (codecs.uplink, codecs.reply))
    left = end.folded().get("residual") if lossless else None
    if used is None:
        outcome = yield from _exchange_all(end, g, codecs, scale, measure)
    else:
        outcome = yield from _exchange_used(end, g, codecs, scale, used, measure)
    if left is not None:
        undo = partial(TakenBack, left.sub_(end.folded()["residual"]), torch.zeros_like(outcome.finite))
        outcome = replace(outcome, undo=undo)
    return outcome


def _exchange_all(end: Endpoint, g: Tensor, codecs: Codecs, scale: Tensor | None, measure: Measure) -> Exchange:
    """Exchanges the whole bucket."""
    if scale is not None and g.dtype != end.dtype:  # unscaled 16-bit gradients may underflow
        # A copy: the scaler changes its scale in place before a skipped step is undone.
        codecs, scale = replace(codecs, reply=replace(codecs.reply, scale=scale.clone())), None
    if scale is not None:
        g.div_(scale)
    if end.clip_norm is not None:
        g.mul_((end.clip_norm / _norm(g, codecs)).clamp(max=1))
    path = _reduce_uncompressed if end.uncompressed else end.topology.exchange
    outcome = yield from path(end, g, codecs, measure)
    if scale is not None:
        outcome = replace(outcome, finite=outcome.finite & reference.is_finite(g.mul_(scale)))
    poison = torch.zeros_like(g[:1]).masked_fill_(~outcome.finite, torch.nan)
    g.index_add_(0, end.starts, poison.expand(len(end.starts)))
    return outcome


def _norm(g: Tensor, codecs: Codecs) -> Tensor:
    """Norm of the unscaled gradient, a scalar float64."""
    norm: Tensor = torch.linalg.vector_norm(g, dtype=torch.float64)
    scale = codecs.reply.scale
    return norm if scale is None else norm / scale


def _unscaled(g: Tensor, end: Endpoint, codecs: Codecs) -> Tensor:
    """Returns the vector to send: ``g`` ``[numel]`` or, if it keeps its scale, an unscaled copy of dtype ``end.dtype``.

    Either way ``g`` is zero once the vector is sent.
    """
    if codecs.reply.scale is None:
        return g
    x = g.to(end.dtype).div_(codecs.reply.scale)
    g.zero_()
    return x


def _reduce_uncompressed(end: Endpoint, g: Tensor, codecs: Codecs, measure: Measure) -> Exchange:
    """Exchanges a bucket with uncompressed parameters: all-reduces those first, and leaves zeros in their place."""
    places = [g[begin:stop] for begin, stop in end.uncompressed]
    mine = torch.cat(places).div_(end.workers)
    for place in places:
        place.zero_()
    total = yield AllReduce(mine, "uplink")
    outcome = yield from end.topology.exchange(end, g, codecs, measure)
    for place, summed in zip(places, total.split([len(place) for place in places]), strict=True):
        place += summed  # the exchange may have delivered a residual of earlier settings here
    return replace(outcome, finite=outcome.finite & ops.is_finite(total))


def _exchange_used(
    end: Endpoint, g: Tensor, codecs: Codecs, scale: Tensor | None, used: Tensor, measure: Measure
) -> Exchange:
    """Exchanges the parameters that at least one rank used.

    If no rank used a parameter, DDP keeps its old gradient and discards the hook's result: anything sent for it would
    be lost. The ranks therefore first share one bit per parameter. Workers and servers set aside the gradients and
    residuals of unused parameters.
    """
    votes = yield AllGather(reference.pack_bits(_to(used, g.device).unsqueeze(0))[0], "uplink")
    unused = ~reference.unpack_bits(votes, len(used)).bool().any(dim=0)
    absent = unused.repeat_interleave(end.sizes, output_size=len(g))
    aside = g.masked_fill(~absent, 0)
    g.masked_fill_(absent, 0)
    kept = end.spread(unused)
    end.uplink.memory.hold(kept)
    for link, served in zip(end.downlinks, end.served(kept), strict=False):
        link.memory.hold(served)
    outcome = yield from _exchange_all(end, g, codecs, scale, measure)
    for link in end.links:
        link.memory.release()
    g.copy_(torch.where(absent, aside, g))
    undo = outcome.undo

    def undo_used() -> TakenBack:
        assert undo is not None
        back = undo()
        return back._replace(absorbed=back.absorbed & ~kept)

    return outcome if undo is None else replace(outcome, undo=undo_used)


def _to(x: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device, asynchronously to a GPU: host and stream do not wait for each other."""
    return x if x.device == device else x.pin_memory().to(device, non_blocking=True)


# ------------------------------------------------------------------------------------------------ the topologies


class Sharded(Topology):
    """Every rank is a worker and the server of one shard (steps 1-9 above)."""

    name = "sharded"

    @override
    def shards(self, world: int) -> int:
        return world

    @override
    def exchange(self, end: Endpoint, g: Tensor, codecs: Codecs, measure: Measure) -> Exchange:
        layouts = end.layout.of_each_piece
        finite: list[Tensor] = []

        def take(piece: int, replies: Tensor) -> None:
            finite.append(deliver(replies, codecs.reply, layouts[piece], out=g))

        outcome = yield from _serve(end, _unscaled(g, end, codecs), codecs, measure, "all", g.dtype, take)
        return outcome(finite[0] if len(finite) == 1 else torch.stack(finite).all())

    @override
    def requests(self, shape: BucketSpec, codecs: Codecs, itemsize: int) -> list[Request]:
        return _served_requests(shape, codecs, "all")


def _serve(
    end: Endpoint,
    g: Tensor,
    codecs: Codecs,
    measure: Measure,
    among: Among,
    dtype: torch.dtype,
    take: Callable[[int, Tensor], None],
) -> Generator[Request | Begin | Begun, Any, Callable[[Tensor], Outcome]]:
    """Steps 1-8 of each piece: compresses one piece while another is in flight.

    Args:
        end: This rank's links.
        g: ``[numel]``; each piece is zeroed when it is sent, and ``take`` may write to it afterwards.
        codecs: Codecs of the payloads.
        measure: What to measure.
        among: Ranks that take part.
        dtype: dtype of the bucket.
        take: Called with each piece and the servers' replies ``[shards, P]``.

    Returns:
        A function that returns the outcome, given whether all delivered values are finite.
    """
    pieces = end.layout.pieces
    finite = ops.is_finite(g) if pieces > 1 else None  # before a reply is written to g
    uplinks: list[Begun] = []
    downlinks: list[Begun] = []
    sent: list[Tensor] = []
    received: list[Tensor] = []
    stats: tuple[list[LinkStats], list[LinkStats]] = [], []
    for step, piece in _pipeline(pieces):
        if step == "send":
            payloads, up = end.uplinks[piece].send(g, codecs.uplink, measure, finite)
            uplinks.append((yield Begin(AllToAll(payloads, "uplink", among))))
            sent.append(payloads)
            stats[0].append(up)
        elif step == "serve":
            b = aggregate((yield uplinks[piece]), codecs.uplink, end.dtype, room=g if pieces == 1 else g[:0])
            reply, down = end.downlinks[piece].send(b, codecs.reply, measure)
            downlinks.append((yield Begin(AllGather(reply[0], "downlink", among))))
            stats[1].append(down)
        else:
            received.append((yield downlinks[piece]))
            take(piece, received[piece])
    undo = partial(take_back, end, codecs, end.uplink.selector.step, sent, received, dtype)
    up, down = map(LinkStats.total, stats)
    return partial(Outcome, uplink=up, downlink=down, undo=undo)


def _pipeline(pieces: int) -> Iterator[tuple[Literal["send", "serve", "take"], int]]:
    """Yields the steps of all pieces, in the same order on all ranks."""
    steps: tuple[Literal["send", "serve", "take"], ...] = ("send", "serve", "take")
    for turn in range(pieces + 2):
        for late, step in enumerate(steps):
            if 0 <= turn - late < pieces:
                yield step, turn - late


def _served_requests(shape: BucketSpec, codecs: Codecs, among: Among) -> list[Request]:
    """Predicts the requests of :func:`_serve`."""
    uplink = AllToAll(placeholder(shape.world, codecs.uplink.nbytes), "uplink", among)
    downlink = AllGather(placeholder(codecs.reply.nbytes), "downlink", among)
    steps = [step for step, _ in _pipeline(shape.layout.pieces) if step != "take"]
    return [uplink if step == "send" else downlink for step in steps]


class Hierarchical(Topology):
    """Dense inside nodes, sparse between them: each rank exchanges one part of its node's mean gradient."""

    name = "hierarchical"
    by_node = True

    @override
    def on(self, world: int, local: int) -> str:
        return self.name if 1 < local < world else Dense.name if local == world > 1 else Sharded.name

    @override
    def shards(self, world: int) -> int:
        return world

    @override
    def exchange(self, end: Endpoint, g: Tensor, codecs: Codecs, measure: Measure) -> Exchange:
        rows = reference.split_parts(g, end.parts)
        rows[:, :1].masked_fill_(~ops.is_finite(g), torch.nan)  # so that no part of this node's gradient is sent
        received = yield AllToAll(rows.view(torch.uint8), "uplink", "node")
        part, *others = received.view(g.dtype).to(end.dtype)
        for other in others:
            part += other
        part /= end.parts.count
        if codecs.reply.scale is not None:
            part /= codecs.reply.scale
        replies: list[Tensor] = []
        outcome = yield from _serve(end, part, codecs, measure, "peers", g.dtype, lambda _, each: replies.append(each))
        everyones = yield AllGather(torch.stack(replies).view(-1), "downlink", "node")
        rows.zero_()
        finite = [
            deliver(each, codecs.reply, layout, out=row)
            for row, pieces in zip(rows, everyones, strict=True)
            for each, layout in zip(pieces.view(-1, *replies[0].shape), end.layout.of_each_piece, strict=True)
        ]
        reference.join_parts(rows, end.parts, out=g)
        return outcome(torch.stack(finite).all())

    @override
    def requests(self, shape: BucketSpec, codecs: Codecs, itemsize: int) -> list[Request]:
        inside = placeholder(shape.parts.count, shape.parts.numel * itemsize)
        replies = placeholder(shape.layout.pieces * shape.world * codecs.reply.nbytes)
        between = _served_requests(shape, codecs, "peers")
        return [AllToAll(inside, "uplink", "node"), *between, AllGather(replies, "downlink", "node")]


class SingleServer(Topology):
    """The parameter server of the thesis: rank 0 serves the whole bucket, and is a worker too."""

    name = "single_server"

    @override
    def exchange(self, end: Endpoint, g: Tensor, codecs: Codecs, measure: Measure) -> Exchange:
        x = _unscaled(g, end, codecs)
        payload, up = end.uplink.send(x, codecs.uplink, measure)
        received = yield Gather(payload[0], "uplink")
        down = None
        if end.downlink is not None:
            b = aggregate(received, codecs.uplink, end.dtype, room=x)
            reply, down = end.downlink.send(b, codecs.reply, measure)
        else:
            reply = torch.empty(1, codecs.reply.nbytes, dtype=torch.uint8, device=g.device)
        replies = (yield Broadcast(reply[0], "downlink")).unsqueeze(0)
        undo = partial(take_back, end, codecs, end.uplink.selector.step, [payload], [replies], g.dtype)
        return Outcome(deliver(replies, codecs.reply, end.layout, out=g), up, down, undo)

    @override
    def requests(self, shape: BucketSpec, codecs: Codecs, itemsize: int) -> list[Request]:
        uplink = Gather(placeholder(codecs.uplink.nbytes), "uplink")
        return [uplink, Broadcast(placeholder(codecs.reply.nbytes), "downlink")]


class AllGathered(Topology):
    """TopK-SGD without a server: every worker receives every worker's selection."""

    name = "allgather"
    has_servers = False

    @override
    def exchange(self, end: Endpoint, g: Tensor, codecs: Codecs, measure: Measure) -> Exchange:
        x, scale = _unscaled(g, end, codecs), codecs.reply.scale
        payload, up = end.uplink.send(x, codecs.uplink, measure)
        received = yield AllGather(payload[0], "uplink")
        b = aggregate(received, codecs.uplink, end.dtype, room=x)
        finite = ops.is_finite(b)
        limit = torch.finfo(g.dtype).max
        g.copy_((b if scale is None else b * scale).clamp(-limit, limit))
        if g.dtype != end.dtype and end.uplink.memory.tensors():
            # Every worker keeps the same error of rounding to the bucket's dtype, so their mean is that error.
            arrived = g if scale is None else g.to(b.dtype) / scale
            end.uplink.memory.tensors()["residual"].add_(reference.zero_unless_(b.sub_(arrived), finite))
        undo = partial(take_back_from_all, end, codecs, end.uplink.selector.step, payload, received, g.dtype)
        return Outcome(finite, up, undo=undo)

    @override
    def requests(self, shape: BucketSpec, codecs: Codecs, itemsize: int) -> list[Request]:
        return [AllGather(placeholder(codecs.uplink.nbytes), "uplink")]


class Dense(Topology):
    """All-reduces the mean in the bucket's dtype, as DDP does: no compression and no residual."""

    name = "dense"
    compresses = False
    has_servers = False

    @override
    def exchange(self, end: Endpoint, g: Tensor, codecs: Codecs, measure: Measure) -> Exchange:
        if end.uplink.memory.tensors():
            _join_leftover(end, g, codecs)
        stats = LinkStats()
        if measure.error:
            energy = _norm(g, codecs).square()
            stats = LinkStats(g.count_nonzero(), torch.stack([energy, torch.zeros_like(energy)]))
        total = yield AllReduce(g.div_(end.world), "uplink")
        finite = ops.is_finite(total)
        if total.data_ptr() != g.data_ptr():
            g.copy_(total)
        return Outcome(finite, stats)

    @override
    def requests(self, shape: BucketSpec, codecs: Codecs, itemsize: int) -> list[Request]:
        return [AllReduce(placeholder(shape.layout.numel * itemsize), "uplink")]


def _join_leftover(end: Endpoint, g: Tensor, codecs: Codecs) -> None:
    """Adds the residual of earlier settings to a gradient that is sent dense."""
    memory, scale, finite = end.uplink.memory, codecs.reply.scale, ops.is_finite(g)
    poison = torch.zeros_like(g[:1]).masked_fill_(~finite, torch.nan)
    a = memory.compensate(_unscaled(reference.zero_unless_(g, finite), end, codecs), finite)
    g.copy_(a if scale is None else a * scale).add_(poison)
    nothing = g[:0]
    memory.keep(nothing.long(), nothing)


TopologyName = Literal["sharded", "hierarchical", "single_server", "allgather", "dense"]
TOPOLOGIES: dict[str, Topology] = {
    topology.name: topology for topology in (Sharded(), SingleServer(), AllGathered(), Hierarchical(), Dense())
}
"""Topologies by name."""
