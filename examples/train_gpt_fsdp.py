"""Trains a GPT on Python's documentation with FSDP2 inside nodes, and torch's HSDP or top-k between them.

python examples/train_gpt_fsdp.py                    # 2 nodes of 2 ranks: processes or GPUs of this machine
python examples/train_gpt_fsdp.py --rate 100mbit     # emulated hosts with links of this rate (root and iproute2)

Prints the loss on held-out text, milliseconds per step and, with --rate, the bytes that leave a node.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

from lab import hosts
from lab.data import documentation
from lab.models import GPT
from lightning_topk import TopKConfig, attach
from lightning_topk.plan import markdown


def train(options: dict[str, Any], rank: int, world: int) -> list[dict[str, Any]]:
    """Trains one rank, first with HSDP and then with ours."""
    return [_train(options, rank, way) for way in ("HSDP", f"saving={options['saving']:g}")]


def _train(options: dict[str, Any], rank: int, way: str) -> dict[str, Any]:
    device, steps, data = options["device"], options["steps"], documentation()
    torch.manual_seed(0)
    model = GPT(options["width"], options["depth"]).to(device)
    mesh = init_device_mesh(device, (options["nodes"], options["ranks"]), mesh_dim_names=("replicate", "shard"))
    native = way == "HSDP"
    for block in model.blocks.layers:
        fully_shard(block, mesh=mesh if native else mesh["shard"])
    fully_shard(model, mesh=mesh if native else mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), options["lr"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    state = None
    if not native:
        given = {"saving": options["saving"], "optimizer": optimizer, "max_norm": 1.0}
        state = attach(model, process_group=mesh["replicate"], **given)
    drawn = torch.Generator().manual_seed(rank)
    for step in tqdm(range(steps), desc=way, unit="step", disable=rank > 0):
        if step == 3:  # connections and residuals exist by now
            begin, sent = time.perf_counter(), hosts.sent_bytes()
        chosen = torch.randint(len(data.labels), (options["batch"],), generator=drawn)
        optimizer.zero_grad()
        _loss(model, data.examples[chosen].to(device), data.labels[chosen].to(device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    dist.barrier()
    seconds, sent = (time.perf_counter() - begin) / (steps - 3), (hosts.sent_bytes() - sent) / (steps - 3)
    losses = []
    with torch.no_grad():
        for examples, labels in zip(data.held_examples.split(50), data.held_labels.split(50), strict=True):
            losses += [_loss(model, examples.to(device), labels.to(device)).item()] * len(labels)
    found = {"between nodes": way, "held-out loss": sum(losses) / len(losses), "ms a step": 1000 * seconds}
    if sent:
        found["kB that leave a node in a step"] = sent / 1000
    if state is not None:
        state.close()
    return found


def _loss(model: nn.Module, examples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(examples).flatten(0, 1), labels.flatten())


def main() -> None:
    """Trains both ways and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="steps, more than 3 (default: %(default)s)")
    parser.add_argument("--saving", type=float, default=50, help="how many times fewer bytes (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2, help="nodes (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks per node (default: %(default)s)")
    parser.add_argument("--rate", help="link rate of emulated hosts, such as 100mbit")
    parser.add_argument("--width", type=int, default=64, help="width of the states (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="blocks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="pieces of text per rank and step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="peak learning rate (default: %(default)s)")
    options = parser.parse_args()
    if options.steps <= 3:
        parser.error(f"--steps {options.steps}: the first 3 are not timed; take more.")
    world = options.nodes * options.ranks
    gpus = torch.cuda.device_count() >= world and not options.rate
    module = importlib.import_module(Path(__file__).stem)  # ranks import this file as a module
    try:
        TopKConfig(saving=options.saving)
        emulated = hosts.emulate(options.nodes, options.rate, options.ranks) if options.rate else None
        with emulated or nullcontext(hosts.local(world)) as group:
            given = {**vars(options), "device": "cuda" if gpus else "cpu"}
            rows = group.run(module.train, given, timeout=24 * 3600, shown=True)[0]
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    parameters = sum(parameter.numel() for parameter in GPT(options.width, options.depth).parameters())
    setting = f"{parameters:,} parameters, {options.nodes} nodes of {options.ranks} ranks, {options.steps} steps"
    print(f"{setting}\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
