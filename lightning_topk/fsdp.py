"""FSDP2's side: the shard of a gradient that a rank holds becomes a job, exchanged between the replicas of a model.

``fully_shard`` deals a model to the ranks of a node. Other nodes hold replicas of it, shard by shard::

                node 0               node 1
    shard 0     rank 0  <- top-k ->  rank 2
                  |                    |       reduce-scatter: FSDP, dense, inside a node
    shard 1     rank 1  <- top-k ->  rank 3

1. Backward has the gradients of a wrapped module. FSDP takes their mean over the node and gives each rank its shard of
   it, one flat tensor: the shards of the module's parameters, one after the other, each padded to equal size.
2. FSDP calls its all-reduce hook with that tensor, on the stream that belongs to the hook. A *unit* here is the module
   with its hook; :meth:`ShardState.exchange` makes a job of the tensor.
3. The job runs at once: the exchange of :mod:`lightning_topk.core.exchange` with the ranks that hold the same shard on
   other nodes. On CUDA this only queues work on the hook's stream, so backward goes on; on CPU it is waited for, since
   FSDP reads the tensor when the hook returns.
4. FSDP hands the shards to the optimizer.

It is the hierarchical topology with FSDP's shards for its parts: residuals are of a shard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topk.config import TopKConfig
from lightning_topk.runtime import checkpoint
from lightning_topk.runtime.checkpoint import EMPTY, Mode
from lightning_topk.runtime.checks import check_parameters, check_same_model, check_settings, one_config
from lightning_topk.runtime.drive import tree_broadcast_sends
from lightning_topk.runtime.exchanger import Batch, Bucket
from lightning_topk.runtime.groups import check_agreement, device_of
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.state import ExchangeState

# ------------------------------------------------------------------------------------------------ a wrapped module


class Unit:
    """A group of parameters whose gradients FSDP reduces together.

    A bucket is a tuple of tensors with an identity, a size, a dtype and a device. A sharded parameter has the size of
    the whole one, so a *stand-in* takes its place: ``[elements of the padded shard]`` in the dtype of the reduced
    gradient, without memory of its own.

    Args:
        module: One of the modules that ``fully_shard`` wrapped together.
        group: FSDP's own account of the group, which is private: torch offers no other list of what a hook's tensor
            holds.
        names: The sharded parameters' names.
        known: Stand-ins by name, of an earlier state of the same model; this adds to it.
    """

    def __init__(self, module: FSDPModule, group: Any, names: Mapping[Tensor, str], known: dict[str, Tensor]) -> None:
        self.module, self._group = module, group
        self.stand_ins: dict[Tensor, Any] = {}
        """FSDP's account of each trainable parameter, by stand-in."""
        self.names: dict[Tensor, str] = {}
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            if not sharded.requires_grad:
                continue
            name, size = names[sharded], parameter.padded_sharded_param_size.numel()
            if name not in known or known[name].numel() != size:
                known[name] = torch.zeros((), dtype=sharded.dtype, device=group.device).expand(size).requires_grad_()
            self.stand_ins[known[name]], self.names[known[name]] = parameter, name
        self.ranks: list[int] = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
        """The ranks to which the parameters are dealt."""
        self._used: set[Any] = set()  # parameters with a gradient that was not reduced yet

    def __str__(self) -> str:
        first, *others = self.names.values()
        return first if not others else f"{first} and {len(others)} more"

    def watch_use(self) -> None:
        """Notes from now on which parameters get a gradient. A collective of the node: all are gathered, once."""
        self.module.unshard()
        for parameter in self.stand_ins.values():

            def note(_: Tensor, used: Any = parameter) -> None:
                self._used.add(used)

            parameter._unsharded_param.register_post_accumulate_grad_hook(note)
        self.module.reshard()

    def bucket(self, g: Tensor) -> Bucket:
        """The parameters whose gradients a hook's tensor holds, in its order: all, or those that got one.

        Raises:
            RuntimeError: Its size says that it holds others.
        """
        parameters = self._group.fsdp_params
        order = getattr(self._group, "_reduce_scatter_param_indices", None)  # torch 2.15 sorts them by dtype
        ordered = parameters if order is None else [parameters[number] for number in order]
        member = {parameter: stand_in for stand_in, parameter in self.stand_ins.items()}
        every = tuple(member[parameter] for parameter in ordered if parameter in member)
        used = tuple(each for each in every if self.stand_ins[each] in self._used)
        self._used.clear()
        for bucket in (every, used):
            if sum(each.numel() for each in bucket) == g.numel():
                return bucket
        raise RuntimeError(
            f"the gradient of {self} has {g.numel()} elements on this rank, but its parameters that are to be trained "
            f"have {sum(each.numel() for each in every)}. If parameters were frozen, unfrozen or replaced since "
            "attach, close the state and attach again."
        )

    @property
    def partial(self) -> bool:
        """Whether a part of the reduction is switched off, so that replicas would differ."""
        return bool(self._group.reduce_grads and not self._group.all_reduce_grads)

    def node_bytes(self, g: Tensor) -> int:
        """Bytes that FSDP sends inside the node for a forward and a backward pass, by all its ranks together.

        The reduce-scatter of the gradient, and an all-gather of the parameters for each pass that needs them anew.
        """
        ranks, again = len(self.ranks), self._group.post_forward_mesh_info is not None
        gathered = sum(
            each.padded_sharded_param_size.numel() * (each.param_dtype or each.orig_dtype).itemsize
            for each in self._group.fsdp_params
        )
        return ranks * (ranks - 1) * (g.nbytes + (1 + again) * int(gathered))

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""
        device: torch.device = self._group.device
        return device

    @property
    def hook(self) -> Any:
        """What FSDP calls with each reduced gradient; None if nothing."""
        return self._group._all_reduce_hook

    def set_hook(self, hook: Callable[[Tensor], None], stream: torch.cuda.Stream | None) -> None:
        """Has FSDP call a hook with each reduced gradient, on that stream."""
        self.module.set_all_reduce_hook(hook, stream=stream)

    def later_divided_by(self, stand_in: Tensor) -> float:
        """By what FSDP divides the hook's result, so that sums of small floats do not overflow.

        Residuals have the hook's units; in a checkpoint they have the gradient's.
        """
        if stand_in.dtype in (torch.float32, torch.bfloat16):
            return 1.0
        factor = self._group.gradient_divide_factor or len(self.ranks)  # as torch's _get_gradient_divide_factors
        before = 1
        while factor % before == 0 and factor / before > before:
            before *= 2
        return float(factor / before)


