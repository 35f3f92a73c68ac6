"""One rank of a timed exchange: ``python -m lightning_topk.lab.papers.step RANK WORLD ADDRESS:PORT NUMEL SYSTEM...``.

Prints a line of JSON: seconds of a step, and bytes sent, for each system.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.config import TopKConfig, presets
from lightning_topk.core.exchange import exchange
from lightning_topk.core.select import Selector
from lightning_topk.runtime.collectives import Groups, Meter, drive

REPEATS = 2


class TorchTopK(Selector):
    """Exact top-k by torch.topk, as the papers' code selects."""

    def pick(self, rows: Tensor, k: int) -> Tensor:
        """See :meth:`lightning_topk.core.select.Selector.pick`."""
        return rows.abs().topk(k, dim=1).indices.sort(dim=1).values


SYSTEMS = {
    "dense": presets["dense"],
    "fp16 all-reduce": presets["dense"],
    "topk by torch.topk": {**presets["topk"], "selector": TorchTopK()},
    **{name: presets[name] for name in ("topk", "dgc", "gaussiank", "bidirectional_topk")},
}
"""Settings of what is timed. The first two are torch's all-reduce, of the gradient and of its half-precision copy."""


def main() -> None:
    """Times the systems one after the other."""
    rank, world, address, numel = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{address}", rank=rank, world_size=world, timeout=timedelta(seconds=300))
    groups = Groups.make(None, None)
    print(json.dumps({name: timed(name, rank, world, numel, groups) for name in sys.argv[5:]}))
    dist.barrier()
    dist.destroy_process_group()


def timed(system: str, rank: int, world: int, numel: int, groups: Groups) -> dict[str, float]:
    """Best seconds of a step after one, and bytes that this rank sent in it.

    Args:
        system: A key of :data:`SYSTEMS`.
        rank: This rank.
        world: Ranks.
        numel: Elements of the gradient.
        groups: The ranks' groups.
    """
    config = TopKConfig(**SYSTEMS[system])
    meter, cpu = Meter(), torch.device("cpu")
    plain = {"dense": torch.float32, "fp16 all-reduce": torch.float16}.get(system)
    end = None if plain else config.endpoint(numel, rank, world, torch.float32, cpu)
    fresh = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    times = []
    for _ in range(1 + REPEATS):
        g = fresh.clone()
        before = dict(meter.bytes)
        dist.barrier()
        begin = time.perf_counter()
        if end is None:
            sent = g.to(plain)
            dist.all_reduce(sent, group=groups.all)
            g.copy_(sent).div_(world)
            meter.bytes["uplink"] += 2 * (world - 1) * sent.nbytes // world
        else:
            config.resize_(end, step=10**6, epoch=10**6)  # warm-ups are over
            drive(exchange(end, g), groups, meter)
        times.append(time.perf_counter() - begin)
    nbytes = sum(meter.bytes[way] - before[way] for way in ("uplink", "downlink"))
    return {"seconds": min(times[1:]), "bytes": nbytes}


if __name__ == "__main__":
    main()
