"""The laws, the settings for which they hold, and vectors that are hard to select from; every harness calls `check`.

`simulate` is the harness in memory. Harnesses on real ranks are in test_gloo (DDP) and test_fsdp (FSDP2).
"""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.endpoint import Codecs, Exchange, Outcome
from lightning_topk.core.link import COLUMNS, SLOPE, Clip
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import Request
from lightning_topk.optim.applied import faded
from lightning_topk.simulate import Cluster
from lightning_topk.volume import volume

ROUTES = [(name, both) for name in ("sharded", "single_server") for both in (True, False)] + [("allgather", False)]
ON_NODES = [("hierarchical", True), ("hierarchical", False), ("dense", True)]
"""Topologies for nodes of several ranks."""
WIRES = ["fp32", "bf16", "int8", "int4"]
SELECTED = ["topk", "gaussiank", "dgc", "trimmed", "randk"]
LOCAL = 2
"""Ranks per simulated node."""

routes = pytest.mark.parametrize(("topology", "bidirectional"), ROUTES)
wires = pytest.mark.parametrize("wire", WIRES)
everywhere = pytest.mark.parametrize(("topology", "bidirectional"), [*ROUTES, *ON_NODES])


def in_turn(last: Sequence, *axes: Sequence) -> list[tuple]:
    """All combinations of the axes, each with one of ``last`` in turn, so that any three values meet in some case.

    No axis is shorter than ``last``: with the values of two axes fixed, a third axis goes through all of ``last``.
    """
    assert len(last) <= min(map(len, axes))
    cases = []
    for numbered in itertools.product(*map(enumerate, axes)):
        values = [*(value for _, value in numbered), last[sum(i for i, _ in numbered) % len(last)]]
        cases.append(tuple(part for value in values for part in (value if isinstance(value, tuple) else (value,))))
    return cases


def check(
    computed: Tensor, received: Tensor, left: Tensor | None, sent: Sequence[dict[str, int]],
    planned: Sequence[dict[str, int]], exact: Tensor | bool = False, settled: int | None = 0,
    atol: float = 1e-6, rtol: float = 1e-5,
) -> None:  # fmt: skip
    """Fails if a run of some steps breaks a law.

    Given are the mean over the workers of each step's gradient, ``computed [steps, numel]``; the gradient delivered to
    each rank, ``received [ranks, steps, numel]``; the mean of the workers' residuals plus the servers', ``left
    [numel]``, or None if some mass is lost on purpose; the measured and the predicted bytes of each step; whether every
    step delivers all of an element, ``exact [numel]``; and the step from which on sizes are fixed, ``settled``, or None
    if a schedule changes them. The tolerances are those of identity and conservation.
    """
    for step, rows in enumerate(received.unbind(1)):
        assert all(torch.equal(row, rows[0]) for row in rows), f"agreement, step {step}"
    assert sent == planned, f"prediction {sent} {planned}"
    if settled is not None:
        assert all(each == sent[settled] for each in sent[settled:]), "fixed size"
    delivered, computed = received[0].double(), computed.double()
    exact = torch.as_tensor(exact).expand(delivered.shape[1])
    for name, found, expected in (
        ("identity", delivered[:, exact], computed[:, exact]),
        ("conservation", delivered.sum(0) + (0 if left is None else left.double()), computed.sum(0)),
    ):
        if name == "identity" or left is not None:
            torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, msg=lambda why, law=name: f"{law}: {why}")


def gradients(world: int, numel: int, step: int) -> list[Tensor]:
    """Normal gradients of all ranks."""
    generator = torch.Generator().manual_seed(1000 * step + numel)
    return [torch.randn(numel, generator=generator) for _ in range(world)]


class Noted(Cluster):
    """A cluster that records each rank's requests, with all that determines their bytes and cost."""

    def drive(self, exchanges: Sequence[Exchange]) -> list[Outcome]:
        self.asked: list[list[tuple]] = [[] for _ in exchanges]
        return super().drive([_noted(*each) for each in zip(exchanges, self.asked, strict=True)])


