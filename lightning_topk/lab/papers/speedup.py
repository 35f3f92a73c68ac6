"""How long an exchange takes on links of three speeds, beside the speed-ups of Shi et al. 2019 (table 4)."""

from __future__ import annotations

import json
import time

import torch

from lightning_topk.config import TopKConfig
from lightning_topk.lab import hosts
from lightning_topk.lab.papers.step import SYSTEMS
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Check, Result
from lightning_topk.planning.volume import volume
from lightning_topk.simulate import Cluster

RATES = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
WORLD, NUMEL = 4, 25_000_000


def run() -> Result:
    """Measures on emulated hosts where they can be made, else models from measured costs."""
    real = hosts.available()
    how = (
        f"{WORLD} emulated hosts (network namespaces, tbf) on this machine's cores, gloo, best of 2 after one"
        if real
        else "MODELLED, not measured (hosts need root and iproute2): measured computation + bytes / rate"
    )
    result = Result(
        "speedup",
        "sparsified exchange is faster than dense on slow links, and Gaussian_k's faster than exact TopK's and DGC's",
        f"One exchange of {NUMEL:,} normal float32 on CPU, without forward and backward, ratio 0.001; {how}.",
    )
    seconds = _measured() if real else _modelled()
    result.tables["Seconds of a step"] = [
        {"system": system, **{rate: seconds[rate][system] for rate in RATES}} for system in SYSTEMS
    ]
    gain = {rate: {other: took[other] / took["gaussiank"] for other in SYSTEMS} for rate, took in seconds.items()}
    ours = {
        rate: {other: took[other] / took["bidirectional_topk"] for other in SYSTEMS} for rate, took in seconds.items()
    }
    for title, table in (("Gaussian_k's", gain), ("Bidirectional TopK's", ours)):
        result.tables[f"{title} speed-up over each"] = [
            {"over": system, **{rate: f"{table[rate][system]:.2f}x" for rate in RATES}} for system in SYSTEMS
        ]
    result.panels.append(
        Panel(
            f"seconds of a step ({'measured' if real else 'modelled'})",
            "bit/s",
            {system: (list(RATES.values()), [seconds[rate][system] for rate in RATES]) for system in SYSTEMS},
            xlog=True,
            ylog=True,
        )
    )
    for other, published in (("dense", 2.33), ("topk by torch.topk", 3.63), ("dgc", 1.51)):
        seen = gain["10gbit"][other]
        result.checks.append(
            Check(
                f"Gaussian_k faster than {other} at 10 Gbit/s",
                f"up to {published}x a whole step, 16 GPUs",
                f"{seen:.2f}x an exchange, {WORLD} CPU hosts",
                seen > 1,
            )
        )
    for rate in RATES:
        for peer in ("dense", "fp16 all-reduce"):
            seen = ours[rate][peer]
            result.checks.append(
                Check(f"bidirectional TopK faster than {peer} at {rate}", "-", f"{seen:.1f}x", seen > 1)
            )
    return result


def _measured() -> dict[str, dict[str, float]]:
    """Seconds by rate and system, the slowest rank's, on emulated hosts."""
    found = {}
    for rate in RATES:
        with hosts.emulate(WORLD, rate) as group:
            outputs = group.run("lightning_topk.lab.papers.step", str(NUMEL), *SYSTEMS)
        ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
        found[rate] = {system: max(rank[system]["seconds"] for rank in ranks) for system in SYSTEMS}
    return found


def _modelled() -> dict[str, dict[str, float]]:
    """Seconds by rate and system: a rank's share of a simulated step, plus its bytes over the rate."""
    computing, sent = {}, {}
    for system in SYSTEMS:
        config = TopKConfig(**SYSTEMS[system])
        plan = volume(config, [NUMEL], WORLD, step=10**6, epoch=10**6)
        sent[system] = (plan.uplink + plan.downlink) // (2 if system == "fp16 all-reduce" else 1)
        computing[system] = 0.0
        if system not in ("dense", "fp16 all-reduce"):
            cluster = Cluster(config, WORLD, NUMEL)
            cluster.steps = 10**6
            given = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]
            cluster.step(given, epoch=10**6)
            begin = time.perf_counter()
            cluster.step(given, epoch=10**6)
            computing[system] = (time.perf_counter() - begin) / WORLD
    return {
        rate: {system: computing[system] + 8 * sent[system] / bits for system in SYSTEMS}
        for rate, bits in RATES.items()
    }
