"""Turns outcomes into reports of one rank's exchanges: bytes, times and compression errors.

Used only by the caller's side, between two backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.runtime.buckets import BucketSettings
from lightning_topk.runtime.collectives import Meter
from lightning_topk.runtime.jobs import JobResult, Timed
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.messages import WarnOnce
from lightning_topk.volume import Volume

PROBE_BYTES = 1 << 20
"""Size of the timed all-reduce from which longer ones are estimated: a quarter of a second at 100 Mbit/s."""


@dataclass
class Report:
    """One rank's exchanges since the last report.

    Attributes:
        bytes: Bytes sent to other ranks, by purpose (see :class:`lightning_topk.runtime.collectives.Meter`).
        elements: Gradient elements exchanged.
        k: Capacity of this worker's payloads in entries.
        selected: Nonzero entries that its selector selected, and uncompressed elements; zero unless measured.
        energy: ``[2, 2]`` float64, the sums over buckets of ‖a‖² and ‖a - C(a)‖² (columns) for this worker's uplink and
            this server's downlink (rows); zero unless measured.
        exchanges: Number of exchanged gradients.
        nbytes: Total bytes of these gradients.
        largest: Bytes of the largest one.
        seconds: Time spent in exchanges; zero unless timed.
        exposed_seconds: The part after the last gradient was ready, which backward could not hide.
        layers: By parameter, ``[3]`` float64: ‖a‖², ‖a - C(a)‖² and entries sent; empty unless measured.
    """

    bytes: dict[str, int]
    elements: int = 0
    k: int = 0
    selected: int = 0
    energy: Tensor = field(default_factory=lambda: torch.zeros(2, 2, dtype=torch.float64))
    exchanges: int = 0
    nbytes: int = 0
    largest: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    layers: dict[str, Tensor] = field(default_factory=dict)


class Reporting:
    """Settings, residuals, bytes, times and errors of one rank.

    Args:
        config: The settings, resolved for these ranks.
        residuals: The rank's residuals.
        rank: This rank.
        world: Number of ranks.
        local: Ranks per node.
        epoch: Returns the number of completed epochs.
        say: Shows a message to the user.
    """

    shards_per_node = 1
    """Ranks of this node, this one included, that each exchange a shard of the same gradients."""

    def __init__(
        self,
        config: TopKConfig,
        residuals: Residuals,
        rank: int,
        world: int,
        local: int,
        epoch: Callable[[], int],
        say: WarnOnce,
    ) -> None:
        self.config, self.residuals, self.rank, self.world, self.local = config, residuals, rank, world, local
        self.buckets = BucketSettings(config, world, local)
        self.voting = False
        """Whether the ranks exchange in every step which parameters they used."""
        self.measure = self.measure_layers = self.timing = False
        """Whether exchanges measure their compression error, the error of each parameter, and their time."""
        self.meter = Meter()
        """All bytes that this rank sent so far."""
        self._epoch, self._say = epoch, say
        self._reported = dict(self.meter.bytes)
        self._report = Report(bytes={})
        self._measured: list[JobResult] = []
        self._timed: list[Timed] = []
        self._nonfinite_steps: Tensor | int = 0
        self._nonfinite_reported: Tensor | int = 0
        self._dense_cost: tuple[float, float] | None = None

    def _collect(self) -> None:
        """Collects the results of finished exchanges."""

    def _add(self, found: Sequence[JobResult | Timed]) -> None:
        """Adds the results of a backward pass. Values stay on the device, so the host does not wait."""
        report, exchanged = self._report, [each for each in found if isinstance(each, JobResult)]
        self._timed += [each for each in found if isinstance(each, Timed)]
        for done in exchanged:
            for kind, count in done.meter.bytes.items():
                self.meter.bytes[kind] += count * (self.shards_per_node if kind.endswith("node") else 1)
            self.meter.bytes["dense"] += 2 * (self.world - 1) * done.nbytes // self.world
            report.elements += done.elements
            report.k += done.k
            report.exchanges += 1
            report.nbytes += done.nbytes
            report.largest = max(report.largest, done.nbytes)
            if done.job.measure.error:
                self._measured.append(done)
        if exchanged:
            failed = torch.stack([~done.outcome.finite for done in exchanged]).any()
            before = self._nonfinite_steps
            if isinstance(before, Tensor) and before.is_cuda:  # possibly created on another stream, and freed here
                before.record_stream(torch.cuda.current_stream(before.device))
            self._nonfinite_steps = self._nonfinite_steps + failed

    @property
    def names(self) -> Mapping[Tensor, str]:
        """The parameters' names; empty if they are not known."""
        return self.buckets.names

    @property
    def exchanged(self) -> bool:
        """Whether anything was exchanged since the last report."""
        self._collect()
        return self._report.elements > 0

    @property
    def nonfinite_steps(self) -> int:
        """Backward passes so far that delivered a gradient with a NaN or an infinity. Waits for the device."""
        self._collect()
        return int(self._nonfinite_steps)

    def report(self) -> Report:
        """Returns the report since the last call. Call it between two backward passes.

        Each exchange is reported once: a :class:`lightning_topk.CompressionMonitor` takes the report at every step.
        """
        self._collect()
        report, self._report = self._report, Report(bytes={})
        for done in self._measured:
            up, down = done.outcome.uplink, done.outcome.downlink
            for side, stats in enumerate((up, down)):
                if stats is not None and stats.error is not None:
                    report.energy[side] += stats.error.cpu()
            if up.selected is not None:
                report.selected += int(up.selected) + done.uncompressed
            if up.per_layer is not None and self.names:
                for parameter, measured in zip(done.job.bucket, up.per_layer.cpu().T, strict=True):
                    name = self.names[parameter]
                    report.layers[name] = report.layers.get(name, 0) + measured
        for timed in self._timed:
            seconds, exposed = timed.seconds()
            report.seconds += seconds
            report.exposed_seconds += exposed
        report.exposed_seconds = min(report.exposed_seconds, report.seconds)
        self._measured.clear()
        self._timed.clear()
        now = dict(self.meter.bytes)
        report.bytes = {kind: count - self._reported[kind] for kind, count in now.items()}
        self._reported, self._nonfinite_reported = now, self._nonfinite_steps
        return report

    def drop_report(self) -> None:
        """Discards the exchanges since the last report, which belong to no training step, but not the broadcasts."""
        self._collect()
        self._report = Report(bytes={})
        self._measured.clear()
        self._timed.clear()
        self._reported = {**self.meter.bytes, "broadcast": self._reported["broadcast"]}
        self._nonfinite_steps = self._nonfinite_reported

    def dense_seconds(self, report: Report) -> float | None:
        """Estimated seconds to all-reduce the same gradients; None before :meth:`.HookState.measure_link`."""
        if self._dense_cost is None:
            return None
        latency, seconds_per_byte = self._dense_cost
        return report.exchanges * latency + report.nbytes * seconds_per_byte

    def predicted(self, rank: int | None = None) -> Volume:
        """Predicts the bytes that a rank sends in the next step, if it exchanges the same buckets as in the last.

        The bytes that FSDP2 sends inside a node are not included.
        """
        residuals, mine = self.residuals, self.rank if rank is None else rank
        total = self.buckets.volume(residuals.buckets, mine, residuals.steps, self._epoch(), self.voting)
        of_node = ("intra_node", "inter_node", "dense_inter_node")
        return replace(total, **{kind: self.shards_per_node * getattr(total, kind) for kind in of_node})

    def continue_from(self, other: Reporting) -> None:
        """Continues the counts and measurements of another state of the same run."""
        self.measure, self.measure_layers, self.timing = other.measure, other.measure_layers, other.timing
        self._dense_cost = other._dense_cost
        self._nonfinite_steps = self._nonfinite_reported = other._nonfinite_steps
        self._say.said = other._say.said
