"""The laws of the exchange, on every topology, direction, wire, selector, memory and size, in memory."""

from functools import partial
from unittest import mock

import laws
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import ON_NODES, ROUTES, SELECTED, WIRES, everywhere, gradients, in_turn, routes, simulate
from oracle import BidirectionalTopK, DeepGradientCompression, bfloat16, shards_of
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topk import simulate as simulator
from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core import select
from lightning_topk.core.guards import exchange
from lightning_topk.core.layout import NodeShards
from lightning_topk.core.link import DELIVERED, ENTERED, NOTHING, Measure, Step
from lightning_topk.core.ops.reference import join_parts, split_parts
from lightning_topk.core.wire import WIRES as WIRES_BY_NAME
from lightning_topk.core.wire import Codec, Wire
from lightning_topk.schedule import CosineWarmup, ExponentialWarmup
from lightning_topk.simulate import Cluster
from lightning_topk.volume import volume

SIZES = [(1, 0.001), (1, 1.0), (257, 0.1), (257, 1.0), (1100, 0.001), (1100, 0.1), (1100, 1.0), (150_001, 0.005)]
"""Elements and ratios."""


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "numel", "ratio", "world"),
    in_turn([1, 2, 5], [*ROUTES, *ON_NODES], WIRES, SIZES),
)
def test_laws_hold(topology, bidirectional, wire, numel, ratio, world):
    simulate(TopKConfig(ratio=ratio, bidirectional=bidirectional, wire=wire, topology=topology), world, numel)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "selector", "numel", "ratio", "world"),
    in_turn([1, 4], [*ROUTES, *ON_NODES], SELECTED, [3, 1100], [0.01, 1.0]),
)
def test_laws_hold_for_every_selector(topology, bidirectional, selector, numel, ratio, world):
    simulate(TopKConfig(ratio=ratio, bidirectional=bidirectional, selector=selector, topology=topology), world, numel)


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
    simulate(TopKConfig(bidirectional=bidirectional, topology=topology, **settings), 3, 4000)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "clip", "scale"),
    in_turn([None, 1024.0], [*ROUTES, *ON_NODES], WIRES, [None, 20.0]),
)
def test_conservation_holds_for_what_dense_training_applies(topology, bidirectional, wire, clip, scale):
    """Rates as in a warm-up, and in a schedule that starts again; norms are 39."""
    config = TopKConfig(ratio=0.02, bidirectional=bidirectional, wire=wire, topology=topology)
    rates = [0.0, 0.1, 0.5, 1.0, 0.7, 0.01, 1.0]
    simulate(config, 3, 1500, steps=7, scale=scale, rates=rates, clip=clip, atol=1e-4)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "dtype", "scale", "clip"),
    in_turn(
        [(None, None), (1024.0, None), (None, 20.0)],
        [*ROUTES, ON_NODES[0]],
        WIRES,
        [torch.float32, torch.bfloat16, torch.float64],
    ),
)
def test_laws_hold_while_the_lifts_of_parameters_change(topology, bidirectional, wire, dtype, scale, clip):
    """More is sent of what is lifted. The lifts of a step are the units of what waits until then."""
    config = TopKConfig(ratio=0.02, bidirectional=bidirectional, wire=wire, topology=topology)
    lifts, small = [(64.0, 1.0, 1.0), (), (64.0, 1.0, 2.0)], torch.tensor([1e-3, 1.0, 1.0])

    def make(world, numel, step):
        return [g * small.repeat_interleave(numel // 3) for g in gradients(world, numel, step)]

    cluster = simulate(config, 3, 12_000, dtype, 7, make, scale=scale, clip=clip, atol=1e-4, lifts=lifts)
    assert not cluster.endpoints[0].uplink.lifts
    shares = []
    for lift in (1.0, 1024.0):
        for end in cluster.endpoints:
            end.lift((lift, 1.0, 1.0))
        delivered = cluster.step([g.to(dtype) for g in make(len(cluster.endpoints), 12_000, 9)])[0]
        shares.append(delivered[:4000].count_nonzero())
    assert 2 * shares[0] < shares[1]


@routes
def test_errors_are_measured_in_the_gradients_own_units(topology, bidirectional):
    """Workers send all of it, and then servers' vectors are the mean."""
    few = 0.1 if bidirectional else None
    config = TopKConfig(1.0, bidirectional, server_ratio=few, wire="fp32", topology=topology)
    cluster = Cluster(config, 3, 5000, sizes=(2000, 3000), measure=Measure(error=True))
    for end in cluster.endpoints:
        end.lift((64.0, 1.0))
    mine = gradients(3, 5000, 0)
    cluster.step(mine)
    workers, *servers = zip(*(outcome.errors for outcome in cluster.outcomes), strict=False)
    assert [float(energy) for energy, _ in workers] == pytest.approx([float(g.square().sum()) for g in mine])
    for each in servers:
        mean = torch.stack(mine).mean(0)
        assert sum(float(energy) for energy, _ in each) == pytest.approx(float(mean.square().sum()))


def test_a_residual_that_is_lifted_stays_finite():
    cluster = Cluster(TopKConfig(saving=50), 2, 500)
    for end in cluster.endpoints:
        for link in end.links:
            link.memory.residual.fill_(1e38)
        end.lift((1024.0,))
        assert all(link.memory.residual.isfinite().all() for link in end.links)


@pytest.mark.parametrize(("topology", "bidirectional"), [*ROUTES, *ON_NODES[:2]])
@pytest.mark.parametrize(
    "settings",
    [
        *({"selector": selector} for selector in SELECTED),
        {"error_feedback": "worker"},
        {"error_feedback": False},
        {"momentum": 0.9, "clip_norm": 1.0},
        {"ratio": CosineWarmup(0.01, start=0.5, steps=4)},
    ],
    ids=str,
)
def test_laws_hold_for_lifts_with_every_selector_and_memory(topology, bidirectional, settings):
    config = TopKConfig(**{"ratio": 0.02, **settings}, bidirectional=bidirectional, topology=topology)
    simulate(config, 3, 1500, atol=1e-4, lifts=[(64.0, 1.0, 1.0), (), (16.0, 1.0, 1024.0)])


@routes
def test_laws_hold_for_a_wire_that_the_fused_functions_do_not_support(topology, bidirectional, monkeypatch):
    """A new wire as CONTRIBUTING describes it; it has as many bits as int8."""
    monkeypatch.setitem(WIRES_BY_NAME, "e4m3", Wire("e4m3", torch.float8_e4m3fn))
    simulate(TopKConfig(ratio=0.005, bidirectional=bidirectional, wire="e4m3", topology=topology), 3, 150_001)


@pytest.mark.parametrize(("numel", "world"), [(2**33, 2), (2**32, 1)])
def test_a_bucket_whose_positions_need_more_than_32_bits_is_refused(numel, world):
    with pytest.raises(ValueError, match=r"positions have 32 bits.*use more ranks"):
        plan_bucket(TopKConfig(), [numel], world)
    assert plan_bucket(TopKConfig(), [2**31], 4).layout.shard_size < 2**31


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "dtype", "scale"),
    [
        *in_turn([1e-6, 200.0], [*ROUTES, ON_NODES[0]], WIRES, [torch.bfloat16, torch.float16]),
        *in_turn([1.0], [*ROUTES, ON_NODES[0]], WIRES, [torch.float64]),
    ],  # without dense, which rounds sums as DDP does
)
def test_laws_hold_for_other_dtypes(topology, bidirectional, wire, dtype, scale):
    """A lost rounding error shows after a few steps, a drift in the one system that runs longer.

    The residual keeps the rounding error of a half-precision bucket too, so only float32's own errors remain.
    """
    steps = 60 if (topology, bidirectional, wire, dtype) == ("sharded", True, "bf16", torch.bfloat16) else 6
    config = TopKConfig(ratio=0.01, wire=wire, topology=topology, bidirectional=bidirectional)
    simulate(config, 3, 1500, dtype, steps, lambda *at: [scale * g for g in gradients(*at)], atol=1e-4 * scale)


