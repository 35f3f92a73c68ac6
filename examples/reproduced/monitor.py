"""The runs of monitor.json: what CompressionMonitor logs while a small GPT learns on two CPU ranks.

PYTHONPATH=examples python examples/reproduced/monitor.py saving 50 0.003       # the amount and the learning rate
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lab.data import documentation
from lab.models import MODELS
from lightning_topk import CompressionMonitor, TopKStrategy


class Reader(L.LightningModule):
    """A GPT of 0.1 million parameters that learns with AdamW."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net, self.lr = MODELS["gpt"](), lr

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Cross-entropy of characters ``[N, T]`` and the next ones."""
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]).flatten(0, -2), batch[1].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a constant rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    """Logs a run into the folder ``logs``."""
    name, amount, lr = sys.argv[1:]
    settings: dict[str, Any] = {name: float(amount)}
    torch.set_num_threads(1)
    L.seed_everything(0)
    data = documentation()
    batches = DataLoader(TensorDataset(data.examples, data.labels), 4, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        strategy=TopKStrategy(**settings),
        callbacks=[CompressionMonitor()],
        logger=CSVLogger("logs"),
        accelerator="cpu",
        devices=2,
        max_steps=3000,
        log_every_n_steps=25,
        enable_checkpointing=False,
    )
    trainer.fit(Reader(float(lr)), batches)


if __name__ == "__main__":
    main()
