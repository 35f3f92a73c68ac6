"""What a model learns: its loss as a function of one flat vector of parameters, and the quality of a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from typing_extensions import override

from lab.data import LENGTH, Data, digits, documentation, image_folder, source_code
from lab.models import LARGE, MODELS, SIDE, TEXT


class Problem:
    """A model as a function of one flat vector of parameters.

    Args:
        model: A key of :data:`lab.models.MODELS`.
        seed: Seed of the initial parameters.
        data: Training data, or a folder of images, see :func:`lab.data.folders`. Default: Python's
            documentation for models of text, its library's source code for the large ones, else digits.
        device: Device to compute on.

    Models with more than two million parameters train on a GPU as with ``precision="bf16-mixed"``.
    """

    together = 32
    """Examples whose mean gradient is computed at once where the exchange needs no more: this is faster."""

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

    def _loss(self, weights: list[Tensor], *batch: Tensor) -> Tensor:
        examples, labels = batch
        return nn.functional.cross_entropy(self._scores(weights, examples).flatten(0, -2), labels.flatten())


class Diffusion(Problem):
    """A network finds the noise in images of half the height and width (Ho et al. 2020, algorithm 1).

    The images' amplitude falls along a cosine over time (Nichol and Dhariwal 2021, 3.2). About 2,000 held-out images
    are evaluated, always with the same noise and times.
    """

    @override
    def _draw(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        return [_noisy(self.data.examples[batch], generator) for batch in batches]

    @override
    def _loss(self, weights: list[Tensor], *batch: Tensor) -> Tensor:
        images, times, noise = batch
        return nn.functional.mse_loss(self._scores(weights, images, times), noise)

    @override
    @torch.no_grad()
    def _quality(self, theta: Tensor, examples: Tensor, labels: Tensor) -> tuple[float, float]:
        generator, examples = torch.Generator().manual_seed(0), examples[:: max(1, len(examples) // 2000)]
        parts = ((len(part), _noisy(part, generator)) for part in examples.split(500))
        return sum(count * float(self._loss(self.weights(theta), *part)) for count, part in parts) / len(examples), 0.0


def _noisy(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images ``[B, C, H / 2, W / 2]``, their times ``[B]`` from 0 to 1, and their noise, of their shape."""
    images = nn.functional.avg_pool2d(images, 2) / 2  # between -1 and 1
    times = torch.rand(len(images), generator=generator).to(images.device)
    noise = torch.randn(images.shape, generator=generator).to(images.device)
    angles = (math.pi / 2 * times)[:, None, None, None]
    return angles.cos() * images + angles.sin() * noise, times, noise


