"""``bench model``: how far the predicted times of exchanges are from those measured on emulated hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from lightning_topk.config import TopKConfig
from lightning_topk.lab import hosts as emulated
from lightning_topk.lab.bench.costs import Case, timed
from lightning_topk.lab.report import Panel, Result, Row
from lightning_topk.planning.costs import Links, bytes_per_second, exchange_seconds, load_costs

TARGET = 0.25
LOOPBACK = 1e12
"""Bytes a second inside a host: a byte costs processor time there, which the constants hold."""
NUMELS = (400_000, 2_000_000, 6_500_000)
"""Elements of the buckets; DDP's hold 6.5 million by default."""
RATIOS = (0.001, 0.01)


def run(
    hosts: int = 2,
    ranks: int = 2,
    rates: Sequence[str] = ("100mbit", "1gbit", "10gbit"),
    costs: Path | None = None,
) -> Result:
    """Compares predicted times of exchanges with those measured on emulated hosts.

    Args:
        hosts: Number of hosts.
        ranks: Processes on each host.
        rates: Rates of their links, as tc writes them.
        costs: File of constants. Default: the one that ``bench costs`` wrote.

    Raises:
        RuntimeError: Hosts cannot be emulated here.
    """
    if not emulated.available():
        raise RuntimeError("Network namespaces need root, and ip and tc of iproute2.")
    constants = load_costs("cpu", costs)
    result = Result(
        "model",
        "predicted times are those measured",
        f"{hosts} emulated hosts of {ranks} ranks on this machine's cores, gloo; constants {constants.source}.",
    )
    errors: list[float] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for rate in tqdm(rates, desc="model", leave=False):
        links = Links(bytes_per_second(rate), LOOPBACK)
        with emulated.emulate(hosts, rate, ranks) as group:
            times = group.run(measured, {})
        rows: list[Row] = []
        for (config, numel, _), each in zip(cases(ranks), zip(*times, strict=True), strict=True):
            seconds, predicted = max(each), exchange_seconds(config, [numel], hosts * ranks, ranks, links, constants)
            errors.append((predicted - seconds) / seconds)
            name = config.topology if config.topology == "dense" else f"{config.topology} {config.ratio}"
            points.setdefault(name, []).append((predicted, seconds))
            row = {"elements": f"{numel:,}", "exchange": name, "predicted ms": 1000 * predicted}
            rows.append({**row, "measured ms": 1000 * seconds, "error": f"{errors[-1]:+.0%}"})
        result.tables[rate] = rows
    middle = median(map(abs, errors))
    result.check("median error of predicted times", f"<= {TARGET:.0%}", f"{middle:.0%}", middle <= TARGET)
    panel = Panel("seconds of an exchange", "predicted", xlog=True, ylog=True)
    for name, pairs in points.items():
        x, y = zip(*sorted(pairs), strict=True)
        panel.curves[name] = (x, y)
    result.panels.append(panel)
    return result


def cases(ranks: int) -> list[Case]:
    """The exchanges that are timed on hosts of some ranks."""
    topologies = ["sharded", *(["hierarchical"] if ranks > 1 else [])]
    ways: list[dict[str, Any]] = [{"topology": name, "ratio": ratio} for name in topologies for ratio in RATIOS]
    return [(TopKConfig(**way), numel, ranks) for numel in NUMELS for way in ({"topology": "dense"}, *ways)]


def measured(options: dict[str, Any], rank: int, world: int) -> list[float]:
    """Seconds of each of :func:`cases` on one rank."""
    return timed(cases(int(os.environ["LOCAL_WORLD_SIZE"])), torch.device("cpu"))[0]
