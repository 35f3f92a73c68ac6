"""Folds the records of whole passes into reports of one rank's exchanges: bytes, times and compression errors.

A pass is folded once, when all its exchanges have ended. Until then, also in the middle of a backward pass and from any
thread, reports and counts are those of the passes before.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.optim.applied import Clipping
from lightning_topk.runtime.passes import Mark, Pass, Record, seconds
from lightning_topk.runtime.shares import Shares
from lightning_topk.volume import Volume


@dataclass
class Report:
    """One rank's exchanges since the last report.

    Attributes:
        bytes: Bytes sent to other ranks in exchanges; with FSDP2, without those that FSDP sends inside a node.
        elements: Gradient elements exchanged.
        k: Capacity of this worker's payloads in entries.
        measured: Records of the exchanges whose error was measured.
        timed: Of each pass that was timed: its records, and the mark from which on backward hid nothing of its
            exchanges (None if it waited for each).
    """

    bytes: Volume = field(default_factory=Volume)
    elements: int = 0
    k: int = 0
    measured: list[Record] = field(default_factory=list)
    timed: list[tuple[list[Record], Mark | None]] = field(default_factory=list)

    @cached_property
    def energy(self) -> Tensor:
        """``[2, 2]`` float64 on the CPU: of uplink and downlink (rows), ‖a‖² and ‖a - C(a)‖² (columns).

        They are sums over this worker's and this server's buckets, zero unless measured. Waits for the device.
        """
        total = torch.zeros(2, 2, dtype=torch.float64)
        for record in self.measured:
            for side, stats in enumerate((record.outcome.uplink, record.outcome.downlink)):
                if stats is not None and stats.error is not None:
                    total[side] += stats.error.cpu()
        return total

    @cached_property
    def layers(self) -> dict[Tensor, Tensor]:
        """By parameter, ``[3]`` float64 on the CPU: ‖a‖², ‖a - C(a)‖² and entries sent; empty unless measured."""
        layers: dict[Tensor, Tensor] = {}
        for record in self.measured:
            if (measured := record.outcome.uplink.per_layer) is not None:
                for parameter, column in zip(record.bucket, measured.cpu().T, strict=True):
                    layers[parameter] = layers.get(parameter, 0) + column
        return layers

    @cached_property
    def times(self) -> tuple[float, float]:
        """Seconds spent in exchanges, and the part after the last gradient was ready, which backward could not hide.

        Time that several exchanges share counts once. Zero unless timed. Waits for the device until they have ended.
        """
        total = exposed = 0.0
        for records, ready in self.timed:
            start = records[0].begun
            hidden = -math.inf if ready is None else seconds(start, ready)
            until = -math.inf  # end of the exchanges so far
            for begun, ended in sorted((seconds(start, each.begun), seconds(start, each.ended)) for each in records):
                total += max(0.0, ended - max(begun, until))
                exposed += max(0.0, ended - max(begun, until, hidden))
                until = max(until, ended)
        return total, exposed


class Telemetry:
    """Bytes, times and compression errors of one rank's exchanges."""

    def __init__(self, shards_per_node: int, clipping: Clipping, shares: Shares) -> None:
        self._shards_per_node, self._clipping, self._shares = shards_per_node, clipping, shares
        self.measure = self.measure_layers = self.timing = False
        """Whether exchanges measure their compression error, the error of each parameter, and their time."""
        self._lock = threading.Lock()
        self._ended: Pass | None = None  # the last pass, until it is folded
        self._report = Report()
        self.sent, self.passes = Volume(), 0
        """The bytes of all passes of the run, and their number."""
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
        report, records = self._report, [record for record in ended.records if record is not None]
        if not records:
            return
        sent = sum((record.sent for record in records), Volume()).of_shards(self._shards_per_node)
        report.bytes, self.sent, self.passes = report.bytes + sent, self.sent + sent, self.passes + 1
        for record in records:
            report.elements += record.plan.layout.numel
            report.k += record.k
        if records[0].outcome.uplink.error is not None:  # then all have one
            report.measured += records
        if ended.timed:
            report.timed.append((records, None if ended.waits else ended.ready))
        self._shares.fold(records)
        norms = [record.outcome.norms for record in records if record.outcome.norms is not None]
        if norms and len(norms) == len(records):
            self._clipping.fold([record.bucket for record in records], norms)
        failed = torch.stack([~record.outcome.finite for record in records]).any()
        if isinstance(self._nonfinite_steps, Tensor):
            ops.use_here(self._nonfinite_steps)
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
