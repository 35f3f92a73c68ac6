"""Nodes as replicas of a sharded model: meshes and checkpoints of the model-parallel strategy."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_topk.adapters.fsdp.hook import ShardState
from lightning_topk.adapters.lightning._compat import rank_zero_info
from lightning_topk.adapters.lightning._resume import without_residuals
from lightning_topk.config import check_count
from lightning_topk.runtime.checkpoint import KEY, SHARDED, VERSION

Size = Literal["auto"] | int


def check_size(name: str, size: Any) -> Size:
    """Returns a size that is "auto" or a positive number of ranks, and refuses any other."""
    if size is None or (isinstance(size, str) and size != "auto"):
        raise TypeError(f"{name}={size!r} must be 'auto' or a number of ranks per node.")
    if size != "auto":
        check_count(name, size)
    return size


def meshes(device: str, world: int, local: int, data: Size, tensor: Size) -> tuple[DeviceMesh, DeviceMesh]:
    """Creates the mesh of this node and the mesh of its replicas. A collective.

    Args:
        device: Type of the ranks' devices.
        world: Number of ranks.
        local: Ranks per node; ranks of a node are consecutive.
        data: Ranks of a node that share parameters and batches. "auto": all that ``tensor`` leaves.
        tensor: Ranks of a node that share single tensors. "auto": one, or all that ``data`` leaves.

    Returns:
        A mesh with the dimensions ``data_parallel`` and ``tensor_parallel``, and the ranks that hold the same shard.

    Raises:
        ValueError: ``world`` is not a multiple of ``local``, or the product of the sizes is not ``local``.
    """
    if world % local:
        raise ValueError(
            f"{world} ranks cannot be divided into nodes of {local}: every node needs the same number of ranks. Pass "
            "local_world_size=, the number of ranks per node."
        )
    columns = tensor if tensor != "auto" else 1 if data == "auto" else max(1, local // data)
    rows = data if data != "auto" else max(1, local // columns)
    if rows * columns != local:
        raise ValueError(
            f"data_parallel_size={rows} times tensor_parallel_size={columns} is not {local}, the ranks per node: "
            "these sizes apply to one node, and each node is a replica. Change them, or pass local_world_size=, the "
            "number of ranks per node."
        )
    # torch 2.9 warns about slicing the mesh of a node, which is the intended use.
    warnings.filterwarnings("ignore", message="You are attempting to slice a submesh from another submesh")
    mesh = init_device_mesh(
        device, (world // local, rows, columns), mesh_dim_names=("replicate", "data_parallel", "tensor_parallel")
    )
    return mesh["data_parallel", "tensor_parallel"], mesh["replicate"]


def in_shards(state: ShardState) -> dict[str, Any]:
    """The entry in a distributed checkpoint's metadata file: the residuals are in a folder beside it."""
    return {"version": VERSION, "mode": SHARDED, "steps": state.steps}


def save_shards(state: ShardState, checkpoint: Path) -> None:
    """Saves residuals beside the weights of a distributed checkpoint. A collective."""
    save({KEY: state.state_dict()}, checkpoint_id=checkpoint / KEY)


def resume(state: ShardState, entry: Any, checkpoint: Path) -> None:
    """Loads the residuals of a checkpoint. A collective."""
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
        state.load_state_dict(without_residuals(entry))
        return
    shards = {KEY: state.state_dict()}
    load(shards, checkpoint_id=checkpoint / KEY, planner=DefaultLoadPlanner(allow_partial_load=True))
    state.load_state_dict(shards[KEY])
