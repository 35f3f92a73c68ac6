"""What the Trainer's strategies share: arguments of ``attach``, and which residuals are saved and resumed with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_topk.adapters.lightning._compat import rank_zero_info
from lightning_topk.runtime.checkpoint import EMPTY, KEY, absent


def arguments_of(strategy: Any) -> dict[str, Any]:
    """The arguments of ``attach`` that come from the Trainer."""
    return {
        "epoch": lambda: strategy.lightning_module.trainer.current_epoch if strategy.lightning_module else 0,
        "optimizer": lambda: strategy.optimizers,
        "scaler": getattr(strategy.precision_plugin, "scaler", None),
        "note": rank_zero_info,
    }


def release(strategy: Any) -> None:
    """Closes the state in use; its residuals stay, on the CPU."""
    state, strategy.topk_state = strategy.topk_state, None
    if state is not None:
        state.close()
        state.residuals.offload_to_cpu()


def entry_to_save(strategy: Any, save: Callable[[Any], dict[str, Any]], filepath: Any) -> dict[str, Any]:
    """Returns what ``save`` makes of the strategy's last state, or an entry that says why it has no residuals.

    A collective, unless other ranks might not save this checkpoint, so that it could hang.
    """
    state, trainer = strategy._last, getattr(strategy.lightning_module, "_trainer", None)
    steps, interrupted = getattr(state, "steps", 0), getattr(trainer, "interrupted", False)
    if not strategy._residual_checkpoint:
        return absent("it was saved with residual_checkpoint=False", steps)
    if not (dist.is_available() and dist.is_initialized()):
        return absent("it was saved after the worker processes, which held them, had ended")
    if interrupted or Path(filepath).name.startswith("hpc_ckpt"):
        return absent("it was saved while an exception or a signal was handled, when collectives could hang", steps)
    return dict(EMPTY) if state is None else save(state)


def entry_to_resume(checkpoint: Mapping[str, Any], residual_checkpoint: bool) -> Any:
    """Returns the entry to resume with: the checkpoint's, or one of zeros after as many steps, with a message."""
    entry = checkpoint.get(KEY)
    if entry is None:
        resumable = "lr_schedulers" in checkpoint  # sharded checkpoints keep optimizer states elsewhere
        entry = absent("it was saved by another strategy" if resumable else "it is weights-only")
    if isinstance(entry, dict) and entry.get("mode") == "none":
        said = f"the checkpoint has no residuals ({entry.get('reason', 'no reason given')})"
    elif not residual_checkpoint:
        said = "residuals in the checkpoint are ignored (residual_checkpoint=False)"
    else:
        return entry
    rank_zero_info(f"lightning_topk: {said}; starting from zero.")
    steps = entry.get("steps") if isinstance(entry, dict) else None
    return {**EMPTY, "steps": steps if type(steps) is int and steps > 0 else 0}
