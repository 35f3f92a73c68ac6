"""``env``: versions, devices and launch settings of this machine, to paste into a bug report."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib import metadata

import torch

from lightning_topk._version import __version__
from lightning_topk.config import TopKConfig

PACKAGES = ("lightning", "pytorch-lightning", "numba", "triton", "numpy", "accelerate", "transformers")
VARIABLES = r"(NCCL|GLOO|TORCH|CUDA|OMP|GLIBC|SLURM_NTASKS)\w*|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE"


def run() -> str | None:
    """Describes this machine, one fact a line; returns None except on the first rank of a node."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    gpus = [processor(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]
    nccl = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else ("none",)
    facts = versions() | {"system": platform.platform(), "CPU": processor(torch.device("cpu"))}
    facts |= {"GPUs": "; ".join(gpus) or "none", "CUDA": torch.version.cuda or torch.version.hip or "none"}
    facts |= {"NCCL": ".".join(map(str, nccl)), "ranks": ranks(len(gpus))}
    facts |= {name: value for name, value in sorted(os.environ.items()) if re.fullmatch(VARIABLES, name)}
    return "\n".join(f"{name}: {fact}" for name, fact in facts.items())


def versions() -> dict[str, str]:
    """Versions of Python and of packages, without importing them."""
    found = {"lightning_topk": __version__, "torch": torch.__version__, "python": platform.python_version()}
    found |= dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def processor(device: torch.device) -> str:
    """The name of a GPU, or the number of CPU cores."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def ranks(gpus: int) -> str:
    """Ranks, backend and topology that the launcher's variables lead to on a node with this number of GPUs."""
    try:
        world = count("WORLD_SIZE", "SLURM_NTASKS")
        local = count("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
        local = local if world % local == 0 else 1  # as attach does if nodes have unequal sizes
        topology = TopKConfig().resolve(world, local, gpus=gpus >= local).topology
    except ValueError as error:
        return str(error)
    if world == 1:
        hint = "to see backend and topology, run this command under the launcher that you train with"
        return f"1, since no launcher set WORLD_SIZE; {hint}"
    return f"{world}, {local} per node: {'nccl' if gpus >= local else 'gloo'}, topology {topology}"


def count(*names: str, least: int = 1) -> int:
    """Returns the count in the first of these variables that is set, or 1; refuses counts below ``least``."""
    name, value = next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("", "1"))
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
    return int(value)
