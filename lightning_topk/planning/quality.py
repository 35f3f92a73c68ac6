"""What saving costs in quality, by how often each entry of the gradient is sent during the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import geometric_mean
from typing import NamedTuple


@dataclass(frozen=True)
class Point:
    """What was measured of a model and an optimizer, at one length of the run and one saving.

    Attributes:
        sends: How often an entry is sent during the run: density x steps.
        gap: Mean distance to dense training of the same seeds; positive is worse. Points of accuracy, or percent of
            the loss.
        error: Its standard error; NaN of a single seed.
        seeds: Runs.
    """

    sends: float
    gap: float
    error: float = math.nan
    seeds: int = 1

    @property
    def shown_error(self) -> float:
        """The length of its error bar."""
        return 0.0 if math.isnan(self.error) else self.error

    def __str__(self) -> str:
        return f"{self.gap:+.2f}" + (f" ± {self.error:.2f}" if self.seeds > 1 else " (1 seed)")


@dataclass(frozen=True)
class Law:
    """``gap = (sends for a gap of 1 / sends) ^ exponent``, with ``sends = density x steps``.

    Attributes:
        exponent: Common to all models.
        sends: Sends for a gap of 1, by the name of the model and optimizer.
    """

    exponent: float
    sends: Mapping[str, float]

    @property
    def typical(self) -> float:
        """Sends for a gap of 1 that a model takes of which nothing is known: the geometric mean."""
        return geometric_mean(self.sends.values())


class Enough(NamedTuple):
    """The fewest sends of those measured from which on a model was near to dense training; infinite if there are none.

    Attributes:
        by_mean: From which on every mean gap was 1 at most.
        by_error: From which on every mean gap was so with its standard error added. A single run has none: it can show
            that sends are too few, not that they are enough.
    """

    by_mean: float
    by_error: float


def enough(points: Sequence[Point]) -> Enough:
    """How many sends were enough.

    Args:
        points: Of one model and optimizer.
    """
    telling = [p for p in points if p.seeds > 1 or p.gap > 1]
    return Enough(_fewest(points, lambda p: p.gap), _fewest(telling, lambda p: p.gap + p.shown_error))


def _fewest(points: Sequence[Point], gap: Callable[[Point], float]) -> float:
    """The fewest sends from which on every gap was 1 at most."""
    near = takewhile(lambda p: gap(p) <= 1, sorted(points, key=lambda p: p.sends, reverse=True))
    return min((p.sends for p in near), default=math.inf)


def fit(points: Mapping[str, Sequence[Point]]) -> Law:
    """The law that is nearest to what was measured.

    Distances are between inverse hyperbolic sines of the gaps: near to zero they are absolute, as noise is, and
    relative where gaps are large.

    Args:
        points: By the name of the model and optimizer.
    """
    exponents = [0.2 * 1.06**i for i in range(48)]  # to 3.1
    return min((_with_exponent(exponent, points) for exponent in exponents), key=lambda found: found[0])[1]


def _with_exponent(exponent: float, points: Mapping[str, Sequence[Point]]) -> tuple[float, Law]:
    """The summed squared distance, and the law, for an exponent."""
    total, sends = 0.0, {}
    for name, those in points.items():
        near = [
            (sum((math.asinh((s / p.sends) ** exponent) - math.asinh(p.gap)) ** 2 for p in those), s)
            for s in (0.1 * 1.1**i for i in range(100))  # to 1,250
        ]
        distance, sends[name] = min(near)
        total += distance
    return total, Law(exponent, sends)


ENOUGH = {
    "wide mlp, SGD": Enough(3.6, 3.6),
    "wide mlp, AdamW": Enough(3.6, 3.6),
    "cnn, SGD": Enough(6.8, 6.8),
    "cnn, AdamW": Enough(2.4, 6.8),
    "char lstm, AdamW": Enough(19, 19),
    "gpt, AdamW": Enough(42, 83),
}
"""What :func:`enough` says of the runs of ``python -m lightning_topk reproduce saving-curves``."""
LONGEST = 10_000
"""Steps of the longest of those runs."""
LARGEST = 200
"""The largest saving in them."""


def sentence(steps: int, saving_at: Callable[[float], float]) -> str:
    """What can be saved in a run without losing more than a point of accuracy or 1 % of the loss, and how sure that is.

    Args:
        steps: Steps of the run.
        saving_at: How many times fewer bytes than all-reduce are sent at a density.
    """
    most = max(each.by_error for each in ENOUGH.values())
    if steps <= most or saving_at(most / steps) < 1:
        return (
            f"By quality: use DDPStrategy, or compare with it. {steps:,} steps are few: the hardest of our models had "
            f"to send an entry of the gradient {most:g} times to end within 1 % of the loss of dense training."
        )
    saving = f"{min(LARGEST, saving_at(most / steps)):.2g}"
    fewer, least = max(each.by_mean for each in ENOUGH.values()), min(each.by_mean for each in ENOUGH.values())
    return (
        f"By quality: use saving={float(saving):g} at most. In {steps:,} steps it sends an entry of the gradient "
        f"{most:g} times or more, on average. From there on the hardest of our models ended within 1 % of the loss of "
        "dense training, the standard error of the mean over its seeds included. Without that error it needed "
        f"{fewer:g} times, and the easiest model {least:g} times. So models differ much: try a part of your run first. "
        f"These are {len(ENOUGH)} pairs of model and optimizer, on digits, and on text with AdamW: up to {LONGEST:,} "
        f"steps and 210,000 parameters, and no long run with a saving above {LARGEST}. SGD with a momentum of 0.9 "
        "needs more, on text and for convolutional nets on images (examples/guides/learning.md)."
    )
