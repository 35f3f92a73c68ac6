"""The FSDP2 adapter: turns a rank's shard of a gradient into a job, exchanged between the replicas of the model.

``fully_shard`` shards a model over the ranks of a node. Other nodes hold replicas of it, shard by shard::

                node 0               node 1
    shard 0     rank 0  <- top-k ->  rank 2
                  |                    |       reduce-scatter: FSDP, dense, inside a node
    shard 1     rank 1  <- top-k ->  rank 3

1. FSDP averages a module's gradients over the node and gives each rank its shard, one flat tensor: the shards of the
   module's parameters, one after the other, each padded to equal size.
2. FSDP calls its all-reduce hook with that tensor, on the hook's stream: :meth:`ShardState.exchange_shard`. A
   :class:`ParamGroup` names the parameters in it.
3. The ranks that hold the same shard on other nodes exchange it. On CUDA this only queues work on the hook's stream, so
   backward continues; on CPU backward waits, since FSDP reads the tensor when the hook returns.

This is the hierarchical topology with FSDP's shards as parts: each rank keeps the residuals of its shard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topk.adapters.checks import check_parameters, described
from lightning_topk.adapters.fsdp import checkpoint as sharded_checkpoint
from lightning_topk.adapters.fsdp.param_groups import ParamGroup, param_groups_of, watch_backward
from lightning_topk.bucket import Bucket, all_names_of, names_of
from lightning_topk.config import TopKConfig
from lightning_topk.consensus import check_agreement, every_rank, gathered, on_device
from lightning_topk.optim.momentum import local_part
from lightning_topk.optim.optimizers import GetOptimizers, getter
from lightning_topk.runtime.groups import on_failure
from lightning_topk.runtime.jobs import mark
from lightning_topk.runtime.state import HookState


class ShardState(HookState):
    """State of the hooks of one FSDP2 model: exchanges shards of gradients with the model's replicas.

    Created by :func:`lightning_topk.attach`. It reports and saves like :class:`.TopKState`, and
    ``torch.distributed.checkpoint`` can save it: its residuals are sharded like the parameters.
    """

    def __init__(
        self, model: torch.nn.Module, groups: Sequence[ParamGroup], replicas: dist.ProcessGroup, **arguments: Any
    ) -> None:
        self.shards_per_node = dist.get_world_size() // dist.get_world_size(replicas)
        self._param_groups, self._replicas, self.shards = groups, replicas, groups[0].shards
        self._group_of = {member: group for group in groups for member in group.proxies}
        self._names = {member: group.names[member] for member, group in self._group_of.items()}
        sharded, named = {*self._names.values()}, all_names_of(model)
        self._strangers = {name: p for p, name in names_of(model).items() if name not in sharded}  # without a proxy
        super().__init__(device=groups[0].device, process_group=replicas, local_world_size=1, **arguments)
        self.buckets.all_names = {each: named.get(group.sharded(each), ()) for each, group in self._group_of.items()}
        self._trained: set[Tensor] = set()  # in the last pass
        self._agreed: set[Bucket] = set()
        self._ready: Any | None = None  # mark of when the last gradient was computed, on a GPU with timing

    def learn_names(self) -> None:
        """Names the parameters, see :meth:`lightning_topk.bucket.Buckets.learn_names`."""
        self._trained = self._trained_now()
        self.buckets.learn_names(self._names, self._copied_inside())

    def _trained_now(self) -> set[Tensor]:
        """The proxies of the parameters that are trained now; refuses trained ones without a proxy."""
        strangers = [name for name, parameter in self._strangers.items() if parameter.requires_grad]
        if strangers:
            raise ValueError(
                f"the parameter {strangers[0]!r} (one of {len(strangers)}) is not sharded by fully_shard, or belongs "
                "to another attached model, so its gradient would not be reduced. Shard it before attach, or freeze it."
            )
        return {member for group in self._param_groups for member in group.trained}

    @override
    def held_by_optimizers(self, members: Collection[Tensor]) -> Collection[Tensor]:
        return [self._group_of[member].sharded(member) for member in members]

    def exchange_shard(self, group: ParamGroup, g: Tensor) -> None:
        """FSDP's hook: exchanges this rank's shard of a gradient between the replicas; see :meth:`exchange`.

        ``g`` ``[elements]`` is the mean over the node, and becomes the mean that all replicas agree on. After
        ``set_requires_all_reduce(False)`` it is kept for the next exchange, as with HSDP.
        """
        bucket = self.buckets.find(group.bucket(g))
        if g.is_cuda:
            g.record_stream(torch.cuda.current_stream(g.device))  # torch 2.9 may free it while the hook's stream works
        if not group.exchanges:
            group.accumulate_(bucket, g)
            return
        group.add_accumulated_(bucket, g)
        if self.current and not set(bucket).isdisjoint(p for earlier in self.current.buckets for p in earlier):
            self.backward_ended()  # an earlier pass failed
        if self.current is None:
            self._refresh_trained()
            self.begin_pass(waits=not g.is_cuda)
        if bucket not in self._agreed:
            self._agree_on(f"that of {group} ({len(bucket)} parameters, {g.numel()} elements, {g.dtype})")
            self._agreed.add(bucket)
        if group.user_divides:
            g.mul_(self.world)
        # On CPU backward waits for the hook. On CUDA it continues, and ends at the last of these marks.
        if self.telemetry.timing and group.stream is not None:
            with torch.cuda.stream(group.stream):
                self._ready = mark(g.device)
        self.exchange(bucket, g, f"the gradient of {group}").wait()

    def _refresh_trained(self) -> None:
        """Recomputes the density if parameters were frozen or unfrozen."""
        before, self._trained = self._trained, self._trained_now()
        if self._trained != before:
            copied = self._copied_inside()
            if not self._trained.isdisjoint(self.buckets.compressed):
                try:
                    self.buckets.learn_names(self.names, copied)
                except ValueError as error:  # the settings fit the parameters that were trained at first
                    self._say(f"lightning_topk: {error} The previous density stays in force.")

    def _copied_inside(self) -> list[Tensor]:
        """The proxies of parameters with several copies inside a node, such as norm layers under tensor parallelism.

        Different ranks exchange each copy. If their gradients differ in the last bit, they would select other entries,
        and the copies would drift apart; so these parameters are exchanged uncompressed.
        """
        found = []
        for member, group in self._group_of.items():
            sharded = group.sharded(member)
            axes = zip(sharded.device_mesh.shape, sharded.placements, strict=True)
            if math.prod(size for size, placement in axes if placement.is_shard()) < self.shards_per_node:
                found.append(member)
        if any(member.requires_grad for member in found) and self.config.momentum and self.config.compresses:
            raise ValueError(
                f"momentum={self.config.momentum!r} applies only to compressed parameters, but {len(found)} parameters "
                "that are replicated inside a node are exchanged uncompressed. Use the optimizer's own momentum."
            )
        return found

    def _agree_on(self, gradient: str) -> None:
        """Checks that all replicas exchange the same gradient next: else payloads of equal size could be mixed up."""
        remedy = (
            "All replicas must exchange the same gradients in the same order: use the same parameters in every forward "
            "pass, or call set_reduce_scatter_unused_params(True) on the FSDP modules (torch 2.14 and later)."
        )
        check_agreement({"the next gradient": gradient}, remedy, self.device, self.open_groups().all)

    def root_ended(self) -> None:
        """Called by FSDP when a backward pass has ended, of this model or another."""
        if self.groups is not None and not any(group.in_backward for group in self._param_groups):
            for group in self._param_groups:
                group.end_pass()
            self.backward_ended()

    def backward_ended(self) -> None:
        """Ends the pass in progress, if there is one."""
        if self.current is None:
            return
        if set(self.current.buckets) != set(self.last_buckets):
            self._agree_on("none, since the backward pass has ended")
        self.end_pass(self._ready)

    @override
    def close(self) -> None:
        # FSDP's hook stays: without it FSDP would continue, and replicas would diverge.
        for watch in (watch for group in self._param_groups for watch in group.watches):
            watch.remove()
        super().close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns residuals for ``torch.distributed.checkpoint``. Every rank must call it between two backward passes.

        :mod:`lightning_topk.adapters.fsdp.checkpoint` describes the entry.
        """
        self.check_between_passes()
        return sharded_checkpoint.collect(self.residuals, self.steps, self._param_groups, self.config, self._replicas)

    def full_state_dict(self) -> dict[str, Any]:
        """Returns residuals for a single file. Every rank must call it between two backward passes.

        On rank 0 it is what :meth:`.HookState.state_dict` returns for the unsharded model; elsewhere, no tensors.
        """
        return sharded_checkpoint.joined(self.state_dict(), self.device)

    @override
    def load_state_dict(self, entry: Mapping[str, Any]) -> None:
        """Loads the residuals of a checkpoint from any number of nodes and ranks per node. Every rank must call it.

        Args:
            entry: The entry that :meth:`state_dict` returned on this rank, or one loaded into it; or, on every rank,
                rank 0's entry of :meth:`full_state_dict` or :meth:`.HookState.state_dict`.

        Raises:
            ValueError: The entry is damaged, belongs to another model, or has one rank's part on all ranks of a node.
        """
        self.check_between_passes("load_state_dict")
        self.open_groups()
        with every_rank("comparing what the ranks of a node have loaded"):
            rows = gathered(sharded_checkpoint.sums(entry), self.device, self.shards)
        if len(rows) > 1 and any(rows[0]) and all(row == rows[0] for row in rows):
            raise ValueError(
                "all ranks of a node have loaded the residuals of the same shard: torch.save, and Fabric's save, keep "
                "only rank 0's part of state.state_dict(). Save that with torch.distributed.checkpoint, or save "
                "state.full_state_dict(), and pass what is loaded to load_state_dict."
            )
        trained = {self.names[member] for member in self._trained_now()}
        frozen = {*self._strangers, *self.names.values()} - trained
        super().load_state_dict(sharded_checkpoint.of_this_rank(entry, self._param_groups, frozen))


