"""``bench select``: the compress step of a worker and of a server, in passes over memory; and its peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from lab import hosts
from lab.report import Result
from lightning_topk.bucket import plan_bucket
from lightning_topk.config import SAVING, TopKConfig
from lightning_topk.core.link import aggregate, deliver
from lightning_topk.optim.momentum import adapt_momentum

A_THOUSANDTH = TopKConfig(ratio=0.001, wire="bf16")
AN_EIGHTH = TopKConfig(ratio=0.12, wire="int4")
STEP = {0.001: (2.0, 0.6), 0.01: (2.4, 0.7), 0.12: (3.5, 1.5)}
"""Targets by ratio: passes of ``add_`` and ``zero_`` for the compress step of a worker, and of a server."""
BEYOND = {"SGD": 1, "AdamW, fused": 2}
"""Targets: passes of ``add_`` and ``zero_`` that adapted momentum takes beyond the optimizer's own step."""
Work = Callable[[], object]
WORLD = 4
"""Ranks of the exchange whose computing is measured."""


def run(
    numel: int = 25_000_000, device: Literal["cpu", "cuda"] = "cpu", ratios: Sequence[float] = (0.001, 0.01)
) -> Result:
    """Times the whole compress step, selection included, in passes over memory, and measures peak memory."""
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

    def floor() -> float:  # timed again for each table: machines are noisy
        return best(lambda: (y.add_(x), out.zero_()), where, repeats=12)

    least, density = floor(), plan_bucket(TopKConfig(), [numel], WORLD).density()
    result.tables["Passes over memory"] = [
        {"pass": "e.add_(g); g.zero_()", "ms": 1000 * least, "GB/s": 16e-9 * numel / least}
    ]
    configs = {str(ratio): TopKConfig(ratio=ratio, wire="bf16") for ratio in ratios}
    configs |= {"0.12, int4": AN_EIGHTH, f"{density:.3g}, saving={SAVING:g}": TopKConfig()}
    for title, config in tqdm(configs.items(), desc="select", leave=False):
        _compression(result, x, config, title, floor())
    _steps(result, x, density, floor())
    if where.type == "cpu":
        memory_table(result, numel)
    return result


def _compression(result: Result, x: Tensor, config: TopKConfig, where: str, floor: float) -> None:
    """Times a worker's whole compress step, and a server's."""
    rank, g = Rank(config, x), x.clone()
    sent = copies(rank.uplink.send(g, rank.up))
    serve = best(partial(rank.serve, sent, g), x.device, g.zero_)
    g.zero_()
    replies = copies(rank.serve(sent, g))

    def worker() -> None:
        rank.uplink.send(g, rank.up)
        deliver(replies, rank.reply, rank.uplink.layout, g)

    for _ in range(3):  # fills the residual
        g.copy_(x)
        worker()
    whole = best(worker, x.device, lambda: g.copy_(x), repeats=12)
    rows = result.tables[f"Compress step at {where}"] = [
        {"part": part, "ms": 1000 * took, "of add_ + zero_": took / floor}
        for part, took in (("worker", whole), ("server", serve))
    ]
    if x.device.type == "cuda":
        for row, (gpu, host) in zip(
            rows, (turns(worker, lambda: g.copy_(x)), turns(partial(rank.serve, sent, g), g.zero_)), strict=True
        ):
            row |= {"GPU ms": 1000 * gpu, "host ms": 1000 * host}
    if x.device.type == "cuda" and config.ratio == 0.001:
        copy = best(lambda: g.copy_(x), x.device)  # reads and writes 8 B per element
        allowed = 1.35 * 2 * copy + 60e-6
        words = f"<= {1e6 * allowed:.0f} µs (1.35 x 16 B an element at copy speed + 60 µs)"
        result.check(f"compress step at {config.ratio}", words, f"{1e6 * whole:.0f} µs", whole <= allowed)
    if x.device.type == "cpu" and config.ratio in STEP:
        for who, took, target in zip(("worker", "server"), (whole, serve), STEP[config.ratio], strict=True):
            statement = f"a {who}'s whole compress step at {where}, in units of add_ + zero_"
            result.check(statement, f"<= {target}", f"{took / floor:.2f}", took / floor <= target)


