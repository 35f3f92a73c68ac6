"""The plan of a bucket's exchange, one rank's links for it, and the outcome."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.layout import PIECE, Layout, NodeShards, k_of
from lightning_topk.core.link import Link, Step, multiply_
from lightning_topk.core.memory import Memory, MomentumResidual, Residual
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import AllGather, AllReduce, Request, Volume, placeholder, request_volume
from lightning_topk.core.select import RandK, Selector, TopK
from lightning_topk.core.wire import WIRES, Codec, Wire
from lightning_topk.schedule import Varying, ratio_at


class Codecs(NamedTuple):
    """Codecs of one exchange, at the density of the current step: the workers', and the servers' if there are any."""

    uplink: Codec
    reply: Codec


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """How one bucket is exchanged: between whom, how it is split, and what is sent.

    Created by :func:`lightning_topk.bucket.plan_bucket`. In a hierarchical exchange each rank of a node exchanges one
    part of the bucket; ``layout`` then describes this part, and ``world`` counts the ranks, one per node, that exchange
    it.
    """

    topology: Topology
    parts: NodeShards  # how the bucket is split among the ranks of a node; one part if each rank exchanges all of it
    layout: Layout  # how a part is split among the servers
    world: int  # ranks that exchange a part; each of them is a worker
    workers: int  # all ranks
    local: int  # ranks per node
    itemsize: int  # bytes per gradient element
    k: int | Varying  # entries that a worker sends to each server; or their ratio, as a function of the step
    server_k: int | Varying | None  # entries that each server sends, likewise; None for every nonzero entry
    wire: Wire
    selector: Selector  # each endpoint copies it
    feedback: Collection[str] = ()  # the sides that keep a residual: "worker", "server"
    momentum: float = 0.0  # of the workers
    clip_norm: float | None = None  # of one worker's gradient
    uncompressed: tuple[int, ...] = ()  # indices of the parameters that are all-reduced
    tag: int = 0  # identifies the bucket on the wire
    padding: int = 0  # of payloads, bytes

    @cached_property
    def numel(self) -> int:
        """Number of elements in the bucket."""
        return sum(self.parts.sizes)

    def same_as(self, other: BucketPlan) -> bool:
        """Whether another plan equals this one; selectors count as equal if they have the same class."""
        mine, theirs = ({**vars(plan), "selector": type(plan.selector)} for plan in (self, other))
        return all(mine[each.name] == theirs[each.name] for each in fields(self))

    @cached_property
    def compressed_sizes(self) -> list[int]:
        """Number of compressed elements of each parameter."""
        sizes = self.parts.sizes if self.topology.compresses else (0,) * len(self.parts.sizes)
        return [0 if number in self.uncompressed else size for number, size in enumerate(sizes)]

    @cached_property
    def uncompressed_numel(self) -> int:
        """Number of uncompressed elements in the bucket."""
        return sum(self.parts.sizes[number] for number in self.uncompressed)

    def codecs(self, step: int = 0, epoch: int = 0, selector: Selector | None = None) -> Codecs:
        """Returns the codecs for the payloads of a step.

        The payload of a server that does not compress has space for all entries that its workers can send. To encode or
        decode, pass the endpoint's ``selector``; for sizes alone, the plan's own suffices.
        """
        return self._fixed or self._codecs_at(step, epoch, selector or self.selector)

    @cached_property
    def _fixed(self) -> Codecs | None:
        """The codecs, if they are always the same."""
        fixed = isinstance(self.k, int) and isinstance(self.server_k, int | None)
        return self._codecs_at(0, 0, self.selector) if fixed and not isinstance(self.selector, RandK) else None

    def _codecs_at(self, step: int, epoch: int, selector: Selector) -> Codecs:
        layout, size = self.layout, self.layout.shard_size
        if not self.topology.compresses:
            everything = Codec(WIRES["fp32"], layout.numel, layout.numel)
            return Codecs(everything, everything)

        def entries(k: int | Varying, name: str) -> int:
            return k if isinstance(k, int) else layout.k_per_shard(k_of(layout.numel, ratio_at(k, step, epoch, name)))

        shared = partial(selector.shared_positions, step) if isinstance(selector, RandK) else None
        up = entries(self.k, "ratio")
        if self.server_k is not None:
            down = entries(self.server_k, "server_ratio")
        else:
            # All workers draw the same positions, so their mean has no others.
            down = up if shared is not None else min(size, self.world * up)
        tag = self.tag if shared is None else (self.tag + step) % 2**24  # a rank at another step draws others
        common = shared, tag, self.padding
        return Codecs(Codec(self.wire, size, up, *common), Codec(self.wire, size, down, *common))

    @cached_property
    def lossless(self) -> bool:
        """Whether every pass delivers every entry exactly, so that nothing waits in a residual."""
        fixed = isinstance(self.k, int) and isinstance(self.server_k, int | None)
        return fixed and self.wire.name == "fp32" and all(each.k == each.universe for each in self.codecs())

    @cached_property
    def waits(self) -> bool:
        """Whether gradients wait in residuals."""
        return "worker" in self.feedback and not self.lossless

    def capacity(self, codecs: Codecs) -> int:
        """Number of elements that fit into a worker's payloads, plus the uncompressed ones."""
        k = codecs.uplink.k * self.layout.shards + self.uncompressed_numel // self.parts.count
        return min(k, self.layout.numel)

    def density(self) -> float:
        """Fraction of the elements that fit in a worker's payloads, at step 0."""
        return min(1.0, self.codecs().uplink.k * self.layout.shards / self.layout.numel)

    def requests(self, codecs: Codecs, voters: int | None = None) -> list[Request]:
        """Predicts the requests of :func:`lightning_topk.core.guards.exchange`: payloads of the right size, no content.

        ``voters`` is the number of parameters in the bucket if some may be unused; else None.
        """
        asked = self.topology.requests(self, codecs)
        if voters is not None:
            asked.insert(0, AllGather(placeholder(-(-voters // 8)), "uplink"))
        if self.uncompressed:
            asked.append(AllReduce(placeholder(self.uncompressed_numel * self.itemsize), "uplink"))
        return asked

    def volume(self, rank: int = 0, step: int = 0, epoch: int = 0, voters: int | None = None) -> Volume:
        """Predicts the bytes of a step."""
        return self.volume_of(self.codecs(step, epoch), rank, voters) if self.numel else Volume()

    def volume_of(self, codecs: Codecs, rank: int, voters: int | None) -> Volume:
        """The bytes of an exchange with these codecs."""
        asked = self.requests(codecs, voters)
        return sum((request_volume(each, rank, self.workers, self.local) for each in asked), self.dense_volume)

    @cached_property
    def dense_volume(self) -> Volume:
        """The bytes of a ring all-reduce of the bucket, the same for every rank and node."""
        ring = AllReduce(placeholder(self.numel * self.itemsize), "uplink")
        sent = request_volume(ring, 0, self.workers, self.local)
        return Volume(dense=sent.uplink, dense_inter_node=sent.inter_node)

    def endpoint(
        self, rank: int, dtype: torch.dtype, device: torch.device, scratch: ops.Scratch | None = None
    ) -> Endpoint:
        """Creates the endpoint of ``rank``, counted among all ranks, for a bucket of ``dtype``, with empty memories.

        Residuals are float64 for a float64 bucket, else float32. Endpoints may share ``scratch`` memory.
        """
        layout, selector, number = self.layout, copy.deepcopy(self.selector), rank // self.parts.count
        wide = torch.promote_types(dtype, torch.float32)

        def memory(side: str, numel: int) -> Memory:
            return Residual(numel, wide, device) if side in self.feedback else Memory(wide)

        mine = memory("worker", layout.numel)
        if self.momentum:
            mine = MomentumResidual(layout.numel, wide, device, self.momentum)
        uplink = Link(layout, selector, mine, sizes=self.parts.slices, count=self.parts.count).fuse(scratch=scratch)
        downlink = None
        if self.topology.has_servers and number < layout.shards:  # it serves shard `number`
            served, lossless = Layout(layout.shard_size), self.server_k is None
            # A server that does not compress sends every nonzero entry of a sum of selections: it needs exact top-k.
            selector = TopK() if lossless and not isinstance(selector, RandK) else selector
            ends = [layout.count_before(end, number) for end in accumulate(self.parts.slices, initial=0)]
            sizes = [end - begin for begin, end in pairwise(ends)]
            kept = memory("server", served.numel)
            downlink = Link(served, selector, kept, dtype, sizes).fuse(lossless, scratch)
        return Endpoint(self, rank, wide, uplink, downlink, device)


@dataclass(frozen=True, eq=False)
class Endpoint:
    """State of one rank for one bucket."""

    plan: BucketPlan
    rank: int  # among all ranks
    dtype: torch.dtype  # of sums and residuals
    uplink: Link  # the worker's
    downlink: Link | None  # the server's; None on a rank that is not a server
    device: torch.device

    @cached_property
    def links(self) -> list[Link]:
        """The worker's link and, on a server, the server's."""
        return [self.uplink] if self.downlink is None else [self.uplink, self.downlink]

    @cached_property
    def starts(self) -> Tensor:
        """Offset of every nonempty parameter in the bucket: ``[nonempty parameters]`` int64."""
        sizes = self.plan.parts.sizes
        starts = [start for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False) if size]
        return torch.tensor(starts, device=self.device)

    @cached_property
    def uncompressed(self) -> Tensor:
        """Indices of the uncompressed parameters, and their elements: ``[2, parameters]`` int64."""
        numbers = self.plan.uncompressed
        return torch.tensor([numbers, [self.plan.parts.sizes[number] for number in numbers]], device=self.device)

    @cached_property
    def pieces(self) -> tuple[Tensor, Tensor]:
        """How a GPU splits a bucket among the ranks of its node: two tensors on the device.

        A piece has at most ``PIECE`` elements of one parameter's slice. The first, ``[pieces]`` int32, has the
        parameter of each piece; the second, ``[parameters, 5]`` int64, the first piece, the offset of the slice in a
        part, the offset of the parameter in the bucket, the parameter's size, and the size of its slice.
        """
        parts = self.plan.parts
        columns = [-(-size // PIECE) for size in parts.slices], parts.slices, parts.sizes
        begins = [accumulate(column, initial=0) for column in columns]
        owner = [number for number, count in enumerate(columns[0]) for _ in range(count)]
        table = [*zip(*begins, parts.sizes, parts.slices, strict=False)]
        owners = torch.tensor(owner, dtype=torch.int32, device=self.device)
        return owners, torch.tensor(table, device=self.device)

    def reply(self, mean: Tensor | None, codec: Codec, step: Step) -> Tensor:
        """Compresses the workers' ``mean`` ``[shard_size]`` as their server; returns the payload ``[P]`` for all.

        On a rank that is not a server, ``mean`` is None and the payload a buffer. A server that keeps a residual now
        has the workers' entries, so they do not return to the workers if the exchange fails.
        """
        if "server" in self.plan.feedback:
            self.uplink.sent = None
        if mean is None or self.downlink is None:
            return torch.empty(codec.nbytes, dtype=torch.uint8, device=self.device)
        return self.downlink.send(mean, codec, step)[0]

    def lift(self, lifts: Sequence[float] = ()) -> None:
        """Sets :attr:`.Link.lifts`, and multiplies the memories by the new lifts over the old ones."""
        before = self.uplink.lifts
        if lifts == before:
            return
        none = [1.0] * len(self.uplink.sizes)
        factors = [new / old for new, old in zip(lifts or none, before or none, strict=True)]
        for link in self.links:
            for memory in link.memory.tensors().values():
                reference.clamp_(multiply_(memory, link.sizes, factors))
            link.lifts = lifts

    def slices(self, number: int) -> list[slice]:
        """Where a parameter of the bucket lies in the memory of each link."""
        return [slice(sum(link.sizes[:number]), sum(link.sizes[: number + 1])) for link in self.links]

    def add_served(self, name: str, to: Tensor, times: float = 1.0) -> None:
        """Adds the server's memory ``name``, multiplied by ``times``, to this rank's part ``to`` ``[parts.numel]``."""
        kept = None if self.downlink is None else self.downlink.memory.tensors().get(name)
        if kept is None:
            return
        layout, shard = self.plan.layout, self.rank // self.plan.parts.count
        turn, block = layout.shards * layout.block, layout.block
        full = to.numel() // turn  # turns through all shards
        head, tail = to.split([full * turn, to.numel() - full * turn])
        mine = head.view(full, layout.shards, block)[:, shard]
        mine.add_(kept[: full * block].view(full, block), alpha=times)
        rest = tail[shard * block : (shard + 1) * block]
        rest.add_(kept[full * block : full * block + len(rest)], alpha=times)


@dataclass(frozen=True)
class Outcome:
    """Result of one exchange, on the device; None where not measured. See :class:`.Link` for what links measure."""

    finite: Tensor  # scalar bool, the same on every rank: whether all delivered values are finite
    errors: Sequence[Tensor | None] = ()  # of each link
    per_layer: Tensor | None = None


Exchange = Generator[Request, Any, Outcome]
"""Generator that exchanges one bucket: yields requests, receives their replies, and returns an :class:`Outcome`."""
Path = Generator[Request, Any, Tensor]
"""The same for a topology alone; returns whether all delivered values are finite, a scalar bool."""


@dataclass(frozen=True)
class Topology:
    """Who sends what to whom."""

    name: str
    exchange: Callable[[Endpoint, Tensor, Codecs, Step], Path]  # replaces g [numel] by the mean that all agree on
    requests: Callable[[BucketPlan, Codecs], list[Request]]  # predicts those of `exchange`, without content
    compresses: bool = True
    has_servers: bool = True  # servers answer the workers
    sharded: bool = False  # every rank serves one shard of the bucket; if not, there is one server
    by_node: bool = False  # the ranks of a node exchange as one worker
