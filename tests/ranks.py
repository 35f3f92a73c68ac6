"""Helpers for tests on real ranks: nets, gradients and residuals as one flat tensor, and sums over ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import laws
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lightning_topk
from lightning_topk.runtime.residuals import Residuals


class Net(nn.Module):
    """Layers of odd sizes, a scalar, an empty parameter (FSDP2 supports none), and parts that can be left out."""

    def __init__(self, empty: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.last = nn.Linear(20, 51), nn.Linear(51, 51), nn.Linear(51, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0)) if empty else torch.ones(0)

    def forward(self, x: Tensor, branch: bool = True, scale: bool = True) -> Tensor:
        h = self.first(x).tanh()
        if branch:
            h = h + self.branch(h).tanh()
        return (self.scale * self.last(h) if scale else self.last(h)) + self.empty.sum()


def four_layers() -> nn.Sequential:
    """A net with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])


def batch(rank: int, step: int, features: int = 20) -> Tensor:
    """A rank's batch in a step: ``[8, features]``."""
    return torch.randn(8, features, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(net: nn.Module, rank: int, step: int, **use: bool) -> Tensor:
    """The loss of a net of 20 features, on the device of its parameters."""
    return net(batch(rank, step).to(next(net.parameters()).device), **use).square().mean()


_OPEN: list[Any] = []


def attach(*args: Any, **settings: Any) -> Any:
    """As ``lightning_topk.attach``, but :func:`states_closed` closes the state."""
    _OPEN.append(lightning_topk.attach(*args, **settings))
    return _OPEN[-1]


@contextmanager
def states_closed() -> Iterator[None]:
    """Closes the states that were attached meanwhile, unless a test has closed them."""
    try:
        yield
    finally:
        while _OPEN:
            _OPEN.pop().close()


def attached(net: nn.Module, ddp: dict[str, Any] | None = None, **settings: Any) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(net, **(ddp or {}))
    return model, attach(model, **settings)


def train(net: nn.Module, rank: int, steps: Iterable[int], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Computes the gradients of some steps and, with an optimizer, takes the steps."""
    for step in steps:
        net.zero_grad()
        loss_of(net, rank, step).backward()
        if optimizer is not None:
            optimizer.step()


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().flatten()


def weights(net: nn.Module) -> Tensor:
    """All parameters, sharded ones gathered: ``[numel]``."""
    return torch.cat([_full(p) for p in net.parameters()])


def gradient(net: nn.Module) -> Tensor:
    """All gradients, zero if a parameter has none: ``[numel]``."""
    grads = [torch.zeros(p.shape, device=p.device) if p.grad is None else p.grad for p in net.parameters()]
    return torch.cat([*map(_full, grads)])


def local_gradient(alone: nn.Module, net: nn.Module, rank: int, step: int, **use: bool) -> Tensor:
    """This rank's own gradient at the weights of ``net``; ``alone`` is an unwrapped copy of it."""
    nn.utils.vector_to_parameters(weights(net), alone.parameters())
    alone.zero_grad()
    loss_of(alone, rank, step, **use).backward()
    return gradient(alone)


def held_by(residuals: Residuals) -> dict[Tensor, tuple[Tensor, Tensor]]:
    """A rank's residual of each exchanged parameter, as a worker and as a server, each ``[numel]``.

    Over all ranks, the mean of the first plus the sum of the second is not yet delivered.
    """
    served: dict[Tensor, Tensor] = {}
    for bucket, end in residuals._live.items():
        flat = torch.zeros(end.plan.parts.numel, dtype=end.dtype, device=end.sizes.device)
        end.add_served("residual", flat, 1 / residuals._rates.get(bucket, 1.0))
        served.update(zip(bucket, flat.split(list(end.plan.parts.slices)), strict=True))
    found = {}
    over = {p: rate for bucket, rate in residuals._rates.items() for p in bucket}
    for p, kept in residuals._kept.items():
        zero = torch.zeros(p.numel(), device=p.device)
        worker, server = kept.parts.get("residual"), served.get(p)
        found[p] = (
            zero if worker is None else kept.spread(worker, p.numel(), residuals.rank, kept.count) / over.get(p, 1.0),
            zero if server is None else kept.spread(server, p.numel(), residuals.rank),
        )
    return found


def held(state: Any, net: nn.Module) -> Tensor:
    """This rank's residuals as a worker and as a server: ``[2, numel]``."""
    kept = held_by(state.residuals)
    sides = [kept.get(p, (torch.zeros(p.numel(), device=p.device),) * 2) for p in net.parameters()]
    return torch.stack([torch.cat(side) for side in zip(*sides, strict=True)])


def undelivered(state: Any, net: nn.Module) -> Tensor:
    """The mean of the workers' residuals plus the sum of the servers': ``[numel]`` float64."""
    if not hasattr(state, "full_state_dict"):
        worker, server = held(state, net)
        return mean_over_ranks(worker + dist.get_world_size() * server)
    kept = state.full_state_dict()["parameters"]
    known = [
        kept[name]["residual"].double() if name in kept else torch.zeros(p.numel(), dtype=torch.float64)
        for name, p in net.named_parameters()
    ]
    total = torch.cat(known)
    dist.broadcast(total, 0)
    return total


def mean_over_ranks(x: Tensor) -> Tensor:
    x = x.double()
    dist.all_reduce(x)
    return x.cpu() / dist.get_world_size()


def every_rank(x: Tensor) -> Tensor:
    """Every rank's tensor, stacked, on the CPU; gloo gathers no tensors of GPUs, and NCCL none of CPUs."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, x.cpu())
    return torch.stack(rows)


def check_laws(
    state: Any, net: nn.Module, computed: list[Tensor], received: list[Tensor], *sizes: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """As :func:`laws.check`, by rank, with bytes in ``sizes``; returns what every rank received, and what is left."""
    means, rows = mean_over_ranks(torch.stack(computed)), every_rank(torch.stack(received))
    left, (sent, planned) = undelivered(state, net), sizes or ([], [])
    laws.check(means, rows, left, sent, planned, **options)
    return rows, left


@dataclass
class Run:
    """The training of ``net``, wrapped as ``model``, and what was computed and received, times rates: ``[numel]``."""

    rank: int
    alone: nn.Module  # an unwrapped copy
    net: nn.Module
    model: nn.Module
    state: Any
    optimizer: torch.optim.Optimizer
    computed: Tensor | float = 0.0
    received: Tensor | float = 0.0

    def by_entry(self, values: dict[str, float]) -> Tensor:
        """A parameter's value, for each entry: ``[numel]`` float64."""
        return torch.cat([torch.full((p.numel(),), values[name]).double() for name, p in self.net.named_parameters()])

    def rates(self) -> Tensor:
        """The rate of each entry: ``[numel]``."""
        rate_of = {p: group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        return self.by_entry({name: rate_of[p] for name, p in self.net.named_parameters()})

    def backward(self, step: int) -> None:
        self.own = mean_over_ranks(local_gradient(self.alone, self.net, self.rank, step))
        train(self.model, self.rank, [step])

    def step(self) -> None:
        """Takes the step, and adds up what was computed and received."""
        self.optimizer.step()
        self.computed = self.computed + self.rates() * self.own
        self.received = self.received + self.rates() * gradient(self.net).double()

    def check(self) -> None:
        """Fails unless the residuals hold what was computed and not received, in the unit that they have."""
        units = self.state.residuals.units(self.state.optimizers.rates)
        rates = {self.state.names[member]: unit.rate for member, unit in units.items()}
        left = undelivered(self.state, self.net) * self.by_entry(rates)
        assert left.norm() > 0.1 * self.received.norm(), "something waits"
        torch.testing.assert_close(self.received + left, self.computed, atol=1e-6, rtol=1e-4)


def users_clipping(state: Any) -> Any:
    """The norm to which the user's clipping seems to clip, its factor, how sure it is, and slack: no public names."""
    return state.optimizers._clipping._limit


def alike(x: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    rows = every_rank(x)
    return all(torch.equal(row, rows[0]) for row in rows)


def shared(entry: Any) -> Any:
    """Rank 0's entry for a checkpoint."""
    box = [entry]
    dist.broadcast_object_list(box)
    return box[0]


def others(rank: int, world: int) -> list[int]:
    return [each for each in range(world) if each != rank]


class Counted(ExitStack):
    """Counts the bytes that collectives send to other ranks, by patching torch.distributed's functions."""

    COSTS: ClassVar[dict[str, Callable[..., dict[int, int]]]] = {
        "all_to_all_single": lambda rank, world, out, x: dict.fromkeys(others(rank, world), x.nbytes // world),
        "all_reduce": lambda rank, world, x: {(rank + 1) % world: 2 * (world - 1) * x.nbytes // world},
        "all_gather_into_tensor": lambda rank, world, out, x: {(rank + 1) % world: x.nbytes * (world - 1)},
        "reduce_scatter_tensor": lambda rank, world, out, x: {(rank + 1) % world: out.nbytes * (world - 1)},
        "gather": lambda rank, world, x: {0: x.nbytes * (rank != 0)},
        "scatter": lambda rank, world, out: dict.fromkeys(others(rank, world), out.nbytes * (rank == 0)),
    }
    """Bytes by their receiver; of rings, the next rank."""
    NEWER: ClassVar = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[frozenset[int], int] = {}
        """Bytes by the ranks that take part."""
        self.to: dict[int, int] = {}
        """Bytes by the rank that receives them."""
        for name in (*self.COSTS, *self.NEWER):
            if hasattr(dist, name):
                self.enter_context(mock.patch.object(dist, name, self._count(name, getattr(dist, name))))

    def _count(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            ranks = dist.get_process_group_ranks(group)
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            costs = self.COSTS[self.NEWER.get(name, name)](dist.get_rank(group), len(ranks), *tensors)
            for number, cost in costs.items():
                self.to[ranks[number]] = self.to.get(ranks[number], 0) + cost
            self.bytes[frozenset(ranks)] = self.bytes.get(frozenset(ranks), 0) + sum(costs.values())
            return function(*args, **kwargs)

        return counted


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the error that a call raises; empty if it raises none."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def unsaid(said: Iterable[tuple[str, str]]) -> list[str]:
    """Of pairs of expected words and a message, those whose message lacks the words."""
    return [f"{found!r} instead of {words!r}" for words, found in said if words not in found]


counts_threads = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")


def open_now() -> list[int]:
    """Numbers of this process's threads, file descriptors and process groups."""
    kinds = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd"), dist.distributed_c10d._world.pg_map
    return [*map(len, kinds)]


@contextmanager
def log(name: str = "lightning_topk") -> Iterator[list[str]]:
    words: list[str] = []
    with mock.patch.object(logging.getLogger(name), "handle", lambda record: words.append(record.getMessage())):
        yield words
