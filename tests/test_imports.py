"""The layers of the package, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_topk

PACKAGE = Path(lightning_topk.__file__).parent
LAYERS = [
    {"layout", "schedule", "beta1", "_version", "_lightning"},
    {"ops.reference"},
    {"ops.cpu", "ops.kernels"},
    {"ops"},
    {"select", "memory"},
    {"wire"},
    {"exchange"},
    {"config"},
    {"collectives", "simulate", "undo", "plan"},
    {"residuals", "choose", "costs", "checks"},
    {"advice"},
    {"checkpoint"},
    {"hook"},
    {"metrics", "strategy", "fabric"},
    {"callback", "plots", "hosts"},
    {"reproduce.result", "reproduce.problem", "reproduce.step", "reproduce.parallel", "reproduce.variants"},
    {
        "reproduce.bound",
        "reproduce.convergence",
        "reproduce.counterexample",
        "reproduce.distribution",
        "reproduce.operators",
        "reproduce.saving",
        "reproduce.speedup",
    },
    {"reproduce.tuning", "reproduce.recipes", "scale"},
    {"reproduce"},
    {"bench.timing", "bench.memory", "bench.peers"},
    {"bench.select", "bench.wire", "bench.ddp", "bench.train", "bench.costs", "bench.model"},
    {"bench.hosts"},
    {"bench.step"},
    {"bench"},
    {"_register"},
    {"__init__"},
    {"__main__"},
]
ALLOWED = {
    "torch.distributed": {
        "collectives",
        "choose",
        "checkpoint",
        "hook",
        "strategy",
        "reproduce.step",
        "bench.peers",
        "bench.ddp",
        "bench.costs",
        "bench.model",
    },
    "lightning": {"_lightning", "strategy", "callback", "fabric", "bench.train"},
    "triton": {"ops.kernels"},
    "torchmetrics": {"metrics"},
    "matplotlib": {"plots"},
}
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__") if "." in name else name: path for name, path in MODULES.items()}


def imports(path: Path) -> set[str]:
    """Modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if name.removeprefix("lightning_topk.") in MODULES}
            found |= modules or {node.module}
    return found


def layer(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if name in names)


def test_every_module_has_a_layer():
    assert set(MODULES) == set().union(*LAYERS)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__init__", "_register"}))
def test_imports_point_downward(name):
    for imported in imports(MODULES[name]):
        own = imported.removeprefix("lightning_topk.")
        if imported.startswith("lightning_topk.") and own in MODULES:
            assert layer(own) < layer(name), f"{name} imports {own}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_heavy_packages_are_imported_where_they_are_needed_only(name):
    for package, where in ALLOWED.items():
        if any(imported == package or imported.startswith(f"{package}.") for imported in imports(MODULES[name])):
            assert name in where, f"{name} imports {package}"


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_hook_needs_no_lightning():
    code = "import sys; from lightning_topk import topk_hook, TopKState, attach, TopKConfig; import lightning_topk.simulate\n"
    run(code + "assert not {'lightning', 'pytorch_lightning', 'torchmetrics', 'matplotlib'} & set(sys.modules)")


NAMES = "{'topk', 'topk_spawn', 'topk_fork', 'topk_notebook', 'topk_find_unused_parameters_true'}"


@pytest.mark.parametrize(
    "order", ["import lightning_topk; import lightning", "import lightning; import lightning_topk"]
)
def test_the_names_are_registered_in_either_order_of_imports(order):
    check = f"from lightning.pytorch.strategies import StrategyRegistry; assert {NAMES} <= set(StrategyRegistry)"
    run(f"{order}; {check}; import importlib; importlib.reload(lightning_topk); {check}")


@pytest.mark.parametrize(
    "first",
    [
        "from lightning_topk import CompressionMonitor",
        "import lightning_topk.lightning.fabric",
    ],
)
def test_any_module_can_be_imported_before_lightning(first):
    check = f"from lightning.pytorch.strategies import StrategyRegistry; assert {NAMES} <= set(StrategyRegistry)"
    run(f"{first}; {check}")


PL = """
import warnings; warnings.simplefilter("ignore")
{order}
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_topk import CompressionMonitor, TopKStrategy
quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for strategy in ("topk", TopKStrategy(ratio=0.1)):
    trainer = Trainer(devices=1, max_steps=2, strategy=strategy, callbacks=[CompressionMonitor()], **quiet)
    trainer.fit(BoringModel())
    assert trainer.callback_metrics["topk/dense_bytes"] == 0  # one worker
"""


@pytest.mark.parametrize(
    "order", ["import lightning_topk, pytorch_lightning", "import pytorch_lightning, lightning_topk"]
)
def test_pytorch_lightning_is_served_too(order):
    pytest.importorskip("pytorch_lightning")
    run(PL.format(order=order))


def test_the_wrong_package_says_which_one_is_right():
    pytest.importorskip("pytorch_lightning")
    code = "import lightning.pytorch, pytorch_lightning as pl, lightning_topk\n"
    code += "try: pl.Trainer(strategy=lightning_topk.TopKStrategy())\nexcept ValueError as error: print(error)"
    assert "TopKStrategy for lightning.pytorch.Trainer" in run(code)


def test_names_that_do_not_exist_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'TopKStrateg'"):
        _ = lightning_topk.TopKStrateg
    assert set(lightning_topk.__all__) <= set(dir(lightning_topk))
