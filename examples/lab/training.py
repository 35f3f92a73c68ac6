"""Training by simulated workers, through the exchange that a cluster runs, and many such runs in parallel."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm
from typing_extensions import override

from lab.commands import need
from lab.data import Data
from lab.problems import PROBLEMS, Problem
from lightning_topk.bucket import Bucket
from lightning_topk.config import TopKConfig
from lightning_topk.optim.applied import Clipping, faded
from lightning_topk.optim.momentum import adapt_momentum
from lightning_topk.runtime.shares import Shares, energies_of
from lightning_topk.simulate import Cluster

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass
class Run:
    """A training run: final losses and norm of the weights, infinite if it diverged, and accuracy in percent.

    Of agents, the losses are those of reward, and the reward of 100 steps takes the place of accuracy.
    Bytes are per rank and step.
    ``union`` has the number of nonzero delivered entries and ``seen`` the result of ``observe``, step by step.
    ``curve`` has steps, held-out loss, and accuracy in percent.
    """

    loss: float = math.inf
    held_loss: float = math.inf
    accuracy: float = 0.0
    norm: float = math.inf
    uplink_bytes: float = 0.0
    downlink_bytes: float = 0.0
    dense_bytes: float = 0.0
    union: list[int] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    curve: list[tuple[int, float, float]] = field(default_factory=list)


LANGUAGE = ("AdamW 0.95", "AdamW 0.99", "AdamW 0.999")
"""AdamW as language models use it: with this second beta, and a decay of 0.1 on matrices alone."""
BARE = ("Adadelta", "Adafactor", "Adagrad", "RMSprop")
"""Torch's optimizers without momentum, as they are."""
ADAM = ("Adam 0.99", "Adam 0.999")
"""Adam with this second beta."""
OPTIMIZERS = ("SGD", "AdamW", *LANGUAGE, *ADAM, "Muon", *BARE, "Lion", "schedule-free")
"""Kinds of :class:`Optimizer`. Muon steps the matrices of hidden layers, and AdamW the rest; schedule-free is AdamW."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of :data:`OPTIMIZERS`, with ``momentum`` as Adam's and Lion's first beta.

    After ``warmup`` steps the learning rate falls to ``least`` of itself along half a ``cosine``, or is constant, as in
    the thesis.
    The mean gradient is clipped to ``clip_norm`` after the exchange, as ``gradient_clip_val`` does. SGD alone has
    ``weight_decay``, and :data:`ADAM` alone ``eps``; the others have their own default.
    """

    lr: float
    momentum: float = 0.0
    kind: str = "SGD"
    cosine: bool = False
    clip_norm: float | None = None
    weight_decay: float = 0.0
    warmup: int = 0
    least: float = 0.0
    eps: float = 1e-8

    def make(self, parameters: Mapping[str, Tensor]) -> list[torch.optim.Optimizer]:
        """Makes the optimizers of parameters by name."""
        lr, m, all_of_them, optim = self.lr, self.momentum, [*parameters.values()], torch.optim
        if self.kind == "SGD":
            return [optim.SGD(all_of_them, lr, m, weight_decay=self.weight_decay)]
        if self.kind in ADAM:
            return [optim.Adam(all_of_them, lr, (m, float(self.kind.split()[1])), self.eps)]
        if self.kind == "AdamW":
            return [optim.AdamW(all_of_them, lr, (m, 0.999))]
        if self.kind in LANGUAGE:
            parts = [[p for p in all_of_them if (p.dim() > 1) == matrices] for matrices in (True, False)]
            groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]
            return [optim.AdamW(groups, lr, (m, float(self.kind.split()[1])))]
        if self.kind == "Muon":  # one learning rate for both (Liu et al. 2025)
            hidden = [p for name, p in parameters.items() if "blocks" in name and p.dim() == 2]
            others = [p for name, p in parameters.items() if "blocks" not in name or p.dim() != 2]
            return [optim.Muon(hidden, lr, adjust_lr_fn="match_rms_adamw"), optim.AdamW(others, lr, (m, 0.999))]
        if self.kind in BARE:
            return [getattr(optim, self.kind)(all_of_them, lr)]
        if self.kind == "Lion":
            need("lion_pytorch", "lion-pytorch")
            from lion_pytorch import Lion  # type: ignore[import-not-found, import-untyped, unused-ignore]

            return [Lion(all_of_them, lr, (m, 0.99))]
        need("schedulefree")
        from schedulefree import AdamWScheduleFree  # type: ignore[import-not-found, import-untyped, unused-ignore]

        made = AdamWScheduleFree(all_of_them, lr, (m, 0.999))
        made.train()
        return [made]

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of ``step`` of ``steps``."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if not self.cosine or self.kind == "schedule-free":
            return self.lr
        begin = self.warmup if self.least else 0
        cosine = (1 + math.cos(math.pi * (step - begin) / max(1, steps - begin))) / 2
        return self.lr * (self.least + (1 - self.least) * cosine)

    def step(self, made: Sequence[torch.optim.Optimizer], step: int, steps: int) -> None:
        """Clips the gradient, sets the learning rate for ``step`` of ``steps``, and takes the step."""
        groups = [group for each in made for group in each.param_groups]
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], self.clip_norm)
        for group in groups:
            group["lr"] = self.rate(step, steps)
        for each in made:
            each.step()


