"""The path of a gradient: what happens to one bucket between DDP's hook and the optimizer.

Problem. A data-parallel step must turn W local gradients into one that all ranks share, over links too slow for dense
gradients. Method: top-k with error feedback in both directions (Zou 2022; Tang et al. 2019; Zheng et al. 2019)::

    bucket g            [d]     the worker's gradient, from DDP
    1 compensate        a = g + e            the worker's residual e [d] joins; g is empty now, and gives servers room
    2 select            the k/W entries of largest |a| in each of the W shards
    3 encode            values + positions -> uint8 payload [W, P]; its size follows from (d, k, wire)
    4 keep              e = a - what will be decoded: the wire's rounding is kept too
    5 uplink            all_to_all: shard s of every worker reaches server s
    6 aggregate         b = mean over the workers              [d/W]
    7 1-4 again         on the server's shard, with the server's residual E [d/W]
    8 downlink          all_gather: every worker gets every server's reply
    9 deliver           g <- the decoded replies; every rank holds the same bits

Steps 1-4 are :meth:`Link.send`; 5-9 are one of the exchanges :func:`sharded`, :func:`single_server`, :func:`allgather`.
:func:`hierarchical` does the same between nodes, with the mean of each node; :func:`dense` compresses nothing. An exchange does no I/O: it *yields* a request where bytes must leave and is sent the reply. Process groups
(:mod:`lightning_topk.runtime.collectives`) and the in-memory simulator (:mod:`lightning_topk.simulate`) drive the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.layout import Layout, Parts
from lightning_topk.core.memory import Memory, Residual
from lightning_topk.core.ops import reference
from lightning_topk.core.select import Selector, TopK
from lightning_topk.core.wire import Codec

Direction = Literal["uplink", "downlink"]
Among = Literal["all", "node", "peers"]
"""Who takes part: all ranks, those of this node, or those of the same local rank on every node."""

# ------------------------------------------------------------------------------------------------ requests


@dataclass(frozen=True)
class Request(ABC):
    """What an exchange asks for where bytes must leave.

    Attributes:
        payload: What this rank gives.
        direction: What it is for.
        among: Who takes part; ranks and W are theirs.
    """

    payload: Tensor
    direction: Direction
    among: Among = "all"

    @abstractmethod
    def sent_bytes(self, rank: int, world: int) -> int:
        """Bytes that leave ``rank`` for other ranks."""

    @abstractmethod
    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        """Bytes that leave a node of ``local`` consecutive ranks for other nodes, if all ranks of all nodes take part."""

    def node_bytes(self, rank: int, world: int, local: int) -> tuple[int, int]:
        """What the ranks of a node send together, to each other and to other nodes, in bytes.

        Args:
            rank: One of them, of all ranks.
            world: All ranks.
            local: Ranks of a node.
        """
        node = rank // local
        if self.among == "node":
            return sum(self.sent_bytes(each, local) for each in range(local)), 0
        if self.among == "peers":
            return 0, local * self.sent_bytes(node, world // local)
        leaving = self.leaving_bytes(node, world, local) if local < world else 0
        return sum(self.sent_bytes(node * local + each, world) for each in range(local)) - leaving, leaving


class AllToAll(Request):
    """Row s of ``payload`` ``[W, P]`` to rank s. Reply: ``[W, P]``, row r from rank r."""

    def sent_bytes(self, rank: int, world: int) -> int:
        """See :meth:`Request.sent_bytes`."""
        return self.payload[0].nbytes * (world - 1)

    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        """See :meth:`Request.leaving_bytes`."""
        return self.payload[0].nbytes * (world - local) * local


class AllGather(Request):
    """``payload`` ``[P]`` to every rank. Reply: ``[W, P]``, row r from rank r."""

    def sent_bytes(self, rank: int, world: int) -> int:
        """See :meth:`Request.sent_bytes`."""
        return self.payload.nbytes * (world - 1)

    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        """See :meth:`Request.leaving_bytes`. Around a ring, the last rank of a node sends to the next node."""
        return self.sent_bytes(0, world)


class AllReduce(Request):
    """The sum of ``payload`` ``[n]``, floating, over the ranks. Reply: ``[n]``, perhaps in the same memory."""

    def sent_bytes(self, rank: int, world: int) -> int:
        """See :meth:`Request.sent_bytes`. Around a ring, twice."""
        return 2 * (world - 1) * self.payload.nbytes // world

    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        """See :meth:`Request.leaving_bytes`."""
        return self.sent_bytes(0, world)


class Gather(Request):
    """``payload`` ``[P]`` to rank 0. Reply: ``[W, P]`` at rank 0, None elsewhere."""

    def sent_bytes(self, rank: int, world: int) -> int:
        """See :meth:`Request.sent_bytes`."""
        return self.payload.nbytes if rank else 0

    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        """See :meth:`Request.leaving_bytes`."""
        return self.payload.nbytes * local if node else 0


class Broadcast(Request):
    """``payload`` ``[P]`` from rank 0 to every rank; elsewhere an empty buffer of that size. Reply: ``[P]``."""

    def sent_bytes(self, rank: int, world: int) -> int:
        """See :meth:`Request.sent_bytes`. Rank 0 sends to each of the others itself."""
        return 0 if rank else self.payload.nbytes * (world - 1)

    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        """See :meth:`Request.leaving_bytes`."""
        return 0 if node else self.payload.nbytes * (world - local)


Exchange = Generator[Request, Tensor, None]

# ------------------------------------------------------------------------------------------------ one direction


class Link:
    """One lossy direction, at its sending end: compensate, select, encode, keep.

    Args:
        layout: How the vector is dealt to its receivers.
        selector: Which entries are sent.
        codec: How they are written.
        memory: What becomes of the rest.
        delivered: dtype into which receivers write what they decode, if its rounding is to be kept too.
    """

    def __init__(
        self, layout: Layout, selector: Selector, codec: Codec, memory: Memory, delivered: torch.dtype | None = None
    ) -> None:
        self.layout = layout
        self.delivered = delivered
        self.selector = selector
        self.codec = codec
        self.memory = memory
        self.measure = False
        self.energy: Tensor | None = None
        """``[2]`` float64, ‖a‖² and ‖a - C(a)‖² of the last ``send``; None unless ``measure`` was set."""
        self.selected: Tensor | None = None
        """Scalar int64: entries that the last ``send`` chose, at most ``codec.kept`` for each shard."""
        self.sizes: list[int] | None = None
        """Lengths of the P parts of the vector that ``send`` shall measure one by one; None for none."""
        self.parts: Tensor | None = None
        """``[3, P]`` float64: ‖a‖², ‖a - C(a)‖² and entries sent, of each part, of the last ``send``."""

    def send(self, x: Tensor) -> Tensor:
        """Compresses ``x`` and remembers what was left out.

        A vector with a NaN or an infinity is not sent at all: every value on the wire is NaN, so that every
        receiver learns of it, and the memory stays as it was.

        Args:
            x: ``[numel]``, floating. It is moved: zero afterwards.

        Returns:
            ``[shards, P]`` uint8.
        """
        a, finite, index, value, self.selected = self.choose(x)
        payloads, sent = self.codec.encode(index, value, self.delivered, finite)
        flat = reference.flat_index(index, self.layout).view(-1)
        self.energy = _energy(a, flat, sent.view(-1)) if self.measure else None
        self.parts = None if self.sizes is None else _parts(a, flat, sent.view(-1), self.sizes)
        self.memory.keep(flat, value.reshape(-1), sent.view(-1))
        return payloads

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compensates and selects.

        Args:
            x: ``[numel]``, floating; zero afterwards.

        Returns:
            The sum ``[numel]``; whether ``x`` is finite, a scalar bool, without which the sum is what was kept; and what
            :meth:`lightning_topk.core.select.Selector.select` returns of the sum.
        """
        finite = ops.is_finite(x)
        a = self.memory.compensate(reference.zero_unless_(x, finite), finite)
        return a, finite, *self.selector.select(a, self.layout, self.codec.kept)


