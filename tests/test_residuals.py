"""Residuals lose nothing however buckets and settings change, unless these keep none: runs of all ranks, in memory."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import waiting
from torch import Tensor, nn

from lightning_topk.bucket import Bucket, plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.guards import exchange
from lightning_topk.core.link import Step
from lightning_topk.optim.applied import FALL, Rates, faded, rate_of
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.simulate import Cluster

NUMELS = (700, 1, 300, 64)
WAYS = [
    TopKConfig(ratio=0.02),
    TopKConfig(ratio=0.1, wire="int8"),
    TopKConfig(ratio=0.05, bidirectional=False, topology="allgather"),
    TopKConfig(ratio=0.05, topology="single_server"),
    TopKConfig(topology="dense"),
]
ON_NODES = [TopKConfig(ratio=ratio, topology="hierarchical") for ratio in (0.02, 0.1)]


class Ranks:
    """Residuals of all ranks, and what is still to be delivered of the gradients so far."""

    def __init__(self, world: int, local: int) -> None:
        self.world, self.local = world, local
        self.parameters = [nn.Parameter(torch.zeros(numel, dtype=torch.float64)) for numel in NUMELS]
        self.plans = {}
        self.owed = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
        self.random = torch.Generator().manual_seed(0)
        self.passes, self.last, self.before = 0, None, None
        self.restart()

    def restart(self) -> None:
        self.residuals, self.before = [Residuals() for _ in range(self.world)], None
        self.buckets = [{} for _ in self.residuals]
        for rank, residuals in enumerate(self.residuals):
            residuals.rank = rank

    def backward(self, order: list[int], cut: int, config: TopKConfig, rate: float = 1.0) -> None:
        """Exchanges one gradient in two buckets, at a learning rate."""
        rates, fade = Rates(dict.fromkeys(self.parameters, 0), (rate,), (self.last,)), 1.0
        before = self.last if self.before is None else self.before
        if before is not None:
            fade, self.before = faded(before, rate)
        for numbers in filter(None, (order[:cut], order[cut:])):
            parameters, sizes = tuple(self.parameters[i] for i in numbers), [NUMELS[i] for i in numbers]
            gradients = [torch.randn(sum(sizes), dtype=torch.float64, generator=self.random) for _ in self.residuals]
            mean = torch.stack(gradients).mean(0)
            plan = self.plans.setdefault((parameters, config), plan_bucket(config, sizes, self.world, self.local, 8))
            running = []
            for residuals, buckets, g in zip(self.residuals, self.buckets, gradients, strict=True):
                bucket = buckets.setdefault(parameters, Bucket(parameters))
                end = residuals.endpoint(bucket, plan)
                step = Step(self.passes, fade=residuals.fade(bucket, rates))
                running.append(exchange(end, g, plan.codecs(selector=end.uplink.selector), step))
            Cluster(TopKConfig(ratio=1.0), self.world, 1, local=self.local).drive(running)
            assert all(torch.equal(g, gradients[0]) for g in gradients)
            for i, part in zip(numbers, (mean - gradients[0]).split(sizes), strict=True):
                kept = fade * self.owed[i] if config.compresses else 0  # dense exchanges drop what was kept
                self.owed[i] = part + kept
        self.passes, self.last = self.passes + 1, rate

    def resume(self) -> None:
        """Restarts all ranks from a checkpoint."""
        saved = {p: self.undelivered(i) for i, p in enumerate(self.parameters) if p in self.residuals[0]}
        self.restart()
        for residuals in self.residuals:
            residuals.restore({p: {"residual": total.clone()} for p, total in saved.items()})

    def undelivered(self, i: int) -> Tensor:
        """The mean of the workers' residuals of a parameter plus the sum of the servers'."""
        total = torch.zeros(NUMELS[i], dtype=torch.float64)
        for residuals in self.residuals:
            total += waiting(residuals, self.parameters, self.world).get(self.parameters[i], 0)
        return total

    def check(self) -> None:
        for i, owed in enumerate(self.owed):
            torch.testing.assert_close(self.undelivered(i), owed, rtol=0, atol=1e-9)


@st.composite
def runs(draw):
    """Draws a number of workers, ranks per node, and backward passes with the action after each."""
    on_nodes = draw(st.booleans())
    ways = ON_NODES if on_nodes else WAYS
    rates = st.sampled_from([0.0, 1e-3, 0.1, 1.0])
    one = st.tuples(st.permutations(range(len(NUMELS))), st.integers(1, len(NUMELS)), st.sampled_from(ways), rates)
    then = st.sampled_from(["go on", "go on", "go on", "offload", "resume"])
    passes = st.lists(st.tuples(one, then), min_size=1, max_size=12)
    return (draw(st.sampled_from([4, 6])), 2, draw(passes)) if on_nodes else (draw(st.integers(1, 4)), 1, draw(passes))


@given(runs())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_run_loses_only_residuals_that_its_settings_drop_whatever_is_regrouped_and_resumed(run):
    world, local, passes = run
    ranks = Ranks(world, local)
    for one, then in passes:
        ranks.backward(*one)
        if then == "resume":
            ranks.resume()
        for residuals in ranks.residuals * (then == "offload"):
            residuals.offload_to_cpu()
        ranks.check()


def test_a_parameter_that_leaves_its_bucket_takes_only_its_own_residual():
    """A new head replaces the old one while the old one's bucket is in use."""
    body, head, new = (nn.Parameter(torch.zeros(8)) for _ in range(3))
    config, residuals = TopKConfig(ratio=0.1), Residuals()
    end = residuals.endpoint(Bucket((body, head)), plan_bucket(config, [8, 8], 2))
    end.uplink.memory.residual.fill_(1.0)
    end.downlink.memory.residual.fill_(3.0)  # this rank serves the body

    before = waiting(residuals, [body, head], 2)
    residuals.keep_only([body, new])
    after = waiting(residuals, [body, head], 2)
    assert before[body].sum() == 8 * 1.0 / 2 + 8 * 3.0
    assert after.keys() == {body}
    assert torch.equal(after[body], before[body])


