"""Training by simulated workers, through the exchange that a cluster runs; and many such runs at a time."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_topk.config import TopKConfig
from lightning_topk.lab.data import Data, digits, documentation, image_folder
from lightning_topk.lab.models import MODELS, TEXT
from lightning_topk.runtime.momentum import adapt_momentum
from lightning_topk.simulate import Cluster

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Problem:
    """A model as a function of one flat vector of parameters.

    Args:
        model: A key of :data:`lightning_topk.lab.models.MODELS`.
        seed: Seed of the initial parameters.
        data: What it learns. Default: Python's documentation for models of text, else digits.
    """

    def __init__(self, model: str, seed: int, data: Data | None = None) -> None:
        self.data = data or (documentation() if model in TEXT else digits())
        torch.manual_seed(seed)
        self.net = MODELS[model]()
        self.parameters = list(self.net.parameters())
        self.start = torch.cat([p.detach().flatten() for p in self.parameters])
        # vmap does not support LSTMs, and is slower for large models.
        large = len(self.start) > 200_000 or model in TEXT
        self._vectorised = (
            data is None and not large and not any(isinstance(part, nn.LSTM) for part in self.net.modules())
        )

    def gradients(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[Tensor]:
        """The gradient of each worker.

        Args:
            theta: The parameters, ``[d]`` float32.
            batches: The numbers of each worker's training examples, ``[W, B]`` int64.
            generator: Source of the random numbers of the data's augmentation.

        Returns:
            W tensors ``[d]`` float32.
        """
        images, labels = self.data.examples, self.data.labels
        if self._vectorised:
            gradient = torch.func.grad(lambda theta, *batch: self._loss(self._weights(theta), *batch))
            return list(torch.func.vmap(partial(gradient, theta))(images[batches], labels[batches]))
        found = []
        for batch in batches:
            weights = [weight.requires_grad_() for weight in self._weights(theta.detach())]
            loss = self._loss(weights, self.data.augment(images[batch], generator), labels[batch])
            found.append(torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, weights)]))
        return found

    def evaluate(self, theta: Tensor) -> tuple[float, float]:
        """Training loss, of about 5,000 examples where there are more, and accuracy in percent on held-out data."""
        some = slice(None, None, max(1, len(self.data.labels) // 5000))
        loss, _ = self._quality(theta, self.data.examples[some], self.data.labels[some])
        return loss, self._quality(theta, self.data.held_examples, self.data.held_labels)[1]

    def held_loss(self, theta: Tensor) -> float:
        """Loss on held-out data."""
        return self._quality(theta, self.data.held_examples, self.data.held_labels)[0]

    @torch.no_grad()
    def _quality(self, theta: Tensor, examples: Tensor, labels: Tensor) -> tuple[float, float]:
        loss, right, parts = 0.0, 0, math.ceil(len(labels) / 500)
        for part in range(parts):  # each of examples from all over: folders are sorted by class, and batch norm mixes
            batch, wanted = examples[part::parts], labels[part::parts]
            scores = self._scores(self._weights(theta), batch)
            loss += float(nn.functional.cross_entropy(scores.flatten(0, -2), wanted.flatten(), reduction="sum"))
            right += int((scores.argmax(-1) == wanted).sum())
        return loss / labels.numel(), 100 * right / labels.numel()

    def _weights(self, theta: Tensor) -> list[Tensor]:
        """The parameters: views of ``theta`` ``[d]``."""
        parts = theta.split([parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _scores(self, weights: list[Tensor], examples: Tensor) -> Tensor:
        named = {name: weight for (name, _), weight in zip(self.net.named_parameters(), weights, strict=True)}
        scores: Tensor = torch.func.functional_call(self.net, named, examples)
        return scores

    def _loss(self, weights: list[Tensor], examples: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self._scores(weights, examples).flatten(0, -2), labels.flatten())


@dataclass
class Run:
    """A training run.

    Attributes:
        loss: Final loss on training data; infinite if it diverged.
        accuracy: Final accuracy on held-out data, percent.
        held_loss: Final loss on held-out data; infinite if it diverged.
        uplink_bytes: Bytes from a worker to the servers in a step, mean over workers and steps.
        downlink_bytes: Bytes from a server to the workers in a step, likewise.
        dense_bytes: Bytes that a ring all-reduce would send from a rank in a step.
        union: Nonzero entries that were delivered, step by step.
        seen: What ``observe`` returned, step by step.
        curve: Step, training loss and accuracy in percent, at the ``points``.
    """

    loss: float = float("inf")
    accuracy: float = 0.0
    uplink_bytes: float = 0.0
    downlink_bytes: float = 0.0
    dense_bytes: float = 0.0
    held_loss: float = float("inf")
    union: list[int] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def conclude(self, problem: Problem, theta: Tensor, ranks: Cluster, steps: int) -> None:
        """Enters final qualities and the bytes of all steps.

        Args:
            problem: What was trained.
            theta: Its parameters at the end, ``[d]``.
            ranks: The workers.
            steps: Steps of the run.
        """
        if theta.isfinite().all():
            self.loss, self.accuracy = problem.evaluate(theta)
            self.held_loss = problem.held_loss(theta)
        workers = len(ranks.endpoints)
        self.uplink_bytes, self.downlink_bytes = (
            sum(ranks.sent_bytes[way]) / workers / steps for way in ("uplink", "downlink")
        )
        self.dense_bytes = 2 * (workers - 1) * 4 * len(theta) / workers


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, its learning rate and clipping.

    Args:
        lr: Learning rate.
        momentum: Momentum of SGD, or the first beta of AdamW.
        adamw: AdamW with torch's weight decay; else SGD.
        cosine: Whether the learning rate falls to zero along half a cosine; else it is constant, as in the thesis.
        clip_norm: Norm to which the mean gradient is clipped after the exchange, as ``gradient_clip_val`` does.
        weight_decay: SGD's.
        warmup: Steps in which the learning rate rises from zero.
    """

    lr: float
    momentum: float = 0.0
    adamw: bool = False
    cosine: bool = False
    clip_norm: float | None = None
    weight_decay: float = 0.0
    warmup: int = 0

    def make(self, theta: Tensor) -> torch.optim.Optimizer:
        """The optimizer of one flat vector of parameters ``[d]``."""
        if self.adamw:
            return torch.optim.AdamW([theta], self.lr, (self.momentum, 0.999))
        return torch.optim.SGD([theta], self.lr, self.momentum, weight_decay=self.weight_decay)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step of a run of ``steps``."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * (1 + math.cos(math.pi * step / steps)) / 2 if self.cosine else self.lr


