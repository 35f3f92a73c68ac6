"""Undoes an exchange whose result no optimizer applies.

A GradScaler skips an optimizer step whose gradients have an infinity or a NaN, and so discards everything that the
buckets of that step delivered. Every worker then adds the delivered values back to its residual. It decodes them from
the step's payloads, which take a few percent of the model's memory; no copy of the residuals is needed. The step's own
finite gradients stay in the residuals, and later steps deliver them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_topk.core.endpoint import Codecs, Endpoint, TakenBack
from lightning_topk.core.link import aggregate
from lightning_topk.core.ops import reference


def take_back(
    end: Endpoint, codecs: Codecs, step: int, payloads: Sequence[Tensor], replies: Sequence[Tensor], dtype: torch.dtype
) -> TakenBack:
    """Correction after an exchange through servers: the delivered values.

    A server whose reply is not finite has dropped what the workers sent it, so each worker takes that back instead.

    Args:
        end: This rank's links.
        codecs: Codecs of the payloads.
        step: Step of the exchange, for the selector.
        payloads: ``[shards, P]`` uint8 for each piece, sent by this worker.
        replies: ``[shards, P']`` uint8 for each piece, sent by the servers.
        dtype: dtype of the bucket, to which replies were rounded.
    """
    end.uplink.selector.step = step
    back = torch.zeros(end.layout.numel, dtype=end.dtype, device=payloads[0].device)
    absorbed = []
    for layout, mine, theirs in zip(end.layout.of_each_piece, payloads, replies, strict=True):
        index, sent = codecs.uplink.read(mine, end.dtype)
        places, reply = codecs.reply.read(theirs, end.dtype)
        reply = _delivered(reply, codecs, dtype)
        arrived, finite = reply.isfinite().all(dim=1, keepdim=True), sent.isfinite()
        absorbed.append(finite.all())
        for at, value in (
            (places, torch.where(arrived, reply, 0)),
            (index, torch.where(finite & ~arrived, sent, 0)),
        ):
            back.index_add_(0, reference.flat_index(at, layout).view(-1), value.view(-1))
    return TakenBack(back, torch.stack(absorbed).all())


def take_back_from_all(
    end: Endpoint, codecs: Codecs, step: int, payload: Tensor, received: Tensor, dtype: torch.dtype
) -> TakenBack:
    """Correction after an exchange without servers: the mean or, if it is not finite, what this worker sent.

    Args:
        end: This rank's links.
        codecs: Codecs of the payloads.
        step: Step of the exchange, for the selector.
        payload: ``[1, P]`` uint8, sent by this worker.
        received: ``[W, P]`` uint8, sent by all workers.
        dtype: dtype of the bucket, to which the mean was rounded.
    """
    end.uplink.selector.step = step
    mean, sent = (torch.zeros(end.layout.numel, dtype=end.dtype, device=payload.device) for _ in range(2))
    mean, limit = aggregate(received, codecs.uplink, end.dtype, room=mean), torch.finfo(dtype).max
    index, value = codecs.uplink.read(payload, end.dtype)
    finite = value.isfinite()
    sent.index_add_(0, index.view(-1), torch.where(finite, value, 0).view(-1))
    scaled = mean if codecs.reply.scale is None else mean * codecs.reply.scale
    delivered = _delivered(scaled.clamp(-limit, limit), codecs, dtype)
    return TakenBack(torch.where(reference.is_finite(mean), delivered, sent), finite.all())


def _delivered(value: Tensor, codecs: Codecs, dtype: torch.dtype) -> Tensor:
    """Values as rounded in a bucket of ``dtype``, without the bucket's scale."""
    rounded = value.to(dtype).to(value.dtype)
    return rounded if codecs.reply.scale is None else rounded / codecs.reply.scale
