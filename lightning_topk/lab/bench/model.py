"""How far the predicted times of exchanges are from those measured on emulated hosts.

As a module it is one rank: ``python -m lightning_topk.lab.bench.model RANK WORLD ADDRESS:PORT CASES``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from lightning_topk.config import TopKConfig
from lightning_topk.lab import hosts as emulated
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Check, Result
from lightning_topk.planning.costs import Links, bytes_per_second, exchange_seconds, load_costs
from lightning_topk.runtime.autotune import trial
from lightning_topk.runtime.collectives import Groups, Meter

TARGET = 0.25
LOOPBACK = 1e12
"""Bytes a second inside a host: what a byte costs there is the processor's time, which the constants hold."""


def run(
    hosts: int = 2,
    ranks: int = 2,
    rates: Sequence[str] = ("100mbit", "1gbit", "10gbit"),
    numels: Sequence[int] = (400_000, 2_000_000, 6_500_000),
    ratios: Sequence[float] = (0.001, 0.01),
    costs: Path | None = None,
) -> Result:
    """Measures and compares.

    Args:
        hosts: How many.
        ranks: On each.
        rates: Of their links.
        numels: Elements of the bucket; DDP's hold 6.5 million by default.
        ratios: Kept fractions.
        costs: The file of constants. Default: those of ``bench costs`` on this machine.

    Raises:
        RuntimeError: Hosts cannot be emulated here.
    """
    if not emulated.available():
        raise RuntimeError("bench model needs root, and ip and tc of iproute2, to make network namespaces.")
    constants = load_costs("cpu", costs)
    topologies = ["sharded", *(["hierarchical"] if ranks > 1 else [])]
    ways: list[dict[str, Any]] = [
        {"topology": "dense"},
        *({"topology": t, "ratio": r} for t in topologies for r in ratios),
    ]
    cases: list[dict[str, Any]] = [{"numel": numel, **way} for numel in numels for way in ways]
    result = Result(
        "model",
        "predicted times are those measured",
        f"{hosts} emulated hosts of {ranks} ranks on this machine's cores, gloo; constants {constants.source}.",
    )
    errors, panel = [], Panel("seconds of an exchange", "predicted", xlog=True, ylog=True)
    for rate in tqdm(rates, desc="model", leave=False):
        links = Links(bytes_per_second(rate), LOOPBACK)
        with emulated.emulate(hosts, rate, ranks) as group:
            outputs = group.run("lightning_topk.lab.bench.model", json.dumps(cases))
        measured = [max(times) for times in zip(*(json.loads(o.splitlines()[-1]) for o in outputs), strict=True)]
        rows = []
        for case, seconds in zip(cases, measured, strict=True):
            config, numel = _config(case), case["numel"]
            predicted = exchange_seconds(config, [numel], hosts * ranks, ranks, links, constants)
            errors.append(abs(predicted - seconds) / seconds)
            name = config.topology if config.topology == "dense" else f"{config.topology} {config.ratio}"
            rows.append(
                {
                    "elements": f"{numel:,}",
                    "exchange": name,
                    "predicted ms": 1000 * predicted,
                    "measured ms": 1000 * seconds,
                    "error": f"{(predicted - seconds) / seconds:+.0%}",
                }
            )
            x, y = panel.curves.get(name, ((), ()))
            panel.curves[name] = ([*x, predicted], [*y, seconds])
        result.tables[rate] = rows
    middle = median(errors)
    result.checks.append(
        Check("median error of predicted times", f"<= {TARGET:.0%}", f"{middle:.0%}", middle <= TARGET)
    )
    for name, points in panel.curves.items():
        x, y = zip(*sorted(zip(*points, strict=True)), strict=True)
        panel.curves[name] = (x, y)
    result.panels.append(panel)
    return result


def _config(case: dict[str, Any]) -> TopKConfig:
    return TopKConfig(**{key: value for key, value in case.items() if key != "numel"})


def main() -> None:
    """Measures as one rank."""
    rank, world, address, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{address}", rank=rank, world_size=world, timeout=timedelta(seconds=600))
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    groups = Groups.make(None, None).divided(None, None, local, hierarchy=1 < local < world)
    print(json.dumps([trial(_config(case), [torch.zeros(case["numel"])], groups, Meter()) for case in cases]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
