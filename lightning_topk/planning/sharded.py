"""What a model sharded by FSDP2 inside nodes, with top-k between them, sends and keeps: by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_topk.build import make_endpoint, make_shape
from lightning_topk.config import TopKConfig
from lightning_topk.planning.volume import format_bytes, volume
from lightning_topk.saving import with_ratio

UNIT = 200_000_000
"""Parameters that are wrapped together, at most: a block of a large transformer."""
WEIGHT, GATHERED, OPTIMIZER = 4, 2, 8
"""Bytes of a parameter: as it is kept, and reduced; as it is gathered, in bfloat16; and of Adam's moments for it."""


@dataclass(frozen=True)
class ShardedForecast:
    """What one way to exchange costs.

    Attributes:
        config: The settings.
        inter_node: Bytes that a node sends to other nodes in a step.
        intra_node: Bytes that its ranks send to each other: FSDP's two all-gathers and its reduce-scatter.
        residuals: Bytes that a rank keeps.
        states: Bytes of a rank's weights, gradients and optimizer, and of two units gathered; without activations.
    """

    config: TopKConfig
    inter_node: int
    intra_node: int
    residuals: int
    states: int


def sharded_forecast(parameters: int, nodes: int, ranks: int, config: TopKConfig) -> ShardedForecast:
    """Predicts a step.

    Args:
        parameters: Of the model.
        nodes: Replicas of it.
        ranks: Of a node, over which it is sharded.
        config: The settings.
    """
    units = math.ceil(parameters / UNIT)
    unit = math.ceil(parameters / units)
    shard = math.ceil(unit / ranks)
    sent = volume(config, [shard], nodes)
    here, residuals = config.on(nodes, 1), 0
    if here.compresses and nodes > 1:
        here = with_ratio(here, [shard], nodes)
        end = make_endpoint(here, make_shape(here, [shard], nodes), 0, torch.float32, torch.device("meta"))
        residuals = sum(kept.nbytes for link in end.links for kept in link.memory.tensors().values())
    return ShardedForecast(
        config,
        inter_node=units * ranks * sent.inter_node,
        intra_node=(ranks - 1) * units * shard * ranks * (2 * GATHERED + WEIGHT),
        residuals=units * residuals,
        states=units * shard * (2 * WEIGHT + OPTIMIZER) + 2 * unit * GATHERED * (ranks > 1),
    )


def sharded_table(found: Sequence[ShardedForecast], speed: float, memory: float) -> list[dict[str, object]]:
    """Rows for people.

    Args:
        found: What :func:`sharded_forecast` returned, of HSDP first.
        speed: Of a node's network, bytes per second.
        memory: Of a GPU, bytes.
    """
    return [
        {
            "exchange": f"saving {each.config.saving:g}" if each.config.saving else "all-reduce (HSDP)",
            "a node sends": format_bytes(each.inter_node),
            "at its speed": f"{each.inter_node / speed:.3g} s",
            "inside the node": format_bytes(each.intra_node),
            "residuals": format_bytes(each.residuals),
            "with weights, gradients, Adam": format_bytes(each.residuals + each.states),
            "of a GPU": f"{(each.residuals + each.states) / memory:.0%}",
        }
        for each in found
    ]
