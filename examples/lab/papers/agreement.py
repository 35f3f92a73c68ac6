"""How far Adam moves an entry whose gradients agree: the movement over dense training's, by signal over noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

from lab.report import Result
from lab.training import run_all
from lightning_topk.config import TopKConfig
from lightning_topk.optim.momentum import adapt_momentum
from lightning_topk.simulate import Cluster

ENTRIES, WORKERS = 20_000, 2
SIGNAL = (0.0, 0.1, 0.3, 1.0, 3.0, math.inf)
"""The mean of an entry's gradient over its standard deviation, of the mean over the workers."""
KINDS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters, **_: SGD(parameters, 1e-3, 0.9),
    **{kind.__name__: partial(kind, lr=1e-3) for kind in (Adam, AdamW, NAdam, RAdam, Adamax)},
}
SENT = {
    "saving=10": TopKConfig(saving=10),
    "saving=50": TopKConfig(saving=50),
    "ratio=0.001": TopKConfig(ratio=0.001),
}
SQUARES = (0.95, 0.99, 0.999)
"""Second betas."""


def run(steps: int = 300) -> Result:
    """Each optimizer, at each amount sent and each second beta."""
    panels = {
        f"{sent}, beta2 {beta:g}": {kind: (kind, sent, beta if kind != "SGD" else 0.0) for kind in KINDS}
        for sent in SENT
        for beta in SQUARES
    }
    settings = {setting for lines in panels.values() for setting in lines.values()}
    jobs = {(setting, x): partial(measure, *setting, x, steps) for setting in sorted(settings) for x in SIGNAL}
    found = run_all(jobs, "agreement")
    result = Result(
        "agreement",
        "how far an entry moves whose gradients agree",
        f"A linear loss whose gradient is a constant and noise, {ENTRIES:,} entries, {WORKERS} simulated workers, "
        f"{steps} steps. Movement along the constant over dense training's; without a signal, the root mean square of "
        "the movement.",
    )
    for title, lines in panels.items():
        curves = result.panel(title, "signal over noise", xlog=True, ylabel="movement over dense's", level=1.0)
        rows = result.tables[title] = []
        for label, setting in lines.items():
            moved = [found[setting, x] for x in SIGNAL]
            rows.append({"": label} | {f"{x:g}": f"{each:.2f}" for x, each in zip(SIGNAL, moved, strict=True)})
            curves[label] = [x for x in SIGNAL if 0 < x < math.inf], moved[1:-1]
    return result


def measure(kind: str, sent: str, beta: float, signal: float, steps: int) -> float:
    """How far the entries move in ``steps``, over how far they move in dense training."""
    torch.manual_seed(0)
    ours, dense = torch.zeros(2, ENTRIES)
    options = {} if kind == "SGD" else {"betas": (0.9, beta), "weight_decay": 0.0}
    adapted, plain = (KINDS[kind]([parameter], **options) for parameter in (ours, dense))
    cluster = Cluster(SENT[sent], WORKERS, ENTRIES)
    adapt_momentum([adapted], cluster)
    along = torch.randn(ENTRIES).sign()
    constant, deviation = (along, 1 / signal) if signal else (0 * along, 1.0)
    for _ in range(steps):
        gradients = [constant + deviation * math.sqrt(WORKERS) * torch.randn(ENTRIES) for _ in range(WORKERS)]
        ours.grad, dense.grad = cluster.step(gradients)[0], torch.stack(gradients).mean(0)
        adapted.step()
        plain.step()
    return _length(ours, along, signal) / _length(dense, along, signal)


def _length(moved: Tensor, along: Tensor, signal: float) -> float:
    return float(moved @ along) if signal else float(moved.norm())
