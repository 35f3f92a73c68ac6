"""Top-k gradient compression with error feedback in both directions, for PyTorch DDP, FSDP2 and Lightning.

With Lightning, change one argument::

    Trainer(strategy=TopKStrategy(saving=50))

With plain DistributedDataParallel, call :func:`attach` on the model; this does not import Lightning.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lightning_topk._version import __version__

if TYPE_CHECKING:
    from lightning_topk.adapters.attach import attach
    from lightning_topk.adapters.lightning.callback import CompressionMonitor
    from lightning_topk.adapters.lightning.model_parallel import TopKModelParallelStrategy
    from lightning_topk.adapters.lightning.strategy import TopKStrategy
    from lightning_topk.config import TopKConfig
    from lightning_topk.schedule import CosineWarmup, ExponentialWarmup
    from lightning_topk.systems import presets


__all__ = [
    "CompressionMonitor",
    "CosineWarmup",
    "ExponentialWarmup",
    "TopKConfig",
    "TopKModelParallelStrategy",
    "TopKStrategy",
    "__version__",
    "attach",
    "presets",
]

_MODULES = ("fabric", "metrics", "select")
_HOMES = {
    "CompressionMonitor": "adapters.lightning.callback",
    "CosineWarmup": "schedule",
    "ExponentialWarmup": "schedule",
    "TopKConfig": "config",
    "TopKModelParallelStrategy": "adapters.lightning.model_parallel",
    "TopKStrategy": "adapters.lightning.strategy",
    "attach": "adapters.attach",
    "presets": "systems",
}
"""Module of each public name, imported on first access: importing Lightning takes seconds."""


def __getattr__(name: str) -> Any:
    """Imports public modules and names on first access."""
    if name in _MODULES:
        return importlib.import_module(f"lightning_topk.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"lightning_topk.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


# Registers the name for Trainer(strategy="topk"), but only if Lightning was imported before: importing it takes
# seconds, which users of plain DDP should not pay.
if {"lightning.pytorch.strategies", "pytorch_lightning.strategies"} & set(sys.modules):
    importlib.import_module("lightning_topk.adapters.lightning")
