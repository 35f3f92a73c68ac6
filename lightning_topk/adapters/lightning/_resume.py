"""When residuals can be saved, and which ones a run resumes with; shared by all strategies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_topk.adapters.lightning._compat import TrainerStatus, rank_zero_info
from lightning_topk.runtime.checkpoint import EMPTY, KEY, absent

INTERRUPTED = "it was saved while an exception or a signal was handled, when collectives could hang"
"""Why a checkpoint that not all ranks may save has no residuals."""
LEFT_OUT = "it was saved with residual_checkpoint=False"
"""Why another checkpoint has none."""


def interrupted(module: Any, filepath: Any) -> bool:
    """Whether other ranks might not save this checkpoint, so that a collective could hang."""
    trainer = None if module is None else module._trainer
    status = None if trainer is None else trainer.state.status
    return status == TrainerStatus.INTERRUPTED or Path(filepath).name.startswith("hpc_ckpt")


def entry_to_resume(checkpoint: Mapping[str, Any], residual_checkpoint: bool) -> Any:
    """Returns the entry to resume with: the checkpoint's, or one of zeros after as many steps, with a message."""
    entry = checkpoint.get(KEY)
    if entry is None:
        whole = "lr_schedulers" in checkpoint  # sharded checkpoints keep optimizer states elsewhere
        entry = absent("it was saved by another strategy" if whole else "it is weights-only")
    if isinstance(entry, dict) and entry.get("mode") == "none":
        said = f"the checkpoint has no residuals ({entry.get('reason', 'no reason given')})"
    elif not residual_checkpoint:
        said = "residuals in the checkpoint are ignored (residual_checkpoint=False)"
    else:
        return entry
    rank_zero_info(f"lightning_topk: {said}; starting from zero.")
    return without_residuals(entry)


def without_residuals(entry: Any) -> dict[str, Any]:
    """The entry of a run that starts with zero residuals after as many steps as another entry, for schedules."""
    steps = entry.get("steps") if isinstance(entry, dict) else None
    return {**EMPTY, "steps": steps if type(steps) is int and steps > 0 else 0}
