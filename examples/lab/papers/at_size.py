"""Cost of compression at several learning rates and sizes: final quality over the rate, and learning curves.

A run with ten million parameters takes one to two core hours on a CPU. Each run is appended to ``at-size.jsonl`` when
it ends, so an interrupted command resumes where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.commands import check_names
from lab.models import TEXT
from lab.report import Panel, Result, in_words, standard_error
from lab.training import OPTIMIZERS, DiLoCo, LocalSGD, Optimizer, Runs, train
from lightning_topk.config import TopKConfig
from lightning_topk.optim.momentum import AdaptedMomentum
from lightning_topk.plan import Row
from lightning_topk.simulate import Cluster

_adamw = partial(Optimizer, momentum=0.9, kind="AdamW", cosine=True, clip_norm=1.0, warmup=100)
EVERYONES = Optimizer(3e-3, 0.9, "AdamW 0.99", cosine=True, clip_norm=1.0, warmup=20, least=0.1)
_sgd = partial(Optimizer, momentum=0.9, cosine=True, weight_decay=5e-4, warmup=100)
WORKERS = 8
OURS = tuple(f"saving {amount}" for amount in (5, 10, 30, 50, 100, 150, 400))
_diloco = tuple(f"DiLoCo {period} at {rate}" for period in (30, 100) for rate in (0.4, 0.7, 1.0))
SYSTEMS = (
    *("dense", *OURS, "ratio 0.001", "saving 50 not adapted", "saving 50 preempted"),
    *("PowerSGD", "local 10", "local 50"),
    *_diloco,
    *(f"{name} saving 50" for name in _diloco),
)
"""``local 50`` is post-local SGD that averages the weights every 50 steps. ``DiLoCo 30 at 0.7`` exchanges every 30,
with an outer learning rate of 0.7; with ``saving 50``, through our exchange. ``preempted``: see :func:`preempt`."""
BOTH = ("dense", "saving 50")
LOSS, ACCURACY = "held-out loss", "held-out accuracy %"


class Course(NamedTuple):
    """Settings for training of a model: the optimizer, at the default rate; and examples per worker.

    ``powersgd`` is the rank with which PowerSGD sends about as much as ``saving=50``. ``quality`` labels the measure.
    """

    optimizer: Optimizer
    batch: int
    powersgd: int
    images: bool = False
    workers: int = WORKERS
    quality: str = LOSS

    @property
    def points(self) -> bool:
        """Whether quality counts in points, of which more are better, and not in percent of a loss."""
        return self.quality != LOSS


COURSES: Mapping[str, Course] = {
    "tied gpt": Course(EVERYONES, 16, 1, workers=2),
    "gpt": Course(replace(_adamw(0.01), warmup=0), 4, 1),
    "convnet": Course(Optimizer(0.05, 0.9, cosine=True), 16, 1, images=True, quality=ACCURACY),
    "large gpt": Course(_adamw(1e-3), 1, 5),
    "huge gpt": Course(_adamw(6e-4), 8, 10),
    "narrow resnet18": Course(_sgd(0.03), 8, 3, images=True, quality=ACCURACY),
    "resnet18": Course(_sgd(0.03), 16, 6, images=True, quality=ACCURACY),
    "diffusion": Course(Optimizer(1e-4, 0.9, "Adam 0.99", clip_norm=1.0), 32, 1, images=True, workers=2),
    "ppo": Course(
        Optimizer(3e-4, 0.9, "Adam 0.999", clip_norm=0.5, eps=1e-5), 8, 1, workers=2, quality="reward of 100 steps"
    ),
    "two losses": Course(Optimizer(1e-3, 0.9, "Adam 0.999"), 32, 1, workers=2),
}


def run(
    data: Path | None = None,
    models: Sequence[str] = ("large gpt", "narrow resnet18"),
    systems: Sequence[str] = BOTH,
    rates: Sequence[str] = (),
    optimizers: Sequence[str] = ("",),
    workers: int = 0,
    batch: int = 0,
    steps: int = 3000,
    seeds: int = 2,
    minutes: float = math.inf,
    device: str = "cpu",
    out: Path = Path("reproduced"),
) -> Result:
    """Trains models at several learning rates. Rate, workers, batch and optimizer are the course's by default.

    Models of images need ``data``, a folder of images. ``huge gpt`` is too slow on CPUs.
    """
    check_names("--models", models, COURSES)
    check_names("--systems", systems, SYSTEMS)
    check_names("--optimizers", filter(None, optimizers), OPTIMIZERS)
    chosen = [name for name in models if data is not None or not COURSES[name].images]
    if not chosen:
        raise ValueError("this model learns images: pass their folder by --data.")
    found = Runs(out / "at-size.jsonl")
    if "Muon" in optimizers and (without := [model for model in chosen if model not in TEXT]):
        raise ValueError(f"Muon steps the matrices of a GPT's blocks, and {', '.join(without)} has none.")
    setups = [setup(model, steps, batch, kind, workers) for model in chosen for kind in optimizers]
    jobs = {
        run_key(each, system, rate, seed): partial(train_run, each, system, rate, seed, data, device)
        for seed in range(seeds)
        for each in setups
        for rate in [float(rate) for rate in rates] or [COURSES[each.model].optimizer.lr]
        for system in systems
    }
    found.complete(jobs, "at-size", minutes)
    result = Result(
        "at-size",
        "what compression costs, at the best learning rate of each system",
        f"Simulated workers, {WORKERS} by default, {steps:,} steps, only saving= or ratio= set; bf16-mixed on GPUs "
        "above two million parameters. GPT (0.12 million parameters, texts of 64 characters; tied: 0.35; large: 10.8, "
        "huge: 85, texts of 128): AdamW. Convnet (0.2 million) and ResNet-18 (11.0; narrow: 2.8): SGD, momentum 0.9. "
        "Diffusion (0.2 million, images of 16 pixels), PPO (0.02 million) and two losses, of weights 1 and 100, of "
        "which the first counts (0.04 million): Adam.",
    )
    result.tables = {each.title: table(found, each) for each in setups}
    result.panels = panels(found, setups)
    return result


class Setup(NamedTuple):
    """What runs have in common that are compared: model, optimizer, examples a worker and step, steps, workers."""

    model: str
    optimizer: str
    batch: int
    steps: int
    workers: int = WORKERS

    @property
    def title(self) -> str:
        """The setup in words."""
        workers = f", {self.workers} workers" * (self.workers != WORKERS)
        return f"{self.model}, {self.optimizer}, {self.batch} examples a worker, {self.steps:,} steps{workers}"


def setup(model: str, steps: int, batch: int = 0, optimizer: str = "", workers: int = 0) -> Setup:
    """A setup with the course's batch, optimizer and workers by default."""
    course = COURSES[model]
    kind, workers = optimizer or course.optimizer.kind, workers or course.workers
    return Setup(model, kind, batch or course.batch, steps, workers)


