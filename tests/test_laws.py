"""The laws of the exchange, on every topology, direction, wire and size, in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from oracle import BidirectionalTopK, bfloat16, deal
from shapes import endpoint_of

from lightning_topk.config import TopKConfig
from lightning_topk.core.layout import Parts
from lightning_topk.core.link import Measure
from lightning_topk.core.ops.reference import join_parts, split_parts
from lightning_topk.core.wire import WIRES as WIRES_BY_NAME
from lightning_topk.core.wire import Wire
from lightning_topk.schedule import CosineWarmup, ExponentialWarmup
from lightning_topk.simulate import Cluster
from lightning_topk.volume import volume

ROUTES = [
    ("sharded", True),
    ("sharded", False),
    ("single_server", True),
    ("single_server", False),
    ("allgather", False),
]
WIRES = ["fp32", "bf16", "int8", "int4"]
SELECTED = ["topk", "gaussiank", "dgc", "trimmed", "randk"]
WORLDS = [1, 2, 5]

routes = pytest.mark.parametrize(("topology", "bidirectional"), ROUTES)
ON_NODES = [("hierarchical", True), ("hierarchical", False), ("dense", True)]
everywhere = pytest.mark.parametrize(("topology", "bidirectional"), [*ROUTES, *ON_NODES])
"""The routes, and those for nodes of several ranks."""
LOCAL = 2
selectors = pytest.mark.parametrize("selector", SELECTED)
wires = pytest.mark.parametrize("wire", WIRES)
SIZES = [(1, 0.001), (1, 1.0), (257, 0.1), (257, 1.0), (1100, 0.001), (1100, 0.1), (1100, 1.0)]
"""Elements and ratios."""


def in_turn(last: Sequence, *axes: Sequence) -> list[tuple]:
    """All combinations of the axes, each with one of ``last`` in turn, so that every three values meet in some case.

    ``last`` is no longer than any axis: with two values of two axes in hand, a third axis goes through all of it.
    """
    assert len(last) <= min(map(len, axes))
    cases = []
    for numbered in itertools.product(*map(enumerate, axes)):
        values = [*(value for _, value in numbered), last[sum(i for i, _ in numbered) % len(last)]]
        cases.append(tuple(part for value in values for part in (value if isinstance(value, tuple) else (value,))))
    return cases


def gradients(world: int, numel: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + numel)
    return [torch.randn(numel, generator=generator) for _ in range(world)]


def cluster_of(config: TopKConfig, workers: int, numel: int, dtype: torch.dtype = torch.float32) -> Cluster:
    """A simulated cluster of that many workers: ranks, or nodes of two."""
    local = LOCAL if config.topology == "hierarchical" else 1
    return Cluster(config, workers * local, numel, dtype, local)


def undelivered(cluster: Cluster) -> torch.Tensor:
    dtype = cluster.endpoints[0].dtype
    total = torch.zeros(sum(cluster.endpoints[0].parts.sizes), dtype=dtype)
    for rank, end in enumerate(cluster.endpoints):
        mine = end.uplink.memory.tensors().get("residual", torch.zeros((), dtype=dtype)) / end.world
        for served in () if end.downlink is None else end.downlink.memory.tensors().values():
            mine = mine + end.to_bucket(served)
        rows = torch.zeros(end.parts.count, end.parts.numel, dtype=dtype)
        rows[rank % len(rows)] = mine
        whole = torch.empty_like(total)
        join_parts(rows, end.parts, whole)
        total += whole
    return total


def check_laws(config: TopKConfig, workers: int, numel: int, conserves: bool = True) -> None:
    """Four steps of a simulated cluster: agreement, identity, fixed size, prediction, conservation."""
    cluster = cluster_of(config, workers, numel)
    world = len(cluster.endpoints)
    produced, delivered, sent_before = torch.zeros(numel), torch.zeros(numel), [0] * world
    for step in range(4):
        given = gradients(world, numel, step)
        received = cluster.step(given)
        average = torch.stack(given).mean(0)
        produced += average
        delivered += received[0]
        for each in received:  # agreement
            assert torch.equal(each, received[0])
        if config.ratio == 1 and config.wire == "fp32" and config.server_ratio is None:  # identity
            torch.testing.assert_close(received[0], average, atol=1e-6, rtol=1e-6)
        for rank in range(world):  # fixed size, prediction
            plan = volume(config, [numel], world, rank, step=step, local=cluster.local)
            sent = cluster.sent_bytes["uplink"][rank] + cluster.sent_bytes["downlink"][rank]
            assert sent - sent_before[rank] == plan.uplink + plan.downlink
            sent_before[rank] = sent
        for end, outcome in zip(cluster.endpoints, cluster.outcomes, strict=True):  # never more than there is room for
            codecs = cluster.plan.codecs(step, selector=end.uplink.selector)
            for stats, codec in ((outcome.uplink, codecs.uplink), (outcome.downlink, codecs.reply)):
                if stats is not None and stats.selected is not None:
                    shards = end.layout.shards if stats is outcome.uplink else 1
                    assert 0 <= stats.selected <= codec.kept * shards
        if conserves:
            torch.testing.assert_close(delivered + undelivered(cluster), produced, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "numel", "ratio", "world"),
    in_turn(WORLDS, [*ROUTES, *ON_NODES], WIRES, SIZES),
)
def test_laws_hold(topology, bidirectional, wire, numel, ratio, world):
    check_laws(TopKConfig(ratio=ratio, bidirectional=bidirectional, wire=wire, topology=topology), world, numel)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "selector", "numel", "ratio", "world"),
    in_turn([1, 4], [*ROUTES, *ON_NODES], SELECTED, [3, 1100], [0.01, 1.0]),
)
def test_laws_hold_for_every_selector(topology, bidirectional, selector, numel, ratio, world):
    check_laws(TopKConfig(ratio=ratio, bidirectional=bidirectional, selector=selector, topology=topology), world, numel)


@everywhere
@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": ExponentialWarmup(0.01, start=0.5, steps=3)},
        {"ratio": CosineWarmup(0.01, start=0.5, steps=4)},
        {"saving": 20},
        {"ratio": lambda step: 0.1 / (1 + step), "wire": "fp32"},
        {"ratio": 1.0, "wire": "fp32"},
        {"ratio": 0.02, "error_feedback": "worker"},
        {"ratio": 0.02, "error_feedback": False},
        {"ratio": 0.02, "momentum": 0.9, "clip_norm": 1.0},
    ],
)
def test_laws_hold_for_schedules_and_memories(topology, bidirectional, settings):
    if topology == "dense":
        settings = {key: value for key, value in settings.items() if key not in ("momentum", "clip_norm")}
    conserves = settings.get("error_feedback", True) is True and "momentum" not in settings
    config = TopKConfig(bidirectional=bidirectional, topology=topology, **settings)
    check_laws(config, workers=3, numel=4000, conserves=conserves)


@routes
def test_laws_hold_for_a_wire_that_the_fused_functions_do_not_know(topology, bidirectional, monkeypatch):
    """As CONTRIBUTING says how to add one; it has as many bits as int8."""
    monkeypatch.setitem(WIRES_BY_NAME, "e4m3", Wire("e4m3", torch.float8_e4m3fn))
    config = TopKConfig(ratio=0.005, bidirectional=bidirectional, wire="e4m3", topology=topology)
    check_laws(config, workers=3, numel=150_001)


@everywhere
@wires
@pytest.mark.parametrize("world", [1, 3])
def test_laws_hold_for_buckets_so_large_that_links_are_fused(topology, bidirectional, wire, world):
    config = TopKConfig(ratio=0.005, bidirectional=bidirectional, wire=wire, topology=topology)
    check_laws(config, world, numel=150_001)


@pytest.mark.parametrize("topology", ["sharded", "single_server"])
def test_downlink_only_compression_sends_dense_gradients_up(topology):
    config = TopKConfig(ratio=1.0, server_ratio=0.01, topology=topology, wire="fp32")
    check_laws(config, workers=4, numel=4096)
    plan = volume(config, [4096], world=4, rank=1)
    dense = 4 * 4096 * (3 / 4 if topology == "sharded" else 1)
    assert plan.uplink == dense + 4 * (3 if topology == "sharded" else 1)
    assert plan.downlink < plan.uplink / 20


@pytest.mark.parametrize("wire", ["fp32", "bf16"])  # the oracle knows these two
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_one_server_is_the_algorithm_of_the_thesis(world, bidirectional, wire):
    numel, k, k_server = 2000, 20, 60
    config = TopKConfig(
        ratio=k / numel,
        server_ratio=k_server / numel if bidirectional else None,
        bidirectional=bidirectional,
        wire=wire,
        topology="single_server",
    )
    rounding = bfloat16 if wire == "bf16" else (lambda vector: vector)
    # Unidirectional with rounded values: what rounding leaves on the server is small, and W k entries have room.
    room = k_server if bidirectional else min(numel, world * k)
    thesis = BidirectionalTopK(world, numel, k, room, [np.arange(numel)], rounding)
    cluster = Cluster(config, world, numel)
    for step in range(30):
        given = gradients(world, numel, step)
        expected = thesis.step(torch.stack(given).numpy())
        np.testing.assert_allclose(cluster.step(given)[0].numpy(), expected, rtol=1e-6, atol=1e-7)
        held = torch.stack([end.uplink.memory.tensors()["residual"] for end in cluster.endpoints])
        np.testing.assert_allclose(held.numpy(), thesis.e, rtol=1e-5, atol=1e-6)
        server = cluster.endpoints[0].downlink.memory.tensors()["residual"]
        np.testing.assert_allclose(server.numpy(), thesis.E, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize(("world", "numel", "block"), [(2, 4096, 256), (4, 5000, 256), (3, 700, 234), (4, 3, 1)])
def test_sharded_exchange_is_the_thesis_on_every_shard(world, numel, block, wire):
    shards = deal(numel, world, block)
    kept = int(np.ceil(max(1, int(0.02 * numel)) / world))
    rounding = bfloat16 if wire == "bf16" else (lambda vector: vector)
    thesis = BidirectionalTopK(world, numel, kept, kept, shards, rounding)
    cluster = Cluster(TopKConfig(ratio=0.02, wire=wire), world, numel)
    for step in range(30):
        given = gradients(world, numel, step)
        expected = thesis.step(torch.stack(given).numpy())
        np.testing.assert_allclose(cluster.step(given)[0].numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("topology", ["sharded", "single_server", "allgather"])
@wires
def test_all_gather_and_unidirectional_servers_deliver_all_that_workers_sent(topology, wire):
    world, numel = 4, 3000
    cluster = Cluster(TopKConfig(ratio=0.05, bidirectional=False, wire=wire, topology=topology), world, numel)
    given = gradients(world, numel, 0)
    received = cluster.step(given)[0]
    sent = sum(g - end.uplink.memory.tensors()["residual"] for g, end in zip(given, cluster.endpoints, strict=True))
    once = wire == "fp32" or topology == "allgather"  # else the servers' wire rounds too
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if once else {"atol": 0, "rtol": 2**-7}
    if wire in ("int8", "int4") and not once:
        tolerance = {"atol": 1.1 * received.abs().amax().item() * WIRES_BY_NAME[wire].rounding, "rtol": 0}
    torch.testing.assert_close(received, sent / world, **tolerance)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "selector", "poison", "momentum"),
    [
        *in_turn([0.0, 0.9], [*ROUTES, *ON_NODES[:2]], SELECTED, [float("nan"), -float("inf")]),
        *in_turn([0.0], ON_NODES[2:], SELECTED, [float("nan"), -float("inf")]),  # dense refuses momentum
    ],
)
def test_non_finite_gradients_reach_everyone_and_no_residual(topology, bidirectional, selector, poison, momentum):
    workers, numel = 3, 2000
    config = TopKConfig(
        ratio=0.01, bidirectional=bidirectional, topology=topology, selector=selector, momentum=momentum, clip_norm=9.0
    )
    cluster = cluster_of(config, workers, numel)
    world = len(cluster.endpoints)
    cluster.step(gradients(world, numel, 0))
    # Worker 1; in the hierarchy it is the node of ranks 0 and 1, of which rank 0 has the part where the poison is.
    poisoned = cluster.endpoints[0 if topology == "hierarchical" else 1].uplink.memory.tensors()
    before = {name: kept.clone() for name, kept in poisoned.items()}
    given = gradients(world, numel, 1)
    given[1][700:900] = poison
    for received in cluster.step(given):
        assert not received.isfinite().all()
    for end in cluster.endpoints:
        for link in end.links:
            assert all(kept.isfinite().all() for kept in link.memory.tensors().values())
    for name, kept in poisoned.items():
        assert torch.equal(kept, before[name])
    assert all(received.isfinite().all() for received in cluster.step(gradients(world, numel, 2)))


def dgc(gradients, momentum, kept, clip):
    """Deep Gradient Compression of one worker without sampling, from its algorithm 4: what it sends at each step."""
    u = v = np.zeros_like(gradients[0])
    sent = []
    for g in gradients:
        norm = np.linalg.norm(g)
        g = g * min(1.0, clip / norm)
        u = momentum * u + g
        v = v + u
        mask = np.zeros(len(v), bool)
        mask[np.argsort(-np.abs(v), kind="stable")[:kept]] = True
        sent.append(np.where(mask, v, 0))
        u, v = np.where(mask, 0, u), np.where(mask, 0, v)
    return sent


@pytest.mark.parametrize("world", [1, 4])
def test_momentum_correction_masking_and_local_clipping_are_dgc(world):
    numel, kept, steps = 1000, 20, 25
    config = TopKConfig(
        ratio=kept / numel, momentum=0.9, clip_norm=20.0, wire="fp32", topology="allgather", bidirectional=False
    )
    given = [gradients(world, numel, step) for step in range(steps)]
    expected = [dgc([step[worker].numpy() for step in given], 0.9, kept, 20.0 / world**0.5) for worker in range(world)]
    cluster = Cluster(config, world, numel)
    for step in range(steps):
        mean = np.mean([worker[step] for worker in expected], axis=0)
        np.testing.assert_allclose(cluster.step(given[step])[0].numpy(), mean, rtol=1e-4, atol=1e-5)


@routes
def test_worker_only_feedback_forgets_at_the_server(topology, bidirectional):
    config = TopKConfig(ratio=0.02, error_feedback="worker", bidirectional=bidirectional, topology=topology)
    for end in Cluster(config, 2, 1000).endpoints:
        assert end.uplink.memory.tensors()
        assert end.downlink is None or not end.downlink.memory.tensors()


@routes
def test_without_error_feedback_nothing_is_kept(topology, bidirectional):
    config = TopKConfig(ratio=0.01, bidirectional=bidirectional, topology=topology, error_feedback=False)
    cluster = Cluster(config, 3, 1000)
    first, again = (cluster.step(gradients(3, 1000, 0))[0] for _ in range(2))
    assert torch.equal(first, again)


def test_gradients_at_the_edge_of_float32_leave_finite_residuals():
    cluster = Cluster(TopKConfig(ratio=0.01), 2, 1000)
    given = gradients(2, 1000, 0)
    given[0][5] = given[0][6] = torch.finfo(torch.float32).max  # rounds to infinity in bfloat16, as their sum does
    received = cluster.step(given)[0]
    assert received.isfinite().all()
    assert all(link.memory.tensors()["residual"].isfinite().all() for end in cluster.endpoints for link in end.links)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "dtype", "scale"),
    [
        *in_turn([1e-6, 200.0], [*ROUTES, ON_NODES[0]], WIRES, [torch.bfloat16, torch.float16]),
        *in_turn([1.0], [*ROUTES, ON_NODES[0]], WIRES, [torch.float64]),
    ],  # dense rounds sums, as DDP does
)
def test_other_dtypes_agree_and_conserve(topology, bidirectional, wire, dtype, scale):
    """A rounding that is lost is seen after a few steps; a drift, in one system that goes on for longer."""
    workers, numel = 3, 1500
    steps = 60 if (topology, bidirectional, wire, dtype) == ("sharded", True, "bf16", torch.bfloat16) else 6
    config = TopKConfig(ratio=0.01, wire=wire, topology=topology, bidirectional=bidirectional)
    cluster = cluster_of(config, workers, numel, dtype)
    world = len(cluster.endpoints)
    produced, delivered = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        given = [(scale * g).to(dtype) for g in gradients(world, numel, step)]
        received = cluster.step(given)
        assert all(torch.equal(each, received[0]) for each in received)
        assert received[0].isfinite().all()
        assert received[0].dtype == dtype
        produced += torch.stack(given).double().mean(0)
        delivered += received[0].double()
    # What a half-precision bucket rounds off is kept as well, so errors are those of the residual's float32.
    torch.testing.assert_close(delivered + undelivered(cluster).double(), produced, atol=1e-4 * scale, rtol=1e-5)


@everywhere
@wires
def test_the_largest_half_precision_gradient_arrives_finite(topology, bidirectional, wire):
    config = TopKConfig(ratio=1.0, wire=wire, topology=topology, bidirectional=bidirectional)
    largest = torch.full((300,), torch.finfo(torch.float16).max, dtype=torch.float16)
    cluster = cluster_of(config, 2, 300, torch.float16)
    assert cluster.step([largest] * len(cluster.endpoints))[0].isfinite().all()


@routes
def test_the_measured_error_is_that_of_the_step(topology, bidirectional):
    world, numel, k = 3, 3000, 30
    config = TopKConfig(ratio=k / numel, topology=topology, bidirectional=bidirectional, wire="fp32")
    cluster = Cluster(config, world, numel, measure=Measure(error=True))
    for step in range(3):
        before = [end.uplink.memory.tensors()["residual"].clone() for end in cluster.endpoints]
        given = gradients(world, numel, step)
        cluster.step(given)
        for end, outcome, g, e in zip(cluster.endpoints, cluster.outcomes, given, before, strict=True):
            a, left = (g + e).double(), end.uplink.memory.tensors()["residual"].double()
            torch.testing.assert_close(outcome.uplink.error, torch.stack([a.square().sum(), left.square().sum()]))
            if end.downlink is not None:
                left = end.downlink.memory.tensors()["residual"].double().square().sum()
                torch.testing.assert_close(outcome.downlink.error[1], left)
                assert outcome.downlink.error[0] >= outcome.downlink.error[1]


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_ranks_of_a_node_are_one_worker_that_exchanges_its_mean(nodes, local, bidirectional):
    """Parameter by parameter, a part of the hierarchy is the sharded exchange of the nodes' means of that part."""
    sizes, world = (1000, 7, 0, 64, 1), nodes * local
    config = TopKConfig(ratio=0.02, topology="hierarchical", bidirectional=bidirectional, wire="fp32")
    cluster = Cluster(config, world, sum(sizes), local=local, sizes=sizes)
    if nodes == 1:
        assert cluster.plan.config.topology == "dense"
        return
    layout = Parts(sizes, local)
    flat = TopKConfig(ratio=0.02, bidirectional=bidirectional, wire="fp32")
    parts = [Cluster(flat, nodes, layout.numel) for _ in range(local)]
    for step in range(5):
        given = gradients(world, sum(sizes), step)
        means = [torch.stack(given[node * local : (node + 1) * local]).sum(0).div(local) for node in range(nodes)]
        rows = [split_parts(mean, layout) for mean in means]
        received = [part.step([row[i] for row in rows])[0] for i, part in enumerate(parts)]
        expected = torch.empty(sum(sizes))
        join_parts(torch.stack(received), layout, expected)
        for each in cluster.step(given):
            assert torch.equal(each, expected)
    kept = sum(end.uplink.memory.tensors()["residual"].numel() for end in cluster.endpoints[:local])
    assert sum(sizes) <= kept <= sum(sizes) + local * len(sizes)


