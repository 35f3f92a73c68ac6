"""Residuals lose nothing however buckets and settings change, unless these keep none: runs of all ranks, in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import waiting
from torch import Tensor, nn

from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.guards import exchange
from lightning_topk.runtime.applied import Rates
from lightning_topk.runtime.residuals import FALL, Residuals
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
        self.passes = 0
        self.restart()

    def restart(self) -> None:
        self.residuals = [Residuals() for _ in range(self.world)]
        for rank, residuals in enumerate(self.residuals):
            residuals.rank = rank

    def backward(self, order: list[int], cut: int, config: TopKConfig) -> None:
        """Exchanges one gradient in two buckets."""
        for numbers in filter(None, (order[:cut], order[cut:])):
            bucket, sizes = tuple(self.parameters[i] for i in numbers), [NUMELS[i] for i in numbers]
            gradients = [torch.randn(sum(sizes), dtype=torch.float64, generator=self.random) for _ in self.residuals]
            mean = torch.stack(gradients).mean(0)
            plan = self.plans.setdefault((bucket, config), plan_bucket(config, sizes, self.world, self.local, 8))
            running = []
            for residuals, g in zip(self.residuals, gradients, strict=True):
                end = residuals.endpoint(bucket, plan)
                running.append(exchange(end, g, plan.codecs(selector=end.uplink.selector), self.passes))
            Cluster(TopKConfig(ratio=1.0), self.world, 1, local=self.local).drive(running)
            assert all(torch.equal(g, gradients[0]) for g in gradients)
            for i, part in zip(numbers, (mean - gradients[0]).split(sizes), strict=True):
                self.owed[i] = part + (self.owed[i] if config.compresses else 0)  # dense exchanges drop what was kept
        self.passes += 1

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
    one = st.tuples(st.permutations(range(len(NUMELS))), st.integers(1, len(NUMELS)), st.sampled_from(ways))
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
    end = residuals.endpoint((body, head), plan_bucket(config, [8, 8], 2))
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
    bucket = changed, kept = nn.Parameter(torch.zeros(8, 8, 3, 3)), nn.Parameter(torch.zeros(8))
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


def test_shares_come_in_the_same_order_on_all_ranks():
    """Two threads make endpoints, in an order that depends on their timing, and each share is summed over the ranks."""
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
    buckets = [tuple(parameters[2:]), tuple(parameters[:2])]
    orders = []
    for made in (buckets, buckets[::-1]):
        residuals = Residuals()
        for bucket in made:
            residuals.endpoint(bucket, plan_bucket(TopKConfig(ratio=0.1), [p.numel() for p in bucket], 2))
        shares = residuals.shares("residual", parameters, 2, torch.device("cpu"))
        orders.append([[*map(id, bucket)] for bucket, *_ in shares])
    assert orders[0] == orders[1]


def test_the_energies_of_the_parameters_add_up_to_that_of_the_worker_while_the_rate_changes():
    parameters, residuals = [nn.Parameter(torch.zeros(numel)) for numel in NUMELS], Residuals()
    bucket, group_of = tuple(parameters), dict.fromkeys(parameters, 0)
    plan = plan_bucket(TopKConfig(ratio=0.1), NUMELS, 2)
    for now, last in ((0.1, 0.0), (0.1, 0.1), (0.05, 0.1)):
        rates = Rates(group_of, ("SGD",), (now,), (last,))
        residuals.endpoint(bucket, plan, rates).uplink.memory.residual.fill_(1.0)
        rate = residuals.rate(bucket, rates)
    assert rate == 0.5
    torch.testing.assert_close(sum(residuals.worker_energies().values()), residuals.worker_energy())


@pytest.mark.parametrize("kind", ["AdamW", "SGD with momentum", "SGD"])
def test_a_rate_that_falls_and_rises_again_and_again_neither_enlarges_nor_starves_what_waits(kind):
    """A warm restart in every fourth step."""
    parameter, residuals, found = nn.Parameter(torch.zeros(64)), Residuals(), []
    plan, factors = plan_bucket(TopKConfig(ratio=0.1), [64], 2), [1.0, 0.5, 0.1, 1e-3] * 50
    for now, last in zip(factors, [0.0, *factors], strict=False):
        rates = Rates({parameter: 0}, (kind,), (now,), (last,))
        residuals.endpoint((parameter,), plan, rates)
        found.append(residuals.rate((parameter,), rates))
    assert found[::4] == pytest.approx([1.0] * 50)
    assert found[1::4] == pytest.approx([0.5 if kind == "SGD" else FALL] * 50)
    assert found[3::4] == pytest.approx([1e-3 if kind == "SGD" else FALL**3] * 50)
