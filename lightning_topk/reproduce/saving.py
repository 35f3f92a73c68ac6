"""What travels, as the number of workers grows: the union of the workers' selections against one selection.

Unidirectional TopK sends down all that any worker sent up. Zou 2022 finds that union "almost linear" in the number of
workers N; bidirectional TopK sends one selection down, whatever N is.
"""

from __future__ import annotations

import math
from statistics import linear_regression
from typing import Any

from lightning_topk.config import TopKConfig
from lightning_topk.plan import volume
from lightning_topk.plots import Panel
from lightning_topk.reproduce.problem import Problem, train
from lightning_topk.reproduce.result import Check, Result

COUNTS = [2, 4, 8, 16, 32, 64, 128, 256]


def run() -> Result:
    """Trains with error feedback at each N and counts."""
    result = Result(
        "saving",
        "the downlink of unidirectional TopK grows almost linearly with the number of workers, bidirectional's not at all",
        "Digits, 10 examples a worker, SGD lr 0.1, IID data, single server; bytes of the bf16 wire; union of the selections as delivered, "
        "mean of the last 20 of 60 steps. Where k < N, every shard still sends one entry.",
    )
    panel = Panel("union of selections / k", "workers", xlog=True, ylog=True)
    slopes: dict[float, tuple[float, float]] = {}
    for model, ratio, counts in (("mlp", 0.01, COUNTS), ("wide mlp", 0.001, COUNTS[:6])):
        numel = len(Problem(model, 0).start)
        k = TopKConfig(ratio=ratio).codecs(numel, 1)[1].kept
        unions, rows = [], []
        for workers in counts:
            unions.append(_union(model, ratio, workers) / k)
            rows.append({"N": workers, "union / k": unions[-1], **_bytes(numel, ratio, workers)})
        result.tables[f"{model}, d = {numel:,}, k = {k} (ratio {ratio:g}); bytes of the busiest rank in a step"] = rows
        panel.curves[f"ratio {ratio:g}"] = (counts, unions)
        slopes[ratio] = (_slope(counts[:4], unions[:4]), _slope(counts[3:], unions[3:]))
    panel.curves["N"] = (COUNTS, COUNTS)
    result.panels.append(panel)
    for ratio, (few, many) in slopes.items():
        result.checks += [
            Check(f"almost linear up to 16 workers (ratio {ratio:g})", "N^1", f"N^{few:.2f}", few > 0.85),
            Check(
                f"and beyond (ratio {ratio:g}, where d/k = {1 / ratio:.0f} is the limit)",
                "N^1",
                f"N^{many:.2f}",
                many > 0.85,
            ),
        ]
    sixteen, most = (volume(TopKConfig(), [25_000_000], n) for n in (16, 256))
    growth = (most.uplink + most.downlink) / (sixteen.uplink + sixteen.downlink)
    claim = (
        "sharded bidirectional volume does not grow from 16 to 256 workers (predicted for d = 25,000,000, ratio 0.001)"
    )
    result.checks.append(Check(claim, "-", f"{growth:.2f}x", growth < 1.1))
    return result


def _union(model: str, ratio: float, workers: int) -> float:
    """Entries of the union of the workers' selections."""
    # Exact values, and a server that keeps nothing: what it delivers is then the union and nothing else.
    config = TopKConfig(
        ratio=ratio, bidirectional=False, topology="single_server", wire="fp32", error_feedback="worker"
    )
    last = train(model, config, workers, steps=60, lr=0.1, seed=0).union[-20:]
    return sum(last) / len(last)


def _bytes(numel: int, ratio: float, workers: int) -> dict[str, Any]:
    """Predicted bytes of rank 0: with one server it is the busiest."""
    cells = {}
    for topology in ("single_server", "sharded"):
        for bidirectional in (False, True):
            config = TopKConfig(ratio=ratio, bidirectional=bidirectional, topology=topology)
            sent = volume(config, [numel], workers)
            name = f"{topology.replace('_', ' ')}, {'bi' if bidirectional else 'uni'}"
            cells[name] = f"{sent.uplink + sent.downlink:,}"
    return cells | {"dense": f"{volume(TopKConfig(), [numel], workers).dense:,}"}


def _slope(x: list[int], y: list[float]) -> float:
    """Least-squares slope in log-log coordinates."""
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    slope, _ = linear_regression(a, b)
    return slope
