"""What Lightning's DDPStrategy does, TopKStrategy does: with everything sent, the weights are the same."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from ranks import every_rank
from test_lightning import QUIET
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_topk import CompressionMonitor, TopKStrategy


class InThisProcess(ClusterEnvironment):
    """Ranks that run and are connected already."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


class Plain(L.LightningModule):
    """A small network on data that both strategies see alike: four batches for each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.build()
        self.batch_size, self.lr = 4, 0.1

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return (self(x) - x[:, :1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        data = torch.randn(32, 12, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Adam(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


class Closures(Plain):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3, tolerance_grad=0, tolerance_change=0)


class Gan(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward((net(x) - x[:, :1]).square().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]


class Branch(Plain):
    """A branch that is left out in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        y = self(x) + (self.branch(x) if batch_idx % 2 else 0)
        return (y - x[:, :1]).square().mean()


class Frozen(Plain):
    """The first layer begins to learn in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)


class Tied(Plain):
    def build(self):
        first, second = nn.Linear(12, 12), nn.Linear(12, 12)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)


class ChannelsLast(Plain):
    def build(self):
        layers = [nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(8, 1)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)


class Checkpointed(Plain):
    def forward(self, x):
        return self.net[1:](checkpoint(self.net[0], x, use_reentrant=False))


class Sparse(Plain):
    """An embedding with sparse gradients beside dense parameters, of two dtypes."""

    automatic_optimization = False

    def build(self):
        self.table = nn.Embedding(50, 4, sparse=True)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.ones(0))
        return nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        entries = self.table((x[:, 0].abs() * 20).long().clamp(max=49))
        y = self.net(torch.cat([x, entries], dim=1)) * self.scale.float() + self.nothing.sum()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward((y - x[:, :1]).square().mean())
        assert self.table.weight.grad.is_sparse
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        dense = [p for name, p in self.named_parameters() if name != "table.weight"]
        return [torch.optim.SGD(dense, lr=0.1), torch.optim.SparseAdam([self.table.weight], lr=0.1)]


class Compiled(Plain):
    def configure_model(self):
        self.net.compile(backend="aot_eager")


class SteppedLate(Plain):
    """Two losses, two backward passes and one step."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        (x,) = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for sign in (1, -1):
            self.manual_backward((self(sign * x) - x[:, :1]).square().mean())
        optimizer.step()


FEATURES = {
    "plain": (Plain, {}, {}),
    "fused AdamW and a schedule": (Adam, {}, {}),
    "accumulation with a partial last window": (Plain, {"accumulate_grad_batches": 3}, {}),
    "accumulation by a schedule": (Plain, {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]}, {}),
    "clipping by norm": (Plain, {"gradient_clip_val": 0.05}, {}),
    "clipping by value": (Plain, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "closures called more than once": (Closures, {}, {}),
    "manual optimization of two networks": (Gan, {}, {"find_unused_parameters": True}),
    "two backward passes a step": (SteppedLate, {}, {}),
    "a branch that is left out at times": (Branch, {}, {"find_unused_parameters": True}),
    "tied weights": (Tied, {}, {}),
    "channels_last": (ChannelsLast, {}, {"gradient_as_bucket_view": True}),
    "activation checkpointing": (Checkpointed, {}, {}),
    "sparse embeddings, mixed dtypes, empty parameters": (Sparse, {}, {}),
    "torch.compile": (Compiled, {}, {"bucket_cap_mb": 25}),
    "stochastic weight averaging": (
        Plain,
        {"callbacks": lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)]},
        {},
    ),
    "static graph": (Plain, {}, {"static_graph": True}),
    "no inference mode": (Plain, {"inference_mode": False, "limit_val_batches": 2}, {}),
}


