"""How long an exchange will take: an alpha-beta model of links, and what computing costs by the element.

A request takes ``rounds x alpha + bytes x beta``: the latency of each round, and the time that the busiest link needs,
or a rank's own processor if that takes longer. A worker passes over its gradient, a server over its shard; entries are
encoded and decoded. ``bench costs`` fits the constants to exchanges that it times on a machine, and stores them;
``bench model`` says how wrong the model is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_topk.build import make_codecs, make_shape
from lightning_topk.config import TopKConfig
from lightning_topk.core.requests import AllGather, AllReduce, Request
from lightning_topk.planning.volume import requests
from lightning_topk.saving import with_ratio
from lightning_topk.schedule import LATE


@dataclass(frozen=True)
class Costs:
    """The constants of the model, of one rank while all others of its host work too; seconds.

    Attributes:
        scan: For each element over which a worker or server passes: compensate, select, clear.
        encode: For each entry that is sent.
        decode: For each entry that is received and summed or delivered.
        copy: For each byte of a gradient that is dealt to the ranks of a node and back.
        fixed: For each exchange that compresses, whatever its size.
        latency: For each round of a collective.
        byte: For each byte that a rank sends, on links of any speed.
        reduce: The same, in an all-reduce.
        efficiency: Part of a link's rate that collectives reach.
        source: Where the constants are from.
    """

    scan: float
    encode: float
    decode: float
    copy: float
    fixed: float
    latency: float
    byte: float
    reduce: float
    efficiency: float = 0.92
    source: str = ""


GPU = Costs(
    scan=16 / 3.0e12,
    encode=1e-10,
    decode=1e-10,
    copy=2 / 3.0e12,
    fixed=2e-4,
    latency=2e-5,
    byte=0.0,
    reduce=0.0,
    source="estimates for a GPU of 3 TB/s and NCCL, not measured: "
    "run `python -m lightning_topk bench costs --device cuda` on a node",
)
CPU = Costs(
    scan=4.0e-9,
    encode=3.0e-8,
    decode=2.0e-8,
    copy=3.0e-10,
    fixed=2e-3,
    latency=1e-3,
    byte=8e-10,
    reduce=6e-10,
    source="of four ranks on two cores of 2.5 GHz, not of this machine: "
    "run `python -m lightning_topk bench costs` on a node",
)


@dataclass(frozen=True)
class Links:
    """The speed of a cluster's links, bytes a second in each direction.

    Attributes:
        inter: Between a node and the network.
        intra: Between a rank and the others of its node.
    """

    inter: float
    intra: float


def path_of_costs(device: str) -> Path:
    """The file in which ``bench costs`` stores the constants of this machine."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "lightning_topk" / f"costs-{device}.json"


def store_costs(costs: Costs, path: Path) -> None:
    """Writes constants to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(costs), indent=1) + "\n")


def load_costs(device: str, path: Path | None = None) -> Costs:
    """The constants in a file; else those stored for this machine, else the ones that came with the package.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        path: The file, or None.

    Raises:
        ValueError: The file holds none.
    """
    stored = path or path_of_costs(device)
    if path is None and not stored.exists():
        return GPU if device == "cuda" else CPU
    try:
        return Costs(**json.loads(stored.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{stored} holds no constants ({error}); write it with bench costs.") from error


def bytes_per_second(rate: str, what: str = "rate") -> float:
    """A rate in words, bits as tc writes them or bytes; or a size, which has the same units.

    Args:
        rate: The words.
        what: What they are, for the error message.

    Raises:
        ValueError: It is not a positive number with ``kbit``, ``mbit``, ``gbit``, ``mbyte`` or ``gbyte``.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])(bit|byte)", rate.lower())
    if not found or float(found[1]) == 0:
        raise ValueError(f"invalid {what} {rate!r}; write it like 100mbit, 1gbit, 2.5gbit or 80gbyte.")
    bits = float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[found[2]]
    return bits / 8 if found[3] == "bit" else bits


def exchange_seconds(
    config: TopKConfig, sizes: Sequence[int], world: int, local: int, links: Links, costs: Costs, itemsize: int = 4
) -> float:
    """Predicted seconds of the exchange of one bucket, with nothing beside it.

    Args:
        config: The settings; of a schedule, those after many steps count.
        sizes: Elements of each parameter of the bucket.
        world: Number of ranks.
        local: Ranks of a node.
        links: Their speed.
        costs: The constants.
        itemsize: Bytes of an element of the gradient.
    """
    config = with_ratio(config.on(world, local), sizes, world, local, itemsize)
    asked = requests(config, sizes, world, local, itemsize, step=LATE, epoch=LATE)
    count = work(config, sizes, world, local, itemsize)
    constants: dict[str, float] = vars(costs)
    computing = sum(constants[name] * times for name, times in count.items())
    return computing + sum(_seconds(request, world, local, links, costs) for request in asked)


