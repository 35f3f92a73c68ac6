"""Command line: ``python -m lightning_topk`` ``plan``, ``bench NAME`` or ``reproduce NAME``."""

from __future__ import annotations

import argparse
import subprocess

from lightning_topk._version import __version__
from lightning_topk.lab import bench, papers, plan


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands."""
    about = "Plans and measures top-k gradient exchange, and reproduces the papers' claims."
    parser = argparse.ArgumentParser(prog="python -m lightning_topk", description=about)
    parser.add_argument("--version", action="version", version=f"lightning_topk {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (plan, bench, papers):
        module.declare(commands)
    return parser


def main() -> None:
    """Runs the command that was asked for; ends with a sentence if it cannot."""
    arguments = make_parser().parse_args()
    try:
        arguments.main(arguments)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise SystemExit(f"{arguments.prog}: {error}") from error


if __name__ == "__main__":
    main()
