"""Exchanges the gradients of one model during its backward passes, whatever the wrapper.

A wrapper's adapter (:mod:`lightning_topk.adapters.ddp`) reports the start of a backward pass and passes on gradients;
this module turns them into jobs, queues them on the lane, and collects their records between two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from numbers import Integral
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topk import messages
from lightning_topk.bucket import Bucket, Buckets
from lightning_topk.config import TopKConfig, check_function, check_integer
from lightning_topk.consensus import check_agreement, every_rank, gathered
from lightning_topk.core.link import NOTHING, Measure
from lightning_topk.optim.applied import Clipping
from lightning_topk.optim.clips import MaxNorm, UserClipping
from lightning_topk.optim.optimizers import Optimizers
from lightning_topk.runtime import checkpoint
from lightning_topk.runtime.groups import Groups, connect, on_failure
from lightning_topk.runtime.jobs import Job, Pass, mark
from lightning_topk.runtime.lanes import Future, StreamLane, ThreadLane
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.shares import Shares
from lightning_topk.runtime.telemetry import Report, Telemetry
from lightning_topk.schedule import Schedule
from lightning_topk.volume import Volume


class HookState:
    """State of one rank for exchanging the gradients of one model.

    Only the thread that runs backward writes its fields. :func:`lightning_topk.attach` creates it; see there for
    arguments and errors.
    """

    shards_per_node = 1
    """Ranks of this node, this one included, that each exchange a shard of the same gradients."""
    shards: dist.ProcessGroup | None = None
    """The group of the ranks that hold the shards of this rank's parameters; None if they are not sharded."""

    def __init__(
        self,
        config: TopKConfig,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        earlier: HookState | None = None,
        epoch: Callable[[], int] | None = None,
        optimizers: Callable[[], Sequence[Optimizer]] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        local_world_size: int | None = None,
        announce: Callable[[str], None] | None = None,
        note: Callable[[str], None] | None = None,
        max_norm: MaxNorm = None,
    ) -> None:
        _check_arguments(config, epoch, optimizers is not None)
        groups, self.config, uneven = connect(config, device, process_group, timeout, local_world_size)
        self.device = device
        self.groups: Groups | None = groups
        self.rank, self.world, self.local = groups.rank, groups.world, groups.local
        self.residuals: Residuals = Residuals() if earlier is None else earlier.residuals
        self._epoch = epoch or (lambda: 0)
        self.steps: int = 0 if earlier is None else earlier.steps
        """Backward passes of the run that were exchanged, for schedules and selectors."""
        self.last_buckets: tuple[Bucket, ...] = ()
        self._parent = process_group
        # With a sharded model, self.rank counts the replicas of one shard: it is 0 on every rank of the first node.
        self._say = messages.WarnOnce(announce, self.rank if self.shards_per_node == 1 else dist.get_rank(), note)
        self.buckets = Buckets(self.config, self.world, groups.local)
        self.voting = False
        """Whether the ranks exchange in every step which parameters they used."""
        self.told = False
        """Whether the user has seen the :meth:`summary`, or a later state will show it."""
        clipping = Clipping(self.world // (self.local if self.config.by_node else 1), self.shards)
        self.shares = Shares(device, self.shards)
        self.telemetry = telemetry = Telemetry(self.rank, self.shards_per_node, clipping, self.shares)
        self.optimizers = Optimizers(
            optimizers, scaler, self.config, self.buckets, self.held_by_optimizers, telemetry, self._say,
            UserClipping(max_norm, clipping, self.config.waits, self._say),
        )  # fmt: skip
        self._lane: StreamLane | ThreadLane | None = None
        self.current: Pass | None = None
        """The backward pass in progress."""
        self._last: Pass | None = None  # the previous pass, which may be in flight
        self._unchanged = 0  # consecutive passes with the same buckets
        with on_failure(self.close):
            self.residuals.move_to(self, self.rank, self.local if self.config.by_node else 1)
            self._collect()
            if not self.steps:  # not for a model that is wrapped again
                self._say.note(messages.start_message(self.config, self.world, self.local))
                self._say(uneven, *messages.startup_warnings(config, self.config, self.world, optimizers is not None))

    @property
    def names(self) -> Mapping[Tensor, str]:
        """The parameters' names."""
        return self.buckets.names

    def lane(self, device: torch.device) -> StreamLane | ThreadLane:
        """Returns the lane for gradients on a device."""
        if self._lane is None:
            groups = self.open_groups()
            if device.type not in ("cpu", "cuda"):
                raise TypeError(f"gradients are on {device}; the exchange supports CPU and CUDA tensors only.")
            self._lane = StreamLane(device, groups) if device.type == "cuda" else ThreadLane(groups)
            self._say(messages.slow_compression(self.config, device))
        return self._lane

    def open_groups(self) -> Groups:
        """The process groups."""
        if self.groups is None:
            raise RuntimeError(
                f"this {type(self).__name__} was closed. To continue, attach the model again, with "
                "residuals=state.residuals."
            )
        return self.groups

    def begin_pass(self, waits: bool = False) -> None:
        """Begins a backward pass, before its first gradient; drops a pass that began and did not end.

        ``waits``: whether backward waits for each exchange instead of overlapping with it.
        """
        self.open_groups()  # refuses a closed state, which would adapt optimizers again
        self._collect()
        self.optimizers.begin_pass()
        telemetry, optimizers = self.telemetry, self.optimizers
        for due in self.shares.due:
            self._share_out(due)
        epoch: Any = self._epoch()
        if not isinstance(epoch, Integral) or epoch < 0:
            raise TypeError(f"the function epoch= returned {epoch!r}; it must return the number of completed epochs.")
        self.current = Pass(
            self.steps,
            int(epoch),
            self.residuals,
            optimizers.scale,
            optimizers.rates,
            Measure(True, telemetry.measure_layers) if telemetry.measure else NOTHING,
            telemetry.timing,
            waits,
            clips=any(self.buckets.plan_of(bucket).waits for bucket in self.last_buckets),
        )

    def _share_out(self, buckets: tuple[Bucket, ...]) -> None:
        """Redistributes the bytes of a step among its buckets and their parameters, as rank 0 decides. A collective."""
        sizes = {bucket: self.buckets.plan_of(bucket).compressed_sizes for bucket in buckets}
        groups = self.open_groups()
        with every_rank("dividing a step's bytes among its buckets"):
            weights, lifts = gathered(self.shares.decide(sizes), self.device, groups.all)[0]
        if weights and len(buckets) > 1:
            steps = [turn for turn in self.shares.turns if buckets[0] in turn]
            self.buckets.share(dict(zip(buckets, weights, strict=True)), steps)
        for bucket, its in zip(buckets, lifts, strict=True):
            bucket.lifts = its if bucket.dtype != torch.float16 else ()  # lifted float16 may overflow
        messages.LOGGER.debug("the buckets' shares of the bytes, over their mean: %s; lifts: %s", weights, lifts)

    def exchange(
        self, parameters: Sequence[Tensor], gradient: Tensor, name: str, used: Sequence[bool] | None = None
    ) -> Future:
        """Queues the exchange of a bucket's gradient in this pass.

        ``gradient`` ``[numel]`` is overwritten with the mean over all ranks, which is also the future's result.
        ``used`` says whether this rank used each parameter; None if it used all. ``name`` appears in errors.
        """
        lane, now = self._lane or self.lane(gradient.device), self.current or self._outside_pass("exchange")
        bucket, clipping, clip = self.buckets.find(parameters), self.optimizers.clipping.estimate, None
        plan = self.buckets.plan_of(bucket)
        if not now.buckets:
            now.weighs = self.shares.measures(bucket)
        now.buckets.append(bucket)
        if plan.topology.compresses and plan.lossless:
            self.optimizers.expect_all_of(bucket)
        now.clips |= plan.waits
        if now.clips and clipping.limits:
            clip = clipping.of(bucket, gradient.device)
        job = Job(gradient, bucket, plan, name, used, clip, now)
        now.jobs += [job] * (gradient.numel() > 0)  # an empty gradient is not exchanged
        return lane.submit(job)

    def held_by_optimizers(self, members: Collection[Tensor]) -> Collection[Tensor]:
        """Returns the tensors that optimizers hold for members of buckets, in order: here the members themselves."""
        return members

    def end_pass(self, ready: Any = None) -> None:
        """Ends the backward pass, after its last gradient was submitted.

        ``ready`` marks when that gradient was ready, if the pass is timed; default: now.
        """
        self._last = now = self.current or self._outside_pass("end_pass")
        self.current = None
        buckets = now.buckets
        now.ready = ready or (mark(buckets[0][0].device) if now.timed and buckets else None)
        same = tuple(buckets) == self.last_buckets
        self._unchanged = self._unchanged + 1 if same else 0
        if not same and self.groups is not None:
            self.groups.forget_replies()
        saves = self.config.saving is not None and self.world > 1
        if saves and (ended := self.shares.end_pass(tuple(buckets))):
            self.buckets.forget_shares(ended)
        self.telemetry.end_pass(now)  # from now on, any thread may fold it
        self.optimizers.end_pass()
        self.optimizers.clipping.exchanged = now.clipped
        self.steps, self.last_buckets = self.steps + 1, tuple(buckets)
        if changed := self.buckets.plan_together(buckets):
            messages.LOGGER.debug("the density of %d of %d buckets has changed", changed, len(buckets))
        if saves and self._unchanged == 2:  # the buckets are final: DDP regroups after the first or second pass
            self._say(*messages.saving_warnings(self.buckets, buckets, self.predicted()))

    def _outside_pass(self, method: str) -> NoReturn:
        raise RuntimeError(f"{method} was called outside a pass: call begin_pass before its first gradient.")

    def _collect(self) -> None:
        self.telemetry.collect()
        if self.residuals.dropped:
            self._say(*self.residuals.take_warnings())

    def report(self) -> Report:
        """Returns the bytes, times and errors of exchanges since the last call; call it between backward passes."""
        return self.telemetry.report()

    def summary(self) -> str:
        """Compares what this rank sent per step so far, on average, with a dense exchange; empty if it sent nothing."""
        self.telemetry.collect()
        return messages.sent_message(self.config, self.telemetry.sent, self.telemetry.passes)

    @property
    def nonfinite_steps(self) -> int:
        """Backward passes so far that delivered a gradient with a NaN or an infinity. Waits for the device."""
        return self.telemetry.nonfinite_steps

    def predicted(self, rank: int | None = None) -> Volume:
        """Predicts the bytes that a rank sends in the next step, if it exchanges the same buckets as in the last.

        The bytes that FSDP2 sends inside a node are not included.
        """
        rank = self.rank if rank is None else check_integer("rank", rank, 0, self.world - 1)
        when = rank, self.steps, self._epoch()
        plans = [(self.buckets.plan_of(bucket), len(bucket) if self.voting else None) for bucket in self.last_buckets]
        total = sum((plan.volume(*when, voters) for plan, voters in plans), Volume())
        return total.of_shards(self.shards_per_node)

    def state_dict(self) -> dict[str, Any]:
        """Returns residuals for a checkpoint. Every rank must call it at the same point, between two backward passes.

        It also works after :meth:`close`.

        Returns:
            On rank 0, the entry that :mod:`lightning_topk.runtime.checkpoint` describes; on others, without tensors.

        Raises:
            RuntimeError: It was called within a backward pass.
        """
        self.check_between_passes()
        group = self._parent if self.groups is None else self.groups.all
        return checkpoint.collect(self.residuals, self.steps, self.names, self.config, self.device, group)

    def check_between_passes(self, method: str = "state_dict") -> None:
        """Refuses a call within a backward pass, since its exchanges write the residuals."""
        now, failed = self.current, self._lane is not None and self._lane.error is not None
        jobs = [job for each in (now, self._last) if each is not None for job in each.jobs]
        in_flight = not failed and not all(job.outcome for job in jobs)
        if in_flight or (now is not None and torch._C._current_graph_task_id() != -1):
            raise RuntimeError(f"{method} was called within a backward pass: call it between two backward passes.")

    def load_state_dict(self, entry: Mapping[str, Any]) -> None:
        """Loads the residuals of a checkpoint, of any world size. A collective: every rank must call it.

        Args:
            entry: The entry that :meth:`state_dict` returned on rank 0.

        Raises:
            RuntimeError: The state was closed, it was called within a backward pass, or another rank did not call it.
            ValueError: The entry is damaged, belongs to another model, or differs between the ranks; nothing changes.
        """
        self.check_between_passes("load_state_dict")
        self.open_groups()
        try:
            memories, checksum = checkpoint.read(self.names, entry)
        except ValueError:
            with suppress(ValueError):
                self._agree_on_entry({})
            raise
        self._agree_on_entry({"the step count": entry["steps"], "the checksum of residuals": checksum})
        self.residuals.restore(memories)
        self.steps, rates = entry["steps"], self.optimizers.rates
        if rates is not None:  # no step has been taken since
            self.optimizers.rates = rates._replace(last=(None,) * len(rates.last))

    def _agree_on_entry(self, loaded: Mapping[str, int]) -> None:
        """Checks that all ranks have loaded the same entry. A collective."""
        remedy = "Call load_state_dict with the same entry on every rank."
        with every_rank("comparing what the ranks have loaded", remedy):
            check_agreement(loaded, remedy, self.device, self.open_groups().all)

    def __deepcopy__(self, memo: Any) -> HookState:
        """Returns the state itself, so that objects that refer to it can be copied: its process groups cannot."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be saved. Save what its state_dict() returns.")

    def close(self) -> None:
        """Ends the lane and releases the process groups, but keeps the residuals. Shows the :meth:`summary`."""
        idle = self._lane is None or self._lane.close()
        self._collect()
        if not self.told:
            self._say.note(self.summary())
        self.optimizers.close()
        if self.groups is not None:
            self.groups.destroy(idle, failed=self._lane is not None and self._lane.error is not None)
        self._lane = self.groups = self._last = self.current = None


def _check_arguments(config: TopKConfig, epoch: Any, has_optimizers: bool) -> None:
    """Refuses settings that need ``epoch`` or optimizers where these were not passed."""
    if epoch is not None:
        check_function("epoch", epoch)
    by_epoch = [r for r in (config.ratio, config.server_ratio) if isinstance(r, Schedule) and r.by_epoch]
    if by_epoch and epoch is None:
        raise ValueError(
            f"{by_epoch[0]!r} depends on the epoch: pass epoch=, a function that returns it, or use steps=."
        )
    if config.momentum and not has_optimizers:
        raise ValueError(
            f"momentum={config.momentum!r} is applied on the workers, and the optimizer must have none of its own. "
            "Pass optimizer=, so that it can be checked."
        )
