"""What can happen to a gradient on its way: unused and uncompressed parameters, local clipping, NaN, a failure.

:func:`exchange` handles these around the exchange of a topology (:mod:`lightning_topk.core.exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.endpoint import Codecs, Endpoint, Exchange, Outcome
from lightning_topk.core.link import FIRST, Step, norm
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import AllGather, AllReduce


def exchange(
    end: Endpoint, g: Tensor, codecs: Codecs, step: Step = FIRST, used: Sequence[bool] | None = None
) -> Exchange:
    """Exchanges one bucket: replaces ``g`` by the mean that all ranks agree on.

    If the gradient is not finite on some rank, or overflows in the exchange, every rank sets the first element of each
    exchanged parameter to NaN, so that every optimizer and GradScaler notices.

    If a request fails, what this rank has sent last and nobody delivers returns to its residual.

    ``g`` is ``[numel]``. ``used`` says of each parameter whether this rank used it; None if none may be unused.
    """
    request = reply = unused = None
    try:
        if used is not None:
            # If no rank used a parameter, DDP keeps its old gradient and discards the hook's result: anything sent for
            # it would be lost. The ranks therefore first share one bit per parameter.
            mine = ops.to_device(torch.tensor(used), g.device)
            votes = yield AllGather(reference.pack_bits(mine.unsqueeze(0))[0], "uplink")
            unused = ~reference.unpack_bits(votes, len(used)).bool().any(dim=0)
        with _set_aside(end, g, unused, used or (), step.fade):
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
def _set_aside(end: Endpoint, g: Tensor, unused: Tensor | None, used: Sequence[bool], fade: float) -> Iterator[None]:
    """Makes gradients and residuals of ``unused`` parameters ``[parameters]`` bool zero, and puts them back, faded.

    They are among those that this rank has not ``used``; on a GPU the host knows no more.
    """
    held = list[tuple[Tensor, Tensor, Tensor, float]]()
    for number in (number for number, here in enumerate(used) if not here):
        assert unused is not None
        absent = unused[number]
        if ops.on_cpu(g) and not absent:  # another rank used it
            continue
        begin, size = sum(end.plan.parts.sizes[:number]), end.plan.parts.sizes[number]
        parts = [(g[begin : begin + size], 1.0)]
        for link, its in zip(end.links, end.slices(number), strict=True):
            tensors = link.memory.tensors()
            parts += [(memory[its], fade if name == "residual" else 1.0) for name, memory in tensors.items()]
        for part, factor in parts:
            held.append((part, part.clone(), absent, factor))
            part.masked_fill_(absent, 0)
    try:
        yield
    finally:
        for part, before, absent, factor in held:
            part.copy_(torch.where(absent, before * factor, part))


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
