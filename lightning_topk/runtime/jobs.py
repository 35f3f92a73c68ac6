"""Backward passes and their jobs. A job exchanges one gradient over process groups, and then records how.

A lane runs the jobs, on CPU in its own threads. A job writes only its own fields, and the thread that runs backward
reads them when all jobs of the pass have ended. So no two threads write the same place, and nothing here calls the code
that submits jobs.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core import guards
from lightning_topk.core.endpoint import BucketPlan, Codecs, Outcome
from lightning_topk.core.link import NOTHING, Clip, Measure, Step
from lightning_topk.messages import LOGGER
from lightning_topk.optim.applied import Rates
from lightning_topk.runtime import collectives, shares
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.residuals import Residuals

Mark = Any
"""A point in time: seconds of the host's clock, or an event in a CUDA stream."""


def mark(device: torch.device) -> Mark:
    """Marks a point in the caller's work on a device: on a GPU, in the current stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(start: Mark, end: Mark) -> float:
    """Seconds between two marks. Waits for the device."""
    if isinstance(start, float):
        return float(end - start)
    for each in (start, end):  # the streams may differ, and neither waits for the other
        each.synchronize()
    return float(start.elapsed_time(end)) / 1000


@dataclass(eq=False)
class Pass:
    """A backward pass whose gradients are exchanged: its jobs, and what they share.

    Attributes:
        step: Passes before this one.
        epoch: The epoch, for schedules.
        residuals: The memories of this rank.
        scale: Scalar by which the loss was multiplied; None without a GradScaler.
        rates: The learning rates of its gradients.
        measure: Statistics that its jobs measure.
        timed: Whether its jobs are timed.
        waits: Whether backward waits for each job, so that none overlaps with it.
        clips: Whether the exchange clips gradients, if the user passed a norm: whether any of them may wait.
        weighs: Whether jobs measure energies of gradients (:mod:`.shares`).
        ready: Mark of when the last gradient was ready: then no backward work is left to overlap with.
        buckets: The buckets exchanged so far.
        jobs: The exchanges, in the order of submission. Empty gradients have none.
    """

    step: int
    epoch: int
    residuals: Residuals
    scale: Tensor | None = None
    rates: Rates | None = None
    measure: Measure = NOTHING
    timed: bool = False
    waits: bool = False
    clips: bool = False
    weighs: bool = False
    ready: Mark | None = None
    buckets: list[Bucket] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    @property
    def clipped(self) -> bool:
        """Whether all its gradients were clipped in the exchange."""
        return bool(self.jobs) and None not in [job.clip for job in self.jobs]

    @property
    def in_flight(self) -> bool:
        """Whether a job that was submitted has not ended."""
        return not all(job.outcome for job in self.jobs)


@dataclass(eq=False)
class Job:
    """One gradient to exchange; once ``outcome`` is set, the record of its exchange.

    Attributes:
        gradient: The gradient, of any shape; overwritten.
        name: Name in error messages.
        used: Whether this rank used each parameter of the bucket; None if it used all.
        clip: The user's clipping; None if the exchange does not clip.
        codecs: Codecs of the payloads.
        energies: ``[2, parameters]``, of each parameter's gradient as it entered and as delivered; if the pass weighs.
        begun, ended: Marks, if the pass is timed.
    """

    gradient: Tensor
    bucket: Bucket
    plan: BucketPlan
    name: str
    used: Sequence[bool] | None
    clip: Clip | None
    of: Pass
    codecs: Codecs = field(init=False)
    energies: Tensor | None = field(default=None, init=False)
    begun: Mark | None = field(default=None, init=False)
    ended: Mark | None = field(default=None, init=False)
    outcome: Outcome | None = field(default=None, init=False)

    def run(self, groups: Groups, wait: Callable[[dist.Work], None] | None = None) -> Tensor:
        """Exchanges the gradient over ``groups``, which no other job in progress uses; returns the delivered one.

        With ``wait``, collectives run in the background, and ``wait`` is called with each. Without it, they run in the
        current stream, or the caller waits. Autograd must be off.
        """
        # Sparse gradients are converted to dense tensors for the exchange, and back afterwards. On a GPU the host waits
        # for that: the size of a sparse tensor depends on data.
        gradient, sparse = self.gradient, self.gradient.is_sparse
        del self.gradient  # its memory may be freed before this record
        try:
            g = (gradient.to_dense() if sparse else gradient).view(-1)
            if g.numel():
                self._exchange(g, groups, wait)
            return g.view(gradient.shape).to_sparse(1) if sparse else gradient
        except Exception as error:
            raise RuntimeError(
                f"lightning_topk: the {self.plan.topology.name} exchange of {self.name} ({gradient.numel()} elements) "
                f"failed on rank {groups.rank} of {groups.world}: {error} (A rank that does not respond within the "
                f"timeout of {groups.timeout} counts as lost.)"
            ) from error

    def _exchange(self, g: Tensor, groups: Groups, wait: Callable[[dist.Work], None] | None) -> None:
        """Exchanges ``g`` ``[numel]``: performs the exchange's requests.

        The DEBUG log gets a line before each collective: after a timeout, NCCL's watchdog ends the process and names
        only the group, the collective and its size.
        """
        now, plan, reply = self.of, self.plan, None
        self.begun = mark(g.device) if now.timed else None
        entered = shares.energies_of(g, plan.parts.sizes) if now.weighs else None
        end = now.residuals.endpoint(self.bucket, plan)
        fade = 1.0 if now.rates is None else now.residuals.fade(self.bucket, now.rates)
        self.codecs = plan.codecs(now.step, now.epoch, end.uplink.selector)
        step = Step(now.step, now.scale, now.measure, fade, self.clip)
        exchange, logged = guards.exchange(end, g, self.codecs, step, self.used), LOGGER.isEnabledFor(logging.DEBUG)
        try:
            for place in itertools.count():
                request = exchange.send(reply)
                if logged:
                    what = type(request).__name__, request.payload.numel(), request.among, request.direction
                    where = groups.rank, groups.world, now.step, self.name  # not the job, which a log would keep
                    LOGGER.debug("rank %d of %d, step %d, %s: %s of %d elements among %s, %s", *where, *what)
                reply = collectives.perform(request, groups, place, wait)
        except StopIteration as stopped:
            outcome: Outcome = stopped.value
        finally:
            exchange.close()  # after a failure, at once: undelivered entries return to the residuals
        self.ended = mark(g.device) if now.timed else None
        if entered is not None:
            self.energies = torch.stack([entered, shares.energies_of(g, plan.parts.sizes)])
        self.outcome = outcome  # last: it says that the job has ended
