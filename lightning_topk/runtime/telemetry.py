"""Turns the results of whole passes into reports of one rank's exchanges: bytes, times and compression errors.

A pass is folded once, when all its exchanges have ended. Until then, also in the middle of a backward pass and from any
thread, reports and counts are those of the passes before.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_topk.bucket import Buckets
from lightning_topk.runtime.applied import Clipping
from lightning_topk.runtime.passes import Mark, Pass, Result, Timing, seconds
from lightning_topk.volume import Volume


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
        timings: Of each pass that was timed: of its exchanges, in order, and the mark from which on backward hid
            nothing of them (None if it waited for each).
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
    timings: list[tuple[list[Timing], Mark | None]] = field(default_factory=list)
    layers: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def times(self) -> tuple[float, float]:
        """Seconds spent in exchanges, and the part after the last gradient was ready, which backward could not hide.

        Zero unless timed. Waits for the device until these exchanges have ended.
        """
        total = exposed = 0.0
        for exchanges, ready in self.timings:
            before: Mark | None = None
            for begun, ended in exchanges:
                took = seconds(begun, ended)
                took = took if before is None else min(took, seconds(before, ended))  # two may share time: once
                total += took
                exposed += took if ready is None else min(took, max(0.0, seconds(ready, ended)))
                before = ended
        return total, exposed


class Telemetry:
    """Bytes, times and compression errors of one rank's exchanges."""

    def __init__(self, buckets: Buckets, shards_per_node: int, clipping: Clipping) -> None:
        self._buckets, self._shards_per_node, self._clipping = buckets, shards_per_node, clipping
        self.measure = self.measure_layers = self.timing = False
        """Whether exchanges measure their compression error, the error of each parameter, and their time."""
        self._lock = threading.Lock()
        self._ended: Pass | None = None  # the last pass, until it is folded
        self._report = Report()
        self._measured: list[Result] = []
        self._nonfinite_steps: Tensor | int = 0
        self._nonfinite_reported: Tensor | int = 0

    def end_pass(self, ended: Pass) -> None:
        """Keeps a pass until all its exchanges have ended."""
        with self._lock:
            self._ended = ended

    def collect(self) -> None:
        """Folds the last pass, if all its exchanges have ended. Values stay on the device: the host does not wait."""
        with self._lock:
            if self._ended is not None and self._ended.whole:
                ended, self._ended = self._ended, None
                self._fold(ended)

    def _fold(self, ended: Pass) -> None:
        report = self._report
        results = [result for result in ended.results if result.outcome is not None]
        outcomes = [result.outcome for result in results if result.outcome is not None]
        for result, outcome in zip(results, outcomes, strict=True):
            nbytes = result.plan.numel * result.plan.itemsize
            report.bytes += result.sent.of_shards(self._shards_per_node)
            report.elements += result.plan.layout.numel
            report.k += result.k
            report.exchanges += 1
            report.nbytes += nbytes
            report.largest = max(report.largest, nbytes)
            if outcome.uplink.error is not None:
                self._measured.append(result)
        if ended.timed:
            timed = [result.times for result in results if result.times is not None]
            report.timings.append((timed, None if ended.waits else ended.ready))
        if results:
            norms = [each.norms for each in outcomes if each.norms is not None]
            if norms:  # then all have them
                self._clipping.fold([result.bucket for result in results], norms)
            failed = torch.stack([~outcome.finite for outcome in outcomes]).any()
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
        for bucket, plan, outcome, *_ in self._measured:
            assert outcome is not None
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
        self._nonfinite_steps = self._nonfinite_reported

    def continue_from(self, other: Telemetry) -> None:
        """Continues the counts and measurements of another state of the same run."""
        self.measure, self.measure_layers, self.timing = other.measure, other.measure_layers, other.timing
        self._nonfinite_steps = self._nonfinite_reported = other._nonfinite_steps
