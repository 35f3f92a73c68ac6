"""Residuals in a checkpoint, by parameter name, for any world size.

The entry consists of numbers, strings, lists, dicts and CPU tensors, so ``torch.load(weights_only=True)`` can read it::

    version      1
    mode         "mean", "full", or "none" with a reason
    world_size   of the run that wrote it
    node_sizes   {name: ranks that exchanged it as one worker}: a node's, with topology="hierarchical"; 1 if missing
    steps        number of exchanged steps, for schedules and random selectors
    rates        learning rates of the last step, for lr_ratio
    buckets      the parameters' names, bucket by bucket
    settings     those that matter when a run goes on with others; may be missing
    parameters   {name: {"worker": {"residual": tensor, ...}, "server": {"residual": tensor}}}

The gradient still to be delivered is the mean of the workers' residuals plus the servers' residual. Mode ``"mean"``
stores only these two, 2 x the model size for any world size; every worker resumes with the mean. Mode ``"full"`` stores
the residual of each worker, ``[W, numel]``: a run resumed with the same world size and settings is bit-identical to an
uninterrupted one. At another world size, workers resume with the mean. Where the ranks of a node form one worker, each
row holds the piece of its rank and zeros elsewhere.

Elements are in the order of their indices (:mod:`lightning_topk.runtime.forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Endpoint
from lightning_topk.runtime.forms import Form
from lightning_topk.runtime.residuals import Residuals

KEY = "lightning_topk"
"""The entry's key in a checkpoint."""
VERSION = 1
EMPTY: dict[str, Any] = {
    "version": VERSION,
    "mode": "mean",
    "world_size": 1,
    "steps": 0,
    "rates": [],
    "buckets": [],
    "parameters": {},
}
"""The entry of a run before its first step."""
SHARDED = "sharded"
"""The mode of an entry whose residuals are in a folder beside it (:mod:`lightning_topk.runtime.sharded_checkpoint`)."""
Mode = Literal["mean", "full"]
KEPT = ("residual", "velocity")
"""What a worker may keep of a parameter."""
SETTINGS = ("ratio", "saving", "wire", "topology", "error_feedback")
"""What is said to have changed, when a run goes on."""


