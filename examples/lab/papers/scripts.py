"""Scripts that people publish: their optimizers and schedules on small models, with DDP and with one line added.

Each is trained between real ranks of plain DDP, as long as its schedule is. Compression is not configured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LRScheduler, OneCycleLR, StepLR
from tqdm import trange
from typing_extensions import override

from lab.commands import check_names
from lab.data import (
    LENGTH,
    WORDS,
    Data,
    crop_and_flip,
    digits,
    documentation,
    documentation_words,
    image_folder,
    ratings,
    source_code,
)
from lab.hosts import local
from lab.models import (
    BATCH_NORM,
    GPT,
    VAE,
    MaskedAutoencoder,
    Recommender,
    TextLSTM,
    TiedGPT,
    ViTClassifier,
    convnet,
    resnet,
)
from lab.report import Result, in_words
from lab.training import Runs
from lightning_topk import attach
from lightning_topk.plan import Row

STEPS, WORKERS = 300, 2
SYSTEMS = ("dense", "saving 50")
Loss = Callable[..., Tensor]


def classified(scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy of scores ``[..., classes]`` and labels ``[...]``."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)


def own(loss: Tensor, labels: Tensor) -> Tensor:
    """The loss that a model returns."""
    return loss


def warm_up(step: int, steps: int = 20, least: float = 0.0) -> float:
    """A linear warm-up, then half a cosine down to ``least``: the factor of the learning rate."""
    if step < steps:
        return (step + 1) / steps
    return least + (1 - least) * (1 + math.cos(math.pi * (step - steps) / (STEPS - steps))) / 2


def inverse_square_root(step: int, steps: int = 100) -> float:
    """A linear warm-up, then the inverse square root of the step (Vaswani et al. 2017): the factor of the rate."""
    return min((step + 1) / steps, math.sqrt(steps / (step + 1)))


class YoloSchedule(LambdaLR):
    """YOLOv5's 100 steps of warm-up and linear decay, of groups with biases, weights and norms.

    Rates rise from 0, and those of biases fall from ten times their own; momentum rises from 0.8.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        def rising(step: int, first: float = 0.0) -> float:
            warm = min(1.0, step / 100)
            return (1 - warm) * first + warm * (1 - 0.99 * step / STEPS)

        super().__init__(optimizer, [partial(rising, first=10.0), rising, rising])

    @override
    def step(self, epoch: int | None = None) -> None:
        super().step()
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.8 + (0.937 - 0.8) * min(1.0, self.last_epoch / 100)


def decayed(net: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Parameter groups: biases without decay, weights with it, and vectors of norms without."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": each} for each in (0.0, decay, 0.0)]
    for name, parameter in net.named_parameters():
        groups[0 if name.endswith("bias") else 1 if parameter.dim() > 1 else 2]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def by_layer(net: ViTClassifier, lr: float, decay: float, factor: float = 0.65) -> list[dict[str, Any]]:
    """Parameter groups of a ViT: the rate of each layer is a ``factor`` of the next one's (Bao et al. 2021)."""
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    last = len(net.encoder.blocks) + 1
    for name, parameter in net.named_parameters():
        _, _, block = name.partition("blocks.")
        layer = int(block.partition(".")[0]) + 1 if block else 0 if "patches" in name or "position" in name else last
        each = {"params": [], "lr": lr * factor ** (last - layer), "weight_decay": decay * (parameter.dim() > 1)}
        groups.setdefault((layer, parameter.dim() > 1), each)["params"].append(parameter)
    return [*groups.values()]


