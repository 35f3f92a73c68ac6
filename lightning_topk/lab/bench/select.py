"""``bench select``: selection and the whole compress step, in passes over memory; and the memory they take at most."""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_topk.build import plan_bucket
from lightning_topk.config import SAVING, TopKConfig
from lightning_topk.core import ops
from lightning_topk.core.layout import kept_count
from lightning_topk.core.link import Link, aggregate, deliver
from lightning_topk.core.wire import Codec
from lightning_topk.lab import hosts
from lightning_topk.lab.report import Result
from lightning_topk.lab.timing import best
from lightning_topk.runtime.momentum import adapt_momentum

WORLD = 4
A_THOUSANDTH = TopKConfig(ratio=0.001, wire="bf16")
AN_EIGHTH = TopKConfig(ratio=0.12, wire="int4")
SELECTION = {0.001: 1.5, 0.01: 2.3}
"""By ratio: most passes of an addition that exact top-k should take on one CPU thread."""
STEP = {0.001: (2.0, 0.6), 0.01: (2.4, 0.7), 0.12: (3.5, 1.5)}
"""By ratio: most passes of ``add_`` and ``zero_`` that a worker's compress step, and a server's, should take there."""

BEYOND = {"SGD": 1, "AdamW, fused": 2}
"""Most passes of ``add_`` and ``zero_`` that adapted momentum should take beyond the optimizer's own step there."""


def run(
    numel: int = 25_000_000,
    device: Literal["cpu", "cuda"] = "cpu",
    ratios: Sequence[float] = (0.001, 0.01),
) -> Result:
    """Times selection and the whole compress step in passes over memory, and measures peak memory.

    Args:
        numel: Elements of the gradient.
        device: Where the gradient lives.
        ratios: Kept fractions.
    """
    where = torch.device(device)
    name = torch.cuda.get_device_name() if where.type == "cuda" else "CPU, one thread"
    result = Result(
        "select",
        "exact top-k and the whole compress step cost a few passes over memory",
        f"{numel:,} normal float32 on {name}; least of several runs; a worker's side of a sharded exchange of {WORLD}. "
        "The compress step adds the residual, selects, encodes, keeps, clears the bucket, decodes the replies and "
        "scatters them.",
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
        config = TopKConfig(ratio=ratio, wire="bf16")
        _compression(result, x, config, str(ratio), floor())  # timed again: machines are noisy
    _compression(result, x, AN_EIGHTH, "0.12, int4", floor())
    density = plan_bucket(TopKConfig(), [numel], WORLD, in_pieces=False).ratio
    _compression(result, x, TopKConfig(), f"{density:.3g}, saving={SAVING:g}", floor())
    _steps(result, x, density, floor())
    if where.type == "cpu":
        _memory(result, numel)
    return result


def _selection(result: Result, x: Tensor, ratio: float, add: float) -> None:
    """Exact top-k; ``reproduce operators`` times the approximate selectors."""
    k, rows = kept_count(len(x), ratio), x.view(1, -1)
    ways: dict[str, Callable[[], object]] = {
        "ours, exact": lambda: ops.topk_index(rows, k),
        "torch.topk(x.abs())": lambda: x.abs().topk(k, sorted=False),
    }
    seconds = {way: best(work, x.device, repeats=3) for way, work in ways.items()}
    result.tables[f"Selection at {ratio}"] = [
        {"way": way, "ms": 1000 * took, "passes of add": took / add} for way, took in seconds.items()
    ]
    if x.device.type == "cpu" and ratio in SELECTION:
        seen, target = seconds["ours, exact"] / add, SELECTION[ratio]
        result.check(f"exact top-k at {ratio}, in passes of add", f"<= {target}", f"{seen:.2f}", seen <= target)


def _compression(result: Result, x: Tensor, config: TopKConfig, where: str, floor: float) -> None:
    """A worker's whole compress step, and a server's."""
    ratio = config.ratio
    uplink, downlink, up, reply = _links(config, x)
    g = x.clone()
    sent = _copies(uplink.send(g, up)[0])
    average = best(lambda: aggregate(sent, up, x.dtype, g), x.device, g.zero_)
    serve = best(lambda: downlink.send(aggregate(sent, up, x.dtype, g), reply), x.device, g.zero_)
    g.zero_()
    replies = _copies(downlink.send(aggregate(sent, up, x.dtype, g), reply)[0])

    def worker() -> None:
        uplink.send(g, up)
        deliver(replies, reply, uplink.layout, g)

    for _ in range(3):  # the residual fills up
        g.copy_(x)
        worker()
    whole = best(worker, x.device, lambda: g.copy_(x), repeats=12)
    result.tables[f"Compress step at {where}"] = [
        {"part": "worker: the whole step", "ms": 1000 * whole, "of add_ + zero_": whole / floor},
        {"part": "server: decode and aggregate", "ms": 1000 * average, "of add_ + zero_": average / floor},
        {"part": "server: the whole step, decoding included", "ms": 1000 * serve, "of add_ + zero_": serve / floor},
    ]
    if x.device.type == "cuda":
        copy = best(lambda: g.copy_(x), x.device)  # reads and writes: 8 B an element
        allowed = 1.35 * 2 * copy + 60e-6
        words = f"<= {1e6 * allowed:.0f} µs (1.35 x 16 B an element at copy speed + 60 µs)"
        if ratio == 0.001:
            result.check(f"compress step at {ratio}", words, f"{1e6 * whole:.0f} µs", whole <= allowed)
    elif ratio in STEP:
        for who, took, target in zip(("worker", "server"), (whole, serve), STEP[ratio], strict=True):
            statement = f"a {who}'s whole compress step at {where}, in units of add_ + zero_"
            result.check(statement, f"<= {target}", f"{took / floor:.2f}", took / floor <= target)


def step_seconds(config: TopKConfig, numel: int, device: torch.device) -> float:
    """Seconds in which one of :data:`WORLD` ranks compresses and decompresses a gradient, as a worker and a server.

    Args:
        config: The settings.
        numel: Elements of the gradient.
        device: Where it lives.
    """
    x = torch.randn(numel, device=device)
    uplink, downlink, up, reply = _links(config, x)
    g = x.clone()

    def step() -> None:
        received = _copies(uplink.send(g, up)[0])
        replies = _copies(downlink.send(aggregate(received, up, x.dtype, g), reply)[0])
        deliver(replies, reply, uplink.layout, g)

    return best(step, device, lambda: g.copy_(x))


def _steps(result: Result, x: Tensor, density: Any, floor: float) -> None:
    """A step of SGD with momentum and of AdamW, plain and adapted, where a fraction ``density`` was delivered."""
    gradient = x * (torch.rand_like(x) < density)
    rows = []
    kinds: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-6, momentum=0.9),
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
    }
    for name, made in kinds.items():
        units = []
        for adapted in (False, True):
            parameter = torch.nn.Parameter(x.clone())
            parameter.grad = gradient
            optimizer, exchange = made([parameter]), _Exchange()
            if adapted:
                adapt_momentum([optimizer], exchange)
            units.append(best(optimizer.step, x.device, optimizer.step) / floor)
        plain, ours = units
        rows.append({"optimizer": name, "plain": plain, "adapted": ours})
        if x.device.type == "cpu" and name in BEYOND:
            statement = f"adapted momentum, beyond a step of {name}, in units of add_ + zero_"
            beyond, most = ours - plain, BEYOND[name]
            result.check(statement, f"<= {most}", f"{beyond:.2f}", beyond <= most)
    result.tables["Step of the optimizer, in units of add_ + zero_"] = rows


