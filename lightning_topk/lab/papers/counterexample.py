"""Where the second compression helps, and where it hurts: quadratics small enough to understand.

Zou 2022 shows by example that compressing the downlink as well can *improve* convergence. Two constructions where it
does, and a control where it does not. All run on the simulator, through the exchange that a cluster runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.lab.parallel import run_all
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Check, Result
from lightning_topk.simulate import Cluster

SYSTEMS: dict[str, dict[str, Any]] = {
    "uni": {"bidirectional": False},
    "bi": {},
    "bi without server memory": {"error_feedback": "worker"},
    "downlink only": {"ratio": 1.0},
}
"""Settings of the systems; k = 1 in each direction unless they say otherwise."""

STARTS = ((1.0, -2.0), (2.5, 1.0), (-1.3, 0.7))
"""Where the opposite workers start, by seed."""
PUBLISHED = {0.01: 19.0, 0.03: 4.5, 0.1: 20.0, 0.3: 13.1}
"""uni's gap over bi's there, by learning rate."""
LENGTHS = {0.01: 20_000, 0.03: 10_000, 0.1: 6000, 0.3: 6000}
"""Steps by learning rate, so many that the starts are forgotten."""


@dataclass(frozen=True)
class Quadratic:
    """Workers that share the minimisation of the mean of their quadratics.

    Args:
        gradients: The gradients of all workers at a point ``[d]``.
        gap: The common objective at a point, minus its least value.
        start: ``[d]`` float64.
    """

    gradients: Callable[[Tensor], list[Tensor]]
    gap: Callable[[Tensor], Tensor]
    start: Tensor


def descend(problem: str, seed: int, system: str, lr: float, steps: int) -> Tensor:
    """Gradient descent in float64, one entry kept in each compressed direction.

    Args:
        problem: A key of :data:`PROBLEMS`.
        seed: Of the problem.
        system: A key of :data:`SYSTEMS`.
        lr: Learning rate.
        steps: Steps.

    Returns:
        ``[steps]``, the gap after each step.
    """
    task = PROBLEMS[problem](seed)
    x, numel = task.start, len(task.start)
    settings: dict[str, Any] = {"ratio": 1 / numel, "wire": "fp32", "topology": "single_server"} | SYSTEMS[system]
    if settings.get("bidirectional", True):
        settings["server_ratio"] = 1 / numel
    cluster = Cluster(TopKConfig(**settings), len(task.gradients(x)), numel, torch.float64)
    gaps = torch.empty(steps, dtype=torch.float64)
    for step in range(steps):
        x = x - lr * cluster.step(task.gradients(x))[0]
        gaps[step] = task.gap(x)
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


def random_quadratics(seed: int) -> Quadratic:
    """Ten workers with f_i = ‖x - c_i‖² / 2 in 100 dimensions, c_i normal: nothing is steep or flat."""
    centres = torch.randn(10, 100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    middle = centres.mean(0)
    return Quadratic(
        lambda x: [x - centre for centre in centres],
        lambda x: (x - middle).square().sum() / 2,
        torch.zeros(100, dtype=torch.float64),
    )


def _toy(seed: int) -> Quadratic:
    noise = torch.randn(100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Quadratic(toy, toy_gap, 20 + noise)


PROBLEMS: dict[str, Callable[[int], Quadratic]] = {
    "opposites": lambda seed: Quadratic(opposites, opposites_gap, torch.tensor(STARTS[seed], dtype=torch.float64)),
    "toy": _toy,
    "control": random_quadratics,
}
"""The two constructions and the control, by seed."""


def run() -> Result:
    """Runs the two constructions and the control."""
    result = Result(
        "counterexample",
        "compressing the downlink too can improve convergence",
        "Error feedback on both sides unless a column says otherwise, k = 1 entry each way, exact gradients, fp32 wire, "
        "single server, simulator.",
    )
    shapes: dict[str, tuple[dict[float, int], tuple[str, ...], range]] = {
        "opposites": (LENGTHS, ("uni", "bi"), range(3)),
        "toy": ({0.01: 1000, 0.03: 1000}, tuple(SYSTEMS), range(5)),
        "control": ({0.01: 2000}, ("uni", "bi"), range(3)),
    }
    jobs = {
        (problem, lr, system, seed): partial(descend, problem, seed, system, lr, steps)
        for problem, (lengths, systems, seeds) in shapes.items()
        for lr, steps in lengths.items()
        for system in systems
        for seed in seeds
    }
    paths = run_all(jobs, "counterexample")

    def gap(problem: str, lr: float, system: str, last: int) -> float:
        """The mean over the last steps and the seeds."""
        seeds = shapes[problem][2]
        return float(torch.stack([paths[problem, lr, system, seed][-last:] for seed in seeds]).mean())

    pairs = {lr: [gap("opposites", lr, system, 2000) for system in ("uni", "bi")] for lr in PUBLISHED}
    ratios = {lr: uni / bi for lr, (uni, bi) in pairs.items()}
    title = "Opposite workers (two workers, two coordinates): mean gap of the last 2,000 steps, 3 starts"
    result.tables[title] = [
        {
            "learning rate": lr,
            "steps": LENGTHS[lr],
            "uni": uni,
            "bi": bi,
            "uni / bi": uni / bi,
            "published": PUBLISHED[lr],
        }
        for lr, (uni, bi) in pairs.items()
    ]
    toys = {(lr, system): gap("toy", lr, system, 300) for lr in (0.01, 0.03) for system in SYSTEMS}
    result.tables["The thesis's toy (3 workers, d = 100): mean gap of the last 300 of 1,000 steps, 5 seeds"] = [
        {"learning rate": lr} | {system: toys[lr, system] for system in SYSTEMS} for lr in (0.01, 0.03)
    ]
    control = {system: gap("control", 0.01, system, 300) for system in ("uni", "bi")}
    worse = control["bi"] / control["uni"]
    title = "Control: isotropic random quadratics (10 workers, d = 100, lr 0.01), last 300 of 2,000 steps, 3 seeds"
    result.tables[title] = [control | {"bi / uni": worse}]
    uni, bi, forgetful, down = (toys[0.01, system] for system in SYSTEMS)
    result.checks = [
        Check(
            "bi beats uni on opposite workers, at every learning rate",
            "yes",
            f"{min(ratios.values()):.1f}x to {max(ratios.values()):.1f}x",
            min(ratios.values()) > 1,
        ),
        *(
            Check(f"by the published factor at lr {lr:g}, within 2", f"{PUBLISHED[lr]:g}x", f"{ratio:.1f}x", 0.5 < ratio / PUBLISHED[lr] < 2)
            for lr, ratio in ratios.items()
        ),
        Check("bi beats uni on the thesis's toy at lr 0.01", "16.3 against 22.6", f"{bi:.1f} against {uni:.1f}", bi < uni),
        Check("compressing the downlink only is nearly exact there", "5e-7", f"{down:.1g}", down < 1e-3),
        Check("the server's memory is needed there", "60 without", f"{forgetful:.0f} without", forgetful > bi),
        Check("bi loses to uni on the toy at lr 0.03", "worse", f"{toys[0.03, 'bi']:.1f} against {toys[0.03, 'uni']:.1f}", toys[0.03, "bi"] > toys[0.03, "uni"]),
        Check("bi loses to uni on the control", "about 2x the gap", f"{worse:.1f}x the gap", worse > 1),
    ]  # fmt: skip
    opposite = {s: paths["opposites", 0.1, s, 0][-100:].clamp(min=1e-12).tolist() for s in ("uni", "bi")}
    toyish = {s: paths["toy", 0.01, s, 0][::5].clamp(min=1e-8).tolist() for s in SYSTEMS}
    result.panels = [
        Panel("opposite workers, lr 0.1: the last 100 steps", "step", {s: (list(range(5900, 6000)), y) for s, y in opposite.items()}, ylog=True),
        Panel("the thesis's toy, lr 0.01, one seed", "step", {s: (list(range(0, 1000, 5)), y) for s, y in toyish.items()}, ylog=True),
    ]  # fmt: skip
    return result
