"""The replicas of an FSDP2 model's shards, and checks that they match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_topk.fsdp.param_groups import ParamGroup
from lightning_topk.runtime.checks import check_same_model
from lightning_topk.runtime.groups import check_agreement
from lightning_topk.runtime.state import HookState


def replicas_of(group: Any) -> dist.ProcessGroup:
    """The group of ranks that hold the same shard."""
    remedy = "Pass process_group=mesh['replicate'], the dimension of a device mesh along which nodes are counted."
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"process_group= is a mesh of shape {tuple(group.shape)}, not one dimension. {remedy}")
        return group.get_group()
    if group is None:
        raise ValueError(f"process_group= is missing: the ranks that hold the same shard, one per node. {remedy}")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group={group!r} is a {type(group).__name__}, not a process group or a device mesh. {remedy}"
        )
    return group


def check_group(groups: Sequence[ParamGroup], replicas: dist.ProcessGroup) -> None:
    """Refuses ranks that hold different shards."""
    if not groups:
        raise ValueError("no parameter of the model is trained: there is no gradient to exchange.")
    ranks = dist.get_process_group_ranks(replicas)
    if set(ranks) & set(groups[0].ranks) != {dist.get_rank()}:
        raise ValueError(
            f"process_group= has the ranks {ranks}, and the model is sharded over the ranks {groups[0].ranks}: all "
            "ranks of the group must hold the same shard, each on a different node. Pass the dimension of the mesh "
            "along which nodes are counted."
        )


def check_hooks(groups: Sequence[ParamGroup]) -> None:
    """Refuses groups whose gradients go to another hook."""
    for group in groups:
        if has_hook(group):
            raise RuntimeError(
                f"FSDP already calls a hook with the gradient of {group}. Close the earlier state first."
            )


def has_hook(group: ParamGroup) -> bool:
    """Whether FSDP calls a hook with the gradients of a group, other than the hook of a closed state."""
    user = getattr(getattr(group.hook, "func", None), "__self__", None)
    return group.hook is not None and not (isinstance(user, HookState) and user.groups is None)


def check_replicas(model: torch.nn.Module, groups: Sequence[ParamGroup], replicas: dist.ProcessGroup) -> None:
    """Refuses replicas with different shards or different models."""
    shards = {"the index of the shard": groups[0].ranks.index(dist.get_rank())}
    remedy = "process_group= must be the ranks that hold the same shard, one per node."
    check_agreement(shards, remedy, replicas)
    check_same_model(model, replicas)
