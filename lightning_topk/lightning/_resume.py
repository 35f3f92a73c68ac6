"""When the residuals of a run can be saved, and with which ones it goes on: what all strategies share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_topk.lightning._compat import TrainerStatus, rank_zero_info
from lightning_topk.runtime.memory.checkpoint import EMPTY, absent

INTERRUPTED = absent("it was saved while an exception or a signal was handled, when collectives could hang")
"""In a checkpoint that not all ranks may have saved."""


def interrupted(module: Any, filepath: Any) -> bool:
    """Whether other ranks may not save this checkpoint, so that a collective could hang.

    Args:
        module: The LightningModule. After a spawned fit the main process's has no Trainer.
        filepath: Where the checkpoint is saved.
    """
    trainer = None if module is None else module._trainer
    status = None if trainer is None else trainer.state.status
    return status == TrainerStatus.INTERRUPTED or Path(filepath).name.startswith("hpc_ckpt")


def entry_to_resume(entry: Any, residual_checkpoint: bool) -> Any:
    """The residuals with which a run goes on: those of a checkpoint, or zeros, which is said.

    Args:
        entry: What the checkpoint has of them; None if nothing.
        residual_checkpoint: The strategy's setting.
    """
    if entry is None:
        entry = absent("it was saved by another strategy, or with residual_checkpoint=False")
    if isinstance(entry, dict) and entry.get("mode") == "none":
        said = f"the checkpoint has no residuals ({entry.get('reason', 'for no reason that it gives')})"
    elif not residual_checkpoint:
        said = "residuals in the checkpoint are ignored (residual_checkpoint=False)"
    else:
        return entry
    rank_zero_info(f"lightning_topk: {said}; starting from zero.")
    return EMPTY
