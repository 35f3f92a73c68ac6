"""The thesis's central claim: with the learning rate tuned, bidirectional TopK is as good as unidirectional.

Systems are compared over one grid of learning rates and several seeds, see :func:`sweep`, here and in ``convergence``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from lightning_topk.config import TopKConfig
from lightning_topk.lab.report import Panel, Result, Row, spread
from lightning_topk.lab.training import Optimizer, Run, run_all, train
from lightning_topk.volume import volume

S = TypeVar("S", bound=Hashable)
SEEDS = 3


@dataclass(frozen=True)
class Tuned:
    """The runs of one system, by learning rate; a list for the seeds."""

    runs: Mapping[float, list[Run]]

    def losses(self) -> dict[float, float]:
        """Final training loss by learning rate, mean of the seeds."""
        return {lr: fmean(run.loss for run in runs) for lr, runs in self.runs.items()}

    @property
    def lr(self) -> float:
        """The learning rate with the least loss."""
        losses = self.losses()
        return min(losses, key=losses.__getitem__)

    @property
    def lr_in_words(self) -> str:
        """The learning rate, and whether it is the last of its grid, so that a better one may lie beyond."""
        grid = [*self.runs]
        return f"{self.lr:g}" + (" (edge of the grid)" if self.lr in (grid[0], grid[-1]) else "")

    @property
    def best(self) -> list[Run]:
        """The runs at that learning rate."""
        return self.runs[self.lr]

    @property
    def loss(self) -> float:
        """Their mean training loss."""
        return self.losses()[self.lr]

    @property
    def accuracy(self) -> float:
        """Their mean accuracy, percent."""
        return fmean(run.accuracy for run in self.best)

    def by_rate(self) -> Row:
        """Cells of the losses by learning rate."""
        return {f"lr {lr:g}": loss for lr, loss in self.losses().items()}

    def spread(self, style: str) -> str:
        """The accuracy at the best learning rate, mean and half the range."""
        return spread([run.accuracy for run in self.best], style)


def sweep(systems: Mapping[S, Callable[..., Run]], grid: Sequence[float], seeds: int, title: str) -> dict[S, Tuned]:
    """Trains every system by SGD at every learning rate with every seed, on all cores.

    Args:
        systems: By name: :func:`lightning_topk.lab.training.train` with all but optimizer and seed, by ``partial``.
        grid: Learning rates, ascending.
        seeds: Number of runs of each.
        title: Title of the progress bar.
    """
    jobs = {
        (name, lr, seed): partial(system, optimizer=Optimizer(lr), seed=seed)
        for name, system in systems.items()
        for lr in grid
        for seed in range(seeds)
    }
    found = run_all(jobs, title)
    return {name: Tuned({lr: [found[name, lr, seed] for seed in range(seeds)] for lr in grid}) for name in systems}


def panel(title: str, tuned: Mapping[str, Tuned]) -> Panel:
    """The losses by learning rate, cut off at 10."""
    result = Panel(title, "learning rate", xlog=True, ylog=True, ylabel="final training loss")
    for name, each in tuned.items():
        result.curves[name] = ([*each.runs], [min(loss, 10.0) for loss in each.losses().values()])
    return result


GRID = (0.3, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
WORKERS, STEPS, RATIO, NUMEL = 8, 200, 0.01, 4810
SYSTEMS: dict[str, dict[str, Any]] = {
    "uni": {"bidirectional": False},
    "bi": {},
    "bi, server ratio x2": {"server_ratio": 2 * RATIO},
    "bi, server ratio x4": {"server_ratio": 4 * RATIO},
    "bi, server ratio x8": {"server_ratio": 8 * RATIO},
    "dense": {"ratio": 1.0, "bidirectional": False, "error_feedback": False},
}


def run() -> Result:
    """Holds unidirectional TopK against bidirectional, at equal k and at equal bytes, with tuned learning rates."""
    equal = equal_bytes_ratio()
    systems = SYSTEMS | {"bi, equal bytes": {"ratio": equal}}
    result = Result(
        "tuning",
        "with a tuned learning rate, bidirectional TopK is as good as unidirectional",
        f"Digits MLP 64-64-10 (d = {NUMEL:,}), {WORKERS} workers, batch 10 each, plain SGD, {STEPS} steps, {SEEDS} "
        f"seeds, ratio {RATIO:g}; final training loss. Equal bytes: bi at ratio {equal:g}, the largest at which it "
        "sends no more than uni, whose servers have room for all that the workers can send them (N k entries, whether "
        "or not they overlap).",
        against="published",
    )
    common: dict[str, Any] = {"ratio": RATIO, "wire": "bf16"}
    configs = {system: TopKConfig(**common | settings) for system, settings in systems.items()}
    runs = {system: partial(train, "mlp", config, WORKERS, STEPS) for system, config in configs.items()}
    tuned = sweep(runs, GRID, SEEDS, "tuning")
    result.tables["Final training loss by learning rate; accuracy in percent at the best"] = [
        {
            "system": system,
            "bytes": f"{_bytes(configs[system]):,}",
            **each.by_rate(),
            "best lr": each.lr_in_words,
            "accuracy": each.accuracy,
        }
        for system, each in tuned.items()
    ]
    result.panels.append(panel(f"mean of {SEEDS} seeds", tuned))
    uni, bi, same, widest = (tuned[name] for name in ("uni", "bi", "bi, equal bytes", "bi, server ratio x8"))
    result.check(
        "bi as accurate as uni at equal k, tuned",
        "97.67 and 97.56 (N = 20)",
        f"{bi.accuracy:.1f} and {uni.accuracy:.1f}",
        abs(bi.accuracy - uni.accuracy) <= 1,
    )
    loss = f"{bi.loss / uni.loss:.2f}x"
    result.check("with the same training loss, to 10 percent", "", loss, bi.loss < 1.1 * uni.loss)
    loss, published = f"{same.loss / uni.loss:.2f}x", ".244 against .281 on another net"
    result.check("at equal bytes bi has the lower loss", published, loss, same.loss < uni.loss)
    loss = f"x8: {widest.loss / uni.loss:.2f}x uni's loss"
    result.check("a larger server ratio closes the gap", "", loss, widest.loss < bi.loss)
    moved = bi.lr / tuned["dense"].lr
    result.check("the tuned learning rate is 1 to 3 times SGD's", "1-3x", f"{moved:.1f}x", 1 <= moved <= 3)
    return result


def equal_bytes_ratio() -> float:
    """The largest ratio, in thousandths, at which bi sends no more than uni does at :data:`RATIO`."""
    room = _bytes(TopKConfig(ratio=RATIO, bidirectional=False, wire="bf16"))
    return max(r / 1000 for r in range(1, 1000) if _bytes(TopKConfig(ratio=r / 1000, wire="bf16")) <= room)


def _bytes(config: TopKConfig) -> int:
    """Bytes that a rank sends in a step."""
    sent = volume(config, [NUMEL], WORKERS)
    return sent.uplink + sent.downlink
