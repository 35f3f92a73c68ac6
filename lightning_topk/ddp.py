"""DDP's side: its communication hook turns buckets into jobs for the lane.

DDP hands over each bucket as soon as its gradients are ready. The hook queues the bucket's exchange on a lane and
returns a future at once, so backward goes on while bytes travel.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes, and strings fail.

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import Unpack, override

from lightning_topk.config import Settings, TopKConfig
from lightning_topk.runtime.buckets import names_of
from lightning_topk.runtime.checks import check_ddp_options, check_parameters, check_settings, one_config
from lightning_topk.runtime.collectives import tree_broadcast_sends
from lightning_topk.runtime.exchanger import Batch, Bucket
from lightning_topk.runtime.groups import device_of
from lightning_topk.runtime.lanes import Future
from lightning_topk.runtime.memory.by_parameter import Residuals
from lightning_topk.runtime.messages import LOGGER
from lightning_topk.runtime.optimizer.optimizers import GetOptimizers, getter
from lightning_topk.runtime.state import HookState


class TopKState(HookState):
    """The state of the hook of one model: accepts DDP's buckets, queues their exchanges, closes.

    Construct it on every rank at the same point, since it creates process groups. :func:`attach` does so, checks DDP's
    options, counts DDP's broadcasts and handles parameters that may go unused; prefer it. With a state and the hook
    alone, every parameter must get a gradient in every step.

    Args:
        config: The settings; or pass them as keywords.
        process_group: The ranks that exchange gradients. Default: all.
        timeout: After which a collective that some rank does not join fails. Default: that of ``process_group``.
        residuals: Those of an earlier state of the same model, to go on with.
        epoch: Returns the epoch, for schedules by epoch.
        optimizers: Returns the optimizers at the first step, for settings that depend on them and for ``scaler``.
        scaler: The GradScaler that scales the loss. Residuals are then kept in unscaled units, and what was delivered
            for a step that it skips goes back into them; the payloads are kept until the step is taken.
        local_world_size: Ranks of each node, for ``topology="hierarchical"`` and to count what leaves a node. Ranks of
            a node are consecutive. Default: torchrun's ``LOCAL_WORLD_SIZE``, or 1.
        announce: Is called on rank 0 with what a user should know: settings without effect, adapted momentum.
            Default: warnings of the logger ``lightning_topk``.
        **settings: See :class:`lightning_topk.TopKStrategy`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: Ranks have different settings or do not make up whole nodes; a scaler without
            optimizers; a schedule by epochs without ``epoch``; or a bad setting.
    """

    def __init__(
        self,
        config: TopKConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        residuals: Residuals | None = None,
        epoch: Callable[[], int] | None = None,
        optimizers: Callable[[], Sequence[Optimizer]] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        local_world_size: int | None = None,
        announce: Callable[[str], None] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(
            one_config(TopKState, config, settings),
            process_group,
            timeout,
            residuals,
            epoch,
            optimizers,
            scaler,
            local_world_size,
            announce,
        )
        self.static_graph = False
        """Whether DDP regroups its buckets a pass later."""
        self._buckets: list[Bucket] = []  # that this backward pass has exchanged so far
        self._usage: _Usage | None = None

    def watch_use(self, parameters: Iterable[Tensor]) -> None:
        """Notes from now on which of the parameters get a gradient, for a model in which some may not."""
        self._usage, self.voting = _Usage(parameters), True

    def launch(self, bucket: GradBucket) -> Future:
        """Queues the exchange of a bucket.

        Args:
            bucket: DDP's bucket; its buffer will hold the result.

        Returns:
            A future of the buffer.

        Raises:
            RuntimeError: As :meth:`lane`.
            TypeError: The bucket is not one of DDP's reducer, or is on a device that the exchange does not support.
            ValueError: As :meth:`begin_pass`.
        """
        _check_bucket(bucket)
        # The bucket itself is gone when this returns: take all that the job needs from it now.
        buffer, parameters, index, last = bucket.buffer(), tuple(bucket.parameters()), bucket.index(), bucket.is_last()
        lane = self.lane(buffer.device)
        if index == 0:
            self._buckets.clear()  # what a backward pass that failed has left
            self.begin_pass()
        if buffer.is_sparse:
            self._say(
                "lightning_topk: sparse gradients are exchanged as dense ones, and what is saved counts against an "
                "all-reduce of all rows. DDP would send only the rows that a batch touches, which may be less."
            )
        promised, future = lane.promise()
        self._buckets.append(parameters)
        ready = lane.mark() if self.timing and last else None
        job = self.job(parameters, f"bucket {index}", self._usage.take(parameters) if self._usage else None)
        if last:
            self.observe(self._buckets, self.static_graph)
        self.submit(Batch(buffer, job, self.timing, ready), promised)
        if last:
            self.end_pass(self._buckets)
        return future

    @override
    def close(self) -> None:
        if self._usage is not None:
            self._usage.stop()
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        # DDP lists its hook's state among what it pickles, and makes a copy without the hook.
        return _left_out, ()


def _left_out() -> None:
    """Stands for a state in a pickle, or in a deep copy, of a DDP model."""
    LOGGER.warning(
        "lightning_topk: a copy of a DDP model has no communication hook, and exchanges whole gradients. To compress "
        "them, attach the copy too."
    )


class _Usage:
    """Which parameters got a gradient since they were last asked for.

    Args:
        parameters: Those to watch.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        used = self._used = set[Tensor]()
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(used.add) for p in parameters if p.requires_grad
        ]

    def take(self, bucket: Bucket) -> Tensor:
        """``[parameters]`` bool, which parameters of a bucket got a gradient; forgets it."""
        used = torch.tensor([parameter in self._used for parameter in bucket])
        self._used.difference_update(bucket)
        return used

    def stop(self) -> None:
        """Ends watching."""
        for hook in self._hooks:
            hook.remove()


