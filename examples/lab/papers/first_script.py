"""The first script that people try, between real ranks: a GPT trained as everyone trains it, with one line added.

The runs of :mod:`lab.papers.at_size` for ``tied gpt`` are simulated. Here DDP trains the same model on the same batches
in two processes: accumulated with ``no_sync``, tied weights, clipping between backward and step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import trange

from lab.data import LENGTH, source_code
from lab.hosts import local
from lab.models import MODELS
from lab.papers.at_size import COURSES, EVERYONES
from lab.problems import Problem
from lab.report import Result
from lightning_topk import attach

SYSTEMS = ("DDP", "saving=50", "saving=50, three buckets")
BUCKET_MB = 0.5
"""Size of buckets if there are to be three: DDP's own, 25 MiB, holds the whole model."""


def run(steps: int = 300, seeds: int = 1, workers: int = 2) -> Result:
    """Trains with DDP and with ``saving=50``, in one bucket and in three, on this host's processes."""
    result = Result("first-script", "a GPT with everyone's settings, between real ranks", run.__doc__ or "")
    rows = result.tables[f"held-out loss after {steps:,} steps, {workers} ranks"] = []
    for seed in range(seeds):
        ends = [
            local(workers).run(train, {"system": system, "steps": steps, "seed": seed}, 3600, shown=True)[0]
            for system in SYSTEMS
        ]
        behind = {
            f"{name}, behind %": 100 * (end / ends[0] - 1) for name, end in zip(SYSTEMS[1:], ends[1:], strict=True)
        }
        rows.append({"seed": seed, **dict(zip(SYSTEMS, ends, strict=True)), **behind})
    return result


def train(options: dict[str, Any], rank: int, world: int) -> float:
    """Trains on one rank; returns the held-out loss."""
    steps, seed, batch = options["steps"], options["seed"], COURSES["tied gpt"].batch
    data = source_code(LENGTH)
    torch.manual_seed(seed)
    net = MODELS["tied gpt"]()
    several = options["system"] == SYSTEMS[-1]
    model, parts = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB if several else None), 2
    (optimizer,) = EVERYONES.make(dict(net.named_parameters()))
    ours: dict[str, Any] = {"saving": 50, "optimizer": optimizer, "max_norm": EVERYONES.clip_norm}
    state = attach(model, **ours) if options["system"] != "DDP" else None
    generator = torch.Generator().manual_seed(seed)
    for step in trange(steps, desc=f"{options['system']}, seed {seed}", disable=rank > 0, mininterval=5):
        mine = torch.randint(len(data.labels), (world, batch), generator=generator)[rank]
        for number, part in enumerate(mine.chunk(parts)):
            with model.no_sync() if number < parts - 1 else nullcontext():
                scores = model(data.examples[part]).flatten(0, 1)
                (torch.nn.functional.cross_entropy(scores, data.labels[part].flatten()) / parts).backward()
        EVERYONES.step([optimizer], step, steps)
        optimizer.zero_grad()
    if state is not None:
        state.close()
    problem = Problem("tied gpt", seed, data)
    return problem.held_out(torch.cat([p.detach().flatten() for p in net.parameters()]))[0]
