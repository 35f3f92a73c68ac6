"""Checks that DDP options, models, optimizers and argument names are compatible with the exchange."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_topk.config import Settings, TopKConfig
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


GONE = {
    "beta1": "remove it: adapt_momentum=True does more.",
    "momentum_masking": "remove it: adapt_momentum=True does more.",
    "lr_ratio": "remove it.",
    "scope": "remove it; for one selection over the model, take one bucket: bucket_cap_mb= as large as the model.",
    "residual_checkpoint": "only the Trainer's strategies have it; elsewhere leave the state out of what you save.",
}
"""Settings that were removed or belong to other entry points, with the remedy."""


def check_known(name: str, options: Mapping[str, Any], takers: Iterable[Callable[..., Any]]) -> None:
    """Refuses unknown keyword arguments."""
    taken = [parameter for taker in takers for parameter in inspect.signature(taker).parameters.values()]
    known = {each.name for each in taken if each.kind is not each.VAR_KEYWORD} - {"self", "module", "device_ids"}
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known))}."
            hint = GONE.get(option, hint)
            raise TypeError(f"{name} got an unknown argument {option}={options[option]!r}; {hint}")


def check_same_model(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Checks that all ranks have the same parameters, and none without a shape yet. A collective."""
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"the parameter {lazy[0]!r} (one of {len(lazy)}) is lazy and has no shape yet. Run one batch through the "
            "module before training, such as in configure_model."
        )
    shapes = {
        name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in module.named_parameters()
    }
    check_agreement(shapes, "Build the same model on every rank.", group)


def check_momentum(config: TopKConfig, optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers with momentum if the configuration applies momentum before compression."""
    if not config.momentum:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            own = group.get("momentum") or (group.get("betas") or (0,))[0]
            if own:
                raise ValueError(
                    f"momentum={config.momentum!r} is applied on the workers, before compression, but "
                    f"{type(optimizer).__name__} has momentum {own!r} of its own and would apply it again. Use "
                    "torch.optim.SGD(..., momentum=0) or AdamW(..., betas=(0, 0.999)), or remove momentum= from the "
                    "strategy. If you made the optimizer without momentum, a checkpoint or a scheduler such as "
                    "OneCycleLR (cycle_momentum=False) has set it."
                )


def check_closures(config: TopKConfig, optimizers: Iterable[Optimizer]) -> None:
    """Refuses LBFGS, which compares gradients of one batch, while each compressed pass delivers a different part."""
    if config.compresses and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS evaluates its closure several times per step and compares the gradients, but compression delivers "
            "a different part of the gradient each time, so training would diverge. Pass topology='dense', which sends "
            "whole gradients, or use another optimizer."
        )


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


def one_config(taker: Callable[..., Any], config: TopKConfig | None, settings: Settings) -> TopKConfig:
    """Returns the settings that a function or class received as a config or as keywords."""
    if config is not None and not isinstance(config, TopKConfig):
        raise TypeError(
            f"{taker.__name__}: config={config!r} is a {type(config).__name__}; it must be a TopKConfig. Pass "
            "settings by name, such as ratio=0.1."
        )
    if config is not None and settings:
        raise ValueError(f"pass either config or the settings {sorted(settings)}, not both.")
    check_known(taker.__name__, dict(settings), [TopKConfig, taker])
    return config or TopKConfig(**settings)
