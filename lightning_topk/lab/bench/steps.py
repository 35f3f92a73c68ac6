"""``bench step`` and ``bench hosts``: DDP steps that are exchanges and nothing else, with ours and with each peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tqdm import tqdm

from lightning_topk.config import check_name
from lightning_topk.lab import hosts as emulated
from lightning_topk.lab.bench import ddp
from lightning_topk.lab.bench.peers import ON_NODES, PEERS, checked, named
from lightning_topk.lab.report import Panel, Result

TARGETS = {"100mbit": 60, "1gbit": 10, "10gbit": 3}
"""How many times faster than dense a step shall be, with 25 million parameters, 4 hosts and a ratio of 0.001."""


def step(
    workers: int = 2,
    numel: int = 25_000_000,
    ratio: float | None = None,
    saving: float | None = None,
    wire: str | None = None,
    bucket_cap_mb: float = 128,
    seconds: float = 10,
    peers: Sequence[str] = (),
) -> Result:
    """Times DDP steps with each of the peers, as processes on this host: no slow link.

    Args:
        workers: Processes.
        numel: Parameters of the model.
        ratio: Kept fraction.
        saving: How many times fewer bytes than all-reduce, instead. Default: 50.
        wire: Format of the values.
        bucket_cap_mb: Size of DDP's buckets, MiB. By default the model is one bucket.
        seconds: Time for each peer, about.
        peers: What to time. Default: all that make a difference.

    Raises:
        ValueError: A peer is unknown, there is one rank only, or a setting is impossible.
    """
    settings = checked(workers, {"ratio": ratio, "saving": saving, "wire": wire})
    result = Result("step", "what compression costs where links cost nothing", f"{workers} processes on this machine")
    options = {"numel": numel, "settings": settings, "bucket_cap_mb": bucket_cap_mb, "seconds": seconds}
    _time(result, {"loopback": nullcontext(emulated.local(workers))}, 1, options, peers)
    return result


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
        raise RuntimeError("Network namespaces need root, and ip and tc of iproute2. Without them: bench step.")
    claim = "a step is faster than with what a user would pick instead, at any speed of link"
    result = Result("hosts", claim, f"{hosts} emulated hosts of {ranks} ranks (network namespaces, tbf)")
    options = {"numel": numel, "settings": settings, "bucket_cap_mb": bucket_cap_mb, "seconds": seconds}
    groups = {rate: emulated.emulate(hosts, rate, ranks) for rate in rates}
    published = (numel, ratio, hosts, ranks) == (25_000_000, 0.001, 4, 1)
    panel = Panel("seconds of a step", "bit/s", xlog=True, ylog=True)
    timed = _time(result, groups, ranks, options, peers, published)
    panel.curves = {peer: (bits, [found[peer]["seconds"] for found in timed]) for peer in timed[0]}
    result.panels.append(panel)
    return result


def _time(
    result: Result,
    groups: Mapping[str, AbstractContextManager[emulated.Hosts]],
    ranks: int,
    options: dict[str, Any],
    peers: Sequence[str],
    published: bool = False,
) -> list[dict[str, dict[str, Any]]]:
    """Times the peers, and judges them, on each of the groups, which are known by their links."""
    peers = peers or [peer for peer in PEERS if ranks > 1 or peer not in ON_NODES]
    for peer in peers:
        check_name("peer", peer, PEERS)
    result.setting += (
        f", gloo, one thread each; a DDP model of {options['numel']:,} float32 parameters whose backward pass costs "
        f"nothing, so nothing hides an exchange; {named(options['settings'])}, buckets of {options['bucket_cap_mb']} "
        "MiB that gradients are views of; least of several steps, the slowest rank's."
    )
    timed = []
    for link, group in tqdm(groups.items(), desc=result.name, leave=False):
        with group as entered:
            measured = entered.run(ddp.noise, {**options, "peers": ["no exchange", *peers]}, timeout=3600)
        timed.append(ddp.worst(measured))
        judge(result, link, timed[-1], published)
    return timed


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
