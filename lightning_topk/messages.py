"""Messages to the user during training, shown once and on rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_topk.bucket import TOLERANCE, Bucket, Buckets, TooLargeError
from lightning_topk.config import TopKConfig
from lightning_topk.core import ops
from lightning_topk.volume import Volume, format_bytes

LOGGER = logging.getLogger("lightning_topk")


class WarnOnce:
    """Shows each message once, on rank 0: warnings through ``tell``, information through ``note``, if set."""

    def __init__(
        self, tell: Callable[[str], None] | None, rank: int, note: Callable[[str], None] | None = None
    ) -> None:
        self._tell, self._note, self.rank = tell or LOGGER.warning, note or tell or LOGGER.info, rank
        self.said: set[str] = set()  # kept on every rank

    def __call__(self, *messages: str, show: Callable[[str], None] | None = None) -> None:
        """Shows warnings, unless they were shown before."""
        for message in messages:
            if self.rank == 0 and message and message not in self.said:
                (show or self._tell)(message)
            self.said.add(message)

    def note(self, *messages: str) -> None:
        """Shows information, unless it was shown before."""
        self(*messages, show=self._note)


def start_message(config: TopKConfig, world: int, local: int) -> str:
    """Names the ratio or saving, the ranks and the resolved topology; empty if nothing is compressed."""
    if not config.compresses or world == 1:
        return ""
    ranks = f"{world // local} nodes of {local} ranks" if 1 < local < world else f"{world} ranks"
    amount = f"ratio={config.ratio!r}" if config.saving is None else f"saving={config.saving:g}"
    how = "; each rank averages one shard" * (config.topology == "sharded")
    return (
        f"lightning_topk: gradients are compressed ({amount}) and exchanged among {ranks}{how} "
        f"(topology={config.topology!r})."
    )


def sent_message(config: TopKConfig, sent: Volume, passes: int) -> str:
    """Compares the average bytes sent in a pass with DDP's; empty if nothing was compressed."""
    counted = sent.counted(config.by_node)
    if not config.compresses or not counted:
        return ""
    who, whom = ("node", " to others") if config.by_node else ("rank", "")
    ours, dense = (format_bytes(nbytes / passes) for nbytes in (counted, sent.dense))
    return f"lightning_topk: this {who} sent {ours}{whom} instead of {dense} a step ({sent.dense / counted:.1f}x less)."


def startup_warnings(requested: TopKConfig, config: TopKConfig, world: int, has_optimizers: bool) -> list[str]:
    """Returns the warnings about the settings of a run."""
    if not config.compresses:
        idle = [name for name in requested.changed if name not in ("topology", "clip_norm")]
        if not requested.compresses and not idle:
            return []
        if world == 1:
            return ["lightning_topk: a single rank exchanges no gradients, so nothing is compressed."]
        where = f"topology={requested.topology!r}" + " on one node" * requested.compresses
        return [f"lightning_topk: {where} all-reduces whole gradients. Without effect: {', '.join(idle) or 'saving'}."]
    if config.adapts_momentum and not has_optimizers:
        return [
            "lightning_topk: attach was called without optimizer=, so momentum is not adapted to compression, "
            "residuals do not follow the learning rate, and training may end behind DDP's. "
            "Pass optimizer=. Without a torch optimizer, pass adapt_momentum=False to silence this."
        ]
    return []


def slow_compression(config: TopKConfig, device: torch.device) -> str:
    """Warns if compression runs in plain torch on a CPU, and says why; empty if it does not."""
    if device.type != "cpu" or not config.compresses or ops.fast(device) is not None:
        return ""
    remedy = f"numba fails here with {ops.FAILED['numba']}" if "numba" in ops.FAILED else "pip install numba."
    return f"lightning_topk: compression on the CPU is several times slower without numba: {remedy}"


def saving_warnings(settings: Buckets, buckets: Sequence[Bucket], sent: Volume) -> list[str]:
    """Returns the warnings about a missed ``saving=`` once the buckets are final; ``sent`` are the bytes of a step."""
    asked, by_node, found = settings.config.saving, settings.config.by_node, []
    if asked is None or not settings.config.compresses:
        return []
    seen, least = sent.saved(by_node), asked * (1 - TOLERANCE)
    if seen < least:
        small, remedy = "this model is", "Use DDP"
        if len(buckets) > 1 and _together(settings, buckets).saved(by_node) >= least:
            small, remedy = "its buckets are", "Use a larger bucket_cap_mb= or, with fully_shard, larger modules"
        found.append(
            f"lightning_topk: saving={asked:g} was requested, but {small} too small: each step saves {seen:.3g}x. "
            f"{remedy}."
        )
    if seen > asked * (1 + TOLERANCE) and all(settings.plan_of(bucket).density() == 1 for bucket in buckets):
        found.append(
            f"lightning_topk: saving={asked:g} was requested, but every entry is sent, rounded to "
            f"{settings.config.wire_name}, and each step saves {seen:.3g}x. Pass wire='bf16' or 'fp32' for more digits."
        )
    if not by_node and settings.local > 1 and sent.inter_node and sent.node_saving < 0.9 * asked:
        found.append(
            f"lightning_topk: saving={asked:g} holds for each rank, but between nodes each step saves only "
            f"{sent.node_saving:.3g}x, since each rank of a node sends its own entries. Pass topology='hierarchical', "
            "the default on GPUs; on CPUs its steps may take longer."
        )
    return found


def _together(settings: Buckets, buckets: Sequence[Bucket]) -> Volume:
    """Returns the bytes of a step with a single bucket per dtype; none if such a bucket would be too large."""
    by_dtype: dict[torch.dtype, tuple[Tensor, ...]] = {}
    for bucket in buckets:
        by_dtype[bucket[0].dtype] = by_dtype.get(bucket[0].dtype, ()) + bucket
    try:
        return sum((plan.volume() for plan in settings.planned([*map(Bucket, by_dtype.values())])), Volume())
    except TooLargeError:
        return Volume()
