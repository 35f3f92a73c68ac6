"""The laws between the replicas of an FSDP2 model, shard by shard, on gloo ranks; torch's own HSDP is the oracle."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from groups import Group
from test_gloo import mean_over_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lightning_topk import attach
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
        self.scale, self.use_scale = nn.Parameter(torch.ones(1)), True

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        h = self.first(x).tanh()
        if branch:
            h = h + self.branch(h).tanh()
        return self.scale * self.last(h) if self.use_scale else self.last(h)


def loss_of(net: nn.Module, rank: int, step: int, branch: bool = True) -> torch.Tensor:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))
    return net(x, branch).square().mean()


@cache
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
    known = [kept[name]["residual"].double() for name in names]
    whole = torch.cat(known) if known else torch.zeros(sum(p.numel() for p in net.parameters())).double()
    dist.broadcast(whole, 0)
    return whole


def local_gradient(net: nn.Module, plain: nn.Module, rank: int, step: int, branch: bool) -> torch.Tensor:
    """This rank's own gradient at the weights of a sharded net."""
    with torch.no_grad():
        for p, q in zip(plain.parameters(), net.parameters(), strict=True):
            p.copy_(q.full_tensor())
    plain.zero_grad()
    loss_of(plain, rank, step, branch).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in plain.parameters()])


class Counted:
    """Counts what collectives are given for other ranks, by the ranks of their group."""

    COSTS: ClassVar = {
        "all_to_all_single": lambda world, out, x: x.nbytes * (world - 1) // world,
        "all_reduce": lambda world, x: 2 * (world - 1) * x.nbytes // world,
        "all_gather_into_tensor": lambda world, out, x: x.nbytes * (world - 1),
        "all_gather_single": lambda world, out, x: x.nbytes * (world - 1),
        "reduce_scatter_tensor": lambda world, out, x: out.nbytes * (world - 1),
        "reduce_scatter_single": lambda world, out, x: out.nbytes * (world - 1),
        "gather": lambda world, x: x.nbytes,
        "scatter": lambda world, out: out.nbytes * (world - 1),
    }
    SENDERS: ClassVar = {"gather": lambda rank: rank > 0, "scatter": lambda rank: rank == 0}

    def __init__(self) -> None:
        self.bytes: dict[frozenset[int], int] = {}
        self._patches = [
            mock.patch.object(dist, name, self._count(name, getattr(dist, name)))
            for name in self.COSTS
            if hasattr(dist, name)
        ]

    def _count(self, name, function):
        def counted(*args, **kwargs):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            ranks = frozenset(dist.get_process_group_ranks(kwargs.get("group")))
            if self.SENDERS.get(name, lambda rank: True)(dist.get_rank(kwargs.get("group"))):
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
    """Conservation, agreement, fixed size and prediction, with a branch that is left out ``every`` so many steps."""
    every = settings.pop("every", STEPS + 1)
    net, state = made(nodes, local, **{"ratio": 0.05, **settings})
    plain = Net()
    produced, delivered, checks = 0.0, 0.0, []
    between, inside = (
        frozenset(dist.get_process_group_ranks(group))
        for group in (state.groups.all, net.first.weight.device_mesh.get_group())
    )
    with Counted() as counted:
        for step in range(STEPS):
            branch = (step + 1) % every != 0
            produced = produced + mean_over_ranks(local_gradient(net, plain, rank, step, branch))
            net.zero_grad()
            predicted = state.predicted() if step and every > STEPS else None
            counted.bytes.clear()
            loss_of(net, rank, step, branch).backward()
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
            assert report.bytes["intra_node"] == local * sent_inside, "arithmetic, inside the node"
    assert steps == STEPS
    if not isinstance(settings.get("ratio"), str | ExponentialWarmup) and every > STEPS:
        assert len({report.bytes["uplink"] for report, *_ in checks}) == 1, "fixed size"
    assert delivered.count_nonzero() > 0
    torch.testing.assert_close(delivered + left, produced, atol=1e-6, rtol=1e-5)
    assert (left.count_nonzero() > 0) == (nodes > 1)


ROUTES = [("sharded", True), ("sharded", False), ("single_server", True), ("allgather", False)]


