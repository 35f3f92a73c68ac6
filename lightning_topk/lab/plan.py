"""``plan``: bytes, times and memory of every topology, before the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_topk.config import TopKConfig
from lightning_topk.core.wire import WireName
from lightning_topk.lab.commands import add_command, call
from lightning_topk.lab.report import markdown
from lightning_topk.planning.advice import Hardware, forecasts, parameter_sizes, sentence, table
from lightning_topk.planning.costs import Links, bytes_per_second, load_costs
from lightning_topk.recipe import START


def declare(commands: Any) -> None:
    """Declares ``plan``."""
    add_command(commands, "plan", run).set_defaults(main=show)


def show(arguments: argparse.Namespace) -> None:
    """Prints the plan."""
    print(call(arguments))


def run(
    nodes: int,
    gpus_per_node: int = 1,
    model: str | None = None,
    module: str | None = None,
    params: int | None = None,
    inter: str = "10gbit",
    intra: str = "300gbyte",
    ratio: Sequence[float] = (0.001, 0.01),
    server_ratio: float | None = None,
    wire: WireName | None = None,
    steps: int | None = None,
    compute_ms: float = 0.0,
    bucket_cap_mb: float = 25,
    device: Literal["cpu", "cuda"] = "cuda",
    costs: Path | None = None,
) -> str:
    """Predicts bytes, times and memory of every topology, before the run, and recommends one.

    Args:
        nodes: Number of nodes.
        gpus_per_node: Ranks on each node.
        model: A name of torchvision's, such as resnet50.
        module: A class such as mine.models.Net, called without arguments.
        params: Parameters of the model, such as 25e6.
        inter: Speed of a node's network.
        intra: Speed of a rank's link inside its node.
        ratio: Fractions that workers send.
        server_ratio: Fraction that servers send. Default: that of the workers.
        wire: Format of values. Default: bf16, or with --steps the recipe's.
        steps: Planned steps: predicts means over a run by the default recipe, which begins with a higher density.
        compute_ms: Time of forward, backward and optimizer, milliseconds.
        bucket_cap_mb: Size of DDP's buckets, MiB.
        device: Where gradients live.
        costs: File of constants. Default: the one that ``bench costs`` wrote.

    Raises:
        ValueError: A setting is invalid, or there is one rank only.
    """
    sizes = parameter_sizes(model, module, params)
    if nodes < 1 or gpus_per_node < 1 or nodes * gpus_per_node < 2:
        raise ValueError("--nodes x --gpus-per-node must be at least 2: one rank exchanges nothing.")
    links = Links(bytes_per_second(inter), bytes_per_second(intra))
    constants = load_costs(device, costs)
    hardware = Hardware(nodes, gpus_per_node, links, constants)
    base, compute = TopKConfig(server_ratio=server_ratio, wire=wire), compute_ms / 1000
    found = forecasts(sizes, hardware, ratio, compute, base, bucket_cap_mb, steps)
    if steps is None:
        densities = (
            "Ratios are taken literally; --steps N plans a run by the default recipe, which begins with a higher "
            "density."
        )
    else:
        densities = (
            f"Means over a run of {steps:,} steps by the default recipe, which descends to the ratios if they are "
            f"below {START}; speeds below which it pays are those of its middle."
        )
    return (
        f"{sum(sizes):,} parameters, float32; {nodes} nodes of {gpus_per_node} ranks, {inter} between, {intra} "
        f"inside.\nTimes are predictions; constants: {constants.source}.\n{densities}\n\n"
        f"{markdown(table(found, compute))}\n\n{sentence(found, compute)}"
    )