def trainer_of(
    rank: int, world: int, strategy: str, options: dict, ddp: dict, monitor: bool = True, **settings
) -> L.Trainer:
    make = DDPStrategy if strategy == "ddp" else TopKStrategy
    callbacks = options.get("callbacks", list)() + ([CompressionMonitor()] if monitor else [])
    return L.Trainer(
        strategy=make(cluster_environment=InThisProcess(rank, world), **{"bucket_cap_mb": 0.0005} | ddp, **settings),
        **{**QUIET, "devices": world, "max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0}
        | options | {"callbacks": callbacks},
    )  # fmt: skip


def trained(rank: int, world: int, name: str) -> None:
    warnings.simplefilter("ignore")
    module, options, ddp = FEATURES[name]
    weights = {}
    for strategy, settings in {
        "ddp": {},
        "all": {"ratio": 1.0, "wire": "fp32"},
        "model": {"ratio": 1.0, "wire": "fp32", "bidirectional": False},
        "topk": {"ratio": 0.1},
    }.items():
        model = module()
        trainer_of(rank, world, strategy, options, ddp, monitor=strategy == "topk", **settings).fit(model)
        weights[strategy] = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    rows = every_rank(torch.stack([*weights.values()]))
    for number, strategy in enumerate(weights):
        assert (rows[:, number] == rows[0, number]).all(), f"ranks differ with {strategy}"
    for strategy in ("all", "model"):
        torch.testing.assert_close(weights[strategy], weights["ddp"], rtol=1e-4, atol=1e-5)
    assert not torch.equal(weights["topk"], weights["ddp"])
    assert weights["topk"].isfinite().all()


@pytest.mark.parametrize("name", FEATURES)
def test_with_everything_sent_training_gives_the_weights_of_ddp(groups, name):
    groups(2).run(trained, name, timeout=100)


class Moving(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, 0.9, weight_decay=0.01, nesterov=True)


def adapted(rank: int, world: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    for kind in (Moving, Adam):
        weights = []
        for settings in ({"saving": 40}, {"saving": 40, "adapt_momentum": False}):
            model = kind()
            trainer = trainer_of(rank, world, "topk", {"gradient_clip_val": 0.5}, {}, **settings)
            for _ in range(2):  # the second fit has an optimizer of its own
                trainer.fit(model)
                trainer.fit_loop.max_epochs += 1
            trainer.save_checkpoint(f"{folder}/last.ckpt")
            saved = torch.load(f"{folder}/last.ckpt", weights_only=False)["optimizer_states"][0]
            assert {key for state in saved["state"].values() for key in state} <= {
                "momentum_buffer", "step", "exp_avg", "exp_avg_sq"
            }  # fmt: skip
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert not torch.equal(*weights)


def test_momentum_is_adapted_in_every_fit_and_checkpoints_hold_the_optimizers_own_state(groups, tmp_path):
    groups(2).run(adapted, str(tmp_path), timeout=100)


def unfrozen(rank: int, world: int) -> None:
    """DDP does not know of parameters that were frozen when it was built; ranks would drift apart."""
    warnings.simplefilter("ignore")
    model = Frozen()
    options = {"use_distributed_sampler": False}  # every rank sees all data: the mean is what one process has
    trainer_of(rank, world, "topk", options, {}, ratio=1.0, wire="fp32").fit(model)
    alone = Frozen()
    for epoch in range(2):
        alone.net[0].requires_grad_(epoch > 0)
        for batch in alone.train_dataloader():
            alone.zero_grad()
            alone.training_step(batch, 0).backward()
            with torch.no_grad():
                for p in alone.parameters():
                    p -= 0 if p.grad is None else 0.1 * p.grad
    flat = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (model, alone)]
    torch.testing.assert_close(*flat, rtol=1e-4, atol=1e-5)


def test_layers_that_are_unfrozen_later_are_exchanged_too(groups):
    groups(2).run(unfrozen)


class Thawing(Frozen):
    """Unfreezes its first layer before the loss is computed, where that is too late, or after."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self._before = before

    def on_train_epoch_start(self):
        pass

    def training_step(self, batch, index):
        if self._before:
            self.net[0].requires_grad_(index > 0)
        loss = super().training_step(batch, index)
        if not self._before:
            self.net[0].requires_grad_(True)
        return loss


def unfrozen_inside(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    with pytest.raises(RuntimeError, match="training_step unfroze a parameter"):
        trainer_of(rank, world, "topk", {}, {}, ratio=0.1).fit(Thawing(before=True))
    trainer = trainer_of(rank, world, "topk", {}, {}, ratio=0.1)
    trainer.fit(Thawing(before=False))
    assert trainer.global_step > 2


def test_a_training_step_that_unfreezes_a_layer_is_refused(groups):
    groups(2).run(unfrozen_inside)


class Steps(Callback):
    def on_train_start(self, trainer, pl_module):
        self.steps = trainer.strategy.topk_state.residuals.progress.steps
        self.held = len(trainer.strategy.topk_state.residuals.held())


def tuned(rank: int, world: int, folder: str) -> None:
    """What the Tuner tries out leaves no residuals behind."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    model, steps = Plain(), Steps()
    trainer = trainer_of(rank, world, "topk", {"default_root_dir": folder, "callbacks": lambda: [steps]}, {}, ratio=0.1)
    Tuner(trainer).lr_find(model, num_training=4, update_attr=False)
    trainer.fit(model)
    assert steps.steps == steps.held == 0
    assert trainer.strategy._residuals.progress.steps == trainer.global_step


def test_the_tuner_leaves_no_residuals_behind(groups, tmp_path):
    groups(2).run(tuned, str(tmp_path))


def evaluated(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    model = Plain()
    options = {"limit_val_batches": 2, "limit_test_batches": 2, "limit_predict_batches": 2}
    trainer = trainer_of(rank, world, "topk", options, {}, ratio=0.1)
    before = trainer.validate(model, verbose=False)[0]["val_loss"]
    trainer.test(model, verbose=False)
    assert len(trainer.predict(model)) == 2
    trainer.fit(model)
    assert trainer.validate(model, verbose=False)[0]["val_loss"] != before
    assert trainer.strategy._residuals.progress.steps == trainer.global_step


def test_validate_test_and_predict_work_before_and_without_fit(groups):
    groups(2).run(evaluated)


def throughput(rank: int, world: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    options = {"callbacks": lambda: [monitor], "logger": CSVLogger(folder), "log_every_n_steps": 2}
    trainer_of(rank, world, "topk", options, {}).fit(Plain())


def test_the_throughput_monitor_logs_beside_the_compression_monitor(groups, tmp_path):
    groups(2).run(throughput, str(tmp_path))
    rows = next(Path(tmp_path).rglob("metrics.csv")).read_text()
    assert "batches_per_sec" in rows
    assert "topk/saving" in rows
