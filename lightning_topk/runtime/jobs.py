"""Jobs: the exchange of one gradient over process groups, from its endpoint to its record.

A lane runs jobs, on CPU in its own thread. Each puts its record in its own place in the pass, and the thread that runs
backward reads them when all jobs of the pass have ended. So no two threads write the same place, and nothing here calls
the side that submits jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core import guards
from lightning_topk.core.endpoint import BucketPlan
from lightning_topk.core.link import Clip, Step
from lightning_topk.messages import LOGGER
from lightning_topk.runtime import collectives, shares
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.passes import Pass, Record, mark


@dataclass(eq=False)
class Job:
    """One gradient to exchange.

    Attributes:
        gradient: The gradient, of any shape; overwritten.
        name: Name in error messages.
        used: Of each parameter of the bucket, whether this rank used it; None if it used all.
        clip: The user's clipping; None if nothing was told.
        place: Index of its record in those of its pass; an empty gradient has none.
    """

    gradient: Tensor
    bucket: Bucket
    plan: BucketPlan
    name: str
    used: Sequence[bool] | None
    clip: Clip | None
    of: Pass
    place: int

    @torch.no_grad()
    def run(self, groups: Groups, wait: Callable[[dist.Work], None] | None = None) -> Tensor:
        """Exchanges the gradient over ``groups``, which no other job in progress uses; returns the delivered one.

        With ``wait``, collectives run in the background, and it is called with each. Without, they run in the current
        stream, or the caller waits.
        """
        # Sparse gradients are converted to dense tensors for the exchange, and back afterwards. On a GPU the host waits
        # for that: the size of a sparse tensor depends on data.
        sparse = self.gradient.is_sparse
        try:
            g = (self.gradient.to_dense() if sparse else self.gradient).view(-1)
            if g.numel():
                self._exchange(g, groups, wait)
            return g.view(self.gradient.shape).to_sparse(1) if sparse else self.gradient
        except Exception as error:
            raise RuntimeError(
                f"lightning_topk: the {self.plan.topology.name} exchange of {self.name} ({self.gradient.numel()} "
                f"elements) failed on rank {groups.rank} of {groups.world}: {error} (A rank that does not respond "
                f"within the timeout of {groups.timeout} counts as lost.)"
            ) from error

    def _exchange(self, g: Tensor, groups: Groups, wait: Callable[[dist.Work], None] | None) -> None:
        """Exchanges ``g`` ``[numel]`` and keeps the record: performs the exchange's requests, whose bytes the plan has.

        The DEBUG log gets a line before each collective: after a timeout, NCCL's watchdog ends the process and names
        only the group, the collective and its size.
        """
        now, plan = self.of, self.plan
        begun = mark(g.device) if now.timed else None
        rank, world, local = groups.rank, groups.world, groups.local
        end = now.residuals.endpoint(self.bucket, plan)
        fade = 1.0 if now.rates is None else now.residuals.fade(self.bucket, now.rates)
        codecs, reply = plan.codecs(now.step, now.epoch, end.uplink.selector), None
        step = Step(now.step, now.scale, now.measure, fade, self.clip)
        exchange = guards.exchange(end, g, codecs, step, self.used)
        try:
            while True:
                request = exchange.send(reply)
                if LOGGER.isEnabledFor(logging.DEBUG):
                    what = type(request).__name__, request.payload.numel(), request.among, request.direction
                    where = rank, world, now.step, self.name  # not the job, which a record of the log would keep
                    LOGGER.debug("rank %d of %d, step %d, %s: %s of %d elements among %s, %s", *where, *what)
                across_nodes = request.among == "all" and 1 < local < world
                reply = collectives.perform(request, groups.among[request.among], wait, across_nodes)
        except StopIteration as stopped:
            outcome = stopped.value
        finally:
            exchange.close()  # of one that failed, at once: what was not delivered returns to the residuals
        sent = plan.volume_of(codecs, rank, None if self.used is None else len(self.used))
        k = codecs.uplink.k * plan.layout.shards + plan.uncompressed_numel // plan.parts.count
        ended = mark(g.device) if now.timed else None
        energy = None
        if now.weighs:
            energy = torch.where(outcome.finite, shares.energy(plan.compressed_part(g)), torch.nan)
        now.records[self.place] = Record(
            self.bucket, plan, outcome, sent, min(k, plan.layout.numel), begun, ended, energy
        )
