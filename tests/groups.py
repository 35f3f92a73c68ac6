"""Processes forked from a server that has imported everything: groups of processes, torchrun's ranks, scripts."""

import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from inspect import Parameter, Signature, signature
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import states_closed
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

MESHES = 12
"""Process groups that a :class:`Group` may hold before its processes are restarted. Meshes are never destroyed, since
DTensor's caches refer to them, and each of their groups has a thread that wakes a hundred times a second."""


class Group:
    """Processes joined by gloo, or by NCCL if tensors are on GPUs. Ranks share GPUs if there are too few."""

    def __init__(
        self, world: int, device: str = "cpu", backend: str | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self.world, self.device = world, device
        backend = backend or ("nccl" if device == "cuda" else "gloo")
        context, self._folder = multiprocessing.get_context("forkserver"), tempfile.TemporaryDirectory()
        self._pipes, theirs = zip(*(context.Pipe() for _ in range(world)), strict=True)
        arguments = world, backend, device, self._folder.name, environment or {}
        self._processes = [  # not daemons, which could start no processes
            context.Process(target=_serve, args=(pipe, rank, *arguments)) for rank, pipe in enumerate(theirs)
        ]
        for process in self._processes:
            process.start()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, ranks: Iterable[int] = ()
    ) -> list[Any]:
        """Calls ``function(rank, world, *args)`` on every rank; returns the results of all, or of some ``ranks``.

        The function should assert only after its last collective, so that a failing rank does not keep the others
        waiting. After ``timeout`` seconds (by default 60, or 300 on GPUs, which may compile kernels) the group is
        killed and the call fails.
        """
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        timeout = timeout or (60.0 if self.device == "cpu" else 300.0)
        results, deadline = [], time.monotonic() + timeout
        for rank in ranks or range(self.world):
            if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(f"{function}{args}: rank {rank} of {self.world} did not end in {timeout} s")
            results.append(pickle.loads(self._pipes[rank].recv_bytes()))
        if max(count for *_, count in results) > MESHES:
            self.close()
        failed = [f"rank {rank}:\n{error}" for rank, (error, *_) in enumerate(results) if error]
        assert not failed, "\n".join(failed)
        return [value for _, value, _ in results]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def on_ranks(count: int | Callable[..., int] | None = None, timeout: float | None = None) -> Callable[..., Any]:
    """Makes a test from a function that every rank of a group calls: ``function(rank, world, ...)``.

    Its arguments after these two are fixtures and parameters of the test. ``count`` is the number of ranks, or a
    function of the test's arguments that returns it; by default the argument ``world``.
    """

    def test_of(function: Callable[..., Any]) -> Callable[..., None]:
        names = list(signature(function).parameters)[2:]

        def test(groups: Callable[[int], Group], **arguments: Any) -> None:
            world = arguments.pop("world") if count is None else count(**arguments) if callable(count) else count
            groups(world).run(test, *(arguments[name] for name in names), timeout=timeout)

        asked = ["groups", *names, *["world"] * (count is None)]
        test.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in asked])
        test.on_rank, test.pytestmark = function, getattr(function, "pytestmark", [])
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # the ranks find the test by these
            setattr(test, name, getattr(function, name))
        return test

    return test_of


def _serve(
    pipe: Connection, rank: int, world: int, backend: str, device: str, folder: str, environment: dict[str, str]
) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(folder, "store"), world)
    if device == "cuda":
        gpus = torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(rank % gpus)  # NCCL of torch 2.15 binds to this GPU
        torch.cuda.set_device(rank % gpus)
        if gpus < world:
            # NCCL refuses two ranks of one host on one GPU. With a host id of its own each rank poses as a host, and
            # sockets connect them. NCCL reads this once, before the first communicator.
            os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    while True:
        function, args = pickle.loads(pipe.recv_bytes())
        try:
            with states_closed():
                answer = None, getattr(function, "on_rank", function)(rank, world, *args)
        except Exception:
            answer = traceback.format_exc(), None
        answer = *answer, len(dist.distributed_c10d._world.pg_map)
        pipe.send_bytes(pickle.dumps(answer))  # Connection.send would pass tensors as file descriptors


def torchrun(script: Path, *arguments: str, logs: Path, restarts: int = 0) -> str:
    """Runs a script as ``torchrun --standalone --nproc-per-node=2`` does; returns its ranks' output.

    Uses torchrun's agent, which starts functions instead of commands, so that ranks come from the fork server.
    """
    caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the agent handles them itself
    handlers = {number: signal.getsignal(number) for number in caught}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=logs.name, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=restarts, monitor_interval=0.1, start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )  # fmt: skip
    try:
        elastic_launch(config, _run_script)(str(script), *arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return "".join(path.read_text() for path in sorted(logs.rglob("stdout.log")))


def script(path: Path, *arguments: str, log: Path, folder: Path, timeout: float = 200.0) -> str:
    """Runs a script in ``folder`` in a process of the fork server; returns its output and its children's."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_run_script_in, args=(str(folder), str(log), str(path), *arguments)
    )
    process.start()
    process.join(timeout)
    process.kill()
    process.join()
    said = log.read_text()
    assert process.exitcode == 0, f"exit status {process.exitcode}\n{said}"
    return said


def _run_script_in(folder: str, log: str, path: str, *arguments: str) -> None:
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    _run_script(path, *arguments)


def _run_script(script: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))  # as Python does for scripts
    runpy.run_path(script, run_name="__main__")
