"""The DDP adapter: a communication hook that turns buckets into jobs for the lane.

DDP calls the hook with each bucket as soon as its gradients are ready. The hook queues the bucket's exchange on a lane
and returns a future immediately, so backward continues while bytes travel.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes, and strings fail.

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_topk.adapters.checks import check_ddp_options, check_parameters, described, watch_gradients
from lightning_topk.bucket import all_names_of, names_of
from lightning_topk.config import CPU_BUCKET_MB, TopKConfig
from lightning_topk.consensus import check_agreement
from lightning_topk.messages import WarnOnce
from lightning_topk.optim.optimizers import GetOptimizers, getter
from lightning_topk.runtime.groups import DESCRIPTION, on_failure, on_gpus
from lightning_topk.runtime.lanes import Future
from lightning_topk.runtime.state import HookState

_SAME = (
    "find_unused_parameters", "static_graph", "bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list",
)  # fmt: skip
"""Attributes of DDP models that must be the same on every rank. Torch 2.9 lacks the last one."""


class TopKState(HookState):
    """State of the communication hook of one DDP model. Created by :func:`lightning_topk.attach`."""

    used: "set[Tensor] | None" = None
    """Parameters with a gradient that is not exchanged yet; None if they are not watched."""
    _watches: "Sequence[RemovableHandle]" = ()
    _together = False  # whether the buckets of a pass are exchanged as one
    _waiting: "list[_Part]"
    _delayed = 0  # parameters still to come in the first pass of a static graph
    _outside: "Sequence[tuple[Tensor, str]]" = ()  # parameters that an optimizer updates and DDP does not reduce
    model: "Callable[[], DistributedDataParallel | None]" = staticmethod(lambda: None)
    """Returns the model while it is in use."""

    def exchange_together(self, model: DistributedDataParallel, trained: Sequence[Tensor]) -> None:
        """Exchanges a model of up to 25 MiB as one bucket, unless the user has set the size of buckets.

        DDP would make two: one of 1 MiB, and one of the rest. In one bucket all entries compete for the payload; in
        two, a parameter keeps its bucket's density, and a model whose embedding needs five times as much falls behind.
        """
        small = sum(p.nbytes for p in trained) <= model.bucket_bytes_cap
        self._together = small and model.bucket_bytes_cap_default and len({p.dtype for p in trained}) == 1

    def watch_use(self, parameters: Iterable[Tensor]) -> None:
        """Tracks which parameters get a gradient, for models with unused parameters."""
        self.used, self.voting = set(), True
        self._watches = [watch for each in parameters for watch in watch_gradients(each, self.used.add)]

    def continue_accumulation(self, earlier: "Iterable[TopKState]") -> None:
        """Tells DDP and this state which parameters have gradients that earlier states did not exchange.

        If the next backward pass does not use them, a new or reset reducer would count them as unused and leave their
        gradients as they are. It learns of a use only from autograd's hooks; so they get a gradient of zeros.
        """
        if self.used is not None:
            accumulated = {p for each in earlier for p in each.used or () if p in self.names and p.requires_grad}
            zeros = {p: torch.zeros_like(p.grad) for p in accumulated if p.grad is not None}
            torch.autograd.backward([*zeros], [*zeros.values()])

    def expect_delayed_pass(self, model: DistributedDataParallel) -> None:
        """Counts the parameters of a static graph's first pass, in which DDP gives every bucket the index 0."""
        if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            self._delayed = model._get_ddp_logging_data()["num_parameter_tensors"]

    def plan_first_pass(self, model: DistributedDataParallel, trained: Sequence[Tensor]) -> None:
        """Plans the first pass's buckets together if DDP keeps them; otherwise their plans would change after it."""
        if self._together or not model.find_unused_parameters or model.static_graph:
            return
        private: Any = dist
        with suppress(AttributeError, TypeError):  # torch's private function; without it, densities change a little
            first = private._DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else model.bucket_bytes_cap
            places, _ = private._compute_bucket_assignment_by_size(trained, [first, model.bucket_bytes_cap])
            buckets = [[trained[place] for place in each] for each in reversed(places)]
            self.buckets.plan_together([*map(self.buckets.find, buckets)])

    def check_launch_order(self, model: DistributedDataParallel) -> None:
        """Warns if NCCL may start the exchange and other collectives in a different order on each rank."""
        sync = any(isinstance(each, torch.nn.SyncBatchNorm) for each in model.modules())
        others = [
            each.group_desc or each.group_name
            for each in dist.distributed_c10d._world.pg_map
            if each not in (dist.group.WORLD, model.process_group) and each.group_desc != DESCRIPTION
            if each.size() > 1 and on_gpus(each)
        ]
        in_order = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0")
        if (sync or others) and self.world > 1 and on_gpus(self.open_groups().all) and not in_order:
            whose = "SyncBatchNorm's collectives" if sync else f"collectives of {others[0]!r}, if backward has any,"
            self._say(
                f"lightning_topk: {whose} and the exchange use different NCCL communicators. Training may hang unless "
                "all ranks start collectives of both in the same order: set NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26+)."
            )

    def launch(self, bucket: GradBucket) -> Future:
        """Queues the exchange of DDP's bucket, whose buffer will hold the result; see :meth:`exchange`."""
        if not isinstance(bucket, GradBucket):
            raise TypeError(
                f"the hook was called with a {type(bucket).__name__} instead of a GradBucket, as torch.compile does "
                "with torch._dynamo.config.optimize_ddp = 'python_reducer'. Set it to 'ddp_optimizer' (the default)."
            )
        # The bucket is only valid during this call, so take everything the job needs from it now.
        buffer, parameters, index, last = bucket.buffer(), tuple(bucket.parameters()), bucket.index(), bucket.is_last()
        if self._delayed:
            index = 0 if self.current is None else len(self.current.buckets) + len(self._waiting)
            self._delayed -= len(parameters)
            last = not self._delayed
        if index == 0:
            self.begin_pass()
            self._waiting = []
        if buffer.is_sparse:
            self._say(
                "lightning_topk: sparse gradients are exchanged as dense ones, and the saving is relative to an "
                "all-reduce of all rows. DDP would send only the rows that a batch touches, which may be less."
            )
        used = None
        if self.used is not None:
            used = [parameter in self.used for parameter in parameters]
            self.used.difference_update(parameters)
        if self._together and not buffer.is_sparse and not (index == 0 and last):
            done: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
            self._waiting.append(_Part(parameters, buffer, used, done))
            future = done if buffer.is_cuda else done.then(lambda future: future.value())  # as ThreadLane.submit
        else:
            future = self.exchange(parameters, buffer, f"bucket {index}", used)
        if last:
            if self._waiting:
                self._exchange_waiting()
            self.end_pass()
            self._check_outside()
        return future

    def _exchange_waiting(self) -> None:
        """Exchanges the buckets of this pass as one, and copies the result to their buffers."""
        bucket = tuple(parameter for part in self._waiting for parameter in part.parameters)
        buffers, used = [part.buffer for part in self._waiting], [part.used for part in self._waiting]
        all_used = None if used[0] is None else [each for part in used for each in part or ()]
        waiting, self._waiting, flat = self._waiting, [], torch.cat(buffers)

        def deliver() -> None:
            for part, piece in zip(waiting, flat.split([*map(len, buffers)]), strict=True):
                part.buffer.copy_(piece)
                part.done.set_result(part.buffer)

        def end(exchanged: Future) -> None:
            try:
                exchanged.value()
                deliver()
            except Exception as error:
                for part in waiting:
                    part.done.set_exception(error)  # type: ignore[arg-type]  # torch annotates the result's type

        exchanged = self.exchange(bucket, flat, f"{len(waiting)} buckets", all_used)
        stream = self.lane(flat.device).stream
        if stream is None:
            exchanged.then(end)
        else:
            with torch.cuda.stream(stream):
                deliver()
            for each in (flat, *buffers):
                each.record_stream(stream)

    def _check_outside(self) -> None:
        """Warns of trained parameters that DDP does not reduce, although it was not told to ignore them."""
        model = self.model()
        if model is not None and self.optimizers.renewed:
            self.optimizers.renewed, updated = False, self.optimizers.updated()
            updated.difference_update(*self.last_buckets)
            self._outside = [each for each in _exchanged(model).items() if each[0] in updated] if updated else ()
        if self._outside and (drifting := [name for p, name in self._outside if p.requires_grad and p.is_leaf]):
            self._say(
                f"lightning_topk: DDP does not reduce {drifting[0]!r} (one of {len(drifting)} parameters), which an "
                "optimizer updates: it was added or unfrozen after DDP wrapped the model, so the ranks drift apart. "
                "Wrap the module in a new DistributedDataParallel, and attach that."
            )

    def continue_from(self, other: "TopKState") -> None:
        """Continues the counts, measurements and messages of another state of the same run."""
        self.telemetry.continue_from(other.telemetry)
        self._say.said = other._say.said

    @override
    def close(self) -> None:
        for watch in self._watches:
            watch.remove()
        super().close()


