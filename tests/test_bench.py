"""The benches: what they print, at small sizes; never how long anything took."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from unittest import mock

import pytest
import torch

import lightning_topk
from lightning_topk import CompressionMonitor, __main__
from lightning_topk.lab import bench, commands, hosts, papers, plan
from lightning_topk.lab.bench import BENCHES, race, select, steps, train, wire
from lightning_topk.lab.bench.peers import ON_NODES, PEERS
from lightning_topk.lab.models import DIGIT, mlp
from lightning_topk.lab.report import Result


def test_select_holds_ours_beside_the_naive_way(monkeypatch):
    monkeypatch.setattr(select, "_memory", lambda *_: None)
    result = select.run(numel=200_000)
    ways = [row["way"] for row in result.tables["Selection at 0.001"]]
    assert ways == ["ours, exact", "torch.topk(x.abs())"]
    assert len(result.checks) == 10  # two selections, a worker's and a server's step at three densities, two optimizers


def test_wire_meets_its_byte_targets_at_every_size(monkeypatch):
    monkeypatch.setattr(wire, "_speed", lambda *_: None)
    result = wire.run(numel=25_000_000)
    counted = [check for check in result.checks if "the worst" in check.statement]
    assert len(counted) == 4
    assert all(check.holds for check in counted)


def test_an_exchange_needs_its_residuals_and_little_more_memory():
    peak, residuals = select.measured_memory(8_000_000)
    assert residuals == 4 * 8_000_000 + 4 * 2_000_128  # shards are whole blocks
    assert peak <= 1.1 * residuals


def as_json(rank: int, world: int, function: Callable[[dict[str, Any], int, int], Any], options: str) -> Any:
    """Calls a function of one rank as :mod:`lightning_topk.lab.ranks` does: options and result travel as JSON."""
    return json.loads(json.dumps(function(json.loads(options), rank, world)))


@pytest.fixture
def ranks(groups, monkeypatch):
    """Two processes on this host run in a group; that commands start others is held by the test of ``bench hosts``."""

    def run(function, options, timeout):
        return groups(2).run(as_json, function, json.dumps(options), timeout=100.0)

    monkeypatch.setattr(hosts, "local", lambda count: SimpleNamespace(run=run))
    monkeypatch.setattr(hosts, "emulate", lambda *_: nullcontext(SimpleNamespace(run=run)))
    monkeypatch.setattr(hosts, "available", lambda: True)


@pytest.mark.gloo
def test_hosts_times_every_peer_and_counts_bytes(ranks):
    result = steps.hosts(hosts=2, rates=["1gbit"], numel=300_000, seconds=0)
    (rows,) = result.tables.values()
    assert [row["peer"] for row in rows] == ["no exchange", *(peer for peer in PEERS if peer not in ON_NODES)]
    bytes_ = next(check for check in result.checks if check.statement.startswith("bytes counted"))
    assert bytes_.holds


@pytest.mark.gloo
def test_train_times_whole_steps_of_a_torchvision_model_with_every_peer(ranks):
    result = train.run("squeezenet1_1", batch_size=1, image_size=32, steps=5)
    (rows,) = result.tables.values()
    assert [row["peer"] for row in rows] == [peer for peer in PEERS if peer not in ON_NODES]
    assert [row["peer"] for row in rows if row["hidden"]] == ["ours", "ours, 0.001"]


@pytest.mark.skipif(not hosts.available(), reason="emulated hosts need root and iproute2")
def test_hosts_checks_counted_bytes_against_the_interface(monkeypatch, capsys, tmp_path):
    options = ["--hosts=2", "--ranks=2", "--rate", "1gbit", "--numel=2e6", "--ratio=0.01", "--seconds=0"]
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    peers = ["--peers", "ours", "ours, hierarchical"]
    monkeypatch.setattr(sys, "argv", ["lightning_topk", "bench", "hosts", *options, *peers, *files])
    try:
        __main__.main()
    except SystemExit as error:  # a container may be root without the right to make namespaces
        if "ip netns" not in str(error):
            raise
        pytest.skip(str(error))
    result = json.loads((tmp_path / "r.json").read_text())
    judged = {check["statement"]: check["holds"] for check in result["checks"]}
    for peer in ("ours", "ours, hierarchical"):
        assert judged[f"bytes counted are bytes predicted, {peer}, 1gbit"]
        assert judged[f"the interface counts little more, {peer}, 1gbit"]
    assert (tmp_path / "r.png").stat().st_size > 0
    assert "python -m lightning_topk bench hosts --hosts=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hosts", "--rate", "fast"], "write it like 100mbit, 1gbit"),
        (["wire", "--json", "nowhere/r.json"], "there is no folder nowhere"),
        (["wire", "--plot", "r.txt"], r"r.txt must end in .png, .svg, .pdf"),
        (["hosts", "--peers", "theirs"], "'theirs' is unknown"),
        (["train", "--model", "resnet0"], "torchvision has no model 'resnet0'"),
    ],
)
def test_invalid_options_of_a_bench_are_refused_in_words(monkeypatch, arguments, words):
    from lightning_topk.__main__ import main

    monkeypatch.setattr(sys, "argv", ["lightning_topk", "bench", *arguments])
    monkeypatch.setattr(hosts, "available", lambda: True)
    with pytest.raises(SystemExit, match=words):
        main()


@pytest.mark.parametrize("function", [plan.run, *BENCHES.values(), *(papers.CLAIMS | papers.EXPERIMENTS).values()])
def test_every_option_of_a_command_is_explained(function):
    parser = commands.add_command(argparse.ArgumentParser().add_subparsers(), "name", function)
    unexplained = [action.dest for action in parser._actions if not action.help or action.help.startswith(" (default")]
    assert unexplained == []


def scaled(
    numel: int, ratios: Sequence[float] = (0.5,), kind: Literal["a", "b"] = "a", path: Path | None = None
) -> dict:
    """Scales.

    Args:
        numel: Elements.
        ratios: Fractions, 100 % at most.
        kind: One of two.
        path: A file.
    """
    return {"numel": numel, "ratios": ratios, "kind": kind, "path": path}


def test_a_signature_gives_the_options_of_a_command():
    parser = argparse.ArgumentParser()
    commands.add_options(parser, scaled)
    found = commands.call(parser.parse_args(["--numel", "25e6", "--ratios", "0.1", "1", "--path", "x"]), other=1)
    assert found == {"numel": 25_000_000, "ratios": [0.1, 1.0], "kind": "a", "path": Path("x")}
    assert "Fractions, 100 % at most (default: 0.5)" in " ".join(parser.format_help().split())
    for wrong in (["--ratios", "1"], ["--numel", "1", "--kind", "c"], ["--numel", "many"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64Kbit", 64e3)])
def test_rates_are_written_as_tc_writes_them(rate, bits):
    assert hosts.bits_per_second(rate) == bits


def alone(value: torch.Tensor, reduce_op: str) -> torch.Tensor:
    """The reduction of a strategy with one rank."""
    assert reduce_op == "min"
    return value


TRAINER = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu"), reduce=alone))


def test_the_monitor_warns_once_when_dense_all_reduces_would_take_less():
    ends = [
        (0.001, 1, 0.001),
        (0.001, 1, 0.12),
        (0.001, 1, lambda step: 0.1),
        (0.1, 0, 0.001),
        (None, 0, 0.001),
    ]
    for dense, expected, end in ends:
        monitor = CompressionMonitor()
        monitor._density = 0.12
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for monitor._steps in range(1, 30):
                monitor._compare(dense, 0.01, TRAINER, end)
        said = [str(warning.message) for warning in caught]
        assert len(said) == expected
        if said:
            assert "takes 10.0 ms per step at a density of 0.12" in said[0]
            assert ("density decays to 0.001" in said[0]) == (end == 0.001)
            assert "about 1.0 ms, so plain DDP is probably faster on this link: try strategy='ddp'." in said[0]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("wire", "--ratios", "0"), r"ratio=0\.0 must be in \(0, 1\]"),
        (("select", "--numel", "100", "--ratios", "2"), r"ratio=2\.0 must be in \(0, 1\]"),
        (("train", "--ratio", "3"), r"ratio=3\.0 must be in \(0, 1\]"),
        (("hosts", "--hosts", "1"), "it takes 2 ranks or more: one exchanges nothing"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(monkeypatch, words, message):
    monkeypatch.setattr(sys, "argv", ["lightning_topk", "bench", *words])
    with pytest.raises(SystemExit, match=message):
        __main__.main()


@pytest.mark.unit
def test_a_fail_is_the_exit_status_only_with_strict(monkeypatch, capsys):
    result = Result("wire", "claim", "setting")
    result.check("statement", "target", "measured", holds=False)
    parser = argparse.ArgumentParser()
    bench.declare(parser.add_subparsers())
    monkeypatch.setitem(bench.BENCHES, "wire", lambda: result)
    for words, status in ((["bench", "wire"], None), (["bench", "wire", "--strict"], 1)):
        arguments = parser.parse_args(words)
        arguments.function = bench.BENCHES["wire"]
        if status is None:
            arguments.main(arguments)
        else:
            with pytest.raises(SystemExit) as raised:
                arguments.main(arguments)
            assert raised.value.code == status
    assert "| target " in capsys.readouterr().out


@pytest.mark.unit
def test_missing_extras_are_named_before_work_begins(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for words in (["bench", "wire", "--plot", "x.png"], ["reproduce", "saving"]):
        monkeypatch.setattr(sys, "argv", ["lightning_topk", *words])
        with pytest.raises(SystemExit, match=r"this needs matplotlib, which is not installed: pip install matplotlib"):
            __main__.main()


@pytest.mark.unit
@pytest.mark.parametrize(("text", "count"), [("300", 300), ("25e6", 25_000_000), ("25M", 25_000_000), ("1.5k", 1500)])
def test_counts_are_read_as_people_write_them(text, count):
    assert commands.count(text) == count
    for wrong in ("0", "-1", "2.5", "many", "1e-3", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="write it like 300, 25e6 or 25M"):
            commands.count(wrong)


@pytest.mark.unit
def test_the_version_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning_topk", "--version"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert capsys.readouterr().out == f"lightning_topk {lightning_topk.__version__}\n"


class Rehearsed:
    """Stands for emulated hosts: a run takes as long as the name of its racer says."""

    runs: ClassVar[list[tuple[str, str]]] = []

    def run(self, function, options, timeout):
        assert function is race.race
        assert timeout > options["budget"]
        self.runs.append((options["racer"], options.get("aim", "no aim")))
        seconds = {"saving 50": 2.0, "fp16 hook": 1.0}.get(options["racer"], 10.0)
        ends = options["racer"] != "PowerSGD 4"
        curve = [[seconds / 2, 5, 50.0], [seconds, 10, 96.0]]
        return [{"curve": curve, "reached": "aim" in options and ends, "sent": 1000}]


def test_race_says_who_is_sooner_and_goes_on_where_it_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "available", lambda: True)
    monkeypatch.setattr(hosts, "emulate", lambda count, rate: nullcontext(Rehearsed()))
    monkeypatch.setattr(hosts, "local", lambda count: Rehearsed())
    monkeypatch.setattr(Rehearsed, "runs", [])
    racers = ["saving 50", "DDP", "fp16 hook", "PowerSGD 4"]
    result = race.run(rates=["300mbit"], racers=racers, out=tmp_path / "race.jsonl")
    assert Rehearsed.runs == [("DDP", "no aim"), *((racer, 96.0) for racer in racers)]
    (rows,) = result.tables.values()
    assert [row["sooner than DDP"] for row in rows] == ["5.00x", "1.00x", "10.00x", ""]
    assert rows[-1]["seconds"] == "> 10"
    assert [check.holds for check in result.checks] == [True, False, True]  # fp16 is ahead
    assert race.run(rates=["300mbit"], racers=racers, out=tmp_path / "race.jsonl").tables == result.tables
    assert len(Rehearsed.runs) == 5, "a run was repeated"
    for wrong, message in (({"racers": ["nobody"]}, "racer"), ({"hosts": 1}, "2 hosts"), ({"rates": ["fast"]}, "rate")):
        with pytest.raises(ValueError, match=message):
            race.run(**wrong)


def raced(rank: int, world: int) -> list[dict[str, object]]:
    course = race.Course(partial(mlp, DIGIT, 10, (32,)), steps=20, lr=0.1, batch=16, every=10, heavy=True)
    found = []
    with mock.patch.dict(race.COURSES, small=course):
        for racer, more in (("DDP", {"steps": 20}), ("ratio 0.001", {"aim": 5.0}), ("PowerSGD 2", {"aim": 101.0})):
            given = {"course": "small", "racer": racer, "images": None, "seed": 0, "budget": 0.5, **more}
            found.append(race.race({**given, "budget": 60 if "steps" in more else 0.2}, rank, world))
    return found


def test_a_training_of_the_race_ends_with_its_steps_its_aim_or_its_budget(groups):
    dense, sparse, rest = groups(2).run(raced)[0]
    assert [step for _, step, _ in dense["curve"]] == [10, 20]
    assert not dense["reached"]
    assert sparse["reached"]
    assert sparse["curve"][-1][2] >= 5.0 * 0.99
    assert not rest["reached"]
    assert rest["curve"][-1][0] >= 0.2
