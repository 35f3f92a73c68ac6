"""Settings: bad ones are refused early, in the user's words, and the bytes sent match a requested saving."""

import inspect
import itertools
import pickle
import re
from fractions import Fraction
from functools import partial
from typing import Any, get_args

import laws
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as st
from laws import codecs_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topk import TopKModelParallelStrategy, TopKStrategy
from lightning_topk.bucket import (
    TOLERANCE,
    Bucket,
    Buckets,
    TooLargeError,
    for_compressed,
    plan_bucket,
    plan_step,
    share_out,
)
from lightning_topk.config import Settings, TopKConfig
from lightning_topk.core.exchange import TOPOLOGIES, TopologyName
from lightning_topk.core.select import RandK, SampledK, Selector
from lightning_topk.core.wire import WIRES, WireName
from lightning_topk.messages import saving_warnings, startup_warnings
from lightning_topk.runtime.shares import FIRST, LEAST, TURNS, WINDOW, Shares, energies_of, lifts_of
from lightning_topk.schedule import ExponentialWarmup
from lightning_topk.simulate import Cluster
from lightning_topk.volume import Volume, volume

BAD = [
    ({"ratio": 0}, ValueError, r"ratio=0 must be in \(0, 1\].*Use ratio=0\.001"),
    ({"ratio": True}, TypeError, r"ratio=True is a bool; it must be a number"),
    ({"saving": 0.5}, ValueError, r"saving=0\.5 must be 1 or more.*Use saving=50"),
    ({"saving": 10**400}, ValueError, r"saving=10*0 must be finite.*Use saving=50"),
    ({"saving": Fraction(10**400)}, ValueError, r"saving=Fraction\(10*0 must be finite"),
    ({"ratio": lambda: 0.1}, TypeError, r"ratio=.*lambda.* must be a function of the step"),
    ({"ratio": 0.1, "saving": 50}, ValueError, r"ratio=0\.1 and saving=50 both say how much to send"),
    ({"server_ratio": 0.1}, ValueError, r"server_ratio=0\.1 needs ratio=: saving=50 sets"),
    ({"ratio": 0.1, "server_ratio": 0.1, "bidirectional": False}, ValueError, r"server_ratio=0\.1 has no effect"),
    ({"bidirectional": "yes"}, TypeError, r"bidirectional='yes' is a str; it must be True or False"),
    ({"error_feedback": "both"}, ValueError, r"error_feedback='both' is unknown; .*'worker', True or False"),
    ({"momentum": 1.0}, ValueError, r"momentum=1\.0 must be in \[0, 1\)"),
    ({"clip_norm": 0}, ValueError, r"clip_norm=0 must be positive"),
    ({"dense_parameters": 5}, TypeError, r"dense_parameters=5 must be a name pattern or a list"),
    ({"topology": "dense", "momentum": 0.9}, ValueError, r"momentum=0\.9 needs .* Leave out topology='dense',"),
    ({"dense_parameters": "*", "momentum": 0.9, "error_feedback": False}, ValueError, "out dense_.* and error_f.*, or"),
    ({"topology": "ring"}, ValueError, r"topology='ring' is unknown; it must be one of 'sharded', 'single_server'"),
    ({"topology": "allgather"}, ValueError, r"bidirectional=True is incompatible with topology='allgather'.*Pass"),
]
BAD_FOR_DDP = [
    ({"local_world_size": 0}, ValueError, r"local_world_size=0 must be at least 1"),
    ({"local_world_size": "2"}, TypeError, r"local_world_size='2' is a str"),
    ({"ddp_comm_hook": print}, ValueError, r"ddp_comm_hook=.*TopKStrategy installs its own"),
    ({"model_averaging_period": 4}, ValueError, r"model_averaging_period=4 is not supported.*post-local SGD"),
    ({"mixed_precision": object()}, ValueError, r"mixed_precision=.*Use the Trainer's precision"),
    ({"skip_all_reduce_unused_params": True}, ValueError, r"skip_all_reduce_unused_params=True is not supported with"),
    ({"rato": 0.1}, TypeError, r"unknown argument rato=0\.1; did you mean 'ratio'\?"),
]

