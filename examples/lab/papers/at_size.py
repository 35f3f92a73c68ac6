"""Cost of compression with ten million parameters: learning curves of a GPT and a ResNet-18, by steps and by bytes.

Each run takes one to two core hours; the most useful ones come first. Each run is appended to ``at-size.jsonl`` when
it ends, so an interrupted command resumes where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.report import Panel, Result, in_words
from lab.training import Optimizer, Runs, train
from lightning_topk.config import TopKConfig
from lightning_topk.plan import Row

_adamw = partial(Optimizer, momentum=0.9, adamw=True, cosine=True, clip_norm=1.0, warmup=100)
WORKERS = 8
SYSTEMS = ("dense", "saving 50", "saving 200", "ratio 0.001", "PowerSGD")
"""The most useful first."""


class Course(NamedTuple):
    """Settings for dense training of a model: the optimizer, and examples per worker.

    ``powersgd`` is the rank with which PowerSGD sends about as much as ``saving=50``.
    """

    optimizer: Optimizer
    batch: int
    powersgd: int
    images: bool = False


COURSES: Mapping[str, Course] = {
    "large gpt": Course(_adamw(1e-3), 1, 5),
    "huge gpt": Course(_adamw(6e-4), 8, 10),
    "resnet18": Course(Optimizer(0.05, 0.9, cosine=True, weight_decay=5e-4), 4, 6, images=True),
}


def run(
    data: Path | None = None,
    models: Sequence[str] = ("large gpt", "resnet18"),
    systems: Sequence[str] = SYSTEMS,
    steps: int = 3000,
    seeds: int = 2,
    minutes: float = math.inf,
    device: str = "cpu",
    out: Path = Path("reproduced"),
) -> Result:
    """Trains large models; ResNet-18 only with ``data``, a folder of images. ``huge gpt`` is too slow on CPUs."""
    if unknown := {*models} - {*COURSES} | {*systems} - {*SYSTEMS}:
        raise ValueError(f"there is no {', '.join(sorted(unknown))} here: there are {', '.join((*COURSES, *SYSTEMS))}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here.")
    chosen = [name for name in models if data is not None or not COURSES[name].images]
    if not chosen:
        raise ValueError("ResNet-18 learns images: pass their folder by --data.")
    found = Runs(out / "at-size.jsonl")
    every = max(1, steps // 12)
    jobs = {
        run_key(model, system, steps, seed): partial(_train, model, system, steps, seed, every, data, device)
        for seed in range(seeds)
        for system in systems
        for model in chosen
    }
    found.complete(jobs, "at-size", minutes)
    result = Result(
        "at-size",
        "what compression costs with ten million parameters",
        f"{WORKERS} simulated workers, {steps:,} steps, bf16-mixed, nothing set but saving= or ratio=. GPT: 10.8 "
        "million parameters (huge: 85), AdamW, 128 (1,024) characters of Python's source code a worker and step. "
        "ResNet-18: 11.2 million, SGD with momentum 0.9 and weight decay, 4 images a worker and step.",
    )
    result.tables = {model: table(found, model, steps, seeds) for model in chosen}
    result.panels = panels(found, chosen, systems, steps)
    return result


def run_key(model: str, system: str, steps: int, seed: int) -> str:
    """Key of a run in ``at-size.jsonl``."""
    return f"{model}, {steps} steps, {system}, seed {seed}"


def quality_of(model: str) -> str:
    """Label of the quality measure."""
    return "held-out accuracy %" if COURSES[model].images else "held-out loss"


def _train(
    model: str, system: str, steps: int, seed: int, every: int, data: Path | None, device: str = "cpu"
) -> dict[str, Any]:
    course, (name, _, amount) = COURSES[model], system.partition(" ")
    setting: dict[str, Any] = {name: float(amount)} if amount else {}
    exchanged = TopKConfig(**setting) if amount else partial(PowerSGD, course.powersgd if name == "PowerSGD" else 0)
    given: dict[str, Any] = {"data": data if course.images else None, "every": every, "device": device}
    ended = train(model, exchanged, WORKERS, steps, course.optimizer, seed, course.batch, **given)
    sent = ended.uplink_bytes + ended.downlink_bytes
    measured = {"loss": ended.loss, "held": ended.held_loss, "accuracy": ended.accuracy, "curve": ended.curve}
    return measured | {"sent": sent, "saving": ended.dense_bytes / sent}


def panels(found: Runs, models: Sequence[str], systems: Sequence[str] = SYSTEMS, steps: int = 3000) -> list[Panel]:
    """Learning curves of the first seed, over steps and over the bytes that a worker sent."""
    drawn = []
    for model in models:
        runs = {system: found[key] for system in systems if (key := run_key(model, system, steps, 0)) in found}
        for along in ("steps", "MB that a worker sent"):
            panel = Panel(model, along, xlog=along != "steps", ylabel=quality_of(model))
            for system, run in runs.items():
                passed, losses, accuracies = zip(*run["curve"], strict=True)
                scale = 1.0 if along == "steps" else run["sent"] / 1e6
                quality = accuracies if COURSES[model].images else losses
                panel.curves[system] = [step * scale for step in passed], quality
            drawn += [panel] * bool(runs)
    return drawn


def ends(found: Runs, model: str, system: str, steps: int = 3000, seeds: int = 2) -> dict[int, float]:
    """Final quality by seed: held-out loss, or accuracy in percent."""
    keys = {seed: run_key(model, system, steps, seed) for seed in range(seeds)}
    measured = "accuracy" if COURSES[model].images else "held"
    return {seed: found[key][measured] for seed, key in keys.items() if key in found}


def table(found: Runs, model: str, steps: int = 3000, seeds: int = 2) -> list[Row]:
    """Final quality by system, with the saving and the gap to dense training of the same seeds."""
    images, rows = COURSES[model].images, []
    dense = ends(found, model, "dense", steps, seeds)
    for system in SYSTEMS:
        ours = ends(found, model, system, steps, seeds)
        if ours:
            both = [(ours[seed], dense[seed]) for seed in ours if seed in dense and system != "dense"]
            gaps = [b - a if images else 100 * (a / b - 1) for a, b in both]
            name = f"PowerSGD {COURSES[model].powersgd}" if system == "PowerSGD" else system
            saved = found[run_key(model, system, steps, min(ours))]["saving"]
            row: Row = {"": name, "times fewer bytes": f"{saved:.3g}"}
            row[quality_of(model)] = in_words([*ours.values()], ".2f" if images else ".3f")
            rows.append(row | {f"behind dense, {'points' if images else '%'}": in_words(gaps, "+.2f")})
    return rows


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