def _check_bucket(bucket: Any) -> None:
    """Refuses what is no bucket of DDP's reducer."""
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            f"the hook was called with a {type(bucket).__name__} instead of a GradBucket, as torch.compile does with "
            "torch._dynamo.config.optimize_ddp = 'python_reducer'. Set it to 'ddp_optimizer' (the default)."
        )


def topk_hook(state: TopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: exchanges the bucket's gradient as ``state`` says.

    Example::

        model = DistributedDataParallel(net)
        model.register_comm_hook(TopKState(saving=50), topk_hook)  # or attach(model, saving=50), which does more

    Args:
        state: Settings and residuals, one for each DDP model.
        bucket: DDP's bucket.

    Returns:
        A future of the bucket's buffer, which then holds the mean that all ranks agree on.
    """
    return state.launch(bucket)


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
    **settings: Unpack[Settings],
) -> TopKState:
    """Makes a DDP model exchange its gradients by :func:`topk_hook`.

    What DDP broadcasts is counted too: the model when it is wrapped, and the buffers before a forward pass. Arguments
    are those of :func:`lightning_topk.attach`, which has its errors too.
    """
    config = one_config(attach, config, settings)
    model = _ddp_of(model)
    check_ddp_options(
        {
            "mixed_precision": model.mixed_precision,
            "skip_all_reduce_unused_params": getattr(model, "skip_all_reduce_unused_params", False),
            "delay_all_reduce_named_params": model._delay_all_reduce_params,
        }
    )
    model._comm_hooks[:] = [each for each in model._comm_hooks if each != (topk_hook, None)]  # those of a copy
    if model._comm_hooks:
        raise RuntimeError(
            "this DistributedDataParallel model has a communication hook already, and DDP takes one only. Wrap the "
            "module in a new DistributedDataParallel, and attach that."
        )
    exchanged = _exchanged(model)
    check_parameters(exchanged)
    check_settings(config, optimizer is not None)
    optimizers = getter(optimizer)
    with device_of(exchanged):
        state = TopKState(
            config,
            process_group=model.process_group if model.process_group is not dist.group.WORLD else None,
            timeout=timeout,
            residuals=residuals,
            epoch=epoch,
            optimizers=optimizers,
            scaler=scaler,
            local_world_size=local_world_size,
            announce=announce,
        )
    try:
        state.buckets.learn_names({p: name for p, name in names_of(model.module).items() if p in exchanged})
        if optimizers is not optimizer:  # there are some already
            state.sync_optimizers()
        model.register_comm_hook(state, topk_hook)
    except (RuntimeError, ValueError):
        state.close()
        raise
    state.static_graph = bool(model.static_graph)
    if model.find_unused_parameters and not model.static_graph:
        state.watch_use(exchanged)
    model.register_forward_pre_hook(_BeforeForward(model, state, init_sync))
    return state


def _exchanged(model: DistributedDataParallel) -> dict[Tensor, str]:
    """The names of the parameters that DDP reduces if they are trained: all but those that it is told to ignore.

    DDP compares ``module.parameter``, so ``.parameter`` for one of the model itself.
    """
    return {
        parameter: f"{part}.{name}".removeprefix(".")
        for part, module in model.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{part}.{name}" not in model.parameters_to_ignore
    }


class _BeforeForward:
    """Counts DDP's broadcasts before each forward pass, and refuses a ``join`` whose mean is not over all ranks.

    Args:
        model: The model.
        state: Its state.
        init_sync: Whether DDP's constructor has broadcast rank 0's weights.
    """

    def __init__(self, model: DistributedDataParallel, state: TopKState, init_sync: bool) -> None:
        self._bytes = state.telemetry.meter.bytes
        self._sends = tree_broadcast_sends(state.rank, state.world)
        if init_sync:
            ignored: set[str] = model.parameters_to_ignore
            weights = sum(p.nbytes for name, p in model.module.named_parameters() if name not in ignored)
            # Where DDP has forward_sync_buffers (torch 2.14), it does not apply here. The deprecated
            # broadcast_buffers=False does, but the model does not keep it: then this counts too much.
            buffers = model.broadcast_buffers or hasattr(model, "forward_sync_buffers")
            self._count(weights + sum(buffer.nbytes for buffer in model.modules_buffers) * buffers)

    def __call__(self, model: DistributedDataParallel, args: Any) -> None:
        if model._join_config.enable and not model._divide_by_initial_world_size:
            raise ValueError(
                "join(divide_by_initial_world_size=False) is not supported with top-k exchange, which takes the mean "
                "over all ranks. Leave the argument out."
            )
        if model.will_sync_module_buffers():
            self._count(sum(buffer.nbytes for buffer in model.modules_buffers))

    def _count(self, nbytes: int) -> None:
        self._bytes["broadcast"] += self._sends * nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)  # a copy of the model has no exchange


def _nothing(*_: Any) -> None:
    """Does nothing."""


def is_ddp(model: Any) -> bool:
    """Whether a model is wrapped in DDP, and compiled or not."""
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)


def _ddp_of(model: Any) -> DistributedDataParallel:
    """The DDP model that a model is, compiled or not.

    Raises:
        TypeError: It is another model, or none.
    """
    if is_ddp(model):
        found: DistributedDataParallel = getattr(model, "_orig_mod", model)
        return found
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
        "DistributedDataParallel model that training calls: with Hugging Face's Trainer trainer.model_wrapped, in a "
        "loop of your own DistributedDataParallel(model)."
    )


def own_memory_(module: torch.nn.Module) -> None:
    """Gives a CPU model memory of its own.

    Lightning 2.6 gives it to spawned workers, but not to those of ``start_method="forkserver"``: torch then shares the
    memory, and the optimizers of all ranks step on the same weights.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()
