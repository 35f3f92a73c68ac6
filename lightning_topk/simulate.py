"""In-memory simulator: drives any number of workers in lockstep in one process, with the same bits as a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_topk.bucket import plan_step
from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Exchange, Outcome
from lightning_topk.core.guards import exchange
from lightning_topk.core.link import NOTHING, Clip, Measure, Step
from lightning_topk.core.requests import AllGather, AllReduce, AllToAll, Among, Broadcast, Gather, Request


class Cluster:
    """Simulates ``world`` workers, ``local`` on each node, that exchange a gradient of ``numel`` elements step by step.

    ``sizes`` lists the elements of each parameter (default: one parameter), ``uncompressed`` the indices of the
    uncompressed ones. With ``saving=``, training lifts the parameters whose gradients are small
    (``runtime/shares.py``). The simulator does not; :meth:`.Endpoint.lift` sets lifts.
    """

    def __init__(
        self,
        config: TopKConfig,
        world: int,
        numel: int,
        dtype: torch.dtype = torch.float32,
        local: int = 1,
        sizes: tuple[int, ...] | None = None,
        uncompressed: Sequence[int] = (),
        measure: Measure = NOTHING,
        device: str | torch.device = "cpu",
    ) -> None:
        sizes = sizes or (numel,)
        if sum(sizes) != numel:
            raise ValueError(f"sizes={sizes} add up to {sum(sizes)}, but numel={numel}; make them equal.")
        bucket = sizes, dtype.itemsize, uncompressed, 0
        (self.plan,) = plan_step(config.resolve(world, local), [bucket], world, local)
        self.local, self.measure, self.steps = local, measure, 0
        self.endpoints = [self.plan.endpoint(rank, dtype, torch.device(device)) for rank in range(world)]
        self.outcomes: list[Outcome] = []  # of the last exchange, one per rank
        self.sent_bytes = {"uplink": [0] * world, "downlink": [0] * world}  # so far, from each worker to others

    def step(
        self,
        gradients: Sequence[Tensor],
        epoch: int = 0,
        scale: Tensor | None = None,
        fade: float = 1.0,
        clips: Sequence[Clip | None] | None = None,
    ) -> list[Tensor]:
        """Exchanges W gradients ``[numel]``; returns the W delivered ones ``[numel]``.

        If the gradients are multiplied by a scalar loss ``scale``, so are the delivered ones. Residuals are multiplied
        by ``fade``. ``clips`` holds each worker's clipping.
        """
        found, world, numel = {tuple(gradient.shape) for gradient in gradients}, len(self.endpoints), self.plan.numel
        if len(gradients) != world or found != {(numel,)}:
            raise ValueError(
                f"step got {len(gradients)} gradients of shape {' and '.join(map(str, found))}; it takes {world}, one "
                f"per worker, of shape {(numel,)}."
            )
        outputs, exchanges = [gradient.clone() for gradient in gradients], []
        for end, g, clip in zip(self.endpoints, outputs, clips or [None] * len(outputs), strict=True):
            codecs = self.plan.codecs(self.steps, epoch, end.uplink.selector)
            exchanges.append(exchange(end, g, codecs, Step(self.steps, scale, self.measure, fade, clip)))
        with torch.cuda.device_of(outputs[0]):
            self.outcomes = self.drive(exchanges)
        self.steps += 1
        return outputs

    def drive(self, exchanges: Sequence[Exchange]) -> list[Outcome]:
        """Runs one exchange per rank; answers requests once every rank has made one. Returns the outcomes."""
        replies: list[Any] = [None] * len(exchanges)
        while True:
            requests: list[Request] = []
            outcomes = []
            for each, reply in zip(exchanges, replies, strict=True):
                try:
                    requests.append(each.send(reply))
                except StopIteration as end:
                    outcomes.append(end.value)
            if not requests:
                return outcomes
            replies = [None] * len(requests)
            for ranks in self._groups(requests[0].among, len(requests)):
                asked = [requests[rank] for rank in ranks]
                for rank, reply, (number, request) in zip(ranks, answer(asked), enumerate(asked), strict=True):
                    replies[rank] = reply
                    self.sent_bytes[request.direction][rank] += request.sent_bytes(number, len(asked))

    def _groups(self, among: Among, world: int) -> list[range]:
        """The groups of ranks that take part in the same request."""
        if among == "node":
            return [range(first, first + self.local) for first in range(0, world, self.local)]
        if among == "peers":
            return [range(local, world, self.local) for local in range(self.local)]
        return [range(world)]


def answer(requests: Sequence[Request]) -> list[Tensor | None]:
    """Returns the replies to one request from each rank; refuses different requests, which would hang on a cluster."""
    kinds = {(type(request).__name__, request.among, request.payload.shape) for request in requests}
    if len(kinds) > 1:
        raise RuntimeError(f"the ranks take different branches: {sorted(map(str, kinds))}")
    first, world = requests[0], len(requests)
    if isinstance(first, Broadcast):
        return [first.payload] * world
    stacked = torch.stack([request.payload for request in requests])
    if isinstance(first, AllToAll):
        return list(stacked.unbind(1))
    if isinstance(first, AllReduce):
        return [stacked.sum(dim=0)] * world
    assert isinstance(first, Gather | AllGather)
    return [stacked, *[None] * (world - 1)] if isinstance(first, Gather) else [stacked] * world
