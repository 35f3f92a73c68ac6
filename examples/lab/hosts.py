"""Emulates hosts on one machine: one network namespace per host, joined by a bridge, with links of a given rate.

Needs root and iproute2 (``ip``, ``tc``). Addresses exist inside the namespaces only; everything is removed on exit.
As a program, this module is one rank: see :func:`main`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_topk.plan import link

PORT = 29400
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def available() -> bool:
    """Whether hosts can be emulated here."""
    return os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


def check_available() -> None:
    """Raises a RuntimeError if hosts cannot be emulated."""
    if not available():
        raise RuntimeError(
            "Emulated hosts need root and iproute2 (ip, tc). bench train and train_gpt_fsdp.py run without --rate."
        )


def sent_bytes() -> int:
    """Bytes that all ranks of this host sent through its interface so far; zero if hosts are not emulated."""
    return int(COUNTER.read_text()) if os.environ.get("GLOO_SOCKET_IFNAME") == "eth0" else 0


class Hosts:
    """Emulated hosts, from :func:`emulate`; or processes that share this host, from :func:`local`.

    Args:
        names: Network namespaces of the hosts; None is this host's own.
        address: ``ADDRESS:PORT`` at which the first host listens.
        ranks: Processes per host.
    """

    def __init__(self, names: Sequence[str | None], address: str, ranks: int = 1) -> None:
        self.names, self.address, self.ranks = names, address, ranks

    def run(
        self,
        function: Callable[[dict[str, Any], int, int], Any],
        options: Mapping[str, Any],
        timeout: float = 600.0,
        shown: bool = False,
    ) -> list[Any]:
        """Calls ``function(options, rank, world)`` in a process for every rank, joined by ``torch.distributed``.

        Args:
            function: A function of an importable module. Its options and its result must be JSON.
            options: Options of the call. ``"device": "cuda"`` puts each rank on a GPU; ranks share too few GPUs.
            timeout: Seconds after which all processes are killed.
            shown: Whether rank 0 inherits standard error, for example for a progress bar.

        Raises:
            RuntimeError: A process failed.
            TimeoutError: The processes did not end in time.
        """
        path, world, started = f"{function.__module__}:{function.__qualname__}", len(self.names) * self.ranks, []
        for rank in range(world):
            place = [str(rank), str(world), self.address]
            command = [sys.executable, "-m", "lab.hosts", *place, path, json.dumps(options)]
            local = {"LOCAL_WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank % self.ranks)}
            local["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # it imports what this process can
            started.append(self.start(rank // self.ranks, command, local, shown and rank == 0))
        try:
            outputs = [process.communicate(timeout=timeout) for process in started]
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{path} did not end within {timeout:.0f} s on {len(self.names)} hosts") from None
        finally:
            for process in started:
                process.kill()
        for process, (_, errors) in zip(started, outputs, strict=True):
            if process.returncode:
                words = "see its output above." if errors is None else f"\n{errors[-2000:]}"
                raise RuntimeError(f"{path} failed on one of {len(self.names)} hosts: {words}")
        return [json.loads(output.splitlines()[-1]) for output, _ in outputs]

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], shown: bool = False
    ) -> subprocess.Popen[str]:
        """Starts a process on a host, with its output in pipes; with ``shown``, it inherits standard error."""
        name = self.names[host]
        enter = ["ip", "netns", "exec", name] if name else []
        interface = {"GLOO_SOCKET_IFNAME": "eth0"} if name else {}
        return subprocess.Popen(
            [*enter, *command],
            stdout=subprocess.PIPE,
            stderr=None if shown else subprocess.PIPE,
            text=True,
            env={**os.environ, **interface, "OMP_NUM_THREADS": "1", **environment},
        )


def local(count: int) -> Hosts:
    """``count`` processes on this host, joined by its loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Hosts([None] * count, f"127.0.0.1:{probe.getsockname()[1]}")


@contextmanager
def emulate(count: int, rate: str, ranks: int = 1) -> Iterator[Hosts]:
    """Creates hosts whose links have a rate in both directions, such as ``100mbit``, and removes them on exit.

    ``100mbit/20ms`` adds a round trip of 20 ms between any two hosts. Ranks of the same host reach each other without
    that link.
    """
    check_available()
    if not 1 <= count <= 200:
        raise ValueError(f"Invalid number of hosts {count}; emulate 1 to 200.")
    bits, round_trip = link(rate)
    tag = f"ltk{os.getpid() % 100000}"
    names = [f"{tag}h{number}" for number in range(count)]
    with ExitStack() as stack:
        for name in names:
            _ip(f"netns add {name}")
            stack.callback(_ip, f"netns del {name}")
        if round_trip:
            from lab.delays import Switch  # needs fcntl, which Windows lacks

            switch = Switch(bits, round_trip / 2)
            stack.callback(switch.close)
            for number, name in enumerate(names):
                switch.add(f"{tag}p{number}")
                _ip(f"link set {tag}p{number} netns {name} name eth0")
        else:
            _bridge(stack, f"{tag}s", names, bits)
        for number, name in enumerate(names):
            _ip(f"-n {name} addr add 10.77.0.{number + 1}/24 dev eth0")
            for interface in ("lo", "eth0"):
                _ip(f"-n {name} link set {interface} up")
        if round_trip:
            switch.start()
        yield Hosts(names, f"10.77.0.1:{PORT}", ranks)


def _bridge(stack: ExitStack, switch: str, names: Sequence[str], bits: float) -> None:
    """Joins hosts by a bridge in a namespace of its own; tc limits the rate of its ports."""
    # The bucket holds 2 ms of traffic, at least 32 KiB: a smaller one throttles dense traffic below the rate.
    shape = f"root tbf rate {bits:.0f}bit burst {max(1 << 15, math.ceil(bits / 8 * 0.002))} latency 50ms"
    _ip(f"netns add {switch}")
    stack.callback(_ip, f"netns del {switch}")
    _ip(f"-n {switch} link add br0 type bridge")
    _ip(f"-n {switch} link set br0 up")
    for number, name in enumerate(names):
        port = f"p{number}"
        _ip(f"-n {name} link add eth0 type veth peer name {port} netns {switch}")
        _ip(f"-n {switch} link set {port} master br0 up")
        _ip(f"netns exec {name} tc qdisc add dev eth0 {shape}")
        _ip(f"netns exec {switch} tc qdisc add dev {port} {shape}")


def _ip(arguments: str) -> None:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {arguments} failed: {done.stderr.strip()}")


def main() -> None:
    """Runs one rank: ``python -m lab.hosts RANK WORLD ADDRESS:PORT MODULE:FUNCTION OPTIONS``.

    It joins the process group, calls the function on one thread, and prints the result as a line of JSON.
    """
    import torch
    import torch.distributed as dist

    rank, world, address, path, options = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], json.loads(sys.argv[5])
    torch.set_num_threads(1)
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    gpus = torch.cuda.device_count() if options.get("device") == "cuda" else 0
    if gpus:
        torch.cuda.set_device(rank % gpus)
    backend, late = "nccl" if gpus >= world else "gloo", timedelta(minutes=10)
    dist.init_process_group(backend, f"tcp://{address}", rank=rank, world_size=world, timeout=late)
    print(json.dumps(function(options, rank, world)))
    dist.barrier()  # others may still need the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
