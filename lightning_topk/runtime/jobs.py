"""The lane's side of a rank: runs the exchanges of jobs in order and returns their results.

A :class:`JobRunner` uses the rank's endpoints. During a backward pass only the lane calls it, on CPU from the lane's
thread. It puts results on a queue, which the thread that runs backward empties between two passes. So no two threads
write the same field, and nothing here calls the side that submits jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core.endpoint import BucketPlan, Codecs, Exchange, Outcome
from lightning_topk.core.guards import exchange
from lightning_topk.core.link import NOTHING, Measure
from lightning_topk.runtime.collectives import Turn
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.lanes import Lane
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.volume import Volume, dense_volume


@dataclass(frozen=True)
class Job:
    """One gradient to exchange, and everything that its exchange depends on.

    Attributes:
        bucket: The parameters of the gradient.
        plan: The exchange plan.
        name: Name in error messages.
        used: ``[parameters]`` bool, which of them this rank used; None if all.
        step: Gradients exchanged before this one.
        epoch: Epochs completed.
        scale: Scalar by which the loss was multiplied; None without a GradScaler.
        measure: Errors to measure.
    """

    bucket: Bucket
    plan: BucketPlan
    name: str = ""
    used: Tensor | None = None
    step: int = 0
    epoch: int = 0
    scale: Tensor | None = None
    measure: Measure = NOTHING


Result = tuple[Job, Outcome, Volume, int]
"""A job, its outcome, the bytes sent and those of a ring all-reduce, and the entries that fit into the payloads."""
Duration = Callable[[], tuple[float, float]]
"""Returns the seconds of an exchange, and of the part after the last gradient was ready. Waits for the device."""


class JobRunner:
    """Runs the exchanges of one rank."""

    def __init__(self, residuals: Residuals, groups: Groups, timeout: timedelta) -> None:
        self._residuals, self._timeout = residuals, timeout
        self._groups = [groups] if groups.second_groups is None else [groups, groups.second_groups]
        self._jobs = 0
        self._ended: Any = None  # end of the last timed exchange, as a mark of the lane
        self._place = f"rank {dist.get_rank(groups.all)} of {dist.get_world_size(groups.all)}"
        self._results: deque[Result] = deque()
        self._durations: deque[Duration] = deque()

    def finished(self) -> tuple[list[Result], list[Duration]]:
        """Returns results and durations since the last call; for the thread that runs backward, between two passes."""
        results = [self._results.popleft() for _ in range(len(self._results))]
        return results, [self._durations.popleft() for _ in range(len(self._durations))]

    def close(self) -> None:
        """Drops the process groups: their threads run as long as a group is referenced."""
        self._groups.clear()

    def turn(self, buffer: Tensor, job: Job, lane: Lane, timed: bool = False, ready: Any | None = None) -> Turn:
        """A job for the lane, which overwrites the gradient in ``buffer`` and returns the buffer.

        If ``timed``, backward does not hide the exchange after the mark ``ready``; it hides all of it if that is None.
        """
        assert self._groups
        groups = self._groups[self._jobs % min(lane.max_in_flight, len(self._groups))]
        self._jobs += 1
        return _Turn(self, groups, f"{self._place}, step {job.step}, {job.name}", buffer, job, lane, timed, ready)

    def note_time(self, lane: Lane, begun: Any, ready: Any | None) -> None:
        """Records that an exchange ends now."""
        ended = lane.mark()
        if lane.max_in_flight > 1 and self._ended is not None:
            begun = max(begun, self._ended)  # time that two exchanges share counts once
        self._ended = ended

        def duration() -> tuple[float, float]:
            return lane.seconds(begun, ended), 0.0 if ready is None else max(0.0, lane.seconds(ready, ended))

        self._durations.append(duration)

    def begin(self, g: Tensor, job: Job) -> tuple[Exchange, Codecs]:
        """Begins the exchange of a gradient ``[numel]``."""
        end = self._residuals.endpoint(job.bucket, job.plan)
        codecs = job.plan.codecs(job.step, job.epoch, end.uplink.selector)
        return exchange(end, g, codecs, job.step, job.scale, job.used, job.measure), codecs

    def end(self, job: Job, outcome: Outcome, sent: Volume, codecs: Codecs) -> None:
        """Records the result of an exchange."""
        plan = job.plan
        k = min(codecs.uplink.k * plan.layout.shards + plan.uncompressed_numel // plan.parts.count, plan.layout.numel)
        self._results.append((job, outcome, sent + dense_volume(plan, self._residuals.rank), k))

    def failure(self, job: Job, numel: int, error: Exception) -> RuntimeError:
        """The error of a failed exchange, with its place."""
        return RuntimeError(
            f"lightning_topk: the {job.plan.topology.name} exchange of {job.name} ({numel} elements) failed on "
            f"{self._place}: {error} (A rank that does not respond within the timeout of {self._timeout} counts as "
            "lost.)"
        )


@dataclass
class _Turn:
    """A job in its turn, see :class:`.Turn`."""

    runner: JobRunner
    groups: Groups
    name: str
    buffer: Tensor
    job: Job
    lane: Lane
    timed: bool
    ready: Any | None

    def begin(self) -> Exchange | None:
        self._begun = self.lane.mark() if self.timed else None
        # Sparse gradients are converted to dense tensors for the exchange, and back afterwards. On a GPU the host waits
        # for that: the size of a sparse tensor depends on data.
        self._dense = (self.buffer.to_dense() if self.buffer.is_sparse else self.buffer).view(-1)
        if self._dense.numel() == 0:
            return None
        path, self._codecs = self.runner.begin(self._dense, self.job)
        return path

    def end(self, outcome: Outcome | None, sent: Volume) -> Tensor:
        if outcome is not None:
            self.runner.end(self.job, outcome, sent, self._codecs)
        if self.timed:
            self.runner.note_time(self.lane, self._begun, self.ready)
        shaped = self._dense.view(self.buffer.shape)
        return shaped.to_sparse(1) if self.buffer.is_sparse else self.buffer

    def failure(self, error: Exception) -> Exception:
        return self.runner.failure(self.job, self.buffer.numel(), error)
