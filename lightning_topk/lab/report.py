"""The result of a command: tables, verdicts, curves; printed, and written as JSON and a picture.

Pictures need matplotlib: the extra ``plot``.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_topk._version import __version__

Row = dict[str, Any]
Curve = tuple[Sequence[float], Sequence[float]]
"""Values along the two axes."""


@dataclass
class Check:
    """A statement and what was measured.

    Args:
        statement: The claim, in one sentence.
        expected: The target; of a paper's claim the published figure, empty if there is none.
        measured: The measured figure.
        holds: Whether the measurement confirms the claim.
    """

    statement: str
    expected: str
    measured: str
    holds: bool


@dataclass
class Panel:
    """One pair of axes.

    Args:
        title: Title; without ``ylabel`` it names the vertical axis too.
        xlabel: Label of the horizontal axis.
        curves: Curves by their label.
        xlog: Whether the horizontal axis is logarithmic.
        ylog: Whether the vertical axis is logarithmic.
        ylabel: Label of the vertical axis, with its unit.
        level: A height to mark, such as an aim.
        errors: Standard errors of a curve's heights, by its label.
    """

    title: str
    xlabel: str
    curves: dict[str, Curve] = field(default_factory=dict)
    xlog: bool = False
    ylog: bool = False
    ylabel: str = ""
    level: float | None = None
    errors: dict[str, Sequence[float]] = field(default_factory=dict)


METHODS = {
    "#0072b2": ("PowerSGD 2", "topk", "uni"),
    "#d55e00": ("saving 50", "ours", "bidirectional_topk", "bi"),
    "#009e73": ("fp16 hook", "gaussiank"),
    "#cc79a7": ("ratio 0.001", "dgc"),
    "#e69f00": ("saving 150", "trimmed"),
    "#56b4e9": ("PowerSGD 1",),
    "#3b3b98": ("PowerSGD 4",),
    "#999999": ("saving 400", "randk"),
    "#222222": ("DDP", "dense"),
}
"""Who has which colour in every picture; told apart by colour-blind people too (after Okabe and Ito)."""
COLOURS = {method: colour for colour, methods in METHODS.items() for method in methods}


def _versions() -> dict[str, str]:
    machine = f"{os.cpu_count()} {platform.machine()} cores"
    versions = {"lightning_topk": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return versions | {"machine": machine}


@dataclass
class Result:
    """What a command measured.

    Args:
        name: Name of the command.
        claim: What was tested.
        setting: Model, data, workers, steps: all that is needed to judge the figures.
        tables: Rows by the table's title.
        checks: The verdicts.
        panels: The curves.
        seconds: Wall time, seconds.
        command: The command.
        versions: Versions of the packages, and the machine.
        against: What is expected: ``"target"``, or ``"published"`` for the claims of the papers.
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
    against: Literal["target", "published"] = "target"

    def check(self, statement: str, expected: str, measured: str, holds: bool) -> None:
        """Adds a verdict, see :class:`Check`."""
        self.checks.append(Check(statement, expected, measured, holds))

    def text(self) -> str:
        """Tables and verdicts as Markdown that reads well in a terminal."""
        parts = [f"## {self.name}: {self.claim}", self.setting]
        for title, rows in self.tables.items():
            parts.append(f"**{title}**\n\n{markdown(rows)}")
        marks = ("FAIL", "pass")
        rows = [
            {"": marks[each.holds], "claim": each.statement, self.against: each.expected, "measured": each.measured}
            for each in self.checks
        ]
        if rows:
            parts.append(markdown(rows))
        words = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts.append(f"{self.seconds:.0f} s: `{self.command}` ({words})")
        return "\n\n".join(parts)

    @staticmethod
    def read(path: Path) -> Result:
        """Reads a file that :meth:`write` wrote."""
        data = json.loads(path.read_text())
        data["checks"] = [Check(**check) for check in data["checks"]]
        data["panels"] = [Panel(**panel) for panel in data["panels"]]
        return Result(**data)

    def json(self) -> str:
        """The result as JSON."""
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> None:
        """Writes ``NAME.json``, ``NAME.png`` and ``NAME.svg`` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(self.json())
        if self.panels:
            for suffix in ("png", "svg"):
                draw(self.panels, folder / f"{self.name}.{suffix}")


def spread(values: list[float], style: str) -> str:
    """Mean and half the range."""
    return f"{sum(values) / len(values):{style}} ± {(max(values) - min(values)) / 2:{style}}"


def _finite(value: Any) -> Any:
    """The value with infinity and NaN, which JSON does not have, as strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
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


def draw(panels: Sequence[Panel], path: str | Path) -> None:
    """Draws panels, three in a row, with each curve's label at its end.

    Args:
        panels: The panels.
        path: The picture to write; its suffix decides the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws to files: needs no display
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.6 * columns, 4 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        taken = {COLOURS[label] for label in panel.curves if label in COLOURS}
        others = iter([colour for colour in METHODS if colour not in taken] * len(panel.curves))
        lines = []
        for label, (x, y) in panel.curves.items():
            colour = COLOURS.get(label) or next(others)
            lines += axis.plot(x, y, color=colour, linewidth=1.6, marker="." if len(x) < 12 else None)
            if label in panel.errors:
                axis.errorbar(x, y, panel.errors[label], color=colour, linestyle="", linewidth=0.8, capsize=2)
        axis.set_title(panel.title, loc="left", fontsize="medium")
        axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
        for scale, name, room in ((axis.xaxis, "x" * panel.xlog, 2), (axis.yaxis, "y" * panel.ylog, 5)):
            if name:
                (axis.set_xscale if name == "x" else axis.set_yscale)("log")
                low, high = scale.get_view_interval()
                scale.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 10**room else (1,)))
                scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                scale.set_minor_formatter(NullFormatter())
        if panel.level is not None:
            axis.axhline(panel.level, color="#999999", linewidth=0.8, linestyle="--")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e5e5", linewidth=0.6)
        axis.set_axisbelow(True)
        _label_ends(axis, panel, lines)
    figure.savefig(path, dpi=110)
    plt.close(figure)


GAP = 0.065
"""Least distance of two labels beside a panel, as a share of its height."""


def _label_ends(axis: Any, panel: Panel, lines: Sequence[Any]) -> None:
    """Writes the label of each curve beside the panel, as near to the height of its end as others allow."""
    to_axes = axis.transScale + axis.transLimits
    ends = []
    for line, label in zip(lines, panel.curves, strict=True):
        x, y = line.get_xdata()[-1], line.get_ydata()[-1]
        height = to_axes.transform((x, y))[1]
        axis.plot(x, y, "o", color=line.get_color(), markersize=3.5)
        ends.append((height if math.isfinite(height) else 0.0, (x, y), label, line.get_color()))
    ends.sort(key=lambda end: end[0])
    places: list[float] = []
    for height, *_ in ends:
        places.append(max(height, places[-1] + GAP) if places else height)
    over = max(0.0, places[-1] - 1) if places else 0.0
    for number in reversed(range(len(places))):  # down again from the top
        places[number] = min(places[number], 1 - GAP * (len(places) - 1 - number)) if over else places[number]
    for place, (_, end, label, colour) in zip(places, ends, strict=True):
        axis.annotate(
            label, end, (1.04, place), textcoords="axes fraction", color=colour, fontsize="small", va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkB": 0},
            annotation_clip=False,
        )  # fmt: skip
