"""What the code for GPUs does, on machines without one: devices, streams and events are stand-ins."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_topk.core.endpoint import TakenBack
from lightning_topk.core.select import RandK
from lightning_topk.runtime import groups, lanes
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.residuals import Residuals, Sent
from lightning_topk.runtime.skipped_steps import StepOutcome


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, and takes note of the streams that use it."""

    is_cuda = True
    streams: list[str]

    @staticmethod
    def __new__(cls, value: bool):
        made = torch.tensor(value).as_subclass(cls)
        made.streams = []
        return made

    def record_stream(self, stream):
        self.streams.append(stream)


def test_a_verdict_of_the_scaler_is_kept_until_the_lane_has_read_it():
    verdict, parameter, residuals, outcome = OnGpu(True), nn.Parameter(torch.zeros(4)), Residuals(), StepOutcome(True)
    residuals.restore({parameter: {"residual": torch.zeros(4)}})
    outcome.skipped[parameter] = verdict
    residuals.remember(Sent((parameter,), [4], lambda: TakenBack(torch.ones(4), torch.tensor(True)), outcome))
    with mock.patch("torch.cuda.current_stream", return_value="the lane's"):
        residuals.settle()
    assert verdict.streams == ["the lane's"]
    assert residuals.held()[parameter][0].tolist() == [1.0] * 4


def result_of(future: torch.futures.Future) -> torch.Tensor:
    """What a lane promised; to wait has no time limit of its own."""
    end = time.monotonic() + 20
    while not future.done():
        assert time.monotonic() < end, "the lane hangs"
        time.sleep(0.001)
    return future.wait()


class Event:
    """An event of a stream that ends, or never does."""

    def __init__(self, ends: bool) -> None:
        self._ends = ends

    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self._ends


def lane_of_a_gpu() -> lanes.StreamLane:
    with mock.patch("torch.cuda.Stream"):
        return lanes.StreamLane(torch.device("cuda", 0))


@pytest.mark.parametrize("ends", [True, False])
def test_a_lane_of_a_gpu_says_whether_its_work_has_ended(monkeypatch, ends):
    """Groups with work in flight are not destroyed: that would wait for ranks that have failed."""
    monkeypatch.setattr(lanes, "PATIENCE", 0.1)
    made: list[Event] = []
    monkeypatch.setattr("torch.cuda.Event", lambda: made.append(Event(ends)) or made[-1])
    lane = lane_of_a_gpu()
    assert lane.close() is ends
    assert [event.stream for event in made] == [lane._stream], "what a failed job has queued counts too"


def test_a_lane_of_a_gpu_that_failed_leaves_the_first_error_to_be_seen(monkeypatch):
    failed = mock.Mock(query=mock.Mock(side_effect=RuntimeError("device-side assert triggered")))
    monkeypatch.setattr("torch.cuda.Event", lambda: failed)
    assert not lane_of_a_gpu().close()


def test_a_lane_of_a_gpu_takes_no_job_after_one_that_failed(monkeypatch):
    """Other ranks wait in the exchange that failed: the next one would answer it."""
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    ran: list[str] = []

    def job(name: str, error: Exception | None = None):
        ran.append(name)
        if error is not None:
            raise error
        return []
        yield

    lane = lane_of_a_gpu()
    promised = mock.Mock()
    lane.submit(job("first"), promised)
    with pytest.raises(MemoryError):
        lane.submit(job("second", MemoryError()), promised)
    for go in (lambda: lane.submit(job("third"), promised), lambda: lane.run(job("fourth"))):
        with pytest.raises(MemoryError):
            go()
    assert ran == ["first", "second"]


def test_times_of_two_streams_are_read_once_both_marks_have_come():
    begun, ended = mock.Mock(elapsed_time=mock.Mock(return_value=1000.0)), mock.Mock()
    assert lanes.StreamLane.seconds(mock.Mock(), begun, ended) == 1.0
    begun.synchronize.assert_called_once()
    ended.synchronize.assert_called_once()


def test_a_lane_of_a_cpu_says_whether_its_work_has_ended(monkeypatch):
    monkeypatch.setattr(lanes, "PATIENCE", 0.1)
    lane, go = lanes.ThreadLane(), threading.Event()
    promised, future = lane.promise()

    def wait():
        yield
        return torch.tensor(float(go.wait(20)))

    lane.submit(wait(), promised)
    assert not lane.close()
    go.set()
    assert result_of(future) == 1


@pytest.mark.parametrize("abreast", [1, 2])
def test_a_lane_of_a_cpu_computes_for_one_job_while_another_waits(abreast):
    """A third job begins when the first has ended; results come in the order of submission."""
    lane, all_there, log = lanes.ThreadLane(abreast), threading.Event(), []

    def job(name):
        all_there.wait(20)
        for step in range(3):
            log.append(f"{name}{step}")
            yield
        return torch.tensor(float(ord(name)))

    futures = []
    for name in "abc":
        promised, future = lane.promise()
        lane.submit(job(name), promised)
        futures.append(future)
    all_there.set()
    assert [int(result_of(future)) for future in futures] == [97, 98, 99]
    assert lane.close()
    alone = "a0 a1 a2 b0 b1 b2 c0 c1 c2"
    assert log == (alone if abreast == 1 else "a0 b0 a1 a2 c0 b1 b2 c1 c2").split()


