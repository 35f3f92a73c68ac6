"""What can happen to a gradient on its way: unused and uncompressed parameters, local clipping, NaN, a failure.

:func:`exchange` handles these around the exchange of a topology (:mod:`lightning_topk.core.exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.endpoint import Codecs, Endpoint, Exchange, Outcome
from lightning_topk.core.link import FIRST, Step, norm
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import AllGather, AllReduce


def exchange(end: Endpoint, g: Tensor, codecs: Codecs, step: Step = FIRST, used: Tensor | None = None) -> Exchange:
    """Exchanges one bucket: replaces ``g`` by the mean that all ranks agree on.

    If the gradient is not finite on some rank, or overflows in the exchange, every rank sets the first element of each
    exchanged parameter to NaN, so that every optimizer and GradScaler notices.

    If a request fails, what this rank has sent last and nobody delivers returns to its residual.

    ``g`` is ``[numel]``. ``used``, ``[parameters]`` bool on the CPU, are the parameters that this rank used; None if
    none may be unused.
    """
    request = reply = unused = None
    try:
        if used is not None:
            # If no rank used a parameter, DDP keeps its old gradient and discards the hook's result: anything sent for
            # it would be lost. The ranks therefore first share one bit per parameter.
            votes = yield AllGather(reference.pack_bits(ops.to_device(used, g.device).unsqueeze(0))[0], "uplink")
            unused = ~reference.unpack_bits(votes, len(used)).bool().any(dim=0)
        with _set_aside(end, g, unused, step.fade):
            path = _exchange_used(end, g, codecs, step)
            try:
                while True:
                    request = path.send(reply)
                    reply = yield request
            except StopIteration as ended:
                outcome: Outcome = ended.value
        return outcome
    except BaseException:  # also GeneratorExit, if another exchange has failed
        last = isinstance(request, AllReduce) or (request is not None and request.direction == "downlink")
        arrived = last and end.plan.topology.has_servers and "server" in end.plan.feedback
        if (link := end.downlink if arrived else end.uplink) is not None:
            link.take_back()
        raise
    finally:
        for link in end.links:
            link.sent = None


@contextmanager
def _set_aside(end: Endpoint, g: Tensor, unused: Tensor | None, fade: float) -> Iterator[None]:
    """Makes gradients and residuals of unused parameters ``[parameters]`` bool zero, and puts them back, faded."""
    if unused is None:
        yield
        return
    absent, held = unused.repeat_interleave(end.sizes, output_size=len(g)), []
    aside = g.masked_fill(~absent, 0)
    g.masked_fill_(absent, 0)
    for link, mask in zip(end.links, end.spread(unused), strict=True):
        for name, memory in link.memory.tensors().items():
            held.append((memory, memory.masked_fill(~mask, 0), fade if name == "residual" else 1.0))
            memory.masked_fill_(mask, 0)
    try:
        yield
    finally:
        for memory, unsent, factor in held:
            memory.add_(unsent, alpha=factor)
    g.copy_(torch.where(absent, aside, g))


def _exchange_used(end: Endpoint, g: Tensor, codecs: Codecs, step: Step) -> Exchange:
    """Clips the gradient locally, exchanges it, all-reduces uncompressed parameters, and marks what is not finite."""
    plan, clip, sizes = end.plan, step.clip, end.plan.parts.sizes
    if plan.clip_norm is not None:
        g.mul_((plan.clip_norm / norm(g, step.scale)).clamp(max=1))
    places = [g.split(sizes)[number] for number in plan.uncompressed]
    mine, lengths = torch.cat(places) if places else g, [*map(len, places)]
    of_places = clip.among(plan.uncompressed) if clip is not None and places else None
    if of_places is not None:
        step = replace(step, apart=of_places.norms(mine, lengths, step.scale))
    for place in places:
        place.zero_()
    outcome = yield from plan.topology.exchange(end, g, codecs, step)
    clipped = outcome.uplink.clipped
    if places:
        if of_places is not None and clipped is not None:
            mine.div_(of_places.spread(clipped[1], lengths))
        total = yield AllReduce(mine.div_(plan.workers), "uplink")
        for place, summed in zip(places, total.split(lengths), strict=True):
            place += summed  # the exchange may have delivered a residual of earlier settings here
        outcome = replace(outcome, finite=outcome.finite & reference.is_finite(total))
    if clip is not None and clipped is not None:
        outcome = replace(outcome, norms=torch.stack([clipped[0], clip.norms(g, sizes, step.scale)]))
    ops.nan_unless_(g, end.starts, outcome.finite)
    return outcome
