"""LightningCLI: the strategy is a matter of configuration.

python main.py fit --config config.yaml
python main.py fit --config config.yaml --trainer.strategy.ratio=0.1
"""

from __future__ import annotations

import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import lightning_topk


class Net(BoringModel):
    """A small net on random data; ``hidden`` is its width."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        """Shows the settings that arrived."""
        if isinstance(self.trainer.strategy, lightning_topk.TopKStrategy) and self.trainer.is_global_zero:
            print(self.trainer.strategy.config, flush=True)


if __name__ == "__main__":
    LightningCLI(Net, save_config_callback=None)
