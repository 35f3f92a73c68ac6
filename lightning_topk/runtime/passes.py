"""Backward passes: what the exchanges of one share, and the records of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core.endpoint import BucketPlan, Outcome
from lightning_topk.core.link import NOTHING, Measure
from lightning_topk.optim.applied import Rates
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.volume import Volume

Mark = Any
"""A point in time: seconds of the host's clock, or an event in a CUDA stream."""


def mark(device: torch.device) -> Mark:
    """Marks a point in the caller's work on a device; on a GPU in the current stream."""
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


class Record(NamedTuple):
    """One exchange that has ended."""

    bucket: Bucket
    plan: BucketPlan
    outcome: Outcome
    sent: Volume  # with the bytes of a dense all-reduce
    k: int  # entries that fit into this worker's payloads
    begun: Mark | None  # None if it was not timed
    ended: Mark | None
    energy: Tensor | None = None  # delivered to compressed parameters, scalar float64; if it is weighed


@dataclass(eq=False)
class Pass:
    """A backward pass whose gradients are exchanged: what its jobs share, and their records.

    Attributes:
        step: Passes before this one.
        epoch: The epoch, for schedules.
        residuals: The memories of this rank.
        scale: Scalar by which the loss was multiplied; None without a GradScaler.
        rates: The learning rates of its gradients.
        measure: Statistics that its jobs measure.
        timed: Whether its jobs are timed.
        waits: Whether backward waits for each job, so that it hides none of them.
        clips: Whether the gradients are clipped in the exchange, if a norm was told: if any of them may wait.
        weighs: Whether jobs measure the energy of what they deliver (:mod:`.shares`).
        ready: Mark of when the last gradient was ready: from then on, backward hides nothing.
        buckets: The buckets exchanged so far.
        records: Of each exchange, in the order of submission; None until it has ended. Empty gradients have none.
        ended: Whether all its jobs were submitted.
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
    records: list[Record | None] = field(default_factory=list)
    ended: bool = False

    @property
    def whole(self) -> bool:
        """Whether all its exchanges have ended."""
        return self.ended and all(self.records)
