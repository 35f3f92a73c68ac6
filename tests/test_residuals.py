"""Residuals lose nothing however buckets, settings and steps change: runs of all ranks, in memory."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_topk import bucket as build
from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core.exchange import exchange
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.checkpoint import still_to_deliver
from lightning_topk.runtime.skipped_steps import Sent, StepOutcome
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
    """The residuals of all ranks, and the sums of produced and delivered gradients."""

    def __init__(self, world: int, local: int) -> None:
        self.world, self.local = world, local
        self.parameters = [nn.Parameter(torch.zeros(numel, dtype=torch.float64)) for numel in NUMELS]
        self.optimizers = [torch.optim.SGD(self.parameters[:2]), torch.optim.SGD(self.parameters[2:])]
        self.outcome = StepOutcome(sums=False)
        self.plans = {}
        self.produced, self.delivered = (
            [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS] for _ in range(2)
        )
        self.random = torch.Generator().manual_seed(0)
        self.passes = 0
        self.restart()

    def restart(self) -> None:
        self.residuals = [Residuals() for _ in range(self.world)]
        for rank, residuals in enumerate(self.residuals):
            residuals.rank = rank

    def backward(self, order: list[int], cut: int, config: TopKConfig) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Exchanges one gradient in two buckets; returns its mean and the delivered gradient by parameter."""
        produced, delivered = {}, {}
        for numbers in filter(None, (order[:cut], order[cut:])):
            bucket, sizes = tuple(self.parameters[i] for i in numbers), [NUMELS[i] for i in numbers]
            gradients = [torch.randn(sum(sizes), dtype=torch.float64, generator=self.random) for _ in self.residuals]
            mean = torch.stack(gradients).mean(0)
            plan = self.plans.setdefault((bucket, config), plan_bucket(config, sizes, self.world, self.local, 8))
            ends = [residuals.endpoint(bucket, plan, self.outcome) for residuals in self.residuals]
            running = []
            for end, g in zip(ends, gradients, strict=True):
                running.append(exchange(end, g, plan.codecs(selector=end.uplink.selector), self.passes))
            outcomes = Cluster(TopKConfig(ratio=1.0), self.world, 1, local=self.local).drive(running)
            self.outcome.watch({parameter: parameter for parameter in bucket})
            for residuals, outcome in zip(self.residuals, outcomes, strict=True):
                if outcome.undo is not None:
                    residuals.remember(Sent(bucket, plan.shape.parts.pieces, outcome.undo, self.outcome))
            assert all(torch.equal(g, gradients[0]) for g in gradients)
            produced.update(zip(numbers, mean.split(sizes), strict=True))
            delivered.update(zip(numbers, gradients[0].split(sizes), strict=True))
        self.passes += 1
        return produced, delivered

    def step(self, passes: list[tuple[list[int], int, TopKConfig]], skipped: tuple[bool, bool]) -> None:
        """Takes a step of several passes; the scaler skips the step of some optimizers.

        The gradients of a skipped step stay in the residuals, except those sent uncompressed.
        """
        self.outcome.final = True
        self.outcome = StepOutcome(sums=False)
        did = [(self.backward(*each), each[2]) for each in passes]
        for optimizer, skips in zip(self.optimizers, skipped, strict=True):
            self.outcome.note(optimizer, skips)
        for (produced, delivered), config in did:
            for i in range(len(NUMELS)):
                if config.compresses or not skipped[i // 2]:
                    self.produced[i] += produced[i]
                if not skipped[i // 2]:
                    self.delivered[i] += delivered[i]

    def resume(self) -> None:
        """Restarts all ranks from a checkpoint."""
        held = [residuals.held() for residuals in self.residuals]
        saved = {
            p: {"residual": sum(still_to_deliver(each[p], p, self.world) for each in held)}
            for p in self.parameters
            if p in held[0]
        }
        self.restart()
        for residuals in self.residuals:
            residuals.restore({p: {"residual": kept["residual"].clone()} for p, kept in saved.items()})

    def check(self) -> None:
        held = [residuals.held() for residuals in self.residuals]
        for i, parameter in enumerate(self.parameters):
            left = torch.zeros(NUMELS[i], dtype=torch.float64)
            for each in held:
                worker, server = each.get(parameter, (torch.zeros(()), torch.zeros(())))
                left += worker / self.world + server
            torch.testing.assert_close(self.delivered[i] + left, self.produced[i], rtol=0, atol=1e-9)


@st.composite
def runs(draw):
    """Draws a number of workers, ranks per node, and steps: passes, skipping optimizers, and the action after each."""
    on_nodes = draw(st.booleans())
    ways = ON_NODES if on_nodes else WAYS
    one = st.tuples(st.permutations(range(len(NUMELS))), st.integers(1, len(NUMELS)), st.sampled_from(ways))
    passes = st.lists(one, min_size=1, max_size=3)
    then = st.sampled_from(["go on", "go on", "offload", "resume"])
    steps = st.lists(st.tuples(passes, st.tuples(st.booleans(), st.booleans()), then), min_size=1, max_size=6)
    return (draw(st.sampled_from([4, 6])), 2, draw(steps)) if on_nodes else (draw(st.integers(1, 4)), 1, draw(steps))


@pytest.mark.parametrize("piece", [build.PIECE, 250])
@given(runs())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_run_loses_nothing_whatever_is_regrouped_skipped_and_resumed(piece, run):
    world, local, steps = run
    ranks = Ranks(world, local)
    for passes, skipped, then in steps:
        with mock.patch.object(build, "PIECE", piece):
            ranks.step(passes, skipped)
        if then == "resume":
            ranks.resume()
        for residuals in ranks.residuals * (then == "offload"):
            residuals.offload_to_cpu()
        ranks.check()


@pytest.mark.parametrize("piece", [build.PIECE, 250])
def test_energies_are_those_of_what_is_held(piece, monkeypatch):
    monkeypatch.setattr(build, "PIECE", piece)
    ranks = Ranks(3, 1)
    ranks.step([([*range(len(NUMELS))], len(NUMELS), TopKConfig(ratio=0.05))], (False, False))
    for residuals in ranks.residuals:
        workers, servers = zip(*residuals.held().values(), strict=True)
        expected = torch.stack([sum(part.square().sum() for part in parts) for parts in (workers, servers)])
        torch.testing.assert_close(residuals.energy(), expected)


def test_a_parameter_that_leaves_its_bucket_takes_only_its_own_residual():
    """A new head replaces the old one while the old one's bucket is in use."""
    body, head, new = (nn.Parameter(torch.zeros(8)) for _ in range(3))
    config, residuals = TopKConfig(ratio=0.1), Residuals()
    end = residuals.endpoint((body, head), plan_bucket(config, [8, 8], 2))
    end.uplink.memory.residual.fill_(1.0)
    end.downlink.memory.residual.fill_(3.0)  # this rank serves the body

    def mass() -> Tensor:
        worker, server = residuals.held()[body]
        return worker / 2 + server

    before = mass()
    residuals.keep_only([body, new])
    assert before.sum() == 8 * 1.0 / 2 + 8 * 3.0
    assert torch.equal(mass(), before)
    assert head not in residuals.held()
