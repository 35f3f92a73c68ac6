"""Ranks that die, hang, are slow, are configured differently, or send damaged bytes."""

import json
import os
import pickle
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from groups import Group, on_ranks, torchrun
from ranks import every_rank, four_layers, gradient, loss_of
from torch.nn.parallel import DistributedDataParallel

from lightning_topk import attach
from lightning_topk.ddp import TopKState
from lightning_topk.runtime import collectives as drive
from lightning_topk.runtime import groups as process_groups
from lightning_topk.runtime.groups import Groups

JOB = Path(__file__).with_name("job.py")


def test_groups_that_torch_has_destroyed_are_dropped_silently(tmp_path):
    for store in ("first", "second"):
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / store), 1), rank=0, world_size=1)
        if store == "first":
            groups = Groups.make(None, None)
        else:
            groups.destroy()
        dist.destroy_process_group()


def test_exchanges_use_the_timeout_of_the_users_own_group(tmp_path):
    user, some, own = timedelta(seconds=45), timedelta(seconds=44), timedelta(seconds=43)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=user)
    try:
        for group, given, expected in (
            (None, None, user),
            (dist.new_group([0], timeout=some), None, some),
            (None, own, own),
        ):
            state = TopKState(process_group=group, timeout=given)
            backend = state.groups.all._get_backend(torch.device("cpu"))
            state.close()
            assert backend.options._timeout == expected
    finally:
        dist.destroy_process_group()


def test_a_rank_that_failed_alone_does_not_wait_to_destroy_an_nccl_group(tmp_path, monkeypatch):
    """Its error would not surface before the others' collectives time out."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    groups, destroy, others, destroyed = Groups.make(None, None), dist.destroy_process_group, Event(), Event()

    def waits(group: dist.ProcessGroup) -> None:
        assert others.wait(60)
        destroy(group)
        destroyed.set()

    monkeypatch.setattr(process_groups, "PATIENCE", 0.1)
    monkeypatch.setattr(process_groups, "_only_gloo", lambda group: False)
    monkeypatch.setattr(dist, "destroy_process_group", waits)
    groups.destroy()
    assert not destroyed.is_set()
    others.set()
    assert destroyed.wait(60)
    destroy()


@on_ranks(2)
def test_a_slow_rank_is_waited_for(rank, world):
    ddp = DistributedDataParallel(four_layers())
    state = attach(ddp, ratio=0.1, timeout=timedelta(seconds=20))
    time.sleep(2 * rank)
    loss_of(ddp, rank, 0).backward()
    state.close()
    one, other = every_rank(gradient(ddp))
    assert torch.equal(one, other)
    assert one.any()


def struck(rank: int, world: int, blow: str) -> tuple[str, float, float]:
    """Fails rank 1 in the third step's exchange; returns the error message, seconds to it, and seconds to close."""
    ddp = DistributedDataParallel(four_layers(), bucket_cap_mb=0.001)
    state = attach(ddp, ratio=0.1, timeout=timedelta(seconds=4))
    perform, count = drive.perform, [0]

    def striking(request, *args):
        count[0] += 1
        if rank == 1 and count[0] > 8:
            if blow == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif blow == "hangs":
                time.sleep(9)
            elif blow == "raises":
                raise MemoryError("no memory left")
            elif count[0] == 9:
                request.payload.view(-1)[3] ^= 4
        return perform(request, *args)

    drive.perform = striking
    message = ""
    begin = time.monotonic()
    for step in range(4):
        begin = time.monotonic()
        try:
            loss_of(ddp, rank, step).backward()
        except RuntimeError as error:
            message = str(error)
            break
    took = time.monotonic() - begin
    begin = time.monotonic()
    state.close()
    return message, took, time.monotonic() - begin


@pytest.mark.gloo
@pytest.mark.parametrize("blow", ["killed", "hangs", "raises", "damages"])
def test_if_one_rank_fails_the_others_end_in_time_and_name_the_bucket(blow):
    group = Group(3)
    for pipe in group._pipes:
        pipe.send_bytes(pickle.dumps((struck, (blow,))))
    answers = {}
    for rank in (0, 1, 2) if blow == "raises" else (0, 2):
        assert group._pipes[rank].poll(60), f"rank {rank} hangs"
        answers[rank] = pickle.loads(group._pipes[rank].recv_bytes())
    group.close()
    for error, answer, _ in answers.values():
        assert error is None, error
        message, took, closing = answer
        assert re.search(r"sharded exchange of bucket \d+ \(\d+ elements\) failed on rank [012] of 3", message)
        assert "timeout of 0:00:04" in message
        assert took < 4 + 6
        assert closing < 3
    if blow == "damages":
        assert any("payload from rank 1 was damaged" in message for _, (message, *_), _ in answers.values())


@pytest.mark.trainer
def test_after_a_kill_torchrun_restarts_and_nothing_is_lost(tmp_path):
    options = {"strategy": {"ratio": 0.1}, "devices": 2, "max_epochs": 4, "limit_train_batches": 3}
    ends = []
    for victim in ("1", "-1"):
        arguments = str(tmp_path / victim), victim, "15", json.dumps(options)  # in the eighth step: two requests each
        said = torchrun(JOB, *arguments, logs=tmp_path / f"logs of {victim}", restarts=1)
        assert ('"first life": false' in said) == (victim == "1")
        ends.append(torch.load(tmp_path / victim / "epoch=3.ckpt", weights_only=True))
    # The killed run resumes with the mean of the residuals: its bits differ, but it ends as well trained.
    one, other = (torch.cat([weight.flatten() for weight in end["state_dict"].values()]) for end in ends)
    assert (one - other).norm() < 0.05 * other.norm()
    assert [end["lightning_topk"]["steps"] for end in ends] == [12, 12]
    pids = [int(path.name) for path in tmp_path.glob("*/pids/*")]
    assert len(pids) == 6
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "orphaned processes"


FABRIC = """
import os, sys, torch, lightning as L
from lightning_topk.lightning.fabric import TopKStrategy

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
