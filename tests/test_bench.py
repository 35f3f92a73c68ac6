"""The benches at small sizes: their output, but never how long anything took."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lightning_topk
from lab import commands, hosts
from lab.bench import race, select, steps, wire
from lab.bench.peers import PEERS
from lab.data import Data
from lab.models import DIGIT, mlp
from lab.papers import CLAIMS
from lab.report import Result
from lab.training import DiLoCo, Optimizer
from lightning_topk import __main__
from lightning_topk.bench.peers import ours
from lightning_topk.plan import link

LAB = Path(commands.__file__).parent


def run(monkeypatch, *words: str, main: Callable[[], None] = commands.main) -> None:
    """Runs a command, of the lab or of the package, in this process."""
    monkeypatch.setattr(sys, "argv", ["x", *words])
    main()


def test_select_and_wire_compare_with_passes_over_memory_and_with_the_entropy(monkeypatch):
    monkeypatch.setattr(select, "memory_table", lambda *_: None)
    steps = itertools.product(("0.001", "0.01", "0.12, int4"), ("worker", "server"))
    said = [f"a {who}'s whole compress step at {density}" for density, who in steps]
    said += [f"adapted momentum, beyond a step of {name}" for name in ("SGD", "AdamW, fused")]
    found = {check.statement: float(check.measured) for check in select.run(numel=200_000).checks}
    assert [*found] == [f"{each}, in units of add_ + zero_" for each in said]
    assert min([*found.values()][:6]) > 0
    held = {check.statement: check.holds for check in wire.run().checks}
    bounds = [f"of {bound}, at {ratio}, the worst" for ratio in (0.001, 0.01) for bound in ("entropy", "the bound")]
    assert held == dict.fromkeys(bounds, True)


def test_an_exchange_needs_little_memory_beyond_its_residuals():
    peak, residuals = select.measured_memory(8_000_000)  # in a process of its own
    assert residuals == 4 * 8_000_000 + 4 * 2_000_128  # shards are whole blocks
    assert peak <= 1.1 * residuals


@pytest.mark.gloo
def test_hosts_times_every_peer_and_counts_bytes(groups, monkeypatch):
    """Two processes of a group stand for hosts."""
    ranks = SimpleNamespace(run=lambda function, options, timeout: groups(2).run(as_hosts, function, options))
    monkeypatch.setattr(hosts, "emulate", lambda *_: nullcontext(ranks))
    result = steps.hosts(hosts=2, rates=["1gbit"], numel=300_000, seconds=0)
    (rows,) = result.tables.values()
    assert {row["peer"] for row in rows} == {*PEERS} - {"ours, hierarchical"}
    assert next(check for check in result.checks if check.statement.startswith("bytes counted")).holds


def as_hosts(rank: int, world: int, function: Callable[[dict[str, Any], int, int], Any], options: Any) -> Any:
    return function(options, rank, world)


@pytest.mark.slow
@pytest.mark.skipif(not hosts.available(), reason="emulated hosts need root and iproute2")
def test_hosts_checks_counted_bytes_against_the_interface(monkeypatch, tmp_path):
    options = ["--hosts=2", "--ranks=2", "--rate", "1gbit", "--numel=2e6", "--ratio=0.01", "--seconds=0"]
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    try:
        run(monkeypatch, "bench", "hosts", *options, "--peers", "ours", "ours, hierarchical", *files)
    except SystemExit as error:  # a container may be root without the right to make namespaces
        if "ip netns" not in str(error):
            raise
        pytest.skip(str(error))
    judged = {each["statement"]: each["holds"] for each in json.loads((tmp_path / "r.json").read_text())["checks"]}
    for peer in ("ours", "ours, hierarchical"):
        assert judged[f"bytes counted are bytes predicted, {peer}, 1gbit"]
        assert judged[f"the interface counts little more, {peer}, 1gbit"]
    assert (tmp_path / "r.png").stat().st_size > 0
    left = subprocess.check_output(["ip", "netns", "list"], text=True)
    assert f"ltk{os.getpid() % 100000}" not in left


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench hosts --rate fast", "bench hosts: .*write it like 100mbit or 2.5gbit"),
        ("bench hosts --peers theirs", "bench hosts: .*'theirs' is unknown"),
        ("bench wire --json nowhere/r.json", "bench wire: .*No such file or directory: 'nowhere/r.json'"),
        ("bench own-work --workers 1", "own-work: --workers 1 exchanges nothing: use 2 or more"),
        ("bench own-work --device cuda", "own-work: --device cuda: torch finds no GPU here"),
        ("reproduce", r"reproduce: name a claim \(counterexample, saving, .*\) or pass --all"),
        ("reproduce at-size --models AdamW", "at-size: --models='AdamW' is unknown; .*'narrow resnet18'"),
        ("reproduce at-size --systems gpt", "at-size: --systems='gpt' is unknown; .*'saving 50'"),
        ("reproduce lag --models gtp", "lag: --models='gtp' is unknown"),
        ("reproduce scripts --models MNIST --systems PowerSGD", "scripts: --systems PowerSGD: write it like dense or"),
        ("reproduce deliveries --optimizers AdamW", "deliveries: --optimizers='AdamW' is unknown; .*'AdamW 0.95'"),
    ],
)
def test_invalid_arguments_are_refused_in_a_sentence(monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, *words.split())


def test_only_the_papers_claims_are_in_the_report(monkeypatch, tmp_path):
    """A command that is no claim once overwrote the committed report with an empty one."""
    monkeypatch.setattr(commands, "function_of", lambda name: lambda: Result(name.split()[1], "", ""))
    (report := tmp_path / "report.md").write_text("earlier")
    for name, said in (("agreement", "earlier"), ("saving", "0 of 0 statements hold")):
        run(monkeypatch, "reproduce", name, "--out", str(tmp_path))
        assert said in report.read_text()
    committed = (LAB.parent / "reproduced" / "report.md").read_text()
    assert [name for name in CLAIMS if f"\n## {name}: " not in committed] == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((str(LAB), "bench", "-h"), "whole trainings on emulated hosts"),
        (("-m", "lightning_topk", "-h"), "examples/lab"),
        (("-m", "lightning_topk", "--version"), f"lightning_topk {lightning_topk.__version__}\n"),
    ],
)
def test_help_and_version_come_without_torch_and_say_where_the_benches_are(words, text):
    env = {**os.environ, "PYTHONPATH": str(LAB.parents[1])}  # finds the package, but not the lab
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True)
    assert text in done.stdout
    assert not re.search(r"\| torch$", done.stderr, re.MULTILINE)


@pytest.mark.unit
def test_counts_and_rates_are_read_as_people_write_them():
    assert [*map(__main__.count, ("300", "25e6", "1.5k"))] == [300, 25_000_000, 1500]
    assert [*map(link, ("2.5gbit", "64Kbit/20ms"))] == [(2.5e9, 0), (64e3, 0.02)]
    for wrong in ("0", "2.5", "many", "1e300", "1e400"):
        with pytest.raises(argparse.ArgumentTypeError, match="write it like 300, 25e6 or 25M"):
            __main__.count(wrong)


def data() -> Data:
    """Needs no scikit-learn, which takes seconds to import."""
    examples = torch.randn(200, *DIGIT, generator=torch.Generator().manual_seed(0))
    labels = examples.flatten(1)[:, :10].argmax(1)
    return Data(examples[:160], labels[:160], examples[160:], labels[160:])


def raced(rank: int, world: int) -> list[dict[str, Any]]:
    course = race.Course(partial(mlp, DIGIT, 10, (32,)), data, 20, Optimizer(0.1, 0.9), batch=16, every=10)
    ends = {"DDP": {"steps": 20}, "ratio 0.001": {"aim": 3.0}, "local 10": {"aim": 0.0, "budget": 0.2}}
    with mock.patch.object(race, "COURSE", course):
        return [race.race({"racer": each, "seed": 0, "budget": 60, **ends[each]}, rank, world) for each in ends]


def test_a_training_of_the_race_ends_at_its_steps_its_aim_or_its_budget(groups):
    dense, sparse, rest = found = groups(2).run(raced)[0]
    assert [each["reached"] for each in found] == [False, True, False]
    assert [step for _, step, _ in dense["curve"]] == [10, 20]
    assert sparse["curve"][-1][2] <= 3.0
    assert rest["curve"][-1][0] >= 0.2


def test_figures_of_a_race_are_of_the_seeds_that_all_racers_ran():
    def runs(*seconds: float) -> dict[int, dict[str, Any]]:
        return {
            seed: {"curve": [(took / 2, 10, 3.0), (took, 20, 1.0)], "sent": 4e7} for seed, took in enumerate(seconds)
        }

    several = {
        ("loopback", "DDP"): runs(1, 1, 1),
        ("1gbit", "DDP"): runs(300),
        ("1gbit", "saving 50"): runs(100, 40, 50),
    }
    dense, ours = race.table(several, ["1gbit"], ["DDP", "saving 50"])
    assert dense["1gbit"] == "300"
    assert ours == {
        "": "saving 50",
        "1gbit": "100 (40 to 100), 3x",
        "steps": "20",
        "ms a step, by link": "5000",
        "MB a host and step": "2",
    }


def locally_stepped(rank: int, world: int) -> list[torch.Tensor]:
    """Weights after seven steps of DiLoCo, averaged every three steps through ours."""
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Linear(3, 2))
    (optimizer,) = Optimizer(0.1, 0.9).make(dict(net.named_parameters()))
    state = race.diloco(3, ours(ratio=1, wire="fp32")).register(net, {"optimizer": optimizer})
    for step in range(7):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, rank + step + 1.0)
        optimizer.step()
    state.close()
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_diloco_between_processes_and_in_the_simulator_is_one_algorithm(groups):
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in torch.nn.Linear(3, 2).parameters()])
    weights = [start.clone(), start.clone()]
    stepped = [Optimizer(0.1, 0.9).make({"": each})[0] for each in weights]
    simulated = DiLoCo(3, race.OUTER_RATE, None, 2, [start.shape])
    simulated.begin(start)
    for step in range(7):
        gradients = simulated.step([torch.full_like(start, rank + step + 1.0) for rank in range(2)])
        for each, made, gradient in zip(weights, stepped, gradients, strict=True):
            each.grad = gradient
            made.step()
        simulated.average_(weights)
    for mine, own in zip(groups(2).run(locally_stepped), weights, strict=True):
        torch.testing.assert_close(torch.cat([each.flatten() for each in mine]), own)
    assert not torch.equal(*weights), "the last step was local"
