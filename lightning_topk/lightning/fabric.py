"""The Fabric strategies: Lightning Fabric's own with the exchange of :mod:`lightning_topk.core.exchange`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.utilities import rank_zero_info
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
from lightning_topk.lightning._resume import entry_to_resume
from lightning_topk.runtime.buckets import names_of
from lightning_topk.runtime.checkpoint import EMPTY, KEY
from lightning_topk.runtime.checks import check_ddp_options, check_known, check_momentum, check_same_model
from lightning_topk.runtime.rendezvous import connect_after_restart
from lightning_topk.runtime.state import ExchangeState
from lightning_topk.schedule import Ratio

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH


@describes_settings
class TopKStrategy(DDPStrategy):
    """Data-parallel training with Fabric that exchanges only the largest entries of the gradient.

    Example::

        fabric = Fabric(strategy=lightning_topk.fabric.TopKStrategy(saving=50), devices=4)
        model, optimizer = fabric.setup(model, optimizer)

    Several modules can be set up; each has its own residuals. ``fabric.save`` saves them. ``fabric.load`` restores them
    if the same modules were set up in the same order. Schedules with ``epochs=`` need ``epoch``, since Fabric does not
    count epochs.

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
        ratio: Ratio | Literal["auto"] | None = None,
        bidirectional: bool = True,
        server_ratio: Ratio | None = None,
        selector: str | Selector = "topk",
        wire: WireName | None = None,
        topology: TopologyName | Literal["auto"] = "sharded",
        dense_parameters: str | Sequence[str] = (),
        error_feedback: bool | Side = True,
        scope: Literal["bucket", "model"] = "bucket",
        momentum: float = 0.0,
        momentum_masking: bool | None = None,
        beta1: float | None = None,
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
        """The states of the communication hooks, one for each module that was set up."""
        self._set_up: list[Optimizer] = []
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
        _give_up(before, self.topk_states)
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
            optimizer=lambda: [
                o for o in self._set_up if parameters & {p for g in o.param_groups for p in g["params"]}
            ],
            scaler=getattr(self.precision, "scaler", None),
            local_world_size=self._local_world_size or self.num_processes,
            announce=rank_zero_info,
        )
        if len(before) == 1:
            state.residuals.retain(parameters)
            state.follow(before[0])
        self.topk_states.append(state)
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
        """Saves a checkpoint; with all residuals if ``state`` has an optimizer. Every rank must call it."""
        if self._residual_checkpoint != "none" and any(isinstance(each, Optimizer) for each in state.values()):
            state = {**state, KEY: [each.state_dict(self._residual_checkpoint) for each in self.topk_states]}
        super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(self, path: _PATH, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; if ``state`` has an optimizer, with its residuals, or with zeros if it has none."""
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        if not isinstance(state, dict) or not any(isinstance(each, Optimizer) for each in state.values()):
            return remainder
        entries = entry_to_resume(remainder.pop(KEY, None), self._residual_checkpoint, self)
        if entries == EMPTY:
            entries = [EMPTY] * len(self.topk_states)
        elif isinstance(entries, dict):  # of a Trainer
            entries = [entries]
        if self.topk_states and len(entries) != len(self.topk_states):
            raise ValueError(
                f"the checkpoint has residuals of {len(entries)} modules, but {len(self.topk_states)} are set up. "
                "Set up the same modules in the same order, or pass residual_checkpoint='none' to start with zero "
                "residuals."
            )
        for each, entry in zip(self.topk_states, entries, strict=False):
            each.load_state_dict(entry)
        self._resumed = entries[len(self.topk_states) :]
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
        ratio: Ratio | Literal["auto"] | None = None,
        bidirectional: bool = True,
        server_ratio: Ratio | None = None,
        selector: str | Selector = "topk",
        wire: WireName | None = None,
        topology: TopologyName | Literal["auto"] = "sharded",
        dense_parameters: str | Sequence[str] = (),
        error_feedback: bool | Side = True,
        scope: Literal["bucket", "model"] = "bucket",
        momentum: float = 0.0,
        momentum_masking: bool | None = None,
        beta1: float | None = None,
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
        self.topk_states: list[fsdp.ShardState] = []
        """The states of FSDP's hooks, one for each module that was set up."""
        self._replicas: DeviceMesh | None = None
        self._set_up: list[Optimizer] = []

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
        _give_up(before, self.topk_states)
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
            optimizer=lambda: [
                o for o in self._set_up if parameters & {p for g in o.param_groups for p in g["params"]}
            ],
            scaler=getattr(self.precision, "scaler", None),
            announce=rank_zero_info,
            process_group=self._replicas,
        )
        if len(before) == 1:
            state.follow(before[0])
        self.topk_states.append(state)
        return sharded

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Registers an optimizer and checks that momentum is not applied twice."""
        check_momentum(self.config, [optimizer])
        self._set_up.append(optimizer)
        for state in self.topk_states:
            state.follow_optimizers()
        return super().setup_optimizer(optimizer)

    def _state_of(self, state: dict[str, Any]) -> fsdp.ShardState | None:
        """The residuals that belong to a checkpoint: those of its module, if it has an optimizer."""
        if not any(isinstance(each, Optimizer) for each in state.values()):
            return None
        parameters = {p for each in state.values() if isinstance(each, Module) for p in each.parameters()}
        return next((each for each in self.topk_states if parameters & set(each.parameters)), None)

    @override
    def save_checkpoint(self, path: _PATH, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint; with the residuals if ``state`` has an optimizer. Every rank must call it."""
        mine = self._state_of(state)
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
        mine = self._state_of(state) if isinstance(state, dict) else None
        if mine is not None:
            if isinstance(entry, list) and len(entry) == 1:  # of TopKStrategy, with one module
                entry = entry[0]
            resume(mine, entry_to_resume(entry, self._residual_checkpoint, self), Path(self.broadcast(path)))
        return remainder

    @override
    def teardown(self) -> None:
        """Releases the exchanges' process groups, then the resources of ModelParallelStrategy."""
        for state in self.topk_states:
            state.close()
        super().teardown()


def _give_up(before: Sequence[ExchangeState], known: list[Any]) -> None:
    """Closes the states of modules that are set up again."""
    for old in before:
        old.close()
        known.remove(old)
    if len(before) > 1:
        rank_zero_info(f"lightning_topk starts with zero residuals: {len(before)} modules are one now.")
