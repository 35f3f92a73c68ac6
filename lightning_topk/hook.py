"""The DDP communication hook and its state; all that plain DistributedDataParallel needs.

DDP hands over each bucket as soon as its gradients are there. The hook queues the bucket's exchange on a lane and
returns a future at once, so that backward goes on while bytes travel.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes, and strings fail.

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.collectives import Lane, Meter, drive, lane_for
from lightning_topk.config import TopKConfig
from lightning_topk.exchange import exchange
from lightning_topk.residuals import Residuals


@dataclass
class Report:
    """What one rank exchanged since the last report.

    Attributes:
        bytes: Bytes sent to other ranks, by what they are for (see :class:`lightning_topk.collectives.Meter`).
        elements: Gradient elements exchanged.
        kept: Entries that this worker sent for them.
        energy: ``[2, 2]`` float64, the sums over buckets of ‖a‖² and ‖a - C(a)‖² (columns) for this worker's uplink and
            this server's downlink (rows); zero unless measured.
    """

    bytes: dict[str, int]
    elements: int = 0
    kept: int = 0
    energy: Tensor = field(default_factory=lambda: torch.zeros(2, 2, dtype=torch.float64))


class TopKState:
    """What the hook of one model keeps: settings, residuals, a lane, a process group of its own.

    Construct it on every rank at the same point, as it creates a process group. :func:`attach` does so, and also checks
    DDP's options; use that unless you need the hook by itself.

    Args:
        config: The settings; or pass them as keywords.
        process_group: The ranks that exchange gradients. Default: all.
        find_unused_parameters: Whether the model was wrapped with ``find_unused_parameters=True``.
        timeout: After which a collective that some rank does not join fails. Default: the backend's own.
        residuals: Those of an earlier state of the same model, to go on with.
        **settings: Arguments of :class:`lightning_topk.config.TopKConfig`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(
        self,
        config: TopKConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        timeout: timedelta | None = None,
        residuals: Residuals | None = None,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise ValueError(f"pass either config or the settings {sorted(settings)}, not both.")
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "TopKState creates a process group, but torch.distributed is not initialised; "
                "call torch.distributed.init_process_group first."
            )
        self.config = config or TopKConfig(**settings)
        self.find_unused_parameters = find_unused_parameters
        self.residuals = residuals or Residuals()
        self.meter = Meter()
        self.measure = False
        """Whether the exchanges measure their compression error: two more passes over every bucket."""
        # Its own group: the lane must not meet DDP's own collectives (buffers, used parameters) on the same one.
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=ranks is not None)
        assert isinstance(group, dist.ProcessGroup)
        self.group: dist.ProcessGroup | None = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._lane: Lane | None = None
        self._report = Report(bytes=dict(self.meter.bytes))

    def launch(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queues the exchange of a bucket.

        Args:
            bucket: DDP's bucket; its buffer will hold the result.

        Returns:
            A future of the buffer.

        Raises:
            RuntimeError: The state was closed.
            TypeError: The bucket is not one of DDP's reducer, or holds sparse gradients.
        """
        if self.group is None:
            raise RuntimeError("this TopKState was closed; wrap the model in a new DistributedDataParallel and attach.")
        if not isinstance(bucket, GradBucket):
            raise TypeError(
                f"the hook was called with a {type(bucket).__name__} instead of a GradBucket, as torch.compile does with "
                "torch._dynamo.config.optimize_ddp = 'python_reducer'. Set it to 'ddp_optimizer' (the default)."
            )
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise TypeError("gradients of a sparse embedding cannot be compressed; build it with sparse=False.")
        if self._lane is None:
            self._lane = lane_for(buffer.device)
        # The bucket itself is gone when this returns: take all that the job needs from it now.
        return self._lane.submit(partial(self._exchange, buffer, tuple(bucket.parameters()), bucket.index()))

    @torch.no_grad()
    def _exchange(self, buffer: Tensor, parameters: tuple[Tensor, ...], index: int) -> Tensor:
        """Exchanges one bucket, on the lane."""
        assert self.group is not None
        if buffer.numel() == 0:
            return buffer
        try:
            sizes = tuple(p.numel() for p in parameters) if self.find_unused_parameters else None
            make = partial(
                self.config.endpoint, buffer.numel(), self.rank, self.world, buffer.dtype, buffer.device, sizes
            )
            end = self.residuals.endpoint(parameters, make)
            for link in end.links:
                link.measure = self.measure
            drive(exchange(end, buffer, self.config.topology), self.group, self.meter)
        except Exception as error:
            raise RuntimeError(
                f"lightning_topk: the {self.config.topology} exchange of bucket {index} ({buffer.numel()} elements) "
                f"failed on rank {self.rank} of {self.world}: {error}"
            ) from error
        self.meter.bytes["dense"] += 2 * (self.world - 1) * buffer.nbytes // self.world
        self._report.elements += end.layout.numel
        self._report.kept += end.kept
        for side, link in enumerate(end.links):
            if link.energy is not None:
                self._report.energy[side] += link.energy.cpu()
        return buffer

    @property
    def exchanged(self) -> bool:
        """Whether anything was exchanged since the last report."""
        return self._report.elements > 0

    def report(self) -> Report:
        """What was exchanged since the last call. Call it between two backward passes."""
        report, now = self._report, dict(self.meter.bytes)
        self._report = Report(bytes=now)
        report.bytes = {kind: now[kind] - before for kind, before in report.bytes.items()}
        return report

    def residual_energy(self) -> Tensor:
        """``[2]`` float64: the sums of squares of this rank's worker and server residuals."""
        energy = torch.zeros(2, dtype=torch.float64)
        for end in self.residuals.endpoints:
            for side, link in enumerate(end.links):
                for kept in link.memory.tensors().values():
                    energy[side] += torch.linalg.vector_norm(kept, dtype=torch.float64).square().cpu()
        return energy

    def close(self) -> None:
        """Ends the lane and gives up the process group. The residuals stay."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        if self.group is not None:
            if dist.is_initialized():
                dist.destroy_process_group(self.group)
            self.group = None


def topk_hook(state: TopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: exchanges the bucket's gradient as ``state`` says.

    Example::

        model = DistributedDataParallel(net)
        model.register_comm_hook(TopKState(ratio=0.001), topk_hook)

    Args:
        state: Settings and residuals, one for each DDP model.
        bucket: DDP's bucket.

    Returns:
        A future of the bucket's buffer, which then holds the mean that all ranks agree on.
    """
    return state.launch(bucket)


def attach(
    model: DistributedDataParallel,
    config: TopKConfig | None = None,
    timeout: timedelta | None = None,
    residuals: Residuals | None = None,
    **settings: Any,
) -> TopKState:
    """Makes a DDP model exchange its gradients by :func:`topk_hook`.

    Call it on every rank, right after wrapping the model. What DDP broadcasts is counted too: the model when it is
    wrapped, and the buffers before a forward pass.

    Args:
        model: The wrapped model.
        config: The settings; or pass them as keywords.
        timeout: See :class:`TopKState`.
        residuals: See :class:`TopKState`.
        **settings: Arguments of :class:`lightning_topk.config.TopKConfig`.

    Returns:
        The state; call its ``close()`` when training is over.

    Raises:
        ValueError: An option of the model bypasses or contradicts the hook.
        RuntimeError: The model has a communication hook already.
    """
    check_ddp_options(
        {
            "mixed_precision": model.mixed_precision,
            "skip_all_reduce_unused_params": getattr(model, "skip_all_reduce_unused_params", False),
            "delay_all_reduce_named_params": model._delay_all_reduce_params,
        }
    )
    check_parameters(model.module)
    state = TopKState(
        config,
        process_group=model.process_group if model.process_group is not dist.group.WORLD else None,
        find_unused_parameters=model.find_unused_parameters and not model.static_graph,
        timeout=timeout,
        residuals=residuals,
        **settings,
    )
    model.register_comm_hook(state, topk_hook)
    sends = tree_broadcast_sends(state.rank, state.world)
    buffers = sends * sum(buffer.nbytes for buffer in model.modules_buffers)
    # DDP's constructor has just made all ranks equal to rank 0.
    state.meter.bytes["broadcast"] += sends * sum(parameter.nbytes for parameter in model.module.parameters()) + buffers

    def count_buffers(module: torch.nn.Module, args: Any) -> None:
        if model.will_sync_module_buffers():
            state.meter.bytes["broadcast"] += buffers

    model.register_forward_pre_hook(count_buffers)
    return state


def check_ddp_options(options: Mapping[str, Any]) -> None:
    """Refuses options of DDP by which gradients would pass the hook by.

    Args:
        options: Keyword arguments of DistributedDataParallel. Judged by value, since some callers pass every default.

    Raises:
        ValueError: An option bypasses the hook.
    """
    reasons = {
        "mixed_precision": "DDP then casts gradients beside the hook. Use the Trainer's precision, or autocast",
        "skip_all_reduce_unused_params": "ranks would then exchange different buckets and hang. Leave it out",
        "delay_all_reduce_named_params": "these parameters' gradients would bypass the hook. Leave it out",
    }
    for name, reason in reasons.items():
        value = options.get(name)
        if value is not None and value is not False and value != []:
            raise ValueError(f"{name}={value!r} does not go with top-k exchange: {reason}.")


def check_parameters(module: torch.nn.Module) -> None:
    """Refuses parameters whose gradients have no largest entries to choose.

    Raises:
        ValueError: The module has a complex parameter or a sparse embedding.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise ValueError(
                f"{name} is an embedding with sparse=True, whose gradients cannot be compressed; use sparse=False."
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(
                f"{name} has dtype {parameter.dtype}; only real floating-point gradients can be compressed."
            )


def tree_broadcast_sends(rank: int, world: int) -> int:
    """How often ``rank`` sends the message when rank 0 broadcasts it over a binomial tree, as gloo does.

    In round i the ranks below 2^i have it, and each sends it 2^i ranks further.
    """
    rounds = (world - 1).bit_length()
    return sum(rank < 2**i and rank + 2**i < world for i in range(rounds))
