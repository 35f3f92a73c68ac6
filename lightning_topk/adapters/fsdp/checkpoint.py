"""Sharded residuals in a checkpoint, for any number of nodes and ranks per node.

``torch.distributed.checkpoint`` saves DTensors and loads them on any number of ranks. So the gradient not yet delivered
is saved as DTensors that are sharded like the parameters::

    residual  {parameter: DTensor}    the gradient not yet delivered; with momentum, ``velocity`` too
    about     the rest of an entry of :mod:`lightning_topk.runtime.checkpoint`, as JSON

Joined, they are an entry of that module in one file, from which an unsharded model can resume, and vice versa.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_topk.adapters.fsdp.param_groups import ParamGroup
from lightning_topk.config import TopKConfig
from lightning_topk.runtime.checkpoint import EMPTY, explain_unreadable, undelivered
from lightning_topk.runtime.residuals import Residuals


def collect(
    residuals: Residuals, steps: int, groups: Sequence[ParamGroup], config: TopKConfig, replicas: dist.ProcessGroup
) -> dict[str, Any]:
    """Creates the entry of sharded residuals, on the CPU. A collective, between two backward passes."""
    trained = {p for group in groups for p in group.trained}
    group_of = {p: group for group in groups for p in group.proxies if p in trained or p in residuals}
    found: dict[str, Any] = {"residual": {}}
    sum_ = partial(dist.all_reduce, group=replicas)
    for kind, member, total in undelivered(residuals, group_of, config, groups[0].device, replicas, sum_):
        group, total = group_of[member], total / group_of[member].later_divided_by(member)
        found.setdefault(kind, {})[group.names[member]] = _like_parameter(total, group.sharded(member))
    about = {**EMPTY, "world_size": dist.get_world_size(replicas), "steps": steps}
    return {**found, "about": json.dumps(about)}


def _like_parameter(flat: Tensor, parameter: DTensor) -> DTensor:
    """A padded shard ``[elements]`` as a DTensor on the CPU, sharded like the parameter."""
    like: Any = torch.empty_like(parameter.detach(), dtype=flat.dtype, device=flat.device)
    local = like.to_local()
    local.copy_(flat[: local.numel()].view(local.shape))
    return like.to("cpu")


def joined(sharded: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Joins the shards of an entry on a device; only rank 0 returns tensors. A collective of the node."""
    found = _by_parameter(sharded)
    parameters: dict[str, Any] = {}
    for name, kept in found["parameters"].items():
        full = {kind: part.to(device).full_tensor().flatten().cpu() for kind, part in kept.items()}
        if dist.get_rank() == 0:
            parameters[name] = full
    return {**found, "parameters": parameters}


def _by_parameter(sharded: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of sharded residuals in the form of :mod:`lightning_topk.runtime.checkpoint`."""
    kinds = {kind: parts for kind, parts in sharded.items() if kind != "about"}
    names = sorted({name for parts in kinds.values() for name in parts})
    parameters = {name: {kind: parts[name] for kind, parts in kinds.items() if name in parts} for name in names}
    return {**json.loads(sharded["about"]), "parameters": parameters}


def sums(entry: Any) -> list[float]:
    """The sums of this rank's parts of a sharded entry; none of an entry in another form."""
    kinds = [*entry.values()] if isinstance(entry, Mapping) and "about" in entry else []
    parts = [part for kind in kinds if isinstance(kind, Mapping) for part in kind.values()]
    return [float(part.to_local().sum()) for part in parts if isinstance(part, DTensor)]


@explain_unreadable()
def of_this_rank(entry: Any, groups: Sequence[ParamGroup], frozen: Collection[str] = ()) -> Any:
    """Returns this rank's part of an entry (of any wrapper), without the residuals of ``frozen`` parameters."""
    if isinstance(entry, Mapping) and "about" in entry:
        entry = _by_parameter(entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("parameters"), Mapping):
        return entry
    mine = {name: kept for name, kept in entry["parameters"].items() if name not in frozen}
    for group in groups:
        for member, name in group.names.items():
            if isinstance(mine.get(name), Mapping):
                mine[name] = {
                    kind: _shard_of(part, group.sharded(member), member.numel()) * group.later_divided_by(member)
                    for kind, part in mine[name].items()
                }
    return {**entry, "parameters": mine}


def _shard_of(saved: Tensor, parameter: DTensor, size: int) -> Tensor:
    """This rank's padded shard ``[size]`` of a full tensor ``[numel]``, or of a DTensor sharded like the parameter."""
    if isinstance(saved, DTensor):
        mine = saved.to_local().flatten()
    elif saved.shape != (parameter.numel(),):
        return saved  # of another model: the caller refuses it
    else:
        placed = parameter.shape, parameter.device_mesh, parameter.placements
        shape, begin = compute_local_shape_and_global_offset(*placed)
        cut = tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))
        mine = saved.view(parameter.shape)[cut].flatten()
    return torch.nn.functional.pad(mine, (0, size - len(mine)))
