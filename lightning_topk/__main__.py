"""Command line: ``python -m lightning_topk`` ``plan``, ``bench NAME`` or ``reproduce NAME``."""

from __future__ import annotations

import subprocess

from lightning_topk.lab import commands


def main() -> None:
    """Runs the requested command; exits with an error message if it fails."""
    parser = commands.make_parser()
    arguments = parser.parse_args()
    try:
        commands.run(arguments)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise SystemExit(f"{parser.prog} {arguments.command}: {error}") from error


if __name__ == "__main__":
    main()
