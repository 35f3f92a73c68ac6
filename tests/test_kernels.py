"""The Triton kernels, compared with the reference: on a GPU, and everywhere under Triton's interpreter."""

import itertools
import os
import random
import subprocess
import sys
from unittest import mock

import pytest
import torch
from laws import residual_and_gradient, simulate

from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core import ops
from lightning_topk.core.exchange import TOPOLOGIES
from lightning_topk.core.layout import Layout
from lightning_topk.core.link import COLUMNS, ENTERED, EXCESS, FACTOR, SLOPE, Link, deliver
from lightning_topk.core.memory import Residual
from lightning_topk.core.ops import reference
from lightning_topk.core.ops.reference import Rule, Stepped
from lightning_topk.core.select import TopK
from lightning_topk.core.wire import WIRES, Codec

pytest.importorskip("triton")
import triton

from lightning_topk.core.ops import cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_a_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU; the interpreter runs in a process of its own"
)
DEVICE = "cpu" if INTERPRETED else "cuda"
FLOAT = torch.finfo(torch.float32)
NUMEL = 12_001 if INTERPRETED else 70_001


@pytest.mark.process
@pytest.mark.skipif(INTERPRETED, reason="it is the interpreter's process")
@pytest.mark.skipif(triton.__version__ < "3.7", reason="Triton 3.6's interpreter does not run with NumPy 2.4")
def test_the_kernels_agree_with_the_reference_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@on_a_device
def test_the_kernels_are_tried_before_they_are_used():
    cuda.attempt(torch.device(DEVICE))


