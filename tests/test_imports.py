"""The layers of the package, and the cost of importing it."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from groups import script

import lightning_topk

PACKAGE = Path(lightning_topk.__file__).parent

ADAPTERS = ["attach", "checks", "ddp", "fsdp", "lightning", "workarounds"]
BELOW = ("checks", "workarounds", "ddp", "fsdp")
SETTINGS = ["schedule", "config", "systems", "bucket"]
TRAINING = ["volume", "messages", "consensus", "optim", "runtime"]
MAY_IMPORT = {
    "schedule": [],
    "core": ["schedule"],
    "config": ["core", "schedule"],
    "systems": ["schedule"],
    "bucket": ["config", "core", "schedule"],
    "simulate": ["bucket", "config", "core"],
    "models": [],
    "plan": ["bucket", "config", "models", "volume"],
    "env": ["_version", "config"],
    "bench": ["_version", "config", "env", *TRAINING, "models", "plan", "adapters.attach"],
    "volume": ["core", *SETTINGS],
    "messages": ["core", *SETTINGS, "volume"],
    "consensus": [],
    "optim": ["core", *SETTINGS, "messages", "consensus"],
    "runtime": ["core", *SETTINGS, "volume", "messages", "consensus", "optim"],
    "adapters": [],
    "adapters.checks": [],
    "adapters.workarounds": [],
    "adapters.ddp": ["bucket", "config", *TRAINING, "adapters.checks"],
    "adapters.fsdp": ["bucket", "config", *TRAINING, "adapters.checks"],
    "adapters.attach": ["config", *TRAINING, "adapters.ddp", "adapters.fsdp"],
    "adapters.lightning": ["core", *SETTINGS, *TRAINING, *(f"adapters.{name}" for name in BELOW)],
}
"""The wings that each wing may import, except ``__init__``, ``__main__`` and modules that only re-export public
names."""
PUBLIC_NAMES = ("fabric", "metrics", "select")
"""Modules that only re-export public names of another module."""
PACKAGES = {
    "torch.distributed": {"bench", "consensus", "optim", "runtime", *(f"adapters.{name}" for name in ADAPTERS)},
    "lightning": {"adapters.lightning"},
    "pytorch_lightning": {"adapters.lightning"},
    "torchmetrics": {"adapters.lightning"},
    "triton": {"core"},
    "torchvision": {"models"},
    "matplotlib": set(),
    "tqdm": {"bench"},
    "lab": set(),
}
"""The wings that may import packages which are slow to import or optional."""
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


@cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, including through ``import_module``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0].removeprefix("lightning_topk.")
            found |= {node.value} if node.value.startswith("lightning_topk.") and module in MODULES else set()
    return found


def wing(module: str) -> str:
    """The wing of a module of the package, from its full name."""
    parts = module.removeprefix("lightning_topk.").split(".")
    return ".".join(parts[:2] if parts[0] == "adapters" else parts[:1])


INSIDE = sorted(name for name in MODULES if wing(name) in MAY_IMPORT)


def test_every_module_belongs_to_a_wing_which_imports_only_the_wings_below_it():
    assert {wing(name) for name in MODULES} - {*MAY_IMPORT, *PUBLIC_NAMES} == {"__init__", "__main__", "_version"}
    for name in INSIDE:
        allowed = {wing(name), *MAY_IMPORT[wing(name)]}
        ours = {imported for imported in imports(MODULES[name]) if imported.startswith("lightning_topk.")}
        assert {*map(wing, ours)} <= allowed, name


def test_no_modules_and_no_wings_import_each_other_in_a_circle():
    """Not even for type hints."""

    def imported(name: str) -> set[str]:
        found = set()
        for each in imports(MODULES[name]):
            module = each.removeprefix("lightning_topk.") if each.startswith("lightning_topk.") else ""
            while module and module not in MODULES:  # the name is inside a module
                module = module.rpartition(".")[0]
            found.add(module)
        return found - {name, ""}

    graph = {name: imported(name) for name in MODULES if name != "__init__"}
    assert "core.endpoint" in graph["core.exchange"]
    TopologicalSorter(graph).prepare()  # raises CycleError
    TopologicalSorter(MAY_IMPORT).prepare()


def test_packages_are_imported_only_in_the_wings_that_need_them():
    for name, path in MODULES.items():
        for package, wings in PACKAGES.items():
            if any(f"{imported}.".startswith(f"{package}.") for imported in imports(path)):
                assert wing(name) in wings, f"{name} imports {package}"


UNBOUNDED = {
    "fast": "devices",
    "_compiled": "devices, dtypes, alignments and settings",
    "_replace_final_callback": "nothing",
}
"""Functions whose results a process keeps without a bound, and what they are kept by."""


def test_no_cache_of_the_process_grows_with_steps_or_models():
    """A schedule may ask for another k in every step, and a search over models makes layout after layout."""
    found = set()
    for path in MODULES.values():
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in (*tree.body, *(each for body in classes for each in body.body)):
            marks = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
            found |= {node.name for each in marks if each in ("cache", "lru_cache", "lru_cache(maxsize=None)")}
    assert found == {*UNBOUNDED}


HOOK = """
from lightning_topk import attach, TopKConfig
import lightning_topk.env, lightning_topk.simulate
assert not {"lightning", "pytorch_lightning", "torchmetrics", "matplotlib"} & set(sys.modules)
assert "lightning_topk.adapters.fsdp" not in sys.modules
"""
REGISTERED = """
from lightning.pytorch.strategies import StrategyRegistry
names = {"topk", "topk_spawn", "topk_fork", "topk_notebook", "topk_find_unused_parameters_true"}
names |= {"topk_model_parallel"}
assert names <= set(StrategyRegistry)
"""
PL = """
import warnings; warnings.simplefilter("ignore")
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_topk import CompressionMonitor, TopKStrategy
quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
for strategy in ("topk", TopKStrategy(ratio=0.1)):
    trainer = Trainer(devices=1, max_steps=2, strategy=strategy, callbacks=[CompressionMonitor()], **quiet)
    trainer.fit(BoringModel())
    assert trainer.callback_metrics["topk/total_bytes"] == 0  # one worker
"""
CASES = {
    "the hook needs no Lightning, and the monitor registers names": (
        f"{HOOK}from lightning_topk import CompressionMonitor\n{REGISTERED}"
        "import lightning_topk; lightning_topk.fabric.TopKStrategy"
    ),
    "names are registered by an import after Lightning": (
        f"import lightning, lightning_topk, importlib\n{REGISTERED}importlib.reload(lightning_topk)\n{REGISTERED}"
    ),
    "pytorch_lightning is served": f"import pytorch_lightning, lightning_topk\n{PL}",
}
FORGET = """
import sys
ours = ("lightning", "lightning_fabric", "lightning_topk", "lightning_utilities", "matplotlib", "pytorch_lightning",
        "torchmetrics")
for name in [*sys.modules]:
    if name.partition(".")[0] in ours:
        del sys.modules[name]
"""


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_packages_work_together_in_every_order_of_imports(tmp_path, case):
    """In a process that forgets Lightning and this package: what they import takes seconds in a new interpreter."""
    pytest.importorskip("pytorch_lightning")
    path = tmp_path / "case.py"
    path.write_text(FORGET + CASES[case])
    script(path, log=tmp_path / "log", folder=tmp_path)


def test_names_that_do_not_exist_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'TopKStrateg'"):
        _ = lightning_topk.TopKStrateg
    assert set(lightning_topk.__all__) <= set(dir(lightning_topk))
