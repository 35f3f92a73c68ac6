"""All systems on the same model, with the learning rate tuned for each over the same grid."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightning_topk.config import TopKConfig
from lightning_topk.lab.data import image_folder
from lightning_topk.lab.papers.tuning import SEEDS, panel, sweep
from lightning_topk.lab.report import Result, Row, spread
from lightning_topk.lab.training import Problem, train
from lightning_topk.schedule import ExponentialWarmup
from lightning_topk.systems import presets

RATIO = 0.01
GRID = (0.03, 0.1, 0.3, 0.7, 1.0, 1.4, 2.0, 2.8)
SYSTEMS = ("dense", "topk", "bidirectional_topk", "randk", "gaussiank", "dgc", "trimmed")
COMPARED = ("topk", "bidirectional_topk", "gaussiank", "dgc", "trimmed")
"""Systems that should reach the quality of dense SGD."""

THESIS_GRID = (0.7, 1.0, 1.4, 2.0, 2.8)
THESIS: dict[str, dict[str, Any]] = {
    "SGD": dict(presets["dense"]),
    "uni": {"ratio": RATIO, "bidirectional": False, "topology": "single_server", "wire": "bf16"},
    "bi": {"ratio": RATIO, "topology": "single_server", "wire": "bf16"},
}
"""The thesis's systems, through one server."""
LENGTHS = {20: 150, 100: 100}
"""Steps of the thesis's rows, by workers."""
PUBLISHED = {20: "97.56 and 97.67", 100: "97.55 and 97.43"}
"""The thesis's accuracies on MNIST, uni and bi, by workers."""


def settings_of(system: str, ratio: float, steps: int) -> dict[str, Any]:
    """A preset at a ratio; DGC's warm-up takes a fifth of the run."""
    ratios = {"dense": 1.0, "dgc": ExponentialWarmup(ratio, start=0.25, steps=max(1, steps // 5))}
    return {**presets[system], "ratio": ratios.get(system, ratio)}


def run(data: Path | None = None, steps: int | None = None) -> Result:
    """Holds every system against dense SGD, with tuned learning rates and three seeds.

    Args:
        data: Folder of images, such as CIFAR-10, to train ResNet-20 on instead of digits: train/<class>/*,
            test/<class>/*. Takes days.
        steps: Steps of a run. Default: 200 on digits, 1,000 on images.
    """
    model, batch = ("mlp", 10) if data is None else ("resnet20", 32)
    workers, steps = 8, steps or (200 if data is None else 1000)
    numel = len(Problem(model, 0, None if data is None else image_folder(data)).start)
    systems = {
        system: partial(
            train, model, TopKConfig(**settings_of(system, RATIO, steps)), workers, steps, batch=batch, images=data
        )
        for system in SYSTEMS
    }
    tuned = sweep(systems, GRID, SEEDS, "convergence")
    result = Result(
        "convergence",
        "sparsified SGD reaches the quality of dense SGD",
        f"{'Digits' if data is None else 'Images'}, {model} (d = {numel:,}), {workers} simulated workers, batch "
        f"{batch} each, SGD without momentum (DGC: 0.9 on the workers), ratio {RATIO:g}, {steps} steps, {SEEDS} seeds "
        f"(mean ± half the range), learning rate tuned for each system over {GRID} by final training loss (in "
        "the last columns). Where at least k entries pass a threshold, trimmed and gaussiank send exactly what topk "
        "does, since the cap takes the k largest: equal rows are no mistake.",
        against="published",
    )
    result.tables["Every system at its best learning rate"] = [
        {
            "system": system,
            "lr": each.lr_in_words,
            "loss": spread([run.loss for run in each.best], ".4f"),
            "accuracy": each.spread(".1f"),
            "bytes up a step": f"{each.best[0].uplink_bytes:,.0f}",
            "bytes down a step": f"{each.best[0].downlink_bytes:,.0f}",
            **each.by_rate(),
        }
        for system, each in tuned.items()
    ]
    behind = tuned["topk"].accuracy - tuned["randk"].accuracy
    result.check("RandK falls behind TopK", "far (figure 1)", f"{-behind:+.1f} points", behind > 2)
    for system in COMPARED:
        gap = tuned["dense"].accuracy - tuned[system].accuracy
        result.check(f"{system} within 2 points of dense", "same accuracy", f"{-gap:+.1f} points", gap <= 2.0)
    _thesis_rows(result)
    result.panels.append(panel(f"mean of {SEEDS} seeds", tuned))
    return result


def _thesis_rows(result: Result) -> None:
    """Adds the rows and verdicts of SGD, uni and bi with 20 and 100 workers."""
    systems = {
        (workers, name): partial(train, "mlp", TopKConfig(**each), workers, steps)
        for workers, steps in LENGTHS.items()
        for name, each in THESIS.items()
    }
    found = sweep(systems, THESIS_GRID, SEEDS, "the thesis's rows")
    rows = []
    for workers, steps in LENGTHS.items():
        row: Row = {"N": workers, "steps": steps}
        for name in THESIS:
            each = found[workers, name]
            row |= {name: each.spread(".2f"), f"lr {name}": each.lr_in_words}
        rows.append(row)
        uni, bi = (found[workers, name].accuracy for name in ("uni", "bi"))
        statement, measured = f"uni and bi alike at N = {workers}", f"{uni:.1f} and {bi:.1f}"
        result.check(statement, PUBLISHED[workers], measured, abs(uni - bi) <= 1.0)
    title = (
        f"The thesis's MLP rows at this size: 64-64-10 on digits, ratio {RATIO:g}, {SEEDS} seeds, learning rate tuned "
        f"over {THESIS_GRID}; accuracy in percent"
    )
    result.tables[title] = rows
