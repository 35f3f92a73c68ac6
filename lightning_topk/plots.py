"""Figures. Needs matplotlib: ``pip install lightning_topk[plot]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only; no display is needed, and none is looked for
from matplotlib import pyplot as plt

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Curves by name: steps and values."""


def plot_runs(runs: Mapping[str, Series], path: str | Path) -> None:
    """Draws loss, bytes and compression error over steps.

    Args:
        runs: For each run, by its name, the logged series by their keys: ``train_loss``, and those of
            :class:`lightning_topk.callback.CompressionMonitor` that the run has.
        path: The picture to write; its suffix decides the format.
    """
    panels: list[tuple[str, dict[str, str]]] = [
        ("training loss", {"train_loss": ""}),
        ("bytes sent by rank 0 so far", {"topk/total_bytes": "", "topk/total_dense_bytes": "ring all-reduce"}),
        (
            "compression error ‖a - C(a)‖² / ‖a‖²",
            {"topk/uplink_error": "uplink", "topk/downlink_error": "downlink", "topk/bound": "(1 - k/d)²"},
        ),
    ]
    figure, axes = plt.subplots(1, len(panels), figsize=(15, 4.2), layout="constrained")
    for axis, (title, keys) in zip(axes, panels, strict=True):
        for run, series in runs.items():
            for key, label in keys.items():
                if key in series:
                    axis.plot(*series[key], label=" ".join(filter(None, (run, label))), linewidth=1.2)
        axis.set(title=title, xlabel="step")
        if axis.lines:
            axis.legend(fontsize="small")
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[2].set_ylim(0, 1.02)
    figure.savefig(path, dpi=120)
    plt.close(figure)
