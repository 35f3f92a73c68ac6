"""Residuals in a checkpoint, by parameter name, for any world size.

The entry consists of numbers, strings, lists, dicts and CPU tensors, so ``torch.load(weights_only=True)`` can read it::

    version      1
    mode         "mean", or "none" with a reason
    world_size   of the run that wrote it
    steps        number of exchanged steps, for schedules and random selectors
    settings     compared with the settings of a run that resumes; may be missing
    parameters   {name: {"residual": tensor, ...}}

A residual is the gradient not yet delivered: the mean of the workers' residuals plus the servers' residuals, 1 x the
model at any world size. Every worker resumes with it. Elements are in the order of their indices
(:data:`.residuals.Form`).
"""

from __future__ import annotations

import reprlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.config import TopKConfig
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
SETTINGS = ("ratio", "saving", "wire", "topology", "error_feedback")
"""Settings whose changes are reported when a run resumes."""


def collect(
    residuals: Residuals,
    steps: int,
    names: Mapping[Tensor, str],
    config: TopKConfig,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Creates the entry. A collective: every rank must call it at the same point, between two backward passes.

    Returns:
        The entry on the group's rank 0; the same without tensors on other ranks.
    """
    root = 0 if group is None else dist.get_global_rank(group, 0)
    entry = {**without_parameters(steps, config, dist.get_world_size(group)), "parameters": {}}
    exchanged = [parameter for parameter in names if parameter in residuals]
    sum_to_root = partial(dist.reduce, dst=root, group=group)
    on_root = dist.get_rank(group) == 0
    for kind, parameter, total in undelivered(residuals, exchanged, config, device, group, sum_to_root):
        if on_root:
            entry["parameters"].setdefault(names[parameter], {})[kind] = total.cpu()
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

    A collective: ``sum_`` adds the shares of the group's ranks in place, on all of them or on one.
    """
    world = dist.get_world_size(group)
    for kind in ("residual", "velocity") if config.momentum else ("residual",):
        held = residuals.held(kind)
        for parameter in parameters:
            nothing = torch.zeros(()).expand(parameter.numel())
            mine = still_to_deliver(held.get(parameter, (nothing, nothing)), parameter, world).to(device)
            total = by_index(mine, residuals.form(parameter)).contiguous()
            try:
                sum_(total)
            except RuntimeError as error:
                raise RuntimeError(
                    "collecting the residuals for a checkpoint failed: some rank did not take part. Call state_dict(), "
                    "or the Trainer's save_checkpoint, on every rank at the same point, between two backward passes; "
                    "not on rank 0 only."
                ) from error
            yield kind, parameter, total


class _OnRank0:
    """Refuses ``torch.distributed.checkpoint``, which asks it what to write, where only rank 0 has residuals.

    That would save parts of the entries of all ranks, and load only what an entry already has.
    """

    def __create_write_items__(self, name: str, value: Any) -> None:
        raise ValueError(
            f"torch.distributed.checkpoint cannot save {name!r}, since only rank 0 has the residuals of a DDP model. "
            "Save rank 0's state.state_dict() with torch.save, and pass it to load_state_dict on every rank; with a "
            "strategy, pass residual_checkpoint=False to leave the residuals out."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # torch.load(weights_only=True) reads it


def still_to_deliver(held: tuple[Tensor, Tensor], parameter: Tensor, world: int) -> Tensor:
    """This rank's share ``[numel]`` of the gradient not yet delivered; the shares of ``world`` ranks add up to it.

    ``held`` is the rank's memory as a worker and as a server (:meth:`Residuals.held`).
    """
    worker, server = held
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    total = torch.zeros(parameter.numel(), dtype=dtype, device=worker.device)
    return total.add_(worker, alpha=1 / world).add_(server.to(worker.device))


def without_parameters(steps: int, config: TopKConfig, world: int) -> dict[str, Any]:
    """The entry of a rank without residuals."""
    return {**EMPTY, "world_size": world, "steps": steps, "settings": settings_of(config)}


def changes(entry: Mapping[str, Any], config: TopKConfig, keeps: bool) -> str:
    """Message that settings differ from those of an entry; empty if none do, or if the entry has none.

    ``keeps`` says whether this run keeps residuals.
    """
    before, now = entry.get("settings", {}), settings_of(config)
    differ = [name for name in SETTINGS if name in before and before[name] != now[name]]
    if "topology" in differ and now["topology"] is None:  # the default depends on the ranks
        differ.remove("topology")
    words = {name: f"{name}={now[name]!r} (was {before[name]!r})" for name in differ}
    if "ratio" in differ and "saving" in differ:  # a run has one of them
        new, old = (next(name for name in ("ratio", "saving") if each[name] is not None) for each in (now, before))
        del words["ratio"], words["saving"]
        words = {new: f"{new}={now[new]!r} (checkpoint: {old}={before[old]!r})", **words}
    changed = ", ".join(words.values())
    return changed and f"lightning_topk: resuming with {changed}." + " Stored residuals are kept." * keeps


def settings_of(config: TopKConfig) -> dict[str, Any]:
    """The values of ``SETTINGS``, in types that ``torch.load(weights_only=True)`` reads."""
    found = {**config.summary(), "wire": config.wire_name}
    return {name: value if _is_plain(value := found[name]) else repr(value) for name in SETTINGS}


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, strings and lists of them."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def absent(reason: str, steps: int = 0) -> dict[str, Any]:
    """Returns an entry without residuals that states the reason, with the number of exchanged steps."""
    return {"version": VERSION, "mode": "none", "reason": reason, "steps": steps}


def restore(residuals: Residuals, names: Mapping[Tensor, str], entry: Mapping[str, Any]) -> None:
    """Replaces this rank's residuals with those of an entry.

    If it is damaged or belongs to another model, a ValueError says how to start with zero residuals.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    with unusable_if_it_fails():
        problem = _problem(entry, parameters)
    if problem:
        raise _unusable(problem)
    residuals.restore(
        {
            parameters[name]: {kind: by_memory(part, form_of(parameters[name])).clone() for kind, part in kept.items()}
            for name, kept in entry["parameters"].items()
        }
    )


@contextmanager
def unusable_if_it_fails() -> Iterator[None]:
    """Context for reading an entry: if that fails, a ValueError says how to start with zero residuals."""
    try:
        yield
    except Exception as error:
        raise _unusable(f"it was damaged ({error!r})") from error


def _unusable(problem: str) -> ValueError:
    return ValueError(
        f"the checkpoint's entry {KEY!r}, which holds the residuals, cannot be used: {problem}. To start with zero "
        "residuals, pass residual_checkpoint=False to the strategy, or leave load_state_dict out."
    )


def _problem(entry: Any, parameters: Mapping[str, Tensor]) -> str | None:
    if not isinstance(entry, Mapping) or "version" not in entry:
        return "it was not written by lightning_topk"
    if entry["version"] != VERSION:
        version = reprlib.repr(entry["version"])
        return f"it has version {version}; this version of lightning_topk reads version {VERSION}"
    if entry.get("mode") == SHARDED:
        return "it is one file, converted from a folder, and the residuals are only in that folder"
    missing = EMPTY.keys() - entry.keys()
    if missing:
        return f"it is incomplete: {', '.join(sorted(missing))} is missing"
    if entry["mode"] == ELSEWHERE:
        return "it comes from a rank other than 0, and only rank 0's has the residuals"
    if entry["mode"] != "mean":
        return f"its mode is {reprlib.repr(entry['mode'])} instead of 'mean'"
    strangers = sorted(entry["parameters"].keys() - parameters.keys())
    if strangers:
        return f"the model has no parameter {strangers[0]!r} (one of {len(strangers)} missing)"
    for count, least in (("steps", 0), ("world_size", 1)):
        if type(entry[count]) is not int or entry[count] < least:
            return f"{count}={reprlib.repr(entry[count])} must be an integer of at least {least}"
    settings = entry.get("settings", {})
    if not isinstance(settings, Mapping) or not all(map(_is_plain, settings.values())):
        return f"its settings are {reprlib.repr(settings)} instead of numbers and strings by name"
    for name, kept in entry["parameters"].items():
        for part in kept.values():
            problem = _problem_of(part, (parameters[name].numel(),))
            if problem:
                return f"the residual of {name!r} {problem}"
    return None


def _problem_of(part: Any, shape: tuple[int, ...]) -> str | None:
    if not isinstance(part, Tensor) or part.shape != shape:
        return f"is {tuple(part.shape) if isinstance(part, Tensor) else f'a {type(part).__name__}'} instead of {shape}"
    if not part.is_floating_point() or part.layout != torch.strided:
        return f"is of {part.dtype} and {part.layout} instead of floating-point numbers"
    return None if part.isfinite().all() else "has a NaN or an infinity"
