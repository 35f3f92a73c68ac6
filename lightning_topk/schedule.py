"""Density schedules: which fraction is sent at which step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


class Schedule(ABC):
    """A ratio that changes over training. It must be the same function on every rank."""

    @property
    def by_epoch(self) -> bool:
        """Whether the epoch matters."""
        return False

    @abstractmethod
    def at(self, step: int, epoch: int) -> float:
        """The ratio, in (0, 1].

        Args:
            step: Gradients exchanged before this one, optimizer steps.
            epoch: Epochs completed; 0 outside a Trainer.
        """


@dataclass(frozen=True)
class ExponentialWarmup(Schedule):
    """A geometric descent from ``start`` to ``ratio``, constant afterwards (Lin et al. 2018, section 3.3).

    Args:
        ratio: The ratio after the warm-up, in (0, 1].
        start: The ratio at the beginning, in (0, 1].
        steps: Length of the warm-up in optimizer steps. Give this or ``epochs``.
        epochs: Length in epochs; the ratio then changes between epochs only.

    Raises:
        ValueError: A ratio is not in (0, 1], or not exactly one positive length is given.
    """

    ratio: float
    start: float = 0.25
    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        for name in ("ratio", "start"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"ExponentialWarmup: {name}={getattr(self, name)!r} must be in (0, 1].")
        if (self.steps is None) == (self.epochs is None) or (self.steps or self.epochs or 0) < 1:
            raise ValueError(
                f"ExponentialWarmup: give either steps or epochs, at least 1; got steps={self.steps!r}, "
                f"epochs={self.epochs!r}."
            )

    @property
    def by_epoch(self) -> bool:
        """See :attr:`Schedule.by_epoch`."""
        return self.epochs is not None

    def at(self, step: int, epoch: int) -> float:
        """See :meth:`Schedule.at`."""
        now, length = (step, self.steps) if self.epochs is None else (epoch, self.epochs)
        assert length is not None
        progress = min(now, length) / length
        return float(self.start * (self.ratio / self.start) ** progress)


Ratio = float | Schedule | Callable[[int], float]
"""A constant, a schedule, or any function of the step."""


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
