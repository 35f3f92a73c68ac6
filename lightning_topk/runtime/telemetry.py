"""Folds the records of whole passes into reports of one rank's exchanges: bytes, times and compression errors.

A pass is folded once, when all its exchanges have ended. Until then, even in the middle of a backward pass and from any
thread, reports and counts cover only earlier passes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_topk.bucket import Bucket
from lightning_topk.core import ops
from lightning_topk.core.endpoint import BucketPlan, Codecs, Outcome
from lightning_topk.optim.applied import Clipping
from lightning_topk.runtime.jobs import Job, Mark, Pass, seconds
from lightning_topk.runtime.shares import Shares
from lightning_topk.volume import Volume


@dataclass
class Report:
    """One rank's exchanges since the last report.

    Attributes:
        bytes: Bytes sent to other ranks in exchanges; with FSDP2, without those that FSDP sends inside a node.
        elements: Gradient elements exchanged.
        k: Capacity of this worker's payloads in entries.
        measured: Buckets whose error was measured, and the outcomes of their exchanges.
        timed: For each timed pass, its jobs, and the mark after which no backward work was left to overlap with them
            (None if backward waited for each).
    """

    bytes: Volume = field(default_factory=Volume)
    elements: int = 0
    k: int = 0
    measured: list[tuple[Bucket, Outcome]] = field(default_factory=list)
    timed: list[tuple[list[Job], Mark | None]] = field(default_factory=list)

    @cached_property
    def energy(self) -> Tensor:
        """``[2, 2]`` float64 on the CPU: for uplink and downlink (rows), ‖a‖² and ‖a - C(a)‖² (columns).

        They are sums over this worker's and this server's buckets, zero unless measured. Waits for the device.
        """
        total = torch.zeros(2, 2, dtype=torch.float64, device="cpu")
        for _, outcome in self.measured:
            for side, error in enumerate(outcome.errors):
                if error is not None:
                    total[side] += error.cpu()
        return total

    @cached_property
    def layers(self) -> dict[Tensor, Tensor]:
        """By parameter, ``[3]`` float64 on the CPU: ‖a‖², ‖a - C(a)‖² and entries sent; empty unless measured."""
        layers: dict[Tensor, Tensor] = {}
        for bucket, outcome in self.measured:
            if (measured := outcome.per_layer) is not None:
                for parameter, column in zip(bucket, measured.cpu().T, strict=True):
                    layers[parameter] = layers.get(parameter, 0) + column
        return layers

    @cached_property
    def times(self) -> tuple[float, float]:
        """Seconds spent in exchanges, and the part after the last gradient was ready, which overlaps with no backward.

        Time that several exchanges share counts once. Zero unless timed. Waits for the device until they have ended.
        """
        total = exposed = 0.0
        for jobs, ready in self.timed:
            start = jobs[0].begun
            hidden = -math.inf if ready is None else seconds(start, ready)
            until = -math.inf  # end of the exchanges so far
            for begun, ended in sorted((seconds(start, each.begun), seconds(start, each.ended)) for each in jobs):
                total += max(0.0, ended - max(begun, until))
                exposed += max(0.0, ended - max(begun, until, hidden))
                until = max(until, ended)
        return total, exposed


class Telemetry:
    """Bytes, times and compression errors of one rank's exchanges."""

    def __init__(self, rank: int, shards_per_node: int, clipping: Clipping, shares: Shares) -> None:
        self._rank, self._shards_per_node, self._clipping, self._shares = rank, shards_per_node, clipping, shares
        self.measure = self.measure_layers = self.timing = False
        """Whether exchanges measure their compression error, the error of each parameter, and their time."""
        self._lock = threading.Lock()
        self._ended: Pass | None = None  # the last pass, until it is folded
        self._report = Report()
        self.sent, self.passes = Volume(), 0
        """The bytes of all passes of the run, and their number."""
        self._exchanged: list[tuple[BucketPlan, Codecs, bool]] = []  # in the last pass, and whether ranks voted
        self._counted = Volume(), 0, 0  # its bytes, elements and capacity
        self._nonfinite_steps: Tensor | int = 0
        self._nonfinite_reported: Tensor | int = 0

    def end_pass(self, ended: Pass) -> None:
        """Keeps a pass until all its exchanges have ended."""
        with self._lock:
            self._ended = ended

    def collect(self) -> None:
        """Folds the last pass, if all its exchanges have ended. Values stay on the device: the host does not wait."""
        with self._lock:
            if self._ended is not None and not self._ended.in_flight:
                ended, self._ended = self._ended, None
                self._fold(ended)

    def _fold(self, ended: Pass) -> None:
        report, jobs = self._report, ended.jobs
        if not jobs:
            return
        buckets, outcomes = [job.bucket for job in jobs], [job.outcome for job in jobs if job.outcome is not None]
        exchanged = [(job.plan, job.codecs, job.used is not None) for job in jobs]
        if exchanged != self._exchanged:
            self._exchanged, self._counted = exchanged, self._count(jobs)
        sent, elements, capacity = self._counted
        report.bytes, self.sent, self.passes = report.bytes + sent, self.sent + sent, self.passes + 1
        report.elements, report.k = report.elements + elements, report.k + capacity
        if outcomes[0].errors:  # then all have some
            report.measured += zip(buckets, outcomes, strict=True)
        if ended.timed:
            report.timed.append((jobs, None if ended.waits else ended.ready))
        if ended.weighs:
            energies = {job.bucket: job.energies for job in jobs if job.energies is not None}
            self._shares.fold((*ended.buckets,), energies)
        if ended.clipped:
            self._clipping.fold(buckets)
        failed = ~torch.stack([outcome.finite for outcome in outcomes]).all()
        if isinstance(self._nonfinite_steps, Tensor):
            ops.use_here(self._nonfinite_steps)
        self._nonfinite_steps = self._nonfinite_steps + failed

    def _count(self, jobs: Sequence[Job]) -> tuple[Volume, int, int]:
        """The bytes of exchanges, their elements, and the capacity of their payloads."""
        votes = [None if job.used is None else len(job.used) for job in jobs]
        each = (job.plan.volume_of(job.codecs, self._rank, voters) for job, voters in zip(jobs, votes, strict=True))
        sent, numel = sum(each, Volume()), sum(job.plan.layout.numel for job in jobs)
        return sent.of_shards(self._shards_per_node), numel, sum(job.plan.capacity(job.codecs) for job in jobs)

    @property
    def exchanged(self) -> bool:
        """Whether anything was exchanged since the last report."""
        self.collect()
        return self._report.elements > 0

    @property
    def nonfinite_steps(self) -> int:
        """Backward passes so far that delivered a gradient with a NaN or an infinity. Waits for the device."""
        self.collect()
        return int(self._nonfinite_steps)

    def report(self) -> Report:
        """Returns the report since the last call: a :class:`.CompressionMonitor` takes it at every step."""
        self.collect()
        report, self._report = self._report, Report()
        self._nonfinite_reported = self._nonfinite_steps
        return report

    def drop_report(self) -> None:
        """Discards the exchanges since the last report, which belong to no training step."""
        self.collect()
        self._report, self._nonfinite_steps = Report(), self._nonfinite_reported

    def continue_from(self, other: Telemetry) -> None:
        """Continues the counts and measurements of another state of the same run."""
        self.measure, self.measure_layers, self.timing = other.measure, other.measure_layers, other.timing
        self.sent, self.passes = other.sent, other.passes
        self._nonfinite_steps = self._nonfinite_reported = other._nonfinite_steps
