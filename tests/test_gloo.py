"""The laws on real process groups, through DDP's reducer, in all its modes."""

from __future__ import annotations

import copy
import os
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shapes import codecs_of, endpoint_of
from test_laws import ON_NODES, ROUTES, WIRES, routes, selectors
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.build import make_codecs
from lightning_topk.config import TopKConfig
from lightning_topk.core.exchange import exchange
from lightning_topk.ddp import TopKState, attach, topk_hook, tree_broadcast_sends
from lightning_topk.runtime import agreement
from lightning_topk.runtime.collectives import Meter, dense_cost, drive, finish
from lightning_topk.runtime.exchanger import Batch, Job
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.lanes import ThreadLane
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.schedule import ExponentialWarmup
from lightning_topk.simulate import Cluster
from lightning_topk.volume import volume

MODES = {
    "one_bucket": {"bucket_cap_mb": 25},
    "several_buckets": {"bucket_cap_mb": 0.005},
    "static_graph": {"bucket_cap_mb": 0.005, "static_graph": True},
    "find_unused_parameters": {"bucket_cap_mb": 0.005, "find_unused_parameters": True},
    "gradient_as_bucket_view": {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
}
SEVERAL = ("several_buckets", "find_unused_parameters")
"""Where buckets have different sizes and some of their parameters no gradient: enough beside another axis."""
modes = pytest.mark.parametrize("mode", MODES)
worlds = pytest.mark.parametrize("world", [2, 3, 4])
STEPS = 4
SQUARE = [(*way, mode, (i + j) % 5, (i + 2 * j) % 5) for i, way in enumerate(ROUTES) for j, mode in enumerate(MODES)]
"""Topology, direction, mode, and two numbers below five: any two of these four (a topology with its direction) meet in
some case, as in two orthogonal Latin squares. The laws of three and more at a time are held in memory, in test_laws."""


class Net(nn.Module):
    """Several layers, a scalar, an empty parameter, and a branch that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(12, 50), nn.Linear(50, 50), nn.Linear(50, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        h = self.first(x).tanh()
        if branch:
            h = h + self.branch(h).tanh()
        return self.scale * self.last(h) + self.empty.sum()


def uses_branch(mode: str, rank: int, step: int) -> bool:
    """With find_unused_parameters: all ranks, one rank, no rank."""
    return mode != "find_unused_parameters" or step % 3 == 0 or (step % 3 == 1 and rank == 0)


def loss_of(net: nn.Module, mode: str, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))
    return net(x, uses_branch(mode, rank, step)).square().mean()


def local_gradient(net: Net, mode: str, rank: int, step: int) -> torch.Tensor:
    alone = copy.deepcopy(net)
    alone.zero_grad()
    loss_of(alone, mode, rank, step).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in alone.parameters()])


def gradient(net: Net) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in net.parameters()])


def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def every_rank(x: torch.Tensor) -> torch.Tensor:
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    return torch.stack(rows)


def sum_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The sum over steps, in float64."""
    return torch.stack(gradients).double().sum(0)


def check_agreement(received: list[torch.Tensor]) -> None:
    """Fails where ranks hold different bits after a step; a collective of one call for all steps."""
    for step, rows in enumerate(every_rank(torch.stack(received)).unbind(1)):
        assert all(torch.equal(row, rows[0]) for row in rows), f"agreement, step {step}"


def undelivered(state, net: nn.Module, world: int) -> torch.Tensor:
    """The mean of the workers' residuals plus the sum of the servers', of all parameters in turn."""
    kept, zero = state.residuals.held(), lambda p: (torch.zeros(p.numel()),) * 2
    sides = [torch.cat([kept.get(p, zero(p))[side] for p in net.parameters()]) for side in (0, 1)]
    worker, server = mean_over_ranks(torch.stack(sides))
    return worker + server * world


class CountedCollectives:
    """Counts what collectives are given for other ranks, at torch.distributed's own functions."""

    def __init__(self) -> None:
        self.bytes = 0
        self._patches = [
            mock.patch.object(dist, name, self._count(getattr(dist, name), cost))
            for name, cost in {
                "all_to_all_single": lambda rank, world, out, x, **_: x.nbytes * (world - 1) // world,
                "all_reduce": lambda rank, world, x, *_, **__: 2 * (world - 1) * x.nbytes // world,
                "all_gather_into_tensor": lambda rank, world, out, x, **_: x.nbytes * (world - 1),
                "all_gather_single": lambda rank, world, out, x, **_: x.nbytes * (world - 1),  # its newer name
                "gather": lambda rank, world, x, out, dst, **_: x.nbytes * (rank != dst),
                "scatter": lambda rank, world, out, rows, src, **_: sum(r.nbytes for r in (rows or [])[1:]),
            }.items()
            if hasattr(dist, name)
        ]

    def _count(self, function, cost):
        def counted(*args, **kwargs):
            group = kwargs.get("group")
            self.bytes += cost(dist.get_rank(group), dist.get_world_size(group), *args, **kwargs)
            return function(*args, **kwargs)

        return counted

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()


def laws(rank: int, world: int, topology: str, bidirectional: bool, mode: str, settings: dict) -> None:
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net, **MODES[mode])
    local = settings.get("local", 1)
    settings = {key: value for key, value in settings.items() if key != "local"}
    config = TopKConfig(**{"ratio": 0.05, "bidirectional": bidirectional, "topology": topology, **settings})
    state = attach(ddp, config, local_world_size=local)
    buckets: list[list[int]] = []  # of this step: elements of every parameter
    uncompressed: list[int] = []  # elements that are not compressed
    hook, names = state.launch, {p: name for name, p in net.named_parameters()}

    def launch(bucket):
        parameters = bucket.parameters()
        buckets.append([p.numel() for p in parameters])
        uncompressed.append(sum(p.numel() for p in parameters if names[p] in settings.get("dense_parameters", ())))
        return hook(bucket)

    state.launch = launch
    computed, received, checks = [], [], []
    with CountedCollectives() as counted:
        for step in range(STEPS):
            computed.append(local_gradient(net, mode, rank, step))
            ddp.zero_grad()
            buckets.clear()
            uncompressed.clear()
            counted.bytes = 0
            loss_of(ddp, mode, rank, step).backward()
            sent = counted.bytes
            parameters = [len(b) for b in buckets] if mode == "find_unused_parameters" else None
            plan = volume(config, buckets, world, rank, parameters=parameters, local=local, uncompressed=uncompressed)
            checks.append((state.report(), plan, sent))
            received.append(gradient(net))
    produced, left = mean_over_ranks(sum_of(computed)), undelivered(state, net, world)
    state.close()
    check_agreement(received)

    for report, plan, sent in checks:
        assert report.bytes["uplink"] == plan.uplink, "prediction, uplink"
        assert report.bytes["downlink"] == plan.downlink, "prediction, downlink"
        assert report.bytes["dense"] == plan.dense, "prediction, dense"
        assert report.bytes["intra_node"] == plan.intra_node, "prediction, inside the node"
        assert report.bytes["inter_node"] == plan.inter_node, "prediction, between nodes"
        assert sent == plan.uplink + plan.downlink, "prediction, at the collectives"
    # Buckets are regrouped after the first steps; then nothing about the sizes changes any more.
    assert len({(r.bytes["uplink"], r.bytes["downlink"]) for r, *_ in checks[2:]}) == 1, "fixed size"
    assert len(buckets) == 1 if mode == "one_bucket" else len(buckets) > 1
    delivered = sum_of(received)
    assert delivered.count_nonzero() > 0
    torch.testing.assert_close(delivered + left, produced, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "mode", "world", "wire"),
    [(*way, (2, 3, 4)[one % 3], WIRES[other % len(WIRES)]) for *way, one, other in SQUARE],
)
def test_laws_hold(groups, world, topology, bidirectional, wire, mode):
    groups(world).run(laws, topology, bidirectional, mode, {"wire": wire})


