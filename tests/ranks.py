"""Helpers for tests on real ranks: nets, gradients and residuals as one flat tensor, and sums over ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
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
from lightning_topk.optim.applied import FALL
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


def waiting(residuals: Residuals, parameters: Iterable[Tensor], world: int) -> dict[Tensor, Tensor]:
    """This rank's share of what waits of each parameter, ``[numel]``: a part of the workers' mean and of the servers'.

    The sum over all ranks is not yet delivered. ``parameters`` have whole buckets.
    """
    found, known = {}, [p for p in parameters if p in residuals]
    for several, _, shares in residuals.shares("residual", known, world, known[0].device) if known else ():
        found |= zip(several, (each.clone() for each in shares), strict=True)
    return found


def share(state: Any, net: nn.Module) -> Tensor:
    """This rank's share of what waits: ``[numel]``."""
    known = waiting(state.residuals, net.parameters(), state.world)
    return torch.cat([known.get(p, torch.zeros(p.numel(), device=p.device)) for p in net.parameters()])


def undelivered(state: Any, net: nn.Module) -> Tensor:
    """The mean of the workers' residuals plus the sum of the servers', as a checkpoint has it: ``[numel]`` float64."""
    entry = getattr(state, "full_state_dict", state.state_dict)()
    total = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    parts = total.split([p.numel() for p in net.parameters()])
    for (name, _), part in zip(net.named_parameters(), parts, strict=True):
        if name in entry["parameters"]:
            part += entry["parameters"][name]["residual"].double()
    return shared(total)


def mean_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    x = x.double().clone()
    dist.all_reduce(x, group=group)
    return x.cpu() / dist.get_world_size(group)


def every_rank(x: Tensor) -> Tensor:
    """Every rank's tensor, stacked, on the CPU; gloo gathers no tensors of GPUs, and NCCL none of CPUs."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, x.cpu())
    return torch.stack(rows)


class Run:
    """The training of ``net``, wrapped as ``model``, on a rank: what the laws are about. ``alone`` is a bare copy.

    By steps: this rank's own gradients, ``computed``, and those it ``received``, ``[numel]``; and bytes, as they were
    ``sent`` and as they were ``planned``.
    """

    def __init__(
        self, rank: int, alone: nn.Module, net: nn.Module, model: nn.Module, state: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.alone, self.net, self.model = rank, alone, net, model
        self.state, self.optimizer = state, optimizer
        self.computed: list[Tensor] = []
        self.received: list[Tensor] = []
        self.sent: list[dict[str, int]] = []
        self.planned: list[dict[str, int]] = []
        self._rates: Tensor | None = None  # at which what waits counts; None before the first step

    def backward(self, step: int, **use: bool) -> None:
        """Computes the gradients of a step; what waits, and what was computed and received before it, fades."""
        if self._rates is not None:
            now = torch.maximum(self.rates(), FALL * self._rates)
            fade, self._rates = (self._rates / now).nan_to_num(1.0).clamp(max=1), now
            for several in (self.computed, self.received):
                several[:] = [fade * each for each in several]
        self.computed.append(local_gradient(self.alone, self.net, self.rank, step, **use))
        self.net.zero_grad()
        loss_of(self.model, self.rank, step, **use).backward()
        self.received.append(gradient(self.net))

    def own(self) -> Tensor:
        """The mean over the ranks of what the last step computed."""
        return mean_over_ranks(self.computed[-1])

    def rates(self) -> Tensor:
        """The learning rate of each entry: ``[numel]``."""
        rate_of = {p: group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        return torch.cat([torch.full((p.numel(),), rate_of[p]) for p in self.net.parameters()])

    def step(self) -> None:
        """Takes the optimizer's step."""
        self.optimizer.step()
        self._rates = self.rates() if self._rates is None else self._rates

    def check(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Fails if a law is broken (:func:`laws.check`); returns what every rank received, and what is left."""
        means, rows = mean_over_ranks(torch.stack(self.computed)), every_rank(torch.stack(self.received))
        left = undelivered(self.state, self.net)
        laws.check(means, rows, left, self.sent, self.planned, **options)
        return rows, left


def alike(x: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    rows = every_rank(x)
    return all(torch.equal(row, rows[0]) for row in rows)


def shared(entry: Any) -> Any:
    """Rank 0's, such as an entry for a checkpoint; NCCL sends no tensors of CPUs but in objects."""
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

    def clear(self) -> None:
        """Starts counting anew."""
        self.bytes.clear()
        self.to.clear()

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
