"""``plan``: predicts the exact bytes and the approximate time of a step with each topology, before the run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.link import aggregate, deliver
from lightning_topk.volume import format_bytes, volume

Row = dict[str, Any]  # cells of a table by heading
Work = Callable[[], object]
MEASURED, WORLD = 4_000_000, 4  # elements at most, and ranks, of the exchange whose computing is measured


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
    default = given.resolve(world, gpus_per_node, gpus=True).topology
    second = step_seconds(given, numel, torch.device(device)) / numel  # per element
    rows = []
    for topology in ("dense", "sharded", "hierarchical", "single_server", "allgather"):
        if topology == "hierarchical" and not 1 < gpus_per_node < world:
            continue
        config = replace(given, topology=topology, bidirectional=topology != "allgather")
        sent = volume(config, buckets, world, local=gpus_per_node)  # of rank 0, the busiest
        elements = sum(sizes) / (gpus_per_node if topology == "hierarchical" else 1)
        computing = second * elements if config.compresses else 0.0
        row: Row = {"topology": topology + " (DDP)" * (topology == "dense") + " (default)" * (topology == default)}
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
    """Elements of each trainable parameter of a torchvision model or of a class, or of one large parameter."""
    if sum(given is not None for given in (model, module, params)) != 1:
        raise ValueError("give one of --model, --module and --params.")
    if params is not None:
        if not 1 <= params <= 10**14:
            raise ValueError(f"--params {params:.3g} must be at least 1 and at most 1e14.")
        return [params]
    with torch.device("meta"):  # no memory, no initialisation
        net = torchvision_model(model) if model is not None else _imported(str(module))
    return [parameter.numel() for parameter in net.parameters() if parameter.requires_grad]


def torchvision_model(name: str, **options: Any) -> nn.Module:
    """Makes an untrained torchvision model with the given options."""
    if importlib.util.find_spec("torchvision") is None:
        raise ValueError("this needs torchvision, which is not installed: pip install torchvision.")
    import torchvision

    if name not in torchvision.models.list_models():
        raise ValueError(f"torchvision has no model {name!r}; torchvision.models.list_models() names them.")
    return torchvision.models.get_model(name, weights=None, **options)


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
    """Groups elements of parameters as DDP does, last first: 1 MiB in the first bucket, ``cap_mb`` in the others."""
    buckets: list[list[int]] = [[]]
    for size in reversed(sizes):
        buckets[-1].append(size)
        if sum(buckets[-1]) * 4 >= (min(1, cap_mb) if len(buckets) == 1 else cap_mb) * 2**20:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]


def link(rate: str) -> tuple[float, float]:
    """Bits per second and seconds of a round trip of a link such as ``100mbit``, or ``100mbit/20ms``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit(?:/(\d+(?:\.\d+)?)ms)?", rate.lower())
    if not found or float(found[1]) == 0:
        raise ValueError(f"Invalid rate {rate!r}; write it like 100mbit or 2.5gbit, or 1gbit/20ms with a round trip.")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]], float(found[3] or 0) / 1000


class Rank:
    """One of :data:`WORLD` ranks that exchange a gradient such as ``like`` ``[d]``; the others send the same."""

    def __init__(self, config: TopKConfig, like: Tensor) -> None:
        plan = plan_bucket(config, [len(like)], WORLD)
        end, codecs = plan.endpoint(0, like.dtype, like.device), plan.codecs()
        assert end.downlink is not None
        self.uplink, self.downlink, self.up, self.reply = end.uplink, end.downlink, codecs.uplink, codecs.reply

    def serve(self, received: Tensor, g: Tensor) -> Tensor:
        """Aggregates the payloads ``[WORLD, P]`` with ``g`` as scratch memory; returns the server's ``[1, P]``."""
        return self.downlink.send(aggregate(received, self.up, g.dtype, g), self.reply)[0]

    def exchange(self, g: Tensor) -> None:
        """Runs a worker's and a server's part of an exchange."""
        replies = self.serve(copies(self.uplink.send(g, self.up)[0]), g)
        deliver(copies(replies), self.reply, self.uplink.layout, g)


def copies(payloads: Tensor) -> Tensor:
    """The first payload, as if every rank had sent it: ``[WORLD, P]``."""
    return payloads[:1].expand(WORLD, -1).contiguous()


def step_seconds(config: TopKConfig, numel: int, device: torch.device) -> float:
    """Seconds for a rank to compress and decompress a gradient of ``numel`` entries, as worker and server."""
    x = torch.randn(numel, device=device)
    rank, g = Rank(config, x), x.clone()
    return best(partial(rank.exchange, g), device, lambda: g.copy_(x))


def best(
    work: Work, device: torch.device, prepare: Work = lambda: None, repeats: int = 5, budget: float = 8.0
) -> float:
    """Least seconds of ``work``, after an untimed run; each follows ``prepare``, untimed. Waits for a GPU.

    Stops after ``repeats`` timed runs or ``budget`` seconds.
    """
    wait: Work = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    times, begin = list[float](), time.perf_counter()
    while len(times) < 2 or (len(times) <= repeats and time.perf_counter() - begin < budget):
        prepare()
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table with aligned columns."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    found = [[row.get(head, "") for head in heads] for row in rows]
    cells = [heads, *([f"{each:.4g}" if isinstance(each, float) else str(each) for each in row] for row in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