@on_nodes
@pytest.mark.parametrize(("topology", "bidirectional"), ROUTES)
def test_laws_hold_between_the_replicas_of_a_sharded_model(groups, nodes, local, topology, bidirectional):
    groups(nodes * local).run(laws, nodes, local, {"topology": topology, "bidirectional": bidirectional})


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": None, "saving": 8},
        {"ratio": None, "saving": 8, "dense_parameters": ["*.bias", "scale"]},
        {"selector": "gaussiank", "wire": "bf16"},
        {"selector": "randk", "wire": "fp32"},
        {"ratio": ExponentialWarmup(0.05, steps=3), "wire": "int8"},
        {"every": 2},
        {"options": {"reshard_after_forward": False}},
    ],
)
def test_laws_hold_between_replicas_for_every_kind_of_setting(groups, settings):
    groups(4).run(laws, 2, 2, settings)


def learned(mesh, rank: int, hybrid: bool, options: dict, clip: bool, adam: bool) -> torch.Tensor:
    """Weights after some steps, each of two backward passes of which the first is not reduced."""
    torch.manual_seed(0)
    net = sharded(Net(), mesh if hybrid else mesh["shard"], **options)
    state = None if hybrid else attach(net, process_group=mesh["replicate"], ratio=1.0, wire="fp32")
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(net.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        for part in (0, 1):
            net.set_requires_gradient_sync(part == 1)
            (loss_of(net, rank, 2 * step + part, branch=step % 3 != 2) / 2).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    if state is not None:
        assert state.residuals.progress.steps == 6  # accumulated gradients are exchanged once
        state.close()
    return weights(net)


def as_hybrid(rank: int, world: int, options: dict, clip: bool, adam: bool) -> None:
    mesh = mesh_of(2, 2)
    ours = learned(mesh, rank, False, options, clip, adam)
    torch.testing.assert_close(ours, learned(mesh, rank, True, options, clip, adam), atol=1e-6, rtol=1e-5)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "clip", "adam"),
    [({}, False, False), ({}, True, True), ({"reshard_after_forward": False}, False, True),
     ({"mp_policy": HALF}, True, False)],
)  # fmt: skip
def test_with_everything_sent_a_model_learns_as_with_torchs_hybrid_sharding(groups, options, clip, adam):
    groups(4).run(as_hybrid, options, clip, adam)


def thawed(rank: int, world: int) -> None:
    """A module that is frozen at first, and others of which a part is; then the other way round."""
    mesh, found = mesh_of(2, 2), []
    for hybrid in (True, False):
        torch.manual_seed(0)
        net = Net()
        net.branch.requires_grad_(False)
        net.last.bias.requires_grad_(False)
        net = sharded(net, mesh if hybrid else mesh["shard"])
        state = None if hybrid else attach(net, process_group=mesh["replicate"], ratio=1.0, wire="fp32")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            if step == 2:
                net.branch.requires_grad_(True)
                net.last.requires_grad_(True)
                net.first.requires_grad_(False)
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            optimizer.step()
        found.append(weights(net))
    kept = state.full_state_dict()
    state.load_state_dict(state.state_dict())
    state.close()
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    assert "first.weight" not in kept["parameters"]
    assert rank or "branch.weight" in kept["parameters"]


def outside(rank: int, world: int) -> None:
    """FSDP's root is a module around the model, whose parts are trained in turn, most of them uncompressed at times."""
    mesh = mesh_of(2, 2)
    net = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    for part in (*net, net):
        fully_shard(part, mesh=mesh["shard"])
    outer = fully_shard(nn.Sequential(net, nn.Tanh()), mesh=mesh["shard"])
    state = attach(net, process_group=mesh["replicate"], saving=20, dense_parameters="1.bias", optimizer=list)
    watched, steps = Watched(state), []
    for step in range(6):
        net[0].requires_grad_(step % 2 == 0)
        outer(torch.randn(4, 12)).square().mean().backward()
        steps.append(state.residuals.progress.steps)
    watched.check()
    state.close()
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_pass_ends_with_fsdps_root_though_that_is_outside_and_amounts_bear_what_is_frozen(groups):
    groups(4).run(outside)


