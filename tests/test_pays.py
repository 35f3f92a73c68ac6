"""``bench`` of the package: what it prints, on which rank, and what it does if a peer fails."""

import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from contenders import Broken, Faulty, never
from groups import on_ranks, torchrun
from test_bench import run

from lightning_topk.__main__ import main
from lightning_topk.bench import command, processes
from lightning_topk.bench.command import Work, report, rows
from lightning_topk.bench.verdict import decide, ratio
from lightning_topk.config import TopKConfig
from lightning_topk.models import GPTS, VOCABULARY
from lightning_topk.volume import volume

CPU = torch.device("cpu")
ROWS = ["no exchange", "DDP", "16-bit hook", "PowerSGD", "saving=50", "saving=150", "ratio=0.001"]
COMPUTED = ["DiLoCo, H=30 (computed)", "DiLoCo, H=100 (computed)", "DiLoCo, H=30, saving=50 (computed)"]


@contextmanager
def launched(rank: int) -> Iterator[None]:
    """A launcher's store, at which the contenders' processes meet; these processes need not import anything."""
    multiprocessing.set_forkserver_preload(["warm", "contenders", "torch._dynamo"])
    forkserver.ensure_running()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store and store.port]
    dist.broadcast_object_list(port)
    with mock.patch.dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT=str(port[0])):
        yield


