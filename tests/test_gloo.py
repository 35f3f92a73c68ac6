"""The laws on real process groups, through DDP's reducer, in all its modes."""

import copy
import gc
import itertools
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from fnmatch import fnmatch
from functools import partial
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from groups import on_ranks
from laws import ON_NODES, ROUTES, SELECTED, WIRES
from ranks import alike, attach, attached, every_rank, gradient, local_gradient, loss_of, mean_over_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topk.bucket import plan_step
from lightning_topk.config import TopKConfig
from lightning_topk.runtime import collectives
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.jobs import Job, Pass
from lightning_topk.runtime.telemetry import Report
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
"""Modes in which buckets differ in size and some parameters have no gradient: enough beside another axis."""
EVERYTHING = {"ratio": 1.0, "wire": "fp32"}
SENT = [*({"wire": wire} for wire in WIRES), EVERYTHING]
UNCOMPRESSED = {"dense_parameters": ("*.bias", "last.weight", "scale")}
SAVING = {"ratio": None, "saving": 8, "dense_parameters": "scale"}
"""Each bucket has its own ratio."""
SQUARE = [
    ((2, 3, 4)[(i + j) % 5 % 3], *route, mode,
     {**SENT[(i + 2 * j) % 5], "selector": SELECTED[(i + 3 * j) % 5], **(UNCOMPRESSED if (i + 4 * j) % 5 < 2 else {})})
    for i, route in enumerate(ROUTES) for j, mode in enumerate(MODES)
]  # fmt: skip
"""Any two values of topology (with its direction), mode, world size, wire and selector meet in some case, with some
parameters uncompressed or not, as in orthogonal Latin squares. test_laws covers combinations of three and more in
memory."""