class Beside(nn.Module):
    """A frozen layer that is sharded, one that is not, and a head."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.plain, self.base, self.head = nn.Linear(12, 12), base, nn.Linear(12, 3)
        self.plain.requires_grad_(False)

    def forward(self, x):
        return self.head(self.base(self.plain(x)))


def shared(rank: int, world: int) -> None:
    mesh, base = mesh_of(2, 2), nn.Linear(12, 12).requires_grad_(False)
    fully_shard(base, mesh=mesh["shard"])
    nets = [Beside(base) for _ in range(2)]
    for net in nets:
        fully_shard(net.head, mesh=mesh["shard"])
    states = [attach(net, process_group=mesh["replicate"], ratio=0.1) for net in nets]
    for net in nets:
        net(torch.randn(4, 12)).square().mean().backward()
    assert [state.residuals.progress.steps for state in states] == [1, 1]
    nets[0].plain.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'plain\.\w+' \(one of 2\) was unfrozen, but nobody reduces its gradient"):
        nets[0](torch.randn(4, 12)).square().mean().backward()
    for state in states:
        state.close()


def test_two_models_may_share_a_frozen_module_and_what_is_not_sharded_stays_frozen(groups):
    groups(4).run(shared)


def test_layers_that_are_unfrozen_later_learn_as_with_torchs_hybrid_sharding(groups):
    groups(4).run(thawed)


def in_turn(rank: int, world: int) -> None:
    """Two parameters of one size in one module, of which the second is trained after the first."""
    mesh = mesh_of(2, 2)
    net = nn.Sequential(nn.Linear(12, 12, bias=False), nn.Tanh(), nn.Linear(12, 12, bias=False))
    net[2].requires_grad_(False)
    fully_shard(net, mesh=mesh["shard"])
    state = attach(net, process_group=mesh["replicate"], ratio=0.1)
    watched = Watched(state)
    for step in range(6):
        if step == 3:
            net[0].requires_grad_(False)
            net[2].requires_grad_(True)
        net.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(9 * step + rank))
        (net(x).square().mean() * (step != 3)).backward()
        if step == 3:
            assert not net[2].weight.grad.full_tensor().any()  # nothing of the other's residual
    watched.check()
    state.close()


def test_the_residual_of_a_frozen_parameter_is_not_delivered_to_one_of_the_same_size(groups):
    groups(4).run(in_turn)


def divided(rank: int, world: int) -> None:
    """The user divides the sum of all ranks' gradients, such as by a number of tokens."""
    mesh, found = mesh_of(2, 2), []
    for hybrid in (True, False):
        torch.manual_seed(0)
        net = sharded(Net(), mesh if hybrid else mesh["shard"])
        for part in (net, net.first, net.branch):
            part.set_gradient_divide_factor(3.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
        state = None if hybrid else attach(net, process_group=mesh["replicate"], ratio=1.0, wire="fp32")
        for step in range(2):
            net.zero_grad()
            loss_of(net, rank, step).backward()
        found.append(gradient(net))
    state.close()
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


def test_a_factor_that_the_user_divides_by_is_of_all_ranks_as_with_torchs_hybrid_sharding(groups):
    groups(4).run(divided)


class Watched:
    """What the hooks of a state were given and what they delivered, by bucket: the mean over the replicas, in sum."""

    def __init__(self, state) -> None:
        self.given: dict = {}
        self.delivered: dict = {}
        self._state, self._run = state, state._exchanger._exchange
        state._exchanger._exchange = self._watch

    def _watch(self, g, job, *others):
        mean = g.double().clone()
        dist.all_reduce(mean, group=self._state._replicas)
        yield from self._run(g, job, *others)
        for parts, before, after in zip(
            job.bucket,
            (mean / self._state.world).split([m.numel() for m in job.bucket]),
            g.double().split([m.numel() for m in job.bucket]),
            strict=True,
        ):
            if before.isfinite().all():
                self.given[parts] = self.given.get(parts, 0) + before
                self.delivered[parts] = self.delivered.get(parts, 0) + after

    def check(self, tolerance: float = 1e-5) -> None:
        held = self._state.residuals.held()
        for member in [each for each in self._state.names if each in held]:  # in the same order on every rank
            worker, server = held[member]
            left = worker.double() / self._state.world + server.double()
            dist.all_reduce(left, group=self._state._replicas)
            torch.testing.assert_close(
                self.delivered[member] + left, self.given[member], atol=tolerance, rtol=tolerance
            )


def mixed(rank: int, world: int, dtype: torch.dtype, policy: dict) -> None:
    net, state = made(2, 2, Net().to(dtype), ratio=0.05, options={"mp_policy": MixedPrecisionPolicy(**policy)})
    watched, kinds = Watched(state), set()
    for step in range(4):
        net.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        net(x).square().mean().backward()
        kinds |= {p.grad.dtype for p in net.parameters()}
    members = {member.dtype for bucket in state.residuals.progress.buckets for member in bucket}
    watched.check(1e-4)
    state.close()
    assert kinds == {dtype}
    assert members == {policy.get("reduce_dtype", dtype)}


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (torch.float32, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}),
        (torch.float32, {"reduce_dtype": torch.float16}),
        (torch.bfloat16, {"reduce_dtype": torch.float32}),
        (torch.bfloat16, {}),
        (torch.float64, {}),
    ],
)
def test_nothing_is_lost_whatever_the_dtypes_of_parameters_and_reductions(groups, dtype, policy):
    groups(4).run(mixed, dtype, policy)


