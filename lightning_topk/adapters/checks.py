"""What the adapters share: checks of models and of DDP's options, and hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

OTHER_HOOK = "a DDP model has one communication hook, and TopKStrategy installs its own. Remove it, or use DDPStrategy"
REFUSED = {
    "mixed_precision": "DDP would cast gradients outside the hook. Use the Trainer's precision=, or autocast",
    "skip_all_reduce_unused_params": "ranks would exchange different buckets and hang. Remove it",
    "delay_all_reduce_named_params": "gradients of these parameters would bypass the hook. Remove it",
    "ddp_comm_hook": OTHER_HOOK,
    "ddp_comm_state": OTHER_HOOK,
    "ddp_comm_wrapper": OTHER_HOOK,
    "model_averaging_period": "it belongs to post-local SGD, which averages weights. Remove it, or use DDPStrategy",
}
"""Options of DistributedDataParallel and DDPStrategy that the exchange does not support, and why."""


def check_ddp_options(options: Mapping[str, Any]) -> None:
    """Refuses options that the exchange does not support. Values matter, since some callers pass every default."""
    for name, reason in REFUSED.items():
        value = options.get(name)
        if value is not None and value is not False and value != []:
            raise ValueError(f"{name}={value!r} is not supported with top-k exchange: {reason}.")


def described(names: Mapping[Tensor, str]) -> dict[str, str]:
    """Describes parameters by name, to compare them between ranks."""
    return {name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}" for p, name in names.items()}


def check_parameters(names: Mapping[Tensor, str]) -> None:
    """Refuses trained parameters on several devices, not of real floating point, or with an optimizer in backward."""
    trained = {parameter: name for parameter, name in names.items() if parameter.requires_grad}
    devices = {parameter.device for parameter in trained}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on {', '.join(sorted(map(str, devices)))}: the exchange runs on one device "
            "per rank. Put the model on one device, or wrap each part in a DDP of its own."
        )
    for parameter, name in trained.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name!r} has dtype {parameter.dtype}; only real floating-point gradients can be exchanged. "
                "Freeze it, or use a real floating-point dtype."
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"parameter {name!r} has an optimizer in backward (_apply_optimizer_in_backward), which would step "
                "before the exchange. Step the optimizer after backward."
            )


def watch_gradients(parameter: Tensor, note: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Calls ``note`` with a parameter whenever its gradient is accumulated, even if it is unfrozen later."""
    if not parameter.is_floating_point():
        return []  # it never gets a gradient
    trained = parameter.requires_grad
    handle = parameter.requires_grad_().register_post_accumulate_grad_hook(note)  # torch refuses it on a frozen one
    parameter.requires_grad_(trained)
    return [handle]
