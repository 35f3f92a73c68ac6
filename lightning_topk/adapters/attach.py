"""``attach``: passes a model to the adapter of its wrapper, DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_topk.adapters import ddp
from lightning_topk.adapters.ddp import TopKState
from lightning_topk.config import Settings, TopKConfig, check_bool, check_count, check_function, one_config
from lightning_topk.messages import WarnOnce, startup_warnings
from lightning_topk.optim.clips import MaxNorm, check_max_norm
from lightning_topk.optim.optimizers import GetOptimizers, getter
from lightning_topk.runtime.checkpoint import EMPTY
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.telemetry import Report
from lightning_topk.volume import Volume

if TYPE_CHECKING:
    from lightning_topk.adapters.fsdp.hook import ShardState


def attach(
    model: torch.nn.Module,
    config: TopKConfig | None = None,
    timeout: timedelta | None = None,
    residuals: Residuals | None = None,
    epoch: Callable[[], int] | None = None,
    broadcast_weights: bool = True,
    optimizer: GetOptimizers | Sequence[Optimizer] | Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    local_world_size: int | None = None,
    announce: Callable[[str], None] | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    max_norm: MaxNorm = None,
    **settings: Unpack[Settings],
) -> TopKState | ShardState | Alone:
    """Compresses the gradient exchange of a wrapped model.

    Call it on every rank, right after wrapping the model. With DDP, all ranks exchange the model's buckets. With
    ``fully_shard`` (FSDP2) inside each node, ranks of different nodes that hold the same shard exchange it::

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = attach(model, process_group=mesh["replicate"], saving=50, optimizer=optimizer)

    If a DDP model was attached before, its earlier state is closed, and the new one takes its place.

    Args:
        model: The wrapped model. In a single process it may be a bare module, such as Accelerate's ``prepare`` returns
            there; nothing is exchanged then.
        config: The settings; or pass them as keywords.
        timeout: Timeout of collectives. Default: the timeout of the model's process group.
        residuals: Residuals of an earlier state of the same model. The new state continues them and the step count.
        epoch: Function that returns the epoch, for schedules by epoch.
        broadcast_weights: For FSDP2 only: whether to broadcast the first replica's weights to the others now. DDP
            broadcasts weights when it wraps a model.
        optimizer: The optimizer, a list of them, or a function that returns a list, empty until they exist. Residuals
            follow the learning rate; ``adapt_momentum`` and ``momentum`` depend on the optimizer.
        scaler: The GradScaler that scales the loss. Residuals are kept unscaled.
        local_world_size: For DDP only: ranks per node, for ``topology="hierarchical"`` and to count bytes between
            nodes. Ranks of a node are consecutive. Default: torchrun's ``LOCAL_WORLD_SIZE``, or 1.
        announce: Called on rank 0 with messages for the user, such as settings without effect or adapted momentum.
            Default: the logger ``lightning_topk``, at level WARNING, or INFO for information.
        process_group: For FSDP2 only: the ranks that hold the same shard, one per node, as a process group or as one
            dimension of a device mesh. A DDP model has its own group.
        max_norm: What you pass to ``clip_grad_norm_``: each gradient then enters the residual clipped as in dense
            training. A number if you clip all parameters together, or a list with one for each optimizer (None: not
            clipped). Keep your call: it clips what is delivered. If you change gradients before that call, such as
            dividing them by a number of tokens, change the loss instead, or leave ``max_norm`` out.
        **settings: See :class:`lightning_topk.TopKStrategy`.

    Returns:
        The state. Call its ``close()`` when training is over; it also shows what a step has sent (``summary()``).

    Raises:
        TypeError: The model is wrapped neither in DistributedDataParallel nor by ``fully_shard``, an argument has
            the wrong type, ``optimizer`` or ``epoch`` returns the wrong type, or a setting is unknown.
        ValueError: A model option bypasses or contradicts the hook, a setting needs an argument that was not passed,
            or an argument belongs to the other wrapper.
        RuntimeError: The model already has another communication hook.
    """
    config = one_config(attach, config, settings)
    _check(timeout, residuals, scaler, announce)
    check_bool("broadcast_weights", broadcast_weights)
    local_world_size = check_count("local_world_size", local_world_size)
    getter(optimizer)
    check_max_norm(max_norm)
    if isinstance(max_norm, list | tuple) and optimizer is None:
        raise ValueError(f"max_norm={max_norm!r} has a norm for each optimizer: pass optimizer= too, or one number.")
    if epoch is not None:
        check_function("epoch", epoch)
    earlier = None if residuals is None else residuals.state
    common: dict[str, Any] = {"timeout": timeout, "earlier": earlier, "epoch": epoch, "scaler": scaler}
    common |= {"announce": announce, "max_norm": max_norm}
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    wrappers = {kind for module in modules for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
    if any(kind.__module__.startswith("torch.distributed._composable.replicate") for kind in wrappers):
        raise TypeError(
            "attach does not take a model wrapped by torch's replicate(): no hook can replace its all-reduce. Use "
            "DistributedDataParallel(model), and attach that."
        )
    if any(kind.__name__ == "FSDPModule" for kind in wrappers):
        # FSDP2 is slow to import; a sharded model has imported it already.
        from lightning_topk.adapters.fsdp import hook as fsdp

        if local_world_size is not None:
            raise ValueError(f"local_world_size={local_world_size} applies only to DDP models. Leave it out.")
        return fsdp.attach(model, config, process_group, optimizer, broadcast_weights, **common)
    if process_group is not None:
        raise ValueError("process_group= applies only to models wrapped by fully_shard; DDP has a group of its own.")
    if not broadcast_weights:
        raise ValueError("broadcast_weights=False applies only to models wrapped by fully_shard. Leave it out.")
    wrapped = getattr(model, "_orig_mod", model)  # torch.compile's
    if isinstance(wrapped, DistributedDataParallel):
        return ddp.attach(wrapped, config, optimizer, local_world_size=local_world_size, **common)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if isinstance(model, torch.nn.Module) and ranks == 1:
        return Alone(config, announce)
    raise TypeError(
        "attach takes a DistributedDataParallel model or one wrapped by fully_shard (FSDP2); FSDP1 has no hook for "
        f"sharded gradients. This is a {type(model).__name__} on one of {ranks} ranks. Pass the model that training "
        "calls: with Hugging Face's Trainer, trainer.model_wrapped; in your own loop, DistributedDataParallel(model)."
    )


def _check(timeout: Any, residuals: Any, scaler: Any, announce: Any) -> None:
    """Refuses arguments of the wrong type before anything is connected."""
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise TypeError(f"timeout={timeout!r} must be a timedelta above 0, or None.")
    if residuals is not None and not isinstance(residuals, Residuals):
        raise TypeError(f"residuals={residuals!r:.200} must be the .residuals of an earlier state, or None.")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"scaler={scaler!r} must be a GradScaler, or None.")
    if announce is not None and not callable(announce):
        raise TypeError(f"announce={announce!r} must be a function of a message, or None.")


class Alone:
    """The state of a module that a single process trains: exchanges nothing, but keeps a checkpoint's step count."""

    nonfinite_steps = steps = 0
    rank, world = 0, 1

    def __init__(self, config: TopKConfig, announce: Callable[[str], None] | None) -> None:
        self.config, self.residuals, self._say = config.dense, Residuals(), WarnOnce(announce, 0)
        self._say(*startup_warnings(config, self.config, 1, has_optimizers=True))

    def report(self) -> Report:
        """Returns an empty report."""
        return Report()

    def summary(self) -> str:
        """Returns an empty string: nothing is sent."""
        return ""

    def predicted(self, rank: int | None = None) -> Volume:
        """Returns a volume of zero bytes."""
        return Volume()

    def state_dict(self) -> dict[str, Any]:
        """Returns an entry without residuals, see :meth:`.HookState.state_dict`."""
        return {**EMPTY, "steps": self.steps}

    def load_state_dict(self, entry: Mapping[str, Any]) -> None:
        """Ignores residuals, with a warning."""
        self.steps = entry.get("steps", 0)
        if entry.get("parameters"):
            self._say("lightning_topk: the checkpoint's residuals are ignored, since a single rank exchanges nothing.")

    def close(self) -> None:
        """Does nothing: the state holds no resources."""
