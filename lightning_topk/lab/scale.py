"""Many simulated workers train a real small model through the exchange that a cluster runs: ``simulate``.

What they learn, what they send and how their selections overlap is what it would be on a cluster. How long a cluster would take is
predicted by :mod:`lightning_topk.planning.costs`.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor

from lightning_topk.config import TopKConfig
from lightning_topk.lab.plots import Panel
from lightning_topk.lab.report import Result
from lightning_topk.lab.training import Optimizer, Problem, train
from lightning_topk.planning.costs import Links, bytes_per_second, exchange_seconds, load_costs
from lightning_topk.planning.volume import volume
from lightning_topk.simulate import Cluster

RATES = ("1gbit", "10gbit", "100gbit")
WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
NODE = 8
"""Ranks of a node in the plot of predicted times."""
INTRA = "300gbyte"


class _Union:
    """Counts the entries that any worker sent, at the servers, before they add what they kept."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []
        self._hooked = False

    def __call__(self, cluster: Cluster, gradients: list[Tensor]) -> int:
        """The union of the last step; zero before the first."""
        if not self._hooked:
            self._hooked = True
            for end in cluster.endpoints:
                if end.downlink is not None:
                    end.downlink.send = self._noting(end.downlink.send)  # type: ignore[method-assign]
        union = int(sum(self._counts))
        self._counts.clear()
        return union

    def _noting(self, send: Any) -> Any:
        def noting(b: Tensor) -> Tensor:
            self._counts.append(b.count_nonzero())
            sent: Tensor = send(b)
            return sent

        return noting


def run(
    workers: int = 64,
    gpus_per_node: int = 1,
    ratio: float = 0.001,
    topology: str = "sharded",
    model: str = "wide mlp",
    steps: int = 60,
    lr: float = 0.3,
    batch_size: int = 10,
    time_params: int = 25_000_000,
    device: str = "cuda",
) -> Result:
    """Trains with compression and without.

    Args:
        workers: Simulated workers.
        gpus_per_node: Workers on each node.
        ratio: Fraction that workers send, and servers.
        topology: Of the exchange; ``"allgather"`` is unidirectional.
        model: A key of :data:`lightning_topk.lab.training.MODELS` that learns digits.
        steps: Of training.
        lr: Learning rate of SGD, the same with and without compression.
        batch_size: Examples a worker and step.
        time_params: Parameters of the model whose times are predicted.
        device: Whose constants predict times.

    Raises:
        ValueError: The workers do not make up nodes, or a number is not positive.
    """
    if min(workers, gpus_per_node, steps, batch_size, time_params) < 1:
        raise ValueError("workers, gpus per node, steps, batch size and parameters must be at least 1.")
    config = TopKConfig(ratio=ratio, topology=topology, bidirectional=topology != "allgather")
    here = config.on(workers, gpus_per_node)
    sizes = [parameter.numel() for parameter in Problem(model, 0).parameters]
    begin, union = time.perf_counter(), _Union()
    sparse = train(
        model, config, workers, steps, Optimizer(lr), 0, batch_size, observe=union, local=gpus_per_node, points=20
    )
    took = (time.perf_counter() - begin) / steps
    dense = train(model, config.dense, workers, steps, Optimizer(lr), 0, batch_size, points=20)
    plan = volume(config, [sizes], workers, local=gpus_per_node)
    peers = workers // gpus_per_node if here.topology == "hierarchical" else workers
    exchanged = volume_of_a_worker(here, sizes, workers, gpus_per_node)
    unions = [count / exchanged for count in sparse.seen[2:] if count]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result = Result(
        "simulate",
        f"{workers} workers, {here.topology} exchange",
        f"Digits, {model} (d = {sum(sizes):,}), {batch_size} examples a worker and step, SGD lr {lr:g}, {steps} steps, ratio {ratio:g}: a "
        f"worker sends {exchanged:,} entries, {exchanged / sum(sizes):.2%} of its gradient (every one of {peers} servers gets at least "
        f"one). The simulator took {took:.2f} s a step and at most {peak / 2**30:.2f} GiB.",
    )
    result.tables["After the last step"] = [
        {
            "exchange": name,
            "training loss": one.loss,
            "accuracy %": one.accuracy,
            "bytes a rank and step": f"{sent:,.0f}",
        }
        for name, one, sent in (
            (here.topology, sparse, plan.uplink + plan.downlink),
            ("dense", dense, plan.dense),
        )
    ]
    if unions:
        result.tables["Union of the workers' selections over one selection"] = [
            {"first": unions[0], "last": unions[-1], "workers": peers}
        ]
    result.panels.append(
        Panel(
            "training loss",
            "step",
            {name: _curve(one.curve) for name, one in ((here.topology, sparse), ("dense", dense))},
            ylog=True,
        )
    )
    if unions:
        result.panels.append(
            Panel("union of selections / k", "step", {here.topology: (list(range(len(unions))), unions)})
        )
    result.panels += _times(result, time_params, ratio, device)
    return result


def volume_of_a_worker(config: TopKConfig, sizes: list[int], workers: int, local: int) -> int:
    """Entries for which a worker's payloads have room; of a node's together if its ranks are one worker."""
    end = config.endpoint(sum(sizes), 0, workers, torch.float32, torch.device("cpu"), tuple(sizes), local)
    return end.uplink.codec.kept * end.layout.shards * end.parts.count


def _curve(points: list[tuple[int, float, float]]) -> tuple[list[float], list[float]]:
    return [float(step) for step, *_ in points], [loss for _, loss, _ in points]


def _times(result: Result, numel: int, ratio: float, device: str) -> list[Panel]:
    """Predicted exchange times of every topology, as the number of workers grows."""
    costs, panels, rows = load_costs(device), [], []
    for rate in RATES:
        links = Links(bytes_per_second(rate), bytes_per_second(INTRA))
        panel = Panel(f"predicted s of an exchange, {numel:,} elements, {rate}", "workers", xlog=True, ylog=True)
        for topology in ("dense", "sharded", "hierarchical", "single_server", "allgather"):
            config = TopKConfig(ratio=ratio, topology=topology, bidirectional=topology != "allgather")
            seconds = [exchange_seconds(config, [numel], count, NODE, links, costs) for count in WORKERS]
            panel.curves[topology] = (WORKERS, seconds)
            shown = {
                f"W = {count}": 1000 * each
                for count, each in zip(WORKERS, seconds, strict=True)
                if count in (8, 64, 1024)
            }
            rows.append({"link": rate, "topology": topology, **shown})
        panels.append(panel)
    result.tables[f"Predicted ms of an exchange of {numel:,} elements, {NODE} ranks a node ({costs.source})"] = rows
    return panels