def test_a_lane_that_failed_with_a_collective_in_progress_says_so():
    """Its groups are not destroyed: that would wait for the collective."""
    lane, both_there, collective = lanes.ThreadLane(abreast=2), threading.Event(), mock.Mock()
    collective.is_completed.return_value = False

    def job(fails):
        both_there.wait(20)
        yield collective
        if fails:
            raise ValueError("first")
        return torch.zeros(1)

    promises = [lane.promise() for _ in range(2)]
    for (promised, _), fails in zip(promises, (True, False), strict=True):
        lane.submit(job(fails), promised)
    both_there.set()
    for _, future in promises:
        with pytest.raises(RuntimeError, match="ValueError: first"):
            result_of(future)
    assert not lane.close()
    collective.is_completed.return_value = True
    assert lane.close()


def test_a_lane_runs_no_job_after_one_that_failed_and_an_idle_one_has_no_thread(monkeypatch):
    monkeypatch.setattr(lanes, "IDLE", 0.05)
    lane, ran = lanes.ThreadLane(), []

    def job(number):
        ran.append(number)
        yield
        if number == 3:
            raise ValueError("first")
        return torch.tensor(number)

    for number in range(6):
        promised, future = lane.promise()
        lane.submit(job(number), promised)
        if number < 3:
            assert result_of(future) == number
            end = time.monotonic() + 20
            while lane._thread is not None and time.monotonic() < end:
                time.sleep(0.01)
            assert lane._thread is None, "it works again when a job comes"
        else:
            with pytest.raises(RuntimeError, match="first"):
                result_of(future)
    assert ran == [0, 1, 2, 3]
    assert lane.close()


ENDS_WHILE_TORCH_CALLS_BACK = """
import time
import torch
from lightning_topk.runtime.lanes import ThreadLane

def job():
    yield from ()
    return torch.zeros(1)

lane = ThreadLane()
promised, _ = lane.promise()
promised.then(lambda future: [time.sleep(0.001) for _ in range(500)])
lane.submit(job(), promised)
time.sleep(0.1)
"""


@pytest.mark.process
def test_a_process_ends_well_while_the_lane_is_at_work():
    ended = subprocess.run([sys.executable, "-c", ENDS_WHILE_TORCH_CALLS_BACK], timeout=120)
    assert ended.returncode == 0


def test_a_lane_of_a_gpu_comes_before_the_kernels_of_backward():
    with mock.patch("torch.cuda.Stream") as stream:
        lanes.StreamLane(torch.device("cuda", 1))
    assert stream.call_args == mock.call(torch.device("cuda", 1), priority=-1)


class OnCpu(TorchDispatchMode):
    """Counts the elements of all tensors that are made on the CPU."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.elements += made.untyped_storage().nbytes()
        return made


def test_a_new_endpoint_copies_no_zeros_from_the_cpu():
    bucket = tuple(torch.empty(size, device="meta") for size in (1000, 50))
    with OnCpu() as made:
        found = Residuals()._gather({}, bucket, "residual", torch.empty(1050, device="meta"))
    assert found.device.type == "meta"
    assert len(found) == 1050
    assert made.elements == 0


def test_random_positions_are_drawn_on_the_device():
    with OnCpu() as made:
        found = RandK().pick(torch.empty(4, 1000, device="meta"), 10)
    assert found.device.type == "meta"
    assert found.shape == (4, 10)
    assert made.elements == 0


def test_objects_are_sent_by_way_of_the_models_device(monkeypatch):
    """On every rank the current device is the first GPU, unless the user has set it."""
    with mock.patch("torch.cuda.device") as device:
        groups.device_of(mock.Mock(parameters=lambda: iter([mock.Mock(device=torch.device("cuda", 1))])))
        assert device.call_args == mock.call(torch.device("cuda", 1))
        device.reset_mock()
        with groups.device_of(nn.Linear(2, 2)):
            pass
        assert not device.called


def test_a_group_of_some_ranks_is_not_split_off_the_communicator_of_all(monkeypatch):
    """NCCL splits a bound group's communicator with all its ranks, and those that do not train the model never come."""
    split = mock.Mock(side_effect=AssertionError("a split"))
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", split)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        some = dist.new_group([0, 1], use_local_synchronization=True)
        bound = dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        groups = Groups.make(some, None).divided(some, None, local=1, hierarchy=True)
        made = [groups.all, groups.node, groups.peers]
        assert [dist.get_process_group_ranks(each) for each in made] == [[0, 1], [0], [0, 1]]
        assert [each.bound_device_id for each in made] == [bound] * 3
        assert dist.group.WORLD.bound_device_id == bound
    finally:
        dist.destroy_process_group()
    assert not split.called
