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
from lab.training import Problem, run_all
from lightning_topk.config import TopKConfig
from lightning_topk.plan import Row
from lightning_topk.runtime.momentum import adapt_momentum
from lightning_topk.simulate import Cluster

EDGES = (1, 4, 8, 16, 32, 64, math.inf)
"""Bounds of the ranges of waits, in steps."""


def run(rates: Sequence[str] = ("0.0035", "0.01", "0.03"), steps: int = 1000) -> Result:
    """Trains the small GPT at several learning rates."""
    result = Result(
        "second-moment",
        "how much larger than dense training's Adam's second moment is, by how long an entry waits",
        f"GPT of 0.12 million parameters, {WORKERS} simulated workers, AdamW, saving=50, one seed. The second moment "
        "after some steps, over that of the workers' mean gradients of the same steps: the median of the entries that "
        "wait so long on average. Both gradients are clipped.",
    )
    jobs = {rate: partial(measure, float(rate), steps) for rate in rates}
    for rate, rows in run_all(jobs, "second-moment").items():
        result.tables[f"learning rate {rate}"] = rows
        axes = {"xlog": True, "ylog": True, "ylabel": "second moment, over dense training's"}
        curves = result.panel(f"learning rate {rate}", "steps that an entry waits, at least", **axes)
        curves |= {head: (EDGES[:-1], [row[head] for row in rows]) for head in [*rows[0]][1:]}
    return result


def measure(rate: float, steps: int, seed: int = 0) -> list[Row]:
    """The ratio of the second moments after a tenth, three tenths and all of the steps, for each range of waits."""
    course = COURSES["gpt"]
    problem, optimizer = Problem("gpt", seed), replace(course.optimizer, lr=rate)
    sizes = tuple(parameter.numel() for parameter in problem.parameters)
    cluster, theta = Cluster(TopKConfig(saving=50), WORKERS, sum(sizes), sizes=sizes), problem.start.clone()
    made = optimizer.make({"": theta})
    adapt_momentum(made, cluster)
    deliveries, ours, dense = (torch.zeros_like(theta) for _ in range(3))
    generator, rows = torch.Generator().manual_seed(seed), dict[float, Row]()
    for step in range(1, steps + 1):
        batches = torch.randint(len(problem.data.labels), (WORKERS, course.batch), generator=generator)
        gradients = problem.gradients(theta, batches, generator)
        theta.grad = cluster.step(gradients)[0]
        deliveries += theta.grad != 0
        optimizer.step(made, step - 1, steps)  # clips the gradient
        mean = torch.stack(gradients).mean(0)
        mean *= min(1.0, (optimizer.clip_norm or math.inf) / float(mean.norm()))
        for moment, gradient in ((ours, theta.grad), (dense, mean)):
            moment.lerp_(gradient**2, 1 - 0.999)
        if step in (steps // 10, 3 * steps // 10, steps):
            known = (dense > 0) & (deliveries > 0)
            waits, ratios = (step / deliveries)[known], (ours / dense)[known]
            for low, high in itertools.pairwise(EDGES):
                here = (low <= waits) & (waits < high)
                row = rows.setdefault(low, {"wait, steps": f"{low} to {high}" if high < math.inf else f"over {low}"})
                row[f"after {step:,} steps"] = float(ratios[here].median())
    return [*rows.values()]
