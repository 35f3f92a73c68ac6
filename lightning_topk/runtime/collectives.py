"""Performs the requests of exchanges as collectives over process groups."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.core.requests import AllGather, AllReduce, AllToAll, Broadcast, Gather, Request
from lightning_topk.runtime.groups import all_gather


def perform(
    request: Request, group: dist.ProcessGroup, background: bool = False, across_nodes: bool = False
) -> tuple[Tensor | None, dist.Work | None]:
    """Performs one request as a collective, of ranks that share nodes if ``across_nodes``, of which there are several.

    Returns the reply (see the request's class). In the ``background`` it returns before the collective ends, also with
    the work to wait for before reading the reply.
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
