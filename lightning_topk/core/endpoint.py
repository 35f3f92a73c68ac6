"""State of an exchange: the bucket and its topology, one rank's links, a step's codecs, and the outcome."""

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
    """Codecs of one exchange, at the density of the current step.

    Attributes:
        uplink: Codec of the workers' payloads.
        reply: Codec of the servers' payloads; unused without servers.
    """

    uplink: Codec
    reply: Codec


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """Integer description of one bucket and of the ranks that exchange it.

    In a hierarchical exchange each rank of a node owns one part of the bucket. ``layout`` then describes that part, and
    ``world`` counts the ranks, one per node, that own it.

    Attributes:
        topology: Who sends what to whom.
        parts: How the bucket is split among the ranks of a node; one part if each rank exchanges the whole bucket.
        layout: How a part is split among the servers.
        world: Number of ranks that exchange a part; each of them is a worker.
        workers: Number of all ranks.
    """

    topology: Topology
    parts: NodeShards
    layout: Layout
    world: int
    workers: int


@dataclass(frozen=True, eq=False)
class Endpoint(BucketSpec):
    """State of one rank for one bucket.

    Attributes:
        rank: Index of this rank among the ranks that exchange its part.
        dtype: dtype of sums and residuals.
        uplinks: The worker's links, one per piece; they share one memory and one selector.
        downlinks: The server's links, one per piece; empty on a rank that is not a server.
        sizes: ``[parameters]`` int64 on the bucket's device, number of elements of each parameter.
        clip_norm: Maximum norm of the worker's gradient, applied before anything else; None disables clipping.
        uncompressed: Begin and end, in the bucket, of each parameter that is all-reduced uncompressed, in order.
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
        """Offset of every nonempty parameter in the bucket: ``[nonempty parameters]`` int64."""
        ends = accumulate(self.parts.sizes)
        starts = [end - size for end, size in zip(ends, self.parts.sizes, strict=True) if size]
        return torch.tensor(starts, device=self.sizes.device)

    @property
    def shard(self) -> int:
        """Index of the shard that this rank serves; 0 if there is only one."""
        return self.rank if self.layout.shards > 1 else 0

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that own a memory: the worker's, and the server's for each piece."""
        return (self.uplink, *self.downlinks)

    @property
    def uplink(self) -> Link:
        """The worker's link of the first piece; all pieces share its memory."""
        return self.uplinks[0]

    @property
    def downlink(self) -> Link | None:
        """The server's link of the first piece; None on a rank that is not a server."""
        return self.downlinks[0] if self.downlinks else None

    def served(self, kept: Tensor) -> list[Tensor]:
        """Slices ``kept`` ``[parts.numel]`` to this rank's shard of each piece: ``[shard_size]``, padded with zeros."""
        return [reference.shard_rows(kept, layout)[self.shard] for layout in self.layout.of_each_piece]

    def server_memory(self) -> dict[str, Tensor]:
        """The server's memory, scattered into this rank's part of the bucket: ``[parts.numel]`` by name."""
        found: dict[str, Tensor] = {}
        for link, layout in zip(self.downlinks, self.layout.of_each_piece, strict=False):
            for name, kept in link.memory.tensors().items():
                every = torch.arange(len(kept), device=kept.device).unsqueeze(0)
                places = reference.flat_index(every, layout, torch.tensor([[self.shard]], device=kept.device))[0]
                whole = found.setdefault(name, kept.new_zeros(self.layout.numel))
                whole.index_add_(0, places, kept)
        return found

    def folded(self) -> dict[str, Tensor]:
        """The worker's memory plus W times the server's: ``[parts.numel]`` by name."""
        found = {name: kept.clone() for name, kept in self.uplink.memory.tensors().items()}
        for name, served in self.server_memory().items():
            found[name] += served * self.world
        return found

    def spread(self, flags: Tensor) -> Tensor:
        """Expands ``flags``, one per parameter, to the elements of each parameter in this rank's part."""
        if self.parts.count == 1:
            return flags.repeat_interleave(self.sizes, output_size=self.layout.numel)
        pieces = (self.sizes + self.parts.count - 1) // self.parts.count
        return flags.repeat_interleave(pieces, output_size=self.layout.numel)


class TakenBack(NamedTuple):
    """Correction to this worker's residual if the optimizer skips the step.

    Attributes:
        value: ``[numel]`` of the endpoint's dtype, to add to the residual.
        absorbed: Bool, scalar or per element: whether the residual has absorbed this worker's gradient. A gradient that
            accumulates over several exchanges contains what earlier exchanges of the step delivered.
    """

    value: Tensor
    absorbed: Tensor


@dataclass(frozen=True)
class Outcome:
    """Result of one exchange.

    Attributes:
        finite: Scalar bool, the same on every rank: whether all delivered values are finite.
        uplink: Statistics of the worker's payloads.
        downlink: Statistics of the server's payloads; None on a rank that is not a server.
        undo: Computes the correction to this worker's residual if the optimizer skips the step. Keeps the payloads
            alive. None if everything is all-reduced.
    """

    finite: Tensor
    uplink: LinkStats
    downlink: LinkStats | None = None
    undo: Callable[[], TakenBack] | None = None


Exchange = Generator[Request | Begin | Begun, Any, Outcome]
"""Generator that exchanges one bucket: yields requests, receives their replies, and returns an :class:`Outcome`."""


class Topology(ABC):
    """Who sends what to whom. Its subclasses are in :mod:`lightning_topk.core.exchange`."""

    name: ClassVar[str]
    """Name in the settings."""
    compresses: ClassVar[bool] = True
    has_servers: ClassVar[bool] = True
    by_node: ClassVar[bool] = False
    """Whether the ranks of a node exchange as one worker."""

    def on(self, world: int, local: int) -> str:
        """Name of the equivalent topology for ``world`` ranks on nodes of ``local`` ranks."""
        return self.name

    def shards(self, world: int) -> int:
        """Number of servers for ``world`` ranks."""
        return 1

    @abstractmethod
    def exchange(self, end: Endpoint, g: Tensor, codecs: Codecs, measure: Measure) -> Exchange:
        """Replaces ``g`` ``[numel]`` by the mean that all ranks agree on."""

    @abstractmethod
    def requests(self, shape: BucketSpec, codecs: Codecs, itemsize: int) -> list[Request]:
        """Predicts the requests of :meth:`exchange`, with payloads of the right size and no content.

        Args:
            shape: The bucket.
            codecs: Codecs of the payloads.
            itemsize: Bytes per gradient element.
        """
