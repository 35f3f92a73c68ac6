"""``plan``: predicts the exact bytes of a step with each topology, and the least time that they take on a link."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_topk.bucket import LARGEST, TooLargeError
from lightning_topk.config import TopKConfig
from lightning_topk.models import make_module
from lightning_topk.volume import Volume, format_bytes, plans_of

Row = dict[str, Any]  # cells of a table by heading


def run(
    nodes: int,
    gpus_per_node: int = 1,
    model: str | None = None,
    module: str | None = None,
    params: int | None = None,
    inter: str = "1gbit",
    saving: float | None = None,
    ratio: float | None = None,
) -> str:
    """Tabulates the bytes of a step with each topology, and the least time that they take on a link."""
    sizes, world = parameter_sizes(model, module, params), nodes * gpus_per_node
    if world < 2:
        raise ValueError("--nodes x --gpus-per-node must be at least 2: one rank exchanges nothing.")
    (bits, delay), buckets = link(inter, "--inter"), exchanged_buckets(sizes)
    if delay:
        raise ValueError(f"--inter {inter}: plan counts bytes, not round trips. Leave out the slash and what follows.")
    speed = bits / 8
    settings = TopKConfig(saving=saving, ratio=ratio)
    default = settings.resolve(world, gpus_per_node, gpus=True).topology
    rows, notes, densities = [], list[str](), dict[str, float]()
    for topology in ("dense", "sharded", "hierarchical", "single_server", "allgather"):
        if topology == "hierarchical" and not 1 < gpus_per_node < world:
            continue
        row: Row = {"topology": topology + " (DDP)" * (topology == "dense") + " (default)" * (topology == default)}
        config = replace(settings, topology=topology, bidirectional=topology != "allgather")
        try:
            plans = plans_of(config, buckets, world, local=gpus_per_node)
            sent = sum((each.volume() for each in plans), Volume())  # of rank 0, the busiest
        except TooLargeError:
            row["a rank sends"] = "too large"
        else:
            densities[topology] = sum(each.density() * each.numel for each in plans) / sum(sizes)
            row |= {"a rank sends": format_bytes(sent.sent), "a node sends": format_bytes(sent.inter_node)}
            row |= {"in messages of": format_bytes(sent.inter_node / max(1, sent.messages))}
            ms = 1000 * sent.inter_node / speed
            row |= {"saving": f"{sent.node_saving:.1f}x", "density": f"{densities[topology]:.3g}"}
            row |= {"ms on the link, at least": ms if ms < 1000 else f"{ms:,.0f}"}
            if topology == default:
                notes.append(_advice(sent, speed, gpus_per_node, sizes))
        rows.append(row)
    if gpus_per_node > 1:
        notes.append("The bytes of a rank include those to ranks of its own node; the bytes of a node do not.")
    if densities.get("single_server", 1.0) < 0.9 * densities.get(str(default), 0.0):
        notes.append("single_server sends fewer entries (density), so that rank 0, the server, reaches the saving.")
    if any("too large" in row.values() for row in rows):
        notes.append(f"Too large: a bucket, or a server's shard of it, has more than {LARGEST:,} elements.")
    if sum(sizes) < FEW:
        notes.append(f"Use DDP: below {FEW:,} parameters its all-reduce is fast, and a server gets few entries.")
    return (
        f"{sum(sizes):,} parameters, float32, in {counted(len(buckets), 'bucket')}; {counted(nodes, 'node')} of "
        f"{counted(gpus_per_node, 'rank')}, {inter} between them; "
        f"{'saving' if ratio is None else 'ratio'} {ratio or settings.saving:g}.\n\n{markdown(rows)}\n\n"
        "Bytes are exact for these buckets; DDP may fill them in another order. Times are not measured: they are the "
        "bytes over the speed of the link, a lower bound. To time steps, run python -m lightning_topk bench under "
        f"torchrun on your machines. {' '.join(notes)}"
    )


FEW = 10_000  # parameters below which DDP is the better choice


def parameter_sizes(model: str | None = None, module: str | None = None, params: int | None = None) -> list[int]:
    """Elements of each trained parameter of a model (by name or class), or of up to 1,000 equal parameters."""
    if params is not None:
        each = max(2**20, -(-params // 1000))
        return [each] * (params // each) + [params % each] * (params % each > 0)
    with torch.device("meta"):  # no memory, no initialisation
        net = make_module(model, module)
    return [parameter.numel() for parameter in net.parameters() if parameter.requires_grad]


MESSAGE = 10e-6
"""Assumed cost of a message to its sender, in seconds, whatever its size: a system call and its interrupts."""


def _advice(sent: Volume, speed: float, gpus: int, sizes: Sequence[int]) -> str:
    """Advises larger buckets if a rank's messages take longer than a node's bytes on a link of ``speed`` bytes/s."""
    messages, of_bytes = MESSAGE * sent.messages / gpus, sent.inter_node / speed  # seconds
    words = f"A rank sends {sent.messages // gpus:,} messages to other nodes"
    if messages <= of_bytes:
        return f"{words}."
    words += f": at {1e6 * MESSAGE:.0f} µs each they take {1000 * messages:,.1f} ms, longer than the bytes."
    cap, whole = math.ceil(25 * messages / of_bytes), math.ceil(4 * sum(sizes) / 2**20)  # MiB
    return words if whole <= 25 else f"{words} Pass bucket_cap_mb={min(cap, whole)} or more."


def exchanged_buckets(sizes: list[int]) -> list[list[int]]:
    """Elements of each parameter, by bucket: DDP's buckets, or a single one for a model of up to 25 MiB."""
    return [sizes] if sum(sizes) * 4 <= 25 * 2**20 else ddp_buckets(sizes)


def ddp_buckets(sizes: list[int], cap_mb: float = 25) -> list[list[int]]:
    """Groups parameters into buckets as DDP does, last first: 1 MiB in the first bucket, ``cap_mb`` in the others."""
    buckets: list[list[int]] = [[]]
    for size in reversed(sizes):
        buckets[-1].append(size)
        if sum(buckets[-1]) * 4 >= (min(1, cap_mb) if len(buckets) == 1 else cap_mb) * 2**20:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]


def link(rate: str, name: str = "--rate") -> tuple[float, float]:
    """Parses a link such as ``100mbit`` or ``100mbit/20ms``: bits per second, and seconds per round trip."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit(?:/(\d+(?:\.\d+)?)ms)?", rate.lower())
    if not found or float(found[1]) == 0:
        raise ValueError(
            f"{name} {rate} is not a rate; write it like 100mbit or 2.5gbit, or 1gbit/20ms with a round trip."
        )
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]], float(found[3] or 0) / 1000


def counted(number: int, what: str) -> str:
    """Formats a count, such as ``2 nodes``."""
    return f"{number} {what}{'s' * (number > 1)}"


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table with aligned columns."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    found = [[row.get(head, "") for head in heads] for row in rows]
    cells = [heads, *([f"{each:.4g}" if isinstance(each, float) else str(each) for each in row] for row in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
