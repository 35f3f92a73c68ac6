"""Loss scaling, skipped steps, gradients that are not finite."""

import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import laws
import pytest
import ranks
import torch
import torch.distributed as dist
from groups import on_ranks
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from ranks import every_rank, four_layers, gradient, held, loss_of, mean_over_ranks, undelivered, weights
from torch import nn
from torch.optim import SGD
from trainers import Module, fit

from lightning_topk import TopKStrategy, build
from lightning_topk.config import TopKConfig
from lightning_topk.core.guards import exchange
from lightning_topk.simulate import Cluster


class Run:
    """A net of four layers that trains with a GradScaler.

    ``optimizers`` makes the optimizers that the scaler steps; ``given`` makes the argument of ``attach`` from the first
    optimizer (default: all of them).
    """

    def __init__(
        self, rank: int, optimizers: Callable[[nn.Module], list] = lambda net: [SGD(net.parameters(), lr=0.1)],
        given: Any = None, ddp: dict[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.rank, self.net, self.alone = rank, four_layers(), four_layers()
        self.optimizers, self.scaler = optimizers(self.net), torch.amp.GradScaler("cpu", init_scale=1024.0)
        given = (lambda: self.optimizers) if given is None else given(self.optimizers[0])
        settings = {"ratio": 0.05, **settings, "optimizer": given, "scaler": self.scaler}
        self.ddp, self.state = ranks.attached(self.net, {"bucket_cap_mb": 0.001, **(ddp or {})}, **settings)
        self.computed: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []

    def backward(self, number: int, spoilt: str = "", passes: int = 1) -> torch.Tensor:
        """Runs a step's backward passes and spoils the middle one; returns the unscaled gradient."""
        self.net.zero_grad()
        for part in range(passes):
            how = spoilt if part == passes // 2 else ""
            hook = self.net[1].weight.register_hook(lambda g, how=how: spoil(g, how))
            self.scaler.scale(loss_of(self.ddp, self.rank, passes * number + part)).backward()
            hook.remove()
        return gradient(self.net) / self.scaler.get_scale()

    def take(self) -> None:
        """Steps all optimizers."""
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def look(self) -> torch.Tensor:
        """The residuals of this rank."""
        return held(self.state, self.net)

    def own(self, number: int, lost: Collection[str] = ()) -> torch.Tensor:
        """This rank's own gradient of a pass, except for parameters whose gradient a skipped step loses."""
        return ranks.without(ranks.local_gradient(self.alone, self.net, self.rank, number), self.net, lost)

    def note(self, computed: torch.Tensor, received: torch.Tensor | float) -> None:
        """Records a step's computed gradient, and the received one (zero if its optimizers skip the step)."""
        self.computed.append(computed)
        self.received.append(torch.zeros_like(computed) + received)

    def left(self) -> torch.Tensor:
        """The undelivered gradient of all ranks."""
        return undelivered(self.state, self.net)

    def check(self, conserves: bool = True) -> None:
        """Fails if the recorded steps break a law."""
        computed, received = mean_over_ranks(torch.stack(self.computed)), every_rank(torch.stack(self.received))
        left = self.left() if conserves else None
        laws.check(computed, received, left, [], [], settled=None, rtol=1e-4)


def spoil(g: torch.Tensor, how: str) -> torch.Tensor:
    """A gradient with an infinity or a NaN; unchanged if ``how`` is empty."""
    g = g.clone()
    if how:
        g.view(-1)[: None if how == "everywhere" else 1] = torch.nan if how == "nan" else torch.inf
    return g


class Hookless(torch.optim.Optimizer):
    """Wraps an optimizer as some libraries do, without calling the constructor that gives ``step`` its hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, inner.defaults, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure=None):
        return self.inner.step(closure)


GIVEN = {"wrapper": lambda wrapper: wrapper, "inner": lambda wrapper: wrapper.inner}
"""What ``attach`` gets if the scaler steps a wrapper."""
MEMORIES = [{"momentum": 0.9, "clip_norm": 1.0}, {"error_feedback": True, "wire": "fp32"}]


@pytest.mark.parametrize(
    ("world", "topology", "bidirectional", "how", "fused", "settings"),
    [
        *((3, *route, "inf", False, {}) for route in laws.ROUTES),
        (3, "sharded", True, "nan", False, {}),
        (3, "allgather", False, "everywhere", False, {}),
        *((2, "sharded", True, "inf", True, settings) for settings in MEMORIES),
        *((3, "sharded", way, "inf", False, {"piece": 200}) for way in (True, False)),
        *((2, *laws.ROUTES[i + 1], "inf", True, settings) for i, settings in enumerate(MEMORIES)),
        *((2, "sharded", True, "inf", False, {"given": given}) for given in GIVEN),
        *((4, *way, "inf", False, {"local_world_size": 2}) for way in laws.ON_NODES),
        *((4, *way, "inf", True, {"local_world_size": 2, "dense_parameters": "*bias"}) for way in laws.ON_NODES),
    ],
    ids=str,
)
@on_ranks()
def test_a_skipped_step_returns_its_gradients_to_residuals(rank, world, topology, bidirectional, how, fused, settings):
    """The step's own gradients stay in the residuals, except if uncompressed or not finite on a node."""
    piece, given = settings.pop("piece", build.PIECE), GIVEN.get(settings.pop("given", ""))
    settings |= {"topology": topology, "bidirectional": bidirectional}

    def optimizers(net: nn.Module) -> list[torch.optim.Optimizer]:
        plain = SGD(net.parameters(), lr=0.1, fused=fused)
        return [Hookless(plain) if given else plain]

    run = Run(rank, optimizers, given, **settings)
    seen, names, node = [], [name for name, _ in run.net.named_parameters()], settings.get("local_world_size", 1)
    with mock.patch.object(build, "PIECE", piece):
        for step in range(7):
            bad, before, lost = step in (2, 3, 5), weights(run.net), set()
            if bad:
                biases = "dense_parameters" in settings
                lost |= {name for name in names if topology == "dense" or (biases and "bias" in name)}
                lost |= {"1.weight", "1.bias"} if rank // node == step % world // node else set()
            computed = run.own(step, lost)
            g = run.backward(step, how if bad and rank == step % world else "")
            run.note(computed, 0.0 if bad else g)
            run.take()
            seen.append((bad, before, (run.look(), weights(run.net)), g))
    everyones = every_rank(torch.stack([g for *_, g in seen]))
    run.check(conserves="momentum" not in settings)
    for step, (bad, before, after, _) in enumerate(seen):
        assert after[0].isfinite().all()
        assert torch.equal(before, after[1]) == bad, f"step {step}"
        if bad:
            assert not everyones[:, step].isfinite().all(1).any(), "some rank saw a finite gradient"
    assert run.state.nonfinite_steps == 3


@pytest.mark.parametrize("static", [False, True])
@on_ranks(2)
def test_a_first_step_of_several_passes_is_undone_as_a_whole(rank, world, static):
    """DDP regroups its buckets within the first step, which is skipped.

    The second pass is infinite on rank 0, so the third starts with NaN on all ranks, in one bucket or in several.
    """
    run = Run(rank, ddp={"static_graph": static})
    jobs, job, names = [], run.state.job, [name for name, _ in run.net.named_parameters()]
    run.state.job = lambda *given: jobs.append(given) or job(*given)
    for step in range(4):
        bucket = names if static else ["1.weight", "1.bias"]
        lost = [bucket if step == 0 and (part == 2 or (part == 1 and rank == 0)) else [] for part in range(3)]
        computed = sum(run.own(3 * step + part, each) for part, each in enumerate(lost))
        g = run.backward(step, "inf" if step == rank == 0 else "", passes=3)
        run.note(computed, g if step else 0.0)
        run.take()
    run.check()
    assert len(run.state.residuals.buckets) == 4
    regrouped = 1 + static  # after so many passes; then all exchanges overlap with backward
    assert len(jobs) == regrouped + 4 * (12 - regrouped)


@on_ranks(2)
def test_a_scaler_can_be_copied_and_pickled_and_the_copy_steps_by_itself(rank, world):
    run = Run(rank)
    for other in (copy.deepcopy(run.scaler), pickle.loads(pickle.dumps(run.scaler))):
        run.net.zero_grad()
        other.scale(run.net(torch.ones(1, 20)).sum()).backward()
        other.step(run.optimizers[0])
        other.update()
        assert other.get_scale() == run.scaler.get_scale() == 1024
    dist.barrier()


@pytest.mark.parametrize("case", ["one skips", "one skips that a layer has joined", "both skip"])
@on_ranks(2)
def test_a_skipped_step_restores_the_parameters_of_its_optimizer_only(rank, world, case):
    """Two optimizers share a bucket. Both skip if it is spoilt, and one if its gradients are after the exchange."""
    joined, both = "joined" in case, case == "both skip"

    def halves(net: nn.Sequential) -> list[SGD]:
        return [SGD(half.parameters(), lr=0.1) for half in (net[:2], net[2] if joined else net[2:])]

    run = Run(rank, halves, ddp={"bucket_cap_mb": 25})
    for step in range(4):
        if step == 2 and joined:
            run.optimizers[1].add_param_group({"params": [*run.net[3].parameters()]})
        elif step == 2:
            run.optimizers[0] = SGD(run.net[:2].parameters(), lr=0.1)  # its steps count as the old one's did
        before, own = run.left(), mean_over_ranks(run.own(step) * (not both or rank > 0))
        run.backward(step, "inf" if both and step == 3 and rank == 0 else "")
        if step == 3 and not both:
            run.net[2 + joined].weight.grad.view(-1)[0] = torch.inf
        sent = run.left()
        run.take()
    after, first = run.left(), 0 if both else 2 * 420
    assert torch.equal(after[:first], sent[:first])
    assert not torch.equal(after[first:], sent[first:])
    torch.testing.assert_close(after[first:], (before + own)[first:], atol=1e-6, rtol=1e-4)


@laws.routes
@on_ranks(2)
def test_residuals_do_not_depend_on_the_scales_history(rank, world, topology, bidirectional):
    ends = []
    for scales in ([1.0] * 5, [65536.0] * 5, [2.0, 1024.0, 0.5, 8.0, 65536.0]):
        run = Run(rank, topology=topology, bidirectional=bidirectional, clip_norm=1.0)
        for step, scale in enumerate(scales):
            run.scaler.scale(torch.ones(()))  # makes the scale
            run.scaler.update(scale)
            run.backward(step)
            run.scaler.step(run.optimizers[0])
        ends.append((run.look(), weights(run.net)))
    for residuals, learned in ends[1:]:
        assert torch.equal(residuals, ends[0][0])
        assert torch.equal(learned, ends[0][1])


def scaled_step(cluster: Cluster, given: list[torch.Tensor], scale: torch.Tensor) -> list[torch.Tensor]:
    """Exchanges gradients that a GradScaler has scaled; returns the delivered gradients, with the scale."""
    outputs = [g.clone() for g in given]
    exchanges = [
        exchange(end, g, cluster.plan.codecs(selector=end.uplink.selector), cluster.steps, scale)
        for end, g in zip(cluster.endpoints, outputs, strict=True)
    ]
    cluster.outcomes = cluster.drive(exchanges)
    cluster.steps += 1
    return outputs


@laws.everywhere
@pytest.mark.parametrize("magnitude", [1e-6, 1e-8])
def test_half_precision_gradients_that_vanish_without_the_scale_arrive(topology, bidirectional, magnitude):
    """Law 5 for FSDP2's reduction in float16: with everything sent, the mean arrives to float16's precision."""
    config = TopKConfig(ratio=1.0, wire="fp32", topology=topology, bidirectional=bidirectional)
    cluster, scale = laws.cluster_of(config, 2, 1000, torch.float16), torch.tensor(65536.0)
    given = [(g * magnitude * scale).half() for g in laws.gradients(len(cluster.endpoints), 1000, 0)]
    mean = torch.stack(given).double().mean(0)
    for received in scaled_step(cluster, given, scale):
        torch.testing.assert_close(received.double(), mean, rtol=2**-10, atol=2**-22)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "dtype"),
    laws.in_turn([torch.float16, torch.bfloat16], [*laws.ROUTES, laws.ON_NODES[0]], laws.WIRES),
)
def test_nothing_of_a_scaled_half_precision_gradient_is_lost(topology, bidirectional, wire, dtype):
    """A scaled sum of many steps may overflow float16: later steps then deliver the rest."""
    config = TopKConfig(ratio=0.01, wire=wire, topology=topology, bidirectional=bidirectional)
    cluster = laws.cluster_of(config, 2, 1000, dtype)
    produced, delivered = torch.zeros(1000).double(), torch.zeros(1000).double()
    for step, scale in enumerate([2.0**24, 2.0**24, 3e7, 2.0**10, *[2.0**24] * 26]):
        given = [(g * 1e-3).clamp(-2e-3, 2e-3) * scale for g in laws.gradients(len(cluster.endpoints), 1000, step % 2)]
        given = [g.to(dtype) for g in given]
        received = scaled_step(cluster, given, torch.tensor(scale))
        assert all(torch.equal(each, received[0]) for each in received)
        assert received[0].isfinite().all()
        assert cluster.outcomes[0].finite
        produced += torch.stack(given).double().mean(0) / scale
        delivered += received[0].double() / scale
    torch.testing.assert_close(delivered + laws.undelivered(cluster).double(), produced, atol=1e-7, rtol=1e-5)


