"""The thesis's central claim: with the learning rate tuned, bidirectional TopK is as good as unidirectional."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from lightning_topk.config import TopKConfig
from lightning_topk.plots import Panel
from lightning_topk.reproduce.problem import Run, train
from lightning_topk.reproduce.result import Check, Result

GRID = (0.1, 0.3, 1.0, 2.0, 4.0)
SYSTEMS: dict[str, dict[str, Any]] = {
    "uni": {"bidirectional": False},
    "bi": {},
    "bi, server ratio x2": {"server_ratio": 0.02},
    "bi, server ratio x4": {"server_ratio": 0.04},
    "bi, equal bytes": {},
    "dense": {"ratio": 1.0, "bidirectional": False, "error_feedback": False},
}


def run() -> Result:
    """Learning rate against system, at equal k and at equal bytes."""
    workers, steps, seeds, ratio = 8, 200, 2, 0.01
    uni_bytes = _bytes(TopKConfig(ratio=ratio, bidirectional=False), workers)
    # The ratio at which bi sends what uni sends.
    equal = next(r / 1000 for r in range(10, 1000) if _bytes(TopKConfig(ratio=r / 1000), workers) >= uni_bytes)
    result = Result(
        "tuning",
        "with a tuned learning rate, bidirectional TopK is as good as unidirectional",
        f"Digits MLP 64-64-10, {workers} workers, batch 10 each, plain SGD, {steps} steps, {seeds} seeds, ratio {ratio:g} "
        f"(equal bytes: {equal:g}); final training loss.",
    )
    found: dict[tuple[str, float], list[Run]] = {}
    panel = Panel("final training loss", "learning rate", xlog=True, ylog=True)
    with tqdm(total=len(SYSTEMS) * len(GRID) * seeds, desc="tuning", unit="run") as bar:
        for system, settings in SYSTEMS.items():
            config = TopKConfig(**{"ratio": equal if system == "bi, equal bytes" else ratio, **settings})
            for lr in GRID:
                found[system, lr] = []
                for seed in range(seeds):
                    found[system, lr].append(train("mlp", config, workers, steps, lr, seed))
                    bar.update()
            panel.curves[system] = (GRID, [min(loss(found[system, lr]), 10.0) for lr in GRID])
    best = {system: min((loss(found[system, lr]), lr) for lr in GRID)[1] for system in SYSTEMS}
    result.tables["Final training loss by learning rate; accuracy in percent at the best"] = [
        {
            "system": system,
            **{f"lr {lr:g}": loss(found[system, lr]) for lr in GRID},
            "best lr": best[system],
            "accuracy": accuracy(found[system, best[system]]),
        }
        for system in SYSTEMS
    ]
    result.panels.append(panel)
    losses = {system: loss(found[system, best[system]]) for system in SYSTEMS}
    right = {system: accuracy(found[system, best[system]]) for system in SYSTEMS}
    moved = best["bi"] / best["dense"]
    result.checks = [
        Check(
            "bi as accurate as uni at equal k, tuned",
            "97.67 and 97.56 (N = 20)",
            f"{right['bi']:.1f} and {right['uni']:.1f}",
            abs(right["bi"] - right["uni"]) <= 1,
        ),
        Check(
            "with the same training loss",
            "not said",
            f"{losses['bi'] / losses['uni']:.2f}x",
            losses["bi"] < 1.1 * losses["uni"],
        ),
        Check(
            "at equal bytes bi has the lower loss",
            "not said",
            f"{losses['bi, equal bytes'] / losses['uni']:.2f}x",
            losses["bi, equal bytes"] < losses["uni"],
        ),
        Check(
            "a larger server ratio closes the gap",
            "not said",
            f"x4: {losses['bi, server ratio x4'] / losses['uni']:.2f}x uni's loss",
            losses["bi, server ratio x4"] < losses["bi"],
        ),
        Check("the tuned learning rate is 1 to 3 times SGD's", "1-3x", f"{moved:.1f}x", 1 <= moved <= 3),
    ]
    return result


def loss(runs: list[Run]) -> float:
    """Mean final loss over seeds."""
    return sum(one.loss for one in runs) / len(runs)


def accuracy(runs: list[Run]) -> float:
    """Mean final accuracy over seeds, percent."""
    return sum(one.accuracy for one in runs) / len(runs)


def _bytes(config: TopKConfig, workers: int) -> int:
    """Bytes a rank sends in a step, d = 4,810."""
    from lightning_topk.plan import volume

    sent = volume(config, [4810], workers)
    return sent.uplink + sent.downlink
