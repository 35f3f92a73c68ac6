"""The constants of :mod:`lightning_topk.planning.costs` on this machine, stored for ``plan``.

As a module it is one rank: ``python -m lightning_topk.lab.bench.costs RANK WORLD ADDRESS:PORT DEVICE``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from lightning_topk.config import TopKConfig
from lightning_topk.lab import hosts
from lightning_topk.lab.report import Result
from lightning_topk.planning.costs import Costs, path_of_costs, sending, store_costs, work
from lightning_topk.planning.volume import requests
from lightning_topk.runtime.autotune import trial
from lightning_topk.runtime.collectives import Groups, Meter

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
"""Times that each exchange is tried, all of them one after the other, so that a busy moment does not spoil one kind."""


def run(workers: int = 4, device: str = "cpu", out: Path | None = None) -> Result:
    """Fits and stores them.

    Args:
        workers: Processes at a time, as many as there are ranks on a host of the cluster; an even number.
        device: ``"cpu"``, or ``"cuda"``, where the processes share the GPUs of this machine: over NCCL if each has its own,
            else over gloo.
        out: The file. Default: where ``plan`` looks.

    Raises:
        ValueError: The number of workers is odd or less than four.
    """
    if workers < 4 or workers % 2:
        raise ValueError(f"workers={workers}: exchanges inside nodes and between them are timed with 4, 6, 8 or more.")
    outputs = hosts.local(workers).run("lightning_topk.lab.bench.costs", device)
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    seconds = [max(times) for times in zip(*ranks, strict=True)]
    name = torch.cuda.get_device_name() if device == "cuda" else f"{workers} ranks on one machine"
    found, error = fit(seconds, workers)
    costs = Costs(**found, source=f"measured: {name}, torch {torch.__version__}")
    out = out or path_of_costs(device)
    store_costs(costs, out)
    result = Result(
        "costs",
        "what computing and sending cost here",
        f"{costs.source}; stored in {out}. Median error of the fit {error:.0%}.",
    )
    units = {"fixed": ("us an exchange", 1e6), "latency": ("us a round", 1e6), "scan": ("ns an element", 1e9)}
    units |= dict.fromkeys(("encode", "decode"), ("ns an entry", 1000000000.0))
    result.tables["Constants"] = [
        {"constant": name, "value": value * units.get(name, ("", 1e9))[1], "unit": units.get(name, ("ns a byte", 0))[0]}
        for name, value in found.items()
    ]
    return result


def cases(workers: int) -> list[tuple[TopKConfig, int, int]]:
    """What is timed: settings, elements, and ranks of a node."""
    return [
        (TopKConfig(**way), numel, workers // 2 if way["topology"] == "hierarchical" else 1)
        for numel in SIZES
        for way in WAYS
    ]


def fit(seconds: Sequence[float], workers: int) -> tuple[dict[str, float], float]:
    """The constants, none negative, that come closest to what was timed, in relative terms.

    Args:
        seconds: Of each of :func:`cases`.
        workers: Ranks.

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
    took = np.array(seconds)
    relative = np.array(rows) / took[:, None]
    scale = relative.max(axis=0)
    used = list(range(len(names)))
    while True:  # least squares; whatever comes out negative is nothing
        solution, *_ = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(len(took)), rcond=None)
        if (solution >= 0).all():
            break
        used.pop(int(solution.argmin()))
    values = np.zeros(len(names))
    values[used] = solution / scale[used]
    error = float(np.median(np.abs(relative @ values - 1)))
    return {name: float(value) for name, value in zip(names, values, strict=True)}, error


def main() -> None:
    """Measures as one rank."""
    rank, world, address, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" and torch.cuda.device_count() >= world else "gloo"
    dist.init_process_group(backend, f"tcp://{address}", rank=rank, world_size=world, timeout=timedelta(seconds=300))
    where = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
    flat = Groups.make(None, None)
    nodes = flat.divided(None, None, world // 2, hierarchy=True)
    rounds = [
        [
            trial(config, [torch.zeros(numel, device=where)], nodes if local > 1 else flat, Meter())
            for config, numel, local in cases(world)
        ]
        for _ in range(ROUNDS)
    ]
    print(json.dumps([median(times) for times in zip(*rounds, strict=True)]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
