"""Tensor operations of the compression.

:mod:`~lightning_topk.core.ops.reference` defines them in plain torch. ``cpu`` (numba) and ``cuda`` (Triton) are
faster versions, imported when a tensor needs them. The functions here dispatch to the fastest version for their
tensors. ``cpu`` returns the same bits. So does ``cuda``, unless the threshold that it estimates from a sample is off:
it may then send fewer entries, or leave out later ones. Momentum agrees to rounding.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lightning_topk.core.layout import Layout, NodeShards, PayloadFormat
from lightning_topk.core.ops import reference
from lightning_topk.core.ops.reference import Rule, Stepped

FAILED: dict[str, str] = {}  # why an installed compiler does not work here, by its name


@cache
def fast(device: torch.device) -> Any | None:
    """Returns the fast version for a device, or None (plain torch) if its compiler is missing or fails.

    Numba is an optional extra; Triton comes with torch, and needs a C compiler.
    """
    module, needs = ("cpu", "numba") if device.type == "cpu" else ("cuda", "triton")
    if device.type not in ("cpu", "cuda") or find_spec(needs) is None:
        return None
    # Compiling may take tens of seconds. Python runs signal handlers in the main thread, and an exception that they
    # raise must not count as a failure to compile. So another thread compiles.
    executor = ThreadPoolExecutor(1)
    try:
        version = executor.submit(_compiled_once, module, device)
        error = version.exception()
    finally:
        executor.shutdown(wait=False)
    if error is None:
        return version.result()
    FAILED[needs] = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"lightning_topk: {needs} does not work on {device} ({FAILED[needs]}); falling back to plain torch, which is "
        "slower.",
        stacklevel=2,
    )
    return None


def _compiled_once(module: str, device: torch.device) -> Any:
    """Returns a fast version that has compiled and run once."""
    version = import_module(f"lightning_topk.core.ops.{module}")
    version.attempt(device)
    return version


def on_cpu(x: Tensor) -> bool:
    """Whether the CPU computes with ``x``; if not, a GPU does, and the host does not wait for it."""
    return x.device.type == "cpu"


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device; neither the host nor a GPU's stream waits."""
    return x if x.device == device else x.pin_memory().to(device, non_blocking=True)


def use_here(*several: Tensor) -> None:
    """Keeps the memory of tensors that may come from another stream until the current one has used them."""
    for each in several:
        if each.is_cuda:
            each.record_stream(torch.cuda.current_stream(each.device))


def separate(x: Tensor) -> Any:
    """Returns the version whose functions do single steps with ``x``, such as selecting or coding positions."""
    return (fast(x.device) if on_cpu(x) else None) or reference


