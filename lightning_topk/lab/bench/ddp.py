"""One rank's timed DDP steps, with each peer: of a model whose backward pass costs nothing, or of any model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_topk.lab.bench.peers import ONE_BUCKET, PEERS, Settings

COLUMNS = 1024
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
WARMUP = 4
"""Steps that are not counted: DDP regroups its buckets after the first, PowerSGD starts with the third, ours may
measure, residuals fill up."""
WARMUPS = {"DDP": 1, "fp16 hook": 1, "naive top-k": 1}
"""Where fewer do. A step of noise is a whole exchange, and may take seconds."""


class _Given(torch.autograd.Function):
    """Zero, with a given gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class Noise(nn.Module):
    """Matrices whose gradients are noise: a backward pass that costs next to nothing, so nothing hides an exchange."""

    def __init__(self, numel: int, seed: int) -> None:
        super().__init__()
        rows, rest = divmod(numel, COLUMNS)
        shapes = [(min(COLUMNS, rows - row), COLUMNS) for row in range(0, rows, COLUMNS)]
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in (*shapes, *([(rest,)] if rest else []))])
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [torch.randn(weight.shape, generator=generator) for weight in self.weights]

    @override
    def forward(self) -> Tensor:
        """A sum of zeros."""
        pairs = zip(self.weights, self.gradients, strict=True)
        return torch.stack([_Given.apply(*pair) for pair in pairs]).sum()


def noise(options: dict[str, Any], rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Times steps of :class:`Noise`, which are exchanges and nothing else: :func:`measured` for each peer."""
    found = {}
    for peer in options["peers"]:
        net = Noise(options["numel"], rank)  # its weights are the same everywhere: no need to send them
        cap = bucket_cap(peer, options["bucket_cap_mb"])
        model = DistributedDataParallel(net, bucket_cap_mb=cap, gradient_as_bucket_view=True, init_sync=False)
        model.require_backward_grad_sync = peer != "no exchange"

        def step(model: DistributedDataParallel = model) -> None:
            model().backward()

        warmup = WARMUPS.get(peer, WARMUP)
        found[peer] = measured(peer, model, options["settings"], step, min, warmup, 1, 21, options["seconds"])
    return found


def bucket_cap(peer: str, megabytes: float) -> float:
    """The size of a peer's buckets, MiB."""
    return 10_000 if peer in ONE_BUCKET else megabytes


def measured(
    peer: str,
    model: DistributedDataParallel,
    settings: Settings,
    step: Callable[[], None],
    reduced: Callable[[list[float]], float],
    warmup: int,
    least: int,
    most: int,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Times steps of a wrapped model; a collective.

    Args:
        peer: A key of :data:`lightning_topk.lab.bench.peers.PEERS`, or ``"no exchange"``.
        model: The model.
        settings: For ours.
        step: Takes one step; gradients are cleared before.
        reduced: The time of a step from those of all steps, such as ``min``.
        warmup: Steps that are not counted.
        least: Fewest steps that are.
        most: Most steps that are.
        seconds: Time after which no further step begins.

    Returns:
        ``seconds`` of a step, and means over the steps: ``cpu``, seconds of this process, and ``sent``, bytes that left
        this host's emulated interface. Of ours also ``exchange``, its seconds; ``hidden``, the share of it beside the
        backward pass; ``counted`` bytes and ``predicted`` ones, and those ``leaving`` the node.
    """
    state = PEERS[peer](model, settings) if peer in PEERS else None
    times: list[float] = []
    cpu, sent, begin = 0.0, 0, time.perf_counter()
    go_on, reports = torch.ones(()), []
    while go_on:
        if state is not None:
            state.timing = True
        model.zero_grad()
        dist.barrier()
        wire, used, start = sent_bytes(), time.process_time(), time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        dist.barrier()
        counted = len(times) - warmup
        if counted > 0:
            cpu, sent = cpu + time.process_time() - used, sent + sent_bytes() - wire
        if state is not None:
            reports.append(state.report())
        go_on.fill_(counted < least or (counted < most and time.perf_counter() - begin < seconds))
        dist.broadcast(go_on, 0)
    found = {"seconds": reduced(times[warmup:]), "cpu": cpu / counted, "sent": sent / counted}
    if state is not None:
        last, plan = reports[warmup:], state.predicted()
        found["exchange"] = min(report.seconds for report in last)
        found["hidden"] = 1 - sum(r.exposed_seconds for r in last) / max(sum(r.seconds for r in last), 1e-9)
        found["counted"] = sum(r.bytes["uplink"] + r.bytes["downlink"] for r in last) / counted
        found |= {"predicted": plan.uplink + plan.downlink, "leaving": plan.inter_node}
        state.close()
    return found


def worst(ranks: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The most that any rank measured, but the least hidden share; for each peer."""
    return {
        peer: {key: (min if key == "hidden" else max)(rank[peer][key] for rank in ranks) for key in values}
        for peer, values in ranks[0].items()
    }


def sent_bytes() -> int:
    """Bytes that left this host's interface so far, of all its ranks; zero where hosts are not emulated."""
    return int(COUNTER.read_text()) if os.environ.get("GLOO_SOCKET_IFNAME") == "eth0" else 0
