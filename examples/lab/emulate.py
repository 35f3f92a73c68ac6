"""Runs ``python -m lightning_topk bench`` on two emulated hosts of one rank, as torchrun does on two machines.

sudo python examples/lab/emulate.py 1gbit --model resnet18 --input 3,64,64 --batch-size 4
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds lab, also when it is not installed

from lab.hosts import PORT, emulate


def main() -> None:
    """Runs the bench over links of the rate that comes first; the other arguments are the bench's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rate", help="link speed, such as 1gbit, or 1gbit/20ms with a round trip")
    parser.add_argument("bench", nargs=argparse.REMAINDER, help="arguments of python -m lightning_topk bench")
    given = parser.parse_args()
    command = [sys.executable, "-m", "lightning_topk", "bench", *given.bench]
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(PORT)}
    try:
        with emulate(2, given.rate) as hosts:
            common["MASTER_ADDR"] = hosts.address.partition(":")[0]
            ranks = [hosts.start(rank, command, {**common, "RANK": str(rank)}, shown=rank == 0) for rank in (0, 1)]
            output, _ = ranks[0].communicate()
            ranks[1].communicate()
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    print(output, end="")
    sys.exit(ranks[0].returncode)


if __name__ == "__main__":
    main()
