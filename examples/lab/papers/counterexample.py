"""Where the second compression helps, and where it hurts: quadratics small enough to understand.

Zou 2022 shows by example that compressing the downlink as well can *improve* convergence. Here are two constructions
where it does, and a control where it does not. All run on the simulator, through the exchange that a cluster runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.report import Result
from lab.training import run_all
from lightning_topk.config import TopKConfig
from lightning_topk.simulate import Cluster

SYSTEMS: dict[str, dict[str, Any]] = {
    "uni": {"bidirectional": False},
    "bi": {},
    "bi without server memory": {"error_feedback": "worker"},
    "downlink only": {"ratio": 1.0},
}
"""Settings of the systems; k = 1 in each direction unless they say otherwise."""

STARTS = ((1.0, -2.0), (2.5, 1.0), (-1.3, 0.7))
"""Starts of the opposite workers, by seed."""
PUBLISHED = {0.01: 19.0, 0.03: 4.5, 0.1: 20.0, 0.3: 13.1}
"""Published ratio of uni's gap to bi's on the opposite workers, by learning rate."""
LENGTHS = {0.01: 20_000, 0.03: 10_000, 0.1: 6000, 0.3: 6000}
"""Steps of the opposite workers by learning rate: enough that the start no longer matters."""


@dataclass(frozen=True)
class Quadratics:
    """Workers that minimise the mean of f_i(x) = Σ (h x² / 2 - b_i x) together, from a start ``[d]`` in float64.

    The curvature is h ``[d]``, the pulls are b ``[W, d]``.
    """

    curvature: Tensor
    pulls: Tensor
    start: Tensor

    def gradients(self, x: Tensor) -> list[Tensor]:
        """The gradient ``[d]`` of each worker."""
        return list((self.curvature * x - self.pulls).unbind())

    def gap(self, x: Tensor) -> Tensor:
        """The common objective minus its least value, which is at mean(b) / h."""
        return (self.curvature * (x - self.pulls.mean(0) / self.curvature).square()).sum() / 2


def opposites(seed: int) -> Quadratics:
    """f± = (0.1 x1² + x2²) / 2 ∓ (0.3 x1 + x2): opposite pulls, one coordinate steep and one flat."""
    curvature, pull, start = torch.tensor([[0.1, 1.0], [0.3, 1.0], STARTS[seed]], dtype=torch.float64)
    return Quadratics(curvature, torch.stack([pull, -pull]), start)


def toy(seed: int) -> Quadratics:
    """The thesis's f_i = ‖x - a_i 1‖² / 2, a = (1, 5, 10), whose mean is at least 677.78."""
    noise = torch.randn(100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one = torch.ones_like(noise)
    return Quadratics(one, torch.stack([a * one for a in (1, 5, 10)]), 20 + noise)


def control(seed: int) -> Quadratics:
    """Ten workers with f_i = ‖x - c_i‖² / 2 in 100 dimensions, c_i normal: nothing is steep or flat."""
    centres = torch.randn(10, 100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Quadratics(torch.ones_like(centres[0]), centres, torch.zeros_like(centres[0]))


PROBLEMS = {"opposites": opposites, "toy": toy, "control": control}
"""The two constructions and the control, by seed."""


def descend(problem: str, seed: int, system: str, lr: float, steps: int) -> Tensor:
    """The gap after each step, ``[steps]``, of gradient descent with one entry sent in each compressed direction."""
    task = PROBLEMS[problem](seed)
    x, numel = task.start, len(task.start)
    settings: dict[str, Any] = {"ratio": 1 / numel, "wire": "fp32", "topology": "single_server"} | SYSTEMS[system]
    if settings.get("bidirectional", True):
        settings["server_ratio"] = 1 / numel
    cluster = Cluster(TopKConfig(**settings), len(task.pulls), numel, torch.float64)
    gaps = torch.empty(steps, dtype=torch.float64)
    for step in range(steps):
        x = x - lr * cluster.step(task.gradients(x))[0]
        gaps[step] = task.gap(x)
    return gaps


def run() -> Result:
    """Shows where compressing the downlink too improves convergence, and where it does not."""
    result = Result(
        "counterexample",
        "compressing the downlink too can improve convergence",
        "Error feedback on both sides unless a column says otherwise, k = 1 entry each way, exact gradients, fp32 "
        "wire, single server, simulator.",
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
        """Mean gap over the last steps and the seeds."""
        seeds = shapes[problem][2]
        return float(torch.stack([paths[problem, lr, system, seed][-last:] for seed in seeds]).mean())

    pairs = {lr: [gap("opposites", lr, system, 2000) for system in ("uni", "bi")] for lr in PUBLISHED}
    ratios = {lr: uni / bi for lr, (uni, bi) in pairs.items()}
    title = "Opposite workers (two workers, two coordinates): mean gap of the last 2,000 steps, 3 starts"
    result.tables[title] = [
        {"learning rate": lr, "steps": LENGTHS[lr], "uni": uni, "bi": bi, "uni / bi": uni / bi, "published": factor}
        for (lr, factor), (uni, bi) in zip(PUBLISHED.items(), pairs.values(), strict=True)
    ]
    toys = {(lr, system): gap("toy", lr, system, 300) for lr in (0.01, 0.03) for system in SYSTEMS}
    result.tables["The thesis's toy (3 workers, d = 100): mean gap of the last 300 of 1,000 steps, 5 seeds"] = [
        {"learning rate": lr} | {system: toys[lr, system] for system in SYSTEMS} for lr in (0.01, 0.03)
    ]
    isotropic = {system: gap("control", 0.01, system, 300) for system in ("uni", "bi")}
    worse = isotropic["bi"] / isotropic["uni"]
    title = "Control: isotropic random quadratics (10 workers, d = 100, lr 0.01), last 300 of 2,000 steps, 3 seeds"
    result.tables[title] = [isotropic | {"bi / uni": worse}]
    uni, bi, forgetful, down = (toys[0.01, system] for system in SYSTEMS)
    low, high = min(ratios.values()), max(ratios.values())
    check = result.check
    check("bi beats uni on opposite workers, at every learning rate", "yes", f"{low:.1f}x to {high:.1f}x", low > 1)
    for lr, ratio in ratios.items():
        near = 0.5 < ratio / PUBLISHED[lr] < 2
        check(f"by the published factor at lr {lr:g}, within 2", f"{PUBLISHED[lr]:g}x", f"{ratio:.1f}x", near)
    check("bi beats uni on the thesis's toy at lr 0.01", "16.3 against 22.6", f"{bi:.1f} against {uni:.1f}", bi < uni)
    check("compressing the downlink only is nearly exact there", "5e-7", f"{down:.1g}", down < 1e-3)
    check("the server's memory is needed there", "60 without", f"{forgetful:.0f} without", forgetful > bi)
    faster_uni, faster_bi = toys[0.03, "uni"], toys[0.03, "bi"]
    loses = f"{faster_bi:.1f} against {faster_uni:.1f}"
    check("bi loses to uni on the toy at lr 0.03", "worse", loses, faster_bi > faster_uni)
    check("bi loses to uni on the control", "about 2x the gap", f"{worse:.1f}x the gap", worse > 1)
    last = {s: paths["opposites", 0.1, s, 0][-100:].clamp(min=1e-12).tolist() for s in ("uni", "bi")}
    whole = {s: paths["toy", 0.01, s, 0][::5].clamp(min=1e-8).tolist() for s in SYSTEMS}
    for title, steps, curves in (
        ("opposite workers, lr 0.1: the last 100 steps", range(5900, 6000), last),
        ("the thesis's toy, lr 0.01, one seed", range(0, 1000, 5), whole),
    ):
        panel = result.panel(title, "step", ylog=True, ylabel="gap to the least loss")
        panel |= {system: (list(steps), path) for system, path in curves.items()}
    return result
