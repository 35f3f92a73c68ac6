"""Imports Lightning's names from the package that the user imported: ``lightning.pytorch`` or ``pytorch_lightning``.

Both contain the same code with separate class hierarchies, and the Trainer of each accepts only its own classes. If
only ``pytorch_lightning`` has been imported, names come from there, else from ``lightning.pytorch``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

PACKAGE = "lightning.pytorch"
if "pytorch_lightning" in sys.modules and PACKAGE not in sys.modules:
    PACKAGE = "pytorch_lightning"

OTHER = "pytorch_lightning" if PACKAGE == "lightning.pytorch" else "lightning.pytorch"
"""The package whose Trainer the strategy does not serve."""

if TYPE_CHECKING or PACKAGE == "lightning.pytorch":
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
else:
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

__all__ = [
    "OTHER",
    "PACKAGE",
    "DDPStrategy",
    "ModelParallelStrategy",
    "OfOnePackage",
    "StrategyRegistry",
    "TrainerFn",
    "TrainerStatus",
    "rank_zero_info",
    "rank_zero_warn",
]


class OfOnePackage:
    """A strategy that says when it was given to the other package's Trainer."""

    @property
    def accelerator(self) -> Any:
        """The Trainer's accelerator, which it sets when it is made; only then is it seen whose Trainer it is."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        if any(kind.__module__.startswith(f"{OTHER}.") for kind in type(accelerator).__mro__):
            raise ValueError(
                f"import {OTHER} before lightning_topk, and not {PACKAGE}: this {type(self).__name__} is for the "
                f"Trainer of {PACKAGE}, and was given to that of {OTHER}."
            )
        self._accelerator = accelerator