def scaled(rank: int, world: int) -> None:
    """Gradients of about 1e-8, which float16 holds with a GradScaler's scale only."""
    mesh, found = mesh_of(2, 2), []
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    for hybrid in (True, False):
        torch.manual_seed(0)
        net, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**24)
        net = sharded(net, mesh if hybrid else mesh["shard"], mp_policy=policy)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        settings = {"ratio": 1.0, "wire": "fp32", "optimizer": optimizer, "scaler": scaler}
        state = None if hybrid else attach(net, process_group=mesh["replicate"], **settings)
        scaler.scale(loss_of(net, rank, 0).float() * 1e-7).backward()
        found.append(gradient(net))
    state.close()
    ours, theirs = found[1], found[0]
    assert (theirs / 2**24).abs().median() < 3e-8
    assert (theirs != 0).float().mean() > 0.9
    torch.testing.assert_close(ours, theirs, rtol=0.01, atol=1e-6)


def test_small_gradients_that_are_scaled_arrive_as_with_torchs_hybrid_sharding(groups):
    groups(4).run(scaled)


class TwoKinds(nn.Module):
    """Modules of two dtypes, each wrapped by itself, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.single, self.frozen = nn.Linear(12, 30).bfloat16(), nn.Linear(30, 4), nn.Linear(30, 30)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.single(self.frozen(self.short(x.bfloat16()).float()))


def two_kinds(rank: int, world: int) -> None:
    torch.manual_seed(0)
    mesh, net = mesh_of(2, 2), TwoKinds()
    for part in (net.short, net.single, net.frozen):
        fully_shard(part, mesh=mesh["shard"])
    state = attach(net, process_group=mesh["replicate"], ratio=0.05)
    watched = Watched(state)
    for _ in range(3):
        net(torch.randn(4, 12)).square().mean().backward()
    watched.check(1e-4)
    kept = {state.names[member] for member in state.residuals.held()}
    assert kept == {"short.weight", "short.bias", "single.weight", "single.bias"}
    assert net.frozen.weight.grad is None
    state.close()


def test_modules_of_several_dtypes_and_frozen_ones_are_exchanged_unit_by_unit(groups):
    groups(4).run(two_kinds)


def different_use(rank: int, world: int) -> list[str]:
    """Nodes that use different parameters: of a module, and a module more or less."""
    messages = []
    for case in ("part", "whole", "last"):
        net, state = made(2, 2, ratio=0.05)
        net.use_scale = case != "part" or rank < 2
        message = ""
        try:
            if case == "last":
                h = net.first(torch.randn(8, 12)) if rank < 2 else net.branch(torch.randn(8, 51))
                h.square().mean().backward()
            else:
                loss_of(net, rank, 0, branch=case == "part" or rank < 2).backward()
        except (ValueError, RuntimeError) as error:
            message = str(error)
        messages.append(message)
        state.close()
    return messages


def test_replicas_that_use_different_parameters_are_told_so(groups):
    for messages in groups(4).run(different_use):
        for message in messages:
            assert "the ranks differ: the gradient that comes next is" in message, messages
            assert "set_reduce_scatter_unused_params(True)" in message


def other_modules(rank: int, world: int) -> str:
    """Each node uses one of two modules of equal size, both of which were used by all before."""
    mesh = mesh_of(2, 2)
    net = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])
    for part in net:
        fully_shard(part, mesh=mesh["shard"])
    state = attach(net, process_group=mesh["replicate"], ratio=0.1)
    message = ""
    try:
        for used in (0, 1, 0 if rank < 2 else 1):
            net[used](torch.randn(4, 12)).square().mean().backward()
    except RuntimeError as error:
        message = str(error)
    state.close()
    return message


def test_gradients_of_different_modules_of_one_size_are_not_mixed_up(groups):
    group = Group(4)
    try:
        for message in group.run(other_modules):
            assert "is of other parameters than this rank's" in message
    finally:
        group.stop()


def zeros_for_unused(rank: int, world: int) -> None:
    net, state = made(2, 2, ratio=0.05)
    if not hasattr(net, "set_reduce_scatter_unused_params"):
        return
    net.set_reduce_scatter_unused_params(True)
    watched = Watched(state)
    for step in range(6):
        net.zero_grad()
        net.use_scale = (step + rank) % 3 == 0
        loss_of(net, rank, step).backward()
    watched.check()
    assert len(watched.given) == len(list(net.parameters()))
    state.close()


def test_every_rank_may_use_other_parameters_if_fsdp_reduces_unused_ones(groups):
    groups(4).run(zeros_for_unused)


def refusals(rank: int, world: int) -> list[str]:
    mesh, other = mesh_of(2, 2), mesh_of(4, 1)
    crossed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
    plain, inside, between = Net(), mesh["shard"], mesh["replicate"]
    several = Net()
    fully_shard(several.first, mesh=other["shard"])
    fully_shard(several, mesh=inside)
    partly = Net()
    fully_shard(partly.first, mesh=inside)
    taken = sharded(Net(), inside)
    state = attach(taken, process_group=between, ratio=0.1)
    whole = sharded(Net(), inside)
    frozen = Net().requires_grad_(False)
    with torch.device("meta"):
        empty = Net()
    cases = {
        "process_group= is missing": (whole, {"ratio": 0.1}),
        "is a str, not a process group or a device mesh": (whole, {"process_group": "replicate"}),
        "not one dimension": (whole, {"process_group": mesh}),
        "must hold the same shard, each on another node": (whole, {"process_group": inside}),
        "with a dimension of replicas": (sharded(Net(), mesh), {"process_group": between}),
        "on several meshes": (several, {"process_group": between}),
        "'scale' (one of 5) is not sharded": (partly, {"process_group": between}),
        "no gradient to exchange": (sharded(frozen, inside), {"process_group": between}),
        "have no values yet": (sharded(empty, inside), {"process_group": between}),
        "clip every shard by a norm of its own": (whole, {"process_group": between, "clip_norm": 1.0}),
        "Close the earlier state first": (taken, {"process_group": between}),
        "unknown argument ratoi": (whole, {"process_group": between, "ratoi": 1}),
        "local_world_size=2 is for DDP models": (whole, {"process_group": between, "local_world_size": 2}),
        "process_group= is for models that fully_shard": (plain, {"process_group": between}),
        "the shard that a rank holds is": (whole, {"process_group": crossed["replicate"]}),
    }
    said = []
    for words, (model, arguments) in cases.items():
        try:
            attach(model, **arguments)
            said.append(f"nothing, instead of {words}")
        except (ValueError, TypeError, RuntimeError) as error:
            said.append("" if words in str(error) else f"{error} instead of {words}")
    try:
        taken.set_requires_all_reduce(False)
        loss_of(taken, rank, 0).backward()
        said.append("nothing about set_requires_all_reduce")
    except RuntimeError as error:
        said.append("" if "use set_requires_gradient_sync(False)" in str(error) else str(error))
    state.close()
    return [words for words in said if words]


def told(rank: int, world: int) -> list[str]:
    said: list[str] = []
    mesh = mesh_of(2, 2)
    attach(sharded(Net(), mesh["shard"]), process_group=mesh["replicate"], announce=said.append).close()
    return said


def test_one_rank_of_the_first_node_speaks(groups):
    (words,), *others = groups(4).run(told)
    assert "attach was called without optimizer=" in words
    assert others == [[], [], []]


def test_what_cannot_be_exchanged_is_refused_with_the_remedy(groups):
    assert groups(4).run(refusals) == [[]] * 4


def closed(rank: int, world: int) -> None:
    net, state = made(2, 2, ratio=0.1)
    loss_of(net, rank, 0).backward()
    kept = undelivered(state, net)
    state.close()
    with pytest.raises(RuntimeError, match="this ShardState was closed; attach the model again"):
        loss_of(net, rank, 1).backward()
    again = attach(sharded_again(net), process_group=mesh_of(2, 2)["replicate"], ratio=0.1, residuals=state.residuals)
    assert torch.equal(undelivered(again, net), kept)
    again.close()


def closed_again_and_again(rank: int, world: int) -> list[tuple[int, int, int]]:
    """Threads, file descriptors and groups of this process after each of some states was closed."""
    counts = []
    for _ in range(4):
        net, state = made(2, 2, ratio=0.1)
        loss_of(net, rank, 0).backward()
        state.close()
        threads, files = (len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd"))
        counts.append((threads, files, len(dist.distributed_c10d._world.pg_map)))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_states_of_shards_that_are_closed_leave_their_groups_to_the_next_one(groups):
    for first, *_, last in groups(4).run(closed_again_and_again):
        assert all(now < before + 3 for now, before in zip(last, first, strict=True)), "3 would be one state's"


def sharded_again(net):
    getattr(net, "reset_iter_state", lambda: None)()
    return net


def test_a_closed_state_lets_no_replica_go_its_own_way_and_another_one_goes_on(groups):
    groups(4).run(closed)


def undone(rank: int, world: int) -> None:
    """A GradScaler skips the step of a gradient that is infinite on one rank."""
    net, state = made(2, 2, ratio=0.05, optimizer=lambda: [optimizer], scaler=(scaler := torch.amp.GradScaler("cpu")))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(number: int, factor: float = 1.0) -> tuple:
        optimizer.zero_grad()
        scaler.scale(loss_of(net, rank, number) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        return weights(net), undelivered(state, net)

    before = step(0)
    after = step(1, torch.inf if rank == 3 else 1.0)
    found = state.nonfinite_steps
    last = step(2)
    finite = all(part.isfinite().all() for part in last)
    state.close()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(last[0], after[0])
    assert finite
    assert found == 1


def test_what_was_sent_for_a_step_that_the_scaler_skips_comes_back_to_the_shards(groups):
    groups(4).run(undone)


def uncompressed(rank: int, world: int) -> None:
    net, state = made(2, 2, ratio=0.01, dense_parameters=["*.bias", "scale"])
    plain, pairs = Net(), []
    for step in range(3):
        expected = mean_over_ranks(local_gradient(net, plain, rank, step, True))
        net.zero_grad()
        loss_of(net, rank, step).backward()
        pairs.append((gradient(net).double(), expected))
    state.close()
    exact = torch.cat([torch.full((p.numel(),), p.ndim == 1) for p in net.parameters()])
    for got, expected in pairs:
        torch.testing.assert_close(got[exact], expected[exact], atol=1e-7, rtol=1e-5)
        assert not torch.allclose(got[~exact], expected[~exact], atol=1e-7, rtol=1e-5)


def test_dense_parameters_are_found_by_name_among_shards(groups):
    groups(4).run(uncompressed)


def adapted(rank: int, world: int) -> None:
    net, optimizer, seen = Net(), [], []
    net, state = made(2, 2, net, ratio=0.1, dense_parameters="*.bias", optimizer=lambda: optimizer)
    optimizer.append(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    def look(p):
        return [each.to_local().clone() for each in (p, optimizer[0].state[p]["momentum_buffer"])]

    for step in range(4):
        optimizer[0].zero_grad()
        loss_of(net, rank, step).backward()
        before = {p: look(p) for p in net.parameters() if step}
        optimizer[0].step()
        seen += [(name, p.grad.to_local(), before[p], look(p)) for name, p in net.named_parameters() if step]
    state.close()
    for name, arrived, before, after in seen:
        still = (arrived == 0) & (not name.endswith("bias"))
        for was, now in zip(before, after, strict=True):
            assert torch.equal(now[still], was[still])
        assert (after[0][~still] != before[0][~still]).all()
    assert any((arrived == 0).any() for _, arrived, *_ in seen)


def test_momentum_of_shards_stands_still_where_nothing_is_delivered(groups):
    groups(4).run(adapted)


def failed(rank: int, world: int) -> None:
    """A backward pass fails on every rank, after some exchanges; training goes on."""
    net, state = made(2, 2, ratio=0.05)
    watched = Watched(state)
    loss_of(net, rank, 0).backward()

    def fail(grad):
        raise KeyError("of the user")

    h = net.first(torch.randn(8, 12))
    h.register_hook(fail)
    with pytest.raises(KeyError):
        net.branch(h).square().mean().backward()
    if not hasattr(net, "reset_iter_state"):
        state.close()
        return
    net.reset_iter_state()
    for step in (1, 2):
        net.zero_grad()
        loss_of(net, rank, step).backward()
    steps = state.residuals.progress.steps
    watched.check()
    state.close()
    assert steps == 4


def test_training_goes_on_after_a_backward_pass_that_failed(groups):
    groups(4).run(failed)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Reentrant(nn.Module):
    """Runs a block again in backward, as a backward pass of its own inside the other."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.block, x, use_reentrant=True)


