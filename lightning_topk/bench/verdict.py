"""Compares the times of contenders that ran in turns, and says in one line what to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import median
from typing import NamedTuple

Times = Mapping[str, Sequence[float]]  # seconds of a step by turn, by contender
SURE = 6  # fewest turns for a 95 % interval of the median of the ratios in the same turns


class Ratio(NamedTuple):
    """A median, and its interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(times: Times, one: str, other: str) -> Ratio:
    """The median of the ratios of two contenders' times in the same turns, and its 95 % interval.

    With fewer than ``SURE`` turns, the interval covers the ratio of any turn of one to any turn of the other.
    """
    ratios = sorted(a / b for a, b in zip(times[one], times[other], strict=False))
    count, dropped = len(ratios), 0
    if count < SURE:
        return Ratio(median(ratios), min(times[one]) / max(times[other]), max(times[one]) / min(times[other]))
    # The median lies between the (d+1)-th smallest and largest, unless at most d of the values are on one of its sides.
    while sum(comb(count, few) for few in range(dropped + 2)) <= 0.025 * 2**count:
        dropped += 1
    return Ratio(median(ratios), ratios[dropped], ratios[-1 - dropped])


def decide(times: Times, ours: str, others: Sequence[str] = ()) -> str:
    """Returns one line: what to use. ``others`` of ours, which send less, are named only if ``ours`` does not win."""
    rivals = [name for name in times if name not in (ours, "no exchange", *others)]
    if ours not in times or not rivals:
        return f"Nothing to compare: time {ours} and one of DDP's exchanges."
    rival = min(rivals, key=lambda name: median(times[name]))
    if "DDP" in times and rival != "DDP" and ratio(times, rival, "DDP").high >= 1:
        rival = "DDP"  # needs no hook
    baseline = "DDP" if "DDP" in times else rival
    against, over = ratio(times, ours, rival), ratio(times, ours, baseline)
    told = f"{ours} takes {over} of {baseline}'s time a step"
    beside = "" if rival == baseline else f", and {against} of {rival}'s"
    if against.high < 1:
        return f"{told}{beside}: use TopKStrategy({ours})."
    if against.low > 1:
        best = f"{rival} is fastest here: use it; {told}{beside}."
    elif rival != baseline and over.high < 1:
        best = f"{told}; no significant difference to {rival}: {against} of its time."
    else:
        best = f"No significant difference, the interval contains 1: {told}{beside}."
    if ahead := [name for name in others if name in times and ratio(times, name, rival).high < 1]:
        words = " and ".join(f"{name} takes {ratio(times, name, rival)} of {rival}'s time" for name in ahead)
        best += f" In runs of many thousand steps, {words}."
    return best
