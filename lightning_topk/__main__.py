"""Command line: ``python -m lightning_topk`` ``plan``, ``bench NAME`` or ``reproduce NAME``."""

from __future__ import annotations

import subprocess

from lightning_topk.lab import commands


def main() -> None:
    """Runs the command that was asked for; ends with a sentence if it cannot."""
    parser = commands.make_parser()
    arguments = parser.parse_args()
    try:
        commands.run(arguments)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise SystemExit(f"{parser.prog} {arguments.command}: {error}") from error


if __name__ == "__main__":
    main()
