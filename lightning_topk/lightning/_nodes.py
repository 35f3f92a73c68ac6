"""Nodes as replicas of a sharded model: what the Trainer's and Fabric's model-parallel strategies share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lightning_topk.config import check_count
from lightning_topk.fsdp.hook import ShardState
from lightning_topk.lightning._compat import rank_zero_info
from lightning_topk.runtime.memory.checkpoint import EMPTY, KEY, SHARDED, VERSION

Size = Literal["auto"] | int


def check_size(name: str, size: Any) -> Size:
    """Refuses what is neither "auto" nor a positive number of ranks; returns it.

    Raises:
        TypeError: It is something else.
        ValueError: It is not positive.
    """
    if size == "auto":
        return "auto"
    if size is None or isinstance(size, str):
        raise TypeError(f"{name}={size!r} must be 'auto' or a number of ranks of a node.")
    checked = check_count(name, size)
    assert checked is not None
    return checked


def meshes(device: str, world: int, local: int, data: Size, tensor: Size) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of this node, and the one of its replicas. A collective.

    Args:
        device: Type of the ranks' devices.
        world: All ranks.
        local: Ranks of a node; ranks of a node are consecutive.
        data: Ranks over which a model's parameters and a node's batches are spread. "auto": all that are left.
        tensor: Ranks over which single tensors are spread. "auto": one, or all that ``data`` leaves.

    Returns:
        A mesh with the dimensions ``data_parallel`` and ``tensor_parallel``, and the ranks that hold the same shard.

    Raises:
        ValueError: Ranks do not make up whole nodes, or a node's sizes do not multiply to its ranks.
    """
    if world % local:
        raise ValueError(
            f"{world} ranks do not make up nodes of {local}: every node needs the same number of ranks. Pass "
            "local_world_size=, the ranks of a node."
        )
    columns = tensor if tensor != "auto" else 1 if data == "auto" else max(1, local // data)
    rows = data if data != "auto" else max(1, local // columns)
    if rows * columns != local:
        raise ValueError(
            f"data_parallel_size={rows} times tensor_parallel_size={columns} is not {local}, the ranks of a node: "
            "these sizes are of one node, and each node is a replica. Change them, or pass local_world_size=, the "
            "ranks of a node."
        )
    # torch 2.9 warns of what is meant to be done with the mesh of a node: to take one of its dimensions.
    warnings.filterwarnings("ignore", message="You are attempting to slice a submesh from another submesh")
    mesh = init_device_mesh(
        device, (world // local, rows, columns), mesh_dim_names=("replicate", "data_parallel", "tensor_parallel")
    )
    return mesh["data_parallel", "tensor_parallel"], mesh["replicate"]


def sampler_arguments(node: DeviceMesh, replicas: DeviceMesh) -> dict[str, int]:
    """How batches are dealt: to all ranks, but to those that hold parts of the same tensors as to one."""
    data = node["data_parallel"]
    return {
        "num_replicas": replicas.size() * data.size(),
        "rank": replicas.get_local_rank() * data.size() + data.get_local_rank(),
    }


@contextmanager
def unsynchronised(module: torch.nn.Module) -> Iterator[None]:
    """Backward passes inside accumulate gradients without reducing them."""
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for part in sharded:
            part.set_requires_gradient_sync(True, recurse=False)


IN_SHARDS = {"version": VERSION, "mode": SHARDED}
"""In a distributed checkpoint's file of other things: that the residuals are in a folder beside it."""


def save_shards(state: ShardState, checkpoint: Path) -> None:
    """Saves residuals beside the weights of a distributed checkpoint. A collective."""
    save({KEY: state.state_dict()}, checkpoint_id=checkpoint / KEY)


def resume(state: ShardState, entry: Any, checkpoint: Path) -> None:
    """Goes on with the residuals of a checkpoint. A collective.

    Args:
        state: The state.
        entry: What the checkpoint's file has of them; :data:`IN_SHARDS` if :func:`save_shards` saved them.
        checkpoint: The checkpoint, a folder or one file. A folder may have been converted to one file, without them.
    """
    if not isinstance(entry, dict) or entry.get("mode") != SHARDED:
        state.load_state_dict(entry)
        return
    one_file = [checkpoint.is_file()]
    dist.broadcast_object_list(one_file)
    if one_file[0]:
        rank_zero_info(
            f"lightning_topk starts with zero residuals: {checkpoint} is one file, converted from a folder, and the "
            "residuals are only in that folder."
        )
        state.load_state_dict(EMPTY)
        return
    shards = {KEY: state.state_dict()}
    load(shards, checkpoint_id=checkpoint / KEY, planner=DefaultLoadPlanner(allow_partial_load=True))
    state.load_state_dict(shards[KEY])
