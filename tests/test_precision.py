"""Loss scaling, skipped steps, gradients that are not finite."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import laws
import pytest
import torch
import torch.distributed as dist
from groups import on_ranks
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from ranks import (
    every_rank,
    four_layers,
    gradient,
    held,
    local_gradient,
    loss_of,
    mean_over_ranks,
    undelivered,
    weights,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from trainers import Module, fit

from lightning_topk import TopKStrategy
from lightning_topk.ddp import attach


class Run:
    """A net of four layers that is trained with a GradScaler.

    Args:
        rank: This rank.
        optimizers: Makes the optimizers that the scaler steps.
        given: What ``attach`` gets instead of them.
        ddp: Options of DDP.
        **settings: Arguments of ``attach``.
    """

    def __init__(
        self,
        rank: int,
        optimizers: Callable[[nn.Module], list] = lambda net: [SGD(net.parameters(), lr=0.1)],
        given: Any = None,
        ddp: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.rank, self.net, self.alone = rank, four_layers(), four_layers()
        self.ddp = DistributedDataParallel(self.net, **{"bucket_cap_mb": 0.001, **(ddp or {})})
        self.optimizers, self.scaler = optimizers(self.net), torch.amp.GradScaler("cpu", init_scale=1024.0)
        given = (lambda: self.optimizers) if given is None else given(self.optimizers[0])
        self.state = attach(self.ddp, optimizer=given, scaler=self.scaler, **{"ratio": 0.05, **settings})
        self.computed: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []

    def backward(self, number: int, spoilt: str = "", passes: int = 1) -> torch.Tensor:
        """A step's backward passes, of which the middle one is spoilt; returns the gradient without its scale."""
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

    def note(self, number: int, received: torch.Tensor, passes: int = 1) -> None:
        """Takes note of a step that is taken, before its optimizers are stepped."""
        parts = range(passes * number, passes * (number + 1))
        self.computed.append(sum(local_gradient(self.alone, self.net, self.rank, part) for part in parts))
        self.received.append(received)

    def check(self, conserves: bool = True) -> None:
        """Fails where the steps that were taken break a law; closes the state."""
        computed, received = mean_over_ranks(torch.stack(self.computed)), every_rank(torch.stack(self.received))
        left = undelivered(self.state, self.net) if conserves else None
        self.state.close()
        laws.check(computed, received, left, [], [], settled=None, rtol=1e-4)


def spoil(g: torch.Tensor, how: str) -> torch.Tensor:
    """A gradient with an infinity or a NaN; as it is if ``how`` is empty."""
    g = g.clone()
    if how:
        g.view(-1)[: None if how == "everywhere" else 1] = torch.nan if how == "nan" else torch.inf
    return g


MEMORIES = [{"momentum": 0.9, "clip_norm": 1.0}, {"error_feedback": True, "wire": "fp32"}]


@pytest.mark.parametrize(
    ("world", "topology", "bidirectional", "how", "fused", "settings"),
    [
        *((3, *route, "inf", False, {}) for route in laws.ROUTES),
        (3, "sharded", True, "nan", False, {}),
        (3, "allgather", False, "everywhere", False, {}),
        *((2, "sharded", True, "inf", True, settings) for settings in MEMORIES),
        *((2, *laws.ROUTES[i + 1], "inf", True, settings) for i, settings in enumerate(MEMORIES)),
        *((4, *way, "inf", False, {"local_world_size": 2}) for way in laws.ON_NODES),
        *((4, *way, "inf", True, {"local_world_size": 2, "dense_parameters": "*bias"}) for way in laws.ON_NODES),
    ],
    ids=str,
)
@on_ranks()
def test_a_skipped_step_leaves_weights_and_residuals_as_they_were(
    rank, world, topology, bidirectional, how, fused, settings
):
    settings = {"topology": topology, "bidirectional": bidirectional, **settings}
    run = Run(rank, lambda net: [SGD(net.parameters(), lr=0.1, fused=fused)], **settings)
    seen = []
    for step in range(7):
        bad = step in (2, 3, 5)
        before = run.look(), weights(run.net)
        g = run.backward(step, how if bad and rank == step % world else "")
        if not bad:
            run.note(step, g)
        run.take()
        seen.append((bad, before, (run.look(), weights(run.net)), g))
    everyones, count = every_rank(torch.stack([g for *_, g in seen])), run.state.nonfinite_steps
    run.check(conserves="momentum" not in settings)
    for step, (bad, before, after, _) in enumerate(seen):
        assert after[0].isfinite().all()
        assert torch.equal(before[1], after[1]) == bad, f"step {step}"
        if bad:
            assert torch.equal(before[0], after[0]), f"the residuals changed in skipped step {step}"
            assert not everyones[:, step].isfinite().all(1).any(), "some rank saw a finite gradient"
    assert count == 3


@pytest.mark.parametrize("static", [False, True])
@on_ranks(2)
def test_a_first_step_of_several_passes_is_undone_as_a_whole(rank, world, static):
    """DDP regroups its buckets within the first step, which is skipped."""
    run = Run(rank, ddp={"static_graph": static})
    kept, batches, submit = [], [], run.state.submit
    run.state.submit = lambda batch, promises: (batches.append(batch), submit(batch, promises))
    for step in range(4):
        g = run.backward(step, "inf" if step == rank == 0 else "", passes=3)
        if step:
            run.note(step, g, passes=3)
        run.take()
        kept.append(run.look())
    buckets = len(run.state.residuals.progress.buckets)
    run.check()
    assert not kept[0].any(), "what was kept of the skipped step is still there"
    assert kept[1].any()
    assert buckets == 4
    regrouped = 1 + static  # after so many passes; then all exchanges overlap with backward
    assert len(batches) == regrouped + 4 * (12 - regrouped)


