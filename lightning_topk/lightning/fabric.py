"""The Fabric strategies: Lightning Fabric's own with the exchange of :mod:`lightning_topk.core.exchange`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topk import fsdp
from lightning_topk.config import (
    Side,
    TopKConfig,
    check_count,
    check_name,
    describes_settings,
)
from lightning_topk.core.exchange import TopologyName
from lightning_topk.core.select import Selector
from lightning_topk.core.wire import WireName
from lightning_topk.ddp import TopKState, attach, own_memory_
from lightning_topk.lightning._nodes import (
    IN_SHARDS,
    Size,
    check_size,
    meshes,
    resume,
    sampler_arguments,
    save_shards,
)
from lightning_topk.lightning._resume import BY_MODULE, entry_to_resume
from lightning_topk.runtime.buckets import names_of
from lightning_topk.runtime.checkpoint import KEY, VERSION
from lightning_topk.runtime.checks import check_ddp_options, check_known, check_momentum, check_same_model
from lightning_topk.runtime.groups import gathered
from lightning_topk.runtime.rendezvous import connect_after_restart
from lightning_topk.runtime.state import ExchangeState
from lightning_topk.schedule import Ratio

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

T = TypeVar("T")
S = TypeVar("S", bound=ExchangeState)


@describes_settings
class TopKStrategy(DDPStrategy):
    """Data-parallel training with Fabric that exchanges only the largest entries of the gradient.

    Example::

        fabric = Fabric(strategy=lightning_topk.fabric.TopKStrategy(saving=50), devices=4)
        model, optimizer = fabric.setup(model, optimizer)

    Several modules can be set up; each has its own residuals. ``fabric.save`` saves those of the modules in its state,
    and ``fabric.load`` restores them by the same keys; before modules are set up, in the order in which they will be.
    Schedules with ``epochs=`` need ``epoch``, since Fabric does not count epochs.

    Args:
        {settings}
        residual_checkpoint: The residuals in checkpoints: ``"mean"``, ``"full"`` or ``"none"``, see
            :class:`lightning_topk.TopKStrategy`.
        epoch: The current epoch, for schedules with ``epochs=``; set ``strategy.epoch`` when a new one begins.
        local_world_size: Number of ranks per node; ranks of a node are consecutive. Default: Fabric's processes per
            node.
        **ddp_kwargs: Arguments of Fabric's DDPStrategy and of torch's DistributedDataParallel.

    Raises:
        TypeError: An argument has the wrong type or is unknown.
        ValueError: An argument has a value that is not allowed or contradicts another argument.
    """

    def __init__(
        self,
        ratio: Ratio | None = None,
        bidirectional: bool = True,
        server_ratio: Ratio | None = None,
        selector: str | Selector = "topk",
        wire: WireName | None = None,
        topology: TopologyName = "sharded",
        dense_parameters: str | Sequence[str] = (),
        error_feedback: bool | Side = True,
        scope: Literal["bucket", "model"] = "bucket",
        momentum: float = 0.0,
        adapt_momentum: bool = True,
        clip_norm: float | None = None,
        lr_ratio: bool = False,
        saving: float | None = None,
        residual_checkpoint: Literal["mean", "full", "none"] = "mean",
        epoch: int = 0,
        local_world_size: int | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        self.config = TopKConfig.of(locals())
        self.epoch = epoch
        check_name("residual_checkpoint", residual_checkpoint, ("mean", "full", "none"))
        self._residual_checkpoint = residual_checkpoint
        self._local_world_size = check_count("local_world_size", local_world_size)
        takers: list[Any] = [TopKStrategy.__init__, DDPStrategy.__init__, DistributedDataParallel.__init__]
        check_known("TopKStrategy", ddp_kwargs, takers)
        check_ddp_options(ddp_kwargs)
        super().__init__(**ddp_kwargs)
        self.topk_states: list[TopKState] = []
        """The states of the communication hooks, one for each module that was set up and is in use."""
        self._modules = WeakKeyDictionary[DistributedDataParallel, TopKState]()
        self._set_up = _InUse[Optimizer]()
        self._resumed: list[Any] = []

    @override
    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        connect_after_restart(
            self._get_process_group_backend(), self.global_rank, self.world_size, self._timeout, self.root_device
        )
        super()._setup_distributed()

    @override
    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wraps a module in DDP and installs the exchange; every rank must call it.

        A module that is set up again, as after other layers were unfrozen, keeps its residuals.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return super().setup_module(module)  # DDP says what is missing
        parameters = set(module.parameters())
        before = [state for state in self.topk_states if parameters & state.names.keys()]
        _give_up(before)
        self.topk_states = [state for state in self.topk_states if state not in before]
        _close_dropped(self.topk_states, self._modules)
        own_memory_(module)
        check_same_model(module)
        ddp = super().setup_module(module)
        state = attach(
            ddp,
            self.config,
            timeout=self._timeout,
            residuals=before[0].residuals if len(before) == 1 else None,
            epoch=lambda: self.epoch,
            init_sync=self._ddp_kwargs.get("init_sync", True),
            optimizer=lambda: [each for each in self._set_up if parameters & _parameters_of(each)],
            scaler=getattr(self.precision, "scaler", None),
            local_world_size=self._local_world_size or self.num_processes,
            announce=rank_zero_info,
        )
        if len(before) == 1:
            state.residuals.retain(parameters)
            state.follow(before[0])
        self.topk_states.append(state)
        self._modules[ddp] = state
        if self._resumed:
            state.load_state_dict(self._resumed.pop(0))
        return ddp

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Registers an optimizer and checks that momentum is not applied twice."""
        check_momentum(self.config, [optimizer])
        self._set_up.append(optimizer)
        for state in self.topk_states:
            state.follow_optimizers()
        return super().setup_optimizer(optimizer)

    @override
    def save_checkpoint(self, path: _PATH, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint; if ``state`` has an optimizer, with its modules' residuals. Every rank must call it."""
        if self._residual_checkpoint != "none" and any(isinstance(each, Optimizer) for each in state.values()):
            mine = _states_of(state, self.topk_states)
            entries = {key: each.state_dict(self._residual_checkpoint) for key, each in mine.items()}
            state = {**state, KEY: {"version": VERSION, "mode": BY_MODULE, "modules": entries}}
        super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(self, path: _PATH, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; if ``state`` has an optimizer, with its residuals, or with zeros if it has none."""
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        if not isinstance(state, dict) or not any(isinstance(each, Optimizer) for each in state.values()):
            return remainder
        entry = entry_to_resume(remainder.pop(KEY, None), self._residual_checkpoint, self)
        mine = _states_of(state, self.topk_states)
        by_module = isinstance(entry, dict) and entry.get("mode") == BY_MODULE
        entries = entry["modules"] if by_module else dict.fromkeys(mine or ["module"], entry)
        missing = [key for key in mine if key not in entries]
        if missing:
            raise _no_entry(missing[0], entries)
        for key, each in mine.items():
            each.load_state_dict(entries[key])
        self._resumed = [] if mine else [*entries.values()]  # of modules that will be set up
        return remainder

    @override
    def teardown(self) -> None:
        """Releases the exchanges' process groups and threads, then the resources of DDPStrategy."""
        for state in self.topk_states:
            state.close()
        super().teardown()


@describes_settings
class TopKModelParallelStrategy(ModelParallelStrategy):
    """FSDP2, and tensor parallelism, inside each node; between nodes only the largest entries of the gradient.

    ``parallelize_fn`` is as for Fabric's ModelParallelStrategy. The mesh that it is given is the node's; nodes are
    replicas of the model::

        def parallelize(model, mesh):
            return fully_shard(model, mesh=mesh["data_parallel"])


        fabric = Fabric(strategy=lightning_topk.fabric.TopKModelParallelStrategy(parallelize, saving=50), devices=8)
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

    Every parameter that is trained must be in a module that ``fully_shard`` wraps. ``topology`` is how the nodes
    exchange a shard; ``scope="model"`` and ``clip_norm`` are refused.

    Args:
        parallelize_fn: Shards a module on the mesh of a node, and returns it.
        {settings}
        data_parallel_size: See :class:`lightning_topk.TopKModelParallelStrategy`.
        tensor_parallel_size: See :class:`lightning_topk.TopKModelParallelStrategy`.
        residual_checkpoint: See :class:`lightning_topk.TopKModelParallelStrategy`.
        epoch: The current epoch, for schedules with ``epochs=``; set ``strategy.epoch`` when a new one begins.
        local_world_size: Number of ranks per node; ranks of a node are consecutive. Default: Fabric's processes per
            node.
        save_distributed_checkpoint: Whether each rank saves its shards, in a folder, or rank 0 saves all in one file.
        process_group_backend: As in ModelParallelStrategy.
        timeout: After which a collective that some rank does not join fails. Default: the backend's own.

    Raises:
        TypeError: An argument has the wrong type or is unknown.
        ValueError: An argument has a value that is not allowed or contradicts another argument.
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        ratio: Ratio | None = None,
        bidirectional: bool = True,
        server_ratio: Ratio | None = None,
        selector: str | Selector = "topk",
        wire: WireName | None = None,
        topology: TopologyName = "sharded",
        dense_parameters: str | Sequence[str] = (),
        error_feedback: bool | Side = True,
        scope: Literal["bucket", "model"] = "bucket",
        momentum: float = 0.0,
        adapt_momentum: bool = True,
        clip_norm: float | None = None,
        lr_ratio: bool = False,
        saving: float | None = None,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        residual_checkpoint: Literal["mean", "none"] = "mean",
        epoch: int = 0,
        local_world_size: int | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.config = TopKConfig.of(locals())
        fsdp.check_shardable(self.config)
        self.epoch = epoch
        check_name("residual_checkpoint", residual_checkpoint, ("mean", "none"))
        self._residual_checkpoint = residual_checkpoint
        self._local_world_size = check_count("local_world_size", local_world_size)
        self._sizes: tuple[Size, Size] = (
            check_size("data_parallel_size", data_parallel_size),
            check_size("tensor_parallel_size", tensor_parallel_size),
        )
        super().__init__(
            parallelize_fn,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
        )
        if timeout is not None:
            self._timeout = timeout
        self._given_timeout = timeout
        self._states = _InUse[fsdp.ShardState]()  # FSDP holds them, as long as their modules are in use
        self._replicas: DeviceMesh | None = None
        self._set_up = _InUse[Optimizer]()

    @property
    def topk_states(self) -> list[fsdp.ShardState]:
        """The states of FSDP's hooks, one for each module that was set up and is in use."""
        return [state for state in self._states if state.groups is not None]

    @override
    def setup_environment(self) -> None:
        """Connects the ranks, and makes the mesh of the node and the groups of replicas."""
        super(ModelParallelStrategy, self).setup_environment()  # its own would make one mesh of all ranks
        self._setup_distributed()
        local = self._local_world_size or self.num_processes
        self._device_mesh, self._replicas = meshes(self.root_device.type, self.world_size, local, *self._sizes)
        self._data_parallel_size, self._tensor_parallel_size = self._device_mesh.shape

    @override
    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        connect_after_restart(
            self._get_process_group_backend(), self.global_rank, self.world_size, self._timeout, self.root_device
        )
        super()._setup_distributed()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        assert self._replicas is not None
        return sampler_arguments(self.device_mesh, self._replicas)

    @override
    def setup_module(self, module: Module) -> Module:
        """Shards a module inside the node, makes replicas equal and hooks them up; every rank must call it.

        A module that is set up again keeps its residuals, if the names of its parameters are the same.
        """
        sharded = super().setup_module(module)
        parameters = set(sharded.parameters())
        before = [state for state in self.topk_states if parameters.intersection(state.parameters)]
        _give_up(before)
        residuals = before[0].residuals if len(before) == 1 else None
        names = names_of(sharded)
        if residuals and any(names.get(before[0].parameter_of(p)) != name for p, name in before[0].names.items()):
            rank_zero_info("lightning_topk starts with zero residuals: the module has other layers than before.")
            residuals = None
        state = fsdp.attach(
            sharded,
            self.config,
            timeout=self._given_timeout,
            residuals=residuals,
            epoch=lambda: self.epoch,
            optimizer=lambda: [each for each in self._set_up if parameters & _parameters_of(each)],
            scaler=getattr(self.precision, "scaler", None),
            announce=rank_zero_info,
            process_group=self._replicas,
        )
        if len(before) == 1:
            state.follow(before[0])
        self._states.append(state)
        return sharded

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Registers an optimizer and checks that momentum is not applied twice."""
        check_momentum(self.config, [optimizer])
        self._set_up.append(optimizer)
        for state in self.topk_states:
            state.follow_optimizers()
        return super().setup_optimizer(optimizer)

    @override
    def save_checkpoint(self, path: _PATH, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint; with the residuals if ``state`` has an optimizer. Every rank must call it."""
        with_optimizer = any(isinstance(each, Optimizer) for each in state.values())
        mine = next(iter(_states_of(state, self.topk_states).values()), None) if with_optimizer else None
        if mine is None or self._residual_checkpoint == "none":
            super().save_checkpoint(path, state, *args, **kwargs)
        elif self._save_distributed_checkpoint:
            super().save_checkpoint(path, {**state, KEY: dict(IN_SHARDS)}, *args, **kwargs)
            save_shards(mine, Path(self.broadcast(path)))
        else:
            super().save_checkpoint(path, {**state, KEY: mine.full_state_dict()}, *args, **kwargs)

    @override
    def load_checkpoint(self, path: _PATH, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; if ``state`` has an optimizer, with its residuals, or with zeros if it has none."""
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        entry = remainder.pop(KEY, None)
        if not isinstance(state, dict) or not any(isinstance(each, Optimizer) for each in state.values()):
            return remainder
        for key, mine in [*_states_of(state, self.topk_states).items()][:1]:
            if isinstance(entry, dict) and entry.get("mode") == BY_MODULE:  # of TopKStrategy
                if key not in entry["modules"]:
                    raise _no_entry(key, entry["modules"])
                entry = entry["modules"][key]
            resume(mine, entry_to_resume(entry, self._residual_checkpoint, self), Path(self.broadcast(path)))
        return remainder

    @override
    def teardown(self) -> None:
        """Releases the exchanges' process groups, then the resources of ModelParallelStrategy."""
        for state in self.topk_states:
            state.close()
        super().teardown()


class _InUse(Generic[T]):
    """Objects in the order in which they were added, as long as somebody else uses them."""

    def __init__(self) -> None:
        self._added: list[ref[T]] = []

    def append(self, added: T) -> None:
        """Adds an object."""
        self._added = [each for each in self._added if each() is not None] + [ref(added)]

    def __iter__(self) -> Iterator[T]:
        return (found for each in self._added if (found := each()) is not None)


def _parameters_of(each: Any) -> set[Tensor]:
    """The parameters of a module, or those that an optimizer updates; none of anything else."""
    if isinstance(each, Optimizer):
        return {parameter for group in each.param_groups for parameter in group["params"]}
    return set(each.parameters()) if isinstance(each, Module) else set()


def _states_of(state: dict[str, Any], known: Sequence[S]) -> dict[str, S]:
    """The states that belong to a checkpoint, by the key of the module that has their parameters, or the optimizer."""
    found: dict[str, S] = {}
    modules_first = sorted(state.items(), key=lambda item: not isinstance(item[1], Module))
    for each in known:
        mine = {each.parameter_of(parameter) for parameter in each.names}
        key = next((key for key, part in modules_first if mine & _parameters_of(part)), None)
        if key is not None:
            found[key if key not in found else f"{key} {len(found)}"] = each  # a module of several that were set up
    return found


def _no_entry(key: str, entries: dict[str, Any]) -> ValueError:
    """The error that a checkpoint has no residuals of a module."""
    return ValueError(
        f"the checkpoint has residuals of {', '.join(entries) or 'nothing'}, but not of {key}. Save and load a module "
        "under the same key, or pass residual_checkpoint='none' to start with zero residuals."
    )


def _close_dropped(known: list[S], modules: WeakKeyDictionary[Any, S]) -> None:
    """Closes the states of modules that no rank uses any more. A collective."""
    used = set(modules.values())
    dropped = gathered([state not in used for state in known]) if known else []
    for state, everywhere in [*zip(known, map(all, zip(*dropped, strict=True)), strict=True)]:
        if everywhere:
            state.close()
            known.remove(state)


def _give_up(before: Sequence[ExchangeState]) -> None:
    """Closes the states of modules that are set up again."""
    for old in before:
        old.close()
    if len(before) > 1:
        rank_zero_info(f"lightning_topk starts with zero residuals: {len(before)} modules are one now.")
