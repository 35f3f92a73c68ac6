"""The DDP adapter: a communication hook that turns buckets into jobs for the lane.

DDP calls the hook with each bucket as soon as its gradients are ready. The hook queues the bucket's exchange on a lane
and returns a future immediately, so backward continues while bytes travel.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes, and strings fail.

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_topk.adapters.checks import check_ddp_options, check_parameters
from lightning_topk.bucket import Bucket, all_names_of, names_of
from lightning_topk.config import CPU_BUCKET_MB, TopKConfig
from lightning_topk.runtime.groups import device_of, on_gpus
from lightning_topk.runtime.lanes import Future
from lightning_topk.runtime.messages import LOGGER
from lightning_topk.runtime.optimizers import GetOptimizers, getter
from lightning_topk.runtime.state import HookState


class TopKState(HookState):
    """State of the communication hook of one model: queues the exchanges of DDP's buckets.

    Created by :func:`lightning_topk.attach`.
    """

    _usage: "_Usage | None" = None

    def watch_use(self, parameters: Iterable[Tensor]) -> None:
        """Tracks which parameters get a gradient, for models with unused parameters."""
        self._usage, self.voting = _Usage(parameters), True

    def check_launch_order(self, model: torch.nn.Module) -> None:
        """Names collectives of the backward pass that NCCL may start in another order than the exchange's."""
        sync = any(isinstance(each, torch.nn.SyncBatchNorm) for each in model.modules())
        in_order = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0")
        if sync and self.world > 1 and on_gpus(self.open_groups().all) and not in_order:
            self._say(
                "lightning_topk: SyncBatchNorm's collectives run beside the exchange's, which have communicators of "
                "their own. If a GPU is too busy for kernels of both, they must start in the same order on all ranks: "
                "set NCCL_LAUNCH_ORDER_IMPLICIT=1 before training (NCCL 2.26 and later), or training may hang."
            )

    def launch(self, bucket: GradBucket) -> Future:
        """Queues the exchange of a bucket.

        Args:
            bucket: DDP's bucket; its buffer will hold the result.

        Returns:
            A future of the buffer.

        Raises:
            RuntimeError: The state was closed.
            TypeError: The bucket is not a GradBucket, or it is on an unsupported device.
            ValueError: An optimizer and the exchange would both apply momentum.
        """
        if not isinstance(bucket, GradBucket):
            raise TypeError(
                f"the hook was called with a {type(bucket).__name__} instead of a GradBucket, as torch.compile does "
                "with torch._dynamo.config.optimize_ddp = 'python_reducer'. Set it to 'ddp_optimizer' (the default)."
            )
        # The bucket is only valid during this call, so take everything the job needs from it now.
        buffer, parameters, index, last = bucket.buffer(), tuple(bucket.parameters()), bucket.index(), bucket.is_last()
        if index == 0:
            self._buckets.clear()  # left over from a failed backward pass
        if buffer.is_sparse:
            self._say(
                "lightning_topk: sparse gradients are exchanged as dense ones, and the saving is relative to an "
                "all-reduce of all rows. DDP would send only the rows that a batch touches, which may be less."
            )
        used = self._usage.take(parameters) if self._usage else None
        future = self.exchange(parameters, buffer, f"bucket {index}", used, exposed=last)
        if last:
            self.end_pass(self._buckets)
        return future

    def continue_from(self, other: "TopKState") -> None:
        """Continues the counts, measurements and messages of another state of the same run."""
        self.telemetry.continue_from(other.telemetry)
        self._say.said = other._say.said

    @override
    def close(self) -> None:
        if self._usage is not None:
            self._usage.stop()
        super().close()


class InUse:
    """What DDP's hook receives: the state in use. DDP never drops a hook, so a later attach replaces the state."""

    def __init__(self, state: TopKState) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        # DDP pickles it, but a copy of the model has no hook.
        return _left_out, ()


def _left_out() -> None:
    """Replaces the state in a pickle or deep copy of a DDP model."""
    LOGGER.warning(
        "lightning_topk: a copy of a DDP model has no communication hook, and exchanges whole gradients. To compress "
        "them, attach the copy too."
    )


class _Usage:
    """Tracks which parameters got a gradient since the last query.

    Args:
        parameters: The parameters to watch.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._used = set[Tensor]()
        self._hooks: list[RemovableHandle] = []
        for parameter in parameters:
            trained = parameter.requires_grad
            if parameter.is_floating_point():
                # A frozen parameter may be unfrozen later, but torch registers hooks only on trained ones.
                parameter.requires_grad_(True)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._used.add))
                parameter.requires_grad_(trained)

    def take(self, bucket: Bucket) -> Tensor:
        """Returns ``[parameters]`` bool, which parameters of a bucket got a gradient, and resets it."""
        used = torch.tensor([parameter in self._used for parameter in bucket])
        self._used.difference_update(bucket)
        return used

    def stop(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


def topk_hook(model: InUse, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook that exchanges a bucket's gradient with the settings of a model's state.

    Args:
        model: The state in use; one per DDP model.
        bucket: DDP's bucket.

    Returns:
        A future of the bucket's buffer, which will hold the mean that all ranks agree on.
    """
    return model.state.launch(bucket)