def units_of(model: torch.nn.Module, known: dict[str, Tensor]) -> list[Unit]:
    """The groups of parameters of an FSDP2 model, in the order of its modules.

    Args:
        model: The model.
        known: See :class:`Unit`.

    Raises:
        ValueError: Replicas are exchanged by FSDP itself, modules have several meshes, or parameters are not sharded.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    units, seen = [], set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        one = getattr(state, "_fsdp_param_groups", None)  # torch 2.9 has one group a module
        groups = [group for group in ([state._fsdp_param_group] if one is None else one) if group is not None]
        if len(groups) > 1:
            raise ValueError(
                f"the module {name!r} is sharded on {len(groups)} meshes, and FSDP2 has one hook for them. Wrap its "
                "parts by fully_shard one by one, all on the mesh of the node."
            )
        for group in groups:
            if id(group) not in seen:
                seen.add(id(group))
                _check_mesh(group, name)
                units.append(Unit(module, group, names, known))
    found = {parameter for unit in units for parameter in unit.names.values()}
    strangers = [name for parameter, name in names.items() if parameter.requires_grad and name not in found]
    if strangers:
        raise ValueError(
            f"the parameter {strangers[0]!r} (one of {len(strangers)}) is not sharded by fully_shard, so nobody would "
            "reduce its gradient. Wrap the module that holds it too, or freeze it."
        )
    units = [unit for unit in units if unit.stand_ins]
    meshes = {tuple(unit.ranks) for unit in units}
    if len(meshes) > 1:
        raise ValueError(
            f"the model is sharded on several meshes, of the ranks {' and '.join(map(str, sorted(meshes)))}: their "
            "replicas are on different ranks. Shard all modules on one mesh, that of the node."
        )
    return units


def _check_mesh(group: Any, name: str) -> None:
    """Refuses a mesh on which FSDP exchanges replicas' gradients itself, or does not shard."""
    if getattr(group.mesh_info, "replicate_mesh_dim", None) is not None:
        raise ValueError(
            f"the module {name!r} is on a mesh {tuple(group.mesh_info.mesh.shape)} with a dimension of replicas, whose "
            "gradients FSDP all-reduces whole. Pass fully_shard the dimension of a node alone, such as "
            "mesh=mesh['shard'], and attach(..., process_group=mesh['replicate'])."
        )


