"""Lanes run exchanges in order, concurrently with backward.

Collectives issued from callbacks of several buckets interleave differently on different ranks, and then deadlock or
pair up wrongly (pytorch #48478). So whole exchanges run in order on a *lane* with its own process groups: on CUDA a
side stream, on CPU two threads. Each thread has groups of its own, and exchanges take turns between them: one computes
while the bytes of the other are in transit. So within a set of groups collectives have the same order on all ranks,
whatever the timing.

This needs collectives that start without waiting for other ranks, since the order in which a rank starts those of
different sets depends on its timing. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares each collective across all
ranks before starting it, so there is only one set and one thread.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.runtime.groups import PATIENCE, Groups
from lightning_topk.runtime.jobs import Job

Future = torch.futures.Future[Tensor]

NAME = "lightning_topk-lane"
IDLE = 0.5
"""Seconds after which an idle thread ends; the next job starts another one."""


class ThreadLane:
    """A lane for CPU tensors: a thread for each set of groups. One computes at a time; the other may wait for bytes."""

    stream = None

    def __init__(self, groups: Groups) -> None:
        self.error: Exception | None = None  # the first of any job
        self._computing = threading.Lock()  # held by a thread except while it waits
        self._lock = threading.Lock()  # of the error and the promised futures
        self._promised: dict[Job, Future] = {}
        sets = [groups] if groups.second_groups is None else [groups, groups.second_groups]
        self._threads = deque(_Thread(self, each) for each in sets)  # in the order of their turns

    def submit(self, job: Job) -> Future:
        """Queues a job; returns a future of its result, or of the first error of any job."""
        done: Future = torch.futures.Future()
        with self._lock:
            self._promised[job] = done
        if self.error is not None:  # another rank may be waiting in the exchange that failed here
            self._fail(self.error)
        else:
            self._threads[0].put(job)
            self._threads.rotate()
            _THREADED.add(self)
        # DDP waits in C++, where an exception set from Python would arrive as an odd value. A callback that raises it
        # turns it into an error of the future that DDP sees.
        return done.then(lambda future: future.value())

    def run(self, job: Job, groups: Groups) -> None:
        """Runs a job over groups, in their thread, and completes its future."""
        with self._computing:
            if self.error is not None:
                return
            try:
                result = job.run(groups, self._wait)
            except Exception as error:
                self._fail(error)
                return
        with self._lock:
            done = self._promised.pop(job, None)
        if done is not None:
            done.set_result(result)

    def _wait(self, work: dist.Work) -> None:
        """Lets the other thread compute until a collective has ended."""
        self._computing.release()
        try:
            work.wait()
        finally:
            self._computing.acquire()
        if self.error is not None:
            raise self.error

    def _fail(self, error: Exception) -> None:
        """Fails all jobs that have not ended: another rank may never join their collectives."""
        with self._lock:
            self.error = self.error or error
            promised, self._promised = self._promised, {}
        for done in promised.values():
            done.set_exception(self.error)  # type: ignore[arg-type]  # torch annotates the result's type

    def close(self) -> bool:
        """Ends the lane; returns whether all jobs ended within ``PATIENCE`` seconds, with no collective in progress."""
        _THREADED.discard(self)
        end = time.monotonic() + PATIENCE
        ended = [each.end(end) for each in self._threads]
        if all(ended):
            # The threads and this lane refer to each other, which would keep the groups until a garbage collection. If
            # a forked data loader's worker runs it, gloo waits forever for threads that the fork does not have.
            self._threads.clear()
        return all(ended)


class _Thread:
    """A thread that runs jobs over its groups, in order; a daemon, so that a rank stuck in a collective can still exit.

    It ends when it is idle: nobody need close a lane, and Lightning's tests fail if a thread is left.
    """

    def __init__(self, lane: ThreadLane, groups: Groups) -> None:
        self._lane, self._groups = lane, groups
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while the thread starts, or ends because it is idle
        self._running: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Queues a job, and starts the thread if it has ended."""
        with self._lock:
            self._jobs.put(job)
            if self._running is None:
                self._running = threading.Thread(target=self._run, name=NAME, daemon=True)
                self._running.stop = self._lane.close  # type: ignore[attr-defined]  # Lightning's tests call it
                self._running.start()

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._running = None
                        return
            else:
                if job is None:
                    return
                self._lane.run(job, self._groups)

    def end(self, deadline: float) -> bool:
        """Ends the thread after the jobs in its queue; returns whether it has ended by then."""
        thread = self._running
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return thread is None or not thread.is_alive()


_THREADED = weakref.WeakSet[ThreadLane]()
"""Lanes that were not closed."""


@atexit.register
def _end_threads() -> None:
    """Waits for jobs in progress: Python ends daemon threads at exit, and one inside torch aborts the process."""
    for lane in list(_THREADED):
        lane.close()


class StreamLane:
    """A lane for CUDA tensors: a side stream. Jobs are enqueued immediately; the host never waits.

    The exchange has its own NCCL communicators: in a shared one, other collectives of backward, such as those of
    SyncBatchNorm, would wait for the previous bucket. An NCCL kernel occupies the GPU until the other ranks have joined
    it. So if a GPU cannot run kernels of two communicators at once, all ranks must start them in the same order. They
    do, since autograd's single thread issues all of them, and the side stream waits for backward's, and so for all
    earlier collectives. But later ones run beside an exchange in any order, unless NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL
    2.26) keeps the host's (:meth:`.TopKState.check_launch_order`). With CUDA_DEVICE_MAX_CONNECTIONS=1, a kernel that
    waits holds up all that the host issued later, so nothing overlaps with the exchange.
    """

    def __init__(self, device: torch.device, groups: Groups) -> None:
        self._groups, self._device = groups, device
        self.error: Exception | None = None  # the first of any job
        # Ahead of backward's kernels, since other ranks wait for this one's bytes.
        self.stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, job: Job) -> Future:
        """Enqueues a job; its future records the side stream, so that waiting for it happens on the GPU."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        done: Future = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self.stream), torch.no_grad():
            if self.error is not None:
                raise self.error  # another rank may be waiting in the exchange that failed here
            try:
                done.set_result(job.run(self._groups))
            except Exception as error:
                self.error = error
                raise
        return done

    def close(self) -> bool:
        """Returns whether all jobs ended within ``PATIENCE`` seconds.

        A collective that another rank never joins does not end. The groups must then be left alone, since destroying
        them would wait for it and hide the error that ended the run.
        """
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