def mnist_cnn() -> nn.Module:
    """The network of PyTorch's MNIST example for 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


class Script(NamedTuple):
    """A script: what it trains, and how.

    Attributes:
        model: The model in words.
        settings: Optimizer and schedule in words.
        net: Makes the model.
        batch: Examples of a rank and step.
        optimizer: Makes the optimizer of a model.
        schedule: Makes the scheduler of an optimizer.
        data: Its data. Default: images.
        loss: The loss, of what the model returns and of labels.
        smoothing: Label smoothing in training.
        max_norm: Norm to which gradients are clipped.
        max_value: Value to which they are clipped.
        before: The script whose dense training comes first, if the model is fine-tuned.
    """

    model: str
    settings: str
    net: Callable[[], nn.Module]
    batch: int
    optimizer: Callable[[Any], optim.Optimizer]
    schedule: Callable[[optim.Optimizer], LRScheduler] = partial(ConstantLR, factor=1.0)
    data: Callable[[], Data] | None = None
    loss: Loss = classified
    smoothing: float = 0.0
    max_norm: float | None = None
    max_value: float | None = None
    before: str = ""


MNIST = Script(
    "CNN of digits, 0.15 million",
    "Adadelta 1, times .7 after each of 14 parts, dropout",
    net=mnist_cnn,
    data=digits,
    batch=32,
    optimizer=lambda net: optim.Adadelta(net.parameters(), 1.0),
    schedule=partial(StepLR, step_size=STEPS // 14, gamma=0.7),
)
RECOMMENDER = Script(
    "embeddings of users and items, most of them rare, 0.17 million",
    "Adam .001",
    net=Recommender,
    data=ratings,
    batch=256,
    optimizer=lambda net: optim.Adam(net.parameters(), 0.001),
    loss=nn.functional.mse_loss,
)
SCRIPTS: Mapping[str, Script] = {
    "GPT": Script(
        "GPT, tied weights, 0.35 million",
        "AdamW .9 .95, 6e-4, decay .1 of matrices, clipping at a norm of 1, warm-up, cosine to a tenth",
        net=TiedGPT,
        data=partial(source_code, LENGTH),
        batch=8,
        optimizer=lambda net: optim.AdamW(decayed(net, 0.1), 6e-4, (0.9, 0.95)),
        schedule=partial(LambdaLR, lr_lambda=partial(warm_up, least=0.1)),
        max_norm=1.0,
    ),
    "Transformer": Script(
        "GPT, 0.12 million",
        "Adam .9 .98, eps 1e-9, .002, 100 steps of warm-up, inverse square root, label smoothing .1",
        net=GPT,
        data=documentation,
        batch=16,
        optimizer=lambda net: optim.Adam(net.parameters(), 0.002, (0.9, 0.98), 1e-9),
        schedule=partial(LambdaLR, lr_lambda=inverse_square_root),
        smoothing=0.1,
    ),
    "word LSTM": Script(
        "LSTM of two layers, 2,000 words, 0.6 million",
        "SGD 20, clipping at a norm of .25, dropout .2",
        net=partial(TextLSTM, WORDS, 100, 100, 2, 0.2),
        data=documentation_words,
        batch=10,
        optimizer=lambda net: optim.SGD(net.parameters(), 20.0),
        max_norm=0.25,
    ),
    "ImageNet": Script(
        "ResNet, batch norms, 0.3 million",
        "SGD .1, momentum .9, decay 1e-4, a tenth of the rate after each third",
        net=partial(resnet, (3, 32, 32), 10, (16, 32, 64, 128), BATCH_NORM, 2),
        batch=32,
        optimizer=lambda net: optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-4),
        schedule=partial(StepLR, step_size=STEPS // 3),
    ),
    "timm": Script(
        "convnet, group norms, 0.2 million",
        "AdamW .001, decay .05 of matrices, label smoothing .1, warm-up, cosine",
        net=convnet,
        batch=16,
        optimizer=lambda net: optim.AdamW(decayed(net, 0.05), 0.001),
        schedule=partial(LambdaLR, lr_lambda=warm_up),
        smoothing=0.1,
    ),
    "YOLO": Script(
        "convnet, batch norms, 0.2 million",
        "SGD .01, momentum .937, nesterov, three groups, decay 5e-4, 100 steps of warm-up (of biases from .1), linear",
        net=partial(convnet, BATCH_NORM),
        batch=16,
        optimizer=lambda net: optim.SGD(decayed(net, 5e-4), 0.01, 0.8, nesterov=True),
        schedule=YoloSchedule,
    ),
    "one cycle": Script(
        "convnet, batch norms, 0.2 million",
        "SGD, one cycle up to .1, momentum .85 to .95, decay 5e-4, clipping at a value of .1",
        net=partial(convnet, BATCH_NORM),
        batch=16,
        optimizer=lambda net: optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=5e-4),
        schedule=partial(OneCycleLR, max_lr=0.1, total_steps=STEPS),
        max_value=0.1,
    ),
    "masked autoencoder": Script(
        "ViT, 0.3 million",
        "AdamW .9 .95, .001, decay .05 of matrices, warm-up, cosine",
        net=MaskedAutoencoder,
        batch=32,
        optimizer=lambda net: optim.AdamW(decayed(net, 0.05), 0.001, (0.9, 0.95)),
        schedule=partial(LambdaLR, lr_lambda=warm_up),
        loss=own,
    ),
    "its fine-tuning": Script(
        "ViT, 0.2 million",
        "AdamW .001, layer decay .65, decay .05 of matrices, label smoothing .1, warm-up, cosine",
        net=ViTClassifier,
        batch=16,
        optimizer=lambda net: optim.AdamW(by_layer(net, 0.001, 0.05)),
        schedule=partial(LambdaLR, lr_lambda=warm_up),
        smoothing=0.1,
        before="masked autoencoder",
    ),
    "MNIST": MNIST,
    "MNIST, rho": MNIST._replace(
        model="the same",
        settings="Adadelta with rho .99 instead of .9, else the same",
        optimizer=lambda net: optim.Adadelta(net.parameters(), 1.0, rho=0.99),
    ),
    "VAE": Script(
        "VAE of digits, 0.1 million",
        "Adam .001",
        net=VAE,
        data=digits,
        batch=64,
        optimizer=lambda net: optim.Adam(net.parameters(), 0.001),
        loss=own,
    ),
    "recommender": RECOMMENDER,
    "recommender, Adagrad": RECOMMENDER._replace(
        model="the same",
        settings="Adagrad .01",
        optimizer=lambda net: optim.Adagrad(net.parameters(), 0.01),
    ),
}


def run(
    data: Path | None = None,
    models: Sequence[str] = (),
    systems: Sequence[str] = SYSTEMS,
    seeds: int = 1,
    minutes: float = math.inf,
    out: Path = Path("reproduced"),
) -> Result:
    """Trains with published optimizers and schedules, each by DDP in two processes. Some need ``data``, images."""
    chosen = models or [name for name, script in SCRIPTS.items() if script.data or data]
    check_names("--models", chosen, SCRIPTS)
    if unknown := [system for system in systems if not re.fullmatch(r"dense|saving [\d.]+", system)]:
        raise ValueError(f"--systems {unknown[0]}: write it like dense or 'saving 50'.")
    if data is None and not all(SCRIPTS[name].data for name in chosen):
        raise ValueError("this script learns images: pass their folder by --data.")
    images = out / "images.pt"
    if data is not None and not images.exists():
        read = image_folder(data)
        torch.save((read.examples, read.labels, read.held_examples, read.held_labels), images)
    found = Runs(out / "scripts.jsonl")
    runs = [(name, system, seed) for seed in range(seeds) for name in chosen for system in systems]
    found.complete({run_key(*each): partial(between_ranks, *each, images) for each in runs}, "scripts", minutes)
    setting = f"{WORKERS} ranks of DDP on this host, {STEPS} steps; held-out loss."
    return Result("scripts", "what compression costs scripts that people publish", setting, {"scripts": table(found)})


def run_key(name: str, system: str, seed: int) -> str:
    """Key of a run in ``scripts.jsonl``."""
    return f"{name}, {system}, seed {seed}"


def table(found: Runs) -> list[Row]:
    """Held-out losses by script, and how far ``saving=50`` is behind DDP with the same seeds; in bold above 1 %."""
    rows = []
    for name, script in SCRIPTS.items():
        pairs = [[found.get(run_key(name, system, seed)) for system in SYSTEMS] for seed in range(len(found))]
        if both := [(dense["held"], ours["held"]) for dense, ours in pairs if dense and ours]:
            row: Row = {"script": name, "model": script.model, "settings": script.settings}
            row["batch"] = WORKERS * script.batch
            means = (f"{fmean(each):.3f}" for each in zip(*both, strict=True))
            row |= dict(zip(("DDP", "saving 50"), means, strict=True))
            gaps = [100 * (now / before - 1) for before, now in both]
            words = in_words(gaps, "+.1f")
            rows.append(row | {"behind, %": f"**{words}**" if fmean(gaps) > 1 else words})
    return rows


def between_ranks(name: str, system: str, seed: int, images: Path, steps: int = STEPS) -> dict[str, Any]:
    """Trains in processes of this host, and returns an entry of ``scripts.jsonl``."""
    entry = {"script": name, "system": system, "seed": seed, "steps": steps}
    held, *_ = local(WORKERS).run(train, entry | {"images": str(images)}, 3600, shown=True)
    return entry | {"held": held}


def train(options: Mapping[str, Any], rank: int, world: int) -> float:
    """Trains on one rank; returns the held-out loss."""
    script, seed = SCRIPTS[options["script"]], options["seed"]
    data = (
        script.data()
        if script.data
        else replace(Data(*torch.load(options["images"], mmap=True)), augment=crop_and_flip)
    )
    torch.manual_seed(seed)
    net = script.net()
    if script.before:
        first = SCRIPTS[script.before].net()
        fit(first, SCRIPTS[script.before], data, {**options, "system": "dense"}, rank, world)
        net.load_state_dict(first.state_dict(), strict=False)
    fit(net, script, data, options, rank, world)
    return held_out(net, script, data)


def fit(net: nn.Module, script: Script, data: Data, options: Mapping[str, Any], rank: int, world: int) -> None:
    """Trains a model as any script does."""
    steps, seed, (_, *saving) = options["steps"], options["seed"], options["system"].split()
    model, optimizer = DistributedDataParallel(net), script.optimizer(net)
    schedule = script.schedule(optimizer)
    state = attach(model, saving=float(*saving), optimizer=optimizer, max_norm=script.max_norm) if saving else None
    drawn = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed * world + rank)  # dropout and augmentation
    train_loss = partial(script.loss, smoothing=script.smoothing) if script.smoothing else script.loss
    for _ in trange(steps, desc=f"{options['script']}, {options['system']}", disable=rank > 0, mininterval=5):
        mine = torch.randint(len(data.labels), (world, script.batch), generator=drawn)[rank]
        optimizer.zero_grad()
        train_loss(model(data.augment(data.examples[mine], torch.default_generator)), data.labels[mine]).backward()
        if script.max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), script.max_norm)
        if script.max_value is not None:
            nn.utils.clip_grad_value_(net.parameters(), script.max_value)
        optimizer.step()
        schedule.step()
    if state is not None:
        state.close()


@torch.no_grad()
def held_out(net: nn.Module, script: Script, data: Data) -> float:
    """The mean loss on about 2,000 held-out examples, always with the same noise."""
    torch.manual_seed(0)
    some = slice(None, None, max(1, len(data.held_labels) // 2000))
    examples, labels = data.held_examples[some], data.held_labels[some]
    parts, total = math.ceil(len(labels) / 200), 0.0
    for part in range(parts):  # strided: folders are sorted by class, and batch norm mixes a part
        wanted = labels[part::parts]
        total += len(wanted) * float(script.loss(net.eval()(examples[part::parts]), wanted))
    return total / len(labels)
