"""Loss scaling, skipped steps, gradients that are not finite."""

import itertools
from typing import Any

import laws
import pytest
import ranks
import torch
from groups import on_ranks
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from ranks import four_layers, gradient, loss_of, share, undelivered, waiting, weights
from torch.optim import SGD
from trainers import Module, fit

from lightning_topk import TopKStrategy
from lightning_topk.config import TopKConfig
from lightning_topk.simulate import Cluster


class Scaled(ranks.Run):
    """A net of four layers, each of which is a bucket, that trains with a GradScaler."""

    def __init__(self, rank: int, ddp: dict[str, Any] | None = None, **settings: Any) -> None:
        net, self.scaler = four_layers(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = SGD(net.parameters(), lr=0.1)
        settings = {"ratio": 0.05, "optimizer": optimizer, "scaler": self.scaler, **settings}
        model, state = ranks.attached(net, {"bucket_cap_mb": 0.001, **(ddp or {})}, **settings)
        super().__init__(rank, four_layers(), net, model, state, optimizer)

    def scaled(self, number: int, spoilt: bool = False, passes: int = 1) -> torch.Tensor:
        """Runs a step's backward passes, the middle one infinite if ``spoilt``; returns the unscaled gradient."""
        self.net.zero_grad()
        for part in range(passes):
            bad = spoilt and part == passes // 2
            hook = self.net[1].weight.register_hook(lambda g, bad=bad: g * torch.inf if bad else g)
            self.scaler.scale(loss_of(self.model, self.rank, passes * number + part)).backward()
            hook.remove()
        return gradient(self.net) / self.scaler.get_scale()

    def take(self) -> bool:
        """Takes the optimizer's step, unless the scaler skips it; returns whether it moved the weights."""
        before = weights(self.net)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return not torch.equal(before, weights(self.net))

    def local(self, number: int) -> torch.Tensor:
        """This rank's own gradient of a pass."""
        return ranks.local_gradient(self.alone, self.net, self.rank, number)


@pytest.mark.parametrize(
    ("world", "topology", "bidirectional", "settings"),
    [
        *((3, *route, {}) for route in laws.ROUTES),
        *((4, *route, {"local_world_size": 2, "dense_parameters": "*bias"}) for route in laws.ON_NODES),
    ],
    ids=str,
)
@on_ranks()
def test_a_skipped_step_loses_what_it_delivers_and_no_more(rank, world, topology, bidirectional, settings):
    """A gradient that is not finite arrives as such in its bucket, and leaves its worker's and all servers' residuals.

    All other buckets are exchanged as usual.
    """
    run = Scaled(rank, topology=topology, bidirectional=bidirectional, **settings)
    node = settings.get("local_world_size", 1)
    spoilt = torch.arange(4).repeat_interleave(420) == 1  # the elements of the spoilt bucket
    firsts = [420, 420 + 400]  # of each parameter in it
    for step in range(7):
        bad, before, computed = step in (2, 3, 5), share(run.state, run.net), run.local(step)
        g = run.scaled(step, bad and rank == step % world)
        after = share(run.state, run.net)
        assert after.isfinite().all()
        assert g[~spoilt].isfinite().all()
        assert g[firsts].isfinite().tolist() == [not bad] * 2
        if bad:
            guilty = rank // node == step % world // node
            assert not guilty or torch.equal(before[spoilt], after[spoilt]), "of its worker and its server"
            computed, g = torch.where(spoilt, world * (after - before), computed), g.masked_fill(spoilt, 0)
        run.computed.append(computed)
        run.received.append(g)
        assert run.take() != bad, f"step {step}"
    run.check(settled=None, rtol=1e-4)
    assert run.state.nonfinite_steps == 3


@pytest.mark.parametrize("static", [False, True])
@on_ranks(2)
def test_nothing_is_lost_after_a_skipped_first_step_of_several_passes(rank, world, static):
    """DDP regroups its buckets within the first step, which is skipped, as its second pass is infinite on rank 0."""
    run = Scaled(rank, {"static_graph": static})
    run.scaled(0, rank == 0, passes=3)
    assert not run.take()
    assert share(run.state, run.net).isfinite().all()
    run.computed.append(undelivered(run.state, run.net).float())
    run.received.append(torch.zeros_like(weights(run.net)))
    for step in range(1, 4):
        run.computed.append(sum(run.local(3 * step + part) for part in range(3)))
        run.received.append(run.scaled(step, passes=3))
        assert run.take()
    run.check(settled=None, rtol=1e-4)
    assert len(run.state.last_buckets) == 4


@laws.routes
def test_residuals_do_not_depend_on_the_scales_history(topology, bidirectional):
    config, ends = TopKConfig(ratio=0.05, topology=topology, bidirectional=bidirectional, clip_norm=1.0), []
    for scales in ([1.0] * 5, [65536.0] * 5, [2.0, 1024.0, 0.5, 8.0, 65536.0]):
        cluster, received = Cluster(config, 2, 1000), []
        for step, scale in enumerate(scales):
            inputs = [g * scale for g in laws.gradients(2, 1000, step)]
            received.append(cluster.step(inputs, scale=torch.tensor(scale))[0] / scale)
        kept = [part for end in cluster.endpoints for link in end.links for part in link.memory.tensors().values()]
        ends.append([*received, *kept])
    for end in ends[1:]:
        assert all(map(torch.equal, end, ends[0]))


@laws.everywhere
@pytest.mark.parametrize("magnitude", [1e-6, 1e-8])
def test_half_precision_gradients_that_vanish_without_the_scale_arrive(topology, bidirectional, magnitude):
    """Law 5 for FSDP2's reduction in float16: with everything sent, the mean arrives to float16's precision."""
    config = TopKConfig(ratio=1.0, wire="fp32", topology=topology, bidirectional=bidirectional)
    cluster, scale = laws.cluster_of(config, 2, 1000, torch.float16), torch.tensor(65536.0)
    inputs = [(g * magnitude * scale).half() for g in laws.gradients(len(cluster.endpoints), 1000, 0)]
    mean = torch.stack(inputs).double().mean(0)
    for received in cluster.step(inputs, scale=scale):
        torch.testing.assert_close(received.double(), mean, rtol=2**-10, atol=2**-22)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "wire", "dtype"),
    laws.in_turn([torch.float16, torch.bfloat16], [*laws.ROUTES, laws.ON_NODES[0]], laws.WIRES),
)
def test_of_scaled_half_precision_gradients_only_the_last_rounding_is_lost(topology, bidirectional, wire, dtype):
    config = TopKConfig(0.01, bidirectional, topology=topology, wire=wire)
    small = {"make_gradients": lambda *at: [1e-6 * g for g in laws.gradients(*at)], "atol": 1e-10}
    laws.simulate(config, 2, 1000, dtype, 30, scale=2.0**24, rates=[0.3, 0.7, 1.0] * 10, **small)


