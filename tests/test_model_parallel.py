"""Strategies for sharded models, in a Trainer and with Fabric: two nodes of two ranks, as one group of processes."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from test_features import InThisProcess
from test_gloo import every_rank
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_topk import CompressionMonitor, TopKModelParallelStrategy
from lightning_topk.lightning.fabric import TopKModelParallelStrategy as FabricStrategy

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 12, generator=generator)
    return TensorDataset(x, x[:, :3].sum(1, keepdim=True))


class Model(L.LightningModule):
    """A net whose layers are sharded on the mesh of its node."""

    def __init__(self, rank: int = 0, policy: MixedPrecisionPolicy | None = None, shuffled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(rank if shuffled else 0)
        self.net = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
        self.policy, self.seen = policy, []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        options = {} if self.policy is None else {"mp_policy": self.policy}
        if not hasattr(self.net, "set_requires_gradient_sync"):
            for number in (0, 2):
                fully_shard(self.net[number], mesh=mesh, **options)
            fully_shard(self.net, mesh=mesh, **options)

    def training_step(self, batch, index):
        x, y = batch
        self.seen.append(x[:, 0].clone())
        return nn.functional.mse_loss(self.net(x), y)

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
            "save_distributed_checkpoint", "beta1", "dense_parameters")  # fmt: skip


def dense(rank: int, world: int, options: dict) -> None:
    """With everything sent, as one process learns with batches of all ranks."""
    _, model = fit(rank, world, Model(rank // 2, shuffled=True), ratio=1.0, wire="fp32", **options)
    found, seen = weights(model), model.seen
    torch.manual_seed(0)
    alone = Model(0)
    optimizer, parts = alone.configure_optimizers(), options.get("accumulate_grad_batches", 1)
    batches = [torch.arange(64).view(4, 4, 4)[:, :, each] for each in range(4)]
    for step in range(4):
        optimizer.zero_grad()
        for part in range(parts):
            x, y = (torch.cat([t[number::4][4 * (step * parts + part) % 16 :][:4] for number in range(4)])
                    for t in data().tensors)  # fmt: skip
            (nn.functional.mse_loss(alone.net(x), y) / parts).backward()
        if "gradient_clip_val" in options:
            nn.utils.clip_grad_norm_(alone.parameters(), options["gradient_clip_val"])
        optimizer.step()
    del batches
    expected = torch.cat([p.detach().flatten() for p in alone.parameters()])
    rows = every_rank(torch.cat(seen))
    assert len(set(rows.flatten().tolist())) == rows.numel() or parts * 4 * 4 * 4 > 64  # no row was seen twice
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}])
def test_with_everything_sent_nodes_learn_as_one_process_from_the_weights_of_the_first(groups, options):
    groups(4).run(dense, options)
