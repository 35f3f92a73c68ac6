"""Several hosts on one machine: a network namespace for each, joined by a bridge, with links of a chosen rate.

Needs root and iproute2 (``ip``, ``tc``). Addresses exist inside the namespaces only; everything is removed on exit.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from lightning_topk.planning.costs import bytes_per_second

PORT = 29400
MODULE_TIMEOUT = 600.0


def available() -> bool:
    """Whether hosts can be emulated here."""
    return os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


def bits_per_second(rate: str) -> float:
    """A rate in tc's words as a number.

    Raises:
        ValueError: It is not a number with ``kbit``, ``mbit`` or ``gbit``.
    """
    found = re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate.lower())
    if not found:
        raise ValueError(f"rate {rate!r} is none; write it like 100mbit, 1gbit or 2.5gbit.")
    return 8 * bytes_per_second(rate)


class Hosts:
    """Emulated hosts; made by :func:`emulate`, or :func:`local` for processes that share this host.

    Args:
        names: Their network namespaces; None is this host's own.
        address: Where the first one listens, ``ADDRESS:PORT``.
        ranks: On each of them.
    """

    def __init__(self, names: Sequence[str | None], address: str, ranks: int = 1) -> None:
        self.names, self.address, self.ranks = names, address, ranks

    def run(self, module: str, *arguments: str, timeout: float = MODULE_TIMEOUT) -> list[str]:
        """Runs ``python -m module RANK WORLD ADDRESS:PORT *arguments`` for every rank, with torchrun's ``LOCAL_WORLD_SIZE``.

        Args:
            module: A module of this package.
            *arguments: Further arguments.
            timeout: Seconds after which all are killed.

        Returns:
            What each rank printed.

        Raises:
            RuntimeError: One of them failed.
            TimeoutError: They did not end in time.
        """
        world, started = len(self.names) * self.ranks, []
        for rank in range(world):
            command = [sys.executable, "-m", module, str(rank), str(world), self.address, *arguments]
            local = {"LOCAL_WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank % self.ranks)}
            started.append(self.start(rank // self.ranks, command, local))
        try:
            outputs = [process.communicate(timeout=timeout) for process in started]
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{module} did not end within {timeout:.0f} s on {len(self.names)} hosts") from None
        finally:
            for process in started:
                process.kill()
        for process, (_, errors) in zip(started, outputs, strict=True):
            if process.returncode:
                raise RuntimeError(f"{module} failed on one of {len(self.names)} hosts:\n{errors[-2000:]}")
        return [output for output, _ in outputs]

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a process on a host, with its output in pipes.

        Args:
            host: Which one, from 0.
            command: The command.
            environment: Variables beside those of this process.
        """
        name = self.names[host]
        enter = ["ip", "netns", "exec", name] if name else []
        interface = {"GLOO_SOCKET_IFNAME": "eth0"} if name else {}
        return subprocess.Popen(
            [*enter, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **interface, "OMP_NUM_THREADS": "1", **environment},
        )

    def sent_bytes(self) -> list[int]:
        """Bytes that left the interface of each emulated host so far."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(_ip("netns", "exec", name, "cat", path)) for name in self.names if name]


def local(count: int) -> Hosts:
    """``count`` processes on this host, joined by its loopback: no slow link at all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Hosts([None] * count, f"127.0.0.1:{probe.getsockname()[1]}")


@contextmanager
def emulate(count: int, rate: str, ranks: int = 1) -> Iterator[Hosts]:
    """Makes ``count`` hosts whose links have a rate in both directions, and removes them at the end.

    Args:
        count: Hosts, at most 200.
        rate: As tc writes it, such as ``100mbit`` or ``1gbit``.
        ranks: On each host; they reach each other without that link.

    Raises:
        RuntimeError: They could not be made.
        ValueError: The rate or the number of hosts is none.
    """
    if not 1 <= count <= 200:
        raise ValueError(f"{count} hosts cannot be emulated; between 1 and 200 can.")
    tag = f"ltk{os.getpid() % 100000}"
    switch, names = f"{tag}s", [f"{tag}h{number}" for number in range(count)]
    # The bucket holds 2 ms of traffic, at least 32 KiB: with a smaller one dense traffic collapses, which would flatter us.
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