@pytest.mark.parametrize("more", [{}, {"dense_parameters": ["scale"]}])
@routes
def test_laws_hold_with_a_saving(groups, topology, bidirectional, more):
    """Each bucket has a ratio of its own."""
    groups(3).run(laws, topology, bidirectional, "several_buckets", {"ratio": None, "saving": 8, **more})


def served(rank: int, world: int) -> list[int]:
    ddp = DistributedDataParallel(Net())
    state = attach(ddp, ratio=0.05, topology="single_server")
    loss_of(ddp, "one_bucket", rank, 0).backward()
    found = [state.predicted().downlink, *(state.predicted(each).downlink for each in range(world))]
    state.close()
    return found


def test_the_bytes_of_every_rank_are_predicted_on_every_rank(groups):
    first, *others = groups(3).run(served)
    assert first[0] == first[1] > 0
    for mine, *each in others:
        assert mine == 0
        assert each == first[1:]


@pytest.mark.parametrize(
    ("topology", "bidirectional", "nodes", "local", "mode"),
    [
        *((*way, 2, 2, mode) for way in ON_NODES for mode in MODES),
        *((*way, 2, 3, SEVERAL[i % 2]) for i, way in enumerate(ON_NODES)),
        *((*way, 3, 2, SEVERAL[1 - i % 2]) for i, way in enumerate(ON_NODES)),
    ],
)
def test_laws_hold_on_nodes_of_several_ranks(groups, nodes, local, topology, bidirectional, mode):
    groups(nodes * local).run(laws, topology, bidirectional, mode, {"local": local})


