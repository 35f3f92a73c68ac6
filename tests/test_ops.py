"""Bits, positions, layouts and selections."""

import itertools
import math
import random
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from laws import codecs_of, in_turn, residual_and_gradient, vector

from lightning_topk.config import TopKConfig
from lightning_topk.core import ops
from lightning_topk.core.layout import Layout, k_of
from lightning_topk.core.link import Link, Step, aggregate, deliver
from lightning_topk.core.memory import Residual
from lightning_topk.core.ops import cpu, loops, reference
from lightning_topk.core.ops.reference import Rule, Stepped
from lightning_topk.core.select import GaussianK, RandK, SampledK, TopK, TrimmedK
from lightning_topk.core.wire import WIRES, Codec


def positions(universe: int, k: int, rows: int = 2) -> torch.Tensor:
    return torch.tensor([sorted(random.Random(row).sample(range(universe), k)) for row in range(rows)])


def test_elias_fano_takes_repeats_and_matches_an_example():
    index = torch.tensor([[0, 0, 5, 5, 999], [0, 1, 2, 998, 999]])
    low = reference.elias_fano_low_width(1000, 5)
    assert torch.equal(reference.elias_fano_decode(reference.elias_fano_encode(index, 1000, low), 1000, 5, low), index)
    # 3, 4, 13 below 16 with two low bits: lows 11 00 01 (first bit lowest), highs 0, 1, 3 -> bits 0, 2, 5.
    code = reference.elias_fano_encode(torch.tensor([[3, 4, 13]]), 16, 2)
    assert code.tolist() == [[0b010011, 0b100101]]


@pytest.mark.parametrize("ratio", [0.001, 0.01])
def test_positions_cost_at_most_6_percent_over_their_entropy(ratio):
    universe, k = 1_000_000, int(1_000_000 * ratio)
    entropy = universe * -(ratio * math.log2(ratio) + (1 - ratio) * math.log2(1 - ratio))
    codec = Codec(WIRES["bf16"], universe, k)
    assert codec.format().index_bytes * 8 / entropy < 1.062


ROUNDING = {"fp32": 6e-8, "bf16": 0.004, "int8": 0.008, "int4": 0.076}
"""Rounding error of a value relative to the largest one."""


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("rows", "universe", "k"),
    [(1, 10, 3), (5, 1000, 7), (3, 1, 1), (2, 2, 1), (2, 256, 256), (2, 1000, 1), (3, 1000, 63), (2, 1000, 64),
     (3, 1000, 65), (2, 300, 257), (2, 70_000, 700), (2, 2**26, 40)],
)  # fmt: skip
def test_a_decoded_payload_holds_what_the_codec_returned(wire, rows, universe, k):
    codec = Codec(WIRES[wire], universe, k)
    index, value = positions(universe, k, rows), torch.randn(rows, k)
    payload, sent = codec.encode(index, value)
    assert payload.shape == (rows, codec.nbytes)
    assert payload.dtype == torch.uint8
    read_index, read_value = codec.read(payload, torch.float32)
    assert torch.equal(read_index, index)
    assert torch.equal(read_value, sent)
    assert ((sent - value).abs() <= value.abs().amax(1, keepdim=True) * ROUNDING[wire]).all()


def test_two_4_bit_values_share_a_byte_the_first_one_lowest():
    written = WIRES["int4"].write(torch.tensor([[7.0, -1.0, 0.4, -7.0, 3.0]]))
    assert written.tolist() == [[0xF7, 0x90, 0x03, *torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).tolist()]]
    assert WIRES["int4"].read(written, 5).tolist() == [[7, -1, 0, -7, 3]]


def test_a_payload_of_the_same_size_but_another_bucket_or_k_is_refused():
    codec, *others = (Codec(WIRES["int4"], 1000, k, tag=tag) for k, tag in ((10, 0), (9, 0), (10, 1), (9, 1)))
    payload, _ = codec.encode(positions(1000, 10), torch.ones(2, 10))
    codec.read(payload, torch.float32)
    for other in others:
        assert other.nbytes == codec.nbytes
        with pytest.raises(ValueError, match="was sent for another bucket, ratio or step"):
            other.read(payload, torch.float32)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("universe", "k"), [(10, 3), (1000, 7), (5, 5)])
