"""Speed, measured against memory, links and what a user would pick instead: ``python -m lightning_topk bench NAME``.

===== =====================================================================================================
name  what is timed
===== =====================================================================================================
select selection and the whole compress step on this machine, in passes over memory; peak memory
wire   bits and bytes against their entropy; encoding, decoding and aggregation
step   steps of DDP with each of the peers, as processes on this host: no slow link
hosts  the same on emulated hosts, whose links have a rate; bytes as the interfaces count them
train  whole Trainer steps of a torchvision model, on this host or on emulated ones
costs  the constants by which ``plan`` predicts times, measured here and stored
model  how wrong those predictions are, on emulated hosts
===== =====================================================================================================

Machines are noisy: what is judged are ratios of times taken in one run. What misses its target, and every peer that is faster, is
printed as FAIL.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_topk.lab.plots import draw
from lightning_topk.lab.report import Result, plain

BENCHES = ["select", "wire", "step", "hosts", "train", "costs", "model"]
"""Names of the benches."""


def bench(name: str, json_path: Path | None = None, plot_path: Path | None = None, **options: Any) -> Result:
    """Runs one bench and prints it.

    Args:
        name: One of :data:`BENCHES`.
        json_path: Where to write it as JSON; None does not.
        plot_path: Where to draw it; None does not.
        **options: Arguments of that bench's ``run``.
    """
    torch.set_num_threads(options.pop("threads", 1))
    begin = time.perf_counter()
    result: Result = importlib.import_module(f"lightning_topk.lab.bench.{name}").run(**options)
    result.seconds = time.perf_counter() - begin
    result.command = " ".join(["bench", *sys.argv[2:]])
    print(f"{result.text()}\n", flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps(plain(asdict(result)), indent=1, allow_nan=False) + "\n")
    if plot_path is not None:
        draw(result.panels, plot_path)
    return result
