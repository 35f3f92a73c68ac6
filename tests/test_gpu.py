"""Training on one GPU: NCCL with one rank, gloo with several, the side stream, a real GradScaler, SyncBatchNorm."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_topk import CompressionMonitor, TopKStrategy
from lightning_topk.ddp import attach

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 4000), nn.BatchNorm1d(4000), nn.ReLU(), nn.Linear(4000, 1))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("sync_batchnorm", [False, True])
def test_a_model_trains_on_a_gpu(tmp_path, precision, sync_batchnorm):
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=6,
        precision=precision,
        sync_batchnorm=sync_batchnorm,
        strategy=TopKStrategy(ratio=0.01),
        callbacks=[CompressionMonitor()],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = Model()
    before = model.net[3].weight.detach().clone()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(48, 20)), batch_size=8))
    assert trainer.global_step == 6
    assert not torch.equal(model.net[3].weight.cpu(), before)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert 0 < trainer.callback_metrics["topk/uplink_error"] < 1


def on_one_gpu(rank: int, world: int, topology: str) -> None:
    """Ranks that share a GPU, which NCCL refuses: gloo, by way of the CPU."""
    torch.manual_seed(0)
    net = nn.Linear(50, 50).cuda()
    ddp = DistributedDataParallel(net)
    state = attach(ddp, ratio=1.0, wire="fp32", topology=topology, local_world_size=2)
    pairs = []
    for step in range(3):
        x = torch.randn(4, 50, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
        alone = copy.deepcopy(net)
        alone(x).square().mean().backward()
        expected = torch.cat([p.grad.flatten() for p in alone.parameters()]).cpu()
        dist.all_reduce(expected)
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        pairs.append((torch.cat([p.grad.flatten() for p in net.parameters()]).cpu(), expected / world))
    state.close()
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("topology", ["sharded", "hierarchical", "single_server", "auto"])
def test_ranks_that_share_a_gpu_exchange_over_gloo(groups, topology):
    groups(4).run(on_one_gpu, topology)
