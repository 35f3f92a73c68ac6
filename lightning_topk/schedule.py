"""Density schedules: the fraction of the gradient that is sent at each step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from typing_extensions import override


def as_float(number: Real) -> float:
    """Converts a number to a float; a number too large for one becomes NaN, which fails every range check."""
    try:
        return float(number)
    except OverflowError:
        return math.nan


class Schedule(ABC):
    """A ratio that changes over training. It must be the same function on every rank."""

    @property
    def by_epoch(self) -> bool:
        """Whether the ratio depends on the epoch."""
        return False

    @abstractmethod
    def at(self, step: int, epoch: int) -> float:
        """Returns the ratio, in (0, 1].

        Args:
            step: Number of optimizer steps whose gradients were exchanged before this one.
            epoch: Number of completed epochs; 0 outside a Trainer.
        """


@dataclass(frozen=True)
class Warmup(Schedule):
    """A ratio that decays from ``start`` to ``ratio`` and then stays constant.

    Pass either ``steps`` or ``epochs``.

    Args:
        ratio: The ratio after the warm-up, in (0, 1].
        start: The ratio at the beginning, in (0, 1].
        steps: Length of the warm-up in optimizer steps, at least 1.
        epochs: Length in epochs, at least 1; the ratio then changes between epochs only.

    Raises:
        ValueError: A ratio or a length is out of range, or ``steps`` and ``epochs`` are both set or both missing.
    """

    ratio: float
    start: float = 0.25
    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        for each in ("ratio", "start"):
            value: Any = getattr(self, each)
            if isinstance(value, bool) or not (isinstance(value, Real) and 0 < as_float(value) <= 1):
                raise ValueError(f"{name}: {each}={value!r:.50} must be a number in (0, 1].")
        lengths: list[Any] = [length for length in (self.steps, self.epochs) if length is not None]
        if len(lengths) != 1 or isinstance(lengths[0], bool) or not isinstance(lengths[0], Integral) or lengths[0] < 1:
            raise ValueError(
                f"{name}: pass either steps or epochs, an integer of at least 1; got steps={self.steps!r}, "
                f"epochs={self.epochs!r}."
            )

    @property
    @override
    def by_epoch(self) -> bool:
        return self.epochs is not None

    @override
    def at(self, step: int, epoch: int) -> float:
        now, length = (step, self.steps) if self.epochs is None else (epoch, self.epochs)
        assert length is not None
        return self.shape(min(now, length) / length)

    @abstractmethod
    def shape(self, progress: float) -> float:
        """Returns the ratio after a fraction ``progress`` of the warm-up, in [0, 1]."""


class ExponentialWarmup(Warmup):
    """Exponential decay of the ratio (Lin et al. 2018, section 3.3)."""

    @override
    def shape(self, progress: float) -> float:
        return float(self.start * (self.ratio / self.start) ** progress)


class CosineWarmup(Warmup):
    """Cosine decay of the ratio, as is common for learning rates."""

    @override
    def shape(self, progress: float) -> float:
        return self.ratio + (self.start - self.ratio) * (1 + math.cos(math.pi * progress)) / 2


Varying = Schedule | Callable[[int], float]
"""A ratio as a schedule, or as a function of the step."""
Ratio = float | Varying
"""A constant, a schedule, or a function of the step."""


def ratio_at(ratio: Varying, step: int, epoch: int, name: str = "ratio") -> float:
    """Returns the ratio in force at a step; refuses a value outside (0, 1]. Errors show ``name``."""
    value: Any = ratio.at(step, epoch) if isinstance(ratio, Schedule) else ratio(step)
    with suppress(TypeError, ValueError, RuntimeError):  # not a single number
        if not isinstance(value, bool) and 0 < value <= 1:
            return float(value)
    raise ValueError(f"{name}={ratio!r} returned {value!r} at step {step}; it must return a number in (0, 1].")
