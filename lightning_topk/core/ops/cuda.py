"""GPU versions of :mod:`lightning_topk.core.ops.reference`: launch :mod:`.kernels` and never synchronise the host.

Launch overhead on the host dominates: a bucket takes 12 launches to send and 5 to receive, whatever its size and the
number of workers. They read the gradient twice and the residual once, and write both once: 20 bytes per element::

    squares     if x is clipped: sums of its squares, by parts
    survey      whether x is finite; by how much it is too large; a histogram of a sample of the sum's magnitudes
    threshold   from the histogram: at most a 64th too low
    move        e <- fade e + x, x <- 0; a bit per entry that reaches the threshold, a count per block of 256
    cumsum      of the counts, shard by shard: the offset at which each block's entries are stored
    gather      the entries that reach the threshold, in order, into a buffer for about twice the expected number
    tally       three times: the bits of the k-th largest of these, digit by digit
    count       in each part of the buffer, how many are larger than it or equal
    choose      the k largest, in order; high parts of positions
    write       values, low parts, and the residual; like choose, takes what it writes off the check word

    weigh       payloads: sums of words, and counts of bits, by parts
    cumsum      of both
    add         values to the vector, unless the words have another sum than they should

One more launch marks a bucket with NaN unless all delivered values are finite.

Each launch is the barrier for what the next one reads: within a launch no program reads what another one writes. Sizes
follow from integers that the host knows. The current device must be that of the tensors, as in a lane. If fewer than k
entries of a shard reach the threshold, fewer are sent; if more reach it than the buffer holds, the last ones stay in
the residual. Otherwise the selection equals the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from lightning_topk.core.layout import BLOCK, DAMAGED, PIECE, Layout, PayloadFormat
from lightning_topk.core.ops import Limit, Scratch, kernels, reference
from lightning_topk.core.ops.reference import AddressTable, Rule, Stepped, sample_of

TILE = 4096  # elements per program, a multiple of the block size
SLOTS = 1024  # entries per program that writes payloads, a multiple of 64, since groups of values share a scale
SIEVE = 4096  # candidates per program that selects among them
OCTETS, WEIGHED = 256, 16  # bytes of a payload per program that decodes it, and such tiles per program that checks it
SAMPLE = 1 << 14  # minimum size of a sample
SHIFT, ROOT = 17, 128  # the sample's histogram has ROOT x ROOT bins, by the 14 bits from bit SHIFT on
PARTS = 1024  # sums of squares at most
DIGITS = 4096  # counters of a row for three digits of 11, 10 and 10 bits
LOW = 24  # the widest low part of a position that is read with 32 bits
EXACT = {"enable_fp_fusion": False}  # option of every launch: no fused multiply-add, which rounds only once
FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""dtypes of tensors that the kernels read and write, and Triton's names."""


def attempt(device: torch.device) -> None:
    """Compiles kernels and launches them, new and kept; raises an exception if Triton does not work."""
    e, x = torch.zeros(2, TILE, dtype=torch.float32, device=device).unbind()
    form, layout = PayloadFormat(TILE, 1, 32, 1.0, 4, 12, 3, 12, 0), Layout(TILE)
    send = Send(e, layout, Scratch())
    with torch.cuda.device_of(e):
        for _ in range(3):
            payloads = send(x, form, None)
            assert payloads is not None
            receive(payloads, layout, form, 1, x)


