"""One rank of timed DDP steps: ``python -m lightning_topk.lab.bench.ddp RANK WORLD ADDRESS:PORT OPTIONS``.

OPTIONS is JSON: ``numel``, ``ratio``, ``peers``, ``bucket_cap_mb``, ``seconds`` (a peer's time, about). Prints a line of JSON: for each
peer its seconds of a step, CPU seconds, and bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.ddp import TopKState
from lightning_topk.lab.bench.peers import ONE_BUCKET, PEERS

COLUMNS = 1024
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
WARMUPS = {"DDP": 1, "fp16 hook": 1, "naive top-k": 1}
WARMUP = 4
"""Steps that are not counted: DDP regroups its buckets after the first, PowerSGD starts with the third, ours may measure, residuals
fill up."""


class _Given(torch.autograd.Function):
    """Zero, with a given gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class Noise(nn.Module):
    """Matrices whose gradients are noise: a backward pass that costs next to nothing, so nothing hides an exchange.

    Args:
        numel: Elements of all.
        seed: Of the noise.
    """

    def __init__(self, numel: int, seed: int) -> None:
        super().__init__()
        rows, rest = divmod(numel, COLUMNS)
        shapes = [(min(COLUMNS, rows - row), COLUMNS) for row in range(0, rows, COLUMNS)]
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in (*shapes, *([(rest,)] if rest else []))])
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [torch.randn(weight.shape, generator=generator) for weight in self.weights]

    def forward(self) -> Tensor:
        """A sum of zeros."""
        pairs = zip(self.weights, self.gradients, strict=True)
        return torch.stack([_Given.apply(*pair) for pair in pairs]).sum()


def timed(peer: str, options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Times one peer.

    Args:
        peer: A key of :data:`lightning_topk.lab.bench.peers.PEERS`, or ``"no exchange"``.
        options: See above.
        rank: This rank.
        world: Ranks.
    """
    warmup = WARMUPS.get(peer, WARMUP)
    cap = 10_000 if peer in ONE_BUCKET else options["bucket_cap_mb"]
    net = Noise(options["numel"], rank)  # its weights are the same everywhere: no need to send them
    model = DistributedDataParallel(net, bucket_cap_mb=cap, gradient_as_bucket_view=True, init_sync=False)
    model.require_backward_grad_sync = peer != "no exchange"
    state = PEERS[peer](model, options["ratio"]) if peer in PEERS else None
    times: list[float] = []
    cpu, begin, sent = 0.0, time.perf_counter(), 0
    go_on, reports = torch.ones(()), []
    while go_on:
        count = len(times)
        if state is not None:
            state.timing = True
        model.zero_grad()
        dist.barrier()
        wire, used, start = _sent(), time.process_time(), time.perf_counter()
        model().backward()
        times.append(time.perf_counter() - start)
        dist.barrier()
        if count >= warmup:
            cpu, sent = cpu + time.process_time() - used, sent + _sent() - wire
        if state is not None:
            reports.append(state.report())
        spent = time.perf_counter() - begin
        go_on.fill_(count < warmup or (spent < options["seconds"] and count < warmup + 20))
        dist.broadcast(go_on, 0)
    counted = len(times) - warmup
    found = {"seconds": min(times[warmup:]), "cpu": cpu / counted, "sent": sent / counted, "steps": counted}
    if state is not None:
        assert isinstance(state, TopKState)
        last = reports[warmup:]
        found["exchange"] = min(report.seconds for report in last)
        found["hidden"] = 1 - sum(r.exposed_seconds for r in last) / sum(r.seconds for r in last)
        found["counted"] = sum(r.bytes["uplink"] + r.bytes["downlink"] for r in last) / counted
        plan = state.predicted()
        found["predicted"], found["buckets"] = plan.uplink + plan.downlink, len(state.residuals.buckets)
        found["leaving"] = plan.inter_node
        state.close()
    return found


def _sent() -> int:
    """Bytes that left this host's interface so far, of all its ranks; zero where hosts are not emulated."""
    return int(COUNTER.read_text()) if os.environ.get("GLOO_SOCKET_IFNAME") == "eth0" else 0


def main() -> None:
    """Times the peers one after the other."""
    rank, world, address, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{address}", rank=rank, world_size=world, timeout=timedelta(seconds=600))
    print(json.dumps({peer: timed(peer, options, rank, world) for peer in options["peers"]}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
