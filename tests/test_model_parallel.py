"""Strategies for sharded models, in a Trainer and with Fabric: two nodes of two ranks in one group of processes."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import trainers
from groups import on_ranks
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import alike, attach, every_rank, four_layers, loss_of, refusal, unsaid, weights
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from trainers import InThisProcess, Keeper

from lightning_topk import CompressionMonitor, TopKModelParallelStrategy


class Model(trainers.Module):
    """A net whose layers are sharded on its node's mesh; trains on 64 rows."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(partial(torch.optim.Adam, lr=0.01), seed)
        self.options, self.seen = options, []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        if not hasattr(self.net, "set_requires_gradient_sync"):
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=mesh, **self.options)

    def training_step(self, batch, index):
        (x,) = batch
        self.seen.append(x.clone())
        return nn.functional.mse_loss(self.net(x).float(), x[:, :3].sum(1, keepdim=True))

    def train_dataloader(self):
        data = torch.randn(64, 12, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(data), 4, shuffle=False)


def fit(rank: int, world: int, model=None, ckpt=None, callbacks=(), local: int = 2, settings=None, **options):
    strategy = TopKModelParallelStrategy(local_world_size=local, **{"ratio": 0.05, **(settings or {})})
    model, options = Model() if model is None else model, {"max_steps": 4, **options}
    return trainers.fit(rank, world, model, strategy, callbacks, ckpt, monitor=False, **options)[0], model