def attach(
    model: torch.nn.Module,
    config: TopKConfig,
    process_group: dist.ProcessGroup | DeviceMesh | None,
    optimizer: GetOptimizers | Sequence[Optimizer] | Optimizer | None = None,
    broadcast_weights: bool = True,
    **arguments: Any,
) -> ShardState:
    """Makes the replicas of an FSDP2 model exchange their gradients; see :func:`lightning_topk.attach`."""
    check_shardable(config)
    replicas: Any = process_group
    if isinstance(process_group, DeviceMesh) and process_group.ndim == 1:
        replicas = process_group.get_group()
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(
            f"process_group={process_group!r} must be the ranks that hold the same shard, one per node: a process "
            "group or one dimension of a device mesh. Pass the dimension across nodes, such as mesh['replicate']."
        )
    names = names_of(model)
    check_parameters(names)
    optimizers = getter(optimizer)
    earlier = arguments.get("earlier")
    proxies = {name: member for member, name in earlier.names.items()} if isinstance(earlier, ShardState) else {}
    # A frozen module may belong to two models. The first one keeps it.
    groups = [group for group in param_groups_of(model, proxies) if group.trained or not group.has_hook]
    _check_groups(groups, replicas)
    if isinstance(earlier, ShardState) and (ranks := earlier._param_groups[0].ranks) != groups[0].ranks:
        raise ValueError(
            f"residuals= come from another mesh: there the ranks {ranks} hold a replica's shards, here "
            f"{groups[0].ranks}. Leave residuals= out, and pass what full_state_dict() of the earlier state returned "
            "on rank 0 to load_state_dict() on every rank."
        )
    state = ShardState(model, groups, replicas, config=config, optimizers=optimizers, **arguments)
    with on_failure(state.close), on_device(state.device):  # FSDP gathers parameters on the current device
        state.learn_names()
        state.buckets.plan_together([state.buckets.find(group.trained) for group in groups if group.trained])
        state.open_groups().connect()
        state.residuals.keep_only(state.names)
        state.optimizers.start(optimizers is None or optimizers is not optimizer, state.device, state.open_groups().all)
        same = {"the index of the shard": groups[0].ranks.index(dist.get_rank()), **described(names)}
        remedy = "The ranks of process_group= must hold the same shard of the same model, each on another node."
        check_agreement(same, remedy, state.device, state.open_groups().all)
        for group in groups:
            group.watch_use()
        if broadcast_weights:
            _broadcast(model, replicas, state.device)
        for group in groups:
            hook = partial(state.exchange_shard, group)
            group.module.set_all_reduce_hook(hook, stream=state.lane(group.device).stream)
        watch_backward(state)
    return state


