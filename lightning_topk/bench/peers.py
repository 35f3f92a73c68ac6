"""The exchanges to compare: none, DDP's, its 16-bit and PowerSGD hooks, and ours; and a model without computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_topk.adapters.attach import attach
from lightning_topk.config import CPU_BUCKET_MB

Backward = Callable[[nn.Module], None]  # runs forward and backward of a wrapped model


class Peer(NamedTuple):
    """An exchange. ``register`` takes arguments of :func:`.attach`; returns the state of ours, else None."""

    register: Callable[[DistributedDataParallel, Mapping[str, Any]], Any]
    bucket_mb: float | None = None  # size of DDP's buckets on CPUs, MiB; DDP's own
    warmup: int = 2  # untimed steps; DDP regroups its buckets after the first


def hook(function: Callable[..., Any], state: Callable[[DistributedDataParallel], Any], *others: Any) -> Peer:
    """Returns one of torch's hooks as a peer; ``state`` makes the hook's state for a model."""
    return Peer(lambda model, settings: model.register_comm_hook(state(model), function), *others)


ALONE = Peer(lambda model, settings: setattr(model, "require_backward_grad_sync", False))
"""Exchanges nothing: each rank trains by itself."""
DENSE = Peer(lambda model, settings: None)
BF16 = hook(default_hooks.bf16_compress_hook, lambda model: model.process_group)


def power_sgd(rank: int) -> Peer:
    """PowerSGD (Vogels et al. 2019) of this rank, from the third step on.

    On CPUs it gets one bucket: its hook hangs on gloo with several (torch 2.15).
    """

    def state(model: DistributedDataParallel) -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(model.process_group, rank, start_powerSGD_iter=2)

    return hook(powerSGD_hook.powerSGD_hook, state, 10_000, 4)


def ours(**own: Any) -> Peer:
    """Our exchange with the bench's settings and ``own``. Its residuals fill up in four steps."""
    return Peer(lambda model, settings: attach(model, **{**settings, **own}), CPU_BUCKET_MB, 4)


def power_sgd_elements(shapes: Iterable[Sequence[int]], rank: int) -> int:
    """Elements that PowerSGD of a rank sends for parameters of these shapes, instead of all.

    A parameter is a matrix of ``shape[0]`` rows. It is sent uncompressed unless that more than doubles its elements.
    """
    total = 0
    for shape in shapes:
        rows, columns = math.prod(shape[:1]), math.prod(shape[1:])
        factors = (rows + columns) * min(rows, columns, rank)
        total += factors if 2 * factors < rows * columns else rows * columns
    return total


def power_sgd_rank(shapes: Sequence[Sequence[int]], saving: float) -> int:
    """The rank of PowerSGD whose saving is nearest to ``saving``."""
    numel = sum(map(math.prod, shapes))
    return min(range(1, 65), key=lambda rank: abs(math.log(numel / power_sgd_elements(shapes, rank) / saving)))


class Weights(nn.Module):
    """Parameters without a model: backward starts at them with the caller's gradients, and costs almost nothing."""

    def __init__(self, values: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(values)

    @override
    def forward(self) -> list[Tensor]:
        """The parameters."""
        return [*self.weights]


def noise(numel: int, seed: int, device: torch.device) -> tuple[Weights, Backward]:
    """Returns matrices of up to 1024 x 1024 whose gradients are noise, and their backward, which hides no exchange."""
    rows, rest = divmod(numel, 1024)
    shapes = [(min(1024, rows - row), 1024) for row in range(0, rows, 1024)]
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(shape, generator=generator) for shape in (*shapes, *[(rest,)] * (rest > 0)))
    gradients = [each.to(device) for each in drawn]

    def backward(model: nn.Module) -> None:
        torch.autograd.backward(model(), gradients)

    return Weights(map(torch.zeros_like, gradients)), backward
