"""Codecs and endpoints of a bucket of a given size, and vectors that are hard to select from."""

from collections.abc import Sequence

import torch

from lightning_topk.build import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Codecs, Endpoint


def codecs_of(config: TopKConfig, numel: int, world: int, step: int = 0) -> Codecs:
    """The codecs of a bucket at a step."""
    return plan_bucket(config, [numel], world).codecs(step)


def endpoint_of(
    config: TopKConfig,
    sizes: Sequence[int],
    rank: int,
    world: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    local: int = 1,
    uncompressed: Sequence[int] = (),
) -> Endpoint:
    """The endpoint of a rank, with empty memories."""
    plan = plan_bucket(config, sizes, world, local, dtype.itemsize, uncompressed)
    return plan.endpoint(rank, dtype, torch.device(device))


def residual_and_gradient(name: str, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual and a gradient."""
    generator = torch.Generator().manual_seed(numel)
    e, x = (torch.randn(2, numel, generator=generator) * torch.tensor([[0.1], [1.0]])).unbind()
    if name == "ties":
        e, x = torch.zeros(numel), (2 * x).round()
    elif name == "equal":
        e, x = torch.zeros(numel), torch.ones(numel)
    elif name == "zero":
        e, x = torch.zeros(numel), torch.zeros(numel)
    elif name == "spike":
        e, x = torch.zeros(numel), torch.nn.functional.one_hot(torch.tensor(5), numel).float()
    elif name == "denormal":
        e, x = e * 1e-40, x * 1e-40
    elif name == "overflowing":  # more than k entries
        e[: numel // 2], x[: numel // 2] = 3e38, 2e38
    elif name == "sorted":
        e, x = e.abs().sort().values, x.abs().sort().values
    elif name == "sparse":
        e, x = torch.zeros(numel), x * (torch.rand(numel, generator=generator) < 0.0005)
    elif name == "one shard":  # one shard has large values: a sample misjudges the others
        x = x * (1 + 99 * (torch.arange(numel) // 256 % 3 == 0))
    return e.clone(), x.clone()
