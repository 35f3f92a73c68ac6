"""``bench own-work``: what our exchange itself adds to a whole training step on one GPU, without any network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lab.commands import check_names
from lab.models import GPT
from lab.report import Result
from lightning_topk.bench.loop import Contender
from lightning_topk.bench.peers import Peer, ours
from lightning_topk.core.requests import AllGather, Request
from lightning_topk.models import make_module
from lightning_topk.runtime import collectives


class Training(NamedTuple):
    """A model, its optimizer, a batch of inputs and labels, and the largest share that an exchange should add."""

    net: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: Callable[[], tuple[Tensor, Tensor]]
    target: float


def _text(examples: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(vocabulary, (examples, length + 1))
    return words[:, :-1], words[:, 1:]


def _images(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 3, 224, 224), torch.randint(1000, (examples,))


TRAININGS = {
    "gpt2": Training(
        partial(GPT, 768, 12, 12, 1024, 50257, tied=True),
        partial(torch.optim.AdamW, lr=1e-4, fused=True),
        partial(_text, 8, 1024, 50257),
        0.05,
    ),
    "resnet50": Training(
        partial(make_module, "resnet50"),
        partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4),
        partial(_images, 64),
        0.10,
    ),
    "tiny gpt": Training(GPT, partial(torch.optim.AdamW, lr=1e-4), partial(_text, 4, 64, 128), 1.0),
}
"""GPT-2 of 124 million parameters, ResNet-50, and a model to try the command with on a CPU."""


def run(
    models: Sequence[str] = ("gpt2", "resnet50"),
    steps: int = 60,
    workers: int = 4,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Result:
    """Times whole steps in turns: DDP whose hook exchanges nothing, and ours, whose payloads are copied."""
    check_names("--models", models, TRAININGS)
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    result = Result(
        "own-work",
        "what the exchange itself adds to a whole step",
        f"One of {workers} simulated workers on {name}: bf16 autocast, {steps} steps in turns; the median. A hook that "
        "exchanges nothing, against ours with each payload copied instead of sent.",
    )
    rows = result.tables["A step"] = []
    with alone(workers):
        for model in tqdm(models, desc="own-work", leave=False):
            training = TRAININGS[model]
            before, *others = measure(training, steps, where)
            rows.append({"model": model, "exchange": "none", "ms": 1000 * before, "added": ""})
            for amount, took in zip(AMOUNTS, others, strict=True):
                added = took / before - 1
                rows.append({"model": model, "exchange": amount, "ms": 1000 * took, "added": f"{added:.1%}"})
                if device == "cuda" and amount == "saving=50":
                    words = f"time that {amount} adds to a step of {model}"
                    result.check(words, f"<= {training.target:.0%}", f"{added:.1%}", added <= training.target)
    return result


AMOUNTS: dict[str, dict[str, float]] = {"saving=50": {"saving": 50}, "ratio=0.001": {"ratio": 0.001}}


def measure(training: Training, steps: int, device: torch.device) -> list[float]:
    """Seconds of a step without exchange, and with each of ``AMOUNTS``."""
    x, labels = (each.to(device) for each in training.batch())

    def backward(model: nn.Module) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            scores = model(x)
        nn.functional.cross_entropy(scores.flatten(0, -2).float(), labels.flatten()).backward()

    compared = [Peer(nothing), *(ours(**amount) for amount in AMOUNTS.values())]
    contenders = [Contender(peer, training.net().to(device), backward, training.optimizer) for peer in compared]
    for each in contenders:
        each.take(5)
    times = [[each.take(5) for each in contenders] for _ in range(max(3, steps // 5))]
    for each in contenders:
        if each.state is not None:
            each.state.close()
    return [median(column) for column in zip(*times, strict=True)]


def nothing(model: DistributedDataParallel, settings: Any) -> None:
    """A hook that leaves each bucket as it is."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
        devices = [bucket.buffer().device] if bucket.buffer().is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)


@contextmanager
def alone(workers: int) -> Iterator[None]:
    """One rank of several, whose collectives copy its own payload in place of the others'."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def perform(request: Request, *_: Any) -> Tensor:
        payload = request.payload
        return payload.expand(workers, -1).contiguous() if isinstance(request, AllGather) else payload.clone()

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        with mock.patch.object(collectives, "perform", perform):
            yield
    finally:
        dist.destroy_process_group()
