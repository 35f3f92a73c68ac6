"""``bench hosts`` and ``bench train``: DDP steps with ours and with each peer.

``hosts`` times a model whose backward pass costs nothing, on emulated hosts; ``train`` times whole steps of a
torchvision model on random images: forward, backward, and a step of SGD.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import fmean, median_high
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from lab import hosts as emulated
from lab.bench.peers import BUCKETS, PEERS, prepared
from lab.report import Result
from lightning_topk.bench import loop
from lightning_topk.bench.command import Work
from lightning_topk.bench.peers import Peer
from lightning_topk.models import make_module
from lightning_topk.plan import link

Measured = dict[str, dict[str, Any]]
"""Results of :func:`measured` by peer."""


def timed(options: dict[str, Any], rank: int, world: int, known: Mapping[str, Peer] = PEERS) -> Measured:
    """Times one rank's steps of :class:`.Work` with each peer: the median, or the least if they only exchange.

    ``"no exchange"`` is a peer that exchanges nothing.
    """
    work, ddp, optimizer, timing = Work(**options["work"]), dict[str, Any](), None, dict[str, Any]()
    if work.params is None:
        timing |= {"reduced": median_high, "steps": options["steps"]}
        optimizer = partial(torch.optim.SGD, lr=0.01)
    else:
        timing |= {"reduced": min, "steps": 21, "seconds": options["seconds"]}
        ddp |= {"gradient_as_bucket_view": True, "init_sync": False}  # all ranks have the same weights

    def make(peer: Peer) -> loop.Contender:
        return loop.Contender(peer, *work.training(rank, torch.device("cpu")), optimizer, options["settings"], **ddp)

    return {peer: measured(make(known[peer]), **timing) for peer in options["peers"]}


def measured(
    contender: loop.Contender, reduced: Callable[[list[float]], float], steps: int, seconds: float = math.inf
) -> dict[str, Any]:
    """Times steps of a contender, and closes it; a collective.

    ``reduced`` reduces the times of all steps to one. After ``seconds`` no step starts, but for three.

    Returns:
        ``seconds`` of a step, of the slowest rank, and means over the steps: ``cpu``, seconds of this process, and
        ``sent``, bytes that left this host's emulated interface. For ours also ``hidden``, the fraction of the exchange
        that overlaps with backward; and bytes ``counted``, ``predicted``, and ``leaving`` the node.
    """
    contender.take(contender.peer.warmup)
    times, used, begin = list[float](), list[tuple[float, int]](), time.perf_counter()
    while len(times) < steps and (len(times) < 3 or loop.gather(time.perf_counter() - begin)[0] < seconds):
        dist.barrier()
        before, cpu = emulated.sent_bytes(), time.process_time()
        took = contender.take(1)
        dist.barrier()  # the others have sent, too
        used.append((time.process_time() - cpu, emulated.sent_bytes() - before))
        times.append(max(loop.gather(took)))
    found = {"seconds": reduced(times)}
    found["cpu"], found["sent"] = (fmean(each) for each in zip(*used, strict=True))
    if contender.state is not None:
        found["hidden"], plan = 1 - contender.watch(), contender.state.predicted()
        contender.take(1)
        counted = contender.state.report().bytes
        found |= {
            "counted": counted["uplink"] + counted["downlink"],
            "predicted": plan.sent,
            "leaving": plan.inter_node,
        }
        contender.state.close()
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
    options = {"work": {"params": numel}, "settings": settings, "seconds": seconds, "peers": ["no exchange", *chosen]}
    found = []
    for rate in tqdm(rates, desc="hosts", leave=False):
        with emulated.emulate(hosts, rate, ranks) as group:
            found.append(worst(group.run(timed, options, timeout=3600)))
        enter(result, rate, found[-1])
    curves = result.panel("seconds of a step", "bit/s", xlog=True, ylog=True)
    curves |= {peer: (bits, [each[peer]["seconds"] for each in found]) for peer in found[0]}
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
        make_module(model)
    where = rate or "loopback"
    result = Result(
        "train",
        "a whole training step",
        f"{model} of torchvision, {workers} {'emulated hosts' if rate else 'processes'} ({where}), {batch_size} images "
        f"of {image_size} pixels a worker and step, SGD, {words}; {BUCKETS}; median of {steps} steps.",
    )
    work = {"model": model, "input": (3, image_size, image_size), "batch_size": batch_size}
    options = {"work": work, "settings": settings, "steps": steps, "peers": chosen}
    with emulated.emulate(workers, rate) if rate else nullcontext(emulated.local(workers)) as group:
        found = worst(group.run(timed, options, timeout=3600))
    enter(result, where, found)
    return result