@pytest.mark.parametrize("topology", ["sharded", "single_server", "allgather"])
def test_laws_hold_and_inter_node_bytes_are_counted_in_flat_topologies_on_nodes(groups, topology):
    groups(4).run(laws, topology, topology != "allgather", "several_buckets", {"local": 2})


EXACT = ("first.bias", "last.bias", "last.weight", "scale")


@pytest.mark.parametrize(
    ("world", "topology", "bidirectional", "local", "mode"),
    [
        (*way, mode)
        for way in [(3, "sharded", True, 1), (2, "allgather", False, 1), (4, "hierarchical", True, 2)]
        for mode in MODES
    ],
)
def test_laws_hold_beside_parameters_that_are_not_compressed(groups, world, topology, bidirectional, local, mode):
    groups(world).run(laws, topology, bidirectional, mode, {"local": local, "dense_parameters": EXACT})


def uncompressed(rank: int, world: int, mode: str) -> None:
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net, **MODES[mode])
    state = attach(ddp, ratio=0.01, dense_parameters=["*.bias", "scale"])
    received, computed = [], []
    for step in range(4):
        computed.append(local_gradient(net, mode, rank, step))
        ddp.zero_grad()
        loss_of(ddp, mode, rank, step).backward()
        received.append(gradient(net).double())
    pairs = list(zip(received, mean_over_ranks(torch.stack(computed)), strict=True))
    state.close()
    exact = torch.cat([torch.full((p.numel(),), p.ndim == 1 and p.numel() > 0) for p in net.parameters()])
    for got, expected in pairs:
        torch.testing.assert_close(got[exact], expected[exact], atol=1e-7, rtol=1e-5)
        assert not torch.allclose(got[~exact], expected[~exact], atol=1e-7, rtol=1e-5)


@modes
def test_dense_parameters_get_the_mean(groups, mode):
    groups(3).run(uncompressed, mode)


@routes
@selectors
def test_laws_hold_for_every_selector(groups, topology, bidirectional, selector):
    groups(2).run(laws, topology, bidirectional, "several_buckets", {"selector": selector})


def identity(rank: int, world: int, topology: str, bidirectional: bool, mode: str) -> None:
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net, **MODES[mode])
    state = attach(ddp, ratio=1.0, bidirectional=bidirectional, wire="fp32", topology=topology)
    received, computed = [], []
    for step in range(3):
        computed.append(local_gradient(net, mode, rank, step))
        ddp.zero_grad()
        loss_of(ddp, mode, rank, step).backward()
        received.append(gradient(net).double())
    expected = mean_over_ranks(torch.stack(computed))
    state.close()
    torch.testing.assert_close(torch.stack(received), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "mode", "world"), [(*way, (2, 3)[one % 2]) for *way, one, _ in SQUARE]
)
def test_a_ratio_of_one_is_the_mean(groups, world, topology, bidirectional, mode):
    groups(world).run(identity, topology, bidirectional, mode)


def same_as_simulated(
    rank: int, world: int, topology: str, bidirectional: bool, names: list[str], local: int = 1
) -> None:
    groups = Groups(dist.group.WORLD).divided(None, None, local, hierarchy=local > 1)
    found = {}
    for wire in names:
        config = TopKConfig(ratio=0.02, bidirectional=bidirectional, wire=wire, topology=topology)
        numel = 3001
        simulated = Cluster(config, world, numel, local=local)
        end = endpoint_of(config, [numel], rank, world, local=local)
        results = []
        for step in range(4):
            given = list(torch.randn(world, numel, generator=torch.Generator().manual_seed(step)))
            mine = given[rank].clone()
            codecs = make_codecs(config, end, step, selector=end.uplink.selector)
            finish(drive(exchange(end, mine, codecs, step), groups, Meter()))
            results.append((mine, simulated.step(given)[rank]))
        for real, imagined in zip(end.links, simulated.endpoints[rank].links, strict=True):
            results.append((real.memory.tensors()["residual"], imagined.memory.tensors()["residual"]))
        found[wire] = results
    for wire, results in found.items():
        for real, imagined in results:
            assert torch.equal(real, imagined), wire


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "world"),
    [(*way, wire, (2, 3, 4)[(i + j) % 3]) for i, way in enumerate(ROUTES) for j, wire in enumerate(WIRES)],
)
def test_the_simulator_gives_the_same_bits(groups, world, topology, bidirectional, wire):
    groups(world).run(same_as_simulated, topology, bidirectional, [wire])


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 3), (3, 2)])
def test_the_simulator_gives_the_same_bits_on_nodes_of_several_ranks(groups, nodes, local):
    groups(nodes * local).run(same_as_simulated, "hierarchical", True, WIRES, local)


