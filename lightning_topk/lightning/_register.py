"""Makes ``Trainer(strategy="topk")`` work after ``import lightning_topk``, in either order of imports.

Lightning has no entry points for strategies; names must be added to its registry. Importing Lightning for that would
cost users of plain DDP several seconds. So the names are registered immediately if Lightning has been imported, else
right after it is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from typing_extensions import override

_REGISTRIES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")
_STRATEGY = "lightning_topk.lightning.strategy"  # registers its names when it is imported


def when_lightning_is_imported() -> None:
    """Registers the strategies' names now, or right after Lightning's registry has been imported."""
    when_imported(_REGISTRIES, lambda module: importlib.import_module(_STRATEGY))


def when_imported(names: tuple[str, ...], then: Callable[[ModuleType], Any]) -> None:
    """Does something with a module now, or right after it has been imported.

    Args:
        names: The module's full names; the first one that is imported counts.
        then: Is called with it.
    """
    loaded = [sys.modules[name] for name in names if name in sys.modules]
    if loaded:
        then(loaded[0])
    elif not any(isinstance(finder, _Finder) and finder.names == names for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(names, then))


class _Finder(MetaPathFinder):
    """Finds a module as usual, and makes its loader do something afterwards; see :func:`when_imported`."""

    def __init__(self, names: tuple[str, ...], then: Callable[[ModuleType], Any]) -> None:
        self.names, self._then = names, then

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        sys.meta_path.remove(self)  # only once, and the find_spec call below must not reach this finder again
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, self._then)
        return spec


class _TellingLoader(Loader):
    def __init__(self, loader: Loader, then: Callable[[ModuleType], Any]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)