def _noted(path: Exchange, asked: list[tuple]) -> Exchange:
    request = next(path)
    while True:
        asked.append(in_words(request))
        try:
            request = path.send((yield request))
        except StopIteration as end:
            return end.value


def in_words(request: Request) -> tuple[str, str, str, int]:
    return type(request).__name__, request.direction, request.among, request.payload.nbytes


def cluster_of(
    config: TopKConfig, workers: int, numel: int, dtype: torch.dtype = torch.float32, sizes: Sequence[int] = ()
) -> Noted:
    """A simulated cluster of that many workers: ranks, or nodes of two."""
    local = LOCAL if config.topology == "hierarchical" else 1
    return Noted(config, workers * local, numel, dtype, local, (*sizes,))


def undelivered(cluster: Cluster) -> Tensor:
    """The mean of the workers' residuals plus the servers': ``[numel]``."""
    dtype = cluster.endpoints[0].dtype
    total = torch.zeros(sum(cluster.plan.parts.sizes), dtype=dtype)
    for rank, end in enumerate(cluster.endpoints):
        end.lift()
        mine = end.uplink.memory.tensors().get("residual", torch.zeros((), dtype=dtype)) / end.plan.world
        mine = mine.expand(end.plan.parts.numel).clone()
        for name in end.downlink.memory.tensors() if end.downlink is not None else ():
            end.add_served(name, mine)
        rows = torch.zeros(end.plan.parts.count, end.plan.parts.numel, dtype=dtype)
        rows[rank % len(rows)] = mine
        joined = torch.empty_like(total)
        reference.join_parts(rows, end.plan.parts, joined)
        total += joined
    return total


def simulate(
    config: TopKConfig, workers: int, numel: int, dtype: torch.dtype = torch.float32, steps: int = 4,
    make_gradients: Callable[[int, int, int], list[Tensor]] = gradients, atol: float = 2e-5, rtol: float = 1e-5,
    scale: float | None = None, rates: Sequence[float] = (), clip: float | None = None,
    lifts: Sequence[Sequence[float]] = (),
) -> Cluster:  # fmt: skip
    """Checks the laws on some steps of a simulated cluster of ranks, or of nodes of two.

    Also checks that exchanges make the predicted requests.
    ``make_gradients`` takes ``(world, numel, step)``; the exchange sees the result times the loss ``scale``. With the
    learning ``rates`` of the steps, what waits fades; each gradient enters as clipped to the norm ``clip``. Parameters
    of about the same size have the ``lifts`` of each step in turn. To half precision, scaled gradients are rounded as
    DDP's are.
    """
    sizes = [len(part) for part in torch.empty(numel).tensor_split(len(lifts[0]) if lifts else 1)]
    cluster = cluster_of(config, workers, numel, dtype, sizes)
    ranks, sent_before, before = range(len(cluster.endpoints)), {}, rates[0] if rates else 1.0
    computed, received, sent, planned = [], [], [], []
    for step in range(steps):
        for end in cluster.endpoints:
            end.lift(lifts[step % len(lifts)] if lifts else ())
        mine = [(each * (scale or 1)).to(dtype) for each in make_gradients(len(ranks), numel, step)]
        own, fade = torch.stack(mine).double() / (scale or 1), 1.0
        if rates:
            fade, before = faded(before, rates[step])
        computed.append(own.mean(0) if clip is None else clipped_mean(own, cluster, clip))
        loss, clips = None if scale is None else torch.tensor(scale), None
        if clip is not None:
            clips = [clip_by([1 / clip]) for _ in mine]
        delivered = torch.stack(cluster.step(mine, scale=loss, fade=fade, clips=clips))
        assert delivered.dtype == dtype
        received.append(delivered if scale is None else delivered.double() / (scale or 1))
        for several in (computed, received):  # what was delivered and what waits of a gradient have faded alike
            several[:-1] = [fade * each for each in several[:-1]]
        total = {(rank, link): n for link, counts in cluster.sent_bytes.items() for rank, n in enumerate(counts)}
        sent.append({key: count - sent_before.get(key, 0) for key, count in total.items()})
        sent_before = total
        plans = [volume(config, [numel], len(ranks), r, dtype.itemsize, step=step, local=cluster.local) for r in ranks]
        planned.append({(rank, link): getattr(plans[rank], link) for rank, link in total})
        expected = [*map(in_words, cluster.plan.requests(cluster.plan.codecs(step)))]
        assert cluster.asked == [expected] * len(ranks), "generator and arithmetic ask for different things"
        for end in cluster.endpoints:
            assert all(kept.isfinite().all() for link in end.links for kept in link.memory.tensors().values())
    everything = config.ratio == 1 and config.wire == "fp32" and config.server_ratio is None
    exact = dtype.itemsize >= 4 and (everything or not cluster.plan.topology.compresses)
    left = undelivered(cluster) if config.error_feedback is True and not config.momentum else None
    if dtype.itemsize < 4 and (scale or rates):
        atol += torch.stack(received)[:, 0].abs().sum(0).max().item() * torch.finfo(dtype).eps / 2
    settled = 0 if isinstance(config.ratio, float | None) else None  # no schedule
    check(torch.stack(computed), torch.stack(received, 1), left, sent, planned, exact, settled, atol, rtol)
    return cluster