BAD_FOR_SHARDS = [
    ({"data_parallel_size": "all"}, TypeError, "data_parallel_size='all' is a str; it must be an integer, or 'auto'"),
    ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size=0 must be at least 1"),
    ({"residual_checkpoint": "full"}, TypeError, "residual_checkpoint='full' is a str"),
    ({"clip_norm": 1.0}, ValueError, r"clip_norm=1\.0 would clip every shard"),
]
BAD_SCHEDULES = [
    ({"ratio": 0, "steps": 3}, ValueError, r"ratio=0 must be a number in"),
    ({"ratio": 0.1, "start": 2, "steps": 3}, ValueError, r"start=2 must be a number in"),
    ({"ratio": 0.1, "steps": 1, "epochs": 1}, ValueError, r"pass either steps or epochs"),
    ({"ratio": 0.1, "steps": 0}, ValueError, r"at least 1"),
    ({"ratio": 0.1, "steps": True}, ValueError, r"at least 1"),
    ({"ratio": True, "steps": 3}, ValueError, r"ratio=True must be a number in"),
    ({"ratio": 10**400, "steps": 3}, ValueError, r"ratio=10*0 must be a number in"),
]
BAD_FRACTIONS = [
    ({"fraction": 0}, ValueError, r"fraction=0 must be a number in"),
    ({"fraction": "x"}, ValueError, r"fraction='x' must be a number in"),
]
BAD_VOLUMES = [
    ({"buckets": [8, -5]}, ValueError, "buckets: size=-5 must be at least 0"),
    ({"buckets": [[8, 1.5]]}, TypeError, "buckets: size=1.5 is a float; it must be an integer"),
    ({"world": 0}, ValueError, "world=0 must be at least 1"),
    ({"local": 0}, ValueError, "local=0 must be at least 1"),
    ({"itemsize": 0}, ValueError, "itemsize=0 must be at least 1"),
    ({"rank": 2}, ValueError, "rank=2 must be from 0 to 1"),
    ({"rank": -1}, ValueError, "rank=-1 must be from 0 to 1"),
    ({"parameters": [2]}, ValueError, r"parameters=\[2\] has 1 items, but one is needed for each of 2 buckets"),
    ({"uncompressed": [[0]]}, ValueError, r"uncompressed=\[\[0\]\] has 1 items, but one is needed for each of 2"),
    ({"uncompressed": [[2], []]}, ValueError, "uncompressed: index=2 must be from 0 to 1"),
]
REFUSED = {
    TopKConfig: BAD,
    TopKStrategy: [BAD[0], *BAD_FOR_DDP],
    TopKModelParallelStrategy: [BAD[0], *BAD_FOR_SHARDS],
    ExponentialWarmup: BAD_SCHEDULES,
    SampledK: BAD_FRACTIONS,
    RandK: [({"seed": 1.5}, TypeError, r"seed=1\.5 must be an integer")],
    partial(volume, config=TopKConfig(), buckets=[[5, 3], 4], world=2): BAD_VOLUMES,
    volume: [({"config": {"saving": 50}, "buckets": [8], "world": 2}, TypeError, "config={.*must be a TopKConfig")],
    partial(Cluster, TopKConfig(), 2, 100): [
        ({"sizes": (60,)}, ValueError, r"sizes=\(60,\) add up to 60, but numel=100")
    ],
    Cluster(TopKConfig(), 2, 100).step: [
        ({"gradients": [torch.zeros(100)] * 3}, ValueError, r"got 3 gradients of shape \(100,\); it takes 2, one per"),
        ({"gradients": [torch.zeros(50)] * 2}, ValueError, r"2 gradients of shape \(50,\); .*, of shape \(100,\)"),
    ],
}


@pytest.mark.parametrize(
    ("target", "settings", "error", "message"), [(target, *row) for target, rows in REFUSED.items() for row in rows]
)
def test_bad_settings_raise_at_construction(target, settings, error, message):
    with pytest.raises(error, match=message):
        target(**settings)


def test_settings_are_pickled_and_ddps_own_defaults_are_accepted():
    TopKStrategy(ddp_comm_hook=None, mixed_precision=None, skip_all_reduce_unused_params=False, bucket_cap_mb=10)
    config = TopKConfig(ratio=0.25, topology="single_server")
    assert pickle.loads(pickle.dumps(config)) == config
    for kind in (TopKStrategy, TopKModelParallelStrategy):
        assert pickle.loads(pickle.dumps(kind(ratio=0.25))).config.ratio == 0.25


