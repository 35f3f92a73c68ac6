"""Links with a delay, for emulated hosts: a switch in user space between TUN devices, so the kernel needs no netem."""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import threading
import time
from itertools import count

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_HEADER = 10  # bytes of struct virtio_net_hdr
_LARGEST = _HEADER + 65535


class Switch:
    """Forwards IPv4 packets between TUN devices, with a rate and a delay. The n-th device's address ends in n.

    TCP hands over segments of up to 64 kB (segmentation offload), and still counts its window in packets of the MTU.

    Args:
        bits_per_second: Rate of each link, in each direction.
        delay: Seconds of each way.
    """

    def __init__(self, bits_per_second: float, delay: float) -> None:
        self.rate, self.delay = bits_per_second / 8, delay
        self.devices: list[int] = []
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)
        self._closing, self._close = os.pipe()

    def add(self, name: str) -> None:
        """Creates a device. Hosts count from 1, in this order; the device can move to another namespace."""
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self.devices.append(device)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)

    def start(self) -> None:
        """Starts to forward packets."""
        self._thread.start()

    def close(self) -> None:
        """Stops, and removes the devices."""
        os.close(self._close)
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in (self._closing, *self.devices):
            os.close(descriptor)

    def _forward(self) -> None:
        up, down = [0.0] * len(self.devices), [0.0] * len(self.devices)  # when each link is free
        on_the_way: list[tuple[float, int, int, bytes]] = []
        order, sources = count(), {device: host for host, device in enumerate(self.devices)}
        while True:
            wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
            ready, _, _ = select.select([self._closing, *self.devices], [], [], wait)
            if self._closing in ready:
                return
            now = time.monotonic()
            for device in ready:
                packet = os.read(device, _LARGEST)
                source, target = sources[device], packet[_HEADER + 19] - 1  # the last byte of the IPv4 destination
                if packet[_HEADER] >> 4 != 4 or not 0 <= target < len(down):
                    continue
                seconds = (len(packet) - _HEADER) / self.rate
                up[source] = max(up[source], now) + seconds
                down[target] = max(down[target] + seconds, up[source] + self.delay)
                heapq.heappush(on_the_way, (down[target], next(order), target, packet))
            while on_the_way and on_the_way[0][0] <= now:
                _, _, target, packet = heapq.heappop(on_the_way)
                os.write(self.devices[target], packet)
