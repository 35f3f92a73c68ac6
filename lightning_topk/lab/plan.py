"""``plan``: bytes, times and memory of every topology, before the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_topk.config import SAVING, TopKConfig
from lightning_topk.core.wire import WireName
from lightning_topk.lab.commands import add_command, call, need
from lightning_topk.lab.report import markdown
from lightning_topk.planning.advice import Hardware, forecasts, parameter_sizes, saving_at, sentence, table
from lightning_topk.planning.costs import CPU, GPU, Links, bytes_per_second, load_costs
from lightning_topk.planning.quality import sentence as quality
from lightning_topk.planning.sharded import sharded_forecast, sharded_table


def declare(commands: Any) -> None:
    """Declares ``plan``."""
    parser = add_command(commands, "plan", run)
    parser.set_defaults(main=show)
    words = ""
    if steps is not None:
        found_at = partial(saving_at, sizes=sizes, hardware=hardware, base=base, bucket_cap_mb=bucket_cap_mb)
        words = f"\n\n{quality(steps, found_at)}"
    unsure = "With constants that were not measured here: " if hardware.costs in (CPU, GPU) else ""
    return (
        f"{sum(sizes):,} parameters, float32; {nodes} nodes of {gpus_per_node} ranks, {inter} between, {intra} "
        f"inside.\nTimes are predictions; constants: {hardware.costs.source}.\n\n"
        f"{markdown(table(found, compute))}\n\n{unsure}{sentence(found, compute, bucket_cap_mb)}{words}"
    )
