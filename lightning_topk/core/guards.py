"""What can happen to a gradient on its way: unused and uncompressed parameters, clipping, NaN.

:func:`exchange` handles these around the exchange of a topology (:mod:`lightning_topk.core.exchange`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_topk.core import ops
from lightning_topk.core.endpoint import Codecs, Endpoint, Exchange
from lightning_topk.core.link import NOTHING, Measure, Step, norm
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import AllGather, AllReduce


def exchange(
    end: Endpoint,
    g: Tensor,
    codecs: Codecs,
    step: int = 0,
    scale: Tensor | None = None,
    used: Tensor | None = None,
    measure: Measure = NOTHING,
) -> Exchange:
    """Exchanges one bucket: replaces ``g`` by the mean that all ranks agree on.

    If the gradient is not finite on some rank, or overflows in the exchange, every rank sets the first element of each
    exchanged parameter to NaN, so that every optimizer and GradScaler notices.

    ``g`` is ``[numel]``; ``step``, ``scale`` and ``measure`` are those of :class:`.Step`. ``used``, ``[parameters]``
    bool on the CPU, are the parameters that this rank used; None if none may be unused.
    """
    now = Step(step, scale, measure)
    if used is None:
        return (yield from _exchange_checked(end, g, codecs, now))
    return (yield from _exchange_used(end, g, codecs, now, used))


def _exchange_used(end: Endpoint, g: Tensor, codecs: Codecs, step: Step, used: Tensor) -> Exchange:
    """Exchanges the parameters that at least one rank used.

    If no rank used a parameter, DDP keeps its old gradient and discards the hook's result: anything sent for it would
    be lost. The ranks therefore first share one bit per parameter. Workers and servers set aside the gradients and
    residuals of unused parameters.
    """
    votes = yield AllGather(reference.pack_bits(_to(used, g.device).unsqueeze(0))[0], "uplink")
    unused = ~reference.unpack_bits(votes, len(used)).bool().any(dim=0)
    absent = unused.repeat_interleave(end.sizes, output_size=len(g))
    aside = g.masked_fill(~absent, 0)
    g.masked_fill_(absent, 0)
    count = end.plan.parts.count
    kept = unused.repeat_interleave((end.sizes + count - 1) // count, output_size=end.layout.numel)
    masks = [kept] if end.downlink is None else [kept, reference.shard_rows(kept, end.layout)[end.shard]]
    held = []
    for link, mask in zip(end.links, masks, strict=True):
        for memory in link.memory.tensors().values():
            held.append((memory, memory.masked_fill(~mask, 0)))
            memory.masked_fill_(mask, 0)
    outcome = yield from _exchange_checked(end, g, codecs, step)
    for memory, unsent in held:
        memory.add_(unsent)
    g.copy_(torch.where(absent, aside, g))
    return outcome


def _to(x: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device; neither the host nor a GPU's stream waits."""
    return x if x.device == device else x.pin_memory().to(device, non_blocking=True)


def _exchange_checked(end: Endpoint, g: Tensor, codecs: Codecs, step: Step) -> Exchange:
    """Clips the gradient before the exchange, and marks it with NaN afterwards if it is not finite."""
    if end.plan.clip_norm is not None:
        g.mul_((end.plan.clip_norm / norm(g, step.scale)).clamp(max=1))
    path = _exchange_uncompressed if end.plan.uncompressed else end.plan.topology.exchange
    outcome = yield from path(end, g, codecs, step)
    if not ops.on_cpu(g) or not outcome.finite:
        poison = torch.zeros_like(g[:1]).masked_fill_(~outcome.finite, torch.nan)
        g.index_add_(0, end.starts, poison.expand(len(end.starts)))
    return outcome


def _exchange_uncompressed(end: Endpoint, g: Tensor, codecs: Codecs, step: Step) -> Exchange:
    """Exchanges a bucket with uncompressed parameters: all-reduces those first, and leaves zeros in their place."""
    parameters = g.split(end.plan.parts.sizes)
    places = [parameters[number] for number in end.plan.uncompressed]
    mine = torch.cat(places).div_(end.plan.workers)
    for place in places:
        place.zero_()
    total = yield AllReduce(mine, "uplink")
    outcome = yield from end.plan.topology.exchange(end, g, codecs, step)
    for place, summed in zip(places, total.split([len(place) for place in places]), strict=True):
        place += summed  # the exchange may have delivered a residual of earlier settings here
    return replace(outcome, finite=outcome.finite & reference.is_finite(total))