def attach(
    model: torch.nn.Module,
    config: TopKConfig,
    optimizer: GetOptimizers | Sequence[Optimizer] | Optimizer | None = None,
    **arguments: Any,
) -> TopKState:
    """Makes a DDP model exchange its gradients with :func:`topk_hook`; see :func:`lightning_topk.attach`."""
    model = _ddp_of(model)
    check_ddp_options(
        {
            "mixed_precision": model.mixed_precision,
            "skip_all_reduce_unused_params": getattr(model, "skip_all_reduce_unused_params", False),
            "delay_all_reduce_named_params": model._delay_all_reduce_params,
        }
    )
    model._comm_hooks[:] = [each for each in model._comm_hooks if each != (topk_hook, None)]  # left in a copy
    earlier = [each for _, each in model._comm_hooks if isinstance(each, InUse)]
    if len(model._comm_hooks) > len(earlier):
        raise RuntimeError(
            "this DistributedDataParallel model already has another communication hook, and DDP takes only one. Wrap "
            "the module in a new DistributedDataParallel, and attach that."
        )
    exchanged = _exchanged(model)
    check_parameters(exchanged)
    optimizers = getter(optimizer)
    for each in earlier:
        each.state.close()
    with device_of(exchanged):
        group = model.process_group if model.process_group is not dist.group.WORLD else None
        state = TopKState(config, process_group=group, optimizers=optimizers, **arguments)
    try:
        state.buckets.all_names = all_names_of(model.module)
        state.buckets.learn_names({p: name for p, name in names_of(model.module).items() if p in exchanged})
        state.open_groups().connect(model.device)
        state.residuals.keep_only(exchanged)
        state.optimizers.start(optimizers is None or optimizers is not optimizer, state.open_groups().all)
        if earlier:
            earlier[0].state = state
            model.reducer._reset_state()  # a backward pass with the closed state may have failed halfway
        else:
            model.register_comm_hook(InUse(state), topk_hook)
            model.register_forward_pre_hook(_check_join)
    except (RuntimeError, ValueError):
        state.close()
        raise
    if model.find_unused_parameters and not model.static_graph:
        state.watch_use(exchanged)
    state.check_launch_order(model)
    return state


def _exchanged(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Names of the parameters that DDP reduces if they are trained: all but its ``parameters_to_ignore``.

    DDP compares ``module.parameter``, which is ``.parameter`` for parameters of the root module.
    """
    return {
        parameter: f"{part}.{name}".removeprefix(".")
        for part, module in model.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{part}.{name}" not in model.parameters_to_ignore
    }


def _check_join(model: DistributedDataParallel, args: Any) -> None:
    """Refuses a ``join`` whose mean is not over all ranks."""
    if model._join_config.enable and not model._divide_by_initial_world_size:
        raise ValueError(
            "join(divide_by_initial_world_size=False) is not supported with top-k exchange, which takes the mean "
            "over all ranks. Leave the argument out."
        )


def smaller_buckets_(options: dict[str, Any], device: torch.device) -> None:
    """Sets ``bucket_cap_mb`` in DDP's options on CPUs, if the user gave none; see :data:`.CPU_BUCKET_MB`."""
    if device.type == "cpu" and options.get("bucket_cap_mb") is None:
        options["bucket_cap_mb"] = CPU_BUCKET_MB


def is_ddp(model: Any) -> bool:
    """Whether a model, compiled or not, is wrapped in DDP."""
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)


def _ddp_of(model: Any) -> DistributedDataParallel:
    """Returns the DDP model, out of a compiled one if needed."""
    if is_ddp(model):
        return getattr(model, "_orig_mod", model)
    kind = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"attach takes a DistributedDataParallel model, not a {kind}.")
    if "FullyShardedDataParallel" in {kind.__name__ for kind in type(model).__mro__}:
        raise TypeError(
            f"attach takes a DistributedDataParallel model; this {kind} is FSDP1, which has no hook for gradients of "
            "shards. Use torch.distributed.fsdp.fully_shard (FSDP2), or DistributedDataParallel."
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    raise TypeError(
        f"attach takes a DistributedDataParallel model, and this is a bare {kind} on one of {ranks} ranks. Pass the "
        "DistributedDataParallel model that training calls: with Hugging Face's Trainer, trainer.model_wrapped; in "
        "your own loop, DistributedDataParallel(model)."
    )
