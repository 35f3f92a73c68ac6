"""Performs the requests of exchanges as collectives over process groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topk.core.requests import AllGather, AllReduce, AllToAll, Broadcast, Gather, Request
from lightning_topk.runtime.groups import Groups, all_gather


def perform(request: Request, groups: Groups, place: int, wait: Callable[[dist.Work], None] | None) -> Tensor | None:
    """Performs a request as a collective; ``place`` is its number in the exchange.

    Returns the reply (see the request's class) in memory of the ``groups``, or, of an all-reduce, in the payload. With
    ``wait``, the collective runs in the background until ``wait`` returns.
    """
    group, payload, device = groups.among[request.among], request.payload, request.payload.device
    if payload.is_cuda and "cuda:gloo" in dist.get_backend_config(group):
        # gloo supports most collectives on CPU tensors only: the payload is copied there and back, and the host waits.
        reply = perform(replace(request, payload=payload.cpu()), groups, place, None)
        return None if reply is None else reply.to(device)
    across_nodes = request.among == "all" and 1 < groups.local < groups.world
    if isinstance(request, AllGather) and not payload.is_cuda and not across_nodes:
        # gloo gathers in a ring of W - 1 steps, one after the other. An all-to-all of W copies takes one step, but each
        # rank of another node gets a copy of its own: a ring sends fewer bytes between nodes of several ranks.
        request = AllToAll(payload.repeat(group.size(), 1), request.direction, request.among)
        payload = request.payload
    options: dict[str, Any] = {"group": group, "async_op": wait is not None}
    received: Tensor | None
    if isinstance(request, AllToAll):
        received = _memory(groups, place, device, *payload.shape)
        work = dist.all_to_all_single(received, payload, **options)
    elif isinstance(request, AllGather):
        received = _memory(groups, place, device, group.size(), len(payload))
        work = all_gather(received.view(-1), payload, group, wait is not None)
    elif isinstance(request, AllReduce):
        received, work = payload, dist.all_reduce(payload, **options)
    elif isinstance(request, Gather):
        received = _memory(groups, place, device, group.size(), len(payload)) if group.rank() == 0 else None
        into = None if received is None else list(received.unbind())
        work = dist.gather(payload, into, dst=dist.get_global_rank(group, 0), **options)
    else:
        assert isinstance(request, Broadcast)
        # A scatter of equal rows: rank 0 itself sends to every other rank, as the parameter server of the papers does.
        # A broadcast would forward through a tree that depends on the backend, so its bytes could not be predicted.
        received = _memory(groups, place, device, len(payload))
        rows = [payload] * group.size() if group.rank() == 0 else None
        work = dist.scatter(received, rows, src=dist.get_global_rank(group, 0), **options)
    if wait is not None and work is not None:
        wait(work)
    return received


def _memory(groups: Groups, place: int, device: torch.device, *shape: int) -> Tensor:
    """Returns memory for a reply, uint8, valid until the next exchange; it grows to the largest reply."""
    nbytes, kept = math.prod(shape), groups.replies.get(place)
    if kept is None or len(kept) < nbytes or kept.device != device:
        kept = groups.replies[place] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return kept[:nbytes].view(shape)
