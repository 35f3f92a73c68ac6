"""What is chosen from what was measured."""

from __future__ import annotations

import pytest
from shapes import codecs_of

from lightning_topk.config import AUTO_RATIOS, TopKConfig
from lightning_topk.runtime.autotune import judge
from lightning_topk.schedule import ExponentialWarmup

SIZES = [1000, 2_000_000]


def chosen(config, local, seconds):
    choice = judge(config, config.candidates(4, local), SIZES, seconds)
    return [(way.topology, way.ratio) for way in choice.configs], choice.words


def test_every_bucket_gets_its_fastest_way():
    config = TopKConfig(0.001, topology="auto")
    found, words = chosen(config, 2, [[0.003, 0.004, 0.001], [0.05, 0.03, 0.2]])  # sharded, hierarchical, all-reduce
    assert found == [("dense", 1.0), ("hierarchical", 0.001)]
    assert "all-reduce for 1 bucket (1,000 elements), 1.0 ms instead of 3.0 ms compressed" in words
    assert (
        "hierarchical exchange at ratio 0.001 for 1 bucket (2,000,000 elements), 30.0 ms instead of 200.0 ms" in words
    )


def test_all_reduce_is_taken_where_it_costs_little_more_since_it_loses_nothing():
    found, _ = chosen(TopKConfig(topology="auto"), 1, [[1.0, 1.04], [1.0, 1.06]])
    assert [topology for topology, _ in found] == ["dense", "sharded"]


def test_the_largest_ratio_that_costs_little_more_is_taken():
    times = [1.0, 1.01, 1.02, 1.04, 1.2, 1.01]  # .05 was lucky: it counts too
    assert len(times) == len(AUTO_RATIOS)
    found, _ = chosen(TopKConfig(ratio="auto"), 1, [[*times, 9.0], [*times, 0.9]])
    assert found == [("sharded", 0.05), ("dense", 1.0)]  # nothing takes more time than all-reduce
    times[-1] = 1.3
    found, _ = chosen(TopKConfig(ratio="auto"), 1, [[*times, 9.0]] * 2)
    assert found == [("sharded", 0.01)] * 2


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        ({}, "at saving 50"),
        ({"ratio": 0.001}, "at ratio 0.001"),
        ({"ratio": ExponentialWarmup(0.01, steps=9)}, "at ratio 0.01"),  # with which it ends
        ({"ratio": lambda step: 0.5}, "at a ratio by step"),
    ],
)
def test_the_words_tell_how_much_is_sent(amount, words):
    config = TopKConfig(topology="auto", **amount)
    assert words in judge(config, config.candidates(4, 1), SIZES, [[1.0, 9.0]] * 2).words


def test_an_automatic_ratio_has_no_sizes_before_it_was_measured():
    with pytest.raises(ValueError, match="sizes are unknown before they are measured"):
        codecs_of(TopKConfig(ratio="auto"), 1000, 4)
