"""``attach``: passes a model to the adapter for its wrapper, DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_topk.adapters import ddp
from lightning_topk.config import Settings, TopKConfig, one_config
from lightning_topk.adapters.ddp import TopKState
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.checkpoint import EMPTY
from lightning_topk.runtime.messages import WarnOnce, startup_warnings
from lightning_topk.runtime.optimizers import GetOptimizers
from lightning_topk.runtime.telemetry import Reporting

if TYPE_CHECKING:
    from lightning_topk.adapters.fsdp.hook import ShardState


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
    **settings: Unpack[Settings],
) -> TopKState | ShardState | Alone:
    """Compresses the gradient exchange of a wrapped model.

    Call it on every rank, right after wrapping the model. With DDP, all ranks exchange the model's buckets. With
    ``fully_shard`` (FSDP2) inside each node, the replicas on different nodes exchange their shards::

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = attach(model, process_group=mesh["replicate"], saving=50, optimizer=optimizer)

    Args:
        model: The wrapped model. In a single process it may be a bare module, as Accelerate's ``prepare`` returns it
            there; the state then exchanges nothing.
        config: The settings; or pass them as keywords.
        timeout: See :class:`TopKState`.
        residuals: See :class:`TopKState`.
        epoch: See :class:`TopKState`.
        init_sync: For DDP, whether the model was wrapped with ``init_sync``, which broadcasts the weights once. For
            FSDP2, whether to broadcast the first replica's weights to the others now.
        optimizer: The optimizer or a list of optimizers, for settings that depend on them (``adapt_momentum``,
            ``momentum``, ``scaler``); or, if they do not exist yet, a function that returns them at the first step.
        scaler: See :class:`TopKState`.
        local_world_size: See :class:`TopKState`. For DDP only.
        announce: See :class:`TopKState`.
        process_group: For FSDP2 only: the ranks that hold the same shard, one per node, as a process group or as one
            dimension of a device mesh. A DDP model has its own group.
        **settings: See :class:`lightning_topk.TopKStrategy`.

    Returns:
        The state; call its ``close()`` when training is over.

    Raises:
        TypeError: The model is wrapped neither in DistributedDataParallel nor by ``fully_shard``, ``optimizer`` has
            another type, or a setting is unknown.
        ValueError: A model option bypasses or contradicts the hook, a setting needs an argument that was not passed,
            or an argument belongs to the other wrapper.
        RuntimeError: The model already has a communication hook.
    """
    config = one_config(attach, config, settings)
    given = {"timeout": timeout, "residuals": residuals, "epoch": epoch, "scaler": scaler, "announce": announce}
    if _is_sharded(model):
        from lightning_topk.adapters.fsdp import hook as fsdp  # FSDP2 is slow to import; a sharded model has imported it already

        if local_world_size is not None:
            raise ValueError(
                f"local_world_size={local_world_size} applies only to DDP models: the nodes of an FSDP model follow "
                "from process_group=. Leave it out."
            )
        return fsdp.attach(model, config, process_group, optimizer, init_sync, **given)
    if process_group is not None:
        raise ValueError(
            f"process_group= applies only to models wrapped by fully_shard, and this is a {type(model).__name__}. Pass "
            "the group of a DDP model to DistributedDataParallel."
        )
    if _trains_alone(model):
        return Alone(config, announce)
    return ddp.attach(model, config, optimizer, init_sync, local_world_size=local_world_size, **given)


def _is_sharded(model: Any) -> bool:
    """Whether ``fully_shard`` wraps the model or any of its modules."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)


def _trains_alone(model: Any) -> bool:
    """Whether the model is a bare module and this is the only process."""
    fsdp1 = "FullyShardedDataParallel" in {kind.__name__ for kind in type(model).__mro__}
    others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return isinstance(model, torch.nn.Module) and not (ddp.is_ddp(model) or fsdp1 or others)


class Alone(Reporting):
    """The state of a module that a single process trains: it exchanges and keeps nothing.

    Args:
        config: The settings.
        announce: See :class:`TopKState`.
    """

    def __init__(self, config: TopKConfig, announce: Callable[[str], None] | None) -> None:
        say = WarnOnce(announce, 0)
        super().__init__(config.dense, Residuals(), rank=0, world=1, local=1, epoch=lambda: 0, say=say)
        for message in startup_warnings(config, self.config, 1, has_optimizers=True):
            say(message)

    def state_dict(self) -> dict[str, Any]:
        """Returns an entry without residuals, see :meth:`TopKState.state_dict`."""
        return dict(EMPTY)

    def load_state_dict(self, entry: Mapping[str, Any]) -> None:
        """Ignores residuals, with a warning."""
        if isinstance(entry, Mapping) and entry.get("parameters"):
            self._say(
                "lightning_topk: the checkpoint's residuals are ignored: a bare module in one process has no exchange "
                "to deliver them. Wrap it in DistributedDataParallel to apply them."
            )

    def close(self) -> None:
        """Does nothing: the state holds no resources."""
