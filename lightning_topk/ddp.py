"""The DDP communication hook and its state; all that plain DistributedDataParallel needs.

DDP hands over each bucket as soon as its gradients are there. The hook queues the bucket's exchange on a lane and
returns a future at once, so that backward goes on while bytes travel.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes, and strings fail.

import fnmatch
import logging
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_topk.config import TopKConfig, check_count
from lightning_topk.core.exchange import Endpoint, exchange
from lightning_topk.planning.volume import Volume, volume
from lightning_topk.runtime import checkpoint
from lightning_topk.runtime.autotune import PROBE_BYTES, choose
from lightning_topk.runtime.beta1 import lend_beta1, take_back_beta1
from lightning_topk.runtime.checkpoint import Mode
from lightning_topk.runtime.checks import check_ddp_options, check_momentum, check_parameters
from lightning_topk.runtime.collectives import (
    DenseCost,
    Future,
    Groups,
    Lane,
    Meter,
    check_agreement,
    dense_cost,
    drive,
    gathered,
    lane_for,
)
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.skipped_steps import Steps, Undo
from lightning_topk.schedule import Schedule

LOGGER = logging.getLogger("lightning_topk")


@dataclass
class Report:
    """What one rank exchanged since the last report.

    Attributes:
        bytes: Bytes sent to other ranks, by what they are for (see :class:`lightning_topk.runtime.collectives.Meter`).
        elements: Gradient elements exchanged.
        kept: Entries for which this worker's payloads have room.
        selected: Entries that its selector chose and that are not zero; zero unless measured.
        energy: ``[2, 2]`` float64, the sums over buckets of ‖a‖² and ‖a - C(a)‖² (columns) for this worker's uplink and
            this server's downlink (rows); zero unless measured.
        sizes: Bytes of each gradient that was exchanged.
        seconds: Time spent in exchanges; zero unless timed.
        exposed_seconds: The part of it after the last gradient was there, which backward could not hide.
        layers: By parameter, ``[3]`` float64: ‖a‖², ‖a - C(a)‖² and entries sent; empty unless measured.
    """

    bytes: dict[str, int]
    elements: int = 0
    kept: int = 0
    selected: int = 0
    energy: Tensor = field(default_factory=lambda: torch.zeros(2, 2, dtype=torch.float64))
    sizes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    layers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One gradient to exchange.

    Attributes:
        parameters: Whose it is, in its order.
        name: For error messages.
        used: ``[parameters]`` bool, which of them this rank used; None if all.
        step: Gradients exchanged before this one.
        epoch: Epochs completed.
        lr_ratio: The last step's learning rate over this step's.
    """

    parameters: tuple[Tensor, ...]
    name: str
    used: Tensor | None
    step: int
    epoch: int
    lr_ratio: float


