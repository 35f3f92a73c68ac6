"""A Lightning callback that logs the bytes sent and the compression error."""

from __future__ import annotations

import fnmatch
import importlib
import math
import time
from collections.abc import Collection, Iterable, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_topk.adapters.lightning._compat import PACKAGE, rank_zero_info, rank_zero_warn
from lightning_topk.bucket import names_of
from lightning_topk.config import TopKConfig, check_bool
from lightning_topk.runtime.collectives import dense_cost
from lightning_topk.runtime.state import HookState
from lightning_topk.runtime.telemetry import Report
from lightning_topk.schedule import Schedule
from lightning_topk.volume import Volume, format_bytes

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = importlib.import_module(PACKAGE).Callback

EVERY_STEP = ("uplink_bytes", "downlink_bytes", "total_bytes", "saving")  # other keys: when the Trainer logs
SETTLED, COMPARED = 3, 5
"""Steps until DDP has its final buckets, and then steps whose median time is compared with dense all-reduces; they are
not measured, even if they are logged."""
PROBE_BYTES = 1 << 20
"""Size of the timed all-reduce from which longer ones are estimated: a quarter of a second at 100 Mbit/s."""

Values = dict[str, torch.Tensor | float]  # what is logged, by key


class CompressionMonitor(Callback):
    """Logs the exchange's bytes at every optimizer step, and the rest when the Trainer logs.

    Bytes are those that *this* rank sent to other ranks in the step (loggers receive rank 0's); uplink, downlink, total
    and saving are logged at every step. Other keys are logged at log steps and, if the ranks know that their epochs are
    equally long, in an epoch's last batch. Errors and norms are over all ranks; measuring them costs several passes
    over each bucket and one small all-reduce. A step that measures them takes longer, so times are those of the latest
    step that did not; with ``log_every_n_steps=1`` these are only the fourth to the eighth.

    ============================== ==========================================================================
    key                            meaning
    ============================== ==========================================================================
    ``topk/uplink_bytes``          bytes from this worker to the servers
    ``topk/downlink_bytes``        bytes from this server to the workers
    ``topk/total_bytes``           sum of uplink and downlink bytes since fit began
    ``topk/saving``                since fit began: dense bytes over uplink + downlink bytes; with
                                   ``topology="hierarchical"``, of the bytes between nodes
    ``topk/density``               fraction of the gradient that fits in this worker's payloads
    ``topk/uplink_error``          ‖a - C(a)‖² / ‖a‖² of this step's workers
    ``topk/downlink_error``        the error of this step's servers
    ``topk/worker_residual_norm``  norm of a worker's residual, root mean square over the workers (over the nodes,
                                   if the ranks of a node exchange as one worker)
    ``topk/nonfinite_steps``       backward passes since fit began with a NaN or an infinity in a gradient
    ``topk/exchange_seconds``      duration of this rank's exchanges in a step, waiting for other ranks included
    ``topk/hidden_share``          fraction of it that overlapped with backward: before the last gradient was ready
    ``topk/dense_seconds``         estimated duration of dense all-reduces of the same buckets on this link
    with ``details=True`` also
    ------------------------------ --------------------------------------------------------------------------
    ``topk/dense_bytes``           bytes that a ring all-reduce would have sent
    ``topk/intra_node_bytes``      bytes that the ranks of this node, together, sent to each other (without
                                   FSDP's own)
    ``topk/inter_node_bytes``      bytes that they sent to other nodes: what the node's network interface counts
    ``topk/total_uplink_bytes``    sum of uplink bytes since fit began; likewise for each kind of bytes
    ``topk/mbit_per_second``       uplink + downlink over the time since the last step
    ``topk/average_density``       ``topk/density``, averaged since fit began
    ``topk/selected_density``      fraction that the worker's selector actually selected
    ``topk/average_error``         mean of ``topk/uplink_error`` over the steps measured since fit began
    ``topk/bound``                 (1 - k/d)², upper bound of the error of top-k for a bell-shaped distribution
    ``topk/server_residual_norm``  norm of the servers' residual
    ============================== ==========================================================================

    None of these includes the steps of a :class:`~lightning.pytorch.callbacks.LearningRateFinder`.

    After the first step the ranks time an all-reduce of at most 1 MiB. Some steps later, rank 0 warns if dense
    all-reduces would be faster than the exchanges. When training ends, also by an exception or Ctrl+C, rank 0 prints a
    summary. (In spawned and forked processes an exception ends training before any callback hears of it.)

    Args:
        per_layer: The parameters for which to log, at log steps, ``topk/error/NAME`` (the workers' compression error),
            ``topk/payload_share/NAME`` (its share of the sent entries) and ``topk/residual_norm/NAME`` (root mean
            square over the workers): a pattern of names such as ``"*.conv1.weight"``, several, or True for all. This
            costs a few more passes over each bucket.
        details: Whether to log the keys of the table's second part too.

    Raises:
        TypeError: ``per_layer`` or ``details`` has another type.
        ValueError: When fit begins: a pattern matches no parameter.
    """

    def __init__(self, per_layer: bool | str | Sequence[str] = False, details: bool = False) -> None:
        check_bool("details", details)
        patterns = {True: ["*"], False: []}[per_layer] if isinstance(per_layer, bool) else per_layer
        if not isinstance(patterns, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"per_layer={per_layer!r} must be True, False, a name pattern, or several of them.")
        self.per_layer, self.details = [patterns] if isinstance(patterns, str) else list(patterns), details
        self._even = False  # whether an epoch ends at the same step on all ranks
        self._logs = False  # whether the current step is logged; equal on all ranks
        self._fit = _Totals()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resets the totals, checks the name patterns, and warns if there is nothing to monitor."""
        if not hasattr(trainer.strategy, "topk_state"):
            rank_zero_warn(
                f"CompressionMonitor logs nothing: the strategy is {type(trainer.strategy).__name__}, which does not "
                "compress. Use lightning_topk.TopKStrategy, or remove the callback."
            )
        names = [*names_of(pl_module).values()]
        for pattern in self.per_layer:
            if not fnmatch.filter(names, pattern):
                raise ValueError(
                    f"CompressionMonitor(per_layer={pattern!r}): no parameter's name matches. The names are "
                    f"{', '.join(names[:20])}."
                )
        self._fit = _Totals()

    @override
    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Compares the lengths of the ranks' epochs; that of a stream is unknown."""
        if _state(trainer) is not None:
            batches = float(trainer.num_training_batches)
            both = torch.tensor([batches, -batches], device=trainer.strategy.root_device)
            most, least = trainer.strategy.reduce(both, reduce_op="max")
            self._even = bool(most == -least) and math.isfinite(batches)

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Makes the exchange measure its error if this step will be logged."""
        state = _state(trainer)
        if state is not None:
            telemetry = state.telemetry
            if telemetry.exchanged:
                telemetry.drop_report()  # LearningRateFinder's steps call no callbacks
            comparing = state.world > 1 and self._fit.steps >= SETTLED and len(self._fit.timed) < COMPARED
            limit = math.inf if trainer.max_steps < 0 else trainer.max_steps
            last = trainer.global_step + max(1, len(trainer.optimizers)) >= limit
            last |= self._even and trainer.is_last_batch  # equal on all ranks: uneven epochs end at different steps
            self._logs = last or trainer._logger_connector.should_update_logs
            telemetry.measure = last or (self._logs and not comparing)
            telemetry.measure_layers, telemetry.timing = bool(self.per_layer), not telemetry.measure

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs the step if gradients were exchanged in this batch."""
        state = _state(trainer)
        if state is None or not state.telemetry.exchanged:
            return
        report, fit = state.report(), self._fit
        if fit.steps == 0:
            fit.since = trainer.global_step - len(trainer.optimizers)
            if state.world > 1:
                sample = min(report.largest, PROBE_BYTES)
                fit.cost = dense_cost(sample, trainer.strategy.root_device, state.open_groups().all)
        values = fit.add(report, state.config.by_node, self.details)
        dense = None if fit.cost is None else report.exchanges * fit.cost[0] + report.nbytes * fit.cost[1]
        if state.telemetry.timing and fit.steps > SETTLED:
            fit.unmeasured = fit.steps, report
            if dense is not None and len(fit.timed) < COMPARED:
                fit.compare(trainer, state.config, report, dense)
        if self._logs:
            values |= fit.times() | ({} if dense is None else {"dense_seconds": dense})
        if state.telemetry.measure:
            values |= self._measured(trainer, state, report)
        # A call of Lightning's log takes a millisecond, and loggers store values at log steps only.
        for name in values if self._logs else EVERY_STEP:
            # float64 holds every count below 2^53 exactly, and Lightning's `log` turns integers into float32. It does
            # not know the batch size of training_step(dataloader_iter); a step's values need none.
            value = torch.as_tensor(values[name], dtype=torch.float64)
            pl_module.log(f"topk/{name}", value, prog_bar=name == "saving", batch_size=1)

    def _measured(self, trainer: Trainer, state: HookState, report: Report) -> Values:
        """Values of measured steps: errors and residuals, which all ranks reduce, and layers."""
        local = torch.cat([report.energy.view(-1), state.residuals.energy()]).to(trainer.strategy.root_device)
        up, down, (worker, server) = trainer.strategy.reduce(local, reduce_op="sum").cpu().view(3, 2)
        values: Values = {
            f"{way}_error": lost / energy if energy > 0 else 0.0
            for way, (energy, lost) in (("uplink", up), ("downlink", down))
        }
        self._fit.errors.append(float(values["uplink_error"]))
        values |= {
            "worker_residual_norm": (worker / state.world).sqrt(),
            "nonfinite_steps": state.nonfinite_steps,
        }
        if self.details:
            values["server_residual_norm"], values["average_error"] = server.sqrt(), mean(self._fit.errors)
            values["selected_density"] = report.selected / report.elements
        shown = {name for pattern in self.per_layer for name in fnmatch.filter(report.layers, pattern)}
        return values | (_by_layer(trainer, state, report.layers, shown) if shown else {})

    @override
    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Prints the summary once per fit, unless there were no steps, or one process, which sends nothing."""
        state = _state(trainer)  # in on_fit_end it is gone (lightning 2.6)
        if self._fit.steps and not self._fit.told and state is not None and state.world > 1:
            self._fit.told = True
            rank_zero_info(self.summary(state))

    @override
    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_end(trainer)

    def summary(self, state: HookState | None = None) -> str:
        """Returns a summary of the run so far, as measured on this rank; the strategy's state knows who sends what."""
        fit, volume, topology = self._fit, self._fit.volume, "" if state is None else state.config.topology
        by_node = state is not None and state.config.by_node
        up, down, dense = map(format_bytes, (volume.uplink, volume.downlink, volume.dense))
        begun = f"{fit.steps:,} step{'s' * (fit.steps != 1)}" + f" since step {fit.since:,}" * (fit.since > 0)
        sent = f"each rank sent {up} up and {down} down"
        if by_node:
            inside = format_bytes(volume.intra_node)
            sent = f"each node sent {format_bytes(volume.inter_node)} to others (and {inside} inside)"
        elif topology == "single_server":
            sent = f"rank 0, which serves all, sent {down} down"
        average, end = f"{fit.k / max(1, fit.elements):.3g}", f"{fit.density:.3g}"
        words = [
            f"lightning_topk: in {begun} {sent} instead of {dense} ({volume.saved(by_node):.1f}x less)",
            f"density {average}" if average == end else f"density {average} on average, {end} at the end",
        ]
        if topology:
            words.append(f"topology={topology!r}")
        if fit.errors:
            words.append(f"mean compression error {mean(fit.errors):.3f}")
        if fit.timed:
            seconds, exposed = zip(*fit.timed.values(), strict=True)
            hidden, steps = 1 - sum(exposed) / max(sum(seconds), 1e-9), len(fit.timed)
            words.append(
                f"exchange {1000 * median(seconds):.1f} ms per step with waiting for other ranks, {hidden:.0%} of it "
                f"hidden behind backward ({steps} step{'s' * (steps != 1)} timed)"
            )
        return "; ".join(words) + "."