def is_sharded(model: Any) -> bool:
    """Whether ``fully_shard`` wrapped the model, or modules of it."""
    return isinstance(model, torch.nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules())


# ------------------------------------------------------------------------------------------------ the state


class ShardState(ExchangeState):
    """The state of the hooks of one FSDP2 model: exchanges shards of gradients with the model's replicas, and closes.

    Made by :func:`attach`. It reports and saves as :class:`lightning_topk.TopKState` does, and can be saved by
    ``torch.distributed.checkpoint``: its residuals are sharded as the parameters are.
    """

    AFTER_CLOSE = "attach the model again, or its replicas would go different ways"
    PEER = "replica"

    def __init__(self, units: Sequence[Unit], replicas: dist.ProcessGroup, **arguments: Any) -> None:
        self.node_size = dist.get_world_size() // dist.get_world_size(replicas)
        """Ranks of a node."""
        super().__init__(process_group=replicas, local_world_size=1, companions=self.node_size, **arguments)
        self.device = units[0].device
        self._units, self._replicas = units, replicas
        self._parameters = {member: parameter for unit in units for member, parameter in unit.stand_ins.items()}
        self._buckets: list[Bucket] = []  # that this backward pass has exchanged so far
        self._agreed: set[Bucket] = set()

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are exchanged, as the model has them between two passes."""
        return [parameter.sharded_param for parameter in self._parameters.values()]

    @override
    def known_as(self, member: Tensor) -> Tensor:
        parameter: Tensor = self._parameters[member].sharded_param
        return parameter

    def exchange(self, unit: Unit, g: Tensor) -> None:
        """FSDP's hook: exchanges this rank's shard of a gradient between the replicas.

        Args:
            unit: Whose gradient it is.
            g: ``[elements]``, the mean over the node; it will hold the mean over all replicas that they agree on.

        Raises:
            RuntimeError: The state was closed, an exchange failed, or gradients are accumulated in a way that FSDP2
                has for its own replicas only.
            ValueError: Replicas have gradients of different parameters; or as :meth:`begin_pass`.
        """
        if unit.partial:
            raise RuntimeError(
                "set_requires_all_reduce(False) has FSDP2's own replicas wait, and would leave these different. To "
                "accumulate gradients use set_requires_gradient_sync(False)."
            )
        bucket, lane = unit.bucket(g), self.lane(g.device)
        if self._buckets and not set(bucket).isdisjoint(member for earlier in self._buckets for member in earlier):
            self._end_pass()  # of a backward pass that failed, or was not told apart
        if not self._buckets:
            self.begin_pass()
            if torch._C._current_graph_task_id() != -1:  # else the user finalises backward, which torch 2.15 allows
                Variable._execution_engine.queue_callback(self._end_pass)
        self._fit(bucket, g)
        if bucket not in self._agreed:
            self._agree_on(f"that of {unit} ({len(bucket)} parameters, {g.numel()} elements, {g.dtype})")
            self._agreed.add(bucket)
        if g.is_cuda:
            g.record_stream(torch.cuda.current_stream(g.device))  # torch 2.9 may free it while the hook's stream works
        # On CPU the hook is waited for. On CUDA only the time after the backward pass is seen: see _end_pass.
        ready = lane.mark() if self.timing and not g.is_cuda else None
        job = self.job(bucket, f"the gradient of {unit}", None)
        lane.run(partial(self._exchanger.run, Batch([g], [bucket], [job], self.timing, ready), lane))
        self._buckets.append(bucket)
        self.telemetry.meter.bytes["intra_node"] += unit.node_bytes(g)

    def _fit(self, bucket: Bucket, g: Tensor) -> None:
        """Gives the stand-ins the dtype and device of the gradient, which FSDP decides at the first forward pass."""
        if any((member.dtype, member.device) != (g.dtype, g.device) for member in bucket):
            self.residuals.dissolve(set(bucket))
            for member in bucket:
                member.data = torch.zeros((), dtype=g.dtype, device=g.device).expand(member.numel())

    def _agree_on(self, gradient: str) -> None:
        """Compares what comes next with the other replicas: payloads of different sizes would be taken for others."""
        assert self.groups is not None
        remedy = (
            "All replicas must exchange the same gradients in the same order: use the same parameters in every forward "
            "pass, or call set_reduce_scatter_unused_params(True) on the FSDP modules (torch 2.15 and later)."
        )
        check_agreement({"the gradient that comes next": gradient}, remedy, self.groups.all)

    def _end_pass(self) -> None:
        """The backward pass has ended."""
        if not self._buckets:
            return
        buckets, self._buckets = self._buckets, []
        if set(buckets) != set(self.residuals.progress.buckets):
            self._agree_on("none, the backward pass has ended")
        lane, tuning = self._lane, self.tuning(buckets)
        timed = self.timing and lane is not None and lane.stream is not None
        if lane is not None and (timed or tuning is not None):
            # What the hook's stream has left to do now was not hidden behind the backward pass.
            batch = Batch([], [], [], timed, lane.mark() if timed else None, tuning)
            with nullcontext() if lane.stream is None else torch.cuda.stream(lane.stream):
                lane.run(partial(self._exchanger.run, batch, lane))
        self.end_pass(buckets)

    # -------------------------------------------------------------------------------- checkpoints

    @override
    def state_dict(self, mode: Mode = "mean") -> dict[str, Any]:
        """The residuals for ``torch.distributed.checkpoint``: every rank calls it between two backward passes.

        Args:
            mode: ``"mean"``: the mean over the replicas, and what they serve, 2 x the model.

        Returns:
            On every rank, ``worker`` and ``server``: by what is kept, and by parameter, a DTensor on the CPU that is
            sharded as the parameter is, the same on all replicas; and ``about``, the rest in words.

        Raises:
            ValueError: Another mode.
        """
        if mode != "mean":
            raise ValueError(
                f"mode={mode!r} saves every replica's own residuals, which sharded checkpoints have no place for: they "
                "hold one copy of a model. Use mode='mean'."
            )
        found: dict[str, Any] = {"worker": {"residual": {}}, "server": {"residual": {}}}
        if self.config.momentum:
            found["worker"]["velocity"] = {}
        memories, share = self.residuals.memories(), {"worker": self.world, "server": 1}
        for unit in self._units:
            for member, name in unit.names.items():
                worker, server = memories.get(member, ({}, {}))
                for side, kept in (("worker", worker), ("server", server)):
                    for what, parts in found[side].items():
                        total = self._everyones(kept.get(what), member) / (share[side] * unit.later_divided_by(member))
                        parts[name] = _like_parameter(total, self._parameters[member])
        return {**found, "about": json.dumps(self._about())}

    def _everyones(self, kept: Tensor | None, member: Tensor) -> Tensor:
        """The sum over the replicas of what each keeps of a parameter's shard."""
        dtype = torch.promote_types(member.dtype, torch.float32)
        total = torch.zeros(member.numel(), dtype=dtype, device=member.device)
        if kept is not None:
            total += kept.to(member.device)
        if self.world > 1:
            dist.all_reduce(total, group=self._replicas)
        return total

    def _about(self) -> dict[str, Any]:
        """What belongs to the residuals, in numbers and words."""
        return {
            **EMPTY,
            "world_size": self.world,
            "steps": self.residuals.progress.steps,
            "rates": list(self.residuals.progress.learning_rates),
            "buckets": [[self.names[member] for member in bucket] for bucket in self.residuals.progress.buckets],
            "settings": checkpoint.settings_of(self._given),
        }

    def full_state_dict(self) -> dict[str, Any]:
        """The residuals as one file holds them; every rank calls it between two backward passes.

        Returns:
            On rank 0, what :meth:`lightning_topk.TopKState.state_dict` returns of the same model without shards;
            elsewhere the same without tensors.
        """
        sharded, parameters = self.state_dict(), {}
        for name in self.names.values():
            whole = {
                side: {what: _whole(parts[name]) for what, parts in sharded[side].items()}
                for side in ("worker", "server")
            }
            if dist.get_rank() == 0:
                parameters[name] = whole
        return {**self._about(), "parameters": parameters}

    @override
    def load_state_dict(self, entry: Mapping[str, Any]) -> None:
        """Goes on with the residuals of a checkpoint, of any number of nodes and of ranks a node; every rank calls it.

        Args:
            entry: What :meth:`state_dict` returned on this rank, or was loaded into it; or on every rank what
                :meth:`full_state_dict` returned on rank 0, or :meth:`lightning_topk.TopKState.state_dict`.

        Raises:
            ValueError: The entry is damaged, or of another model.
        """
        super().load_state_dict(self._of_this_rank(entry))

    def _of_this_rank(self, entry: Any) -> Any:
        """An entry with this rank's shards alone, as its stand-ins are; as it is where it is damaged."""
        if isinstance(entry, Mapping) and "about" in entry:
            sides = ("worker", "server")
            names = {name for side in sides for parts in entry[side].values() for name in parts}
            parameters = {
                name: {
                    side: {what: parts[name] for what, parts in entry[side].items() if name in parts} for side in sides
                }
                for name in sorted(names)
            }
            entry = {**json.loads(entry["about"]), "parameters": parameters}
        if not isinstance(entry, Mapping) or not isinstance(entry.get("parameters"), Mapping):
            return entry
        mine = dict(entry["parameters"])
        for unit in self._units:
            for member, name in unit.names.items():
                for side, kept in (mine.get(name) or {}).items():
                    units = unit.later_divided_by(member)
                    cut = {what: _shard_of(part, self._parameters[member], member) for what, part in kept.items()}
                    mine[name] = {**mine[name], side: {what: part * units for what, part in cut.items()}}
        return {**entry, "parameters": mine}


