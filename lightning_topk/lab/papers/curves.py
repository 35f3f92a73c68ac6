"""How far can you go: final quality over saving, for runs of several lengths, models and optimizers.

Every run is held against dense training of as many steps with the same seed, batches and hyper-parameters; one with a
smaller momentum against dense training with a momentum of 0.9 at the same lr / (1 - momentum). Runs are appended to
``saving-curves.jsonl`` as they end, the most useful first; an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lightning_topk.config import SAVING, TopKConfig, check_count
from lightning_topk.lab.models import MODELS, TEXT
from lightning_topk.lab.report import Panel, Result
from lightning_topk.lab.training import Optimizer, resume, train
from lightning_topk.planning.quality import Point, enough, fit
from lightning_topk.saving import with_ratio

WORKERS = 8
SAVINGS = (50, 200, 1000, 25, 100, 400, 10)
"""Savings, the most useful first."""
LENGTHS = (300, 1000, 3000, 10_000)
MASKED = " masked"
"""How the name of an optimizer ends that has its momentum masked."""
SMALLER = " 0.5"
"""How the name of SGD ends, then, with that momentum."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD 0.5": {"momentum": 0.5},
    "SGD decay": {"weight_decay": 5e-4},
    "AdamW": {"adamw": True},
}
"""In what they differ from SGD with a momentum of 0.9."""


@dataclass(frozen=True)
class Learner:
    """A model and the hyper-parameters that suit dense training of it; the learning rate falls along half a cosine.

    Attributes:
        model: A key of :data:`lightning_topk.lab.models.MODELS`.
        optimizer: ``"SGD"``, with momentum 0.9; ``"SGD 0.5"``, with momentum 0.5 at the same lr / (1 - momentum);
            ``"SGD decay"``, with momentum 0.9 and a weight decay of 0.0005; or ``"AdamW"``. With ``" masked"`` behind
            it: with ``momentum_masking=True``. Text is clipped at a norm of 1.
        lr: Peak learning rate.
        batch: Examples of each worker in a step.
    """

    model: str
    optimizer: str
    lr: float
    batch: int

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
        made = Optimizer(self.lr, 0.9, cosine=True, clip_norm=1.0 if self.text else None)
        return replace(made, **OPTIMIZERS[self.optimizer.removesuffix(MASKED)])


LEARNERS = (
    Learner("wide mlp", "SGD", 0.1, 10),
    Learner("wide mlp", "AdamW", 0.01, 10),
    Learner("cnn", "SGD", 0.1, 10),
    Learner("cnn", "AdamW", 0.01, 10),
    Learner("char lstm", "AdamW", 0.02, 4),
    Learner("gpt", "AdamW", 0.01, 4),
    Learner("char lstm", "SGD", 1.0, 4),
    Learner("gpt", "SGD", 0.3, 4),
    Learner("char lstm", "SGD 0.5", 5.0, 4),
    Learner("gpt", "SGD 0.5", 1.5, 4),
)
IMAGES = (
    Learner("convnet", "SGD", 0.05, 16),
    Learner("convnet", "SGD 0.5", 0.25, 16),
    Learner("convnet", "SGD 0.5 masked", 0.25, 16),
    Learner("convnet", "SGD masked", 0.05, 16),
    Learner("convnet", "SGD decay", 0.05, 16),
    Learner("convnet", "SGD decay masked", 0.05, 16),
    Learner("convnet", "AdamW", 0.003, 16),
    Learner("batch-norm convnet", "SGD", 0.05, 16),
    Learner("batch-norm convnet", "SGD 0.5", 0.25, 16),
    Learner("batch-norm convnet", "SGD masked", 0.05, 16),
    Learner("resnet20", "SGD", 0.02, 16),
    Learner("resnet20", "SGD 0.5", 0.1, 16),
    Learner("resnet20", "SGD 0.5 masked", 0.1, 16),
    Learner("resnet20", "SGD masked", 0.02, 16),
    Learner("resnet20", "AdamW", 0.003, 16),
)


def baseline(learner: Learner) -> Learner:
    """What dense training a learner is held against: unmasked, with a momentum of 0.9."""
    optimizer = learner.optimizer.removesuffix(MASKED).removesuffix(SMALLER)
    return next(each for each in (*LEARNERS, *IMAGES) if (each.model, each.optimizer) == (learner.model, optimizer))


