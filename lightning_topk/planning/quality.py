"""What saving costs in quality, by how often each entry of the gradient is sent during the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
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


def enough(samples: Sequence[Sample]) -> float:
    """The fewest sends of those measured from which on every gap was 1 at most; infinite if there are none.

    A gap is a mean over seeds; single runs may be further behind.

    Args:
        samples: Of one model and optimizer.
    """
    near = takewhile(lambda sample: sample[1] <= 1, sorted(samples, reverse=True))
    return min((sends for sends, _ in near), default=math.inf)


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


ENOUGH = {
    "wide mlp, SGD": 3.6,
    "wide mlp, AdamW": 3.6,
    "cnn, SGD": 6.8,
    "cnn, AdamW": 2.4,
    "char lstm, AdamW": 19,
    "gpt, AdamW": 42,
}
"""What :func:`enough` says of the runs of ``python -m lightning_topk reproduce saving-curves``."""
LONGEST = 10_000
"""Steps of the longest of those runs."""
LARGEST = 200
"""The largest saving in them."""


def sentence(steps: int, saving_at: Callable[[float], float]) -> str:
    """What can be saved in a run without losing more than a point of accuracy, or 1 % of the loss.

    Args:
        steps: Steps of the run.
        saving_at: How many times fewer bytes than all-reduce are sent at a density.
    """
    least, most = min(ENOUGH.values()), max(ENOUGH.values())
    if steps <= most:
        return (
            f"By quality: use DDPStrategy, or try. {steps:,} steps are few: the hardest of our models had to send an "
            f"entry of the gradient {most:g} times to end within 1 % of the loss of dense training."
        )
    saving, times = saving_at(most / steps), f"{most:g} times"
    if saving > LARGEST:
        saving, times = LARGEST, f"more than {most:g} times"
    return (
        f"By quality: use saving={float(f'{saving:.2g}'):g} at most. In {steps:,} steps it sends an entry of the "
        f"gradient {times} on average. In our runs of digits, and of text with AdamW, that did so, the mean over the "
        "seeds ended within a point of accuracy or 1 % of the loss of dense training. The easiest of these "
        f"{len(ENOUGH)} pairs of model and optimizer needed {least:g} times. So models differ much: try a part of your "
        f"run first. Ours had up to {LONGEST:,} steps, 210,000 parameters and, in the longest, a saving of {LARGEST}. "
        "SGD with momentum on text, and convolutional nets on images, need more (examples/guides/learning.md)."
    )