class Empty(nn.Module):
    """Has a parameter without elements, of a dtype of its own: DDP gives it a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def delayed(rank: int, world: int, topology: str, bidirectional: bool, **settings: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)], Empty(), nn.Linear(40, 40), nn.Linear(40, 40))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001, find_unused_parameters=settings.pop("votes", False))
    state = attach(ddp, ratio=1.0, wire="fp32", topology=topology, bidirectional=bidirectional, **settings)
    delays = torch.Generator().manual_seed(rank)

    def sleep(_: torch.Tensor) -> None:
        time.sleep(0.004 * torch.rand((), generator=delays).item())

    for parameter in net.parameters():
        parameter.register_hook(sleep)
    received, computed = [], []
    for step in range(8):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        alone = copy.deepcopy(net)
        alone(x).square().mean().backward()
        computed.append(flat_gradient(alone))
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        received.append(flat_gradient(net).double())
    expected = mean_over_ranks(torch.stack(computed))
    count = len(list(state.residuals.endpoints))
    state.timing = True
    begin = time.monotonic()
    ddp(x).square().mean().backward()
    took = time.monotonic() - begin
    report = state.report()
    state.close()
    assert count >= 3
    assert 0 < report.seconds < took  # what two exchanges do at the same time counts once
    assert report.exposed_seconds <= report.seconds
    torch.testing.assert_close(torch.stack(received), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(("world", "topology", "bidirectional"), [*((4, *way) for way in ROUTES), (2, "sharded", True)])
def test_random_delays_neither_deadlock_nor_mix_buckets_up(groups, world, topology, bidirectional):
    groups(world).run(delayed, topology, bidirectional)


@pytest.mark.parametrize(
    ("topology", "settings"),
    [
        ("hierarchical", {"local_world_size": 2}),
        ("hierarchical", {"local_world_size": 2, "votes": True, "dense_parameters": "*bias"}),
        ("sharded", {"votes": True, "dense_parameters": "*bias"}),
    ],
)
def test_random_delays_mix_nothing_up_where_an_exchange_makes_several_requests(groups, topology, settings):
    groups(4).run(partial(delayed, **settings), topology, True)


def checked(rank: int, world: int) -> None:
    """Torch compares each collective among all ranks before it starts it; one rank has the second bucket late."""
    net = nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)  # torch 2.14's DDP crashes on a group that is checked
    if rank == 1:
        net[1].weight.register_hook(lambda _: time.sleep(0.05))
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        state = attach(ddp, ratio=0.1, timeout=timedelta(seconds=5))
    finally:
        dist.set_debug_level(level)
    for _ in range(4):
        ddp(torch.randn(8, 20)).square().mean().backward()
    state.close()


def test_exchanges_of_two_buckets_do_not_deadlock_where_torch_checks_collectives(groups):
    groups(2).run(checked)


def nothing_in_turn(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    state = attach(ddp)
    lane, empty = state.lane(torch.device("cpu")), nn.Parameter(torch.empty(0))
    batch = Batch(torch.empty(0), Job((empty,), state.config))
    assert next(state._exchanger.run(batch, lane), "ended") is None
    state.close()


def test_a_bucket_without_elements_ends_in_its_turn(groups):
    """Else the batch after the next would begin on groups that are in use, on some ranks earlier than on others."""
    groups(2).run(nothing_in_turn)


def overlapped(rank: int, world: int) -> None:
    net = nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)])
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
    state = attach(ddp, ratio=0.1)
    finished = threading.Event()
    x = torch.randn(4, 40)
    ddp(x).sum().backward()  # DDP regroups its buckets after this
    whole, seen = state._exchanger._exchange, []

    def noting(*args):
        yield from whole(*args)
        finished.set()

    state._exchanger._exchange = noting
    # The gradient of the first layer comes last; it waits until some bucket has gone all the way.
    net[0].weight.register_hook(lambda _: seen.append(finished.wait(timeout=20)))
    ddp(x).sum().backward()
    state.close()
    assert seen == [True]


@worlds
def test_buckets_travel_while_backward_runs(groups, world):
    groups(world).run(overlapped)


def the_hook_alone(rank: int, world: int) -> None:
    net = nn.Linear(30, 30)
    ddp = DistributedDataParallel(net)
    state = TopKState(ratio=0.1)
    ddp.register_comm_hook(state, topk_hook)
    ddp(torch.randn(4, 30)).sum().backward()
    kept = state.report().kept
    state.close()
    assert kept == codecs_of(state.config, 930, world).uplink.kept * world
    assert 0 < gradient_size(net) <= kept * world


def gradient_size(net: nn.Module) -> int:
    return int(sum(p.grad.count_nonzero() for p in net.parameters()))


def test_the_registered_hook_compresses_plain_ddp(groups):
    groups(2).run(the_hook_alone)


def failing(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(10, 10))
    state = attach(ddp, ratio=0.5)
    state.residuals.endpoint = mock.Mock(side_effect=ValueError("out of luck"))
    message = ""
    try:
        ddp(torch.randn(2, 10)).sum().backward()
    except RuntimeError as error:
        message = str(error)
    state.close()
    return message


def test_an_error_in_the_exchange_reaches_the_training_loop_with_the_buckets_name(groups):
    for rank, message in enumerate(groups(2).run(failing)):
        assert f"sharded exchange of bucket 0 (110 elements) failed on rank {rank} of 2: out of luck" in message


def stale(rank: int, world: int, topology: str, view: bool, clip: float | None) -> None:
    """Two parts that take turns, each zeroing only its own gradients, as the optimizers of a GAN do."""
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.001, gradient_as_bucket_view=view)
    state = attach(
        ddp, ratio=0.05, wire="fp32", topology=topology, bidirectional=topology != "allgather", clip_norm=clip
    )
    parts = [net.branch, net.last]
    produced = [0.0, 0.0]
    delivered = [0.0, 0.0]
    for step in range(6):
        turn = step % 2
        x = torch.randn(8, 50, generator=torch.Generator().manual_seed(100 * step + rank))
        alone = copy.deepcopy(parts[turn])
        alone.zero_grad()
        alone(x).square().mean().backward()
        produced[turn] = produced[turn] + mean_over_ranks(flat_gradient(alone))
        kept = [flat_gradient(part).clone() for part in parts]
        parts[turn].zero_grad()
        net.forward = parts[turn].forward
        ddp(x).square().mean().backward()
        delivered[turn] = delivered[turn] + flat_gradient(parts[turn]).double()
        assert torch.equal(flat_gradient(parts[1 - turn]), kept[1 - turn]), "another's gradient was touched"
    held = state.residuals.held()
    left = [
        sum(
            mean_over_ranks(torch.cat([held[p][side] for p in part.parameters()])) * (world if side else 1)
            for side in (0, 1)
        )
        for part in parts
    ]
    state.close()
    for turn in (0, 1) if clip is None else ():
        torch.testing.assert_close(delivered[turn] + left[turn], produced[turn], atol=1e-7, rtol=1e-5)


def flat_gradient(net: nn.Module) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in net.parameters()])


@pytest.mark.parametrize("topology", ["sharded", "single_server", "allgather"])
@pytest.mark.parametrize("view", [False, True])
def test_parameters_that_take_turns_lose_nothing_and_leave_each_others_gradients_alone(groups, topology, view):
    groups(2).run(stale, topology, view, None)
    groups(2).run(stale, topology, view, 0.01)  # clipping is of what is exchanged


def after_a_failure(rank: int, world: int) -> list[str]:
    """A lane whose first job failed runs no other."""
    lane = ThreadLane()
    ran, errors = [], []

    def fails():
        raise ValueError("first")
        yield

    def works():
        ran.append(1)
        yield

    for job in (fails, works):
        promised, future = lane.promise()
        lane.submit(job(), promised)
        try:
            future.wait()
        except Exception as error:
            errors.append(str(error))
    assert lane.close()
    assert not ran
    return errors


def test_after_an_error_no_other_bucket_is_exchanged(groups):
    for errors in groups(2).run(after_a_failure):
        assert len(errors) == 2
        assert all("first" in error for error in errors)


def new_settings(rank: int, world: int) -> None:
    """Residuals go on under other settings."""
    net = nn.Linear(40, 40, bias=False)
    produced, delivered, residuals = 0.0, 0.0, None
    for settings in (
        {"ratio": 0.1},
        {"ratio": 0.01, "topology": "single_server"},
        {"ratio": 0.05, "topology": "allgather", "bidirectional": False},
        {"ratio": 1.0, "wire": "fp32"},
    ):
        ddp = DistributedDataParallel(net, find_unused_parameters=True)
        state = attach(ddp, residuals=residuals, **settings)
        for step in range(2):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
            alone = copy.deepcopy(net)
            alone.zero_grad()
            alone(x).square().mean().backward()
            produced = produced + mean_over_ranks(flat_gradient(alone))
            ddp.zero_grad()
            ddp(x).square().mean().backward()
            delivered = delivered + flat_gradient(net).double()
        residuals = state.residuals
        state.close()
    torch.testing.assert_close(delivered, produced, atol=1e-6, rtol=1e-5)  # ratio 1 has sent all


def test_residuals_go_on_under_other_settings(groups):
    groups(3).run(new_settings)


def closed(rank: int, world: int) -> None:
    before = threading.active_count(), len(dist.distributed_c10d._world.pg_map)
    ddp = DistributedDataParallel(nn.Linear(10, 10))
    state = attach(ddp, ratio=0.5)
    ddp(torch.randn(2, 10)).sum().backward()
    with pytest.raises(RuntimeError, match="has a communication hook already, and DDP takes one only"):
        attach(ddp)
    entry = state.state_dict()
    state.close()
    assert (threading.active_count(), len(dist.distributed_c10d._world.pg_map)) == before
    for use in (
        lambda: ddp(torch.randn(2, 10)).sum().backward(),
        state.state_dict,
        state.measure_link,
        lambda: state.load_state_dict(entry),
    ):
        with pytest.raises(RuntimeError, match="was closed; save residuals before"):
            use()


def test_a_closed_state_leaves_no_thread_and_no_group(groups):
    groups(2).run(closed)


def with_optimizer(rank: int, world: int) -> list[str]:
    """What attach makes of optimizers; returns the errors."""
    errors = []
    for settings, optimizer in (
        ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)),
        ({"momentum": 0.9}, lambda p: torch.optim.Adam(p)),
        ({"momentum": 0.9}, lambda p: None),
        ({"ratio": ExponentialWarmup(0.1, epochs=2)}, lambda p: None),
        ({"ratio": 0.1, "server_ratio": ExponentialWarmup(0.2, epochs=2)}, lambda p: None),
    ):
        ddp = DistributedDataParallel(nn.Linear(10, 10))
        try:
            attach(ddp, optimizer=optimizer(ddp.parameters()), **settings)
        except ValueError as error:
            errors.append(str(error))
    ddp = DistributedDataParallel(nn.Linear(10, 10))
    with pytest.raises(TypeError, match="epoch=3 must be a function that returns the epoch"):
        attach(ddp, epoch=3)
    return errors


def test_settings_that_need_the_optimizer_refuse_bad_ones(groups):
    for twice, adam, unseen, epochs, server_epochs in groups(2).run(with_optimizer):
        assert "Pass optimizer=" in unseen
        assert "ExponentialWarmup(ratio=0.1, start=0.25, steps=None, epochs=2) depends on the epoch" in epochs
        assert "ExponentialWarmup(ratio=0.2" in server_epochs
        assert "SGD has momentum 0.5 of its own" in twice
        assert "Adam has momentum 0.9 of its own" in adam


def with_buffers(rank: int, world: int) -> tuple[int, int, int, int]:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    ddp = DistributedDataParallel(net)
    state = attach(ddp, ratio=0.1)
    first = state.report().bytes["broadcast"]
    broadcast = 0
    coalesced = dist._broadcast_coalesced

    def counted(group, tensors, *rest):
        nonlocal broadcast
        broadcast += sum(tensor.nbytes for tensor in tensors)
        return coalesced(group, tensors, *rest)

    with mock.patch.object(dist, "_broadcast_coalesced", counted):
        for _ in range(3):
            ddp(torch.randn(4, 8)).sum().backward()
        with ddp.no_sync():
            ddp(torch.randn(4, 8)).sum().backward()
            ddp(torch.randn(4, 8)).sum().backward()
        ddp(torch.randn(4, 8)).sum().backward()
    then = state.report().bytes["broadcast"]
    state.close()
    return first, then, sum(x.nbytes for x in (*net.parameters(), *net.buffers())), broadcast


@worlds
def test_bytes_of_ddps_broadcasts_are_counted_as_what_they_are(groups, world):
    first, then, (model, *_), (broadcast, *_) = zip(*groups(world).run(with_buffers), strict=True)
    # Every other rank receives what is broadcast once: the model when it is wrapped, then its buffers.
    assert broadcast > 0
    assert sum(first) == model * (world - 1)
    assert sum(then) == broadcast * (world - 1)
    assert then[0] > then[-1] == 0


@pytest.mark.parametrize(("world", "sends"), [(1, [0]), (2, [1, 0]), (3, [2, 0, 0]), (4, [2, 1, 0, 0])])
def test_a_tree_broadcast_sends_as_often_as_gloo_was_seen_to(world, sends):
    # Counted at the network interfaces of four hosts.
    assert [tree_broadcast_sends(rank, world) for rank in range(world)] == sends


def regrouped(rank: int, world: int, topology: str, local: int = 1) -> None:
    """Residuals survive any regrouping of parameters into buckets."""
    config = TopKConfig(ratio=0.05, topology=topology)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (700, 1, 300, 64, 2000)]
    residuals, delivered, produced = Residuals(), {}, {}
    residuals.rank = rank
    groups = Groups(dist.group.WORLD).divided(None, None, local, hierarchy=local > 1)
    for step, order in enumerate(([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [4, 2, 0])):
        for group in (order[:2], order[2:]):
            bucket = tuple(parameters[i] for i in group)
            numel = sum(p.numel() for p in bucket)

            sizes = tuple(p.numel() for p in bucket)

            def make(sizes=sizes):
                return endpoint_of(config, sizes, rank, world, local=local)

            end = residuals.endpoint(bucket, config, make)
            codecs = make_codecs(config, end, selector=end.uplink.selector)
            g = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))
            mean = mean_over_ranks(g)
            finish(drive(exchange(end, g, codecs), groups, Meter()))
            for parts, whole in ((produced, mean), (delivered, g.double())):
                for i, part in zip(group, whole.split([p.numel() for p in bucket]), strict=True):
                    parts[i] = parts.get(i, 0) + part
    held = residuals.held()
    kept = [mean_over_ranks(w.double() + world * s.double()) for w, s in (held[p] for p in parameters)]
    for i, left in enumerate(kept):
        torch.testing.assert_close(delivered[i] + left, produced[i], atol=1e-5, rtol=1e-5)


@worlds
@pytest.mark.parametrize("topology", ["sharded", "single_server"])
def test_residuals_follow_their_parameters_from_bucket_to_bucket(groups, world, topology):
    groups(world).run(regrouped, topology)


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 3), (3, 2)])
def test_residuals_of_nodes_follow_their_parameters_from_bucket_to_bucket(groups, nodes, local):
    groups(nodes * local).run(regrouped, "hierarchical", local)


def made_again(rank: int, world: int) -> None:
    """Torch 2.9 names subgroups by the number of groups; a late rank would find the addresses of a closed one."""
    for _ in range(3):
        if rank == 1:
            time.sleep(0.3)
        state = TopKState(topology="hierarchical", local_world_size=2)
        dist.all_reduce(torch.ones(1), group=state.groups.node)
        dist.all_reduce(torch.ones(1), group=state.groups.peers)
        state.close()


def test_process_groups_can_be_made_again_after_they_were_closed(groups):
    groups(4).run(made_again)


def told(rank: int, world: int, sizes: list[int], settings: dict) -> tuple[int, str]:
    """What comes of torchrun's LOCAL_WORLD_SIZE."""
    with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": str(sizes[rank])}):
        try:
            state = TopKState(**settings)
        except ValueError as error:
            return 0, str(error)
    state.close()
    return state.local, ""