def blocks(rank: int, world: int, kind: str) -> torch.Tensor:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    mesh, net = mesh_of(2, 2), nn.Sequential(Block(), Block(), nn.Linear(24, 3))
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind == "offload" else {}
    for number in (0, 1):
        block = net[number]
        if kind == "checkpoint":
            block = checkpoint_wrapper(block)
        if kind == "compile":
            block = torch.compile(block, backend="aot_eager")
        if kind == "reentrant blocks":
            fully_shard(block, mesh=mesh["shard"])
            block = Reentrant(block)
        elif kind == "inside":
            block = checkpoint_wrapper(fully_shard(block, mesh=mesh["shard"]))
        else:
            fully_shard(block, mesh=mesh["shard"], **options)
        net[number] = block
    fully_shard(net, mesh=mesh["shard"], **options)
    state = attach(net, process_group=mesh["replicate"], ratio=ExponentialWarmup(0.05, steps=2))
    watched, optimizer = Watched(state), torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(7 * step + rank), requires_grad=True)
        y = checkpoint(net, x, use_reentrant=True) if kind == "reentrant" else net(x)
        y.square().mean().backward()
        optimizer.step()
    watched.check()
    steps = state.residuals.progress.steps
    state.close()
    assert steps == 3
    return weights(net)


