"""Messages to the user during training, shown once and on rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning_topk.config import TopKConfig

LOGGER = logging.getLogger("lightning_topk")


class WarnOnce:
    """Shows each message to the user once, on rank 0."""

    def __init__(self, tell: Callable[[str], None] | None, rank: int) -> None:
        self._tell, self._rank = tell or LOGGER.warning, rank
        self.said: set[str] = set()
        """Messages so far, on every rank."""

    def __call__(self, message: str) -> None:
        """Shows a message, unless it was shown before."""
        if self._rank == 0 and message not in self.said:
            self._tell(message)
        self.said.add(message)


def startup_warnings(given: TopKConfig, config: TopKConfig, world: int, has_optimizers: bool) -> list[str]:
    """Returns the warnings about the settings of a run."""
    if not config.compresses:
        idle = [name for name in given.changed if name not in ("topology", "clip_norm")]
        if not given.compresses and not idle:
            return []
        if world == 1:
            return ["lightning_topk: a single rank exchanges no gradients, so nothing is compressed."]
        where = f"topology={given.topology!r}" + " on one node" * given.compresses
        return [f"lightning_topk: {where} all-reduces whole gradients. Without effect: {', '.join(idle) or 'saving'}."]
    if config.adapts_momentum and not has_optimizers:
        return [
            "lightning_topk: attach was called without optimizer=, so its momentum is not adapted to compression, and "
            "training may end behind DDP's. Pass optimizer=, or adapt_momentum=False to silence this."
        ]
    return []
