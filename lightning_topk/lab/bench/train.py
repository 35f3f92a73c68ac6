"""Whole Trainer steps of a torchvision model on made-up images, on this host or on emulated ones.

As a module it is one rank: ``python -m lightning_topk.lab.bench.train RANK WORLD ADDRESS:PORT OPTIONS``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from lightning_topk.lab import hosts
from lightning_topk.lab.bench.peers import ON_NODES, ONE_BUCKET, PEERS
from lightning_topk.lab.report import Check, Result

WARMUP = 4
"""Steps that are not counted."""


def run(
    model: str = "resnet18",
    workers: int = 2,
    rate: str | None = None,
    ratio: float = 0.001,
    bucket_cap_mb: float = 25,
    batch_size: int = 4,
    image_size: int = 64,
    steps: int = 12,
) -> Result:
    """Times them.

    Args:
        model: Of torchvision.
        workers: Processes, or hosts.
        rate: Of the links of emulated hosts; None: the workers share this host.
        ratio: Kept fraction.
        bucket_cap_mb: DDP's.
        batch_size: Images a worker and step.
        image_size: Pixels.
        steps: Of which the first four are not counted.

    Raises:
        ValueError: torchvision has no such model, or there are too few steps.
        RuntimeError: Hosts cannot be emulated here.
    """
    import torchvision

    if model not in torchvision.models.list_models():
        raise ValueError(f"torchvision has no model {model!r}; torchvision.models.list_models() names them.")
    if steps <= WARMUP:
        raise ValueError(f"steps={steps}: the first {WARMUP} are not counted; take more.")
    if rate and not hosts.available():
        raise RuntimeError("--rate needs root, and ip and tc of iproute2. Leave it out to share this host.")
    link = rate or "loopback"
    result = Result(
        "train",
        "a whole Trainer step",
        f"{model} of torchvision, {workers} {'emulated hosts' if rate else 'processes'} ({link}), {batch_size} images of "
        f"{image_size} pixels a worker and step, SGD, ratio {ratio}, buckets of {bucket_cap_mb} MiB; median of {steps - WARMUP} steps.",
    )
    options = {
        "model": model,
        "ratio": ratio,
        "cap": bucket_cap_mb,
        "batch": batch_size,
        "size": image_size,
        "steps": steps,
    }
    found: dict[str, dict[str, float]] = {}
    for peer in tqdm([peer for peer in PEERS if peer not in ON_NODES], desc="train", leave=False):
        arguments = ("lightning_topk.lab.bench.train", json.dumps({**options, "peer": peer}))
        if rate:
            with hosts.emulate(workers, rate) as group:
                outputs = group.run(*arguments, timeout=3600)
        else:
            outputs = hosts.local(workers).run(*arguments, timeout=3600)
        ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
        found[peer] = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    ours = found["ours"]
    result.tables[f"{model}, {link}"] = [
        {
            "peer": peer,
            "ms a step": 1000 * values["seconds"],
            "over ours": values["seconds"] / ours["seconds"],
            "hidden": f"{values['hidden']:.0%}" if "hidden" in values else "",
        }
        for peer, values in found.items()
    ]
    for peer, values in found.items():
        if not peer.startswith("ours"):
            seen = values["seconds"] / ours["seconds"]
            result.checks.append(Check(f"a step faster than with {peer}, {link}", ">= 1x", f"{seen:.2f}x", seen >= 1))
    return result


def train(options: Mapping[str, Any], rank: int, world: int) -> dict[str, float]:
    """Trains one rank; returns the median seconds of a step, and the share of ours that backward hid."""
    import lightning as L
    import torchvision
    from lightning.pytorch.strategies import DDPStrategy

    peer = options["peer"]
    states: list[Any] = []

    class Strategy(DDPStrategy):
        """DDP with a peer's hook, on the CPU too."""

        def _register_ddp_hooks(self) -> None:
            states.append(PEERS[peer](self.model, options["ratio"]))  # type: ignore[arg-type]  # it is wrapped by now

    class Model(L.LightningModule):
        """A torchvision model."""

        def __init__(self) -> None:
            super().__init__()
            self.net = torchvision.models.get_model(options["model"], weights=None)

        def training_step(self, batch: Any, index: int) -> Any:
            """Cross-entropy."""
            if states and states[0] is not None:
                states[0].timing = True
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            """SGD."""
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Clock(L.Callback):
        """Notes when steps end."""

        ends: list[float] = []  # noqa: RUF012  # one run a process
        reports: list[Any] = []  # noqa: RUF012

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())
            if states and states[0] is not None:
                self.reports.append(states[0].report())

    images = torch.randn(options["batch"] * world * options["steps"], 3, options["size"], options["size"])
    data = torch.utils.data.TensorDataset(images, torch.randint(0, 1000, (len(images),)))
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=world,
        max_steps=options["steps"],
        strategy=Strategy(bucket_cap_mb=10_000 if peer in ONE_BUCKET else options["cap"], process_group_backend="gloo"),
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=options["batch"]))
    gaps = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)][WARMUP - 1 :]
    found = {"seconds": sorted(gaps)[len(gaps) // 2]}
    if clock.reports:
        counted = clock.reports[WARMUP:]
        found["hidden"] = 1 - sum(r.exposed_seconds for r in counted) / max(sum(r.seconds for r in counted), 1e-9)
    return found


def main() -> None:
    """Trains as one rank."""
    rank, world, address, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    host, port = address.split(":")
    os.environ |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
    }
    print(json.dumps(train(options, rank, world)))


if __name__ == "__main__":
    main()