class Launcher:
    """Binds kernels to their grids and arguments, for launches on the current stream of a device.

    Triton compiles a kernel for each combination of dtypes, constants and alignments. At every launch it derives the
    combination from all arguments, which takes the host longer than the rest. So compiled kernels are kept by the
    ``combination`` of all that differs: a tensor stands for its dtype and alignment, and ``version`` for constants that
    differ between launches of one kernel. Integers above 31 bits need other kernels, and on AMD GPUs so do tensors of
    more bytes: if ``largest``, the largest of both, has more than 31 bits, none is kept.

    Attributes:
        ready: Whether all kernels were compiled before. If not, the bound launches must be used only once.
    """

    def __init__(self, device: torch.device, largest: int, *combination: Any) -> None:
        key = [(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in combination]
        self._compiled = _compiled(device, *key) if largest < 2**31 else {}
        self._stream = _stream(device)
        self.ready = True

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, version: int = 0, **options: Any
    ) -> Callable[..., None]:
        """Returns a function that launches the kernel with these arguments, followed by its own."""
        known = self._compiled.get((kernel, version))
        if known is not None:
            handles = getattr(known, "function", None), getattr(known, "packed_metadata", None)
            return partial(known.run, *(*grid, 1, 1)[:3], self._stream, *handles, None, None, None, *arguments)
        self.ready = False

        def compile_and_launch(*others: Any) -> None:
            self._compiled[kernel, version] = kernel[grid](*arguments, *others, **options, **EXACT)

        return compile_and_launch


@cache
def _compiled(*combination: Any) -> dict[Any, Any]:
    """Kernels that were compiled for a combination, see :class:`Launcher`."""
    return {}