@pytest.mark.parametrize("kind", ["offload", "checkpoint", "inside", "compile", "reentrant", "reentrant blocks"])
def test_the_same_bits_are_learned_with_checkpoints_compiled_blocks_and_shards_on_the_cpu(groups, kind):
    expected = groups(4).run(blocks, "plain")[0]
    for found in groups(4).run(blocks, kind, timeout=240):  # four processes import and run torch's compiler
        assert torch.equal(found, expected)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 40), nn.Linear(40, 12), nn.LayerNorm(12)

    def forward(self, x):
        return self.norm(x + self.down(self.up(x).relu()))


def tensor_parallel(rank: int, world: int, saving: bool) -> None:
    """Two nodes of two ranks, which hold a tensor's halves; norms are on both."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found = []
    for hybrid in (True, False):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        net = parallelize_module(Norm(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["replicate", "shard"] if hybrid else mesh["shard"])
        amount = {"saving": 4} if saving else {"ratio": 1.0, "wire": "fp32"}
        state = None if hybrid else attach(net, process_group=mesh["replicate"], **amount)
        watched = None if hybrid else Watched(state)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            # Ranks of a node see the same rows: they hold halves of one model.
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + rank // 2))
            net(x).square().mean().backward()
            optimizer.step()
        found.append(weights(net) if hybrid else torch.cat([p.full_tensor().flatten() for p in net.parameters()]))
        copies = torch.cat([net.norm.weight.to_local(), net.norm.bias.to_local()])
    whole = {state.names[member] for member in state.names} - {
        state.names[member] for member in state.buckets.compressed
    }
    kept = state.full_state_dict()["parameters"]
    watched.check()
    state.close()
    rows = [torch.empty_like(copies) for _ in range(world)]
    dist.all_gather(rows, copies.detach())
    assert all(torch.equal(row, rows[0]) for row in rows)
    assert whole == {"norm.weight", "norm.bias", "down.bias"}
    if rank == 0:
        assert kept["up.weight"]["residual"].shape == (480,)
    if not saving:
        torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("saving", [False, True])
def test_halves_of_tensors_are_exchanged_as_shards_and_copies_inside_a_node_whole(groups, saving):
    groups(4).run(tensor_parallel, saving)


def saved(rank: int, world: int, nodes: int, local: int, folder: str, momentum: float) -> None:
    net, state = made(nodes, local, ratio=0.05, momentum=momentum, optimizer=list)
    for step in range(3):
        loss_of(net, rank, step).backward()
    left = undelivered(state, net)
    dcp.save({"model": net.state_dict(), "topk": state}, checkpoint_id=folder)
    whole = state.full_state_dict()
    state.close()
    if rank == 0:
        torch.save((left, whole), Path(folder) / "whole.pt")


def loaded(rank: int, world: int, nodes: int, local: int, folder: str, full: bool, momentum: float) -> None:
    net, state = made(nodes, local, ratio=0.05, momentum=momentum, optimizer=list)
    left, whole = torch.load(Path(folder) / "whole.pt", weights_only=True)
    if full:
        state.load_state_dict(whole)
    else:
        dcp.load({"model": (model := net.state_dict()), "topk": state}, checkpoint_id=folder)
        net.load_state_dict(model)
    found, steps = undelivered(state, net), state.residuals.progress.steps
    again = state.full_state_dict()
    loss_of(net, rank, 9).backward()
    state.close()
    torch.testing.assert_close(found, left, atol=1e-7, rtol=1e-6)
    assert found.count_nonzero() > 0
    assert steps == 3
    for name, sides in again["parameters"].items():
        assert sides.keys() == whole["parameters"][name].keys()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_residuals_of_shards_are_saved_and_go_on_on_other_nodes_and_ranks(groups, tmp_path, momentum):
    groups(4).run(saved, 2, 2, str(tmp_path), momentum)
    for nodes, local in ((2, 2), (3, 1)) if momentum else ((2, 2), (4, 1), (3, 1), (2, 1)):
        for full in (False, True):
            groups(nodes * local).run(loaded, nodes, local, str(tmp_path), full, momentum)


def of_one_file(rank: int, world: int, folder: str) -> None:
    """Lightning makes one file of a distributed checkpoint, without the folder of the residuals."""
    from lightning_topk.lightning._nodes import IN_SHARDS, resume, save_shards

    net, state = made(2, 2, ratio=0.05)
    for step in range(2):
        loss_of(net, rank, step).backward()
    save_shards(state, Path(folder))
    resume(state, IN_SHARDS, Path(folder))
    resumed = state.residuals.progress.steps
    one = Path(folder) / "consolidated"
    one.touch()
    resume(state, IN_SHARDS, one)
    begun = state.residuals.progress.steps
    state.close()
    assert (resumed, begun) == (2, 0)


def test_a_consolidated_checkpoint_resumes_with_zero_residuals(groups, tmp_path):
    groups(4).run(of_one_file, str(tmp_path))


def reduced_in(rank: int, world: int) -> None:
    """FSDP reduces in another dtype than the parameters': a run that resumes keeps its saving and its residuals."""
    for dtype in (torch.bfloat16, torch.float16):
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)}
        net, state = made(2, 2, saving=4, options=options)
        for step in range(3):
            loss_of(net, rank, step).backward()
        ratios = [state.buckets.config_of(bucket).ratio for bucket in state.residuals.progress.buckets]
        left, entry = undelivered(state, net), [state.full_state_dict()]
        dist.broadcast_object_list(entry)
        state.close()
        net, state = made(2, 2, saving=4, options=options)
        state.load_state_dict(entry[0])
        torch.testing.assert_close(undelivered(state, net), left)
        loss_of(net, rank, 3).backward()
        again = [state.buckets.config_of(bucket).ratio for bucket in state.residuals.progress.buckets]
        state.close()
        assert again == ratios
    net, state = made(1, 4, ratio=0.05, options=options)
    before = [unit.later_divided_by(member) for unit in state._units for member in unit.names]
    loss_of(net, rank, 0).backward()
    assert before == [unit.later_divided_by(member) for unit in state._units for member in unit.names] != [1.0] * 7
    state.close()


