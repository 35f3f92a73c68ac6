"""What to use on a cluster, before the run: bytes by arithmetic, times by a model of links and of computing."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from lightning_topk.build import make_endpoint, make_shape
from lightning_topk.config import SAVING, SLACK, TopKConfig
from lightning_topk.core.exchange import TOPOLOGIES
from lightning_topk.planning.costs import Costs, Links, break_even, ddp_buckets, exchange_seconds, step_seconds
from lightning_topk.planning.volume import Volume, format_bytes, volume
from lightning_topk.saving import with_ratio
from lightning_topk.schedule import LATE, Ratio, ratio_at

LARGEST_MODEL = 10**14
"""Parameters of the largest model that is planned for."""


@dataclass(frozen=True)
class Hardware:
    """Where a model shall train.

    Args:
        nodes: How many.
        ranks: On each of them.
        links: Their speed.
        costs: What computing and sending take.
    """

    nodes: int
    ranks: int
    links: Links
    costs: Costs

    @property
    def world(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Forecast:
    """What one way to exchange gradients is predicted to cost.

    Attributes:
        config: The settings.
        volume: Bytes of a step, of the busiest rank and its node.
        exchange: Seconds of the exchanges of a step, nothing beside them.
        step: Seconds of a step, with exchanges beside backward; those of the exchanges if computing takes no time.
        break_even: Speed of the network, bytes a second, above which all-reduce takes less time.
        residuals: Bytes of the busiest rank's residuals.
        density: Fraction of the gradient that a worker sends.
    """

    config: TopKConfig
    volume: Volume
    exchange: float
    step: float
    break_even: float
    residuals: int
    density: float

    @property
    def name(self) -> str:
        """The topology, and how much is sent, in words."""
        if not self.config.compresses:
            return "all-reduce (DDP)"
        saving, ratio = self.config.saving, self.config.ratio
        return f"{self.config.topology}, {f'ratio {ratio:g}' if saving is None else f'saving {saving:g}'}"


def parameter_sizes(model: str | None = None, module: str | None = None, params: int | None = None) -> list[int]:
    """Elements of each trainable parameter.

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
        if params < 1:
            raise ValueError(f"--params {params} must be at least 1.")
        if params > LARGEST_MODEL:
            raise ValueError(f"--params {params:.3g} must be at most {LARGEST_MODEL:.0e}.")
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


def forecasts(
    sizes: Sequence[int],
    hardware: Hardware,
    amounts: Sequence[Mapping[str, float]] = ({"saving": SAVING},),
    compute: float = 0.0,
    base: TopKConfig | None = None,
    bucket_cap_mb: float = 25,
) -> list[Forecast]:
    """What every topology is predicted to cost, for each amount to send; all-reduce comes first.

    Args:
        sizes: Elements of each parameter, in the model's order.
        hardware: Where it trains.
        amounts: ``{"saving": s}`` or ``{"ratio": r}``, each, and ``server_ratio`` if servers send another fraction.
        compute: Seconds of forward, backward and optimizer; zero if unknown.
        base: Other settings.
        bucket_cap_mb: DDP's.
    """
    base, buckets = base or TopKConfig(), ddp_buckets(sizes, bucket_cap_mb)
    topologies = ["sharded", "hierarchical", "single_server", "allgather"]
    if not 1 < hardware.ranks < hardware.world:
        topologies.remove("hierarchical")
    ways = [base.dense]
    for topology in topologies:
        bidirectional = base.bidirectional and TOPOLOGIES[topology].has_servers
        for amount in amounts:
            given: dict[str, Any] = {"ratio": None, "saving": None, **amount, "topology": topology}
            if not bidirectional:
                given["server_ratio"] = None
            ways.append(replace(base, bidirectional=bidirectional, **given))
    return [_forecast(way, buckets, hardware, compute) for way in ways]


