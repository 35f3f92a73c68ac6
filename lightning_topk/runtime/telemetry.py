"""Turns results into reports of one rank's exchanges: bytes, times and compression errors.

Only the thread that runs backward uses reports, between two passes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_topk.bucket import Bucket, Buckets
from lightning_topk.core.endpoint import BucketPlan, Outcome
from lightning_topk.volume import Volume

Mark = Any
"""A point in time: seconds of the host's clock, or an event in a CUDA stream."""
Timing = tuple[Mark, Mark | None, Mark]
"""Marks of when an exchange began, of when the last gradient was ready (None if backward hides all), and of its end."""


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


class Result(NamedTuple):
    """The result of a job: among others the entries ``k`` that fit into this worker's payloads."""

    bucket: Bucket
    plan: BucketPlan
    outcome: Outcome
    sent: Volume
    k: int


@dataclass
class Report:
    """One rank's exchanges since the last report.

    Attributes:
        bytes: Bytes sent to other ranks in exchanges; with FSDP2, without those that FSDP sends inside a node.
        elements: Gradient elements exchanged.
        k: Capacity of this worker's payloads in entries.
        selected: Nonzero entries that its selector selected, and uncompressed elements; zero unless measured.
        energy: ``[2, 2]`` float64, the sums over buckets of ‖a‖² and ‖a - C(a)‖² (columns) for this worker's uplink and
            this server's downlink (rows); zero unless measured.
        exchanges: Number of exchanged gradients.
        nbytes: Total bytes of these gradients.
        largest: Bytes of the largest one.
        timings: Of each exchange, in order, if they were timed.
        layers: By parameter, ``[3]`` float64: ‖a‖², ‖a - C(a)‖² and entries sent; empty unless measured.
    """

    bytes: Volume = field(default_factory=Volume)
    elements: int = 0
    k: int = 0
    selected: int = 0
    energy: Tensor = field(default_factory=lambda: torch.zeros(2, 2, dtype=torch.float64))
    exchanges: int = 0
    nbytes: int = 0
    largest: int = 0
    timings: list[Timing] = field(default_factory=list)
    layers: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def times(self) -> tuple[float, float]:
        """Seconds spent in exchanges, and the part after the last gradient was ready, which backward could not hide.

        Zero unless timed. Waits for the device until these exchanges have ended.
        """
        total = exposed = 0.0
        before: Mark | None = None
        for begun, ready, ended in self.timings:
            took = seconds(begun, ended)
            total += took if before is None else min(took, seconds(before, ended))  # two may share time: count it once
            exposed += 0.0 if ready is None else max(0.0, seconds(ready, ended))
            before = ended
        return total, min(exposed, total)


class Telemetry:
    """Bytes, times and compression errors of one rank's exchanges."""

    def __init__(self, buckets: Buckets, shards_per_node: int) -> None:
        self._buckets, self._shards_per_node = buckets, shards_per_node
        self.results: deque[Result] = deque()
        self.timings: deque[Timing] = deque()
        """Results of exchanges, from the lane, and when they took place, in order, if they are timed."""
        self.measure = self.measure_layers = self.timing = False
        """Whether exchanges measure their compression error, the error of each parameter, and their time."""
        self._report = Report()
        self._measured: list[Result] = []
        self._nonfinite_steps: Tensor | int = 0
        self._nonfinite_reported: Tensor | int = 0

    def collect(self) -> None:
        """Adds the results of finished exchanges. Values stay on the device, so the host does not wait."""
        report, results = self._report, [self.results.popleft() for _ in range(len(self.results))]
        for result in results:
            nbytes = result.plan.numel * result.plan.itemsize
            report.bytes += result.sent.of_shards(self._shards_per_node)
            report.elements += result.plan.layout.numel
            report.k += result.k
            report.exchanges += 1
            report.nbytes += nbytes
            report.largest = max(report.largest, nbytes)
            if result.outcome.uplink.error is not None:
                self._measured.append(result)
        if results:
            failed = torch.stack([~result.outcome.finite for result in results]).any()
            before = self._nonfinite_steps
            if isinstance(before, Tensor) and before.is_cuda:  # possibly created on another stream, and freed here
                before.record_stream(torch.cuda.current_stream(before.device))
            self._nonfinite_steps = self._nonfinite_steps + failed

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
        report.timings = [self.timings.popleft() for _ in range(len(self.timings))]
        for bucket, plan, outcome, *_ in self._measured:
            up = outcome.uplink
            for side, stats in enumerate((up, outcome.downlink)):
                if stats is not None and stats.error is not None:
                    report.energy[side] += stats.error.cpu()
            if up.selected is not None:
                report.selected += int(up.selected) + plan.uncompressed_numel // plan.parts.count
            if up.per_layer is not None:
                for parameter, measured in zip(bucket, up.per_layer.cpu().T, strict=True):
                    name = self._buckets.names[parameter]
                    report.layers[name] = report.layers.get(name, 0) + measured
        self._measured.clear()
        self._nonfinite_reported = self._nonfinite_steps
        return report

    def drop_report(self) -> None:
        """Discards the exchanges since the last report, which belong to no training step."""
        self.collect()
        self._report = Report()
        self._measured.clear()
        self.timings.clear()
        self._nonfinite_steps = self._nonfinite_reported

    def continue_from(self, other: Telemetry) -> None:
        """Continues the counts and measurements of another state of the same run."""
        self.measure, self.measure_layers, self.timing = other.measure, other.measure_layers, other.timing
        self._nonfinite_steps = self._nonfinite_reported = other._nonfinite_steps