def _like_parameter(flat: Tensor, parameter: Any) -> DTensor:
    """A padded shard ``[elements]`` as a DTensor on the CPU, sharded as the parameter is."""
    like: Any = torch.empty_like(parameter.sharded_param.detach(), dtype=flat.dtype, device=flat.device)
    local = like.to_local()
    local.copy_(flat[: local.numel()].view(local.shape))
    on_cpu: DTensor = like.to("cpu")
    return on_cpu


def _whole(shards: DTensor) -> Tensor:
    """All of a sharded tensor, ``[elements]`` on the CPU. A collective of the node."""
    there: Any = shards.to(shards.device_mesh.device_type)
    whole: Tensor = there.full_tensor().flatten().cpu()
    return whole


def _shard_of(given: Tensor, parameter: Any, member: Tensor) -> Tensor:
    """A rank's shard of what was saved of a parameter, padded: ``[elements]``, or ``[workers, elements]``.

    Args:
        given: A DTensor that is sharded as the parameter is, or the whole of it, ``[..., elements of the parameter]``.
        parameter: FSDP's account of the parameter.
        member: Its stand-in.
    """
    sharded = parameter.sharded_param
    if isinstance(given, DTensor):
        mine = given.to_local().reshape(-1)
    elif given.shape[-1:] != (sharded.numel(),):
        return given  # of another model: who restores it says so
    else:
        size, begin = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
        cut = [slice(None)] * (given.ndim - 1) + [slice(b, b + s) for b, s in zip(begin, size, strict=True)]
        mine = given.unflatten(-1, sharded.shape)[tuple(cut)].flatten(given.ndim - 1)
    return torch.nn.functional.pad(mine, (0, member.numel() - mine.shape[-1]))


