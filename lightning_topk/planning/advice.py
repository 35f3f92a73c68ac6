"""What to use on a cluster, before the run: bytes by arithmetic, times by a model of links and of computing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean

import torch
from torch import nn

from lightning_topk import recipe
from lightning_topk.build import make_endpoint, make_shape
from lightning_topk.config import SLACK, TopKConfig, check_count
from lightning_topk.core.exchange import TOPOLOGIES
from lightning_topk.planning.costs import Costs, Links, break_even, ddp_buckets, exchange_seconds, step_seconds
from lightning_topk.planning.volume import Volume, volume
from lightning_topk.schedule import LATE

MOMENTS = 51
"""Steps of a run for which its costs are predicted."""


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
    """

    config: TopKConfig
    volume: Volume
    exchange: float
    step: float
    break_even: float
    residuals: int

    @property
    def name(self) -> str:
        """The topology and its ratio in words."""
        return f"{self.config.topology} {self.config.ratio:g}" if self.config.compresses else "all-reduce (DDP)"


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
    ratios: Sequence[float] = (0.001, 0.01),
    compute: float = 0.0,
    base: TopKConfig | None = None,
    bucket_cap_mb: float = 25,
    steps: int | None = None,
) -> list[Forecast]:
    """What every topology is predicted to cost at every ratio; all-reduce comes first.

    Args:
        sizes: Elements of each parameter, in the model's order.
        hardware: Where it trains.
        ratios: Kept fractions.
        compute: Seconds of forward, backward and optimizer; zero if unknown.
        base: Other settings.
        bucket_cap_mb: DDP's.
        steps: Planned for the run: forecasts are then means over it, of what the recipe makes of it. Default: ratios
            are literal.
    """
    base, buckets = base or TopKConfig(), ddp_buckets(sizes, bucket_cap_mb)
    topologies = ["sharded", "hierarchical", "single_server", "allgather"]
    if not 1 < hardware.ranks < hardware.world:
        topologies.remove("hierarchical")
    ways = [base.dense]
    for topology in topologies:
        bidirectional = base.bidirectional and TOPOLOGIES[topology].has_servers
        server = base.server_ratio if bidirectional else None
        way = {"topology": topology, "bidirectional": bidirectional, "server_ratio": server}
        ways += [replace(base, **way, ratio=ratio) for ratio in ratios]  # type: ignore[arg-type]
    if steps is None:
        return [_forecast(way, buckets, hardware, compute) for way in ways]
    check_count("steps", steps)
    return [_over_a_run(way, steps, buckets, hardware, compute) for way in ways]


def _over_a_run(
    config: TopKConfig, steps: int, buckets: Sequence[Sequence[int]], hardware: Hardware, compute: float
) -> Forecast:
    """The means over steps that stand for a run; the middle one says below which link speed it pays."""
    planned, count = recipe.planned(config, steps, hardware.world), min(MOMENTS, steps)
    moments = [planned.at((2 * n + 1) * steps // (2 * count), LATE) for n in range(count)]
    spent = [_spent(moment, buckets, hardware, compute) for moment in moments]
    total = sum((sent for sent, _, _ in spent[1:]), start=spent[0][0])
    middle = _forecast(moments[count // 2], buckets, hardware, compute)
    return replace(
        middle,
        config=config,
        volume=Volume(**{name: round(sent / count) for name, sent in asdict(total).items()}),
        exchange=mean(exchange for _, exchange, _ in spent),
        step=mean(step for _, _, step in spent),
    )


def _forecast(config: TopKConfig, buckets: Sequence[Sequence[int]], hardware: Hardware, compute: float) -> Forecast:
    world, local, costs = hardware.world, hardware.ranks, hardware.costs
    residuals = 0
    for bucket in buckets if config.compresses else ():
        shape = make_shape(config, bucket, world, local)
        end = make_endpoint(config, shape, 0, torch.float32, torch.device("meta"))
        residuals += sum(kept.nbytes for link in end.links for kept in link.memory.tensors().values())
    return Forecast(
        config,
        *_spent(config, buckets, hardware, compute),
        break_even(config, [size for bucket in buckets for size in bucket], world, local, hardware.links, costs),
        residuals,
    )


def _spent(
    config: TopKConfig, buckets: Sequence[Sequence[int]], hardware: Hardware, compute: float
) -> tuple[Volume, float, float]:
    """Bytes of a step, seconds of its exchanges, and of the step."""
    world, local = hardware.world, hardware.ranks
    took = [exchange_seconds(config, bucket, world, local, hardware.links, hardware.costs) for bucket in buckets]
    return volume(config, buckets, world, local=local), sum(took), step_seconds(buckets, took, compute)


def recommend(found: Sequence[Forecast]) -> Forecast:
    """The one to use: the least lossy of those that take at most 5 % more time than the fastest.

    Args:
        found: What :func:`forecasts` returned.
    """
    least = min(each.step for each in found)
    near = [each for each in found if each.step <= SLACK * least]
    return max(near, key=lambda each: (each.config.ratio, -each.step))


def sentence(found: Sequence[Forecast], compute: float) -> str:
    """The recommendation and its reason.

    Args:
        found: What :func:`forecasts` returned.
        compute: Seconds of forward, backward and optimizer; zero if unknown.
    """
    dense, best = found[0], recommend(found)
    what, take = ("a step", "takes") if compute else ("the exchanges of a step", "take")
    fastest = min(found[1:], key=lambda each: each.step)
    if best is dense:
        hidden = ", which backward hides" if compute and dense.step <= SLACK * compute else ""
        return (
            f"Use DDPStrategy: {what} {take} {1000 * dense.step:.1f} ms with all-reduce{hidden}, and "
            f"{1000 * fastest.step:.1f} ms with the fastest compression ({fastest.name}), which delays a part of the "
            "gradient."
        )
    settings = {"ratio": best.config.ratio, **best.config.changed, "topology": best.config.topology}
    words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    times = f"{1000 * best.step:.1f} ms instead of {1000 * dense.step:.1f} ms with all-reduce"
    said = f"Use TopKStrategy({words}): {what} {take} {times}"
    ours, theirs = best.volume.inter_node, dense.volume.inter_node
    if not theirs:
        return f"{said}, inside the one node there is."
    return f"{said}, since a node sends {ours:,} B over the network instead of {theirs:,} B."


def table(found: Sequence[Forecast], compute: float) -> list[dict[str, object]]:
    """Rows for people.

    Args:
        found: What :func:`forecasts` returned.
        compute: Seconds of forward, backward and optimizer; zero if unknown.
    """
    return [
        {
            "exchange": each.name,
            "bytes a rank": f"{each.volume.uplink + each.volume.downlink:,}",
            "bytes a node sends": f"{each.volume.inter_node:,}",
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
