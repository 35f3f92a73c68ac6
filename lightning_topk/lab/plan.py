"""``plan``: bytes, times and memory of every topology, before the run."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_topk.config import SAVING, TopKConfig
from lightning_topk.core.wire import WireName
from lightning_topk.lab.commands import add_command, call, need
from lightning_topk.lab.report import markdown
from lightning_topk.planning.advice import Hardware, forecasts, parameter_sizes, sentence, table
from lightning_topk.planning.costs import CPU, GPU, Links, bytes_per_second, load_costs
from lightning_topk.planning.sharded import sharded_forecast, sharded_table

SHARDED = ("model", "module", "params", "nodes", "gpus_per_node", "inter", "saving", "wire")
"""Options that ``--fsdp`` uses."""


def declare(commands: Any) -> None:
    """Declares ``plan``."""
    parser = add_command(commands, "plan", run)
    parser.set_defaults(main=show)
    options = ", ".join(f"--{name.replace('_', '-')}" for name in SHARDED)
    words = f"shard the model over the ranks of a node by FSDP2; goes with {options}"
    parser.add_argument("--fsdp", action="store_true", help=words)
    parser.add_argument("--memory", metavar="SIZE", help="memory of a GPU, with --fsdp (default: 80gbyte)")


def show(arguments: argparse.Namespace) -> None:
    """Prints the plan."""
    if arguments.model is not None:
        need("torchvision")
    if arguments.memory is not None and not arguments.fsdp:
        raise ValueError("--memory goes with --fsdp: pass both, or leave it out.")
    print(_sharded(arguments) if arguments.fsdp else call(arguments))


def _sharded(arguments: argparse.Namespace) -> str:
    """What a sharded model sends and keeps.

    Raises:
        ValueError: An option has no effect.
    """
    for name, option in inspect.signature(run).parameters.items():
        if name not in SHARDED and getattr(arguments, name) != option.default:
            raise ValueError(f"--fsdp does not use --{name.replace('_', '-')}: leave it out.")
    parameters = sum(parameter_sizes(arguments.model, arguments.module, arguments.params))
    nodes, ranks = arguments.nodes, arguments.gpus_per_node
    amounts = arguments.saving or (SAVING, 4 * SAVING)
    ways = [TopKConfig().dense, *(TopKConfig(saving=saving, wire=arguments.wire) for saving in amounts)]
    found = [sharded_forecast(parameters, nodes, ranks, way) for way in ways]
    room = arguments.memory or "80gbyte"
    speed, memory = bytes_per_second(arguments.inter), bytes_per_second(room, "memory")
    return (
        f"{parameters:,} parameters, float32, gathered in bfloat16; {nodes} nodes of {ranks} ranks, {arguments.inter} "
        f"between. A GPU has {room}; activations need room too.\n\n"
        f"{markdown(sharded_table(found, speed, memory))}"
    )


def run(
    nodes: int,
    gpus_per_node: int = 1,
    model: str | None = None,
    module: str | None = None,
    params: int | None = None,
    inter: str = "10gbit",
    intra: str = "300gbyte",
    saving: Sequence[float] = (),
    ratio: Sequence[float] = (),
    server_ratio: float | None = None,
    wire: WireName | None = None,
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
        saving: How many times fewer bytes than all-reduce to send. Default: 50, or the ratios; 200 is shown beside 50,
            and not recommended unasked, since it costs quality in a short run.
        ratio: Fractions that workers send, instead.
        server_ratio: Fraction that servers send, with ratios. Default: that of the workers.
        wire: Format of values. Default: int4.
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
    if not bucket_cap_mb > 0:
        raise ValueError(f"--bucket-cap-mb {bucket_cap_mb:g} must be positive.")
    if not compute_ms >= 0:
        raise ValueError(f"--compute-ms {compute_ms:g} must not be negative.")
    if server_ratio is not None and not ratio:
        raise ValueError("--server-ratio needs --ratio: a saving decides what workers and servers send.")
    links = Links(bytes_per_second(inter), bytes_per_second(intra))
    hardware = Hardware(nodes, gpus_per_node, links, load_costs(device, costs))
    servers = {} if server_ratio is None else {"server_ratio": server_ratio}
    amounts = [{"ratio": each, **servers} for each in ratio]
    amounts += [{"saving": each} for each in saving or (() if ratio else (SAVING, 4 * SAVING))]
    compute = compute_ms / 1000
    base = TopKConfig(wire=wire)
    found = forecasts(sizes, hardware, amounts, compute, base, bucket_cap_mb)
    asked = found if saving or ratio else [each for each in found if each.config.saving in (None, SAVING)]
    unsure = ", a guess until `bench costs` has run on a node" if hardware.costs in (CPU, GPU) else ""
    return (
        f"{sum(sizes):,} parameters, float32; {nodes} nodes of {gpus_per_node} ranks, {inter} between, {intra} "
        f"inside.\nTimes are predictions; constants: {hardware.costs.source}.\n\n"
        f"{markdown(table(found, compute))}\n\nBy time{unsure}: {sentence(asked, compute, bucket_cap_mb)}"
    )
