"""What closes the gap to dense training when the user's learning rate, optimizer and number of steps stay as they are.

Every recipe trains every model with the hyper-parameters that suit dense training, with several seeds, on simulated workers. Runs are
appended to ``recipes.jsonl`` as they end; a command that was interrupted goes on where it stopped.
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

from lightning_topk.config import START, TopKConfig, check_count
from lightning_topk.lab.papers.variants import Adaptive, Decaying, Differences, OwnShards, PowerSGD
from lightning_topk.lab.parallel import run_all
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Check, Result, Row, spread
from lightning_topk.lab.training import MODELS, TEXT, Optimizer, train
from lightning_topk.planning.volume import volume
from lightning_topk.schedule import CosineWarmup, ExponentialWarmup, Warmup
from lightning_topk.simulate import Cluster

RATIO = 0.001
SEEDS = 3
SAVING = 50
"""What a recipe must save over the whole run to be considered."""


@dataclass(frozen=True)
class Task:
    """A model, its workers, and what a user would train it with.

    Args:
        model: A key of :data:`lightning_topk.lab.training.MODELS`.
        workers: Simulated workers.
        steps: Steps.
        lr: Peak learning rate; it falls to zero along half a cosine. It suits dense training.
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
    def optimizer(self) -> Optimizer:
        """SGD with momentum for images; AdamW and clipping for text."""
        if self.model in TEXT:
            return Optimizer(self.lr, 0.9, adamw=True, cosine=True, clip_norm=1.0)
        return Optimizer(self.lr, 0.9, cosine=True)

    @property
    def title(self) -> str:
        """What it is, in words."""
        kind = "AdamW, clipping at 1" if self.model in TEXT else "SGD, momentum 0.9"
        return f"{self.model}, {self.workers} workers, {self.steps} steps, {kind}, lr {self.lr:g}, batch {self.batch} a worker"


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
    """A way to exchange gradients.

    Args:
        settings: Of :class:`lightning_topk.config.TopKConfig`.
        cluster: What the workers are.
        rank: Of PowerSGD, in the place of all this.
        equal_bytes: Whether the ratio is scaled so that as many bytes are sent as with the default.
        keeps_momentum: Whether the optimizer has momentum of its own (with AdamW: beta1).
        momentum: Of SGD, in the place of the task's, at the same lr / (1 - momentum).
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    cluster: Callable[..., Cluster] = Cluster
    rank: int = 0
    equal_bytes: bool = False
    keeps_momentum: bool = True
    momentum: float | None = None

    def config(self, task: Task) -> TopKConfig:
        """The settings for a task, before the ratio is scaled."""
        return TopKConfig(**{"ratio": RATIO, **self.settings}).planned(task.steps, task.workers)


def flushed(every: int, ratio: float, step: int) -> float:
    """All of the gradient once in so many steps."""
    return 1.0 if step % every == every - 1 else ratio


def _more(cluster: Callable[..., Cluster] = Cluster, keeps_momentum: bool = True, **settings: Any) -> Recipe:
    """The default with something else, in as many bytes."""
    return Recipe(settings, cluster, equal_bytes=True, keeps_momentum=keeps_momentum)


def _from(start: float) -> Recipe:
    """What the default is in a short run, but with another density at its beginning."""
    return Recipe({"ratio": CosineWarmup(RATIO, start, share=1.0), "wire": "int4", "beta1": 0.0})


COURSE = _from(START).settings
"""What the default recipe makes of a short run."""

RECIPES: dict[str, Recipe] = {
    "dense": Recipe({"topology": "dense"}),
    "default": Recipe(),
    "plain": Recipe({"recipe": "plain"}),
    # What else could be sent in as many bytes.
    "constant density, equal bytes": _more(recipe="plain", wire="int4", beta1=0.0),
    "unidirectional, equal bytes": _more(**COURSE, bidirectional=False),
    "all-gather, equal bytes": _more(**COURSE, bidirectional=False, topology="allgather"),
    "PowerSGD 1": Recipe(rank=1),
    "PowerSGD 2": Recipe(rank=2),
    "PowerSGD 4": Recipe(rank=4),
    # The default with one thing changed.
    "exponential over 50 %, equal bytes": _more(
        ratio=ExponentialWarmup(RATIO, 0.25, share=0.5), wire="int4", beta1=0.0
    ),
    "bf16, equal bytes": _more(wire="bf16"),
    "int8, equal bytes": _more(wire="int8"),
    "servers send x2, equal bytes": _more(server_ratio=2 * RATIO),
    "servers send x4, equal bytes": _more(server_ratio=4 * RATIO),
    "1-D dense, equal bytes": _more(dense_parameters=("*bias*",)),
    "lr ratio, equal bytes": _more(lr_ratio=True),
    "momentum correction, equal bytes": _more(momentum=0.9, keeps_momentum=False),
    "momentum correction unmasked, equal bytes": _more(momentum=0.9, momentum_masking=False, keeps_momentum=False),
    "AdamW's own beta1": Recipe({"beta1": 0.9}),
    "SGD's momentum 0.8": Recipe(momentum=0.8),
    "SGD's momentum 0.5": Recipe(momentum=0.5),
    "dense, SGD's momentum 0.5": Recipe({"topology": "dense"}, momentum=0.5),
    "local clipping, equal bytes": _more(clip_norm=1.0, scope="model"),
    "decay 0.97, equal bytes": _more(partial(Decaying, factor=0.97)),
    "own shards, equal bytes": _more(OwnShards),
    "EF21-SGDM, equal bytes": _more(partial(Differences, new=0.1), keeps_momentum=False),
    # What corrections of momentum and EF21-SGDM are to be held against.
    "dense, no momentum": Recipe({"topology": "dense"}, keeps_momentum=False),
    # More bytes, and fewer.
    "from 0.48": _from(0.48),
    "from 0.04": _from(0.04),
    "from 0.01": _from(0.01),
    # Other ways than a warm-up.
    "flush every 50": Recipe({"ratio": partial(flushed, 50, RATIO), "beta1": 0.0}),
    "adaptive, error 0.5": Recipe({"recipe": "plain", "beta1": 0.0}, partial(Adaptive, target=0.5)),
}
"""By name; all at a ratio of 0.001 in the long run."""


def run(
    data: Path | None = None,
    steps: int | None = None,
    out: Path = Path("reproduced"),
    models: Sequence[str] = (),
    recipes: Sequence[str] = (),
    seeds: int = SEEDS,
    lr: float | None = None,
    workers: Sequence[int] = (),
) -> Result:
    """Trains every recipe on every model.

    Args:
        data: A folder of images, such as CIFAR-10, to train ResNet-20 and a VGG on instead of the models of digits and text.
        steps: Of a run, instead of each task's own.
        out: Where ``recipes.jsonl`` is.
        models: Only these.
        recipes: Only these, and dense.
        seeds: Runs of each.
        lr: Peak learning rate, instead of each task's own.
        workers: Numbers of them, instead of each task's own.

    Raises:
        ValueError: There is no such model or recipe, a number is not positive, or there are fewer than two workers.
    """
    check_count("seeds", seeds)
    check_count("steps", steps)
    if lr is not None and not 0 < lr < math.inf:
        raise ValueError(f"lr={lr!r} must be positive.")
    if any(count < 2 for count in workers):
        raise ValueError(f"workers={[*workers]} must be at least 2 each: one worker exchanges nothing.")
    known = TASKS if data is None else IMAGES
    wanted = [task for task in known if not models or task.model in models]
    given = ((task, count) for task in wanted for count in workers or (task.workers,))
    tasks = list(
        dict.fromkeys(
            replace(task, workers=count, steps=steps or task.steps, lr=lr or task.lr) for task, count in given
        )
    )
    names = [name for name in RECIPES if not recipes or name in ("dense", *recipes)]
    unknown = {*models} - {task.model for task in known} | {*recipes} - {*RECIPES}
    if unknown:
        raise ValueError(
            f"there is no {', '.join(sorted(unknown))} here: models are {', '.join(sorted({task.model for task in known}))}, "
            f"recipes {', '.join(RECIPES)}."
        )
    found = _runs(tasks, names, seeds, data, out / "recipes.jsonl")
    result = Result(
        "recipes",
        "a recipe closes the gap to dense training with the user's own hyper-parameters",
        f"Cosine schedule, at a peak learning rate that suits dense training; ratio {RATIO:g} in the long run; {seeds} seeds (mean ± "
        "half the range). Density: the mean over the run of what servers and workers send. Saving: of a ring all-reduce, over the whole "
        "run, in the bytes that a rank sends.",
    )
    for task in tasks:
        rows = {name: [found[_key(task, name, seed)] for seed in range(seeds)] for name in names}
        result.tables[task.title] = [_row(task, name, runs) for name, runs in rows.items()]
        _judge(result, task, rows)
        quality = "loss on held-out text" if task.model in TEXT else "accuracy, %"
        panel = Panel(
            f"{quality}: {task.model}, {task.workers} workers, {task.steps} steps", "bytes a rank and run", xlog=True
        )
        for name, runs in rows.items():
            panel.curves[name] = ([mean(each["bytes"] for each in runs)], [_quality(task, runs)])
        result.panels.append(panel)
    return result


def _key(task: Task, name: str, seed: int) -> str:
    """What a run is known by: another recipe of the same name is another run."""
    recipe = RECIPES[name]
    budget = _default(task).summary() if recipe.equal_bytes else None
    momentum = recipe.keeps_momentum, recipe.momentum
    settings = [recipe.config(task).summary(), repr(recipe.cluster), recipe.rank, budget, momentum]
    return json.dumps([*asdict(task).values(), name, seed, hashlib.sha1(repr(settings).encode()).hexdigest()[:8]])


def _default(task: Task) -> TopKConfig:
    """The default's settings."""
    return Recipe().config(task)


