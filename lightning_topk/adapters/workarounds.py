"""Workarounds for torch and Lightning: each says what misbehaves, in which version, and what makes it obsolete."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous


def connect_after_restart(strategy: Any) -> None:
    """Initialises a strategy's default group without the addresses of ranks that died, if torchrun may restart ranks.

    torch 2.15 gives restarted workers the store of the last attempt. The first rank to connect would read another
    rank's old address there, and fail. Obsolete once torchrun clears the store or gives each attempt a prefix.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or dist.is_initialized():
        return
    rank, world, device = strategy.global_rank, strategy.world_size, strategy.root_device
    timeout = strategy._timeout or default_pg_timeout
    store, *_ = next(rendezvous("env://", rank, world, timeout=timeout))
    attempt = _name_of_attempt(store, rank, world, timeout)
    dist.init_process_group(
        strategy._get_process_group_backend(),
        store=dist.PrefixStore(attempt, store),  # type: ignore[attr-defined]  # exported at run time
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )


def _name_of_attempt(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """Returns a name that the current ranks agree on and that no earlier attempt had.

    The store outlives the ranks, and no rank knows how often the others were restarted, since torchrun counts per
    node. So each rank writes a hello with a random word, and rank 0 answers every hello, stale ones included,
    until all current ranks have acknowledged.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"hello {rank}", mine)
        store.wait([f"answer {rank} {mine}"], timeout)
        name: str = store.get(f"answer {rank} {mine}").decode()
        store.set(f"heard {rank} {name}", "")
        return name
    silent = set(range(1, world))
    while silent:
        for other in [other for other in silent if store.check([f"hello {other}"])]:
            store.set(f"answer {other} {store.get(f'hello {other}').decode()}", mine)
        silent = {other for other in silent if not store.check([f"heard {other} {mine}"])}
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(silent)} did not connect within {timeout}.")
        time.sleep(0.01)
    return mine


def own_memory_(module: torch.nn.Module) -> None:
    """Copies the tensors of a CPU model out of shared memory.

    Lightning 2.6 does so for spawned workers, but not with ``start_method="forkserver"``: the optimizers of all ranks
    would then update the same weights. Obsolete once its launcher treats a fork server like ``spawn``.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()