@pytest.mark.parametrize(("sizes", "local"), [([2] * 4, 2), ([4] * 4, 4), ([8] * 4, 1), ([3, 3, 3, 1], 1)])
def test_torchruns_local_world_size_is_taken_where_nodes_are_equal(groups, sizes, local):
    assert groups(4).run(told, sizes, {}) == [(local, "")] * 4
    if local == 1:
        for _, message in groups(4).run(told, sizes, {"topology": "hierarchical"}):
            assert "needs nodes of equally many ranks, but LOCAL_WORLD_SIZE is [" in message


def misplaced(rank: int, world: int) -> list[str]:
    messages = []
    ddp = DistributedDataParallel(nn.Linear(3, 3))
    for local in (3, 2 if rank else 1):
        try:
            attach(ddp, local_world_size=local, topology="hierarchical")
        except ValueError as error:
            messages.append(str(error))
    return messages


def half_installed(rank: int, world: int) -> str:
    with mock.patch.object(agreement, "find_spec", lambda name: None if rank else name):
        try:
            attach(DistributedDataParallel(nn.Linear(3, 3)))
        except ValueError as error:
            return str(error)
    return ""


def test_ranks_of_which_some_have_numba_are_refused(groups):
    for message in groups(2).run(half_installed):
        assert "numba is installed on rank 0 and missing on rank 1" in message