class FusedLink(Link):
    """A link that compensates and selects in one pass over memory: exact top-k with a plain residual."""

    @staticmethod
    def suits(selector: Selector, memory: Memory, given: torch.dtype) -> bool:
        """Whether there is one pass for these, and for vectors of dtype ``given``."""
        return type(selector) is TopK and type(memory) is Residual and memory.residual.dtype == given

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See :meth:`Link.choose`."""
        assert isinstance(self.memory, Residual)
        if self.codec.kept == self.layout.shard_size:
            return super().choose(x)
        a, finite = self.memory.residual, ops.is_finite(x)
        index, value = ops.add_and_choose(a, x, finite, self.layout, self.codec.kept)
        return a, finite, index, value, value.count_nonzero()


def _energy(a: Tensor, flat: Tensor, sent: Tensor) -> Tensor:
    rest = a.index_add(0, flat, sent, alpha=-1)
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in (a, rest)]).square()


def _parts(a: Tensor, flat: Tensor, sent: Tensor, sizes: list[int]) -> Tensor:
    def energies(x: Tensor) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in x.split(sizes)]).square()

    ends = torch.tensor(sizes).cumsum(0).to(a.device)
    part = torch.bucketize(flat, ends, right=True).clamp_(max=len(sizes) - 1)
    count = torch.zeros(len(sizes), dtype=torch.float64, device=a.device).index_add_(0, part, (sent != 0).double())
    return torch.stack([energies(a), energies(a.index_add(0, flat, sent, alpha=-1)), count])


def mean(payloads: Tensor, codec: Codec, dtype: torch.dtype, room: Tensor) -> Tensor:
    """Decodes one payload of each worker, all for the same shard, and averages them.

    Args:
        payloads: ``[W, P]`` uint8, row w from worker w.
        codec: How they were written.
        dtype: dtype of the sum.
        room: ``[numel]``, zero: a bucket whose content was sent. The sum is made there if it is of that dtype and large enough.

    Returns:
        ``[shard_size]``, the mean over the W workers.
    """
    index, value = codec.decode(payloads, dtype)
    fits = room.dtype == dtype and len(room) >= codec.universe
    total = room[: codec.universe] if fits else room.new_zeros(codec.universe, dtype=dtype)
    workers = len(payloads)
    exact = workers.bit_count() == 1  # then dividing first gives the same bits, and costs nothing
    if exact:
        value = value / workers
    if total.device.type == "cpu":  # where one entry is added after the other
        total.scatter_add_(0, index.reshape(-1), value.reshape(-1))
    else:
        # Worker by worker: within one, no two values other than padding's zeros share a position, so the sum has one order.
        for worker in range(workers):
            total.scatter_add_(0, index[worker], value[worker])
    if exact:
        return total
    # Only what was written is divided; where several workers wrote, the same quotient is written as often.
    places = index.reshape(-1)
    return total.index_copy_(0, places, total.index_select(0, places).div_(workers))


def deliver(payloads: Tensor, codec: Codec, layout: Layout, out: Tensor) -> Tensor:
    """Writes the replies of all servers into the bucket.

    Args:
        payloads: ``[shards, P]`` uint8, row s from server s.
        codec: How they were written.
        layout: How the bucket was dealt to the servers.
        out: ``[numel]``, zero: a bucket whose content was sent.

    Returns:
        Scalar bool: whether all that was delivered is finite.
    """
    index, value = codec.decode(payloads, out.dtype)
    out.scatter_add_(0, reference.flat_index(index, layout).view(-1), value.view(-1))
    return ops.is_finite(value.view(-1))


# ------------------------------------------------------------------------------------------------ the exchanges


@dataclass
class Endpoint:
    """What one rank holds for one bucket.

    Ranks that exchange as a node hold a part of it each: then the part is what layout, links and memories are of, and rank
    and world are those of the ranks on all nodes that hold the same part.

    Args:
        topology: A key of :data:`EXCHANGES`.
        parts: How the bucket is dealt to the ranks of a node; one part if each rank exchanges for itself.
        layout: The shards of a part: one for each server.
        rank: This rank.
        world: Number of ranks, all of them workers.
        dtype: dtype of sums and residuals.
        uplink: The worker's link.
        downlink: The server's link; None where this rank serves nothing.
        reply: How servers write their replies; None where there are no servers.
        sizes: ``[parameters]`` int64 on the bucket's device, elements of each.
        clip_norm: The norm to which the worker's gradient is clipped before anything else; None does not clip.
        servers_keep: Whether there are servers that keep what they do not send, on this rank or another.
        exact: Where in the bucket parameters begin and end that are exchanged by all-reduce, in order.
        workers: Number of ranks, whatever the topology.
    """

    topology: str
    parts: Parts
    layout: Layout
    rank: int
    world: int
    dtype: torch.dtype
    uplink: Link
    downlink: Link | None
    reply: Codec | None
    sizes: Tensor
    clip_norm: float | None = None
    servers_keep: bool = True
    exact: Sequence[tuple[int, int]] = ()
    workers: int = 1
    finite: Tensor | None = None
    """Scalar bool: whether what the last exchange delivered is finite; the same on every rank."""

    def __post_init__(self) -> None:
        ends = accumulate(self.parts.sizes)
        starts = [end - size for end, size in zip(ends, self.parts.sizes, strict=True) if size]
        self.starts = torch.tensor(starts, device=self.sizes.device)
        """``[parameters that have elements]`` int64: where each begins."""

    def spread(self, flags: Tensor) -> Tensor:
        """What belongs to each parameter, ``[parameters]``, at each element of this rank's part ``[parts.numel]``."""
        if self.parts.count == 1:
            return flags.repeat_interleave(self.sizes, output_size=self.layout.numel)
        pieces = (self.sizes + self.parts.count - 1) // self.parts.count
        return flags.repeat_interleave(pieces, output_size=self.layout.numel)

    @property
    def shard(self) -> int:
        """The shard that this rank serves, where it serves one."""
        return self.rank if self.layout.shards > 1 else 0

    def rescale_(self, factor: float) -> None:
        """Multiplies what is kept, for residuals that follow the learning rate (Zheng et al. 2019)."""
        for link in self.links:
            link.memory.scale_(factor)

    @property
    def links(self) -> tuple[Link, ...]:
        """The links of this rank: the worker's, and the server's where it is one."""
        return (self.uplink,) if self.downlink is None else (self.uplink, self.downlink)