def _stream(device: torch.device) -> int:
    """The current stream of a GPU; 0 under Triton's interpreter."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def sender(e: Tensor, layout: Layout, delivered: torch.dtype | None, exact: bool, scratch: Scratch) -> Send | None:
    """See :func:`lightning_topk.core.ops.sender`: for float32, in full blocks. It selects by an estimated threshold."""
    sends = not exact and layout.full_blocks and e.dtype == torch.float32 and delivered in (None, *FLOATS)
    return Send(e, layout, scratch) if sends else None


class Send:
    """Sends from a residual ``e`` ``[numel]``, see :func:`lightning_topk.core.ops.sender`.

    Launches are bound once for a format, in memory that all sends of a stream share. If fewer than k entries of a shard
    are sent, its payload ends in zeros. The payloads are valid until the next send.
    """

    def __init__(self, e: Tensor, layout: Layout, scratch: Scratch) -> None:
        self._e, self._layout, self._scratch = e, layout, scratch
        self._key: Any = None  # of what is bound
        self._memory: Any = None
        self._squares: Any = None
        self._payload, self._launches = e, list[Callable[..., Any]]()

    def __call__(
        self, x: Tensor, form: PayloadFormat, delivered: torch.dtype | None, scale: Tensor | None = None,
        fade: float = 1.0, limit: Limit | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Sends ``x`` ``[numel]``; returns payloads ``[shards, P]`` uint8."""
        if x.dtype not in FLOATS or form.low > LOW or not form.bits:
            return None
        factor = self._e if scale is None else scale
        aligned = x.data_ptr() % 16, factor.data_ptr() % 16
        key = form, delivered, x.dtype, aligned, factor.dtype, scale is None, limit is None, _stream(x.device)
        if key != self._key or self._memory is not self._scratch.memory:
            ready = self._bind(x, form, delivered, factor, scale is not None, limit is not None)
            self._key, self._memory = key if ready else None, self._scratch.memory
        survey, threshold, move, *others = self._launches
        if limit is not None:
            self._squares(x)
        survey(x, factor, fade, *(limit or (1.0, factor)))
        threshold()
        move(x, factor if limit is None else limit[1], fade)
        for launch in others:
            launch()
        return self._payload

    def _bind(
        self, x: Tensor, form: PayloadFormat, delivered: torch.dtype | None, factor: Tensor, scaled: bool, clipped: bool
    ) -> bool:
        """Binds the launches; returns whether they can be used more than once."""
        e, layout = self._e, self._layout
        numel, shards, k, width = layout.numel, layout.shards, form.k, form.nbytes // 4
        stride, rank, capacity = sampled(layout, k)
        turns = _ceil(numel, BLOCK * shards)
        blocks, tiles = _ceil(turns * shards, TILE // BLOCK), _ceil(capacity, SIEVE)
        sample, begin = numel // stride, form.value_bytes - (-k * form.low // 8)  # of the high bitmap
        parts = min(blocks, PARTS)
        counters, others = self._scratch.take(
            e.device, (8, ROOT * ROOT, shards * DIGITS),
            (parts, shards * 6, blocks * TILE // 32, shards * turns, shards * turns, shards * capacity, shards * k,
             shards * 2 * tiles, shards * capacity, shards * k),
        )  # fmt: skip
        (state, bins, digits), (sums, kth, bitmap, found, ends, place, index, counts, value, chosen) = counters, others
        sums = sums.view(torch.float32)
        value, chosen = value.view(torch.float32), chosen.view(torch.float32)
        if self._payload.shape != (shards, form.nbytes):
            self._payload = torch.empty(shards, form.nbytes, dtype=torch.uint8, device=e.device)
        payload, words = self._payload, self._payload.view(torch.int32)
        rounded, warps = FLOATS[delivered or e.dtype], 4 if x.dtype == e.dtype else 8  # conversion takes registers
        launch = Launcher(
            e.device, 8 * max(numel, payload.numel()), e, x, factor, shards, form.bits, form.low, rounded, scaled,
            clipped,
        )  # fmt: skip
        self._launches = [
            launch(kernels.survey, (blocks,), e, state, bins, sums, numel, sample, stride, _ceil(sample, blocks), parts,
                   scaled, clipped, SHIFT, TILE, 128, PARTS),
            launch(kernels.threshold, (1,), bins, state, rank, SHIFT, ROOT, num_warps=8),
            launch(kernels.move, (blocks,), e, state, bins, bitmap, found, numel, shards, turns, scaled or clipped,
                   TILE, BLOCK, ROOT * ROOT, num_warps=warps),
            partial(torch.cumsum, found, 0, dtype=torch.int32, out=ends),  # in one dimension ten times as fast
            launch(kernels.gather, (blocks,), e, bitmap, found, ends, place, value, shards, turns, capacity, TILE,
                   BLOCK),
            *(launch(kernels.tally, (tiles, shards), value, ends, digits, kth, capacity, turns, k, level, SIEVE,
                     version=level, num_warps=8) for level in range(3)),
            launch(kernels.count, (tiles, shards), value, ends, digits, kth, counts, words, capacity, turns, tiles, k,
                   width, SIEVE, num_warps=8),
            launch(kernels.choose, (tiles, shards), place, value, ends, digits, kth, counts, index, chosen, words,
                   capacity, turns, tiles, k, layout.shard_size, width, 8 * begin, form.check, form.low, SIEVE,
                   num_warps=16),
            launch(kernels.write, (_ceil(k, SLOTS), shards), e, state, index, chosen, payload, words, k, numel, shards,
                   form.largest, form.value_bytes, begin, form.nbytes, form.bits, form.low, rounded, SLOTS, BLOCK,
                   num_warps=8),
        ]  # fmt: skip
        if clipped:
            self._squares = launch(kernels.squares, (parts,), sums, numel, TILE)
        return launch.ready


def _ceil(count: int, size: int) -> int:
    """How many pieces of a size hold ``count``; triton.cdiv takes 5 µs of the host."""
    return -(-count // size)


def sampled(layout: Layout, k: int) -> tuple[int, int, int]:
    """See :func:`.reference.sample_of`, and how many candidates to keep per shard: twice as many as expected."""
    stride, rank = sample_of(layout, k, SAMPLE)  # beyond the sample, all entries reach the threshold
    return stride, rank, min(layout.shard_size, max(k, 2 * rank * stride // layout.shards) + 64)


def receive(
    payloads: Tensor, layout: Layout, form: PayloadFormat, divisor: int, out: Tensor,
    scale: Tensor | None = None, ordered: bool = False, bound: dict[Any, Any] | None = None,
) -> Tensor | None:  # fmt: skip
    """See :func:`lightning_topk.core.ops.receive`. A damaged payload fails an assertion on the device.

    Workers' values for one vector are added by atomic operations in any order, so two runs may differ in the last bit.
    Ranks do not differ if one server computes each sum. Where every rank computes it, pass ``ordered``: one launch for
    each worker then fixes the order, as with ``torch.use_deterministic_algorithms``.
    """
    if out.dtype not in FLOATS or form.low > LOW or not form.bits or not layout.full_blocks:
        return None
    payloads, factor, bound = payloads.contiguous(), out if scale is None else scale, {} if bound is None else bound
    ordered = ordered or torch.are_deterministic_algorithms_enabled()
    aligned = payloads.data_ptr() % 16, out.data_ptr() % 16, factor.data_ptr() % 16
    sizes = layout.numel, layout.shards, payloads.shape, out.numel(), divisor
    key = *sizes, *aligned, out.dtype, factor.dtype, scale is None, ordered, _stream(out.device)
    known = bound.get(key)
    if known is None:
        known, ready = _bind_receive(payloads, layout, form, divisor, out, factor, scale is not None, ordered)
        if ready:
            bound[key] = known
    weigh, sum_up, add, firsts = known
    flags = torch.empty(2, dtype=torch.bool, device=out.device)
    weigh(payloads.view(torch.int32), flags)
    sum_up()
    for first in firsts:
        add(payloads, out, flags, factor, first)
    intact, finite = flags.unbind()
    torch._assert_async(intact, f"lightning_topk: a payload {DAMAGED}")
    return finite


def _bind_receive(
    payloads: Tensor, layout: Layout, form: PayloadFormat, divisor: int, out: Tensor, factor: Tensor, scaled: bool,
    ordered: bool,
) -> tuple[tuple[Any, Any, Any, range], bool]:  # fmt: skip
    """Binds the launches of :func:`receive` in memory of their own; returns whether they can be used more than once."""
    rows, tiles = payloads.shape[0], _ceil(form.nbytes, OCTETS)
    by_shard = rows == layout.shards * (out.numel() // layout.numel)
    at_once = rows if by_shard or not (ordered or out.dtype != torch.float32) else 1
    shared, begin = at_once > 1 and not by_shard, form.value_bytes - (-form.k * form.low // 8)  # of the high bitmap
    size = form.value_bytes + form.index_bytes - begin
    counts, ends = torch.empty(2, 2 * rows * tiles, dtype=torch.int32, device=out.device)
    launch = Launcher(
        out.device, max(out.nbytes, payloads.nbytes), payloads, out, factor, layout.shards, form.bits, form.low,
        scaled, by_shard, shared, counts, ends,
    )  # fmt: skip
    weigh = launch(
        kernels.weigh, (_ceil(tiles, WEIGHED), rows), counts, begin, size, form.nbytes // 4, tiles, rows, WEIGHED,
        OCTETS // 4,
    )  # fmt: skip
    add = launch(
        kernels.add, (_ceil(begin + size, OCTETS) - begin // OCTETS, at_once), counts, ends, rows, form.k,
        form.universe, layout.numel, layout.shards, 1 / divisor, form.check, form.value_bytes, begin, size, form.nbytes,
        tiles, scaled, form.bits, form.low, by_shard, shared, OCTETS, BLOCK,
    )  # fmt: skip
    sum_up = partial(torch.cumsum, counts, 0, dtype=torch.int32, out=ends)
    return (weigh, sum_up, add, range(0, rows, at_once)), launch.ready


def copy_parts(bucket: Tensor, rows: Tensor, pieces: tuple[Tensor, Tensor], bad: Tensor | None = None) -> None:
    """Joins the rows ``[count, parts.numel]`` of a node's ranks, in one launch for all parameters.

    With ``bad``, a scalar bool: splits the bucket instead, and sets it if a value is not finite.
    """
    kernels.copy_parts[len(pieces[0]), len(rows)](
        bucket, rows, rows if bad is None else bad, *pieces, rows.shape[1], bad is None, PIECE, num_warps=8, **EXACT
    )


def nan_unless_(g: Tensor, starts: Tensor, condition: Tensor) -> None:
    """Same as :func:`lightning_topk.core.ops.reference.nan_unless_`, in one launch."""
    count = starts.shape[0]
    launch = Launcher(g.device, g.nbytes, g, starts, condition)
    launch(kernels.nan_unless, (-(-count // SLOTS),), g, starts, condition, count, SLOTS)()


def fold_signs_(counts: Tensor, fresh: Tensor, ratio: Tensor) -> None:
    """Same as :func:`lightning_topk.core.ops.reference.fold_signs_`, in one launch."""
    with torch.cuda.device_of(counts):
        Launcher(counts.device, 0, counts, fresh, ratio)(
            kernels.fold_signs, (len(counts),), counts, fresh, ratio, reference.RANGES, reference.KEPT, reference.PRIOR,
            reference.CERTAIN, math.pi / 2, num_warps=1,
        )()  # fmt: skip


CAPTURED: list[Any] = []
"""Tables and their sources on the host, which replays of CUDA graphs read again; some kilobytes per graph."""


class CatchUp(AddressTable):
    """Same as :func:`lightning_topk.core.ops.reference.catch_up_` of each parameter, in one launch.

    It moves 18 bytes per float32 entry; 4 more for Adam's, and 4 more with weight decay in the gradient. Tables are
    copied to the device when they have changed.
    """

    def __init__(self, several: Sequence[Stepped]) -> None:
        super().__init__(several)
        self._device = several[0].buffer.device
        self._dtypes = FLOATS[several[0].buffer.dtype], FLOATS[several[0].gradient.dtype]
        tiles = -(-self.rows[:, 8] // SLOTS)
        self.rows[:, 10] = tiles.cumsum() - tiles
        self._tiles, owners = int(tiles.sum()), np.arange(len(tiles), dtype=np.int32).repeat(tiles)
        self._owners = self._table = self._rules = self._copied(owners)
        self._known: list[Rule] = []  # in the table of rules

    def __call__(
        self, gradients: Sequence[Tensor], rules: Sequence[Rule], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """See :class:`lightning_topk.core.ops.CatchUp`."""
        if self.find(gradients):
            self._table = self._copied(self.rows)
        if (its := [rules[number] for number in self.rules]) != self._known:
            self._known, self._rules = its, self._copied(np.array([*map(_numbers, its)], np.float32))
        if not self._tiles:
            return  # empty shards
        tables = self._table, self._owners, self._rules
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            CAPTURED.append(tables)
        table, owners, numbers = [copied for _, copied in tables]
        factor, flag = table if scale is None else scale, table if skipped is None else skipped
        with torch.cuda.device_of(table):
            combination = *self._dtypes, scale is not None, skipped is not None
            Launcher(self._device, 0, table, owners, numbers, factor, flag, *combination)(
                kernels.catch_up, (self._tiles,), table, owners, numbers, factor,
                table if scale is None else scale.reciprocal(), flag, *combination, SLOTS, num_warps=8,
            )()  # fmt: skip

    def _copied(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """A table, and its copy on the device; the host does not wait."""
        source = torch.tensor(rows, device="cpu")  # also if the user sets a default device
        source = source if self._device.type == "cpu" else source.pin_memory()
        return source, source.to(self._device, non_blocking=True)


def _numbers(rule: Any) -> list[float]:
    """A row of the kernel's table of rules."""
    m, n = rule.momentum, rule.squares
    memory = math.log2(n) if n else -math.inf, 0.0 if n == 1 else 1 / (1 - n)
    return [*rule, math.log2(m), 1 / (1 - m), rule.weight / m, *memory]
