"""Speed, measured against memory, links and the alternatives: ``python -m lightning_topk bench NAME``.

Machines are noisy: what is judged are ratios of times taken in one run. A missed target, and every peer that is faster,
is printed as FAIL.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_topk.lab.bench import race, select, steps, train, wire
from lightning_topk.lab.commands import add_command, add_strict, check_file, finish, judge, need
from lightning_topk.lab.report import Result, draw

BENCHES: dict[str, Callable[..., Result]] = {
    "select": select.run,
    "wire": wire.run,
    "hosts": steps.hosts,
    "train": train.run,
    "race": race.run,
}
"""The benches by name."""


def declare(commands: Any) -> None:
    """Declares ``bench`` and its commands."""
    about = "speed, against memory, links and the alternatives"
    parser = commands.add_parser("bench", help=about, description=f"Measures {about}.")
    names = parser.add_subparsers(required=True, metavar="NAME")
    for name, function in BENCHES.items():
        one = add_command(names, name, function)
        one.add_argument("--json", type=Path, metavar="FILE", help="file to write the result to")
        one.add_argument("--plot", type=Path, metavar="FILE", help="picture to draw")
        add_strict(one)
        one.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> None:
    """Runs one bench and prints its result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that emulated hosts are removed
    if arguments.plot is not None:
        need("matplotlib")
    check_file(arguments.json)
    check_file(arguments.plot, (".png", ".svg", ".pdf"))
    result = finish(arguments)
    if arguments.json is not None:
        arguments.json.write_text(result.json())
    if arguments.plot is not None:
        draw(result.panels, arguments.plot)
    judge(arguments, [result])