def sharded(end: Endpoint, g: Tensor) -> Exchange:
    """Every rank is a worker and the server of one shard (steps 1-9 above)."""
    assert end.reply is not None
    replies = yield from _served(end, g, "all")
    end.finite = deliver(replies, end.reply, end.layout, out=g)


def _served(end: Endpoint, g: Tensor, among: Among) -> Generator[Request, Tensor, Tensor]:
    """Steps 1-8: returns every server's reply, ``[shards, P]``."""
    assert end.downlink is not None
    payloads = end.uplink.send(g)
    received = yield AllToAll(payloads, "uplink", among)
    b = mean(received, end.uplink.codec, end.dtype, room=g)
    reply = end.downlink.send(b)
    return (yield AllGather(reply[0], "downlink", among))


def hierarchical(end: Endpoint, g: Tensor) -> Exchange:
    """The ranks of a node exchange as one worker, each a part of the gradient: dense inside, sparse between nodes."""
    assert end.reply is not None
    rows = reference.split_parts(g, end.parts)
    rows[:, :1].masked_fill_(~ops.is_finite(g), torch.nan)  # then no part of this node's gradient is sent
    received = yield AllToAll(rows.view(torch.uint8), "uplink", "node")
    part, *others = received.view(g.dtype).to(end.dtype)
    for other in others:
        part += other
    part /= end.parts.count
    replies = yield from _served(end, part, "peers")
    everyones = yield AllGather(replies.view(-1), "downlink", "node")
    rows.zero_()
    finite = [
        deliver(each.view(replies.shape), end.reply, end.layout, out=row)
        for row, each in zip(rows, everyones, strict=True)
    ]
    end.finite = torch.stack(finite).all()
    reference.join_parts(rows, end.parts, out=g)