def test_an_option_of_ddp_is_passed_on_if_its_signature_says_nothing(monkeypatch):
    """As when a tool replaces the constructor."""
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module, *args, **kwargs: None)
    strategy = TopKStrategy(find_unused_parameters=True)
    assert strategy._ddp_kwargs["find_unused_parameters"]


class Turns(Selector):
    """Selects the next k entries in every step, in descending order, and leaves the last slot unused."""

    def pick(self, rows, k):
        index = (torch.arange(k).flip(0) + k * self.step).repeat(len(rows), 1)
        index[:, -1] = -1
        return index


class Few(Selector):
    def pick(self, rows, k):
        return torch.arange(k - 1).expand(len(rows), -1)


class Fixed(Selector):
    """Selects these positions."""

    def __init__(self, *positions):
        self.positions = positions

    def pick(self, rows, k):
        return torch.tensor([self.positions])


@pytest.mark.parametrize("positions", [(3, 5, 3), (0, 1, 30), (-2, 1, 2)])
def test_positions_that_a_selector_picks_twice_or_outside_the_shard_are_refused(positions):
    cluster = Cluster(TopKConfig(ratio=0.1, selector=Fixed(*positions)), world=1, numel=30)
    with pytest.raises(ValueError, match=r"Fixed\.pick returned a position twice, or one that is not in \[-1, 30\)"):
        cluster.step([torch.ones(30)])


def test_a_custom_selector_may_use_the_step_and_any_order_but_must_return_k_positions():
    cluster = Cluster(TopKConfig(ratio=0.1, selector=Turns(), wire="fp32"), world=1, numel=100)
    delivered = [cluster.step([torch.ones(100)])[0].nonzero().flatten().tolist() for _ in range(3)]
    assert delivered == [[*range(10 * step + 1, 10 * step + 10)] for step in range(3)]
    with pytest.raises(ValueError, match=r"Few\.pick returned positions of shape \(1, 9\).*\(1, 10\)"):
        Cluster(TopKConfig(ratio=0.1, selector=Few()), world=1, numel=100).step([torch.ones(100)])


def test_schedules_descend_geometrically_and_then_stay():
    steps = ExponentialWarmup(0.001, start=0.25, steps=4)
    densities = [steps.at(step, epoch=9) for step in range(7)]
    assert densities[0] == 0.25
    assert densities[4:] == pytest.approx([0.001] * 3)
    ratios = [b / a for a, b in itertools.pairwise(densities[:5])]
    assert ratios == pytest.approx([ratios[0]] * 4)
    epochs = ExponentialWarmup(0.001, epochs=2)
    assert epochs.at(step=100, epoch=0) == 0.25
    assert epochs.at(step=100, epoch=2) == pytest.approx(0.001)


def test_numpy_numbers_and_sets_become_plain_values():
    config = TopKConfig(ratio=np.float64(0.1), momentum=np.float32(0.5), clip_norm=np.int64(2))
    numbers = config.ratio, config.momentum, config.clip_norm, TopKConfig(saving=np.float64(10)).saving
    assert [(type(x), x) for x in numbers] == [(float, 0.1), (float, 0.5), (float, 2.0), (float, 10.0)]
    patterns = ["*.bias", "1.*", "2.weight"]
    assert TopKConfig(dense_parameters=set(patterns)).dense_parameters == tuple(patterns)
    sizes, plain = np.array([2 * 10**9, 10**9], dtype=np.int32), [2 * 10**9, 10**9]
    assert volume(config, sizes, 4) == volume(config, plain, np.int64(4))
    assert volume(config, [sizes], 4, parameters=np.array([2])) == volume(config, [plain], 4, parameters=[2])
    assert TopKStrategy(local_world_size=np.int64(2))._local_world_size == 2


@pytest.mark.parametrize(
    ("settings", "world", "words"),
    [
        ({}, 4, []),
        ({"topology": "dense"}, 4, []),
        ({"topology": "hierarchical"}, 4, [r"'hierarchical' on one node all-reduces .* Without effect: saving\."]),
        ({"topology": "dense", "ratio": 0.01, "dense_parameters": "*.bias"}, 4, ["effect: ratio, dense_parameters"]),
        ({}, 1, ["a single rank exchanges no gradients, so nothing is compressed"]),
        ({"topology": "dense"}, 1, []),
    ],
)
def test_settings_without_effect_are_named(settings, world, words):
    config = TopKConfig(**settings)
    resolved = config.resolve(world, world) if world > 1 else config.dense
    said = startup_warnings(config, resolved, world, has_optimizers=True)
    assert all(re.search(expected, remark) for remark, expected in zip(said, words, strict=True))


