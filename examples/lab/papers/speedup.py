"""The time of an exchange on links of three speeds, beside the speed-ups of Shi et al. 2019 (table 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from lab import hosts
from lab.bench import steps
from lab.bench.peers import BUCKETS, PEERS
from lab.report import Result
from lightning_topk.bench.peers import Peer, ours
from lightning_topk.systems import presets

RATES = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
WORLD, NUMEL, RATIO = 4, 25_000_000, 0.001
SYSTEMS: dict[str, Mapping[str, Any]] = {
    name: {**presets[name], "ratio": RATIO} for name in ("topk", "dgc", "gaussiank", "bidirectional_topk")
}
"""Settings of the timed systems, after their warm-ups."""
DENSE, NAIVE = ("DDP", "fp16 hook"), "naive top-k"
"""Torch's all-reduce, of the gradient and of its half-precision copy; exact top-k by torch.topk, as in the papers."""
NAMES = [*DENSE, NAIVE, *SYSTEMS]


def run() -> Result:
    """Measures exchange times on emulated hosts."""
    result = Result(
        "speedup",
        "sparsified exchange is faster than dense on slow links, and Gaussian_k's faster than exact TopK's and DGC's",
        f"One exchange of {NUMEL:,} normal float32 on CPU by DDP, with a backward pass that costs nothing, ratio "
        f"{RATIO}; {WORLD} emulated hosts (network namespaces, tbf) on this machine's cores, gloo; {BUCKETS}; "
        "least of several steps.",
    )
    seconds = {}
    for rate in tqdm(RATES, desc="speedup", leave=False):
        with hosts.emulate(WORLD, rate) as group:
            given = {"work": {"params": NUMEL}, "peers": NAMES, "settings": {}, "seconds": 10}
            ranks = group.run(timed, given, timeout=3600)
        seconds[rate] = {system: values["seconds"] for system, values in steps.worst(ranks).items()}
    result.tables["Seconds of a step"] = [
        {"system": system, **{rate: seconds[rate][system] for rate in RATES}} for system in NAMES
    ]
    title = f"an exchange of {NUMEL:,} entries"
    curves = result.panel(title, "rate of the link, bit/s", xlog=True, ylog=True, ylabel="seconds")
    curves |= {system: ([*RATES.values()], [seconds[rate][system] for rate in RATES]) for system in NAMES}
    for other, published in (("DDP", 2.33), (NAIVE, 3.63), ("dgc", 1.51)):
        seen = seconds["10gbit"][other] / seconds["10gbit"]["gaussiank"]
        expected, measured = f"up to {published}x a whole step, 16 GPUs", f"{seen:.2f}x an exchange, {WORLD} CPU hosts"
        result.check(f"Gaussian_k faster than {other} at 10 Gbit/s", expected, measured, seen > 1)
    for rate in RATES:
        for peer in DENSE:
            seen = seconds[rate][peer] / seconds[rate]["bidirectional_topk"]
            result.check(f"bidirectional TopK faster than {peer} at {rate}", "", f"{seen:.1f}x", seen > 1)
    return result


def timed(options: dict[str, Any], rank: int, world: int) -> steps.Measured:
    """Times steps with each of the systems, see :func:`lab.bench.steps.timed`."""

    def peer(own: Mapping[str, Any]) -> Peer:
        plain = ours(**own)  # DGC requires an optimizer without momentum
        return plain._replace(
            register=lambda model, given: plain.register(
                model, {**given, "optimizer": torch.optim.SGD(model.parameters(), 0.0)}
            )
        )

    return steps.timed(options, rank, world, {**PEERS, **{name: peer(own) for name, own in SYSTEMS.items()}})
