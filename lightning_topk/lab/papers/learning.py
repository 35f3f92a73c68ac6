"""``saving=50`` against dense training and against its peers, with the user's learning rate, optimizer and steps.

Every method trains every model with the hyper-parameters that suit dense training, with several seeds, on simulated
workers. Runs are appended to ``learning.jsonl`` as they end; an interrupted command goes on where it stopped. What was
tried and rejected is in ``examples/recipes``, on the same tasks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from lightning_topk.build import TOLERANCE
from lightning_topk.config import SAVING, TopKConfig, check_count
from lightning_topk.lab.models import MODELS, TEXT
from lightning_topk.lab.papers.powersgd import PowerSGD
from lightning_topk.lab.report import Panel, Result, spread
from lightning_topk.lab.training import Optimizer, Run, resume, train
from lightning_topk.simulate import Cluster

OURS = f"saving {SAVING:g}"
"""The method that is judged: the default."""


@dataclass(frozen=True)
class Task:
    """A model, its workers, and the hyper-parameters that suit dense training of it.

    Args:
        model: A key of :data:`lightning_topk.lab.models.MODELS`.
        workers: Simulated workers.
        steps: Steps of the run.
        lr: Peak learning rate; it falls to zero along half a cosine.
        batch: Examples of each worker in a step.
        within: How far from dense it may end: points of accuracy, or a fraction of the loss on held-out text.
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
IMAGES = (
    Task("convnet", 8, 3000, 0.05, batch=16, within=0.5),
    Task("resnet20", 8, 1000, 0.02, batch=16, within=0.5),
    Task("vgg", 20, 100, 0.02),
)


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients; ``examples/recipes`` has a subclass with other workers and optimizers.

    Args:
        settings: Arguments of :class:`lightning_topk.config.TopKConfig`.
        rank: PowerSGD's, which then takes the place of all this.
    """

    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    rank: int = 0

    def config(self, task: Task) -> TopKConfig:
        """The settings for a task."""
        config = TopKConfig(**self.settings)
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

    def train(self, task: Task, seed: int, data: Path | None) -> Run:
        """Trains a task.

        Args:
            task: The task.
            seed: Seed of the parameters and the batches.
            data: Folder of images; None for digits and text.
        """
        config, optimizer, cluster = self.config(task), self.optimizer(task), self.cluster(task)
        return train(
            task.model, config, task.workers, task.steps, optimizer, seed, task.batch, images=data, cluster=cluster
        )

    def measured(self, task: Task, seed: int, data: Path | None) -> dict[str, float]:
        """What is kept of a run, see :meth:`train`."""
        ended = self.train(task, seed, data)
        return {
            "loss": min(ended.loss, 1e3),
            "held": min(ended.held_loss, 1e3),
            "accuracy": ended.accuracy,
            "bytes": (ended.uplink_bytes + ended.downlink_bytes) * task.steps,
            "dense": ended.dense_bytes * task.steps,
        }


METHODS: dict[str, Method] = {
    "dense": Method({"topology": "dense"}),
    OURS: Method(),
    "unidirectional": Method({"bidirectional": False}),
    "all-gather": Method({"bidirectional": False, "topology": "allgather"}),
    "PowerSGD 1": Method(rank=1),
    "PowerSGD 2": Method(rank=2),
    "PowerSGD 4": Method(rank=4),
}
"""By name; all but PowerSGD and dense training in the same number of bytes."""


def run(
    data: Path | None = None,
    models: Sequence[str] = (),
    methods: Sequence[str] = (),
    workers: Sequence[int] = (),
    steps: int | None = None,
    lr: float | None = None,
    seeds: int = 3,
    *,
    out: Path = Path("reproduced"),
    known: Mapping[str, Method] = METHODS,
) -> Result:
    """Holds saving=50 against dense training and its peers, with the user's hyper-parameters.

    Args:
        data: Folder of images, such as CIFAR-10, to train a convnet, ResNet-20 and a VGG on instead of digits and text:
            train/<class>/*, test/<class>/*. Takes hours.
        models: Only these models.
        methods: Only these methods, and dense.
        workers: Numbers of workers, instead of each task's own.
        steps: Steps of a run, instead of each task's own.
        lr: Peak learning rate, instead of each task's own.
        seeds: Runs of each.
        out: Folder of ``learning.jsonl``.
        known: The methods by name.

    Raises:
        ValueError: There is no such model or method, a number is not positive, or there are fewer than two workers.
    """
    check_count("seeds", seeds)
    check_count("steps", steps)
    if lr is not None and not 0 < lr < math.inf:
        raise ValueError(f"lr={lr!r} must be positive.")
    if any(count < 2 for count in workers):
        raise ValueError(f"workers={[*workers]} must be at least 2 each: one worker exchanges nothing.")
    tasks: tuple[Task, ...] = TASKS if data is None else IMAGES
    here = sorted({task.model for task in tasks})
    if unknown := {*models} - {*here} | {*methods} - {*known}:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"there is no {names} here: models are {', '.join(here)}, methods {', '.join(known)}.")
    changed = (
        replace(task, workers=count, steps=steps or task.steps, lr=lr or task.lr)
        for task in tasks
        for count in workers or (task.workers,)
        if not models or task.model in models
    )
    tasks = tuple(dict.fromkeys(changed))
    chosen = {name: each for name, each in known.items() if not methods or name in ("dense", *methods)}
    found = _runs(tasks, chosen, seeds, data, out / "learning.jsonl")
    result = Result(
        "learning",
        "a fiftieth of the bytes learns like dense training, with the user's own hyper-parameters",
        f"Cosine schedule, at a peak learning rate that suits dense training; {seeds} seeds (mean ± half the range). "
        "Saving: bytes that a rank sends over the whole run, against a ring all-reduce.",
    )
    for task in tasks:
        rows = {
            name: [found[run_key(task, name, each, seed)] for seed in range(seeds)] for name, each in chosen.items()
        }
        result.tables[task.title] = [
            {
                "method": name,
                "accuracy %": spread([each["accuracy"] for each in runs], ".2f"),
                "loss": spread([each["loss"] for each in runs], ".4f"),
                "held-out loss": spread([each["held"] for each in runs], ".4f"),
                "saving": f"{_mean(runs, 'dense') / _mean(runs, 'bytes'):.1f}x",
            }
            for name, runs in rows.items()
        ]
        _judge(result, task, rows)
        quality = "loss on held-out text" if task.text else "held-out accuracy, %"
        title = f"{task.model}, {task.workers} workers, {task.steps} steps"
        panel = Panel(title, "bytes a rank and run", xlog=True, ylabel=quality)
        panel.curves = {name: ([_mean(runs, "bytes")], [_quality(task, runs)]) for name, runs in rows.items()}
        result.panels.append(panel)
    return result


def run_key(task: Task, name: str, method: Method, seed: int) -> str:
    """What a run is known by: another method of the same name is another run."""
    words = re.sub(r" at 0x[0-9a-f]+", "", repr([method, method.config(task).summary()]))  # of functions
    made = hashlib.sha1(words.encode()).hexdigest()[:8]
    return json.dumps([*asdict(task).values(), name, seed, made])


def _runs(
    tasks: Sequence[Task], methods: Mapping[str, Method], seeds: int, data: Path | None, path: Path
) -> dict[str, dict[str, float]]:
    """All runs by their key: those of the file, and those that are missing in it."""
    jobs: dict[str, Callable[[], dict[str, float]]] = {
        run_key(task, name, method, seed): partial(method.measured, task, seed, data)
        for seed in range(seeds)
        for task in tasks
        for name, method in methods.items()
    }
    return resume(jobs, "learning", path)


def _quality(task: Task, runs: list[dict[str, float]]) -> float:
    """What counts: accuracy in percent, or the loss on held-out text."""
    return _mean(runs, "held" if task.text else "accuracy")


def _mean(runs: list[dict[str, float]], key: str) -> float:
    return mean(each[key] for each in runs)


def _judge(result: Result, task: Task, rows: dict[str, list[dict[str, float]]]) -> None:
    """Holds ours against dense, and against the peers."""
    if OURS not in rows:
        return
    quality = {name: _quality(task, runs) for name, runs in rows.items()}
    what = f"{task.model}, {task.workers} workers, {task.steps} steps, lr {task.lr:g}"
    if task.text:
        gap = quality[OURS] / quality["dense"] - 1
        words, seen = f"<= {100 * task.within:g} %", f"{100 * gap:+.2f} %"
    else:
        gap = quality["dense"] - quality[OURS]
        words, seen = f"<= {task.within:g} points", f"{gap:+.2f} points"
    result.check(f"{what}: the loss against dense", words, seen, gap <= task.within)
    saving = mean(each["dense"] / each["bytes"] for each in rows[OURS])
    reached = abs(saving / SAVING - 1) <= TOLERANCE
    result.check(f"{what}: saving", f"{SAVING:g}x, to {TOLERANCE:.0%}", f"{saving:.1f}x", reached)
    for name, runs in rows.items():
        if name not in ("dense", OURS):
            ahead = (quality[name] - quality[OURS]) * (1 if task.text else -1)
            times = _mean(runs, "bytes") / _mean(rows[OURS], "bytes")
            statement = f"{what}: better than {name} ({times:.1f} x the bytes)"
            result.check(statement, ">= 0", f"{ahead:+.3f} {'of loss' if task.text else 'points'}", ahead >= 0)
