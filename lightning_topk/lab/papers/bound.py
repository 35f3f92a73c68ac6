"""How much top-k loses: measured against 1 - k/d and (1 - k/d)².

Every vector obeys ‖u - TopK(u)‖² <= (1 - k/d) ‖u‖². Shi et al. 2019 (theorem 1) prove (1 - k/d)² for vectors whose
sorted, squared, normalised magnitudes lie under the line from (0, 1) to (1, 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core.layout import Layout, kept_count
from lightning_topk.core.select import TopK
from lightning_topk.lab.papers.distribution import watched
from lightning_topk.lab.report import Panel, Result

RATIOS = [0.001, 0.01, 0.1, 0.5]


def run() -> Result:
    """Measures how much top-k loses of drawn vectors, and of gradients plus residuals, against two bounds."""
    numel = 1_000_000
    result = Result(
        "bound",
        "top-k loses at most (1 - k/d)² of a bell-shaped vector, and 1 - k/d of any",
        f"Drawn vectors of d = {numel:,} (seed 0); g + e of worker 0 of 8 in a unidirectional run on digits, ratio "
        "0.01, steps 20 to 299.",
        against="published",
    )
    vectors = {**drawn(numel), **trained()}
    panels = [
        Panel(title, "k / d", xlog=True, ylabel="‖u - TopK(u)‖² / ‖u‖²")
        for title in ("drawn vectors", "g + e in training")
    ]
    rows, sharp, general = [], {}, {}
    for name, u in vectors.items():
        errors = [error(u, ratio) for ratio in RATIOS]
        kept = [kept_count(len(u), ratio) / len(u) for ratio in RATIOS]
        sharp[name] = all(e <= (1 - k) ** 2 * (1 + 1e-6) for e, k in zip(errors, kept, strict=True))
        general[name] = all(e <= (1 - k) * (1 + 1e-6) for e, k in zip(errors, kept, strict=True))
        rows.append({"vector": name, **{f"{r:g}": f"{e:.4f}" for r, e in zip(RATIOS, errors, strict=True)}})
        panels[", step" in name].curves[name] = (RATIOS, errors)
    for label, power in (("(1 - k/d)²", 2), ("1 - k/d", 1)):
        limits = [(1 - ratio) ** power for ratio in RATIOS]
        rows.append({"vector": label, **{f"{r:g}": f"{limit:.4f}" for r, limit in zip(RATIOS, limits, strict=True)}})
        for panel in panels:
            panel.curves[label] = (RATIOS, limits)
    result.tables["Relative error by ratio"] = rows
    result.panels += panels
    bells = [name for name in vectors if name != "±1"]
    misses = [name for name in bells if not sharp[name]]
    signs = error(vectors["±1"], 0.1)
    normal = error(vectors["normal"], 0.001)
    everywhere = all(general.values())
    result.check("1 - k/d holds for all", "theorem", "all" if everywhere else "no", everywhere)
    result.check(
        "(1 - k/d)² holds for bell-shaped vectors and for real ones",
        "theorem 1, and all their models",
        f"misses: {', '.join(misses) or 'none'}",
        not misses,
    )
    result.check("normal at 0.001", ".9872 against .9980", f"{normal:.4f} against {0.999**2:.4f}", normal < 0.999**2)
    statement = "it fails for ±1 vectors, which lose 1 - k/d exactly"
    result.check(statement, ".9 at 0.1", f"{signs:.4f}", abs(signs - 0.9) < 1e-6)
    return result


def drawn(numel: int) -> dict[str, Tensor]:
    """Vectors ``[numel]`` float32 of the distributions, seed 0."""
    torch.manual_seed(0)
    uniform = torch.distributions.Uniform(-1.0, 1.0)
    return {
        "normal": torch.randn(numel),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((numel,)),
        "t, 4 degrees": torch.distributions.StudentT(4.0).sample((numel,)),
        "t, 2 degrees": torch.distributions.StudentT(2.0).sample((numel,)),
        "Cauchy": torch.distributions.Cauchy(0.0, 1.0).sample((numel,)),
        "uniform": uniform.sample((numel,)),
        "±1": torch.randn(numel).sign(),
    }


def trained() -> dict[str, Tensor]:
    """Gradient plus residual of worker 0, ``[d]`` float32, in training runs."""
    config, steps = TopKConfig(ratio=0.01, bidirectional=False, wire="bf16"), (20, 100, 299)
    return {
        f"{model}, step {step}": u
        for model in ("mlp", "cnn")
        for step, (_, u) in zip(steps, watched(model, config, 8, steps), strict=True)
    }


def error(u: Tensor, ratio: float) -> float:
    """‖u - TopK(u)‖² / ‖u‖², with the library's selector."""
    u = u.double()
    _, value, _ = TopK().select(u, Layout(len(u)), kept_count(len(u), ratio))
    return float(1 - value.square().sum() / u.square().sum())
