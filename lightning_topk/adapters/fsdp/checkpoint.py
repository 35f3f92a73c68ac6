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
from lightning_topk.runtime.checkpoint import EMPTY, undelivered, unusable_if_it_fails
from lightning_topk.runtime.residuals import Residuals


def collect(
    residuals: Residuals,
    steps: int,
    groups: Sequence[ParamGroup],
    config: TopKConfig,
    device: torch.device,
    replicas: dist.ProcessGroup,
) -> dict[str, Any]:
    """Creates the entry of sharded residuals. A collective: every rank calls it, between two backward passes.

    Returns:
        The entry, with tensors on the CPU; the same on all replicas.
    """
    group_of = {member: group for group in groups for member in group.trained}
    found: dict[str, Any] = {"residual": {}}
    sum_ = partial(dist.all_reduce, group=replicas)
    for kind, member, total in undelivered(residuals, group_of, config, device, replicas, sum_):
        group, total = group_of[member], total / group_of[member].later_divided_by(member)
        found.setdefault(kind, {})[group.names[member]] = _like_parameter(total, group.sharded(member))
    return {**found, "about": json.dumps({**EMPTY, "world_size": dist.get_world_size(replicas), "steps": steps})}


def _like_parameter(flat: Tensor, parameter: DTensor) -> DTensor:
    """A padded shard ``[elements]`` as a DTensor on the CPU, sharded like the parameter."""
    like: Any = torch.empty_like(parameter.detach(), dtype=flat.dtype, device=flat.device)
    local = like.to_local()
    local.copy_(flat[: local.numel()].view(local.shape))
    return like.to("cpu")


def joined(sharded: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the shards of an entry of sharded residuals. A collective of the node.

    Returns:
        On rank 0, an entry of :mod:`lightning_topk.runtime.checkpoint`; elsewhere the same without tensors.
    """
    parameters: dict[str, Any] = {}
    for name in sharded["residual"]:
        full = {kind: _join(parts[name]) for kind, parts in sharded.items() if kind != "about"}
        if dist.get_rank() == 0:
            parameters[name] = full
    return {**json.loads(sharded["about"]), "parameters": parameters}


def _join(shards: DTensor) -> Tensor:
    """The full tensor of a DTensor, ``[elements]`` on the CPU. A collective of the node."""
    there: Any = shards.to(shards.device_mesh.device_type)
    return there.full_tensor().flatten().cpu()


@unusable_if_it_fails()
def of_this_rank(entry: Any, groups: Sequence[ParamGroup], frozen: Collection[str] = ()) -> Any:
    """Returns this rank's part of an entry (of any wrapper), without the residuals of ``frozen`` parameters.

    A damaged entry may be returned unchanged; one too damaged to split raises a ValueError.
    """
    if isinstance(entry, Mapping) and "about" in entry:
        kinds = {kind: parts for kind, parts in entry.items() if kind != "about"}
        names = sorted({name for parts in kinds.values() for name in parts})
        parameters = {name: {kind: parts[name] for kind, parts in kinds.items() if name in parts} for name in names}
        entry = {**json.loads(entry["about"]), "parameters": parameters}
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
    """A rank's padded shard ``[size]`` of a parameter's saved tensor.

    ``saved`` is a DTensor that is sharded like the parameter, or the full tensor ``[..., elements of the parameter]``.
    """
    if isinstance(saved, DTensor):
        mine = saved.to_local().reshape(-1)
    elif saved.shape[-1:] != (parameter.numel(),):
        return saved  # of another model: the caller refuses it
    else:
        placed = parameter.shape, parameter.device_mesh, parameter.placements
        shape, begin = compute_local_shape_and_global_offset(*placed)
        cut = [slice(None)] * (saved.ndim - 1) + [slice(b, b + n) for b, n in zip(begin, shape, strict=True)]
        mine = saved.unflatten(-1, parameter.shape)[tuple(cut)].flatten(saved.ndim - 1)
    return torch.nn.functional.pad(mine, (0, size - mine.shape[-1]))
