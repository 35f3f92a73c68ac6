"""``saving=50`` against dense training and against its peers, with the user's learning rate, optimizer and steps.

Every method trains every model with the hyper-parameters that suit dense training, with several seeds, on simulated
workers. Runs are appended to ``learning.jsonl`` as they end; an interrupted command goes on where it stopped. What was
tried and rejected is in ``examples/recipes``, on the same tasks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topk.build import TOLERANCE
from lightning_topk.config import SAVING, TopKConfig
from lightning_topk.lab.models import MODELS, TEXT
from lightning_topk.lab.report import Result, behind, in_words
from lightning_topk.lab.training import Optimizer, Run, Runs, train
from lightning_topk.simulate import Cluster

OURS = f"saving {SAVING:g}"
"""The method that is judged: the default."""


@dataclass(frozen=True)
class Task:
    """A model, its workers, and the hyper-parameters that suit dense training of it.

    The learning rate falls from ``lr`` along half a cosine. ``within`` is how far behind dense training it may end: in
    points of accuracy, or a fraction of the loss on held-out text.
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


class PowerSGD(Cluster):
    """PowerSGD with error feedback (Vogels et al. 2019, algorithms 1 and 2): the leading directions of matrices.

    A parameter with more than two dimensions counts as a matrix of its first by all others; vectors, and matrices that
    this would not make smaller, go by all-reduce. Bytes are those of ring all-reduces of float32.

    Args:
        *args: Arguments of :class:`lightning_topk.simulate.Cluster`.
        rank: Number of directions of a matrix.
        shapes: Shapes of the parameters.
        **kwargs: Likewise.
    """

    def __init__(self, *args: Any, rank: int, shapes: Sequence[tuple[int, ...]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sizes = [torch.Size(shape).numel() for shape in shapes]
        self.residual = torch.zeros(len(self.endpoints), sum(self.sizes))
        generator = torch.Generator().manual_seed(0)
        self.right: dict[int, Tensor] = {}
        for number, (shape, size) in enumerate(zip(shapes, self.sizes, strict=True)):
            rows, columns = shape[0], size // shape[0]
            if len(shape) > 1 and rank * (rows + columns) < rows * columns:
                self.right[number] = torch.randn(columns, rank, generator=generator)

    @override
    def step(self, gradients: Sequence[Tensor], epoch: int = 0) -> list[Tensor]:
        self.residual += torch.stack(list(gradients))
        parts, world, floats = [], len(gradients), 0
        for number, kept in enumerate(self.residual.split(self.sizes, dim=1)):
            if number not in self.right:
                parts.append(kept.mean(dim=0))
                floats += kept.shape[1]
                kept.zero_()
                continue
            matrices = kept.view(world, -1, len(self.right[number]))
            left = torch.linalg.qr((matrices @ self.right[number]).mean(dim=0)).Q
            right = self.right[number] = (matrices.mT @ left).mean(dim=0)
            parts.append((left @ right.T).flatten())
            floats += left.numel() + right.numel()
            kept -= parts[-1]
        for rank in range(world):
            self.sent_bytes["uplink"][rank] += 2 * (world - 1) * 4 * floats // world
        self.steps += 1
        return [torch.cat(parts) for _ in gradients]


@dataclass(frozen=True)
class Method:
    """Settings of the exchange, or PowerSGD's rank; ``examples/recipes`` has subclasses with workers of their own."""

    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    rank: int = 0

    def config(self, task: Task) -> TopKConfig:
        """The settings for a task."""
        config = TopKConfig(**self.settings)
        return config.dense if self.rank else config

    def cluster(self, task: Task) -> Callable[..., Cluster]:
        """Makes the workers, see :func:`lightning_topk.lab.training.train`."""
        return partial(PowerSGD, rank=self.rank, shapes=shapes_of(task)) if self.rank else Cluster

    def optimizer(self, task: Task) -> Optimizer:
        """The optimizer of a task."""
        return task.optimizer

    def train(self, task: Task, seed: int, data: Path | None) -> Run:
        """Trains a task; ``data`` is a folder of images, None for digits and text."""
        given: dict[str, Any] = {"batch": task.batch, "data": data, "cluster": self.cluster(task)}
        return train(task.model, self.config(task), task.workers, task.steps, self.optimizer(task), seed, **given)

    def measured(self, task: Task, seed: int, data: Path | None) -> dict[str, float]:
        """What is kept of a run, see :meth:`train`."""
        ended = self.train(task, seed, data)
        sent = {"bytes": ended.uplink_bytes + ended.downlink_bytes, "dense": ended.dense_bytes}
        return ended.quality | {key: value * task.steps for key, value in sent.items()}


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


def shapes_of(task: Task) -> list[tuple[int, ...]]:
    """The shapes of the parameters of a task's model."""
    return [tuple(parameter.shape) for parameter in MODELS[task.model]().parameters()]


def run(
    data: Path | None = None,
    models: Sequence[str] = (),
    methods: Sequence[str] = (),
    steps: int | None = None,
    seeds: int = 3,
    out: Path = Path("reproduced"),
    known: Mapping[str, Method] = METHODS,
) -> Result:
    """Holds saving=50 against dense training and its peers (``known``), with the user's hyper-parameters.

    With ``data``, a folder of images, a convnet, ResNet-20 and a VGG learn those, instead of digits and text.
    """
    tasks: tuple[Task, ...] = TASKS if data is None else IMAGES
    here = sorted({task.model for task in tasks})
    if unknown := {*models} - {*here} | {*methods} - {*known}:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"there is no {names} here: models are {', '.join(here)}, methods {', '.join(known)}.")
    wanted = (replace(task, steps=steps or task.steps) for task in tasks if not models or task.model in models)
    tasks = tuple(dict.fromkeys(wanted))
    chosen = {name: each for name, each in known.items() if not methods or name in ("dense", *methods)}
    found = Runs(out / "learning.jsonl")
    jobs = {
        run_key(task, name, method, seed): partial(method.measured, task, seed, data)
        for seed in range(seeds)
        for task in tasks
        for name, method in chosen.items()
    }
    found.complete(jobs, "learning")
    result = Result(
        "learning",
        "a fiftieth of the bytes learns like dense training, with the user's own hyper-parameters",
        "Cosine schedule, at a peak learning rate that suits dense training; SGD with momentum 0.9, for text AdamW and "
        "clipping at 1. Accuracy on held-out data in percent, or loss on held-out text; mean ± standard error; how "
        "many times fewer bytes than a ring all-reduce, where it is not 50.",
    )
    enter(result, found, tasks, chosen, seeds)
    return result


def run_key(task: Task, name: str, method: Method, seed: int) -> str:
    """What a run is known by: another method of the same name is another run."""
    words = re.sub(r" at 0x[0-9a-f]+", "", repr([method, method.config(task).summary()]))  # of functions
    made = hashlib.sha1(words.encode()).hexdigest()[:8]
    return json.dumps([*asdict(task).values(), name, seed, made])


def enter(
    result: Result,
    found: Mapping[str, Mapping[str, float]],
    tasks: Sequence[Task],
    methods: Mapping[str, Method],
    seeds: int = 3,
) -> None:
    """Enters what every method ends with, as far as there are runs, and how far behind dense training ours does."""
    rows = result.tables["Final quality"] = []
    for task in tasks:
        unit, scale, style = ("", 100, ".3f") if task.text else (" %", 1, ".2f")
        ends: dict[str, list[float]] = {}
        row = {"model": f"{task.model}, {task.workers} workers, {task.steps} steps" + " (loss)" * task.text}
        for name, method in methods.items():
            runs = [found[key] for seed in range(seeds) if (key := run_key(task, name, method, seed)) in found]
            ends[name] = [run["held" if task.text else "accuracy"] for run in runs]
            row[name] = in_words(ends[name], style, unit)
            if name != "dense" and any(abs(run["dense"] / run["bytes"] / SAVING - 1) > TOLERANCE for run in runs):
                row[name] += f" ({runs[0]['dense'] / runs[0]['bytes']:.0f}x)"
            if name == OURS:
                ours, dense = mean(ends[OURS]), mean(ends["dense"])
                gap = 100 * (ours / dense - 1) if task.text else dense - ours
                row["difference"], limit = behind(gap, " %" * task.text), scale * task.within
                result.check(row["model"], f"at most {limit:g} behind", row["difference"], gap <= limit)
        rows.append(row)
