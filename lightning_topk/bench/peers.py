"""The exchanges to compare: none, DDP's, its 16-bit and PowerSGD hooks, and ours; and a model that only exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_topk.adapters.attach import attach
from lightning_topk.config import CPU_BUCKET_MB

Settings = Mapping[str, Any]
"""Arguments of :func:`.attach`, for ours."""
Register = Callable[[DistributedDataParallel, Settings], Any]
"""Registers an exchange with a wrapped model; ours returns its state."""
COLUMNS = 1024


def alone(model: DistributedDataParallel, settings: Settings) -> None:
    """Exchanges nothing: each rank trains by itself."""
    model.require_backward_grad_sync = False


def dense(model: DistributedDataParallel, settings: Settings) -> None:
    """Leaves DDP's all-reduce."""


def hook(function: Callable[..., Any], state: Callable[[DistributedDataParallel], Any]) -> Register:
    """Registers one of torch's hooks, with a state made for the model."""
    return lambda model, settings: model.register_comm_hook(state(model), function)


FP16 = hook(default_hooks.fp16_compress_hook, lambda model: model.process_group)
BF16 = hook(default_hooks.bf16_compress_hook, lambda model: model.process_group)


def power_sgd(rank: int) -> Register:
    """PowerSGD (Vogels et al. 2019) of a rank, from the third step on."""
    options: dict[str, Any] = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
    return hook(powerSGD_hook.powerSGD_hook, lambda model: powerSGD_hook.PowerSGDState(model.process_group, **options))


def ours(**own: Any) -> Register:
    """Registers our exchange with the bench's settings and ``own``, whose ratio or saving counts."""
    amounts = {"ratio", "saving"} if {"ratio", "saving"} & own.keys() else set()

    def register(model: DistributedDataParallel, settings: Settings) -> Any:
        chosen = {name: value for name, value in settings.items() if name not in amounts}
        return attach(model, **{**chosen, **own})

    return register


def bucket_cap(peer: str, device: str = "cpu") -> float | None:
    """Bucket size of a peer in MiB, or None for DDP's own; for ours the strategy's.

    On CPUs PowerSGD gets one bucket: its hook hangs on gloo with several (torch 2.15).
    """
    if device != "cpu":
        return None
    if peer.startswith("PowerSGD"):
        return 10_000
    return CPU_BUCKET_MB if peer.startswith(("ours", "saving", "ratio")) else None


def power_sgd_elements(shapes: Iterable[Sequence[int]], rank: int) -> int:
    """Elements that PowerSGD of a rank sends for parameters of these shapes, instead of all.

    A parameter is a matrix of ``shape[0]`` rows. It is sent uncompressed unless that takes over twice the elements.
    """
    total = 0
    for shape in shapes:
        numel = math.prod(shape)
        columns = numel // shape[0] if len(shape) > 1 and numel else 0
        factors = (shape[0] + columns) * min(shape[0], columns, rank) if columns else numel
        total += factors if 2 * factors < numel else numel
    return total


def power_sgd_rank(shapes: Sequence[Sequence[int]], saving: float) -> int | None:
    """The rank of PowerSGD whose saving is nearest to ``saving``; None if it compresses no parameter."""
    numel = sum(map(math.prod, shapes))
    savings = {rank: numel / max(1, power_sgd_elements(shapes, rank)) for rank in range(1, 65)}
    if max(savings.values()) <= 1:
        return None
    return min(savings, key=lambda rank: abs(math.log(savings[rank] / saving)))


class Noise(nn.Module):
    """Matrices whose gradients are noise: a backward pass that costs next to nothing, so nothing hides an exchange.

    Backward starts at the weights, with ``gradients``.
    """

    def __init__(self, numel: int, seed: int) -> None:
        super().__init__()
        rows, rest = divmod(numel, COLUMNS)
        shapes = [(min(COLUMNS, rows - row), COLUMNS) for row in range(0, rows, COLUMNS)]
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in (*shapes, *([(rest,)] if rest else []))])
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [torch.randn(weight.shape, generator=generator) for weight in self.weights]

    @override
    def forward(self) -> list[Tensor]:
        """The weights."""
        return [*self.weights]

    def backward(self, model: nn.Module) -> None:
        """Runs backward through the wrapped module."""
        self.gradients = [each.to(self.weights[0].device) for each in self.gradients]
        torch.autograd.backward(model(), self.gradients)
