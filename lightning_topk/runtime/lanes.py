"""Lanes run exchanges in order, concurrently with backward.

Collectives issued from callbacks of several buckets interleave differently on different ranks, and then deadlock or
pair up wrongly (pytorch #48478). So whole exchanges run in order on a *lane* with its own process groups: on CUDA a
side stream, on CPU a thread. The thread may have two exchanges in progress, which alternate between two sets of groups:
it computes for one while the bytes of the other are in transit. Exchanges end in the order in which they begin, so
within each set collectives have the same order on all ranks, whatever the timing. The thread only waits for the older
exchange, which therefore always makes progress.

This needs collectives that start without waiting for other ranks, since the order in which a rank starts those of
different sets depends on its timing. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares each collective across all
ranks before starting it, so there is only one set and one exchange at a time.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import cycle

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
    """A lane for CPU tensors: one daemon thread, so that a rank stuck in a collective can still exit.

    The thread ends when it is idle: nobody need close a lane, and Lightning's tests fail if a thread is left.
    """

    stream = None

    def __init__(self, groups: Groups) -> None:
        sets = [groups] if groups.second_groups is None else [groups, groups.second_groups]
        self._groups, self._max_in_flight = cycle(sets), len(sets)
        self.error: Exception | None = None  # the first of any job
        self._jobs: queue.SimpleQueue[Iterator[bool]] = queue.SimpleQueue()
        self._abandoned: list[dist.Work] = []  # collectives of jobs in progress when another one failed
        self._lock = threading.Lock()  # held while a thread starts, or ends because it is idle
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Job) -> Future:
        """Queues a job; returns a future of its result, or of the first error of any job."""
        done: Future = torch.futures.Future()
        with self._lock:
            self._jobs.put(self._fulfil(job, next(self._groups), done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
                self._thread.stop = self.close  # type: ignore[attr-defined]  # Lightning's tests call it
                self._thread.start()
                _THREADED.add(self)
        # DDP waits in C++, where an exception set from Python would arrive as an odd value. A callback that raises it
        # turns it into an error of the future that DDP sees.
        return done.then(lambda future: future.value())

    def _run(self) -> None:
        """Begins the next job if one is queued and may start; otherwise advances the oldest one by a step."""
        in_progress: deque[Iterator[bool]] = deque()
        while True:
            if len(in_progress) < self._max_in_flight:
                try:
                    job = self._jobs.get(block=not (in_progress or self._closed), timeout=IDLE)
                except queue.Empty:
                    with self._lock:
                        if not in_progress and self._jobs.empty():
                            self._thread = None
                            return
                else:
                    if next(job, False):
                        in_progress.append(job)
                    continue
            if in_progress and not next(in_progress[0], False):
                in_progress.popleft()

    def _fulfil(self, job: Job, groups: Groups, promised: Future) -> Iterator[bool]:
        """Runs a job, yields True whenever it waits, and completes its future."""
        collective, steps = None, job.run(groups, self._max_in_flight > 1)
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
        finally:
            steps.close()  # of an exchange that does not go on: what it has sent returns to the residuals

    def close(self) -> bool:
        """Ends the lane; returns whether all jobs ended within ``PATIENCE`` seconds, with no collective in progress."""
        _THREADED.discard(self)
        thread, self._closed = self._thread, True
        if thread is not None:
            self._jobs.put(iter(()))  # wakes the thread
            thread.join(timeout=PATIENCE)
        return (thread is None or not thread.is_alive()) and all(work.is_completed() for work in self._abandoned)


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
    earlier collectives. But later ones run beside an exchange, in any order: with NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL
    2.26) in the host's (:meth:`.TopKState.check_launch_order`). With CUDA_DEVICE_MAX_CONNECTIONS=1 a kernel that waits
    holds up all that the host issued later: nothing hides the exchange.
    """

    def __init__(self, device: torch.device, groups: Groups) -> None:
        self._groups, self._device = groups, device
        self.error: Exception | None = None  # the first of any job
        # Before backward's kernels: other ranks wait for its bytes.
        self.stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, job: Job) -> Future:
        """Enqueues a job; its future records the side stream, so that waiting for it happens on the GPU."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        done: Future = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self.stream):
            if self.error is not None:
                raise self.error  # another rank may be waiting in the exchange that failed here
            try:
                next(job.run(self._groups))  # never yields
            except StopIteration as end:
                done.set_result(end.value)
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
