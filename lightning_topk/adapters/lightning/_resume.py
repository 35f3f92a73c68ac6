"""What the Trainer's strategies share: a state during ``fit``, and the residuals in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from typing_extensions import override

from lightning_topk.adapters.lightning._compat import Strategy, rank_zero_info
from lightning_topk.config import TopKConfig, check_bool, check_count
from lightning_topk.consensus import check_agreement
from lightning_topk.runtime.checkpoint import EMPTY, KEY, absent


class Resumes(Strategy):
    """Base of the Trainer's strategies: ``topk_state`` exchanges in ``fit``; ``_last`` keeps its residuals later."""

    config: TopKConfig
    topk_state: Any = None
    _last: Any = None
    _resumed: Any = None  # the entry to resume with, until the model is wrapped

    def _check(self, residual_checkpoint: bool, local_world_size: int | None) -> None:
        """Checks and stores two arguments of the constructor."""
        check_bool("residual_checkpoint", residual_checkpoint)
        self._residual_checkpoint = residual_checkpoint
        self._local_world_size = check_count("local_world_size", local_world_size)

    def _attach(self, attach: Callable[..., Any], **arguments: Any) -> None:
        """Attaches the model with the Trainer's epoch, optimizers, GradScaler and clipping."""
        self.topk_state = self._last = attach(
            self.model,
            self.config,
            epoch=lambda: self.lightning_module.trainer.current_epoch if self.lightning_module else 0,
            optimizer=lambda: self.optimizers,
            scaler=getattr(self.precision_plugin, "scaler", None),
            note=rank_zero_info,
            **arguments,
        )
        self._tell_clipping()
        same, state = {"residual_checkpoint": self._residual_checkpoint}, self.topk_state
        check_agreement(same, "Pass the same arguments on every rank.", state.device, state.open_groups().all)

    def _tell_clipping(self) -> None:
        """Passes the Trainer's clipping to the exchange, and skips it for gradients that the exchange has clipped.

        The exchange delivers a sum of gradients that were clipped one by one: clipping it again would cut most of it.
        """
        plugin: Any = self.precision_plugin
        module: Any = self.lightning_module
        trainer: Any = getattr(module, "_trainer", None)
        if ".plugins.precision." not in type(plugin).clip_grad_by_norm.__module__:
            return  # the user's own rule
        plugin.clip_grad_by_norm = self._clip_grad_by_norm  # a method, since it is pickled with the Trainer
        rule = type(module).configure_gradient_clipping.__module__
        usual = trainer is not None and module.automatic_optimization and rule.endswith(".core.module")
        if usual and trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, "norm"):
            self.topk_state.optimizers.clipping.first = float(trainer.gradient_clip_val)

    def _clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        parameters = [*self.precision_plugin.main_params(optimizer)]
        self.topk_state.optimizers.clip(optimizer, clip_val, partial(clip_grad_norm_, parameters))

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        """Creates the optimizers, and adapts them now: a step calls only hooks that exist when it begins.

        In automatic optimization the first backward pass runs inside the first step.
        """
        super().setup_optimizers(trainer)
        if self.topk_state is not None:
            self.topk_state.optimizers.sync()

    def _absent(self, filepath: Any) -> dict[str, Any] | None:
        """Returns an entry that says why a checkpoint has no residuals; None if all ranks can collect them now."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        steps, interrupted = getattr(self._last, "steps", 0), getattr(trainer, "interrupted", False)
        if not self._residual_checkpoint:
            return absent("it was saved with residual_checkpoint=False", steps)
        if not (dist.is_available() and dist.is_initialized()):
            return absent("it was saved after the worker processes, which held the residuals, had ended")
        if interrupted or Path(filepath).name.startswith("hpc_ckpt"):
            return absent("it was saved while handling an exception or a signal, when collectives could hang", steps)
        return None

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Pickles all but the state, which belongs to its process groups; a data loader may pickle the Trainer."""
        return {**super().__getstate__(), "topk_state": None, "_last": None}

    @override
    def teardown(self) -> None:
        """Closes the state in use; its residuals stay, on the CPU."""
        state, self.topk_state, self._resumed = self.topk_state, None, None
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        try:
            if state is not None:
                state.close()
                state.residuals.offload_to_cpu()
        finally:
            super().teardown()


def entry_to_resume(checkpoint: Mapping[str, Any], residual_checkpoint: bool) -> Any:
    """Returns the entry to resume with: the checkpoint's, or an empty one with its step count, and a message."""
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
    rank_zero_info(f"lightning_topk: {said}; residuals start at zero.")
    steps = entry.get("steps") if isinstance(entry, dict) else None
    return {**EMPTY, "steps": steps if type(steps) is int and steps > 0 else 0}