def check_shardable(config: TopKConfig) -> None:
    """Refuses settings that do not apply to shards."""
    if config.clip_norm is not None:
        raise ValueError(
            f"clip_norm={config.clip_norm!r} would clip every shard by its own norm. Clip gradients after "
            "backward, with the Trainer's gradient_clip_val= or torch.nn.utils.clip_grad_norm_."
        )


def _broadcast(model: torch.nn.Module, replicas: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcasts the first replica's weights and buffers to the others, shard by shard."""
    first = dist.get_global_rank(replicas, 0)
    for tensor in (*model.parameters(), *model.buffers()) if dist.get_world_size(replicas) > 1 else ():
        local = local_part(tensor).detach()
        sent = local.to(device).contiguous()  # shards may be offloaded to the CPU
        dist.broadcast(sent, first, group=replicas)
        if sent.data_ptr() != local.data_ptr():
            local.copy_(sent)


def _check_groups(groups: Sequence[ParamGroup], replicas: dist.ProcessGroup) -> None:
    """Refuses ranks that hold different shards, and groups whose gradients go to another hook."""
    if not groups:
        raise ValueError("no parameter that fully_shard sharded is trained: there is no gradient to exchange.")
    ranks = dist.get_process_group_ranks(replicas)
    if set(ranks) & set(groups[0].ranks) != {dist.get_rank()}:
        raise ValueError(
            f"process_group= has the ranks {ranks}, but the model is sharded over the ranks {groups[0].ranks}: the "
            "group must hold the same shard, one rank per node. Pass the mesh's dimension across nodes."
        )
    for group in groups:
        if group.has_hook:
            raise RuntimeError(
                f"FSDP already calls a hook with the gradient of {group}. Close the earlier state first."
            )
