"""The models of the examples and of the papers' claims. None of them depends on how it is trained."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lab.commands import need
from lab.data import CHARACTERS, ITEMS, LENGTH, LONG, USERS

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""
Norm = Callable[[int], nn.Module]
"""Makes the norm layer for a number of channels."""
GROUP_NORM: Norm = partial(nn.GroupNorm, 8)
"""Has no buffers to average: a gradient depends on its batch alone."""
BATCH_NORM: Norm = partial(nn.BatchNorm2d, track_running_stats=False)
"""Uses the statistics of each batch, in evaluation too."""


def mlp(shape: Shape, classes: int, hidden: Sequence[int] = (256, 128)) -> nn.Module:
    """Hidden layers with ReLU on all pixels."""
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Two convolutions, pooling, and a linear layer."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (height // 2) * (width // 2), classes),
    )  # fmt: skip


class Block(nn.Module):
    """Two convolutions beside a shortcut that drops pixels and pads channels (He et al. 2016, option A).

    ``outputs`` is ``inputs`` or twice that; if twice, height and width are halved.
    """

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.stride, self.widen = outputs // inputs, outputs - inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False), norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs),
        )  # fmt: skip

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, outputs, H / stride, W / stride]``."""
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widen))
        return torch.relu(self.body(x) + shortcut)


def resnet(shape: Shape, classes: int, widths: Sequence[int], norm: Norm, stride: int = 1) -> nn.Module:
    """A residual network (He et al. 2016): a convolution to ``widths[0]`` channels, then a block to each next width."""
    blocks = [Block(a, b, norm) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(shape[0], widths[0], 3, stride, padding=1, bias=False), norm(widths[0]), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes),
    )  # fmt: skip


def resnet20(shape: Shape, classes: int, norm: Norm = nn.BatchNorm2d) -> nn.Module:
    """The ResNet-20 for CIFAR-10: 0.27 million parameters."""
    return resnet(shape, classes, (16, 16, 16, 16, 32, 32, 32, 64, 64, 64), norm)


def resnet18(width: int = 64, stride: int = 1) -> nn.Module:
    """A ResNet-18 for 32 x 32 colour images in ten classes, with group norms: by default, 11 million parameters."""
    widths = (width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width)
    return resnet((3, 32, 32), 10, widths, GROUP_NORM, stride)


def convnet(norm: Norm = GROUP_NORM) -> nn.Module:
    """Four convolutions with norms for 32 x 32 colour images in ten classes: 0.2 million parameters."""
    widths, layers = (3, 24, 48, 96, 192), list[nn.Module]()
    for a, b in itertools.pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), norm(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class RowLSTM(nn.Module):
    """Reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[B, 1, 8, 8]`` to scores ``[B, 10]``."""
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


class TextLSTM(nn.Module):
    """Predicts the next character or word from all earlier ones."""

    def __init__(
        self, vocabulary: int = CHARACTERS, width: int = 32, hidden: int = 128, depth: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, hidden, depth, batch_first=True, dropout=dropout * (depth > 1))
        self.head = nn.Linear(hidden, vocabulary)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to scores ``[B, T, vocabulary]``."""
        return self.head(self.drop(self.lstm(self.drop(self.embedding(x)))[0]))


class GPT(nn.Module):
    """A transformer that predicts the next character: pre-norm blocks, GELU, no dropout."""

    def __init__(
        self, width: int = 64, depth: int = 2, heads: int = 4, length: int = LENGTH, vocabulary: int = CHARACTERS,
        tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to scores ``[B, T, vocabulary]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        states = self.embedding(x) + self.position[: x.shape[1]]
        return self.head(self.blocks(states, mask, is_causal=True))


def large_gpt(width: int = 384, depth: int = 6) -> nn.Module:
    """A GPT of 10.8 million parameters by default, initialised as GPT-2 (Radford et al. 2019, 2.3)."""
    net = GPT(width, depth, width // 64, LONG)
    for name, weight in net.named_parameters():
        if weight.dim() > 1:
            last = name.endswith(("out_proj.weight", "linear2.weight"))  # layer of a residual branch
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth) if last else 0.02)
    return net


class Attention(nn.Module):
    """Causal self-attention, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inputs = heads, nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, width]`` to the same."""
        split = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class TiedGPT(nn.Module):
    """A GPT as most scripts build it: embedding and head are tied, linear layers have no biases (0.35 million).

    Initialised as GPT-2 (Radford et al. 2019, 2.3).
    """

    def __init__(self, width: int = 96, depth: int = 3, heads: int = 3) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(CHARACTERS, width), nn.Embedding(LENGTH, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(depth))
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False),
            ) for _ in range(depth)
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, CHARACTERS, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                branch = name.endswith(("output.weight", ".2.weight"))  # the last layer of a residual branch
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth) if branch else 0.02)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to scores ``[B, T, CHARACTERS]``."""
        states = self.embedding(x) + self.position.weight[: x.shape[1]]
        for number, (attention, layer) in enumerate(zip(self.attention, self.layers, strict=True)):
            states = states + attention(self.norms[2 * number](states))
            states = states + layer(self.norms[2 * number + 1](states))
        return self.head(self.norms[-1](states))


