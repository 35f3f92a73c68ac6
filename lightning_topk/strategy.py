"""The Lightning strategy: DDPStrategy with the gradient exchange of :mod:`lightning_topk.exchange`."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.config import TopKConfig
from lightning_topk.hook import TopKState, attach, check_ddp_options
from lightning_topk.residuals import Residuals
from lightning_topk.select import Selector

if TYPE_CHECKING:
    from lightning.fabric.strategies.registry import _StrategyRegistry


class TopKStrategy(DDPStrategy):
    """Data-parallel training that exchanges only the largest entries of the gradient, with error feedback.

    Example::

        Trainer(strategy=TopKStrategy(ratio=0.001, bidirectional=True), devices=4)

    Args:
        ratio: Fraction of the gradient that each worker sends, in (0, 1].
        bidirectional: Whether the servers compress too. If not, they send all that is nonzero.
        server_ratio: Fraction of the gradient that the servers send, in (0, 1]. Default: ``ratio``.
        selector: ``"topk"``, or an instance of :class:`lightning_topk.select.Selector`.
        wire: ``"bf16"`` or ``"fp32"`` values; positions are packed in both.
        topology: ``"sharded"`` (every rank serves a shard), ``"single_server"`` (rank 0 serves all) or ``"allgather"``
            (no server, hence ``bidirectional=False``).
        error_feedback: Whether what is not sent is kept for later steps. Without it, it is lost.
        start_method: How Lightning starts the processes, as in DDPStrategy.
        **ddp_kwargs: Arguments of DDPStrategy and of torch's DistributedDataParallel.

    Raises:
        TypeError: An argument has the wrong type, or is unknown.
        ValueError: An argument has a value that is not allowed, or contradicts another.
    """

    def __init__(
        self,
        ratio: float = 0.001,
        bidirectional: bool = True,
        server_ratio: float | None = None,
        selector: str | Selector = "topk",
        wire: str = "bf16",
        topology: str = "sharded",
        error_feedback: bool = True,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        self.config = TopKConfig(ratio, bidirectional, server_ratio, selector, wire, topology, error_feedback)
        _check_strategy_options(ddp_kwargs)
        check_ddp_options(ddp_kwargs)
        super().__init__(start_method=start_method, **ddp_kwargs)
        self.topk_state: TopKState | None = None
        """The state of the comm hook; None outside ``fit``."""
        self._residuals = Residuals()

    def _register_ddp_hooks(self) -> None:
        # DDPStrategy registers hooks on CUDA only (lightning 2.6) and skips CPU silently.
        assert isinstance(self.model, DistributedDataParallel)
        self._residuals.retain(self.model.module.parameters())
        self.topk_state = attach(self.model, self.config, timeout=self._timeout, residuals=self._residuals)

    def teardown(self) -> None:
        """Gives up the exchange's process group and thread, then all that DDPStrategy holds."""
        if self.topk_state is not None:
            self.topk_state.close()
            self.topk_state = None
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the names by which ``Trainer(strategy=...)`` finds this class."""
        names: dict[str, dict[str, Any]] = {
            "topk": {"start_method": "popen"},
            "topk_spawn": {"start_method": "spawn"},
            "topk_fork": {"start_method": "fork"},
            "topk_notebook": {"start_method": "fork"},
            "topk_find_unused_parameters_true": {"start_method": "popen", "find_unused_parameters": True},
        }
        for name, settings in names.items():
            words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            strategy_registry.register(
                name, cls, description=f"top-k gradient exchange with {words}", override=True, **settings
            )


def _check_strategy_options(options: dict[str, Any]) -> None:
    """Refuses what DDPStrategy would accept and the exchange cannot honour, and names that nobody knows."""
    for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name}={options[name]!r}: a DDP model has one communication hook, and TopKStrategy installs its own. "
                "Leave it out, or use DDPStrategy for another hook."
            )
    if options.get("model_averaging_period") is not None:
        raise ValueError(
            f"model_averaging_period={options['model_averaging_period']!r} belongs to post-local SGD, which exchanges "
            "weights instead of gradients. Leave it out, or use DDPStrategy."
        )
    known = {
        *inspect.signature(TopKStrategy.__init__).parameters,
        *inspect.signature(DDPStrategy.__init__).parameters,
        *inspect.signature(DistributedDataParallel.__init__).parameters,
    } - {"self", "kwargs", "ddp_kwargs", "module", "device_ids"}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(
                f"TopKStrategy got an unknown argument {name}={options[name]!r}; {hint}Allowed are its own arguments and those "
                "of DDPStrategy and DistributedDataParallel."
            )


TopKStrategy.register_strategies(StrategyRegistry)
