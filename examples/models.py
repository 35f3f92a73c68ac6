"""The models of the classifier example. None of them knows how it is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
        nn.Linear(128, classes),
    )  # fmt: skip


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Three convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, classes),
    )  # fmt: skip


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut that drops pixels and pads channels (option A of He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.stride, self.widen = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, outputs, H / stride, W / stride]``."""
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widen))
        return torch.relu(self.body(x) + shortcut)


def resnet20(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The ResNet-20 for CIFAR-10 of He et al. 2016: 0.27 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(BasicBlock(width, outputs, stride=2 if block == 0 and outputs > 16 else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def vgg16(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """VGG-16 with batch norm from torchvision, with one linear layer for 32 x 32 pixels: 14.7 million parameters."""
    from torchvision.models import vgg16_bn

    features = vgg16_bn(weights=None).features
    features[0] = nn.Conv2d(shape[0], 64, 3, padding=1)
    return nn.Sequential(
        nn.Upsample((32, 32)) if shape[1] < 32 else nn.Identity(), features, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(512, classes),
    )  # fmt: skip


MODELS = {"mlp": mlp, "cnn": cnn, "resnet20": resnet20, "vgg16": vgg16}
"""Models by name; each takes the images' shape [C, H, W] and the number of classes."""
