"""Strategies for sharded models, in a Trainer and with Fabric: two nodes of two ranks, as one group of processes."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import every_rank
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from trainers import InThisProcess

from lightning_topk import CompressionMonitor, TopKModelParallelStrategy, attach

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 12, generator=generator)
    return TensorDataset(x, x[:, :3].sum(1, keepdim=True))


class Model(L.LightningModule):
    """A net whose layers are sharded on the mesh of its node."""

    def __init__(
        self,
        rank: int = 0,
        policy: MixedPrecisionPolicy | None = None,
        shuffled: bool = False,
        offloaded: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(rank if shuffled else 0)
        self.net = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
        self.policy, self.offloaded, self.seen = policy, offloaded, []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        options = {} if self.policy is None else {"mp_policy": self.policy}
        if self.offloaded:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if not hasattr(self.net, "set_requires_gradient_sync"):
            for number in (0, 2):
                fully_shard(self.net[number], mesh=mesh, **options)
            fully_shard(self.net, mesh=mesh, **options)

    def training_step(self, batch, index):
        x, y = batch
        self.seen.append(x.clone())
        return nn.functional.mse_loss(self.net(x).float(), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(data(), 4, shuffle=False)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def fit(rank: int, world: int, model=None, ckpt=None, callbacks=(), local: int = 2, **settings):
    warnings.simplefilter("ignore")
    options = {key: settings.pop(key) for key in list(settings) if key not in STRATEGY}
    strategy = TopKModelParallelStrategy(local_world_size=local, **settings)
    strategy.cluster_environment = InThisProcess(rank, world)
    trainer = L.Trainer(
        devices=world,
        strategy=strategy,
        callbacks=list(callbacks),
        **{**QUIET, "enable_checkpointing": False, "max_steps": 4, **options},
    )
    model = Model() if model is None else model
    trainer.fit(model, ckpt_path=ckpt)
    return trainer, model


STRATEGY = ("ratio", "saving", "wire", "data_parallel_size", "tensor_parallel_size", "residual_checkpoint",
            "save_distributed_checkpoint", "adapt_momentum", "dense_parameters")  # fmt: skip


def dense(rank: int, world: int, options: dict, offloaded: bool) -> None:
    """With everything sent, as one process learns with the batches of all ranks."""
    given = Model(rank // 2, shuffled=True, offloaded=offloaded)
    _, model = fit(rank, world, given, ratio=1.0, wire="fp32", **options)
    found, seen = weights(model), every_rank(torch.stack(model.seen))  # [ranks, batches, rows, 12]
    alone = Model(0)
    optimizer, parts = alone.configure_optimizers(), options.get("accumulate_grad_batches", 1)
    for batches in seen.transpose(0, 1).split(parts):
        optimizer.zero_grad()
        for x in batches.flatten(1, 2):
            (nn.functional.mse_loss(alone.net(x), x[:, :3].sum(1, keepdim=True)) / parts).backward()
        if "gradient_clip_val" in options:
            nn.utils.clip_grad_norm_(alone.parameters(), options["gradient_clip_val"])
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in alone.parameters()])
    rows = seen[:, :4].reshape(-1, 12)
    assert len(rows.unique(dim=0)) == len(rows) == 64, "every row is seen once an epoch"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "offloaded"),
    [({}, False), ({"gradient_clip_val": 0.05}, False), ({"accumulate_grad_batches": 2}, False), ({}, True)],
)
def test_with_everything_sent_nodes_learn_as_one_process_from_the_weights_of_the_first(groups, options, offloaded):
    groups(4).run(dense, options, offloaded)


def learned(rank: int, world: int, folder: str) -> dict:
    """A fit with the monitor, one that goes on, and what goes wrong; asserts come last."""
    monitor = CompressionMonitor(per_layer=True, details=True)
    trainer, model = fit(rank, world, ratio=0.05, max_steps=4, callbacks=[monitor], log_every_n_steps=2)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    strategy = trainer.strategy
    before, steps = strategy._last.full_state_dict(), strategy._last.residuals.progress.steps
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(model)
    after = strategy._last.residuals.progress.steps
    predicted = strategy._last.predicted()
    copies = every_rank(torch.cat([p.to_local().detach().flatten() for p in model.parameters()])[:200])
    assert strategy.topk_state is None
    assert (steps, after) == (4, 6)
    assert torch.equal(copies[0], copies[2])
    assert torch.equal(copies[1], copies[3])
    if rank == 0:
        assert sum(float(each["residual"].norm()) for each in before["parameters"].values())
    assert logged["topk/uplink_bytes"] == predicted.uplink
    assert logged["topk/inter_node_bytes"] == predicted.inter_node == 2 * (predicted.uplink + predicted.downlink)
    assert logged["topk/dense_bytes"] == predicted.dense
    assert logged["topk/intra_node_bytes"] > 0
    assert logged["topk/broadcast_bytes"] == 0
    assert logged["topk/total_broadcast_bytes"] > 0
    assert 0 < logged["topk/uplink_error"] < 1
    assert logged["topk/worker_residual_norm"] > 0
    assert "topk/error/net.0.weight" in logged
    return logged


def test_a_fit_is_monitored_and_another_one_goes_on(groups, tmp_path):
    groups(4).run(learned, str(tmp_path))


def resumed(rank: int, world: int, folder: str, whole: bool, keeps: bool) -> None:
    settings = {
        "ratio": 0.05,
        "adapt_momentum": False,
        "residual_checkpoint": keeps,
        "save_distributed_checkpoint": not whole,
    }
    path = Path(folder) / "run.ckpt"
    trainer, model = fit(rank, world, **settings)
    trainer.save_checkpoint(path)
    kept = trainer.strategy._last.full_state_dict()["parameters"]
    seen: dict = {}

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.update(trainer.strategy.topk_state.full_state_dict())
            seen["weights"] = weights(pl_module)

    expected = weights(model)
    trainer, model = fit(rank, world, ckpt=path, callbacks=[Look()], **{**settings, "max_steps": 6})
    last = weights(model)
    assert trainer.global_step == 6
    assert torch.equal(seen["weights"], expected)
    assert not torch.equal(last, expected)
    assert seen["steps"] == 4 * keeps
    for name, parts in kept.items():
        found = seen["parameters"].get(name, {}).get("residual", torch.zeros(()))
        torch.testing.assert_close(found + 0 * parts["residual"], parts["residual"] * keeps, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("whole", "keeps"), [(False, True), (True, True), (False, False)])
def test_a_run_resumes_with_its_residuals_from_a_folder_or_a_file(groups, tmp_path, whole, keeps):
    groups(4).run(resumed, str(tmp_path), whole, keeps)


def elsewhere(rank: int, world: int, folder: str) -> None:
    """A checkpoint of two nodes of two ranks goes on on nodes of one, and is read by ModelParallelStrategy."""
    path = Path(folder) / "run.ckpt"
    trainer, _ = fit(rank, world, ratio=0.05)
    trainer.save_checkpoint(path)
    kept = trainer.strategy._last.full_state_dict()["parameters"]
    trainer, _ = fit(rank, world, ckpt=path, local=1, ratio=0.05, max_steps=4)  # no step more
    found = trainer.strategy._last.full_state_dict()["parameters"]
    plain = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    plain.cluster_environment = InThisProcess(rank, world)
    other = L.Trainer(devices=world, strategy=plain, max_steps=5, enable_checkpointing=False, **QUIET)
    other.fit(Model(), ckpt_path=path)
    assert other.global_step == 5
    for name, parts in kept.items():
        torch.testing.assert_close(found[name]["residual"], parts["residual"], atol=1e-6, rtol=1e-5)


def test_a_checkpoint_goes_on_on_other_nodes_and_without_compression(groups, tmp_path):
    groups(4).run(elsewhere, str(tmp_path))


class Manual(Model):
    """Two backward passes a step, of which the first is not reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in (0, 1):
            self.net.set_requires_gradient_sync(part == 1)
            self.manual_backward(nn.functional.mse_loss(self.net(x), y))
        optimizer.step()


