"""``saving=``: the bytes sent match the requested saving, by arithmetic."""

import itertools

import pytest
import torch
from torch import nn

from lightning_topk.build import TOLERANCE, for_compressed, plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.runtime.buckets import BucketSettings
from lightning_topk.simulate import Cluster
from lightning_topk.volume import format_bytes, volume

TOPOLOGIES = [("sharded", 1), ("single_server", 1), ("allgather", 1), ("hierarchical", 2)]


def saved(config: TopKConfig, buckets: list, world: int, local: int = 1, **others: object) -> float:
    sent = volume(config, buckets, world, local=local, **others)
    return sent.node_saving if config.topology == "hierarchical" else sent.saving


@pytest.mark.parametrize(("topology", "local"), TOPOLOGIES)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
def test_every_topology_reaches_the_requested_saving(topology, local, bidirectional, wire):
    if topology == "allgather":
        bidirectional = False
    worlds = (4, 8, 64) if bidirectional else (4, 8)  # replies of many are long, and one entry per worker counts
    for saving, world, itemsize in itertools.product((12, 50, 400), worlds, (2, 4)):
        config = TopKConfig(saving=saving, topology=topology, bidirectional=bidirectional, wire=wire)
        seen = saved(config, [6_000_000, 3_000_001], world, local, itemsize=itemsize)
        assert seen == pytest.approx(saving, rel=TOLERANCE), (saving, world, itemsize)


def test_a_saving_is_one_literal_ratio():
    ratio = plan_bucket(TopKConfig(saving=50), [1_000_000], 4).ratio
    assert 0 < ratio < 1
    assert (
        plan_bucket(TopKConfig(ratio=ratio), [1_000_000], 4).codecs()
        == plan_bucket(TopKConfig(saving=50), [1_000_000], 4).codecs()
    )
    assert plan_bucket(TopKConfig(ratio=0.1), [5], 4).ratio == 0.1


@pytest.mark.parametrize("bidirectional", [True, False])
def test_a_ratio_is_at_most_1(bidirectional):
    assert plan_bucket(TopKConfig(saving=1, bidirectional=bidirectional), [1_000_000], 4).ratio == 1.0
    # Slightly below, servers that do not compress send everything; positions would cost more.
    assert plan_bucket(TopKConfig(saving=8, bidirectional=False), [1_000_000], 4).ratio > 0.25


def test_small_buckets_come_as_near_as_whole_words_allow():
    assert saved(TopKConfig(saving=1000), [5000], 8) < 300  # one entry per server and rank
    for numel in range(1, 200, 7):
        assert plan_bucket(TopKConfig(saving=50), [numel], 8).ratio <= 1.0


def test_a_single_rank_has_the_ratio_of_two_ranks():
    """With momentum on the worker it keeps a residual, though it sends nothing."""
    config = TopKConfig(momentum=0.9)
    assert plan_bucket(config, [100_000], 1).ratio == plan_bucket(config, [100_000], 2).ratio
    Cluster(config, 1, 1000).step([torch.ones(1000)])


def test_uncompressed_parameters_count_towards_the_saving():
    config = TopKConfig(saving=50, dense_parameters="*.bias")
    assert saved(config, [(991_000, 9_000), 500_000], 4, uncompressed=[[1], []]) == pytest.approx(50, rel=TOLERANCE)
    with pytest.raises(ValueError, match=r"dense_parameters are 3\.00% of the gradient.*saving= below 33\.3"):
        for_compressed(config, 1000, 30)
    assert for_compressed(config, 1000, 0) is config


def test_a_cluster_reaches_the_requested_saving():
    cluster = Cluster(TopKConfig(saving=30, dense_parameters="b"), 4, 40_000, sizes=(39_800, 200), uncompressed=(1,))
    for _ in range(2):
        cluster.step([torch.randn(40_000) for _ in range(4)])
    sent = cluster.sent_bytes["uplink"][0] + cluster.sent_bytes["downlink"][0]
    assert 2 * 2 * 3 * 40_000 * 4 / 4 / sent == pytest.approx(30, rel=TOLERANCE)


def startup_warnings(saving: float, buckets: list[list[int]], dtype: torch.dtype = torch.float32) -> str:
    """The warnings for buckets with these parameter sizes, on four ranks."""
    settings = BucketSettings(TopKConfig(saving=saving), 4, 1)
    made = [tuple(nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes) for sizes in buckets]
    return " ".join(settings.warnings(made, settings.volume(made, 0, 0, 0, voting=False)))


def test_a_missed_saving_warns_with_a_remedy():
    asked = "lightning_topk: saving=50 was requested, but"
    assert startup_warnings(50, [[100, 30]]) == f"{asked} this model is too small: each step saves 10.8x. Use DDP."
    small = f"{asked} its buckets are too small: each step saves 33.3x. "
    small += "Use a larger bucket_cap_mb= or, with fully_shard, larger modules."
    assert startup_warnings(50, [[400]] * 100) == small
    assert startup_warnings(50, [[300_000]]) == ""
    assert startup_warnings(2, [[300_000]]) == "", "the saving is exceeded"


def test_the_saving_of_half_precision_gradients_names_its_baseline():
    """An entry takes twice the share of the bytes, so half as many entries are sent."""
    sizes = [[300_000, 1000], [200_000]]
    ratios = [plan_bucket(TopKConfig(saving=50), [200_000], 4, itemsize=itemsize).ratio for itemsize in (2, 4)]
    same = plan_bucket(TopKConfig(saving=25), [200_000], 4, itemsize=2).ratio
    assert ratios[0] == pytest.approx(ratios[1] / 2, rel=0.1)
    assert same == pytest.approx(ratios[1], rel=0.01)
    assert startup_warnings(50, sizes, torch.bfloat16) == (
        "lightning_topk: saving=50 is relative to the bfloat16 gradients that DDP would send: the density is "
        f"{ratios[0]:.2g}. saving=25 sends as many entries as saving=50 does of float32 gradients."
    )
    assert startup_warnings(50, sizes) == ""


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (89_453_760, "89.5 MB"), (5e9, "5 GB"), (123e12, "123 TB")],
)
def test_bytes_are_formatted_with_units(nbytes, words):
    assert format_bytes(nbytes) == words
