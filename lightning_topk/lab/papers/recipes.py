"""The default recipe against dense training and against its peers, with the user's learning rate, optimizer and steps.

Every recipe trains every model with the hyper-parameters that suit dense training, with several seeds, on simulated
workers. Runs are appended to ``recipes.jsonl`` as they end; an interrupted command goes on where it stopped. What was
tried and rejected is in ``examples/recipes``, on the same tasks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from lightning_topk.config import TopKConfig, check_count
from lightning_topk.lab.models import MODELS, TEXT
from lightning_topk.lab.papers.powersgd import PowerSGD
from lightning_topk.lab.report import Panel, Result, spread
from lightning_topk.lab.training import Optimizer, run_all, train
from lightning_topk.planning.volume import volume
from lightning_topk.recipe import START, planned
from lightning_topk.schedule import CosineWarmup, Warmup
from lightning_topk.simulate import Cluster

RATIO = 0.001
SAVING = 50
"""How many times fewer bytes than dense training a recipe should send over the whole run."""


@dataclass(frozen=True)
class Task:
    """A model, its workers, and the hyper-parameters that suit dense training of it.

    Args:
        model: A key of :data:`lightning_topk.lab.models.MODELS`.
        workers: Simulated workers.
        steps: Steps of the run.
        lr: Peak learning rate; it falls to zero along half a cosine.
        batch: Examples of each worker in a step.
        within: How far from dense a recipe may end: points of accuracy, or a fraction of the loss on held-out text.
    """

    model: str
    workers: int
    steps: int
    lr: float
    batch: int = 10
    within: float = 1.0

    @property
    def text(self) -> bool:
        """Whether the loss on held-out text counts; else accuracy."""
        return self.model in TEXT

    @property
    def optimizer(self) -> Optimizer:
        """SGD with momentum for images; AdamW and clipping for text."""
        if self.text:
            return Optimizer(self.lr, 0.9, adamw=True, cosine=True, clip_norm=1.0)
        return Optimizer(self.lr, 0.9, cosine=True)

    @property
    def title(self) -> str:
        """What it is, in words."""
        kind = "AdamW, clipping at 1" if self.text else "SGD, momentum 0.9"
        length = f"{self.workers} workers, {self.steps} steps"
        return f"{self.model}, {length}, {kind}, lr {self.lr:g}, batch {self.batch} a worker"


TASKS = (
    Task("mlp", 2, 300, 0.1),
    Task("mlp", 8, 300, 0.1),
    Task("mlp", 32, 300, 0.1),
    Task("wide mlp", 8, 300, 0.1),
    Task("cnn", 8, 300, 0.03),
    Task("lstm", 8, 300, 0.1),
    Task("char lstm", 8, 300, 0.02, batch=4, within=0.01),
    Task("gpt", 8, 300, 0.01, batch=4, within=0.01),
    Task("char lstm", 8, 3000, 0.02, batch=4, within=0.01),
    Task("gpt", 8, 3000, 0.01, batch=4, within=0.01),
)
IMAGES = (Task("resnet20", 8, 1000, 0.02, batch=16, within=0.5), Task("vgg", 20, 100, 0.02))


@dataclass(frozen=True)
class Recipe:
    """A way to exchange gradients; ``examples/recipes`` has a subclass with other workers and optimizers.

    Args:
        settings: Arguments of :class:`lightning_topk.config.TopKConfig`.
        equal_bytes: Whether the ratio is scaled so that as many bytes are sent as with the default.
        rank: PowerSGD's, which then takes the place of all this.
    """

    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    equal_bytes: bool = False
    rank: int = 0

    def config(self, task: Task) -> TopKConfig:
        """The settings for a task, before the ratio is scaled."""
        config = planned(TopKConfig(**{"ratio": RATIO, **self.settings}), task.steps, task.workers)
        return config.dense if self.rank else config

    def cluster(self, task: Task) -> Callable[..., Cluster]:
        """Makes the workers, see :func:`lightning_topk.lab.training.train`."""
        if not self.rank:
            return Cluster
        shapes = [tuple(parameter.shape) for parameter in MODELS[task.model]().parameters()]
        return partial(PowerSGD, rank=self.rank, shapes=shapes)

    def optimizer(self, task: Task) -> Optimizer:
        """The optimizer of a task."""
        return task.optimizer


def begins(start: float) -> dict[str, Any]:
    """Settings of the default recipe in a short run, but for the density at its beginning."""
    return {"ratio": CosineWarmup(RATIO, start, share=1.0), "wire": "int4", "beta1": 0.0}


UNIDIRECTIONAL = {**begins(START), "bidirectional": False}

RECIPES: dict[str, Recipe] = {
    "dense": Recipe({"topology": "dense"}),
    "default": Recipe(),
    "unidirectional, equal bytes": Recipe(UNIDIRECTIONAL, equal_bytes=True),
    "all-gather, equal bytes": Recipe({**UNIDIRECTIONAL, "topology": "allgather"}, equal_bytes=True),
    "PowerSGD 1": Recipe(rank=1),
    "PowerSGD 2": Recipe(rank=2),
    "PowerSGD 4": Recipe(rank=4),
}
"""By name; all at a ratio of 0.001 in the long run."""


def run(
    data: Path | None = None,
    models: Sequence[str] = (),
    recipes: Sequence[str] = (),
    workers: Sequence[int] = (),
    steps: int | None = None,
    lr: float | None = None,
    seeds: int = 3,
    *,
    out: Path = Path("reproduced"),
    known: Mapping[str, Recipe] = RECIPES,
) -> Result:
    """Holds the default recipe against dense training and its peers, with the user's hyper-parameters.

    Args:
        data: Folder of images, such as CIFAR-10, to train ResNet-20 and a VGG on instead of digits and text:
            train/<class>/*, test/<class>/*. Takes hours.
        models: Only these models.
        recipes: Only these recipes, and dense.
        workers: Numbers of workers, instead of each task's own.
        steps: Steps of a run, instead of each task's own.
        lr: Peak learning rate, instead of each task's own.
        seeds: Runs of each.
        out: Folder of ``recipes.jsonl``.
        known: The recipes by name.

    Raises:
        ValueError: There is no such model or recipe, a number is not positive, or there are fewer than two workers.
    """
    check_count("seeds", seeds)
    check_count("steps", steps)
    if lr is not None and not 0 < lr < math.inf:
        raise ValueError(f"lr={lr!r} must be positive.")
    if any(count < 2 for count in workers):
        raise ValueError(f"workers={[*workers]} must be at least 2 each: one worker exchanges nothing.")
    tasks: tuple[Task, ...] = TASKS if data is None else IMAGES
    here = sorted({task.model for task in tasks})
    if unknown := {*models} - {*here} | {*recipes} - {*known}:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"there is no {names} here: models are {', '.join(here)}, recipes {', '.join(known)}.")
    changed = (
        replace(task, workers=count, steps=steps or task.steps, lr=lr or task.lr)
        for task in tasks
        for count in workers or (task.workers,)
        if not models or task.model in models
    )
    tasks = tuple(dict.fromkeys(changed))
    chosen = {name: recipe for name, recipe in known.items() if not recipes or name in ("dense", *recipes)}
    found = _runs(tasks, chosen, seeds, data, out / "recipes.jsonl")
    result = Result(
        "recipes",
        "a recipe closes the gap to dense training with the user's own hyper-parameters",
        f"Cosine schedule, at a peak learning rate that suits dense training; ratio {RATIO:g} in the long run; {seeds} "
        "seeds (mean ± half the range). Saving: bytes that a rank sends over the whole run, against a ring all-reduce.",
    )
    for task in tasks:
        rows = {
            name: [found[_key(task, name, recipe, seed)] for seed in range(seeds)] for name, recipe in chosen.items()
        }
        result.tables[task.title] = [
            {
                "recipe": name,
                "accuracy %": spread([each["accuracy"] for each in runs], ".2f"),
                "loss": spread([each["loss"] for each in runs], ".4f"),
                "held-out loss": spread([each["held"] for each in runs], ".4f"),
                "saving": f"{_mean(runs, 'dense') / _mean(runs, 'bytes'):.0f}x",
            }
            for name, runs in rows.items()
        ]
        _judge(result, task, rows)
        quality = "loss on held-out text" if task.text else "accuracy, %"
        title = f"{quality}: {task.model}, {task.workers} workers, {task.steps} steps"
        panel = Panel(title, "bytes a rank and run", xlog=True)
        panel.curves = {name: ([_mean(runs, "bytes")], [_quality(task, runs)]) for name, runs in rows.items()}
        result.panels.append(panel)
    return result


def _key(task: Task, name: str, recipe: Recipe, seed: int) -> str:
    """What a run is known by: another recipe of the same name is another run."""
    budget = Recipe().config(task).summary() if recipe.equal_bytes else None
    made = hashlib.sha1(repr([recipe, recipe.config(task).summary(), budget]).encode()).hexdigest()[:8]
    return json.dumps([*asdict(task).values(), name, seed, made])


def _runs(
    tasks: Sequence[Task], recipes: Mapping[str, Recipe], seeds: int, data: Path | None, path: Path
) -> dict[str, dict[str, float]]:
    """All runs by their key: those of the file, and those that are missing in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    found = {entry["key"]: entry for entry in map(json.loads, lines)}
    jobs: dict[str, Callable[[], dict[str, float]]] = {
        _key(task, name, recipe, seed): partial(_train, task, recipe, seed, data)
        for seed in range(seeds)
        for task in tasks
        for name, recipe in recipes.items()
    }
    jobs = {key: job for key, job in jobs.items() if key not in found}

    def note(key: str, measured: dict[str, float]) -> None:
        found[key] = {"key": key, **measured}
        with path.open("a") as file:
            file.write(json.dumps(found[key]) + "\n")

    run_all(jobs, "recipes", note)
    return found


def _train(task: Task, recipe: Recipe, seed: int, data: Path | None) -> dict[str, float]:
    config, optimizer, cluster = recipe.config(task), recipe.optimizer(task), recipe.cluster(task)
    if recipe.equal_bytes:
        config = _scaled(config, task)
    ended = train(
        task.model, config, task.workers, task.steps, optimizer, seed, task.batch, images=data, cluster=cluster
    )
    return {
        "loss": min(ended.loss, 1e3),
        "held": min(ended.held_loss, 1e3),
        "accuracy": ended.accuracy,
        "bytes": (ended.uplink_bytes + ended.downlink_bytes) * task.steps,
        "dense": ended.dense_bytes * task.steps,
    }


def _scaled(config: TopKConfig, task: Task) -> TopKConfig:
    """Settings whose ratio is multiplied so that a run sends at most as many bytes as one with the default."""
    sizes = {name: parameter.numel() for name, parameter in MODELS[task.model]().named_parameters()}
    steps = range(0, task.steps, max(1, task.steps // 60))

    def sent(config: TopKConfig) -> int:
        skipped = sum(
            size for name, size in sizes.items() if any(fnmatchcase(name, p) for p in config.dense_parameters)
        )
        whole = [sum(sizes.values())]
        volumes = (volume(config, whole, task.workers, step=step, uncompressed=[skipped]) for step in steps)
        return sum(each.uplink + each.downlink for each in volumes)

    def times(factor: float, ratio: Any) -> Any:
        if isinstance(ratio, Warmup):
            return replace(ratio, ratio=min(1.0, factor * ratio.ratio), start=min(1.0, factor * ratio.start))
        return ratio if ratio is None else min(1.0, factor * ratio)

    def scaled(factor: float) -> TopKConfig:
        return replace(config, ratio=times(factor, config.ratio), server_ratio=times(factor, config.server_ratio))

    budget = sent(Recipe().config(task))
    low, high = 1e-3, 1e3
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sent(scaled(middle)) <= budget else (low, middle)
    return scaled(low)


def _quality(task: Task, runs: list[dict[str, float]]) -> float:
    """What counts: accuracy in percent, or the loss on held-out text."""
    return _mean(runs, "held" if task.text else "accuracy")


def _mean(runs: list[dict[str, float]], key: str) -> float:
    return mean(each[key] for each in runs)


def _judge(result: Result, task: Task, rows: dict[str, list[dict[str, float]]]) -> None:
    """Holds the default against dense, and against the peers."""
    if "default" not in rows:
        return
    quality = {name: _quality(task, runs) for name, runs in rows.items()}
    what = f"{task.model}, {task.workers} workers, {task.steps} steps, lr {task.lr:g}"
    if task.text:
        gap = quality["default"] / quality["dense"] - 1
        words, seen = f"<= {100 * task.within:g} %", f"{100 * gap:+.2f} %"
    else:
        gap = quality["dense"] - quality["default"]
        words, seen = f"<= {task.within:g} points", f"{gap:+.2f} points"
    result.check(f"{what}: the default's loss against dense", words, seen, gap <= task.within)
    saving = mean(each["dense"] / each["bytes"] for each in rows["default"])
    result.check(f"{what}: saving over the whole run", f">= {SAVING}x", f"{saving:.0f}x", saving >= SAVING)
    for name, runs in rows.items():
        if name.endswith("equal bytes") or name.startswith("PowerSGD"):
            ahead = (quality[name] - quality["default"]) * (1 if task.text else -1)
            times = _mean(runs, "bytes") / _mean(rows["default"], "bytes")
            statement = f"{what}: better than {name} ({times:.1f} x the bytes)"
            result.check(statement, ">= 0", f"{ahead:+.3f} {'of loss' if task.text else 'points'}", ahead >= 0)