def another_model(rank: int, world: int) -> None:
    trainer, model = fit(rank, world, ratio=0.05, max_steps=2)
    for each, most, steps in ((model, 4, 4), (Model(), 6, 2)):
        trainer.fit_loop.epoch_loop.max_steps = most
        trainer.fit(each)
        assert trainer.strategy._last.residuals.progress.steps == steps


def test_a_strategy_that_trains_another_model_keeps_nothing_of_the_first(groups):
    groups(4).run(another_model)


def by_hand(rank: int, world: int) -> None:
    trainer, _ = fit(rank, world, Manual(), ratio=0.05)
    steps = trainer.strategy._last.residuals.progress.steps
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    _, half = fit(rank, world, Model(policy=policy), saving=4)
    accumulated, _ = fit(rank, world, ratio=0.05, accumulate_grad_batches=2, max_steps=2)
    found = accumulated.strategy._last.residuals.progress.steps
    assert steps == 4
    assert weights(half).isfinite().all()
    assert found == 2


def test_manual_optimization_half_precision_and_accumulation_exchange_once_a_step(groups):
    groups(4).run(by_hand)


def with_fabric(rank: int, world: int) -> None:
    """The recipe of the guide on clusters: Fabric's own strategy, whose first dimension is that of the replicas."""
    warnings.simplefilter("ignore")

    def parallelize(model, mesh):
        return fully_shard(model, mesh=mesh["tensor_parallel"])

    strategy = FabricModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=2)
    strategy.cluster_environment = InThisProcess(rank, world)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    torch.manual_seed(rank // 2)
    model = fabric.setup_module(nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 1)))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    replicas = strategy.device_mesh["data_parallel"]
    state = attach(model.module, process_group=replicas, optimizer=optimizer.optimizer, ratio=0.05)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))
        fabric.backward(model(x).square().mean())
        optimizer.step()
    rows = every_rank(torch.cat([p.to_local().detach().flatten() for p in model.parameters()])[:100])
    steps = state.residuals.progress.steps
    state.close()
    assert steps == 3
    assert torch.equal(rows[0], rows[2])