def test_ranks_that_make_up_no_nodes_are_refused(groups):
    for uneven, different in groups(4).run(misplaced):
        assert "4 ranks do not make up nodes of 3" in uneven
        assert "local_world_size is 1 on rank 0 and 2 on rank 1" in different


def bypassed(rank: int, world: int) -> dict[str, str]:
    messages = {}
    for name, options in {"skip": {"skip_all_reduce_unused_params": True, "find_unused_parameters": True}}.items():
        try:
            attach(DistributedDataParallel(nn.Linear(3, 3), **options))
        except ValueError as error:
            messages[name] = str(error)
    net = nn.Linear(3, 3)
    delayed = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[("weight", net.weight)],
        param_to_hook_all_reduce=net.bias,
    )
    cases = {
        "delay": lambda: attach(delayed),
        "complex": lambda: attach(DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64))),
        "both": lambda: attach(DistributedDataParallel(nn.Linear(3, 3)), TopKConfig(), ratio=0.1),
    }
    for name, case in cases.items():
        try:
            case()
        except ValueError as error:
            messages[name] = str(error)
    ddp = DistributedDataParallel(nn.Linear(3, 3))
    attach(ddp)
    try:
        attach(ddp)
    except RuntimeError as error:
        messages["second"] = str(error)
    return messages


