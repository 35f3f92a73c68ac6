"""Top-k exchange in a plain DDP training loop, without Lightning.

torchrun --nproc-per-node=2 examples/plain_ddp.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topk import attach


def main() -> None:
    """Fits a small net to a random teacher."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    teacher, net = (nn.Sequential(nn.Linear(20, 256), nn.Tanh(), nn.Linear(256, 1)).to(device) for _ in range(2))

    # On CPUs smaller buckets than DDP's 25 MiB overlap better; the strategies use 8 MiB by default.
    model = DistributedDataParallel(net, bucket_cap_mb=None if gpu else 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = attach(model, saving=50, optimizer=optimizer, max_norm=1.0)  # the only line about compression

    torch.manual_seed(1 + dist.get_rank())
    for step in range(201):
        x = torch.randn(64, 20, device=device)
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(state.summary())
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
