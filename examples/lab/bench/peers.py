"""The peers to compare: those of the package's own bench by several settings, and naive top-k by all-gather.

Settings of ours are arguments of :class:`lightning_topk.TopKConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_topk.bench import peers
from lightning_topk.config import CPU_BUCKET_MB, SAVING, TopKConfig, check_name
from lightning_topk.core.layout import k_of
from lightning_topk.runtime.groups import all_gather


def naive_topk_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
    """Top-k with error feedback by all-gather of float32 values and int64 positions; blocks, as most hooks do.

    ``state`` holds the ratio, and the residuals by bucket.
    """
    ratio, residuals = state
    g, world = bucket.buffer(), dist.get_world_size()
    kept = residuals.get(bucket.index())
    a = g if kept is None or len(kept) != len(g) else g + kept
    index = a.abs().topk(k_of(len(a), ratio)).indices
    values = a[index]
    residuals[bucket.index()] = a.index_fill(0, index, 0)
    everyones = [values.new_empty(world, len(values)), index.new_empty(world, len(index))]
    for received, mine in zip(everyones, (values, index), strict=True):
        all_gather(received.view(-1), mine)
    g.zero_().index_add_(0, everyones[1].view(-1), everyones[0].view(-1)).div_(world)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(g)
    return future


PEERS: dict[str, peers.Peer] = {
    "no exchange": peers.ALONE,
    "ours": peers.ours(),
    "ours, 0.001": peers.ours(ratio=0.001, saving=None),
    "ours, hierarchical": peers.ours(topology="hierarchical"),
    "DDP": peers.DENSE,
    "fp16 hook": peers.hook(default_hooks.fp16_compress_hook, lambda model: model.process_group),
    **{f"PowerSGD {rank}": peers.power_sgd(rank) for rank in (1, 2, 4)},
    "naive top-k": peers.Peer(
        lambda model, settings: model.register_comm_hook((settings.get("ratio") or 0.001, {}), naive_topk_hook)
    ),
}
"""Peers by name. Naive top-k sends the given ratio, or a thousandth."""


BUCKETS = f"buckets of {CPU_BUCKET_MB} MiB for ours, DDP's 25 MiB for others, one for PowerSGD"
"""What :class:`.Peer` gives, in words."""


def prepared(
    ranks: int, ratio: float | None, saving: float | None, chosen: Sequence[str], nodes: bool = False
) -> tuple[dict[str, Any], list[str], str]:
    """Returns the given settings, the peers to time and the settings in words; rejects invalid arguments."""
    if ranks < 2:
        raise ValueError("it takes 2 ranks or more: one exchanges nothing.")
    settings = TopKConfig(ratio=ratio, saving=saving).changed
    for peer in chosen:
        check_name("peer", peer, PEERS)
    words = ", ".join(f"{name}={value}" for name, value in settings.items()) or f"saving={SAVING:g}"
    known = [peer for peer in PEERS if peer != "no exchange" and (nodes or peer != "ours, hierarchical")]
    return settings, [*chosen] or known, words
