"""What a model learns: its loss as a function of one flat vector of parameters, and the quality of a result."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import override

from lab.data import LENGTH, Data, digits, documentation, image_folder, source_code
from lab.models import LARGE, MODELS, SIDE, TEXT


class Problem:
    AT_ONCE = 32
    """A model as a function of one flat vector of parameters.

    Args:
        model: A key of :data:`lab.models.MODELS`.
        seed: Seed of the initial parameters.
        data: Training data, or a folder of images, see :func:`lab.data.folders`. Default: Python's
            documentation for models of text, its library's source code for the large ones, else digits.
        device: Device to compute on.

    Models with more than two million parameters train on a GPU as with ``precision="bf16-mixed"``.
    """

    def __init__(
        self, model: str, seed: int, data: Data | Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        own: Callable[[], Data] = source_code if model in LARGE else documentation if model in TEXT else digits
        if model == "tied gpt":
            own = partial(source_code, LENGTH)
        self.data = (image_folder(data) if isinstance(data, Path) else data or own()).to(device)
        self.examples = len(self.data.labels)
        torch.manual_seed(seed)
        self.net = MODELS[model]().to(device)
        self.parameters = list(self.net.parameters())
        self.start = torch.cat([p.detach().flatten() for p in self.parameters])
        # vmap does not support LSTMs, and is slower for large models on CPUs.
        large = len(self.start) > 200_000 or model in TEXT or data is not None
        recurrent = any(isinstance(part, nn.LSTM) for part in self.net.modules())
        self._mixed = len(self.start) > 2_000_000 and self.start.is_cuda
        self._vectorised = not recurrent and (not large or self.start.is_cuda)

    def gradients(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[Tensor]:
        """The gradient ``[d]`` of each worker.

        Args:
            theta: The parameters, ``[d]`` float32, or each worker's own, ``[W, d]``.
            batches: Indices of each worker's training examples, ``[W, B]`` int64.
            generator: Random generator of the data's augmentation.
        """
        drawn = self._draw(theta, batches, generator)
        if self._vectorised:
            gradient = torch.func.grad(lambda theta, batch: self._loss(self.weights(theta), *batch))
            own, stacked = None if theta.dim() == 1 else 0, [torch.stack(each) for each in zip(*drawn, strict=True)]
            return list(torch.func.vmap(gradient, (own, 0))(theta, stacked))
        found = []
        for each, batch in zip(theta.detach().expand(len(batches), -1), drawn, strict=True):
            weights = [weight.requires_grad_() for weight in self.weights(each)]
            gradients = torch.autograd.grad(self._loss(weights, *batch), weights)
            found.append(torch.cat([gradient.flatten() for gradient in gradients]))
        return found

    def _draw(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        """What each worker's loss is computed from; arguments as in :meth:`gradients`."""
        examples, labels = self.data.examples, self.data.labels
        return [(self.data.augment(examples[batch], generator), labels[batch]) for batch in batches]

    def evaluate(self, theta: Tensor) -> tuple[float, float, float]:
        """Loss on about 5,000 training examples, loss on held-out data, and accuracy on held-out data in percent."""
        some = slice(None, None, max(1, len(self.data.labels) // 5000))
        loss, _ = self._quality(theta, self.data.examples[some], self.data.labels[some])
        return loss, *self.held_out(theta)

    def held_out(self, theta: Tensor, stride: int = 1) -> tuple[float, float]:
        """Loss, and accuracy in percent, on every ``stride``-th held-out example."""
        return self._quality(theta, self.data.held_examples[::stride], self.data.held_labels[::stride])

    @torch.no_grad()
    def _quality(self, theta: Tensor, examples: Tensor, labels: Tensor) -> tuple[float, float]:
        loss, right, parts = 0.0, 0, math.ceil(len(labels) / 500)
        for part in range(parts):  # strided: folders are sorted by class, and batch norm mixes a part
            batch, wanted = examples[part::parts], labels[part::parts]
            scores = self._scores(self.weights(theta), batch)
            loss += float(nn.functional.cross_entropy(scores.flatten(0, -2), wanted.flatten(), reduction="sum"))
            right += int((scores.argmax(-1) == wanted).sum())
        return loss / labels.numel(), 100 * right / labels.numel()

    def weights(self, theta: Tensor) -> list[Tensor]:
        """The parameters: views of ``theta`` ``[d]``."""
        parts = theta.split([parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _scores(self, weights: list[Tensor], *inputs: Tensor) -> Tensor:
        named = {name: weight for (name, _), weight in zip(self.net.named_parameters(), weights, strict=True)}
        with torch.autocast(self.start.device.type, torch.bfloat16, enabled=self._mixed):
            scores: Tensor = torch.func.functional_call(self.net, named, inputs)
        return scores.float()

    def _loss(self, weights: list[Tensor], examples: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self._scores(weights, examples).flatten(0, -2), labels.flatten())


class Diffusion(Problem):
    """A network finds the noise in images of half the height and width (Ho et al. 2020, algorithm 1).

    The images' share of the variance falls along a cosine (Nichol and Dhariwal 2021, 3.2). Held-out noise and times are
    always the same.
    """

    @override
    def _draw(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        return [_noisy(self.data.examples[batch], generator) for batch in batches]

    @override
    def _loss(self, weights: list[Tensor], *batch: Tensor) -> Tensor:
        *inputs, noise = batch
        return nn.functional.mse_loss(self._scores(weights, *inputs), noise)

    @override
    @torch.no_grad()
    def _quality(self, theta: Tensor, examples: Tensor, labels: Tensor) -> tuple[float, float]:
        generator, examples = torch.Generator().manual_seed(0), examples[:: max(1, len(examples) // 2000)]
        losses = [self._loss(self.weights(theta), *_noisy(part, generator)) * len(part) for part in examples.split(500)]
        return float(sum(losses)) / len(examples), 0.0


def _noisy(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images ``[B, 3, H, W]``, their times ``[B]`` from 0 to 1, and their noise."""
    images = nn.functional.avg_pool2d(images, 2) / 2  # from -1 to 1
    times = torch.rand(len(images), generator=generator).to(images.device)
    noise = torch.randn(images.shape, generator=generator).to(images.device)
    angles = (times * math.pi / 2)[:, None, None, None]
    return angles.cos() * images + angles.sin() * noise, times, noise


class Agents(Problem):
    """Agents learn by PPO (Schulman et al. 2017) to walk to a goal on a grid. Quality is the mean reward of all steps.

    A step costs 0.05. The goal brings 1, and ends an episode, as 50 steps do; agent and goal start somewhere.
    A worker has as many agents as the batch has examples. Each batch of 32 steps is learned from in four optimizer steps.
    """

    AT_ONCE = 1
    STEPS, EPOCHS, LIMIT, GAMMA, LAMBDA = 16, 4, 50, 0.99, 0.95

    def __init__(
        self, model: str, seed: int, data: Data | Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(model, seed, None, device)
        self.examples, self.rewards, self._epoch = 1, list[float](), 0
        self._drawn: list[tuple[Tensor, ...]] = []
        self._state: Tensor | None = None

    @override
    def _draw(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        if self._epoch % self.EPOCHS == 0:
            self._drawn = self._play(theta, batches, generator)
        self._epoch += 1
        return self._drawn

    @torch.no_grad()
    def _play(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        workers, agents = batches.shape

        def anew() -> Tensor:
            return torch.randint(SIDE, (workers, agents, 4), generator=generator)

        moves = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])
        scores = torch.func.vmap(lambda theta, seen: self._scores(self.weights(theta), seen))
        outputs = partial(scores, theta.expand(workers, -1))

        if self._state is None:
            self._state, self._age = anew(), torch.zeros(workers, agents)
        states, actions, logs, rewards, values, ends, nexts = [], [], [], [], [], [], []
        for _ in range(self.STEPS):
            state = self._state
            out = outputs(state)
            policy = out[..., :4].log_softmax(-1)
            action = torch.multinomial(policy.exp().flatten(0, 1), 1, generator=generator).view(workers, agents)
            states.append(state)
            actions.append(action)
            logs.append(policy.gather(-1, action[..., None])[..., 0])
            values.append(out[..., 4])
            place = (state[..., :2] + moves[action]).clamp(0, SIDE - 1)
            there = (place == state[..., 2:]).all(-1)
            self._age += 1
            done = there | (self._age >= self.LIMIT)
            rewards.append(there.float() - 0.05)
            ends.append(done.float())
            self._age *= ~done
            self._state = torch.where(done[..., None], anew(), torch.cat([place, state[..., 2:]], -1))
        last = outputs(self._state)[..., 4]
        advantage, advantages = torch.zeros_like(last), list[Tensor]()
        for reward, value, end in zip(reversed(rewards), reversed(values), reversed(ends), strict=True):
            delta = reward + self.GAMMA * last * (1 - end) - value
            advantage = delta + self.GAMMA * self.LAMBDA * (1 - end) * advantage
            advantages.insert(0, advantage)
            last = value
        self.rewards.append(float(torch.stack(rewards).mean()))
        columns = [torch.stack(each, 1).flatten(1, 2) for each in (states, actions, logs, advantages, values)]
        return list(zip(*columns, strict=True))

    @override
    def _loss(self, weights: list[Tensor], *batch: Tensor) -> Tensor:
        states, actions, before, advantages, values = batch
        out = self._scores(weights, states)
        policy = out[:, :4].log_softmax(-1)
        ratio = (policy.gather(-1, actions[:, None])[:, 0] - before).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
        entropy = -(policy.exp() * policy).sum(-1).mean()
        return 0.5 * (out[:, 4] - values - advantages).square().mean() - gain - 0.01 * entropy

    @override
    def evaluate(self, theta: Tensor) -> tuple[float, float, float]:
        mean = sum(self.rewards) / len(self.rewards)
        return -mean, -mean, mean

    @override
    def held_out(self, theta: Tensor, stride: int = 1) -> tuple[float, float]:
        last = self.rewards[-20:]
        mean = sum(last) / len(last)
        return -mean, mean


def problem_of(model: str, seed: int, data: Data | Path | None = None, device: torch.device | str = "cpu") -> Problem:
    """The problem that a model learns, with the arguments of :class:`Problem`."""
    return {"diffusion": Diffusion, "ppo": Agents}.get(model, Problem)(model, seed, data, device)