# ------------------------------------------------------------------------------------------------ attach


def attach(
    model: torch.nn.Module,
    config: TopKConfig | None = None,
    timeout: timedelta | None = None,
    residuals: Residuals | None = None,
    epoch: Callable[[], int] | None = None,
    init_sync: bool = True,
    optimizer: Callable[[], Sequence[Optimizer]] | Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    announce: Callable[[str], None] | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    **settings: Any,
) -> ShardState:
    """Makes the replicas of an FSDP2 model exchange their gradients, shard by shard.

    Call it on every rank, after ``fully_shard`` and once parameters have memory. See :func:`lightning_topk.attach`,
    which calls it, for the other arguments.

    Args:
        model: A model with modules that ``fully_shard`` wrapped, all on the mesh of the node.
        config: The settings; or pass them as keywords.
        timeout: See :class:`lightning_topk.TopKState`.
        residuals: See :class:`lightning_topk.TopKState`.
        epoch: See :class:`lightning_topk.TopKState`.
        init_sync: Whether to give all replicas the weights and buffers of the first one.
        optimizer: See :func:`lightning_topk.attach`.
        scaler: See :class:`lightning_topk.TopKState`.
        announce: See :class:`lightning_topk.TopKState`.
        process_group: The ranks that hold the same shard, one on each node, or the dimension of a mesh that they are.
        **settings: Arguments of :class:`lightning_topk.TopKConfig`.

    Returns:
        The state; call its ``close()`` when training is over.

    Raises:
        TypeError: A setting is unknown.
        ValueError: The group is missing or holds other shards, a setting has no meaning for shards, the model is
            sharded in a way that leaves replicas different, or replicas have different models.
        RuntimeError: FSDP calls another hook already.
    """
    config = one_config(attach, config, settings)
    _check_config(config)
    replicas = _replicas(process_group)
    check_parameters(model)
    check_settings(config, model, optimizer is not None)
    residuals = residuals or Residuals()
    units = units_of(model, residuals.stand_ins)
    _check_group(units, replicas)
    for unit in units:
        user = getattr(getattr(unit.hook, "func", None), "__self__", None)
        if unit.hook is not None and not (isinstance(user, ShardState) and user.groups is None):
            raise RuntimeError(f"FSDP calls a hook with the gradient of {unit} already. Close the earlier state first.")
    with device_of(model):
        state = ShardState(
            units,
            replicas,
            config=config,
            timeout=timeout,
            residuals=residuals,
            epoch=epoch,
            optimizers=(lambda: [optimizer]) if isinstance(optimizer, Optimizer) else optimizer,
            scaler=scaler,
            announce=announce,
        )
        try:
            copies = _copied_inside(state, units)
            names = {member: name for unit in units for member, name in unit.names.items()}
            state.buckets.name(names, copies)
            if isinstance(optimizer, Optimizer):
                state.follow_optimizers()
            shards = {"the shard that a rank holds": units[0].ranks.index(dist.get_rank())}
            remedy = "process_group= must be the ranks that hold the same shard, one on each node."
            check_agreement(shards, remedy, replicas)
            check_same_model(model, replicas)
        except (RuntimeError, ValueError):
            state.close()
            raise
        if init_sync:
            _broadcast(model, replicas, state)
        for unit in units:
            unit.watch_use()
            unit.set_hook(partial(state.exchange, unit), state.lane(unit.device).stream)
    return state


