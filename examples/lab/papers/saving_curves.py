"""Final quality over saving, for runs of several lengths, models and optimizers.

Every run is compared with dense training of as many steps with the same seed, batches and hyper-parameters, including
the optimizer's. The most useful runs come first. Each run is appended to ``saving-curves.jsonl`` when it ends, so an
interrupted command resumes where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from lab.models import TEXT
from lab.report import Panel, Result, in_words, standard_error
from lab.training import Optimizer, Runs, train
from lightning_topk.config import SAVING, TopKConfig
from lightning_topk.plan import Row
from lightning_topk.systems import presets

AMOUNTS = (50, 150, 0.001)
"""Amounts to send, the most useful first: a saving, or a ratio below 1."""
LENGTHS = (300, 1000, 3000, 10_000, 30_000)


class Way(NamedTuple):
    """A variant of the optimizer: changes to SGD with a momentum of 0.9, exchange settings, a learning rate factor.

    ``baseline`` is the variant of the dense training to compare with; empty for the same variant.
    """

    steps: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    lr: float = 1.0
    baseline: str = ""


WAYS: dict[str, Way] = {
    "SGD": Way(),
    "SGD decay": Way({"weight_decay": 5e-4}),
    "SGD, clip 0.5": Way({"clip_norm": 0.5}),
    "SGD, clip 0.25": Way({"clip_norm": 0.25}),
    "SGD, workers clip 0.5": Way({"clip_norm": None}, {"clip_norm": 0.5}, baseline="SGD"),
    "SGD, workers clip 1": Way({"clip_norm": None}, {"clip_norm": 1.0}, baseline="SGD"),
    "SGD not adapted": Way(settings={"adapt_momentum": False}, baseline="SGD"),
    "DGC": Way({"momentum": 0.0}, presets["dgc"], baseline="SGD"),
    "AdamW": Way({"kind": "AdamW"}),
    "AdamW, 3 lr": Way({"kind": "AdamW"}, lr=3.0),
    "AdamW, lr / 3": Way({"kind": "AdamW"}, lr=1 / 3),
    "AdamW not adapted": Way({"kind": "AdamW"}, {"adapt_momentum": False}, baseline="AdamW"),
}
"""Variants by name; ``decay`` is a weight decay of 0.0005, ``clip`` the norm to which the delivered gradient or each
worker's is clipped, ``DGC`` the preset with falling density at first."""