class TopKState:
    """What the hook of one model keeps: settings, residuals, a lane, a process group of its own.

    Construct it on every rank at the same point, as it creates a process group. :func:`attach` does so, checks DDP's
    options, counts DDP's broadcasts and sees to parameters that may go unused; prefer it. With a state and the hook
    alone, every parameter must get a gradient in every step.

    Args:
        config: The settings; or pass them as keywords.
        process_group: The ranks that exchange gradients. Default: all.
        timeout: After which a collective that some rank does not join fails. Default: the backend's own.
        residuals: Those of an earlier state of the same model, to go on with.
        epoch: Tells the epoch, for schedules by epoch.
        optimizers: Gives the optimizers at the first step, for settings that depend on them and for ``scaler``.
        scaler: The GradScaler that scales the loss. Residuals are then kept in unscaled units, and what was sent for a step
            that it skips comes back; that costs a copy of the residuals.
        local_world_size: Ranks of each node, for ``topology="hierarchical"`` and to count what leaves a node. Ranks of a node
            are consecutive. Default: torchrun's ``LOCAL_WORLD_SIZE``, or 1.
        announce: Is told, on rank 0, what a user should know: settings without effect, a run that is short or of unknown length, what was
            chosen with ``topology="auto"`` or ``ratio="auto"``. Default: the logger ``lightning_topk``, at level INFO.
        planned_steps: Optimizer steps of the whole run, for schedules by share and for ``recipe="default"``, which does nothing
            without; infinite if the run has no end; where ranks expect different numbers, the least.
        **settings: Arguments of :class:`lightning_topk.config.TopKConfig`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: Ranks have different settings or do not make up whole nodes, ``lr_ratio=True``, ``beta1`` or a scaler without optimizers, a schedule by epochs
            without ``epoch`` or by share without ``planned_steps``, or a bad setting.
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
        planned_steps: float | None = None,
        **settings: Any,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "TopKState creates a process group, but torch.distributed is not initialised; "
                "call torch.distributed.init_process_group first."
            )
        self.config = _one_config(config, settings)
        check_count("local_world_size", local_world_size)
        check_count("planned_steps", None if planned_steps == math.inf else planned_steps)
        if self.config.by_plan and planned_steps is None:
            raise ValueError("a schedule goes by a share of the planned steps: pass planned_steps=, or use steps=.")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.config.lr_ratio and optimizers is None:
            raise ValueError("lr_ratio=True needs the learning rate: pass optimizer= to attach.")
        if self.config.beta1 is not None and optimizers is None:
            raise ValueError(f"beta1={self.config.beta1!r} is lent to the optimizer: pass optimizer= to attach.")
        if self._scaler is not None and optimizers is None:
            raise ValueError("scaler= needs the optimizers whose steps it may skip: pass optimizer= to attach.")
        for ratio in (self.config.ratio, self.config.server_ratio):
            if isinstance(ratio, Schedule) and ratio.by_epoch and epoch is None:
                raise ValueError(
                    f"{ratio!r} goes by epochs: pass epoch=, a function that tells the epoch, or use steps=."
                )
        self._epoch = epoch or (lambda: 0)
        self._optimizers, self._last_optimizers = optimizers, list[Optimizer]()
        self._lr_ratio = 1.0
        self._waiting: list[tuple[Tensor, tuple[Tensor, ...], Future]] = []
        self._buckets: list[tuple[Tensor, ...]] = []
        self._energy: list[tuple[int, Tensor]] = []
        self._selected: list[Tensor] = []
        self._layers: list[tuple[tuple[Tensor, ...], Tensor]] = []
        self._marks: list[tuple[Any, Any, Any]] = []
        self._failed: list[Tensor] = []
        self._failed_steps: Tensor | int = 0
        self.residuals = residuals or Residuals()
        self.residuals.settle()  # their endpoints may have been of other settings
        self._used: set[Tensor] | None = None
        self._watches: list[RemovableHandle] = []
        self.names: Mapping[Tensor, str] = {}
        """The parameters' names, which :func:`attach` knows."""
        self.static_graph = False
        """Whether DDP regroups its buckets a pass later."""
        self._unchanged = 0
        self._exact: set[Tensor] = set()
        self._chosen: dict[tuple[Tensor, ...], TopKConfig] = {}
        self._choice: dict[tuple[Tensor, ...], TopKConfig] = {}  # that will be in force from the next step on
        self._announce = announce or LOGGER.info
        self._said: set[str] = set()
        self._asked_for_beta1 = self.config.beta1 is not None
        self.meter = Meter()
        self.measure = False
        """Whether the exchanges measure their compression error: two more passes over every bucket."""
        self._dense_cost: DenseCost | None = None
        self.timing = False
        """Whether they measure their time."""
        self.measure_layers = False
        """Whether they do so parameter by parameter as well."""
        self._lane: Lane | None = None
        # Its own group: the lane must not meet DDP's own collectives (buffers, used parameters) on the same one.
        self.groups: Groups | None = Groups.make(process_group, timeout)
        group = self.groups.all
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = timeout or dist.distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))
        try:
            steps = min(gathered(math.inf if planned_steps is None else planned_steps, group))
            given, self.config = self.config, self.config.planned(steps, self.world)
            self._planned_steps = steps
            summary = {**self.config.summary(), "local_world_size": local_world_size}
            check_agreement(summary, "Pass the same settings on every rank.", group)
            self.local = local_world_size or _local_world_size(self.config, group)
            """Ranks of a node."""
            self.config = self.config.on(self.world, self.local)
        except ValueError:
            self.close()
            raise
        hierarchy = self.config.topology in ("hierarchical", "auto") and 1 < self.local < self.world
        self.groups = self.groups.divided(process_group, timeout, self.local, hierarchy)
        self.residuals.rank = self.rank
        if not self.residuals.steps:  # a model that is wrapped again goes on
            for remark in given.remarks(steps, self.world, self.local):
                self._say(remark)
            if self.config.lent_beta1 is not None and optimizers is None:
                self._say(
                    "lightning_topk: without optimizer= of attach, Adam keeps its beta1, which the default recipe lowers (README, Adam)."
                )
        self._report = Report(bytes=dict(self.meter.bytes))

    def _say(self, words: str) -> None:
        """Tells the user something, on rank 0 and once."""
        if self.rank == 0 and words not in self._said:
            self._announce(words)
        self._said.add(words)

    def name(self, names: Mapping[Tensor, str]) -> None:
        """Learns the parameters' names.

        Raises:
            ValueError: A pattern of ``dense_parameters`` is that of no parameter.
        """
        self.names = names
        for pattern in self.config.dense_parameters:
            found = {parameter for parameter, name in names.items() if fnmatch.fnmatchcase(name, pattern)}
            if not found:
                raise ValueError(
                    f"dense_parameters: no parameter is called {pattern!r}. There are {', '.join(sorted(names.values())[:20])}."
                )
            self._exact |= found

    def watch_use(self, parameters: Iterable[Tensor]) -> None:
        """Notes from now on which of the parameters get a gradient, for a model in which some may not."""
        used = self._used = set()
        self._watches = [p.register_post_accumulate_grad_hook(used.add) for p in parameters if p.requires_grad]

    def launch(self, bucket: GradBucket) -> Future:
        """Queues the exchange of a bucket; with ``scope="model"``, of all buckets when the last one comes.

        Args:
            bucket: DDP's bucket; its buffer will hold the result.

        Returns:
            A future of the buffer.

        Raises:
            RuntimeError: The state was closed.
            TypeError: The bucket is not one of DDP's reducer.
            ValueError: The learning rates of two parameter groups changed by different factors, with ``lr_ratio=True``.
        """
        if self.config.dense_parameters and not self.names:
            raise RuntimeError("dense_parameters are found by name; make the state with lightning_topk.attach.")
        if self.groups is None:
            raise RuntimeError("this TopKState was closed; wrap the model in a new DistributedDataParallel and attach.")
        if not isinstance(bucket, GradBucket):
            raise TypeError(
                f"the hook was called with a {type(bucket).__name__} instead of a GradBucket, as torch.compile does with "
                "torch._dynamo.config.optimize_ddp = 'python_reducer'. Set it to 'ddp_optimizer' (the default)."
            )
        # The bucket itself is gone when this returns: take all that the job needs from it now.
        buffer, parameters, index, last = bucket.buffer(), tuple(bucket.parameters()), bucket.index(), bucket.is_last()
        if self._lane is None:
            self._lane = lane_for(buffer.device)
        if index == 0:
            self._begin_pass()
        promised, future = self._lane.promise()
        self._waiting.append((buffer, parameters, promised))
        if last or (self.config.scope == "bucket" and not self.residuals.resumed):
            self._submit(index, last)
        if last:
            self.residuals.steps += 1
            self.residuals.buckets = tuple(self._buckets)
            self.residuals.resumed = max(0, self.residuals.resumed - 1)
        return future

    def _begin_pass(self) -> None:
        """A backward pass has its first bucket ready."""
        self._waiting.clear()  # what a backward pass that failed has left
        self._buckets.clear()
        if self._choice and not self.residuals.undecided:
            # Not before: what was sent for a step that the scaler then skipped would not come back.
            self.residuals.dissolve({parameter for bucket in self._choice for parameter in bucket})
            self._chosen |= self._choice
            self._choice = {}
        self._lr_ratio = self._follow_learning_rate()
        self.follow_optimizers()

    def _submit(self, index: int, last: bool) -> None:
        """Queues the exchange of the buffers that wait."""
        assert self._lane is not None
        buffers, groups, promises = zip(*self._waiting, strict=True)
        self._waiting.clear()
        flat: tuple[Tensor, ...] = sum(groups, ())
        saved = self.residuals.buckets if self.residuals.resumed else ()
        if saved and {p for p in flat if p.numel()} == {p for bucket in saved for p in bucket if p.numel()}:
            # DDP's first bucket holds the whole model. A resumed run exchanges it as the buckets that it had before.
            together = saved
        elif self.config.scope == "model":
            together = (flat,)
        else:
            together = groups
        self._buckets += together
        name = f"bucket {index}" if self.config.scope == "bucket" else "all buckets"
        ready = self._lane.mark() if self.timing and last else None
        jobs = [
            Job(bucket, name, self._used_of(bucket), self.residuals.steps, self._epoch(), self._lr_ratio)
            for bucket in together
        ]
        final: tuple[tuple[Tensor, ...], ...] = ()
        if last:
            self._unchanged = self._unchanged + 1 if _same(self._buckets, self.residuals.buckets) else 0
            settled = self._unchanged > self.static_graph and not self.residuals.resumed
            final = tuple(self._buckets) if settled and not self._choice else ()
        self._lane.submit(partial(self._exchange_all, buffers, groups, jobs, last, final, ready), promises)

    def _used_of(self, parameters: tuple[Tensor, ...]) -> Tensor | None:
        """``[parameters]`` bool, which of them got a gradient since they were last asked for; None if all always do."""
        if self._used is None:
            return None
        used = torch.tensor([parameter in self._used for parameter in parameters])
        self._used.difference_update(parameters)
        return used

    @torch.no_grad()
    def _exchange_all(
        self,
        buffers: Sequence[Tensor],
        groups: Sequence[tuple[Tensor, ...]],
        jobs: Sequence[Job],
        last: bool,
        final: tuple[tuple[Tensor, ...], ...],
        ready: Any | None,
    ) -> Sequence[Tensor]:
        """Exchanges what is in buffers as the jobs say, on the lane.

        Args:
            buffers: DDP's, one or more.
            groups: Whose gradients each holds, in order.
            jobs: How they are exchanged.
            last: Whether a backward pass ends with them.
            final: All buckets of that pass, if DDP will not regroup them any more.
            ready: When that pass had all its gradients, if that is measured.
        """
        assert self._lane is not None
        begun = self._lane.mark() if self.timing else None
        # Sparse gradients are exchanged as what they stand for, and become sparse again where anything arrives.
        dense = [(buffer.to_dense() if buffer.is_sparse else buffer).view(-1) for buffer in buffers]
        if len(jobs) == len(buffers) == 1 and all(map(operator.is_, jobs[0].parameters, groups[0])):
            self._exchange(dense[0], jobs[0])
        else:
            part = {
                parameter: piece
                for whole, group in zip(dense, groups, strict=True)
                for parameter, piece in zip(group, whole.split([p.numel() for p in group]), strict=True)
            }
            for job in jobs:
                g = torch.cat([part[p] for p in job.parameters])
                self._exchange(g, job)
                for p, piece in zip(job.parameters, g.split([p.numel() for p in job.parameters]), strict=True):
                    part[p].copy_(piece)
        results = [
            whole.view(buffer.shape).to_sparse(1) if buffer.is_sparse else buffer
            for buffer, whole in zip(buffers, dense, strict=True)
        ]
        if begun is not None:
            self._marks.append((begun, self._lane.mark(), ready))
        if last and self._failed:
            self._failed_steps = self._failed_steps + torch.stack(self._failed).any()
            self._failed.clear()
        if self.config.automatic:
            buckets = [bucket for bucket in final if bucket not in self._chosen and self._compressed(bucket)]
            done = jobs[0].step
            self._choose(buckets, (done + max(done, self._planned_steps)) / 2)
        return results

    def _choose(self, buckets: Sequence[tuple[Tensor, ...]], middle: float) -> None:
        """Measures how buckets are best exchanged from now on: at the step in the middle of what is left, infinite if that is unknown."""
        assert self.groups is not None
        if not buckets or self.world == 1:
            return
        try:
            exact = [self._exact_in(bucket) for bucket in buckets]
            choice = choose(
                self.config, buckets, exact, self.groups, self.meter, None if math.isinf(middle) else int(middle)
            )
        except Exception as error:
            raise RuntimeError(
                f"lightning_topk: measuring how buckets are best exchanged failed on rank {self.rank} of {self.world}: {error}"
            ) from error
        self._choice = dict(zip(buckets, choice.configs, strict=True))
        self._say(choice.words)

    def _compressed(self, parameters: Sequence[Tensor]) -> bool:
        """Whether there is anything in a bucket that may be compressed."""
        return any(p.numel() and p not in self._exact for p in parameters)

    def _exact_in(self, parameters: Sequence[Tensor]) -> list[int]:
        """Which parameters of a bucket, by number, are not to be compressed."""
        return [number for number, p in enumerate(parameters) if p in self._exact]

    def _config_of(self, parameters: tuple[Tensor, ...]) -> TopKConfig:
        """How a bucket is exchanged: before the choice, if there is one, by all-reduce."""
        if not self._compressed(parameters):
            return self.config.dense
        return self._chosen.get(parameters, self.config.dense) if self.config.automatic else self.config

    def _exchange(self, g: Tensor, job: Job) -> None:
        """Exchanges one gradient in place."""
        assert self.groups is not None
        if g.numel() == 0:
            return
        try:
            guarded = self._scaler is not None and self._last_optimizers
            guard = partial(self._guard, job.parameters) if guarded else None
            end = self.residuals.endpoint(
                job.parameters, partial(self.make_endpoint, job.parameters), g.device, job.lr_ratio, guard
            )
            self._config_of(job.parameters).resize_(end, job.step, job.epoch)
            for link in end.links:
                link.measure = self.measure
            layers = self.measure and self.measure_layers
            end.uplink.sizes = list(end.parts.pieces) if layers else None
            scale = None if self._scaler is None else self._scaler._scale
            drive(exchange(end, g, job.step, scale, job.used), self.groups, self.meter)
        except Exception as error:
            raise RuntimeError(
                f"lightning_topk: the {self._config_of(job.parameters).topology} exchange of {job.name} ({g.numel()} elements) "
                f"failed on rank {self.rank} of {self.world}: {error} (A rank that does not answer within the timeout of "
                f"{self._timeout} counts as lost.)"
            ) from error
        self._take_note(end, g.nbytes)
        if end.uplink.parts is not None:
            self._layers.append((job.parameters, end.uplink.parts))

    def make_endpoint(self, parameters: tuple[Tensor, ...]) -> Endpoint:
        """The endpoint of a bucket of parameters, with empty memories."""
        sizes, config, like = tuple(p.numel() for p in parameters), self._config_of(parameters), parameters[0]
        exact = [] if config.topology == "dense" else self._exact_in(parameters)
        return config.endpoint(
            sum(sizes), self.rank, self.world, like.dtype, like.device, sizes, self.local, exact=exact
        )

    def _take_note(self, end: Endpoint, nbytes: int) -> None:
        """Enters an exchange of a gradient of ``nbytes`` into the report."""
        self.meter.bytes["dense"] += 2 * (self.world - 1) * nbytes // self.world
        self._report.elements += end.layout.numel
        self._report.sizes.append(nbytes)
        exact = sum(stop - begin for begin, stop in end.exact) // end.parts.count
        self._report.kept += min(end.uplink.codec.kept * end.layout.shards + exact, end.layout.numel)
        # On the device until the report, so that the host does not wait here.
        assert end.finite is not None
        self._failed.append(~end.finite)
        self._energy += [(side, link.energy) for side, link in enumerate(end.links) if link.energy is not None]
        if end.uplink.energy is not None and end.uplink.selected is not None:
            self._selected.append(end.uplink.selected + exact)

    def _follow_learning_rate(self) -> float:
        """The last step's learning rate over this step's; 1 while it is zero, and with ``lr_ratio=False``."""
        if not self.config.lr_ratio or self._optimizers is None:
            return 1.0
        rates = [float(group["lr"]) for optimizer in self._optimizers() for group in optimizer.param_groups]
        last = self.residuals.learning_rates
        pairs = [(before, now) for before, now in zip(last, rates, strict=False) if before and now]
        self.residuals.learning_rates = [
            now or before for before, now in zip_longest(last[: len(rates)], rates, fillvalue=0.0)
        ]
        ratios = [before / now for before, now in pairs]
        if ratios and max(ratios) > min(ratios) * 1.001:
            raise ValueError(
                f"lr_ratio=True scales all residuals by one factor, but the learning rates of the parameter groups changed by "
                f"different ones: {ratios}. Use one schedule for all groups, or lr_ratio=False."
            )
        return ratios[0] if ratios else 1.0

    def follow_optimizers(self) -> None:
        """Checks the optimizers when they are new, lends them a beta1, and has the scaler's steps noted.

        A backward pass begins with it. Before, it tells what does not go together as soon as there are optimizers.

        Raises:
            ValueError: An optimizer and the exchange would both apply momentum.
        """
        now = [] if self._optimizers is None else list(self._optimizers())
        if len(now) == len(self._last_optimizers) and all(map(operator.is_, now, self._last_optimizers)):
            return
        check_momentum(self.config, now)
        take_back_beta1(self._last_optimizers, self)
        if self.config.lent_beta1 is not None:
            compressed = self.names.keys() - self._exact if self.names else None
            for words in lend_beta1(now, self.config.lent_beta1, self, compressed, self._asked_for_beta1):
                self._say(words)
        if self._scaler is not None:
            Steps.of(self._scaler).watch(now)
            self.residuals.forget_steps()
        self._last_optimizers = now

    def _guard(self, parameters: tuple[Tensor, ...], end: Endpoint) -> Undo:
        """What undoes the steps that the scaler skips, for a bucket's endpoint."""
        assert self._scaler is not None
        return Undo(end, parameters, Steps.of(self._scaler), self._last_optimizers)

    def predicted(self) -> Volume:
        """The bytes of the next step, if it exchanges the buckets of the last, as this rank sends them."""
        total = Volume(0, 0, 0, 0, 0, 0)
        for bucket in self.residuals.buckets:
            config, sizes = self._config_of(bucket), [p.numel() for p in bucket]
            exact = 0 if config.topology == "dense" else sum(sizes[number] for number in self._exact_in(bucket))
            parameters = None if self._used is None else [len(bucket)]
            when = self.residuals.steps, self._epoch()
            total += volume(
                config, [sizes], self.world, self.rank, bucket[0].itemsize, parameters, *when, self.local, [exact]
            )
        return total

    @property
    def nonfinite_steps(self) -> int:
        """Backward passes so far that delivered a gradient with a NaN or an infinity. Waits for the device."""
        return int(self._failed_steps)

    @property
    def exchanged(self) -> bool:
        """Whether anything was exchanged since the last report."""
        return self._report.elements > 0

    def report(self) -> Report:
        """What was exchanged since the last call. Call it between two backward passes.

        There is one report: a :class:`lightning_topk.CompressionMonitor` takes it at every step.
        """
        report, now = self._report, dict(self.meter.bytes)
        for side, energy in self._energy:
            report.energy[side] += energy.cpu()
        report.selected = sum(int(selected) for selected in self._selected)
        for parameters, parts in self._layers:
            for parameter, measured in zip(parameters, parts.cpu().T, strict=True):
                name = self.names[parameter]
                report.layers[name] = report.layers.get(name, 0) + measured
        for begun, ended, ready in self._marks:
            assert self._lane is not None
            report.seconds += self._lane.seconds(begun, ended)
            if ready is not None:
                report.exposed_seconds += max(0.0, self._lane.seconds(ready, ended))
        report.exposed_seconds = min(report.exposed_seconds, report.seconds)
        for noted in (self._energy, self._selected, self._layers, self._marks):
            noted.clear()
        self._report = Report(bytes=now)
        report.bytes = {kind: now[kind] - before for kind, before in report.bytes.items()}
        return report

    def measure_link(self) -> None:
        """Times two all-reduces, of at most 1 MiB; a collective. Call it between two backward passes."""
        assert self.groups is not None
        nbytes = min(max(self._report.sizes), PROBE_BYTES)
        self._dense_cost = dense_cost(nbytes, self._device(), self.groups.all, self.meter)

    def dense_seconds(self, report: Report) -> float | None:
        """About how long all-reduces of what was exchanged would take on this link; None before :meth:`measure_link`."""
        return None if self._dense_cost is None else self._dense_cost.seconds(report.sizes)

    def residual_energy(self) -> Tensor:
        """``[2]`` float64: the sums of squares of this rank's worker and server residuals.

        The mean over the ranks of the first is the mean over the workers, also where the ranks of a node are one worker.
        """
        energy = torch.zeros(2, dtype=torch.float64)
        for end in self.residuals.endpoints:
            for side, link in enumerate(end.links):
                kept = link.memory.tensors().get("residual")
                if kept is not None:
                    shared = 1 if side else end.parts.count
                    energy[side] += shared * torch.linalg.vector_norm(kept, dtype=torch.float64).square().cpu()
        return energy

    def state_dict(self, mode: Mode = "mean") -> dict[str, Any]:
        """The residuals for a checkpoint: every rank calls it at the same point, between two backward passes.

        Args:
            mode: ``"mean"`` keeps the mean over the workers, 2 x the model at any world size; ``"full"`` keeps every worker's
                own, for a resumed run of the same bits.

        Returns:
            On rank 0, numbers, words and CPU tensors, see :mod:`lightning_topk.runtime.checkpoint`; elsewhere the same without
            tensors.

        Raises:
            RuntimeError: The state was not made by :func:`attach`, which knows the parameters' names.
        """
        assert self.groups is not None
        return checkpoint.collect(self.residuals, self._names(), mode, self._device(), self.groups.all)

    def load_state_dict(self, entry: Mapping[str, Any]) -> None:
        """Goes on with the residuals of a checkpoint, of any world size; every rank calls it.

        Args:
            entry: What :meth:`state_dict` returned on rank 0.

        Raises:
            RuntimeError: The state was not made by :func:`attach`.
            ValueError: The entry is damaged, or of another model.
        """
        checkpoint.restore(self.residuals, self._names(), entry, self.make_endpoint, self.rank, self.world)

    def _names(self) -> Mapping[Tensor, str]:
        if not self.names:
            raise RuntimeError("residuals are saved by parameter name; make the state with lightning_topk.attach.")
        return self.names

    def _device(self) -> torch.device:
        return next(iter(self._names())).device

    def follow(self, other: "TopKState") -> None:
        """Goes on counting and measuring where another state of the same training ends."""
        self.measure, self.measure_layers, self.timing = other.measure, other.measure_layers, other.timing
        self._dense_cost = other._dense_cost
        self._failed_steps, self._chosen = other._failed_steps, other._chosen
        self._said = other._said

    def close(self) -> None:
        """Ends the lane and gives up the process groups. The residuals stay."""
        for watch in self._watches:
            watch.remove()
        idle = self._lane is None or self._lane.close()
        self.residuals.forget_steps()
        take_back_beta1(self._last_optimizers, self)
        if self.groups is not None and idle and dist.is_initialized():
            self.groups.destroy()  # not under a thread that is still in a collective
        self._lane = self.groups = None