def test_a_damaged_payload_is_refused_wherever_the_damage_is(wire, universe, k):
    codec = Codec(WIRES[wire], universe, k)
    payload, _ = codec.encode(positions(universe, k, 3), torch.randn(3, k))
    for place in range(codec.nbytes):
        for bit in (1, 128):
            damaged = payload.clone()
            damaged[1, place] ^= bit
            with pytest.raises(ValueError, match="payload from rank 1 is damaged"):
                codec.read(damaged, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("delivered", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wire", WIRES)
def test_any_value_arrives_finite_and_as_the_sender_expects(wire, delivered, dtype):
    info = torch.finfo(torch.float32)
    value = torch.tensor([[torch.inf, -info.max, info.tiny, info.tiny / 4, 0.0, 1.0, -1e-3, 65504.0]], dtype=dtype)
    for chosen in (value, value[:, 2:], value[:, 2:5], value[:, :2]):
        k = chosen.shape[1]
        codec = Codec(WIRES[wire], k, k)
        payload, sent = codec.encode(torch.arange(k).unsqueeze(0), chosen, delivered)
        arrived = codec.read(payload, delivered or dtype)[1].to(dtype)
        assert torch.equal(arrived, sent)
        assert sent.isfinite().all()
    payload, sent = codec.encode(torch.arange(k).unsqueeze(0), chosen, delivered, torch.tensor(False))
    assert not sent.any()
    assert codec.read(payload, dtype)[1].isnan().all()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 1023, 1024, 70_001])
