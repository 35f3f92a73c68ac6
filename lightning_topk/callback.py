"""A Lightning callback that logs what crossed the wire and what the compression lost."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_topk.hook import TopKState
from lightning_topk.metrics import CompressionError, ExchangeVolume


class CompressionMonitor(Callback):
    """Logs the exchange's bytes at every optimizer step, and its error when the Trainer logs.

    Bytes are those that *this* rank sent to other ranks in the step (loggers see rank 0's). Errors and norms are over all
    ranks: measuring them costs two passes over each bucket and one small all-reduce, at log steps and an
    epoch's last batch only.

    ============================== ==========================================================================
    key                            meaning
    ============================== ==========================================================================
    ``topk/uplink_bytes``          bytes from this worker to the servers
    ``topk/downlink_bytes``        bytes from this server to the workers
    ``topk/broadcast_bytes``       bytes by which DDP made weights equal (once) and buffers (each step); no gradients
    ``topk/dense_bytes``           bytes that a ring all-reduce would have sent
    ``topk/saving``                dense bytes over uplink + downlink bytes
    ``topk/ratio``                 fraction of the gradient for which this worker's payloads have room
    ``topk/selected_ratio``        fraction that the worker's selector really chose, at log steps
    ``topk/bound``                 (1 - k/d)², the error that top-k of a bell-shaped vector does not exceed
    ``topk/uplink_error``          ‖a - C(a)‖² / ‖a‖² of this step's workers
    ``topk/downlink_error``        the same of this step's servers
    ``topk/worker_residual_norm``  root mean square over the workers of the norm of their residual
    ``topk/server_residual_norm``  norm of the servers' residual
    ``topk/nonfinite_steps``       backward passes since fit began that gave a gradient with a NaN or an infinity, at log steps
    ``topk/total_bytes``           sum of uplink and downlink bytes since fit began; also ``topk/total_uplink_bytes``,
                                   ``topk/total_downlink_bytes``, ``topk/total_dense_bytes`` and
                                   ``topk/total_broadcast_bytes``
    ============================== ==========================================================================
    """

    def __init__(self) -> None:
        self._total = ExchangeVolume(sync_on_compute=False)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Warns if there is nothing to monitor."""
        if stage == "fit" and not hasattr(trainer.strategy, "topk_state"):
            rank_zero_warn(
                f"CompressionMonitor logs nothing: the strategy is {type(trainer.strategy).__name__}, which does not compress."
                " Use lightning_topk.TopKStrategy, or remove the callback."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the totals at zero."""
        self._total.reset()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Has the exchange measure its error if this step will be logged."""
        state = _state(trainer)
        if state is not None:
            state.measure = _is_log_step(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the step, if this batch ended one."""
        state = _state(trainer)
        if state is None or not state.exchanged:
            return
        report = state.report()
        self._total.update(**report.bytes)
        step = ExchangeVolume(sync_on_compute=False)
        step.update(**report.bytes)
        values = dict(step.compute())
        del values["total_bytes"]
        values["bound"] = torch.tensor((1 - report.kept / report.elements) ** 2)
        for name, total in self._total.compute().items():
            if name.endswith("_bytes"):
                values[name if name == "total_bytes" else f"total_{name}"] = total
        values["ratio"] = torch.tensor(report.kept / report.elements)
        if state.measure:
            values["nonfinite_steps"] = torch.tensor(state.nonfinite_steps)
            values["selected_ratio"] = torch.tensor(report.selected / report.elements)
            local = torch.cat([report.energy.view(-1), state.residual_energy()]).to(trainer.strategy.root_device)
            values |= _errors(trainer.strategy.reduce(local, reduce_op="sum").cpu(), state.world)
        pl_module.log_dict({f"topk/{name}": value.double() for name, value in values.items() if name != "saving"})
        pl_module.log("topk/saving", values["saving"], prog_bar=True)


def _errors(sums: torch.Tensor, world: int) -> dict[str, torch.Tensor]:
    """The logged values of ``[6]``: ‖a‖² and ‖a - C(a)‖² up, the same down, and both residuals' energy; sums over ranks."""
    up, down, (worker, server) = sums.view(3, 2)
    values = {"worker_residual_norm": (worker / world).sqrt(), "server_residual_norm": server.sqrt()}
    for name, (energy, lost) in (("uplink_error", up), ("downlink_error", down)):
        error = CompressionError(sync_on_compute=False)
        error.update(energy, lost)
        values[name] = error.compute()
    return values


def _state(trainer: Trainer) -> TopKState | None:
    return getattr(trainer.strategy, "topk_state", None)


def _is_log_step(trainer: Trainer) -> bool:
    """Whether the step under way is one of the logger's, or the last of its epoch or of the fit; the same on all ranks."""
    last = trainer.global_step + max(1, len(trainer.optimizers)) >= (
        math.inf if trainer.max_steps < 0 else trainer.max_steps
    )
    return trainer._logger_connector.should_update_logs or trainer.is_last_batch or last
