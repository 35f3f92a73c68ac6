"""Tensor operations of the compression: ``reference`` in plain torch is the oracle of the faster ones beside it.

The functions here take the fastest version for the tensors that they are given.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lightning_topk.core.layout import Layout
from lightning_topk.core.ops import cpu, reference


@cache
def _kernels(device: torch.device) -> Any | None:
    """The Triton kernels if they work on a device: Triton is not on every platform, and needs a compiler."""
    if find_spec("triton") is None:
        return None
    try:
        from lightning_topk.core.ops import kernels

        e, x = torch.zeros(2, kernels.SAMPLE, device=device).unbind()
        kernels.add_and_choose(e, x, torch.ones((), dtype=torch.bool, device=device), Layout(len(e)), 1)
    except Exception as error:
        warnings.warn(
            f"lightning_topk: Triton's kernels do not work on {device} ({error}); plain torch takes their place, which is slower.",
            stacklevel=2,
        )
        return None
    return kernels


def is_finite(x: Tensor) -> Tensor:
    """See :func:`lightning_topk.core.ops.reference.is_finite`."""
    return cpu.is_finite(x) if x.device.type == "cpu" else reference.is_finite(x)


def add_and_choose(e: Tensor, x: Tensor, finite: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """See :func:`lightning_topk.core.ops.reference.add_and_choose`."""
    version: Any = reference
    if e.device.type == "cpu":
        if cpu.suits(layout.numel, layout, k) and e.dtype in (torch.float32, torch.float64):
            version = cpu
    else:
        kernels = _kernels(e.device)
        if kernels is not None and kernels.suits(e, layout, k):
            version = kernels
    chosen: tuple[Tensor, Tensor] = version.add_and_choose(e, x, finite, layout, k)
    return chosen


def topk_index(rows: Tensor, k: int) -> Tensor:
    """See :func:`lightning_topk.core.ops.reference.topk_index`."""
    return cpu.topk_index(rows, k) if rows.device.type == "cpu" else reference.topk_index(rows, k)


def count_reaching(rows: Tensor, threshold: Tensor) -> Tensor:
    """See :func:`lightning_topk.core.ops.reference.count_reaching`."""
    version = cpu if rows.device.type == "cpu" else reference
    count: Tensor = version.count_reaching(rows, threshold)
    return count


def over_threshold_index(rows: Tensor, threshold: Tensor, k: int) -> Tensor:
    """See :func:`lightning_topk.core.ops.reference.over_threshold_index`."""
    version = cpu if rows.device.type == "cpu" else reference
    index: Tensor = version.over_threshold_index(rows, threshold, k)
    return index


def elias_fano_encode(index: Tensor, universe: int, low: int) -> Tensor:
    """See :func:`lightning_topk.core.ops.reference.elias_fano_encode`."""
    version = cpu if index.device.type == "cpu" else reference
    code: Tensor = version.elias_fano_encode(index, universe, low)
    return code


def elias_fano_decode(code: Tensor, universe: int, k: int, low: int) -> Tensor:
    """See :func:`lightning_topk.core.ops.reference.elias_fano_decode`."""
    version = cpu if code.device.type == "cpu" else reference
    index: Tensor = version.elias_fano_decode(code, universe, k, low)
    return index
