"""Steps of DDP on emulated hosts, with ours and with each peer; bytes as the interfaces count them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from lightning_topk.config import check_name
from lightning_topk.lab import hosts as emulated
from lightning_topk.lab.bench.peers import ON_NODES, PEERS
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Check, Result

TARGETS = {"100mbit": 60, "1gbit": 10, "10gbit": 3}
"""How many times faster than dense a step shall be, at 25 million parameters, 4 hosts and a ratio of 0.001."""


def run(
    hosts: int = 4,
    ranks: int = 1,
    rates: Sequence[str] = ("100mbit", "1gbit", "10gbit"),
    numel: int = 25_000_000,
    ratio: float = 0.001,
    bucket_cap_mb: float = 128,
    seconds: float = 10,
    peers: Sequence[str] | None = None,
) -> Result:
    """Times them.

    Args:
        hosts: How many.
        ranks: On each host.
        rates: Of their links, one after the other; as tc writes them.
        numel: Parameters of the model.
        ratio: Kept fraction.
        bucket_cap_mb: DDP's. By default the model is one bucket: there is no backward to hide behind, so latency is paid once.
        seconds: Time for each peer, about; slow ones take what five steps take.
        peers: Which of :data:`lightning_topk.lab.bench.peers.PEERS`. Default: all that make a difference.

    Raises:
        RuntimeError: Hosts cannot be emulated here.
        ValueError: A rate or a peer is unknown.
    """
    peers = peers or [peer for peer in PEERS if ranks > 1 or peer not in ON_NODES]
    check_peers(peers)
    for rate in rates:
        emulated.bits_per_second(rate)
    if not emulated.available():
        raise RuntimeError(
            "bench hosts needs root, and ip and tc of iproute2, to make network namespaces. Without them: bench step."
        )
    result = Result(
        "hosts",
        "a step is faster than with what a user would pick instead, at any speed of link",
        f"{hosts} emulated hosts of {ranks} ranks (network namespaces, tbf) on this machine's cores, gloo, one thread each; a DDP model of {numel:,} "
        f"float32 parameters whose backward is as good as free, so little can hide an exchange; ratio {ratio}, buckets of "
        f"{bucket_cap_mb} MiB that gradients are views of; least of several steps, the slowest rank's.",
    )
    panel = Panel("seconds of a step", "bit/s", {peer: ([], []) for peer in peers}, xlog=True, ylog=True)
    for rate in tqdm(rates, desc="hosts", leave=False):
        with emulated.emulate(hosts, rate, ranks) as group:
            found = steps(group, numel, ratio, bucket_cap_mb, seconds, peers)
        judge(result, rate, found, (numel, ratio, hosts, ranks) == (25_000_000, 0.001, 4, 1))
        for peer in peers:
            x, y = panel.curves[peer]
            panel.curves[peer] = ([*x, emulated.bits_per_second(rate)], [*y, found[peer]["seconds"]])
    result.panels.append(panel)
    return result


def check_peers(peers: Sequence[str]) -> None:
    """Refuses peers that do not exist.

    Raises:
        ValueError: One of them is unknown.
    """
    for peer in peers:
        check_name("peer", peer, PEERS)


def steps(
    group: emulated.Hosts, numel: int, ratio: float, bucket_cap_mb: float, seconds: float, peers: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """What :mod:`lightning_topk.lab.bench.ddp` measures for each peer: the most of any rank, but the least hidden share."""
    options = {"numel": numel, "ratio": ratio, "bucket_cap_mb": bucket_cap_mb, "seconds": seconds}
    options["peers"] = ["no exchange", *peers]  # type: ignore[assignment]
    outputs = group.run("lightning_topk.lab.bench.ddp", json.dumps(options), timeout=3600)
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        peer: {key: (min if key == "hidden" else max)(rank[peer][key] for rank in ranks) for key in values}
        for peer, values in ranks[0].items()
    }


def judge(result: Result, link: str, found: dict[str, dict[str, Any]], published: bool) -> None:
    """Enters what was measured on one kind of link, and who is faster."""
    idle = found["no exchange"]
    result.tables[f"{link}"] = [
        {
            "peer": peer,
            "ms a step": 1000 * values["seconds"],
            "over ours": values["seconds"] / found["ours"]["seconds"] if "ours" in found else "",
            "CPU ms a rank": 1000 * values["cpu"],
            "of them exchange": 1000 * (values["cpu"] - idle["cpu"]),
            "exchange ms": 1000 * values["exchange"] if "exchange" in values else "",
            "bytes a host sends": f"{values['sent']:,.0f}" if values["sent"] else "",
            "hidden": f"{values['hidden']:.0%}" if "hidden" in values else "",
        }
        for peer, values in found.items()
    ]
    if "ours" not in found:
        return
    ours = found["ours"]
    for peer, values in found.items():
        if peer.startswith("ours") or peer == "no exchange":
            continue
        seen = values["seconds"] / ours["seconds"]
        target = TARGETS.get(link, 1) if published and peer == "DDP" else 1
        result.checks.append(
            Check(f"a step faster than with {peer}, {link}", f">= {target}x", f"{seen:.2f}x", seen >= target)
        )
    if published:
        seen = 1000 * (ours["cpu"] - idle["cpu"])
        result.checks.append(
            Check(f"CPU time of the exchange a rank, {link}", "<= 30 ms", f"{seen:.0f} ms", seen <= 30)
        )
    for peer, values in found.items():
        if "predicted" not in values:
            continue
        result.checks.append(
            Check(
                f"bytes counted are bytes predicted, {peer}, {link}",
                f"{values['predicted']:,}",
                f"{values['counted']:,.0f}",
                values["counted"] == values["predicted"],
            )
        )
        if values["sent"] and values["leaving"]:
            # Beside gloo's and TCP's headers, and acknowledgements of what comes in: more of them for more and smaller buckets.
            more = values["sent"] - idle["sent"] - values["leaving"]
            statement, near = (
                f"the interface counts little more, {peer}, {link}",
                0 <= more <= 0.15 * values["leaving"] + 8192,
            )
            seen = f"{1 + more / values['leaving']:.3f} x"
            result.checks.append(Check(statement, "<= 1.15 x + 8 KiB", seen, near))