class Scratch:
    """GPU memory that the exchanges of a stream use one after the other; as large as the largest needs."""

    def __init__(self) -> None:
        self.memory = torch.empty(0), torch.empty(0)  # zeros (each use clears all but the first 8 again), and others

    def take(
        self, device: torch.device, zeros: Sequence[int], others: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns int32 tensors of at least these sizes, aligned to 16 bytes; those of ``zeros`` are zero."""
        sizes = [[-(-size // 4) * 4 for size in several] for several in (zeros, others)]
        need, now = [*map(sum, sizes)], [len(x) if x.device == device else 0 for x in self.memory]
        if now[0] < need[0] or now[1] < need[1]:
            most = [*map(max, now, need)]
            options: Any = {"dtype": torch.int32, "device": device}
            self.memory = torch.zeros(most[0], **options), torch.empty(most[1], **options)
        first, second = self.memory
        return first[: need[0]].split(sizes[0]), second[: need[1]].split(sizes[1])


Limit = tuple[float, Tensor]  # factor of a gradient's norm, and the row of a limit, see :class:`.Clip`
Sender = Callable[..., Tensor | None]  # ``send(x, form, delivered, scale, fade, limit)``, see :func:`sender`


def sender(
    e: Tensor, layout: Layout, delivered: torch.dtype | None, exact: bool = False, scratch: Scratch | None = None
) -> Sender | None:
    """Returns a function that sends from a residual ``e`` ``[numel]`` in one pass over memory; None if there is none.

    It multiplies ``e`` by the number ``fade``, adds ``x`` ``[numel]``, divided by the scalar ``scale``, zeroes ``x``,
    and moves the k largest magnitudes of every shard to payloads ``[shards, P]`` uint8, which it returns; ``e`` keeps
    the wire's rounding error, and that of ``delivered``, the dtype of the receivers' output. If ``x`` is not finite,
    ``e`` only fades, and every value in the payloads is NaN. All tensors are contiguous, and ``e`` is finite.

    It returns None if it cannot do that, without effect on a finite ``x``: the caller then adds, selects, encodes and
    keeps in separate steps, with the same result.

    On a GPU it also clips ``x`` to a ``limit``, works in ``scratch`` memory, and may send fewer than the k largest,
    unless ``exact`` forbids it.
    """
    version = fast(e.device)
    return version.sender(e, layout, delivered, exact, scratch or Scratch()) if version is not None else None


def receive(
    payloads: Tensor, layout: Layout, form: PayloadFormat, divisor: int, out: Tensor,
    scale: Tensor | None = None, ordered: bool = False, bound: dict[Any, Any] | None = None,
) -> Tensor | None:  # fmt: skip
    """Decodes payloads, divides the values by ``divisor``, a power of two, and multiplies them by the loss ``scale``.

    Adds them to ``out`` ``[numel]`` or ``[parts, numel]``, contiguous. Row r of the payloads ``[R, P]`` uint8 belongs
    to shard r of the layout, and the rows after the last shard to the next part of ``out``. With one shard and one
    part, all rows belong to it. They are added in order if ``ordered``. Otherwise a GPU adds them in any order, and the
    last bits of a sum may differ each time. Rejects damaged payloads.

    Returns a scalar bool, whether all values are finite; or None, without effect, if no fast function can do this: the
    caller then decodes and adds. A GPU caches in ``bound`` what is the same for all payloads of a form.
    """
    version = fast(out.device)
    return version and version.receive(payloads, layout, form, divisor, out, scale, ordered, bound)


def split_parts(x: Tensor, parts: NodeShards, pieces: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """Splits a bucket ``[numel]`` among the ranks of a node: ``[count, parts.numel]``.

    If ``x`` is not finite, every row begins with NaN, so that no rank sends its part. ``pieces`` returns those of
    :class:`lightning_topk.core.endpoint.Endpoint`.
    """
    version = _kernels_for(x)
    if version is not None:
        rows, bad = x.new_empty(parts.count, parts.numel), torch.zeros((), dtype=torch.bool, device=x.device)
        version.copy_parts(x, rows, pieces(), bad)
    else:
        rows, bad = reference.split_parts(x, parts), ~reference.is_finite(x)
    rows[:, :1].masked_fill_(bad, torch.nan)
    return rows


def join_parts(rows: Tensor, parts: NodeShards, pieces: Callable[[], tuple[Tensor, Tensor]], out: Tensor) -> None:
    """Inverse of :func:`split_parts`: overwrites ``out`` ``[numel]``."""
    version = _kernels_for(out)
    if version is not None:
        version.copy_parts(out, rows, pieces())
    else:
        reference.join_parts(rows, parts, out)


def nan_unless_(g: Tensor, starts: Tensor, condition: Tensor) -> None:
    """Sets elements ``starts`` ``[n]`` int64 of a bucket ``[numel]`` to NaN unless the scalar ``condition`` holds."""
    (_kernels_for(g) or reference).nan_unless_(g, starts, condition)


def _kernels_for(bucket: Tensor) -> Any | None:
    """The version with kernels for a bucket in its own dtype, or None."""
    known = not on_cpu(bucket) and bucket.itemsize <= 4 and bucket.is_contiguous()
    return fast(bucket.device) if known else None


Kind = tuple[torch.device, torch.dtype, torch.dtype]
"""What parameters stepped in one launch have in common: device, dtype of momentum buffers, dtype of gradients."""


def kind_of(stepped: Stepped) -> Kind | None:
    """The kind of a parameter; None if no fast version can step it."""
    buffer, gradient = stepped.buffer, stepped.gradient
    version, dense = fast(buffer.device), torch.ops.aten.is_non_overlapping_and_dense(buffer)
    if version is None or not dense or not {buffer.dtype, gradient.dtype} <= {*version.FLOATS}:
        return None
    theirs = [x for x in (gradient, stepped.parameter, stepped.replacement) if x is not None]
    same = all((x.dtype, x.device) == (gradient.dtype, buffer.device) for x in theirs)
    same = same and all(alike(x, buffer) for x in (stepped.waited, stepped.out, *theirs))
    return (buffer.device, buffer.dtype, gradient.dtype) if same else None


class CatchUp:
    """Steps the momentum buffers of parameters, all of a kind in one launch; see :func:`.reference.catch_up_`.

    An instance serves all steps with the same tensors and rules of the same forms. The numbers in the rules may change,
    and the gradients may be other tensors with the same dtypes and memory formats.
    """

    def __init__(self, several: Sequence[Stepped], rules: Sequence[Rule]) -> None:
        kinds = defaultdict[Kind | None, list[int]](list)
        for place, each in enumerate(several):
            kinds[None if rules[each.rule].unread else kind_of(each)].append(place)
        # Without their gradients, which the user may free after the step.
        self._singly = [(place, several[place]._replace(gradient=reference.NOTHING)) for place in kinds.pop(None, [])]
        self._together = list[tuple[list[int], Any]]()
        for kind, places in kinds.items():
            version: Any = None if kind is None else fast(kind[0])
            self._together.append((places, version.CatchUp([several[place] for place in places])))

    def __call__(
        self, gradients: Sequence[Tensor], rules: Sequence[Rule], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """Takes a step; ``Stepped.rule`` is an index into ``rules``."""
        for place, each in self._singly:
            reference.catch_up_(each._replace(gradient=gradients[place]), rules[each.rule], scale, skipped)
        for places, launch in self._together:
            launch([gradients[place] for place in places], rules, scale, skipped)


def fold_signs_(counts: Tensor, fresh: Tensor, ratio: Tensor) -> None:
    """Adds the signs that :class:`CatchUp` counted in the last step; see :func:`.reference.fold_signs_`."""
    version = None if on_cpu(counts) else fast(counts.device)
    (version or reference).fold_signs_(counts, fresh, ratio)


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape and memory format, so that flat loops meet the same entries."""
    # Strides of dimensions with one element mean nothing, and may differ between ranks.
    return x.shape == y.shape and x.squeeze().stride() == y.squeeze().stride()
