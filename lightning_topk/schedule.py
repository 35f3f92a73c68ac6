"""Density schedules: which fraction is sent at which step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace


class Schedule(ABC):
    """A ratio that changes over training. It must be the same function on every rank."""

    @property
    def by_epoch(self) -> bool:
        """Whether the epoch matters."""
        return False

    @property
    def by_plan(self) -> bool:
        """Whether it must be told how many steps are planned before it can say anything."""
        return False

    def planned(self, steps: float) -> Schedule:
        """The schedule of a run of so many optimizer steps, infinite if it has no end."""
        return self

    @abstractmethod
    def at(self, step: int, epoch: int) -> float:
        """The ratio, in (0, 1].

        Args:
            step: Gradients exchanged before this one, optimizer steps.
            epoch: Epochs completed; 0 outside a Trainer.
        """


@dataclass(frozen=True)
class Warmup(Schedule):
    """A descent from ``start`` to ``ratio``, constant afterwards.

    Args:
        ratio: The ratio after the warm-up, in (0, 1].
        start: The ratio at the beginning, in (0, 1].
        steps: Length of the warm-up in optimizer steps. Give this, ``epochs`` or ``share``.
        epochs: Length in epochs; the ratio then changes between epochs only.
        share: Length as a share of all planned steps, in (0, 1]. The Trainer knows these; elsewhere pass ``planned_steps=``.

    Raises:
        ValueError: A ratio is not in (0, 1], or not exactly one positive length is given.
    """

    ratio: float
    start: float = 0.25
    steps: int | None = None
    epochs: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        for each in ("ratio", "start"):
            if not 0 < getattr(self, each) <= 1:
                raise ValueError(f"{name}: {each}={getattr(self, each)!r} must be in (0, 1].")
        lengths = [length for length in (self.steps, self.epochs, self.share) if length is not None]
        if len(lengths) != 1 or (self.share is None and lengths[0] < 1):
            raise ValueError(
                f"{name}: give one of steps and epochs, at least 1, and share; got steps={self.steps!r}, "
                f"epochs={self.epochs!r}, share={self.share!r}."
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"{name}: share={self.share!r} of the planned steps must be in (0, 1].")

    @property
    def by_epoch(self) -> bool:
        """See :attr:`Schedule.by_epoch`."""
        return self.epochs is not None

    @property
    def by_plan(self) -> bool:
        """See :attr:`Schedule.by_plan`."""
        return self.share is not None

    def planned(self, steps: float) -> Schedule:
        """See :meth:`Schedule.planned`.

        Raises:
            ValueError: It goes by share, and the run has no end.
        """
        if self.share is None:
            return self
        if math.isinf(steps):
            raise ValueError(
                f"{self!r} is a share of a run that has no end. Give the Trainer max_steps or max_epochs, or the schedule steps=."
            )
        return replace(self, share=None, steps=max(1, round(self.share * steps)))

    def at(self, step: int, epoch: int) -> float:
        """See :meth:`Schedule.at`."""
        if self.share is not None:
            raise ValueError(f"{self!r} is a share of the planned steps, which nobody told: pass planned_steps=.")
        now, length = (step, self.steps) if self.epochs is None else (epoch, self.epochs)
        assert length is not None
        return self.shape(min(now, length) / length)

    @abstractmethod
    def shape(self, progress: float) -> float:
        """The ratio when a share ``progress`` of the warm-up is over."""


class ExponentialWarmup(Warmup):
    """A geometric descent (Lin et al. 2018, section 3.3)."""

    def shape(self, progress: float) -> float:
        """See :meth:`Warmup.shape`."""
        return float(self.start * (self.ratio / self.start) ** progress)


class CosineWarmup(Warmup):
    """A descent along half a cosine, as learning rates often take it."""

    def shape(self, progress: float) -> float:
        """See :meth:`Warmup.shape`."""
        return self.ratio + (self.start - self.ratio) * (1 + math.cos(math.pi * progress)) / 2


Ratio = float | Schedule | Callable[[int], float]
"""A constant, a schedule, or any function of the step."""


LATE = 1_000_000_000
"""A step, and an epoch, by which every schedule has ended."""


def ratio_at(ratio: Ratio, step: int, epoch: int) -> float:
    """The ratio in force at a step.

    Raises:
        ValueError: A schedule or function gave a value outside (0, 1].
    """
    if isinstance(ratio, Schedule):
        value = ratio.at(step, epoch)
    elif callable(ratio):
        value = ratio(step)
    else:
        return ratio
    if not 0 < value <= 1:
        raise ValueError(f"the ratio schedule {ratio!r} gave {value!r} at step {step}; it must stay in (0, 1].")
    return float(value)