def clip_by(slopes: Sequence[float], of: Tensor | None = None) -> Clip:
    """A clipping with these slopes."""
    rows = torch.zeros(len(slopes), COLUMNS)
    rows[:, SLOPE] = torch.tensor(slopes)
    return Clip(rows, of)


def clipped_mean(own: Tensor, cluster: Cluster, limit: float) -> Tensor:
    """The mean ``[numel]`` of what enters the uplinks of gradients ``[ranks, numel]``: workers', or parts of nodes'."""
    parts, entered = cluster.plan.parts, []
    for node in own.split(parts.count):
        rows = reference.split_parts(node.mean(0), parts).clone()
        rows /= (rows.norm(dim=1, keepdim=True) * parts.count**0.5 / limit).clamp(min=1)
        entered.append(torch.empty_like(own[0]))
        reference.join_parts(rows, parts, entered[-1])
    return torch.stack(entered).mean(0)


def codecs_of(config: TopKConfig, numel: int, world: int, step: int = 0) -> Codecs:
    """The codecs of a bucket at a step."""
    return plan_bucket(config, [numel], world).codecs(step)


def vector(name: str, numel: int, seed: int = 0) -> Tensor:
    """A vector that is hard to select from: ``[numel]``."""
    generator, place = torch.Generator().manual_seed(seed), torch.arange(numel)
    normal, uniform = torch.randn(numel, generator=generator), torch.rand(numel, generator=generator)
    return {
        "normal": lambda: normal,
        "shifted": lambda: normal + 0.5,
        "laplace": lambda: normal.sign() * -(1 - uniform).log(),
        "heavy": lambda: normal**5,
        "uniform": lambda: uniform - 0.5,
        "zero": lambda: torch.zeros(numel),
        "equal": lambda: torch.full((numel,), -2.0),
        "signs": lambda: normal.sign(),
        "ties": lambda: (2 * normal).round() + 0.0,  # no negative zeros
        "spike": lambda: torch.where(place == numel // 3, -7.0, 0.0),
        "sparse": lambda: torch.where(uniform < 0.0005, normal, 0.0),
        "denormal": lambda: normal * 1e-40,
        "overflowing": lambda: torch.where(place < numel // 2, 2.5e38, normal),  # two of them, in more than k entries
        "sorted": lambda: normal.sort().values,
        "ascending": lambda: normal.abs().sort().values,
        "one shard": lambda: torch.where(place // 256 % 3 == 0, 100 * normal, normal),  # a sample misjudges the others
        "not sampled": lambda: torch.where(place % 7 == 3, 100.0, normal),
    }[name]()


def residual_and_gradient(name: str, numel: int) -> tuple[Tensor, Tensor]:
    return vector(name, numel), vector(name, numel, seed=1)
