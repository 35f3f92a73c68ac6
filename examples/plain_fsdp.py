"""A model sharded by FSDP2 inside each node, and top-k between nodes, in a plain training loop.

torchrun --nproc-per-node=4 examples/plain_fsdp.py

On a single machine, the ranks form two nodes.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_topk import attach


def main() -> None:
    """Fits a small net to a random teacher."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = world // local if world > local else 2
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(0)
    layers = nn.Linear(20, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
    model, teacher = nn.Sequential(*layers).to(device), nn.Linear(20, 1).to(device)

    mesh = init_device_mesh(device, (nodes, world // nodes), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = attach(model, process_group=mesh["replicate"], saving=50, optimizer=optimizer, max_norm=1.0)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(101):
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