class Hookless(torch.optim.Optimizer):
    """Wraps an optimizer as some libraries do: without the constructor that gives ``step`` its hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, inner.defaults, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("given", ["wrapper", "inner"])
@on_ranks(2)
def test_an_optimizer_without_hooks_is_undone_when_the_scaler_skips_its_step(rank, world, given):
    """The scaler steps a wrapper; the exchange knows it, or the optimizer in it."""
    known = {"wrapper": lambda wrapper: wrapper, "inner": lambda wrapper: wrapper.inner}[given]
    run = Run(rank, lambda net: [Hookless(SGD(net.parameters(), lr=0.1))], known)
    for step in range(5):
        before = run.look()
        run.backward(step, "inf" if step == 3 and rank == 0 else "")
        run.take()
        assert run.look().any()
        assert torch.equal(before, run.look()) == (step == 3)
    run.state.close()


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
    run.state.close()


def halves(net: nn.Sequential) -> list[SGD]:
    """Two optimizers that share a bucket."""
    return [SGD(half.parameters(), lr=0.1) for half in (net[:2], net[2:])]


ONE_BUCKET = {"bucket_cap_mb": 25}


@on_ranks(2)
def test_a_step_skipped_by_one_of_two_optimizers_restores_its_parameters_only(rank, world):
    run = Run(rank, halves, ddp=ONE_BUCKET)
    for step in range(4):
        if step == 2:
            run.optimizers[0] = SGD(run.net[:2].parameters(), lr=0.1)  # its steps count as the old one's did
        before = run.look()
        run.backward(step)
        if step == 3:
            run.net[2].weight.grad.view(-1)[0] = torch.inf  # after the exchange: only the second optimizer skips
        sent = run.look()
        run.take()
    after, first = run.look(), 2 * 420
    run.state.close()
    assert not torch.equal(before[:, first:], sent[:, first:])
    assert torch.equal(after[:, :first], sent[:, :first])
    assert torch.equal(after[:, first:], before[:, first:])


@on_ranks(2)
def test_a_layer_that_joins_an_optimizer_later_is_undone_with_it(rank, world):
    run = Run(rank, lambda net: [SGD(part.parameters(), lr=0.1) for part in (net[:2], net[2])], ddp=ONE_BUCKET)
    for step in range(4):
        if step == 2:
            run.optimizers[1].add_param_group({"params": [*run.net[3].parameters()]})
        before = run.look()
        run.backward(step)
        if step == 3:
            run.net[3].weight.grad.view(-1)[0] = torch.inf  # after the exchange
        run.take()
    after = run.look()
    run.state.close()
    assert torch.equal(after[:, -420:], before[:, -420:])
    assert not torch.equal(after[:, :-420], before[:, :-420])


@on_ranks(2)
def test_both_optimizers_of_a_spoilt_bucket_skip(rank, world):
    run = Run(rank, halves, ddp=ONE_BUCKET)
    for step in range(4):
        before = run.look()
        run.backward(step, "inf" if step == 3 and rank == 0 else "")
        run.take()
    after = run.look()
    run.state.close()
    assert torch.equal(before, after)  # the bucket is spoilt as a whole


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
        run.state.close()
    for residuals, learned in ends[1:]:
        assert torch.equal(residuals, ends[0][0])
        assert torch.equal(learned, ends[0][1])


class Spoilt(Module):
    """Rank 1's gradient is infinite in the third step."""

    def on_before_backward(self, loss):
        self.spoil = self.trainer.global_step == 2 and self.global_rank == 1

    def configure_optimizers(self):
        next(self.parameters()).register_hook(lambda grad: grad * torch.inf if self.spoil else grad)
        return super().configure_optimizers()


class Look(Callback):
    """Weights and residuals before each step, and after the last."""

    def __init__(self) -> None:
        self.seen = []

    def look(self, trainer, pl_module, *_):
        self.seen.append((weights(pl_module), held(trainer.strategy.topk_state, pl_module)))

    on_train_batch_start = on_train_end = look


@pytest.mark.trainer
@on_ranks(2)
def test_a_trainer_with_a_scaler_goes_on_as_if_the_step_had_not_been(rank, world):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    look = Look()
    _, logged = fit(rank, world, Spoilt(), TopKStrategy(ratio=0.1), [look], plugins=plugin, max_steps=6)
    for side in (0, 1):
        same = [torch.equal(one[side], other[side]) for one, other in itertools.pairwise(look.seen)]
        assert same == [step == 2 for step in range(6)]
    assert logged["topk/nonfinite_steps"] == 1


@pytest.mark.trainer
@on_ranks(2)
def test_without_a_scaler_nan_arrives_as_with_ddp_and_is_counted(rank, world):
    look = Look()
    _, logged = fit(rank, world, Spoilt(), callbacks=[look], max_steps=4)
    assert logged["topk/nonfinite_steps"] == 2  # the step after it is computed with NaN weights
    assert not look.seen[-1][0].isfinite().all()
    assert look.seen[-1][1].isfinite().all()


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
