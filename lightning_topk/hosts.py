"""Several hosts on one machine: a network namespace for each, joined by a bridge, with links of a chosen rate.

Needs root and iproute2 (``ip``, ``tc``). Addresses exist inside the namespaces only; everything is removed on exit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

BURSTS = {"100mbit": "32kb", "1gbit": "256kb", "10gbit": "2mb"}
"""Rates of links, and the token bucket each needs: with a smaller one dense traffic collapses, which would flatter us."""


def available() -> bool:
    """Whether hosts can be emulated here."""
    return os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


class Hosts:
    """Emulated hosts; made by :func:`emulate`.

    Args:
        names: Their network namespaces.
        addresses: Their addresses on the interface ``eth0``.
    """

    def __init__(self, names: Sequence[str], addresses: Sequence[str]) -> None:
        self.names, self.addresses = names, addresses

    def run(self, module: str, *arguments: str, timeout: float = 600.0) -> list[str]:
        """Runs ``python -m module RANK WORLD ADDRESS *arguments`` on every host.

        Args:
            module: A module of this package.
            *arguments: Further arguments.
            timeout: Seconds after which all are killed.

        Returns:
            What each printed.

        Raises:
            RuntimeError: One of them failed.
        """
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    sys.executable,
                    "-m",
                    module,
                    str(rank),
                    str(len(self.names)),
                    self.addresses[0],
                    *arguments,
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank, name in enumerate(self.names)
        ]
        try:
            outputs = [process.communicate(timeout=timeout) for process in started]
        finally:
            for process in started:
                process.kill()
        for process, (_, errors) in zip(started, outputs, strict=True):
            if process.returncode:
                raise RuntimeError(f"{module} failed on an emulated host:\n{errors[-2000:]}")
        return [output for output, _ in outputs]

    def sent_bytes(self) -> list[int]:
        """Bytes that left the interface of each host so far."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(_ip("netns", "exec", name, "cat", path)) for name in self.names]


@contextmanager
def emulate(count: int, rate: str) -> Iterator[Hosts]:
    """Makes ``count`` hosts whose links have a rate in both directions, and removes them at the end.

    Args:
        count: Hosts, at most 200.
        rate: A key of :data:`BURSTS`.
    """
    tag = f"ltk{os.getpid() % 100000}"
    switch, names = f"{tag}s", [f"{tag}h{number}" for number in range(count)]
    shape = ["root", "tbf", "rate", rate, "burst", BURSTS[rate], "latency", "50ms"]
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
        yield Hosts(names, [f"10.77.0.{number + 1}" for number in range(count)])


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
