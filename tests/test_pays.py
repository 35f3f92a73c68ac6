"""``bench`` of the package: what it prints, on which rank, and what it does if a peer or a rank fails."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from groups import on_ranks
from test_bench import run
from torch import nn

from lightning_topk.__main__ import main
from lightning_topk.bench import command, loop, peers
from lightning_topk.bench.command import Bench, Work, report
from lightning_topk.bench.verdict import decide, ratio
from lightning_topk.config import TopKConfig
from lightning_topk.volume import volume

CPU = torch.device("cpu")
ROWS = ["no exchange", "DDP", "16-bit hook", "PowerSGD", "saving=50", "saving=150", "ratio=0.001"]
COMPUTED = ["DiLoCo, H=30 (computed)", "DiLoCo, H=100 (computed)", "DiLoCo, H=30, saving=50 (computed)"]


class Tiny(nn.Sequential):
    """A user's model: two outputs, and batch norm's buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 200))

    def forward(self, x):
        y = super().forward(x)
        return {"all": y, "some": (y[:, :3], None)}


def cells(shown: str) -> dict[str, list[str]]:
    """The cells of the table, by exchange."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    return {name: values for name, *values in lines[2:]}


WORKS = {
    "a module in bfloat16": Work(module="test_pays.Tiny", input=(8,), batch_size=4, precision="bf16"),
    "exchanges alone": Work(params=300_000),
}


@pytest.mark.parametrize("name", WORKS)
@on_ranks(2, timeout=120)
def test_every_exchange_is_timed_and_one_line_decides(rank, world, name, tmp_path):
    bench = Bench(WORKS[name], CPU, 50, steps=3)
    said = report(bench, tmp_path / "found.json")
    assert bench.failed == {}
    if rank:
        assert said is None
        return
    found, kept = cells(said), json.loads((tmp_path / "found.json").read_text())
    assert [*found] == [*ROWS, *COMPUTED]
    assert [*kept["seconds"]] == ROWS
    assert said.splitlines()[-1] == kept["verdict"]
    assert re.search("saving=50|nothing", kept["verdict"])
    assert kept["bytes"]["no exchange"] == 0
    dense = volume(TopKConfig(topology="dense"), [sum(bench.sizes)], 2)
    assert kept["bytes"]["DDP"] == dense.sent
    assert kept["bytes"]["16-bit hook"] == dense.sent / 2
    if name == "exchanges alone":
        assert kept["bytes"]["saving=50"] == pytest.approx(dense.sent / 50, rel=0.02)
        assert "PowerSGD: rank " in said
    else:
        assert float(found["DDP"][-1]) > 0, "images a second"
        assert found["saving=50"][-2].endswith("%")


def breaks_on(rank: int, after: int):
    """A hook that raises on one rank after some buckets, and exchanges nothing."""
    calls = [0]

    def hook(state, bucket):
        calls[0] += 1
        if state == rank and calls[0] > after:
            raise KeyError("this hook is broken\nin a second line")
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook


@pytest.mark.parametrize("after", [0, 4])
@on_ranks(2)
def test_a_peer_that_fails_on_one_rank_is_left_out_on_all_and_the_others_are_timed(rank, world, after):
    broken = peers.hook(breaks_on(rank=1, after=after), lambda model: rank)
    with mock.patch.object(peers, "BF16", broken), mock.patch.object(command, "TIMEOUT", timedelta(seconds=4)):
        bench = Bench(Work(params=3000), CPU, 50, ["DDP", "16-bit hook", "saving=50"], steps=3)
        said = report(bench)  # the other rank waits for this one, until the timeout
    assert bench.failed == {"16-bit hook": "rank 1: KeyError: 'this hook is broken\\nin a second line'"}
    if rank == 0:
        assert cells(said)["16-bit hook"][0] == "failed"
        assert cells(said)["saving=50"][0] != "failed"
        assert "16-bit hook: rank 1: KeyError" in said


@on_ranks(2)
def test_ranks_that_were_asked_for_different_things_say_so(rank, world):
    with pytest.raises(ValueError, match=r"ranks differ. Rank \d: .*saving=5[01].* Rank \d: .*saving=5[01]"):
        Bench(Work(params=3000), CPU, 50 + rank)
    with pytest.raises(ValueError, match=r"ranks differ. .* 50 steps of (DDP|all)\. .* 50 steps of (DDP|all)\."):
        Bench(Work(params=3000), CPU, 50, ["DDP"] * rank)


def times(**seconds: list[float]) -> dict[str, list[float]]:
    return {name.replace("_", "="): values for name, values in seconds.items()}


@pytest.mark.unit
def test_diloco_exchanges_in_one_step_of_h():
    seconds, sent = {"no exchange": [1.0], "DDP": [4.0], "saving=50": [0.5]}, {"DDP": 3_000_000, "saving=50": 60_000}
    often, seldom, ours = command.local_steps(seconds, sent, "saving=50", "MB")
    assert (often["ms a step"], often["of DDP's time"], often["MB"]) == ("1100", "0.28", "0.1")
    assert (seldom["ms a step"], seldom["MB"]) == ("1030", "0.03")
    assert (ours["ms a step"], ours["MB"]) == ("1000", "0.002"), "never faster than without an exchange"
    assert command.local_steps({"DDP": [4.0]}, sent, "saving=50", "MB") == []


@pytest.mark.unit
def test_the_line_decides_only_what_the_noise_allows():
    dense, noisy = [10.0, 10.2, 9.8] * 4, [10.0, 14.0, 7.0, 9.0] * 3
    fast = [0.6 * each for each in dense]
    assert decide(times(DDP=dense, saving_50=fast), "saving=50").startswith(
        "saving=50 takes 0.60 (0.60 to 0.60) of DDP"
    )
    assert decide(times(DDP=fast, saving_50=dense), "saving=50").startswith("DDP is fastest here: use it; saving=50")
    assert decide(times(DDP=dense, saving_50=noisy), "saving=50").startswith("No difference that this noise can show")
    told = decide(times(DDP=dense, hook=fast, saving_50=dense, saving_9=[3.0] * 12), "saving=50", ["saving=9"])
    assert told.startswith("hook is fastest here: use it; saving=50 takes 1.00")
    assert told.endswith("In runs of many thousand steps, saving=9 takes 0.50 (0.49 to 0.51) of hook's time.")
    told = decide(times(DDP=dense, hook=[0.59, 0.61] * 6, saving_50=[0.6] * 12), "saving=50")
    assert "of DDP's time a step; to hook no difference that this noise can show: 1.00" in told
    assert decide(times(saving_50=fast), "saving=50").startswith("Nothing to decide")
    noisy = times(DDP=[10.0, 10.2, 9.8], saving_50=[9.9, 10.1, 9.7])
    assert max(one / other for one, other in zip(noisy["saving=50"], noisy["DDP"], strict=True)) < 1
    assert decide(noisy, "saving=50").startswith("No difference"), "three turns of equals are in order by chance"
    assert decide(times(DDP=dense[:3], saving_50=fast[:3]), "saving=50").endswith("use TopKStrategy(saving=50).")
    assert ratio(times(a=[*map(float, range(1, 22))], b=[1.0] * 21), "a", "b") == (11.0, 6.0, 16.0)


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1"}
LAUNCHED["MASTER_ADDR"] = "localhost"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ("--params 1M", LAUNCHED, r"only rank.*torchrun --nnodes=2 .* lightning_topk bench --params 1M\. To try it"),
        ("--params 1M", {"RANK": "0"}, "but not WORLD_SIZE, .*, MASTER_PORT. With srun, set what torchrun"),
        ("--params 1M --ranks 2", {**LAUNCHED, "WORLD_SIZE": "2"}, "a launcher has: leave it out"),
        ("--params 1M --only DPP", {}, "'DPP' is unknown; it must be one of 'no exchange', 'DDP'"),
    ],
)
def test_invalid_benches_are_refused_before_anything_starts(monkeypatch, words, env, message):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "bench", *words.split(), main=main)


@pytest.mark.unit
@pytest.mark.parametrize("mine", ["cpu", "cuda"])
def test_ranks_with_and_without_a_gpu_are_refused_before_two_backends_wait_for_each_other(monkeypatch, mine):
    store = torch.distributed.HashStore()
    store.set("device of 1", "cuda" if mine == "cpu" else "cpu")
    for name, value in {**LAUNCHED, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(command, "_device", lambda: torch.device(mine))
    which = {"cpu": "rank 1 has a GPU, rank 0 has none", "cuda": "rank 0 has a GPU, rank 1 has none"}[mine]
    with pytest.raises(SystemExit, match=f"bench: ranks differ: {which}. Every node needs a GPU for each"):
        run(monkeypatch, "bench", "--params", "3000", main=main)


def bench(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the command without a launcher."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    clean |= {"PYTHONPATH": os.pathsep.join([str(Path(loop.__file__).parents[2]), *sys.path]), **env}
    command = [sys.executable, "-m", "lightning_topk", "bench", *words]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.process
def test_without_a_launcher_two_ranks_run_here_and_say_that_no_network_was_measured(monkeypatch, capfd, tmp_path):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    words = ["--params=3000", "--steps=3", "--only", "DDP", "saving=50", "--json"]
    run(monkeypatch, "bench", *words, str(tmp_path / "found.json"), main=main)
    said = capfd.readouterr().out
    assert [*cells(said)] == ["DDP", "saving=50"]
    assert "1 node of 2 ranks, gloo" in said
    assert "All ranks are on this machine: no network was measured." in said
    assert len(json.loads((tmp_path / "found.json").read_text())["hosts"]) == 2


@pytest.mark.unit
def test_a_rank_that_fails_here_is_named_after_its_own_message(monkeypatch):
    """The ranks get the command as it was typed, but for their number."""
    started = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: started.append(command) or mock.Mock(returncode=1))
    for ranks in (["--ranks", "3"], ["--ranks=3"]):
        with pytest.raises(SystemExit, match="bench: a rank failed; its message is above"):
            run(monkeypatch, "bench", "--params", "1M", *ranks, "--steps", "2", main=main)
        assert "--nproc-per-node=3" in started[-1]
        assert started[-1][-5:] == ["bench", "--params", "1M", "--steps", "2"]


DYING = """
import os, signal
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
"""


@pytest.mark.process
def test_a_rank_that_dies_ends_the_bench_with_a_message(tmp_path):
    """As on two machines, where no launcher stops the other rank."""
    (tmp_path / "dying.py").write_text(DYING)
    words = ("--module=dying.Net", "--input=8", "--only", "DDP")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env = {**LAUNCHED, "WORLD_SIZE": "2", "MASTER_PORT": str(probe.getsockname()[1]), "PYTHONPATH": path}
    with ThreadPoolExecutor() as both:
        left, died = both.map(lambda rank: bench(*words, **{**env, "RANK": rank}), "01")
    assert died.returncode == -signal.SIGKILL
    assert left.returncode == 1
    assert re.search("bench: rank 0 of 2 lost another rank, which has died or cannot be reached", left.stderr)