def harness(rank: int, world: int, topology: str, bidirectional: bool, mode: str, settings: dict[str, Any]) -> None:
    """Checks the laws on four steps of a DDP model in a ``mode``.

    The settings may contain ``local``, the ranks per node, and ``device``.
    """
    local, device = settings.pop("local", 1), settings.pop("device", "cpu")
    config = TopKConfig(**{"ratio": 0.05, "bidirectional": bidirectional, "topology": topology, **settings})
    net = ranks.Net().to(device)
    ddp, state = attached(net, MODES[mode], config=config, local_world_size=local)
    run = ranks.Run(rank, ranks.Net().to(device), net, ddp, state)
    dense = {p for name, p in net.named_parameters() if any(fnmatch(name, each) for each in config.dense_parameters)}
    leaving, buckets, names = [], (), ("uplink", "downlink", "dense", "intra_node", "inter_node")
    with ranks.Counted() as counted:
        for step in range(4):
            some = mode == "find_unused_parameters"  # all ranks, one rank and no rank use the branch in turn
            counted.clear()
            run.backward(step, branch=not some or step % 3 == 0 or (step % 3 == 1 and rank == 0))
            leaving.append(sum(nbytes for other, nbytes in counted.to.items() if other // local != rank // local))
            collectives, bytes_ = sum(counted.bytes.values()), state.report().bytes
            buckets, before = state.last_buckets, buckets
            # With find_unused_parameters DDP never regroups, and its buckets are planned before the first step.
            settled = some or [[*map(id, each)] for each in buckets] == [[*map(id, each)] for each in before]
            plan = volume(
                config, [[p.numel() for p in bucket] for bucket in buckets], world, rank, local=local,
                parameters=[*map(len, buckets)] if some else None,
                uncompressed=[[n for n, p in enumerate(bucket) if p in dense] for bucket in buckets],
                settled=settled,
            )  # fmt: skip
            run.planned.append({name: getattr(plan, name) for name in names} | {"": plan.uplink + plan.downlink})
            run.sent.append({name: bytes_[name] for name in names} | {"": collectives})
        known = [[getattr(state.predicted(each), name) for name in names] for each in range(world)]
    node = every_rank(torch.tensor(leaving)).view(world // local, local, -1).sum(1)[rank // local]
    for counts, plans, nbytes in zip(run.sent, run.planned, node.tolist(), strict=True):
        counts["interface"], plans["interface"] = nbytes, plans["inter_node"]
    known = every_rank(torch.tensor(known))
    everything = (config.ratio, config.wire) == (1.0, "fp32") or topology == "dense"
    exact = torch.cat([torch.full((p.numel(),), everything or p in dense) for p in net.parameters()])
    rows, _ = run.check(exact=exact, settled=2)  # DDP regroups its buckets after the first steps
    assert known.eq(known[0]).all(), "every rank predicts the bytes of every rank"
    assert known[0, rank].tolist() == [run.planned[-1][name] for name in names]
    assert len(buckets) == 1 if mode == "one_bucket" else len(buckets) > 1
    assert rows.any()


@pytest.mark.parametrize(
    ("world", "topology", "bidirectional", "mode", "settings"),
    [
        *SQUARE,
        *((3, *route, SEVERAL[0], SAVING) for route in ROUTES),
        (4, "allgather", False, SEVERAL[1], {**SAVING, "wire": "fp32"}),
        (2, "sharded", True, "one_bucket", SAVING),
        *((4, *route, mode, {"local": 2}) for route in ON_NODES for mode in MODES),
        *((6, *route, SEVERAL[n % 2], {"local": n}) for route, n in zip(ON_NODES, (3, 2, 3), strict=True)),
        *((4, name, name != "allgather", SEVERAL[0], {"local": 2}) for name in {name: 0 for name, _ in ROUTES}),
        *((4, *ON_NODES[0], mode, {"local": 2, **UNCOMPRESSED}) for mode in SEVERAL),
    ],
    ids=str,
)  # fmt: skip
def test_laws_hold(groups, world, topology, bidirectional, mode, settings):
    groups(world).run(harness, topology, bidirectional, mode, settings)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "nodes", "local"),
    [
        *((*route, wire, (2, 3, 4)[(i + j) % 3], 1) for i, route in enumerate(ROUTES) for j, wire in enumerate(WIRES)),
        *(("hierarchical", True, wire, *((2, 2), (2, 3), (3, 2))[j % 3]) for j, wire in enumerate(WIRES)),
    ],
)
@on_ranks(lambda nodes, local, **_: nodes * local)
def test_the_simulator_gives_the_same_bits(rank, world, topology, bidirectional, wire, nodes, local):
    groups = Groups.make(None, torch.device("cpu"), None, local, hierarchy=local > 1)
    config, numel = TopKConfig(ratio=0.02, bidirectional=bidirectional, wire=wire, topology=topology), 3001
    simulated, results = Cluster(config, world, numel, local=local), []
    end = simulated.plan.endpoint(rank, torch.float32, torch.device("cpu"))
    residuals = mock.Mock(endpoint=lambda *_: end)
    for step in range(4):
        inputs = list(torch.randn(world, numel, generator=torch.Generator().manual_seed(step)))
        mine = inputs[rank].clone()
        Job(mine, (), simulated.plan, "", None, None, Pass(step, 0, residuals)).run(groups)
        results.append((mine, simulated.step(inputs)[rank]))
    for real, imagined in zip(end.links, simulated.endpoints[rank].links, strict=True):
        results.append((real.memory.tensors()["residual"], imagined.memory.tensors()["residual"]))
    assert all(torch.equal(real, imagined) for real, imagined in results)


SEVERAL_REQUESTS = {"votes": True, "dense_parameters": "*bias"}


@pytest.mark.parametrize(
    ("topology", "bidirectional", "settings"),
    [
        *(("sharded", True, settings) for settings in ({}, SEVERAL_REQUESTS)),
        ("single_server", True, {}),
        ("allgather", False, {}),
        ("hierarchical", True, {"local_world_size": 2, **SEVERAL_REQUESTS}),
    ],
    ids=str,
)
@on_ranks(4)
def test_random_delays_neither_deadlock_nor_mix_buckets_up(rank, world, topology, bidirectional, settings):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(20, 20) for _ in range(6)])
    options = {"bucket_cap_mb": 0.001, "find_unused_parameters": settings.pop("votes", False)}
    ddp, state = attached(net, options, **EVERYTHING, topology=topology, bidirectional=bidirectional, **settings)
    delays, alone = torch.Generator().manual_seed(rank), copy.deepcopy(net)
    for parameter in net.parameters():
        parameter.register_hook(lambda _: time.sleep(0.004 * torch.rand((), generator=delays).item()))
    received, computed = [], []
    for step in range(5):
        ranks.train(ddp, rank, (step,))
        received.append(gradient(net).double())
        computed.append(local_gradient(alone, net, rank, step))
    expected = mean_over_ranks(torch.stack(computed))
    state.telemetry.timing, begin = True, time.monotonic()
    loss_of(ddp, rank, 9).backward()
    took, report = time.monotonic() - begin, state.report()
    assert len(state.last_buckets) >= 3
    assert 0 < report.times[0] < took  # the time of two simultaneous exchanges counts once
    assert report.times[1] <= report.times[0]
    torch.testing.assert_close(torch.stack(received), expected, atol=1e-7, rtol=1e-5)


