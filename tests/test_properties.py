"""The laws for whatever shapes, ratios, world sizes, dtypes and settings a machine thinks of."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_laws import ON_NODES, ROUTES, SELECTED, WIRES, undelivered

from lightning_topk.config import TopKConfig
from lightning_topk.simulate import Cluster
from lightning_topk.volume import volume

VALUES = st.one_of(
    st.just(0.0),
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([1.0, -1.0, 1e-30, -1e-40, 1e30]),  # ties, denormals, spikes
)


@st.composite
def systems(draw):
    """A configuration, a world, and gradients for three steps."""
    topology, bidirectional = draw(st.sampled_from([*ROUTES, *(way for way in ON_NODES if way[0] != "dense")]))
    ratios = st.floats(1e-4, 1.0)
    config = TopKConfig(
        ratio=draw(ratios),
        server_ratio=draw(st.none() | ratios) if bidirectional else None,
        bidirectional=bidirectional,
        topology=topology,
        wire=draw(st.sampled_from(WIRES)),
        selector=draw(st.sampled_from(SELECTED)),
    )
    world, numel = draw(st.integers(1, 6)), draw(st.integers(1, 700))
    if topology == "hierarchical":
        world = 2 * max(2, world)  # nodes of two; one node would be dense
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    few = draw(st.lists(VALUES, min_size=1, max_size=12))
    seed = draw(st.integers(0, 2**16))
    return config, world, numel, dtype, few, seed


def local_of(config: TopKConfig) -> int:
    """Ranks of a node."""
    return 2 if config.topology == "hierarchical" else 1


@given(systems())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_laws_hold(system):
    config, world, numel, dtype, few, seed = system
    generator = torch.Generator().manual_seed(seed)
    cluster = Cluster(config, world, numel, dtype, local_of(config))
    produced, delivered, largest = torch.zeros(numel).double(), torch.zeros(numel).double(), 1e-6
    for step in range(3):
        noise = torch.randn(world, numel, generator=generator)
        spots = torch.randint(numel, (world, len(few)), generator=generator)
        given_ = list(noise.scatter(1, spots, torch.tensor(few).expand(world, -1)).clamp(-6e4, 6e4).to(dtype))
        before = {way: list(sent) for way, sent in cluster.sent_bytes.items()}
        received = cluster.step(given_)
        produced += torch.stack(given_).double().mean(0)
        delivered += received[0].double()
        largest = max(largest, float(torch.stack(given_).double().abs().max()))
        assert all(torch.equal(each, received[0]) for each in received), "agreement"
        for rank in range(world):
            plan = volume(config, [numel], world, rank, dtype.itemsize, step=step, local=local_of(config))
            for way in before:
                assert cluster.sent_bytes[way][rank] - before[way][rank] == getattr(plan, way), "prediction, fixed size"
    for end, outcome in zip(cluster.endpoints, cluster.outcomes, strict=True):
        codecs = cluster.plan.codecs(cluster.steps - 1, selector=end.uplink.selector)
        for stats, codec in ((outcome.uplink, codecs.uplink), (outcome.downlink, codecs.reply)):
            if stats is not None:
                assert 0 <= stats.selected <= codec.kept * (end.layout.shards if stats is outcome.uplink else 1)
        for link in end.links:
            assert link.memory.tensors()["residual"].isfinite().all()
    left = undelivered(cluster).double()
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(delivered + left, produced, rtol=0, atol=40 * eps * world * largest)  # conservation


@given(systems())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_gradient_that_is_not_finite_leaves_finite_residuals_and_reaches_all(system):
    config, world, numel, dtype, _, seed = system
    cluster = Cluster(config, world, numel, dtype, local_of(config))
    generator = torch.Generator().manual_seed(seed)
    cluster.step(list(torch.randn(world, numel, generator=generator).to(dtype)))
    spoilt = torch.randn(world, numel, generator=generator).to(dtype)
    spoilt[seed % world, : 1 + seed % numel] = (torch.inf, -torch.inf, torch.nan)[seed % 3]
    for each in cluster.step(list(spoilt)):
        assert not each.isfinite().all()
    for end, outcome in zip(cluster.endpoints, cluster.outcomes, strict=True):
        assert not outcome.finite
        for link in end.links:
            assert link.memory.tensors()["residual"].isfinite().all()
    for each in cluster.step(list(torch.randn(world, numel, generator=generator).to(dtype))):
        assert each.isfinite().all()
