"""``bench hosts`` and ``bench train``: DDP steps with ours and with each peer.

``hosts`` times a model whose backward pass costs nothing, on emulated hosts; ``train`` times whole steps of a
torchvision model on random images: forward, backward, and a step of SGD.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from typing_extensions import override

from lab import hosts as emulated
from lab.bench.peers import BUCKETS, PEERS, Register, bucket_cap, prepared
from lab.report import Result
from lightning_topk.adapters.ddp import TopKState
from lightning_topk.plan import link, torchvision_model

COLUMNS = 1024
WARMUP = 4
"""Untimed steps: DDP regroups its buckets after the first, PowerSGD starts with the third, ours may measure, residuals
fill up."""
WARMUPS = {"DDP": 1, "fp16 hook": 1, "naive top-k": 1}
"""Peers that need fewer. A step of :func:`noise` is a whole exchange, and may take seconds."""
Measured = dict[str, dict[str, Any]]
"""Results of :func:`measured` by peer."""


class Noise(nn.Module):
    """Matrices whose gradients are noise: a backward pass that costs next to nothing, so nothing hides an exchange.

    Backward starts at the weights, with ``gradients``.
    """

    def __init__(self, numel: int, seed: int) -> None:
        super().__init__()
        rows, rest = divmod(numel, COLUMNS)
        shapes = [(min(COLUMNS, rows - row), COLUMNS) for row in range(0, rows, COLUMNS)]
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in (*shapes, *([(rest,)] if rest else []))])
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [torch.randn(weight.shape, generator=generator) for weight in self.weights]

    @override
    def forward(self) -> list[Tensor]:
        """The weights."""
        return [*self.weights]


def noise(options: dict[str, Any], rank: int, world: int, known: Mapping[str, Register] = PEERS) -> Measured:
    """Times one rank's steps of :class:`Noise` with each peer, which only exchange; takes the least.

    ``"no exchange"`` is a peer that exchanges nothing.
    """
    found = {}
    for peer in options["peers"]:
        net = Noise(options["numel"], rank)  # all ranks have the same weights: no need to send them
        model = DistributedDataParallel(
            net, bucket_cap_mb=bucket_cap(peer), gradient_as_bucket_view=True, init_sync=False
        )
        model.require_backward_grad_sync = peer != "no exchange"

        def step(model: DistributedDataParallel = model, net: Noise = net) -> None:
            torch.autograd.backward(model(), net.gradients)

        state = known.get(peer, PEERS["DDP"])(model, options["settings"])
        found[peer] = measured(model, state, step, min, WARMUPS.get(peer, WARMUP), 21, options["seconds"])
    return found


def images(options: dict[str, Any], rank: int, world: int) -> Measured:
    """Times one rank's steps of a torchvision model with each peer; takes the median."""
    found, counted = {}, options["steps"] - WARMUP
    examples = torch.randn(options["batch"], 3, options["size"], options["size"])
    labels = torch.randint(0, 1000, (options["batch"],))
    for peer in options["peers"]:
        model = DistributedDataParallel(torchvision_model(options["model"]), bucket_cap_mb=bucket_cap(peer))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(model: DistributedDataParallel = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            nn.functional.cross_entropy(model(examples), labels).backward()
            optimizer.step()

        found[peer] = measured(model, PEERS[peer](model, options["settings"]), step, median_high, WARMUP, counted)
    return found


def measured(
    model: DistributedDataParallel,
    state: TopKState | None,
    step: Callable[[], None],
    reduced: Callable[[list[float]], float],
    warmup: int,
    most: int,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Times steps of a wrapped model after ``warmup`` untimed ones; a collective.

    ``reduced`` reduces the times of all steps to one; ``state`` is ours, and is closed at the end. At least one step
    and at most ``most`` are timed; none starts after ``seconds``.

    Returns:
        ``seconds`` of a step, and means over the steps: ``cpu``, seconds of this process, and ``sent``, bytes that left
        this host's emulated interface. For ours also ``hidden``, the fraction of the exchange that overlaps with
        backward; and bytes ``counted``, ``predicted``, and ``leaving`` the node.
    """
    times: list[float] = []
    cpu, sent, go_on, reports, begin = 0.0, 0, torch.ones(()), [], time.perf_counter()
    while go_on:
        if state is not None:
            state.telemetry.timing = True
        model.zero_grad()
        dist.barrier()
        wire, used, start = emulated.sent_bytes(), time.process_time(), time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        dist.barrier()
        counted = len(times) - warmup
        if counted > 0:
            cpu, sent = cpu + time.process_time() - used, sent + emulated.sent_bytes() - wire
        if state is not None:
            reports.append(state.report())
        go_on.fill_(counted < 1 or (counted < most and time.perf_counter() - begin < seconds))
        dist.broadcast(go_on, 0)
    found = {"seconds": reduced(times[warmup:]), "cpu": cpu / counted, "sent": sent / counted}
    if state is not None:
        last, plan = reports[warmup:], state.predicted()
        found["hidden"] = 1 - sum(r.times[1] for r in last) / max(sum(r.times[0] for r in last), 1e-9)
        found["counted"] = sum(r.bytes["uplink"] + r.bytes["downlink"] for r in last) / counted
        found |= {"predicted": plan.sent, "leaving": plan.inter_node}
        state.close()
    return found


def worst(ranks: list[Measured]) -> Measured:
    """The largest values over the ranks for each peer, but the least hidden share."""
    return {
        peer: {key: (min if key == "hidden" else max)(rank[peer][key] for rank in ranks) for key in values}
        for peer, values in ranks[0].items()
    }


def enter(result: Result, link: str, found: Measured) -> None:
    """Adds the results of :func:`worst` on one link: times, and bytes if ``"no exchange"`` is among the peers."""
    idle, ours = found.get("no exchange"), found.get("ours")
    rows = result.tables[link] = []
    for peer, values in found.items():
        times = values["seconds"] / ours["seconds"] if ours else math.nan
        row = {"peer": peer, "ms a step": 1000 * values["seconds"], "over ours": times if ours else ""}
        row["CPU ms a rank"] = 1000 * values["cpu"]
        row["bytes a host sends"] = f"{values['sent']:,.0f}" if values["sent"] else ""
        rows.append(row | {"hidden": f"{values['hidden']:.0%}" if "hidden" in values else ""})
        if ours and not peer.startswith(("ours", "no exchange")):
            result.check(f"a step faster than with {peer}, {link}", ">= 1x", f"{times:.2f}x", times >= 1)
        if idle and "predicted" in values:
            counted, predicted, leaving = values["counted"], values["predicted"], values["leaving"]
            statement = f"bytes counted are bytes predicted, {peer}, {link}"
            result.check(statement, f"{predicted:,}", f"{counted:,.0f}", counted == predicted)
            if values["sent"] and leaving:
                more = values["sent"] - idle["sent"] - leaving  # headers, and acknowledgements of received bytes
                near, measured = 0 <= more <= 0.15 * leaving + 8192, f"{1 + more / leaving:.3f} x"
                result.check(f"the interface counts little more, {peer}, {link}", "<= 1.15 x + 8 KiB", measured, near)


def hosts(
    hosts: int = 4,
    ranks: int = 1,
    rates: Sequence[str] = ("100mbit", "1gbit", "10gbit"),
    numel: int = 25_000_000,
    ratio: float | None = None,
    saving: float | None = None,
    seconds: float = 10,
    peers: Sequence[str] = (),
) -> Result:
    """Times DDP steps with each of the peers on emulated hosts, and counts bytes at their interfaces."""
    settings, chosen, words = prepared(hosts * ranks, ratio, saving, peers, ranks > 1)
    bits = [link(rate)[0] for rate in rates]
    result = Result(
        "hosts",
        "a step is faster than with what a user would pick instead, at any speed of link",
        f"{hosts} emulated hosts of {ranks} ranks (network namespaces, tbf), gloo, one thread each; a DDP model of "
        f"{numel:,} float32 parameters whose backward pass costs nothing, so nothing hides an exchange; {words}; "
        f"{BUCKETS}; gradients are views of buckets; least of several steps, the slowest rank's.",
    )
    options = {"numel": numel, "settings": settings, "seconds": seconds, "peers": ["no exchange", *chosen]}
    timed = []
    for rate in tqdm(rates, desc="hosts", leave=False):
        with emulated.emulate(hosts, rate, ranks) as group:
            timed.append(worst(group.run(noise, options, timeout=3600)))
        enter(result, rate, timed[-1])
    curves = result.panel("seconds of a step", "bit/s", xlog=True, ylog=True)
    curves |= {peer: (bits, [found[peer]["seconds"] for found in timed]) for peer in timed[0]}
    return result


def train(
    model: str = "resnet18",
    workers: int = 2,
    rate: str | None = None,
    ratio: float | None = None,
    saving: float | None = None,
    batch_size: int = 4,
    image_size: int = 64,
    steps: int = 12,
    peers: Sequence[str] = (),
) -> Result:
    """Times whole training steps of a torchvision model, on this host or on emulated ones."""
    settings, chosen, words = prepared(workers, ratio, saving, peers)
    with torch.device("meta"):
        torchvision_model(model)
    if steps <= WARMUP:
        raise ValueError(f"steps={steps}: the first {WARMUP} are not timed; take more.")
    where = rate or "loopback"
    result = Result(
        "train",
        "a whole training step",
        f"{model} of torchvision, {workers} {'emulated hosts' if rate else 'processes'} ({where}), {batch_size} images "
        f"of {image_size} pixels a worker and step, SGD, {words}; {BUCKETS}; median of {steps - WARMUP} steps.",
    )
    options = {"model": model, "settings": settings, "batch": batch_size, "size": image_size, "steps": steps}
    with emulated.emulate(workers, rate) if rate else nullcontext(emulated.local(workers)) as group:
        found = worst(group.run(images, {**options, "peers": chosen}, timeout=3600))
    enter(result, where, found)
    return result
