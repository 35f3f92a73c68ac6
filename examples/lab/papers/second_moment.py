"""Adam's second moment with compression, against dense training's of the same gradients, by how long entries wait."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from lab.papers.at_size import COURSES, WORKERS
from lab.report import Result
from lab.training import LANGUAGE, Problem, run_all
from lightning_topk.config import TopKConfig
from lightning_topk.plan import Row
from lightning_topk.runtime.momentum import adapt_momentum
from lightning_topk.simulate import Cluster

EDGES = (1, 4, 8, 16, 32, 64, math.inf)
"""Bounds of the ranges of waits, in steps."""


def run(optimizers: Sequence[str] = LANGUAGE, rates: Sequence[str] = ("0.01",), steps: int = 1000) -> Result:
    """Trains the small GPT with several second betas and learning rates."""
    result = Result(
        "second-moment",
        "how much larger than dense training's Adam's second moment is, by how long an entry waits",
        f"GPT of 0.12 million parameters, {WORKERS} simulated workers, saving=50, one seed. The second moment by which "
        "an entry is divided when it is delivered, over that of the workers' mean gradients of all steps so far: the "
        "median of the entries that wait so long on average. Both gradients are clipped.",
    )
    jobs = {(kind, rate): partial(measure, kind, float(rate), steps) for kind in optimizers for rate in rates}
    for (kind, rate), rows in run_all(jobs, "second-moment").items():
        title = f"{kind}, learning rate {rate}"
        result.tables[title] = rows
        axes = {"xlog": True, "ylog": True, "ylabel": "second moment, over dense training's"}
        curves = result.panel(title, "steps that an entry waits, at least", **axes)
        curves |= {head: (EDGES[:-1], [row[head] for row in rows]) for head in [*rows[0]][1:]}
    return result


def measure(kind: str, rate: float, steps: int, seed: int = 0) -> list[Row]:
    """The ratio of the second moments after a tenth, three tenths and all of the steps, for each range of waits."""
    course = COURSES["gpt"]
    problem, optimizer = Problem("gpt", seed), replace(course.optimizer, lr=rate, kind=kind)
    beta = float(kind.split()[1])
    sizes = tuple(parameter.numel() for parameter in problem.parameters)
    cluster, theta = Cluster(TopKConfig(saving=50), WORKERS, sum(sizes), sizes=sizes), problem.start.clone()
    parts = problem.weights(theta)
    (made,) = optimizer.make({str(number): part for number, part in enumerate(parts)})
    adapt_momentum([made], cluster)
    deliveries, dense = torch.zeros_like(theta), torch.zeros_like(theta)
    generator, rows = torch.Generator().manual_seed(seed), dict[float, Row]()
    for step in range(1, steps + 1):
        batches = torch.randint(len(problem.data.labels), (WORKERS, course.batch), generator=generator)
        gradients = problem.gradients(theta, batches, generator)
        delivered = cluster.step(gradients)[0]
        deliveries += delivered != 0
        for part, its in zip(parts, problem.weights(delivered), strict=True):
            part.grad = its
        optimizer.step([made], step - 1, steps)  # clips the gradient
        mean = torch.stack(gradients).mean(0)
        mean *= min(1.0, (optimizer.clip_norm or math.inf) / float(mean.norm()))
        dense.lerp_(mean**2, 1 - beta)
        if step in (steps // 10, 3 * steps // 10, steps):
            ours = torch.cat([made.state[part]["exp_avg_sq"].flatten() for part in parts])
            here = (dense > 0) & (delivered != 0)
            waits, ratios = (step / deliveries)[here], (ours / dense)[here]
            for low, high in itertools.pairwise(EDGES):
                some = (low <= waits) & (waits < high)
                row = rows.setdefault(low, {"wait, steps": f"{low} to {high}" if high < math.inf else f"over {low}"})
                row[f"after {step:,} steps"] = float(ratios[some].median())
    return [*rows.values()]