@pytest.mark.parametrize(
    ("options", "offloaded"), [({"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, False), ({}, True)]
)
@on_ranks(4)
def test_with_everything_sent_nodes_learn_as_one_process(rank, world, options, offloaded):
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloaded else {}
    settings = {"ratio": 1.0, "wire": "fp32"}
    last = Keeper()
    _, model = fit(rank, world, Model(rank // 2, **offload), callbacks=[last], settings=settings, **options)
    found, seen = weights(model), every_rank(torch.stack(model.seen))  # [ranks, batches, rows, 12]
    alone = Model()
    optimizer, parts = alone.configure_optimizers(), options.get("accumulate_grad_batches", 1)
    for batches in seen.transpose(0, 1).split(parts):
        optimizer.zero_grad()
        for x in batches.flatten(1, 2):
            (alone.training_step((x,), 0) / parts).backward()
        if "gradient_clip_val" in options:
            nn.utils.clip_grad_norm_(alone.parameters(), options["gradient_clip_val"])
        optimizer.step()
    rows = seen[:, :4].reshape(-1, 12)
    assert len(rows.unique(dim=0)) == len(rows) == 64, "every row is seen once an epoch"
    assert last.state.steps == 4, "accumulated gradients are exchanged once"
    torch.testing.assert_close(found, weights(alone), atol=1e-5, rtol=1e-4)


@on_ranks(4)
def test_a_fit_is_monitored_and_a_second_fit_continues_unless_of_another_model(rank, world):
    monitor, last = CompressionMonitor(per_layer=True), Keeper()
    trainer, model = fit(rank, world, callbacks=[monitor, last], log_every_n_steps=2)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    sent = monitor.volume.compute()
    before, steps = last.state.full_state_dict(), last.state.steps
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(model)
    after, predicted = last.state.steps, last.state.predicted()
    copies = every_rank(torch.cat([p.to_local().detach().flatten() for p in model.parameters()])[:200])
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(Model())
    assert trainer.strategy.topk_state is None
    assert (steps, after, last.state.steps) == (4, 6, 2)
    assert torch.equal(copies[:2], copies[2:])
    assert rank or sum(float(each["residual"].norm()) for each in before["parameters"].values())
    assert logged["topk/uplink_bytes"] == predicted.uplink
    assert sent["inter_node_bytes"] == 4 * predicted.inter_node == 8 * (predicted.uplink + predicted.downlink)
    assert sent["dense_bytes"] == 4 * predicted.dense
    assert sent["intra_node_bytes"] == 0  # FSDP's own bytes are not counted
    assert 0 < logged["topk/uplink_error"] < 1
    assert logged["topk/worker_residual_norm"] > 0
    assert "topk/error/net.0.weight" in logged


@pytest.mark.parametrize(("one_file", "keeps"), [(False, True), (True, True), (False, False)])
@on_ranks(4)
def test_a_run_resumes_with_its_residuals_from_a_folder_or_a_file(rank, world, tmp_path, one_file, keeps):
    settings = {"adapt_momentum": False, "residual_checkpoint": keeps, "save_distributed_checkpoint": not one_file}
    path, first = tmp_path / "run.ckpt", Keeper()
    trainer, model = fit(rank, world, callbacks=[first], settings=settings)
    trainer.save_checkpoint(path)
    kept, expected = first.state.full_state_dict()["parameters"], weights(model)
    seen: dict = {}

    def look(trainer, pl_module):
        seen.update(trainer.strategy.topk_state.full_state_dict(), weights=weights(pl_module))

    trainer, model = fit(rank, world, None, path, [LambdaCallback(on_train_start=look)], settings=settings, max_steps=6)
    last = weights(model)
    assert trainer.global_step == 6
    assert torch.equal(seen["weights"], expected)
    assert not torch.equal(last, expected)
    assert seen["steps"] == 4, "also without residuals"
    for name, parts in kept.items():
        found = seen["parameters"].get(name, {}).get("residual", torch.zeros(()))
        torch.testing.assert_close(found + 0 * parts["residual"], parts["residual"] * keeps, atol=1e-6, rtol=1e-5)


@on_ranks(4)
def test_a_checkpoint_resumes_on_other_nodes_and_without_compression(rank, world, tmp_path):
    """From two nodes of two ranks to nodes of one rank; ModelParallelStrategy reads it too."""
    path, last = tmp_path / "run.ckpt", Keeper()
    trainer, _ = fit(rank, world, callbacks=[last])
    trainer.save_checkpoint(path)
    kept = last.state.full_state_dict()["parameters"]
    fit(rank, world, ckpt=path, callbacks=[last], local=1)  # takes no further step
    found = last.state.full_state_dict()["parameters"]
    plain = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    other, _ = trainers.fit(rank, world, Model(), plain, ckpt_path=path, monitor=False)
    assert other.global_step == 5
    torch.testing.assert_close(found, kept, atol=1e-6, rtol=1e-5)


@on_ranks(4)
def test_fabric_trains_a_sharded_model_by_attach(rank, world):
    """As the guide on launching says: Fabric's own strategy, whose first mesh dimension is the replicas."""
    warnings.simplefilter("ignore")

    def parallelize(model, mesh):
        return fully_shard(model, mesh=mesh["tensor_parallel"])

    strategy = FabricModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=2)
    strategy.cluster_environment = InThisProcess(rank, world)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(four_layers())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    replicas = strategy.device_mesh["data_parallel"]
    state = attach(model.module, process_group=replicas, optimizer=optimizer.optimizer, ratio=0.05)
    for step in range(3):
        fabric.backward(loss_of(model, rank, step))
        optimizer.step()
    assert state.steps == 3
    assert alike(weights(model))


class Unsharded(Model):
    def configure_model(self):
        fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])


@on_ranks(4)
def test_invalid_node_sizes_and_unsharded_models_are_refused(rank, world):
    cases = {
        "data_parallel_size=4 times tensor_parallel_size=1": (Model(), {"settings": {"data_parallel_size": 4}}),
        "4 ranks cannot be divided into nodes of 3": (Model(), {"local": 3}),
        "'net.2.weight' (one of 4) is not sharded by fully_shard": (Unsharded(), {}),
    }
    said = [(words, refusal(fit, rank, world, model, **arguments)) for words, (model, arguments) in cases.items()]
    assert unsaid(said) == []
