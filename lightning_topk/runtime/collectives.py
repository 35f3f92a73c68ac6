"""Drives an exchange over process groups: performs its requests as collectives and counts their bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.core.requests import AllGather, AllReduce, AllToAll, Broadcast, Gather, Request, request_volume
from lightning_topk.runtime.groups import all_gather
from lightning_topk.runtime.jobs import Job
from lightning_topk.runtime.messages import LOGGER
from lightning_topk.volume import Volume

T = TypeVar("T")
Steps = Generator["dist.Work | None", None, T]
"""A generator that yields before it waits: a collective, or None to wait until all earlier steps have ended."""


def finish(steps: Steps[T]) -> T:
    """Runs steps to completion and returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@torch.no_grad()
def drive(job: Job, background: bool = False) -> Steps[Tensor]:
    """Drives one rank's exchange over process groups; returns the delivered gradient.

    In the ``background``, collectives run asynchronously while other exchanges progress; if not, it never yields. The
    DEBUG log gets a line with the exchange's name before each collective: after a timeout, NCCL's watchdog ends the
    process and names only the group, the collective and its size.
    """
    groups, outcome, sent, reply = job.groups, None, Volume(), None
    logged = LOGGER.isEnabledFor(logging.DEBUG)
    place = dist.get_rank(groups.all), dist.get_world_size(groups.all), groups.local
    try:
        exchange = job.begin()
        if exchange is None and background:
            yield None  # ends in its turn: until then the next exchange must not use its groups
        while exchange is not None:
            try:
                request = exchange.send(reply)
            except StopIteration as end:
                outcome = end.value
                break
            sent += request_volume(request, *place)
            if logged:
                kind, size = type(request).__name__, request.payload.numel()
                where = f"{request.among}, {request.direction}"
                LOGGER.debug("%s: %s of %d elements among %s", str(job), kind, size, where)
            across = request.among == "all" and 1 < groups.local < place[1]
            reply, work = perform(request, groups.among(request.among), background, across)
            if work is not None:
                yield work
                work.wait()
        return job.end(outcome, sent)
    except Exception as error:
        raise job.failure(error) from error


def perform(
    request: Request, group: dist.ProcessGroup, background: bool = False, across_nodes: bool = False
) -> tuple[Tensor | None, dist.Work | None]:
    """Performs one request as a collective.

    Args:
        request: The request.
        group: The ranks that take part.
        background: Whether to return before the collective ends.
        across_nodes: Whether these ranks share nodes, of which there are several.

    Returns:
        The reply (see the request's class), and the work to wait for before reading it; None if there is none.
    """
    payload, rank, world = request.payload, dist.get_rank(group), dist.get_world_size(group)
    if payload.is_cuda and "cuda:gloo" in dist.get_backend_config(group):
        # gloo supports most collectives on CPU tensors only: the payload is copied there and back, and the host waits.
        reply, _ = perform(replace(request, payload=payload.cpu()), group, False, across_nodes)
        return None if reply is None else reply.to(payload.device), None
    if isinstance(request, AllGather) and not payload.is_cuda and not across_nodes:
        # gloo gathers in a ring of W - 1 steps, one after the other. An all-to-all of W copies takes one step, but each
        # rank of another node gets a copy of its own: a ring sends fewer bytes between nodes of several ranks.
        request = AllToAll(payload.repeat(world, 1), request.direction, request.among)
        payload = request.payload
    if isinstance(request, AllToAll):
        received = torch.empty_like(payload)
        return received, dist.all_to_all_single(received, payload, group=group, async_op=background)
    if isinstance(request, AllGather):
        received = payload.new_empty(world, len(payload))
        return received, all_gather(received.view(-1), payload, group, background)
    if isinstance(request, AllReduce):
        return payload, dist.all_reduce(payload, group=group, async_op=background)
    root = dist.get_global_rank(group, 0)
    if isinstance(request, Gather):
        rows = payload.new_empty(world, len(payload)) if rank == 0 else None
        into = None if rows is None else list(rows.unbind())
        return rows, dist.gather(payload, into, dst=root, group=group, async_op=background)
    assert isinstance(request, Broadcast)
    # A scatter of equal rows: rank 0 itself sends to every other rank, as the parameter server of the papers does. A
    # broadcast would forward through a tree that depends on the backend, so its bytes could not be predicted.
    received = torch.empty_like(payload)
    row = [payload] * world if rank == 0 else None
    return received, dist.scatter(received, row, src=root, group=group, async_op=background)


def dense_cost(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[float, float]:
    """Times a very small all-reduce and one of ``nbytes``. A collective; the host waits for a GPU.

    Returns:
        Seconds for each all-reduce of any size, and for each byte of its tensor; the same on all ranks.
    """
    took = []
    for count in (16, max(32, nbytes // 4)):
        x = torch.zeros(count, dtype=torch.float32, device=device)
        for timed in (False, True):  # the first one sets up connections
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            dist.all_reduce(x, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if timed:
                took.append(time.perf_counter() - begin)
    slowest = torch.tensor(took, dtype=torch.float32, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    small, large = slowest.tolist()
    return small, max(0.0, large - small) / x.nbytes
