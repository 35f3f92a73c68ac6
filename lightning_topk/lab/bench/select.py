"""Selection and the whole compress step, in passes over memory; and the peak of the memory they take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_topk.config import TopKConfig
from lightning_topk.core import ops
from lightning_topk.core.exchange import deliver, mean
from lightning_topk.core.layout import Layout, kept_count
from lightning_topk.core.select import SELECTORS
from lightning_topk.lab.bench.timing import best
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Check, Result

WORLD = 4
TARGETS = {0.001: (1.5, 2.2), 0.01: (2.3, 3.0)}
"""By ratio: passes that selection, and that the whole compress step, may take on one CPU thread."""


def run(numel: int = 25_000_000, device: str = "cpu", ratios: tuple[float, ...] = (0.001, 0.01)) -> Result:
    """Times them.

    Args:
        numel: Elements of the gradient.
        device: ``cpu`` or ``cuda``.
        ratios: Kept fractions.
    """
    where = torch.device(device)
    name = torch.cuda.get_device_name() if where.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    result = Result(
        "select",
        "exact top-k and the whole compress step cost a few passes over memory",
        f"{numel:,} normal float32 on {name}; least of some runs; a worker's side of a sharded exchange of {WORLD}. The compress "
        "step adds the residual, selects, encodes, keeps, clears the bucket, decodes the replies and scatters them.",
    )
    generator = torch.Generator(where).manual_seed(0)
    x, y = (torch.randn(numel, device=where, generator=generator) for _ in range(2))
    out = torch.empty_like(x)
    add = best(lambda: torch.add(x, y, out=out), where)

    def floor() -> float:
        return best(lambda: (y.add_(x), out.zero_()), where, repeats=12)

    result.tables["Passes over memory"] = [
        {"pass": "torch.add(x, y, out=)", "ms": 1000 * add, "GB/s": 12e-9 * numel / add},
        {"pass": "e.add_(g); g.zero_()", "ms": 1000 * (least := floor()), "GB/s": 16e-9 * numel / least},
    ]
    for ratio in tqdm(ratios, desc="select", leave=False):
        _selection(result, x, ratio, add)
        _compression(result, x, TopKConfig(ratio=ratio), str(ratio), floor())  # anew: machines are noisy
    begin = TopKConfig().planned(1).at(0, 0)
    _compression(result, x, begin, f"{begin.ratio} in {begin.wire}, where the default recipe begins", floor())
    if where.type == "cpu":
        _memory(result, numel)
    return result


def _selection(result: Result, x: Tensor, ratio: float, add: float) -> None:
    """Exact top-k and the approximate ones."""
    k, layout = kept_count(len(x), ratio), Layout(len(x))
    rows = x.view(1, -1)
    ways: dict[str, Callable[[], object]] = {
        "ours, exact": lambda: ops.topk_index(rows, k),
        "torch.topk(x.abs())": lambda: x.abs().topk(k, sorted=False),
        **{
            f"selector {name!r}": partial(kind().select, x, layout, k)
            for name, kind in SELECTORS.items()
            if name not in ("topk", "randk")
        },
    }
    seconds = {way: best(work, x.device, repeats=3) for way, work in ways.items()}
    result.tables[f"Selection at {ratio}"] = [
        {"way": way, "ms": 1000 * took, "passes of add": took / add} for way, took in seconds.items()
    ]
    panel = Panel(f"selection at {ratio}, passes of add", "way", bars=True)
    panel.curves = {way: ([number], [took / add]) for number, (way, took) in enumerate(seconds.items())}
    result.panels.append(panel)
    if x.device.type == "cpu" and ratio in TARGETS:
        seen, target = seconds["ours, exact"] / add, TARGETS[ratio][0]
        result.checks.append(
            Check(f"exact top-k at {ratio}, in passes of add", f"<= {target}", f"{seen:.2f}", seen <= target)
        )


def _compression(result: Result, x: Tensor, config: TopKConfig, where: str, floor: float) -> None:
    """A worker's whole compress step, and a server's."""
    ratio = config.ratio
    assert isinstance(ratio, float)
    end = config.endpoint(len(x), 0, WORLD, x.dtype, x.device)
    assert end.downlink is not None
    assert end.reply is not None
    downlink, reply = end.downlink, end.reply
    g = x.clone()
    sent = end.uplink.send(g)[:1].expand(WORLD, -1).contiguous()
    aggregate = best(lambda: mean(sent, end.uplink.codec, x.dtype, g), x.device, g.zero_)
    serve = best(lambda: downlink.send(mean(sent, end.uplink.codec, x.dtype, g)), x.device, g.zero_)
    g.zero_()
    replies = downlink.send(mean(sent, end.uplink.codec, x.dtype, g)).expand(WORLD, -1).contiguous()

    def worker() -> None:
        end.uplink.send(g)
        deliver(replies, reply, end.layout, g)

    for _ in range(3):  # the residual fills up
        g.copy_(x)
        worker()
    whole = best(worker, x.device, lambda: g.copy_(x), repeats=12)
    naive = best(_naive(x, ratio), x.device, repeats=2)
    result.tables[f"Compress step at {where}"] = [
        {"part": "worker: the whole step", "ms": 1000 * whole, "of add_ + zero_": whole / floor},
        {"part": "server: decode and aggregate", "ms": 1000 * aggregate, "of add_ + zero_": aggregate / floor},
        {"part": "server: the whole step, decoding included", "ms": 1000 * serve, "of add_ + zero_": serve / floor},
        {"part": "naive worker: torch.topk, int64, scatter", "ms": 1000 * naive, "of add_ + zero_": naive / floor},
    ]
    if x.device.type == "cuda":
        copy = best(lambda: g.copy_(x), x.device)  # reads and writes: 8 B an element
        allowed = 1.35 * 2 * copy + 60e-6
        words = f"<= {1e6 * allowed:.0f} µs (1.35 x 16 B an element at copy speed + 60 µs)"
        if ratio == 0.001:
            result.checks.append(Check(f"compress step at {ratio}", words, f"{1e6 * whole:.0f} µs", whole <= allowed))
    elif ratio in TARGETS:
        seen, target = whole / floor, TARGETS[ratio][1]
        statement = f"whole compress step at {ratio}, in units of add_ + zero_"
        result.checks.append(Check(statement, f"<= {target}", f"{seen:.2f}", seen <= target))


def _naive(x: Tensor, ratio: float) -> Callable[[], None]:
    """Top-k with error feedback as it is mostly written."""
    residual, k = torch.zeros_like(x), kept_count(len(x), ratio)

    def work() -> None:
        a = x + residual
        index = a.abs().topk(k).indices
        values = a[index]
        residual.copy_(a)
        residual[index] = 0
        torch.zeros_like(x)[index] = values

    return work


def _memory(result: Result, numel: int) -> None:
    """Peak memory of one rank beyond the gradient, in a process of its own."""

    def measured(*begin: str) -> tuple[int, int]:
        command = [sys.executable, "-m", "lightning_topk.lab.bench.memory", str(numel), str(WORLD), *begin]
        peak, residuals = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return int(peak), int(residuals)

    peak, residuals = measured()
    result.tables["Memory of a rank beyond its gradient"] = [
        {"what": "residuals: worker d, server d / W", "MB": residuals / 1e6},
        {"what": "peak while exchanging", "MB": peak / 1e6},
        {"what": "peak where the default recipe begins", "MB": measured("begin")[0] / 1e6},
    ]
    result.checks.append(
        Check("peak memory over the residuals", "<= 1.10", f"{peak / residuals:.3f}", peak <= 1.1 * residuals)
    )
