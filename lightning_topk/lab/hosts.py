"""Several hosts on one machine: a network namespace for each, joined by a bridge, with links of a given rate.

Needs root and iproute2 (``ip``, ``tc``). Addresses exist inside the namespaces only; everything is removed on exit.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

PORT = 29400


def available() -> bool:
    """Whether hosts can be emulated here."""
    return os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


def bits_per_second(rate: str) -> float:
    """Bits per second of a rate as tc writes it.

    Raises:
        ValueError: It is not a number with ``kbit``, ``mbit`` or ``gbit``.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate.lower())
    if not found or float(found[1]) == 0:
        raise ValueError(f"Invalid rate {rate!r}; write it like 100mbit, 1gbit or 2.5gbit.")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


class Hosts:
    """Emulated hosts, from :func:`emulate`; or processes that share this host, from :func:`local`.

    Args:
        names: The hosts' network namespaces; None is this host's own.
        address: Where the first one listens, ``ADDRESS:PORT``.
        ranks: Processes on each host.
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
        """Calls ``function(options, rank, world)`` in a process for every rank, see :mod:`lightning_topk.lab.ranks`.

        The processes are joined by ``torch.distributed`` and have torchrun's ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.

        Args:
            function: A function of an importable module. What it returns must be JSON.
            options: What it is called with, as JSON.
            timeout: Seconds after which all processes are killed.
            shown: Whether rank 0's standard error, such as a progress bar, is this process's.

        Returns:
            What each rank returned.

        Raises:
            RuntimeError: One of them failed.
            TimeoutError: They did not end in time.
        """
        path, world, started = f"{function.__module__}:{function.__qualname__}", len(self.names) * self.ranks, []
        for rank in range(world):
            place = [str(rank), str(world), self.address]
            command = [sys.executable, "-m", "lightning_topk.lab.ranks", *place, path, json.dumps(options)]
            local = {"LOCAL_WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank % self.ranks)}
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
                words = "what it said is above." if errors is None else f"\n{errors[-2000:]}"
                raise RuntimeError(f"{path} failed on one of {len(self.names)} hosts: {words}")
        return [json.loads(output.splitlines()[-1]) for output, _ in outputs]

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], shown: bool = False
    ) -> subprocess.Popen[str]:
        """Starts a process on a host, with its output in pipes.

        Args:
            host: Its number, from 0.
            command: What to run there.
            environment: Variables to add to those of this process.
            shown: Whether its standard error is this process's.
        """
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

    def sent_bytes(self) -> list[int]:
        """Bytes that left the interface of each emulated host so far."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(_ip("netns", "exec", name, "cat", path)) for name in self.names if name]


def local(count: int) -> Hosts:
    """``count`` processes on this host, joined by its loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Hosts([None] * count, f"127.0.0.1:{probe.getsockname()[1]}")


@contextmanager
def emulate(count: int, rate: str, ranks: int = 1) -> Iterator[Hosts]:
    """Makes hosts whose links have a rate in both directions, and removes them at the end.

    Args:
        count: Hosts, 1 to 200.
        rate: As tc writes it, such as ``100mbit`` or ``1gbit``.
        ranks: Processes on each host; they reach each other without that link.

    Raises:
        RuntimeError: The namespaces or links could not be made.
        ValueError: Invalid rate or number of hosts.
    """
    if not 1 <= count <= 200:
        raise ValueError(f"Invalid number of hosts {count}; emulate 1 to 200.")
    tag = f"ltk{os.getpid() % 100000}"
    switch, names = f"{tag}s", [f"{tag}h{number}" for number in range(count)]
    # The bucket holds 2 ms of traffic, at least 32 KiB: a smaller one throttles dense traffic below the rate.
    burst = max(1 << 15, math.ceil(bits_per_second(rate) / 8 * 0.002))
    shape = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
    with ExitStack() as stack:
        for name in (switch, *names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            port = f"p{number}"
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")
            _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shape)
            _ip("netns", "exec", switch, "tc", "qdisc", "add", "dev", port, *shape)
        yield Hosts(names, f"10.77.0.1:{PORT}", ranks)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
