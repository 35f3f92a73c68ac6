"""Ranks that die, hang, are slow or send damaged bytes, also on two nodes, as network namespaces, of two ranks each."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from groups import Group, on_ranks, torchrun
from ranks import attached, four_layers, loss_of, refusal

from lab import hosts
from lightning_topk.adapters.ddp import TopKState
from lightning_topk.config import TopKConfig
from lightning_topk.runtime import collectives as drive
from lightning_topk.runtime import groups as process_groups
from lightning_topk.runtime.groups import Groups
from lightning_topk.volume import volume

CPU = torch.device("cpu")
JOB = Path(__file__).with_name("job.py")


@pytest.fixture
def default_group(tmp_path):
    """Makes this process the only rank of a default group with these options; destroys it at the end."""

    def make(**options: Any) -> None:
        store = dist.FileStore(str(tmp_path / str(len(list(tmp_path.iterdir())))), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, **options)

    yield make
    dist.destroy_process_group()


def test_groups_that_torch_has_destroyed_are_dropped_silently(default_group):
    default_group()
    groups = Groups.make(None, CPU, None)
    dist.destroy_process_group()
    default_group()
    groups.destroy()
    assert groups.all not in dist.distributed_c10d._world.pg_map


def test_exchanges_use_the_timeout_of_the_users_own_group(default_group):
    user, some, own = (timedelta(seconds=seconds) for seconds in (45, 44, 43))
    default_group(timeout=user)
    for group, timeout, expected in (
        (None, None, user),
        (dist.new_group([0], timeout=some), None, some),
        (None, own, own),
    ):
        state = TopKState(TopKConfig(), CPU, process_group=group, timeout=timeout)
        backend = state.groups.all._get_backend(torch.device("cpu"))
        state.close()
        assert backend.options._timeout == expected


def test_a_rank_that_failed_alone_does_not_wait_to_destroy_an_nccl_group(default_group, monkeypatch):
    """Its error would not surface before the others' collectives time out."""
    default_group()
    groups, destroy, others, destroyed = Groups.make(None, CPU, None), dist.destroy_process_group, Event(), Event()

    def waits(group: dist.ProcessGroup) -> None:
        assert others.wait(60)
        destroy(group)
        destroyed.set()

    with monkeypatch.context() as patched:
        patched.setattr(process_groups, "PATIENCE", 0.1)
        patched.setattr(process_groups, "on_gpus", lambda group: True)
        patched.setattr(dist, "destroy_process_group", waits)
        groups.destroy()
        assert not destroyed.is_set()
        others.set()
        assert destroyed.wait(60)


@on_ranks(2)
def test_no_rank_continues_before_all_are_connected(rank, world):
    """Else it could close its groups while others still connect."""
    store, new_group, calls = dist.distributed_c10d._get_default_store(), dist.new_group, []

    def slow(*args, **kwargs):
        calls.append(new_group(*args, **kwargs))
        time.sleep(0.2 * rank)
        store.add("connected", 1)
        return calls[-1]

    with mock.patch.object(dist, "new_group", slow):
        attached(four_layers(), ratio=0.1)
    assert store.add("connected", 0) == world * len(calls)


def struck(rank: int, world: int, blow: str) -> tuple[str, float, float]:
    """Fails rank 1 in the third step's exchange; returns the error message, seconds to it, and seconds to close."""
    ddp, state = attached(four_layers(), {"bucket_cap_mb": 0.001}, ratio=0.1, timeout=timedelta(seconds=2))
    perform, count = drive.perform, [0]

    def striking(request, *args):
        count[0] += 1
        if rank == 1 and count[0] > 8:
            if blow == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif blow == "hangs":
                time.sleep(5)
            elif blow == "raises":
                raise MemoryError("no memory left")
            elif count[0] == 9:
                request.payload.view(-1)[3] ^= 4
        return perform(request, *args)

    drive.perform = striking
    message, step = "", 0
    while not message and step < 4:
        begin = time.monotonic()
        message, step = refusal(loss_of(ddp, rank, step).backward), step + 1
    took, begin = time.monotonic() - begin, time.monotonic()
    state.close()
    return message, took, time.monotonic() - begin


@pytest.mark.gloo
@pytest.mark.parametrize("blow", ["killed", "hangs", "raises", "damages"])
def test_if_one_rank_fails_the_others_end_in_time_and_name_the_bucket(blow):
    with closing(Group(3)) as group:
        answers = group.run(struck, blow, ranks=(0, 1, 2) if blow == "raises" else (0, 2))
    for message, took, seconds in answers:
        assert re.search(r"sharded exchange of bucket \d+ \(\d+ elements\) failed on rank [012] of 3", message)
        assert "timeout of 0:00:02" in message
        assert took < 10
        assert seconds < 3
    assert blow != "damages" or any("payload from rank 1 is damaged" in message for message, *_ in answers)


