"""CPU versions of :mod:`lightning_topk.core.ops.reference`: wrappers of the compiled :mod:`.loops` and :mod:`.steps`.

They take contiguous float32 tensors, and cost one pass over memory and some nanoseconds per entry sent. The
compression has the same bits as the reference; optimizer steps agree to rounding.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lightning_topk.core.layout import Layout, PayloadFormat
from lightning_topk.core.ops import Velocity, loops, reference, steps
from lightning_topk.core.ops.loops import SAMPLE as SAMPLE

_salts = random.Random()  # seeds of samples; the selection does not depend on them


def _deal(layout: Layout) -> loops.KernelLayout:
    run = layout.run * layout.shards * layout.block
    places = layout.piece * run, run, (layout.pieces - 1) * run
    return loops.KernelLayout(layout.numel, layout.shards, layout.block, layout.shard_size, *places)


def suits(e: Tensor, x: Tensor, layout: Layout, k: int) -> bool:
    """Whether :func:`add_and_select` supports this: float32, some entries left out, positions that fit in 32 bits."""
    return e.dtype == x.dtype == torch.float32 and k < layout.shard_size < 2**31


def send(
    e: Tensor,
    x: Tensor,
    finite: Tensor,
    layout: Layout,
    form: PayloadFormat,
    delivered: torch.dtype | None,
    velocity: Velocity | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See :func:`lightning_topk.core.ops.send`, for float32. None if ``x`` is not finite, or with momentum."""
    if delivered not in (None, torch.float32) or velocity is not None or not finite:
        return None
    payloads = torch.empty(layout.shards, form.nbytes, dtype=torch.uint8)
    selected = loops.send(e.numpy(), x.numpy(), _deal(layout), form, _salt(), payloads.numpy())
    return payloads, torch.tensor(selected)


def receive(payloads: Tensor, layout: Layout, form: PayloadFormat, divisor: int, out: Tensor) -> Tensor | None:
    """See :func:`lightning_topk.core.ops.receive`, for float32.

    Raises:
        ValueError: A payload does not hold k positions, so it was damaged.
    """
    if out.dtype != torch.float32:
        return None
    dealt = layout.shards == len(payloads)
    finite, rows = True, len(payloads) if dealt else 1
    places, values = np.empty((rows, form.k), np.int32), np.empty((rows, form.k), np.float32)
    for row, payload in enumerate(payloads.numpy()):
        place, value = places[row % rows], values[row % rows]
        code = payload[form.value_bytes : form.value_bytes + form.index_bytes]
        _check(loops.read_positions(code, form.universe, form.low, place), form.k)
        finite &= loops.read_values(payload, form, value)
        if divisor > 1:
            value /= divisor
        if row % rows == rows - 1:
            loops.add_at(out.numpy(), _deal(layout), places, values)
    return torch.tensor(bool(finite))