def test_fabric_trains_a_sharded_model_by_attach(groups):
    groups(4).run(with_fabric)


def refused(rank: int, world: int) -> list[str]:
    class Unsharded(Model):
        def configure_model(self):
            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])

    said = []
    for model, settings, words in (
        (Model(), {"data_parallel_size": 4}, "data_parallel_size=4 times tensor_parallel_size=1 is not 2"),
        (Model(), {"local": 3}, "4 ranks do not make up nodes of 3"),
        (Unsharded(), {}, "'net.2.weight' (one of 4) is not sharded by fully_shard"),
    ):
        try:
            fit(rank, world, model, ratio=0.1, **settings)
            said.append(f"nothing instead of {words}")
        except ValueError as error:
            said.append("" if words in str(error) else f"{error} instead of {words}")
    return [words for words in said if words]


def test_sizes_that_make_no_node_and_models_that_are_not_sharded_are_refused(groups):
    assert groups(4).run(refused) == [[]] * 4


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"data_parallel_size": "all"}, TypeError, "data_parallel_size='all' must be 'auto' or a number"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size=0 must be at least 1"),
        ({"residual_checkpoint": "full"}, TypeError, "residual_checkpoint='full' is a str"),
        ({"ratio": 2.0}, ValueError, r"ratio=2\.0 must be in \(0, 1\]"),
        ({"clip_norm": 1.0}, ValueError, r"clip_norm=1\.0 would clip every shard"),
    ],
)
def test_mistaken_settings_of_a_sharded_run_are_refused_when_they_are_given(settings, error, words):
    with pytest.raises(error, match=words):
        TopKModelParallelStrategy(**settings)