@pytest.mark.parametrize(
    ("topology", "nodes", "ranks", "gpus", "name"),
    [
        (None, 4, 8, True, "hierarchical"),
        (None, 4, 8, False, "sharded"),  # on CPUs a dense exchange inside a node costs more than it saves
        (None, 1, 8, True, "sharded"),
        (None, 4, 1, True, "sharded"),
        ("sharded", 4, 8, True, "sharded"),
        ("hierarchical", 4, 8, False, "hierarchical"),
        ("hierarchical", 1, 8, True, "dense"),
    ],
)
def test_the_default_topology_follows_the_nodes_and_a_chosen_one_is_used(topology, nodes, ranks, gpus, name):
    for amount in ({"saving": 50}, {"ratio": 0.001, "bidirectional": True}):
        found = TopKConfig(topology=topology, **amount).resolve(nodes * ranks, ranks, gpus)
        assert found.topology == name
    alone = TopKConfig(topology=topology, momentum=0.9).resolve(nodes * ranks, ranks, gpus)
    assert alone.topology == ("sharded" if name == "dense" else name), "momentum stays on the workers"


@pytest.mark.parametrize("topology", ["sharded", "hierarchical"])
def test_small_buckets_are_sent_whole_within_the_tolerance_of_the_saving(topology):
    """Whole: without positions. Beyond the tolerance, no bucket has less density than a large one."""
    config, local = TopKConfig(saving=50, topology=topology), 2 if topology == "hierarchical" else 1
    large = plan_bucket(config, [1 << 22], 4, local)

    def planned(*sizes: int) -> list:
        return plan_step(config, [((size,), 4, (), 0) for size in sizes], 4, local)

    *heads, body = planned(65, 257, 1_000_000)
    assert [plan.density() for plan in heads] == [1.0, 1.0]
    assert not any(plan.codecs().uplink.format().index_bytes for plan in heads)
    assert volume(config, [(65,), (257,), (1_000_000,)], 4, local=local).saved(config.by_node) >= 50 * 0.98
    assert body.density() == pytest.approx(large.density(), rel=1e-3)
    many = planned(*[300] * 100)
    assert max(plan.density() for plan in many) < 1
    assert min(plan.density() for plan in many) >= 0.99 * large.density()
    assert [plan.k for plan in plan_step(TopKConfig(ratio=0.01), [((65,), 4, (), 0)] * 2, 4)] == [1, 1]


@pytest.mark.parametrize(
    ("topology", "settings"),
    [
        *((name, {}) for name in ("sharded", "hierarchical", "single_server")),
        ("allgather", {"bidirectional": False}),
        ("sharded", {"selector": "randk", "wire": "fp32"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(400_000, 100_000, 100_000), (4099, 70_001, 257, 30_000), (900, 800)])
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (10, 0.25, 3, 0.25), (0.25, 10, 10, 0.25)])
def test_shares_move_the_bytes_of_a_step_between_its_buckets(topology, settings, sizes, weights):
    config = TopKConfig(saving=60, topology=topology, **settings)
    before = plan_step(config, [((size,), 4, (), 0) for size in sizes], 4, 2 if topology == "hierarchical" else 1)
    after = share_out(before, weights[: len(sizes)])
    for rank in range(4):
        sent = [sum((plan.volume(rank) for plan in plans), Volume()) for plans in (before, after)]
        assert sent[0] == sent[1]
    padding = [plan.padding for plan in after]
    assert sum(each > 0 for each in padding) <= 1
    assert max(padding) <= 16
    if min(sizes) > 4096:
        nbytes = [[plan.codecs().uplink.nbytes for plan in plans] for plans in (before, after)]
        grown = [new / old for old, new in zip(*nbytes, strict=True)]
        assert grown[0] / grown[1] == pytest.approx(weights[0] / weights[1], rel=0.1)