def setup_of(run: Mapping[str, Any]) -> Setup:
    """The setup of an existing run."""
    return Setup(*(run.get(name, WORKERS) for name in Setup._fields))


def run_key(setup: Setup, system: str, rate: float, seed: int) -> str:
    """Key of a run in ``at-size.jsonl``."""
    model, optimizer, batch, steps, workers = setup
    among = f", {workers} workers" * (workers != WORKERS)
    return f"{model}, {optimizer}, batch {batch}, {steps} steps{among}, {system}, rate {rate:g}, seed {seed}"


def exchange(system: str, course: Course) -> Any:
    """What a system is for :func:`lab.training.train`."""
    name, *more = system.split()
    if name in ("saving", "ratio"):
        setting: dict[str, Any] = {name: float(more[0]), "adapt_momentum": "adapted" not in more}
        return TopKConfig(**setting)
    if name == "local":
        return partial(LocalSGD, int(more[0]))
    if name == "DiLoCo":
        period, _, rate, *ours = more
        return partial(DiLoCo, int(period), float(rate), TopKConfig(saving=float(ours[1])) if ours else None)
    return partial(PowerSGD, course.powersgd if name == "PowerSGD" else 0)


def preempt(at: int, cluster: Cluster, gradients: Sequence[Tensor]) -> None:
    """Zeroes before step ``at`` what a checkpoint at preemption lacks: the residuals, and the optimizers' step counts.

    It is called before every step.
    """
    if cluster.steps == at:
        for memory in (link.memory for end in cluster.endpoints for link in end.links):
            for tensor in memory.tensors().values():
                tensor.zero_()
        for adapted in AdaptedMomentum._instances.values():
            adapted.members.clear()
            adapted._prepared = None