def cells(shown: str) -> dict[str, list[str]]:
    """The cells of the table, by exchange."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    return {name: values for name, *values in lines[2:]}


@pytest.mark.parametrize("alone", [False, True], ids=["a module in bfloat16", "exchanges alone"])
@on_ranks(2, timeout=120)
def test_every_exchange_is_timed_and_one_line_decides(rank, world, alone, tmp_path):
    module = {"module": "contenders.Tiny", "input": (8,), "batch_size": 4, "precision": "bf16"}
    with launched(rank):
        said = report(Work(steps=3, **({"params": 300_000} if alone else module)), CPU, tmp_path / "found.json")
    if rank:
        assert said is None
        return
    found, kept = cells(said), json.loads((tmp_path / "found.json").read_text())
    assert kept["failed"] == {}
    assert [*found] == [*ROWS, *COMPUTED]
    assert [*kept["seconds"]] == ROWS
    assert said.splitlines()[-1] == kept["verdict"]
    assert kept["verdict"] == decide(kept["seconds"], "saving=50", ["saving=150", "ratio=0.001"])
    assert str(ratio(kept["seconds"], "saving=50", "DDP")) in kept["verdict"], "of DDP's time, with its interval"
    dense = volume(TopKConfig(topology="dense"), [300_000 if alone else 300 * (8 + 1 + 2 + 200) + 200], 2).sent
    assert [kept["bytes"][name] for name in ROWS[:3]] == [0, dense, dense / 2]
    assert "PowerSGD: rank " in said
    if alone:
        assert kept["bytes"]["saving=50"] == pytest.approx(dense / 50, rel=0.02)
    else:
        assert float(found["DDP"][-1]) > 0, "examples a second"
        assert found["saving=50"][-2].endswith("%")


@on_ranks(2, timeout=120)
def test_contenders_that_fail_on_one_rank_end_no_rank_and_are_named_and_the_others_are_timed(rank, world, tmp_path):
    with launched(rank):
        said = report(Faulty(params=3000, only=["DDP", "saving=50"], steps=3), CPU, tmp_path / "found.json")
    assert multiprocessing.active_children() == []
    if rank == 0:
        broken, end = "KeyError: 'this hook is broken\\nin a second line'", "its process ended with exit status"
        assert json.loads((tmp_path / "found.json").read_text())["failed"] == {
            "at set-up": f"rank 0: {broken}",
            "in its first step": f"rank 1: {broken}",
            "in its fifth step": f"rank 1: {broken}",
            "dies": f"rank 1: {end} -9",
            "hangs": f"rank 0: {end} 6",  # the other waits for ever
        }
        assert [*cells(said)] == ["DDP", "saving=50"]
        assert f"in its fifth step failed on rank 1: {broken}" in said


@on_ranks(2, timeout=120)
def test_if_every_exchange_fails_the_bench_does(rank, world):
    with (
        launched(rank),
        pytest.raises(RuntimeError, match="dies failed on rank 1: its process ended with exit status -9"),
    ):
        report(Broken(params=3000), CPU)


@on_ranks(2, timeout=120)
def test_no_rank_waits_for_ever_for_a_contender(rank, world):
    """Rank 1 has waited long enough, and rank 0 waits no longer either."""
    with launched(rank), processes.Runners(never, CPU, 0) as runners:
        limit = 1.0 if rank == 1 else processes.LIMIT
        with mock.patch.object(processes, "LIMIT", limit), pytest.raises(processes.ContenderError) as error:
            runners.ask("x", bool)
    assert str(error.value) == "x failed on rank 1: no answer in 1 s"


@on_ranks(2)
def test_ranks_that_were_asked_for_different_things_say_so(rank, world):
    with pytest.raises(ValueError, match=r"ranks differ: the work .*saving=50.* rank 0 and .*saving=51.* rank 1"):
        report(Work(params=3000, saving=50 + rank), CPU)


@pytest.mark.unit
def test_a_gpt_is_timed_by_its_name_on_tokens(monkeypatch):
    monkeypatch.setitem(GPTS, "gpt2", (2, 16, 2))
    net, backward = Work(model="gpt2", input=(8,), batch_size=3).training(0, CPU)
    backward(net)
    assert all(p.grad is not None for p in net.parameters())
    tokens = torch.randint(VOCABULARY, (2, 8))
    seen = net(tokens)
    tokens[:, 5] = (tokens[:, 5] + 1) % VOCABULARY
    changed = (net(tokens) != seen).any(dim=2).all(dim=0)
    assert changed.tolist() == [False] * 5 + [True] * 3, "no token sees a later one"
    for name, value in {**LAUNCHED, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "dist", mock.Mock())
    monkeypatch.setattr(command, "report", lambda work, *_: (work.input, work.batch_size))
    asked = ({"model": "gpt2"}, {"model": "gpt2", "batch_size": 9}, {"model": "resnet18"})
    assert [command.run(**each) for each in asked] == [((1024,), 4), ((1024,), 9), ((3, 224, 224), 32)]


@pytest.mark.unit
def test_diloco_exchanges_in_one_step_of_h():
    seconds, sent = {"no exchange": [1.0], "DDP": [4.0], "saving=50": [0.5]}, {"DDP": 3_000_000, "saving=50": 60_000}
    sent["no exchange"], work = 0, Work(params=1)
    *_, often, seldom, ours = rows(work, seconds, sent, {}, "MB")
    assert (often["ms a step"], often["of DDP's time"], often["MB"]) == ("1100", "0.28", "0.1")
    assert (seldom["ms a step"], seldom["MB"]) == ("1030", "0.03")
    assert (ours["ms a step"], ours["MB"]) == ("1000", "0.002"), "never faster than without an exchange"
    assert [row["exchange"] for row in rows(work, {"DDP": [4.0]}, sent, {}, "MB")] == ["DDP"]


@pytest.mark.unit
def test_the_line_decides_only_what_the_noise_allows():
    dense, fast, noisy = [10.0, 10.2, 9.8] * 4, [6.0, 6.12, 5.88] * 4, [10.0, 14.0, 7.0, 9.0] * 3
    three, chance = [9.9, 10.1, 9.7], "No significant difference"  # three turns of equals are in order by chance
    wins, against = "saving=50 takes 0.60", {"DDP": dense, "hook": [5.9, 6.1] * 6}
    for others, ours, begin in (
        ({"DDP": dense}, fast, f"{wins} (0.60 to 0.60) of DDP's time a step: use TopKStrategy(saving=50)"),
        ({"DDP": fast}, dense, "DDP is fastest here: use it; saving=50"),
        ({"DDP": dense}, noisy, chance),
        ({"DDP": dense[:3]}, three, chance),
        ({"DDP": dense[:3]}, fast[:3], wins),
        (against, [6.0] * 12, f"{wins} (0.59 to 0.61) of DDP's time a step;"),
        ({}, fast, "Nothing to compare"),
    ):
        assert decide({**others, "saving=50": ours}, "saving=50").startswith(begin)
    times = {"DDP": dense, "hook": fast, "saving=50": dense, "saving=9": [3.0] * 12}
    told = decide(times, "saving=50", ["saving=9"])
    assert told.startswith("hook is fastest here: use it; saving=50 takes 1.00")
    assert told.endswith("In runs of many thousand steps, saving=9 takes 0.50 (0.49 to 0.51) of hook's time.")
    assert ratio({"a": [*map(float, range(1, 22))], "b": [1.0] * 21}, "a", "b") == (11.0, 6.0, 16.0)


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1"}
LAUNCHED["MASTER_ADDR"] = "localhost"


@pytest.fixture
def bench(monkeypatch):
    """Runs the command with these variables of a launcher; returns its message if it refuses."""

    def refused(words: str, **env: str) -> str:
        for name in LAUNCHED:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as error:
            run(monkeypatch, "bench", *words.split(), main=main)
        return str(error.value)

    return refused


@pytest.mark.unit
def test_invalid_benches_are_refused_before_anything_starts(bench):
    assert "so there is nothing to exchange. Run this on each of two machines" in bench("--params 1M", **LAUNCHED)
    assert "not WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT." in bench("--params 1M", RANK="0")
    assert "WORLD_SIZE='abc' must be an integer" in bench("--params 1M", **{**LAUNCHED, "WORLD_SIZE": "abc"})
    assert "LOCAL_RANK='x' must be an integer" in bench("--params 1M", **{**LAUNCHED, "LOCAL_RANK": "x"})
    assert "'DPP' is unknown; it must be one of 'no exchange', 'DDP'" in bench("--params 1M --only DPP")
    assert "exchanges nothing: use 2 or more" in bench("--params 1M --ranks 1")


@on_ranks(2)
def test_ranks_with_and_without_a_gpu_are_refused_before_two_backends_wait(rank, world):
    device = torch.device("cuda" if rank else "cpu")
    with pytest.raises(ValueError, match=r"the device is cpu on rank 0 and cuda on rank 1.*needs a GPU for each"):
        report(Work(params=3000), device)


@on_ranks(2, timeout=120)
def test_a_model_that_does_not_take_its_input_ends_the_bench_at_its_first_step(rank, world):
    with launched(rank), pytest.raises(RuntimeError, match=r"mat1 and mat2 .*--input") as error:
        report(Work(module="contenders.Tiny", input=(3,), steps=3), CPU)
    assert str(error.value).count("mat1 and mat2") == 1, "no exchange was tried"


@pytest.mark.unit
def test_without_a_launcher_torchrun_starts_the_same_command_here(monkeypatch, bench):
    monkeypatch.setattr(command, "ChildFailedError", KeyError)
    monkeypatch.setattr(command.torchrun, "run", started := mock.Mock(side_effect=KeyError))
    assert "bench: a rank failed; its message is above" in bench("--params 1M --ranks 3")
    (launch,) = started.call_args.args
    assert (launch.module, launch.training_script, launch.nproc_per_node) == (True, "lightning_topk", "3")
    assert launch.training_script_args == ["bench", "--params", "1M", "--ranks", "3"]


@pytest.mark.process
def test_ranks_of_one_machine_say_that_no_network_was_measured(tmp_path):
    job = "from lightning_topk.__main__ import main\nif __name__ == '__main__':\n    main()\n"
    (tmp_path / "job.py").write_text(job)
    words = ["bench", "--params=3000", "--steps=3", "--ranks=2", "--only", "DDP", "saving=50"]
    said = torchrun(tmp_path / "job.py", *words, logs=tmp_path / "logs")
    assert [*cells(said)] == ["DDP", "saving=50"]
    assert "1 node of 2 ranks, gloo" in said
    assert "All ranks are on this machine: no network was measured." in said
