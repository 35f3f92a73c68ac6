"""The time of an exchange on links of three speeds, beside the speed-ups of Shi et al. 2019 (table 4)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from typing_extensions import override

from lightning_topk.config import TopKConfig
from lightning_topk.core.select import Selector
from lightning_topk.lab import hosts
from lightning_topk.lab.bench import steps
from lightning_topk.lab.bench.peers import PEERS, Register, ours
from lightning_topk.lab.report import Result
from lightning_topk.simulate import Cluster
from lightning_topk.systems import presets
from lightning_topk.volume import volume


class TorchTopK(Selector):
    """Exact top-k by torch.topk, as the papers' code selects."""

    @override
    def pick(self, rows: Tensor, k: int) -> Tensor:
        return rows.abs().topk(k, dim=1).indices.sort(dim=1).values


RATES = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
WORLD, NUMEL, RATIO = 4, 25_000_000, 0.001
SYSTEMS: dict[str, Mapping[str, Any]] = {
    "topk by torch.topk": {**presets["topk"], "selector": TorchTopK()},
    **{name: {**presets[name], "ratio": RATIO} for name in ("topk", "dgc", "gaussiank", "bidirectional_topk")},
}
"""Settings of the timed systems, after their warm-ups."""
DENSE = {"DDP": 4, "fp16 hook": 2}
"""Torch's all-reduce, of the gradient and of its half-precision copy: bytes per entry."""


def run() -> Result:
    """Measures exchange times on emulated hosts if these are available, else models the times."""
    real = hosts.available()
    how = (
        f"{WORLD} emulated hosts (network namespaces, tbf) on this machine's cores, gloo, least of several"
        if real
        else "MODELLED, not measured (hosts need root and iproute2): measured computation + bytes / rate"
    )
    result = Result(
        "speedup",
        "sparsified exchange is faster than dense on slow links, and Gaussian_k's faster than exact TopK's and DGC's",
        f"One exchange of {NUMEL:,} normal float32 on CPU by DDP, with a backward pass that costs nothing, ratio "
        f"{RATIO}; {how}.",
    )
    seconds = _measured() if real else _modelled()
    names = [*DENSE, *SYSTEMS]
    result.tables["Seconds of a step"] = [
        {"system": system, **{rate: seconds[rate][system] for rate in RATES}} for system in names
    ]
    title = f"an exchange of {NUMEL:,} entries, {'measured' if real else 'modelled'}"
    curves = result.panel(title, "rate of the link, bit/s", xlog=True, ylog=True, ylabel="seconds")
    curves |= {system: ([*RATES.values()], [seconds[rate][system] for rate in RATES]) for system in names}
    for other, published in (("DDP", 2.33), ("topk by torch.topk", 3.63), ("dgc", 1.51)):
        seen = seconds["10gbit"][other] / seconds["10gbit"]["gaussiank"]
        expected, measured = f"up to {published}x a whole step, 16 GPUs", f"{seen:.2f}x an exchange, {WORLD} CPU hosts"
        result.check(f"Gaussian_k faster than {other} at 10 Gbit/s", expected, measured, seen > 1)
    for rate in RATES:
        for peer in DENSE:
            seen = seconds[rate][peer] / seconds[rate]["bidirectional_topk"]
            result.check(f"bidirectional TopK faster than {peer} at {rate}", "", f"{seen:.1f}x", seen > 1)
    return result


def _measured() -> dict[str, dict[str, float]]:
    """Seconds by rate and system, the slowest rank's, on emulated hosts."""
    found = {}
    for rate in tqdm(RATES, desc="speedup", leave=False):
        with hosts.emulate(WORLD, rate) as group:
            given = {"numel": NUMEL, "peers": [*DENSE, *SYSTEMS], "settings": {}, "seconds": 10}
            ranks = group.run(timed, given, timeout=3600)
        found[rate] = {system: values["seconds"] for system, values in steps.worst(ranks).items()}
    return found


def timed(options: dict[str, Any], rank: int, world: int) -> steps.Measured:
    """Times steps with each of the systems, see :func:`lightning_topk.lab.bench.steps.noise`."""

    def register(own: Mapping[str, Any]) -> Register:  # DGC requires an optimizer without momentum
        return lambda model, given: ours(optimizer=torch.optim.SGD(model.parameters(), 0.0), **own)(model, given)

    return steps.noise(options, rank, world, {**PEERS, **{name: register(own) for name, own in SYSTEMS.items()}})


def _modelled() -> dict[str, dict[str, float]]:
    """Seconds by rate and system: a rank's share of a simulated step, plus its bytes over the rate."""
    ring = volume(TopKConfig(), [NUMEL], WORLD).dense // 4  # entries
    computing, sent = dict.fromkeys(DENSE, 0.0), {system: ring * size for system, size in DENSE.items()}
    for system, settings in SYSTEMS.items():
        config = TopKConfig(**settings)
        plan, cluster = volume(config, [NUMEL], WORLD), Cluster(config, WORLD, NUMEL)
        given = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]
        cluster.step(given)
        begin = time.perf_counter()
        cluster.step(given)
        sent[system], computing[system] = plan.uplink + plan.downlink, (time.perf_counter() - begin) / WORLD
    return {rate: {name: computing[name] + 8 * sent[name] / bits for name in sent} for rate, bits in RATES.items()}
