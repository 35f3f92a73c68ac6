"""All systems on the same model, learning rate tuned for each over one grid (DGC: a third of it, as it adds momentum)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tqdm import tqdm

from lightning_topk.config import TopKConfig, presets
from lightning_topk.plots import Panel
from lightning_topk.reproduce.problem import Problem, Run, digits, image_folder, train
from lightning_topk.reproduce.result import Check, Result, Row
from lightning_topk.schedule import ExponentialWarmup

RATIO = 0.01
GRID = (0.1, 0.3, 1.0)
SYSTEMS = ("dense", "topk", "bidirectional_topk", "randk", "gaussiank", "dgc", "trimmed")


def settings_of(system: str, ratio: float, steps: int) -> dict[str, Any]:
    """A preset at a ratio; DGC's warm-up takes a fifth of the run."""
    settings = {"ratio": ratio, **presets[system]}
    if system == "dgc":
        settings["ratio"] = ExponentialWarmup(ratio, start=0.25, steps=steps // 5)
    return settings


def run(folder: Path | None = None) -> Result:
    """Trains every system at every learning rate with three seeds, and the thesis's rows.

    Args:
        folder: A folder of images, such as CIFAR-10, to train ResNet-20 on instead of digits; takes hours.
    """
    workers, steps, seeds = (8, 200, 3) if folder is None else (8, 1000, 3)
    model, data, batch = ("mlp", digits(), 10) if folder is None else ("resnet20", image_folder(folder), 32)
    numel = len(Problem(model, 0, data).start)
    result = Result(
        "convergence",
        "sparsified SGD reaches the quality of dense SGD",
        f"{'Digits' if folder is None else 'Images'}, {model} (d = {numel:,}), {workers} simulated workers, batch {batch} each, SGD without momentum (DGC: 0.9 on the "
        f"workers), ratio {RATIO:g}, {steps} steps, {seeds} seeds, learning rate tuned for each system over {GRID} (DGC: a "
        "third of it) by final training loss.",
    )
    rows: list[Row] = []
    best: dict[str, list[Run]] = {}
    with tqdm(total=len(SYSTEMS) * len(GRID) * seeds, desc="convergence", unit="run") as bar:
        for system in SYSTEMS:
            config = TopKConfig(**settings_of(system, RATIO, steps))
            tried: dict[float, list[Run]] = {}
            for lr in GRID:
                rate = lr / 3 if config.momentum else lr
                tried[rate] = []
                for seed in range(seeds):
                    tried[rate].append(train(model, config, workers, steps, rate, seed, batch, data=data))
                    bar.update()
            rate = min(tried, key=lambda lr: sum(one.loss for one in tried[lr]))
            best[system] = tried[rate]
            rows.append({"system": system, "lr": rate, **summary(best[system])})
    result.tables["Every system at its best learning rate"] = rows
    thesis = _thesis_rows()
    result.tables[
        "The thesis's MLP rows: ratio 0.01 at this size, 1 seed, learning rate tuned; accuracy in percent"
    ] = thesis
    dense = mean_accuracy(best["dense"])
    behind = mean_accuracy(best["topk"]) - mean_accuracy(best["randk"])
    result.checks.append(Check("RandK falls behind TopK", "far (figure 1)", f"{-behind:+.1f} points", behind > 2))
    for system in ("topk", "bidirectional_topk", "gaussiank", "dgc", "trimmed"):
        gap = dense - mean_accuracy(best[system])
        result.checks.append(
            Check(f"{system} within 2 points of dense", "same accuracy", f"{-gap:+.1f} points", gap <= 2.0)
        )
    for row in thesis:
        gap = float(row["uni"]) - float(row["bi"])
        published = {20: "97.56 and 97.67", 100: "97.55 and 97.43"}[int(row["N"])]
        result.checks.append(
            Check(
                f"uni and bi alike at N = {row['N']}",
                published,
                f"{row['uni']:.1f} and {row['bi']:.1f}",
                abs(gap) <= 1.0,
            )
        )
    result.panels.append(
        Panel(
            "final accuracy by seed, percent",
            "seed",
            {name: (list(range(seeds)), [r.accuracy for r in runs]) for name, runs in best.items()},
        )
    )
    return result


def _thesis_rows() -> list[Row]:
    """SGD, uni and bi at N = 20 and 100, through one server."""
    rows = []
    for workers, steps in ((20, 150), (100, 100)):
        row: Row = {"N": workers, "steps": steps}
        for name, settings in {
            "SGD": presets["dense"],
            "uni": {"ratio": RATIO, "bidirectional": False, "topology": "single_server"},
            "bi": {"ratio": RATIO, "topology": "single_server"},
        }.items():
            runs = {lr: train("mlp", TopKConfig(**settings), workers, steps, lr, seed=0) for lr in (0.3, 1.0)}
            lr = min(runs, key=lambda lr: runs[lr].loss)
            row |= {name: runs[lr].accuracy, f"lr {name}": lr}
        rows.append(row)
    return rows


def mean_accuracy(runs: list[Run]) -> float:
    """Mean over seeds, percent."""
    return sum(one.accuracy for one in runs) / len(runs)


def summary(runs: list[Run]) -> Row:
    """Mean and spread over seeds, and bytes."""
    losses, accuracies = [one.loss for one in runs], [one.accuracy for one in runs]
    return {
        "loss": sum(losses) / len(losses),
        "accuracy": f"{mean_accuracy(runs):.1f} ± {(max(accuracies) - min(accuracies)) / 2:.1f}",
        "bytes up a step": f"{runs[0].uplink_bytes:,.0f}",
        "bytes down a step": f"{runs[0].downlink_bytes:,.0f}",
    }
