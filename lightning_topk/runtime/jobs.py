"""Jobs: the exchange of one gradient, from its endpoint to its result.

A lane calls the methods of a job, on CPU from its own thread. A result goes to a queue, which the thread that runs
backward empties between two passes. So no two threads write the same field, and nothing here calls the side that
submits jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core.endpoint import BucketPlan, Exchange, Outcome
from lightning_topk.core.guards import exchange
from lightning_topk.core.link import Measure
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.volume import Volume

Duration = Callable[[], tuple[float, float]]
"""Returns the seconds of an exchange, and of the part after the last gradient was ready. Waits for the device."""


class Result(NamedTuple):
    """The result of a job.

    Attributes:
        bucket: The parameters of the gradient.
        plan: The exchange plan.
        measured: Whether errors were measured.
        outcome: The outcome.
        sent: Bytes sent, and those of a ring all-reduce.
        k: Entries that fit into this worker's payloads.
    """

    bucket: Bucket
    plan: BucketPlan
    measured: bool
    outcome: Outcome
    sent: Volume
    k: int


@dataclass(eq=False)
class Job:
    """One gradient to exchange, and everything that its exchange depends on.

    Attributes:
        gradient: The gradient, of any shape; overwritten.
        bucket: Its parameters.
        plan: The exchange plan.
        name: Name in error messages.
        used: ``[parameters]`` bool, which of them this rank used; None if all.
        step: Gradients exchanged before this one.
        epoch: Epochs completed.
        scale: Scalar by which the loss was multiplied; None without a GradScaler.
        measure: Errors to measure.
        residuals: The rank's residuals.
        groups: The process groups. Exchanges in progress at the same time have different ones.
        results: Takes the result.
        clock: The lane, if the exchange is timed.
        ready: The lane's mark, after which backward does not hide the exchange; None if backward hides all of it.
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
    clock: Any | None = None
    ready: Any | None = None

    def __str__(self) -> str:
        return f"{self.groups.place}, step {self.step}, {self.name}"

    def begin(self) -> Exchange | None:
        """Begins the exchange; None if there is nothing to exchange."""
        self._begun = None if self.clock is None else self.clock.mark()
        # Sparse gradients are converted to dense tensors for the exchange, and back afterwards. On a GPU the host waits
        # for that: the size of a sparse tensor depends on data.
        self._dense = (self.gradient.to_dense() if self.gradient.is_sparse else self.gradient).view(-1)
        if self._dense.numel() == 0:
            return None
        end = self.residuals.endpoint(self.bucket, self.plan)
        self._codecs = self.plan.codecs(self.step, self.epoch, end.uplink.selector)
        return exchange(end, self._dense, self._codecs, self.step, self.scale, self.used, self.measure)

    def end(self, outcome: Outcome | None, sent: Volume) -> Tensor:
        """Takes the outcome, None if there is none, and the bytes sent; returns the delivered gradient."""
        plan = self.plan
        if outcome is not None:
            k = self._codecs.uplink.k * plan.layout.shards + plan.uncompressed_numel // plan.parts.count
            sent += plan.dense_volume
            k = min(k, plan.layout.numel)
            self.results.append(Result(self.bucket, plan, self.measure.error, outcome, sent, k))
        if self.clock is not None:
            self.clock.note_time(self._begun, self.ready)
        shaped = self._dense.view(self.gradient.shape)
        return shaped.to_sparse(1) if self.gradient.is_sparse else self.gradient

    def failure(self, error: Exception) -> RuntimeError:
        """The error that users see, with its place."""
        return RuntimeError(
            f"lightning_topk: the {self.plan.topology.name} exchange of {self.name} ({self.gradient.numel()} elements) "
            f"failed on {self.groups.place}: {error} (A rank that does not respond within the timeout of "
            f"{self.groups.timeout} counts as lost.)"
        )
