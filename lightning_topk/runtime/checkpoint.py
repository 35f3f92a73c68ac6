"""Residuals in a checkpoint, by parameter name, for any world size.

The entry consists of numbers, strings, lists, dicts and CPU tensors, so ``torch.load(weights_only=True)`` can read it::

    version      1
    mode         "mean", or "none" with a reason
    world_size   of the run that wrote it
    steps        number of exchanged steps, for schedules and random selectors
    parameters   {name: {"residual": tensor, ...}}

A residual is the gradient not yet delivered: the mean of the workers' residuals plus the servers' residuals, as large
as the model at any world size. Every worker resumes with it, at any learning rate. Elements are in the order of their
indices (:data:`.residuals.Form`). Entries of earlier versions also have ``units``, which are ignored.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.consensus import every_rank
from lightning_topk.runtime.residuals import Residuals, by_index, by_memory, form_of

KEY = "lightning_topk"
"""The entry's key in a checkpoint."""
VERSION = 1
EMPTY: dict[str, Any] = {"version": VERSION, "mode": "mean", "world_size": 1, "steps": 0, "parameters": {}}
"""The entry of a run before its first step."""
SHARDED = "sharded"
"""The mode of an entry whose residuals are in a folder beside it (:mod:`lightning_topk.adapters.fsdp.checkpoint`)."""
ELSEWHERE = "on rank 0"
"""The mode of an entry from a rank other than 0, which has no residuals."""
_TOGETHER = (
    "Call state_dict(), or the Trainer's save_checkpoint, on every rank at the same point, between two backward "
    "passes; not on rank 0 only."
)
_NOT_HERE = {
    SHARDED: "it is one file, converted from a folder, and the residuals are only in that folder",
    ELSEWHERE: "it comes from a rank other than 0, and only rank 0's has the residuals",
}


def collect(
    residuals: Residuals,
    steps: int,
    names: Mapping[Tensor, str],
    config: TopKConfig,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Creates the entry on the group's rank 0; the same without tensors on other ranks.

    A collective: every rank must call it at the same point, between two backward passes.
    """
    entry = {**EMPTY, "world_size": dist.get_world_size(group), "steps": steps, "parameters": {}}
    exchanged = [parameter for parameter in names if parameter in residuals]
    sum_to_root = partial(dist.reduce, group=group, group_dst=0)
    on_root = dist.get_rank(group) == 0
    found: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in exchanged}
    for kind, parameter, total in undelivered(residuals, exchanged, config, device, group, sum_to_root):
        if on_root:
            found[parameter][kind] = total.to("cpu", copy=True)
    entry["parameters"] = {names[parameter]: kept for parameter, kept in found.items() if kept}
    return entry if on_root else {**entry, "mode": ELSEWHERE, "residuals": _OnRank0()}


def undelivered(
    residuals: Residuals,
    parameters: Collection[Tensor],
    config: TopKConfig,
    device: torch.device,
    group: dist.ProcessGroup | None,
    sum_: Callable[[Tensor], Any],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields what a checkpoint keeps: ``residual`` or ``velocity``, a parameter, and ``[numel]`` in index order.

    A tensor is valid until the next one is yielded, so only one more bucket is in memory. A collective: ``sum_``
    adds the shares of the group's ranks in place, on all of them or on one.
    """
    world, wanted = dist.get_world_size(group), {*parameters}
    for kind in ("residual", "velocity") if config.momentum else ("residual",):
        for several, share, sums in residuals.shares(kind, parameters, world, device):
            with every_rank("collecting the residuals for a checkpoint", _TOGETHER):
                sum_(share)
            for parameter, total in zip(several, sums, strict=True):
                if parameter in wanted:
                    yield kind, parameter, by_index(total, residuals.form(parameter))


class _OnRank0:
    """Raises an error when ``torch.distributed.checkpoint`` asks it what to write: only rank 0 has residuals.

    Otherwise it would save parts of the entries of all ranks, and load only what an entry already has.
    """

    def __create_write_items__(self, name: str, value: Any) -> None:
        raise ValueError(
            f"torch.distributed.checkpoint cannot save {name!r}, since only rank 0 has the residuals of a DDP model. "
            "Save rank 0's state.state_dict() with torch.save, and pass it to load_state_dict on every rank; with a "
            "strategy, pass residual_checkpoint=False to leave the residuals out."
        )

    def __deepcopy__(self, memo: Any) -> _OnRank0:
        return self  # async_save copies what it saves

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # torch.load(weights_only=True) reads it


def absent(reason: str, steps: int = 0) -> dict[str, Any]:
    """Returns an entry without residuals that states the reason, with the number of exchanged steps."""
    return {"version": VERSION, "mode": "none", "reason": reason, "steps": steps}


def read(names: Mapping[Tensor, str], entry: Mapping[str, Any]) -> tuple[dict[Tensor, dict[str, Tensor]], int]:
    """Returns the memories of an entry by parameter, for :meth:`.Residuals.restore`, and their checksum.

    Refuses an entry that is damaged or belongs to another model.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    with explain_unreadable():
        _check(entry, parameters)
        memories = {
            parameters[name]: {kind: by_memory(part, form_of(parameters[name])).clone() for kind, part in kept.items()}
            for name, kept in entry["parameters"].items()
        }
    checksum = 0
    for part in (part for kept in memories.values() for part in kept.values()):
        checksum = zlib.crc32(part.cpu().view(torch.uint8).numpy().data, checksum)
    return memories, checksum


@contextmanager
def explain_unreadable() -> Iterator[None]:
    """Turns any error inside into a ValueError that says how to start without residuals."""
    try:
        yield
    except Exception as error:
        known = type(error) is ValueError  # from _check
        problem = error if known else f"it was damaged ({error!r:.100}), or not written by lightning_topk"
        raise ValueError(
            f"the checkpoint's entry {KEY!r}, which holds the residuals, cannot be used: {problem}. To start with zero "
            "residuals, pass residual_checkpoint=False to the strategy, or leave load_state_dict out."
        ) from error


def _check(entry: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raises an error, a ValueError if the reason is known, unless an entry fits a model's parameters."""
    if not isinstance(entry, Mapping) or "version" not in entry:
        raise ValueError("it was not written by lightning_topk")
    if entry["version"] != VERSION:
        raise ValueError(f"it has version {entry['version']!r:.50}; this version of lightning_topk reads {VERSION}")
    if entry["mode"] != "mean":
        raise ValueError(_NOT_HERE.get(entry["mode"]) or f"its mode is {entry['mode']!r:.50} instead of 'mean'")
    if type(entry["steps"]) is not int or entry["steps"] < 0:
        raise ValueError(f"steps={entry['steps']!r:.50} must be an integer of at least 0")
    strangers = sorted(entry["parameters"].keys() - parameters.keys())
    if strangers:
        raise ValueError(f"the model has no parameter {strangers[0]!r} (one of {len(strangers)} missing)")
    for name, kept in entry["parameters"].items():
        shape = (parameters[name].numel(),)
        for part in kept.values():
            if part.shape != shape or not part.is_floating_point():
                found = f"{tuple(part.shape)} of {part.dtype}"
                raise ValueError(f"the residual of {name!r} is {found} instead of {shape} floating-point numbers")
            if not part.isfinite().all():
                raise ValueError(f"the residual of {name!r} has a NaN or an infinity")