def _runs(
    tasks: Sequence[Task], names: Sequence[str], seeds: int, data: Path | None, path: Path
) -> dict[str, dict[str, float]]:
    """All runs by their key: those of the file, and those that are missing in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    found = {entry["key"]: entry for entry in map(json.loads, lines)}
    wanted = {_key(task, name, seed): (task, name, seed) for seed in range(seeds) for task in tasks for name in names}
    jobs: dict[str, Callable[[], dict[str, float]]] = {
        key: partial(_train, *each, data) for key, each in wanted.items() if key not in found
    }

    def note(key: str, measured: dict[str, float]) -> None:
        found[key] = {"key": key, **measured}
        with path.open("a") as file:
            file.write(json.dumps(found[key]) + "\n")

    run_all(jobs, "recipes", note)
    return found


def _train(task: Task, name: str, seed: int, data: Path | None) -> dict[str, float]:
    """One run."""
    recipe, optimizer = RECIPES[name], task.optimizer
    config, cluster = recipe.config(task), recipe.cluster
    net = MODELS[task.model]()
    shapes = [tuple(parameter.shape) for parameter in net.parameters()]
    if recipe.equal_bytes:
        config = _scaled(config, task, {name: p.numel() for name, p in net.named_parameters()})
    if recipe.rank:
        config, cluster = config.dense, partial(PowerSGD, rank=recipe.rank, shapes=shapes)
    if recipe.momentum is not None and not optimizer.adamw:
        lr = optimizer.lr * (1 - recipe.momentum) / (1 - optimizer.momentum)
        optimizer = replace(optimizer, lr=lr, momentum=recipe.momentum)
    if not recipe.keeps_momentum:  # what averages on the worker takes its place
        optimizer = replace(optimizer, momentum=0.0)
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


def _scaled(config: TopKConfig, task: Task, sizes: Mapping[str, int]) -> TopKConfig:
    """Settings whose ratio is multiplied so that a run sends at most as many bytes as one with the default."""
    numel = sum(sizes.values())

    def sent(config: TopKConfig) -> int:
        exact = sum(size for name, size in sizes.items() if any(fnmatchcase(name, p) for p in config.dense_parameters))
        volumes = (
            volume(config, [numel], task.workers, step=step, exact=[exact])
            for step in range(0, task.steps, max(1, task.steps // 60))
        )
        return sum(each.uplink + each.downlink for each in volumes)

    def scaled(factor: float) -> TopKConfig:
        ratios: dict[str, Any] = {"ratio": config.ratio, "server_ratio": config.server_ratio}
        for name, given in ratios.items():
            if isinstance(given, Warmup):
                ends = {end: min(1.0, factor * getattr(given, end)) for end in ("ratio", "start")}
                ratios[name] = replace(given, **ends)
            elif given is not None:
                ratios[name] = min(1.0, factor * given)
        return replace(config, **ratios)

    budget = sent(_default(task))
    low, high = 1e-3, 1e3
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sent(scaled(middle)) <= budget else (low, middle)
    return scaled(low)


def _quality(task: Task, runs: list[dict[str, float]]) -> float:
    """What counts: accuracy in percent, or the loss on held-out text."""
    return mean(each["held" if task.model in TEXT else "accuracy"] for each in runs)


def _row(task: Task, name: str, runs: list[dict[str, float]]) -> Row:
    return {
        "recipe": name,
        "accuracy %": spread([each["accuracy"] for each in runs], ".2f"),
        "loss": spread([each["loss"] for each in runs], ".4f"),
        "held-out loss": spread([each["held"] for each in runs], ".4f"),
        "saving": f"{mean(each['dense'] for each in runs) / mean(each['bytes'] for each in runs):.0f}x",
    }


def _judge(result: Result, task: Task, rows: dict[str, list[dict[str, float]]]) -> None:
    """Holds the default against dense, and against what sends as many bytes."""
    if "default" not in rows:
        return
    text, quality = task.model in TEXT, {name: _quality(task, runs) for name, runs in rows.items()}
    what = f"{task.model}, {task.workers} workers, {task.steps} steps, lr {task.lr:g}"
    if text:
        gap = quality["default"] / quality["dense"] - 1
        words, seen = f"<= {100 * task.within:g} %", f"{100 * gap:+.2f} %"
    else:
        gap = quality["dense"] - quality["default"]
        words, seen = f"<= {task.within:g} points", f"{gap:+.2f} points"
    result.checks.append(Check(f"{what}: the default's loss against dense", words, seen, gap <= task.within))
    saving = mean(each["dense"] / each["bytes"] for each in rows["default"])
    result.checks.append(
        Check(f"{what}: saving over the whole run", f">= {SAVING}x", f"{saving:.0f}x", saving >= SAVING)
    )
    for name in rows:
        if name.endswith("equal bytes") or name.startswith("PowerSGD"):
            ahead = quality[name] - quality["default"] if text else quality["default"] - quality[name]
            bytes_ = mean(each["bytes"] for each in rows[name]) / mean(each["bytes"] for each in rows["default"])
            unit = "of loss" if text else "points"
            result.checks.append(
                Check(
                    f"{what}: better than {name} ({bytes_:.1f} x the bytes)", ">= 0", f"{ahead:+.3f} {unit}", ahead >= 0
                )
            )
