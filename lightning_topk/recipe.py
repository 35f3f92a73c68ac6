"""What the default recipe makes of a run's length: a density that descends, four-bit values, Adam without its beta1.

What is kept back arrives about 1 / density steps late, and a run must be long against that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from statistics import mean
from typing import Any

from lightning_topk.config import TopKConfig
from lightning_topk.schedule import CosineWarmup, Schedule, ratio_at

START = 0.12
"""The density with which a run begins, at most: it saves 50x the bytes of a run, and lies below the eighth that
selection in one pass allows."""
PASSES = 180
"""How often a run sends each entry on average: what ``START`` makes of 3,000 steps, the longest runs that
``python -m lightning_topk reproduce recipes`` measures."""


def applies(config: TopKConfig) -> bool:
    """Whether the recipe changes the density, if the number of steps is known."""
    if config.recipe == "plain" or not config.compresses or isinstance(config.ratio, str | Schedule):
        return False
    return not callable(config.ratio) and mean(_numbers(config)) < START


def planned(config: TopKConfig, steps: float, world: int = 2) -> TopKConfig:
    """The settings of a run of so many optimizer steps: with what the recipe makes of them.

    Args:
        config: The settings.
        steps: Optimizer steps, infinite if the run has no end.
        world: Number of ranks. It matters where no server compresses: bytes grow with it, so the recipe begins with
            less.

    Raises:
        ValueError: A schedule is a share of a run that has no end.
    """
    ratios: dict[str, Any] = {"ratio": config.ratio, "server_ratio": config.server_ratio}
    wire, beta1 = config.wire, config.beta1
    if applies(config) and steps < math.inf:
        if config.error_feedback is True:  # else the rounding would be lost
            wire = wire or "int4"
        keeps = config.error_feedback in (True, "worker")
        if beta1 is None and keeps and not config.momentum and not config.automatic:
            beta1 = 0.0
        rise = min(START / _amplification(config, world), 2 * PASSES / max(1.0, steps)) / mean(_numbers(config))
        for name, ratio in ratios.items():
            if isinstance(ratio, Real) and rise > 1:  # a server's too, so that the two keep their proportion
                ratios[name] = CosineWarmup(float(ratio), min(1.0, rise * float(ratio)), share=1.0)
    found: dict[str, Any] = {name: r.planned(steps) for name, r in ratios.items() if isinstance(r, Schedule)}
    return replace(config, wire=wire, beta1=beta1, **found)


def _amplification(config: TopKConfig, world: int) -> float:
    """Entries that a rank sends for each that its worker selects, over those of a bidirectional exchange."""
    if config.bidirectional:
        return 1.0
    servers = config.fixed_topology is None or config.fixed_topology.has_servers
    return (1 + world) / 2 if servers else world / 2


def remarks(config: TopKConfig, steps: float, world: int, local: int) -> list[str]:
    """What a user of these settings should know before a run.

    Args:
        config: The settings.
        steps: Planned optimizer steps, infinite if they are unknown.
        world: Number of ranks.
        local: Ranks of each node.
    """
    if not config.on(world, local).compresses:
        idle = [name for name in config.changed if name not in ("topology", "clip_norm", "scope")]
        if not config.compresses and not idle:
            return []
        where = f"topology={config.topology!r}" + " on one node" * config.compresses
        return [f"lightning_topk: {where} all-reduces whole gradients. Without effect: {', '.join(idle) or 'ratio'}."]
    if not applies(config) or config.automatic:
        return []
    if math.isinf(steps):
        return [
            "lightning_topk: the length of the run is unknown, so the default recipe does nothing: the density is "
            "constant, and Adam keeps its beta1. Short runs learn better with the recipe: set the Trainer's max_steps, "
            "use a loader with a length, or pass planned_steps= to Fabric's strategy or attach. To silence this, pass "
            "recipe='plain'."
        ]
    ratio = planned(config, steps, world).ratio
    assert not isinstance(ratio, str)
    passes = steps * mean(ratio_at(ratio, int(end), 0) for end in (0, steps))  # half a cosine is symmetric
    if passes >= PASSES:
        return []
    return [
        f"lightning_topk: steps planned: {steps:,.0f}. Each entry of a gradient is sent {passes:.3g} times on average; "
        f"in runs where it was fewer than {PASSES} times, models often learned less than with DDP. Plan more steps, or "
        "compare with DDP (README, Learning like dense)."
    ]


def _numbers(config: TopKConfig) -> list[float]:
    """The ratios that are numbers."""
    ratios: list[Any] = [config.ratio, config.server_ratio]
    return [float(each) for each in ratios if isinstance(each, Real)]
