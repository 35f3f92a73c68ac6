"""Requests that an exchange makes where bytes must leave, and the number of bytes that each one sends.

A request carries this rank's payload; the driver performs it and sends the reply back. Predictions use the same classes
with payloads on the meta device, which have a size but no content.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

Direction = Literal["uplink", "downlink"]  # whether workers send to servers, or servers to workers
Among = Literal["all", "node", "peers"]
"""Ranks that take part: all ranks, the ranks of this node, or the ranks with the same local rank on every node."""


@dataclass(frozen=True)
class Request(ABC):
    """One communication step of an exchange. W ranks take part, numbered from 0."""

    payload: Tensor  # this rank's input
    direction: Direction
    among: Among = "all"
    divided: ClassVar[bool] = False  # whether the payload is divided into one message for each rank

    @abstractmethod
    def leaving_messages(self, rank: int, world: int, node: range) -> int:
        """Messages that ``rank`` sends to ranks outside ``node``, to which it belongs."""

    def leaving_bytes(self, rank: int, world: int, node: range) -> int:
        """Bytes of these messages."""
        return self.leaving_messages(rank, world, node) * self.payload.nbytes // (world if self.divided else 1)

    def sent_bytes(self, rank: int, world: int) -> int:
        """Bytes that ``rank`` sends to other ranks."""
        return self.leaving_bytes(rank, world, range(rank, rank + 1))


class AllToAll(Request):
    """Sends row s of ``payload`` ``[W, P]`` to rank s. Reply: ``[W, P]``, row r from rank r."""

    divided = True

    @override
    def leaving_messages(self, rank: int, world: int, node: range) -> int:
        return world - len(node)


class AllGather(Request):
    """Sends ``payload`` ``[P]`` to every rank. Reply: ``[W, P]``, row r from rank r."""

    @override
    def leaving_messages(self, rank: int, world: int, node: range) -> int:
        return 0 if (rank + 1) % world in node else world - 1  # around a ring


class AllReduce(Request):
    """Sums ``payload`` ``[n]``, floating, over the ranks. Reply: ``[n]``, possibly in the same memory."""

    divided = True

    @override
    def leaving_messages(self, rank: int, world: int, node: range) -> int:
        return 0 if (rank + 1) % world in node else 2 * (world - 1)  # around a ring, twice


class Gather(Request):
    """Sends ``payload`` ``[P]`` to rank 0. Reply: ``[W, P]`` at rank 0, None elsewhere."""

    @override
    def leaving_messages(self, rank: int, world: int, node: range) -> int:
        return int(0 not in node)


class Broadcast(Request):
    """Sends ``payload`` ``[P]`` from rank 0 to every rank; elsewhere it is an empty buffer. Reply: ``[P]``."""

    @override
    def leaving_messages(self, rank: int, world: int, node: range) -> int:
        return 0 if rank else world - len(node)  # rank 0 itself sends to each of the others


def placeholder(*shape: int) -> Tensor:
    """A payload of a size in bytes, without content: uint8 on the meta device."""
    return torch.empty(shape, dtype=torch.uint8, device="meta")


@dataclass(frozen=True)
class Volume:
    """Bytes sent, predicted or counted."""

    uplink: int = 0  # by this rank as a worker, to other ranks
    downlink: int = 0  # by this rank as a server
    dense: int = 0  # by this rank in a ring all-reduce of the same gradients, for comparison
    intra_node: int = 0  # between the ranks of this rank's node, in total
    inter_node: int = 0  # by these ranks to other nodes, in total: what the node's network interface counts
    dense_inter_node: int = 0  # by these ranks to other nodes in a ring all-reduce
    messages: int = 0  # that carry the bytes of ``inter_node``, before the network splits them

    def __add__(self, other: Volume) -> Volume:
        return Volume(*map(operator.add, vars(self).values(), vars(other).values()))

    def __getitem__(self, kind: str) -> int:
        """The bytes of a kind, by its name."""
        return int(getattr(self, kind))

    def of_shards(self, count: int) -> Volume:
        """The volume if ``count`` ranks of the node each exchange a shard of the gradients, as this one does."""
        kinds = () if count == 1 else ("intra_node", "inter_node", "dense_inter_node", "messages")
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
    """The bytes of a request of ``rank``, one of ``world``, on a node of ``local`` ranks."""
    return _volume(type(request), request.payload.nbytes, request.direction, request.among, rank, world, local)


@lru_cache(maxsize=4096)
def _volume(
    kind: type[Request], nbytes: int, direction: Direction, among: Among, rank: int, world: int, local: int
) -> Volume:
    request, number, inside = kind(placeholder(nbytes), direction, among), rank // local, rank % local
    senders: Iterable[int]
    if among == "node":
        mine, world, senders, node = inside, local, range(local), range(local)
    elif among == "peers":  # each rank of the node sends to others of its own local rank
        mine, world, senders, node = number, world // local, [number] * local, range(number, number + 1)
    else:
        mine, node = rank, range(rank - inside, rank - inside + local)
        senders = node
    leaving = sum(request.leaving_bytes(each, world, node) for each in senders)
    total = sum(request.sent_bytes(each, world) for each in senders)
    sent = request.sent_bytes(mine, world)
    messages = sum(request.leaving_messages(each, world, node) for each in senders)
    return Volume(**{direction: sent}, intra_node=total - leaving, inter_node=leaving, messages=messages)