class _Totals:
    """Totals of one fit, as measured on this rank."""

    def __init__(self) -> None:
        self.since = self.steps = 0  # optimizer steps before this fit, in a resumed run, and in it
        self.volume = Volume()
        self.k = self.elements = 0  # entries that fit in the payloads, and elements exchanged
        self.density = 0.0  # of the last step
        self.ended = 0.0  # when the last step ended
        self.errors: list[float] = []  # of the measured steps
        self.unmeasured: tuple[int, Report] | None = None  # the latest step that was timed, if no log step followed
        self.timed: dict[int, tuple[float, float]] = {}  # seconds and exposed seconds of a step's exchanges, by step
        self.cost: tuple[float, float] | None = None  # seconds for each dense all-reduce, and for each of its bytes
        self.told = False  # whether the summary was printed

    def add(self, report: Report, by_node: bool, details: bool) -> Values:
        """Adds a step; returns values that need no waiting or reading of data: bytes and densities."""
        before, self.ended = self.ended, time.perf_counter()
        self.volume += report.bytes
        self.steps, self.k, self.elements = self.steps + 1, self.k + report.k, self.elements + report.elements
        self.density = report.k / report.elements
        values: Values = {
            "uplink_bytes": report.bytes.uplink,
            "downlink_bytes": report.bytes.downlink,
            "total_bytes": self.volume.sent,
            "saving": self.volume.saved(by_node),
            "density": self.density,
        }
        if details:
            values["average_density"], values["bound"] = self.k / self.elements, (1 - self.density) ** 2
            for kind in ("uplink", "downlink", "dense", "intra_node", "inter_node"):
                values[f"{kind}_bytes"], values[f"total_{kind}_bytes"] = report.bytes[kind], self.volume[kind]
            if self.steps > 1:
                values["mbit_per_second"] = 8e-6 * report.bytes.sent / (self.ended - before)
        return values

    def times(self) -> Values:
        """Times of the latest step that was not measured, unless they are known."""
        if self.unmeasured is None:
            return {}
        (step, report), self.unmeasured = self.unmeasured, None
        self.timed[step] = seconds, exposed = report.times
        return {"exchange_seconds": seconds, "hidden_share": 1 - exposed / max(seconds, 1e-9)}

    def compare(self, trainer: Trainer, config: TopKConfig, report: Report, dense: float) -> None:
        """Times a step; after some, warns if all-reduces, which would take about ``dense`` seconds, are faster."""
        self.timed[self.steps] = report.times
        if len(self.timed) < COMPARED:
            return
        # The last rank to arrive does not wait for the others, so the minimum is the duration of the exchange itself.
        mine = torch.tensor(median(seconds for seconds, _ in self.timed.values()), device=trainer.strategy.root_device)
        least = float(trainer.strategy.reduce(mine, reduce_op="min"))
        if least > dense:
            later, ended = "", 10**9  # step and epoch by which a schedule has ended
            if isinstance(config.ratio, Schedule) and (end := config.ratio.at(ended, ended)) < 0.9 * self.density:
                later = f" The density decays to {end:.3g}, and the exchange time with it."
            rank_zero_warn(
                f"lightning_topk: the exchange takes {1000 * least:.1f} ms per step at a density of "
                f"{self.density:.3g}, and dense all-reduces of the same gradients would take about "
                f"{1000 * dense:.1f} ms, so plain DDP is probably faster on this link: try strategy='ddp'. Compression "
                "pays on slower links, with larger models and with a larger saving. To compare whole steps on these "
                f"machines, run `python -m lightning_topk bench` under torchrun.{later}"
            )


def _by_layer(trainer: Trainer, state: HookState, layers: dict[str, torch.Tensor], shown: Collection[str]) -> Values:
    """The logged values of the layers shown, over all ranks; ``layers`` are those of :class:`.Report`."""
    names = sorted(layers)
    energies = {state.names[p]: energy for p, energy in state.residuals.worker_energies().items()}
    kept = torch.stack([energies.get(name, torch.zeros((), dtype=torch.float64)) for name in names])
    local = torch.cat([torch.stack([layers[name] for name in names]), kept.unsqueeze(1)], dim=1)
    energy, lost, sent, kept = trainer.strategy.reduce(local.to(trainer.strategy.root_device), reduce_op="sum").cpu().T
    return {
        f"{what}/{name}": value
        for what, column in (
            ("error", torch.where(energy > 0, lost / energy.clamp(min=1e-300), 0.0)),
            ("payload_share", sent / sent.sum().clamp(min=1)),
            ("residual_norm", (kept / state.world).sqrt()),
        )
        for name, value in zip(names, column, strict=True)
        if name in shown
    }


def _state(trainer: Trainer) -> HookState | None:
    return getattr(trainer.strategy, "topk_state", None)