class GPT2(nn.Module):
    """The GPT-2 of Transformers, 0.12 million parameters, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        need("transformers")
        from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found, unused-ignore]

        sizes = {"vocab_size": CHARACTERS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
        others = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        config: Any = GPT2Config(**sizes, **others)  # type: ignore[arg-type, unused-ignore]
        self.inner: nn.Module = GPT2LMHeadModel(config)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to scores ``[B, T, CHARACTERS]``."""
        return self.inner(x).logits


class TimedBlock(nn.Module):
    """Two convolutions beside a shortcut, the first of which is scaled and shifted by the time (Ho et al. 2020)."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(a, outputs, 3, padding=1) for a in (inputs, outputs))
        self.norms = nn.ModuleList(GROUP_NORM(outputs) for _ in range(2))
        self.time = nn.Linear(times, 2 * outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    @override
    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` and embedded times ``[N, times]`` to ``[N, outputs, H, W]``."""
        scale, shift = self.time(times)[:, :, None, None].chunk(2, 1)
        hidden = nn.functional.silu(self.norms[0](self.first(x)) * (scale + 1) + shift)
        return nn.functional.silu(self.norms[1](self.second(hidden))) + self.shortcut(x)


class UNet(nn.Module):
    """Finds the noise in images (Ho et al. 2020): a U-Net of two levels with group norms, 0.2 million parameters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.frequencies = [math.exp(-math.log(1e4) * 2 * number / width) for number in range(width // 2)]
        times = 2 * width
        self.times = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            TimedBlock(a, b, times) for a, b in ((width, width), (2 * width, 2 * width), (2 * width, width))
        )
        self.down, self.up = nn.Conv2d(width, 2 * width, 4, 2, 1), nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = nn.Conv2d(width, 3, 1)

    @override
    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Noisy images ``[N, 3, H, W]`` and times ``[N]`` from 0 to 1 to their noise."""
        angles = 1000 * times[:, None] * times.new_tensor(self.frequencies)
        embedded = self.times(torch.cat([angles.sin(), angles.cos()], 1))
        fine = self.blocks[0](self.first(x), embedded)
        coarse = self.blocks[1](self.down(fine), embedded)
        up = self.up(nn.functional.interpolate(coarse, scale_factor=2.0))
        return self.last(self.blocks[2](torch.cat([up, fine], 1), embedded))


SIDE = 8
"""Height and width of the grid on which agents walk."""


class Walker(nn.Module):
    """Scores of four moves, and the value, from the place of an agent and of its goal: one network for both."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        layers = [nn.Linear(4 * SIDE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5)]
        self.layers = nn.Sequential(*layers)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Rows and columns of agent and goal, ``[N, 4]`` int64, to scores and value ``[N, 5]``."""
        return self.layers((x[:, :, None] == torch.arange(SIDE, device=x.device)).flatten(1).float())


class TwoHeads(nn.Module):
    """Two outputs for 32 inputs, from a trunk that both share: 0.04 million parameters."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        heads = (nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 1)) for _ in range(2))
        self.heads = nn.ModuleList(heads)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[N, 32]`` to ``[N, 2]``."""
        shared = self.trunk(x)
        return torch.cat([head(shared) for head in self.heads], 1)


