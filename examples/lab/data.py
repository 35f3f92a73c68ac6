"""Data for the models: scikit-learn's digits, Python's documentation and source code, and folders of images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from sysconfig import get_path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lab.commands import need

CHARACTERS, LENGTH, LONG = 128, 64, 128
"""Size of the alphabet, and T: lengths of a piece of text."""
WORDS, USERS, ITEMS = 2000, 3000, 2000
"""Sizes of the vocabulary of words, and of the table of ratings."""


@dataclass(frozen=True)
class Data:
    """Training and held-out examples with their labels.

    Images ``[N, C, H, W]`` float32 with labels ``[N]`` int64; or text ``[N, T]`` int64 with the next characters,
    ``[N, T]`` int64, as labels; or pairs of user and item ``[N, 2]`` int64 with ratings ``[N]`` float32. ``augment``
    transforms a batch of training examples.
    """

    examples: Tensor
    labels: Tensor
    held_examples: Tensor
    held_labels: Tensor
    augment: Callable[[Tensor, torch.Generator], Tensor] = lambda examples, generator: examples

    def to(self, device: torch.device | str) -> Data:
        """Copies the data to a device."""
        parts: dict[str, Any] = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **{name: part.to(device) for name, part in parts.items()})


@cache
def digits() -> Data:
    """scikit-learn's 1,797 digits of 8 x 8 pixels in ten classes; every fifth is held out."""
    need("sklearn", "scikit-learn")
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    out = torch.arange(len(labels)) % 5 == 0
    return Data(images[~out], labels[~out], images[out], labels[out])


@cache
def documentation() -> Data:
    """The topics of Python's own ``help()``, 0.46 million characters in Python 3.11; every tenth piece is held out."""
    text, known = _topics()
    return _pieces([known.get(character, 0) for character in text], LENGTH)


def _pieces(text: list[int], length: int) -> Data:
    """Pieces of a text of numbers; every tenth is held out."""
    pieces = torch.tensor(text).unfold(0, length + 1, length)
    out = torch.arange(len(pieces)) % 10 == 0
    return Data(pieces[~out, :-1], pieces[~out, 1:], pieces[out, :-1], pieces[out, 1:])


@cache
def documentation_words() -> Data:
    """:func:`documentation` in pieces of 35 words and signs, of which the rarer ones are one word."""
    text = re.findall(r"\w+|[^\w\s]", _topics()[0])
    known = {word: number for number, (word, _) in enumerate(Counter(text).most_common(WORDS - 1), 1)}
    return _pieces([known.get(word, 0) for word in text], 35)


@cache
def ratings() -> Data:
    """100,000 ratings that a made-up table of low rank gives, with noise; every tenth is held out.

    How often a user or an item occurs falls as one over its number: most are rare.
    """
    generator, count, rank = torch.Generator().manual_seed(0), 100_000, 8
    parts, tastes = [], []
    for number in (USERS, ITEMS):
        frequency = 1 / torch.arange(1.0, number + 1)
        parts.append(frequency.multinomial(count, replacement=True, generator=generator))
        tastes.append(torch.randn(number, rank, generator=generator)[parts[-1]])
    scores = (tastes[0] * tastes[1]).mean(-1) + (tastes[0] + tastes[1])[:, 0] / 2
    scores += 0.5 * torch.randn(count, generator=generator)
    pairs, out = torch.stack(parts, 1), torch.arange(count) % 10 == 0
    return Data(pairs[~out], scores[~out], pairs[out], scores[out])


def _topics() -> tuple[str, dict[str, int]]:
    """The text of :func:`documentation`, and the numbers of its characters."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    return text, {character: number for number, character in enumerate(sorted(set(text))[:CHARACTERS])}


@cache
def source_code(length: int = LONG) -> Data:
    """The source code of Python's standard library, some 30 million characters; every twentieth file is held out.

    About 2,000 pieces are held out, spread over these files.
    """
    library = Path(get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    parts: list[Tensor] = []
    for which in ([path for number, path in enumerate(files) if number % 20], files[::20]):
        text = bytearray(b"".join(path.read_bytes() for path in which))
        codes = torch.frombuffer(text, dtype=torch.uint8).clamp(max=CHARACTERS - 1).long()
        parts.append(codes.unfold(0, length + 1, length))
    pieces, out = parts[0], parts[1][:: max(1, len(parts[1]) // 2000)]
    return Data(pieces[:, :-1], pieces[:, 1:], out[:, :-1], out[:, 1:])


@cache
def source_as_documentation() -> Data:
    """:func:`source_code` in pieces as short as those of :func:`documentation`, with the same numbers of characters."""
    code, (_, known) = source_code(LENGTH), _topics()
    numbers = torch.tensor([known.get(chr(character), 0) for character in range(CHARACTERS)])
    return Data(numbers[code.examples], numbers[code.labels], numbers[code.held_examples], numbers[code.held_labels])


@cache
def image_folder(folder: Path) -> Data:
    """The images of a folder, see :func:`folders`, resized to 32 x 32 and augmented by :func:`crop_and_flip`."""
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    normal = v2.Normalize([0.5] * 3, [0.25] * 3)
    transform = v2.Compose([v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normal])
    parts: list[Tensor] = []
    for name, part in zip(("train", "test"), folders(folder, transform, transform), strict=True):
        images, numbers = zip(*tqdm(part, desc=f"reading {name}"), strict=True)
        # Convolutions are fastest with channels last.
        parts += [torch.stack(images).contiguous(memory_format=torch.channels_last), torch.tensor(numbers)]
    examples, labels, held_examples, held_labels = parts
    return Data(examples, labels, held_examples, held_labels, crop_and_flip)


def first_classes(data: Data, count: int) -> Data:
    """The images of the first classes alone."""
    chosen, held = data.labels < count, data.held_labels < count
    return Data(
        data.examples[chosen], data.labels[chosen], data.held_examples[held], data.held_labels[held], data.augment
    )


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts images ``[N, C, H, W]`` by up to four pixels and mirrors half of them at random (He et al. 2016, 4.2)."""
    count, _, height, width = images.shape
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    rows, columns = down + torch.arange(height), torch.arange(width)
    columns = right + torch.where(mirrored, columns.flip(0), columns)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def folders(root: Path, transform: Any, held_transform: Any) -> tuple[Any, Any]:
    """The training images ``root/train/<class>/*`` and the held-out images ``root/test/<class>/*``.

    Raises:
        ValueError: One of the two folders is missing.
    """
    from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise ValueError(f"there is no folder {root / part}. Put images into train/<class>/ and test/<class>/.")
    return ImageFolder(root / "train", transform), ImageFolder(root / "test", held_transform)