@dataclass(frozen=True)
class Learner:
    """A model and the hyper-parameters for its dense training with an optimizer of :data:`WAYS`.

    The learning rate falls from ``lr`` along half a cosine; with ``warmup`` steps, it is constant after them instead.
    Gradients of text models are clipped at a norm of 1.
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
        """Makes the optimizer."""
        way, clip = WAYS[self.optimizer], 1.0 if self.text else None
        made = Optimizer(self.lr * way.lr, 0.9, cosine=not self.warmup, clip_norm=clip, warmup=self.warmup)
        return replace(made, **way.steps)

    def config(self, amount: float) -> TopKConfig:
        """Settings that send ``amount``; zero is dense training."""
        if not amount:
            return TopKConfig().dense
        return TopKConfig(**{"saving" if amount >= 1 else "ratio": amount} | dict(WAYS[self.optimizer].settings))


def _learners(model: str, batch: int, rates: Mapping[str, float], ways: Sequence[str], **more: int) -> list[Learner]:
    """The learners of one model; ``rates`` are the learning rates of dense training with SGD and AdamW."""
    return [Learner(model, way, rates[way.replace(",", " ").split()[0]], batch, **more) for way in ways]


SGDS, ADAMS = ("SGD", "SGD not adapted"), ("AdamW", "AdamW, 3 lr", "AdamW, lr / 3", "AdamW not adapted")
LEARNERS = (
    *_learners("wide mlp", 10, {"SGD": 0.1, "AdamW": 0.01}, (*SGDS, *ADAMS)),
    *_learners("cnn", 10, {"SGD": 0.1, "AdamW": 0.01}, (*SGDS, *ADAMS)),
    *_learners("char lstm", 4, {"SGD": 1.0, "AdamW": 0.02}, (*SGDS, *ADAMS)),
    *_learners("gpt", 4, {"SGD": 0.3, "AdamW": 0.01}, (*SGDS, "SGD, clip 0.25", "SGD, workers clip 1", *ADAMS)),
    *_learners("gpt2", 8, {"AdamW": 0.003}, ("AdamW", "AdamW not adapted"), workers=2, warmup=20),
)
CLIPPED = ("SGD, clip 0.5", "SGD, workers clip 0.5")
CONVNET = {"SGD": 0.05, "DGC": 0.05, "AdamW": 0.003}
IMAGES = (
    *_learners("convnet", 16, CONVNET, (*SGDS, "SGD decay", *CLIPPED, "DGC", *ADAMS)),
    *_learners("batch-norm convnet", 16, CONVNET, (*SGDS, "SGD decay")),
    *_learners("resnet20", 16, {"SGD": 0.02, "AdamW": 0.003}, (*SGDS, *ADAMS)),
)


def baseline(learner: Learner) -> Learner:
    """The dense training to compare a learner with."""
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
    out: Path = Path("reproduced"),
) -> Result:
    """Measures final quality over saving, by the length of the run, the model and the optimizer.

    With ``data``, a folder of images, convnets and ResNet-20 learn these images instead of digits and text.
    """
    here = LEARNERS if data is None else IMAGES
    wanted = [each for each in here if not models or each.model in models]
    chosen = [each for each in wanted if not optimizers or each.optimizer in optimizers]
    for saving in savings:
        _ = TopKConfig(saving=saving) if saving >= 1 else TopKConfig(ratio=saving)  # raises if it is invalid
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
    found = Runs(out / "saving-curves.jsonl")
    found.complete({run_key(*each): partial(_train, *each, data) for each in plan}, "saving-curves", minutes)
    result = Result(
        "saving-curves",
        "what quality costs, as a function of saving and of the length of the run",
        "8 simulated workers (gpt2: 2), saving= or ratio= with all else at its default; peak learning rates that suit "
        "dense training, falling to zero along half a cosine. Gap to dense training of the same seed, batches, steps "
        "and optimizer: points of accuracy on held-out images, or percent of the loss on held-out text; mean ± "
        "standard error.",
    )
    result.tables["Gap to dense training"] = table(found, chosen, sorted(lengths), sorted(savings), seeds)
    default = SAVING if SAVING in savings else savings[0]
    result.panels = panels(found, chosen, sorted(lengths), default, seeds)
    return result


def amount_name(amount: float) -> str:
    """Name of an amount; zero is dense training."""
    return f"saving {amount:g}" if amount >= 1 else f"ratio {amount:g}" if amount else "dense"


def run_key(learner: Learner, steps: int, saving: float, seed: int) -> str:
    """Key of a run in ``saving-curves.jsonl``."""
    lr = learner.stepped().lr
    return f"{learner.name}, lr {lr:.3g}, batch {learner.batch}, {steps} steps, {amount_name(saving)}, seed {seed}"


def _train(learner: Learner, steps: int, saving: float, seed: int, data: Path | None) -> dict[str, float]:
    given: dict[str, Any] = {"batch": learner.batch, "data": data}
    ended = train(learner.model, learner.config(saving), learner.workers, steps, learner.stepped(), seed, **given)
    saving = ended.dense_bytes / (ended.uplink_bytes + ended.downlink_bytes)
    found = {"loss": min(ended.loss, 1e3), "held": min(ended.held_loss, 1e3), "accuracy": ended.accuracy}
    return found | {"saving": saving}


def ends(found: Runs, learner: Learner, steps: int, amount: float, seeds: int = 3) -> dict[int, float]:
    """Final quality of a learner's runs by seed: the loss on held-out text, or accuracy in percent."""
    held = learner if amount else baseline(learner)
    keys = {seed: run_key(held, steps, amount, seed) for seed in range(seeds)}
    return {seed: found[key]["held" if learner.text else "accuracy"] for seed, key in keys.items() if key in found}


def gaps(found: Runs, learner: Learner, steps: int, amount: float, seeds: int = 3) -> list[float]:
    """Gap to dense training for each seed, positive if worse: percent of the loss, or points of accuracy."""
    ours, dense = (ends(found, learner, steps, each, seeds) for each in (amount, 0.0))
    both = [(ours[seed], dense[seed]) for seed in ours if seed in dense]
    return [100 * (a / b - 1) if learner.text else b - a for a, b in both]


def table(
    found: Runs, learners: Sequence[Learner], lengths: Sequence[int], amounts: Sequence[float], seeds: int = 3
) -> list[Row]:
    """Gaps by learner and length, for existing runs."""
    rows = []
    for learner in learners:
        unit, style = ("%", ".3f") if learner.text else ("points", ".2f")
        for steps in lengths:
            cells = {amount_name(each): in_words(gaps(found, learner, steps, each, seeds), "+.2f") for each in amounts}
            dense = in_words([*ends(found, learner, steps, 0.0, seeds).values()], style)
            if any(cells.values()):
                row = {"model, optimizer": f"{learner.name} ({unit})", "steps": f"{steps:,}", "dense": dense}
                rows.append(row | cells)
    return rows


def panels(
    found: Runs, learners: Sequence[Learner], lengths: Sequence[int], amount: float = SAVING, seeds: int = 3
) -> list[Panel]:
    """Gaps over the length of the run, for images and for text."""
    drawn = []
    for text, unit in ((False, "points of accuracy"), (True, "% of the loss on held-out text")):
        panel = Panel(amount_name(amount), "steps of the run", {}, True, False, f"gap to dense, {unit}", 0.0)
        for learner in (each for each in learners if each.text == text):
            over = {steps: here for steps in lengths if (here := gaps(found, learner, steps, amount, seeds))}
            if len(over) > 1:
                panel.curves[learner.name] = ([*over], [mean(here) for here in over.values()])
                panel.errors[learner.name] = [standard_error(here) for here in over.values()]
        drawn += [panel] * bool(panel.curves)
    return drawn
