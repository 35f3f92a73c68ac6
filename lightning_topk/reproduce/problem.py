"""A real model on real data, trained by any number of simulated workers through the exchange that a cluster runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topk.config import TopKConfig
from lightning_topk.simulate import Cluster


class RowLSTM(nn.Module):
    """Reads an image row by row."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, hidden, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 1, 8, 8]`` to scores ``[B, 10]``."""
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "wide mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    ),
    "lstm": RowLSTM,
}  # fmt: skip
"""Models for 8 x 8 digits. ``mlp`` is the thesis's 784-64-10 at this size."""


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's digits: images ``[N, 1, 8, 8]`` and labels, to train on and (every fifth) held out."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise SystemExit("this needs scikit-learn's digits: pip install 'lightning_topk[examples]'") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    out = torch.arange(len(labels)) % 5 == 0
    return images[~out], labels[~out], images[out], labels[out]


class Problem:
    """A model as a function of one flat vector of parameters.

    Args:
        model: A key of :data:`MODELS`.
        seed: Of the initial parameters.
    """

    def __init__(self, model: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = MODELS[model]()
        self.parameters = list(self.net.parameters())
        self.start = torch.cat([p.detach().flatten() for p in self.parameters])
        self._vectorised = not any(isinstance(part, nn.LSTM) for part in self.net.modules())  # vmap knows no LSTM

    def gradients(self, theta: Tensor, batches: Tensor) -> list[Tensor]:
        """The gradient of each worker.

        Args:
            theta: ``[d]``.
            batches: ``[W, B]`` int64, the training examples of each worker.

        Returns:
            W tensors ``[d]``.
        """
        images, labels, *_ = digits()
        if self._vectorised:
            gradient = torch.func.grad(self._loss)
            return list(torch.func.vmap(partial(gradient, theta))(images[batches], labels[batches]))
        found = []
        for batch in batches:
            variable = theta.clone().requires_grad_()
            found.append(torch.autograd.grad(self._loss(variable, images[batch], labels[batch]), variable)[0])
        return found

    def evaluate(self, theta: Tensor) -> tuple[float, float]:
        """Training loss, and accuracy in percent on what was held out."""
        images, labels, held_images, held_labels = digits()
        with torch.no_grad():
            loss = self._loss(theta, images, labels)
            right = self._scores(theta, held_images).argmax(1) == held_labels
        return float(loss), 100 * float(right.float().mean())

    def _scores(self, theta: Tensor, images: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in self.parameters])
        names = [name for name, _ in self.net.named_parameters()]
        weights = {n: part.view_as(p) for n, part, p in zip(names, parts, self.parameters, strict=True)}
        scores: Tensor = torch.func.functional_call(self.net, weights, images)
        return scores

    def _loss(self, theta: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self._scores(theta, images), labels)


@dataclass
class Run:
    """A training run.

    Attributes:
        loss: Final loss on all training data; infinite if it diverged.
        accuracy: Final accuracy on held-out data, percent.
        uplink_bytes: Bytes from a worker to the servers, mean over workers and steps.
        downlink_bytes: Bytes from a server to the workers, likewise.
        union: Entries that were delivered and not zero, step by step.
        seen: What ``observe`` returned, step by step.
    """

    loss: float
    accuracy: float
    uplink_bytes: float
    downlink_bytes: float
    union: list[int] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)


def train(
    model: str,
    config: TopKConfig,
    workers: int,
    steps: int,
    lr: float,
    seed: int,
    batch: int = 10,
    momentum: float = 0.0,
    observe: Callable[[Cluster, list[Tensor]], Any] | None = None,
) -> Run:
    """Trains by SGD with a constant learning rate, as the thesis does.

    Args:
        model: A key of :data:`MODELS`.
        config: The exchange.
        workers: Simulated workers.
        steps: Steps.
        lr: Learning rate.
        seed: Of the parameters and the batches.
        batch: Examples of each worker in a step, drawn from all training data.
        momentum: The optimizer's own.
        observe: Called before each exchange with the cluster and the workers' gradients.
    """
    problem = Problem(model, seed)
    theta, velocity = problem.start, torch.zeros_like(problem.start)
    cluster = Cluster(config, workers, len(theta))
    generator, examples = torch.Generator().manual_seed(seed), len(digits()[0])
    epoch_steps = max(1, examples // (workers * batch))
    run = Run(float("inf"), 0.0, 0.0, 0.0)
    for step in range(steps):
        batches = torch.randint(examples, (workers, batch), generator=generator)
        gradients = problem.gradients(theta, batches)
        if observe is not None:
            run.seen.append(observe(cluster, gradients))
        delivered = cluster.step(gradients, epoch=step // epoch_steps)[0]
        run.union.append(int(delivered.count_nonzero()))
        velocity = momentum * velocity + delivered
        theta = theta - lr * velocity
    if theta.isfinite().all():
        run.loss, run.accuracy = problem.evaluate(theta)
    run.uplink_bytes, run.downlink_bytes = (
        sum(cluster.sent_bytes[way]) / workers / steps for way in ("uplink", "downlink")
    )
    return run
