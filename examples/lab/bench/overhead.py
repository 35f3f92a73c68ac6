"""``bench overhead``: the host's time for an exchange and an optimizer's step beside DDP's, of many tiny layers."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lab import hosts
from lab.report import Result
from lightning_topk import attach
from lightning_topk.plan import Row

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "SGD, decay": {"momentum": 0.9, "weight_decay": 1e-4},
    "AdamW": {},
}


def run(workers: int = 2, buckets: int = 20, steps: int = 200, device: Literal["cpu", "cuda"] = "cpu") -> Result:
    """Trains tiny layers, a bucket each, with DDP and with ``saving=50``."""
    result = Result(
        "overhead",
        "what an exchange and an adapted optimizer cost the host, whatever the size of the model",
        f"{workers} ranks, {buckets} buckets of a layer of 64 x 64 each, {steps} steps in turns; the median of rank 0, "
        "in ms. CPU ms: of all threads of the process.",
    )
    options = {"buckets": buckets, "steps": steps, "device": device}
    rows, rank = hosts.local(workers).run(measure, options, timeout=900, shown=True)[0]
    result.tables |= {"Milliseconds a step": rows, "A rank": [rank]}
    return result


def measure(options: dict[str, Any], rank: int, world: int) -> tuple[list[Row], Row]:
    """Times backward and the step of each optimizer, in turns; and what a rank takes beside them."""
    device = torch.device(options["device"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    pairs = {name: [_training(name, ours, options["buckets"], device) for ours in (False, True)] for name in OPTIONS}
    x = torch.randn(8, 64, device=device)
    times: dict[tuple[str, int], list[Sequence[float]]] = {}
    for step in tqdm(range(options["steps"]), desc="overhead", leave=False, disable=rank > 0):
        for name, both in pairs.items():
            for ours, (model, optimizer, *_) in enumerate(both):
                took = _step(model, optimizer, x)
                if step >= options["steps"] // 10:
                    times.setdefault((name, ours), []).append(took)
    heads = ("backward", "backward, CPU ms", "step", "step, CPU ms")
    rows: list[Row] = []
    for (name, ours), found in times.items():
        medians = torch.tensor(found).median(dim=0).values.tolist()
        row: Row = {"optimizer": name, "exchange": "saving=50" if ours else "DDP"}
        rows.append(row | {head: 1000 * value for head, value in zip(heads, medians, strict=True)})
    _, (*_, state, attached) = pairs["SGD"]
    begin = time.perf_counter()
    state.state_dict()
    beside: Row = {"ranks": world, "attach, s": attached, "checkpoint, s": time.perf_counter() - begin}
    return rows, beside | {"MB resident at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}


def _training(name: str, ours: bool, buckets: int, device: torch.device) -> tuple[Any, ...]:
    """A DDP model with a bucket for each layer, and its optimizer; with ours, the state, and seconds of attach."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(buckets))).to(device)
    ids = None if device.type == "cpu" else [device.index]
    model = DistributedDataParallel(net, device_ids=ids, bucket_cap_mb=1e-3)
    optimizer = KINDS[name.partition(",")[0]](net.parameters(), lr=1e-4, **OPTIONS[name])
    if not ours:
        return model, optimizer
    begin = time.perf_counter()
    return model, optimizer, attach(model, saving=50, optimizer=optimizer), time.perf_counter() - begin


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Sequence[float]:
    """Seconds of backward and of the optimizer's step: wall time, and CPU time of the process."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    marks = []
    for part in (loss.backward, optimizer.step):
        marks.append((time.perf_counter(), time.process_time()))
        part()
        marks.append((time.perf_counter(), time.process_time()))  # the host's: a GPU may be behind
        if x.is_cuda:
            torch.cuda.synchronize()
    return [after - before for first, last in (marks[:2], marks[2:]) for before, after in zip(first, last, strict=True)]