def test_shares_follow_energies_within_bounds_and_begin_again_with_other_buckets():
    """The energy of an entry counts, to the power 5/8, in finite passes that used its bucket."""
    shares, buckets = Shares(), tuple(Bucket((torch.ones(1),)) for _ in range(3))
    regrouped = (Bucket(p for bucket in buckets for p in bucket),)
    sizes = dict(zip(buckets, ([100], [100], [50]), strict=True))

    def decided(energies: list[float], used: int = 1) -> list[float]:
        """With energies of which the first is 0 but in every ``used``-th pass; another network trains in turn."""
        ended = shares.end_pass(regrouped)
        assert ended in ([], [*buckets])
        for number in range(FIRST):
            assert buckets not in shares.due
            assert shares.end_pass(buckets) == [*regrouped] * (number == 0)
            assert shares.end_pass(other) == []
            if shares.measures(buckets[0]):
                values = [torch.inf] * 3 if number == 3 else [energies[0] * (number % used == 0), *energies[1:]]
                shares.fold(buckets, {b: torch.tensor([[1.0], [x]]) for b, x in zip(buckets, values, strict=True)})
        assert buckets in shares.due
        weights, lifts = shares.decide(sizes)
        assert lifts == [(), (), ()]
        return weights

    other = (Bucket((torch.ones(1),)),)
    large, small, last = decided([1600.0, 100.0, 50.0])
    assert (large / small, small / last) == pytest.approx((16**0.625, 1.0))
    assert decided([1600.0, 100.0, 50.0], used=4) == pytest.approx([large, small, last])
    large, small, _ = decided([1e9, 1.0, 1.0])
    assert (large, small) == (pytest.approx(2.5**0.625), LEAST)
    unused, large, small = decided([0.0, 1600.0, 50.0])
    assert (unused, large / small) == (1.0, pytest.approx(16**0.625))
    assert decided([0.0] * 3) == []
    sizes[buckets[0]] = [0]  # not compressed: its energy does not count
    assert decided([1e9, 100.0, 50.0]) == pytest.approx([1.0, 1.0, 1.0])


def test_gradients_far_below_the_root_mean_square_of_their_bucket_are_lifted_to_less_than_half_of_it():
    """Those below a 32nd, by powers of two up to 1,024; uncompressed parameters and zeros do not count."""
    sizes = [4000, 100, 100, 50, 50, 0]
    rms = [1.0, 0.03, 0.04, 0.01, 1e-9, 1e6]
    energies = energies_of(torch.cat([torch.full((n,), x) for n, x in zip(sizes, rms, strict=True)]), sizes)
    assert lifts_of(energies.tolist(), sizes) == [1.0, 16.0, 1.0, 32.0, 1024.0, 1.0]
    assert lifts_of([4.0, 0.0], [4, 10]) == ()
    assert lifts_of([4.0, 5e-324], [4, 10]) == [1.0, 1024.0]
    bucket, shares = Bucket((torch.ones(4), torch.ones(10))), Shares()
    for used in (True, False, True):
        shares.end_pass((bucket,))
        shares.fold((bucket,), {bucket: torch.tensor([[4.0, used * 0.002], [1.0, 0.0]])})
    assert shares.decide({bucket: [4, 10]}) == ([1.0], [[1.0, 16.0]]), "the passes that used it count"
    bucket.lifts = [1.0, 16.0]
    assert shares.decide({bucket: [4, 10]}) == ([], [[1.0, 16.0]]), "nothing was measured"
    for energies in ([4.0, 0.0], [torch.nan, 0.1]):
        shares.fold((bucket,), {bucket: torch.tensor([energies, [1.0, 0.0]])})
    assert shares.decide({bucket: [4, 10]}) == ([1.0], [[1.0, 16.0]]), "no pass used it"


def test_lifts_are_decided_anew_every_64_passes_and_weights_after_twice_as_many():
    """A lift that is out of date starves the rest of the bucket; another plan moves residuals."""
    shares, buckets, turns = Shares(), (Bucket((torch.ones(4),)),), []
    for number in range(1, 2500):
        shares.end_pass(buckets)
        shares.fold(buckets, {buckets[0]: torch.ones(2, 1)})
        turns += [(number, shares.decide({buckets[0]: [4]})[0] == [1.0]) for _ in shares.due]
    assert [number for number, _ in turns] == [8, 16, 32, *range(64, 2500, 64)]
    assert [number for number, weighed in turns if weighed] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048]


