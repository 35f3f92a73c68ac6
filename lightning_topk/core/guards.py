"""Handles unused, uncompressed and lifted parameters, clipping, NaN, and failures.

:func:`exchange` does so around the exchange of a topology (:mod:`lightning_topk.core.exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.endpoint import Codecs, Endpoint, Exchange, Outcome
from lightning_topk.core.link import FIRST, Step, multiply_, norm
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import AllGather, AllReduce


def exchange(
    end: Endpoint, g: Tensor, codecs: Codecs, step: Step = FIRST, used: Sequence[bool] | None = None
) -> Exchange:
    """Exchanges one bucket: replaces ``g`` by the mean that all ranks agree on.

    If the gradient is not finite on some rank, or overflows in the exchange, every rank sets the first element of each
    exchanged parameter to NaN, so that every optimizer and GradScaler notices.

    If a request fails, the entries that this rank sent last return to its residual, since nobody delivers them.

    ``g`` is ``[numel]``. ``used`` says whether this rank used each parameter; None if no parameter may be unused.
    """
    plan, clip, scale, sizes, link = end.plan, step.clip, step.scale, end.plan.parts.sizes, end.uplink
    held: list[tuple[Tensor, Tensor, Tensor, float]] = []
    try:
        if used is not None:
            # If no rank used a parameter, DDP keeps its old gradient and discards the hook's result: anything sent for
            # it would be lost. The ranks therefore first share one bit per parameter.
            mine = ops.to_device(torch.tensor(used), g.device)
            votes = yield AllGather(reference.pack_bits(mine.unsqueeze(0))[0], "uplink")
            unused = ~reference.unpack_bits(votes, len(used)).bool().any(dim=0)
            held += _set_aside(end, g, unused, used, step.fade)
        if plan.clip_norm is not None:
            g.mul_((plan.clip_norm / norm(g, scale)).clamp(max=1))
        places = [g.split(sizes)[number] for number in plan.uncompressed] if plan.uncompressed else []
        if places:
            apart, lengths = torch.cat(places), [*map(len, places)]
            limits = None if clip is None else clip.among(end.uncompressed[0])
            if limits is not None:
                step = replace(step, apart=limits.norms(apart, lengths, scale))
            for place in places:
                place.zero_()
        finite = yield from plan.topology.exchange(end, g, codecs, step)
        if link.lifts:
            multiply_(g, sizes, [1 / lift for lift in link.lifts])
        if places:
            if limits is not None:
                limits.divide_(apart, end.uncompressed[1])
            total = yield AllReduce(apart.div_(plan.workers), "uplink")
            for place, summed in zip(places, total.split(lengths), strict=True):
                place += summed  # the exchange may have delivered a residual of earlier settings here
            finite = finite & reference.is_finite(total)
        if clip is not None:
            clip.deliver(g, sizes, scale)
        ops.nan_unless_(g, end.starts, finite)
        errors = [each.error for each in end.links] if step.measure.error else ()
        return Outcome(finite, errors, link.per_layer)
    except BaseException:  # also GeneratorExit, if another exchange has failed
        for each in end.links:
            each.take_back()
        raise
    finally:
        for part, before, absent, factor in held:
            part.copy_(torch.where(absent, before * factor, part))
        for each in end.links:
            each.sent = each.error = each.per_layer = None


def _set_aside(
    end: Endpoint, g: Tensor, unused: Tensor, used: Sequence[bool], fade: float
) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Zeroes gradients and memories of ``unused`` parameters ``[parameters]`` bool; yields what restores them.

    Each item is a tensor, its former values, whether its parameter is unused, and the factor by which it fades. On a
    GPU the host does not read ``unused``, so it visits every parameter that this rank has not ``used``.
    """
    for number in (number for number, here in enumerate(used) if not here):
        absent = unused[number]
        if ops.on_cpu(g) and not absent:  # another rank used it
            continue
        begin, size = sum(end.plan.parts.sizes[:number]), end.plan.parts.sizes[number]
        parts = [(g[begin : begin + size], 1.0)]
        for link, its in zip(end.links, end.slices(number), strict=True):
            tensors = link.memory.tensors()
            parts += [(memory[its], fade if name == "residual" else 1.0) for name, memory in tensors.items()]
        for part, factor in parts:
            yield part, part.clone(), absent, factor
            part.masked_fill_(absent, 0)
