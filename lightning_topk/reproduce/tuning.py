"""The thesis's central claim: with the learning rate tuned, bidirectional TopK is as good as unidirectional."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from lightning_topk.config import TopKConfig
from lightning_topk.plots import Panel
from lightning_topk.reproduce.problem import train
from lightning_topk.reproduce.result import Check, Result, Row

GRID = (0.03, 0.1, 0.3, 1.0, 2.0)
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
    losses: dict[tuple[str, float], float] = {}
    panel = Panel("final training loss", "learning rate", xlog=True, ylog=True)
    with tqdm(total=len(SYSTEMS) * len(GRID) * seeds, desc="tuning", unit="run") as bar:
        for system, settings in SYSTEMS.items():
            used = equal if system == "bi, equal bytes" else ratio
            config = TopKConfig(**{"ratio": used, **settings})
            for lr in GRID:
                runs = []
                for seed in range(seeds):
                    runs.append(train("mlp", config, workers, steps, lr, seed).loss)
                    bar.update()
                losses[system, lr] = sum(runs) / seeds
            panel.curves[system] = (GRID, [min(losses[system, lr], 10.0) for lr in GRID])
    best = {system: min((losses[system, lr], lr) for lr in GRID)[1] for system in SYSTEMS}
    rows: list[Row] = [
        {"system": system, **{f"lr {lr:g}": losses[system, lr] for lr in GRID}, "best lr": best[system]}
        for system in SYSTEMS
    ]
    result.tables["Final training loss"] = rows
    result.panels.append(panel)

    def at_best(system: str) -> float:
        return losses[system, best[system]]

    ratio_of = at_best("bi") / at_best("uni")
    result.checks = [
        Check("bi as good as uni at equal k, tuned", "equal (within .2 points)", f"loss {ratio_of:.2f}x", ratio_of < 1.1),
        Check("at equal bytes bi is better", "facts: .244 against .281", f"loss {at_best('bi, equal bytes') / at_best('uni'):.2f}x", at_best("bi, equal bytes") < at_best("uni")),
        Check("a larger server ratio closes the gap", "x4: most of it", f"loss {at_best('bi, server ratio x4') / at_best('uni'):.2f}x", at_best("bi, server ratio x4") < at_best("bi")),
        Check("the tuned learning rate is 1 to 3 times SGD's", "1-3x", f"{best['bi'] / best['dense']:.1f}x", 1 <= best["bi"] / best["dense"] <= 3),
    ]  # fmt: skip
    return result


def _bytes(config: TopKConfig, workers: int) -> int:
    """Bytes a rank sends in a step, d = 4,810."""
    from lightning_topk.plan import volume

    sent = volume(config, [4810], workers)
    return sent.uplink + sent.downlink