@pytest.mark.parametrize("new", [torch.ones(8, 8, 2, 2), torch.ones(8, 8, 3, 3).to(memory_format=torch.channels_last)])
def test_a_parameter_that_changes_size_or_format_restarts_at_zero_and_warns(new):
    bucket = Bucket((nn.Parameter(torch.zeros(8, 8, 3, 3)), nn.Parameter(torch.zeros(8))))
    changed, kept = bucket
    config, residuals = TopKConfig(ratio=0.1), Residuals()
    end = residuals.endpoint(bucket, plan_bucket(config, [576, 8], 2))
    end.uplink.memory.residual.fill_(1.0)
    residuals.move_to(None, 0)
    changed.data = new
    residuals.endpoint(bucket, plan_bucket(config, [new.numel(), 8], 2))
    found = waiting(residuals, bucket, 2)
    assert torch.equal(found[changed], torch.zeros(new.numel()))
    assert torch.equal(found[kept], torch.full((8,), 0.5))
    (words,) = residuals.take_warnings()
    assert "residuals of 1 parameter were dropped, since their size or memory format changed" in words


@pytest.mark.parametrize("link", ["uplink", "downlink"])
def test_residuals_of_whole_parameters_are_not_moved_to_the_slices_of_a_nodes_ranks(link):
    residuals, bucket = Residuals(), Bucket([nn.Parameter(torch.zeros(8))])
    plan = plan_bucket(TopKConfig(ratio=0.1), [8], 2)
    residuals.endpoint(bucket, plan)
    residuals.move_to(None, 0, 2)  # zeros
    getattr(residuals.endpoint(bucket, plan), link).memory.residual.fill_(1.0)
    with pytest.raises(ValueError, match="the slices need the other ranks' residuals"):
        residuals.move_to(None, 0, 2)


def test_shares_come_in_the_same_order_on_all_ranks():
    """Two threads make endpoints, in an order that depends on their timing, and each share is summed over the ranks."""
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
    buckets = [Bucket(parameters[2:]), Bucket(parameters[:2])]
    orders = []
    for made in (buckets, buckets[::-1]):
        residuals = Residuals()
        for bucket in made:
            residuals.endpoint(bucket, plan_bucket(TopKConfig(ratio=0.1), [p.numel() for p in bucket], 2))
        shares = residuals.shares("residual", parameters, 2, torch.device("cpu"))
        orders.append([[*map(id, bucket)] for bucket, *_ in shares])
    assert orders[0] == orders[1]


def test_the_energies_of_the_parameters_add_up_to_that_of_the_worker():
    parameters, residuals = [nn.Parameter(torch.zeros(numel)) for numel in NUMELS], Residuals()
    residuals.endpoint(Bucket(parameters), plan_bucket(TopKConfig(ratio=0.1), NUMELS, 2)).uplink.memory.residual.fill_(
        1
    )
    torch.testing.assert_close(sum(residuals.worker_energies().values()), residuals.worker_energy())


