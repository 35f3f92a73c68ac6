"""Imports Lightning's names from the package that the user imported: ``lightning.pytorch`` or ``pytorch_lightning``.

Both contain the same code with separate class hierarchies, and the Trainer of each accepts only its own classes. If
only ``pytorch_lightning`` has been imported, names come from there, else from ``lightning.pytorch``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

PACKAGE = "lightning.pytorch"
if "pytorch_lightning" in sys.modules and PACKAGE not in sys.modules:
    PACKAGE = "pytorch_lightning"

if TYPE_CHECKING or PACKAGE == "lightning.pytorch":
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
else:
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, Strategy, StrategyRegistry
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

__all__ = ["DDPStrategy", "ModelParallelStrategy", "Strategy", "StrategyRegistry", "rank_zero_info", "rank_zero_warn"]
