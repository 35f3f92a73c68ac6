"""Tensor operations of the compression.

:mod:`~lightning_topk.core.ops.reference` defines them in plain torch. ``cpu`` (numba) and ``cuda`` (Triton) are
faster versions, imported when a tensor needs them. The functions here dispatch to the fastest version for their
tensors. ``cpu`` returns the same bits. So does ``cuda``, unless the threshold that it estimates from a sample is off:
it may then send fewer entries, or leave out later ones. Momentum agrees to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lightning_topk.core.layout import Layout, NodeShards, PayloadFormat
from lightning_topk.core.ops import reference
from lightning_topk.core.ops.reference import Stepped

FAILED: dict[str, str] = {}
"""Why an installed compiler does not work here, by its name."""


@cache
def fast(device: torch.device) -> Any | None:
    """Returns the fast version for a device, or None (plain torch) if its compiler is missing or fails.

    Numba is an optional extra; Triton comes with torch, and needs a C compiler.
    """
    module, needs = ("cpu", "numba") if device.type == "cpu" else ("cuda", "triton")
    if device.type not in ("cpu", "cuda") or find_spec(needs) is None:
        return None
    # Compiling may take tens of seconds. Python runs signal handlers in the main thread, and what they raise must not
    # count as a failure to compile: the other thread can only fail by compiling.
    executor = ThreadPoolExecutor(1)
    try:
        version, error = executor.submit(_tried, module, device).result()
    finally:
        executor.shutdown(wait=False)
    if error is not None:
        FAILED[needs] = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"lightning_topk: {needs} does not work on {device} ({FAILED[needs]}); falling back to plain torch, which "
            "is slower.",
            stacklevel=2,
        )
    return version


def _tried(module: str, device: torch.device) -> tuple[Any | None, Exception | None]:
    """Returns a fast version that has compiled and run once, or the error."""
    try:
        version = import_module(f"lightning_topk.core.ops.{module}")
        version.attempt(device)
    except Exception as error:
        return None, error
    return version, None


def on_cpu(x: Tensor) -> bool:
    """Whether the CPU computes with ``x``; if not, a GPU does, and the host does not wait for it."""
    return x.device.type == "cpu"


def separate(x: Tensor) -> Any:
    """The version whose functions each do one step with ``x``: of selecting, or of coding positions."""
    return (fast(x.device) if on_cpu(x) else None) or reference


def is_finite(x: Tensor) -> Tensor:
    """Whether every element of ``x``, of any nonempty shape, is finite: a scalar bool."""
    if not on_cpu(x) and x.is_contiguous() and x.dtype != torch.float64 and fast(x.device) is not None:
        return fast(x.device).is_finite(x)  # type: ignore[union-attr]
    return reference.is_finite(x)


Sender = Callable[..., Tensor | None]
"""``send(e, x, layout, form, delivered, scale, rescale)``, see :func:`sender`."""


def sender(e: Tensor, layout: Layout, delivered: torch.dtype | None, exact: bool = False) -> Sender | None:
    """The function that sends from a residual ``e`` ``[numel]`` in one pass over memory; None if there is none.

    It adds ``x`` to ``e`` in place, zeroes ``x``, and moves the k largest magnitudes of every shard to payloads. If
    ``x`` is not finite, ``e`` is unchanged, and every value in the payloads is NaN. Its arguments, beside these:

    - x: ``[numel]``, contiguous; becomes zero.
    - form: Format of a payload, with ``bits``.
    - scale: Scalar loss scale that ``x`` contains, to be removed; on a GPU only.
    - rescale: Scalar by which receivers multiply before they round to ``delivered``; on a GPU only.

    It returns the payloads ``[shards, P]`` uint8. Or None, without effect, if it cannot: then add, select, encode and
    keep one after the other, with the same result.

    Args:
        e: Contiguous, finite; becomes the residual, which includes the wire's rounding error.
        layout: How the elements are split among shards.
        delivered: dtype of the receivers' output, if the residual must include its rounding error.
        exact: Whether it must always select the k largest.
    """
    version = fast(e.device)
    return version.send if version is not None and version.sends(e, layout, delivered, exact) else None


def receive(
    payloads: Tensor, layout: Layout, form: PayloadFormat, divisor: int, out: Tensor, scale: Tensor | None = None
) -> Tensor | None:
    """Decodes payloads, divides the values by ``divisor`` and adds them to ``out``. Rejects damaged payloads.

    Args:
        payloads: ``[R, P]`` uint8. Row r belongs to shard r of the layout, and the rows after the last shard to the
            next part of ``out``; if the layout has one shard and ``out`` one part, every row belongs to it.
        layout: How ``out`` is split among shards.
        form: Format of a payload.
        divisor: A power of two.
        out: ``[numel]`` or ``[parts, numel]``, contiguous.
        scale: Scalar loss scale by which the values are multiplied.

    Returns:
        Whether all values are finite, a scalar bool. None, without effect, if no function does all that: then decode
        and add, with the same result.
    """
    version = fast(out.device) if form.bits else None
    return version.receive(payloads, layout, form, divisor, out, scale) if version is not None else None


def split_parts(x: Tensor, parts: NodeShards, pieces: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """Splits a bucket ``[numel]`` among the ranks of a node: ``[count, parts.numel]``.

    If ``x`` is not finite, every row begins with NaN, so that no rank sends its part. ``pieces`` are those of
    :class:`lightning_topk.core.endpoint.Endpoint`.
    """
    version = None if on_cpu(x) else fast(x.device)
    split = version.split_parts(x, parts, pieces()) if version is not None else None
    rows, bad = split or (reference.split_parts(x, parts), ~is_finite(x))
    rows[:, :1].masked_fill_(bad, torch.nan)
    return rows


def join_parts(rows: Tensor, parts: NodeShards, pieces: Callable[[], tuple[Tensor, Tensor]], out: Tensor) -> None:
    """Inverse of :func:`split_parts`: overwrites ``out`` ``[numel]``."""
    version = None if on_cpu(out) else fast(out.device)
    if version is None or not version.join_parts(rows, parts, pieces(), out):
        reference.join_parts(rows, parts, out)


@dataclass(frozen=True, eq=False)
class Kind:
    """What parameters have in common that one launch of :func:`catch_up_` steps; compared by identity, which is fast.

    Attributes:
        version: The fast version that steps them.
    """

    version: Any


@cache
def _kind(device: torch.device, buffer: torch.dtype, parameter: torch.dtype) -> Kind | None:
    version = fast(device)
    if version is None or not {buffer, parameter} <= {*version.CATCHES_UP}:
        return None
    return Kind(version)


def kind_of(buffer: Tensor, waited: Tensor, parameter: Tensor) -> Kind | None:
    """The kind of a parameter; None if no fast version can step it."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(buffer)
    same = dense and all(alike(each, buffer) for each in (waited, parameter))
    return _kind(buffer.device, buffer.dtype, parameter.dtype) if same else None