def train(
    model: str,
    config: TopKConfig,
    workers: int,
    steps: int,
    optimizer: Optimizer,
    seed: int,
    batch: int = 10,
    observe: Callable[[Cluster, list[Tensor]], Any] | None = None,
    images: Path | None = None,
    local: int = 1,
    points: int = 0,
    cluster: Callable[..., Cluster] = Cluster,
) -> Run:
    """Trains a model by simulated workers.

    Args:
        model: A key of :data:`lightning_topk.lab.models.MODELS`.
        config: Settings of the exchange.
        workers: Simulated workers.
        steps: Steps of the run.
        optimizer: The optimizer.
        seed: Seed of the parameters and the batches.
        batch: Examples of each worker in a step, drawn from all training data.
        observe: Called before each exchange with the cluster and the workers' gradients.
        images: A folder of images, see :func:`lightning_topk.lab.data.folders`. Default: the data of :class:`Problem`.
        local: Workers on each simulated node.
        points: How many times to evaluate during the run.
        cluster: Makes the workers; called like :class:`lightning_topk.simulate.Cluster`.
    """
    problem = Problem(model, seed, None if images is None else image_folder(images))
    theta = problem.start
    stepped = optimizer.make(theta)
    sizes = tuple(parameter.numel() for parameter in problem.parameters)
    names = [name for name, _ in problem.net.named_parameters()]
    skipped = [n for n, name in enumerate(names) if any(fnmatch.fnmatchcase(name, p) for p in config.dense_parameters)]
    ranks = cluster(config, workers, len(theta), local=local, sizes=sizes, uncompressed=skipped)
    if config.on(workers, local).adapts_momentum:
        adapt_momentum([stepped], ranks)
    generator, examples = torch.Generator().manual_seed(seed), len(problem.data.labels)
    epoch_steps = max(1, examples // (workers * batch))
    run = Run()
    for step in tqdm(range(steps), desc=f"{workers} workers", unit="step", leave=False, disable=not points):
        batches = torch.randint(examples, (workers, batch), generator=generator)
        gradients = problem.gradients(theta, batches, generator)
        if observe is not None:
            run.seen.append(observe(ranks, gradients))
        rate = optimizer.rate(step, steps)
        theta.grad = ranks.step(gradients, epoch=step // epoch_steps)[0]
        run.union.append(int(theta.grad.count_nonzero()))
        if optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([theta], optimizer.clip_norm)
        stepped.param_groups[0]["lr"] = rate
        stepped.step()
        if points and (step + 1) % max(1, steps // points) == 0:
            run.curve.append((step + 1, *problem.evaluate(theta)))
    run.conclude(problem, theta, ranks, steps)
    return run


def run_all(
    jobs: Mapping[K, Callable[[], T]],
    title: str,
    note: Callable[[K, T], None] = lambda key, result: None,
    minutes: float = math.inf,
) -> dict[K, T]:
    """Runs jobs in processes of one thread each, as many at a time as there are cores.

    Args:
        jobs: What to run, by name. Jobs travel by pickle: use :func:`functools.partial`.
        title: Title of the progress bar.
        note: Called in this process with each name and result, as they come.
        minutes: Time after which no job is begun.

    Returns:
        The results by name, in the order of ``jobs``; without those that were not begun.
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


def resume(
    jobs: Mapping[str, Callable[[], dict[str, float]]], title: str, path: Path, minutes: float = math.inf
) -> dict[str, dict[str, float]]:
    """Runs the jobs that a file does not have, and appends to it what they measured, as they end.

    Args:
        jobs: What to run, by key.
        title: Title of the progress bar.
        path: A file of one JSON object a line, with its ``"key"``.
        minutes: Time after which no job is begun.

    Returns:
        What was measured, by key, also by other jobs of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    found = {entry["key"]: entry for entry in map(json.loads, lines)}

    def note(key: str, measured: dict[str, float]) -> None:
        found[key] = {"key": key, **measured}
        with path.open("a") as file:
            file.write(json.dumps(found[key]) + "\n")

    run_all({key: job for key, job in jobs.items() if key not in found}, title, note, minutes)
    return found
