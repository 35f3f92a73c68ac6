"""Requests that an exchange makes where bytes must leave, and the number of bytes that each one sends.

A request carries this rank's payload; the driver performs it and sends the reply back. Predictions use the same classes
with payloads on the meta device, which have a size but no content.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

Direction = Literal["uplink", "downlink"]
Among = Literal["all", "node", "peers"]
"""Ranks that take part: all ranks, the ranks of this node, or the ranks with the same local rank on every node."""


@dataclass(frozen=True)
class Request(ABC):
    """One communication step of an exchange.

    Attributes:
        payload: This rank's input.
        direction: Whether workers send to servers, or servers to workers.
        among: Ranks that take part. W is their number, and ranks are numbered among them.
    """

    payload: Tensor
    direction: Direction
    among: Among = "all"

    @abstractmethod
    def sent_bytes(self, rank: int, world: int) -> int:
        """Bytes that ``rank`` sends to other ranks."""

    @abstractmethod
    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        """Bytes that a node of ``local`` consecutive ranks sends to other nodes, if all ranks take part."""

    def node_bytes(self, rank: int, world: int, local: int) -> tuple[int, int]:
        """Bytes that the ``local`` ranks of the node of ``rank`` send in total: to each other, and to other nodes."""
        node = rank // local
        if self.among == "node":
            return sum(self.sent_bytes(each, local) for each in range(local)), 0
        if self.among == "peers":
            return 0, local * self.sent_bytes(node, world // local)
        leaving = self.leaving_bytes(node, world, local) if local < world else 0
        return sum(self.sent_bytes(node * local + each, world) for each in range(local)) - leaving, leaving


class AllToAll(Request):
    """Sends row s of ``payload`` ``[W, P]`` to rank s. Reply: ``[W, P]``, row r from rank r."""

    @override
    def sent_bytes(self, rank: int, world: int) -> int:
        return self.payload[0].nbytes * (world - 1)

    @override
    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        return self.payload[0].nbytes * (world - local) * local


class AllGather(Request):
    """Sends ``payload`` ``[P]`` to every rank. Reply: ``[W, P]``, row r from rank r."""

    @override
    def sent_bytes(self, rank: int, world: int) -> int:
        return self.payload.nbytes * (world - 1)

    @override
    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        return self.sent_bytes(0, world)  # around a ring, the last rank of a node sends to the next node


class AllReduce(Request):
    """Sums ``payload`` ``[n]``, floating, over the ranks. Reply: ``[n]``, possibly in the same memory."""

    @override
    def sent_bytes(self, rank: int, world: int) -> int:
        return 2 * (world - 1) * self.payload.nbytes // world  # around a ring, twice

    @override
    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        return self.sent_bytes(0, world)


class Gather(Request):
    """Sends ``payload`` ``[P]`` to rank 0. Reply: ``[W, P]`` at rank 0, None elsewhere."""

    @override
    def sent_bytes(self, rank: int, world: int) -> int:
        return self.payload.nbytes if rank else 0

    @override
    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        return self.payload.nbytes * local if node else 0


class Broadcast(Request):
    """Sends ``payload`` ``[P]`` from rank 0 to every rank; elsewhere it is an empty buffer. Reply: ``[P]``."""

    @override
    def sent_bytes(self, rank: int, world: int) -> int:
        return 0 if rank else self.payload.nbytes * (world - 1)  # rank 0 itself sends to each of the others

    @override
    def leaving_bytes(self, node: int, world: int, local: int) -> int:
        return 0 if node else self.payload.nbytes * (world - local)


def placeholder(*shape: int) -> Tensor:
    """A payload of a size in bytes, without content: uint8 on the meta device."""
    return torch.empty(shape, dtype=torch.uint8, device="meta")


@dataclass(frozen=True)
class Volume:
    """Bytes sent, predicted or counted.

    Attributes:
        uplink: Sent by this rank as a worker, to other ranks.
        downlink: Sent by this rank as a server.
        dense: Sent by this rank in a ring all-reduce of the same gradients, for comparison.
        intra_node: Sent between the ranks of this rank's node, in total.
        inter_node: Sent by these ranks to other nodes, in total: the count of the node's network interface.
        dense_inter_node: Sent by these ranks to other nodes in a ring all-reduce.
    """

    uplink: int = 0
    downlink: int = 0
    dense: int = 0
    intra_node: int = 0
    inter_node: int = 0
    dense_inter_node: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(*map(operator.add, vars(self).values(), vars(other).values()))

    def __getitem__(self, kind: str) -> int:
        """The bytes of a kind, by its name."""
        return int(getattr(self, kind))

    def of_shards(self, count: int) -> Volume:
        """The same if ``count`` ranks of the node each exchange a shard of the gradients like this one."""
        kinds = ("intra_node", "inter_node", "dense_inter_node")
        return replace(self, **{kind: count * self[kind] for kind in kinds})

    @property
    def sent(self) -> int:
        """All that this rank sends."""
        return self.uplink + self.downlink

    def counted(self, by_node: bool) -> int:
        """The bytes that ``saving`` counts: of a rank or, if a node's ranks exchange as one worker, to other nodes."""
        return self.inter_node if by_node else self.sent

    def saved(self, by_node: bool) -> float:
        """Dense bytes, which leave a node once, over the bytes that ``saving`` counts; 1 where nothing is sent."""
        sent = self.counted(by_node)
        return self.dense / sent if sent else 1.0

    @property
    def saving(self) -> float:
        """Dense bytes over bytes sent; 1 where nothing is sent."""
        return self.saved(by_node=False)

    @property
    def node_saving(self) -> float:
        """The same for the bytes between nodes."""
        return self.dense_inter_node / self.inter_node if self.inter_node else 1.0


def request_volume(request: Request, rank: int, world: int, local: int) -> Volume:
    """The bytes of a request.

    Args:
        request: The request of one rank.
        rank: This rank.
        world: Number of all ranks.
        local: Ranks per node.
    """
    among = {"all": (rank, world), "node": (rank % local, local), "peers": (rank // local, world // local)}
    inside, outside = request.node_bytes(rank, world, local)
    sent = {request.direction: request.sent_bytes(*among[request.among])}
    return Volume(**sent, intra_node=inside, inter_node=outside)
