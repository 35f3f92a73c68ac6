"""What an exchange will send, before it runs: bytes by arithmetic, equal to what is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_topk.config import TopKConfig


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends to other ranks in a step.

    Attributes:
        uplink: As a worker.
        downlink: As a server.
        dense: By a ring all-reduce of the same gradients, for comparison.
    """

    uplink: int
    downlink: int
    dense: int

    @property
    def saving(self) -> float:
        """Dense bytes over bytes sent; 1 where nothing is sent."""
        sent = self.uplink + self.downlink
        return self.dense / sent if sent else 1.0


def volume(
    config: TopKConfig,
    buckets: Iterable[int],
    world: int,
    rank: int = 0,
    itemsize: int = 4,
    parameters: Iterable[int] | None = None,
    step: int = 0,
    epoch: int = 0,
) -> Volume:
    """Predicts the bytes of a step.

    Args:
        config: The settings.
        buckets: Elements of each of DDP's buckets; one number for a model that fits one bucket.
        world: Number of ranks.
        rank: The rank in question; with ``single_server`` rank 0 differs from the others.
        itemsize: Bytes of an element of the dense gradient.
        parameters: Parameters in each bucket, with ``find_unused_parameters`` only: the ranks then exchange one bit each.
        step: Gradients exchanged before this one, for schedules.
        epoch: Epochs completed, for schedules.
    """
    others = world - 1
    buckets, parameters = list(buckets), list(parameters or ())
    if config.scope == "model":
        buckets, parameters = [sum(buckets)], [sum(parameters)] * bool(parameters)
    uplink = downlink = dense = 0
    for numel in buckets:
        _, up, down = config.codecs(numel, world, step, epoch)
        dense += 2 * others * numel * itemsize // world
        if config.topology == "single_server":
            uplink += up.nbytes if rank else 0
            downlink += 0 if rank or down is None else others * down.nbytes
        else:
            uplink += others * up.nbytes
            downlink += others * down.nbytes if down is not None else 0
    for count in parameters:
        uplink += others * -(-count // 8)
    return Volume(uplink, downlink, dense)
