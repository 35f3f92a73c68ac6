"""The peers to compare: DDP, its fp16 and PowerSGD hooks, naive top-k by all-gather, and ours.

Each registers its exchange with a wrapped model. Settings of ours are arguments of :class:`lightning_topk.TopKConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.adapters.attach import attach
from lightning_topk.config import CPU_BUCKET_MB, SAVING, TopKConfig, check_name
from lightning_topk.core.layout import k_of
from lightning_topk.runtime.collectives import all_gather


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


Settings = Mapping[str, Any]
Register = Callable[[DistributedDataParallel, Settings], Any]
"""Registers an exchange with a wrapped model; ours returns its state."""


def hook(function: Callable[..., Any], state: Callable[[Settings], Any] = lambda settings: None) -> Register:
    """Registers one of torch's hooks, with a state made from the settings."""
    return lambda model, settings: model.register_comm_hook(state(settings), function)


def _power_sgd(rank: int) -> Register:
    given: dict[str, Any] = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
    return hook(powerSGD_hook.powerSGD_hook, lambda settings: powerSGD_hook.PowerSGDState(None, **given))


def ours(**own: Any) -> Register:
    """Registers our exchange with the given settings and ``own``. A ratio or saving in ``own`` replaces a given one."""
    amounts = {"ratio", "saving"} if {"ratio", "saving"} & own.keys() else set()

    def register(model: DistributedDataParallel, settings: Settings) -> Any:
        given = {name: value for name, value in settings.items() if name not in amounts}
        return attach(model, **{**given, **own})

    return register


PEERS: dict[str, Register] = {
    "ours": ours(),
    "ours, 0.001": ours(ratio=0.001),
    "ours, hierarchical": ours(topology="hierarchical"),
    "DDP": lambda model, settings: None,
    "fp16 hook": hook(default_hooks.fp16_compress_hook),
    **{f"PowerSGD {rank}": _power_sgd(rank) for rank in (1, 2, 4)},
    "naive top-k": hook(naive_topk_hook, lambda settings: (settings.get("ratio") or 0.001, {})),
}
"""Peers by name. Naive top-k sends the given ratio, or a thousandth."""


BUCKETS = f"buckets of {CPU_BUCKET_MB} MiB for ours, DDP's 25 MiB for others, one for PowerSGD"
"""What :func:`bucket_cap` gives, in words."""


def bucket_cap(peer: str) -> float | None:
    """Bucket size of a peer in MiB, or None for DDP's own.

    PowerSGD's hook hangs on gloo with several buckets (torch 2.15), so it gets one.
    """
    if peer.startswith("PowerSGD"):
        return 10_000
    return CPU_BUCKET_MB if peer.startswith(("ours", "saving", "ratio")) else None


def prepared(
    ranks: int, ratio: float | None, saving: float | None, peers: Sequence[str], nodes: bool = False
) -> tuple[dict[str, Any], list[str], str]:
    """Returns the given settings, the peers to time and the settings in words; rejects invalid arguments."""
    if ranks < 2:
        raise ValueError("it takes 2 ranks or more: one exchanges nothing.")
    settings = TopKConfig(ratio=ratio, saving=saving).changed
    for peer in peers:
        check_name("peer", peer, PEERS)
    words = ", ".join(f"{name}={value}" for name, value in settings.items()) or f"saving={SAVING:g}"
    return settings, [*peers] or [peer for peer in PEERS if nodes or peer != "ours, hierarchical"], words