def _check_config(config: TopKConfig) -> None:
    """Refuses settings that have no meaning for shards."""
    if config.scope == "model":
        raise ValueError(
            "scope='model' selects among all gradients when backward is done, but FSDP takes each module's gradient "
            "when its hook returns. Use scope='bucket'."
        )
    if config.clip_norm is not None:
        raise ValueError(
            f"clip_norm={config.clip_norm!r} would clip every shard by a norm of its own. Clip gradients after "
            "backward, by gradient_clip_val= of the Trainer or torch.nn.utils.clip_grad_norm_."
        )


def _replicas(group: Any) -> dist.ProcessGroup:
    """The group of ranks that hold the same shard."""
    remedy = "Pass process_group=mesh['replicate'], the dimension of a device mesh along which nodes are counted."
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"process_group= is a mesh of shape {tuple(group.shape)}, not one dimension. {remedy}")
        return group.get_group()
    if group is None:
        raise ValueError(f"process_group= is missing: the ranks that hold the same shard, one on each node. {remedy}")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group={group!r} is a {type(group).__name__}, and no group of ranks. {remedy}")
    return group


def _check_group(units: Sequence[Unit], replicas: dist.ProcessGroup) -> None:
    """Refuses ranks that hold different shards."""
    if not units:
        raise ValueError("no parameter of the model is to be trained: there is no gradient to exchange.")
    ranks = dist.get_process_group_ranks(replicas)
    if set(ranks) & set(units[0].ranks) != {dist.get_rank()}:
        raise ValueError(
            f"process_group= has the ranks {ranks}, and the model is sharded over the ranks {units[0].ranks}: a rank "
            "must share with its group the shard that it holds and no other rank of its node. Pass the dimension of "
            "the mesh along which nodes are counted."
        )


