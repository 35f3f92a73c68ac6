"""A real model on real data, trained by any number of simulated workers through the exchange that a cluster runs."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_topk.config import TopKConfig
from lightning_topk.runtime.beta1 import lend_beta1
from lightning_topk.simulate import Cluster


class RowLSTM(nn.Module):
    """Reads an image row by row."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, hidden, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 1, 8, 8]`` to scores ``[B, 10]``."""
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])  # type: ignore[no-any-return]


class CharLSTM(nn.Module):
    """Tells the next character from all before it.

    Args:
        characters: How many there are.
        width: Of an embedding.
        hidden: Units.
    """

    def __init__(self, characters: int, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm, self.head = nn.LSTM(width, hidden, batch_first=True), nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to scores ``[B, T, characters]``."""
        return self.head(self.lstm(self.embedding(x))[0])  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A transformer that tells the next character from all before it: learned positions, norms first, GELU, no dropout.

    Args:
        characters: How many there are.
        length: Characters that it sees at once.
        width: Of a state.
        layers: Blocks, of four heads each.
    """

    def __init__(self, characters: int, length: int = 64, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(characters, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to scores ``[B, T, characters]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        states = self.embedding(x) + self.position[: x.shape[1]]
        return self.head(self.blocks(states, mask, is_causal=True))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two convolutions beside a shortcut that drops pixels and pads channels (option A of He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        # Group norm instead of batch norm: a gradient is then a function of its batch alone, with no buffers to average.
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, outputs, H / stride, W / stride]``."""
        inner = self.body(x)
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return torch.relu(inner + nn.functional.pad(shortcut, (0, 0, 0, 0, 0, inner.shape[1] - x.shape[1])))


def resnet20() -> nn.Module:
    """ResNet-20 for 32 x 32 images in ten classes, with group norm."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def vgg() -> nn.Module:
    """A small VGG (six convolutions, 1.1 million parameters) for 32 x 32 images in ten classes, with group norm."""
    layers: list[nn.Module] = []
    for a, b, pool in [(3, 32, 1), (32, 64, 1), (64, 128, 0), (128, 128, 1), (128, 256, 0), (256, 256, 1)]:
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(8, b), nn.ReLU(), *[nn.MaxPool2d(2)] * pool]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


CHARACTERS = 128
"""Room for the characters of :func:`documentation`."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "wide mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    ),
    "lstm": RowLSTM,
    "resnet20": resnet20,
    "vgg": vgg,
    "char lstm": lambda: CharLSTM(CHARACTERS),
    "gpt": lambda: GPT(CHARACTERS),
}  # fmt: skip
"""Models for 8 x 8 digits (``mlp`` is the thesis's 784-64-10 at this size), ``resnet20`` and ``vgg`` for 32 x 32 colour images, and two
for text."""
TEXT = ("char lstm", "gpt")
"""Those for text."""


@dataclass(frozen=True)
class Data:
    """Examples and their labels, to train on and held out.

    Images ``[N, C, H, W]`` float32 with labels ``[N]`` int64; or text ``[N, T]`` int64 with the characters that follow, ``[N, T]``.
    """

    examples: Tensor
    labels: Tensor
    held_examples: Tensor
    held_labels: Tensor


@cache
def digits() -> Data:
    """scikit-learn's digits, 8 x 8 pixels; every fifth is held out."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise SystemExit("this needs scikit-learn's digits: pip install 'lightning_topk[examples]'") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    out = torch.arange(len(labels)) % 5 == 0
    return Data(images[~out], labels[~out], images[out], labels[out])


@cache
def documentation(length: int = 64) -> Data:
    """What Python's own ``help()`` says of its topics, 0.46 million characters in Python 3.11; every tenth piece is held out.

    Args:
        length: Characters of a piece, T.
    """
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    known = {character: number for number, character in enumerate(sorted(set(text))[:CHARACTERS])}
    codes = torch.tensor([known.get(character, 0) for character in text])
    count = (len(codes) - 1) // length
    examples, labels = (codes[first : first + count * length].view(count, length) for first in (0, 1))
    out = torch.arange(count) % 10 == 0
    return Data(examples[~out], labels[~out], examples[out], labels[out])


@cache
def image_folder(folder: Path) -> Data:
    """A folder with ``train/<class>/*`` and ``test/<class>/*`` in ten classes, such as CIFAR-10, resized to 32 x 32."""
    from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    transform = v2.Compose(
        [v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    )
    parts = []
    for part in ("train", "test"):
        images, labels = zip(*tqdm(ImageFolder(folder / part, transform), desc=f"reading {part}"), strict=True)
        # Convolutions on CPUs are faster with channels last.
        parts += [torch.stack(images).contiguous(memory_format=torch.channels_last), torch.tensor(labels)]
    return Data(*parts)


class Problem:
    """A model as a function of one flat vector of parameters.

    Args:
        model: A key of :data:`MODELS`.
        seed: Of the initial parameters.
        data: What it learns; default: :func:`documentation` for models of text, and :func:`digits`.
    """

    def __init__(self, model: str, seed: int, data: Data | None = None) -> None:
        self.data = data or (documentation() if model in TEXT else digits())
        torch.manual_seed(seed)
        self.net = MODELS[model]()
        self.parameters = list(self.net.parameters())
        self.start = torch.cat([p.detach().flatten() for p in self.parameters])
        # vmap knows no LSTM, and is slower for large models.
        large = len(self.start) > 200_000 or model in TEXT
        self._vectorised = not large and not any(isinstance(part, nn.LSTM) for part in self.net.modules())

    def gradients(self, theta: Tensor, batches: Tensor) -> list[Tensor]:
        """The gradient of each worker.

        Args:
            theta: ``[d]``.
            batches: ``[W, B]`` int64, the training examples of each worker.

        Returns:
            W tensors ``[d]``.
        """
        images, labels = self.data.examples, self.data.labels
        if self._vectorised:
            gradient = torch.func.grad(lambda theta, *batch: self._loss(self._weights(theta), *batch))
            return list(torch.func.vmap(partial(gradient, theta))(images[batches], labels[batches]))
        found = []
        for batch in batches:
            weights = [weight.requires_grad_() for weight in self._weights(theta.detach())]
            loss = self._loss(weights, images[batch], labels[batch])
            found.append(torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, weights)]))
        return found

    def evaluate(self, theta: Tensor) -> tuple[float, float]:
        """Training loss, of some 5,000 examples where there are more, and accuracy in percent on what was held out."""
        some = slice(None, None, max(1, len(self.data.labels) // 5000))
        loss, _ = self._quality(theta, self.data.examples[some], self.data.labels[some])
        return loss, self._quality(theta, self.data.held_examples, self.data.held_labels)[1]

    def held_loss(self, theta: Tensor) -> float:
        """Loss on what was held out."""
        return self._quality(theta, self.data.held_examples, self.data.held_labels)[0]

    @torch.no_grad()
    def _quality(self, theta: Tensor, examples: Tensor, labels: Tensor) -> tuple[float, float]:
        """Mean loss, and accuracy in percent."""
        loss, right = 0.0, 0
        for batch, wanted in zip(examples.split(500), labels.split(500), strict=True):
            scores = self._scores(self._weights(theta), batch)
            loss += float(nn.functional.cross_entropy(scores.flatten(0, -2), wanted.flatten(), reduction="sum"))
            right += int((scores.argmax(-1) == wanted).sum())
        return loss / labels.numel(), 100 * right / labels.numel()

    def _weights(self, theta: Tensor) -> list[Tensor]:
        """The parameters: views of ``theta`` ``[d]``."""
        parts = theta.split([parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _scores(self, weights: list[Tensor], examples: Tensor) -> Tensor:
        named = {name: weight for (name, _), weight in zip(self.net.named_parameters(), weights, strict=True)}
        scores: Tensor = torch.func.functional_call(self.net, named, examples)
        return scores

    def _loss(self, weights: list[Tensor], examples: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self._scores(weights, examples).flatten(0, -2), labels.flatten())


@dataclass
class Run:
    """A training run.

    Attributes:
        loss: Final loss on training data; infinite if it diverged.
        accuracy: Final accuracy on held-out data, percent.
        held_loss: Final loss on held-out data; infinite if it diverged.
        uplink_bytes: Bytes from a worker to the servers, mean over workers and steps.
        downlink_bytes: Bytes from a server to the workers, likewise.
        dense_bytes: Bytes that a ring all-reduce would send from a rank in a step.
        union: Entries that were delivered and not zero, step by step.
        seen: What ``observe`` returned, step by step.
        curve: Step, training loss and accuracy, every so often.
    """

    loss: float
    accuracy: float
    uplink_bytes: float
    downlink_bytes: float
    dense_bytes: float = 0.0
    held_loss: float = float("inf")
    union: list[int] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    curve: list[tuple[int, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Optimizer:
    """What a user would train with.

    Args:
        lr: Learning rate.
        momentum: Of SGD; the first beta of AdamW.
        adamw: AdamW with torch's weight decay, else SGD.
        cosine: Whether the learning rate falls to zero, along half a cosine; else it is constant, as in the thesis.
        clip_norm: Norm to which the gradient that was exchanged is clipped, as the Trainer's ``gradient_clip_val`` does.
    """

    lr: float
    momentum: float = 0.0
    adamw: bool = False
    cosine: bool = False
    clip_norm: float | None = None

    def make(self, theta: Tensor) -> torch.optim.Optimizer:
        """An optimizer of torch for one flat vector of parameters."""
        if self.adamw:
            return torch.optim.AdamW([theta], self.lr, (self.momentum, 0.999))
        return torch.optim.SGD([theta], self.lr, self.momentum)

    def rate(self, progress: float) -> float:
        """The learning rate when a share ``progress`` of the run is over."""
        return self.lr * (1 + math.cos(math.pi * progress)) / 2 if self.cosine else self.lr


def train(
    model: str,
    config: TopKConfig,
    workers: int,
    steps: int,
    optimizer: Optimizer,
    seed: int,
    batch: int = 10,
    observe: Callable[[Cluster, list[Tensor]], Any] | None = None,
    images: Path | None = None,
    local: int = 1,
    points: int = 0,
    cluster: Callable[..., Cluster] = Cluster,
) -> Run:
    """Trains a model by simulated workers.

    Args:
        model: A key of :data:`MODELS`.
        config: The exchange.
        workers: Simulated workers.
        steps: Steps.
        optimizer: What takes the steps.
        seed: Of the parameters and the batches.
        batch: Examples of each worker in a step, drawn from all training data.
        observe: Called before each exchange with the cluster and the workers' gradients.
        images: A folder of images to learn, see :func:`image_folder`; default: what :class:`Problem` takes.
        local: Workers on each simulated node.
        points: How often to evaluate on the way.
        cluster: Makes the workers; takes the arguments of :class:`lightning_topk.simulate.Cluster`.
    """
    problem = Problem(model, seed, None if images is None else image_folder(images))
    theta = problem.start
    stepped = optimizer.make(theta)
    sizes = tuple(parameter.numel() for parameter in problem.parameters)
    names = [name for name, _ in problem.net.named_parameters()]
    exact = [n for n, name in enumerate(names) if any(fnmatch.fnmatchcase(name, p) for p in config.dense_parameters)]
    ranks = cluster(config, workers, len(theta), local=local, sizes=sizes, exact=exact)
    beta1 = config.on(workers, local).lent_beta1
    if beta1 is not None:
        lend_beta1([stepped], beta1, ranks)
    generator, examples = torch.Generator().manual_seed(seed), len(problem.data.labels)
    epoch_steps = max(1, examples // (workers * batch))
    run, last = Run(float("inf"), 0.0, 0.0, 0.0), optimizer.lr
    for step in tqdm(range(steps), desc=f"{workers} workers", unit="step", leave=False, disable=not points):
        batches = torch.randint(examples, (workers, batch), generator=generator)
        gradients = problem.gradients(theta, batches)
        if observe is not None:
            run.seen.append(observe(ranks, gradients))
        rate = optimizer.rate(step / steps)
        following = last / rate if config.lr_ratio and step else 1.0
        theta.grad, last = ranks.step(gradients, epoch=step // epoch_steps, lr_ratio=following)[0], rate
        run.union.append(int(theta.grad.count_nonzero()))
        if optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([theta], optimizer.clip_norm)
        stepped.param_groups[0]["lr"] = rate
        stepped.step()
        if points and (step + 1) % max(1, steps // points) == 0:
            run.curve.append((step + 1, *problem.evaluate(theta)))
    if theta.isfinite().all():
        run.loss, run.accuracy = problem.evaluate(theta)
        run.held_loss = problem.held_loss(theta)
    run.uplink_bytes, run.downlink_bytes = (
        sum(ranks.sent_bytes[way]) / workers / steps for way in ("uplink", "downlink")
    )
    run.dense_bytes = 2 * (workers - 1) * 4 * len(theta) / workers
    return run
