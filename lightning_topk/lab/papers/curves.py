"""How far can you go: final quality by saving, for runs of several lengths, models and optimizers.

Every run is held against dense training of as many steps with the same seed, batches and hyper-parameters, those of the
optimizer included. Runs are appended to ``saving-curves.jsonl`` as they end, the most useful first; an interrupted
command goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from lightning_topk.config import SAVING, TopKConfig, check_count
from lightning_topk.lab.models import TEXT
from lightning_topk.lab.report import Panel, Result
from lightning_topk.lab.training import Optimizer, resume, train
from lightning_topk.systems import presets

AMOUNTS = (50, 150, 0.001)
"""What is sent, the most useful first: a saving, or a ratio where it is below 1."""
LENGTHS = (300, 1000, 3000, 10_000, 30_000)


class Way(NamedTuple):
    """One way to step: changes to SGD with a momentum of 0.9.

    Attributes:
        steps: Fields of :class:`lightning_topk.lab.training.Optimizer`.
        settings: Settings of the exchange.
        lr: By what the learner's rate is multiplied.
        baseline: The way of dense training that it is held against; empty for its own.
    """

    steps: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    lr: float = 1.0
    baseline: str = ""


WAYS: dict[str, Way] = {
    "SGD": Way(),
    "SGD decay": Way({"weight_decay": 5e-4}),
    "SGD not adapted": Way(settings={"adapt_momentum": False}, baseline="SGD"),
    "DGC": Way({"momentum": 0.0}, presets["dgc"], baseline="SGD"),
    "AdamW": Way({"adamw": True}),
    "AdamW, 3 lr": Way({"adamw": True}, lr=3.0),
    "AdamW, lr / 3": Way({"adamw": True}, lr=1 / 3),
    "AdamW not adapted": Way({"adamw": True}, {"adapt_momentum": False}, baseline="AdamW"),
}
"""By name; ``decay`` is a weight decay of 0.0005, ``DGC`` the preset, whose density falls in the first epochs."""


@dataclass(frozen=True)
class Learner:
    """A model and the hyper-parameters that suit dense training of it; the learning rate falls along half a cosine.

    Attributes:
        model: A key of :data:`lightning_topk.lab.models.MODELS`.
        optimizer: A key of :data:`WAYS`.
        lr: Peak learning rate of dense training with this kind of optimizer.
        batch: Examples of each worker in a step.
        workers: Simulated workers.
        warmup: Steps in which the learning rate rises, to stay constant then; 0 for the cosine. Text is clipped at a
            norm of 1.
    """

    model: str
    optimizer: str
    lr: float
    batch: int
    workers: int = 8
    warmup: int = 0

    @property
    def name(self) -> str:
        """The model and the optimizer."""
        return f"{self.model}, {self.optimizer}"

    @property
    def text(self) -> bool:
        """Whether the loss on held-out text counts; else accuracy."""
        return self.model in TEXT

    def stepped(self) -> Optimizer:
        """The optimizer."""
        way, clip = WAYS[self.optimizer], 1.0 if self.text else None
        made = Optimizer(self.lr * way.lr, 0.9, cosine=not self.warmup, clip_norm=clip, warmup=self.warmup)
        return replace(made, **way.steps)

    def config(self, amount: float) -> TopKConfig:
        """The settings with which so much is sent; zero is dense training."""
        if not amount:
            return TopKConfig().dense
        return TopKConfig(**{"saving" if amount >= 1 else "ratio": amount} | dict(WAYS[self.optimizer].settings))


def _learners(model: str, batch: int, rates: Mapping[str, float], ways: Sequence[str], **more: int) -> list[Learner]:
    """The learners of one model; ``rates`` are those of dense training with SGD and AdamW."""
    return [Learner(model, way, rates[way.replace(",", " ").split()[0]], batch, **more) for way in ways]


SGDS, ADAMS = ("SGD", "SGD not adapted"), ("AdamW", "AdamW, 3 lr", "AdamW, lr / 3", "AdamW not adapted")
LEARNERS = (
    *_learners("wide mlp", 10, {"SGD": 0.1, "AdamW": 0.01}, (*SGDS, *ADAMS)),
    *_learners("cnn", 10, {"SGD": 0.1, "AdamW": 0.01}, (*SGDS, *ADAMS)),
    *_learners("char lstm", 4, {"SGD": 1.0, "AdamW": 0.02}, (*SGDS, *ADAMS)),
    *_learners("gpt", 4, {"SGD": 0.3, "AdamW": 0.01}, (*SGDS, *ADAMS)),
    *_learners("gpt2", 8, {"AdamW": 0.003}, ("AdamW", "AdamW not adapted"), workers=2, warmup=20),
)
CONVNET = {"SGD": 0.05, "DGC": 0.05, "AdamW": 0.003}
IMAGES = (
    *_learners("convnet", 16, CONVNET, (*SGDS, "SGD decay", "DGC", *ADAMS)),
    *_learners("batch-norm convnet", 16, CONVNET, (*SGDS, "SGD decay")),
    *_learners("resnet20", 16, {"SGD": 0.02, "AdamW": 0.003}, (*SGDS, *ADAMS)),
)


@dataclass(frozen=True)
class Point:
    """What was measured of a learner, at one length of the run and one amount.

    Attributes:
        gap: Mean distance to dense training of the same seeds; positive is worse. Points of accuracy, or percent of
            the loss.
        error: Its standard error; NaN of a single seed.
        seeds: Runs.
    """

    gap: float
    error: float = math.nan
    seeds: int = 1

    @property
    def shown_error(self) -> float:
        """The length of its error bar."""
        return 0.0 if math.isnan(self.error) else self.error

    def __str__(self) -> str:
        return f"{self.gap:+.2f}" + (f" ± {self.error:.2f}" if self.seeds > 1 else " (1 seed)")


def baseline(learner: Learner) -> Learner:
    """The dense training that a learner is held against."""
    name = WAYS[learner.optimizer].baseline or learner.optimizer
    return replace(learner, optimizer=name)


def run(
    data: Path | None = None,
    models: Sequence[str] = (),
    optimizers: Sequence[str] = (),
    savings: Sequence[float] = AMOUNTS,
    lengths: Sequence[int] = LENGTHS[:3],
    seeds: int = 3,
    minutes: float = math.inf,
    *,
    out: Path = Path("reproduced"),
) -> Result:
    """Measures final quality over saving, by the length of the run, the model and the optimizer.

    Args:
        data: Folder of images, such as CIFAR-10, to train a small convnet and ResNet-20 on instead of digits and text:
            train/<class>/*, test/<class>/*. Takes hours.
        models: Only these models.
        optimizers: Only these optimizers, such as SGD, "SGD not adapted" (adapt_momentum=False), AdamW.
        savings: How many times fewer bytes than a ring all-reduce, each against dense training; below 1 it is a ratio.
        lengths: Steps of a run.
        seeds: Runs of each.
        minutes: Time after which no run is begun; the result then has what there is.
        out: Folder of ``saving-curves.jsonl``.

    Raises:
        ValueError: There is no such model or optimizer, or a number is not positive.
    """
    check_count("seeds", seeds)
    for steps in lengths:
        check_count("lengths", steps)
    here = LEARNERS if data is None else IMAGES
    chosen = [
        each
        for each in here
        if (not models or each.model in models) and (not optimizers or each.optimizer in optimizers)
    ]
    for saving in savings:
        if saving < 1:
            TopKConfig(ratio=saving)  # says what is wrong with it
        TopKConfig(saving=max(1, saving))
    known = {name for each in here for name in (each.model, each.optimizer)}
    if unknown := {*models, *optimizers} - known:
        raise ValueError(f"there is no {', '.join(sorted(unknown))} here: there are {', '.join(sorted(known))}.")
    if not chosen:
        pairs = "; ".join(each.name for each in here)
        raise ValueError(f"no run has such a model with such an optimizer: there are {pairs}.")
    plan = sorted(
        (
            (learner if saving else baseline(learner), steps, saving, seed)
            for saving in (0.0, *savings)  # zero is dense training
            for learner in chosen
            for steps in lengths
            for seed in range(seeds)
        ),
        key=lambda each: each[1] * (each[3] + 1),
    )
    jobs = {run_key(*each): partial(_train, *each, data) for each in plan}
    found = resume(jobs, "saving-curves", out / "saving-curves.jsonl", minutes)
    result = Result(
        "saving-curves",
        "what quality costs, as a function of saving and of the length of the run",
        "8 simulated workers (gpt2: 2), saving= or ratio= with all else at its default; peak learning rates that suit "
        "dense training, falling to zero along half a cosine. Gap to dense training of the same seed, batches, steps "
        "and optimizer: points of accuracy on held-out images, or percent of the loss on held-out text; mean ± "
        "standard error.",
    )
    enter(result, chosen, sorted(lengths), sorted(savings), seeds, found)
    return result


def amount_name(amount: float) -> str:
    """What is sent, in words; zero is dense training."""
    return f"saving {amount:g}" if amount >= 1 else f"ratio {amount:g}" if amount else "dense"


def run_key(learner: Learner, steps: int, saving: float, seed: int) -> str:
    """What a run is known by in ``saving-curves.jsonl``."""
    lr = learner.stepped().lr
    return f"{learner.name}, lr {lr:.3g}, batch {learner.batch}, {steps} steps, {amount_name(saving)}, seed {seed}"


def _train(learner: Learner, steps: int, saving: float, seed: int, data: Path | None) -> dict[str, float]:
    ended = train(
        learner.model, learner.config(saving), learner.workers, steps, learner.stepped(), seed, learner.batch,
        images=data, points=20 if learner.warmup else 0,
    )  # fmt: skip
    return {
        "loss": min(ended.loss, 1e3),
        "held": min(ended.held_loss, 1e3),
        "accuracy": ended.accuracy,
        "saving": ended.dense_bytes / (ended.uplink_bytes + ended.downlink_bytes),
        # A spike: how far the training loss rises above the least so far, of 20 evaluations.
        **({"spike": max(b[1] - min(a[1] for a in ended.curve[: n + 1]) for n, b in enumerate(ended.curve))}
           if ended.curve else {}),
    }  # fmt: skip


def gaps(
    learners: Sequence[Learner],
    lengths: Sequence[int],
    savings: Sequence[float],
    seeds: int,
    found: Mapping[str, Mapping[str, float]],
) -> dict[tuple[str, int, float], Point]:
    """What there is of each learner, length and saving."""
    points = {}
    for learner in learners:
        for steps in lengths:
            for saving in savings:
                gaps = []
                for seed in range(seeds):
                    ours = found.get(run_key(learner, steps, saving, seed))
                    dense = found.get(run_key(baseline(learner), steps, 0.0, seed))
                    if ours is not None and dense is not None:
                        gaps.append(
                            100 * (ours["held"] / dense["held"] - 1)
                            if learner.text
                            else dense["accuracy"] - ours["accuracy"]
                        )
                if gaps:
                    error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
                    points[learner.name, steps, saving] = Point(mean(gaps), error, len(gaps))
    return points


def enter(
    result: Result,
    learners: Sequence[Learner],
    lengths: Sequence[int],
    savings: Sequence[float],
    seeds: int,
    found: Mapping[str, Mapping[str, float]],
) -> None:
    """Enters the tables and the curves of learners.

    Args:
        result: Where.
        learners: The learners.
        lengths: Steps of their runs.
        savings: Savings of their runs.
        seeds: Runs of each.
        found: All runs that there are.
    """
    points = gaps(learners, lengths, savings, seeds, found)
    for learner in learners:
        mine = {key: point for key, point in points.items() if key[0] == learner.name}
        if mine:
            _enter_learner(result, learner, mine, found, seeds)
    for text in (False, True):
        _enter_lengths(result, [learner for learner in learners if learner.text == text], points, savings)


def _enter_lengths(
    result: Result,
    learners: Sequence[Learner],
    points: Mapping[tuple[str, int, float], Point],
    savings: Sequence[float],
) -> None:
    """Enters the curves of learners over the length of their runs, at the default saving."""
    saving = SAVING if SAVING in savings else savings[0]
    unit = "% of the loss on held-out text" if learners and learners[0].text else "points of accuracy"
    panel = Panel(amount_name(saving), "steps of the run", xlog=True, ylabel=f"gap to dense, {unit}", level=0.0)
    for learner in learners:
        mine = {key[1]: point for key, point in points.items() if (key[0], key[2]) == (learner.name, saving)}
        if len(mine) > 1:
            panel.curves[learner.name] = ([*mine], [point.gap for point in mine.values()])
            panel.errors[learner.name] = [point.shown_error for point in mine.values()]
    if panel.curves:
        result.panels.append(panel)


def _enter_learner(
    result: Result,
    learner: Learner,
    points: Mapping[tuple[str, int, float], Point],
    found: Mapping[str, Mapping[str, float]],
    seeds: int,
) -> None:
    """Enters the table and the curves of a learner."""
    unit = "% of the loss on held-out text" if learner.text else "points of accuracy"
    panel = Panel(learner.name, "saving, times fewer bytes", xlog=True, ylabel=f"gap to dense, {unit}", level=0.0)
    rows = []
    for steps in sorted({key[1] for key in points}):
        of_length = {key[2]: point for key, point in points.items() if key[1] == steps}
        dense = [found[key] for seed in range(seeds) if (key := run_key(baseline(learner), steps, 0.0, seed)) in found]
        quality = mean(each["held" if learner.text else "accuracy"] for each in dense)
        row: dict[str, Any] = {"steps": steps, "dense": f"{quality:.3f}" if learner.text else f"{quality:.2f} %"}
        rows.append(row | {amount_name(saving): str(point) for saving, point in of_length.items()})
        savings, shown = [s for s in of_length if s >= 1], [point for s, point in of_length.items() if s >= 1]
        label = f"{steps:,} steps"
        panel.curves[label] = (savings, [point.gap for point in shown])
        panel.errors[label] = [point.shown_error for point in shown]
    result.tables[
        f"{learner.name}, lr {learner.stepped().lr:.3g}, batch {learner.batch} a worker: gap to dense, {unit}"
    ] = rows
    if any(len(savings) > 1 for savings, _ in panel.curves.values()):
        result.panels.append(panel)