def test_every_element_has_one_place_in_the_shards(numel, shards):
    layout = Layout(numel, shards)
    x = torch.arange(1, numel + 1)
    rows = reference.shard_rows(x, layout)
    assert rows.shape == (shards, layout.shard_size)
    assert sorted(rows[rows > 0].tolist()) == x.tolist()
    assert (rows > 0).sum(1).max() == (rows[0] > 0).sum() == layout.shard_size
    index = torch.arange(layout.shard_size).expand(shards, -1)
    flat = reference.flat_index(index.clone(), layout)
    assert torch.equal(x[flat][rows > 0], rows[rows > 0])
    if numel >= 256 * shards:
        assert ((flat // 256) % shards == torch.arange(shards).unsqueeze(1))[rows > 0].all()


def test_k_is_the_papers_and_every_shard_sends_its_share():
    assert k_of(100, 0.29) == 29  # int(100 * 0.29) is 28
    assert [k_of(50_890, 0.001), k_of(3, 0.001), k_of(7, 1)] == [50, 1, 7]
    for numel, shards in itertools.product((1, 10, 1000, 123_457, 25_000_000), (1, 2, 3, 4, 64)):
        layout = Layout(numel, shards)
        for ratio in (0.001, 0.01, 0.29, 1.0):
            kept = layout.k_per_shard(k_of(numel, ratio))
            assert 1 <= kept <= layout.shard_size
            assert kept * shards >= k_of(numel, ratio)
        assert layout.k_per_shard(numel) == layout.shard_size


def test_topk_selects_the_largest_in_order_and_the_first_of_equal_ones():
    index = reference.topk_index(torch.tensor([[1.0, -5.0, 3.0, 0.0], [0.0, 0.5, -0.1, 0.2]]), 2)
    assert index.tolist() == [[1, 2], [1, 3]]
    rows = torch.tensor([[1.0, -2.0, 2.0, -1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [3.0, -3.0, 3.0, 3.0, -4.0]])
    assert reference.topk_index(rows, 3).tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 4]]


NAMES = ["normal", "heavy", "equal", "zero", "spike", "ties", "denormal", "not sampled", "sorted", "ascending"]


@pytest.mark.parametrize(("name", "ratio", "size"), in_turn([1 << 16, 300_001], NAMES, [0.0001, 0.001, 0.01, 0.1, 0.5]))
def test_the_fast_top_k_is_the_reference(name, size, ratio):
    rows = torch.stack([vector(name, size), vector(name, size).flip(0)])
    k = k_of(size, ratio)
    assert torch.equal(cpu.topk_index(rows, k), reference.topk_index(rows, k))


SENT = ["normal", "ties", "equal", "zero", "spike", "denormal", "sparse", "one shard", "overflowing", "ascending"]
SHAPES = [(3, 1, 0.4), (64, 3, 0.2), (300, 4, 0.9), (1_000, 3, 0.1), (5_000, 2, 0.05), (70_001, 1, 0.001),
          (70_001, 3, 0.001), (70_001, 7, 0.12), (200_000, 3, 0.01), (300_007, 7, 0.001)]  # fmt: skip


@pytest.mark.parametrize(("name", "numel", "shards", "ratio", "wire"), in_turn([*WIRES], SENT, SHAPES))
def test_one_function_sends_and_receives_the_bits_of_the_separate_steps(name, wire, numel, shards, ratio):
    layout = Layout(numel, shards)
    codec = Codec(WIRES[wire], layout.shard_size, layout.k_per_shard(k_of(numel, ratio)))
    assert codec.format().index_bytes
    e, x = residual_and_gradient(name, numel)
    x, ends = x.to(torch.bfloat16 if shards == 3 else torch.float32), []
    for context in (nullcontext(), mock.patch.object(ops, "fast", return_value=None)):
        gradient = x.clone()
        with context:
            memory = Residual(numel, torch.float32, torch.device("cpu"))
            link = Link(layout, TopK(), memory, sizes=(numel,)).fuse()
            assert (link.function is None) == bool(ends)
            link.memory.residual.copy_(e)
            payloads = link.send(gradient, codec, Step(scale=torch.tensor(3.0), fade=0.7))
            rows = payloads[:1].repeat(3, 1)
            means = [aggregate(rows[:n], codec, torch.float32, torch.zeros(numel)) for n in (2, 3)]
            out, scaled = torch.zeros(2, numel)
            finite = deliver(payloads, codec, layout, out), deliver(payloads, codec, layout, scaled, torch.tensor(3.0))
        ends.append([payloads, link.memory.residual, gradient, *finite, out, scaled, *means])
    assert ends[0][1].isfinite().all()
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_damaged_positions_under_a_valid_check_word_are_refused():
    """Two flips that cancel out in the sum of words."""
    codec = Codec(WIRES["fp32"], 4096, 64)
    payload, _ = codec.encode(positions(4096, 64, 1), torch.ones(1, 64))
    words = payload.view(torch.int32)
    form = codec.format()
    high = (form.value_bytes + form.k * form.low // 8) // 4  # a word of high bits
    words[0, high] += (change := int(~words[0, high] & -~words[0, high]))  # its lowest zero becomes a one
    words[0, 0] -= change
    reference.check(payload, form.check)  # the sum does not change
    with pytest.raises(ValueError, match="holds too many positions, or too few: it was damaged"):
        deliver(payload, codec, Layout(4096), torch.zeros(4096))


RULES = [
    Rule(0.9, 1.0),
    Rule(0.9, 0.5, -1, 0.1, 0.7),
    Rule(0.9, 0.1, 1, 0.1, waits=True),
    Rule(0.99, 0.01, -1, 0.1, waits=True, squares=0.999),
    Rule(0.9, 0.1, squares=0.95, eps=1e-8),
    Rule(0.9, 0.1, squares=0.95, eps=0.1),
]


def catching_up(shape: tuple[int, ...], number: int, seed: int) -> Stepped:
    generator, rule = torch.Generator().manual_seed(seed), RULES[number]
    buffer, gradient, parameter = (torch.randn(shape, generator=generator) for _ in range(3))
    gradient[gradient.abs() < 1.5] = 0
    waited = (torch.arange(buffer.numel()) * 7 % 256).clamp(max=254).to(torch.uint8).view(shape)
    parameter, replacement = parameter if rule.decays else None, torch.full_like(gradient, 7.0)
    signs = (torch.linspace(0, 15, 8), torch.ones(16, dtype=torch.int32)) if rule.has_squares else (None, None)
    tensors = buffer, waited, gradient, torch.full_like(buffer, 7.0), parameter
    return Stepped(*tensors, replacement if rule.replaces else None, *signs, number)


@pytest.mark.parametrize("skipped", [None, 0.0, 1.0])
@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("formats", ["one", "channels_last", "different"])
def test_momentum_buffers_catch_up_in_one_call_like_in_the_reference(formats, scale, skipped):
    """In any dense memory format, if all tensors have it."""
    found_inf, factor = (None if each is None else torch.tensor(each) for each in (skipped, scale))
    ends, before = (
        [],
        [catching_up(shape, number, 0) for number in range(len(RULES)) for shape in ((7, 3, 20, 24), (1, 1, 1, 5))],
    )
    laid_out = {"one": (), "channels_last": range(6), "different": (2,)}[formats]
    for version in (ops, reference):
        copies = []
        for each in before:
            tensors = [None if x is None else x.clone() for x in each[:6]]
            for i in laid_out:
                tensors[i] = None if tensors[i] is None else tensors[i].to(memory_format=torch.channels_last)
            copies.append(
                Stepped(*tensors, each.ratio, None if each.counts is None else each.counts.clone(), each.rule)
            )
        if version is ops:
            with mock.patch.object(loops, "catch_up", wraps=loops.catch_up) as one_pass:
                ops.CatchUp(copies, RULES)([each.gradient for each in copies], RULES, factor, found_inf)
            assert one_pass.call_count == 1
            assert [*map(ops.kind_of, copies)].count(None) == (len(RULES) if formats == "different" else 0)
        else:
            for each in copies:
                reference.catch_up_(each, RULES[each.rule], factor, found_inf)
        ends.append([[x for x in (*each[:6], each.counts) if x is not None] for each in copies])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)
    if skipped:
        for (b, waited, *_, last), own in zip(ends[0], before, strict=True):
            assert torch.equal(b, own.buffer)
            assert torch.equal(waited, own.waited)
            assert own.counts is None or torch.equal(last, own.counts)


def test_strides_of_single_elements_do_not_decide_how_a_momentum_buffer_catches_up():
    """They may differ between ranks, as for a parameter that one rank did not use."""
    buffer, waited = torch.randn(1, 64, 1, 1), torch.zeros(1, 64, 1, 1, dtype=torch.uint8)
    parameter = torch.randn(64).as_strided((1, 64, 1, 1), (64, 1, 64, 64))
    assert ops.kind_of(Stepped(buffer, waited, buffer, buffer, parameter, None)) is not None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("place", [0, 65_535, 149_999])
def test_is_finite_finds_one_bad_element_and_accepts_a_large_one(value, place):
    x = torch.randn(150_000)
    x[place] = value
    assert bool(reference.is_finite(x)) == bool(reference.is_finite(x.view(2, -1))) == math.isfinite(value)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_without_numbas_compiler_plain_torch_takes_over(monkeypatch):
    """With NUMBA_DISABLE_JIT=1 Python runs the loops, which call instructions of the processor."""
    for name, loop in [*vars(loops).items()]:
        if hasattr(loop, "py_func"):
            monkeypatch.setattr(loops, name, loop.py_func)
    monkeypatch.setattr(ops, "FAILED", {})
    with pytest.warns(UserWarning, match="numba does not work on cpu"):
        assert ops.fast.__wrapped__(torch.device("cpu")) is None


def test_the_fast_version_is_found_whatever_the_default_dtype_is(monkeypatch):
    """Lightning's bf16-true changes it during training_step, and so during a manual backward."""
    monkeypatch.setattr(ops, "fast", ops.fast.__wrapped__)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert ops.fast(torch.device("cpu")) is not None
    finally:
        torch.set_default_dtype(dtype)


NUMEL = 100_000


@pytest.mark.parametrize("selector", [TopK(), GaussianK(), SampledK(), SampledK(1e-320), TrimmedK(), RandK()])
@pytest.mark.parametrize("name", ["normal", "shifted", "laplace", "heavy", "uniform", "zero", "signs"])
def test_no_selector_selects_more_than_k(selector, name):
    layout, k = Layout(NUMEL, 4), 25
    x = vector(name, NUMEL)
    index, value = selector.select(x, layout, k)
    assert index.shape == value.shape == (4, k)
    assert (index.diff(dim=1) >= 0).all()
    assert torch.equal(value[value != 0], reference.shard_rows(x, layout).gather(1, index)[value != 0])


@pytest.mark.parametrize(("selector", "least"), [(GaussianK(), 0.6), (SampledK(), 0.6), (TrimmedK(), 1.0)])
def test_thresholds_are_close_on_bell_shaped_vectors(selector, least):
    for name in ("normal", "laplace"):
        _, value = selector.select(vector(name, NUMEL), Layout(NUMEL), 1000)
        assert least * 1000 <= value.count_nonzero() <= 1000


def test_gaussian_k_corrects_its_threshold_as_algorithm_1_does():
    # On uniform values the first threshold lies beyond the largest one: three halvings bring it down to an eighth.
    uniform = vector("uniform", NUMEL).unsqueeze(0)
    first = (uniform.mean() + 3.0902 * uniform.std()).abs()
    assert GaussianK().threshold(uniform, int(NUMEL * 0.002)) < first
    normal = vector("normal", NUMEL).unsqueeze(0)
    assert GaussianK().threshold(normal, 100).item() == pytest.approx(3.29, abs=0.05)


def test_trimmed_k_descends_until_k_pass():
    a = torch.tensor([[10.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])  # mean 2.7, max 10
    assert TrimmedK().threshold(a, 2).item() == pytest.approx(2.7 + 0.8 * 7.3)
    assert TrimmedK().threshold(a, 3).item() == pytest.approx(2.7)


def test_random_k_is_the_same_on_all_ranks_new_at_every_step_nested_and_uniform():
    one, other = RandK(seed=3), RandK(seed=3)
    first = one.shared_positions(0, 1000, 50)
    assert torch.equal(first, other.shared_positions(0, 1000, 50))
    assert len(first.unique()) == 50
    assert set(first.tolist()) <= set(one.shared_positions(0, 1000, 80).tolist())
    assert not torch.equal(first, RandK(seed=4).shared_positions(0, 1000, 50))
    count = torch.zeros(400)
    for step in range(2000):
        count[one.shared_positions(step, 400, 20)] += 1
    assert count.mean() == 100
    assert count.std() == pytest.approx((100 * 0.95) ** 0.5, rel=0.2)
    assert count.min() > 50


def test_random_k_sends_no_positions():
    codecs = codecs_of(TopKConfig(selector="randk", ratio=0.01, wire="bf16"), 102_400, 4)
    up, down = codecs.uplink, codecs.reply
    assert up.format().index_bytes == down.format().index_bytes == 0
    assert up.nbytes == 256 * 2 + 4  # and the check word
    lossless = codecs_of(TopKConfig(selector="randk", ratio=0.01, bidirectional=False, wire="bf16"), 102_400, 4).reply
    assert lossless.nbytes == up.nbytes


def test_unused_slots_follow_the_selected_entries():
    """Also the shard's last one, whose position the unused slots repeat."""
    x = torch.tensor([0.1, 3.0, 0.2, 0.0, 2.0])
    with mock.patch.object(TopK, "pick", return_value=torch.tensor([[-1, 1, -1, 4]])):
        index, value = TopK().select(x, Layout(5), 4)
    assert (index.tolist(), value.tolist()) == ([[1, 4, 4, 4]], [[3.0, 2.0, 0.0, 0.0]])


@pytest.mark.parametrize("k", [1, 10, 5000])
@pytest.mark.parametrize("name", ["normal", "signs", "zero", "heavy"])
def test_a_threshold_selects_the_largest_entries_that_reach_it(name, k):
    rows = vector(name, NUMEL).view(4, -1)
    for level in (0.0, 0.5, 1.0, 3.0, 100.0):
        threshold = torch.full((4, 1), level)
        with mock.patch.object(TrimmedK, "threshold", return_value=threshold):
            index, largest = TrimmedK().pick(rows, k), reference.topk_index(rows, k)
        for found, places, row in zip(index.tolist(), largest.tolist(), rows.abs().tolist(), strict=True):
            assert found == [place if row[place] >= level else -1 for place in places]
        assert torch.equal(cpu.count_reaching(rows, threshold), reference.count_reaching(rows, threshold))