def dense(end: Endpoint, g: Tensor) -> Exchange:
    """The mean itself, by all-reduce: nothing is compressed and nothing is kept. Sums are in the bucket's dtype, as in DDP."""
    if end.uplink.memory.tensors():
        _join_leftover(end.uplink.memory, g)
    if end.uplink.measure:
        energy = torch.linalg.vector_norm(g, dtype=torch.float64).square()
        end.uplink.energy, end.uplink.selected = torch.stack([energy, torch.zeros_like(energy)]), g.count_nonzero()
    total = yield AllReduce(g.div_(end.world), "uplink")
    end.finite = ops.is_finite(total)
    if total.data_ptr() != g.data_ptr():
        g.copy_(total)


def _join_leftover(memory: Memory, g: Tensor) -> None:
    """Adds what other settings have left to a gradient that is sent whole."""
    finite = ops.is_finite(g)
    poison = torch.zeros_like(g[:1]).masked_fill_(~finite, torch.nan)
    a = memory.compensate(reference.zero_unless_(g, finite), finite)
    g.copy_(a).add_(poison)
    nothing = g[:0]
    memory.keep(nothing.long(), nothing, nothing)


def single_server(end: Endpoint, g: Tensor) -> Exchange:
    """The parameter server of the thesis: rank 0 serves the whole bucket, and is a worker too."""
    assert end.reply is not None
    payload = end.uplink.send(g)
    received = yield Gather(payload[0], "uplink")
    if end.downlink is not None:
        b = mean(received, end.uplink.codec, end.dtype, room=g)
        reply = end.downlink.send(b)
    else:
        reply = torch.empty(1, end.reply.nbytes, dtype=torch.uint8, device=g.device)
    replies = yield Broadcast(reply[0], "downlink")
    end.finite = deliver(replies.unsqueeze(0), end.reply, end.layout, out=g)


