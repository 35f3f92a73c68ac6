"""Residuals in a checkpoint: by parameter name, for any world size.

The entry is made of numbers, words, lists, dicts and CPU tensors, so that ``torch.load(weights_only=True)`` reads it::

    version      1
    mode         "mean", "full", or "none" with a reason
    world_size   of the run that wrote it
    node_sizes   {name: ranks that exchanged it as one worker}: those of a node, with topology="hierarchical"; 1 if missing
    steps        gradients exchanged so far, for schedules and for selectors that draw
    rates        learning rates of the last step, for residuals that follow them
    buckets      the parameters' names, bucket by bucket
    parameters   {name: {"worker": {"residual": tensor, ...}, "server": {"residual": tensor}}}

The gradient that is still to be delivered is the mean of the workers' residuals plus the servers' residual. ``"mean"`` keeps
just these two, 2 x the model whatever the world size; every worker then goes on with the mean. ``"full"`` keeps the residual of each
worker, ``[W, numel]``: with the same world size and settings a resumed run gives the same bits as one that never stopped. At another
world size it is the mean, too. Where the ranks of a node are one worker, each holds its piece and zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.core.exchange import Endpoint
from lightning_topk.runtime.residuals import Residuals

KEY = "lightning_topk"
"""The entry's name in a checkpoint."""
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
"""The entry of a run that has not begun."""
Mode = Literal["mean", "full"]


def collect(
    residuals: Residuals,
    names: Mapping[Tensor, str],
    mode: Mode,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Makes the entry. A collective: every rank calls it at the same point, between two backward passes.

    Args:
        residuals: This rank's.
        names: The parameters' names, in an order that is the same on every rank.
        mode: ``"mean"`` or ``"full"``.
        device: Where collectives want their tensors.
        group: The ranks that exchange gradients. Default: all.

    Returns:
        The entry on the group's rank 0; the same without tensors elsewhere.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parts = residuals.parts()
    parameters: dict[str, Any] = {}
    for parameter, name in names.items():
        if parameter not in parts:
            continue
        worker, server = parts[parameter]
        workers = None if mode == "full" else world // residuals.counts.get(parameter, 1)
        kept = {key: _gather(part.to(device), group, workers) for key, part in worker.items()}
        served = {key: _gather(part.to(device), group, 1) for key, part in server.items()}
        if rank == 0:
            parameters[name] = {"worker": kept, "server": served}
    return {
        "version": VERSION,
        "mode": mode,
        "world_size": world,
        "node_sizes": {names[p]: count for p, count in residuals.counts.items() if p in names and count > 1},
        "steps": residuals.steps,
        "rates": list(residuals.learning_rates),
        "buckets": [
            [names[p] for p in bucket]
            for bucket in residuals.buckets
            if all(
                p in names and p in parts for p in bucket
            )  # not one of empty parameters alone, which is never exchanged
        ],
        "parameters": parameters,
    }


def absent(reason: str) -> dict[str, Any]:
    """An entry that holds no residuals, and says why."""
    return {"version": VERSION, "mode": "none", "reason": reason}


def _gather(part: Tensor, group: dist.ProcessGroup | None, workers: int | None) -> Tensor | None:
    """The mean over the workers of ``[numel]``, or, with None, each rank's as ``[W, numel]``; on rank 0's CPU, None elsewhere."""
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
    make: Callable[[tuple[Tensor, ...]], Endpoint],
    rank: int,
    world: int,
) -> None:
    """Goes on with the residuals of an entry, in place of what there is.

    Args:
        residuals: This rank's.
        names: The parameters' names.
        entry: What :func:`collect` returned on rank 0.
        make: Makes the endpoint of a bucket of parameters, with empty memories.
        rank: This rank.
        world: Number of ranks.

    Raises:
        ValueError: The entry is damaged, or of another model. It says how to start with zero residuals.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    _check(entry, parameters)
    known = {parameters[name]: sides for name, sides in entry["parameters"].items()}
    nodes = entry.get("node_sizes", {})

    def own(parameter: Tensor, count: int) -> dict[str, Tensor]:
        """What this rank goes on with as a worker: what it had, if there is as much for each, else the mean."""
        kept, saved = known[parameter]["worker"], nodes.get(names[parameter], 1)
        if entry["mode"] == "mean":
            return {key: part.clone() for key, part in kept.items()}
        if (entry["world_size"], saved) == (world, count):
            return {key: rows[rank].clone() for key, rows in kept.items()}
        return {key: rows.sum(dim=0) / (len(rows) // saved) for key, rows in kept.items()}

    buckets = [tuple(parameters[name] for name in bucket if name in entry["parameters"]) for bucket in entry["buckets"]]
    rest = known.keys() - {parameter for bucket in buckets for parameter in bucket}
    residuals.restore(
        [*filter(None, buckets), *((parameter,) for parameter in known if parameter in rest)],
        own,
        {parameter: dict(sides["server"]) for parameter, sides in known.items()},
        make,
    )
    residuals.steps, residuals.learning_rates = entry["steps"], list(entry["rates"])


def _check(entry: Any, parameters: Mapping[str, Tensor]) -> None:
    """Refuses an entry that cannot be used, in words."""
    try:
        problem = _problem(entry, parameters)
    except (AttributeError, KeyError, TypeError) as error:
        problem = f"it was damaged ({error!r})"
    if problem:
        raise ValueError(
            f"the checkpoint's entry {KEY!r}, which holds the residuals, cannot be used: {problem}. To go on with residuals "
            "of zero, pass residual_checkpoint='none' to the strategy."
        )


def _problem(entry: Any, parameters: Mapping[str, Tensor]) -> str | None:
    if not isinstance(entry, Mapping) or "version" not in entry:
        return "it was not written by lightning_topk"
    if entry["version"] != VERSION:
        return f"it has version {entry['version']!r}, and this lightning_topk reads version {VERSION}"
    missing = {"mode", "world_size", "steps", "rates", "buckets", "parameters"} - entry.keys()
    if missing:
        return f"it was truncated: {', '.join(sorted(missing))} is missing"
    if entry["mode"] not in ("mean", "full"):
        return f"its mode is {entry['mode']!r}"
    strangers = sorted(entry["parameters"].keys() - parameters.keys())
    if strangers:
        return f"the model has no parameter {strangers[0]!r} (of {len(strangers)} such)"
    if type(entry["steps"]) is not int or type(entry["world_size"]) is not int:
        return f"it counts {entry['steps']!r} steps of {entry['world_size']!r} ranks"
    for name, node in entry.get("node_sizes", {}).items():
        if type(node) is not int or node < 1 or entry["world_size"] % node:
            return f"{entry['world_size']} ranks exchanged {name!r} on nodes of {node!r}"
    named = [name for bucket in entry["buckets"] for name in bucket]
    if len(named) != len(set(named)):
        return "its buckets name a parameter twice"
    if not entry["parameters"].keys() >= set(named):
        return "its buckets name parameters of which it holds no residual, as on ranks other than 0, which alone holds them"
    for name, sides in entry["parameters"].items():
        numel = parameters[name].numel()
        if not isinstance(sides, Mapping) or sides.keys() != {"worker", "server"}:
            return f"it was truncated: {name!r} has no worker or no server"
        shapes = {"worker": (numel,) if entry["mode"] == "mean" else (entry["world_size"], numel), "server": (numel,)}
        for side, shape in shapes.items():
            for part in sides[side].values():
                if not isinstance(part, Tensor) or part.shape != shape:
                    found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                    return f"the {side}'s residual of {name!r} is {found} instead of {shape}"
    return None
