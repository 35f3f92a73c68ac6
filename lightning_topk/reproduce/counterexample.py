"""Where the second compression helps, and where it hurts: quadratics small enough to understand.

Zou 2022 shows by example that compressing the downlink as well can *improve* convergence. Two constructions where it
does, and a control where it does not. All run on the simulator, through the exchange that a cluster runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.plots import Panel
from lightning_topk.reproduce.result import Check, Result
from lightning_topk.simulate import Cluster

Gradients = Callable[[Tensor], list[Tensor]]
"""The gradients of all workers at a point."""

SYSTEMS: dict[str, dict[str, Any]] = {
    "uni": {"bidirectional": False},
    "bi": {},
    "bi without server memory": {"error_feedback": "worker"},
    "downlink only": {"ratio": 1.0},
}
"""Settings of the systems; k = 1 in each direction unless they say otherwise."""


def descend(
    gradients: Gradients, gap: Callable[[Tensor], Tensor], start: Tensor, system: str, lr: float, steps: int
) -> Tensor:
    """Gradient descent in float64, one entry kept in each compressed direction.

    Args:
        gradients: The workers' gradients at a point ``[d]``.
        gap: The common objective at a point, minus its least value.
        start: ``[d]``.
        system: A key of :data:`SYSTEMS`.
        lr: Learning rate.
        steps: Steps.

    Returns:
        ``[steps]``, the gap after each step.
    """
    x, numel = start.double(), len(start)
    settings: dict[str, Any] = {"ratio": 1 / numel, "wire": "fp32", "topology": "single_server"} | SYSTEMS[system]
    if settings.get("bidirectional", True):
        settings["server_ratio"] = 1 / numel
    cluster = Cluster(TopKConfig(**settings), len(gradients(x)), numel, torch.float64)
    gaps = torch.empty(steps, dtype=torch.float64)
    for step in range(steps):
        x = x - lr * cluster.step(gradients(x))[0]
        gaps[step] = gap(x)
    return gaps


def opposites(x: Tensor) -> list[Tensor]:
    """Gradients of f± = (0.1 x1² + x2²) / 2 ∓ (0.3 x1 + x2): opposite pulls, one coordinate steep and one flat."""
    curvature, pull = torch.tensor([0.1, 1.0], dtype=x.dtype), torch.tensor([0.3, 1.0], dtype=x.dtype)
    return [curvature * x - pull, curvature * x + pull]


def opposites_gap(x: Tensor) -> Tensor:
    """The mean of f+ and f-: least, and zero, at the origin."""
    return (0.1 * x[0] ** 2 + x[1] ** 2) / 2


def toy(x: Tensor) -> list[Tensor]:
    """Gradients of the thesis's f_i = ‖x - a_i 1‖² / 2, a = (1, 5, 10)."""
    return [x - a for a in (1.0, 5.0, 10.0)]


def toy_gap(x: Tensor) -> Tensor:
    """The mean of the f_i minus its least value 677.78, which is ‖x - mean(a) 1‖² / 2."""
    return (x - 16 / 3).square().sum() / 2