@on_ranks(2)
def test_a_pass_is_in_flight_until_all_its_jobs_have_ended_in_whatever_order(rank, world):
    groups = Groups.make(None, torch.device("cpu"), None, 1, hierarchy=False)
    (plan,) = plan_step(TopKConfig(ratio=0.5).resolve(world, 1), [((8,), 4, (), 0)], world)
    end = plan.endpoint(rank, torch.float32, torch.device("cpu"))
    residuals, buckets = mock.Mock(endpoint=lambda *_: end), [(nn.Parameter(torch.ones(8)),) for _ in range(2)]
    now = Pass(0, 0, residuals)
    now.jobs += [Job(torch.ones(8), bucket, plan, "", None, None, now) for bucket in buckets]
    in_flight = [now.in_flight]
    for job in now.jobs[::-1]:
        job.run(groups)
        in_flight.append(now.in_flight)
    assert in_flight == [True, True, False]


@pytest.mark.unit
@pytest.mark.parametrize("spans", [*itertools.permutations([(0.0, 10.0), (5.0, 6.0), (9.0, 12.0)])])
def test_time_that_several_exchanges_share_counts_once_in_whatever_order_they_end(spans):
    jobs = [mock.Mock(begun=begun, ended=ended) for begun, ended in spans]
    assert [Report(timed=[(jobs, ready)]).times for ready in (8.0, 20.0, None)] == [(12, 4), (12, 0), (12, 12)]


@pytest.mark.parametrize(
    ("topology", "bidirectional", "settings"),
    [
        ("sharded", True, {}),
        ("sharded", True, {"find_unused_parameters": True}),
        ("sharded", True, {"dense_parameters": "*bias", "selector": "gaussiank"}),
        ("sharded", False, {}),
        ("single_server", True, {"wire": "bf16"}),
        ("allgather", False, {}),
        ("hierarchical", True, {"local_world_size": 2, "saving": 30}),
    ],
    ids=str,
)
@on_ranks(lambda settings, **_: 2 * settings.get("local_world_size", 1))
def test_densities_follow_the_gradients_and_the_bytes_stay(rank, world, topology, bidirectional, settings):
    """Buckets of large gradients send more of their entries from about the tenth pass on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 60), *[nn.Linear(60, 60) for _ in range(4)])
    config = {"saving": 8, "topology": topology, "bidirectional": bidirectional, **settings}
    unused = config.pop("find_unused_parameters", False)
    ddp, state = attached(net, {"bucket_cap_mb": 0.01, "find_unused_parameters": unused}, **config)
    local = config.pop("local_world_size", 1)
    run, densities, dense = ranks.Run(rank, copy.deepcopy(net), net, ddp, state), [], "dense_parameters" in config
    for step in range(14):
        # The last layer's gradient is the largest by far: those before it go through small weights.
        run.backward(step)
        report = state.report()
        if step > 2:
            run.sent.append(report.bytes)
            densities.append([state.buckets.plan_of(bucket).density() for bucket in state.last_buckets])
    buckets = [[p.numel() for p in bucket] for bucket in state.last_buckets]
    biases = [[n for n, numel in enumerate(bucket) if dense and numel == 60] for bucket in buckets]
    votes = [*map(len, buckets)] if unused else None
    plan = volume(TopKConfig(**config), buckets, world, rank, local=local, parameters=votes, uncompressed=biases)
    run.planned = [plan] * len(run.sent)
    run.check()
    before, after = densities[0], densities[-1]
    if topology == "sharded" and not bidirectional:
        assert after == before, "replies are as long as all that workers send"
    else:
        grown = [new / old for old, new in zip(before, after, strict=True)]
        assert max(grown) > 1.2
        assert min(grown) < 0.9


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
@on_ranks(3)
def test_a_small_model_is_exchanged_as_one_bucket(rank, world, options):
    """DDP's first bucket has 1 MiB, and all entries of a small model should compete for the same payload."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 700), nn.Linear(700, 700), nn.Linear(700, 5))

    net = make()
    model, state = attached(net, options, ratio=0.05)
    run = ranks.Run(rank, make(), net, model, state)
    for step in range(4):
        run.backward(step)
        assert [len(bucket) for bucket in state.last_buckets] == [6]
        assert state.report().elements == sum(p.numel() for p in net.parameters())
    run.check()


