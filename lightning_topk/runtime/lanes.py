"""Lanes run exchanges in order, concurrently with backward.

Collectives issued from callbacks of several buckets interleave differently on different ranks, and then deadlock or
pair up wrongly (pytorch #48478). So whole exchanges run in order on a *lane* with its own process groups: on CUDA a
side stream, on CPU a thread. The thread may have two exchanges in progress, which alternate between two sets of groups:
it computes for one while the bytes of the other are in transit. Exchanges end in the order in which they begin, so
within each set collectives have the same order on all ranks, whatever the timing. The thread only waits for the older
exchange, which therefore always makes progress.

This needs collectives that start without waiting for other ranks, since the order in which a rank starts collectives of
different sets depends on its timing. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares each collective across all
ranks before starting it, so there is only one set and one exchange at a time.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topk.runtime.collectives import drive, finish
from lightning_topk.runtime.groups import PATIENCE, Groups
from lightning_topk.runtime.jobs import Duration, Job

Future = torch.futures.Future[Tensor]


class Lane(ABC):
    """Runs jobs in the order of submission, concurrently with the caller.

    Attributes:
        max_in_flight: Maximum number of jobs in progress at the same time.
        stream: Stream of the jobs on CUDA; None on CPU.
        error: The first error of any job.
        groups: The process groups of the jobs, in turn.
        durations: Takes the durations of timed jobs.
    """

    max_in_flight: int
    groups: Iterator[Groups]
    durations: deque[Duration]
    stream: torch.cuda.Stream | None = None
    error: Exception | None = None
    _ended: Any = None  # end of the last timed exchange, as a mark

    @abstractmethod
    def submit(self, job: Job) -> Future:
        """Queues a job; returns a future of its result, or of the first error of any job."""

    @abstractmethod
    def mark(self) -> Any:
        """Marks a point in the caller's work: the host's clock, or an event in the current stream."""

    @abstractmethod
    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks. Waits for the device."""

    def note_time(self, begun: Any, ready: Any | None) -> None:
        """Records the duration of an exchange that ends now, see :class:`.Job`."""
        ended = self.mark()
        if self.max_in_flight > 1 and self._ended is not None:
            begun = max(begun, self._ended)  # time that two exchanges share counts once
        self._ended = ended
        exposed = ready is not None
        self.durations.append(
            lambda: (self.seconds(begun, ended), max(0.0, self.seconds(ready, ended)) if exposed else 0.0)
        )

    def close(self) -> bool:
        """Ends the lane; returns whether all jobs ended within ``PATIENCE`` seconds, with no collective in progress."""
        self.groups = iter(())  # reports refer to the lane, and the threads of a group run while it is referenced
        return self._ends()

    @abstractmethod
    def _ends(self) -> bool:
        """See :meth:`close`."""


IDLE = 0.5
"""Seconds after which an idle thread ends; the next job starts another one."""


