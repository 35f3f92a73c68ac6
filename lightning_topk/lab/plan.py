"""``plan``: what a step sends with each topology, exactly, and about how long that takes, before the run."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Literal

import torch
from torch import nn

from lightning_topk.config import SAVING, TopKConfig
from lightning_topk.core.wire import WireName
from lightning_topk.lab.bench.select import step_seconds
from lightning_topk.lab.commands import add_command, call, need
from lightning_topk.lab.hosts import bits_per_second
from lightning_topk.lab.report import markdown
from lightning_topk.volume import Volume, format_bytes, volume

MEASURED = 4_000_000
"""Most elements of the gradient that is compressed to measure computing."""


def declare(commands: Any) -> None:
    """Declares ``plan``."""
    add_command(commands, "plan", run).set_defaults(main=show)


def show(arguments: argparse.Namespace) -> None:
    """Prints the plan."""
    if arguments.model is not None:
        need("torchvision")
    print(call(arguments))


def run(
    nodes: int,
    gpus_per_node: int = 1,
    model: str | None = None,
    module: str | None = None,
    params: int | None = None,
    inter: str = "1gbit",
    saving: float | None = None,
    ratio: float | None = None,
    wire: WireName | None = None,
    bucket_cap_mb: float = 25,
    device: Literal["cpu", "cuda"] = "cpu",
) -> str:
    """Says what a step sends with each topology, and about how long that takes on a link.

    Args:
        nodes: Number of nodes.
        gpus_per_node: Ranks on each node.
        model: A name of torchvision's, such as resnet50.
        module: A class such as mine.models.Net, called without arguments.
        params: Parameters of the model, such as 25e6.
        inter: Speed of a node's network.
        saving: How many times fewer bytes than all-reduce to send. Default: 50.
        ratio: Fraction that workers send, instead.
        wire: Format of values. Default: int4.
        bucket_cap_mb: Size of DDP's buckets, MiB.
        device: Where compressing is measured, on this machine.

    Raises:
        ValueError: A setting is invalid, or there is one rank only.
    """
    sizes, world = parameter_sizes(model, module, params), nodes * gpus_per_node
    if nodes < 1 or gpus_per_node < 1 or world < 2:
        raise ValueError("--nodes x --gpus-per-node must be at least 2: one rank exchanges nothing.")
    if not bucket_cap_mb > 0:
        raise ValueError(f"--bucket-cap-mb {bucket_cap_mb:g} must be positive.")
    speed, buckets = bits_per_second(inter) / 8, ddp_buckets(sizes, bucket_cap_mb)
    saving = SAVING if saving is None and ratio is None else saving
    amount: dict[str, Any] = {"saving": saving, "ratio": ratio, "wire": wire}
    numel = min(sum(sizes), MEASURED)
    second = step_seconds(TopKConfig(**amount), numel, torch.device(device)) / numel  # for each element
    rows = []
    for topology in ("dense", "sharded", "hierarchical", "single_server", "allgather"):
        if topology == "hierarchical" and not 1 < gpus_per_node < world:
            continue
        config = TopKConfig(**amount, topology=topology, bidirectional=topology != "allgather")
        busiest = volume(config, buckets, world, local=gpus_per_node)
        elements = sum(sizes) / (gpus_per_node if topology == "hierarchical" else 1)
        computing = second * elements if config.compresses else 0.0
        rows.append(_row(topology, busiest, computing, speed))
    return (
        f"{sum(sizes):,} parameters, float32; {nodes} nodes of {gpus_per_node} ranks, {inter} between them; "
        f"{'saving' if ratio is None else 'ratio'} {ratio or saving:g}.\n\n{markdown(rows)}\n\n"
        "Bytes are exact. A time is what it takes to compress and decompress, measured just now on this machine's "
        f"{device.upper()}, plus a node's bytes over its link; nothing is hidden behind backward."
    )


def _row(topology: str, sent: Volume, computing: float, speed: float) -> dict[str, object]:
    """One topology: bytes, the time of its exchanges in a step, and the speed of link below which it pays."""
    gained, pays = sent.dense_inter_node - sent.inter_node, ""
    if topology != "dense":
        pays = "never" if gained <= 0 else _rate(gained / computing)
    return {
        "topology": "dense (DDP)" if topology == "dense" else topology,
        "a rank sends": format_bytes(sent.uplink + sent.downlink),
        "a node sends": format_bytes(sent.inter_node),
        "saving": f"{sent.node_saving:.1f}x",
        "ms a step": 1000 * (computing + sent.inter_node / speed),
        "pays below": pays,
    }


def _rate(speed: float) -> str:
    """Bytes a second as a rate of a link."""
    return f"{8e-9 * speed:.3g} Gbit/s" if speed >= 1.25e8 else f"{8e-6 * speed:.3g} Mbit/s"


def parameter_sizes(model: str | None = None, module: str | None = None, params: int | None = None) -> list[int]:
    """Elements of each trainable parameter; of a number of parameters, one large one.

    Args:
        model: A name of torchvision's, such as ``resnet50``.
        module: A class, or a function that gives a module, such as ``mine.models.Net``; called without arguments.
        params: A number of elements, for one large parameter.

    Raises:
        ValueError: Not exactly one is given, or it does not exist.
    """
    if sum(given is not None for given in (model, module, params)) != 1:
        raise ValueError("give one of --model, --module and --params.")
    if params is not None:
        if not 1 <= params <= 10**14:
            raise ValueError(f"--params {params:.3g} must be at least 1 and at most 1e14.")
        return [params]
    with torch.device("meta"):  # no memory, no initialisation
        net = _torchvision(model) if model is not None else _imported(str(module))
    return [parameter.numel() for parameter in net.parameters() if parameter.requires_grad]


def _torchvision(name: str) -> nn.Module:
    import torchvision

    if name not in torchvision.models.list_models():
        raise ValueError(f"torchvision has no model {name!r}; torchvision.models.list_models() names them.")
    net: nn.Module = torchvision.models.get_model(name, weights=None)
    return net


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
    """How DDP groups parameters, whose gradients come in the opposite order: 1 MiB first, then ``cap_mb`` a bucket.

    Args:
        sizes: Elements of each parameter, in the model's order.
        cap_mb: DDP's ``bucket_cap_mb``.

    Returns:
        Elements of each parameter of each bucket.
    """
    buckets: list[list[int]] = [[]]
    for size in reversed(sizes):
        buckets[-1].append(size)
        if sum(buckets[-1]) * 4 >= (min(1, cap_mb) if len(buckets) == 1 else cap_mb) * 2**20:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]