def test_what_leaves_a_node_is_what_the_plan_says():
    sizes = (500, 300)
    for topology, bidirectional in [*ROUTES, *ON_NODES]:
        config = TopKConfig(ratio=0.05, topology=topology, bidirectional=bidirectional)
        plans = [volume(config, [sizes], 6, rank, local=3) for rank in range(6)]
        sent = sum(plan.uplink + plan.downlink for plan in plans)
        assert sum(plan.intra_node + plan.inter_node for plan in plans[::3]) == sent
        assert plans[0].inter_node > 0


@pytest.mark.parametrize("topology", ["sharded", "hierarchical", "single_server"])
def test_what_was_kept_of_a_parameter_that_is_now_uncompressed_is_delivered(topology):
    cluster = Cluster(TopKConfig(ratio=0.5, wire="fp32", topology=topology), 4, 20, local=2, sizes=(10, 10))
    cluster.endpoints = [
        endpoint_of(cluster.plan.config, (10, 10), rank, 4, local=2, uncompressed=[0]) for rank in range(4)
    ]
    for end in cluster.endpoints:
        end.uplink.memory.residual.fill_(100.0)
    given = [torch.ones(20)] * 4
    delivered = sum(cluster.step(given)[0] for _ in range(9))
    assert torch.equal(delivered[:10], torch.full((10,), 109.0))
    torch.testing.assert_close(delivered + undelivered(cluster), torch.full((20,), 109.0))


def test_a_node_with_a_nan_sends_nothing_of_its_gradient():
    cluster = Cluster(TopKConfig(ratio=0.05, topology="hierarchical"), 4, 1000, local=2)
    cluster.step(gradients(4, 1000, 0))
    before = [end.uplink.memory.tensors()["residual"].clone() for end in cluster.endpoints]
    given = gradients(4, 1000, 1)
    given[0][3] = float("nan")
    cluster.step(given)
    for rank in (0, 1):  # the two parts of the first node
        assert torch.equal(cluster.endpoints[rank].uplink.memory.tensors()["residual"], before[rank])


def test_momentum_on_the_workers_is_applied_on_one_node_too():
    config = TopKConfig(topology="hierarchical", momentum=0.9)
    assert config.on(4, 4).topology == "sharded"
