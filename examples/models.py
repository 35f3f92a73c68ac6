"""Models of the classifier example: those of the package, and a large one. None depends on how it is trained."""

from __future__ import annotations

from torch import nn

from lightning_topk.lab.models import Shape, cnn, mlp, resnet20


def vgg16(shape: Shape, classes: int) -> nn.Module:
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
