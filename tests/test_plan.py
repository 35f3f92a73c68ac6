"""What is predicted before a run: bytes as they are counted, times by a model, and what to use."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topk import __main__
from lightning_topk.config import TopKConfig
from lightning_topk.ddp import attach
from lightning_topk.lab import scale
from lightning_topk.lab.bench import costs as bench_costs
from lightning_topk.planning.advice import Hardware, forecasts, parameter_sizes, recommend, sentence
from lightning_topk.planning.costs import (
    CPU,
    GPU,
    Costs,
    Links,
    break_even,
    bytes_per_second,
    ddp_buckets,
    exchange_seconds,
    load_costs,
    step_seconds,
    store_costs,
)
from lightning_topk.planning.sharded import sharded_forecast

FREE = Costs(scan=0, encode=0, decode=0, copy=0, fixed=0, latency=0, byte=0, reduce=0, efficiency=1)
"""A machine that computes in no time: only links count."""


@pytest.mark.parametrize(
    ("rate", "speed"), [("8bit", None), ("1gbit", 125e6), ("2.5Gbit", 312.5e6), ("600gbyte", 6e11), ("0mbit", None)]
)
def test_rates_are_bits_or_bytes(rate, speed):
    if speed is None:
        with pytest.raises(ValueError, match="write it like 100mbit"):
            bytes_per_second(rate)
    else:
        assert bytes_per_second(rate) == speed


def test_where_computing_is_free_an_exchange_takes_what_its_bytes_take():
    links = Links(inter=1e6, intra=1e15)
    dense = exchange_seconds(TopKConfig(topology="dense"), [1_000_000], 4, 1, links, FREE)
    assert dense == pytest.approx(6.0)  # a ring of four sends one and a half gradients of 4 MB from each
    sharded, hierarchical = (
        exchange_seconds(TopKConfig(0.001, topology=topology), [1_000_000], 4, 2, links, FREE)
        for topology in ("sharded", "hierarchical")
    )
    assert sharded / hierarchical == pytest.approx(7 / 4, rel=0.02)  # 4 + 3 payloads leave a node, or 2 + 2


def test_break_even_is_where_both_take_the_same_time():
    config, sizes, links = TopKConfig(0.001), [25_000_000], Links(1e9, 1e12)
    speed = break_even(config, sizes, 4, 1, links, CPU)
    at = Links(speed, 1e12)
    ours, dense = (exchange_seconds(each, sizes, 4, 1, at, CPU) for each in (config, config.dense))
    assert ours == pytest.approx(dense, rel=0.01)
    assert break_even(config, [10], 4, 1, links, CPU) < 1e5  # latency decides
    assert break_even(config, sizes, 4, 1, links, FREE) == float("inf")


def test_predicted_steps_hide_exchanges_behind_backward():
    buckets = [[100], [100]]
    assert step_seconds(buckets, [0.0, 0.0], compute=3.0) == pytest.approx(3.0)
    assert step_seconds(buckets, [1.0, 0.5], compute=3.0) == pytest.approx(3.5)  # gradients come at 2 and at 3
    assert step_seconds(buckets, [2.0, 0.5], compute=3.0) == pytest.approx(4.5)
    assert step_seconds(buckets, [2.0, 0.5], compute=0.0) == pytest.approx(2.5)


def grouped(rank: int, world: int) -> tuple[list[list[int]], list[list[int]]]:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(300, 300) for _ in range(9)], nn.Linear(300, 2000))
    ddp = DistributedDataParallel(net, bucket_cap_mb=1)
    state = attach(ddp, ratio=0.01)
    for _ in range(3):
        ddp(torch.randn(2, 300)).sum().backward()
    found = [[p.numel() for p in bucket] for bucket in state.residuals.progress.buckets]
    state.close()
    return found, ddp_buckets([p.numel() for p in net.parameters()], cap_mb=1)


def test_buckets_are_those_that_ddp_builds(groups):
    for found, expected in groups(2).run(grouped):
        assert len(found) > 3
        # DDP takes gradients in the order in which they come: a layer's bias may come before its weight.
        assert [sorted(bucket) for bucket in found] == [sorted(bucket) for bucket in expected]


def test_constants_are_stored_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_costs("cpu") == CPU
    assert load_costs("cuda") == GPU
    store_costs(FREE, tmp_path / "lightning_topk" / "costs-cpu.json")
    assert load_costs("cpu") == FREE
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json holds no constants"):
        load_costs("cpu", tmp_path / "other.json")


def test_constants_are_fitted_to_what_was_timed():
    links = Links(1e15, 1e15)
    seconds = [exchange_seconds(config, [numel], 4, local, links, CPU) for config, numel, local in bench_costs.cases(4)]
    found, error = bench_costs.fit(seconds, 4)
    assert error < 1e-3
    for name, value in found.items():
        assert value == pytest.approx(getattr(CPU, name), rel=0.05), name


def found_for(sizes, nodes, ranks, inter, compute=0.0, costs=GPU):
    hardware = Hardware(nodes, ranks, Links(bytes_per_second(inter), 6e11), costs)
    return forecasts(sizes, hardware, ({"saving": 50}, {"ratio": 0.001}), compute)


def test_what_is_recommended_depends_on_the_links():
    sizes = parameter_sizes(model="resnet50")
    assert sum(sizes) == 25_557_032
    slow = found_for(sizes, 4, 8, "10gbit")
    assert recommend(slow).config.topology == "hierarchical"
    assert "instead of" in sentence(slow, 0.0)
    hidden = found_for(sizes, 4, 8, "400gbit", compute=0.5)
    assert recommend(hidden).config.topology == "dense"
    assert sentence(hidden, 0.5).startswith("use DDPStrategy: a step takes 50")
    assert "which backward hides" in sentence(hidden, 0.5)
    assert all(each.residuals > 0 for each in slow[1:])
    one, other = (next(e for e in slow if e.config.topology == t) for t in ("sharded", "hierarchical"))
    assert other.residuals < one.residuals / 5  # a piece for each of eight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(10, 10), nn.Linear(5, 5).requires_grad_(False)


def test_a_module_of_ones_own_is_counted():
    assert parameter_sizes(module="test_plan.Net") == [100, 10]
    for path, words in (
        ("test_plan.Nothing", "no attribute"),
        ("nowhere.Net", "nowhere"),
        ("builtins.dict", "no torch"),
    ):
        with pytest.raises(ValueError, match=words):
            parameter_sizes(module=path)
    with pytest.raises(ValueError, match="one of --model, --module and --params"):
        parameter_sizes(model="resnet18", params=3)


@pytest.mark.parametrize("base", [TopKConfig(), TopKConfig(wire="bf16", selector="gaussiank")])
@pytest.mark.parametrize("amount", [{"saving": 50}, {"saving": 200}, {"ratio": 0.01}])
def test_what_is_recommended_can_be_typed(base, amount):
    found = forecasts([1_000_000], Hardware(2, 1, Links(1e12, 1e6), FREE), (amount,), base=base)
    for way in found[1:]:
        said = sentence([replace(found[0], step=1.0), replace(way, step=0.0)], 0.0)
        if way.config.topology in ("single_server", "allgather"):  # what they send grows with the number of ranks
            assert said.startswith("use DDPStrategy")
            continue
        words = re.fullmatch(r"use TopKStrategy\((.*?)\): .*", said)
        assert words is not None
        assert eval(f"TopKConfig({words[1]})") == way.config
    assert "bucket_cap_mb=5" in sentence([found[0], replace(found[1], step=0.0)], 0.0, bucket_cap_mb=5)


def test_a_tie_goes_to_what_does_not_grow_with_the_ranks():
    """With two ranks all topologies send as much."""
    found = forecasts([1_000_000], Hardware(2, 1, Links(1e6, 1e9), FREE), ({"ratio": 0.01},))
    tied = [replace(each, step=1.0 if each.config.compresses else 99.0) for each in found]
    for order in (tied, tied[::-1]):
        assert recommend(order).config.topology == "sharded"


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning_topk", *arguments])
    __main__.main()


def test_the_plan_command_prints_a_table_and_a_recommendation(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = "--ratio", "0.001", "--wire", "bf16", "--compute-ms", "100"
    run(monkeypatch, "plan", "--params", "25M", "--nodes", "4", *given)
    out = capsys.readouterr().out
    assert "estimates for a GPU" in out
    assert re.search(r"sharded, ratio 0\.001 +\| 131 kB +\| 131 kB +\| 1144\.5x", out)
    assert "step ms" in out
    assert "By time, a guess until `bench costs` has run on a node: use TopKStrategy(ratio=0.001, wire='bf16'" in out
    run(monkeypatch, "plan", "--params", "25M", "--nodes", "4", "--inter", "1gbit")
    out = capsys.readouterr().out
    assert re.search(r"sharded, saving 50 +\|.*\| 50\.0x", out)
    assert re.search(r"allgather, saving 200 +\|.*\| 200\.0x", out)
    assert "use TopKStrategy(saving=50): " in out  # what is faster, and learns less, is not recommended unasked
    run(monkeypatch, "plan", "--params", "25M", "--nodes", "4", "--inter", "1gbit", "--saving", "50", "200")
    assert "use TopKStrategy(saving=200): " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="one rank exchanges nothing"):
        run(monkeypatch, "plan", "--params", "25e6", "--nodes", "1")
    for words, message in (
        (("--model", "resnet0"), "torchvision has no model 'resnet0'"),
        (("--params", "1e30"), r"--params 1e\+30 must be at most 1e\+14"),
        (("--params", "25e6", "--ratio", "2"), r"ratio=2\.0 must be in \(0, 1\]"),
        (("--params", "25e6", "--saving", "0.5"), r"saving=0\.5 must be 1 or more"),
        (("--params", "25e6", "--server-ratio", "0.1"), "--server-ratio needs --ratio"),
        (("--params", "25e6", "--bucket-cap-mb", "0"), "--bucket-cap-mb 0 must be positive"),
        (("--params", "25e6", "--compute-ms", "-1"), "--compute-ms -1 must not be negative"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, "plan", "--nodes", "2", *words)
    for words in (("--params", "2.5"), ("--params", "many"), ("--params", "9", "--nodes", "0")):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, "plan", "--nodes", "2", *words)
        assert "write it like 300, 25e6 or 25M" in capsys.readouterr().err


@pytest.mark.process  # matplotlib asks fc-list for fonts when it has no cache of them
@pytest.mark.parametrize(("topology", "local"), [("sharded", 1), ("hierarchical", 2), ("allgather", 1)])
def test_many_workers_are_simulated(monkeypatch, capsys, tmp_path, topology, local):
    arguments = [
        "--workers",
        "8",
        "--gpus-per-node",
        str(local),
        "--topology",
        topology,
        "--model",
        "mlp",
        "--steps",
        "8",
    ]
    run(monkeypatch, "simulate", *arguments, "--out", str(tmp_path))
    assert f"8 workers, {topology} exchange" in capsys.readouterr().out
    result = json.loads((tmp_path / "simulate.json").read_text())
    if topology != "allgather":
        (union,) = result["tables"]["Union of the workers' selections over one selection"]
        assert 1 < union["last"] <= union["workers"] == 8 // local
    assert (tmp_path / "simulate.png").stat().st_size > 0
    assert len(result["panels"]) == 1 + (topology != "allgather")


def test_workers_that_make_up_no_nodes_are_refused():
    with pytest.raises(ValueError, match="9 ranks do not make up nodes of 2"):
        scale.run(workers=9, gpus_per_node=2, topology="hierarchical")


def test_a_sharded_model_sends_a_fiftieth_between_nodes_and_keeps_residuals_of_shards(monkeypatch, capsys):
    dense, ours = (
        sharded_forecast(7_000_000_000, 4, 8, config) for config in (TopKConfig().dense, TopKConfig(saving=50))
    )
    assert dense.inter_node == pytest.approx(2 * 3 / 4 * 7e9 * 4, rel=1e-3)
    assert dense.inter_node / ours.inter_node == pytest.approx(50, rel=0.02)
    assert dense.intra_node == ours.intra_node == pytest.approx(7 * 7e9 * 8, rel=1e-3)
    assert dense.residuals == 0
    assert ours.residuals == pytest.approx(7e9 / 8 * 4 * (1 + 1 / 4), rel=1e-3)
    run(monkeypatch, "plan", "--params", "25M", "--nodes", "10000")
    assert re.search(r"use DDPStrategy.*compression that scales \(sharded, saving 50\)", capsys.readouterr().out)
    run(monkeypatch, "plan", "--fsdp", "--params=70e9", "--nodes=4", "--gpus-per-node=8", "--inter=1gbit")
    shown = capsys.readouterr().out
    assert "saving 200" in shown
    assert "of a GPU" in shown
    with pytest.raises(SystemExit, match="invalid memory 'much'"):
        run(monkeypatch, "plan", "--fsdp", "--params=7e9", "--nodes=4", "--gpus-per-node=8", "--memory=much")
    with pytest.raises(SystemExit, match="--memory goes with --fsdp"):
        run(monkeypatch, "plan", "--params=25M", "--nodes=4", "--memory=1gbyte")
    for ignored in ("--ratio=0.1", "--compute-ms=1", "--device=cpu", "--intra=1gbit"):
        with pytest.raises(SystemExit, match=f"--fsdp does not use {ignored.partition('=')[0]}"):
            run(monkeypatch, "plan", "--fsdp", "--params=70e9", "--nodes=4", "--gpus-per-node=8", ignored)
