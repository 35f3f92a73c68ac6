"""Requests that an exchange makes where bytes must leave, and the number of bytes that each one sends.

A request carries this rank's payload; the driver performs it and sends the reply back. Predictions use the same classes
with payloads on the meta device, which have a size but no content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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