def _copied_inside(state: ShardState, units: Sequence[Unit]) -> list[Tensor]:
    """The stand-ins of parameters of which a node has several copies, as tensor parallelism leaves them of norms.

    Each copy is exchanged by its own ranks. Where their gradients differ in the last bit, other entries would be
    selected, and the copies would drift apart; so they are exchanged whole.
    """
    found = []
    for unit in units:
        for member, parameter in unit.stand_ins.items():
            sharded = parameter.sharded_param
            sizes = [
                size
                for size, placement in zip(sharded.device_mesh.shape, sharded.placements, strict=True)
                if placement.is_shard()
            ]
            if math.prod(sizes) < state.node_size:
                found.append(member)
    if found and state.config.momentum and state.config.compresses:
        raise ValueError(
            f"momentum={state.config.momentum!r} corrects what a worker keeps, but {len(found)} parameters, of which "
            "a node has several copies, are exchanged whole. Use the optimizer's own momentum."
        )
    return found


def _broadcast(model: torch.nn.Module, replicas: dist.ProcessGroup, state: ShardState) -> None:
    """Gives all replicas the weights and buffers of the first one, shard by shard."""
    first, sends = dist.get_global_rank(replicas, 0), tree_broadcast_sends(state.rank, state.world)
    for tensor in (*model.parameters(), *model.buffers()) if state.world > 1 else ():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        sent = local.to(state.device, copy=False).contiguous()  # shards may be offloaded to the CPU
        dist.broadcast(sent, first, group=replicas)
        if sent.data_ptr() != local.data_ptr():
            local.copy_(sent)
        state.telemetry.meter.bytes["broadcast"] += sends * sent.nbytes