def run(
    data: Path | None = None,
    models: Sequence[str] = (),
    optimizers: Sequence[str] = (),
    savings: Sequence[float] = SAVINGS,
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
        optimizers: Only these optimizers: SGD, "SGD 0.5" (its momentum), AdamW; of images also "SGD decay"
            (with weight decay). Of images each SGD also "masked", such as "SGD masked" (momentum_masking=True).
        savings: How many times fewer bytes than a ring all-reduce, each against dense training.
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
        TopKConfig(saving=saving)  # says what is wrong with it
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
        f"{WORKERS} simulated workers, saving= with all else at its default (SGD masked: momentum_masking=True); peak "
        "learning rates that suit dense training, falling to zero along half a cosine. Gap to dense training of the "
        "same seed, batches and steps: points of accuracy on held-out images, or percent of the loss on held-out "
        "text; mean ± standard error.",
    )
    enter(result, chosen, sorted(lengths), sorted(savings), seeds, found)
    return result


def run_key(learner: Learner, steps: int, saving: float, seed: int) -> str:
    """What a run is known by in ``saving-curves.jsonl``; zero is dense training."""
    amount = f"saving {saving:g}" if saving else "dense"
    return f"{learner.name}, lr {learner.lr:g}, batch {learner.batch}, {steps} steps, {amount}, seed {seed}"


def _train(learner: Learner, steps: int, saving: float, seed: int, data: Path | None) -> dict[str, float]:
    masking = learner.name.endswith(MASKED) or None
    config = TopKConfig(saving=saving, momentum_masking=masking) if saving else TopKConfig().dense
    ended = train(learner.model, config, WORKERS, steps, learner.stepped(), seed, learner.batch, images=data)
    sent = ended.uplink_bytes + ended.downlink_bytes
    return {
        "loss": min(ended.loss, 1e3),
        "held": min(ended.held_loss, 1e3),
        "accuracy": ended.accuracy,
        "saving": ended.dense_bytes / sent,
    }


@cache
def density(model: str, saving: float) -> float:
    """The fraction of the gradient that a worker sends of a model, with a saving."""
    sizes = [parameter.numel() for parameter in MODELS[model]().parameters()]
    ratio = with_ratio(TopKConfig(saving=saving).on(WORKERS, 1), sizes, WORKERS).ratio
    assert isinstance(ratio, float)
    return ratio


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
                    sends = density(learner.model, saving) * steps
                    points[learner.name, steps, saving] = Point(sends, mean(gaps), error, len(gaps))
    return points


def enter(
    result: Result,
    learners: Sequence[Learner],
    lengths: Sequence[int],
    savings: Sequence[float],
    seeds: int,
    found: Mapping[str, Mapping[str, float]],
) -> None:
    """Enters the tables and the curves of learners, and the law that they follow.

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
    _enter_law(result, points)


def _enter_lengths(
    result: Result,
    learners: Sequence[Learner],
    points: Mapping[tuple[str, int, float], Point],
    savings: Sequence[float],
) -> None:
    """Enters the curves of learners over the length of their runs, at the default saving."""
    saving = SAVING if SAVING in savings else savings[0]
    unit = "% of the loss on held-out text" if learners and learners[0].text else "points of accuracy"
    panel = Panel(f"saving={saving:g}", "steps of the run", xlog=True, ylabel=f"gap to dense, {unit}", level=0.0)
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
        rows.append(row | {f"{saving:g}x": str(point) for saving, point in of_length.items()})
        savings, shown = [*of_length], [*of_length.values()]
        label = f"{steps:,} steps"
        panel.curves[label] = (savings, [point.gap for point in shown])
        panel.errors[label] = [point.shown_error for point in shown]
    result.tables[f"{learner.name}, lr {learner.lr:g}, batch {learner.batch} a worker: gap to dense, {unit}"] = rows
    if any(len(savings) > 1 for savings, _ in panel.curves.values()):
        result.panels.append(panel)


def by_learner(points: Mapping[tuple[str, int, float], Point]) -> dict[str, list[Point]]:
    """The points of each learner of digits and text that has three or more: images follow no such law."""
    found: dict[str, list[Point]] = {}
    known = {learner.name for learner in LEARNERS}
    for (name, _, _), point in points.items():
        if name in known:
            found.setdefault(name, []).append(point)
    return {name: those for name, those in found.items() if len(those) >= 3}


def _enter_law(result: Result, points: Mapping[tuple[str, int, float], Point]) -> None:
    """Enters the law that the points follow, and how well it predicts a learner that it has not seen."""
    known = by_learner(points)
    if len(known) < 3:
        return
    law = fit(known)
    rows = []
    for name in known:
        needed = enough(known[name])
        others = fit({other: those for other, those in known.items() if other != name})
        rows.append(
            {
                "learner": name,
                "sends for a gap of 1": law.sends[name],
                "predicted from the others": others.typical,
                "off by": f"{max(others.typical / law.sends[name], law.sends[name] / others.typical):.1f}x",
                "mean within 1 from": needed.by_mean,
                "with its error from": needed.by_error,
            }
        )
    title = f"gap = (sends for a gap of 1 / sends) ^ {law.exponent:.2f}, sends = density x steps"
    result.tables[title] = rows