def test_buckets_share_bytes_with_those_of_the_same_passes_however_many_passes_differ():
    shares, (trunk, deeper, *heads) = Shares(), [Bucket((torch.ones(1),)) for _ in range(40)]
    for head in heads[:2] * FIRST:
        shares.end_pass((head, trunk, deeper))
    assert shares.due == [(trunk, deeper), (heads[1],)], "the first pass was of one group"
    assert shares.end_pass((heads[2], deeper)) == [trunk, deeper], "the trunk is not always used as a whole"
    for pair in itertools.combinations(heads[:8], 2):
        shares.end_pass((*pair, trunk))
    assert len(shares.turns) == TURNS


def test_a_network_that_ends_before_its_first_decision_does_not_have_others_measured():
    shares, ended, other = Shares(), *((Bucket((torch.ones(1),)),) for _ in range(2))
    shares.end_pass(ended)
    for _ in range(FIRST * 4 - WINDOW - 1):
        shares.end_pass(other)
        for each in shares.due:
            shares.decide({bucket: [1] for bucket in each})
    assert not shares.measures(other[0])
    assert shares.measures(ended[0])


def test_buckets_that_send_everything_or_nothing_less_keep_their_plans():
    tiny, full = (plan_step(TopKConfig(saving=saving), [((65,), 4, (), 0)] * 3, 4) for saving in (1e4, 1))
    for plans in (tiny, full, plan_step(TopKConfig(saving=50, bidirectional=False), [((90_000,), 4, (), 0)] * 2, 4)):
        assert share_out(plans, (4.0, 1.0, 1.0)[: len(plans)]) == plans


def test_a_function_of_the_step_is_a_schedule_and_is_validated():
    config = TopKConfig(ratio=lambda step: 0.5 - 0.2 * step)
    assert [codecs_of(config, 1000, 1, step).uplink.k for step in range(3)] == [500, 300, 100]
    for setting, value in itertools.product(("ratio", "server_ratio"), (-0.1, 1.1, None, "0.1", True)):
        config = TopKConfig(**{"ratio": 0.1, setting: lambda step, value=value: value})
        with pytest.raises(ValueError, match=rf"^{setting}=<function .* returned {value!r} at step 3; .* a number in"):
            codecs_of(config, 1000, 1, step=3)


def test_every_setting_is_documented_in_order_in_topk_strategy():
    arguments = inspect.cleandoc(TopKStrategy.__doc__).split("Args:\n")[1].split("\n\n")[0]
    described = re.findall(r"^    \*{0,2}(\w+): ", arguments, flags=re.MULTILINE)
    assert described == list(inspect.signature(TopKStrategy).parameters)
    assert {*Settings.__annotations__} < {*described}
    assert set(get_args(TopologyName)) == set(TOPOLOGIES)
    assert set(get_args(WireName)) == set(WIRES)


def saved(config: TopKConfig, buckets: list, world: int, local: int = 1, **others: object) -> float:
    return volume(config, buckets, world, local=local, **others).saved(config.by_node)


@pytest.mark.parametrize(("topology", "bidirectional"), [*laws.ROUTES, *laws.ON_NODES[:2]])
@laws.wires
def test_every_topology_reaches_the_requested_saving(topology, bidirectional, wire):
    local = 1 + (topology == "hierarchical")
    worlds = (4, 8, 64) if bidirectional else (4, 8)  # replies of many are long, and one entry per worker counts
    for saving, world, itemsize in itertools.product((12, 50, 400), worlds, (2, 4)):
        config = TopKConfig(saving=saving, topology=topology, bidirectional=bidirectional, wire=wire)
        seen = saved(config, [6_000_000, 3_000_001], world, local, itemsize=itemsize)
        assert seen == pytest.approx(saving, rel=TOLERANCE), (saving, world, itemsize)


def test_a_ratio_is_at_most_1_and_small_buckets_come_as_near_as_whole_words_allow():
    for bidirectional in (True, False):
        assert plan_bucket(TopKConfig(saving=1, bidirectional=bidirectional), [1_000_000], 4).density() == 1.0
    # Slightly below, servers that do not compress send everything; positions would cost more.
    assert plan_bucket(TopKConfig(saving=8, bidirectional=False), [1_000_000], 4).density() > 0.25
    assert saved(TopKConfig(saving=1000), [5000], 8) < 300  # one entry per server and rank
    assert all(plan_bucket(TopKConfig(saving=50), [numel], 8).density() <= 1.0 for numel in range(1, 200, 7))


