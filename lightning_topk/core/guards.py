"""What can happen to a gradient on its way: unused and uncompressed parameters, clipping, rates, NaN, a failure.

:func:`exchange` handles these around the exchange of a topology (:mod:`lightning_topk.core.exchange`).

A residual holds gradients of many steps, and is delivered in a later one. So that each counts as much as in dense
training, it holds what dense training would have applied: ``c_t u_t g_t``, with the factor ``c_t`` of the user's
clipping and the learning rate ``u_t`` of the step, and is delivered divided by the rate of that step. :class:`Applied`
has both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.endpoint import Codecs, Endpoint, Exchange, Outcome
from lightning_topk.core.link import NOTHING, Measure, Step, norm
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import AllGather, AllReduce


class Applied(NamedTuple):
    """How dense training would apply the gradient of a step.

    Attributes:
        rate: The learning rate over the one in whose unit the residual is.
        clip: ``[2]`` float32, the user's clipping: a gradient of norm n is divided by ``hypot(clip[0] n, clip[1])``, if
            that is above 1. None: norms are not measured.
    """

    rate: float = 1.0
    clip: Tensor | None = None


AS_IS = Applied()


def exchange(
    end: Endpoint,
    g: Tensor,
    codecs: Codecs,
    step: int = 0,
    scale: Tensor | None = None,
    used: Tensor | None = None,
    measure: Measure = NOTHING,
    applied: Applied = AS_IS,
) -> Exchange:
    """Exchanges one bucket: replaces ``g`` by the mean that all ranks agree on.

    If the gradient is not finite on some rank, or overflows in the exchange, every rank sets the first element of each
    exchanged parameter to NaN, so that every optimizer and GradScaler notices.

    If a request fails, what this rank has sent last and nobody delivers returns to its residual.

    ``g`` is ``[numel]``; ``step`` and ``measure`` are those of :class:`.Step`, ``scale`` is the scalar loss scale of
    ``g``, before and after. ``used``, ``[parameters]`` bool on the CPU, are the parameters that this rank used; None if
    none may be unused. ``applied`` says how dense training would apply the gradient.
    """
    request = reply = unused = None
    try:
        if used is not None:
            # If no rank used a parameter, DDP keeps its old gradient and discards the hook's result: anything sent for
            # it would be lost. The ranks therefore first share one bit per parameter.
            votes = yield AllGather(reference.pack_bits(ops.to_device(used, g.device).unsqueeze(0))[0], "uplink")
            unused = ~reference.unpack_bits(votes, len(used)).bool().any(dim=0)
        with _set_aside(end, g, unused):
            path = _exchange_used(end, g, codecs, Step(step, scale, scale, measure), applied)
            try:
                while True:
                    request = path.send(reply)
                    reply = yield request
            except StopIteration as ended:
                outcome: Outcome = ended.value
        return outcome
    except BaseException:  # also GeneratorExit, if another exchange has failed
        arrived = request is not None and request.direction == "downlink" and "server" in end.plan.feedback
        if (link := end.downlink if arrived else end.uplink) is not None:
            link.take_back()
        raise
    finally:
        for link in end.links:
            link.sent = None


@contextmanager
def _set_aside(end: Endpoint, g: Tensor, unused: Tensor | None) -> Iterator[None]:
    """Makes gradients and residuals of unused parameters ``[parameters]`` bool zero, and puts them back."""
    if unused is None:
        yield
        return
    absent, held = unused.repeat_interleave(end.sizes, output_size=len(g)), []
    aside = g.masked_fill(~absent, 0)
    g.masked_fill_(absent, 0)
    for link, mask in zip(end.links, end.spread(unused), strict=True):
        for memory in link.memory.tensors().values():
            held.append((memory, memory.masked_fill(~mask, 0)))
            memory.masked_fill_(mask, 0)
    try:
        yield
    finally:
        for memory, unsent in held:
            memory.add_(unsent)
    g.copy_(torch.where(absent, aside, g))


def _exchange_used(end: Endpoint, g: Tensor, codecs: Codecs, step: Step, applied: Applied) -> Exchange:
    """Clips the gradient, all-reduces uncompressed parameters, exchanges the rest, and marks what is not finite."""
    if end.plan.clip_norm is not None:
        g.mul_((end.plan.clip_norm / norm(g, step.scale_in)).clamp(max=1))
    loss, own = step.scale_in, None if applied.clip is None else norm(g, step.scale_in, torch.float32)
    computed, places, total = own, [], None
    if "worker" in end.plan.feedback and not end.plan.lossless:  # something waits in a residual
        step, own = _as_applied(g, step, applied, own)
    if end.plan.uncompressed:
        parameters = g.split(end.plan.parts.sizes)
        places = [parameters[number] for number in end.plan.uncompressed]
        mine = torch.cat(places).div_(end.plan.workers)
        for place in places:
            place.zero_()
        total = yield AllReduce(mine, "uplink")
    outcome = yield from end.plan.topology.exchange(end, g, codecs, step)
    if total is not None:
        for place, summed in zip(places, total.split([*map(len, places)]), strict=True):
            place += summed  # the exchange may have delivered a residual of earlier settings here
        outcome = replace(outcome, finite=outcome.finite & reference.is_finite(total))
    if own is not None and computed is not None:
        outcome = replace(outcome, norms=torch.stack([computed, own, norm(g, loss, torch.float32)]))
    ops.nan_unless_(g, end.starts, outcome.finite)
    return outcome


def _as_applied(g: Tensor, step: Step, applied: Applied, own: Tensor | None) -> tuple[Step, Tensor | None]:
    """The step whose scales make the residual hold what dense training would apply; and the norm after clipping."""
    rate, clip = applied
    scale = step.scale_in
    if rate != 1:
        scale = torch.full((), 1 / rate, dtype=torch.float32, device=g.device) if scale is None else scale * (1 / rate)
    scale_out = scale
    if own is not None and clip is not None:
        if ops.on_cpu(g):  # which reads numbers at once, and saves a pass over a gradient that is not clipped
            slope, others = clip.tolist()
            number = math.hypot(slope * own.item(), others) if slope or others else 0.0
            excess = torch.tensor(number) if number > 1 else None
        else:
            excess = torch.hypot(own * clip[0], clip[1]).clamp_(min=1)
        if excess is not None:
            own = own / excess
            scale = excess if scale is None else scale * excess
    return replace(step, scale_in=scale, scale_out=scale_out), own
