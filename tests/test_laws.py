"""The laws of the exchange, on every topology, direction, wire and size, in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import BidirectionalTopK, bfloat16, deal

from lightning_topk.config import TopKConfig
from lightning_topk.plan import volume
from lightning_topk.residuals import _served
from lightning_topk.simulate import Cluster

ROUTES = [
    ("sharded", True),
    ("sharded", False),
    ("single_server", True),
    ("single_server", False),
    ("allgather", False),
]
WIRES = ["fp32", "bf16"]
WORLDS = [1, 2, 3, 4, 7]
SIZES = [1, 2, 3, 10, 255, 257, 1100, 5000]

routes = pytest.mark.parametrize(("topology", "bidirectional"), ROUTES)
wires = pytest.mark.parametrize("wire", WIRES)
worlds = pytest.mark.parametrize("world", WORLDS)
sizes = pytest.mark.parametrize("numel", SIZES)


def gradients(world: int, numel: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + numel)
    return [torch.randn(numel, generator=generator) for _ in range(world)]


def undelivered(cluster: Cluster) -> torch.Tensor:
    ends = cluster.endpoints
    workers = sum(end.uplink.memory.tensors()["residual"] for end in ends) / len(ends)
    return workers + sum(served["residual"] for served in map(_served, ends) if served)


@routes
@wires
@worlds
@sizes
@pytest.mark.parametrize("ratio", [0.001, 0.1, 1.0])
def test_laws_hold(topology, bidirectional, wire, world, numel, ratio):
    config = TopKConfig(ratio=ratio, bidirectional=bidirectional, wire=wire, topology=topology)
    cluster = Cluster(config, world, numel)
    produced, delivered, sent_before = torch.zeros(numel), torch.zeros(numel), [0] * world
    for step in range(4):
        given = gradients(world, numel, step)
        received = cluster.step(given)
        average = torch.stack(given).mean(0)
        produced += average
        delivered += received[0]
        for each in received:  # agreement
            assert torch.equal(each, received[0])
        if ratio == 1 and wire == "fp32":  # identity
            torch.testing.assert_close(received[0], average, atol=1e-6, rtol=1e-6)
        for rank in range(world):  # fixed size, prediction
            plan = volume(config, [numel], world, rank)
            sent = cluster.sent_bytes["uplink"][rank] + cluster.sent_bytes["downlink"][rank]
            assert sent - sent_before[rank] == plan.uplink + plan.downlink
            sent_before[rank] = sent
        # conservation
        torch.testing.assert_close(delivered + undelivered(cluster), produced, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("wire", WIRES)
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


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("world", "numel", "block"), [(2, 4096, 256), (4, 5000, 256), (3, 700, 234), (4, 3, 1)])
def test_sharded_exchange_is_the_thesis_on_every_shard(world, numel, block, wire):
    shards = deal(numel, world, block)
    kept = max(1, int(np.ceil(int(0.02 * numel) * len(shards[0]) / numel)))
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
    tolerance = (
        {"atol": 1e-6, "rtol": 1e-6} if wire == "fp32" or topology == "allgather" else {"atol": 0, "rtol": 2**-7}
    )
    torch.testing.assert_close(received, sent / world, **tolerance)


@routes
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradients_reach_everyone_and_no_residual(topology, bidirectional, poison):
    world, numel = 3, 2000
    cluster = Cluster(TopKConfig(ratio=0.01, bidirectional=bidirectional, topology=topology), world, numel)
    cluster.step(gradients(world, numel, 0))
    before = [end.uplink.memory.tensors()["residual"].clone() for end in cluster.endpoints]
    given = gradients(world, numel, 1)
    given[1][700:900] = poison
    for received in cluster.step(given):
        assert not received.isfinite().all()
    for end in cluster.endpoints:
        for link in end.links:
            assert link.memory.tensors()["residual"].isfinite().all()
    torch.testing.assert_close(cluster.endpoints[1].uplink.memory.tensors()["residual"], before[1])
    assert all(received.isfinite().all() for received in cluster.step(gradients(world, numel, 2)))


@routes
def test_without_error_feedback_nothing_is_kept(topology, bidirectional):
    config = TopKConfig(ratio=0.01, bidirectional=bidirectional, topology=topology, error_feedback=False)
    cluster = Cluster(config, 3, 1000)
    first, again = (cluster.step(gradients(3, 1000, 0))[0] for _ in range(2))
    assert torch.equal(first, again)


def test_gradients_at_the_edge_of_float32_leave_finite_residuals():
    cluster = Cluster(TopKConfig(ratio=0.01), 2, 1000)
    given = gradients(2, 1000, 0)
    given[0][5] = torch.finfo(torch.float32).max  # rounds to infinity in bfloat16
    received = cluster.step(given)[0]
    assert received.isfinite().all()
    assert all(link.memory.tensors()["residual"].isfinite().all() for end in cluster.endpoints for link in end.links)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_agree_and_conserve(dtype):
    world, numel = 3, 1500
    cluster = Cluster(TopKConfig(ratio=0.05, wire="fp32"), world, numel, dtype)
    produced, delivered = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(5):
        given = [g.to(dtype) for g in gradients(world, numel, step)]
        received = cluster.step(given)
        assert all(torch.equal(each, received[0]) for each in received)
        assert received[0].dtype == dtype
        produced += torch.stack(given).double().mean(0)
        delivered += received[0].double()
    tolerance = 1e-5 if dtype == torch.float64 else 5 * torch.finfo(dtype).eps
    torch.testing.assert_close(delivered + undelivered(cluster).double(), produced, atol=tolerance, rtol=tolerance)
