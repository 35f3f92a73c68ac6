"""``simulate``: many simulated workers train a small model through the exchange that a cluster runs.

What they learn, what they send and how their selections overlap is what it would be on a cluster; ``plan`` predicts how
long it would take there.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lightning_topk.build import make_codecs, make_shape
from lightning_topk.config import TopKConfig
from lightning_topk.lab.commands import add_command, check_folder, finish, need
from lightning_topk.lab.report import Panel, Result
from lightning_topk.lab.training import Optimizer, Problem, train
from lightning_topk.planning.volume import volume
from lightning_topk.saving import with_ratio
from lightning_topk.simulate import Cluster


def declare(commands: Any) -> None:
    """Declares ``simulate``."""
    parser = add_command(commands, "simulate", run)
    help_ = "folder for files (default: %(default)s)"
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("simulated"), help=help_)
    parser.set_defaults(main=write)


def write(arguments: argparse.Namespace) -> None:
    """Simulates, prints the result, and writes its JSON and picture."""
    need("matplotlib")
    need("sklearn", "scikit-learn")
    check_folder(arguments.out)
    finish(arguments).write(arguments.out)
    print(f"files: {arguments.out / 'simulate.json'}, {arguments.out / 'simulate.png'}")


class _Union:
    """Counts the entries that any worker sent, at the servers, before they add what they kept."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []
        self._hooked = False

    def __call__(self, cluster: Cluster, gradients: list[Tensor]) -> int:
        """The union of the last step; zero before the first."""
        for end in () if self._hooked else cluster.endpoints:
            if end.downlink is not None:
                end.downlink.send = self._noting(end.downlink.send)  # type: ignore[method-assign]
        self._hooked = True
        union = int(sum(self._counts))
        self._counts.clear()
        return union

    def _noting(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def noting(b: Tensor, *arguments: Any) -> Any:
            self._counts.append(b.count_nonzero())
            return send(b, *arguments)

        return noting


def run(
    workers: int = 64,
    gpus_per_node: int = 1,
    saving: float | None = None,
    ratio: float | None = None,
    topology: Literal["sharded", "hierarchical", "single_server", "allgather"] = "sharded",
    model: Literal["mlp", "wide mlp", "cnn", "lstm"] = "wide mlp",
    steps: int = 60,
    lr: float = 0.3,
    batch_size: int = 10,
) -> Result:
    """Trains a small model by many workers in one process, with compression and without.

    Args:
        workers: Simulated workers.
        gpus_per_node: Workers on each node.
        saving: How many times fewer bytes than all-reduce to send. Default: 50.
        ratio: Fraction that workers send, and servers, instead.
        topology: Topology of the exchange; allgather is unidirectional.
        model: Model, which learns digits.
        steps: Steps of the run.
        lr: Learning rate of SGD, the same with and without compression.
        batch_size: Examples of each worker in a step.

    Raises:
        ValueError: The workers do not make up nodes, or a number is not positive.
    """
    if min(workers, gpus_per_node, steps, batch_size) < 1 or not lr > 0:
        raise ValueError("workers, gpus per node, steps and batch size must be at least 1, lr positive.")
    config = TopKConfig(ratio=ratio, saving=saving, topology=topology, bidirectional=topology != "allgather")
    sizes = [parameter.numel() for parameter in Problem(model, 0).parameters]
    here = with_ratio(config.on(workers, gpus_per_node), sizes, workers, gpus_per_node)
    shared: dict[str, Any] = {"workers": workers, "steps": steps, "seed": 0, "batch": batch_size, "points": 20}
    shared["optimizer"] = Optimizer(lr)
    begin = time.perf_counter()
    sparse = train(model, config, observe=_Union(), local=gpus_per_node, **shared)
    took = (time.perf_counter() - begin) / steps
    dense = train(model, config.dense, **shared)
    shape = make_shape(here, sizes, workers, gpus_per_node)
    # Entries of a worker's payloads; of a node's together, if its ranks are one worker.
    sent = make_codecs(here, shape).uplink.kept * shape.layout.shards * shape.parts.count
    peers = workers // gpus_per_node if here.topology == "hierarchical" else workers
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result = Result(
        "simulate",
        f"{workers} workers, {here.topology} exchange",
        f"Digits, {model} (d = {sum(sizes):,}), {batch_size} examples a worker and step, SGD lr {lr:g}, {steps} steps, "
        f"ratio {here.ratio:.3g}: a worker sends {sent:,} entries, {sent / sum(sizes):.2%} of its gradient (every one "
        f"of {peers} servers gets at least one). The simulator took {took:.2f} s a step and at most {peak / 2**30:.2f} "
        "GiB.",
    )
    plan, rows = volume(config, [sizes], workers, local=gpus_per_node), []
    panel = Panel("training loss", "step", ylog=True)
    for name, run, nbytes in ((here.topology, sparse, plan.uplink + plan.downlink), ("dense", dense, plan.dense)):
        row = {"exchange": name, "training loss": run.loss, "accuracy %": run.accuracy}
        rows.append({**row, "bytes a rank and step": f"{nbytes:,.0f}"})
        panel.curves[name] = ([step for step, *_ in run.curve], [loss for _, loss, _ in run.curve])
    result.tables["After the last step"] = rows
    result.panels.append(panel)
    unions = [count / sent for count in sparse.seen[2:] if count]
    if unions:
        title = "Union of the workers' selections over one selection"
        result.tables[title] = [{"first": unions[0], "last": unions[-1], "workers": peers}]
        curve = ([*range(len(unions))], unions)
        result.panels.append(Panel("union of selections / k", "step", {here.topology: curve}))
    return result