def _seconds(request: Request, world: int, local: int, links: Links, costs: Costs) -> float:
    """Seconds of a collective."""
    rounds, kind, busiest = sending(request, world, local)
    inside, outside = request.node_bytes(0, world, local)
    wire = max(outside / links.inter, inside / local / links.intra) / costs.efficiency
    byte = costs.reduce if kind == "reduce" else costs.byte
    return rounds * costs.latency + max(busiest * byte, wire)


def sending(request: Request, world: int, local: int) -> tuple[int, str, int]:
    """What a collective costs: rounds, the constant for its bytes, and bytes that the busiest rank sends.

    Args:
        request: What is asked for.
        world: Number of ranks.
        local: Ranks of a node.
    """
    group = {"all": world, "node": local, "peers": world // local}[request.among]
    # All-gather goes around a ring; the latency of an all-reduce is that of a tree at best, and here it is taken to be.
    rounds = {AllGather: group - 1, AllReduce: 2 * (group - 1).bit_length()}.get(type(request), 1)
    busiest = max(request.sent_bytes(rank, group) for rank in range(min(2, group)))
    return rounds, "reduce" if isinstance(request, AllReduce) else "byte", busiest


def work(config: TopKConfig, sizes: Sequence[int], world: int, local: int, itemsize: int = 4) -> dict[str, float]:
    """What the busiest rank computes in an exchange: by the name of its constant, how often that is paid.

    Args:
        config: The settings, on these nodes, with a ratio.
        sizes: Elements of each parameter of the bucket.
        world: Number of ranks.
        local: Ranks of a node.
        itemsize: Bytes of an element of the gradient.
    """
    shape = make_shape(config, sizes, world, local)
    return shape.topology.work(shape, make_codecs(config, shape, LATE, LATE), itemsize)


def break_even(
    config: TopKConfig, sizes: Sequence[int], world: int, local: int, links: Links, costs: Costs, itemsize: int = 4
) -> float:
    """The speed of the network, bytes a second, above which all-reduce takes less time than the exchange.

    Args:
        config: The settings.
        sizes: Elements of each parameter.
        world: Number of ranks.
        local: Ranks of a node.
        links: Their speed; only ``intra`` matters.
        costs: The constants.
        itemsize: Bytes of an element of the gradient.

    Returns:
        Zero if all-reduce takes less at any speed, infinity if the exchange does.
    """
    config = with_ratio(config.on(world, local), sizes, world, local, itemsize)

    def gain(inter: float) -> float:
        at = replace(links, inter=inter)
        ours, dense = (
            exchange_seconds(each, sizes, world, local, at, costs, itemsize) for each in (config, config.dense)
        )
        return dense - ours

    low, high = 1e3, 1e15
    if gain(low) <= 0:
        return 0.0
    if gain(high) > 0:
        return float("inf")
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def step_seconds(
    buckets: Sequence[Sequence[int]], exchanges: Sequence[float], compute: float, backward: float = 2 / 3
) -> float:
    """Predicted seconds of a step whose exchanges run one after the other beside backward.

    Args:
        buckets: Elements of each parameter of each bucket, in the order in which their gradients come.
        exchanges: Seconds of the exchange of each.
        compute: Seconds of forward, backward and optimizer.
        backward: Backward's part of them. Gradients are taken to come evenly, element by element.
    """
    elements, ready, free = sum(map(sum, buckets)), 0.0, 0.0
    for bucket, took in zip(buckets, exchanges, strict=True):
        ready += sum(bucket) / elements
        free = max(free, compute * (1 - backward + backward * ready)) + took
    return max(compute, free)


def ddp_buckets(sizes: Sequence[int], cap_mb: float = 25, itemsize: int = 4) -> list[list[int]]:
    """How DDP groups parameters, whose gradients come in the opposite order: 1 MiB first, then ``cap_mb`` a bucket.

    Args:
        sizes: Elements of each parameter, in the model's order.
        cap_mb: DDP's ``bucket_cap_mb``.
        itemsize: Bytes of an element.

    Returns:
        Elements of each parameter of each bucket.
    """
    buckets: list[list[int]] = [[]]
    for size in reversed(sizes):
        buckets[-1].append(size)
        if sum(buckets[-1]) * itemsize >= (min(1, cap_mb) if len(buckets) == 1 else cap_mb) * 2**20:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]
