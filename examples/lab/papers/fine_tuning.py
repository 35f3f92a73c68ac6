"""Fine-tuning: models that were trained densely go on with other data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from lab.commands import check_names
from lab.data import Data, first_classes, image_folder, source_as_documentation
from lab.papers.at_size import COURSES, exchange
from lab.problems import Problem
from lab.report import Panel, Result, in_words
from lab.training import Optimizer, Runs, run_all, train
from lightning_topk.plan import Row

SYSTEMS = ("dense", "saving 10", "saving 50")
BEFORE = 3000
"""Steps of the dense training before."""


class Tuned(NamedTuple):
    """A model, and the optimizer of the dense training before; fine-tuning has a tenth of the rate."""

    model: str
    optimizer: Optimizer

    def data(self, images: Path | None, before: bool) -> Data | None:
        """The data ``before`` and afterwards: Python's documentation, then source code; five classes, then all."""
        if self.model == "gpt":
            return None if before else source_as_documentation()
        if images is None:
            raise ValueError("this model learns images: pass their folder by --data.")
        return first_classes(image_folder(images), 5) if before else image_folder(images)


TUNED = {
    "AdamW": Tuned("gpt", Optimizer(0.01, 0.9, "AdamW", clip_norm=1.0)),
    "SGD": Tuned("gpt", Optimizer(0.3, 0.9, clip_norm=1.0)),
    "convnet": Tuned("convnet", Optimizer(0.017, 0.9)),
    "convnet, AdamW": Tuned("convnet", Optimizer(0.003, 0.9, "AdamW")),
}


def run(
    data: Path | None = None,
    models: Sequence[str] = ("AdamW", "SGD"),
    lengths: Sequence[int] = (100, 300, 1000),
    seeds: int = 2,
    minutes: float = math.inf,
    out: Path = Path("reproduced"),
) -> Result:
    """Trains densely, keeps weights and optimizer states, and goes on from them at a tenth of the rate.

    The small GPT, by an optimizer, or a convnet, which needs ``data``, a folder of images.
    """
    check_names("--models", models, TUNED)
    starts = {(kind, seed): out / f"fine-tuning-{kind}-{seed}.pt" for kind in models for seed in range(seeds)}
    run_all({key: partial(_before, *key, path, data) for key, path in starts.items() if not path.exists()}, "before")
    found = Runs(out / "fine-tuning.jsonl")
    settings = [
        (kind, cosine, steps, system, seed)
        for seed in range(seeds)
        for steps in lengths
        for kind in models
        for cosine in (True, False)
        for system in SYSTEMS
    ]
    jobs = {run_key(*each): partial(_after, *each, starts[each[0], each[-1]], data) for each in settings}
    found.complete(jobs, "fine-tuning", minutes)
    result = Result(
        "fine-tuning",
        "what compression costs where a trained model goes on with other data",
        f"{COURSES['gpt'].workers} simulated workers, {BEFORE:,} dense steps, then others at a tenth of the rate, "
        "without warm-up, with weights and optimizer states of the dense training: GPT of 0.12 million parameters on "
        "Python's documentation, then on its source code; convnet of 0.2 million on five classes of images, then on "
        "all, by SGD unless AdamW is named. Held-out loss on the second data. Of the gain: the part of dense "
        "training's improvement that is reached.",
    )
    for kind in models:
        result.tables[kind] = table(found, kind, lengths, range(seeds))
        for cosine in (True, False):
            panel = Panel(f"{kind}, {_schedule(cosine)}", "steps", xlog=True, ylabel="held-out loss")
            for system in SYSTEMS:
                ends = {steps: _ends(found, kind, cosine, steps, system, range(seeds)) for steps in lengths}
                shown = {steps: fmean(each.values()) for steps, each in ends.items() if each}
                panel.curves[system] = [*shown], [*shown.values()]
            result.panels.append(panel)
    return result


def run_key(kind: str, cosine: bool, steps: int, system: str, seed: int) -> str:
    """Key of a run in ``fine-tuning.jsonl``."""
    return f"{kind}, {_schedule(cosine)}, {steps} steps, {system}, seed {seed}"


def table(found: Runs, kind: str, lengths: Sequence[int], seeds: Sequence[int]) -> list[Row]:
    """Held-out losses by schedule and length, and how far ours are behind dense training."""
    rows = []
    for cosine in (True, False):
        for steps in lengths:
            dense = _ends(found, kind, cosine, steps, "dense", seeds)
            start = {seed: found[run_key(kind, cosine, steps, "dense", seed)]["before"] for seed in dense}
            row: Row = {"learning rate": _schedule(cosine), "steps": f"{steps:,}"}
            row |= {"before": in_words([*start.values()], ".3f"), "dense": in_words([*dense.values()], ".3f")}
            for system in SYSTEMS[1:]:
                ours = _ends(found, kind, cosine, steps, system, seeds)
                both = [(ours[seed], dense[seed], start[seed]) for seed in ours if seed in dense]
                row[f"{system}, behind %"] = in_words([100 * (own / other - 1) for own, other, _ in both], "+.2f")
                gains = [100 * (first - own) / (first - other) for own, other, first in both]
                row[f"{system}, of the gain"] = in_words(gains, ".0f", " %")
            rows.append(row)
    return rows


def _schedule(cosine: bool) -> str:
    return "cosine" if cosine else "constant"


def _ends(found: Runs, kind: str, cosine: bool, steps: int, system: str, seeds: Sequence[int]) -> dict[int, float]:
    keys = {seed: run_key(kind, cosine, steps, system, seed) for seed in seeds}
    return {seed: found[key]["held"] for seed, key in keys.items() if key in found}


def _before(kind: str, seed: int, path: Path, images: Path | None) -> None:
    tuned, course = TUNED[kind], COURSES[TUNED[kind].model]
    optimizer, data = replace(tuned.optimizer, cosine=True), tuned.data(images, before=True)
    how = exchange("dense", course), course.workers, BEFORE, optimizer, seed, course.batch
    train(tuned.model, *how, data=data, keep=path)


def _after(
    kind: str, cosine: bool, steps: int, system: str, seed: int, start: Path, images: Path | None
) -> dict[str, Any]:
    tuned, course = TUNED[kind], COURSES[TUNED[kind].model]
    optimizer, data = replace(tuned.optimizer, lr=tuned.optimizer.lr / 10, cosine=cosine), tuned.data(images, False)
    how = exchange(system, course), course.workers, steps, optimizer, seed, course.batch
    ended = train(tuned.model, *how, data=data, start=start)
    before, _ = Problem(tuned.model, seed, data).held_out(torch.load(start)["weights"])
    return {
        "optimizer": kind,
        "steps": steps,
        "system": system,
        "seed": seed,
        "held": ended.held_loss,
        "before": before,
    }