def test_a_single_rank_has_the_ratio_of_two_ranks():
    """With momentum on the worker it keeps a residual, though it sends nothing."""
    config = TopKConfig(momentum=0.9)
    assert plan_bucket(config, [100_000], 1).density() == plan_bucket(config, [100_000], 2).density()
    Cluster(config, 1, 1000).step([torch.ones(1000)])


def test_uncompressed_parameters_count_towards_the_saving():
    config = TopKConfig(saving=50, dense_parameters="*.bias")
    assert saved(config, [(991_000, 9_000), 500_000], 4, uncompressed=[[1], []]) == pytest.approx(50, rel=TOLERANCE)
    for dense in (10_000, 9_999):  # saving=1 saves nothing
        with pytest.raises(ValueError, match=r"of the bytes\. Pass topology='dense', or fewer"):
            for_compressed(config, 10_000, dense)
    with pytest.raises(ValueError, match=r"dense_parameters match 3\.00% of the gradient.*saving= below 33\.3"):
        for_compressed(config, 1000, 30)
    assert for_compressed(config, 1000, 0) is config
    with pytest.raises(ValueError, match="dense_parameters match all parameters, so nothing is compressed"):
        for_compressed(TopKConfig(ratio=0.1, dense_parameters="*"), 1000, 1000)


def warned(saving: float, buckets: list[list[int]], local: int = 1, **settings: Any) -> str:
    """The warnings for buckets with these parameter sizes, on four ranks."""
    plans = Buckets(TopKConfig(saving=saving, **settings), 4, local)
    made = [plans.find([nn.Parameter(torch.zeros(size)) for size in sizes]) for sizes in buckets]
    sent = sum((plans.plan_of(bucket).volume() for bucket in made), Volume())
    return " ".join(saving_warnings(plans, made, sent))


def test_a_missed_saving_warns_with_a_remedy():
    assert "this model is too small: each step saves 10.8x. Use DDP." in warned(50, [[100, 30]])
    assert "each step saves 33.3x. Use a larger bucket_cap_mb=" in warned(50, [[400]] * 100)
    assert warned(50, [[300_000]]) == ""
    assert "saving=2 was requested, but every entry is sent, rounded to int4, and each" in warned(2, [[300_000]])
    assert warned(2, [[300_000]], wire="fp32") == ""
    assert "between nodes each step saves only 42.9x" in warned(50, [[300_000]], local=2)


@st.composite
def steps_of_extremes(draw):
    """Buckets of parameters without memory, of up to 2^33 elements, and extreme savings."""
    sizes = st.one_of(st.sampled_from([0, 1, 2, 63, 2**20, 2**31 - 1, 2**33]), st.integers(0, 10_000))
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    buckets = []
    for _ in range(draw(st.integers(1, 4))):
        dtype, count = draw(dtypes), draw(st.integers(1, 3))
        made = [torch.nn.Parameter(torch.empty(draw(sizes), dtype=dtype, device="meta")) for _ in range(count)]
        buckets.append(tuple(made))
    world = draw(st.sampled_from([2, 3, 8, 64]))
    saving = draw(st.one_of(st.sampled_from([1, 1.001, 50, 1e9]), st.floats(1, 1e9)))
    topology = draw(st.sampled_from(["sharded", "single_server", "hierarchical"]))
    return buckets, world, draw(st.sampled_from([1, 2])), TopKConfig(saving=saving, topology=topology)


@given(steps_of_extremes())
@options(max_examples=60, deadline=None, derandomize=True)
def test_warnings_about_saving_never_raise_on_what_can_be_exchanged(case):
    buckets, world, local, config = case
    if world % local:
        return
    settings = Buckets(config.resolve(world, local), world, local)
    settings.learn_names({p: f"p{number}" for number, p in enumerate(p for bucket in buckets for p in bucket)})
    buckets = [*map(settings.find, buckets)]
    try:
        settings.plan_together(buckets)
    except TooLargeError:
        return  # refused before the first exchange
    sent = sum((settings.plan_of(bucket).volume() for bucket in buckets), Volume())
    assert all(isinstance(warning, str) for warning in saving_warnings(settings, buckets, sent))