VALUES = st.one_of(
    st.just(0.0),
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([1.0, -1.0, 1e-30, -1e-40, 1e30]),  # ties, denormals, spikes
)


@st.composite
def systems(draw):
    """A configuration, workers, elements, a dtype, some values, and a seed."""
    topology, bidirectional = draw(st.sampled_from([*ROUTES, *(route for route in ON_NODES if route[0] != "dense")]))
    ratios = st.floats(1e-4, 1.0)
    config = TopKConfig(
        ratio=draw(ratios),
        server_ratio=draw(st.none() | ratios) if bidirectional else None,
        bidirectional=bidirectional,
        topology=topology,
        wire=draw(st.sampled_from(WIRES)),
        selector=draw(st.sampled_from(SELECTED)),
    )
    workers = draw(st.integers(2 if topology == "hierarchical" else 1, 6))  # a single node would be dense
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    few = draw(st.lists(VALUES, min_size=1, max_size=12))
    return config, workers, draw(st.integers(1, 700)), dtype, few, draw(st.integers(0, 2**16))


def spotted(few, seed, dtype, world, numel, step):
    """Noise with some of these values."""
    generator = torch.Generator().manual_seed(3 * seed + step)
    spots = torch.randint(numel, (world, len(few)), generator=generator)
    noise = torch.randn(world, numel, generator=generator)
    return list(noise.scatter(1, spots, torch.tensor(few).expand(world, -1)).clamp(-6e4, 6e4).to(dtype))