def add_and_select(e: Tensor, x: Tensor, finite: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """Same as :func:`lightning_topk.core.ops.reference.add_and_select`, in one pass over memory."""
    given = reference.zero_unless_(x, finite)
    places, values = loops.add_and_select(e.numpy(), given.numpy(), _deal(layout), k, _salt())
    return torch.from_numpy(places[:, :k].astype(np.int64)), torch.from_numpy(values[:, :k])


def topk_index(rows: Tensor, k: int) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.topk_index`, in one pass over the rows."""
    deal, nothing = _deal(Layout(rows.shape[1])), np.empty(0, np.float32)
    found = [loops.add_and_select(row.contiguous().numpy(), nothing, deal, k, _salt())[0] for row in rows]
    return torch.from_numpy(np.concatenate([places[:, :k] for places in found]).astype(np.int64))


def count_reaching(rows: Tensor, threshold: Tensor) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.count_reaching`, without a temporary of the rows' size."""
    pairs = zip(rows.contiguous().numpy(), threshold[:, 0].numpy(), strict=True)
    return torch.tensor([[loops.count_reaching(row, least)] for row, least in pairs])


def over_threshold_index(rows: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.over_threshold_index`, in one pass over the rows."""
    index = torch.full((rows.shape[0], k), -1)
    for row, least, found in zip(rows.contiguous().numpy(), threshold[:, 0].numpy(), index.numpy(), strict=True):
        places = loops.over_threshold(row, _deal(Layout(len(row))), least, k)
        found[: len(places)] = places
    return index


def elias_fano_encode(index: Tensor, universe: int, low: int) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.elias_fano_encode`."""
    rows, k = index.shape
    code = torch.empty(rows, reference.elias_fano_bytes(universe, k, low), dtype=torch.uint8)
    for places, written in zip(index.numpy(), code.numpy(), strict=True):
        loops.write_positions(places, low, written)
    return code


def elias_fano_decode(code: Tensor, universe: int, k: int, low: int) -> Tensor:
    """Same as :func:`lightning_topk.core.ops.reference.elias_fano_decode`."""
    index = torch.empty(len(code), k, dtype=torch.int64)
    for row, places in zip(code.numpy(), index.numpy(), strict=True):
        _check(loops.read_positions(row, universe, low, places), k)
    return index


def _salt() -> np.uint64:
    return np.uint64(_salts.getrandbits(31))


def _check(found: int, k: int) -> None:
    if found != k:
        raise ValueError(f"a payload holds {found} positions instead of {k}: it was damaged.")


def sgd_step_(
    x: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    waited: Tensor,
    *,
    momentum: float,
    weight: float,
    lr: float,
    decay: float,
    nesterov: bool,
    maximize: bool,
) -> bool:
    """Takes a step of ``torch.optim.SGD`` with the rule of :mod:`lightning_topk.runtime.momentum`.

    Args:
        x: The parameter, of any shape, float32; updated.
        gradient: Of the same shape, float32.
        buffer: The momentum buffer, of the same shape, float32; updated.
        waited: Of the same shape, uint8; see :func:`lightning_topk.core.ops.reference.catch_up_`.
        momentum: m, in (0, 1).
        weight: 1 - dampening.
        lr: Learning rate.
        decay: Weight decay, added to the gradient.
        nesterov: Whether the step looks ahead.
        maximize: Whether the objective is maximised.

    Returns:
        Whether the step was taken. False for other dtypes, and if the tensors differ in memory format.
    """
    arrays = _flat(x, gradient, buffer, waited)
    if arrays is None:
        return False
    shrink = lr * weight * decay / (1 - momentum)
    numbers = _float32(momentum, weight, lr, decay, shrink)
    steps.sgd_step(*arrays, *_powers(momentum), *numbers, nesterov, np.float32(-1 if maximize else 1))
    return True


def adam_step_(
    x: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    square: Tensor,
    waited: Tensor,
    *,
    betas: tuple[float, float],
    step: float,
    lr: float,
    eps: float,
    decay: float,
    maximize: bool,
) -> bool:
    """Takes a step of ``torch.optim.Adam`` or ``AdamW``; :mod:`lightning_topk.runtime.momentum` has the rule.

    Arguments and result as in :func:`sgd_step_`, except:

    Args:
        x: See :func:`sgd_step_`.
        gradient: See :func:`sgd_step_`.
        buffer: The first moment, of the same shape, float32; updated.
        square: The second moment, of the same shape, float32; updated.
        waited: See :func:`sgd_step_`.
        betas: Decay rates of the first and of the second moment.
        step: Number of this step, starting at 1.
        lr: See :func:`sgd_step_`.
        eps: Term added to the square root of the second moment.
        decay: Decoupled weight decay.
        maximize: See :func:`sgd_step_`.
    """
    arrays = _flat(x, gradient, buffer, square, waited)
    if arrays is None:
        return False
    beta1, beta2 = betas
    size, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    numbers = _float32(beta1, 1 - beta1, beta2, 1 - beta2, size, root, eps, lr * decay, -1 if maximize else 1)
    steps.adam_step(*arrays, *_powers(beta1), *numbers)
    return True


def _flat(*tensors: Tensor) -> list[np.ndarray] | None:
    """Tensors as flat arrays in memory order; None if they differ in shape, strides or device, or have other dtypes."""
    first = tensors[0]
    dense = first.numel() > 0 and torch.ops.aten.is_non_overlapping_and_dense(first)
    same = all(
        (each.shape, each.stride(), each.device) == (first.shape, first.stride(), first.device) for each in tensors
    )
    floats = all(each.dtype == torch.float32 for each in tensors[:-1])
    if not (dense and same and floats):
        return None
    return [each.as_strided((each.numel(),), (1,)).numpy() for each in tensors]


@lru_cache(maxsize=16)  # schedulers may change the momentum in every step
def _powers(momentum: float) -> tuple[np.ndarray, np.ndarray]:
    """m^d, and m + ... + m^d, for d steps waited, 0 to 254."""
    faded = momentum ** np.arange(255.0)
    return faded.astype(np.float32), (momentum * (1 - faded) / (1 - momentum)).astype(np.float32)


def _float32(*numbers: float) -> list[np.float32]:
    return [np.float32(number) for number in numbers]