def catch_up_(
    several: Sequence[tuple[Stepped, Kind | None]],
    scale: Tensor | None,
    skipped: Tensor | None,
    tables: dict[Kind, dict[str, Any]],
) -> None:
    """Steps momentum buffers, all of a kind in one launch; see :func:`.reference.catch_up_`.

    Args:
        several: The parameters, with their kinds.
        scale: See :func:`.reference.catch_up_`.
        skipped: See :func:`.reference.catch_up_`.
        tables: Empty at the first call for these parameters; keeps tables of their addresses on the device.
    """
    together: dict[Kind | None, list[Stepped]] = {}
    plain: dict[int, bool] = {}  # by rule; scalars on a GPU must not be read
    for stepped, kind in several:
        if id(stepped.rule) not in plain:
            plain[id(stepped.rule)] = not any(isinstance(each, Tensor) for each in stepped.rule)
        together.setdefault(kind if plain[id(stepped.rule)] else None, []).append(stepped)
    for kind, members in together.items():
        if kind is not None:
            kind.version.catch_up_(members, scale, skipped, tables.setdefault(kind, {}))
        else:
            for stepped in members:
                reference.catch_up_(stepped, scale, skipped)


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape and memory format, so that flat loops meet the same entries."""
    if x.shape != y.shape:
        return False
    # Strides of dimensions with one element mean nothing, and may differ between ranks.
    return x.stride() == y.stride() or x.squeeze().stride() == y.squeeze().stride()