def train_run(
    setup: Setup, system: str, rate: float, seed: int, data: Path | None, device: str = "cpu"
) -> dict[str, Any]:
    """Trains a system, and returns an entry of ``at-size.jsonl``."""
    model, kind, batch, steps, workers = setup
    course = COURSES[model]
    options: dict[str, Any] = {"every": max(1, steps // 12), "device": device, "data": data if course.images else None}
    if "preempted" in system:
        options["observe"] = partial(preempt, steps // 2)
    optimizer = replace(course.optimizer, lr=rate, kind=kind)
    ended = train(model, exchange(system, course), workers, steps, optimizer, seed, batch, **options)
    sent = ended.uplink_bytes + ended.downlink_bytes
    measured = {"held": min(ended.held_loss, 1e3), "accuracy": ended.accuracy, "curve": ended.curve}
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    entry = setup._asdict() | {"system": system, "rate": rate, "seed": seed}
    return entry | measured | {"sent": sent, "saving": ended.dense_bytes / sent if sent else math.inf, "where": where}


def ends(found: Runs, setup: Setup, system: str, measured: str = "") -> dict[float, dict[int, float]]:
    """Final quality by learning rate and seed, for existing runs: by default the course's measure."""
    measured = measured or ("accuracy" if COURSES[setup.model].points else "held")
    by_rate: dict[float, dict[int, float]] = {}
    for run in found.values():
        if (setup_of(run), run["system"]) == (setup, system):
            by_rate.setdefault(run["rate"], {})[run["seed"]] = run[measured]
    return dict(sorted(by_rate.items()))


def known(found: Runs) -> list[Setup]:
    """The setups of existing runs: by model, optimizer, batch and length."""
    return sorted({*map(setup_of, found.values())})


def best_rate(model: str, by_rate: Mapping[float, Mapping[int, float]]) -> float:
    """The learning rate with the best quality; each two are compared on the seeds that both have."""
    sign = 1 if COURSES[model].points else -1

    def better(one: float, other: float) -> float:
        both = by_rate[one].keys() & by_rate[other].keys()
        return other if sum(sign * (by_rate[other][seed] - by_rate[one][seed]) for seed in both) > 0 else one

    return reduce(better, by_rate)


def gaps(model: str, ours: Mapping[int, float], dense: Mapping[int, float]) -> list[float]:
    """Gap to dense training for each seed, positive if worse: percent of the loss, or points."""
    both = [(ours[seed], dense[seed]) for seed in ours if seed in dense]
    return [b - a if COURSES[model].points else 100 * (a / b - 1) for a, b in both]


def table(found: Runs, setup: Setup) -> list[Row]:
    """Final quality by system and learning rate, with the gaps to dense training at this rate and at its best."""
    points, rows = COURSES[setup.model].points, []
    dense, unit = ends(found, setup, "dense"), "points" if points else "%"
    for system in SYSTEMS:
        by_rate = ends(found, setup, system)
        best = best_rate(setup.model, by_rate) if by_rate else None
        for rate, ours in by_rate.items():
            same, least = dense.get(rate, {}), dense[best_rate(setup.model, dense)] if dense else {}
            row: Row = {"": f"PowerSGD {COURSES[setup.model].powersgd}" if system == "PowerSGD" else system}
            row |= {"learning rate": f"{rate:g}" + " (best)" * (rate == best and len(by_rate) > 1)}
            row |= {COURSES[setup.model].quality: in_words([*ours.values()], ".2f" if points else ".3f")}
            if system != "dense":
                row[f"behind dense at this rate, {unit}"] = in_words(gaps(setup.model, ours, same), "+.2f")
                row[f"behind dense at its best, {unit}"] = in_words(gaps(setup.model, ours, least), "+.2f")
            rows.append(row)
    return rows


def panels(found: Runs, setups: Sequence[Setup]) -> list[Panel]:
    """Final quality over the learning rate, and learning curves of the best rates over steps and bytes."""
    drawn = []
    for setup in setups:
        points, ylabel = COURSES[setup.model].points, COURSES[setup.model].quality
        by_system = {system: ends(found, setup, system) for system in SYSTEMS}
        over = Panel(setup.title, "learning rate", xlog=True, ylabel=ylabel)
        for system, by_rate in by_system.items():
            if len(by_rate) > 1:
                over.curves[system] = [*by_rate], [fmean(each.values()) for each in by_rate.values()]
                over.errors[system] = [standard_error([*each.values()]) for each in by_rate.values()]
        drawn += [over] * bool(over.curves)
        for along in ("steps", "MB that a worker sent"):
            panel = Panel(setup.title, along, xlog=along != "steps", ylabel=ylabel)
            for system, by_rate in by_system.items():
                if by_rate:
                    rate = best_rate(setup.model, by_rate)
                    run = found[run_key(setup, system, rate, min(by_rate[rate]))]
                    passed, losses, scores = zip(*run["curve"], strict=True)
                    scale = 1.0 if along == "steps" else run["sent"] / 1e6
                    panel.curves[system] = [step * scale for step in passed], scores if points else losses
            drawn += [panel] * bool(panel.curves)
    return drawn


def gap_over_steps(found: Runs, model: str) -> Panel:
    """The gap of ``saving=50`` to dense training over the length of a run, a line a batch.

    Both have their best rate of the existing runs. Seeds that have both runs count.
    """
    unit = "points" if COURSES[model].points else "%"
    panel = Panel(model, "steps of the run", xlog=True, ylabel=f"behind dense training, {unit}", level=0.0)
    here = [each for each in known(found) if each[:2] == (model, COURSES[model].optimizer.kind)]
    for batch in dict.fromkeys(each.batch for each in here):
        points = []
        for each in (each for each in here if each.batch == batch):
            dense, ours = (ends(found, each, system) for system in BOTH)
            if dense and ours:
                best = [by_rate[best_rate(model, by_rate)] for by_rate in (ours, dense)]
                if each_seed := gaps(model, *best):
                    points.append((each.steps, fmean(each_seed), standard_error(each_seed)))
        if points:
            steps, means, errors = zip(*points, strict=True)
            label = f"{batch} examples a worker"
            panel.curves[label], panel.errors[label] = (steps, means), errors
    return panel


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
