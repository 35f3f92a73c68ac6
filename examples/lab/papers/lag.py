"""How many steps compression costs: a run that ends at the loss of a shorter dense run lags behind it so many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from lab.commands import check_names
from lab.papers.at_size import COURSES, Setup, ends, run_key, setup, train_run
from lab.problems import Problem
from lab.report import Panel, Result, in_words, standard_error
from lab.training import Runs
from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.plan import Row

DENSE = (250, 350, 500, 700, 1000, 1400, 2000)
"""Lengths of the dense runs, in steps."""


def run(
    data: Path | None = None,
    models: Sequence[str] = ("gpt",),
    savings: Sequence[float] = (10, 25, 50, 100, 200),
    lengths: Sequence[int] = (500, 1000, 2000),
    rates: Sequence[str] = ("0.017", "0.01"),
    batch: int = 32,
    seeds: int = 2,
    minutes: float = math.inf,
    device: str = "cpu",
    out: Path = Path("reproduced"),
) -> Result:
    """Trains models at several lengths, densely and compressed; the learning rate falls by the length.

    Models of images need ``data``, a folder of images.
    """
    check_names("--models", models, COURSES)
    if data is None and any(COURSES[model].images for model in models):
        raise ValueError("this model learns images: pass their folder by --data.")
    found = Runs(out / "lag.jsonl")
    runs = [(steps, "dense") for steps in DENSE]
    runs += [(steps, f"saving {amount:g}") for steps in lengths for amount in savings]
    jobs = {
        run_key(each := setup(model, steps, batch), system, float(rate), seed): partial(
            train_run, each, system, float(rate), seed, data, device
        )
        for rate in rates
        for seed in range(seeds)
        for model in models
        for steps, system in runs
    }
    found.complete(jobs, "lag", minutes)
    result = Result(
        "lag",
        "how many steps compression costs",
        f"Simulated workers, {batch} examples each and step. A run of N steps that ends at the held-out loss of a "
        "dense run of M steps, at the same rate and with the same seed, lags N - M steps behind. Dense losses are "
        "interpolated over log M. No lag where dense training overfits: where fewer steps end lower.",
    )
    for model in models:
        panel = empty_panel(model, batch)
        for rate in map(float, rates):
            rows = table(found, model, batch, rate, lengths, savings, panel)
            result.tables[f"{model}, {batch} examples a worker, rate {rate:g}: lag in steps"] = rows
        result.panels.append(panel)
    return result


def empty_panel(model: str, batch: int) -> Panel:
    """A panel without curves."""
    panel = Panel(f"{model}, {batch} examples a worker", "entries for each that is sent", ylabel="lag, part of the run")
    panel.xlog, panel.level = True, 0.0
    return panel


def table(
    found: Runs, model: str, batch: int, rate: float, lengths: Sequence[int], savings: Sequence[float], panel: Panel
) -> list[Row]:
    """The lag by what is sent and length; adds a curve a length to the panel."""
    dense = {steps: ends(found, setup(model, steps, batch), "dense", "held").get(rate, {}) for steps in DENSE}
    density = {saving: density_of(setup(model, DENSE[0], batch), saving) for saving in savings}
    rows: list[Row] = [{"": f"saving {saving:g}", "density": density[saving]} for saving in savings]
    for steps in lengths:
        points = []
        for row, saving in zip(rows, savings, strict=True):
            ours = ends(found, setup(model, steps, batch), f"saving {saving:g}", "held").get(rate, {})
            lags = [
                steps - dense_steps(loss, curve)
                for seed, loss in ours.items()
                if len(curve := {length: by_seed[seed] for length, by_seed in dense.items() if seed in by_seed}) > 1
                and curve.get(steps, 0.0) <= min(loss for length, loss in curve.items() if length <= steps)
            ]
            row[f"{steps:,} steps"] = in_words(lags, "+.0f")
            if lags:
                points.append((1 / density[saving], fmean(lags) / steps, standard_error(lags) / steps))
        if points:
            x, y, errors = zip(*points, strict=True)
            label = f"{steps:,} steps, rate {rate:g}"
            panel.curves[label], panel.errors[label] = (x, y), errors
    return rows


def density_of(setup: Setup, saving: float) -> float:
    """The fraction of the entries that a worker sends."""
    sizes = [parameter.numel() for parameter in Problem(setup.model, 0).parameters]
    return plan_bucket(TopKConfig(saving=saving).resolve(setup.workers, 1), sizes, setup.workers).density()


def dense_steps(loss: float, dense: Mapping[int, float]) -> float:
    """Steps of the dense run that ends at a loss, by the losses of runs by length; beyond them, along the last two."""
    sections = [*pairwise(sorted(dense.items()))]
    (a, before), (b, after) = next((each for each in sections if loss >= each[1][1]), sections[-1])
    return a * (b / a) ** ((before - loss) / (before - after))