def test_a_scaled_sum_that_overflows_without_a_residual_is_not_finite():
    config = TopKConfig(ratio=0.01, wire="fp32", error_feedback="worker")
    cluster, scale = Cluster(config, 2, 1000, torch.float16), torch.tensor(2.0**24)
    finite = [scaled_step(cluster, [torch.full((1000,), 3e4).half()] * 2, scale)[0].isfinite().all() for _ in range(9)]
    assert finite[0]
    assert not finite[-1]
    for end in cluster.endpoints:
        assert end.uplink.memory.tensors()["residual"].isfinite().all()


class Spoilt(Module):
    """Rank 1's gradient is infinite in the third step."""

    def on_before_backward(self, loss):
        self.spoil = self.trainer.global_step == 2 and self.global_rank == 1

    def configure_optimizers(self):
        next(self.parameters()).register_hook(lambda grad: grad * torch.inf if self.spoil else grad)
        return super().configure_optimizers()


def look_into(seen: list) -> LambdaCallback:
    """Lists weights and residuals before each step, and after the last."""

    def look(trainer, module, *_):
        seen.append((weights(module), held(trainer.strategy.topk_state, module)))

    return LambdaCallback(on_train_batch_start=look, on_train_end=look)


@pytest.mark.trainer
@on_ranks(2)
def test_a_trainer_with_a_scaler_continues_as_if_without_the_skipped_step(rank, world):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    seen = []
    _, logged = fit(rank, world, Spoilt(), TopKStrategy(ratio=0.1), [look_into(seen)], plugins=plugin, max_steps=6)
    same = [torch.equal(one[0], other[0]) for one, other in itertools.pairwise(seen)]
    assert same == [step == 2 for step in range(6)]
    assert all(residuals.isfinite().all() for _, residuals in seen)
    assert logged["topk/nonfinite_steps"] == 1


@pytest.mark.trainer
@on_ranks(2)
def test_without_a_scaler_nan_arrives_as_with_ddp_and_is_counted(rank, world):
    seen = []
    _, logged = fit(rank, world, Spoilt(), callbacks=[look_into(seen)], max_steps=4)
    assert logged["topk/nonfinite_steps"] == 2  # the step after it is computed with NaN weights
    assert not seen[-1][0].isfinite().all()
    assert seen[-1][1].isfinite().all()


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("precision", "bucket"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("64-true", torch.float64),
    ],
)
@on_ranks(2)
def test_every_precision_trains(rank, world, precision, bucket):
    found = set()

    def look(trainer, pl_module):
        kept = trainer.strategy.topk_state.residuals.held().values()
        found.update((p.grad.dtype, worker.dtype) for p, (worker, _) in zip(pl_module.parameters(), kept, strict=True))

    callback = LambdaCallback(on_after_backward=look)
    _, logged = fit(rank, world, callbacks=[callback], precision=precision, max_steps=4)
    assert found == {(bucket, torch.promote_types(bucket, torch.float32))}
    assert logged["topk/nonfinite_steps"] == 0
