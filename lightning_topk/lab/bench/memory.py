"""Peak memory of one rank's exchange: ``python -m lightning_topk.lab.bench.memory NUMEL WORLD``, in a fresh process.

At a ratio of 0.001, or with a third word ``begin`` at that with which the default recipe begins. Prints the peak in bytes beyond the gradient itself, and the bytes of the residuals.
"""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path

import torch

from lightning_topk.config import TopKConfig
from lightning_topk.core.exchange import deliver, mean


def measured(numel: int, world: int, config: TopKConfig) -> tuple[int, int]:
    """Peak of the resident set over three exchanges of one rank, other ranks played by copies of its own payloads.

    Args:
        numel: Elements of the gradient.
        world: Ranks.
        config: The settings, with servers that compress.

    Returns:
        Bytes at the peak beyond those before, and the bytes of residuals.
    """
    torch.set_num_threads(1)
    g = torch.randn(numel)
    _exchange(config, torch.randn(200_000), world)  # what any first call brings into memory
    before = _peak()
    held = _exchange(config, g, world)
    return _peak() - before, held


def _exchange(config: TopKConfig, g: torch.Tensor, world: int) -> int:
    end = config.endpoint(len(g), 0, world, g.dtype, g.device)
    assert end.downlink is not None
    assert end.reply is not None
    for _ in range(3):
        received = end.uplink.send(g)[:1].expand(world, -1).contiguous()
        reply = end.downlink.send(mean(received, end.uplink.codec, g.dtype, g))
        deliver(reply.expand(world, -1).contiguous(), end.reply, end.layout, g)
    return sum(kept.nbytes for link in end.links for kept in link.memory.tensors().values())


def _peak() -> int:
    """Largest resident set of this process so far, bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's begins with that of the process that started this one
        return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


if __name__ == "__main__":
    first = TopKConfig().planned(1).at(0, 0)
    print(*measured(int(sys.argv[1]), int(sys.argv[2]), first if sys.argv[3:] == ["begin"] else TopKConfig()))
