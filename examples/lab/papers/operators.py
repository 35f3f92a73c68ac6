"""Time of the selectors, number of selected entries, and the energy these keep (Shi et al. 2019, figures 4 and 5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.bench.select import best
from lab.report import Result
from lightning_topk.config import TopKConfig
from lightning_topk.core.layout import Layout, k_of
from lightning_topk.core.select import SELECTORS, Selector, Threshold
from lightning_topk.plan import Row
from lightning_topk.simulate import Cluster

SIZES = [10**5, 10**6, 10**7, 10**8]
RATIO = 0.001


def run() -> Result:
    """Times every selector, and measures how much energy it keeps of vectors from three distributions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    result = Result(
        "operators",
        "approximate selection is faster than exact top-k and keeps about as much",
        f"ratio {RATIO:g}; {where}; best of 3 after one; times over one torch.add(out=) pass of the same size.",
    )
    passes, quality = _times(result, device, where), _quality(result)
    for exact, words, published in (
        ("torch.topk of abs", "torch.topk", "by far, on GPUs"),
        ("topk", "our exact top-k", "claimed of exact top-k"),
    ):
        seen = passes[exact] / passes["gaussiank"]
        result.check(f"Gaussian_k is faster than {words}", published, f"{seen:.2f}x at 10^7", seen > 1)
    residuals = "and on gradient plus residual, where the reference sends all of them (ours: at most k)"
    for shape, statement, published in (
        ("normal", "Gaussian_k's threshold lets about k pass on normal vectors", "1.04x"),
        ("g + e", residuals, "about 1x; 10-50x seen"),
    ):
        seen, _ = quality[shape, "gaussiank"]
        result.check(statement, published, f"{seen:.2f}x", 2 / 3 <= seen <= 4 / 3)
    least = min(energy for (_, name), (_, energy) in quality.items() if name in ("gaussiank", "dgc", "trimmed"))
    statement = "approximate selectors keep the energy of exact top-k"
    result.check(statement, "about", f"at least {least:.2f} of it", least > 0.9)
    return result


def _times(result: Result, device: torch.device, where: str) -> dict[str, float]:
    """Adds the time of every selector; returns the times at 10^7 elements, in passes."""
    seconds = partial(best, device=device, repeats=3, budget=math.inf)
    rows = result.tables["Time"] = []
    ways: dict[str, Callable[[Tensor, int], Any]] = {name: partial(_select, make) for name, make in SELECTORS.items()}
    ways["torch.topk of abs"] = lambda u, k: u.abs().topk(k)
    for numel in SIZES:
        u = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
        unit = seconds(partial(torch.add, u, u, out=torch.empty_like(u)))
        for name, work in ways.items():
            took = seconds(partial(work, u, k_of(numel, RATIO)))
            rows.append({"d": f"{numel:,}", "selector": name, "ms": 1e3 * took, "passes": took / unit})
    title = f"a normal vector of d entries ({where})"
    curves = result.panel(title, "d", xlog=True, ylog=True, ylabel="seconds")
    curves |= {name: (SIZES, [row["ms"] / 1e3 for row in rows if row["selector"] == name]) for name in SELECTORS}
    return {row["selector"]: row["passes"] for row in rows if row["d"] == f"{10**7:,}"}


def _select(make: Callable[[], Selector], u: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return make().select(u, Layout(len(u)), k)  # a new selector, since randk caches its positions


def _quality(result: Result) -> dict[tuple[str, str], tuple[float, float]]:
    """Adds the quality of every selector; returns entries over its threshold / k, and energy / exact."""
    quality: dict[tuple[str, str], tuple[float, float]] = {}
    rows = result.tables["Quality, d = 1,000,000"] = []
    torch.manual_seed(0)
    for shape, u in {
        "normal": torch.randn(10**6, generator=torch.Generator().manual_seed(0)),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((10**6,)),
        "g + e": with_residual(10**6),
    }.items():
        k = k_of(len(u), RATIO)
        exact = u.abs().topk(k).values.square().sum()
        for name, make in SELECTORS.items():
            _, value = _select(make, u, k)
            over, energy = quality[shape, name] = (passing(make(), u, k) / k, float(value.square().sum() / exact))
            row: Row = {"vector": shape, "selector": name, "over the threshold / k": over}
            rows.append({**row, "sent / k": int(value.count_nonzero()) / k, "energy / exact": energy})
    return quality


def passing(selector: Selector, u: Tensor, k: int) -> int:
    """Number of entries that reach a selector's threshold, before the cap; k for selectors without one."""
    if not isinstance(selector, Threshold):
        return k
    return int((u.abs() >= selector.threshold(u.view(1, -1), k)).sum())


def with_residual(numel: int) -> Tensor:
    """Gradient plus residual after 100 steps of error feedback on normal gradients of uneven scale."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(numel, generator=generator) ** 4
    cluster = Cluster(TopKConfig(ratio=RATIO, wire="bf16"), 1, numel)
    for _ in range(100):
        cluster.step([torch.randn(numel, generator=generator) * scale])
    residual = cluster.endpoints[0].uplink.memory.tensors()["residual"]
    return residual + torch.randn(numel, generator=generator) * scale