class _Exchange:
    """Whoever exchanges the gradients."""


def _memory(result: Result, numel: int) -> None:
    """Peak memory of one rank beyond the gradient, in a process of its own."""
    peak, residuals = measured_memory(numel)
    eighth = measured_memory(numel, AN_EIGHTH)[0]
    result.tables["Memory of a rank beyond its gradient"] = [
        {"what": "residuals: worker d, server d / W", "MB": residuals / 1e6},
        {"what": "peak while exchanging", "MB": peak / 1e6},
        {"what": "peak at 0.12, int4", "MB": eighth / 1e6},
        {"what": f"peak at saving={SAVING:g}", "MB": measured_memory(numel, TopKConfig())[0] / 1e6},
    ]
    seen = peak / residuals
    result.check("peak memory over the residuals", "<= 1.10", f"{seen:.3f}", seen <= 1.1)
    seen = eighth / residuals
    result.check("peak memory over the residuals at 0.12, int4", "<= 1.30", f"{seen:.3f}", seen <= 1.3)


def measured_memory(numel: int, config: TopKConfig = A_THOUSANDTH) -> tuple[int, int]:
    """What :func:`memory` measures in a fresh process."""
    settings = {"ratio": config.ratio, "saving": config.saving, "wire": config.wire}
    ((peak, residuals),) = hosts.local(1).run(memory, {"numel": numel, "settings": settings})
    return peak, residuals


def memory(options: dict[str, Any], rank: int, world: int) -> tuple[int, int]:
    """Peak of the resident set over three exchanges of one of four ranks, the others played by copies of its payloads.

    Returns:
        Bytes at the peak beyond those before, and the bytes of residuals.
    """
    config = TopKConfig(**options["settings"])
    g = torch.randn(options["numel"])
    _exchanges(config, torch.randn(200_000))  # any first call loads code and data into memory
    before = _peak()
    residuals = _exchanges(config, g)
    return _peak() - before, residuals


def _exchanges(config: TopKConfig, g: Tensor) -> int:
    """Three exchanges of a gradient ``[d]``; returns the bytes of residuals."""
    uplink, downlink, up, reply = _links(config, g)
    for _ in range(3):
        received = _copies(uplink.send(g, up)[0])
        replies = _copies(downlink.send(aggregate(received, up, g.dtype, g), reply)[0])
        deliver(replies, reply, uplink.layout, g)
    return sum(kept.nbytes for link in (uplink, downlink) for kept in link.memory.tensors().values())


def _links(config: TopKConfig, g: Tensor) -> tuple[Link, Link, Codec, Codec]:
    """The links of one of :data:`WORLD` ranks for a gradient, and their codecs."""
    plan = plan_bucket(config, [len(g)], WORLD, in_pieces=False)
    end, codecs = plan.endpoint(0, g.dtype, g.device), plan.codecs()
    assert end.downlink is not None
    return end.uplink, end.downlink, codecs.uplink, codecs.reply


def _copies(payloads: Tensor) -> Tensor:
    """The first payload, as if every rank had sent it: ``[WORLD, P]``."""
    return payloads[:1].expand(WORLD, -1).contiguous()


def _peak() -> int:
    """Largest resident set of this process so far, bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's begins with that of the process that started this one
        return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
