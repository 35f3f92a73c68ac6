"""The papers' topologies, for comparison: the parameter server, TopK-SGD by all-gather, dense all-reduce."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_topk.core.endpoint import BucketPlan, Codecs, Endpoint, Path
from lightning_topk.core.link import Step, aggregate, deliver, norm
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import AllGather, AllReduce, Broadcast, Gather, Request, placeholder


def single_server(end: Endpoint, g: Tensor, codecs: Codecs, step: Step) -> Path:
    """The parameter server of the thesis: rank 0 serves the whole bucket, and is a worker too."""
    payload = end.uplink.send(g, codecs.uplink, step)
    received = yield Gather(payload[0], "uplink")
    mean = None if received is None else aggregate(received, codecs.uplink, end.dtype, scratch=g)
    reply = end.reply(mean, codecs.reply, step)
    replies = yield Broadcast(reply, "downlink")
    return deliver(replies.unsqueeze(0), codecs.reply, end.plan.layout, g, step.scale)


def single_server_requests(plan: BucketPlan, codecs: Codecs) -> list[Request]:
    """Predicts the requests of :func:`single_server`."""
    uplink = Gather(placeholder(codecs.uplink.nbytes), "uplink")
    return [uplink, Broadcast(placeholder(codecs.reply.nbytes), "downlink")]


def all_gathered(end: Endpoint, g: Tensor, codecs: Codecs, step: Step) -> Path:
    """TopK-SGD without a server: every worker receives every worker's selection."""
    payload = end.uplink.send(g, codecs.uplink, step)
    received = yield AllGather(payload[0], "uplink")
    mean = aggregate(received, codecs.uplink, end.dtype, scratch=g, ordered=True)
    scale, kept = step.scale, end.uplink.memory.tensors().get("residual")
    if scale is None and kept is not None and g.dtype != end.dtype:
        finite, limit = reference.is_finite(mean), torch.finfo(g.dtype).max
        g.copy_(mean.clamp(-limit, limit))
        # Every worker keeps the same error of rounding to the bucket's dtype, so their mean is that error.
        kept.add_(reference.zero_unless_(mean.sub_(g), finite))
    else:
        finite = reference.is_finite(g.copy_(mean if scale is None else mean * scale))
    return finite


def all_gathered_requests(plan: BucketPlan, codecs: Codecs) -> list[Request]:
    """Predicts the requests of :func:`all_gathered`."""
    return [AllGather(placeholder(codecs.uplink.nbytes), "uplink")]


def dense(end: Endpoint, g: Tensor, codecs: Codecs, step: Step) -> Path:
    """All-reduces the mean in the bucket's dtype, as DDP does: no compression and no residual."""
    link, sizes = end.uplink, end.plan.parts.sizes
    if step.clip is not None:
        step.clip.enter(step.clip.norms(g, sizes, step.scale))
        step.clip.divide_(g, link.sizes_on(g.device))
    if step.measure.error:
        energy = norm(g, step.scale).square()
        link.error = torch.stack([energy, torch.zeros_like(energy)])
    total = yield AllReduce(g.div_(end.plan.world), "uplink")
    finite = reference.is_finite(total)
    if total.data_ptr() != g.data_ptr():
        g.copy_(total)
    return finite


def dense_requests(plan: BucketPlan, codecs: Codecs) -> list[Request]:
    """Predicts the requests of :func:`dense`."""
    return [AllReduce(placeholder(plan.layout.numel * plan.itemsize), "uplink")]
