"""Jobs: the exchange of one gradient over process groups, from its endpoint to its result.

A lane runs jobs, on CPU in its own thread. A result goes to a queue, which the thread that runs backward empties
between two passes. So no two threads write the same field, and nothing here calls the side that submits jobs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core import guards
from lightning_topk.core.endpoint import BucketPlan
from lightning_topk.core.link import Measure
from lightning_topk.core.requests import Volume, request_volume
from lightning_topk.runtime import collectives
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.messages import LOGGER
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.telemetry import Mark, Result, Timing, mark

Steps = Generator["dist.Work | None", None, Tensor]
"""A generator that yields before it waits: a collective, or None to wait until all earlier steps have ended."""


@dataclass(eq=False)
class Job:
    """One gradient to exchange, and everything that its exchange depends on.

    Attributes:
        gradient: The gradient, of any shape; overwritten.
        name: Name in error messages.
        used: ``[parameters]`` bool, which parameters of the bucket this rank used; None if all.
        step: Gradients exchanged before this one.
        scale: Scalar by which the loss was multiplied; None without a GradScaler.
        groups: The process groups. Jobs in progress at the same time have different ones.
        timings: Takes the time of the exchange; None if it is not timed.
        ready: Mark after which backward does not hide the exchange; None if backward hides all of it.
    """

    gradient: Tensor
    bucket: Bucket
    plan: BucketPlan
    name: str
    used: Tensor | None
    step: int
    epoch: int
    scale: Tensor | None
    measure: Measure
    residuals: Residuals
    groups: Groups
    results: deque[Result]
    timings: deque[Timing] | None = None
    ready: Mark | None = None

    @torch.no_grad()
    def run(self, background: bool = False) -> Steps:
        """Exchanges the gradient; returns the delivered one.

        In the ``background``, collectives run asynchronously while other jobs progress; if not, it never yields.
        """
        # Sparse gradients are converted to dense tensors for the exchange, and back afterwards. On a GPU the host waits
        # for that: the size of a sparse tensor depends on data.
        sparse = self.gradient.is_sparse
        try:
            g = (self.gradient.to_dense() if sparse else self.gradient).view(-1)
            if g.numel():
                yield from self._exchange(g, background)
            elif background:
                yield None  # ends in its turn: until then the next exchange must not use its groups
            return g.view(self.gradient.shape).to_sparse(1) if sparse else self.gradient
        except Exception as error:
            raise RuntimeError(
                f"lightning_topk: the {self.plan.topology.name} exchange of {self.name} ({self.gradient.numel()} "
                f"elements) failed on {self.groups.place}: {error} (A rank that does not respond within the timeout of "
                f"{self.groups.timeout} counts as lost.)"
            ) from error

    def _exchange(self, g: Tensor, background: bool) -> Generator[dist.Work, None, None]:
        """Exchanges ``g`` ``[numel]`` and queues the result: performs the exchange's requests, and counts their bytes.

        The DEBUG log gets a line before each collective: after a timeout, NCCL's watchdog ends the process and names
        only the group, the collective and its size.
        """
        begun, plan, groups = None if self.timings is None else mark(g.device), self.plan, self.groups
        rank, world, local = dist.get_rank(groups.all), dist.get_world_size(groups.all), groups.local
        end = self.residuals.endpoint(self.bucket, plan)
        codecs, sent, reply = plan.codecs(self.step, self.epoch, end.uplink.selector), Volume(), None
        exchange = guards.exchange(end, g, codecs, self.step, self.scale, self.used, self.measure)
        while True:
            try:
                request = exchange.send(reply)
            except StopIteration as stopped:
                outcome = stopped.value
                break
            sent += request_volume(request, rank, world, local)
            if LOGGER.isEnabledFor(logging.DEBUG):
                what = type(request).__name__, request.payload.numel(), request.among, request.direction
                where = groups.place, self.step, self.name  # not the job, which a record of the log would keep
                LOGGER.debug("%s, step %d, %s: %s of %d elements among %s, %s", *where, *what)
            across_nodes = request.among == "all" and 1 < local < world
            reply, work = collectives.perform(request, groups.among[request.among], background, across_nodes)
            if work is not None:
                yield work
                work.wait()
        k = codecs.uplink.k * plan.layout.shards + plan.uncompressed_numel // plan.parts.count
        sent += plan.dense_volume
        self.results.append(Result(self.bucket, plan, outcome, sent, min(k, plan.layout.numel)))
        if self.timings is not None:
            self.timings.append((begun, self.ready, mark(g.device)))
