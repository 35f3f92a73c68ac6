"""Refuses what does not go with the exchange: options of DDP, models, optimizers, misspelt arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

from lightning_topk.config import TopKConfig
from lightning_topk.runtime.collectives import check_agreement


def check_ddp_options(options: Mapping[str, Any]) -> None:
    """Refuses options of DDP by which gradients would pass the hook by.

    Args:
        options: Keyword arguments of DistributedDataParallel. Judged by value, since some callers pass every default.

    Raises:
        ValueError: An option bypasses the hook.
    """
    reasons = {
        "mixed_precision": "DDP then casts gradients beside the hook. Use the Trainer's precision, or autocast",
        "skip_all_reduce_unused_params": "ranks would then exchange different buckets and hang. Leave it out",
        "delay_all_reduce_named_params": "these parameters' gradients would bypass the hook. Leave it out",
    }
    for name, reason in reasons.items():
        value = options.get(name)
        if value is not None and value is not False and value != []:
            raise ValueError(f"{name}={value!r} does not go with top-k exchange: {reason}.")


def check_known(
    name: str, options: Mapping[str, Any], takers: Iterable[Callable[..., Any]], more: Iterable[str]
) -> None:
    """Refuses arguments that nobody takes.

    Args:
        name: Whose arguments they are, for the message.
        options: The arguments.
        takers: Functions that take some of them, besides DistributedDataParallel.
        more: Other names that are taken.

    Raises:
        TypeError: An argument is unknown.
    """
    takers = (*takers, DistributedDataParallel.__init__)
    known = {*more, *(parameter for taker in takers for parameter in inspect.signature(taker).parameters)}
    known -= {"self", "kwargs", "ddp_kwargs", "settings", "module", "device_ids"}
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(
                f"{name} got an unknown argument {option}={options[option]!r}; {hint}Allowed are its own arguments and those "
                "of DDPStrategy and DistributedDataParallel."
            )


def check_same_model(module: torch.nn.Module) -> None:
    """Compares the model of all ranks. A collective.

    Raises:
        ValueError: Two ranks have different parameters; it shows both.
    """
    shapes = {
        name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in module.named_parameters()
    }
    check_agreement(shapes, "Build the same model on every rank.")


def check_momentum(config: TopKConfig, optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers with momentum of their own when momentum is applied before compression.

    Raises:
        ValueError: Momentum would be applied twice.
    """
    if not config.momentum:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lent = config.lent_beta1 is not None and isinstance(optimizer, Adam)
            own = group.get("momentum") or (config.lent_beta1 if lent else (group.get("betas") or (0,))[0])
            if own:
                raise ValueError(
                    f"momentum={config.momentum!r} is applied on the workers, before compression, but "
                    f"{type(optimizer).__name__} has momentum {own!r} of its own and would apply it again. Use "
                    "torch.optim.SGD(..., momentum=0) or AdamW(..., betas=(0, 0.999)), or leave momentum out of the strategy. Of torch's Adam "
                    "and AdamW, beta1=0 beside momentum does it too."
                )


def check_parameters(module: torch.nn.Module) -> None:
    """Refuses parameters whose gradients have no largest entries to choose.

    Raises:
        ValueError: The module has a complex parameter.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(
                f"{name} has dtype {parameter.dtype}; only real floating-point gradients can be compressed."
            )