class TwoKinds(nn.Module):
    """An embedding and a layer whose gradients DDP exchanges in buckets of their own, from the first pass on."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(50, 8, sparse=sparse, dtype=torch.float32 if sparse else torch.float64)
        self.layer = nn.Linear(8, 30)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(self.rows(rows).float()).square().mean()


@pytest.mark.parametrize("sparse", [False, True])
@on_ranks(2)
def test_the_first_pass_of_a_static_graph_may_have_several_buckets(rank, world, sparse):
    """DDP delays it, gives each of its buckets the index 0, and calls none the last."""
    net, said, found = TwoKinds(sparse), [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, static_graph=True)
    state = attach(model, ratio=0.1, optimizer=optimizer, announce=said.append)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(rank, 50, 2)).backward()
        optimizer.step()
        found.append((state.steps, state.report().elements))
    assert found == [(step, 50 * 8 + 8 * 30 + 30) for step in (1, 2, 3)]
    assert not [line for line in said if "took a step with gradients that were not exchanged" in line]


@on_ranks(2)
def test_an_error_of_buckets_that_are_exchanged_as_one_reaches_the_caller(rank, world):
    net = nn.Sequential(nn.Linear(20, 700), nn.Linear(700, 700), nn.Linear(700, 5))
    model, _ = attached(net, ratio=0.05)
    ranks.train(model, rank, range(2))
    with mock.patch.object(collectives, "perform", side_effect=MemoryError("no memory left")):
        assert "exchange of 2 buckets (508905 elements) failed" in ranks.refusal(ranks.train, model, rank, [2])


@on_ranks(2)
def test_two_buckets_do_not_deadlock_where_torch_checks_collectives(rank, world):
    """Torch compares each collective on all ranks before it starts; one rank's second bucket is late."""
    net = ranks.four_layers()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)  # torch 2.14's DDP crashes on a checked group
    if rank == 1:
        net[1].weight.register_hook(lambda _: time.sleep(0.05))
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        attach(ddp, ratio=0.1, timeout=timedelta(seconds=5))
    finally:
        dist.set_debug_level(level)
    ranks.train(ddp, rank, range(4))
    assert alike(gradient(net))


@on_ranks(2)
def test_a_closed_state_frees_its_groups_at_once(rank, world):
    """If Python collected them in a forked process, that would wait forever for gloo's threads, which it lacks."""
    model, state = attached(ranks.four_layers(), ratio=0.05)
    ranks.train(model, rank, range(2))
    second = state.groups.second_groups
    groups = weakref.WeakSet([state.groups.all, second.all])
    del second
    gc.collect()
    gc.disable()
    try:
        state.close()
        assert not groups
    finally:
        gc.enable()


