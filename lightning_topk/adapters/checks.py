"""Checks that DDP options and models are compatible with the exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.runtime.groups import check_agreement


def check_ddp_options(options: Mapping[str, Any]) -> None:
    """Refuses DDP options that the exchange does not support.

    Args:
        options: Keyword arguments of DistributedDataParallel. Values matter, since some callers pass every default.
    """
    reasons = {
        "mixed_precision": "DDP would cast gradients outside the hook. Use the Trainer's precision=, or autocast",
        "skip_all_reduce_unused_params": "ranks would exchange different buckets and hang. Remove it",
        "delay_all_reduce_named_params": "gradients of these parameters would bypass the hook. Remove it",
    }
    for name, reason in reasons.items():
        value = options.get(name)
        if value is not None and value is not False and value != []:
            raise ValueError(f"{name}={value!r} is not supported with top-k exchange: {reason}.")


def check_same_model(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Checks that all ranks have the same parameters. A collective."""
    shapes = {
        name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in module.named_parameters()
    }
    check_agreement(shapes, "Build the same model on every rank.", group)


def check_parameters(names: Mapping[Tensor, str]) -> None:
    """Refuses parameters whose gradients top-k cannot order, or that DDP would pass to another hook."""
    devices = {parameter.device for parameter in names if parameter.requires_grad}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on {', '.join(sorted(map(str, devices)))}: the exchange runs on one device "
            "per rank. Put the model on one device, or wrap each part in a DDP of its own."
        )
    for parameter, name in names.items():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name!r} has dtype {parameter.dtype}; only real floating-point gradients can be exchanged. "
                "Freeze it, or use a real floating-point dtype."
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"parameter {name!r} has an optimizer in backward (_apply_optimizer_in_backward), for which DDP needs "
                "the model's one comm hook. Step the optimizer after backward."
            )
