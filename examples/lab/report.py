"""The result of a command: tables, verdicts, curves; printed, and written as JSON and a picture.

Pictures need matplotlib: the extra ``plot``.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lab.papers import CLAIMS
from lightning_topk.env import versions
from lightning_topk.plan import Row, markdown

Curve = tuple[Sequence[float], Sequence[float]]
"""The x and the y values."""


@dataclass
class Check:
    """A statement, its target or published figure, the measured figure, and whether the statement holds."""

    statement: str
    expected: str
    measured: str
    holds: bool


@dataclass
class Panel:
    """One pair of axes: curves, and standard errors of their y values, by label; ``level`` is a y value to mark.

    Of a curve in ``measured``, so many points are measured, and the rest is drawn dashed. ``inside`` says where in the
    axes the legend stands, such as ``"lower left"``; if it is empty, the legend stands beside them; None has no legend.
    """

    title: str
    xlabel: str
    curves: dict[str, Curve] = field(default_factory=dict)
    xlog: bool = False
    ylog: bool = False
    ylabel: str = ""
    level: float | None = None
    errors: dict[str, Sequence[float]] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)
    inside: str | None = ""


COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#3b3b98", "#999999", "#222222")
"""Distinguishable for colour-blind readers too (after Okabe and Ito)."""


def processor() -> str:
    """The processor's name, as Linux gives it."""
    file = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)", file.read_text() if file.exists() else "", re.M)
    return named[1] if named else platform.machine()


def _versions() -> dict[str, str]:
    return versions() | {"machine": f"{os.cpu_count()} cores of {processor()}"}


@dataclass
class Result:
    """Measurements of the command ``name``.

    ``setting`` states what is needed to judge the figures: model, data, workers, steps. ``tables`` are rows by title,
    ``checks`` compare measurements with targets or published figures. ``seconds`` is the wall time.
    """

    name: str
    claim: str
    setting: str
    tables: dict[str, list[Row]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    seconds: float = 0.0
    command: str = ""
    versions: dict[str, str] = field(default_factory=_versions)

    def check(self, statement: str, expected: str, measured: str, holds: bool) -> None:
        """Adds a verdict, see :class:`Check`."""
        self.checks.append(Check(statement, expected, measured, holds))

    def panel(self, title: str, xlabel: str, **others: Any) -> dict[str, Curve]:
        """Adds a :class:`Panel`, and returns its curves."""
        self.panels.append(Panel(title, xlabel, **others))
        return self.panels[-1].curves

    def text(self) -> str:
        """Tables and verdicts as Markdown that reads well in a terminal."""
        parts = [f"## {self.name}: {self.claim}", self.setting]
        parts += [f"**{title}**\n\n{markdown(rows)}" for title, rows in self.tables.items()]
        against = "published" if self.name in CLAIMS else "target"
        rows = [
            {"": ("FAIL", "pass")[c.holds], "claim": c.statement, against: c.expected, "measured": c.measured}
            for c in self.checks
        ]
        words = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts += [markdown(rows)] * bool(rows) + [f"{self.seconds:.0f} s: `{self.command}` ({words})"]
        return "\n\n".join(parts)

    @staticmethod
    def read(path: Path) -> Result:
        """Reads a file that :meth:`write` wrote."""
        data = json.loads(path.read_text())
        data["checks"] = [Check(**check) for check in data["checks"]]
        data["panels"] = [Panel(**panel) for panel in data["panels"]]
        return Result(**data)

    def json(self) -> str:
        """The result as JSON, with infinity and NaN, which JSON lacks, as strings."""
        plain = json.loads(json.dumps(asdict(self)), parse_constant=lambda word: str(float(word)))
        return json.dumps(plain, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Writes ``NAME.json`` and ``NAME.svg`` into a folder."""
        (folder / f"{self.name}.json").write_text(self.json())
        if self.panels:
            draw(self.panels, folder / f"{self.name}.svg")


def write_report(folder: Path) -> None:
    """Writes the results of the claims in a folder as one page, ``report.md``."""
    results = [Result.read(path) for path in (folder / f"{name}.json" for name in CLAIMS) if path.exists()]
    checks = [check for result in results for check in result.checks]
    head = [
        "# The papers' claims, reproduced or refuted",
        f"{sum(check.holds for check in checks)} of {len(checks)} statements hold. Each table says how it was made.",
    ]
    pages = [f"{result.text()}\n\n![{result.name}]({result.name}.svg)" for result in results]
    (folder / "report.md").write_text("\n\n".join(head + pages) + "\n")


def in_words(values: Sequence[float], style: str, unit: str = "") -> str:
    """Mean ± standard error over several seeds, or the value of one; empty if there is none."""
    if len(values) < 2:
        return "".join(f"{value:{style}}{unit} (1 seed)" for value in values)
    return f"{mean(values):{style}} ± {standard_error(values):{style.lstrip('+')}}{unit}"


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean; zero for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def draw(panels: Sequence[Panel], path: str | Path, columns: int = 3) -> None:
    """Draws panels into a picture, some in a row; the path's suffix decides its format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws to files: needs no display
    matplotlib.rcParams["svg.hashsalt"] = "ids"  # without it and with a date, the same data give another file each time
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.6 * columns, 4 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_prop_cycle(color=COLOURS)
        for label, (x, y) in panel.curves.items():
            first = panel.measured.get(label, len(x))
            marker = "." if len(x) < 12 or panel.measured else None
            error = panel.errors.get(label)
            drawn = axis.errorbar(x[:first], y[:first], error, label=label, marker=marker, elinewidth=0.8, capsize=2)
            if first < len(x):
                axis.plot(x[first - 1 :], y[first - 1 :], color=drawn[0].get_color(), linestyle="--")
        axis.set_title(panel.title, loc="left", fontsize="medium")
        axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
        axis.set(xscale="log" if panel.xlog else "linear", yscale="log" if panel.ylog else "linear")
        for along in (axis.xaxis, axis.yaxis):
            if along.get_scale() == "log":
                low, high = along.get_view_interval()
                along.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
                along.set_major_formatter("{x:g}")
                along.set_minor_formatter(NullFormatter())
        if panel.level is not None:
            axis.axhline(panel.level, color="#999999", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e5e5", linewidth=0.6)
        axis.set_axisbelow(True)
        if panel.inside is not None:
            beside = {} if panel.inside else {"bbox_to_anchor": (1, 0.5)}
            axis.legend(loc=panel.inside or "center left", frameon=False, fontsize="small", **beside)
    figure.savefig(path, dpi=110, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
    plt.close(figure)
