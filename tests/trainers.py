"""Helpers for tests of a Trainer: a small module, and Trainers of connected ranks or of ranks that they start."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_topk import CompressionMonitor, TopKStrategy

OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = {"accelerator": "cpu", **dict.fromkeys(OFF, False)}


class InThisProcess(LightningEnvironment):
    """An environment of ranks that are running and connected."""

    creates_processes_externally = True

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._global_rank, self._world_size = rank, world

    def local_rank(self) -> int:
        return self._global_rank


class Module(L.LightningModule):
    """A small network on data that is the same for all strategies: four batches for each of two ranks.

    ``make`` makes optimizers from the parameters.
    """

    def __init__(self, make: Callable[..., Any] | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net, self._make = self.build(), make or partial(torch.optim.SGD, lr=0.1)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return (self(x) - x[:, :1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters())

    def train_dataloader(self) -> DataLoader:
        data = torch.randn(32, 12, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


ELEMENTS = sum(p.numel() for p in Module().parameters())


class Normed(Module):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))


class Gan(Module):
    """Two optimizers that step in turn, each on a net of its own while the other net is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(12, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward((net(x) - x[:, :1]).square().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]


class Keeper(Callback):
    """Keeps the strategy's latest state, which is closed after fit and still has its residuals."""

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.state = trainer.strategy.topk_state

    on_train_end = on_fit_start


def trainer_of(
    rank: int | None, world: int, strategy: Strategy | str, callbacks: Sequence[Callback] = (), **options: Any
) -> L.Trainer:
    """A Trainer of a connected rank, or of ranks that it starts itself if ``rank`` is None."""
    if rank is not None:
        warnings.simplefilter("ignore")
        strategy.cluster_environment = InThisProcess(rank, world)
    settings = {**QUIET, "devices": world, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    return L.Trainer(strategy=strategy, callbacks=[*callbacks], **settings)


def fit(
    rank: int | None, world: int, module: L.LightningModule | None = None, strategy: Strategy | str | None = None,
    callbacks: Sequence[Callback] = (), ckpt_path: Any = None, monitor: bool = True, **options: Any,
) -> tuple[L.Trainer, dict[str, float]]:  # fmt: skip
    """Trains five steps by default; returns the Trainer and the values that the monitor logged."""
    callbacks = [CompressionMonitor()] * monitor + [*callbacks]
    options = options if options.keys() & {"max_steps", "max_epochs"} else {"max_steps": 5, **options}
    trainer = trainer_of(rank, world, TopKStrategy() if strategy is None else strategy, callbacks, **options)
    trainer.fit(Module() if module is None else module, ckpt_path=ckpt_path)
    return trainer, {key: float(value) for key, value in trainer.callback_metrics.items()}
