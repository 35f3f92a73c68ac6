"""Tensor operations of the compression.

:mod:`~lightning_topk.core.ops.reference` defines them in plain torch; ``cpu`` and ``kernels`` (Triton) are faster
versions that are tested against it. The functions here dispatch to the fastest version for the given tensors.
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
    """Returns the Triton kernels, or None if they do not run: Triton may be missing, and it needs a C compiler."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from lightning_topk.core.ops import kernels

        e, x = torch.zeros(2, kernels.SAMPLE, device=device).unbind()
        kernels.add_and_select(e, x, torch.ones((), dtype=torch.bool, device=device), Layout(len(e)), 1)
    except Exception as error:
        warnings.warn(
            f"lightning_topk: the Triton kernels do not run on {device} ({error}); falling back to plain torch, "
            "which is slower.",
            stacklevel=2,
        )
        return None
    return kernels


def is_finite(x: Tensor) -> Tensor:
    """Whether ``x`` has neither NaN nor infinity: a scalar bool."""
    return cpu.is_finite(x) if x.device.type == "cpu" else reference.is_finite(x)


def add_and_select(e: Tensor, x: Tensor, finite: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
    """Adds ``x`` to ``e`` in place, zeroes ``x``, and selects the k largest magnitudes of every shard of the sum.

    Arguments and results are those of :func:`lightning_topk.core.ops.reference.add_and_select`.
    """
    version: Any = reference
    if e.device.type == "cpu":
        if cpu.suits(layout.numel, layout, k) and e.dtype in (torch.float32, torch.float64):
            version = cpu
    else:
        kernels = _kernels(e.device)
        if kernels is not None and kernels.suits(e, layout, k):
            version = kernels
    chosen: tuple[Tensor, Tensor] = version.add_and_select(e, x, finite, layout, k)
    return chosen


def topk_index(rows: Tensor, k: int) -> Tensor:
    """Ascending positions ``[R, k]`` of the k largest magnitudes of each row ``[R, S]``; of equal ones, the first."""
    return cpu.topk_index(rows, k) if rows.device.type == "cpu" else reference.topk_index(rows, k)


def count_reaching(rows: Tensor, threshold: Tensor) -> Tensor:
    """Counts the entries of each row ``[R, S]`` whose magnitude reaches ``threshold`` ``[R, 1]``: ``[R, 1]`` int64."""
    version = cpu if rows.device.type == "cpu" else reference
    count: Tensor = version.count_reaching(rows, threshold)
    return count


def over_threshold_index(rows: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Ascending positions ``[R, k]`` of the entries that reach ``threshold`` ``[R, 1]``, at most k, padded with -1."""
    version = cpu if rows.device.type == "cpu" else reference
    index: Tensor = version.over_threshold_index(rows, threshold, k)
    return index


def elias_fano_encode(index: Tensor, universe: int, low: int) -> Tensor:
    """Encodes ascending positions ``[R, K]`` below ``universe`` with the Elias-Fano code: uint8 rows of fixed size."""
    version = cpu if index.device.type == "cpu" else reference
    code: Tensor = version.elias_fano_encode(index, universe, low)
    return code


def elias_fano_decode(code: Tensor, universe: int, k: int, low: int) -> Tensor:
    """Decodes what :func:`elias_fano_encode` returned: ``[R, k]`` int64, ascending in each row."""
    version = cpu if code.device.type == "cpu" else reference
    index: Tensor = version.elias_fano_decode(code, universe, k, low)
    return index