def _local_world_size(config: TopKConfig, group: dist.ProcessGroup) -> int:
    """What torchrun says of the ranks on a node; 1 if it says nothing, or nothing that fits these ranks."""
    told = gathered(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), group)
    everyone = len(told) == dist.get_world_size()
    if everyone and len(set(told)) == 1 and len(told) % told[0] == 0:
        return int(told[0])
    if config.topology == "hierarchical":
        raise ValueError(
            f"topology='hierarchical' needs nodes of equally many ranks, but LOCAL_WORLD_SIZE is {told} on {len(told)} of "
            f"{dist.get_world_size()} ranks. "
            "Pass local_world_size=, or topology='sharded'."
        )
    return 1


def _same(buckets: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    """Whether they are of the very same parameters."""
    return [list(map(id, bucket)) for bucket in buckets] == [list(map(id, bucket)) for bucket in others]


def _one_config(config: TopKConfig | None, settings: dict[str, Any]) -> TopKConfig:
    if config is not None and settings:
        raise ValueError(f"pass either config or the settings {sorted(settings)}, not both.")
    return config or TopKConfig(**settings)


def topk_hook(state: TopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: exchanges the bucket's gradient as ``state`` says.

    Example::

        model = DistributedDataParallel(net)
        model.register_comm_hook(TopKState(ratio=0.001), topk_hook)  # or attach(model, ratio=0.001), which does more

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
    epoch: Callable[[], int] | None = None,
    init_sync: bool = True,
    optimizer: Callable[[], Sequence[Optimizer]] | Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    local_world_size: int | None = None,
    announce: Callable[[str], None] | None = None,
    planned_steps: float | None = None,
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
        epoch: See :class:`TopKState`.
        init_sync: Whether the model was wrapped with DDP's ``init_sync``, which broadcasts the weights once.
        optimizer: The optimizer, for settings that depend on it (``momentum``, ``beta1``, ``lr_ratio``, ``scaler``) and for what the
            default recipe does for Adam; or a function that gives the optimizers at the first step, if they do not exist yet.
        scaler: See :class:`TopKState`.
        local_world_size: See :class:`TopKState`.
        announce: See :class:`TopKState`.
        planned_steps: See :class:`TopKState`.
        **settings: Arguments of :class:`lightning_topk.config.TopKConfig`.

    Returns:
        The state; call its ``close()`` when training is over.

    Raises:
        ValueError: An option of the model bypasses or contradicts the hook, or a setting needs what is not passed.
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

    config = _one_config(config, settings)
    if config.momentum and optimizer is None:
        raise ValueError(
            f"momentum={config.momentum!r} is applied on the workers; pass optimizer=, so that it can be checked that the "
            "optimizer has none of its own."
        )
    dtypes = {parameter.dtype for parameter in model.module.parameters() if parameter.requires_grad}
    if config.scope == "model" and len(dtypes) > 1:
        raise ValueError(
            f"scope='model' needs parameters of one dtype; the model has {sorted(map(str, dtypes))}. Use scope='bucket'."
        )
    state = TopKState(
        config,
        process_group=model.process_group if model.process_group is not dist.group.WORLD else None,
        timeout=timeout,
        residuals=residuals,
        epoch=epoch,
        optimizers=(lambda: [optimizer]) if isinstance(optimizer, Optimizer) else optimizer,
        scaler=scaler,
        local_world_size=local_world_size,
        announce=announce,
        planned_steps=planned_steps,
    )
    try:
        state.name({parameter: name for name, parameter in model.module.named_parameters()})
        if isinstance(optimizer, Optimizer):
            state.follow_optimizers()
        model.register_comm_hook(state, topk_hook)
    except (RuntimeError, ValueError):
        state.close()
        raise
    state.static_graph = bool(model.static_graph)
    if model.find_unused_parameters and not model.static_graph:
        state.watch_use(model.module.parameters())
    sends = tree_broadcast_sends(state.rank, state.world)
    buffers = sends * sum(buffer.nbytes for buffer in model.modules_buffers)
    if init_sync:
        # DDP's constructor has just made all ranks equal to rank 0.
        ignored: set[str] = model.parameters_to_ignore
        weights = (p.nbytes for name, p in model.module.named_parameters() if name not in ignored)
        state.meter.bytes["broadcast"] += sends * sum(weights) + (buffers if model.broadcast_buffers else 0)

    def count_buffers(module: torch.nn.Module, args: Any) -> None:
        if model.will_sync_module_buffers():
            state.meter.bytes["broadcast"] += buffers

    model.register_forward_pre_hook(count_buffers)
    return state


def own_memory_(module: torch.nn.Module) -> None:
    """Gives a CPU model memory of its own.

    Lightning 2.6 gives it to spawned workers, but not to those of ``start_method="forkserver"``: torch then shares the memory,
    and the optimizers of all ranks step on the same weights.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


def tree_broadcast_sends(rank: int, world: int) -> int:
    """How often ``rank`` sends the message when rank 0 broadcasts it over a binomial tree, as gloo does (not NCCL).

    In round i the ranks below 2^i have it, and each sends it 2^i ranks further.
    """
    rounds = (world - 1).bit_length()
    return sum(rank < 2**i and rank + 2**i < world for i in range(rounds))