def allgather(end: Endpoint, g: Tensor) -> Exchange:
    """TopK-SGD without a server: every worker receives every worker's selection."""
    payload = end.uplink.send(g)
    received = yield AllGather(payload[0], "uplink")
    b = mean(received, end.uplink.codec, end.dtype, room=g)
    end.finite = ops.is_finite(b)
    limit = torch.finfo(g.dtype).max
    g.copy_(b.clamp(-limit, limit))
    if g.dtype != end.dtype and end.uplink.memory.tensors():
        # Every worker keeps what rounding to the bucket's dtype has left: the mean of it is the whole of it.
        end.uplink.memory.add_(reference.zero_unless_(b.sub_(g), end.finite))


EXCHANGES: dict[str, Callable[[Endpoint, Tensor], Exchange]] = {
    "sharded": sharded,
    "single_server": single_server,
    "allgather": allgather,
    "hierarchical": hierarchical,
    "dense": dense,
}
"""The exchanges by the name of their topology."""


def exchange(
    end: Endpoint,
    g: Tensor,
    step: int = 0,
    scale: Tensor | None = None,
    used: Tensor | None = None,
) -> Exchange:
    """The exchange of one bucket: replaces ``g`` by the mean that all ranks agree on.

    If it is not finite on some rank, or does not stay finite, then on every rank the first element of each parameter is NaN:
    every optimizer, and the scaler before it, sees that.

    Args:
        end: This rank's links.
        g: ``[numel]``, this rank's gradient; overwritten.
        step: Exchanges of this gradient before this one; the same on every rank.
        scale: Scalar: the factor by which the loss, and so ``g``, was multiplied. Residuals are kept without it.
        used: ``[parameters]`` bool, which parameters this rank used, where some may go unused; else None.

    Yields:
        Requests; each expects its reply.
    """
    for link in end.links:
        link.selector.step = step
    if used is None:
        yield from _of_all(end, g, scale)
    else:
        yield from _of_used(end, g, scale, used)


def _of_all(end: Endpoint, g: Tensor, scale: Tensor | None) -> Exchange:
    """The exchange of the whole bucket."""
    if scale is not None:
        g.div_(scale)
    if end.clip_norm is not None:
        g.mul_((end.clip_norm / torch.linalg.vector_norm(g, dtype=torch.float64)).clamp(max=1))
    if end.exact:
        yield from _of_exact(end, g)
    else:
        yield from EXCHANGES[end.topology](end, g)
    assert end.finite is not None
    if scale is not None:
        end.finite = end.finite & reference.is_finite(g.mul_(scale))
    poison = torch.zeros_like(g[:1]).masked_fill_(~end.finite, torch.nan)
    g.index_add_(0, end.starts, poison.expand(len(end.starts)))


def _of_exact(end: Endpoint, g: Tensor) -> Exchange:
    """The exchange of a bucket of which some parameters are not compressed: these go first, and leave zeros behind."""
    places = [g[begin:stop] for begin, stop in end.exact]
    mine = torch.cat(places).div_(end.workers)
    for place in places:
        place.zero_()
    total = yield AllReduce(mine, "uplink")
    yield from EXCHANGES[end.topology](end, g)
    assert end.finite is not None
    end.finite = end.finite & ops.is_finite(total)
    for place, part in zip(places, total.split([len(place) for place in places]), strict=True):
        place += part  # where other settings had kept something back, that was delivered


def _to(x: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device; a GPU's stream does not wait for the host, nor the host for it."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def _of_used(end: Endpoint, g: Tensor, scale: Tensor | None, used: Tensor) -> Exchange:
    """The exchange of the parameters that some rank used.

    DDP leaves the gradient of a parameter that no rank used as it is and discards what the hook delivers for it. What is
    sent for it would be lost. So the ranks first tell each other which parameters they used, one bit each; the bucket's
    content and the residuals of the others are set aside, on workers and servers.
    """
    votes = yield AllGather(reference.pack_bits(_to(used, g.device).unsqueeze(0))[0], "uplink")
    unused = ~reference.unpack_bits(votes, len(used)).bool().any(dim=0)
    absent = unused.repeat_interleave(end.sizes, output_size=len(g))
    aside = g.masked_fill(~absent, 0)
    g.masked_fill_(absent, 0)
    kept = end.spread(unused)
    end.uplink.memory.hold(kept)
    if end.downlink is not None:
        end.downlink.memory.hold(reference.shard_rows(kept, end.layout)[end.shard])
    yield from _of_all(end, g, scale)
    for link in end.links:
        link.memory.release()
    g.copy_(torch.where(absent, aside, g))
