"""Bad settings are refused early, in the user's words."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import pickle
import re
from typing import get_args

import pytest
import torch
from shapes import codecs_of

import lightning_topk.fabric
from lightning_topk.config import TopKConfig
from lightning_topk.core.exchange import TOPOLOGIES, TopologyName
from lightning_topk.core.layout import Layout
from lightning_topk.core.select import Selector
from lightning_topk.core.wire import WIRES, WireName
from lightning_topk.lightning.strategy import TopKStrategy
from lightning_topk.planning.volume import volume
from lightning_topk.presets import presets
from lightning_topk.recipe import PASSES, START, applies, planned, remarks
from lightning_topk.schedule import ExponentialWarmup
from lightning_topk.simulate import Cluster

BAD = [
    ({"ratio": 0}, ValueError, r"ratio=0 must be in \(0, 1\].*Use ratio=0\.001"),
    ({"ratio": 1.5}, ValueError, r"ratio=1\.5 must be in \(0, 1\]"),
    ({"ratio": -0.1}, ValueError, r"ratio=-0\.1 must be in \(0, 1\]"),
    ({"ratio": float("nan")}, ValueError, r"ratio=nan must be in \(0, 1\]"),
    ({"ratio": "0.1"}, TypeError, r"ratio='0\.1' is a str; it must be a number"),
    ({"ratio": True}, TypeError, r"ratio=True is a bool"),
    ({"ratio": None}, TypeError, r"ratio=None is a NoneType"),
    ({"server_ratio": 2}, ValueError, r"server_ratio=2 must be in \(0, 1\]"),
    ({"server_ratio": 0.1, "bidirectional": False}, ValueError, r"server_ratio=0\.1 has no effect"),
    ({"bidirectional": "yes"}, TypeError, r"bidirectional='yes' is a str; it must be True or False"),
    ({"error_feedback": 1}, TypeError, r"error_feedback=1 is a int"),
    ({"error_feedback": "both"}, ValueError, r"error_feedback='both' is unknown; .*'worker', 'server', True or False"),
    ({"scope": "layer"}, ValueError, r"scope='layer' is unknown; it must be one of 'bucket', 'model'"),
    ({"momentum": 1.0}, ValueError, r"momentum=1\.0 must be in \[0, 1\)"),
    ({"momentum": 0.9, "error_feedback": False}, ValueError, r"keeps nothing there"),
    ({"beta1": 1}, ValueError, r"beta1=1 must be in \[0, 1\)\. Leave it out, and the recipe decides"),
    ({"beta1": "0.9"}, TypeError, r"beta1='0\.9' is a str"),
    ({"clip_norm": 0}, ValueError, r"clip_norm=0 must be positive"),
    ({"clip_norm": "1"}, TypeError, r"clip_norm='1' is a str"),
    ({"lr_ratio": 1}, TypeError, r"lr_ratio=1 is a int"),
    ({"lr_ratio": True, "error_feedback": False}, ValueError, r"keeps none"),
    ({"topology": "allgather", "bidirectional": False, "error_feedback": "server"}, ValueError, r"has no server"),
    ({"selector": "best"}, ValueError, r"selector='best' is unknown; it must be one of 'topk'.* or an instance"),
    ({"selector": 3}, TypeError, r"selector=3 is a int"),
    ({"wire": "fp8"}, ValueError, r"wire='fp8' is unknown; it must be one of 'fp32', 'bf16'"),
    ({"ratio": "best"}, TypeError, r"ratio='best' is a str.*or \"auto\""),
    ({"dense_parameters": 5}, TypeError, r"dense_parameters=5 must be a pattern of names, or several"),
    ({"topology": "dense", "momentum": 0.9}, ValueError, r"momentum=0\.9 .* with topology='dense' gradients may be"),
    ({"topology": "auto", "momentum": 0.9}, ValueError, r"with topology='auto'"),
    ({"dense_parameters": "*.bias", "momentum": 0.9}, ValueError, r"with dense_parameters=\('\*\.bias',\)"),
    ({"topology": "ring"}, ValueError, r"topology='ring' is unknown; it must be one of 'sharded', 'single_server'"),
    ({"topology": "allgather"}, ValueError, r"bidirectional=True does not go with topology='allgather'.*Pass"),
]
BAD_FOR_DDP = [
    ({"local_world_size": 0}, ValueError, r"local_world_size=0 must be at least 1"),
    ({"local_world_size": "2"}, TypeError, r"local_world_size='2' is a str"),
    ({"ddp_comm_hook": print}, ValueError, r"ddp_comm_hook=.*TopKStrategy installs its own"),
    ({"ddp_comm_state": object()}, ValueError, r"ddp_comm_state="),
    ({"ddp_comm_wrapper": print}, ValueError, r"ddp_comm_wrapper="),
    ({"model_averaging_period": 4}, ValueError, r"model_averaging_period=4 belongs to post-local SGD"),
    ({"mixed_precision": object()}, ValueError, r"mixed_precision=.*Use the Trainer's precision"),
    ({"skip_all_reduce_unused_params": True}, ValueError, r"skip_all_reduce_unused_params=True is not supported with"),
    ({"delay_all_reduce_named_params": [("a", 1)]}, ValueError, r"delay_all_reduce_named_params="),
    ({"rato": 0.1}, TypeError, r"unknown argument rato=0\.1; did you mean 'ratio'\?"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD)
@pytest.mark.parametrize("target", [TopKConfig, TopKStrategy])
def test_bad_settings_raise_at_construction(target, settings, error, message):
    with pytest.raises(error, match=message):
        target(**settings)


@pytest.mark.parametrize(("settings", "error", "message"), BAD_FOR_DDP)
def test_options_that_bypass_the_hook_raise_at_construction(settings, error, message):
    with pytest.raises(error, match=message):
        TopKStrategy(**settings)


def test_ddp_defaults_that_are_passed_explicitly_are_welcome():
    TopKStrategy(ddp_comm_hook=None, mixed_precision=None, skip_all_reduce_unused_params=False, bucket_cap_mb=10)


def test_settings_are_frozen_and_survive_pickling():
    config = TopKConfig(ratio=0.25, topology="single_server")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ratio = 0.5
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(TopKStrategy(ratio=0.25))).config.ratio == 0.25


class First(Selector):
    """Takes the first k of each shard."""

    def pick(self, rows, k):
        return torch.arange(k).expand(len(rows), k)


class Unsorted(Selector):
    """Returns positions as torch.topk does, largest first, the last of them unused."""

    def pick(self, rows, k):
        index = rows.abs().topk(k, dim=1).indices
        index[:, -1] = -1
        return index


def test_positions_may_come_in_any_order():
    cluster = Cluster(TopKConfig(ratio=0.1, selector=Unsorted(), wire="fp32"), world=1, numel=1000)
    given = torch.arange(1000.0)[torch.randperm(1000)]
    received = cluster.step([given])[0]
    assert torch.equal(received, torch.where(given > 900, given, 0))


class Lazy(Selector):
    """Returns fewer than it was asked for."""

    def pick(self, rows, k):
        return torch.zeros(len(rows), k - 1, dtype=torch.int64)


def test_a_selector_of_ones_own_is_used():
    cluster = Cluster(TopKConfig(ratio=0.1, selector=First(), wire="fp32"), world=1, numel=100)
    received = cluster.step([torch.arange(1.0, 101.0)])[0]
    assert received.nonzero().flatten().tolist() == list(range(10))


def test_a_selector_that_chooses_another_number_is_refused():
    cluster = Cluster(TopKConfig(ratio=0.1, selector=Lazy()), world=1, numel=100)
    with pytest.raises(ValueError, match=r"Lazy\.pick returned positions of shape \(1, 9\).*\(1, 10\)"):
        cluster.step([torch.ones(100)])


def test_a_server_that_does_not_compress_has_room_for_all_that_workers_send():
    for world in (1, 2, 5, 100):
        codecs = codecs_of(TopKConfig(ratio=0.01, bidirectional=False), 100_000, world)
        assert codecs.reply is not None
        assert codecs.reply.kept == min(Layout(100_000, world).shard_size, world * codecs.uplink.kept)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0, "steps": 3}, r"ratio=0 must be in"),
        ({"ratio": 0.1, "start": 2, "steps": 3}, r"start=2 must be in"),
        ({"ratio": 0.1}, r"pass exactly one of steps"),
        ({"ratio": 0.1, "steps": 1, "epochs": 1}, r"pass exactly one of steps"),
        ({"ratio": 0.1, "share": 0}, r"share=0 must be in"),
        ({"ratio": 0.1, "steps": 0}, r"at least 1"),
    ],
)
def test_bad_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExponentialWarmup(**arguments)


def test_a_schedule_may_be_a_share_of_the_planned_steps():
    schedule = ExponentialWarmup(0.001, share=0.25)
    assert schedule.planned(400) == ExponentialWarmup(0.001, steps=100)
    config = TopKConfig(ratio=schedule, server_ratio=ExponentialWarmup(0.01, steps=7))
    assert config.by_plan
    assert planned(config, 400).ratio.at(100, 0) == pytest.approx(0.001)
    assert planned(config, 400).server_ratio == config.server_ratio
    with pytest.raises(ValueError, match="share needs the length of the run"):
        planned(config, float("inf"))
    with pytest.raises(ValueError, match=r"is unknown\. Pass planned_steps="):
        codecs_of(config, 1000, 4)


@pytest.mark.parametrize(
    ("settings", "steps", "words"),
    [
        ({}, 3000, []),
        ({}, 100_000, []),
        ({}, 1000, [r"steps planned: 1,000\. .* sent 60\.5 times on average; .* fewer than 180 times"]),
        ({"ratio": 0.1}, 2000, []),
        ({"topology": "allgather", "bidirectional": False}, 3000, [r"sent 91\.5 times"]),
        (
            {"topology": "hierarchical"},
            100,
            [r"topology='hierarchical' on one node all-reduces .* Without effect: ratio\."],
        ),
        ({}, float("inf"), ["the length of the run is unknown"]),
        ({"ratio": 0.5}, 10, []),
        ({"ratio": "auto"}, 10, []),
        ({"topology": "auto"}, 10, []),
        ({"recipe": "plain"}, 10, []),
        ({"recipe": "plain"}, float("inf"), []),
        ({"topology": "dense"}, 10, []),
        ({"topology": "dense", "clip_norm": 1.0, "wire": "int8"}, 10, [r"Without effect: wire\."]),
        (
            {"topology": "dense", "ratio": 0.01, "dense_parameters": "*.bias"},
            10,
            ["Without effect: ratio, dense_parameters"],
        ),
    ],
)
def test_remarks_warn_of_short_runs_and_settings_without_effect(settings, steps, words):
    said = remarks(TopKConfig(**settings), steps, 4, 4)
    assert len(said) == len(words)
    for remark, expected in zip(said, words, strict=True):
        assert re.search(expected, remark)


def test_the_default_recipe_descends_to_the_ratio_over_the_planned_steps():
    config = TopKConfig(server_ratio=0.002)
    assert applies(config)
    settled = planned(config, 100)
    assert not applies(settled)
    densities = [settled.ratio.at(step, 0) for step in range(120)]
    assert densities[0] == pytest.approx(START * 2 / 3)  # workers and servers together send START
    assert densities[50] == pytest.approx((START * 2 / 3 + 0.001) / 2)
    assert densities[99:] == pytest.approx([0.001] * 21, abs=4e-5)
    assert densities == sorted(densities, reverse=True)
    assert settled.server_ratio.at(0, 0) == 2 * settled.ratio.at(0, 0)  # in proportion
    assert settled.at(100, 0) == dataclasses.replace(config, wire="int4", beta1=0.0)
    assert planned(TopKConfig(wire="bf16"), 100).wire == "bf16"
    assert planned(config, math.inf) == config  # nothing to plan with


def test_the_default_recipe_sends_every_entry_often_enough_and_no_more():
    for steps in (3000, 10_000, 50_000):
        ratio = planned(TopKConfig(), steps).ratio
        assert sum(ratio.at(step, 0) for step in range(steps)) == pytest.approx(PASSES + 0.0005 * steps, rel=0.01)
    assert planned(TopKConfig(), 360_000).ratio == 0.001  # long enough as it is
    assert planned(TopKConfig(ratio=0.01), 36_000).ratio == 0.01


@pytest.mark.parametrize(
    "settings",
    [
        {"recipe": "plain"},
        {"ratio": START},
        {"ratio": lambda step: 0.1},
        {"ratio": ExponentialWarmup(0.001, steps=3)},
        {"ratio": "auto"},
        {"topology": "dense"},
        *presets.values(),
    ],
)
def test_the_recipe_leaves_alone_what_is_plain_dense_or_scheduled(settings):
    config = TopKConfig(**settings)
    assert not applies(config)
    assert planned(config, 100).summary() == config.summary()


@pytest.mark.parametrize("world", [2, 8, 64])
@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({}, 50),
        ({"server_ratio": 0.01}, 50),
        ({"topology": "single_server"}, 50),
        # The ratio that they end with is sent to every rank, and positions of few entries take more bits.
        ({"bidirectional": False}, 25),
        ({"bidirectional": False, "topology": "allgather"}, 25),
    ],
)
def test_the_default_recipe_saves_fifty_times_the_bytes_of_a_whole_run(settings, least, world):
    config = planned(TopKConfig(**settings), 300, world)
    volumes = [
        volume(config, [3_000_000], world, rank, step=step) for step in range(0, 300, 9) for rank in range(world)
    ]
    sent = sum(each.uplink + each.downlink for each in volumes)
    assert sum(each.dense for each in volumes) > least * sent


def test_four_bits_are_the_recipes_only_where_their_rounding_is_kept():
    assert planned(TopKConfig(), 100).wire == "int4"
    for kept in ("worker", "server", False):
        assert planned(TopKConfig(error_feedback=kept, bidirectional=False), 100).wire is None


@pytest.mark.parametrize(
    ("settings", "lent"),
    [
        ({}, 0.0),
        ({"topology": "hierarchical"}, 0.0),
        ({"beta1": 0.9}, 0.9),
        ({"recipe": "plain", "beta1": 0.5}, 0.5),
        ({"recipe": "plain"}, None),
        ({"momentum": 0.9}, None),
        ({"ratio": 0.5}, None),
        ({"ratio": "auto"}, None),
        ({"topology": "auto"}, None),
        ({"topology": "dense", "beta1": 0.5}, None),
        ({"error_feedback": False}, None),
    ],
)
def test_adam_steps_with_another_beta1_only_where_something_is_kept_back(settings, lent):
    assert planned(TopKConfig(**settings), 100).lent_beta1 == lent
    assert planned(TopKConfig(**settings), math.inf).lent_beta1 == (lent if "beta1" in settings else None)


def test_a_hierarchy_of_one_node_is_dense_and_adam_keeps_its_beta1():
    assert planned(TopKConfig(topology="hierarchical"), 100).on(4, 4).lent_beta1 is None


def test_settings_at_a_step_are_numbers_where_there_is_a_schedule():
    given = TopKConfig(ratio=ExponentialWarmup(0.001, epochs=4), server_ratio=lambda step: 0.5)
    assert given.at(7, 0).ratio == 0.25
    assert given.at(7, 4).ratio == 0.001
    assert given.at(7, 4).server_ratio is given.server_ratio


def test_a_function_of_the_step_is_a_schedule_and_is_watched():
    config = TopKConfig(ratio=lambda step: 0.5 - 0.2 * step)
    assert [codecs_of(config, 1000, 1, step).uplink.kept for step in range(3)] == [500, 300, 100]
    with pytest.raises(ValueError, match="it must be in"):
        codecs_of(config, 1000, 1, step=3)


def test_the_predicted_volume_depends_on_the_scope():
    whole, parts = (volume(TopKConfig(scope=scope), [1500, 700, 300], world=4) for scope in ("model", "bucket"))
    assert whole.uplink == volume(TopKConfig(), [2500], world=4).uplink < parts.uplink


def test_every_preset_is_a_setting():
    assert set(presets) == {
        "dense", "topk", "bidirectional_topk", "randk", "gaussiank", "dgc", "trimmed", "parameter_server",
    }  # fmt: skip
    for settings in presets.values():
        TopKStrategy(**settings)
        assert codecs_of(TopKConfig(**settings), 1000, 4)


def test_dense_costs_what_a_ring_all_reduce_costs_and_a_check_word_a_payload():
    plan = volume(TopKConfig(**presets["dense"]), [4096], world=4)
    assert plan.uplink + plan.downlink == plan.dense + 6 * 4


STRATEGIES = [TopKStrategy, lightning_topk.fabric.TopKStrategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_strategies_take_the_settings_of_the_config_with_the_same_defaults_and_types(strategy):
    config, taken = (inspect.signature(kind).parameters for kind in (TopKConfig, strategy))
    assert list(taken)[: len(config)] == list(config)
    assert [taken[name] for name in config] == list(config.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_argument_of_a_strategy_is_described_and_the_settings_as_in_the_config(strategy):
    def described(kind: type) -> dict[str, str]:
        arguments = inspect.cleandoc(kind.__doc__).split("Args:\n")[1].split("\n\n")[0]
        found = re.split(r"^    (\*{0,2}\w+): ", arguments, flags=re.MULTILINE)[1:]
        return dict(zip(found[::2], map(str.strip, found[1::2]), strict=True))

    config, mine = described(TopKConfig), described(strategy)
    assert {name: mine[name] for name in config} == config
    kinds = inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(strategy).parameters.values()
    assert list(mine) == [f"**{p.name}" if p.kind == kinds else p.name for p in parameters]


def test_the_names_in_annotations_are_those_of_the_topologies_and_wires():
    assert set(get_args(TopologyName)) == set(TOPOLOGIES)
    assert set(get_args(WireName)) == set(WIRES)