class _Part(NamedTuple):
    """A bucket of a pass that waits for the others."""

    parameters: "tuple[Tensor, ...]"
    buffer: Tensor
    used: "Sequence[bool] | None"
    done: Future


class InUse:
    """The hook's argument: holds the state in use. DDP never drops a hook, so a later attach replaces the state.

    A copy of a DDP model has no hook; the copy of this object has no state, and warns if the copied model is trained.
    """

    def __init__(self, state: Any = None, say: WarnOnce | None = None) -> None:
        self.state, self._say = state, say

    def __deepcopy__(self, memo: Any) -> "InUse":
        return self if self.state is None else InUse(say=self.state._say)

    def __reduce__(self) -> tuple[Any, ...]:
        return InUse, ()  # DDP pickles it

    def warn_of_copy(self) -> None:
        """Warns once, on rank 0, that a copy exchanges whole gradients."""
        self._say = self._say or WarnOnce(None, dist.get_rank())
        self._say(
            "lightning_topk: a copy of an attached DDP model is trained. It has no communication hook, so it exchanges "
            "whole gradients. To compress them, attach the copy too."
        )


def topk_hook(model: InUse, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: returns a future of the bucket's buffer, which will hold the mean of all ranks."""
    state: TopKState = model.state
    return state.launch(bucket)


def attach(
    model: DistributedDataParallel,
    config: TopKConfig,
    optimizer: GetOptimizers | Sequence[Optimizer] | Optimizer | None = None,
    **arguments: Any,
) -> TopKState:
    """Makes a DDP model exchange its gradients with :func:`topk_hook`; see :func:`lightning_topk.attach`."""
    check_ddp_options({**vars(model), "delay_all_reduce_named_params": model._delay_all_reduce_params})
    copied = [each for each in model._comm_hooks if isinstance(each[1], InUse) and each[1].state is None]
    model._comm_hooks[:] = [each for each in model._comm_hooks if each not in copied]
    earlier = [each for _, each in model._comm_hooks if isinstance(each, InUse)]
    if len(model._comm_hooks) > len(earlier):
        raise RuntimeError(
            "this DistributedDataParallel model already has another communication hook, and DDP takes only one. Wrap "
            "the module in a new DistributedDataParallel, and attach that."
        )
    names = _exchanged(model)
    check_parameters(names)
    optimizers, previous = getter(optimizer), [each.state for each in earlier]
    for each in previous:
        each.close()
    if isinstance(arguments.get("earlier"), TopKState):  # of another wrapper
        previous.append(arguments["earlier"])
    device = next((parameter.device for parameter in names if parameter.requires_grad), model.device)
    group = model.process_group if model.process_group is not dist.group.WORLD else None
    state = TopKState(config, device, process_group=group, optimizers=optimizers, **arguments)
    state.model = ref(model)
    with on_failure(state.close):
        groups, same = state.open_groups(), {**described(names), **{name: getattr(model, name, None) for name in _SAME}}
        remedy = "Build the same model on every rank, and pass the same arguments to DistributedDataParallel."
        check_agreement(same, remedy, device, groups.all)
        state.buckets.all_names = all_names_of(model.module)
        state.buckets.learn_names(names)
        groups.connect()
        state.residuals.keep_only(names)
        state.optimizers.start(optimizers is None or optimizers is not optimizer, device, groups.all)
        if model.find_unused_parameters and not model.static_graph:
            state.watch_use(names)
        state.check_launch_order(model)
        if earlier:
            earlier[0].state = state
            model.reducer._reset_state()  # a backward pass with the closed state may have failed halfway
        else:
            model.register_comm_hook(InUse(state), topk_hook)
            model.register_forward_pre_hook(_check_use)
        state.continue_accumulation(previous)
        trained = [p for p in names if p.requires_grad]
        state.exchange_together(model, trained)
        state.plan_first_pass(model, trained)
        state.expect_delayed_pass(model)
    return state


def _exchanged(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Names of the parameters that DDP reduces if they are trained: all but its ``parameters_to_ignore``."""
    exchanged = {
        parameter
        for part, module in model.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{part}.{name}" not in model.parameters_to_ignore  # of the root module, DDP compares ".name"
    }
    return {parameter: name for parameter, name in names_of(model.module).items() if parameter in exchanged}


def _check_use(model: DistributedDataParallel, args: Any) -> None:
    """Warns if a copy is trained; refuses CUDA graphs, and a ``join`` whose mean is not over all ranks."""
    for _, hook in model._comm_hooks if model.training and torch.is_grad_enabled() else ():
        if isinstance(hook, InUse) and hook.state is None:
            hook.warn_of_copy()
    if model._join_config.enable and not model._divide_by_initial_world_size:
        raise ValueError(
            "join(divide_by_initial_world_size=False) is not supported with top-k exchange, which takes the mean "
            "over all ranks. Leave the argument out."
        )
    exchanges = model.require_backward_grad_sync and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if exchanges and model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph captures a step of an attached model. The exchange decides in each step what to send, but a "
            "replay would repeat one step's decisions. Capture the module alone, before DDP wraps it "
            "(torch.cuda.make_graphed_callables), or use torch.compile(mode='reduce-overhead')."
        )


def smaller_buckets_(options: dict[str, Any], device: torch.device) -> None:
    """Sets ``bucket_cap_mb`` in DDP's options on CPUs, if the user did not; see :data:`.CPU_BUCKET_MB`."""
    if device.type == "cpu" and options.get("bucket_cap_mb") is None:
        options["bucket_cap_mb"] = CPU_BUCKET_MB
