"""Lightning Fabric's DDP strategy with the exchange of :mod:`lightning_topk.core.exchange`."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topk.adapters.checks import check_ddp_options
from lightning_topk.adapters.ddp import TopKState, attach, smaller_buckets_
from lightning_topk.adapters.workarounds import connect_after_restart, own_memory_
from lightning_topk.config import Settings, TopKConfig, check_count, check_known, one_config
from lightning_topk.consensus import gathered


class TopKStrategy(DDPStrategy):
    """Data-parallel training with Fabric that exchanges only the largest entries of the gradient.

    Example::

        fabric = Fabric(strategy=lightning_topk.fabric.TopKStrategy(saving=50), devices=4)
        model, optimizer = fabric.setup(model, optimizer)

        state = {"model": model, "optimizer": optimizer, "topk": fabric.strategy.state_of(model)}
        fabric.save(path, state)  # saves the residuals too, and fabric.load(path, state) loads them

    Several modules can be set up; each has its own residuals. For models that ``fully_shard`` wraps, call
    :func:`lightning_topk.attach` after Fabric's own ModelParallelStrategy has set them up.

    Args:
        config: The settings; or pass them as keywords.
        epoch: The current epoch, for schedules with ``epochs=``. Fabric does not count epochs: set ``strategy.epoch``
            when a new one begins.
        local_world_size: Number of ranks per node; ranks of a node are consecutive. Default: Fabric's processes per
            node.
        **arguments: Settings, see :class:`lightning_topk.TopKStrategy`; and arguments of Fabric's DDPStrategy and of
            torch's DistributedDataParallel.
    """

    def __init__(
        self, config: TopKConfig | None = None, *, epoch: int = 0, local_world_size: int | None = None, **arguments: Any
    ) -> None:
        settings: Any = {name: arguments.pop(name) for name in Settings.__annotations__ if name in arguments}
        takers: list[Any] = [TopKConfig, TopKStrategy.__init__, DDPStrategy.__init__, DistributedDataParallel.__init__]
        check_known("TopKStrategy", arguments, takers)
        check_ddp_options(arguments)
        self.config = one_config(TopKStrategy, config, settings)
        self.epoch = epoch
        self._local_world_size = check_count("local_world_size", local_world_size)
        super().__init__(**arguments)
        self._states: list[TopKState] = []
        self._set_up: list[ref[Optimizer]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Pickles all but the states, which belong to their process groups; a data loader may pickle Fabric."""
        return {**vars(self), "_states": [], "_set_up": []}

    @property
    def topk_states(self) -> list[TopKState]:
        """The states of the communication hooks, one for each module that was set up and is in use."""
        return [state for state in self._states if state.model() is not None and state.groups is not None]

    def state_of(self, module: Module) -> TopKState:
        """Returns the state of a module from ``fabric.setup`` or ``fabric.setup_module``, to save with it.

        Raises:
            KeyError: The module was not set up with this strategy.
        """
        wrapped = getattr(module, "_forward_module", module)
        wrapped = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile's
        for state in self._states:
            if state.model() is wrapped:
                return state
        raise KeyError(f"this {type(module).__name__} was not set up with this strategy. Pass fabric.setup's module.")

    @override
    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        connect_after_restart(self)
        super()._setup_distributed()

    @override
    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wraps a module in DDP and installs the exchange. A module that is set up again keeps its residuals."""
        if not (dist.is_available() and dist.is_initialized()):
            return super().setup_module(module)  # DDP raises the error
        own_memory_(module)
        smaller_buckets_(self._ddp_kwargs, self.root_device)
        ddp = super().setup_module(module)
        parameters = set(module.parameters())
        state = attach(
            ddp,
            self.config,
            timeout=self._timeout,
            earlier=self._give_up(module, parameters),
            epoch=lambda: self.epoch,
            optimizer=lambda: self._optimizers_of(parameters),
            scaler=getattr(self.precision, "scaler", None),
            local_world_size=self._local_world_size or self.num_processes,
            note=rank_zero_info,
        )
        self._states.append(state)
        return ddp

    def _optimizers_of(self, parameters: set[Any]) -> list[Optimizer]:
        """The optimizers in use that update any of the parameters."""
        known = [optimizer for each in self._set_up if (optimizer := each()) is not None]
        return [each for each in known if any(parameters & {*group["params"]} for group in each.param_groups)]

    def _give_up(self, module: Module, parameters: set[Any]) -> TopKState | None:
        """Closes the states of this module, of one with the same parameters, and of modules that no rank still uses.

        Returns the closed state that exchanged any of the parameters, if there is exactly one. A collective.
        """
        gone = [state.model() is None for state in self._states]
        everyones = gathered(gone, self.root_device) if gone else []
        closed = []
        for state, *unused in zip(self._states, *everyones, strict=True):
            wrapped = state.model()
            same = wrapped is not None and wrapped.module is module
            if all(unused) or same or parameters == state.names.keys():
                state.close()
                closed.append(state)
        self._states = [state for state in self._states if state not in closed]
        before = [state for state in closed if parameters & state.names.keys()]
        if len(before) > 1:
            rank_zero_info(f"lightning_topk: residuals start at zero: {len(before)} modules were merged into one.")
        return before[0] if len(before) == 1 else None

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._set_up = [each for each in self._set_up if each() not in (None, optimizer)] + [ref(optimizer)]
        for state in self.topk_states:
            state.optimizers.sync()
        return super().setup_optimizer(optimizer)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips gradients, unless the exchange has clipped them; returns the norm that they had."""
        given: Any = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        clip: Any = partial(super().clip_gradients_norm, module, optimizer, **given)
        for state in self.topk_states if norm_type == 2 else ():
            clip = partial(state.optimizers.clip, optimizer, clip=clip)
        return clip(max_norm)

    @override
    def teardown(self) -> None:
        for state in self._states:
            state.close()
        super().teardown()
