"""The Lightning strategy: DDPStrategy with the gradient exchange of :mod:`lightning_topk.core.exchange`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_topk.adapters.checks import check_ddp_options
from lightning_topk.adapters.ddp import TopKState, attach, smaller_buckets_
from lightning_topk.adapters.lightning._compat import DDPStrategy, StrategyRegistry
from lightning_topk.adapters.lightning._resume import Resumes, entry_to_resume
from lightning_topk.adapters.workarounds import connect_after_restart, own_memory_
from lightning_topk.config import Settings, TopKConfig, check_known
from lightning_topk.core.exchange import TopologyName
from lightning_topk.core.select import Selector
from lightning_topk.core.wire import WireName
from lightning_topk.runtime.checkpoint import EMPTY, KEY
from lightning_topk.schedule import Ratio

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch.utilities.types import STEP_OUTPUT


class TopKStrategy(Resumes, DDPStrategy):
    """Data-parallel training that exchanges only the largest entries of the gradient, with error feedback.

    Example::

        Trainer(strategy=TopKStrategy(saving=50), devices=4)

    Args:
        ratio: Fraction of a bucket's gradient that each worker sends in every step, in (0, 1]: a number, a
            :class:`lightning_topk.schedule.Schedule`, or a function of the step. Default: the ratio that meets
            ``saving``.
        bidirectional: Whether the servers compress too. If not, they send every nonzero entry.
        server_ratio: Fraction of a bucket that all servers together send, in the forms of ``ratio``; not with
            ``saving``. Default: ``ratio``.
        selector: ``"topk"``, ``"gaussiank"``, ``"dgc"``, ``"trimmed"``, ``"randk"``, or an instance of
            :class:`lightning_topk.select.Selector`.
        wire: Format of the values: ``"bf16"``, ``"fp32"``, ``"int8"`` or ``"int4"`` (integers with one scale per 64
            of them). Positions are always Elias-Fano coded. Default: int4, or bf16 if ``error_feedback`` is not True,
            since rounding errors would be lost.
        topology: ``"sharded"`` (every rank serves a shard), ``"hierarchical"`` (dense inside a node, sharded between
            nodes), ``"single_server"`` (rank 0 serves all), ``"allgather"`` (no server, hence ``bidirectional=False``)
            or ``"dense"`` (all-reduce: nothing is compressed). Default: hierarchical on several nodes with several
            GPUs each, else sharded.
        dense_parameters: Names of the parameters that are never compressed: a pattern such as ``"*.bias"``, or several.
        error_feedback: Whether a residual keeps unsent entries for later steps: True on workers and servers, False
            nowhere, ``"worker"`` on workers only. Entries that are not kept are lost.
        momentum: Factor m of momentum correction (Lin et al. 2018), in [0, 1): each worker applies momentum before
            compression, and resets it for entries that it sends. The optimizer's own momentum must then be 0.
        adapt_momentum: Whether torch's SGD, Adam, AdamW, NAdam, RAdam and Adamax update an entry of the parameters only
            in steps that deliver its gradient, and then take all the steps since its last delivery at once; see
            :mod:`lightning_topk.optim.momentum`. False leaves optimizers unchanged, as does ``momentum``.
        clip_norm: Each of W workers clips its bucket's gradient to ``clip_norm / sqrt(W)`` before compression. None
            does not clip.
        saving: How many times fewer bytes than a ring all-reduce each step sends, both directions together: 1 or more,
            instead of ``ratio``. With ``topology="hierarchical"`` it counts the bytes between nodes. From the tenth
            pass on, buckets with more energy in their gradients send more of the bytes, and selection lifts parameters
            whose gradients are far smaller than the rest of their bucket (:mod:`lightning_topk.runtime.shares`).
            Default: 50 without ``ratio``.
        residual_checkpoint: Whether checkpoints hold the residuals (as large as the model), so that a run resumes with
            them on any number of workers. If False, it resumes with zeros.
        local_world_size: Number of ranks per node; ranks of a node are consecutive. Default: the Trainer's processes
            per node.
        start_method: How Lightning starts the processes, as in DDPStrategy.
        **ddp_kwargs: Arguments of DDPStrategy and of torch's DistributedDataParallel.

    Raises:
        TypeError: An argument has the wrong type or is unknown.
        ValueError: An argument has a value that is not allowed or contradicts another argument.
    """

    topk_state: TopKState | None = None
    """The state of the communication hook; None outside ``fit``."""

    def __init__(
        self,
        ratio: Ratio | None = None,
        bidirectional: bool = True,
        server_ratio: Ratio | None = None,
        selector: str | Selector = "topk",
        wire: WireName | None = None,
        topology: TopologyName | None = None,
        dense_parameters: str | Sequence[str] = (),
        error_feedback: bool | Literal["worker"] = True,
        momentum: float = 0.0,
        adapt_momentum: bool = True,
        clip_norm: float | None = None,
        saving: float | None = None,
        residual_checkpoint: bool = True,
        local_world_size: int | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        arguments = locals()
        self.config = TopKConfig(**{name: arguments[name] for name in Settings.__annotations__})
        self._check(residual_checkpoint, local_world_size)
        takers: list[Any] = [TopKStrategy.__init__, DDPStrategy.__init__, DistributedDataParallel.__init__]
        check_known("TopKStrategy", ddp_kwargs, takers)
        check_ddp_options(ddp_kwargs)
        super().__init__(start_method=start_method, **ddp_kwargs)
        self._frozen: list[Tensor] = []

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        connect_after_restart(self)
        super().setup_distributed()

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        own_memory_(self.model)
        smaller_buckets_(self._ddp_kwargs, self.root_device)
        # DDP (torch 2.9 to 2.15) never synchronises parameters that are unfrozen later: ranks would drift apart.
        self._frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        # Lightning 2.6 launches the first exchange of a DDP with static_graph=True in manual optimization, but only the
        # first time: after a second fit or a rebuild nothing would be exchanged.
        self._pl_static_graph_delay_done = False
        super().configure_ddp()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the module's training step; first rebuilds DDP if a parameter was unfrozen."""
        state, model = self.topk_state, self.model
        if state is not None and any(map(_is_trained, self._frozen)):
            assert isinstance(model, DistributedDataParallel)
            if model.require_backward_grad_sync:  # at the end of an accumulation window
                state.told = True  # the next state shows the summary
                state.close()
                self.model = model.module
                self.configure_ddp()
                assert self.topk_state is not None
                self.topk_state.continue_from(state)
        return super().training_step(*args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Raises if DDP did not synchronise a gradient because ``training_step`` unfroze its parameter."""
        super().post_backward(closure_loss)
        synchronised = getattr(self.model, "require_backward_grad_sync", True)  # else the next step rebuilds DDP
        alone = any(_is_trained(parameter) and parameter.grad is not None for parameter in self._frozen)
        if self.topk_state is not None and synchronised and alone:
            raise RuntimeError(
                "training_step unfroze a parameter, so its gradient differs between ranks. Unfreeze it earlier, in "
                "on_train_batch_start or on_train_epoch_start."
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Puts this strategy's remedy into DDP's error about unused parameters; Lightning's names DDPStrategy."""
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            exception.args = (
                "a loss did not use all parameters, but DDP waits for their gradients. Pass TopKStrategy("
                "find_unused_parameters=True), or strategy='topk_find_unused_parameters_true'. With several optimizers "
                "that step in turn, as in a GAN, also call toggle_optimizer(optimizer) before each one's loss, and "
                "untoggle_optimizer after its step; otherwise gradients that are zeroed later are exchanged, too.",
            )

    @override
    def _register_ddp_hooks(self) -> None:
        # DDPStrategy (lightning 2.6) registers hooks on CUDA only and silently skips CPU.
        assert isinstance(self.model, DistributedDataParallel)
        last, parameters = self._last, {*self.model.module.parameters()}
        exchanged = {parameter for parameter in last.names if parameter in last.residuals} if last else set()
        self._attach(
            attach,
            timeout=self._timeout,
            earlier=None if exchanged and parameters.isdisjoint(exchanged) else last,  # another model starts anew
            local_world_size=self._local_world_size or self.num_processes,
        )
        if self._resumed is not None:
            assert self.topk_state is not None
            self.topk_state.load_state_dict(self._resumed)
            self._resumed = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Saves a checkpoint with the residuals of all ranks, unless it is weights-only; every rank must call it."""
        if "optimizer_states" in checkpoint and self.lightning_module is not None:
            checkpoint[KEY] = self._absent(filepath) or (self._last.state_dict() if self._last else dict(EMPTY))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint. ``fit`` resumes with its residuals, or with zeros if it has none (as DDPStrategy's)."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        trainer = getattr(self.lightning_module, "_trainer", None)  # None in the main process after a spawned fit
        if trainer is not None and trainer.state.fn == "fit":
            entry = entry_to_resume(checkpoint, self._residual_checkpoint)
            if self.topk_state is None:
                self._resumed = entry  # when the model is wrapped in DDP
            else:
                self.topk_state.load_state_dict(entry)
        return checkpoint


def _is_trained(parameter: Tensor) -> bool:
    """Whether a parameter gets a gradient. An average that was updated without ``no_grad`` is not a leaf."""
    return parameter.requires_grad and parameter.is_leaf


def _model_parallel(**settings: Any) -> Any:
    """Creates the strategy for sharded models. Its module needs all of Lightning, which may still be importing here."""
    from lightning_topk.adapters.lightning.model_parallel import TopKModelParallelStrategy

    return TopKModelParallelStrategy(**settings)


def _register(name: str, strategy: Any = TopKStrategy, **options: Any) -> None:
    """Registers a name for ``Trainer(strategy=...)``."""
    words = ", ".join(f"{key}={value!r}" for key, value in options.items())
    StrategyRegistry.register(name, strategy, f"top-k gradient exchange; {words}", override=True, **options)


_register("topk", start_method="popen")
_register("topk_spawn", start_method="spawn")
_register("topk_fork", start_method="fork")
_register("topk_notebook", start_method="fork")
_register("topk_find_unused_parameters_true", find_unused_parameters=True)
_register("topk_model_parallel", _model_parallel)