def collect(
    residuals: Residuals,
    names: Mapping[Tensor, str],
    mode: Mode,
    config: TopKConfig,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Creates the entry. A collective: every rank must call it at the same point, between two backward passes.

    Args:
        residuals: This rank's residuals.
        names: The parameters' names, in the same order on every rank.
        mode: ``"mean"`` or ``"full"``.
        config: The settings that the user gave.
        device: Device for the collectives' tensors.
        group: The ranks that exchange gradients. Default: all.

    Returns:
        The entry on the group's rank 0; the same without tensors on other ranks.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts = residuals.memories()
    parameters: dict[str, Any] = {}
    known = {parameter: name for parameter, name in names.items() if parameter in parts}
    for (parameter, name), keys in zip(known.items(), _kept_anywhere(parts, known, device, group), strict=True):
        worker, server = parts[parameter]
        workers = None if mode == "full" else world // residuals.kept.pieces.counts.get(parameter, 1)
        nothing = torch.zeros(parameter.numel(), dtype=torch.promote_types(parameter.dtype, torch.float32))
        by_index = residuals.kept.form(parameter).by_index
        kept = {key: _gather(by_index(worker.get(key, nothing)).to(device), group, workers) for key in keys}
        served = {key: _gather(by_index(part).to(device), group, 1) for key, part in server.items()}
        if rank == 0:
            parameters[name] = {"worker": kept, "server": served}
    buckets = [
        [names[p] for p in bucket]
        for bucket in residuals.progress.buckets
        if all(p in names and p in parts for p in bucket)  # a bucket of empty parameters only is never exchanged
    ]
    node_sizes = {names[p]: count for p, count in residuals.kept.pieces.counts.items() if p in names and count > 1}
    header = without_parameters(residuals, buckets, config, world)
    return {**header, "mode": mode, "node_sizes": node_sizes, "parameters": parameters}


def without_parameters(
    residuals: Residuals, buckets: list[list[str]], config: TopKConfig, world: int
) -> dict[str, Any]:
    """The entry of a rank, but for the residuals.

    Args:
        residuals: The rank's residuals.
        buckets: Names of the parameters that were exchanged together.
        config: The settings that the user gave.
        world: Number of ranks.
    """
    progress = residuals.progress
    return {
        **EMPTY,
        "world_size": world,
        "steps": progress.steps,
        "rates": list(progress.learning_rates),
        "buckets": buckets,
        "settings": settings_of(config),
    }


def _kept_anywhere(
    parts: Mapping[Tensor, Any], parameters: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> list[list[str]]:
    """What some rank's worker keeps of each parameter: a rank that keeps nothing of it sends zeros. A collective."""
    rows = [[key in parts[parameter][0] for key in KEPT] for parameter in parameters]
    if not rows:
        return []
    anywhere = torch.tensor(rows, dtype=torch.uint8, device=device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    return [[key for key, kept in zip(KEPT, row, strict=True) if kept] for row in anywhere.tolist()]


def changes(entry: Mapping[str, Any], config: TopKConfig) -> str:
    """Which settings differ from those of an entry, in words; empty if none do, or if the entry names none.

    Args:
        entry: What :func:`collect` returned.
        config: The settings that the user gave.
    """
    before, now = entry.get("settings", {}), settings_of(config)
    differ = [name for name in SETTINGS if name in before and before[name] != now[name]]
    return ", ".join(f"{name}={now[name]!r} instead of {before[name]!r}" for name in differ)


def settings_of(config: TopKConfig) -> dict[str, Any]:
    """The settings that matter, as what ``torch.load(weights_only=True)`` reads."""
    found = {**config.summary(), "wire": config.wire_name}
    plain = (bool, int, float, str, list, type(None))
    return {name: value if isinstance(value := found[name], plain) else repr(value) for name in SETTINGS}


def absent(reason: str) -> dict[str, Any]:
    """Returns an entry without residuals that states the reason."""
    return {"version": VERSION, "mode": "none", "reason": reason}


def _gather(part: Tensor, group: dist.ProcessGroup | None, workers: int | None) -> Tensor | None:
    """Reduces or gathers ``part`` ``[numel]`` to the CPU of rank 0.

    Args:
        part: This rank's tensor.
        group: The ranks that take part.
        workers: Returns the sum over the ranks divided by this, ``[numel]``; None: all ranks' tensors, ``[W, numel]``.

    Returns:
        The result on rank 0; None on other ranks.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    root = 0 if group is None else dist.get_global_rank(group, 0)
    if workers is None:
        rows = [torch.empty_like(part) for _ in range(world)] if rank == 0 else None
        dist.gather(part.contiguous(), rows, dst=root, group=group)
        return torch.stack([row.cpu() for row in rows]) if rows else None
    total = part.clone(memory_format=torch.contiguous_format)
    dist.reduce(total, dst=root, group=group)
    if workers > 1:
        total /= workers
    return total.cpu() if rank == 0 else None


def restore(
    residuals: Residuals,
    names: Mapping[Tensor, str],
    entry: Mapping[str, Any],
    make: Callable[[tuple[Tensor, ...]], tuple[TopKConfig, Endpoint]],
    rank: int,
    world: int,
) -> None:
    """Replaces this rank's residuals with those of an entry.

    Args:
        residuals: This rank's residuals.
        names: The parameters' names.
        entry: What :func:`collect` returned on rank 0.
        make: Returns the settings in force for a bucket of parameters, and its endpoint with empty memories.
        rank: This rank.
        world: Number of ranks.

    Raises:
        ValueError: The entry is damaged or belongs to another model. The message says how to start with zero residuals.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    _check(entry, parameters)
    known = {parameters[name]: sides for name, sides in entry["parameters"].items()}
    nodes = entry.get("node_sizes", {})

    def own(parameter: Tensor, count: int) -> dict[str, Tensor]:
        """This rank's worker residual: its own if world size and ranks per worker are unchanged, else the mean."""
        kept, saved = known[parameter]["worker"], nodes.get(names[parameter], 1)
        if entry["mode"] == "mean":
            found = {key: part.clone() for key, part in kept.items()}
        elif (entry["world_size"], saved) == (world, count):
            found = {key: rows[rank].clone() for key, rows in kept.items()}
        else:
            found = {key: rows.sum(dim=0) / (len(rows) // saved) for key, rows in kept.items()}
        return {key: Form.of(parameter).by_memory(part) for key, part in found.items()}

    buckets = [tuple(parameters[name] for name in bucket if name in entry["parameters"]) for bucket in entry["buckets"]]
    residuals.restore(
        filter(None, buckets),
        own,
        {
            parameter: {key: Form.of(parameter).by_memory(part) for key, part in sides["server"].items()}
            for parameter, sides in known.items()
        },
        make,
    )
    residuals.progress.steps, residuals.progress.learning_rates = entry["steps"], list(entry["rates"])


def _check(entry: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raises ValueError if an entry cannot be used."""
    try:
        problem = _problem(entry, parameters)
    except (AttributeError, KeyError, TypeError) as error:
        problem = f"it was damaged ({error!r})"
    if problem:
        raise ValueError(
            f"the checkpoint's entry {KEY!r}, which holds the residuals, cannot be used: {problem}. To start with zero "
            "residuals, pass residual_checkpoint='none' to the strategy, or leave load_state_dict out."
        )


def _problem(entry: Any, parameters: Mapping[str, Tensor]) -> str | None:
    if not isinstance(entry, Mapping) or "version" not in entry:
        return "it was not written by lightning_topk"
    if entry["version"] != VERSION:
        return f"it has version {entry['version']!r}; this version of lightning_topk reads version {VERSION}"
    if entry.get("mode") == SHARDED:
        return "it is one file, converted from a folder, and the residuals are only in that folder"
    missing = {"mode", "world_size", "steps", "rates", "buckets", "parameters"} - entry.keys()
    if missing:
        return f"it is incomplete: {', '.join(sorted(missing))} is missing"
    if entry["mode"] not in ("mean", "full"):
        return f"its mode is {entry['mode']!r} instead of 'mean' or 'full'"
    strangers = sorted(entry["parameters"].keys() - parameters.keys())
    if strangers:
        return f"the model has no parameter {strangers[0]!r} (one of {len(strangers)} missing)"
    if type(entry["steps"]) is not int or type(entry["world_size"]) is not int:
        return f"steps={entry['steps']!r} and world_size={entry['world_size']!r} must be integers"
    for name, node in entry.get("node_sizes", {}).items():
        if type(node) is not int or node < 1 or entry["world_size"] % node:
            return f"node_sizes of {name!r} is {node!r}; it must be a divisor of world_size={entry['world_size']}"
    named = [name for bucket in entry["buckets"] for name in bucket]
    if len(named) != len(set(named)):
        return "its buckets list a parameter twice"
    if not entry["parameters"].keys() >= set(named):
        return "its buckets list parameters without residuals: only rank 0 holds them, so save the entry of rank 0"
    for name, sides in entry["parameters"].items():
        numel = parameters[name].numel()
        if not isinstance(sides, Mapping) or sides.keys() != {"worker", "server"}:
            return f"it is incomplete: {name!r} must have the keys 'worker' and 'server'"
        shapes = {"worker": (numel,) if entry["mode"] == "mean" else (entry["world_size"], numel), "server": (numel,)}
        for side, shape in shapes.items():
            for part in sides[side].values():
                if not isinstance(part, Tensor) or part.shape != shape:
                    found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                    return f"the {side}'s residual of {name!r} is {found} instead of {shape}"
                if not part.isfinite().all():
                    return f"the {side}'s residual of {name!r} has a NaN or an infinity"
    return None
