"""Cost of compression at several learning rates and sizes: final quality over the rate, and learning curves.

A run with ten million parameters takes one to two core hours on a CPU. Each run is appended to ``at-size.jsonl`` when
it ends, so an interrupted command resumes where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.report import Panel, Result, in_words, standard_error
from lab.training import LocalSGD, Optimizer, Runs, train
from lightning_topk.config import TopKConfig
from lightning_topk.plan import Row

_adamw = partial(Optimizer, momentum=0.9, adamw=True, cosine=True, clip_norm=1.0, warmup=100)
_sgd = partial(Optimizer, momentum=0.9, cosine=True, weight_decay=5e-4, warmup=100)
WORKERS = 8
SYSTEMS = ("dense", "saving 50", "saving 150", "saving 400", "ratio 0.001", "PowerSGD", "local 10", "local 50")
"""The most useful first; ``local 50`` is post-local SGD that averages the weights every 50 steps."""
BOTH = SYSTEMS[:2]


class Course(NamedTuple):
    """Settings for training of a model: the optimizer, at the default rate; and examples per worker.

    ``powersgd`` is the rank with which PowerSGD sends about as much as ``saving=50``.
    """

    optimizer: Optimizer
    batch: int
    powersgd: int
    images: bool = False


COURSES: Mapping[str, Course] = {
    "gpt": Course(replace(_adamw(0.01), warmup=0), 4, 1),
    "convnet": Course(Optimizer(0.05, 0.9, cosine=True), 16, 1, images=True),
    "large gpt": Course(_adamw(1e-3), 1, 5),
    "huge gpt": Course(_adamw(6e-4), 8, 10),
    "narrow resnet18": Course(_sgd(0.03), 8, 3, images=True),
    "resnet18": Course(_sgd(0.03), 16, 6, images=True),
}


def run(
    data: Path | None = None,
    models: Sequence[str] = ("large gpt", "narrow resnet18"),
    systems: Sequence[str] = BOTH,
    rates: Sequence[str] = (),
    steps: int = 3000,
    seeds: int = 2,
    minutes: float = math.inf,
    device: str = "cpu",
    out: Path = Path("reproduced"),
) -> Result:
    """Trains models at several learning rates, by default at each course's.

    Models of images need ``data``, a folder of images. ``huge gpt`` is too slow on CPUs.
    """
    if unknown := {*models} - {*COURSES} | {*systems} - {*SYSTEMS}:
        raise ValueError(f"there is no {', '.join(sorted(unknown))} here: there are {', '.join((*COURSES, *SYSTEMS))}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here.")
    chosen = [name for name in models if data is not None or not COURSES[name].images]
    if not chosen:
        raise ValueError("this model learns images: pass their folder by --data.")
    found = Runs(out / "at-size.jsonl")
    jobs = {
        run_key(model, system, rate, steps, seed): partial(_train, model, system, rate, steps, seed, data, device)
        for seed in range(seeds)
        for model in chosen
        for rate in [float(rate) for rate in rates] or [COURSES[model].optimizer.lr]
        for system in systems
    }
    found.complete(jobs, "at-size", minutes)
    result = Result(
        "at-size",
        "what compression costs, at the best learning rate of each system",
        f"{WORKERS} simulated workers, {steps:,} steps, nothing set but saving= or ratio=; bf16-mixed on GPUs above "
        "two million parameters. GPT (0.12 million; large: 10.8, huge: 85): AdamW, 256 (large: 128, "
        "huge: 1,024) characters a worker and step. Convnet (0.2 million) and ResNet-18 (11.0; narrow: 2.8): SGD with "
        "momentum 0.9, 16 (narrow: 8) images a worker and step.",
    )
    result.tables = {model: table(found, model, steps) for model in chosen}
    result.panels = panels(found, chosen, steps)
    return result


def run_key(model: str, system: str, rate: float, steps: int, seed: int) -> str:
    """Key of a run in ``at-size.jsonl``."""
    return f"{model}, {steps} steps, {system}, rate {rate:g}, seed {seed}"


def quality_of(model: str) -> str:
    """Label of the quality measure."""
    return "held-out accuracy %" if COURSES[model].images else "held-out loss"


def _train(
    model: str, system: str, rate: float, steps: int, seed: int, data: Path | None, device: str = "cpu"
) -> dict[str, Any]:
    course, (name, _, amount) = COURSES[model], system.partition(" ")
    exchanged: Any = partial(PowerSGD, course.powersgd if name == "PowerSGD" else 0)
    if name == "local":
        exchanged = partial(LocalSGD, int(amount))
    elif amount:
        setting: dict[str, Any] = {name: float(amount)}
        exchanged = TopKConfig(**setting)
    given: dict[str, Any] = {"data": data if course.images else None, "every": max(1, steps // 12), "device": device}
    optimizer = replace(course.optimizer, lr=rate)
    ended = train(model, exchanged, WORKERS, steps, optimizer, seed, course.batch, **given)
    sent = ended.uplink_bytes + ended.downlink_bytes
    measured = {"held": min(ended.held_loss, 1e3), "accuracy": ended.accuracy, "curve": ended.curve}
    entry = {"model": model, "system": system, "rate": rate, "steps": steps, "seed": seed}
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return entry | measured | {"sent": sent, "saving": ended.dense_bytes / sent, "where": where}


def ends(found: Runs, model: str, system: str, steps: int) -> dict[float, dict[int, float]]:
    """Final quality by learning rate and seed, for existing runs: held-out loss, or accuracy in percent."""
    measured = "accuracy" if COURSES[model].images else "held"
    by_rate: dict[float, dict[int, float]] = {}
    for run in found.values():
        if (run["model"], run["system"], run["steps"]) == (model, system, steps):
            by_rate.setdefault(run["rate"], {})[run["seed"]] = run[measured]
    return dict(sorted(by_rate.items()))


def best_rate(model: str, by_rate: Mapping[float, Mapping[int, float]]) -> float:
    """The learning rate with the best mean quality."""
    best = max if COURSES[model].images else min
    return best(by_rate, key=lambda rate: fmean(by_rate[rate].values()))


def gaps(model: str, ours: Mapping[int, float], dense: Mapping[int, float]) -> list[float]:
    """Gap to dense training for each seed, positive if worse: percent of the loss, or points of accuracy."""
    both = [(ours[seed], dense[seed]) for seed in ours if seed in dense]
    return [b - a if COURSES[model].images else 100 * (a / b - 1) for a, b in both]


def table(found: Runs, model: str, steps: int) -> list[Row]:
    """Final quality by system and learning rate, with the gaps to dense training at this rate and at its best."""
    images, rows = COURSES[model].images, []
    dense, unit = ends(found, model, "dense", steps), "points" if images else "%"
    for system in SYSTEMS:
        by_rate = ends(found, model, system, steps)
        best = best_rate(model, by_rate) if by_rate else None
        for rate, ours in by_rate.items():
            same, least = dense.get(rate, {}), dense[best_rate(model, dense)] if dense else {}
            row: Row = {"": f"PowerSGD {COURSES[model].powersgd}" if system == "PowerSGD" else system}
            row |= {"learning rate": f"{rate:g}" + " (best)" * (rate == best and len(by_rate) > 1)}
            row |= {quality_of(model): in_words([*ours.values()], ".2f" if images else ".3f")}
            if system != "dense":
                row[f"behind dense at this rate, {unit}"] = in_words(gaps(model, ours, same), "+.2f")
                row[f"behind dense at its best, {unit}"] = in_words(gaps(model, ours, least), "+.2f")
            rows.append(row)
    return rows


def panels(found: Runs, models: Sequence[str], steps: int) -> list[Panel]:
    """Final quality over the learning rate, and learning curves of the best rates over steps and bytes."""
    drawn = []
    for model in models:
        by_system = {system: ends(found, model, system, steps) for system in SYSTEMS}
        over = Panel(f"{model}, {steps:,} steps", "learning rate", xlog=True, ylabel=quality_of(model))
        for system, by_rate in by_system.items():
            if len(by_rate) > 1:
                over.curves[system] = [*by_rate], [fmean(each.values()) for each in by_rate.values()]
                over.errors[system] = [standard_error([*each.values()]) for each in by_rate.values()]
        drawn += [over] * bool(over.curves)
        for along in ("steps", "MB that a worker sent"):
            panel = Panel(model, along, xlog=along != "steps", ylabel=quality_of(model))
            for system, by_rate in by_system.items():
                if by_rate:
                    run = found[run_key(model, system, best_rate(model, by_rate), steps, 0)]
                    passed, losses, accuracies = zip(*run["curve"], strict=True)
                    scale = 1.0 if along == "steps" else run["sent"] / 1e6
                    quality = accuracies if COURSES[model].images else losses
                    panel.curves[system] = [step * scale for step in passed], quality
            drawn += [panel] * bool(panel.curves)
    return drawn


class PowerSGD:
    """Workers that exchange gradients as torch's ``powerSGD_hook`` does, from the first step on (Vogels et al. 2019).

    Uses error feedback, and starts each factor from the previous one. Both factors are linear in the workers' mean
    gradient, so the mean gradient and the mean of their residuals suffice. With rank 0, training is dense.
    """

    def __init__(self, rank: int, workers: int, shapes: Sequence[torch.Size]) -> None:
        self.rank, self.workers = rank, workers
        self.shapes = [torch.Size([shape[0], shape[1:].numel()]) for shape in shapes]
        self.sizes = [shape.numel() for shape in shapes]
        self.residual: Tensor | float = 0.0
        self.factors: dict[int, Tensor] = {}
        self.sent_bytes = {"uplink": [0] * workers, "downlink": [0] * workers}

    def step(self, gradients: Sequence[Tensor], epoch: int = 0) -> list[Tensor]:
        """Exchanges gradients, of any number of workers."""
        mean = torch.stack([*gradients]).mean(0) + self.residual
        delivered = mean.clone()
        sent = 0
        for number, (part, shape) in enumerate(zip(delivered.split(self.sizes), self.shapes, strict=True)):
            matrix, rank = part.view(shape), min(self.rank, *shape)
            if not rank or 2 * rank * sum(shape) >= shape.numel():  # the hook's min_compression_rate
                sent += shape.numel()
                continue
            sent += rank * sum(shape)
            if number not in self.factors:
                self.factors[number] = torch.randn(shape[1], rank, device=matrix.device)
            left, _ = torch.linalg.qr(matrix @ self.factors[number])
            self.factors[number] = matrix.T @ left
            matrix.copy_(left @ self.factors[number].T)
        self.residual = mean - delivered
        for way in self.sent_bytes.values():  # an all-reduce sends half before its sums are known, and half after
            way[:] = [each + 4 * sent * (self.workers - 1) // self.workers for each in way]
        return [delivered] * self.workers
