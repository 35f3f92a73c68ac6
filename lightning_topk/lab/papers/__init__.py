"""Every claim of the two papers as a command: ``python -m lightning_topk reproduce NAME``.

Each module has a function ``run()`` that trains, measures or counts through the exchange that a cluster runs, and returns a
:class:`lightning_topk.lab.report.Result`: tables, curves, and a verdict on every statement. A claim that fails says so.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch

from lightning_topk.lab.report import Result

CLAIMS = ["counterexample", "saving", "bound", "distribution", "operators", "convergence", "tuning", "speedup"]
"""Names of the commands."""
EXPERIMENTS = ["recipes"]
"""Commands that hold our own settings against each other, and take long: ``--all`` leaves them out."""


def reproduce(name: str, out: Path, **options: Any) -> Result:
    """Runs one reproduction; prints it, and writes its JSON and picture.

    Args:
        name: One of :data:`CLAIMS` or :data:`EXPERIMENTS`.
        out: Where files go.
        **options: Arguments of that reproduction's ``run``.
    """
    torch.set_num_threads(1)  # many small tensors; and one core is what every reader has
    begin = time.perf_counter()
    if name in EXPERIMENTS:  # which write what they have as they go
        options["out"] = out
    result: Result = importlib.import_module(f"lightning_topk.lab.papers.{name}").run(**options)
    result.seconds = time.perf_counter() - begin
    result.write(out)
    print(f"{result.text()}\n", flush=True)
    return result


def report(folder: Path) -> None:
    """Writes all tables and pictures that a folder has as one page, ``report.md``."""
    found = [folder / f"{name}.json" for name in CLAIMS]
    results = [Result.read(path) for path in found if path.exists()]
    checks = [check for result in results for check in result.checks]
    head = [
        "# The papers' claims, reproduced or refuted",
        f"{sum(check.holds for check in checks)} of {len(checks)} statements hold. Each table says how it was made.",
    ]
    pages = [f"{result.text()}\n\n![{result.name}]({result.name}.png)" for result in results]
    (folder / "report.md").write_text("\n\n".join(head + pages) + "\n")
