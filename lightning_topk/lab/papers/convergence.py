"""All systems on the same model, learning rate tuned for each over the same grid."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightning_topk.config import TopKConfig, presets
from lightning_topk.lab.parallel import run_all
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Check, Result, Row, spread
from lightning_topk.lab.training import Optimizer, Problem, Run, image_folder, train
from lightning_topk.schedule import ExponentialWarmup

RATIO = 0.01
GRID = (0.03, 0.1, 0.3, 0.7, 1.0, 1.4, 2.0, 2.8)
THESIS_GRID = (0.7, 1.0, 1.4, 2.0, 2.8)
SEEDS = 3
SYSTEMS = ("dense", "topk", "bidirectional_topk", "randk", "gaussiank", "dgc", "trimmed")
COMPARED = ("topk", "bidirectional_topk", "gaussiank", "dgc", "trimmed")
"""Those that are to reach the quality of dense SGD."""
THESIS: dict[str, dict[str, Any]] = {
    "SGD": dict(presets["dense"]),
    "uni": {"ratio": RATIO, "bidirectional": False, "topology": "single_server"},
    "bi": {"ratio": RATIO, "topology": "single_server"},
}
"""The thesis's systems, through one server."""
PUBLISHED = {20: "97.56 and 97.67", 100: "97.55 and 97.43"}
"""The thesis's accuracies on MNIST, uni and bi, by workers."""


def settings_of(system: str, ratio: float, steps: int) -> dict[str, Any]:
    """A preset at a ratio; DGC's warm-up takes a fifth of the run."""
    settings = {"ratio": ratio, **presets[system]}
    if system == "dgc":
        settings["ratio"] = ExponentialWarmup(ratio, start=0.25, steps=steps // 5)
    return settings


def run(data: Path | None = None, steps: int | None = None) -> Result:
    """Trains every system at every learning rate with three seeds, and the thesis's rows.

    Args:
        data: A folder of images, such as CIFAR-10, to train ResNet-20 on instead of digits; takes hours.
        steps: Of a run; default: 200 on digits, 1,000 on images.
    """
    model, batch = ("mlp", 10) if data is None else ("resnet20", 32)
    workers, steps = 8, steps or (200 if data is None else 1000)
    numel = len(Problem(model, 0, None if data is None else image_folder(data)).start)
    jobs = {
        (system, lr, seed): partial(
            train,
            model,
            TopKConfig(**settings_of(system, RATIO, steps)),
            workers,
            steps,
            Optimizer(lr),
            seed,
            batch,
            images=data,
        )
        for system in SYSTEMS
        for lr in GRID
        for seed in range(SEEDS)
    }
    found = run_all(jobs, "convergence")
    tried = {s: {lr: [found[s, lr, seed] for seed in range(SEEDS)] for lr in GRID} for s in SYSTEMS}
    result = Result(
        "convergence",
        "sparsified SGD reaches the quality of dense SGD",
        f"{'Digits' if data is None else 'Images'}, {model} (d = {numel:,}), {workers} simulated workers, batch {batch} each, SGD "
        f"without momentum (DGC: 0.9 on the workers), ratio {RATIO:g}, {steps} steps, {SEEDS} seeds (mean ± half the range), "
        f"learning rate tuned for each system over {GRID} by final training loss. Where at least k entries pass a threshold, "
        "trimmed and gaussiank send exactly what topk does, since the cap takes the k largest: equal rows are no mistake.",
    )
    best = {system: tune(runs) for system, runs in tried.items()}
    result.tables["Every system at its best learning rate"] = [
        {"system": system, "lr": edge(lr, GRID), **summary(tried[system][lr])} for system, lr in best.items()
    ]
    result.tables["Final training loss by learning rate, mean of the seeds"] = [
        {"system": system, **{f"lr {lr:g}": mean_loss(runs) for lr, runs in tried[system].items()}}
        for system in SYSTEMS
    ]
    accuracy = {system: mean_accuracy(tried[system][lr]) for system, lr in best.items()}
    behind = accuracy["topk"] - accuracy["randk"]
    result.checks.append(Check("RandK falls behind TopK", "far (figure 1)", f"{-behind:+.1f} points", behind > 2))
    for system in COMPARED:
        gap = accuracy["dense"] - accuracy[system]
        result.checks.append(
            Check(f"{system} within 2 points of dense", "same accuracy", f"{-gap:+.1f} points", gap <= 2.0)
        )
    _thesis_rows(result)
    result.panels.append(
        Panel(
            "final training loss, mean of the seeds",
            "learning rate",
            {s: (GRID, [min(mean_loss(runs), 10.0) for runs in tried[s].values()]) for s in SYSTEMS},
            xlog=True,
            ylog=True,
        )
    )
    return result


def _thesis_rows(result: Result) -> None:
    """Adds the rows and verdicts of SGD, uni and bi at N = 20 and 100."""
    lengths = {20: 150, 100: 100}
    jobs = {
        (workers, name, lr, seed): partial(train, "mlp", TopKConfig(**settings), workers, steps, Optimizer(lr), seed)
        for workers, steps in lengths.items()
        for name, settings in THESIS.items()
        for lr in THESIS_GRID
        for seed in range(SEEDS)
    }
    found = run_all(jobs, "the thesis's rows")
    rows = []
    for workers, steps in lengths.items():
        row: Row = {"N": workers, "steps": steps}
        right = {}
        for name in THESIS:
            tried = {lr: [found[workers, name, lr, seed] for seed in range(SEEDS)] for lr in THESIS_GRID}
            lr = tune(tried)
            right[name] = mean_accuracy(tried[lr])
            row |= {name: spread([one.accuracy for one in tried[lr]], ".2f"), f"lr {name}": edge(lr, THESIS_GRID)}
        rows.append(row)
        measured = f"{right['uni']:.1f} and {right['bi']:.1f}"
        alike = abs(right["uni"] - right["bi"]) <= 1.0
        result.checks.append(Check(f"uni and bi alike at N = {workers}", PUBLISHED[workers], measured, alike))
    title = (
        f"The thesis's MLP rows at this size: 64-64-10 on digits, ratio {RATIO:g}, {SEEDS} seeds, learning rate tuned over "
        f"{THESIS_GRID}; accuracy in percent"
    )
    result.tables[title] = rows


def tune(tried: dict[float, list[Run]]) -> float:
    """The learning rate with the least mean loss."""
    return min(tried, key=lambda lr: mean_loss(tried[lr]))


def edge(lr: float, grid: tuple[float, ...]) -> str:
    """A learning rate in words: whether it is the last of its grid, so that a better one may lie beyond."""
    return f"{lr:g}" + (" (edge of the grid)" if lr in (grid[0], grid[-1]) else "")


def mean_loss(runs: list[Run]) -> float:
    """Mean final loss over seeds."""
    return sum(one.loss for one in runs) / len(runs)


def mean_accuracy(runs: list[Run]) -> float:
    """Mean over seeds, percent."""
    return sum(one.accuracy for one in runs) / len(runs)


def summary(runs: list[Run]) -> Row:
    """Mean and spread over seeds, and bytes."""
    return {
        "loss": spread([one.loss for one in runs], ".4f"),
        "accuracy": spread([one.accuracy for one in runs], ".1f"),
        "bytes up a step": f"{runs[0].uplink_bytes:,.0f}",
        "bytes down a step": f"{runs[0].downlink_bytes:,.0f}",
    }
