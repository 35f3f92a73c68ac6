"""The Lightning strategy: DDPStrategy with the gradient exchange of :mod:`lightning_topk.core.exchange`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.config import TopKConfig, check_count, check_name
from lightning_topk.core.select import Selector
from lightning_topk.ddp import TopKState, attach, own_memory_
from lightning_topk.lightning._compat import (
    PACKAGE,
    DDPStrategy,
    MisconfigurationException,
    StrategyRegistry,
    TrainerFn,
    TrainerStatus,
    rank_zero_info,
)
from lightning_topk.runtime.checkpoint import EMPTY, KEY, absent, collect
from lightning_topk.runtime.checks import check_ddp_options, check_known, check_same_model
from lightning_topk.runtime.collectives import connect_after_restart
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.schedule import Ratio

if TYPE_CHECKING:
    from lightning.fabric.strategies.registry import _StrategyRegistry
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.types import STEP_OUTPUT


class TopKStrategy(DDPStrategy):
    """Data-parallel training that exchanges only the largest entries of the gradient, with error feedback.

    Example::

        Trainer(strategy=TopKStrategy(ratio=0.001, bidirectional=True), devices=4)

    Args:
        ratio: Fraction of a bucket's gradient that each worker sends, in (0, 1]: a number, a
            :class:`lightning_topk.schedule.Schedule`, or a function of the step; ``"auto"`` measures, and takes the largest of
            :data:`lightning_topk.config.AUTO_RATIOS` that costs at most 5 % more time than the cheapest.
        bidirectional: Whether the servers compress too. If not, they send all that is nonzero.
        server_ratio: Fraction of a bucket that the servers together send, likewise. Default: ``ratio``.
        selector: ``"topk"``, ``"gaussiank"``, ``"dgc"``, ``"trimmed"``, ``"randk"``, or an instance of
            :class:`lightning_topk.select.Selector`.
        wire: ``"bf16"``, ``"fp32"``, ``"int8"`` or ``"int4"`` (integers, and a scale for every 64 of them): the values' format.
            Positions are Elias-Fano coded in all. Default: the recipe's, else bf16.
        topology: ``"sharded"`` (every rank serves a shard), ``"hierarchical"`` (dense inside a node, sharded between nodes),
            ``"single_server"`` (rank 0 serves all), ``"allgather"`` (no server, hence ``bidirectional=False``) or ``"dense"``
            (all-reduce: nothing is compressed). ``"auto"`` measures, and takes for each bucket the fastest of dense, sharded
            and hierarchical.
        dense_parameters: Parameters that are never compressed, by name: a pattern such as ``"*.bias"``, or several.
        error_feedback: Whether what is not sent is kept for later: True on workers and servers, False nowhere,
            ``"worker"`` or ``"server"`` on that side only. What is not kept is lost.
        scope: ``"bucket"`` selects in each of DDP's buckets, while backward goes on; ``"model"`` selects once among all
            gradients, when backward is done, as the papers do.
        momentum: m of momentum correction (Lin et al. 2018), in [0, 1): momentum on the worker, before compression. The
            optimizer's own must then be 0.
        momentum_masking: Whether momentum is zeroed where it was sent.
        beta1: The first beta with which torch's Adam and AdamW step, in [0, 1). Their groups say what they said when they have
            stepped, and a group keeps its own if all of it is in ``dense_parameters``. Default: the recipe's, else their own.
        clip_norm: Norm to which W workers together clip a bucket's gradient (the model's with ``scope="model"``), before
            compression: each clips to ``clip_norm / sqrt(W)``. None does not clip.
        lr_ratio: Whether residuals are scaled by the last learning rate over this one (Zheng et al. 2019), so that what
            was kept back under one learning rate is applied under it.
        recipe: ``"default"``: ``ratio`` and ``server_ratio``, where they are numbers, are what the run ends with. It begins with 0.12, in
            runs of more than 3,000 steps with less, and descends along half a cosine (:data:`lightning_topk.config.START`,
            :data:`lightning_topk.config.PASSES`); values travel in int4, if ``error_feedback`` is True and ``wire`` says nothing else.
            Adam steps with a ``beta1`` of 0, if workers keep what they do not send and ``beta1`` and ``momentum`` say nothing else;
            with ``topology="auto"`` it keeps its own.
            ``"plain"``: densities are constant, as in the papers.
        residual_checkpoint: What checkpoints hold of the residuals: ``"mean"`` over the workers, 2 x the model, from which a
            run resumes with any number of workers; ``"full"``, every worker's own, from which the same number resumes with the
            same bits; ``"none"`` saves none, and resumes with residuals of zero.
        local_world_size: Ranks of a node, consecutive ones. Default: the Trainer's processes on a node.
        start_method: How Lightning starts the processes, as in DDPStrategy.
        **ddp_kwargs: Arguments of DDPStrategy and of torch's DistributedDataParallel.

    Raises:
        TypeError: An argument has the wrong type, or is unknown.
        ValueError: An argument has a value that is not allowed, or contradicts another.
    """

    def __init__(
        self,
        ratio: Ratio | Literal["auto"] = 0.001,
        bidirectional: bool = True,
        server_ratio: Ratio | None = None,
        selector: str | Selector = "topk",
        wire: Literal["bf16", "fp32", "int8", "int4"] | None = None,
        topology: Literal["sharded", "hierarchical", "single_server", "allgather", "dense", "auto"] = "sharded",
        dense_parameters: str | Sequence[str] = (),
        error_feedback: bool | Literal["worker", "server"] = True,
        scope: Literal["bucket", "model"] = "bucket",
        momentum: float = 0.0,
        momentum_masking: bool = True,
        beta1: float | None = None,
        clip_norm: float | None = None,
        lr_ratio: bool = False,
        recipe: Literal["default", "plain"] = "default",
        residual_checkpoint: Literal["mean", "full", "none"] = "mean",
        local_world_size: int | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        self.config = TopKConfig(
            ratio=ratio,
            bidirectional=bidirectional,
            server_ratio=server_ratio,
            selector=selector,
            wire=wire,
            topology=topology,
            dense_parameters=dense_parameters,
            error_feedback=error_feedback,
            scope=scope,
            momentum=momentum,
            momentum_masking=momentum_masking,
            beta1=beta1,
            clip_norm=clip_norm,
            lr_ratio=lr_ratio,
            recipe=recipe,
        )
        check_name("residual_checkpoint", residual_checkpoint, ("mean", "full", "none"))
        self._residual_checkpoint = residual_checkpoint
        self._local_world_size = check_count("local_world_size", local_world_size)
        _check_strategy_options(ddp_kwargs)
        check_known("TopKStrategy", ddp_kwargs, [TopKStrategy.__init__, DDPStrategy.__init__], ())
        check_ddp_options(ddp_kwargs)
        super().__init__(start_method=start_method, **ddp_kwargs)
        self.topk_state: TopKState | None = None
        """The state of the comm hook; None outside ``fit``."""
        self._residuals = Residuals()
        self._resumed: dict[str, Any] | None = None
        self._frozen: list[Tensor] = []

    def setup_distributed(self) -> None:
        """Connects the ranks; after a restart by torchrun, without the addresses of those that died."""
        self.set_world_ranks()
        connect_after_restart(
            self._get_process_group_backend(), self.global_rank, self.world_size, self._timeout, self.root_device
        )
        super().setup_distributed()

    def configure_ddp(self) -> None:
        """Wraps the module, with parameters that no other rank writes to."""
        assert self.model is not None
        own_memory_(self.model)
        check_same_model(self.model)
        self._frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        super().configure_ddp()

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's training step, exchanging also what was unfrozen since the last one."""
        state, model = self.topk_state, self.model
        if state is not None and any(parameter.requires_grad for parameter in self._frozen):
            # DDP leaves out what is frozen when it is built, for good: the ranks' weights would drift apart.
            assert isinstance(model, DistributedDataParallel)
            if model.require_backward_grad_sync:  # at the end of an accumulation window
                state.close()
                self.model = model.module
                self.configure_ddp()
                assert self.topk_state is not None
                self.topk_state.follow(state)
        return super().training_step(*args, **kwargs)

    def _register_ddp_hooks(self) -> None:
        # DDPStrategy registers hooks on CUDA only (lightning 2.6) and skips CPU silently.
        assert isinstance(self.model, DistributedDataParallel)
        self._residuals.retain(self.model.module.parameters())
        self.topk_state = attach(
            self.model,
            self.config,
            timeout=self._timeout,
            residuals=self._residuals,
            epoch=lambda: self.lightning_module.trainer.current_epoch if self.lightning_module else 0,
            init_sync=self._ddp_kwargs.get("init_sync", True),
            optimizer=lambda: self.optimizers,
            scaler=getattr(self.precision_plugin, "scaler", None),
            local_world_size=self._local_world_size or self.num_processes,
            announce=rank_zero_info,
            planned_steps=self._planned_steps(),
        )

        if self._resumed is not None:
            self.topk_state.load_state_dict(self._resumed)
            self._resumed = None

    def _planned_steps(self) -> float | None:
        """The Trainer's optimizer steps, if a schedule wants to know: asking sets the data up. Infinite where it cannot tell."""
        module = self.lightning_module
        if module is None or not (self.config.by_plan or self.config.warms or self.config.automatic):
            return None
        try:
            steps = module.trainer.estimated_stepping_batches
        except MisconfigurationException:  # accumulation by a schedule
            if self.config.by_plan:
                raise
            return math.inf
        return steps if steps > 0 else math.inf  # Lightning says -1 of a loader without length

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Saves a checkpoint with the residuals of all ranks; every rank calls it. Weights-only checkpoints hold none."""
        module = self.lightning_module
        if self._residual_checkpoint != "none" and "optimizer_states" in checkpoint and module is not None:
            if not (dist.is_available() and dist.is_initialized()):
                checkpoint[KEY] = absent("the worker processes, which held them, had ended")
            elif module.trainer.state.status == TrainerStatus.INTERRUPTED or Path(filepath).name.startswith("hpc_ckpt"):
                # Others may not be here, and would not answer a collective.
                checkpoint[KEY] = absent(
                    "an exception or a signal was being handled, when ranks cannot wait for each other"
                )
            else:
                names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
                checkpoint[KEY] = collect(self._residuals, names, self._residual_checkpoint, self.root_device)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; ``fit`` goes on with its residuals, or with zero if it has none, as one by DDPStrategy."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._resume(
                checkpoint.get(KEY, absent("it was saved by another strategy, or with residual_checkpoint='none'"))
            )
        return checkpoint

    def _resume(self, entry: Any) -> None:
        """Goes on with the residuals of a checkpoint: now, if there is a model to go on with, or when it is wrapped."""
        if self._residual_checkpoint == "none":
            entry = absent("residual_checkpoint='none' does not read them")
        if isinstance(entry, dict) and entry.get("mode") == "none":
            rank_zero_info(
                f"TopKStrategy starts with residuals of zero: the checkpoint has none ({entry.get('reason')})."
            )
            entry = EMPTY
        if self.topk_state is None:
            self._resumed = entry
        else:
            self.topk_state.load_state_dict(entry)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and checks that they and the exchange do not both apply momentum."""
        super().setup_optimizers(trainer)
        if self.topk_state is not None:
            self.topk_state.follow_optimizers()

    def teardown(self) -> None:
        """Gives up the exchange's process group and thread, then all that DDPStrategy holds."""
        try:
            if self.topk_state is not None:
                self.topk_state.close()
                self.topk_state = None
                self._residuals.settle()
        finally:
            super().teardown()

    def __repr__(self) -> str:
        # What the Trainer of the other package shows when it refuses this.
        other = "import pytorch_lightning before lightning_topk, and not lightning.pytorch, to use its Trainer"
        return f"<TopKStrategy for {PACKAGE}.Trainer ({other}): {self.config}>"

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
    """Refuses what DDPStrategy would accept and the exchange cannot honour."""
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


TopKStrategy.register_strategies(StrategyRegistry)
