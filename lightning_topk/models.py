"""Models by name, with untrained weights, for ``plan`` and ``bench``: torchvision's, GPTs, and a user's class."""

from __future__ import annotations

import difflib
import importlib

from torch import Tensor, nn


class GPT(nn.Module):
    """A GPT with the shape of GPT-2 (Radford et al. 2019), without dropout; the head shares the embedding's weights.

    Takes ``[B, T]`` int64, T at most :data:`CONTEXT`; returns logits ``[B, T, VOCABULARY]``.
    """

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits of the next token at each position."""
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        h = self.tokens(x) + self.places.weight[:length]
        return nn.functional.linear(self.blocks(h, mask, is_causal=True), self.tokens.weight)


VOCABULARY, CONTEXT = 50_257, 1024
GPTS = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
"""Depth, width and heads, by name."""


def make_module(model: str | None = None, module: str | None = None) -> nn.Module:
    """Makes a model by its name, or an instance of a class. Refuses one without trained parameters."""
    if model in GPTS:
        return GPT(*GPTS[model])
    try:
        if model is not None:
            import torchvision

            return torchvision.models.get_model(model, weights=None)
        folder, _, name = str(module).rpartition(".")
        made = getattr(importlib.import_module(folder), name)()
        if not sum(each.numel() for each in nn.Module.parameters(made) if each.requires_grad):
            raise ValueError(f"{name} has no trained parameters")
        return made
    except Exception as error:  # a constructor may raise any
        option = f"--module {module}" if model is None else f"--model {model}"
        needs = "Write it like mine.models.Net: importable, callable without arguments, a module with trained weights."
        if model is not None:
            needs = _nearest(model) if isinstance(error, ValueError) else "Install torchvision for this torch."
        raise ValueError(f"{option}: {type(error).__name__}: {error}. {needs}") from error


def _nearest(model: str) -> str:
    """Names the nearest models, or says which names are known."""
    import torchvision

    known = [*GPTS, *torchvision.models.list_models()]
    near = ", ".join(difflib.get_close_matches(model.lower(), known))
    return f"The nearest names are {near}." if near else f"Use {', '.join(GPTS)}, or the name of a torchvision model."
