"""CPU lanes: threads that exchange, in order, beside the backward pass. GPU lanes are in test_stream_order."""

import subprocess
import sys
import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch

from lightning_topk.runtime import lanes


def lane_of(threads: int = 1) -> lanes.ThreadLane:
    return lanes.ThreadLane(mock.Mock(second_groups=None if threads == 1 else mock.Mock()))


def submit(lane, run) -> torch.futures.Future:
    return lane.submit(mock.Mock(run=lambda groups, wait: run(wait)))


class Collective:
    """A collective that ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.ended.wait(20)


def result_of(future: torch.futures.Future) -> torch.Tensor:
    """The result that a lane promised; a future's own wait has no timeout."""
    end = time.monotonic() + 20
    while not future.done():
        assert time.monotonic() < end, "the lane hangs"
        time.sleep(0.001)
    return future.wait()


def test_closing_a_cpu_lane_returns_whether_its_work_has_ended(monkeypatch):
    monkeypatch.setattr(lanes, "PATIENCE", 0.1)
    lane, go = lane_of(), threading.Event()
    future = submit(lane, lambda wait: torch.tensor(float(go.wait(20))))
    assert not lane.close()
    go.set()
    assert result_of(future) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_lane_of_a_cpu_computes_for_one_job_while_another_waits(threads):
    """A third job starts when the first has ended."""
    lane, log, collectives = lane_of(threads), [], [Collective() for _ in "abc"]

    def run(name, collective, wait):
        log.append(f"{name} begins")
        wait(collective)
        log.append(f"{name} ends")
        return torch.tensor(float(ord(name)))

    futures = [submit(lane, partial(run, *each)) for each in zip("abc", collectives, strict=True)]
    for waiting in collectives[:threads]:
        assert waiting.begun.wait(20)
    assert len(log) == threads  # nobody computes for the next
    for collective, future in zip(collectives, futures, strict=True):
        collective.ended.set()
        result_of(future)
    assert [int(future.wait()) for future in futures] == [97, 98, 99]
    assert lane.close()
    assert log.index("a ends") < log.index("c begins")
    assert threads == 2 or log.index("a ends") < log.index("b begins")


def test_one_job_computes_at_a_time():
    lane, computing = lane_of(2), threading.Lock()

    def run(wait):
        for _ in range(20):
            assert computing.acquire(blocking=False)
            time.sleep(0.0005)
            computing.release()
            wait(mock.Mock())
        return torch.ones(1)

    assert all(result_of(future) for future in [submit(lane, run) for _ in range(4)])
    assert lane.close()


def test_closing_a_failed_lane_reports_a_collective_in_progress(monkeypatch):
    """The lane's groups must not be destroyed, since that would wait for the collective. Its job fails at once."""
    monkeypatch.setattr(lanes, "PATIENCE", 0.1)
    lane, collective, undone = lane_of(2), Collective(), []

    def waits(wait):
        try:
            wait(collective)
        finally:
            undone.append(True)

    def fails(wait):
        collective.begun.wait(20)
        raise ValueError("first")

    futures = [submit(lane, run) for run in (waits, fails)]
    for future in futures:
        with pytest.raises(RuntimeError, match="ValueError: first"):
            result_of(future)
    assert not lane.close()
    collective.ended.set()
    assert lane.close()
    assert undone, "the job must not go on"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_lane_runs_no_job_after_a_failed_one(threads):
    lane, ran = lane_of(threads), []

    def run(number, wait):
        ran.append(number)
        raise ValueError("first")

    for number in (1, 2, 3):
        with pytest.raises(RuntimeError, match="first"):
            result_of(submit(lane, partial(run, number)))
    assert ran == [1]
    assert lane.close()


def test_an_idle_lane_has_no_thread(monkeypatch):
    monkeypatch.setattr(lanes, "IDLE", 0.05)
    lane = lane_of(2)
    for _ in range(2):  # the next job starts a thread again
        assert all(result_of(future) for future in [submit(lane, lambda wait: torch.ones(1)) for _ in range(3)])
        for thread in threading.enumerate():
            if thread.name == lanes.NAME:
                thread.join(20)
        assert not any(thread.name == lanes.NAME for thread in threading.enumerate())


ENDS_WHILE_TORCH_CALLS_BACK = """
import time
from unittest import mock
import torch
from lightning_topk.runtime import lanes

job = mock.Mock(run=lambda groups, wait: torch.zeros(1))
future = lanes.ThreadLane(mock.Mock(second_groups=None)).submit(job)
future.then(lambda future: [time.sleep(0.001) for _ in range(500)])
time.sleep(0.1)
"""


@pytest.mark.process
def test_a_process_exits_cleanly_while_the_lane_works():
    assert subprocess.run([sys.executable, "-c", ENDS_WHILE_TORCH_CALLS_BACK], timeout=120).returncode == 0
