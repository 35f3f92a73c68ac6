"""``bench costs``: the constants of :mod:`lightning_topk.planning.costs` on this machine, stored for ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from lightning_topk.config import TopKConfig
from lightning_topk.lab import hosts
from lightning_topk.lab.report import Result
from lightning_topk.planning.costs import Costs, path_of_costs, sending, store_costs, work
from lightning_topk.planning.volume import requests
from lightning_topk.runtime.autotune import trial
from lightning_topk.runtime.drive import Meter
from lightning_topk.runtime.groups import Groups

Case = tuple[TopKConfig, int, int]
"""An exchange to time: its settings, its elements, and the ranks of a node."""

SIZES = (1_000, 400_000, 2_000_000, 6_500_000)
WAYS = (
    {"topology": "dense"},
    {"topology": "sharded", "ratio": 0.001},
    {"topology": "sharded", "ratio": 0.02},
    {"topology": "allgather", "ratio": 0.01, "bidirectional": False},
    {"topology": "hierarchical", "ratio": 0.001},
    {"topology": "hierarchical", "ratio": 0.02},
)
ROUNDS = 3
"""Times that each exchange is timed, all of them in turn, so that a busy moment does not spoil one kind."""
UNITS = {
    "fixed": ("us an exchange", 1e6),
    "latency": ("us a round", 1e6),
    "scan": ("ns an element", 1e9),
    "encode": ("ns an entry", 1e9),
    "decode": ("ns an entry", 1e9),
}
"""Units of the table, and how many are a second; the other constants are in ns a byte."""


def run(workers: int = 4, device: Literal["cpu", "cuda"] = "cpu", out: Path | None = None) -> Result:
    """Measures the constants by which ``plan`` predicts times, and stores them.

    Args:
        workers: Processes, as many as a host of the cluster has ranks; an even number.
        device: Where gradients live. With cuda the processes share this machine's GPUs: over NCCL if each has its own,
            else over gloo.
        out: File to write. Default: the one that ``plan`` reads.

    Raises:
        ValueError: The number of workers is odd or less than four.
    """
    if workers < 4 or workers % 2:
        raise ValueError(f"workers={workers}: exchanges inside nodes and between them are timed with 4, 6, 8 or more.")
    ranks = hosts.local(workers).run(measured, {"device": device})
    name = torch.cuda.get_device_name() if device == "cuda" else f"{workers} ranks on one machine"
    found, error = fit([max(times) for times in zip(*ranks, strict=True)], workers)
    costs = Costs(**found, source=f"measured: {name}, torch {torch.__version__}")
    out = out or path_of_costs(device)
    store_costs(costs, out)
    setting = f"{costs.source}; stored in {out}. Median error of the fit {error:.0%}."
    result = Result("costs", "what computing and sending cost here", setting)
    rows = [(constant, value, *UNITS.get(constant, ("ns a byte", 1e9))) for constant, value in found.items()]
    result.tables["Constants"] = [
        {"constant": constant, "value": value * scale, "unit": unit} for constant, value, unit, scale in rows
    ]
    return result


def cases(workers: int) -> list[Case]:
    """The exchanges whose times the constants are fitted to."""
    return [
        (TopKConfig(**way), numel, workers // 2 if way["topology"] == "hierarchical" else 1)
        for numel in SIZES
        for way in WAYS
    ]


def measured(options: dict[str, Any], rank: int, world: int) -> list[float]:
    """Seconds of each of :func:`cases` on one rank, median of the rounds."""
    count = torch.cuda.device_count()
    device = torch.device("cuda", rank % count) if options["device"] == "cuda" else torch.device("cpu")
    rounds = timed(cases(world), device, ROUNDS)
    return [median(times) for times in zip(*rounds, strict=True)]


def timed(cases: Sequence[Case], device: torch.device, rounds: int = 1) -> list[list[float]]:
    """Seconds of exchanges on this rank, for each round and each case; a collective."""
    flat, world = Groups.make(None, None), torch.distributed.get_world_size()
    nodes = {local: flat.divided(None, None, local, 1 < local < world) for local in sorted({c[2] for c in cases})}
    return [
        [trial(config, [torch.zeros(numel, device=device)], nodes[local], Meter()) for config, numel, local in cases]
        for _ in range(rounds)
    ]


def fit(seconds: Sequence[float], workers: int) -> tuple[dict[str, float], float]:
    """The constants, none negative, that come closest to what was timed, in relative terms.

    Args:
        seconds: Seconds of each of :func:`cases`.
        workers: Number of ranks.

    Returns:
        The constants, and the median relative error.
    """
    names = ("fixed", "scan", "encode", "decode", "copy", "latency", "byte", "reduce")
    rows = []
    for config, numel, local in cases(workers):
        counts = dict.fromkeys(names, 0.0) | work(config, [numel], workers, local)
        for request in requests(config, [numel], workers, local):
            rounds, kind, nbytes = sending(request, workers, local)
            counts["latency"] += rounds
            counts[kind] += nbytes
        rows.append([counts[name] for name in names])
    relative = torch.tensor(rows, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]
    scale, target = relative.amax(0), torch.ones(len(rows), 1, dtype=torch.float64)
    used = list(range(len(names)))
    while True:  # least squares; constants that come out negative are set to zero, one after the other
        solution = torch.linalg.lstsq(relative[:, used] / scale[used], target, driver="gelsd").solution[:, 0]
        if (solution >= 0).all():
            break
        used.pop(int(solution.argmin()))
    values = torch.zeros(len(names), dtype=torch.float64)
    values[used] = solution / scale[used]
    error = median((relative @ values - 1).abs().tolist())
    return dict(zip(names, values.tolist(), strict=True)), error
