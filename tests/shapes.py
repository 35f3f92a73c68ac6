"""Codecs and endpoints of a bucket that is given by its elements, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_topk.build import make_codecs, make_endpoint, make_shape
from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Codecs, Endpoint


def codecs_of(config: TopKConfig, numel: int, world: int, step: int = 0) -> Codecs:
    """How payloads of a bucket are written at a step."""
    return make_codecs(config, make_shape(config, [numel], world), step)


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
    shape = make_shape(config, sizes, world, local)
    return make_endpoint(config, shape, rank, dtype, torch.device(device), uncompressed)