def test_a_launch_reuses_what_was_compiled_for_the_same_combination(monkeypatch):
    """Triton's own look-up takes the host longer than the launch."""
    stream = mock.Mock(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    compiled, kernel, x = mock.MagicMock(function=1, packed_metadata=2), mock.MagicMock(), torch.zeros(64)
    kernel.__getitem__.return_value.return_value = compiled

    def launched(largest: int, *combination, version: int = 0) -> bool:
        """Whether Triton looked the kernel up."""
        before = kernel.__getitem__.call_count
        launch = cuda.Launcher(torch.device("cuda", 0), largest, kernel, *combination)
        launch(kernel, (3,), x, version=version)(5)
        assert launch.ready == (kernel.__getitem__.call_count == before)
        return not launch.ready

    assert launched(10, x, True)
    assert not launched(10, x[4:], True)
    compiled.run.assert_called_once_with(3, 1, 1, 7, 1, 2, None, None, None, x, 5)
    for other in ((x[1:], True), (x.half(), True), (x, False)):  # alignment, dtype, constant
        assert launched(10, *other)
    assert launched(10, x, True, version=1)
    for _ in range(2):
        assert launched(2**31, x, True), "a 64-bit integer is another type"


def inputs(name: str, numel: int) -> list[torch.Tensor]:
    return [each.to(DEVICE) for each in residual_and_gradient(name, numel)]


@pytest.mark.skipif(not INTERPRETED, reason="test_gpu has as many elements on a GPU")
def test_a_send_clears_its_counters_also_if_32_bits_do_not_hold_the_elements_of_its_programs(monkeypatch):
    from triton.runtime.interpreter import interpreter_builder as builder

    monkeypatch.setattr(
        builder, "set_grid_dim", lambda *_: setattr(builder, "grid_dim", (2**31 // cuda.TILE + 1, 1, 1))
    )
    (e, x), bins = torch.zeros(2, 8), torch.ones(cuda.TILE, dtype=torch.int32)
    state, bitmap, counts = torch.zeros(3, 128, dtype=torch.int32)
    cuda.kernels.move[(1,)](e, state, bins, bitmap, counts, 8, 1, 1, False, cuda.TILE, cuda.BLOCK, len(bins), x, e, 1.0)
    assert not bins.any()


@pytest.mark.skipif(not INTERPRETED, reason="it runs one program of a grid")
def test_a_shard_of_nearly_2_31_elements_is_cleared_and_decoded_to_the_end(monkeypatch):
    """32 bits hold neither the candidates of its programs nor the octets of its payload."""
    from triton.runtime.interpreter import interpreter_builder as builder

    zeros, tiles, octets = torch.zeros(4096, dtype=torch.int32), 2**31 // cuda.SIEVE, 2**31 // cuda.OCTETS
    words, value = torch.ones(cuda.SIEVE, dtype=torch.int32), torch.zeros(cuda.SIEVE)
    sizes = 2**31 - 1, 1, tiles, 1, len(words)
    cuda.kernels.count[(1, 1)](value, zeros, zeros, zeros, zeros.new_zeros(2 * tiles), words, *sizes, cuda.SIEVE)
    assert not words.any()

    # A bitmap of 512 octets across the boundary, of which the last tile has one bit.
    payload, begin, k = torch.empty(2**31 + 256, dtype=torch.uint8), 2**31 - 256, 1
    payload[-256:] = torch.tensor([1] + [0] * 255, dtype=torch.uint8)
    counts, out, flags = torch.zeros(2 * (octets + 1), dtype=torch.int32), torch.zeros(4096), torch.ones(2).bool()
    program = {"grid_idx": (octets // cuda.WEIGHED, 0, 0)}
    monkeypatch.setattr(builder, "set_grid_idx", lambda *_: vars(builder).update(program))
    sizes = begin, 512, len(payload) // 4, octets + 1, 1, cuda.WEIGHED, cuda.OCTETS // 4
    cuda.kernels.weigh[(1, 1)](counts, *sizes, payload.view(torch.int32), flags)
    assert counts.nonzero().tolist() == [[octets], [2 * octets + 1]]

    payload[:4], program["grid_idx"] = torch.ones(1).view(torch.uint8), (1, 0, 0)  # the entry's value
    ends, sizes = counts.cumsum(0, dtype=torch.int32), (begin, begin, 512, len(payload), octets + 1)
    form = False, 32, 0, False, False, cuda.OCTETS, cuda.BLOCK
    cuda.kernels.add[(1, 1)](counts, ends, 1, k, 4096, 4096, 1, 1.0, 1, *sizes, *form, payload, out, flags, out, 0)
    assert out.nonzero().tolist() == [[2048]]


def in_part(*axes: list) -> list[tuple]:
    """All combinations on a GPU. Under the interpreter, which is slow, as few as have each value of every axis."""
    cases, shortest = itertools.product(*map(enumerate, axes)), min(map(len, axes))
    chosen = [each for each in cases if not INTERPRETED or sum(place for place, _ in each) % shortest == 0]
    return [tuple(value for _, value in each) for each in chosen]


SELECTED_FROM = ["normal", "few", "ties", "sparse", "overflowing", "equal", "denormal"]
SELECTED = [(700, 1, 1), (16_384, 1, 17), (NUMEL, 3, 40), (12_001, 1, 5_000), (9_001, 2, 4_500)]
"""Elements, shards, entries per shard: tiles are full or not, and candidates fill one program or several."""


def selected(e, x, layout, k, send):
    """Positions and values that a version of a link's steps selects, read from payloads in fp32."""
    codec = Codec(WIRES["fp32"], layout.shard_size, k)
    payload = send(e, x, layout, codec)
    return codec.read(payload, e.dtype)


def fused(e, x, layout, codec, delivered=None):
    return cuda.Send(e, layout, ops.Scratch())(x, codec.format(delivered), delivered)


@on_a_device
@pytest.mark.filterwarnings("ignore:overflow encountered")  # in NumPy, which the interpreter uses
@pytest.mark.parametrize(("name", "shape"), in_part(SELECTED_FROM, SELECTED))
def test_one_pass_selects_like_the_reference(name, shape):
    """At any density, the first of equal entries, and any number of them; missing entries are zeros."""
    numel, shards, k = shape
    layout = Layout(numel, shards)
    e, x = inputs("zero" if name == "few" else name, numel)
    if name == "few":
        x[:: 5 * numel // k] = 1.0 + torch.arange(len(x[:: 5 * numel // k]), device=DEVICE)
    total = (e + x).clamp(-FLOAT.max, FLOAT.max)
    index, value = selected(e, x, layout, k, fused)
    assert (index.diff(dim=1) >= 0).all()
    flat = reference.flat_index(index, layout).view(-1)
    sent = torch.zeros_like(total).scatter_add_(0, flat, value.view(-1))
    assert torch.equal(sent, total.masked_fill(sent == 0, 0))
    assert torch.equal(e, total - sent)
    assert not x.any()
    room = cuda.sampled(layout, k)[2]
    reach = reference.shard_rows(total, layout).abs() >= FLOAT.tiny
    if (reach.sum(1) > room).any() and name in ("ties", "equal", "overflowing"):
        assert (value != 0).all()  # the first ones that have room
    else:
        expected, found = selected(total.clone(), torch.zeros_like(total), layout, k, separate)
        found = torch.where(found.abs() >= FLOAT.tiny, found, 0)
        places = reference.flat_index(expected, layout).view(-1)
        assert torch.equal(sent, torch.zeros_like(total).scatter_add_(0, places, found.view(-1)))


@on_a_device
@pytest.mark.parametrize("width", [100] if INTERPRETED else [64, 100, 256])
def test_selection_stays_exact_if_a_layers_columns_differ_in_scale(width):
    numel, k = (2**16, 655) if INTERPRETED else (2**17, 1310)
    layout, (e, _) = Layout(numel, 2), inputs("normal", numel)
    e *= torch.logspace(-3, 3, width, device=DEVICE).repeat(-(-numel // width))[:numel]
    e[numel // 2 :] *= 100
    for _ in range(1 if INTERPRETED else 3):  # samples differ
        expected, value = selected(e.clone(), torch.zeros_like(e), layout, k, separate)
        found, sums = selected(e.clone(), torch.zeros_like(e), layout, k, fused)
        assert sums.square().sum() > 0.999 * value.square().sum()
        assert (found == expected).float().mean() > 0.99


def separate(e, x, layout, codec, delivered=None):
    """Payloads of a link's separate steps; the rest stays in ``e``, and ``x`` is zeroed."""
    link = Link(layout, TopK(), Residual(0, e.dtype, e.device), delivered)
    link.memory.residual = e
    with mock.patch.object(ops, "fast", return_value=None):
        return link.send(x, codec)


SHAPES = [(16_384, 1, 1), (NUMEL, 1, 700), (NUMEL, 3, 200), (NUMEL, 4, 25), (NUMEL, 3, 1500), (NUMEL, 2, NUMEL // 3)]
"""Elements, shards, entries per shard."""
DTYPES = (
    (None, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
)
"""dtypes of the delivered vector and of the gradient."""
RECEIVED = (torch.float32, torch.bfloat16, torch.float16)
SHAPES_RECEIVED = [(16_384, 1, 17), (NUMEL, 3, 1500), (NUMEL, 4, 25)]


@on_a_device
@pytest.mark.parametrize(("shape", "wire"), in_part(SHAPES, [*WIRES]))
def test_the_fused_send_equals_the_separate_steps(wire, shape):
    numel, shards, k = shape
    layout = Layout(numel, shards)
    codec = Codec(WIRES[wire], layout.shard_size, k)
    one = SHAPES.index(shape) % len(DTYPES)
    for delivered, dtype in [DTYPES[one]] if INTERPRETED else DTYPES:
        e, x = inputs("normal", numel)
        e[numel // 2] = torch.finfo(e.dtype).max  # over the limit of most wires
        x, kept = x.to(dtype), e.clone()
        expected = separate(kept, x.clone(), layout, codec, delivered)
        assert torch.equal(fused(e, x, layout, codec, delivered), expected)
        assert torch.equal(e, kept)
        assert not x.any()


@on_a_device
@pytest.mark.filterwarnings("ignore:overflow encountered")  # in NumPy, which the interpreter uses
@pytest.mark.parametrize(
    ("case", "wire", "dtype"),
    [
        ("overflowing", "fp32", torch.float32),
        ("nan", "fp32", torch.float32),
        ("nan", "bf16", torch.float32),
        ("nan", "int4", torch.bfloat16),
    ],
)
def test_the_fused_send_keeps_residuals_finite(case, wire, dtype):
    """A gradient that is not finite sends NaN and leaves the residual; of sums that overflow, some are not sent."""
    layout = Layout(NUMEL, 3)
    codec = Codec(WIRES[wire], layout.shard_size, 200)
    e, x = inputs("normal", layout.numel)
    if case == "nan":
        x[77] = torch.nan
    else:
        e[::7] = x[::7] = torch.finfo(torch.float32).max
    x, before, kept = x.to(dtype), e.clone(), e.clone()
    expected, payload = separate(kept, x.clone(), layout, codec), fused(e, x, layout, codec)
    assert codec.read(payload, e.dtype)[1].isnan().all() if case == "nan" else torch.equal(payload, expected)
    assert torch.equal(e, before if case == "nan" else kept)
    assert e.isfinite().all()
    assert not x.any()


@on_a_device
@pytest.mark.filterwarnings("ignore:overflow encountered")  # in NumPy, which the interpreter uses
@pytest.mark.parametrize(("wire", "dtype", "scale"), [("fp32", torch.float16, 2.0**16), ("int4", torch.bfloat16, 6e4)])
def test_a_loss_scale_is_removed_and_applied_and_what_waits_fades_in_the_same_launches(wire, dtype, scale):
    layout, scale = Layout(5_001, 3), torch.tensor(scale, device=DEVICE)
    codec = Codec(WIRES[wire], layout.shard_size, 200)
    e, x = (1e-6 * each for each in inputs("normal", layout.numel))
    scaled, (kept, plain) = (x * scale).to(dtype), (e.clone(), e.clone())
    x = scaled.float() * scale.reciprocal()
    expected = separate(plain.mul_(0.7), x.clone(), layout, codec)
    payload = cuda.Send(kept, layout, ops.Scratch())(scaled, codec.format(), None, scale, 0.7)
    assert torch.equal(payload, expected)
    assert torch.equal(kept, plain)
    assert not scaled.any()
    for times in (1, 1e6):  # the larger scale overflows float16
        out = torch.zeros(2, layout.numel, dtype=dtype, device=DEVICE)
        finite = cuda.receive(payload, layout, codec.format(), 1, out[0], times * scale)
        with mock.patch.object(ops, "fast", return_value=None):
            assert finite == deliver(payload, codec, layout, out[1], times * scale)
        assert finite == (times == 1 or dtype == torch.bfloat16)
        assert out[0].count_nonzero() > 500
        assert torch.equal(*out)


@on_a_device
@pytest.mark.parametrize(("slope", "scale", "dtype"), [(0.1, None, torch.float32), (1e-3, 8.0, torch.bfloat16)])
def test_a_gradient_is_clipped_where_it_is_sent(slope, scale, dtype):
    """By its norm, and that of the other parts of a node's ranks."""
    layout, rows = Layout(9_001, 3), torch.zeros(1, COLUMNS, device=DEVICE)
    codec, (e, x) = Codec(WIRES["fp32"], layout.shard_size, 200), inputs("normal", layout.numel)
    x, rows[0, SLOPE] = x.to(dtype), slope
    factor = None if scale is None else torch.tensor(scale, device=DEVICE)
    norm = x.double().norm() / (scale or 1) * 2**0.5
    excess = max(1.0, float(norm) * slope)
    assert (excess > 1) == (scale is None)
    kept, expected = e.clone(), x.clone()
    payload = cuda.Send(kept, layout, ops.Scratch())(x, codec.format(), None, factor, 1.0, (2**0.5, rows))
    found = rows[0, [FACTOR, ENTERED, EXCESS]].tolist()
    torch.testing.assert_close(found, [excess * (scale or 1), float(norm) / excess, excess], rtol=1e-6, atol=0)
    assert torch.equal(payload, separate(e, expected.float() * rows[0, FACTOR].reciprocal(), layout, codec))
    assert torch.equal(kept, e)
    assert not x.any()


@on_a_device
@pytest.mark.parametrize(("count", "bad"), [(2, None), (8, None), (2, torch.nan), (8, -torch.inf)])
def test_a_bucket_is_split_among_the_ranks_of_a_node_and_joined_like_in_the_reference(count, bad):
    sizes = (10_007, 3, 0, 1, 4096 * count, 17)
    plan = plan_bucket(TopKConfig(0.01, topology="hierarchical"), sizes, 2 * count, count)
    end = plan.endpoint(0, torch.float32, torch.device(DEVICE))
    parts, x = end.plan.parts, inputs("normal", sum(sizes))[0]
    if bad is not None:
        x[10_009] = bad
    with mock.patch.object(ops, "fast", return_value=cuda), mock.patch.object(ops, "on_cpu", return_value=False):
        rows, expected = ops.split_parts(x, parts, lambda: end.pieces), reference.split_parts(x, parts)
    assert rows[:, 0].isnan().all() == (bad is not None)
    if bad is not None:
        expected[:, 0] = torch.nan
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
    out = torch.full_like(x, 9)
    cuda.copy_parts(out, reference.split_parts(x, parts), end.pieces)
    assert torch.equal(out.nan_to_num(7), x.nan_to_num(7))


@on_a_device
@pytest.mark.parametrize("dtype", RECEIVED)
@pytest.mark.parametrize("finite", [True, False])
def test_a_bucket_is_marked_as_not_finite_like_in_the_reference(dtype, finite):
    x, starts = inputs("normal", NUMEL)[0].to(dtype), torch.arange(0, NUMEL, 7, device=DEVICE)
    condition, expected = torch.tensor([not finite, finite], device=DEVICE)[1], x.clone()
    cuda.nan_unless_(x, starts, condition)
    reference.nan_unless_(expected, starts, condition)
    assert x[starts].isnan().all() == (not finite)
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the paths of a GPU, and runs the programs of each launch in another order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    drawn, grid = random.Random(0), {}

    def set_grid_dim(*shape: int) -> None:
        builder.grid_dim = shape
        programs = [*itertools.product(*map(range, shape))]
        grid.update(zip(programs, drawn.sample(programs, len(programs)), strict=True))

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", lambda *place: setattr(builder, "grid_idx", grid[place]))
    monkeypatch.setattr(ops, "fast", lambda device: cuda)
    monkeypatch.setattr(ops, "on_cpu", lambda x: False)


@pytest.mark.skipif(not INTERPRETED, reason="test_gpu has the laws on a GPU, which runs programs in any order")
@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "dtype", "scale", "ratio", "clip"),
    [
        ("sharded", True, "int8", torch.float32, 3e3, 0.02, 20.0),
        ("sharded", True, "int4", torch.float32, None, 0.3, None),
        ("single_server", False, "bf16", torch.float16, 3e3, 0.3, None),
        ("allgather", False, "fp32", torch.float32, None, 0.3, None),  # sums of quantised values would be exact
        ("hierarchical", True, "bf16", torch.bfloat16, None, 0.3, 20.0),
        ("dense", True, "fp32", torch.float32, None, 0.3, None),
    ],
)
def test_the_laws_hold_with_the_kernels_in_whatever_order_the_programs_of_a_launch_run(
    monkeypatch, topology, bidirectional, wire, dtype, scale, ratio, clip
):
    """On the paths of a GPU: scales and the ranks of a node are left to kernels, also at densities above 1/8.

    Ranks launch in different orders: they would have different sums of three rows that are added at once.
    """
    as_on_a_gpu(monkeypatch)
    sent = mock.Mock(side_effect=cuda.Send.__call__)
    monkeypatch.setattr(cuda.Send, "__call__", lambda *arguments: sent(*arguments))
    config = TopKConfig(ratio, topology=topology, bidirectional=bidirectional, wire=wire)
    numel = 1_600 if topology == "hierarchical" else 800  # plain torch serves less
    simulate(config, 3, numel, dtype, steps=2 if scale else 1, scale=scale, clip=clip)
    assert sent.called == TOPOLOGIES[topology].compresses


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, the assertion ends the process")
@pytest.mark.parametrize("place", [0, 700, 900, -5, -1])
def test_a_damaged_payload_fails_an_assertion_and_is_not_added(place):
    layout = Layout(20_001, 3)
    codec, row = Codec(WIRES["fp32"], layout.shard_size, 200), reference.shard_rows(inputs("normal", 20_001)[0], layout)
    payload, _ = codec.encode(index := reference.topk_index(row, 200), row.gather(1, index))
    payload[1, place] ^= 4
    out = torch.zeros(20_001)
    with pytest.raises(RuntimeError, match="a payload is damaged"):
        cuda.receive(payload, layout, codec.format(), 1, out)
    assert (reference.shard_rows(out, layout) != 0).sum(1).tolist() == [200, 0, 200]


@on_a_device
@pytest.mark.parametrize(("wire", "shape"), in_part([*WIRES], SHAPES_RECEIVED))
def test_the_fused_receive_equals_the_separate_steps(wire, shape):
    """Workers' entries are added in a fixed order where every rank computes the sum, or the user asks for it."""
    numel, shards, k = shape
    layout = Layout(numel, shards)
    codec = Codec(WIRES[wire], layout.shard_size, k)
    rows = reference.shard_rows(inputs("normal", numel)[0], layout)
    index = reference.topk_index(rows, k)
    for blow in (1.0, torch.nan):
        value = rows.gather(1, index)
        value[-1, -1] *= blow
        payload, _ = codec.encode(index, value)
        one = ([*WIRES].index(wire) + SHAPES_RECEIVED.index(shape)) % len(RECEIVED)
        for dtype in [RECEIVED[one]] if INTERPRETED else RECEIVED:
            _, arrives = codec.read(payload, dtype)
            expected, out = torch.zeros(2, numel, device=DEVICE, dtype=dtype)
            expected.scatter_add_(0, reference.flat_index(index, layout).view(-1), arrives.view(-1))
            assert cuda.receive(payload, layout, codec.format(), 1, out) == (blow == 1)
            assert torch.equal(out.nan_to_num(9), expected.nan_to_num(9))
        _, arrives = codec.read(payload, torch.float32)
        expected = torch.zeros(codec.universe, device=DEVICE)
        for places, values in zip(index, arrives, strict=True):
            expected.scatter_add_(0, places, values / 4)
        served, form, exact = Layout(codec.universe), codec.format(), {"rtol": 0, "atol": 0}
        for ordered, asked, tolerance in ((True, False, exact), (False, True, exact), (False, False, {})):
            total = torch.zeros_like(expected)
            with mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=asked):
                assert cuda.receive(payload, served, form, 4, total, ordered=ordered) == (blow == 1)
            torch.testing.assert_close(total, expected, equal_nan=True, **tolerance)


@on_a_device
def test_signs_are_folded_in_one_launch_like_in_the_reference():
    """A range of D without deliveries in the last step keeps its counts, a parameter without any has r = 0."""
    ends, fresh = [], torch.randint(0, 40, (5, 16), dtype=torch.int32, device=DEVICE)
    fresh[0, 4:], fresh[1], fresh[2, ::2] = 0, 0, 0
    for version in (cuda, reference):
        tensors = torch.zeros(5, 16, device=DEVICE), fresh.clone(), torch.ones(5, 8, device=DEVICE)
        version.fold_signs_(*tensors)
        tensors[1].copy_(fresh.roll(1, 0))
        version.fold_signs_(*tensors)
        ends.append(tensors)
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)
    assert not ends[0][1].any()


@on_a_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skipped", [None, 0.0, 1.0])
def test_momentum_buffers_catch_up_in_one_launch_like_in_the_reference(dtype, skipped):
    squares = Rule(0.9, 0.1, squares=0.95, eps=0.1), Rule(0.5, 0.5, -1, 0.1, waits=True, squares=0.0)
    rules = [Rule(0.9, 0.5), Rule(0.9, 1.0, -1, 0.1, 0.7), Rule(0.5, 0.1, -1, 0.1, waits=True), *squares]
    ends = []
    found_inf = None if skipped is None else torch.tensor(skipped, device=DEVICE)
    scale = None if skipped is None else torch.tensor(8.0, device=DEVICE)
    for version in (cuda, reference):
        several = []
        for number, (rule, numel) in enumerate(zip(rules, (3, 5_001, 2_048, 1_000, 300), strict=True)):
            buffer, gradient = (each.to(dtype) for each in inputs("normal", numel))
            gradient[gradient.abs() < 1.5] = 0
            waited = (torch.arange(numel, device=DEVICE) % 256).clamp(max=254).to(torch.uint8)
            other = torch.empty_like(gradient) if rule.replaces else None
            signs = torch.linspace(0, 15, 8, device=DEVICE), torch.ones(16, dtype=torch.int32, device=DEVICE)
            tensors = buffer, waited, gradient, torch.empty_like(buffer), buffer.flip(0) if rule.decays else None, other
            several.append(Stepped(*tensors, *(signs if rule.has_squares else (None, None)), number))
        before = [(each.buffer.clone(), each.waited.clone()) for each in several]
        if version is cuda:
            assert buffer.dtype in cuda.FLOATS
            cuda.CatchUp(several)([each.gradient for each in several], rules, scale, found_inf)
        else:
            for each in several:
                reference.catch_up_(each, rules[each.rule], scale, found_inf)
        ends.append([[x for x in (*each[:6], each.counts) if x is not None] for each in several])
        if skipped:
            torch.testing.assert_close([(each.buffer, each.waited) for each in several], before, rtol=0, atol=0)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(*ends, rtol=tolerance, atol=tolerance)
