"""The selections of the selectors."""

from functools import cache

import pytest
import torch
from shapes import codecs_of

from lightning_topk.config import TopKConfig
from lightning_topk.core.layout import Layout
from lightning_topk.core.ops import cpu, reference
from lightning_topk.core.select import GaussianK, RandK, SampledK, TopK, TrimmedK
from lightning_topk.simulate import Cluster

NUMEL = 100_000


def vector(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(NUMEL, generator=generator)
    return {
        "normal": normal,
        "shifted": normal + 0.5,
        "laplace": normal.sign() * torch.empty(NUMEL).exponential_(generator=generator),
        "heavy": normal**5,
        "uniform": torch.rand(NUMEL, generator=generator) - 0.5,
        "zero": torch.zeros(NUMEL),
        "signs": normal.sign(),
    }[name]


@cache
def residual() -> torch.Tensor:
    """Gradient plus residual after some steps: values accumulate below the threshold."""
    cluster = Cluster(TopKConfig(ratio=0.001), 1, NUMEL)
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(NUMEL, generator=generator) ** 4
    for _ in range(100):
        cluster.step([torch.randn(NUMEL, generator=generator) * scale])
    return cluster.endpoints[0].uplink.memory.tensors()["residual"] + torch.randn(NUMEL, generator=generator) * scale


@pytest.mark.parametrize("selector", [TopK(), GaussianK(), SampledK(), TrimmedK(), RandK()])
@pytest.mark.parametrize("name", ["normal", "shifted", "laplace", "heavy", "uniform", "zero", "signs"])
def test_no_selector_selects_more_than_k(selector, name):
    layout, k = Layout(NUMEL, 4), 25
    index, value, count = selector.select(vector(name), layout, k)
    assert index.shape == value.shape == (4, k)
    assert 0 <= count <= 4 * k
    assert (index.diff(dim=1) >= 0).all()
    assert torch.equal(value[value != 0], reference.shard_rows(vector(name), layout).gather(1, index)[value != 0])


@pytest.mark.parametrize(("selector", "least"), [(GaussianK(), 0.6), (SampledK(), 0.6), (TrimmedK(), 1.0)])
def test_thresholds_are_close_on_bell_shaped_vectors(selector, least):
    for name in ("normal", "laplace"):
        *_, count = selector.select(vector(name), Layout(NUMEL), 1000)
        assert least * 1000 <= count <= 1000


@pytest.mark.parametrize("selector", [GaussianK(), SampledK(), TrimmedK()])
def test_thresholds_stay_capped_on_residuals(selector):
    a = residual()
    _, value, count = selector.select(a, Layout(NUMEL), 100)
    assert count <= 100
    _, exact, _ = TopK().select(a, Layout(NUMEL), 100)
    assert value.square().sum() >= 0.5 * exact.square().sum() * (count / 100)


def test_gaussian_k_corrects_its_threshold_as_algorithm_1_does():
    # On uniform values the first threshold lies beyond the largest one: three halvings bring it down to an eighth.
    uniform = vector("uniform").unsqueeze(0)
    first = (uniform.mean() + 3.0902 * uniform.std()).abs()
    assert GaussianK().threshold(uniform, int(NUMEL * 0.002)) < first
    normal = vector("normal").unsqueeze(0)
    assert GaussianK().threshold(normal, 100).item() == pytest.approx(3.29, abs=0.05)


def test_trimmed_k_descends_until_k_pass():
    a = torch.tensor([[10.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])  # mean 2.7, max 10
    assert TrimmedK().threshold(a, 2).item() == pytest.approx(2.7 + 0.8 * 7.3)
    assert TrimmedK().threshold(a, 3).item() == pytest.approx(2.7)
    with pytest.raises(ValueError, match=r"fraction=0 must be in \(0, 1\]"):
        SampledK(0)


def test_random_k_is_the_same_on_all_ranks_new_at_every_step_and_nested():
    one, other = RandK(seed=3), RandK(seed=3)
    first = one.shared_positions(1000, 50)
    assert torch.equal(first, other.shared_positions(1000, 50))
    assert len(first.unique()) == 50
    assert set(first.tolist()) <= set(one.shared_positions(1000, 80).tolist())
    one.step += 1
    assert not torch.equal(first, one.shared_positions(1000, 50))
    assert not torch.equal(first, RandK(seed=4).shared_positions(1000, 50))


def test_random_k_draws_every_position_as_often():
    selector, count = RandK(seed=1), torch.zeros(400)
    for step in range(2000):
        selector.step = step
        count[selector.shared_positions(400, 20)] += 1
    assert count.mean() == 100
    assert count.std() == pytest.approx((100 * 0.95) ** 0.5, rel=0.2)
    assert count.min() > 50


def test_random_k_sends_no_positions():
    codecs = codecs_of(TopKConfig(selector="randk", ratio=0.01, wire="bf16"), 102_400, 4)
    up, down = codecs.uplink, codecs.reply
    assert up.index_bytes == down.index_bytes == 0
    assert up.nbytes == 256 * 2 + 4  # and the check word
    lossless = codecs_of(TopKConfig(selector="randk", ratio=0.01, bidirectional=False, wire="bf16"), 102_400, 4).reply
    assert lossless.nbytes == up.nbytes


@pytest.mark.parametrize("k", [1, 10, 5000])
@pytest.mark.parametrize("name", ["normal", "signs", "zero", "heavy"])
def test_the_fast_threshold_selection_is_the_reference(name, k):
    rows = vector(name).view(4, -1)
    for level in (0.0, 0.5, 1.0, 3.0, 100.0):
        threshold = torch.full((4, 1), level)
        fast = cpu.over_threshold_index(rows, threshold, k)
        assert torch.equal(fast, reference.over_threshold_index(rows, threshold, k))
        assert torch.equal(cpu.count_reaching(rows, threshold), reference.count_reaching(rows, threshold))