def random_quadratics(seed: int) -> tuple[Gradients, Callable[[Tensor], Tensor]]:
    """Ten workers with f_i = ‖x - c_i‖² / 2 in 100 dimensions, c_i normal: nothing is steep or flat."""
    centres = torch.randn(10, 100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    middle = centres.mean(0)
    return lambda x: [x - centre for centre in centres], lambda x: (x - middle).square().sum() / 2


def run() -> Result:
    """Runs the two constructions and the control."""
    result = Result(
        "counterexample",
        "compressing the downlink too can improve convergence",
        "Error feedback on both sides unless a column says otherwise, k = 1 entry each way, exact gradients, fp32 wire, "
        "single server, simulator.",
    )
    ratios = _opposites(result)
    toys = _toy(result)
    control = _control(result)
    uni, bi, forgetful, down = (toys[0.01, system] for system in SYSTEMS)
    others = [lr for lr in ratios if lr != 0.1]
    result.checks = [
        Check("bi beats uni on opposite workers at lr 0.1", "about 20x", f"{ratios[0.1]:.1f}x", ratios[0.1] > 10),
        Check(
            "bi beats uni there at other learning rates",
            "19x at .01, 4.5x at .03, 13.1x at .3",
            ", ".join(f"{ratios[lr]:.1f}x at {lr:g}" for lr in others),
            all(ratios[lr] > 1 for lr in others),
        ),
        Check(
            "bi beats uni on the thesis's toy at lr 0.01", "16.3 against 22.6", f"{bi:.1f} against {uni:.1f}", bi < uni
        ),
        Check("compressing the downlink only is nearly exact there", "5e-7", f"{down:.1g}", down < 1e-3),
        Check("the server's memory is needed there", "60 without", f"{forgetful:.0f} without", forgetful > bi),
        Check(
            "bi loses to uni on the toy at lr 0.03",
            "worse",
            f"{toys[0.03, 'bi']:.1f} against {toys[0.03, 'uni']:.1f}",
            toys[0.03, "bi"] > toys[0.03, "uni"],
        ),
        Check("bi loses to uni on the control", "about 2x the gap", f"{control:.1f}x the gap", control > 1),
    ]
    return result


def _opposites(result: Result) -> dict[float, float]:
    """Two workers that pull opposite ways; returns uni's gap over bi's by learning rate."""
    starts = [torch.tensor(start) for start in ((1.0, -2.0), (2.5, 1.0), (-1.3, 0.7))]
    panel = Panel("opposite workers, lr 0.1: the last 100 steps", "step", ylog=True)
    ratios, rows = {}, []
    for lr, steps, used in ((0.01, 6000, 1), (0.03, 3000, 1), (0.1, 2000, 3), (0.3, 2000, 1)):
        gaps = {}
        for system in ("uni", "bi"):
            runs = [descend(opposites, opposites_gap, start, system, lr, steps)[-500:] for start in starts[:used]]
            gaps[system] = float(torch.stack(runs).mean())
            if lr == 0.1:
                panel.curves[system] = (list(range(steps - 100, steps)), runs[0][-100:].clamp(min=1e-12).tolist())
        ratios[lr] = gaps["uni"] / gaps["bi"]
        rows.append({"learning rate": lr, "steps": steps, "starts": used, **gaps, "uni / bi": ratios[lr]})
    result.tables["Opposite workers (two workers, two coordinates): mean gap of the last 500 steps"] = list(rows)
    result.panels.append(panel)
    return ratios


def _toy(result: Result) -> dict[tuple[float, str], float]:
    """The thesis's toy; returns the gap by learning rate and system."""
    panel = Panel("the thesis's toy, lr 0.01, one seed", "step", ylog=True)
    gaps: dict[tuple[float, str], float] = {}
    for lr, seeds in ((0.01, 3), (0.03, 3)):
        steps = 1000
        for system in SYSTEMS:
            last = []
            for seed in range(seeds):
                start = 20 + torch.randn(100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                path = descend(toy, toy_gap, start, system, lr, steps)
                last.append(float(path[-300:].mean()))
            gaps[lr, system] = sum(last) / seeds
            if lr == 0.01:
                panel.curves[system] = (list(range(0, steps, 5)), path[::5].clamp(min=1e-8).tolist())
    result.tables["The thesis's toy (3 workers, d = 100): mean gap of the last 300 steps"] = [
        {"learning rate": lr} | {system: gaps[lr, system] for system in SYSTEMS} for lr in (0.01, 0.03)
    ]
    result.panels.append(panel)
    return gaps


def _control(result: Result) -> float:
    """Quadratics without steep or flat directions; returns bi's gap over uni's."""
    gaps = {}
    for system in ("uni", "bi"):
        last = []
        for seed in range(2):
            gradients, gap = random_quadratics(seed)
            last.append(float(descend(gradients, gap, torch.zeros(100), system, 0.01, 2000)[-300:].mean()))
        gaps[system] = sum(last) / len(last)
    ratio = gaps["bi"] / gaps["uni"]
    title = "Control: isotropic random quadratics (10 workers, d = 100, lr 0.01), last 300 of 2,000 steps, 2 seeds"
    result.tables[title] = [gaps | {"bi / uni": ratio}]
    return ratio
