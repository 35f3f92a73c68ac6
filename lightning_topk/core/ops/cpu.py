"""CPU versions of :mod:`lightning_topk.core.ops.reference`: wrappers of the compiled :mod:`.loops`.

They take contiguous float32 tensors, and cost one pass over memory and some nanoseconds per entry sent. Results have
the same bits as the reference's, except that momentum agrees to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_topk.core.layout import Layout, PayloadFormat
from lightning_topk.core.ops import loops, reference
from lightning_topk.core.ops.reference import AddressTable, Rule, sample_of

# Each element of a sample costs a cache line of the residual and one of the gradient; fewer leave more candidates.
SAMPLE = 1 << 13  # minimum size of a sample
FLOATS = {torch.float32}  # dtypes of parameters and momentum buffers that `CatchUp` supports
salts = random.Random()  # seeds of samples; the selection does not depend on them


def attempt(device: torch.device) -> None:
    """Compiles and runs a function; raises an exception if numba does not work, as with NUMBA_DISABLE_JIT=1."""
    topk_index(torch.ones(1, SAMPLE, dtype=torch.float32, device=device), 1)


def sender(
    e: Tensor, layout: Layout, delivered: torch.dtype | None, exact: bool, scratch: Any
) -> Callable[..., Tensor | None] | None:
    """See :func:`lightning_topk.core.ops.sender`: for float32."""
    return partial(send, e, layout) if e.dtype == torch.float32 else None


def send(
    e: Tensor, layout: Layout, x: Tensor, form: PayloadFormat, delivered: torch.dtype | None,
    scale: Tensor | None = None, fade: float = 1.0, limit: None = None,
) -> Tensor | None:  # fmt: skip
    """See :func:`lightning_topk.core.ops.sender`, for finite ``x``."""
    if not form.bits or delivered not in (None, torch.float32):
        return None
    g = x.float()  # itself, or a copy of 16 bits
    if not reference.is_finite(g if scale is None else g.mul_(scale.reciprocal())):
        return None
    payloads = torch.empty(layout.shards, form.nbytes, dtype=torch.uint8)
    sample = *sample_of(layout, form.k, SAMPLE), salts.getrandbits(31)
    given = layout.sizes, form, sample, np.float32(fade)
    loops.send(e.numpy(), g.numpy(), *given, payloads.numpy())
    if g is not x:
        x.zero_()
    return payloads


def receive(
    payloads: Tensor, layout: Layout, form: PayloadFormat, divisor: int, out: Tensor,
    scale: Tensor | None = None, ordered: bool = False, bound: dict[Any, Any] | None = None,
) -> Tensor | None:  # fmt: skip
    """See :func:`lightning_topk.core.ops.receive`, for float32. It always adds in order."""
    if out.dtype != torch.float32 or not form.bits:
        return None
    payloads, parts = payloads.contiguous(), out.view(-1, layout.numel).numpy()
    reference.check(payloads, form.check)
    factors = np.float32(1 / divisor), np.float32(1 if scale is None else float(scale))
    return torch.tensor(loops.receive(payloads.numpy(), layout.sizes, form, *factors, parts))


def elias_fano_encode(index: Tensor, universe: int, low: int) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.elias_fano_encode`."""
    code = torch.empty(len(index), reference.elias_fano_bytes(universe, index.shape[1], low), dtype=torch.uint8)
    for places, written in zip(index.numpy(), code.numpy(), strict=True):
        loops.write_positions(places, low, written)
    return code


def elias_fano_decode(code: Tensor, universe: int, k: int, low: int) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.elias_fano_decode`."""
    index = torch.empty(len(code), k, dtype=torch.int64)
    for row, places in zip(code.numpy(), index.numpy(), strict=True):
        loops.read_positions(row, universe, low, places)
    return index


def topk_index(rows: Tensor, k: int) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.topk_index`, in one pass over the rows."""
    if rows.dtype != torch.float32 or not k < rows.shape[1] < 2**31:
        return reference.topk_index(rows, k)
    layout, nothing = Layout(rows.shape[1]), np.empty(0, np.float32)
    sample = *sample_of(layout, k, SAMPLE), salts.getrandbits(31)
    given = layout.sizes, k, sample, np.float32(1)
    found = [loops.add_and_select(row.contiguous().numpy(), nothing, *given)[0] for row in rows]
    return torch.from_numpy(np.concatenate([places[:, :k] for places in found]).astype(np.int64))


def count_reaching(rows: Tensor, threshold: Tensor) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.count_reaching`, without a temporary of the rows' size."""
    if rows.dtype != torch.float32:
        return reference.count_reaching(rows, threshold)
    pairs = zip(rows.contiguous().numpy(), threshold[:, 0].numpy(), strict=True)
    return torch.tensor([[loops.count_reaching(row, least)] for row, least in pairs])


class CatchUp(AddressTable):
    """Same as :func:`lightning_topk.core.ops.reference.catch_up_` of each parameter, in one pass over memory."""

    def __call__(
        self, gradients: Sequence[Tensor], rules: Sequence[Rule], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """See :class:`lightning_topk.core.ops.CatchUp`."""
        self.find(gradients)
        taken, factor = skipped is None or not skipped, 1.0 if scale is None else float(scale)
        loops.catch_up(self.rows, np.array([rules[n] for n in self.rules], np.float64), factor, bool(taken))
