"""CPU lanes: a thread that exchanges, in order, beside the backward pass. GPU lanes are in test_stream_order."""

import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch

from lightning_topk.runtime import lanes


def lane_of(max_in_flight: int = 1) -> lanes.ThreadLane:
    return lanes.ThreadLane(mock.Mock(second_groups=None if max_in_flight == 1 else mock.Mock()))


def submit(lane, steps) -> torch.futures.Future:
    return lane.submit(mock.Mock(run=lambda *_: steps))


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

    def wait():
        yield
        return torch.tensor(float(go.wait(20)))

    future = submit(lane, wait())
    assert not lane.close()
    go.set()
    assert result_of(future) == 1


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_lane_of_a_cpu_computes_for_one_job_while_another_waits(max_in_flight):
    """A third job starts when the first has ended; results come in the order of submission."""
    lane, all_there, log = lane_of(max_in_flight), threading.Event(), []

    def job(name):
        all_there.wait(20)
        for step in range(3):
            log.append(f"{name}{step}")
            yield
        return torch.tensor(float(ord(name)))

    futures = [submit(lane, job(name)) for name in "abc"]
    all_there.set()
    assert [int(result_of(future)) for future in futures] == [97, 98, 99]
    assert lane.close()
    alone = "a0 a1 a2 b0 b1 b2 c0 c1 c2"
    assert log == (alone if max_in_flight == 1 else "a0 b0 a1 a2 c0 b1 b2 c1 c2").split()


def test_closing_a_failed_lane_reports_a_collective_in_progress():
    """The lane's groups must not be destroyed, since that would wait for the collective."""
    lane, both_there, collective = lane_of(2), threading.Event(), mock.Mock()
    collective.is_completed.return_value = False

    def job(fails):
        both_there.wait(20)
        yield collective
        if fails:
            raise ValueError("first")
        return torch.zeros(1)

    futures = [submit(lane, job(fails)) for fails in (True, False)]
    both_there.set()
    for future in futures:
        with pytest.raises(RuntimeError, match="ValueError: first"):
            result_of(future)
    assert not lane.close()
    collective.is_completed.return_value = True
    assert lane.close()


def test_a_lane_runs_no_job_after_a_failed_one():
    lane, ran = lane_of(), []

    def job(number):
        ran.append(number)
        yield
        raise ValueError("first")

    for number in (1, 2):
        with pytest.raises(RuntimeError, match="first"):
            result_of(submit(lane, job(number)))
    assert ran == [1]
    assert lane.close()


def test_an_idle_lane_has_no_thread(monkeypatch):
    monkeypatch.setattr(lanes, "IDLE", 0.05)
    lane = lane_of()

    def job():
        yield
        return torch.ones(1)

    for _ in range(2):  # the next job starts a thread again
        assert result_of(submit(lane, job()))
        for thread in threading.enumerate():
            if thread.name == lanes.NAME:
                thread.join(20)
        assert not any(thread.name == lanes.NAME for thread in threading.enumerate())


ENDS_WHILE_TORCH_CALLS_BACK = """
import time
from unittest import mock
import torch
from lightning_topk.runtime import lanes

def steps(groups, background):
    yield from ()
    return torch.zeros(1)

future = lanes.ThreadLane(mock.Mock(second_groups=None)).submit(mock.Mock(run=steps))
future.then(lambda future: [time.sleep(0.001) for _ in range(500)])
time.sleep(0.1)
"""


@pytest.mark.process
def test_a_process_exits_cleanly_while_the_lane_works():
    assert subprocess.run([sys.executable, "-c", ENDS_WHILE_TORCH_CALLS_BACK], timeout=120).returncode == 0
