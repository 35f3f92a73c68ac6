"""``bench hosts`` and ``bench train``: DDP steps with ours and with each peer.

``hosts`` times a model whose backward pass costs nothing, on emulated hosts; ``train`` times whole steps of a
torchvision model on random images: forward, backward, and a step of SGD.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import fmean, median_high
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from lab import hosts as emulated
from lab.bench.peers import BUCKETS, PEERS, prepared
from lab.report import Result
from lightning_topk.bench import loop
from lightning_topk.bench.peers import Noise, Register
from lightning_topk.plan import link, make_module

Measured = dict[str, dict[str, Any]]
"""Results of :func:`measured` by peer."""


def noise(options: dict[str, Any], rank: int, world: int, known: Mapping[str, Register] = PEERS) -> Measured:
    """Times one rank's steps of :class:`.Noise` with each peer, which only exchange; takes the least.

    ``"no exchange"`` is a peer that exchanges nothing.
    """

    def make(peer: str) -> loop.Contender:
        net = Noise(options["numel"], rank)  # all ranks have the same weights: no need to send them
        ddp: dict[str, Any] = {"gradient_as_bucket_view": True, "init_sync": False}
        return loop.Contender(peer, known[peer], net, net.backward, settings=options["settings"], **ddp)

    return {peer: measured(partial(make, peer), min, 21, options["seconds"]) for peer in options["peers"]}


def images(options: dict[str, Any], rank: int, world: int) -> Measured:
    """Times one rank's steps of a torchvision model with each peer; takes the median."""
    examples = torch.randn(options["batch"], 3, options["size"], options["size"])
    labels = torch.randint(0, 1000, (options["batch"],))

    def backward(model: nn.Module) -> None:
        nn.functional.cross_entropy(model(examples), labels).backward()

    def make(peer: str) -> loop.Contender:
        net, optimizer = make_module(options["model"]), partial(torch.optim.SGD, lr=0.01)
        return loop.Contender(peer, PEERS[peer], net, backward, optimizer, options["settings"])

    return {peer: measured(partial(make, peer), median_high, options["steps"]) for peer in options["peers"]}


def measured(
    make: Callable[[], loop.Contender], reduced: Callable[[list[float]], float], steps: int, seconds: float = math.inf
) -> dict[str, Any]:
    """Times steps of a contender, which is closed at the end; a collective.

    ``reduced`` reduces the times of all steps to one. After ``seconds`` no step starts, but for a few.

    Returns:
        ``seconds`` of a step, and means over the steps: ``cpu``, seconds of this process, and ``sent``, bytes that left
        this host's emulated interface. For ours also ``hidden``, the fraction of the exchange that overlaps with
        backward; and bytes ``counted``, ``predicted``, and ``leaving`` the node.

    Raises:
        RuntimeError: The peer failed.
    """
    used: list[tuple[float, int]] = []

    @contextmanager
    def around() -> Iterator[None]:
        sent, cpu = emulated.sent_bytes(), time.process_time()
        yield
        used.append((time.process_time() - cpu, emulated.sent_bytes() - sent))

    ranks, failed = loop.Ranks(), dict[str, str]()
    contenders = loop.made({"peer": make}, ranks, failed)
    contenders = loop.measure(contenders, ranks, failed, steps, seconds, around, longest=1)
    if failed:
        raise RuntimeError(failed["peer"])
    (contender,) = contenders
    cpu, sent = (fmean(each) for each in zip(*used, strict=True))
    found = {"seconds": reduced(contender.seconds), "cpu": cpu, "sent": sent}
    if contender.state is not None:
        last, plan = contender.watch(), contender.state.predicted()
        found["hidden"] = loop.hidden(last)
        found["counted"] = fmean(r.bytes["uplink"] + r.bytes["downlink"] for r in last)
        found |= {"predicted": plan.sent, "leaving": plan.inter_node}
    contender.close()
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
        make_module(model)
    where = rate or "loopback"
    result = Result(
        "train",
        "a whole training step",
        f"{model} of torchvision, {workers} {'emulated hosts' if rate else 'processes'} ({where}), {batch_size} images "
        f"of {image_size} pixels a worker and step, SGD, {words}; {BUCKETS}; median of {steps} steps.",
    )
    options = {"model": model, "settings": settings, "batch": batch_size, "size": image_size, "steps": steps}
    with emulated.emulate(workers, rate) if rate else nullcontext(emulated.local(workers)) as group:
        found = worst(group.run(images, {**options, "peers": chosen}, timeout=3600))
    enter(result, where, found)
    return result
