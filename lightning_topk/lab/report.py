"""What a reproduction gives: tables, verdicts, curves; printed, and written as JSON and a picture."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_topk._version import __version__
from lightning_topk.lab.plots import Panel, draw

Row = dict[str, Any]

VERSIONS = {
    "lightning_topk": __version__,
    "torch": torch.__version__,
    "python": platform.python_version(),
    "machine": f"{os.cpu_count()} {platform.machine()} cores",
}


@dataclass
class Check:
    """A statement held against a measurement.

    Args:
        statement: What is claimed, in one sentence.
        published: The published figure.
        measured: Ours.
        holds: Whether the claim was seen to hold.
    """

    statement: str
    published: str
    measured: str
    holds: bool


@dataclass
class Result:
    """One claim, reproduced or refuted.

    Args:
        name: Name of the command.
        claim: What was tested.
        setting: Model, data, workers, steps: all that one needs to judge the figures.
        tables: Rows by the table's title.
        checks: The verdicts.
        panels: The curves.
        seconds: Wall time, seconds.
        command: What made it, after ``python -m lightning_topk``. Default: ``reproduce NAME``.
        versions: Of what it ran with, and the machine.
    """

    name: str
    claim: str
    setting: str
    tables: dict[str, list[Row]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    seconds: float = 0.0
    command: str = ""
    versions: dict[str, str] = field(default_factory=lambda: dict(VERSIONS))

    def text(self) -> str:
        """Tables and verdicts for a terminal; also good Markdown."""
        parts = [f"## {self.name}: {self.claim}", self.setting]
        for title, rows in self.tables.items():
            parts.append(f"**{title}**\n\n{markdown(rows)}")
        rows = [
            {
                "": "pass" if check.holds else "FAIL",
                "claim": check.statement,
                "published": check.published,
                "measured": check.measured,
            }
            for check in self.checks
        ]
        if rows:
            parts.append(markdown(rows))
        words = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts.append(
            f"{self.seconds:.0f} s: `python -m lightning_topk {self.command or f'reproduce {self.name}'}` ({words})"
        )
        return "\n\n".join(parts)

    @staticmethod
    def read(path: Path) -> Result:
        """The result in a file that :meth:`write` wrote."""
        data = json.loads(path.read_text())
        data["checks"] = [Check(**check) for check in data["checks"]]
        data["panels"] = [Panel(**panel) for panel in data["panels"]]
        return Result(**data)

    def write(self, folder: Path) -> None:
        """Writes ``NAME.json`` and ``NAME.png`` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(plain(asdict(self)), indent=1, allow_nan=False) + "\n")
        if self.panels:
            draw(self.panels, folder / f"{self.name}.png")


def spread(values: list[float], style: str) -> str:
    """Mean and half the range."""
    return f"{sum(values) / len(values):{style}} ± {(max(values) - min(values)) / 2:{style}}"


def plain(value: Any) -> Any:
    """The value with numbers that JSON does not know, infinity and NaN, as words."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def markdown(rows: list[Row]) -> str:
    """Rows as a Markdown table with aligned columns."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [heads, *([_cell(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
