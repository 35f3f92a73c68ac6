"""``plan``: predicts the exact bytes and the approximate time of a step with each topology, before the run."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from lightning_topk.config import TopKConfig
from lightning_topk.lab.bench.select import step_seconds
from lightning_topk.lab.hosts import link
from lightning_topk.lab.models import torchvision_model
from lightning_topk.lab.report import Row, markdown
from lightning_topk.volume import format_bytes, volume

MEASURED = 4_000_000
"""Maximum number of elements that are compressed to measure the computing time."""


def run(
    nodes: int,
    gpus_per_node: int = 1,
    model: str | None = None,
    module: str | None = None,
    params: int | None = None,
    inter: str = "1gbit",
    saving: float | None = None,
    ratio: float | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> str:
    """Tabulates the bytes of a step with each topology, and its approximate time on a link."""
    sizes, world = parameter_sizes(model, module, params), nodes * gpus_per_node
    if world < 2:
        raise ValueError("--nodes x --gpus-per-node must be at least 2: one rank exchanges nothing.")
    speed, buckets, numel = link(inter)[0] / 8, ddp_buckets(sizes), min(sum(sizes), MEASURED)
    given = TopKConfig(saving=saving, ratio=ratio)
    second = step_seconds(given, numel, torch.device(device)) / numel  # per element
    rows = []
    for topology in ("dense", "sharded", "hierarchical", "single_server", "allgather"):
        if topology == "hierarchical" and not 1 < gpus_per_node < world:
            continue
        config = replace(given, topology=topology, bidirectional=topology != "allgather")
        sent = volume(config, buckets, world, local=gpus_per_node)  # of rank 0, the busiest
        elements = sum(sizes) / (gpus_per_node if topology == "hierarchical" else 1)
        computing = second * elements if config.compresses else 0.0
        row: Row = {"topology": "dense (DDP)" if topology == "dense" else topology}
        row |= {"a rank sends": format_bytes(sent.sent), "a node sends": format_bytes(sent.inter_node)}
        row |= {"saving": f"{sent.node_saving:.1f}x", "ms a step": 1000 * (computing + sent.inter_node / speed)}
        pays = 8 * (sent.dense_inter_node - sent.inter_node) / computing if computing else 0.0  # bits per second
        words = f"{pays / 1e9:.3g} Gbit/s" if pays >= 1e9 else f"{pays / 1e6:.3g} Mbit/s" if pays > 0 else "never"
        rows.append(row | {"pays below": words if computing else ""})
    return (
        f"{sum(sizes):,} parameters, float32; {nodes} nodes of {gpus_per_node} ranks, {inter} between them; "
        f"{'saving' if ratio is None else 'ratio'} {ratio or given.saving:g}.\n\n{markdown(rows)}\n\n"
        "Bytes are exact. Times are the time to compress and decompress, measured just now on this machine's "
        f"{device.upper()}, plus the time to send a node's bytes over its link; nothing overlaps with backward."
    )


def parameter_sizes(model: str | None = None, module: str | None = None, params: int | None = None) -> list[int]:
    """Elements of each trainable parameter of a torchvision model or of a class, or of one large parameter.

    Raises:
        ValueError: Not exactly one argument is given, or the model does not exist.
    """
    if sum(given is not None for given in (model, module, params)) != 1:
        raise ValueError("give one of --model, --module and --params.")
    if params is not None:
        if not 1 <= params <= 10**14:
            raise ValueError(f"--params {params:.3g} must be at least 1 and at most 1e14.")
        return [params]
    with torch.device("meta"):  # no memory, no initialisation
        net = torchvision_model(model) if model is not None else _imported(str(module))
    return [parameter.numel() for parameter in net.parameters() if parameter.requires_grad]


def _imported(path: str) -> nn.Module:
    folder, _, name = path.rpartition(".")
    try:
        made = getattr(importlib.import_module(folder), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--module {path}: {error}. It must be importable, and callable without arguments.") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"--module {path} gave a {type(made).__name__}, which is no torch.nn.Module.")
    return made


def ddp_buckets(sizes: list[int], cap_mb: float = 25) -> list[list[int]]:
    """Groups parameters as DDP does, in the reverse order: 1 MiB in the first bucket, ``cap_mb`` in each other one.

    ``sizes`` are the numbers of elements of the parameters.
    """
    buckets: list[list[int]] = [[]]
    for size in reversed(sizes):
        buckets[-1].append(size)
        if sum(buckets[-1]) * 4 >= (min(1, cap_mb) if len(buckets) == 1 else cap_mb) * 2**20:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]
