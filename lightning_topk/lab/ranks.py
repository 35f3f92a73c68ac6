"""One rank: ``python -m lightning_topk.lab.ranks RANK WORLD ADDRESS:PORT MODULE:FUNCTION OPTIONS``.

It joins the others at the address, calls ``FUNCTION(options, rank, world)``, prints what that returns as a line of
JSON, and leaves. OPTIONS is JSON. :meth:`lightning_topk.lab.hosts.Hosts.run` starts such processes.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)
"""After which a collective fails that some rank does not join."""


def main() -> None:
    """Runs one rank, on one thread.

    The backend is NCCL if the options ask for ``"device": "cuda"`` and every rank has a GPU of its own, else gloo.
    """
    rank, world, address, path, options = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], json.loads(sys.argv[5])
    torch.set_num_threads(1)
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    count = torch.cuda.device_count()
    nccl = options.get("device") == "cuda" and count >= world
    if options.get("device") == "cuda" and count:
        torch.cuda.set_device(rank % count)
    dist.init_process_group(
        "nccl" if nccl else "gloo", f"tcp://{address}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    print(json.dumps(function(options, rank, world)))
    dist.barrier()  # others may still need the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
