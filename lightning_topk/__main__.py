"""Command line: ``python -m lightning_topk`` ``plan --params 25e6 --workers 4``, ``reproduce NAME`` or ``bench NAME``."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lightning_topk.bench import BENCHES, bench
from lightning_topk.config import TopKConfig
from lightning_topk.plan import volume
from lightning_topk.reproduce import CLAIMS, report, reproduce


def main() -> None:
    """Runs the command that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m lightning_topk", description="Top-k gradient exchange.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="bytes that a rank will send in a step, by topology")
    plan.add_argument("--params", type=float, required=True, help="parameters of the model, such as 25e6")
    plan.add_argument("--workers", type=int, required=True, help="number of ranks")
    plan.add_argument(
        "--ratio", type=float, default=0.001, help="fraction that each worker sends (default: %(default)s)"
    )
    plan.add_argument("--server-ratio", type=float, help="fraction that the servers send (default: the same)")
    plan.add_argument("--wire", default="bf16", help="format of values (default: %(default)s)")
    claims = commands.add_parser("reproduce", help="the claims of the papers, reproduced or refuted")
    claims.add_argument("names", nargs="*", choices=[*CLAIMS, []], metavar="NAME", help=", ".join(CLAIMS))
    claims.add_argument("--all", action="store_true", help="all of them")
    claims.add_argument(
        "--data", type=Path, help="images for convergence: train/<class>/*, test/<class>/*; takes hours"
    )
    claims.add_argument(
        "--steps", type=int, help="length of convergence's runs (default: 200 on digits, 1000 on images)"
    )
    claims.add_argument("--out", type=Path, default=Path("reproduced"), help="folder for files (default: %(default)s)")
    _add_bench(commands)
    arguments = parser.parse_args()
    if arguments.command == "bench":
        run_bench(arguments)
        return
    if arguments.command == "reproduce":
        names = CLAIMS if arguments.all else arguments.names
        if not names:
            claims.error(f"name a claim ({', '.join(CLAIMS)}) or pass --all")
        options = {key: getattr(arguments, key) for key in ("data", "steps") if getattr(arguments, key) is not None}
        if options and "convergence" not in names:
            claims.error(f"--{' and --'.join(options)}: for convergence only")
        for name in names:
            reproduce(name, arguments.out, **(options if name == "convergence" else {}))
        report(arguments.out)
        print(f"report: {arguments.out / 'report.md'}")
        return
    if arguments.params < 1 or arguments.workers < 1:
        parser.error("--params and --workers must be at least 1")
    print_plan(arguments)


def _add_bench(commands: Any) -> None:
    """Declares ``bench`` and what each bench takes."""
    benches = commands.add_parser("bench", help="speed, against memory, links and what you would use instead")
    names = benches.add_subparsers(dest="name", required=True)
    for name in BENCHES:
        one = names.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.add_argument("--json", type=Path, help="file to write the result to")
        one.add_argument("--plot", type=Path, help="picture to draw")
        if name in ("select", "wire"):
            one.add_argument("--numel", type=_count, default=25_000_000, help="elements of the gradient")
            one.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where")
            one.add_argument("--ratios", type=float, nargs="+", default=[0.001, 0.01], help="kept fractions")
            one.add_argument("--threads", type=int, default=1, help="of the CPU")
            continue
        one.add_argument("--ratio", type=float, default=0.001, help="kept fraction")
        cap = 25 if name == "train" else 128
        one.add_argument("--bucket-cap-mb", type=float, default=cap, help="DDP's buckets, MiB")
        if name == "train":
            one.add_argument("--model", default="resnet18", help="of torchvision")
            one.add_argument("--batch-size", type=int, default=4, help="images a worker and step")
            one.add_argument("--image-size", type=int, default=64, help="pixels")
            one.add_argument("--steps", type=int, default=12, help="of which the first four are not counted")
        else:
            one.add_argument("--numel", type=_count, default=25_000_000, help="parameters")
            one.add_argument("--seconds", type=float, default=10, help="time for each peer, about")
            one.add_argument("--peers", nargs="+", default=argparse.SUPPRESS, help="default: all")
        if name == "hosts":
            one.add_argument("--hosts", type=int, default=4, help="how many")
            one.add_argument("--ranks", type=int, default=1, help="on each host")
            one.add_argument("--rates", "--rate", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="of links")
        else:
            one.add_argument("--workers", type=int, default=2, help="processes")
        if name == "train":
            one.add_argument("--rate", help="of the links of emulated hosts, such as 1gbit; else they share this host")


def _count(text: str) -> int:
    """A number of elements, which may be written 25e6."""
    return int(float(text))


def run_bench(arguments: argparse.Namespace) -> None:
    """Runs the bench that was asked for; ends with a sentence if it cannot."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that emulated hosts are removed
    options = {key: value for key, value in vars(arguments).items() if key not in ("command", "name", "json", "plot")}
    try:
        bench(arguments.name, arguments.json, arguments.plot, **options)
    except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"bench {arguments.name}: {error}") from error


def print_plan(arguments: argparse.Namespace) -> None:
    """Prints bytes of rank 0, the busiest, for every topology."""
    print(f"{'topology':<15}{'direction':<16}{'uplink B':>14}{'downlink B':>14}{'dense B':>16}{'saving':>10}")
    for topology in ("sharded", "single_server", "allgather"):
        for bidirectional in (True, False):
            if topology == "allgather" and bidirectional:
                continue
            config = TopKConfig(
                ratio=arguments.ratio,
                server_ratio=arguments.server_ratio if bidirectional else None,
                bidirectional=bidirectional,
                wire=arguments.wire,
                topology=topology,
            )
            v = volume(config, [int(arguments.params)], arguments.workers)
            direction = "bidirectional" if bidirectional else "unidirectional"
            print(f"{topology:<15}{direction:<16}{v.uplink:>14,}{v.downlink:>14,}{v.dense:>16,}{v.saving:>9.1f}x")


if __name__ == "__main__":
    main()
