"""Messages to the user during training, shown once and on rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from lightning_topk.bucket import TOLERANCE, Bucket, Buckets
from lightning_topk.config import TopKConfig
from lightning_topk.core import ops
from lightning_topk.volume import Volume

LOGGER = logging.getLogger("lightning_topk")


class WarnOnce:
    """Shows each message to the user once, on rank 0.

    Args:
        tell: Shows warnings, and information too unless ``note`` is set. Default: the logger.
        rank: This rank.
        note: Shows information.
    """

    def __init__(
        self, tell: Callable[[str], None] | None, rank: int, note: Callable[[str], None] | None = None
    ) -> None:
        self._tell, self._note, self._rank = tell or LOGGER.warning, note or tell or LOGGER.info, rank
        self.said: set[str] = set()
        """Messages so far, on every rank."""

    def __call__(self, *messages: str) -> None:
        """Shows warnings, unless they were shown before."""
        for message in messages:
            self._show(message, self._tell)

    def note(self, *messages: str) -> None:
        """Shows information, unless it was shown before."""
        for message in messages:
            self._show(message, self._note)

    def _show(self, message: str, by: Callable[[str], None]) -> None:
        if self._rank == 0 and message and message not in self.said:
            by(message)
        self.said.add(message)


def start_message(config: TopKConfig, world: int, local: int) -> str:
    """Says what is in force: the resolved topology, the ranks and the amount; empty if nothing is compressed."""
    if not config.compresses or world == 1:
        return ""
    ranks = f"{world // local} nodes of {local} ranks" if 1 < local < world else f"{world} ranks"
    amount = f"ratio={config.ratio!r}" if config.saving is None else f"saving={config.saving:g}"
    return f"lightning_topk: topology={config.topology!r} on {ranks}, {amount}."


def startup_warnings(requested: TopKConfig, config: TopKConfig, world: int, has_optimizers: bool) -> list[str]:
    """Returns the warnings about the settings of a run."""
    if not config.compresses:
        idle = [name for name in requested.changed if name not in ("topology", "clip_norm")]
        if not requested.compresses and not idle:
            return []
        if world == 1:
            return ["lightning_topk: a single rank exchanges no gradients, so nothing is compressed."]
        where = f"topology={requested.topology!r}" + " on one node" * requested.compresses
        return [f"lightning_topk: {where} all-reduces all gradients. Without effect: {', '.join(idle) or 'saving'}."]
    if config.adapts_momentum and not has_optimizers:
        return [
            "lightning_topk: attach was called without optimizer=, so its momentum is not adapted to compression, and "
            "training may end behind DDP's. Pass optimizer=, or adapt_momentum=False to silence this."
        ]
    return []


def slow_compression(config: TopKConfig, device: torch.device) -> str:
    """Warning that compression runs in plain torch on a CPU, with the reason; empty if it does not."""
    if device.type != "cpu" or not config.compresses or ops.fast(device) is not None:
        return ""
    remedy = f"it fails here with {ops.FAILED['numba']}" if "numba" in ops.FAILED else "pip install numba."
    return f"lightning_topk: compression on the CPU takes several times as long without numba: {remedy}"


def volume_of(settings: Buckets, buckets: Sequence[Bucket], rank: int, step: int, epoch: int, voting: bool) -> Volume:
    """Predicts the bytes that a rank sends in a step; with ``voting``, ranks share which parameters they used."""
    plans = [(settings.plan_of(bucket), len(bucket) if voting else None) for bucket in buckets]
    return sum((plan.volume(rank, step, epoch, voters) for plan, voters in plans), Volume())


def saving_warnings(settings: Buckets, buckets: Sequence[Bucket], sent: Volume) -> list[str]:
    """Returns the warnings about ``saving=`` once the buckets are final; ``sent`` are the bytes of a step."""
    if settings.config.saving is None or not settings.config.compresses:
        return []
    found = _missed_saving(settings, buckets, sent), _missed_between_nodes(settings, sent), _narrow(settings, buckets)
    return [words for words in found if words]


def _missed_saving(settings: Buckets, buckets: Sequence[Bucket], sent: Volume) -> str:
    """Warning that the saving is lower than requested, with the reason; empty if it is not."""
    asked, by_node = settings.config.saving or 0, settings.config.by_node
    seen = sent.saved(by_node)
    if seen >= asked * (1 - TOLERANCE):
        return ""
    together = volume_of(settings, [tuple(p for bucket in buckets for p in bucket)], 0, 0, 0, voting=False)
    small, remedy = "this model is", "Use DDP"
    if len(buckets) > 1 and together.saved(by_node) >= asked * (1 - TOLERANCE):
        small, remedy = "its buckets are", "Use a larger bucket_cap_mb= or, with fully_shard, larger modules"
    return (
        f"lightning_topk: saving={asked:g} was requested, but {small} too small: each step saves {seen:.3g}x. {remedy}."
    )


def _missed_between_nodes(settings: Buckets, sent: Volume) -> str:
    """Warning that a node saves less than each of its ranks, with the remedy; empty if it does not."""
    asked = settings.config.saving or 0
    alone = settings.config.by_node or settings.local == 1 or not sent.inter_node
    if alone or sent.node_saving >= 0.9 * asked:
        return ""
    return (
        f"lightning_topk: saving={asked:g} holds for each rank, but between nodes each step saves only "
        f"{sent.node_saving:.3g}x, since the ranks of a node send for themselves. Pass topology='hierarchical', the "
        "default on GPUs; on CPUs it may take longer per step."
    )


def _narrow(settings: Buckets, buckets: Sequence[Bucket]) -> str:
    """Explains the baseline of ``saving`` for gradients of less than four bytes per entry; empty otherwise."""
    asked, narrow = settings.config.saving or 0, [bucket for bucket in buckets if bucket[0].itemsize < 4]
    plans = [plan for bucket in narrow if (plan := settings.plan_of(bucket)).numel]
    if not plans:
        return ""
    kept = sum(plan.density() * plan.numel for plan in plans) / sum(plan.numel for plan in plans)
    dtype = str(narrow[0][0].dtype).removeprefix("torch.")
    return (
        f"lightning_topk: saving={asked:g} is relative to the {dtype} gradients that DDP would send: the density "
        f"is {kept:.2g}. saving={asked * narrow[0][0].itemsize / 4:g} sends as many entries as saving={asked:g} does "
        "of float32 gradients."
    )
