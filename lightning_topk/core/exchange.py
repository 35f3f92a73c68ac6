"""The path of a gradient: what happens to one bucket between DDP's hook and the optimizer.

Problem. A data-parallel step must turn W local gradients into one that all ranks share, over links too slow for dense
gradients. Method: top-k with error feedback in both directions (Zou 2022; Tang et al. 2019; Zheng et al. 2019)::

    bucket g            [d]     the worker's gradient, from DDP
    1 compensate        a = g + e            the worker's residual e [d] is added; g is zeroed
    2 select            the k/W entries of largest |a| in each of the W shards
    3 encode            values + positions -> uint8 payload [W, P]; its size follows from (d, k, wire)
    4 keep              e = a - decoded payload: the residual includes the wire's rounding error
    5 uplink            all_to_all: shard s of every worker reaches server s
    6 aggregate         b = mean over the workers              [d/W]
    7 repeat 1-4        on the server's shard, with the server's residual E [d/W]
    8 downlink          all_gather: every worker gets every server's reply
    9 deliver           g <- the decoded replies; every rank holds the same bits

:func:`sharded` runs these steps, line by line; :meth:`lightning_topk.core.link.Link.send` does steps 1-4.
:func:`hierarchical` runs them between nodes. :mod:`lightning_topk.core.baselines` has the papers' topologies, for
comparison; :mod:`lightning_topk.core.guards` handles everything else that can happen to a gradient. Each topology also
predicts its requests by arithmetic.

An exchange does no I/O: it *yields* a request where bytes must leave and receives the reply. Process groups
(:mod:`lightning_topk.runtime.jobs`) and the in-memory simulator (:mod:`lightning_topk.simulate`) drive the same
code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from lightning_topk.core import baselines, ops
from lightning_topk.core.endpoint import BucketPlan, Codecs, Endpoint, Path, Topology
from lightning_topk.core.layout import DamagedError
from lightning_topk.core.link import Step, aggregate, deliver
from lightning_topk.core.requests import AllGather, AllToAll, Among, Request, placeholder


def sharded(end: Endpoint, g: Tensor, codecs: Codecs, step: Step) -> Path:
    """Every rank is a worker and the server of one shard."""
    payloads = end.uplink.send(g, codecs.uplink, step)  # 1-4
    received = yield AllToAll(payloads, "uplink")  # 5
    mean = aggregate(received, codecs.uplink, end.dtype, scratch=g)  # 6
    reply = end.reply(mean, codecs.reply, step)  # 7
    replies = yield AllGather(reply, "downlink")  # 8
    return deliver(replies, codecs.reply, end.plan.layout, g, step.scale)  # 9


def sharded_requests(plan: BucketPlan, codecs: Codecs, among: Among = "all") -> list[Request]:
    """Predicts the requests of steps 5 and 8."""
    uplink = AllToAll(placeholder(plan.world, codecs.uplink.nbytes), "uplink", among)
    return [uplink, AllGather(placeholder(codecs.reply.nbytes), "downlink", among)]


def hierarchical(end: Endpoint, g: Tensor, codecs: Codecs, step: Step) -> Path:
    """Dense inside nodes, sparse between them: each rank exchanges one part of its node's mean gradient.

    The ranks that hold the same part run steps 1-8; step 9 decodes the parts of all ranks of the node.
    """
    parts = end.plan.parts
    rows = ops.split_parts(g, parts, lambda: end.pieces)
    received = yield AllToAll(rows.view(torch.uint8), "uplink", "node")
    x = _node_mean(received.view(g.dtype), end.dtype)
    payloads = end.uplink.send(x, codecs.uplink, step)
    received = yield AllToAll(payloads, "uplink", "peers")
    with _sent_by(lambda row: row * parts.count + end.rank % parts.count):
        mean = aggregate(received, codecs.uplink, end.dtype, scratch=x)
    reply = end.reply(mean, codecs.reply, step)
    replies = yield AllGather(reply, "downlink", "peers")
    everyones = yield AllGather(replies.view(-1), "downlink", "node")
    rows.zero_()
    with _sent_by(lambda row: row % end.plan.world * parts.count + row // end.plan.world):
        finite = deliver(everyones.view(-1, codecs.reply.nbytes), codecs.reply, end.plan.layout, rows, step.scale)
    ops.join_parts(rows, parts, lambda: end.pieces, out=g)
    return finite


def hierarchical_requests(plan: BucketPlan, codecs: Codecs) -> list[Request]:
    """Predicts the requests of :func:`hierarchical`."""
    inside = placeholder(plan.parts.count, plan.parts.numel * plan.itemsize)
    replies = placeholder(plan.world * codecs.reply.nbytes)
    between = sharded_requests(plan, codecs, "peers")
    return [AllToAll(inside, "uplink", "node"), *between, AllGather(replies, "downlink", "node")]


@contextmanager
def _sent_by(rank_of: Callable[[int], int]) -> Iterator[None]:
    """Translates the rows that a DamagedError names into the ranks that sent them, by ``rank_of``."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError([*map(rank_of, error.senders)]) from None


def _node_mean(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Averages the gradients ``[count, part]`` that a node's ranks have for one part: ``[part]`` in ``dtype``."""
    if not ops.on_cpu(rows):
        return rows.mean(0, dtype=dtype)  # one launch; on a CPU, adding row by row is faster
    mean, *others = rows.to(dtype)
    for other in others:
        mean += other
    mean /= len(rows)
    return mean


TopologyName = Literal["sharded", "hierarchical", "single_server", "allgather", "dense"]
TOPOLOGIES: dict[str, Topology] = {
    each.name: each
    for each in (
        Topology("sharded", sharded, sharded_requests, sharded=True),
        Topology("single_server", baselines.single_server, baselines.single_server_requests),
        Topology("allgather", baselines.all_gathered, baselines.all_gathered_requests, has_servers=False),
        Topology("hierarchical", hierarchical, hierarchical_requests, sharded=True, by_node=True),
        Topology("dense", baselines.dense, baselines.dense_requests, compresses=False, has_servers=False),
    )
}
"""Topologies by name."""
