"""Shape of gradients, alone and with the residual, and how much of them top-k loses (Shi et al. 2019).

Every vector obeys ‖u - TopK(u)‖² <= (1 - k/d) ‖u‖². Theorem 1 proves (1 - k/d)² for vectors whose sorted, squared,
normalised magnitudes lie under the line from (0, 1) to (1, 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.report import Curve, Result
from lab.training import Optimizer, train
from lightning_topk.config import TopKConfig
from lightning_topk.core.layout import Layout, k_of
from lightning_topk.core.select import TopK
from lightning_topk.simulate import Cluster

STEPS = (10, 50, 150)


def distribution() -> Result:
    """Measures the shape of gradients, alone and with the residual, while three models train."""
    result = Result(
        "distribution",
        "gradients, and gradients plus residuals, are bell-shaped around zero, with π² under the line 1 - i/d",
        f"Digits, 4 workers, TopK at 0.01 by all-gather, SGD lr 0.1, batch 10, worker 0 at steps {STEPS}.",
    )
    rows = result.tables["Shape of the vectors (a normal one has kurtosis 3)"] = []
    config = TopKConfig(ratio=0.01, bidirectional=False, topology="allgather", wire="bf16")
    for model in ("mlp", "cnn", "lstm"):
        pairs = watched(model, config, 4, STEPS)
        for name, side in (("g", 0), ("g + e", 1)):
            curves = result.panel(f"{model}: {name}", "value / std", ylog=True, ylabel="probability density")
            for step, pair in zip(STEPS, pairs, strict=True):
                u = pair[side].double()
                curves[f"step {step}"] = histogram(u)
                rows.append({"model": model, "vector": name, "step": step, **statistics(u)})
    below, convex, peaked = (min(row[key] for row in rows) for key in ("π² below the line", "π² convex", "kurtosis"))
    both, g = (
        sorted(row["kurtosis"] for row in rows if row["vector"] == name)[len(rows) // 4] for name in ("g + e", "g")
    )
    check, normal = result.check, "Gaussian_k assumes it"
    statement = "π² lies below 1 - i/d, the premise of theorem 1"
    check(statement, "on all models", f"at least {below:.2%} of it", below > 0.999)
    check("tails no lighter than a normal's", "bell-shaped", f"least kurtosis {peaked:.1f}", peaked > 3)
    check("π² is convex", "on all models", f"at least {convex:.0%} of it", convex > 0.99)
    statement = "with residuals closer to normal (median kurtosis)"
    check(statement, normal, f"{both:.0f} against {g:.0f} without", both < g)
    check("so a normal threshold is right for g + e", normal, f"kurtosis {both:.0f}, not 3", both < 4)
    return result


def watched(model: str, config: TopKConfig, workers: int, steps: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Worker 0's gradient ``[d]``, and gradient plus residual, at some steps of a run that ends with the last one."""

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
    """Kurtosis; fraction of π² under the line; fraction of it that is convex.

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


RATIOS = [0.001, 0.01, 0.1, 0.5]


def bound() -> Result:
    """Measures how much top-k loses of drawn vectors, and of gradients plus residuals, against two bounds."""
    numel = 1_000_000
    result = Result(
        "bound",
        "top-k loses at most (1 - k/d)² of a bell-shaped vector, and 1 - k/d of any",
        f"Drawn vectors of d = {numel:,} (seed 0); g + e of worker 0 of 8 in a unidirectional run on digits, ratio "
        "0.01, steps 20 to 299.",
    )
    vectors, config, steps = drawn(numel), TopKConfig(ratio=0.01, bidirectional=False, wire="bf16"), (20, 100, 299)
    for model in ("mlp", "cnn"):
        seen = zip(steps, watched(model, config, 8, steps), strict=True)
        vectors |= {f"{model}, step {step}": u for step, (_, u) in seen}
    rows = result.tables["Relative error by ratio"] = []
    sharp, general = {}, {}
    panels = [
        result.panel(title, "k / d", xlog=True, ylabel="‖u - TopK(u)‖² / ‖u‖²")
        for title in ("drawn vectors", "g + e in training")
    ]

    def enter(name: str, errors: list[float], *where: dict[str, Curve]) -> None:
        rows.append({"vector": name, **{f"{r:g}": f"{e:.4f}" for r, e in zip(RATIOS, errors, strict=True)}})
        for curves in where:
            curves[name] = (RATIOS, errors)

    for name, u in vectors.items():
        errors = [error(u, ratio) for ratio in RATIOS]
        kept = [k_of(len(u), ratio) / len(u) for ratio in RATIOS]
        sharp[name], general[name] = (
            all(e <= (1 - k) ** power * (1 + 1e-6) for e, k in zip(errors, kept, strict=True)) for power in (2, 1)
        )
        enter(name, errors, panels[", step" in name])
    for label, power in (("(1 - k/d)²", 2), ("1 - k/d", 1)):
        enter(label, [(1 - ratio) ** power for ratio in RATIOS], *panels)
    misses = [name for name in vectors if name != "±1" and not sharp[name]]
    signs, normal, everywhere = error(vectors["±1"], 0.1), error(vectors["normal"], 0.001), all(general.values())
    result.check("1 - k/d holds for all", "theorem", "all" if everywhere else "no", everywhere)
    statement, missed = "(1 - k/d)² holds for bell-shaped vectors and for real ones", ", ".join(misses) or "none"
    result.check(statement, "theorem 1, and all their models", f"misses: {missed}", not misses)
    result.check("normal at 0.001", ".9872 against .9980", f"{normal:.4f} against {0.999**2:.4f}", normal < 0.999**2)
    statement = "it fails for ±1 vectors, which lose 1 - k/d exactly"
    result.check(statement, ".9 at 0.1", f"{signs:.4f}", abs(signs - 0.9) < 1e-6)
    return result


def drawn(numel: int) -> dict[str, Tensor]:
    """Vectors ``[numel]`` float32 of the distributions, seed 0."""
    torch.manual_seed(0)
    return {
        "normal": torch.randn(numel),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((numel,)),
        "t, 4 degrees": torch.distributions.StudentT(4.0).sample((numel,)),
        "t, 2 degrees": torch.distributions.StudentT(2.0).sample((numel,)),
        "Cauchy": torch.distributions.Cauchy(0.0, 1.0).sample((numel,)),
        "uniform": torch.distributions.Uniform(-1.0, 1.0).sample((numel,)),
        "±1": torch.randn(numel).sign(),
    }


def error(u: Tensor, ratio: float) -> float:
    """‖u - TopK(u)‖² / ‖u‖², with the library's selector."""
    u = u.double()
    _, value = TopK().select(u, Layout(len(u)), k_of(len(u), ratio))
    return float(1 - value.square().sum() / u.square().sum())
