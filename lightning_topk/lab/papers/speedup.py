"""The time of an exchange on links of three speeds, beside the speed-ups of Shi et al. 2019 (table 4)."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topk.config import TopKConfig
from lightning_topk.core.select import Selector
from lightning_topk.lab import hosts
from lightning_topk.lab.report import Panel, Result
from lightning_topk.lab.timing import TRIALS, trial
from lightning_topk.runtime.collectives import Meter
from lightning_topk.runtime.groups import Groups
from lightning_topk.schedule import LATE
from lightning_topk.simulate import Cluster
from lightning_topk.systems import presets
from lightning_topk.volume import volume


class TorchTopK(Selector):
    """Exact top-k by torch.topk, as the papers' code selects."""

    @override
    def pick(self, rows: Tensor, k: int) -> Tensor:
        return rows.abs().topk(k, dim=1).indices.sort(dim=1).values


HALF = "fp16 all-reduce"
SYSTEMS: dict[str, dict[str, Any]] = {
    "dense": {"topology": "dense", "ratio": 1.0},
    HALF: {"topology": "dense", "ratio": 1.0},
    "topk by torch.topk": {**presets["topk"], "selector": TorchTopK()},
    **{name: dict(presets[name]) for name in ("topk", "dgc", "gaussiank", "bidirectional_topk")},
}
"""What is timed. The first two are torch's all-reduce, of the gradient and of its half-precision copy."""
DENSE = ("dense", HALF)
RATES = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
WORLD, NUMEL = 4, 25_000_000


def run() -> Result:
    """Measures exchange times on emulated hosts where they can be made, else models them."""
    real = hosts.available()
    how = (
        f"{WORLD} emulated hosts (network namespaces, tbf) on this machine's cores, gloo, median of {TRIALS - 1}"
        if real
        else "MODELLED, not measured (hosts need root and iproute2): measured computation + bytes / rate"
    )
    result = Result(
        "speedup",
        "sparsified exchange is faster than dense on slow links, and Gaussian_k's faster than exact TopK's and DGC's",
        f"One exchange of {NUMEL:,} normal float32 on CPU, without forward and backward, ratio 0.001; {how}.",
        against="published",
    )
    seconds = _measured() if real else _modelled()
    result.tables["Seconds of a step"] = [
        {"system": system, **{rate: seconds[rate][system] for rate in RATES}} for system in SYSTEMS
    ]
    curves = {system: ([*RATES.values()], [seconds[rate][system] for rate in RATES]) for system in SYSTEMS}
    title = f"an exchange of {NUMEL:,} entries, {'measured' if real else 'modelled'}"
    result.panels.append(Panel(title, "rate of the link, bit/s", {**curves}, xlog=True, ylog=True, ylabel="seconds"))
    for other, published in (("dense", 2.33), ("topk by torch.topk", 3.63), ("dgc", 1.51)):
        seen = seconds["10gbit"][other] / seconds["10gbit"]["gaussiank"]
        result.check(
            f"Gaussian_k faster than {other} at 10 Gbit/s",
            f"up to {published}x a whole step, 16 GPUs",
            f"{seen:.2f}x an exchange, {WORLD} CPU hosts",
            seen > 1,
        )
    for rate in RATES:
        for peer in DENSE:
            seen = seconds[rate][peer] / seconds[rate]["bidirectional_topk"]
            result.check(f"bidirectional TopK faster than {peer} at {rate}", "", f"{seen:.1f}x", seen > 1)
    return result


def _measured() -> dict[str, dict[str, float]]:
    """Seconds by rate and system, the slowest rank's, on emulated hosts."""
    found = {}
    for rate in RATES:
        with hosts.emulate(WORLD, rate) as group:
            ranks = group.run(timed, {"numel": NUMEL, "systems": [*SYSTEMS]})
        found[rate] = {system: max(rank[system]["seconds"] for rank in ranks) for system in SYSTEMS}
    return found


def _modelled() -> dict[str, dict[str, float]]:
    """Seconds by rate and system: a rank's share of a simulated step, plus its bytes over the rate."""
    computing, sent = {}, {}
    for system in SYSTEMS:
        config = TopKConfig(**SYSTEMS[system])
        plan = volume(config, [NUMEL], WORLD, step=LATE, epoch=LATE)
        sent[system] = (plan.uplink + plan.downlink) // (2 if system == HALF else 1)
        computing[system] = 0.0
        if system not in DENSE:
            cluster = Cluster(config, WORLD, NUMEL)
            cluster.steps = LATE
            given = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]
            cluster.step(given, epoch=LATE)
            begin = time.perf_counter()
            cluster.step(given, epoch=LATE)
            computing[system] = (time.perf_counter() - begin) / WORLD
    return {
        rate: {system: computing[system] + 8 * sent[system] / bits for system in SYSTEMS}
        for rate, bits in RATES.items()
    }


def timed(options: dict[str, Any], rank: int, world: int) -> dict[str, dict[str, float]]:
    """Seconds of each of the ``systems`` on one rank, and the bytes that it sends, for ``numel`` elements."""
    groups, found = Groups.make(None, None), {}
    torch.manual_seed(rank)  # ranks select different entries
    for system in options["systems"]:
        meter, like = Meter(), torch.zeros(options["numel"])
        if system == HALF:
            seconds = _half(like, groups, meter)
        else:
            seconds = trial(TopKConfig(**SYSTEMS[system]).at(LATE, LATE), like, groups, meter)  # warm-ups are over
        found[system] = {"seconds": seconds, "bytes": (meter.bytes["uplink"] + meter.bytes["downlink"]) / TRIALS}
    return found


def _half(g: Tensor, groups: Groups, meter: Meter) -> float:
    """Seconds of an all-reduce in half precision, which the exchange does not have, timed as ``trial`` does."""
    world, took = dist.get_world_size(), []
    for _ in range(TRIALS):
        dist.barrier()
        begin = time.perf_counter()
        sent = g.half()
        dist.all_reduce(sent, group=groups.all)
        g.copy_(sent).div_(world)
        took.append(time.perf_counter() - begin)
        meter.bytes["uplink"] += 2 * (world - 1) * sent.nbytes // world
    return median(took[1:])