@given(systems())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_laws_hold_for_random_settings_shapes_and_values(system):
    config, workers, numel, dtype, few, seed = system
    eps, largest = torch.finfo(torch.promote_types(dtype, torch.float32)).eps, max(map(abs, (*few, 5.0)))
    atol = 40 * eps * workers * laws.LOCAL * min(largest, 6e4)
    simulate(config, workers, numel, dtype, 3, partial(spotted, few, seed, dtype), atol, 0)


POISONED = [
    *in_turn([0.0, 0.9], [*ROUTES, *ON_NODES[:2]], SELECTED, [float("nan"), -float("inf")]),
    *in_turn([0.0], ON_NODES[2:], SELECTED, [float("nan"), -float("inf")]),  # dense refuses momentum
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize(
    ("topology", "bidirectional", "selector", "poison", "momentum", "wire", "dtype"),
    [(*case, WIRES[i % 4], DTYPES[i // 4 % 4]) for i, case in enumerate(POISONED)],
)
def test_non_finite_gradients_reach_everyone_and_no_residual(
    topology, bidirectional, selector, poison, momentum, wire, dtype
):
    settings = {"selector": selector, "momentum": momentum, "wire": wire, "clip_norm": 9.0}
    cluster = laws.cluster_of(TopKConfig(0.01, bidirectional, topology=topology, **settings), 3, 2000, dtype)
    # Rank 1 is poisoned; in the hierarchy its worker is the node of ranks 0 and 1, each of which has a part.
    poisoned = [cluster.endpoints[rank] for rank in ((0, 1) if topology == "hierarchical" else (1,))]
    links = [*(end.uplink for end in poisoned), *(end.downlink for end in cluster.endpoints if end.downlink)]
    for step, finite in enumerate((True, False, True)):
        before = [kept.clone() for link in links for kept in link.memory.tensors().values()]
        mine = [each.to(dtype) for each in gradients(len(cluster.endpoints), 2000, step)]
        mine[1][700:900] *= 1.0 if finite else poison
        assert all(received.isfinite().all() == finite for received in cluster.step(mine))
        assert all(bool(outcome.finite) == finite for outcome in cluster.outcomes)
        for end in cluster.endpoints:
            assert all(kept.isfinite().all() for link in end.links for kept in link.memory.tensors().values())
        after = [kept for link in links for kept in link.memory.tensors().values()]
        assert finite or all(map(torch.equal, before, after)), "the worker or a server sent some of its vector"


@pytest.mark.parametrize(
    ("topology", "bidirectional", "selector", "momentum", "wire"),
    [(*case, WIRES[i % 4]) for i, case in enumerate(in_turn([0.0, 0.9], [*ROUTES, *ON_NODES[:2]], SELECTED))],
)
@pytest.mark.parametrize(("dtype", "large", "count"), [(torch.float32, 3e38, 2), (torch.float64, 1.7e308, 60)])
def test_sums_beyond_the_range_of_floats_leave_finite_residuals(
    topology, bidirectional, selector, momentum, wire, dtype, large, count
):
    """Few or many sums overflow, whether selected or not; at first those of one worker alone."""
    settings = {"selector": selector, "momentum": momentum, "wire": wire}
    cluster = laws.cluster_of(TopKConfig(0.01, bidirectional, topology=topology, **settings), 2, 500, dtype)
    for step in range(7):
        mine = [each.to(dtype) for each in gradients(len(cluster.endpoints), 500, step)]
        for each in mine[:1] if step == 0 else mine if step < 5 else []:
            each[7 : 7 + count] = large
        received = cluster.step(mine)[0]
        assert step or received.isfinite().all()
        for end in cluster.endpoints:
            assert all(kept.isfinite().all() for link in end.links for kept in link.memory.tensors().values())
    assert received.any(), "nothing is sent anymore"


def same_as(oracle, cluster: Cluster, world: int, numel: int, steps: int = 30, rtol=1e-6, atol=1e-7) -> None:
    """Fails unless a cluster delivers the same as an oracle, step by step."""
    for step in range(steps):
        mine = gradients(world, numel, step)
        expected = oracle.step(torch.stack(mine).numpy())
        np.testing.assert_allclose(cluster.step(mine)[0].numpy(), expected, rtol=rtol, atol=atol)


ROUNDING = {"fp32": lambda vector: vector, "bf16": bfloat16}
"""The oracle's wires."""


@pytest.mark.parametrize("wire", [*ROUNDING])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("servers", "world", "numel", "block"),
    [(1, 2, 2000, 2000), (1, 5, 2000, 2000), (2, 2, 4096, 256), (4, 4, 5000, 256), (3, 3, 700, 234), (4, 4, 3, 1)],
)
def test_the_exchange_is_the_algorithm_of_the_thesis_on_every_shard(servers, world, numel, block, bidirectional, wire):
    """With one server it is the literal algorithm."""
    kept, replied = (int(np.ceil(max(1, int(ratio * numel)) / servers)) for ratio in (0.02, 0.06))
    # Unidirectional with rounded values: the server's rounding errors are small, and W k entries have room.
    room = replied if bidirectional else world * kept
    thesis = BidirectionalTopK(world, numel, kept, room, shards_of(numel, servers, block), ROUNDING[wire])
    topology, server_ratio = "single_server" if servers == 1 else "sharded", 0.06 if bidirectional else None
    cluster = Cluster(TopKConfig(0.02, bidirectional, server_ratio, wire=wire, topology=topology), world, numel)
    same_as(thesis, cluster, world, numel)
    held = torch.stack([end.uplink.memory.tensors()["residual"] for end in cluster.endpoints])
    np.testing.assert_allclose(held.numpy(), thesis.e, rtol=1e-5, atol=1e-6)
    served = torch.zeros(numel)
    for end in cluster.endpoints:
        end.add_served("residual", served)
    np.testing.assert_allclose(served.numpy(), thesis.E, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 4])
def test_momentum_correction_masking_and_local_clipping_are_dgc(world):
    config = TopKConfig(0.02, False, momentum=0.9, clip_norm=20.0, wire="fp32", topology="allgather")
    papers = DeepGradientCompression(world, 1000, 0.9, 20, 20.0 / world**0.5)
    same_as(papers, Cluster(config, world, 1000), world, 1000, steps=25, rtol=1e-4, atol=1e-5)


@routes
def test_error_feedback_may_be_on_workers_only_or_off(topology, bidirectional):
    on_workers, nowhere = (
        Cluster(TopKConfig(0.02, bidirectional, topology=topology, error_feedback=kept), 3, 1000)
        for kept in ("worker", False)
    )
    for end in on_workers.endpoints:
        assert end.uplink.memory.tensors()
        assert end.downlink is None or not end.downlink.memory.tensors()
    first, again = (nowhere.step(gradients(3, 1000, 0))[0] for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("numel", [3000, 150_001])  # links are fused unless they measure
@routes
def test_the_measured_error_is_the_error_of_the_step_and_measuring_changes_no_bit(topology, bidirectional, numel):
    config, sizes = TopKConfig(ratio=0.01, topology=topology, bidirectional=bidirectional), (numel - 1000, 1000)
    plain, measured = (
        Cluster(config, 3, numel, sizes=sizes, measure=measure)
        for measure in (NOTHING, Measure(error=True, per_layer=True))
    )
    for step in range(3):
        before = [end.uplink.memory.residual.clone() for end in measured.endpoints]
        mine = gradients(3, numel, step)
        assert torch.equal(plain.step(mine)[0], measured.step(mine)[0])
        for end, outcome, g, e in zip(measured.endpoints, measured.outcomes, mine, before, strict=True):
            energy, left = (x.double().square().sum() for x in (g + e, end.uplink.memory.residual))
            torch.testing.assert_close(outcome.errors[0], torch.stack([energy, left]))
            torch.testing.assert_close(outcome.per_layer[:2].sum(1), outcome.errors[0])
            if end.downlink is not None:
                left = end.downlink.memory.residual.double().square().sum()
                torch.testing.assert_close(outcome.errors[1][1], left)
                assert outcome.errors[1][0] >= outcome.errors[1][1]


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_ranks_of_a_node_are_one_worker_that_exchanges_its_mean(nodes, local, bidirectional):
    """Each part of the hierarchy equals a sharded exchange of the nodes' means of that part."""
    sizes, world = (1000, 7, 0, 64, 1), nodes * local
    config = TopKConfig(ratio=0.02, topology="hierarchical", bidirectional=bidirectional, wire="fp32")
    cluster = Cluster(config, world, sum(sizes), local=local, sizes=sizes)
    layout = NodeShards(sizes, local)
    flat = TopKConfig(ratio=0.02, bidirectional=bidirectional, wire="fp32")
    parts = [Cluster(flat, nodes, layout.numel) for _ in range(local)]
    for step in range(5):
        mine = gradients(world, sum(sizes), step)
        means = [torch.stack(mine[node * local : (node + 1) * local]).sum(0).div(local) for node in range(nodes)]
        rows = [split_parts(mean, layout) for mean in means]
        received = [part.step([row[i] for row in rows])[0] for i, part in enumerate(parts)]
        expected = torch.empty(sum(sizes))
        join_parts(torch.stack(received), layout, expected)
        assert all(torch.equal(each, expected) for each in cluster.step(mine))
    kept = sum(end.uplink.memory.tensors()["residual"].numel() for end in cluster.endpoints[:local])
    assert sum(sizes) <= kept <= sum(sizes) + local * len(sizes)


def test_the_plan_splits_bytes_within_and_between_nodes():
    for topology, bidirectional in [*ROUTES, *ON_NODES]:
        config = TopKConfig(ratio=0.05, topology=topology, bidirectional=bidirectional)
        plans = [volume(config, [(500, 300)], 6, rank, local=3) for rank in range(6)]
        sent = sum(plan.uplink + plan.downlink for plan in plans)
        assert sum(plan.intra_node + plan.inter_node for plan in plans[::3]) == sent
        assert plans[0].inter_node > 0


@everywhere
def test_each_parameter_is_clipped_by_its_own_limit_also_an_uncompressed_one(topology, bidirectional):
    """The first two are clipped together, the second is all-reduced, and the third is not clipped."""
    sizes, of, limit = (300, 40, 500), torch.tensor([0, 0, 1]), 5.0
    local = laws.LOCAL if topology in ("hierarchical", "dense") else 1
    config = TopKConfig(ratio=0.05, topology=topology, bidirectional=bidirectional, wire="fp32")
    cluster, total = Cluster(config, 4, sum(sizes), local=local, sizes=sizes, uncompressed=(1,)), 0
    for step in range(3):
        mine, entered = gradients(4, sum(sizes), step), []
        for rank, own in enumerate(mine):
            first, second, third = own.clone().split(sizes)
            if topology == "hierarchical":  # each rank has half of the means of its node
                first, _, third = (mine[rank // 2 * 2] + mine[rank // 2 * 2 + 1]).div(2).split(sizes)
                half = torch.arange(300) // 150 == rank % 2
                first, third = 2 * first * half, 2 * third * (torch.arange(500) // 250 == rank % 2)
                excess = max(1, torch.stack([first.norm() / 2**0.5, second.norm()]).norm() / limit)
            else:
                excess = max(1, torch.stack([first.norm(), second.norm()]).norm() / limit)
            assert excess > 1
            entered.append(torch.cat([first / excess, second / excess, third]))
        total += torch.stack(entered).mean(0)
        clips = [laws.clip_by([1 / limit, 0.0], of) for _ in mine]
        delivered = cluster.step(mine, clips=clips)[0]
        total -= delivered
        first, second, third = delivered.split(sizes)
        norms = torch.stack([torch.cat([first, second]).norm(), third.norm()])
        for rows, _ in clips:
            assert rows[0, ENTERED] == pytest.approx(limit)
            torch.testing.assert_close(rows[:, DELIVERED], norms)
    torch.testing.assert_close(laws.undelivered(cluster), total, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("topology", ["sharded", "hierarchical", "single_server"])
def test_the_residual_of_a_newly_uncompressed_parameter_is_delivered(topology):
    config = TopKConfig(ratio=0.5, wire="fp32", topology=topology)
    cluster = Cluster(config, 4, 20, local=2, sizes=(10, 10), uncompressed=(0,))
    for end in cluster.endpoints:
        end.uplink.memory.residual.fill_(100.0)
    delivered = sum(cluster.step([torch.ones(20)] * 4)[0] for _ in range(9))
    assert torch.equal(delivered[:10], torch.full((10,), 109.0))
    torch.testing.assert_close(delivered + laws.undelivered(cluster), torch.full((20,), 109.0))


def test_an_uncompressed_parameter_may_be_empty():
    first, second = Cluster(TopKConfig(0.5), 2, 10, sizes=(0, 10), uncompressed=(0,)).step(gradients(2, 10, 0))
    assert torch.equal(first, second)


@pytest.mark.parametrize("request_", ["AllToAll", "AllGather"])
@pytest.mark.parametrize("node", [0, 2])
def test_a_damaged_payload_between_nodes_names_the_rank_that_sent_it(monkeypatch, request_, node):
    answered, answer = [], simulator.answer

    def damaging(requests):
        replies = answer(requests)
        answered.append((type(requests[0]).__name__, requests[0].among))
        if answered[-1] == (request_, "peers") and answered.count(answered[-1]) == 2:  # among the nodes' second ranks
            replies = [reply.clone() for reply in replies]
            for reply in replies:
                reply[node, 0] ^= 1
        return replies

    monkeypatch.setattr(simulator, "answer", damaging)
    cluster = Cluster(TopKConfig(0.1, topology="hierarchical"), 6, 5000, local=2)
    with pytest.raises(ValueError, match=f"the payload from rank {2 * node + 1} is damaged, or was sent"):
        cluster.step(gradients(6, 5000, 0))


def failing(cluster: Cluster, gradients: list[torch.Tensor], at: int, used: list[bool] | None, scale) -> bool:
    """Lets request number ``at`` of a step fail on all ranks; returns whether there was one."""

    def failing_at(path):
        try:
            request = next(path)
            for _ in range(at):
                request = path.send((yield request))
        except StopIteration:
            return False
        with pytest.raises(ConnectionError):
            path.throw(ConnectionError("lost"))
        return True

    codecs = [cluster.plan.codecs(cluster.steps, selector=end.uplink.selector) for end in cluster.endpoints]
    several = zip(cluster.endpoints, gradients, codecs, strict=True)
    return all(cluster.drive([failing_at(exchange(*each, Step(cluster.steps, scale), used)) for each in several]))


@pytest.mark.parametrize(
    ("topology", "bidirectional", "settings", "dtype", "scale", "some_unused", "uncompressed"),
    in_turn(
        [(False, ()), (True, ()), (True, (1,))],
        [*ROUTES, *ON_NODES],
        [
            ({"wire": "fp32"}, torch.float32, None),
            ({"wire": "int4"}, torch.float32, 1024.0),
            ({"wire": "bf16"}, torch.bfloat16, None),
            ({"wire": "int8", "error_feedback": "worker"}, torch.float32, None),
            ({"selector": "randk"}, torch.float32, None),
        ],
    ),
    ids=str,
)
def test_a_request_that_fails_loses_at_most_the_steps_gradient(
    topology, bidirectional, settings, dtype, scale, some_unused, uncompressed
):
    """Law 6: whatever was sent before, and the residuals of unused parameters, stay."""
    config = TopKConfig(ratio=0.05, topology=topology, bidirectional=bidirectional, **settings)
    sizes, world = (300, 40, 500), 4
    local = laws.LOCAL if topology in ("hierarchical", "dense") else 1
    loss, used = None if scale is None else torch.tensor(scale), [True, True, False]
    reached = 0
    while True:
        cluster = Cluster(config, world, sum(sizes), dtype, local, sizes, uncompressed)
        for step in range(3):
            cluster.step([(g * (scale or 1)).to(dtype) for g in gradients(world, 840, step)], scale=loss)
        before, computed = laws.undelivered(cluster).double(), [g.to(dtype) for g in gradients(world, 840, 9)]
        mean = torch.stack(computed).double().mean(0)
        if not failing(cluster, [g * (scale or 1) for g in computed], reached, used if some_unused else None, loss):
            break
        lost = before + mean - laws.undelivered(cluster).double()
        either = torch.minimum(lost.abs(), (lost - mean).abs())
        assert either.max() < 1e-4 if dtype == torch.float32 else either.max() < 0.05, f"request {reached}"
        rows = torch.stack(cluster.step([g * 0 for g in computed], scale=loss))
        assert rows.isfinite().all(), "the next step goes on"
        reached += 1
    assert reached >= 1


@routes
@pytest.mark.parametrize("what", ["select", "encode"])
def test_an_error_of_a_selector_or_a_wire_loses_at_most_the_steps_gradient(topology, bidirectional, what, monkeypatch):
    config = TopKConfig(ratio=0.05, topology=topology, bidirectional=bidirectional, selector="gaussiank", wire="fp32")
    cluster = Cluster(config, 2, 1000)
    cluster.step(gradients(2, 1000, 0))
    before, computed = laws.undelivered(cluster), gradients(2, 1000, 1)
    owner, name = (select.GaussianK, "select") if what == "select" else (Codec, "encode")
    broken = mock.Mock(side_effect=KeyError("of the user"))
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        for end, g in zip(cluster.endpoints, computed, strict=True):
            with pytest.raises(KeyError):
                next(exchange(end, g.clone(), cluster.plan.codecs(1, selector=end.uplink.selector), Step(1)))
    torch.testing.assert_close(laws.undelivered(cluster), before + torch.stack(computed).mean(0))


class Copied(TorchDispatchMode):
    """Counts the elements of the tensors that an exchange clones."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.clone.default:
            self.elements += args[0].numel()
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("local", [1, 2])
def test_only_parameters_that_no_rank_used_are_set_aside(local):
    """With find_unused_parameters=True, a pass that uses all costs its votes alone; so do parameters of other ranks."""
    sizes, world, cloned = (3000, 700, 1001), 4, []
    config = TopKConfig(saving=50, topology="sharded" if local == 1 else "hierarchical")
    one = [[True, True, rank == 1] for rank in range(world)]
    for uses in ([None] * world, [[True] * 3] * world, one, [[True, True, False]] * world):
        cluster = Cluster(config, world, sum(sizes), local=local, sizes=sizes)
        for step in range(4):
            gradients = torch.randn(world, sum(sizes))
            before = [[link.memory.tensors()["residual"].clone() for link in end.links] for end in cluster.endpoints]
            several = [
                exchange(end, g, cluster.plan.codecs(step, 0, end.uplink.selector), used=used if step == 3 else None)
                for end, g, used in zip(cluster.endpoints, gradients, uses, strict=True)
            ]
            with Copied() as copied:
                cluster.drive(several)
        cloned.append(copied.elements)
    places = [end.slices(2) for end in cluster.endpoints]
    inside = sum(sizes[2] + sum(each.stop - each.start for each in slices) for slices in places)
    assert cloned == [cloned[0]] * 3 + [cloned[0] + inside]
    for end, slices, kept in zip(cluster.endpoints, places, before, strict=True):
        for link, where, residual in zip(end.links, slices, kept, strict=True):
            assert residual[where].any()
            assert torch.equal(link.memory.tensors()["residual"][where], residual[where])