def _steps(result: Result, x: Tensor, density: Any, floor: float) -> None:
    """Times a step of SGD with momentum and of AdamW, plain and adapted, with a fraction ``density`` delivered."""
    gradient = x * (torch.rand_like(x) < density)
    rows = result.tables["Step of the optimizer, in units of add_ + zero_"] = []
    kinds: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
        "SGD": partial(torch.optim.SGD, lr=1e-6, momentum=0.9),
        "AdamW": partial(torch.optim.AdamW, lr=1e-6),
        "AdamW, fused": partial(torch.optim.AdamW, lr=1e-6, fused=True),
    }
    for name, made in kinds.items():
        units = []
        for adapted in (False, True):
            parameter = torch.nn.Parameter(x.clone())
            parameter.grad = gradient
            optimizer, exchange = made([parameter]), torch.nn.Module()  # stands for the exchange's owner
            if adapted:
                adapt_momentum([optimizer], exchange)
            units.append(best(optimizer.step, x.device, optimizer.step) / floor)
        plain, ours = units
        rows.append({"optimizer": name, "plain": plain, "adapted": ours})
        if x.device.type == "cpu" and name in BEYOND:
            statement = f"adapted momentum, beyond a step of {name}, in units of add_ + zero_"
            beyond, most = ours - plain, BEYOND[name]
            result.check(statement, f"<= {most}", f"{beyond:.2f}", beyond <= most)


def memory_table(result: Result, numel: int) -> None:
    """Measures the peak memory of one rank beyond the gradient, in a process of its own."""
    rows = result.tables["Peak memory of a rank beyond its gradient, over its residuals (worker d, server d / W)"] = []
    for where, config, target in (("", A_THOUSANDTH, 1.1), (" at 0.12, int4", AN_EIGHTH, 1.3)):
        peak, residuals = measured_memory(numel, config)
        rows.append({"what": f"exchange{where}", "peak MB": peak / 1e6, "residuals MB": residuals / 1e6})
        seen, statement = peak / residuals, f"peak memory over the residuals{where}"
        result.check(statement, f"<= {target:.2f}", f"{seen:.3f}", seen <= target)


def measured_memory(numel: int, config: TopKConfig = A_THOUSANDTH) -> tuple[int, int]:
    """Runs :func:`memory` in a fresh process."""
    settings = {"ratio": config.ratio, "wire": config.wire}
    ((peak, residuals),) = hosts.local(1).run(memory, {"numel": numel, "settings": settings})
    return peak, residuals


def memory(options: dict[str, Any], rank: int, world: int) -> tuple[int, int]:
    """Bytes by which three exchanges of a :class:`Rank` raise the peak resident set, and bytes of the residuals."""
    for numel in (200_000, options["numel"]):  # the first pass loads code and data into memory
        g = torch.randn(numel)
        before, one = _peak(), Rank(TopKConfig(**options["settings"]), g)
        for _ in range(3):
            one.exchange(g)
    residuals = [link.memory.tensors()["residual"].nbytes for link in (one.uplink, one.downlink)]
    return _peak() - before, sum(residuals)


def _peak() -> int:
    """Peak resident set of this process in bytes; getrusage would start with the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class Rank:
    """One of :data:`WORLD` ranks that exchange a gradient such as ``like`` ``[d]``; the others send the same."""

    def __init__(self, config: TopKConfig, like: Tensor) -> None:
        plan = plan_bucket(config, [len(like)], WORLD)
        end, codecs = plan.endpoint(0, like.dtype, like.device), plan.codecs()
        assert end.downlink is not None
        self.uplink, self.downlink, self.up, self.reply = end.uplink, end.downlink, codecs.uplink, codecs.reply

    def serve(self, received: Tensor, g: Tensor) -> Tensor:
        """Aggregates the payloads ``[WORLD, P]`` with ``g`` as scratch memory; returns the server's ``[1, P]``."""
        return self.downlink.send(aggregate(received, self.up, g.dtype, g), self.reply)

    def exchange(self, g: Tensor) -> None:
        """Runs a worker's and a server's part of an exchange."""
        replies = self.serve(copies(self.uplink.send(g, self.up)), g)
        deliver(copies(replies), self.reply, self.uplink.layout, g)


def turns(work: Work, prepare: Work, repeats: int = 20) -> tuple[float, float]:
    """Least seconds for which a GPU is busy with ``work``, and for which the host is: to launch it, and no more."""
    busy, host = list[float](), list[float]()
    for _ in range(repeats):
        prepare()
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # 10 ms, in which the host launches all of it
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter()
        work()
        host.append(time.perf_counter() - start)
        end.record()
        torch.cuda.synchronize()
        busy.append(begin.elapsed_time(end) / 1000)
    return min(busy), min(host)


def copies(payloads: Tensor) -> Tensor:
    """The first payload, as if every rank had sent it: ``[WORLD, P]``."""
    return payloads[:1].expand(WORLD, -1).contiguous()


def best(
    work: Work, device: torch.device, prepare: Work = lambda: None, repeats: int = 5, budget: float = 8.0
) -> float:
    """Least seconds of ``work``, after an untimed run; each follows ``prepare``, untimed. Waits for a GPU.

    Stops after ``repeats`` timed runs or ``budget`` seconds.
    """
    wait: Work = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    times, begin = list[float](), time.perf_counter()
    while len(times) < 2 or (len(times) <= repeats and time.perf_counter() - begin < budget):
        prepare()
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])
