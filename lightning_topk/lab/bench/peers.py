"""The alternatives: DDP, its fp16 and PowerSGD hooks, top-k with all-gather as it is mostly written; and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.config import TopKConfig
from lightning_topk.core.layout import kept_count
from lightning_topk.ddp import TopKState, attach


def naive_topk_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
    """Top-k with error feedback by all-gather of float32 values and int64 positions; it blocks, as most hooks do.

    The state is the ratio, and the residuals by bucket.
    """
    ratio, residuals = state
    g, world = bucket.buffer(), dist.get_world_size()
    kept = residuals.get(bucket.index())
    a = g if kept is None or len(kept) != len(g) else g + kept
    index = a.abs().topk(kept_count(len(a), ratio)).indices
    values = a[index]
    residuals[bucket.index()] = a.index_fill(0, index, 0)
    everyones = [values.new_empty(world, len(values)), index.new_empty(world, len(index))]
    for received, mine in zip(everyones, (values, index), strict=True):
        dist.all_gather_into_tensor(received.view(-1), mine)
    g.zero_().index_add_(0, everyones[1].view(-1), everyones[0].view(-1)).div_(world)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(g)
    return future


def _fp16(model: DistributedDataParallel, ratio: float) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _power_sgd(rank: int) -> Callable[[DistributedDataParallel, float], None]:
    def register(model: DistributedDataParallel, ratio: float) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def _naive(model: DistributedDataParallel, ratio: float) -> None:
    model.register_comm_hook((ratio, {}), naive_topk_hook)


def _ours(**settings: Any) -> Callable[[DistributedDataParallel, float], TopKState]:
    return lambda model, ratio: attach(model, ratio=ratio, init_sync=False, **settings)


PEERS: dict[str, Callable[[DistributedDataParallel, float], TopKState | None]] = {
    "ours": _ours(),
    "ours, bf16": _ours(wire="bf16"),
    "ours, hierarchical": _ours(topology="hierarchical"),
    "ours, auto": _ours(topology="auto"),
    "DDP": lambda model, ratio: None,
    "fp16 hook": _fp16,
    "PowerSGD 1": _power_sgd(1),
    "PowerSGD 4": _power_sgd(4),
    "naive top-k": _naive,
}
"""By name: registers the exchange with a wrapped model, at a ratio; ours returns its state."""

ON_NODES = {"ours, hierarchical"}
"""Peers that differ from the others only where a host has several ranks."""

ONE_BUCKET = {"PowerSGD 1", "PowerSGD 4"}
"""PowerSGD's hook hangs on gloo with several buckets (torch 2.15): it gets one."""


def check(ranks: int, ratio: float) -> None:
    """Refuses what cannot be timed, before anything is started.

    Raises:
        ValueError: There is one rank only, or the ratio is impossible.
    """
    if ranks < 2:
        raise ValueError("it takes 2 ranks or more: one exchanges nothing.")
    TopKConfig(ratio=ratio)