class Agents(Problem):
    """Agents learn by PPO (Schulman et al. 2017) to walk to a goal on a grid, with one network for policy and value.

    A step costs 0.05, and the goal brings 1. An episode ends there, or after 50 steps; places of start and goal are
    random. Each worker has as many agents as its batch has examples. They take 16 steps, from which four optimizer
    steps learn; advantages are those of Schulman et al. 2016. Quality is the reward of 100 steps, over the whole run.
    """

    together = 1  # a worker normalises its advantages
    _moves = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])

    def __init__(
        self, model: str, seed: int, data: Data | Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(model, seed, None, device)
        self.examples = 1  # nothing is drawn
        self._rewards: list[float] = []
        self._played: list[tuple[Tensor, ...]] = []
        self._steps, self._ages = 0, torch.zeros(())
        self._places = torch.empty(0)

    @override
    def _draw(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        if self._steps % 4 == 0:
            self._played = self._play(theta, len(batches), batches.shape[1], generator)
        self._steps += 1
        return self._played

    @torch.no_grad()
    def _play(self, theta: Tensor, workers: int, agents: int, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        """Each worker's places, actions, their log-probabilities, advantages and values, ``[16 * B, ...]``."""
        anew = partial(torch.randint, SIDE, (workers, agents, 4), generator=generator)
        network = torch.func.vmap(lambda theta, places: self._scores(self.weights(theta), places))

        def outputs() -> Tensor:
            return network(theta.expand(workers, -1), self._places.to(theta.device)).cpu()

        if not self._steps:
            self._places = anew()
        taken = []
        for _ in range(16):
            places, out = self._places, outputs()
            policy = out[..., :4].log_softmax(-1)
            actions = policy.exp().flatten(0, 1).multinomial(1, generator=generator).view(workers, agents, 1)
            there, goals = (places[..., :2] + self._moves[actions[..., 0]]).clamp(0, SIDE - 1), places[..., 2:]
            reached = (there == goals).all(-1, keepdim=True)
            on = ~reached & (self._ages < 49)
            self._ages = (self._ages + 1) * on
            self._places = torch.where(on, torch.cat([there, goals], -1), anew())
            taken.append((places, actions, policy.gather(-1, actions), out[..., 4:], reached.float() - 0.05, on))
        places, actions, before, values, rewards, on = (torch.stack(each, 1) for each in zip(*taken, strict=True))
        advantages = rewards - values + 0.99 * on * torch.cat([values[:, 1:], outputs()[:, None, :, 4:]], 1)
        for step in reversed(range(15)):
            advantages[:, step] += 0.99 * 0.95 * on[:, step] * advantages[:, step + 1]
        self._rewards.append(100 * float(rewards.mean()))
        parts = (places, actions, before, advantages, values)
        return [*zip(*(part.flatten(1, 2).to(theta.device) for part in parts), strict=True)]

    @override
    def _loss(self, weights: list[Tensor], *batch: Tensor) -> Tensor:
        places, actions, before, advantages, values = batch
        policy, now = self._scores(weights, places).split([4, 1], -1)
        policy = policy.log_softmax(-1)
        ratio = (policy.gather(-1, actions) - before).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
        entropy = -(policy.exp() * policy).sum(-1).mean()
        return 0.5 * (now - values - advantages).square().mean() - gain - 0.01 * entropy

    @override
    def evaluate(self, theta: Tensor) -> tuple[float, float, float]:
        reward = fmean(self._rewards)
        return -reward, -reward, reward

    @override
    def held_out(self, theta: Tensor, stride: int = 1) -> tuple[float, float]:
        reward = fmean(self._rewards[-20:])
        return -reward, reward


class TwoLosses(Problem):
    """Two tasks, whose losses count 1 and 100: to find what two random networks say of random inputs, in noise.

    The losses of a result are those of the first task.
    """

    def __init__(
        self, model: str, seed: int, data: Data | Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(model, seed, None, device)
        self.examples = 1  # inputs are drawn anew in each step
        random = torch.Generator().manual_seed(seed)
        shapes = (32, 32, 64), (64, 64, 1)  # fan-in, and the shape of a layer
        self._teachers = [
            [(torch.randn(*shape, generator=random) / fan_in**0.5).to(device) for fan_in, *shape in shapes]
            for _ in range(2)
        ]

    def _task(self, examples: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs ``[B, 32]``, and what is said of them ``[B, 2]``."""
        x = torch.randn(examples, 32, generator=generator).to(self.start.device)
        said = torch.cat([1.5 * (x @ first).relu() @ second for first, second in self._teachers], 1)
        return x, said + noise * torch.randn(said.shape, generator=generator).to(x.device)

    @override
    def _draw(self, theta: Tensor, batches: Tensor, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        return [self._task(len(batch), 0.1, generator) for batch in batches]

    @override
    def _loss(self, weights: list[Tensor], *batch: Tensor) -> Tensor:
        x, said = batch
        return ((self._scores(weights, x) - said).square().mean(0) * said.new_tensor([1.0, 100.0])).sum()

    @override
    def evaluate(self, theta: Tensor) -> tuple[float, float, float]:
        return self.held_out(theta)[0], *self.held_out(theta)

    @override
    @torch.no_grad()
    def held_out(self, theta: Tensor, stride: int = 1) -> tuple[float, float]:
        x, said = self._task(4096, 0.0, torch.Generator().manual_seed(0))
        return float((self._scores(self.weights(theta), x) - said)[:, 0].square().mean()), 0.0


PROBLEMS: Mapping[str, type[Problem]] = {"diffusion": Diffusion, "ppo": Agents, "two losses": TwoLosses}
"""What models learn that do not classify."""
