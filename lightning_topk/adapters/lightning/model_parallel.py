"""The Lightning strategy for models too large for one rank: sharded inside nodes, with top-k between them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.strategies.model_parallel import _FSDPNoSync
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import Unpack, override

from lightning_topk.adapters.fsdp.hook import ShardState, attach, check_shardable
from lightning_topk.adapters.lightning._compat import ModelParallelStrategy
from lightning_topk.adapters.lightning._resume import Resumes, entry_to_resume
from lightning_topk.adapters.workarounds import connect_after_restart
from lightning_topk.config import Settings, check_count, one_config
from lightning_topk.consensus import on_device
from lightning_topk.runtime.checkpoint import KEY, SHARDED, VERSION

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch import Trainer


class TopKModelParallelStrategy(Resumes, ModelParallelStrategy):
    """FSDP2 and tensor parallelism inside each node; nodes exchange only the largest entries of the gradient.

    Write the module's ``configure_model`` as for ModelParallelStrategy. Its device mesh covers one node, and nodes are
    replicas of the model::

        class Model(LightningModule):
            def configure_model(self):
                for block in self.net.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


        Trainer(strategy=TopKModelParallelStrategy(saving=50), devices=8, num_nodes=4)

    Every trained parameter must be in a module that ``fully_shard`` wraps. When fit begins, the weights of the first
    node are broadcast to all replicas. ``topology`` sets how nodes exchange a shard; ``clip_norm`` is not supported.

    Args:
        data_parallel_size: Ranks over which a node shards parameters and splits batches. ``"auto"``: the ranks per node
            over ``tensor_parallel_size``.
        tensor_parallel_size: Ranks over which a node splits single tensors. ``"auto"``: 1, or the ranks per node over
            ``data_parallel_size``.
        residual_checkpoint: Whether checkpoints hold the residuals (as large as the model), so that a run resumes with
            them on any number of nodes and ranks per node. If False, it resumes with zeros.
        local_world_size: Number of ranks per node; ranks of a node are consecutive. Default: the Trainer's processes
            per node.
        save_distributed_checkpoint: True: each rank saves its shards in a folder. False: rank 0 saves all in one file.
        process_group_backend: As in ModelParallelStrategy.
        timeout: Timeout of collectives. Default: the backend's own.
        **settings: See :class:`lightning_topk.TopKStrategy`.
    """

    topk_state: ShardState | None = None
    """The state of FSDP's hooks; None outside ``fit``."""

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        residual_checkpoint: bool = True,
        local_world_size: int | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self.config = one_config(TopKModelParallelStrategy, None, settings)
        check_shardable(self.config)
        self._check(residual_checkpoint, local_world_size)
        sizes = {"data_parallel_size": data_parallel_size, "tensor_parallel_size": tensor_parallel_size}
        self._sizes = [check_count(name, None if size == "auto" else size, "'auto'") for name, size in sizes.items()]
        super().__init__(data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, process_group_backend)
        if timeout is not None:
            self._timeout = timeout
        self._timeout_or_none = timeout
        self._replicas: DeviceMesh | None = None
        self._trained: Callable[[], Any] | None = None  # refers to its module

    @override
    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()  # the parent's would create one mesh of all ranks
        self.set_world_ranks()
        connect_after_restart(self)
        self._setup_distributed()
        local = self._local_world_size or self.num_processes
        self.config.resolve(self.world_size, local)  # refuses nodes of unequal size
        data, tensor = self._sizes  # None for "auto"
        tensor = tensor or (max(1, local // data) if data else 1)
        data = data or max(1, local // tensor)
        if data * tensor != local:
            raise ValueError(
                f"data_parallel_size={data} times tensor_parallel_size={tensor} is not {local}, the ranks per node: "
                "each node is a replica. Change these sizes, or pass local_world_size=, the number of ranks per node."
            )
        # torch 2.9 warns about slicing the mesh of a node, which is the intended use.
        warnings.filterwarnings("ignore", message="You are attempting to slice a submesh from another submesh")
        sizes, names = (self.world_size // local, data, tensor), ("replicate", "data_parallel", "tensor_parallel")
        mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=names)
        self._device_mesh, self._replicas = mesh["data_parallel", "tensor_parallel"], mesh["replicate"]
        self._data_parallel_size, self._tensor_parallel_size = data, tensor
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler arguments: ranks get different batches, unless they split the same tensors."""
        assert self._replicas is not None
        data, node = self.device_mesh["data_parallel"], self._replicas.get_local_rank()
        rank = node * data.size() + data.get_local_rank()
        return {"num_replicas": self._replicas.size() * data.size(), "rank": rank}

    @override
    def setup(self, trainer: Trainer) -> None:
        """Sets the model up as ModelParallelStrategy does; in ``fit``, also synchronises and attaches the replicas."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        known = None if self._trained is None else self._trained()
        if known is not trainer.lightning_module:  # another model starts without residuals
            self._last, self._trained = None, weakref.ref(trainer.lightning_module)
        self._attach(attach, timeout=self._timeout_or_none, earlier=self._last, process_group=self._replicas)
        assert self.topk_state is not None
        self.topk_state.optimizers.sync()  # they exist already, see setup_optimizers

    @override
    def block_backward_sync(self) -> Any:
        """Accumulates gradients without reducing them; the last backward reduces and exchanges their sum."""
        assert self.model is not None
        return _FSDPNoSync(self.model, enabled=True)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Saves a checkpoint with the residuals, unless it is weights-only; every rank must call it."""
        state, entry = self._last, dict[str, Any]()
        if state is not None and "optimizer_states" in checkpoint:
            beside = {"version": VERSION, "mode": SHARDED, "steps": state.steps}  # the residuals have their own folder
            sharded = beside if self._save_distributed_checkpoint else None
            checkpoint[KEY] = entry = self._absent(filepath) or sharded or state.full_state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if state is not None and entry.get("mode") == SHARDED:
            with on_device(state.device):
                save({KEY: state.state_dict()}, checkpoint_id=Path(self.broadcast(filepath)) / KEY)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint. ``fit`` resumes with its residuals, or with zeros if it has none."""
        path = Path(self.broadcast(checkpoint_path))
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        if self.topk_state is not None:
            entry = entry_to_resume(checkpoint, self._residual_checkpoint)
            if isinstance(entry, dict) and entry.get("mode") == SHARDED and path.is_dir():
                shards = {KEY: self.topk_state.state_dict()}
                with on_device(self.topk_state.device):
                    load(shards, checkpoint_id=path / KEY, planner=DefaultLoadPlanner(allow_partial_load=True))
                entry = shards[KEY]
            self.topk_state.load_state_dict(entry)
        return checkpoint
