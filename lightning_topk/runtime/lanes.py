"""Lanes: where exchanges run, one after the other, beside the backward pass.

Collectives issued from callbacks of several buckets interleave differently on different ranks, and then deadlock or
pair up wrongly (pytorch #48478). So whole exchanges run in order on a *lane* with a process group of its own: on CPU a
thread, on CUDA a side stream.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

Future = torch.futures.Future[Tensor]


class Lane(Protocol):
    """Runs jobs one after the other, in the order of submission, beside the caller."""

    def promise(self) -> tuple[Future, Future]:
        """Two ends of one result: :meth:`submit` fulfils the first, DDP waits for the second."""
        ...

    def submit(self, job: Callable[[], Sequence[Tensor]], promised: Sequence[Future]) -> None:
        """Queues a job; its results, or its error, fulfil the promises."""
        ...

    def run(self, job: Callable[[], Sequence[Tensor]]) -> None:
        """Runs a job at once, for a caller who is in its place already: on CUDA, in :attr:`stream`."""
        ...

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where jobs run on CUDA; None on CPU."""
        ...

    def mark(self) -> Any:
        """A moment in the work of the caller: the host's clock, or an event in the current stream."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks. Waits for the device."""
        ...

    def close(self) -> bool:
        """Ends the lane when the submitted jobs are done. Returns whether that took no more than some seconds."""
        ...


PATIENCE = 5.0
"""Seconds to wait for a job in progress when a lane is closed."""
IDLE = 0.5
"""Seconds after which an idle thread ends; the next job starts another one."""


class ThreadLane(Lane):
    """A lane for CPU tensors: one daemon thread, so that a rank stuck in a collective can still exit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._lock = threading.Lock()  # held while a thread is started, or ends for want of jobs
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            if job is None:
                return
            job()

    @override
    def promise(self) -> tuple[Future, Future]:
        done: Future = torch.futures.Future()
        # DDP waits in C++, where an exception set from Python would arrive as an odd value. A callback that raises it
        # turns it into an error of the future that DDP sees.
        return done, done.then(lambda future: future.value())

    @override
    def submit(self, job: Callable[[], Sequence[Tensor]], promised: Sequence[Future]) -> None:
        def run() -> None:
            try:
                if self._error is not None:
                    # Another rank may be waiting in the exchange that failed here: the next one would answer it.
                    raise self._error
                results = job()
            except Exception as error:
                self._error = error
                for future in promised:
                    future.set_exception(error)  # type: ignore[arg-type]  # torch annotates the result's type
            else:
                for future, result in zip(promised, results, strict=True):
                    future.set_result(result)

        with self._lock:
            self._jobs.put(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lightning_topk-lane", daemon=True)
                self._thread.start()

    @override
    def run(self, job: Callable[[], Sequence[Tensor]]) -> None:
        if self._error is not None:
            raise self._error  # as in submit: the next exchange would answer the one that failed here
        try:
            job()
        except Exception as error:
            self._error = error
            raise

    @property
    @override
    def stream(self) -> None:
        return None

    @override
    def mark(self) -> float:
        return time.perf_counter()

    @override
    def seconds(self, start: float, end: float) -> float:
        return end - start

    @override
    def close(self) -> bool:
        with self._lock:
            thread = self._thread
            if thread is None:
                return True
            self._jobs.put(None)
        thread.join(timeout=PATIENCE)
        return not thread.is_alive()


class StreamLane(Lane):
    """A lane for CUDA tensors: a side stream. Jobs are enqueued at once; the host waits for nothing.

    Args:
        device: The tensors' device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # before backward's kernels: others wait for its bytes
        self._last: torch.cuda.Event | None = None  # the end of the last job

    @override
    def promise(self) -> tuple[Future, Future]:
        done: Future = torch.futures.Future(devices=[self._device])  # ``submit`` itself raises errors
        return done, done

    @override
    def submit(self, job: Callable[[], Sequence[Tensor]], promised: Sequence[Future]) -> None:
        """Runs a job; its futures record the side stream, so that a wait for them is a wait on the GPU."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for future, result in zip(promised, job(), strict=True):
                future.set_result(result)
            self._last = torch.cuda.Event()
            self._last.record(self._stream)

    @override
    def run(self, job: Callable[[], Sequence[Tensor]]) -> None:
        job()
        self._last = torch.cuda.Event()
        self._last.record(self._stream)

    @property
    @override
    def stream(self) -> torch.cuda.Stream:
        return self._stream

    @override
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    @override
    def close(self) -> bool:
        # A collective that another rank never joins does not end: then the groups must be left alone, since to destroy
        # them is to wait for it, and the error that ended the run would not be seen.
        end = time.monotonic() + PATIENCE
        while self._last is not None and not self._last.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


def lane_for(device: torch.device) -> Lane:
    """The lane for tensors of a device.

    Raises:
        TypeError: The device is neither a CPU nor a GPU.
    """
    if device.type not in ("cpu", "cuda"):
        raise TypeError(f"gradients are on {device}; the exchange supports CPU and CUDA tensors only.")
    return StreamLane(device) if device.type == "cuda" else ThreadLane()
