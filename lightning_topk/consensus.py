"""What all ranks must agree on: values gathered from every rank and compared, with errors that name the difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a model's GPU the current device, which is GPU 0 on every rank unless the user changes it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gathered(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gathers a picklable value from every rank. A collective: NCCL sends objects through ``device``, the model's."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    with on_device(device):
        dist.all_gather_object(rows, value, group=group)
    return rows


@contextmanager
def every_rank(action: str, remedy: str = "") -> Iterator[None]:
    """Explains the failure of a collective inside: some rank did not take part."""
    try:
        yield
    except RuntimeError as error:
        words = f"lightning_topk: {action} failed: some rank did not take part ({error}). {remedy}"
        raise RuntimeError(words.rstrip()) from error


def check_agreement(
    mine: Mapping[str, Any], remedy: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Checks that values are the same on every rank. A collective; if ranks differ, it raises on all of them."""
    rows = gathered(dict(mine), device, group)
    for rank, row in enumerate(rows):
        for name in {**rows[0], **row}:
            first, other = rows[0].get(name, "missing"), row.get(name, "missing")
            if first != other:
                raise ValueError(f"the ranks differ: {name} is {first} on rank 0 and {other} on rank {rank}. {remedy}")