@laws.everywhere
@pytest.mark.parametrize("error_feedback", [True, "worker"])
def test_a_scaled_sum_that_overflows_half_precision_is_not_finite_on_any_rank(topology, bidirectional, error_feedback):
    """The scaler halves its scale until a sum of some steps fits."""
    config = TopKConfig(0.01, bidirectional, topology=topology, wire="fp32", error_feedback=error_feedback)
    cluster, finite, scale = laws.cluster_of(config, 2, 1000, torch.float16), [], 2.0**24
    for _ in range(20):
        inputs = [torch.full((1000,), 1e-3 * scale).half()] * len(cluster.endpoints)
        received = cluster.step(inputs, scale=torch.tensor(scale))
        finite.append(bool(cluster.outcomes[0].finite))
        assert all(each[0].isfinite() == finite[-1] for each in received)
        assert all(each.isfinite().all() for each in received) == finite[-1]
        scale /= 1 if finite[-1] else 2
        kept = [part for end in cluster.endpoints for link in end.links for part in link.memory.tensors().values()]
        assert all(each.isfinite().all() for each in kept)
    assert finite[0]
    assert finite[-1]
    assert topology == "dense" or not all(finite)


class Spoilt(Module):
    """Rank 1's gradient is infinite in the third step."""

    def on_before_backward(self, loss):
        self.spoil = self.trainer.global_step == 2 and self.global_rank == 1

    def configure_optimizers(self):
        next(self.parameters()).register_hook(lambda grad: grad * torch.inf if self.spoil else grad)
        return super().configure_optimizers()


@pytest.mark.trainer
@pytest.mark.parametrize("scaled", [True, False])
@on_ranks(2)
def test_a_trainer_skips_a_step_that_is_not_finite_if_it_has_a_scaler_and_counts_it(rank, world, scaled):
    """Without a scaler, NaN arrives as with DDP, and the step after it is computed with NaN weights."""
    seen, scaler = [], torch.amp.GradScaler("cpu", init_scale=256.0)

    def look(trainer, module, *_):
        seen.append((weights(module), share(trainer.strategy.topk_state, module)))

    callback = LambdaCallback(on_train_batch_start=look, on_train_end=look)
    options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)} if scaled else {}
    _, logged = fit(rank, world, Spoilt(), TopKStrategy(ratio=0.1), [callback], max_steps=4, **options)
    stands = [torch.equal(one[0], other[0]) for one, other in itertools.pairwise(seen)]
    assert stands == [scaled and step == 2 for step in range(4)]
    assert seen[-1][0].isfinite().all() == scaled
    assert all(residuals.isfinite().all() for _, residuals in seen)
    assert logged["topk/nonfinite_steps"] == (1 if scaled else 2)


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("precision", "bucket"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)]
)
@on_ranks(2)
def test_every_precision_trains(rank, world, precision, bucket):
    found = set()

    def look(trainer, pl_module):
        kept = waiting(trainer.strategy.topk_state.residuals, pl_module.parameters(), world)
        found.update((p.grad.dtype, each.dtype) for p, each in kept.items())

    callback = LambdaCallback(on_after_backward=look)
    _, logged = fit(rank, world, callbacks=[callback], precision=precision, max_steps=4)
    assert found == {(bucket, torch.promote_types(bucket, torch.float32))}
    assert logged["topk/nonfinite_steps"] == 0
