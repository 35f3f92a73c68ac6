"""What an exchange works on: a bucket's shape and topology, one rank's links, a step's formats, and what came of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_topk.core.layout import Layout, NodeShards
from lightning_topk.core.link import Link, LinkStats, Measure
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import Begin, Begun, Request
from lightning_topk.core.wire import Codec


@dataclass(frozen=True)
class Codecs:
    """How the payloads of one exchange are written, at the density in force.

    Attributes:
        uplink: The workers' payloads.
        reply: The servers' payloads; unused where there are no servers.
    """

    uplink: Codec
    reply: Codec

    @property
    def lossless(self) -> bool:
        """Whether every entry is sent in full precision, both ways, so that residuals are zero afterwards."""
        return all(each.k == each.universe and each.wire.name == "fp32" for each in (self.uplink, self.reply))


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """One bucket and its ranks, in integers.

    Ranks that exchange as a node hold a part of the bucket each: then ``layout`` is that of the part, and ``world``
    counts the ranks on all nodes that hold the same part.

    Attributes:
        topology: Who sends what to whom.
        parts: How the bucket is dealt to the ranks of a node; one part if each rank exchanges for itself.
        layout: How a part is dealt to the servers.
        world: Ranks that exchange a part, all of them workers.
        workers: All ranks.
    """

    topology: Topology
    parts: NodeShards
    layout: Layout
    world: int
    workers: int


@dataclass(frozen=True, eq=False)
class Endpoint(BucketSpec):
    """What one rank holds for one bucket.

    Attributes:
        rank: This rank, among those that exchange its part.
        dtype: dtype of sums and residuals.
        uplinks: The worker's link of each piece; they share one memory and one selector.
        downlinks: The server's link of each piece; empty where this rank serves nothing.
        sizes: ``[parameters]`` int64 on the bucket's device, elements of each.
        clip_norm: The norm to which the worker's gradient is clipped before anything else; None does not clip.
        uncompressed: Begin and end, in the bucket, of the parameters that are exchanged by all-reduce, in order.
    """

    rank: int
    dtype: torch.dtype
    uplinks: tuple[Link, ...]
    downlinks: tuple[Link, ...]
    sizes: Tensor
    clip_norm: float | None = None
    uncompressed: Sequence[tuple[int, int]] = ()

    @cached_property
    def starts(self) -> Tensor:
        """``[parameters that have elements]`` int64: where each begins in the bucket."""
        ends = accumulate(self.parts.sizes)
        starts = [end - size for end, size in zip(ends, self.parts.sizes, strict=True) if size]
        return torch.tensor(starts, device=self.sizes.device)

    @property
    def shard(self) -> int:
        """The shard that this rank serves, where it serves one."""
        return self.rank if self.layout.shards > 1 else 0

    @property
    def links(self) -> tuple[Link, ...]:
        """The links with a memory of their own: the worker's, and the server's where it is one."""
        return (self.uplink, *self.downlinks)

    @property
    def uplink(self) -> Link:
        """The worker's link of the first piece, whose memory is that of all."""
        return self.uplinks[0]

    @property
    def downlink(self) -> Link | None:
        """The server's link of the first piece; None where this rank serves nothing."""
        return self.downlinks[0] if self.downlinks else None

    def served(self, kept: Tensor) -> list[Tensor]:
        """Of ``[parts.numel]``, what this rank serves of each piece: ``[shard_size]``, padded with zeros."""
        return [reference.shard_rows(kept, layout)[self.shard] for layout in self.layout.of_each_piece]

    def server_memory(self) -> dict[str, Tensor]:
        """What the server holds, at its places in this rank's part of the bucket: ``[parts.numel]`` by name."""
        found: dict[str, Tensor] = {}
        for link, layout in zip(self.downlinks, self.layout.of_each_piece, strict=False):
            for name, kept in link.memory.tensors().items():
                every = torch.arange(len(kept), device=kept.device).unsqueeze(0)
                places = reference.flat_index(every, layout, torch.tensor([[self.shard]], device=kept.device))[0]
                whole = found.setdefault(name, kept.new_zeros(self.layout.numel))
                whole.index_add_(0, places, kept)
        return found

    def folded(self) -> dict[str, Tensor]:
        """One memory of all that the links hold: ``[parts.numel]`` by name, what this rank serves W-fold."""
        found = {name: kept.clone() for name, kept in self.uplink.memory.tensors().items()}
        for name, served in self.server_memory().items():
            found[name] += served * self.world
        return found

    def spread(self, flags: Tensor) -> Tensor:
        """Copies what belongs to each parameter, ``[parameters]``, to each of its elements in this rank's part."""
        if self.parts.count == 1:
            return flags.repeat_interleave(self.sizes, output_size=self.layout.numel)
        pieces = (self.sizes + self.parts.count - 1) // self.parts.count
        return flags.repeat_interleave(pieces, output_size=self.layout.numel)


class TakenBack(NamedTuple):
    """What one exchange says of this worker's residual, if its step is skipped.

    Attributes:
        value: ``[numel]`` of the endpoint's dtype, what to add.
        absorbed: Scalar bool, or one for each element: whether the residual has taken in this worker's gradient, and so
            what earlier exchanges of the same step delivered, where gradients are accumulated before their exchange.
    """

    value: Tensor
    absorbed: Tensor


@dataclass(frozen=True)
class Outcome:
    """What became of one exchange.

    Attributes:
        finite: Scalar bool, the same on every rank: whether all that was delivered is finite.
        uplink: What this worker sent.
        downlink: What this server sent; None where this rank serves nothing.
        undo: Computes what this worker's residual takes back if the optimizer skips the step. It holds the payloads.
            None where all is sent by all-reduce.
    """

    finite: Tensor
    uplink: LinkStats
    downlink: LinkStats | None = None
    undo: Callable[[], TakenBack] | None = None


Exchange = Generator[Request | Begin | Begun, Any, Outcome]
"""The exchange of one bucket: yields requests, is sent their replies, and returns what became of it."""


class Topology(ABC):
    """Who sends what to whom. Its subclasses are in :mod:`lightning_topk.core.exchange`."""

    name: ClassVar[str]
    """What users call it."""
    compresses: ClassVar[bool] = True
    has_servers: ClassVar[bool] = True
    by_node: ClassVar[bool] = False
    """Whether the ranks of a node exchange as one worker."""

    def on(self, world: int, local: int) -> str:
        """The name of the topology that this one amounts to on nodes of ``local`` ranks, ``world`` in all."""
        return self.name

    def shards(self, world: int) -> int:
        """Servers among which ``world`` ranks deal a bucket."""
        return 1

    @abstractmethod
    def exchange(self, end: Endpoint, g: Tensor, codecs: Codecs, measure: Measure) -> Exchange:
        """Replaces ``g`` ``[numel]`` by the mean that all ranks agree on."""

    @abstractmethod
    def requests(self, shape: BucketSpec, codecs: Codecs, itemsize: int) -> list[Request]:
        """What :meth:`exchange` asks for, with payloads of the right size and no content.

        Args:
            shape: The bucket.
            codecs: How payloads are written.
            itemsize: Bytes of an element of the gradient.
        """
