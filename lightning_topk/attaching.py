"""``attach``: hands a model to the adapter of what wraps it, DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_topk import ddp
from lightning_topk.config import TopKConfig
from lightning_topk.ddp import TopKState
from lightning_topk.runtime.optimizers import GetOptimizers
from lightning_topk.runtime.residuals import Residuals

if TYPE_CHECKING:
    from lightning_topk.fsdp import ShardState


def attach(
    model: torch.nn.Module,
    config: TopKConfig | None = None,
    timeout: timedelta | None = None,
    residuals: Residuals | None = None,
    epoch: Callable[[], int] | None = None,
    init_sync: bool = True,
    optimizer: GetOptimizers | Sequence[Optimizer] | Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    local_world_size: int | None = None,
    announce: Callable[[str], None] | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    **settings: Any,
) -> TopKState | ShardState:
    """Makes a wrapped model exchange its gradients compressed.

    Call it on every rank, right after wrapping the model. A DDP model's ranks exchange its buckets. Of a model that
    ``fully_shard`` (FSDP2) deals to the ranks of a node, the replicas on other nodes exchange their shards::

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = attach(model, process_group=mesh["replicate"], saving=50, optimizer=optimizer)

    Args:
        model: The wrapped model. In a single process it may be a bare module, as Accelerate's ``prepare`` returns it
            there: nothing is exchanged then, and the state only answers.
        config: The settings; or pass them as keywords.
        timeout: See :class:`TopKState`.
        residuals: See :class:`TopKState`.
        epoch: See :class:`TopKState`.
        init_sync: For DDP, whether the model was wrapped with ``init_sync``, which broadcasts the weights once. For
            FSDP2, whether to give all replicas the weights of the first one now.
        optimizer: The optimizer, or several in a list, for settings that depend on it (``momentum``,
            ``momentum_masking``, ``beta1``, ``lr_ratio``, ``scaler``) and for what ``saving`` does for Adam; or a
            function that gives the optimizers at the first step, if they do not exist yet.
        scaler: See :class:`TopKState`.
        local_world_size: See :class:`TopKState`. For DDP only.
        announce: See :class:`TopKState`.
        process_group: For FSDP2 only: the ranks that hold the same shard, one on each node, or the dimension of a
            device mesh that they are. A DDP model has a group of its own.
        **settings: Arguments of :class:`lightning_topk.config.TopKConfig`.

    Returns:
        The state; call its ``close()`` when training is over.

    Raises:
        TypeError: The model is neither wrapped in DistributedDataParallel nor by ``fully_shard``, ``optimizer`` is
            something else, or a setting is unknown.
        ValueError: An option of the model bypasses or contradicts the hook, a setting needs what is not passed, or an
            argument belongs to the other wrapper.
        RuntimeError: The model has a communication hook already.
    """
    same = config, timeout, residuals, epoch, init_sync, optimizer, scaler
    if _is_sharded(model):
        from lightning_topk import fsdp  # FSDP2 is slow to import; a sharded model has imported it already

        if local_world_size is not None:
            raise ValueError(
                f"local_world_size={local_world_size} is for DDP models: the nodes of an FSDP model are those that "
                "process_group= counts. Leave it out."
            )
        return fsdp.attach(model, *same, announce, process_group, **settings)
    if process_group is not None:
        raise ValueError(
            f"process_group= is for models that fully_shard wrapped, and this is a {type(model).__name__}. A DDP model "
            "has its own: pass it to DistributedDataParallel."
        )
    return ddp.attach(model, *same, local_world_size, announce, **settings)


def _is_sharded(model: Any) -> bool:
    """Whether ``fully_shard`` wrapped a model, or modules of it."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)
