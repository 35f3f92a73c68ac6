"""What delivered gradients do beside dense training's: Adam's second moment by wait; movement and age by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from lab.commands import check_names
from lab.papers.at_size import COURSES
from lab.problems import Problem
from lab.report import Panel, Result
from lab.training import LANGUAGE, Workers, run_all
from lightning_topk.config import TopKConfig
from lightning_topk.optim.momentum import adapt_momentum
from lightning_topk.plan import Row

MODEL = "tied gpt"
EDGES = (1, 4, 8, 16, 32, 64, math.inf)
"""Bounds of the ranges of waits, in steps."""


def run(optimizers: Sequence[str] = LANGUAGE, rates: Sequence[str] = ("0.003",), steps: int = 300) -> Result:
    """Trains the usual GPT with several second betas and learning rates."""
    check_names("--optimizers", optimizers, LANGUAGE)
    result = Result(
        "deliveries",
        "what a delivered gradient does beside dense training's",
        f"GPT of 0.35 million parameters, usual settings, 2 simulated workers, saving=50, {steps} steps, one seed. "
        "Dense: an optimizer of the same kind that steps with the clipped mean gradients of the same steps. Second "
        "moment: that by which an entry is divided when it is delivered, over dense's; the median of the entries that "
        "wait so long on average. Movement: how far a layer moves in the steps, over dense's. Age: steps since an "
        "entry's delivery before, weighted by its gradient.",
    )
    jobs = {(kind, rate): partial(measure, kind, float(rate), steps) for kind in optimizers for rate in rates}
    movement = Panel("movement over dense training's", "layer, in the order of parameters", ylabel="ratio", level=1.0)
    age = Panel("age of what is delivered", "layer, in the order of parameters", ylabel="steps")
    for (kind, rate), (waits, layers) in run_all(jobs, "deliveries").items():
        title = f"{kind}, learning rate {rate}"
        result.tables[f"{title}: second moment over dense training's"] = waits
        result.tables[f"{title}: layers"] = layers
        axes = {"xlog": True, "ylog": True, "level": 1.0, "ylabel": "second moment over dense training's"}
        curves = result.panel(title, "steps that an entry waits, at least", **axes)
        curves |= {head: (EDGES[:-1], [row[head] for row in waits]) for head in [*waits[0]][1:]}
        for part in ("first third", "last third"):
            places = [*range(len(layers))]
            movement.curves[f"{kind}, {part}"] = places, [row[f"movement, {part}"] for row in layers]
            age.curves[f"{kind}, {part}"] = places, [row[f"age, {part}"] for row in layers]
    result.panels += [movement, age]
    return result


def measure(kind: str, rate: float, steps: int, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """The rows by wait, after a tenth, three tenths and all of the steps; and by layer, for each third of them."""
    course, problem = COURSES[MODEL], Problem(MODEL, seed)
    optimizer, beta = replace(course.optimizer, lr=rate, kind=kind), float(kind.split()[1])
    names = [name for name, _ in problem.net.named_parameters()]
    sizes = tuple(parameter.numel() for parameter in problem.parameters)
    ranks = Workers(TopKConfig(saving=50), course.workers, sum(sizes), optimizer.clip_norm, sizes=sizes)
    theta, other = problem.start.clone(), problem.start.clone()
    parts, others = problem.weights(theta), problem.weights(other)
    made, dense = (optimizer.make(dict(zip(names, each, strict=True))) for each in (parts, others))
    adapt_momentum(made, ranks)
    deliveries, waited, square = (torch.zeros_like(theta) for _ in range(3))
    aged = torch.zeros(2, len(sizes))  # the gradients delivered in this third, weighted by their ages, and plainly
    begin, generator = [theta.clone(), other.clone()], torch.Generator().manual_seed(seed)
    waits, layers = dict[float, Row](), [Row(layer=name, entries=size) for name, size in zip(names, sizes, strict=True)]
    for step in range(1, steps + 1):
        batches = torch.randint(len(problem.data.labels), (course.workers, course.batch), generator=generator)
        gradients = problem.gradients(theta, batches, generator)
        mean = torch.stack(gradients).mean(0)
        delivered = ranks.step(gradients, 0, optimizer.rate(step - 1, steps))[0]
        here, size = delivered != 0, delivered.abs()
        aged += torch.stack([_sums(size * (waited + 1), sizes), _sums(size, sizes)])
        deliveries += here
        waited = torch.where(here, 0, waited + 1)
        for tensors, gradient, each in ((parts, delivered, made), (others, mean, dense)):
            for part, its in zip(tensors, problem.weights(gradient), strict=True):
                part.grad = its
            optimizer.step(each, step - 1, steps)  # clips the gradients in place
        square.lerp_(mean**2, 1 - beta)
        if step in (steps // 10, 3 * steps // 10, steps):
            ours = torch.cat([made[0].state[part]["exp_avg_sq"].flatten() for part in parts])
            known = here & (square > 0)
            average, ratios = (step / deliveries)[known], (ours / square)[known]
            for low, high in pairwise(EDGES):
                row = waits.setdefault(low, {"wait, steps": f"{low} to {high}" if high < math.inf else f"over {low}"})
                row[f"after {step:,} steps"] = float(ratios[(low <= average) & (average < high)].median())
        if third := {steps // 3: "first third", 2 * steps // 3: "second third", steps: "last third"}.get(step):
            moved = [
                _sums((now - before) ** 2, sizes).sqrt() for now, before in zip((theta, other), begin, strict=True)
            ]
            for row, ratio, years in zip(layers, moved[0] / moved[1], aged[0] / aged[1], strict=True):
                row |= {f"movement, {third}": float(ratio), f"age, {third}": float(years)}
            begin = [theta.clone(), other.clone()]
            aged.zero_()
    return [*waits.values()], layers


def _sums(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The sum ``[layers]`` of each layer of ``[d]``."""
    return torch.stack([part.sum() for part in x.split(sizes)])
