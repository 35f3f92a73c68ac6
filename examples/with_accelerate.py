"""Top-k exchange in a training loop with Hugging Face Accelerate (``pip install accelerate``).

torchrun --nproc-per-node=2 examples/with_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_topk import attach


def main() -> None:
    """Fits a small net to a linear teacher."""
    torch.manual_seed(0)
    x = torch.randn(4096, 20)
    data = DataLoader(TensorDataset(x, x @ torch.randn(20, 1)), batch_size=64, shuffle=True)
    net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), data)
    given = {"optimizer": optimizer.optimizer, "scaler": accelerator.scaler}
    state = attach(model, saving=50, max_norm=1.0, **given)
    for epoch in range(4):
        for inputs, targets in data:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accelerator.print(f"epoch {epoch}  loss {loss.item():.4f}")
    accelerator.print(state.summary())
    state.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