def _forecast(config: TopKConfig, buckets: Sequence[Sequence[int]], hardware: Hardware, compute: float) -> Forecast:
    world, local, links, costs = hardware.world, hardware.ranks, hardware.links, hardware.costs
    here = config.on(world, local)
    took = [exchange_seconds(config, bucket, world, local, links, costs) for bucket in buckets]
    residuals, kept = 0, 0.0
    for bucket in buckets if here.compresses else ():
        literal = with_ratio(here, bucket, world, local)
        kept += ratio_at(cast(Ratio, literal.ratio), LATE, LATE) * sum(bucket)
        end = make_endpoint(literal, make_shape(literal, bucket, world, local), 0, torch.float32, torch.device("meta"))
        residuals += sum(kept.nbytes for link in end.links for kept in link.memory.tensors().values())
    elements = [size for bucket in buckets for size in bucket]
    return Forecast(
        config,
        volume(config, buckets, world, local=local),
        exchange=sum(took),
        step=step_seconds(buckets, took, compute),
        break_even=break_even(config, elements, world, local, links, costs),
        residuals=residuals,
        density=kept / sum(elements) if here.compresses else 1.0,
    )


def recommend(found: Sequence[Forecast]) -> Forecast:
    """The one to use: of those that take at most 5 % more time than the fastest, the one that sends the most.

    Args:
        found: What :func:`forecasts` returned.
    """
    scalable = _scalable(found)
    least = min(each.step for each in scalable)
    near = [each for each in scalable if each.step <= SLACK * least]
    return max(near, key=lambda each: (each.density, -each.step))


def _scalable(found: Sequence[Forecast]) -> list[Forecast]:
    """Those among which to recommend: with ``single_server`` and ``allgather`` what is sent grows with the ranks."""
    return [each for each in found if each.config.topology in ("dense", "sharded", "hierarchical")]


def sentence(found: Sequence[Forecast], compute: float, bucket_cap_mb: float = 25) -> str:
    """The recommendation and its reason, which is time.

    Args:
        found: What :func:`forecasts` returned.
        compute: Seconds of forward, backward and optimizer; zero if unknown.
        bucket_cap_mb: DDP's, for which it was forecast.
    """
    dense, best = found[0], recommend(found)
    what, take = ("a step", "takes") if compute else ("the exchanges of a step", "take")
    fastest = min(_scalable(found[1:]) or found[1:], key=lambda each: each.step)
    if best is dense:
        hidden = ", which backward hides" if compute and dense.step <= SLACK * compute else ""
        return (
            f"use DDPStrategy: {what} {take} {1000 * dense.step:.1f} ms with all-reduce{hidden}, and "
            f"{1000 * fastest.step:.1f} ms with the fastest compression that scales ({fastest.name}), which delays a "
            "part of the gradient."
        )
    settings = {"ratio": best.config.ratio, "saving": best.config.saving, **best.config.changed}
    if bucket_cap_mb != 25:
        settings["bucket_cap_mb"] = bucket_cap_mb
    words = ", ".join(f"{key}={value!r}".removesuffix(".0") for key, value in settings.items() if value is not None)
    times = f"{1000 * best.step:.1f} ms instead of {1000 * dense.step:.1f} ms with all-reduce"
    said = f"use TopKStrategy({words}): {what} {take} {times}"
    ours, theirs = best.volume.inter_node, dense.volume.inter_node
    if not theirs:
        return f"{said}, inside the one node there is."
    return f"{said}, since a node sends {format_bytes(ours)} over the network instead of {format_bytes(theirs)}."


def table(found: Sequence[Forecast], compute: float) -> list[dict[str, object]]:
    """Rows for people.

    Args:
        found: What :func:`forecasts` returned.
        compute: Seconds of forward, backward and optimizer; zero if unknown.
    """
    return [
        {
            "exchange": each.name,
            "a rank sends": format_bytes(each.volume.uplink + each.volume.downlink),
            "a node sends": format_bytes(each.volume.inter_node),
            "saving": f"{found[0].volume.inter_node / each.volume.inter_node:.1f}x" if each.volume.inter_node else "",
            "exchange ms": 1000 * each.exchange,
            **({"step ms": 1000 * each.step} if compute else {}),
            "pays below": _rate(each.break_even) if each.config.compresses else "",
            "residuals": f"{each.residuals / 2**20:.1f} MiB",
        }
        for each in found
    ]


def _rate(speed: float) -> str:
    """Bytes a second as a rate of a link."""
    if speed == 0:
        return "never"
    bits = 8 * speed
    return "any speed" if bits > 1e14 else f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