class LocalSGD:
    """Post-local SGD (Lin et al. 2020), as torch's ``PostLocalSGDOptimizer`` and ``PeriodicModelAverager`` run it.

    The workers average gradients for ``warmup`` steps. Then each trains alone, and every ``period`` steps they average
    their weights, but not their optimizers' states.
    """

    def __init__(self, period: int, workers: int, shapes: Sequence[torch.Size], warmup: int = 100) -> None:
        self.period, self.workers, self.warmup, self.steps = period, workers, warmup, 0
        self.sent_bytes = {"uplink": [0] * workers, "downlink": [0] * workers}
        self._nbytes = 4 * sum(shape.numel() for shape in shapes) * (workers - 1) // workers

    def step(self, gradients: Sequence[Tensor], epoch: int = 0) -> Sequence[Tensor]:
        """The gradients ``[d]`` with which the workers step."""
        self.steps += 1
        return gradients if self.steps > self.warmup else self._mean(gradients)

    @torch.no_grad()
    def average_(self, weights: Sequence[Tensor]) -> None:
        """Averages the workers' weights ``[d]`` after a step, if it is time."""
        if self.steps > self.warmup and (self.steps - 1 - self.warmup) % self.period == 0:
            for own, mean in zip(weights, self._mean(weights), strict=True):
                own.copy_(mean)

    def begin(self, start: Tensor) -> None:
        """Called before the first step with the initial weights, ``[d]``."""

    def _mean(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        for sent in self.sent_bytes.values():  # an all-reduce sends half before its sums are known, and half after
            sent[:] = [each + self._nbytes for each in sent]
        return [torch.stack([*vectors]).mean(0)] * self.workers


class DiLoCo(LocalSGD):
    """DiLoCo (Douillard et al. 2023, algorithm 1): local steps, and an outer SGD with Nesterov momentum 0.9.

    Each worker trains alone. Every ``period`` steps the workers average how far they moved since the last exchange: the
    gradient of the outer optimizer, whose result all workers continue from. They keep their inner optimizers' states.

    Args:
        period: H, the local steps between exchanges.
        rate: The learning rate of the outer optimizer.
        config: Settings of our exchange, which then sends the movements, as in SparseLoCo (Sarfi et al. 2025), which
            has no outer momentum; here it is adapted. Default: they are averaged in full.
        workers: Number of workers.
        shapes: Shapes of the parameters.
    """

    def __init__(
        self, period: int, rate: float, config: TopKConfig | None, workers: int, shapes: Sequence[torch.Size]
    ) -> None:
        super().__init__(period, workers, shapes, warmup=0)
        self.rate, self.config, self.sizes = rate, config, tuple(shape.numel() for shape in shapes)
        self.cluster: Cluster | None = None

    @override
    def begin(self, start: Tensor) -> None:
        self.outer = start.clone()
        self.optimizer = torch.optim.SGD([self.outer], self.rate, 0.9, nesterov=True)
        if self.config is not None:
            self.cluster = Cluster(self.config, self.workers, len(start), sizes=self.sizes, device=start.device)
            self.sent_bytes = self.cluster.sent_bytes
            adapt_momentum([self.optimizer], self.cluster)

    @override
    @torch.no_grad()
    def average_(self, weights: Sequence[Tensor]) -> None:
        if self.steps % self.period:
            return
        moved = [self.outer - own for own in weights]
        self.outer.grad = (self._mean(moved) if self.cluster is None else self.cluster.step(moved))[0]
        self.optimizer.step()
        for own in weights:
            own.copy_(self.outer)


class Workers:
    """Simulated workers, which are told of clipping to ``max_norm`` and lift parameters as ranks of a cluster do."""

    def __init__(
        self, config: TopKConfig, workers: int, numel: int, max_norm: float | None = None, **options: Any
    ) -> None:
        self.cluster = Cluster(config, workers, numel, **options)
        self.sent_bytes = self.cluster.sent_bytes
        gradient = torch.empty(numel, device="meta")
        self._told = ([max_norm] if max_norm and self.cluster.plan.waits else []), {gradient: 0}
        self._clippings = [Clipping(workers) for _ in range(workers if self._told[0] else 0)]
        self._buckets = [Bucket((gradient,)) for _ in range(workers)]
        self._rate: float | None = None  # at which what waits counts
        self._shares = Shares() if config.saving is not None and self.cluster.plan.waits else None

    def step(self, gradients: Sequence[Tensor], epoch: int, rate: float) -> list[Tensor]:
        """Exchanges the gradients ``[d]`` of a step with this learning rate."""
        fade, self._rate = faded(rate if self._rate is None else self._rate, rate)
        if self._shares is not None:
            self._lift(self._shares, gradients[0])
        for each in self._clippings:
            each.begin_pass(*self._told)
        mine = [*zip(self._clippings, self._buckets, strict=False)]  # none if nothing was told
        clips = [each.of(bucket, gradients[0].device) for each, bucket in mine]
        delivered = self.cluster.step(gradients, epoch, fade=fade, clips=clips)
        for each, bucket in mine:
            each.fold([bucket])
        return delivered

    def _lift(self, shares: Shares, gradient: Tensor) -> None:
        """Decides about the parameters' shares when it is time, by the gradients of one worker."""
        (bucket, *_), sizes = self._buckets, self.cluster.plan.compressed_sizes
        if shares.due:
            _, (lifts,) = shares.decide({bucket: sizes})
            for end in self.cluster.endpoints:
                end.lift(lifts)
        if shares.measures(bucket):
            entered = energies_of(gradient, self.cluster.plan.parts.sizes)
            shares.fold((bucket,), {bucket: torch.stack([entered, entered])})
        shares.end_pass((bucket,))


@contextmanager
def evaluating(stepped: Sequence[Sequence[Any]]) -> Iterator[None]:
    """The weights to evaluate, where an optimizer has others to train (schedule-free)."""
    switched = [made for each in stepped for made in each if hasattr(made, "eval")]
    for made in switched:
        made.eval()
    yield
    for made in switched:
        made.train()


def train(
    model: str,
    config: TopKConfig | Callable[[int, Sequence[torch.Size]], Any],
    workers: int,
    steps: int,
    optimizer: Optimizer,
    seed: int,
    batch: int = 10,
    observe: Callable[[Any, list[Tensor]], Any] | None = None,
    data: Data | Path | None = None,
    every: int = 0,
    device: torch.device | str = "cpu",
    start: Path | None = None,
    keep: Path | None = None,
) -> Run:
    """Trains a model of :data:`lab.models.MODELS` by simulated workers.

    Args:
        model: Name of the model.
        config: Settings of our exchange, or a function of workers and parameter shapes that makes another one, with
            ``step`` and ``sent_bytes`` as :class:`lightning_topk.simulate.Cluster` has them. The other one, unless it
            is :class:`LocalSGD`, must depend on the mean of the gradients alone: they are computed for several
            workers at once, which is faster, see :attr:`lab.problems.Problem.together`.
        workers: Number of simulated workers.
        steps: Number of steps.
        optimizer: The optimizer.
        seed: Seed of the parameters and the batches.
        batch: Examples per worker and step, drawn from all training data.
        observe: Called before each exchange with the cluster and the workers' gradients.
        data: As for :class:`lab.problems.Problem`.
        every: Steps between points of the curve, which use a quarter of the held-out data. Default: no curve.
        device: Device to compute on.
        start: File of an earlier run's weights and optimizer states to go on from.
        keep: File to write them to.
    """
    problem = PROBLEMS.get(model, Problem)(model, seed, data, device)
    saved = None if start is None else torch.load(start)
    if saved is not None:
        problem.start.copy_(saved["weights"])
    shapes = [parameter.shape for parameter in problem.parameters]
    together, numel = 1, len(problem.start)
    if isinstance(config, TopKConfig):
        sizes = tuple(shape.numel() for shape in shapes)
        options = {"sizes": sizes, "device": problem.start.device}
        ranks: Any = Workers(config, workers, numel, optimizer.clip_norm, **options)
    else:
        ranks = config(workers, shapes)
        if not isinstance(ranks, LocalSGD):
            together = math.gcd(workers, max(1, problem.together // batch))
    drawn = workers // together, together * batch
    # Each has the weights of all workers, or of one.
    weights = [problem.start.clone() for _ in range(workers if isinstance(ranks, LocalSGD) else 1)]
    names, parts = [name for name, _ in problem.net.named_parameters()], [*map(problem.weights, weights)]
    stepped = [optimizer.make(dict(zip(names, each, strict=True))) for each in parts]
    if saved is not None:
        for optimizers in stepped:
            for one, state in zip(optimizers, saved["optimizers"], strict=True):
                one.load_state_dict(state)
    if isinstance(ranks, LocalSGD):
        ranks.begin(problem.start)
    if isinstance(config, TopKConfig) and config.adapts_momentum:
        adapt_momentum(stepped[0], ranks)
    generator, examples = torch.Generator().manual_seed(seed), problem.examples
    epoch_steps = max(1, examples // (workers * batch))
    run = Run()
    for step in range(steps):
        batches = torch.randint(examples, drawn, generator=generator)
        gradients = problem.gradients(torch.stack(weights) if len(weights) > 1 else weights[0], batches, generator)
        if observe is not None:
            run.seen.append(observe(getattr(ranks, "cluster", ranks), gradients))
        if isinstance(ranks, Workers):
            delivered = ranks.step(gradients, step // epoch_steps, optimizer.rate(step, steps))
        else:
            delivered = ranks.step(gradients, epoch=step // epoch_steps)
        run.union.append(int(delivered[0].count_nonzero()))
        for each, made, gradient in zip(parts, stepped, delivered, strict=False):
            for part, its in zip(each, problem.weights(gradient), strict=True):
                part.grad = its
            optimizer.step(made, step, steps)
        if isinstance(ranks, LocalSGD):
            ranks.average_(weights)
        if every and (step + 1) % every == 0:
            with evaluating(stepped):
                run.curve.append((step + 1, *problem.held_out(torch.stack(weights).mean(0), 4)))
    with evaluating(stepped):
        theta = torch.stack(weights).mean(0)
    if keep is not None:
        torch.save({"weights": theta, "optimizers": [one.state_dict() for one in stepped[0]]}, keep)
    if theta.isfinite().all():
        run.loss, run.held_loss, run.accuracy = problem.evaluate(theta)
        run.norm = float(theta.norm())
    sent = (sum(ranks.sent_bytes[way]) / workers / steps for way in ("uplink", "downlink"))
    run.uplink_bytes, run.downlink_bytes = sent
    run.dense_bytes = 2 * (workers - 1) * 4 * numel / workers
    return run


def run_all(
    jobs: Mapping[K, Callable[[], T]],
    title: str,
    note: Callable[[K, T], None] = lambda key, result: None,
    minutes: float = math.inf,
) -> dict[K, T]:
    """Runs jobs in single-threaded processes, as many at a time as there are cores, and returns their results.

    Jobs must be picklable: use :func:`functools.partial`. ``note`` is called in this process with the name and result
    of each job as it ends. No job starts after ``minutes``; such jobs have no result.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    end = time.monotonic() + 60 * minutes
    with ProcessPoolExecutor(cores, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        pending = {pool.submit(job): name for name, job in jobs.items()}
        try:
            found = {}
            for done in tqdm(as_completed(pending), total=len(pending), desc=title, unit="run"):
                if not done.cancelled():
                    found[pending[done]] = done.result()
                    note(pending[done], done.result())
                if time.monotonic() > end:
                    for job in pending:
                        job.cancel()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: found[name] for name in jobs if name in found}


class Runs(dict[Any, dict[str, Any]]):
    """Measurements by key, stored in a file of JSON lines: setting an entry appends it to the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for entry in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            key = entry["key"]
            super().__setitem__(tuple(key) if isinstance(key, list) else key, entry)

    def __setitem__(self, key: Any, measured: dict[str, Any]) -> None:
        super().__setitem__(key, {"key": key, **measured})
        with self.path.open("a") as file:
            file.write(json.dumps(self[key]) + "\n")

    def complete(self, jobs: Mapping[str, Callable[[], dict[str, Any]]], title: str, minutes: float = math.inf) -> None:
        """Runs the missing jobs, see :func:`run_all`."""
        run_all({key: job for key, job in jobs.items() if key not in self}, title, self.__setitem__, minutes)