def fades(*passes: tuple[float | None, ...]) -> list[float]:
    """What is left of 1, waiting in the first and the last parameter of a bucket, by passes with these rates.

    A group for each rate; the first pass is before the first step.
    """
    bucket, residuals, found = Bucket(nn.Parameter(torch.zeros(64)) for _ in passes[0]), Residuals(), []
    plan = plan_bucket(TopKConfig(ratio=0.1), [64] * len(bucket), 2)
    residual = residuals.endpoint(bucket, plan).uplink.memory.residual.fill_(1.0)
    group_of = {p: number for number, p in enumerate(bucket)}
    for now, last in zip(passes, [(None,) * len(bucket), *passes], strict=False):
        residual *= residuals.fade(bucket, Rates(group_of, now, last))
        found.append((residual[0].item(), residual[-1].item()))
    return found


RATES = {
    "a warm-up": ([0.1, 0.2, 0.4, 0.4], [1, 0.5, 0.25, 0.25]),
    "a fall": ([1.0, 0.1, 1e-39, 0.0], [1, 1, 1, 1]),
    "from zero": ([0.0, 0.0, 0.1, 0.1], [1, 1, 0, 0]),
    "a step at rate 0": ([0.1, 0.1, 0.0, 0.1], [1, 1, 1, 0.99]),
    "from a tiny rate": ([1e-39, 1e-39, 1.0, 1.0], [1, 1, 1e-39, 1e-39]),
    "unknown for a while": ([0.1, None, None, 1.0], [1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", RATES)
def test_what_waits_shrinks_when_the_rate_rises(name):
    rates, left = RATES[name]
    assert [first for first, _ in fades(*((rate,) for rate in rates))] == pytest.approx(left)


def test_a_warm_restart_in_every_fourth_step_erases_little():
    found = [first for first, _ in fades(*((rate,) for rate in [1.0, 0.5, 0.1, 1e-3] * 50))]
    assert min(now / before for before, now in itertools.pairwise(found)) > FALL**4


def test_groups_of_a_bucket_fade_apart_if_they_differ_and_together_if_they_nearly_do():
    rising = [(0.1 * 1.5**step, 0.1) for step in range(5)]
    apart = fades(*rising)
    assert [second for _, second in apart] == [1] * 5
    assert [first for first, _ in apart] == pytest.approx([1.5**-step for step in range(5)])
    nearly = fades(*((1.005**step, 2 * 1.004**step) for step in range(100)))
    for step, left in enumerate(nearly):
        assert left == pytest.approx((1.005**-step, 1.004**-step), rel=0.02)


def test_a_parameter_that_passes_left_out_while_the_rate_rose_fades_by_all_of_that():
    """FSDP2 exchanges the parameters that a pass used."""
    one, other = (nn.Parameter(torch.zeros(64)) for _ in range(2))
    both, alone, group_of, residuals = Bucket((one, other)), Bucket((one,)), {one: 0, other: 0}, Residuals()
    rates = [0.1, 0.1, 0.2, 0.4, 0.8]
    for bucket, rate, last in zip([both, both, alone, alone, both], rates, [None, *rates], strict=False):
        plan = plan_bucket(TopKConfig(ratio=0.1), [64] * len(bucket), 2)
        residual = residuals.endpoint(bucket, plan).uplink.memory.residual
        if last is None:
            residual.fill_(1.0)
        residual *= residuals.fade(bucket, Rates(group_of, (rate,), (last,)))
    torch.testing.assert_close(residual, torch.full((128,), 1 / 8))


def test_groups_that_fall_to_a_least_rate_leave_the_residuals_alone(monkeypatch):
    """Their factors of the rate differ by little in every step."""
    monkeypatch.setattr("lightning_topk.runtime.residuals.multiply_", mock.Mock(side_effect=AssertionError))
    cosine = [0.1 + 0.45 * (1 + math.cos(step / 100)) for step in range(300)]
    assert fades(*((0.1 * each + 1e-6, 1e-3 * each + 1e-6) for each in cosine))[-1] == (1, 1)


@pytest.mark.parametrize("lr", [None, "0.1", -1.0, math.nan, math.inf])
def test_a_rate_that_is_no_number_is_unknown(lr):
    assert rate_of({"lr": lr}) is None
    assert rate_of({"lr": torch.tensor(0.5)}) == rate_of({"lr": np.float32(0.5)}) == 0.5
    assert rate_of({"lr": mock.Mock(spec=torch.Tensor, is_cuda=True)}) is None, "reading it would wait for the GPU"
