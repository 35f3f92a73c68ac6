"""What all ranks agree on before they exchange anything: the settings, the nodes, and groups to do it in."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec

import torch.distributed as dist

from lightning_topk.config import TopKConfig, value_or_error
from lightning_topk.runtime.groups import Groups, check_agreement, gathered

AHEAD = 1000
"""Steps for which ranks compare functions of the step at a time."""


def connect(
    config: TopKConfig,
    process_group: dist.ProcessGroup | None,
    timeout: timedelta | None,
    local_world_size: int | None,
    shards_per_node: int,
) -> tuple[Groups, TopKConfig]:
    """Creates this rank's groups, and agrees with the others on settings and nodes. A collective.

    Args:
        config: The settings that the user gave.
        process_group: The ranks, and their backend. Default: all.
        timeout: After which a collective that some rank does not join fails. Default: that of ``process_group``.
        local_world_size: Ranks of each node, if the user said so.
        shards_per_node: How many ranks of this node, this one included, exchange a shard of the same gradients each.

    Returns:
        The groups, and the settings on these ranks.

    Raises:
        ValueError: The ranks have different settings, or do not make up whole nodes.
    """
    groups = replace(Groups.make(process_group, timeout), shards_per_node=shards_per_node)
    try:
        agreed, local = _agree(config, groups.all, local_world_size)
    except ValueError:
        groups.destroy()
        raise
    by_node = agreed.by_node and 1 < local < dist.get_world_size(groups.all)
    groups = groups.divided(process_group, timeout, local, by_node)
    return groups.with_second_groups(timeout, by_node) if agreed.compresses else groups, agreed


def _agree(config: TopKConfig, group: dist.ProcessGroup, local_world_size: int | None) -> tuple[TopKConfig, int]:
    """What all ranks go by: the settings, and the ranks of a node. A collective."""
    world = dist.get_world_size(group)
    summary = {**config.summary(), "local_world_size": local_world_size}
    if dist.get_backend(group) == "gloo":  # steps of optimizers with and without numba differ in rounding
        summary["numba"] = "installed" if find_spec("numba") else "missing"
    check_agreement(summary, "Pass the same settings on every rank, and install the same packages.", group)
    local = 1 if world == 1 else local_world_size or _local_world_size(config, group)
    if world == 1 and not config.momentum:  # momentum is applied where something is kept
        return config.dense, local
    return config.resolve(world, local), local


def _local_world_size(config: TopKConfig, group: dist.ProcessGroup) -> int:
    """The ranks on a node by torchrun's word; 1 if it does not say, or if that does not fit these ranks."""
    told = gathered(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), group)
    everyone = len(told) == dist.get_world_size()
    if everyone and len(set(told)) == 1 and len(told) % told[0] == 0:
        return int(told[0])
    if config.by_node:
        raise ValueError(
            f"topology={config.topology!r} needs nodes of equally many ranks, but LOCAL_WORLD_SIZE is {told} on "
            f"{len(told)} of {dist.get_world_size()} ranks. Pass local_world_size=, or topology='sharded'."
        )
    return 1


def compare_functions(config: TopKConfig, step: int, group: dist.ProcessGroup) -> range:
    """Compares what functions of the step return on all ranks; payloads of other sizes would hang or abort the run.

    A collective, where there are such functions.

    Args:
        config: The settings.
        step: The next step.
        group: The ranks.

    Returns:
        The steps that were compared.

    Raises:
        ValueError: Two ranks have different functions; on all ranks.
    """
    steps, given = range(step, step + AHEAD), {"ratio": config.ratio, "server_ratio": config.server_ratio}
    mine = {name: [value_or_error(ratio, s) for s in steps] for name, ratio in given.items() if callable(ratio)}
    for rank, row in enumerate(everyones := gathered(mine, group) if mine else []):
        for name, values in row.items():
            for at, first, other in zip(steps, everyones[0][name], values, strict=True):
                if first != other:
                    raise ValueError(
                        f"the ranks differ: {name} at step {at} is {first} on rank 0 and {other} on rank {rank}. Pass "
                        "a function of the step alone, the same on every rank."
                    )
    return steps
