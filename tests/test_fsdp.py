"""The laws between the replicas of an FSDP2 model, on gloo ranks: shard by shard, with torch's own HSDP as the oracle."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_gloo import loss_of, mean_over_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lightning_topk import TopKConfig, attach
from lightning_topk.schedule import ExponentialWarmup

NODES = [(2, 2), (3, 1), (1, 4)]
"""Nodes, and ranks of each."""
on_nodes = pytest.mark.parametrize(("nodes", "local"), NODES)
STEPS = 4


class Net(nn.Module):
    """Layers of odd sizes, a scalar, and a branch that can be left out. FSDP2 takes no empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(12, 51), nn.Linear(51, 51), nn.Linear(51, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        h = self.first(x).tanh()
        if branch:
            h = h + self.branch(h).tanh()
        return self.scale * self.last(h)


def mesh_of(nodes: int, local: int):
    return init_device_mesh("cpu", (nodes, local), mesh_dim_names=("replicate", "shard"))


def sharded(net: nn.Module, mesh, parts=("first", "branch"), **options) -> nn.Module:
    """The net with some of its layers wrapped, and itself."""
    for name in parts:
        fully_shard(getattr(net, name), mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def made(nodes: int, local: int, net: nn.Module | None = None, **settings):
    """A sharded net and its state."""
    torch.manual_seed(0)
    mesh, net = mesh_of(nodes, local), Net() if net is None else net
    options = settings.pop("options", {})
    net = sharded(net, mesh["shard"], **options)
    return net, attach(net, process_group=mesh["replicate"], **settings)


def full(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape).flatten() if tensor is None else tensor.full_tensor().float().flatten()


def gradient(net: nn.Module) -> torch.Tensor:
    return torch.cat([full(p.grad, p) for p in net.parameters()])


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])


def undelivered(state, net: nn.Module) -> torch.Tensor:
    """What all ranks together still keep of the gradients."""
    kept = state.full_state_dict()["parameters"]
    names = [name for name, _ in net.named_parameters() if name in kept]
    known = [sum(part["residual"].double() for part in kept[name].values()) for name in names]
    whole = torch.cat(known) if known else torch.zeros(sum(p.numel() for p in net.parameters())).double()
    dist.broadcast(whole, 0)
    return whole


def local_gradient(net: nn.Module, plain: nn.Module, mode: str, rank: int, step: int, **forward) -> torch.Tensor:
    """This rank's own gradient at the weights of a sharded net."""
    with torch.no_grad():
        for p, q in zip(plain.parameters(), net.parameters(), strict=True):
            p.copy_(q.full_tensor())
    plain.zero_grad()
    loss_of(plain, mode, rank, step, **forward).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in plain.parameters()])


class Counted:
    """Counts what collectives are given for other ranks, by the ranks of their group."""

    COSTS = {
        "all_to_all_single": lambda world, out, x: x.nbytes * (world - 1) // world,
        "all_reduce": lambda world, x: 2 * (world - 1) * x.nbytes // world,
        "all_gather_into_tensor": lambda world, out, x: x.nbytes * (world - 1),
        "all_gather_single": lambda world, out, x: x.nbytes * (world - 1),
        "reduce_scatter_tensor": lambda world, out, x: out.nbytes * (world - 1),
        "reduce_scatter_single": lambda world, out, x: out.nbytes * (world - 1),
        "gather": lambda world, x: x.nbytes * (dist.get_rank() > 1),
        "scatter": lambda world, out: out.nbytes * (world - 1) * (dist.get_rank() < 2),
    }

    def __init__(self) -> None:
        self.bytes: dict[frozenset[int], int] = {}
        self._patches = [mock.patch.object(dist, name, self._count(name, getattr(dist, name))) for name in self.COSTS if hasattr(dist, name)]

    def _count(self, name, function):
        def counted(*args, **kwargs):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            ranks = frozenset(dist.get_process_group_ranks(kwargs.get("group")))
            self.bytes[ranks] = self.bytes.get(ranks, 0) + self.COSTS[name](len(ranks), *tensors)
            return function(*args, **kwargs)

        return counted

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()


def laws(rank: int, world: int, nodes: int, local: int, settings: dict) -> None:
    mode = settings.pop("mode", "all")
    net, state = made(nodes, local, **{"ratio": 0.05, **settings})
    plain = Net()
    produced, delivered, checks = 0.0, 0.0, []
    between, inside = (
        frozenset(dist.get_process_group_ranks(group))
        for group in (state.groups.all, net.first.weight.device_mesh.get_group())
    )
    with Counted() as counted:
        for step in range(STEPS):
            produced = produced + mean_over_ranks(local_gradient(net, plain, mode, rank, step))
            net.zero_grad()
            predicted = state.predicted() if step else None
            counted.bytes.clear()
            loss_of(net, mode, rank, step).backward()
            sent, sent_inside = counted.bytes.get(between, 0), counted.bytes.get(inside, 0)
            shard = torch.cat([p.grad.to_local().flatten() for p in net.parameters() if p.grad is not None])
            rows = [torch.empty_like(shard) for _ in range(nodes)]
            dist.all_gather(rows, shard, group=state.groups.all)
            checks.append((state.report(), predicted, sent, sent_inside, rows))
            delivered = delivered + gradient(net).double()
    left = undelivered(state, net)
    names = {name for name, p in net.named_parameters()}
    assert set(state.names.values()) == names
    steps = state.residuals.progress.steps
    state.close()

    for report, predicted, sent, sent_inside, rows in checks:
        assert all(torch.equal(row, rows[0]) for row in rows), "agreement"
        assert report.bytes["uplink"] + report.bytes["downlink"] == sent, "prediction, at the collectives"
        assert report.bytes["inter_node"] == local * sent
        if predicted is not None:
            assert predicted.uplink == report.bytes["uplink"], "prediction, uplink"
            assert predicted.downlink == report.bytes["downlink"], "prediction, downlink"
            assert predicted.inter_node == report.bytes["inter_node"], "prediction, between nodes"
            assert report.bytes["intra_node"] == local * sent_inside, (report.bytes["intra_node"], local * sent_inside)
    assert steps == STEPS
    assert len({report.bytes["uplink"] for report, *_ in checks}) == 1, "fixed size"
    assert delivered.count_nonzero() > 0
    torch.testing.assert_close(delivered + left, produced, atol=1e-6, rtol=1e-5)
    assert (left.count_nonzero() > 0) == (nodes > 1)


ROUTES = [("sharded", True), ("sharded", False), ("single_server", True), ("allgather", False)]


@on_nodes
@pytest.mark.parametrize(("topology", "bidirectional"), ROUTES)
def test_laws_hold_between_the_replicas_of_a_sharded_model(groups, nodes, local, topology, bidirectional):
    groups(nodes * local).run(laws, nodes, local, {"topology": topology, "bidirectional": bidirectional})