class ThreadLane(Lane):
    """A lane for CPU tensors: one daemon thread, so that a rank stuck in a collective can still exit.

    The thread ends when it is idle: nobody need close a lane, and Lightning's tests fail if a thread is left.
    """

    def __init__(self, max_in_flight: int = 1) -> None:
        self.max_in_flight = max_in_flight
        self._jobs: queue.SimpleQueue[Iterator[bool] | None] = queue.SimpleQueue()
        self._abandoned: list[dist.Work] = []  # collectives of jobs in progress when another one failed
        self._lock = threading.Lock()  # held while a thread starts, or ends because it is idle
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        """Begins the next job if one is queued and may start; otherwise advances the oldest one by a step."""
        in_progress: deque[Iterator[bool]] = deque()
        waits = True  # for the next job
        while True:
            if len(in_progress) < self.max_in_flight:
                try:
                    job = self._jobs.get(block=waits and not in_progress, timeout=IDLE)
                except queue.Empty:
                    if not in_progress and self._retires():
                        return
                else:
                    if job is None:
                        waits = False
                    elif next(job, False):
                        in_progress.append(job)
                    continue
            if in_progress and not next(in_progress[0], False):
                in_progress.popleft()

    def _retires(self) -> bool:
        """Ends the thread if no job is queued; returns whether it does."""
        with self._lock:
            if self._jobs.empty():
                self._thread = None
                return True
        return False

    def _fulfil(self, job: Job, promised: Future) -> Iterator[bool]:
        """Runs a job, yields True whenever it waits, and completes its future."""
        collective, steps = None, drive(job, background=self.max_in_flight > 1)
        try:
            while True:
                if self.error is not None:
                    # Another rank may be waiting in the exchange that failed here: the next job would answer it.
                    if collective is not None:
                        self._abandoned.append(collective)
                    raise self.error
                collective = next(steps)
                yield True
        except StopIteration as end:
            promised.set_result(end.value)
        except Exception as error:
            self.error = error
            promised.set_exception(error)  # type: ignore[arg-type]  # torch annotates the result's type

    @override
    def submit(self, job: Job) -> Future:
        done: Future = torch.futures.Future()
        with self._lock:
            self._jobs.put(self._fulfil(job, done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lightning_topk-lane", daemon=True)
                self._thread.stop = self._ends  # type: ignore[attr-defined]  # Lightning's tests call it
                self._thread.start()
                _THREADED.add(self)
        # DDP waits in C++, where an exception set from Python would arrive as an odd value. A callback that raises it
        # turns it into an error of the future that DDP sees.
        return done.then(lambda future: future.value())

    @override
    def mark(self) -> float:
        return time.perf_counter()

    @override
    def seconds(self, start: float, end: float) -> float:
        return end - start

    @override
    def _ends(self) -> bool:
        _THREADED.discard(self)
        thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout=PATIENCE)
        return (thread is None or not thread.is_alive()) and all(work.is_completed() for work in self._abandoned)


_THREADED = weakref.WeakSet[ThreadLane]()
"""Lanes that were not closed."""


@atexit.register
def _end_threads() -> None:
    """Waits for jobs in progress: Python ends daemon threads at exit, and one inside torch aborts the process."""
    for lane in list(_THREADED):
        lane.close()


class StreamLane(Lane):
    """A lane for CUDA tensors: a side stream. Jobs are enqueued immediately; the host never waits.

    The exchange has its own NCCL communicators: sharing one with the other collectives of backward, such as
    SyncBatchNorm's, would make them wait for the exchange of the previous bucket. An NCCL kernel occupies the GPU until
    the other ranks have joined it. If the GPU cannot run kernels of two communicators at once, they must start in the
    same order on all ranks:

    - Autograd's single thread issues all of them, in the same order on all ranks that run the same graph.
    - In :meth:`submit` the side stream waits for backward's stream, and so for all earlier collectives.
    - An exchange and the later collectives of backward have no order: they run at the same time, each in some channels.
      With NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26) NCCL starts all kernels in the host's order;
      :meth:`.TopKState.check_launch_order` says so to users of SyncBatchNorm.
    - With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share a queue, in the host's order too, but a kernel that waits
      holds up all that come after it: nothing hides the exchange.
    """

    max_in_flight = 1
    stream: torch.cuda.Stream

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Before backward's kernels: other ranks wait for its bytes.
        self.stream = torch.cuda.Stream(device, priority=-1)

    @override
    def submit(self, job: Job) -> Future:
        """Enqueues a job; its future records the side stream, so that waiting for it happens on the GPU."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        done: Future = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self.stream):
            if self.error is not None:
                raise self.error  # another rank may be waiting in the exchange that failed here
            try:
                done.set_result(finish(drive(job)))
            except Exception as error:
                self.error = error
                raise
        return done

    @override
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        for mark in (start, end):  # the streams may differ, and neither waits for the other
            mark.synchronize()
        return float(start.elapsed_time(end)) / 1000

    @override
    def _ends(self) -> bool:
        # A collective that another rank never joins does not end. The groups must then be left alone, since destroying
        # them would wait for it and hide the error that ended the run.
        end = time.monotonic() + PATIENCE
        try:
            ended = torch.cuda.Event()
            ended.record(self.stream)  # now, since a job that failed may have queued a collective
            while not ended.query():
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
        except RuntimeError:  # from the device, after an earlier error that must stay visible
            return False
        return True


def lane_for(device: torch.device, groups: Groups, durations: deque[Duration]) -> Lane:
    """Creates the lane for gradients on a device."""
    if device.type not in ("cpu", "cuda"):
        raise TypeError(f"gradients are on {device}; the exchange supports CPU and CUDA tensors only.")
    several = [groups] if device.type == "cuda" or groups.second_groups is None else [groups, groups.second_groups]
    lane: Lane = StreamLane(device) if device.type == "cuda" else ThreadLane(len(several))
    lane.groups, lane.durations = cycle(several), durations
    return lane