@pytest.mark.trainer
def test_after_a_kill_torchrun_restarts_and_nothing_is_lost(tmp_path):
    options = {"strategy": {"ratio": 0.1}, "devices": 2, "max_epochs": 4, "limit_train_batches": 3}
    ends = []
    for victim in ("1", "-1"):
        arguments = str(tmp_path / victim), victim, "15", json.dumps(options)  # in the eighth step: two requests each
        said = torchrun(JOB, *arguments, logs=tmp_path / f"logs of {victim}", restarts=1)
        assert ('"first life": false' in said) == (victim == "1")
        ends.append(torch.load(tmp_path / victim / "epoch=3.ckpt", weights_only=True))
    # The killed run resumes with the mean of the residuals: its bits differ, but it ends as well trained. The rate
    # falls tenfold in each epoch, so what waits from the epoch before weighs much.
    one, other = (torch.cat([weight.flatten() for weight in end["state_dict"].values()]) for end in ends)
    assert (one - other).norm() < 0.1 * other.norm()
    assert [end["lightning_topk"]["steps"] for end in ends] == [12, 12]
    pids = [int(path.name) for path in tmp_path.glob("*/pids/*")]
    assert len(pids) == 6
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "orphaned processes"


FABRIC = """
import os, sys, torch, lightning as L
from lightning_topk.adapters.lightning.fabric import TopKStrategy

if __name__ == "__main__":
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=TopKStrategy(ratio=0.1))
    fabric.launch()
    model, optimizer = fabric.setup(net := torch.nn.Linear(40, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    model(torch.ones(2, 40)).sum().backward()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and fabric.global_rank == 1:
        os._exit(3)
    optimizer.step()
    fabric.barrier()
    print("done", fabric.global_rank)
"""


@pytest.mark.trainer
def test_fabric_reconnects_after_torchrun_restarts_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FABRIC)
    said = torchrun(script, logs=tmp_path / "logs", restarts=1)
    assert said.count("done") == 2


on_hosts = pytest.mark.skipif(not hosts.available(), reason="emulated hosts need root and iproute2")
STRATEGY = {"ratio": 0.05, "topology": "hierarchical", "process_group_backend": "gloo"}
OPTIONS = {"strategy": STRATEGY, "devices": 2, "num_nodes": 2, "max_epochs": 3, "limit_train_batches": 4}
TORCHRUN = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --max-restarts=2 --rdzv-backend=c10d --rdzv-id=1"


def launched(group: hosts.Hosts, launcher: str, folder: Path) -> list[tuple[int, str, str]]:
    address, port = group.address.split(":")
    started, base = [], {"MASTER_ADDR": address, "MASTER_PORT": port}
    victim = "3" if launcher == "torchrun" else "-1"  # between nodes, in the sixth step: four requests per step
    job = [str(JOB), str(folder), victim, str(4 * 5 + 2), json.dumps(OPTIONS)]
    for node in range(2):
        if launcher == "torchrun":
            rendezvous = [f"--rdzv-endpoint={group.address}", f"--rdzv-conf=is_host={1 - node}"]
            options = [*TORCHRUN.split(), f"--local-addr=10.77.0.{node + 1}", *rendezvous]
            started.append(group.start(node, [sys.executable, *options, *job], {}))
        elif launcher == "lightning":
            started.append(group.start(node, [sys.executable, *job], {**base, "NODE_RANK": str(node)}))
        else:
            for local in range(2):
                task = {"NTASKS": 4, "NTASKS_PER_NODE": 2, "PROCID": 2 * node + local, "LOCALID": local, "NODEID": node}
                names = {"JOB_ID": 1, "JOB_NAME": "train", "NODELIST": "emulated"}
                slurm = {f"SLURM_{key}": str(value) for key, value in {**task, **names}.items()}
                started.append(group.start(node, [sys.executable, *job], {**base, **slurm}))
    try:
        outputs = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


@on_hosts
@pytest.mark.trainer
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_launcher_of_two_nodes_trains_alike_and_a_rank_may_die(tmp_path):
    ends, moved, said = {}, {}, {}
    try:
        with hosts.emulate(2, "1gbit", 2) as group:
            for launcher in ("slurm", "lightning", "torchrun"):
                found = launched(group, launcher, tmp_path / launcher)
                assert all(code == 0 for code, *_ in found), "\n".join(str(each) for each in found)
                end = torch.load(tmp_path / launcher / "epoch=2.ckpt", weights_only=True)
                kept, weights = end["lightning_topk"], end["state_dict"]
                assert kept["steps"] == 12
                ends[launcher] = torch.cat([weight.flatten() for weight in weights.values()])
                waiting = [kept["parameters"][name]["residual"].flatten() for name in weights]
                moved[launcher] = ends[launcher] - 1e-3 * torch.cat(waiting)  # at the last epoch's learning rate
                said[launcher] = found[0][1:]
    except RuntimeError as error:  # a container may be root without the right to make namespaces
        pytest.skip(f"no network namespaces here: {error}")
    assert torch.equal(ends["lightning"], ends["slurm"])
    # The run in which a rank dies resumes with the mean of the residuals, and delivers other entries first.
    assert (moved["torchrun"] - moved["slurm"]).norm() < 0.05 * moved["slurm"].norm()
    plan = volume(TopKConfig(ratio=0.05, topology="hierarchical"), [[2, 64]], 4, local=2, step=11)
    told = json.loads(said["slurm"][0].splitlines()[-1])
    assert told["inter_node_bytes"] == told["steps"] * plan.inter_node
    assert told["intra_node_bytes"] == told["steps"] * plan.intra_node
    assert re.search(r"hierarchical exchange of bucket \d+ .* failed on rank \d of 4", said["torchrun"][1])
    left = subprocess.run(["pgrep", "-f", str(JOB)], capture_output=True, text=True, check=False).stdout
    assert left == "", "orphaned processes"
