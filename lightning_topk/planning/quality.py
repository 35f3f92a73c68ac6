"""What saving costs in quality, by how often each entry of the gradient is sent during the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

Sample = tuple[float, float]
"""Sends of an entry during a run, and the gap to dense training: points of accuracy, or percent of the loss."""


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

    @property
    def least(self) -> float:
        """Sends for a gap of 1 of the easiest model."""
        return min(self.sends.values())

    @property
    def most(self) -> float:
        """Sends for a gap of 1 of the hardest model."""
        return max(self.sends.values())


def fit(samples: Mapping[str, Sequence[Sample]]) -> Law:
    """The law that is nearest to what was measured.

    Distances are between inverse hyperbolic sines of the gaps: near to zero they are absolute, as noise is, and
    relative where gaps are large.

    Args:
        samples: By the name of the model and optimizer.
    """
    exponents = [0.2 * 1.06**i for i in range(48)]  # to 3.1
    return min((_with_exponent(exponent, samples) for exponent in exponents), key=lambda found: found[0])[1]


def _with_exponent(exponent: float, samples: Mapping[str, Sequence[Sample]]) -> tuple[float, Law]:
    """The summed squared distance, and the law, for an exponent."""
    total, sends = 0.0, {}
    for name, pairs in samples.items():
        near = [
            (sum((math.asinh((s / n) ** exponent) - math.asinh(gap)) ** 2 for n, gap in pairs), s)
            for s in (0.1 * 1.1**i for i in range(100))  # to 1,250
        ]
        distance, sends[name] = min(near)
        total += distance
    return total, Law(exponent, sends)


MEASURED = Law(
    1.29,
    {
        "wide mlp, SGD": 1.31,
        "wide mlp, AdamW": 1.31,
        "cnn, SGD": 8.02,
        "cnn, AdamW": 1.31,
        "char lstm, AdamW": 11.7,
        "gpt, AdamW": 20.8,
    },
)
"""What ``python -m lightning_topk reproduce saving-curves`` found, see examples/guides/learning.md."""
LONGEST = 10_000
"""Steps of the longest of those runs."""


def sentence(steps: int, saving_at: Callable[[float], float], law: Law = MEASURED) -> str:
    """What can be saved in a run without losing more than a point of accuracy, or 1 % of the loss.

    Args:
        steps: Steps of the run.
        saving_at: How many times fewer bytes than all-reduce are sent at a density.
        law: What is known.
    """

    def saving(sends: float) -> str:
        return f"saving={float(f'{saving_at(sends / steps):.2g}'):g}" if sends < steps else "dense training"

    return (
        f"In {steps:,} steps, {saving(law.most)} would keep the hardest of {len(law.sends)} measured models and "
        "optimizers within a point of accuracy or 1 % of the loss of dense training, by a rough law of their runs; "
        f"a typical one allows {saving(law.typical)}, the easiest {saving(law.least)}. The law was measured on digits "
        f"and text in runs of up to {LONGEST:,} steps, and is a guess beyond; convolutional nets on images do not "
        "follow it (examples/guides/learning.md). Try a part of your run first."
    )