@ranks.counts_threads
@on_ranks(4)
def test_closed_states_of_some_ranks_leave_their_groups_to_the_next(rank, world):
    """Counts threads, files and groups after each round of states, which were open at the same time and stay known."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everyone = dist.new_group(list(range(world)))
    counts, known = [], []
    for round_ in range(4):
        known.append(states := [])
        for group, settings in (
            (halves[rank // 2], {}),
            (everyone, {"topology": "hierarchical", "local_world_size": 2}),
            (halves[rank // 2], {}),
        ):
            ddp, state = attached(nn.Linear(20, 30), {"process_group": group}, ratio=0.1, **settings)
            states.append(state)
            loss_of(ddp, rank, 0).backward()
        for state in states if (rank + round_) % 2 else reversed(states):
            state.close()
        counts.append(ranks.open_now())
    for group in (*halves, everyone):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    assert all(now < before + 3 for now, before in zip(counts[-1], counts[0], strict=True)), "3 would be one state's"


@on_ranks(2)
def test_groups_of_a_failed_exchange_are_not_reused(rank, world):
    everyone, states = dist.new_group([0, 1]), []
    for spoilt in (True, False):
        ddp, state = attached(nn.Linear(20, 5), {"process_group": everyone}, ratio=0.5, timeout=timedelta(seconds=2))
        states.append(state.groups.all)
        if spoilt and rank == 1:
            state.residuals.endpoint = mock.Mock(side_effect=ValueError("out of luck"))
        words = rf"sharded exchange of bucket 0 \(105 elements\) failed on rank {rank} of 2: {'out of luck' * rank}"
        with pytest.raises(RuntimeError, match=words) if spoilt else nullcontext():
            loss_of(ddp, rank, 0).backward()
        state.close()
    dist.destroy_process_group(everyone)
    assert states[0] is not states[1]


@on_ranks(2)
def test_a_checkpoint_is_refused_while_the_last_bucket_is_in_flight(rank, world):
    net, refusals = nn.Linear(20, 20), []
    model, state = attached(net, ratio=0.1)
    perform = collectives.perform

    def late(*arguments: Any) -> Any:
        time.sleep(0.2)
        return perform(*arguments)

    def look(_: torch.Tensor) -> None:  # the gradient of the batch comes last
        refusals.extend(map(ranks.refusal, (state.state_dict, partial(state.load_state_dict, {}))))

    with mock.patch.object(collectives, "perform", late):
        batch = ranks.batch(rank, 0).requires_grad_()
        batch.register_hook(look)
        model(1.0 * batch).square().mean().backward()
    assert ["between two backward passes" in each for each in refusals] == [True, True]


@on_ranks(2)
def test_a_state_that_was_closed_after_an_exchange_failed_gives_its_residuals(rank, world):
    model, state = attached(nn.Linear(20, 20), ratio=0.1)
    with mock.patch.object(collectives, "perform", mock.Mock(side_effect=MemoryError("no memory left"))):
        assert "no memory left" in ranks.refusal(model(ranks.batch(rank, 0)).square().mean().backward)
    state.close()
    assert state.state_dict()["steps"] == 1


@on_ranks(2)
def test_reads_in_the_middle_of_backward_give_the_state_after_the_last_whole_pass(rank, world):
    """Each of two layers has a bucket, and both are infinite in one step, which counts once. Two threads read."""
    torch.manual_seed(0)
    net, seen, bad = nn.Sequential(nn.Linear(20, 60), nn.Linear(60, 20)), [], [False]
    model, state = attached(net, {"bucket_cap_mb": 0.003}, ratio=0.1)

    def read() -> tuple[int, int, bool, int]:
        return state.nonfinite_steps, state.steps, state.telemetry.exchanged, state.predicted().sent

    def look(g: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as other:
            seen.append((read(), other.submit(read).result(), ranks.refusal(state.state_dict)))
        return g * torch.inf if bad[0] else g

    for step in range(4):
        bad[0] = step == 1
        hooks = [p.register_hook(look) for p in (net[0].weight, net[1].weight)]
        time.sleep(0.05)  # all exchanges of the pass before have ended
        before = read()
        seen.clear()
        model(ranks.batch(rank, step)).square().mean().backward()
        for hook in hooks:
            hook.remove()
        assert [found[:2] for found in seen] == [(before, before)] * 2
        assert step == 0 or "between two backward passes" in seen[-1][2], "the first bucket is exchanged meanwhile"
        assert state.report().elements == sum(p.numel() for p in net.parameters())
        assert state.nonfinite_steps == (step > 0)
        net.zero_grad()
    assert len(state.last_buckets) > 1


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"bucket_cap_mb": 25}], ids=str)
@on_ranks(2)
def test_the_density_is_decided_once_where_buckets_do_not_change(rank, world, options):
    model, state = attached(ranks.Net(), {"bucket_cap_mb": 0.005, **options}, saving=8)
    sent = []
    with ranks.log() as said:
        for step in range(4):
            ranks.train(model, rank, [step])
            sent.append((state.report().bytes.sent, state.predicted().sent))
    assert len(set(sent)) == 1
    assert not [line for line in said if "has changed" in line]
