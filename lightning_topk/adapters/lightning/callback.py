"""A Lightning callback that logs the bytes sent and the compression error."""

from __future__ import annotations

import fnmatch
import importlib
import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk.adapters.lightning._compat import PACKAGE, rank_zero_info, rank_zero_warn
from lightning_topk.adapters.lightning.metrics import CompressionError, ExchangeVolume
from lightning_topk.bucket import names_of
from lightning_topk.runtime.state import HookState
from lightning_topk.runtime.telemetry import Report
from lightning_topk.volume import format_bytes

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = importlib.import_module(PACKAGE).Callback

Values = dict[str, Tensor | float]  # what is logged, by key
STARVED = 0.1  # share of a parameter that is sent, over that of all, below which the summary names it


class CompressionMonitor(Callback):
    """Logs the exchange's bytes and errors when the Trainer logs, and adds up the bytes of all steps.

    Bytes are those that *this* rank sent to other ranks in the step (loggers receive rank 0's). Values are logged at
    log steps, in the last step and, if the epochs of all ranks are equally long, at the last batch of an epoch. If no
    end is known, as with a stream without ``max_steps``, bytes and saving are logged at every step.

    Errors and norms are over all ranks; measuring them costs several passes over each bucket and one small all-reduce.
    A step that measures them takes longer. So the logged times are those of the latest step without measurement, or of
    this step if every step measures (``log_every_n_steps=1``).

    ============================== ==========================================================================
    key                            meaning
    ============================== ==========================================================================
    ``topk/uplink_bytes``          bytes from this worker to the servers
    ``topk/downlink_bytes``        bytes from this server to the workers
    ``topk/total_bytes``           sum of uplink and downlink bytes since fit began
    ``topk/saving``                since fit began: dense bytes over uplink + downlink bytes; with
                                   ``topology="hierarchical"``, over the bytes between nodes
    ``topk/density``               fraction of the gradient that fits in this worker's payloads
    ``topk/uplink_error``          ‖a - C(a)‖² / ‖a‖² of all workers in this step
    ``topk/downlink_error``        the same of all servers
    ``topk/worker_residual_norm``  norm of a worker's residual, root mean square over the workers (over the nodes,
                                   if the ranks of a node exchange as one worker)
    ``topk/nonfinite_steps``       backward passes since fit began with a NaN or an infinity in a gradient
    ``topk/exchange_seconds``      duration of this rank's exchanges in a step, including waits for other ranks
    ``topk/hidden_share``          fraction of that time in which backward still computed gradients
    ============================== ==========================================================================

    None of these includes the steps of a :class:`~lightning.pytorch.callbacks.LearningRateFinder`.

    When training ends, even by an exception or Ctrl+C, rank 0 prints a summary. (In spawned and forked processes an
    exception ends training before any callback is called.)

    Args:
        per_layer: The parameters for which to log, at log steps, ``topk/error/NAME`` (the workers' compression error),
            ``topk/payload_share/NAME`` (its share of the sent entries) and ``topk/residual_norm/NAME`` (root mean
            square over the workers): a pattern of names such as ``"*.conv1.weight"``, several, or True for all. This
            costs a few more passes over each bucket. The summary then names starved parameters: almost nothing of their
            gradients is sent, since others are larger.

    Attributes:
        volume: The :class:`~lightning_topk.metrics.ExchangeVolume` of this rank since fit began; it also counts the
            bytes inside this node and between nodes.
        uplink_error: The :class:`~lightning_topk.metrics.CompressionError` of all workers in measured steps.
        downlink_error: The same of all servers.

    Raises:
        TypeError: ``per_layer`` has the wrong type.
        ValueError: When fit begins: a pattern matches no parameter.
    """

    def __init__(self, per_layer: bool | str | Sequence[str] = False) -> None:
        several = per_layer if isinstance(per_layer, Iterable) and not isinstance(per_layer, str) else [per_layer]
        patterns: list[Any] = {True: ["*"], False: []}[per_layer] if isinstance(per_layer, bool) else [*several]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"per_layer={per_layer!r} must be True, False, a name pattern or a list of them.")
        self.per_layer = patterns
        # Bytes stay each rank's own, and one all-reduce sums both directions' errors; metrics would gather each state.
        self.volume = ExchangeVolume(sync_on_compute=False)
        self.uplink_error, self.downlink_error = (CompressionError(sync_on_compute=False) for _ in range(2))
        self._even = False  # whether an epoch ends at the same step on all ranks
        self._since = 0  # optimizer steps before this fit, in a resumed run
        self._density = 0.0  # of the last step
        self._unmeasured: Report | None = None  # the latest one
        self._times: list[tuple[float, float]] = []  # logged: seconds, and the share that backward hid
        self._starved: list[str] = []  # parameters of which the last measured step sent almost nothing
        self._told = False  # whether the summary was printed

    def __getstate__(self) -> dict[str, Any]:
        """Pickles all but the last report, which refers to the state; a data loader may pickle the Trainer."""
        return {**vars(self), "_unmeasured": None}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resets the metrics, checks the name patterns, and warns if there is nothing to monitor."""
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
        for metric in (self.volume, self.uplink_error, self.downlink_error):
            metric.reset()
        self._unmeasured, self._times, self._starved, self._told = None, [], [], False

    @override
    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Compares the lengths of the ranks' epochs; a stream's length is unknown."""
        state = _state(trainer)
        if state is not None:
            self.volume.by_node, self._since = state.config.by_node, trainer.global_step
            batches = float(trainer.num_training_batches)
            both = torch.tensor([batches, -batches], device=trainer.strategy.root_device)
            most, least = trainer.strategy.reduce(both, reduce_op="max")
            self._even = bool(most == -least) and math.isfinite(batches)

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Makes the exchange measure its error if this step will be logged: on all ranks or none."""
        state = _state(trainer)
        if state is not None:
            telemetry = state.telemetry
            telemetry.drop_report()  # of LearningRateFinder's steps, which call no callbacks
            limit = math.inf if trainer.max_steps < 0 else trainer.max_steps
            last = trainer.global_step + max(1, len(trainer.optimizers)) >= limit
            last |= self._even and trainer.is_last_batch  # uneven epochs end at different steps
            telemetry.measure = last or trainer._logger_connector.should_update_logs
            telemetry.measure_layers, telemetry.timing = bool(self.per_layer), True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs the step if gradients were exchanged in this batch."""
        state = _state(trainer)
        if state is None or not state.telemetry.exchanged:
            return
        report = state.report()
        self.volume.update(**vars(report.bytes))
        self._density = report.k / report.elements
        totals = self.volume.compute()
        values: Values = {f"{way}_bytes": report.bytes[way] for way in ("uplink", "downlink")}
        values |= {name: totals[name] for name in ("total_bytes", "saving")}
        if state.telemetry.measure:
            values |= self._measured(trainer, state, report)
        else:
            self._unmeasured = report
            if self._even or trainer.max_steps >= 0:  # the last step is known, and logs
                return  # loggers store values at log steps only, and a call to Lightning's log takes a millisecond
        for name, value in values.items():
            # float64 holds every count below 2^53 exactly, and Lightning's `log` turns integers into float32. It
            # cannot infer the batch size of training_step(dataloader_iter); a step's values need none.
            exact = torch.as_tensor(value, dtype=torch.float64)
            pl_module.log(f"topk/{name}", exact, prog_bar=name == "saving", batch_size=1)

    def _measured(self, trainer: Trainer, state: HookState, report: Report) -> Values:
        """Values for log steps: errors and residuals, which all ranks reduce; times; and layers."""
        local = torch.cat([report.energy.view(-1), state.residuals.worker_energy().view(1)])
        *energies, kept = trainer.strategy.reduce(local.to(trainer.strategy.root_device), reduce_op="sum").cpu()
        seconds, exposed = (self._unmeasured or report).times
        self._times.append((seconds, 1 - exposed / max(seconds, 1e-9)))
        return {
            "density": self._density,
            "uplink_error": self.uplink_error(*energies[:2]),
            "downlink_error": self.downlink_error(*energies[2:]),
            "worker_residual_norm": (kept / state.world).sqrt(),
            "nonfinite_steps": state.nonfinite_steps,
            "exchange_seconds": seconds,
            "hidden_share": self._times[-1][1],
            **self._by_layer(trainer, state, report.layers),
        }

    def _by_layer(self, trainer: Trainer, state: HookState, layers: dict[Tensor, Tensor]) -> Values:
        """The logged values of the layers of a :class:`.Report` that match a pattern, over all ranks."""
        parameters = sorted(layers, key=state.names.__getitem__)
        names = [state.names[parameter] for parameter in parameters]
        shown = {name for pattern in self.per_layer for name in fnmatch.filter(names, pattern)}
        if not shown:
            return {}
        energies, none = state.residuals.worker_energies(), torch.zeros((), dtype=torch.float64, device="cpu")
        local = torch.stack([torch.cat([layers[p], energies.get(p, none).view(1)]) for p in parameters])
        every = trainer.strategy.reduce(local.to(trainer.strategy.root_device), reduce_op="sum")
        energy, lost, sent, kept = every.cpu().T
        error, all_sent = lost / energy.clamp(min=1e-300), 1 - lost.sum() / energy.sum()
        starved = (energy > 0) & (1 - error < STARVED * all_sent)
        self._starved = [name for name, each in zip(names, starved, strict=True) if each]
        columns = {
            "error": error,
            "payload_share": sent / sent.sum().clamp(min=1),
            "residual_norm": (kept / state.world).sqrt(),
        }
        return {
            f"{what}/{name}": value
            for what, column in columns.items()
            for name, value in zip(names, column, strict=True)
            if name in shown
        }

    @override
    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Prints the summary once per fit, if there were steps and more than one rank."""
        state = _state(trainer)  # in on_fit_end it is gone (lightning 2.6)
        if self.volume.update_called and not self._told and state is not None and state.world > 1:
            self._told = state.told = True
            rank_zero_info(self.summary())

    @override
    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_end(trainer)

    def summary(self) -> str:
        """Returns a summary of the fit so far, as measured on this rank."""
        steps = self.volume.update_count
        if not steps:
            return "lightning_topk: nothing was exchanged."
        volume = self.volume.compute()
        sent = {name.removesuffix("_bytes"): format_bytes(float(nbytes)) for name, nbytes in volume.items()}
        who = f"this rank sent {sent['uplink']} up and {sent['downlink']} down"
        if self.volume.by_node:
            who = f"this node sent {sent['inter_node']} to others (and {sent['intra_node']} inside)"
        begun = f"{steps:,} step{'s' * (steps != 1)}" + f" since step {self._since:,}" * (self._since > 0)
        words = [
            f"lightning_topk: in {begun} {who} instead of {sent['dense']} ({float(volume['saving']):.1f}x less)",
            f"density {self._density:.3g} at the end",
        ]
        if self.uplink_error.update_called:
            seconds, hidden = map(median, zip(*self._times, strict=True))
            words += [
                f"compression error {float(self.uplink_error.compute()):.3f}",
                f"exchange {1000 * seconds:.1f} ms per step including waits for other ranks, {hidden:.0%} of it hidden "
                "behind backward",
            ]
        if self._starved:
            words.append(
                f"almost nothing is sent of {len(self._starved)} parameter{'s' * (len(self._starved) > 1)} "
                f"({self._starved[0]!r} for one), whose gradients are far smaller than the others': reweight the "
                "losses, or use a smaller saving"
            )
        return "; ".join(words) + "."


def _state(trainer: Trainer) -> HookState | None:
    return getattr(trainer.strategy, "topk_state", None)
