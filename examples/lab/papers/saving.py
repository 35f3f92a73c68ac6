"""Traffic as the number of workers grows: the union of the workers' selections against one selection.

Unidirectional TopK sends down all that any worker sent up. Zou 2022 finds that union "almost linear" in the number of
workers N; bidirectional TopK sends one selection down, whatever N is.
"""

from __future__ import annotations

import math
from functools import partial
from statistics import linear_regression, mean
from typing import Any

from lab.problems import Problem
from lab.report import Result
from lab.training import Optimizer, run_all, train
from lightning_topk.config import TopKConfig
from lightning_topk.core.layout import k_of
from lightning_topk.volume import volume

COUNTS = [2, 4, 8, 10, 16, 20, 32, 50, 64, 100, 128, 256]
RUNS = {0.01: ("mlp", COUNTS), 0.001: ("wide mlp", COUNTS[:-1])}
"""The model and the numbers of workers, by ratio."""
PUBLISHED = {10: (9.8, 9.9), 20: (19.2, 19.7), 50: (45.0, 47.0), 100: (80.0, 92.0)}
"""The thesis's union over k at ratio 0.001, lowest and highest of its models, by N."""


def run() -> Result:
    """Counts the union of the workers' selections, and bytes, as the number of workers grows."""
    result = Result(
        "saving",
        "the downlink of unidirectional TopK grows almost linearly with the workers, bidirectional's not at all",
        "Digits, 10 examples a worker, SGD lr 0.1, IID data, single server; bytes of the bf16 wire; union of the "
        "selections as delivered, mean of the last 20 of 60 steps. Where k < N, every shard still sends one entry. The "
        "union cannot pass d / k.",
    )
    jobs = {(r, n): partial(_union, model, r, n) for r, (model, counts) in RUNS.items() for n in reversed(counts)}
    sizes = run_all(jobs, "saving")
    labels = {"xlog": True, "ylog": True, "ylabel": "union of selections / k"}
    unions, curves = {}, result.panel("what one server delivers", "workers", **labels)
    for ratio, (model, counts) in RUNS.items():
        numel = len(Problem(model, 0).start)
        k = k_of(numel, ratio)
        found = unions[ratio] = {n: sizes[ratio, n] / k for n in counts}
        title = f"{model}, d = {numel:,}, k = {k} (ratio {ratio:g}); bytes of the busiest rank in a step"
        result.tables[title] = [{"N": n, "union / k": found[n], **_bytes(numel, ratio, n)} for n in counts]
        curves[f"ratio {ratio:g}"] = (counts, list(found.values()))
    curves["N"] = (COUNTS, COUNTS)
    for ratio, found in unions.items():
        few, many = _slope(found, up_to=16), _slope(found, start=16)
        claim = f"almost linear up to 16 workers (ratio {ratio:g}; d / k = {1 / ratio:.0f})"
        result.check(claim, "N^1", f"N^{few:.2f}", few > 0.85)
        if max(found) < 0.5 / ratio:  # far enough from the limit d / k
            claim = f"and from 16 to {max(found)} (ratio {ratio:g})"
            result.check(claim, "N^1", f"N^{many:.2f}", many > 0.85)
    for n, (low, high) in PUBLISHED.items():
        seen = unions[0.001][n]
        claim = f"union / k at N = {n}, ratio 0.001, within 10 percent"
        result.check(claim, f"{low:g}-{high:g}", f"{seen:.1f}", 0.9 * low <= seen <= 1.1 * high)
    few, many = (_sent(25_000_000, n, ratio=0.001) for n in (16, 256))
    claim = "sharded bidirectional volume does not grow from 16 to 256 workers (predicted, d = 25,000,000, ratio 0.001)"
    result.check(claim, "", f"{many / few:.2f}x", many / few < 1.1)
    return result


def _union(model: str, ratio: float, workers: int) -> float:
    """Mean number of entries in the union of the workers' selections."""
    # Exact values, and a server without a residual: it then delivers the union and nothing else.
    one_way: dict[str, Any] = {"bidirectional": False, "topology": "single_server"}
    config = TopKConfig(ratio=ratio, wire="fp32", error_feedback="worker", **one_way)
    return mean(train(model, config, workers, steps=60, optimizer=Optimizer(0.1), seed=0).union[-20:])


def _sent(numel: int, workers: int, **settings: Any) -> int:
    """Predicted bytes of rank 0, the busiest rank with a single server."""
    return volume(TopKConfig(wire="bf16", **settings), [numel], workers).sent


def _bytes(numel: int, ratio: float, workers: int) -> dict[str, str]:
    """Table cells with the bytes by topology."""
    cells = {}
    for topology in ("single_server", "sharded"):
        for two_way in (False, True):
            sent = _sent(numel, workers, ratio=ratio, bidirectional=two_way, topology=topology)
            cells[f"{topology.replace('_', ' ')}, {'bi' if two_way else 'uni'}"] = f"{sent:,}"
    return cells | {"dense": f"{volume(TopKConfig(), [numel], workers).dense:,}"}


def _slope(found: dict[int, float], start: int = 0, up_to: float = math.inf) -> float:
    """Least-squares slope in log-log coordinates, over a range of the keys."""
    points = [(math.log(n), math.log(value)) for n, value in found.items() if start <= n <= up_to]
    return linear_regression(*zip(*points, strict=True)).slope