def test_a_resumed_run_reduces_in_the_dtype_of_the_first_one(groups):
    groups(4).run(reduced_in)


def frozen_since(rank: int, world: int, folder: str) -> None:
    net, state = made(2, 2, ratio=0.05)
    for step in range(3):
        loss_of(net, rank, step).backward()
    dcp.save({"topk": state}, checkpoint_id=folder)
    entry = [state.full_state_dict()]
    dist.broadcast_object_list(entry)
    state.close()
    for whole in (False, True):
        frozen = Net()
        frozen.branch.requires_grad_(False)
        net, state = made(2, 2, frozen, ratio=0.05)
        if whole:
            state.load_state_dict(entry[0])
        else:
            dcp.load({"topk": state}, checkpoint_id=folder)
        found = state.full_state_dict()["parameters"]
        loss_of(net, rank, 3).backward()
        state.close()
        if rank == 0:
            expected = {name: sides for name, sides in entry[0]["parameters"].items() if "branch" not in name}
            assert found.keys() == expected.keys()
            for name, sides in expected.items():
                torch.testing.assert_close(found[name]["residual"], sides["residual"])


def test_a_sharded_run_goes_on_when_layers_were_frozen_since(groups, tmp_path):
    groups(4).run(frozen_since, str(tmp_path))


def from_ddp(rank: int, world: int) -> None:
    """The residuals of a DDP model go on in a sharded one."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    state = attach(ddp, ratio=0.05)
    for step in range(3):
        loss_of(ddp, rank, step).backward()
    entry = [state.state_dict()]
    dist.broadcast_object_list(entry)
    state.close()
    _, state = made(2, 2, ratio=0.05)
    state.load_state_dict(entry[0])
    found = state.full_state_dict()["parameters"]
    with pytest.raises(ValueError, match="the model has no parameter 'other'"):
        state.load_state_dict({**entry[0], "parameters": {"other": {}}})
    state.close()
    for name, sides in entry[0]["parameters"].items() if rank == 0 else ():
        expected = sides["residual"]
        torch.testing.assert_close(found[name]["residual"], expected)


def test_residuals_of_a_ddp_run_go_on_in_a_sharded_one(groups):
    groups(4).run(from_ddp)
