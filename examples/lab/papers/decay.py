"""Weight decay in the gradient: norms and losses after training, with DDP and with compression."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lab.report import Result
from lab.training import Optimizer, run_all, train
from lightning_topk.config import TopKConfig
from lightning_topk.optim.momentum import adapt_momentum
from lightning_topk.plan import Row
from lightning_topk.simulate import Cluster

WORKERS = 4
SENT: Mapping[str, TopKConfig] = {
    "as with DDP": TopKConfig(topology="dense"),
    "saving=50": TopKConfig(saving=50),
    "ratio=0.001": TopKConfig(ratio=0.001),
}
DECAYS = (1e-5, 5e-4, 5e-3)


def run(data: Path | None = None, steps: int = 3000, seeds: int = 1) -> Result:
    """Trains with SGD: an MLP on digits, an embedding with unused rows and, with ``data``, a convnet on its images."""
    result = Result(
        "decay",
        "whether SGD's weight decay arrives with compression",
        f"{WORKERS} simulated workers, SGD with momentum 0.9, {steps:,} steps, {seeds} seed(s). The norm of the "
        "weights, and the training loss. Of the embedding's 2,000 rows batches use the first 1,000, the later ones of "
        "these rarely: the norm of the used rows, and of the others.",
    )
    models = ("mlp", "convnet", "embedding") if data is not None else ("mlp", "embedding")
    jobs = {
        (model, decay, sent, seed): partial(measure, model, decay, sent, steps, seed, data)
        for model, decay, sent, seed in itertools.product(models, DECAYS, SENT, range(seeds))
    }
    found = run_all(jobs, "decay")
    for model in models:
        rows = result.tables[model] = []
        for decay in DECAYS:
            row: Row = {"weight decay": f"{decay:g}"}
            for sent in SENT:
                ends = torch.tensor([found[model, decay, sent, seed] for seed in range(seeds)]).mean(0).tolist()
                loss, *norms = ends
                row[sent] = f"{', '.join(f'{norm:.2f}' for norm in norms)} (loss {loss:.3g})"
            rows.append(row)
    return result


def measure(model: str, decay: float, sent: str, steps: int, seed: int, data: Path | None) -> tuple[float, ...]:
    """The training loss and the norm of the weights; of the embedding, those of the used and of the unused rows."""
    if model == "embedding":
        return _embedding(decay, SENT[sent], steps, seed)
    optimizer = Optimizer(0.05, 0.9, weight_decay=decay)
    ended = train(model, SENT[sent], WORKERS, steps, optimizer, seed, data=data if model == "convnet" else None)
    return ended.loss, ended.norm


def _embedding(decay: float, config: TopKConfig, steps: int, seed: int) -> tuple[float, ...]:
    """Regression on the sum of the embeddings of ten words."""
    torch.manual_seed(seed)
    table, truth, head = torch.randn(2000, 16) / 4, torch.randn(2000), torch.randn(16) / 4
    theta = torch.cat([table.flatten(), head])
    made = torch.optim.SGD([theta], 0.01, 0.9, weight_decay=decay)
    ranks = Cluster(config, WORKERS, len(theta), sizes=(table.numel(), len(head)))
    if config.adapts_momentum:
        adapt_momentum([made], ranks)
    chances, losses = 1 / torch.arange(1, 1001), list[float]()  # as words of a text
    for _ in range(steps):
        gradients = list[Tensor]()
        for _ in range(WORKERS):
            words, weights = torch.multinomial(chances, 160, replacement=True).view(16, 10), theta.clone()
            weights.requires_grad_()
            embedded = nn.functional.embedding(words, weights[:-16].view(2000, 16)).sum(1) @ weights[-16:]
            loss = (embedded - truth[words].sum(1)).square().mean()
            losses.append(float(loss.detach()))
            gradients += torch.autograd.grad(loss, weights)
        theta.grad = ranks.step(gradients)[0]
        made.step()
    rows = theta[:-16].view(2000, 16)
    return sum(losses[-400:]) / 400, float(rows[:1000].norm()), float(rows[1000:].norm())
