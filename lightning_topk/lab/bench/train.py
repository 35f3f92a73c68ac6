"""``bench train``: whole steps of a torchvision model on made-up images, in a plain loop over DistributedDataParallel.

A step is what a training loop does: forward, backward, and SGD's step. Lightning is not needed to time it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median_high
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.config import check_name
from lightning_topk.lab import hosts
from lightning_topk.lab.bench import ddp
from lightning_topk.lab.bench.peers import ON_NODES, PEERS, checked, named
from lightning_topk.lab.bench.steps import judge
from lightning_topk.lab.commands import need
from lightning_topk.lab.report import Result


def run(
    model: str = "resnet18",
    workers: int = 2,
    rate: str | None = None,
    ratio: float | None = None,
    saving: float | None = None,
    wire: str | None = None,
    bucket_cap_mb: float = 25,
    batch_size: int = 4,
    image_size: int = 64,
    steps: int = 12,
    peers: Sequence[str] = (),
) -> Result:
    """Times whole training steps of a torchvision model, on this host or on emulated ones.

    Args:
        model: A name of torchvision's.
        workers: Processes, or emulated hosts of one process.
        rate: Rate of the links of emulated hosts, such as 1gbit. Default: the workers share this host.
        ratio: Kept fraction.
        saving: How many times fewer bytes than all-reduce, instead. Default: 50.
        wire: Format of the values.
        bucket_cap_mb: Size of DDP's buckets, MiB.
        batch_size: Images of each worker in a step.
        image_size: Height and width of an image, pixels.
        steps: Steps, of which the first four are not counted.
        peers: What to time. Default: all that make a difference.

    Raises:
        ValueError: torchvision has no such model, there is no such peer, or there are too few steps.
        RuntimeError: Hosts cannot be emulated here.
    """
    settings = checked(workers, {"ratio": ratio, "saving": saving, "wire": wire})
    need("torchvision")
    import torchvision

    if model not in torchvision.models.list_models():
        raise ValueError(f"torchvision has no model {model!r}; torchvision.models.list_models() names them.")
    if steps <= ddp.WARMUP:
        raise ValueError(f"steps={steps}: the first {ddp.WARMUP} are not counted; take more.")
    peers = peers or [peer for peer in PEERS if peer not in ON_NODES]
    for peer in peers:
        check_name("peer", peer, PEERS)
    if rate and not hosts.available():
        raise RuntimeError("--rate needs root, and ip and tc of iproute2. Leave it out to share this host.")
    link = rate or "loopback"
    result = Result(
        "train",
        "a whole training step",
        f"{model} of torchvision, {workers} {'emulated hosts' if rate else 'processes'} ({link}), {batch_size} images "
        f"of {image_size} pixels a worker and step, SGD, {named(settings)}, buckets of {bucket_cap_mb} MiB; median of "
        f"{steps - ddp.WARMUP} steps.",
    )
    options = {
        "model": model,
        "settings": settings,
        "bucket_cap_mb": bucket_cap_mb,
        "batch": batch_size,
        "size": image_size,
        "peers": [*peers],
    }
    with hosts.emulate(workers, rate) if rate else nullcontext(hosts.local(workers)) as group:
        found = ddp.worst(group.run(train, {**options, "steps": steps}, timeout=3600))
    judge(result, link, found)
    return result


def train(options: dict[str, Any], rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Times one rank's steps with each of the peers; their time is the median."""
    import torchvision

    found, counted = {}, options["steps"] - ddp.WARMUP
    images = torch.randn(options["batch"], 3, options["size"], options["size"])
    labels = torch.randint(0, 1000, (options["batch"],))
    for peer in options["peers"]:
        net = torchvision.models.get_model(options["model"], weights=None)
        model = DistributedDataParallel(net, bucket_cap_mb=ddp.bucket_cap(peer, options["bucket_cap_mb"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(model: DistributedDataParallel = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        found[peer] = ddp.measured(peer, model, options["settings"], step, median_high, ddp.WARMUP, counted, counted)
    return found
