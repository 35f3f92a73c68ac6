"""What gradients look like, alone and with the residual (Shi et al. 2019, figures 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.lab.report import Panel, Result, Row
from lightning_topk.lab.training import Optimizer, train
from lightning_topk.simulate import Cluster

STEPS = (10, 50, 150)


def run() -> Result:
    """Measures the shape of gradients, alone and with the residual, while three models train."""
    result = Result(
        "distribution",
        "gradients, and gradients plus residuals, are bell-shaped around zero, with π² under the line 1 - i/d",
        f"Digits, 4 workers, TopK at 0.01 by all-gather, SGD lr 0.1, batch 10, worker 0 at steps {STEPS}.",
        against="published",
    )
    rows: list[Row] = []
    config = TopKConfig(ratio=0.01, bidirectional=False, topology="allgather", wire="bf16")
    for model in ("mlp", "cnn", "lstm"):
        pairs = watched(model, config, 4, STEPS)
        for name, side in (("g", 0), ("g + e", 1)):
            panel = Panel(f"{model}: {name}", "value / std", ylog=True, ylabel="probability density")
            for step, pair in zip(STEPS, pairs, strict=True):
                u = pair[side].double()
                panel.curves[f"step {step}"] = histogram(u)
                rows.append({"model": model, "vector": name, "step": step, **statistics(u)})
            result.panels.append(panel)
    result.tables["Shape of the vectors (a normal one has kurtosis 3)"] = rows
    below = min(float(row["π² below the line"]) for row in rows)
    convex = min(float(row["π² convex"]) for row in rows)
    peaked = min(float(row["kurtosis"]) for row in rows)
    tails = {
        name: sorted(float(row["kurtosis"]) for row in rows if row["vector"] == name)[len(rows) // 4]
        for name in ("g", "g + e")
    }
    check, normal = result.check, "Gaussian_k assumes it"
    statement = "π² lies below 1 - i/d, the premise of theorem 1"
    check(statement, "on all models", f"at least {below:.2%} of it", below > 0.999)
    check("tails no lighter than a normal's", "bell-shaped", f"least kurtosis {peaked:.1f}", peaked > 3)
    check("π² is convex", "on all models", f"at least {convex:.0%} of it", convex > 0.99)
    g, both = tails["g"], tails["g + e"]
    statement = "with residuals closer to normal (median kurtosis)"
    check(statement, normal, f"{both:.0f} against {g:.0f} without", both < g)
    check("so a normal threshold is right for g + e", normal, f"kurtosis {both:.0f}, not 3", both < 4)
    return result


def watched(model: str, config: TopKConfig, workers: int, steps: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Worker 0's gradient ``[d]``, and gradient plus residual, at some steps of a run up to the last of them."""

    def see(cluster: Cluster, gradients: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        if cluster.steps not in steps:
            return None
        return gradients[0], gradients[0] + cluster.endpoints[0].uplink.memory.tensors()["residual"]

    seen = train(model, config, workers, steps=max(steps) + 1, optimizer=Optimizer(0.1), seed=0, observe=see).seen
    return [pair for pair in seen if pair is not None]


def histogram(u: Tensor) -> tuple[list[float], list[float]]:
    """Centres of the bins that are not empty, in standard deviations, and the density there."""
    scaled = (u - u.mean()) / u.std()
    density, edges = torch.histogram(scaled, bins=61, range=(-6.0, 6.0), density=True)
    filled = density > 0
    return ((edges[1:] + edges[:-1]) / 2)[filled].tolist(), density[filled].tolist()


def statistics(u: Tensor) -> dict[str, float]:
    """Kurtosis; how much of π² lies under the line; how much of it is convex.

    π is |u| in descending order over its largest entry. The line runs from (0, 1) to (1, 0).
    """
    centred = u - u.mean()
    kurtosis = centred.pow(4).mean() / centred.square().mean().square()
    squares = (u.abs().sort(descending=True).values / u.abs().max()).square()
    line = 1 - torch.arange(len(u), dtype=u.dtype) / len(u)
    coarse = squares[:: max(1, len(u) // 50)]
    convex = (coarse[2:] - 2 * coarse[1:-1] + coarse[:-2]) >= -1e-6
    return {
        "kurtosis": float(kurtosis),
        "π² below the line": float((squares <= line + 1e-9).double().mean()),
        "π² convex": float(convex.double().mean()),
    }
