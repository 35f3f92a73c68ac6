"""Every claim of the two papers as a command: ``python -m lightning_topk reproduce NAME``.

Each trains, measures or counts through the exchange that a cluster runs, and returns a
:class:`lightning_topk.lab.report.Result`: tables, curves, and a verdict on every statement. A claim that fails says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_topk.lab.commands import add_command, add_strict, check_folder, finish, judge, need
from lightning_topk.lab.papers import (
    bound,
    convergence,
    counterexample,
    curves,
    distribution,
    learning,
    operators,
    saving,
    speedup,
    tuning,
)
from lightning_topk.lab.report import Result

CLAIMS = {
    "counterexample": counterexample.run,
    "saving": saving.run,
    "bound": bound.run,
    "distribution": distribution.run,
    "operators": operators.run,
    "convergence": convergence.run,
    "tuning": tuning.run,
    "speedup": speedup.run,
}
"""The papers' claims by name."""
EXPERIMENTS: dict[str, Callable[..., Result]] = {"learning": learning.run, "saving-curves": curves.run}
"""Experiments with our own settings, which take long: ``--all`` leaves them out."""


def declare(commands: Any) -> None:
    """Declares ``reproduce`` and its commands."""
    about = "the claims of the papers, reproduced or refuted"
    parser = commands.add_parser("reproduce", help=about, description=f"Measures {about}, and writes a report.")
    add_strict(parser)
    out: dict[str, Any] = {"type": Path, "metavar": "DIR", "help": "folder for files (default: reproduced)"}
    parser.add_argument("--all", action="store_true", help="all claims of the papers, one after the other")
    parser.add_argument("--out", default=Path("reproduced"), **out)
    names = parser.add_subparsers(metavar="NAME")
    claims = {name: add_command(names, name, function) for name, function in (CLAIMS | EXPERIMENTS).items()}
    for name, each in claims.items():
        each.add_argument("--out", default=argparse.SUPPRESS, **out)
        add_strict(each)
        each.set_defaults(names=[name])

    def run(arguments: argparse.Namespace) -> None:
        if not arguments.all and not arguments.names:
            parser.error(f"name a claim ({', '.join(claims)}) or pass --all")
        need("matplotlib")  # the pictures
        need("sklearn", "scikit-learn")  # the digits
        results = []
        for name in CLAIMS if arguments.all else arguments.names:
            one = claims[name].parse_args(["--out", str(arguments.out)]) if arguments.all else arguments
            command = f"python -m lightning_topk reproduce {name}" if arguments.all else ""
            check_folder(one.out)
            results.append(finish(one, command, out=one.out))
            results[-1].write(one.out)
        write_report(arguments.out)
        print(f"report: {arguments.out / 'report.md'}")
        judge(arguments, results)

    parser.set_defaults(main=run, names=[], prog=parser.prog)


def write_report(folder: Path) -> None:
    """Writes all tables and pictures of claims that a folder has as one page, ``report.md``."""
    found = [folder / f"{name}.json" for name in CLAIMS]
    results = [Result.read(path) for path in found if path.exists()]
    checks = [check for result in results for check in result.checks]
    head = [
        "# The papers' claims, reproduced or refuted",
        f"{sum(check.holds for check in checks)} of {len(checks)} statements hold. Each table says how it was made.",
    ]
    pages = [f"{result.text()}\n\n![{result.name}]({result.name}.png)" for result in results]
    (folder / "report.md").write_text("\n\n".join(head + pages) + "\n")
