"""The Fabric strategy: DDPStrategy of Lightning Fabric with the gradient exchange of :mod:`lightning_topk.core.exchange`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities import rank_zero_info
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topk.config import TopKConfig, check_count, check_name
from lightning_topk.ddp import TopKState, attach, own_memory_
from lightning_topk.runtime.checkpoint import EMPTY, KEY
from lightning_topk.runtime.checks import check_ddp_options, check_known, check_momentum, check_same_model
from lightning_topk.runtime.collectives import connect_after_restart
from lightning_topk.schedule import Ratio

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH


class TopKStrategy(DDPStrategy):
    """Data-parallel training with Fabric that exchanges only the largest entries of the gradient.

    Example::

        fabric = Fabric(strategy=lightning_topk.fabric.TopKStrategy(ratio=0.001), devices=4)
        model, optimizer = fabric.setup(model, optimizer)

    Several modules can be set up; each has residuals of its own. ``fabric.save`` saves them, and ``fabric.load`` into the same
    modules, set up in the same order, goes on with them. Schedules by epochs need ``epoch``, since Fabric counts none.

    Args:
        ratio: Fraction of a bucket's gradient that each worker sends, in (0, 1]: a number, a schedule, or a function of the
            step.
        residual_checkpoint: What checkpoints hold of the residuals: ``"mean"``, ``"full"`` or ``"none"``, see
            :class:`lightning_topk.TopKStrategy`.
        epoch: The epoch, for schedules by epochs; set ``strategy.epoch`` when a new one begins.
        local_world_size: Ranks of a node, consecutive ones. Default: Fabric's processes on a node.
        planned_steps: Optimizer steps of the whole run, for schedules by share and for ``recipe="default"``, which does nothing
            without.
        **settings: The other arguments of :class:`lightning_topk.TopKConfig`, and those of Fabric's DDPStrategy and of torch's
            DistributedDataParallel.

    Raises:
        TypeError: An argument has the wrong type, or is unknown.
        ValueError: An argument has a value that is not allowed, or contradicts another.
    """

    def __init__(
        self,
        ratio: Ratio | Literal["auto"] = 0.001,
        residual_checkpoint: Literal["mean", "full", "none"] = "mean",
        epoch: int = 0,
        local_world_size: int | None = None,
        planned_steps: int | None = None,
        **settings: Any,
    ) -> None:
        ours = {each.name for each in fields(TopKConfig)}
        self.config = TopKConfig(ratio=ratio, **{name: value for name, value in settings.items() if name in ours})
        self.epoch = epoch
        check_name("residual_checkpoint", residual_checkpoint, ("mean", "full", "none"))
        self._residual_checkpoint = residual_checkpoint
        self._local_world_size = check_count("local_world_size", local_world_size)
        self._planned_steps = check_count("planned_steps", planned_steps)
        options = {name: value for name, value in settings.items() if name not in ours}
        check_known("TopKStrategy", options, [TopKStrategy.__init__, DDPStrategy.__init__], ours)
        check_ddp_options(options)
        super().__init__(**options)
        self.topk_states: list[TopKState] = []
        """The states of the comm hooks, one for each module that was set up."""
        self._set_up: list[Optimizer] = []
        self._resumed: list[Any] = []

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        connect_after_restart(
            self._get_process_group_backend(), self.global_rank, self.world_size, self._timeout, self.root_device
        )
        super()._setup_distributed()

    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wraps a module, and has its gradients exchanged; every rank calls it."""
        parameters = set(module.parameters())
        for old in [state for state in self.topk_states if parameters & state.names.keys()]:
            old.close()
            self.topk_states.remove(old)
        own_memory_(module)
        check_same_model(module)
        ddp = super().setup_module(module)
        state = attach(
            ddp,
            self.config,
            timeout=self._timeout,
            epoch=lambda: self.epoch,
            init_sync=self._ddp_kwargs.get("init_sync", True),
            optimizer=lambda: [
                o for o in self._set_up if parameters & {p for g in o.param_groups for p in g["params"]}
            ],
            scaler=getattr(self.precision, "scaler", None),
            local_world_size=self._local_world_size or self.num_processes,
            announce=rank_zero_info,
            planned_steps=self._planned_steps,
        )
        self.topk_states.append(state)
        if self._resumed:
            state.load_state_dict(self._resumed.pop(0))
        return ddp

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Takes note of an optimizer, and checks that it and the exchange do not both apply momentum."""
        check_momentum(self.config, [optimizer])
        self._set_up.append(optimizer)
        for state in self.topk_states:
            state.follow_optimizers()
        return super().setup_optimizer(optimizer)

    def save_checkpoint(self, path: _PATH, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint, with the residuals of all ranks and modules if an optimizer is saved; every rank calls it."""
        if self._residual_checkpoint != "none" and any(isinstance(each, Optimizer) for each in state.values()):
            state = {**state, KEY: [each.state_dict(self._residual_checkpoint) for each in self.topk_states]}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: _PATH, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; into modules that are set up and an optimizer, with its residuals, or zero if it has none."""
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        if not isinstance(state, dict) or not any(isinstance(each, Optimizer) for each in state.values()):
            return remainder
        entries = remainder.pop(KEY, [])
        entries = [entries] if isinstance(entries, dict) else entries  # a Trainer's
        if not entries or self._residual_checkpoint == "none":
            rank_zero_info("TopKStrategy starts with residuals of zero: the checkpoint has none, or none are wanted.")
            entries = [EMPTY] * len(self.topk_states)
        if self.topk_states and len(entries) != len(self.topk_states):
            raise ValueError(
                f"the checkpoint has residuals of {len(entries)} modules, but {len(self.topk_states)} are set up. Set up the "
                "same modules in the same order, or pass residual_checkpoint='none' to start with residuals of zero."
            )
        for each, entry in zip(self.topk_states, entries, strict=False):
            each.load_state_dict(entry)
        self._resumed = entries[len(self.topk_states) :]
        return remainder

    def teardown(self) -> None:
        """Gives up process groups and threads of the exchanges, then all that DDPStrategy holds."""
        for state in self.topk_states:
            state.close()
        super().teardown()
