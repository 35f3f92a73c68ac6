"""What closes the gap to dense training when the user's learning rate, optimizer and number of steps stay as they are.

Every recipe trains every model with the hyper-parameters that suit dense training, with several seeds, on simulated workers. Runs are
appended to ``recipes.jsonl`` as they end; a command that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from lightning_topk.config import TopKConfig
from lightning_topk.plots import Panel
from lightning_topk.reproduce.parallel import run_all
from lightning_topk.reproduce.problem import train
from lightning_topk.reproduce.result import Check, Result, Row, spread
from lightning_topk.schedule import ExponentialWarmup

RATIO = 0.001
SEEDS = 3
SAVING = 50
"""What a recipe must save over the whole run to be considered."""


@dataclass(frozen=True)
class Task:
    """A model, its workers, and what a user would train it with."""

    model: str
    workers: int
    steps: int
    lr: float
    momentum: float = 0.9
    batch: int = 10


DIGITS = (
    Task("mlp", 32, 300, 0.1),
    Task("wide mlp", 8, 300, 0.1),
    Task("cnn", 8, 300, 0.03),
    Task("lstm", 8, 300, 0.1),
)
IMAGES = (Task("resnet20", 8, 4000, 0.1, batch=32),)


def flushed(every: int, ratio: float, step: int) -> float:
    """All of the gradient once in so many steps."""
    return 1.0 if step % every == every - 1 else ratio


def _warmed(share: float, server: float = 1.0) -> dict[str, Any]:
    up = ExponentialWarmup(RATIO, share=share)
    return (
        {"ratio": up} if server == 1 else {"ratio": up, "server_ratio": ExponentialWarmup(server * RATIO, share=share)}
    )


RECIPES: dict[str, Mapping[str, Any]] = {
    "dense": {"topology": "dense"},
    "plain": {},
    "unidirectional": {"bidirectional": False},
    "all-gather": {"bidirectional": False, "topology": "allgather"},
    "server x2": {"server_ratio": 2 * RATIO},
    "server x4": {"server_ratio": 4 * RATIO},
    "1-D dense": {"dense_parameters": "*bias*"},
    "lr ratio": {"lr_ratio": True},
    "warm-up 10 %": _warmed(0.1),
    "warm-up 25 %": _warmed(0.25),
    "warm-up 50 %": _warmed(0.5),
    "warm-up 25 %, server x4": _warmed(0.25, 4),
    "warm-up 25 %, lr ratio": {**_warmed(0.25), "lr_ratio": True},
    "flush every 100": {"ratio": partial(flushed, 100, RATIO)},
    "momentum correction": {"momentum": 0.9},
    "momentum correction, unmasked": {"momentum": 0.9, "momentum_masking": False},
}
"""Settings by name; all at a ratio of 0.001 in the long run."""


def run(data: Path | None = None, steps: int | None = None, out: Path = Path("reproduced")) -> Result:
    """Trains every recipe on every model.

    Args:
        data: A folder of images, such as CIFAR-10, to train ResNet-20 on instead of the models of digits; takes days.
        steps: Of a run, instead of each task's own.
        out: Where ``recipes.jsonl`` is.
    """
    tasks = [Task(**{**asdict(task), "steps": steps or task.steps}) for task in (DIGITS if data is None else IMAGES)]
    found = _runs(tasks, data, out / "recipes.jsonl")
    result = Result(
        "recipes",
        "a recipe closes the gap to dense training with the user's own hyper-parameters",
        f"{'Digits' if data is None else 'Images'}; SGD with momentum 0.9 and a cosine schedule, at a learning rate that suits dense "
        f"training; ratio {RATIO:g} in the long run; {SEEDS} seeds (mean ± half the range). Saving: of a ring all-reduce, over the whole "
        "run, in the bytes that a rank sends.",
    )
    for task in tasks:
        title = f"{task.model}, {task.workers} workers, {task.steps} steps, lr {task.lr:g}"
        rows = {name: [found[_key(task, name, seed)] for seed in range(SEEDS)] for name in RECIPES}
        result.tables[title] = [_row(name, runs) for name, runs in rows.items()]
        _judge(result, task, rows)
        panel = Panel(f"accuracy, {task.model}, {task.workers} workers", "bytes a rank and run", xlog=True)
        for name, runs in rows.items():
            panel.curves[name] = ([mean(each["bytes"] for each in runs)], [mean(each["accuracy"] for each in runs)])
        result.panels.append(panel)
    return result


def _key(task: Task, recipe: str, seed: int) -> str:
    return json.dumps([*asdict(task).values(), recipe, seed])


def _runs(tasks: list[Task], data: Path | None, path: Path) -> dict[str, dict[str, float]]:
    """All runs by their key: those of the file, and those that are missing in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    found = {entry["key"]: entry for entry in map(json.loads, lines)}
    wanted = {_key(task, name, seed): (task, name, seed) for task in tasks for name in RECIPES for seed in range(SEEDS)}
    jobs: dict[str, Callable[[], dict[str, float]]] = {
        key: partial(_train, *each, data) for key, each in wanted.items() if key not in found
    }

    def note(key: str, measured: dict[str, float]) -> None:
        found[key] = {"key": key, **measured}
        with path.open("a") as file:
            file.write(json.dumps(found[key]) + "\n")

    run_all(jobs, "recipes", note)
    return found


def _train(task: Task, recipe: str, seed: int, data: Path | None) -> dict[str, float]:
    """One run."""
    config = TopKConfig(**{"ratio": RATIO, **RECIPES[recipe]}).planned(task.steps)
    own = 0.0 if config.momentum else task.momentum  # momentum correction takes the optimizer's place
    ended = train(
        task.model, config, task.workers, task.steps, task.lr, seed, task.batch, own, images=data, cosine=True
    )
    sent = (ended.uplink_bytes + ended.downlink_bytes) * task.steps
    return {
        "loss": min(ended.loss, 1e3),
        "accuracy": ended.accuracy,
        "bytes": sent,
        "dense": ended.dense_bytes * task.steps,
    }


def _row(name: str, runs: list[dict[str, float]]) -> Row:
    return {
        "recipe": name,
        "accuracy %": spread([each["accuracy"] for each in runs], ".2f"),
        "training loss": spread([each["loss"] for each in runs], ".4f"),
        "saving": f"{runs[0]['dense'] / runs[0]['bytes']:.0f}x",
    }


def _judge(result: Result, task: Task, rows: dict[str, list[dict[str, float]]]) -> None:
    """Holds the best recipe that saves enough against dense."""
    accuracy = {name: mean(each["accuracy"] for each in runs) for name, runs in rows.items()}
    frugal = [name for name, runs in rows.items() if runs[0]["dense"] >= SAVING * runs[0]["bytes"]]
    best = max(frugal, key=lambda name: accuracy[name], default="plain")
    gap = accuracy["dense"] - accuracy[best]
    statement = f"{task.model}, {task.workers} workers: a recipe that saves {SAVING}x within 1 point of dense"
    result.checks.append(Check(statement, "<= 1 point", f"{gap:+.2f} points ({best})", gap <= 1))
