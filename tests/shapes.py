"""Codecs and endpoints of a bucket that is given by its elements, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_topk.build import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Codecs, Endpoint


def codecs_of(config: TopKConfig, numel: int, world: int, step: int = 0) -> Codecs:
    """How payloads of a bucket are written at a step."""
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
