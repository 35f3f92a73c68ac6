"""Figures: panels of curves. Drawing needs matplotlib: ``pip install lightning_topk[plot]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Curve = tuple[Sequence[float], Sequence[float]]
"""Values along the two axes."""


@dataclass
class Panel:
    """One pair of axes.

    Args:
        title: What is shown.
        xlabel: The horizontal axis.
        curves: Curves by their label.
        xlog: Whether the horizontal axis is logarithmic.
        ylog: Whether the vertical axis is logarithmic.
        bars: Whether the values are bars, one for each curve, instead.
    """

    title: str
    xlabel: str
    curves: dict[str, Curve] = field(default_factory=dict)
    xlog: bool = False
    ylog: bool = False
    bars: bool = False


def draw(panels: Sequence[Panel], path: str | Path, columns: int = 3) -> None:
    """Draws panels side by side.

    Args:
        panels: What to draw.
        path: The picture to write; its suffix decides the format.
        columns: Panels in a row, at most.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")  # files only; no display is needed, and none is looked for
    from matplotlib import pyplot as plt

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 4 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        for label, (x, y) in panel.curves.items():
            if panel.bars:
                axis.bar(x, y, label=label)
            else:
                axis.plot(x, y, label=label, linewidth=1.2, marker="." if len(x) < 12 else None)
        axis.set(title=panel.title, xlabel=panel.xlabel)
        axis.set_xscale("log" if panel.xlog else "linear")
        axis.set_yscale("log" if panel.ylog else "linear")
        axis.tick_params("x", which="minor", labelsize="x-small", labelrotation=60)  # of less than a decade or two
        if panel.curves:
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_runs(runs: Mapping[str, Mapping[str, Curve]], path: str | Path) -> None:
    """Draws loss, bytes and compression error over steps.

    Args:
        runs: For each run, by its name, the logged series by their keys, steps and values: ``train_loss``, and those of
            :class:`lightning_topk.lightning.callback.CompressionMonitor` that the run has.
        path: The picture to write; its suffix decides the format.
    """
    panels = [
        (Panel("training loss", "step", ylog=True), {"train_loss": ""}),
        (
            Panel("bytes sent by rank 0 so far", "step", ylog=True),
            {"topk/total_bytes": "", "topk/total_dense_bytes": "were it a ring all-reduce"},
        ),
        (
            Panel("compression error ‖a - C(a)‖² / ‖a‖²", "step"),
            {"topk/uplink_error": "uplink", "topk/downlink_error": "downlink", "topk/bound": "(1 - k/d)²"},
        ),
    ]
    for panel, keys in panels:
        for run, series in runs.items():
            for key, label in keys.items():
                if key in series:
                    panel.curves[f"{run} {label}".strip()] = series[key]
    draw([panel for panel, _ in panels], path)
