"""``bench hosts``: DDP steps that are exchanges and nothing else, with ours and with each peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from lightning_topk.config import check_name
from lightning_topk.lab import hosts as emulated
from lightning_topk.lab.bench import ddp
from lightning_topk.lab.bench.peers import ON_NODES, PEERS, checked, named
from lightning_topk.lab.report import Panel, Result

TARGETS = {"100mbit": 60, "1gbit": 10, "10gbit": 3}
"""How many times faster than dense a step shall be, with 25 million parameters, 4 hosts and a ratio of 0.001."""


def hosts(
    hosts: int = 4,
    ranks: int = 1,
    rates: Sequence[str] = ("100mbit", "1gbit", "10gbit"),
    numel: int = 25_000_000,
    ratio: float | None = None,
    saving: float | None = None,
    wire: str | None = None,
    bucket_cap_mb: float = 128,
    seconds: float = 10,
    peers: Sequence[str] = (),
) -> Result:
    """Times DDP steps with each of the peers on emulated hosts, and counts bytes at their interfaces.

    Args:
        hosts: Number of hosts.
        ranks: Processes on each host.
        rates: Rates of their links, as tc writes them.
        numel: Parameters of the model.
        ratio: Kept fraction.
        saving: How many times fewer bytes than all-reduce, instead. Default: 50.
        wire: Format of the values.
        bucket_cap_mb: Size of DDP's buckets, MiB. By default the model is one bucket.
        seconds: Time for each peer, about; slow ones take what five steps take.
        peers: What to time. Default: all that make a difference.

    Raises:
        RuntimeError: Hosts cannot be emulated here.
        ValueError: A rate or a peer is unknown, there is one rank only, or a setting is impossible.
    """
    settings = checked(hosts * ranks, {"ratio": ratio, "saving": saving, "wire": wire})
    bits = [emulated.bits_per_second(rate) for rate in rates]
    if not emulated.available():
        raise RuntimeError("Network namespaces need root, and ip and tc of iproute2. Without them: bench train.")
    peers = peers or [peer for peer in PEERS if ranks > 1 or peer not in ON_NODES]
    for peer in peers:
        check_name("peer", peer, PEERS)
    result = Result(
        "hosts",
        "a step is faster than with what a user would pick instead, at any speed of link",
        f"{hosts} emulated hosts of {ranks} ranks (network namespaces, tbf), gloo, one thread each; a DDP model of "
        f"{numel:,} float32 parameters whose backward pass costs nothing, so nothing hides an exchange; "
        f"{named(settings)}, buckets of {bucket_cap_mb} MiB that gradients are views of; least of several steps, the "
        "slowest rank's.",
    )
    options = {"numel": numel, "settings": settings, "bucket_cap_mb": bucket_cap_mb, "seconds": seconds}
    published = (numel, ratio, hosts, ranks) == (25_000_000, 0.001, 4, 1)
    timed = []
    for rate in tqdm(rates, desc="hosts", leave=False):
        with emulated.emulate(hosts, rate, ranks) as group:
            measured = group.run(ddp.noise, {**options, "peers": ["no exchange", *peers]}, timeout=3600)
        timed.append(ddp.worst(measured))
        judge(result, rate, timed[-1], published)
    panel = Panel("seconds of a step", "bit/s", xlog=True, ylog=True)
    panel.curves = {peer: (bits, [found[peer]["seconds"] for found in timed]) for peer in timed[0]}
    result.panels.append(panel)
    return result


def judge(result: Result, link: str, found: dict[str, dict[str, Any]], published: bool = False) -> None:
    """Enters what was measured on one kind of link, and who is faster.

    Args:
        result: Where to.
        link: The link's name.
        found: What :func:`lightning_topk.lab.bench.ddp.worst` returned. Bytes are judged if it has ``"no exchange"``.
        published: Whether the setting is that of the :data:`TARGETS`.
    """
    idle, ours = found.get("no exchange"), found.get("ours")
    result.tables[link] = [
        {
            "peer": peer,
            "ms a step": 1000 * values["seconds"],
            "over ours": values["seconds"] / ours["seconds"] if ours else "",
            "CPU ms a rank": 1000 * values["cpu"],
            **({"of them exchange": 1000 * (values["cpu"] - idle["cpu"])} if idle else {}),
            "exchange ms": 1000 * values["exchange"] if "exchange" in values else "",
            "bytes a host sends": f"{values['sent']:,.0f}" if values["sent"] else "",
            "hidden": f"{values['hidden']:.0%}" if "hidden" in values else "",
        }
        for peer, values in found.items()
    ]
    if not ours:
        return
    for peer, values in found.items():
        if not peer.startswith(("ours", "no exchange")):
            target = TARGETS.get(link, 1) if published and peer == "DDP" else 1
            seen = values["seconds"] / ours["seconds"]
            result.check(f"a step faster than with {peer}, {link}", f">= {target}x", f"{seen:.2f}x", seen >= target)
    if not idle:
        return
    if published:
        seen = 1000 * (ours["cpu"] - idle["cpu"])
        result.check(f"CPU time of the exchange a rank, {link}", "<= 30 ms", f"{seen:.0f} ms", seen <= 30)
    for peer, values in found.items():
        if "predicted" in values:
            _judge_bytes(result, f"{peer}, {link}", values, idle["sent"])


def _judge_bytes(result: Result, where: str, values: dict[str, Any], idle: float) -> None:
    """Holds the bytes of ours that were counted against those predicted, and against those that left the interface."""
    counted, predicted, leaving = values["counted"], values["predicted"], values["leaving"]
    statement = f"bytes counted are bytes predicted, {where}"
    result.check(statement, f"{predicted:,}", f"{counted:,.0f}", counted == predicted)
    if values["sent"] and leaving:
        # Headers of gloo and TCP, and acknowledgements of what comes in: the more, the more and smaller the buckets.
        more = values["sent"] - idle - leaving
        near = 0 <= more <= 0.15 * leaving + 8192
        statement = f"the interface counts little more, {where}"
        result.check(statement, "<= 1.15 x + 8 KiB", f"{1 + more / leaving:.3f} x", near)