def test_what_bypasses_the_hook_is_refused_at_set_up(groups):
    for messages in groups(2).run(bypassed):
        assert "skip_all_reduce_unused_params=True is not supported with top-k exchange" in messages["skip"]
        assert "delay_all_reduce_named_params" in messages["delay"]
        assert "complex64" in messages["complex"]
        assert "not both" in messages["both"]
        assert "has a communication hook already, and DDP takes one only" in messages["second"]


class Rotated(nn.Module):
    """A layer, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.turn = nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.turn(self.first(x).to(torch.complex64)).abs().square()


def ignoring(rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        net = Rotated()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["turn.weight", "turn.bias"])
        ddp = DistributedDataParallel(net)
        state = attach(ddp, ratio=1.0, wire="fp32") if attached else None
        ddp(torch.full((2, 3), 1.0 + rank)).sum().backward()
        found.append((net.first.weight.grad, net.turn.weight.grad))
    names = set(state.names.values())
    state.close()
    assert names == {"first.weight", "first.bias"}
    return found


def test_parameters_that_ddp_ignores_may_be_complex_and_are_not_exchanged(groups):
    ranks = groups(2).run(ignoring)
    for plain, ours in ranks:
        torch.testing.assert_close(ours, plain)
    assert not torch.equal(ranks[0][1][1], ranks[1][1][1])


def measured_link(rank: int, world: int) -> tuple[float, float, int, int]:
    meter = Meter()
    cost = dense_cost(1 << 16, torch.device("cpu"), dist.group.WORLD, meter)
    assert cost.seconds(2, 300) == pytest.approx(2 * cost.latency + 300 * cost.seconds_per_byte)
    return cost.latency, cost.seconds_per_byte, meter.bytes["broadcast"], sum(meter.bytes.values())


@worlds
def test_what_a_dense_all_reduce_costs_is_the_same_on_every_rank_and_its_bytes_are_counted(groups, world):
    found = groups(world).run(measured_link)
    assert len(set(found)) == 1
    latency, _, broadcast, total = found[0]
    assert latency > 0
    assert broadcast == total == 2 * (2 * (world - 1) * 64 // world) + 2 * (2 * (world - 1) * 65536 // world)


def closed_among_some(rank: int, world: int) -> list[list[int]]:
    """Threads, files and groups after each of some states of the same ranks, of which some were open at a time."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    whole = dist.new_group(list(range(world)))
    counts = []
    for round_ in range(4):
        states = []
        for group, settings in (
            (halves[rank // 2], {}),
            (whole, {"topology": "hierarchical", "local_world_size": 2}),
            (halves[rank // 2], {}),
        ):
            ddp = DistributedDataParallel(nn.Linear(30, 30), process_group=group)
            states.append(attach(ddp, ratio=0.1, **settings))
            ddp(torch.randn(4, 30)).sum().backward()
        for state in states if (rank + round_) % 2 else reversed(states):
            state.close()
        kinds = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd"), dist.distributed_c10d._world.pg_map
        counts.append([*map(len, kinds)])
    for group in (*halves, whole):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_states_of_some_ranks_that_are_closed_leave_their_groups_to_the_next_ones(groups):
    for first, *_, last in groups(4).run(closed_among_some):
        assert all(now < before + 3 for now, before in zip(last, first, strict=True)), "3 would be one state's"


def failed_among_some(rank: int, world: int) -> bool:
    """An exchange fails on one rank: the next state has other groups."""
    whole, states = dist.new_group([0, 1]), []
    for spoilt in (True, False):
        ddp = DistributedDataParallel(nn.Linear(10, 10), process_group=whole)
        state = attach(ddp, ratio=0.5, timeout=timedelta(seconds=2))
        states.append(state.groups.all)
        if spoilt and rank == 1:
            state.residuals.endpoint = mock.Mock(side_effect=ValueError("out of luck"))
        with pytest.raises(RuntimeError, match="exchange of bucket 0") if spoilt else nullcontext():
            ddp(torch.randn(2, 10)).sum().backward()
        state.close()
    dist.destroy_process_group(whole)
    return states[0] is states[1]


def test_groups_in_which_an_exchange_failed_are_not_used_again(groups):
    assert groups(2).run(failed_among_some) == [False, False]


def closed_again_and_again(rank: int, world: int) -> tuple[int, int]:
    """Threads of this process after some states were closed and after some more, all of them still referred to."""
    threads, states = [], []
    for _ in range(2):
        for _ in range(4):
            ddp = DistributedDataParallel(nn.Linear(30, 30))
            states.append(attach(ddp, ratio=0.1))
            ddp(torch.randn(4, 30)).sum().backward()
            states[-1].close()
        dist.barrier()
        threads.append(len(os.listdir("/proc/self/task")))
    return threads[0], threads[1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_a_closed_state_leaves_no_threads_behind(groups):
    for before, after in groups(2).run(closed_again_and_again):
        assert after <= before
