"""Command line: ``python -m lightning_topk plan --params 25e6 --workers 4``, ``python -m lightning_topk reproduce NAME``."""

from __future__ import annotations

import argparse
from pathlib import Path

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
    arguments = parser.parse_args()
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