class ViT(nn.Module):
    """Features of the 64 patches of a 32 x 32 colour image (Dosovitskiy et al. 2021): 0.2 million parameters."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, width, 4, 4), nn.Parameter(0.02 * torch.randn(64, width))
        self.blocks = nn.ModuleList(vit_block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    @override
    def forward(self, images: Tensor, seen: Tensor | None = None) -> Tensor:
        """``[N, 3, 32, 32]`` to ``[N, 64, width]``, or to ``[N, S, width]``, of the patches ``seen`` ``[N, S]``."""
        x = self.patches(images).flatten(2).mT + self.position
        if seen is not None:
            x = taken(x, seen)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def vit_block(width: int) -> nn.Module:
    """A pre-norm block with four heads."""
    return nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)


def taken(x: Tensor, places: Tensor) -> Tensor:
    """Of ``x`` ``[N, P, width]``, that at ``places`` ``[N, S]``: ``[N, S, width]``."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


class MaskedAutoencoder(nn.Module):
    """From a quarter of an image's patches, finds the pixels of the others (He et al. 2022)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder, self.decoder = ViT(width), vit_block(width)
        self.hidden, self.position = (nn.Parameter(0.02 * torch.randn(count, width)) for count in (1, 64))
        self.pixels = nn.Linear(width, 48)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """``[N, 3, 32, 32]`` to the mean squared error of the hidden patches' normalised pixels."""
        order = torch.rand(len(images), 64).argsort(1).to(images.device)
        seen, hidden = order.split([16, 48], 1)
        known = self.encoder(images, seen)
        x = torch.cat([known, self.hidden.expand(len(images), 48, -1)], 1) + self.position[order]
        patches = nn.functional.pixel_unshuffle(images, 4).flatten(2).mT
        wanted = nn.functional.layer_norm(taken(patches, hidden), (48,))
        return nn.functional.mse_loss(self.pixels(self.decoder(x))[:, 16:], wanted)


class ViTClassifier(nn.Module):
    """Scores of ten classes from the mean feature of a :class:`ViT`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = ViT(), nn.Linear(64, 10)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """``[N, 3, 32, 32]`` to scores ``[N, 10]``."""
        return self.head(self.encoder(images).mean(1))


class VAE(nn.Module):
    """A variational autoencoder of digits (Kingma and Welling 2014), after PyTorch's example: 0.1 million weights."""

    def __init__(self, hidden: int = 600, code: int = 20) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    @override
    def forward(self, images: Tensor) -> Tensor:
        """``[N, 1, 8, 8]``, from 0 to 1, to the bound of an image's likelihood."""
        mean, log_var = self.encoder(images).chunk(2, -1)
        found = self.decoder(mean + (log_var / 2).exp() * torch.randn_like(mean))
        error = nn.functional.binary_cross_entropy_with_logits(found, images.flatten(1), reduction="sum")
        divergence = (mean.square() + log_var.exp() - 1 - log_var).sum() / 2
        return (error + divergence) / len(images)


class Recommender(nn.Module):
    """Ratings from embeddings of user and item, after neural collaborative filtering (He et al. 2017)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        for embedding in (self.users, self.items):
            nn.init.normal_(embedding.weight, std=0.1)
        self.layers = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    @override
    def forward(self, pairs: Tensor) -> Tensor:
        """User and item ``[N, 2]`` int64 to ratings ``[N]``."""
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return self.layers(torch.cat([user, item, user * item], -1))[:, 0]


DIGIT: Shape = (1, 8, 8)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": partial(mlp, DIGIT, 10, (64,)),
    "wide mlp": partial(mlp, DIGIT, 10, (512,)),
    "cnn": partial(cnn, DIGIT, 10),
    "lstm": RowLSTM,
    "resnet20": partial(resnet20, (3, 32, 32), 10, GROUP_NORM),
    "convnet": convnet,
    "batch-norm convnet": partial(convnet, norm=BATCH_NORM),
    "char lstm": TextLSTM,
    "gpt": GPT,
    "gpt2": GPT2,
    "tied gpt": TiedGPT,
    "large gpt": large_gpt,
    "huge gpt": partial(large_gpt, 768, 12),
    "narrow resnet18": partial(resnet18, 32, stride=2),
    "resnet18": resnet18,
    "diffusion": UNet,
    "ppo": Walker,
    "two losses": TwoHeads,
}
"""Models for simulated workers: four for digits (``mlp`` is the thesis's 784-64-10 at this size), six for colour images
(``narrow resnet18`` has 2.8 million parameters), six for text (``huge gpt`` has 85 million), one for agents, one of two
tasks."""
LARGE = ("large gpt", "huge gpt")
"""Models that learn source code, in long pieces; ``tied gpt`` in short ones."""
TEXT = ("char lstm", "gpt", "gpt2", "tied gpt", *LARGE)
"""Models that learn text."""
