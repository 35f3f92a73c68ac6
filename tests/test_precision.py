"""Loss scaling, skipped steps, gradients that are not finite."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from laws import ON_NODES, ROUTES, routes
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from ranks import every_rank, mean_over_ranks, undelivered
from ranks import gradient as flat_gradient
from test_lightning import Model, fit
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topk import TopKStrategy
from lightning_topk.ddp import attach


def net_of_four_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])


def held(state, net: nn.Module) -> torch.Tensor:
    """What this rank holds, as a worker and as a server."""
    kept = state.residuals.held()
    return torch.stack([torch.cat([kept[p][side] for p in net.parameters()]) for side in (0, 1)])


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean()


def spoil(net: nn.Module, how: str) -> list[torch.utils.hooks.RemovableHandle]:
    """Makes the next gradients of one layer infinite, in one element or everywhere, or NaN."""
    value = torch.nan if how == "nan" else torch.inf

    def poison(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[: None if how == "everywhere" else 1] = value
        return grad

    return [net[1].weight.register_hook(poison)]


MEMORIES = [{"momentum": 0.9, "clip_norm": 1.0}, {"error_feedback": True, "wire": "fp32"}]


def skipped(rank: int, world: int, topology: str, bidirectional: bool, how: str, settings: dict, fused: bool) -> None:
    net = net_of_four_layers()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    settings = {"ratio": 0.05, "topology": topology, "bidirectional": bidirectional} | settings
    state = attach(ddp, optimizer=optimizer, scaler=scaler, **settings)
    computed, received, seen = [], [], []
    for step in range(7):
        bad = step in (2, 3, 5)
        before, weights = held(state, net) if step else None, nn.utils.parameters_to_vector(net.parameters()).clone()
        hooks = spoil(net, how) if bad and rank == step % world else []
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, rank, step)).backward()
        for hook in hooks:
            hook.remove()
        scaler.unscale_(optimizer)
        if not bad:
            alone = net_of_four_layers()
            nn.utils.vector_to_parameters(weights, alone.parameters())
            loss_of(alone, rank, step).backward()
            computed.append(flat_gradient(alone))
            received.append(flat_gradient(net))
        gradient = flat_gradient(net)
        scaler.step(optimizer)
        scaler.update()
        after = nn.utils.parameters_to_vector(net.parameters())
        seen.append((bad, before, held(state, net), torch.equal(weights, after), gradient))
    produced, left = mean_over_ranks(torch.stack(computed).double().sum(0)), undelivered(state, net)
    everyones = every_rank(torch.stack([gradient for *_, gradient in seen])).unbind(1)
    count = state.nonfinite_steps
    state.close()
    for step, ((bad, before, now, unchanged, _), gradients) in enumerate(zip(seen, everyones, strict=True)):
        assert now.isfinite().all()
        assert unchanged == bad, f"step {step}"
        if bad:
            assert torch.equal(before, now), f"the residuals changed in skipped step {step}"
            assert not gradients.isfinite().all(1).any(), "some rank saw a finite gradient"
    assert count == 3
    if not settings.get("momentum"):
        torch.testing.assert_close(torch.stack(received).double().sum(0) + left, produced, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "how"),
    [*((*route, "inf") for route in ROUTES), ("sharded", True, "nan"), ("allgather", False, "everywhere")],
)
def test_a_skipped_step_leaves_all_residuals_as_they_were(groups, topology, bidirectional, how):
    groups(3).run(skipped, topology, bidirectional, how, {}, False)


@pytest.mark.parametrize(
    ("topology", "bidirectional", "settings"),
    [
        *(("sharded", True, settings) for settings in MEMORIES),
        *((*route, settings) for route, settings in zip(ROUTES[1:4], MEMORIES, strict=False)),
    ],
)
def test_a_skipped_step_leaves_residuals_in_every_memory_and_with_fused_optimizers(
    groups, topology, bidirectional, settings
):
    groups(2).run(skipped, topology, bidirectional, "inf", settings, True)


@pytest.mark.parametrize(("topology", "bidirectional"), ON_NODES)
@pytest.mark.parametrize(("fused", "more"), [(False, {}), (True, {"dense_parameters": "*bias"})])
def test_a_skipped_step_leaves_residuals_on_nodes(groups, topology, bidirectional, fused, more):
    groups(4).run(skipped, topology, bidirectional, "inf", {"local_world_size": 2, **more}, fused)


def skipped_in_two_passes(rank: int, world: int, mode: str) -> None:
    """Each step is of three passes; DDP regroups its buckets within the first step, which is skipped."""
    net = net_of_four_layers()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001, static_graph=mode == "static_graph")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = attach(ddp, optimizer=optimizer, scaler=scaler, ratio=0.05)
    computed, received, kept, batches = [], [], [], []
    submit = state.submit
    state.submit = lambda batch, promises: (batches.append(batch), submit(batch, promises))
    for step in range(4):
        optimizer.zero_grad()
        weights = nn.utils.parameters_to_vector(net.parameters()).clone()
        for part in range(3):
            hooks = spoil(net, "inf") if step == 0 and part == 1 and rank == 0 else []
            scaler.scale(loss_of(ddp, rank, 3 * step + part)).backward()
            for hook in hooks:
                hook.remove()
        scaler.unscale_(optimizer)
        if step:
            alone = net_of_four_layers()
            nn.utils.vector_to_parameters(weights, alone.parameters())
            for part in range(3):
                loss_of(alone, rank, 3 * step + part).backward()
            computed.append(flat_gradient(alone))
            received.append(flat_gradient(net))
        scaler.step(optimizer)
        scaler.update()
        kept.append(held(state, net))
    produced, left = mean_over_ranks(torch.stack(computed).double().sum(0)), undelivered(state, net)
    buckets = len(state.residuals.progress.buckets)
    state.close()
    assert not kept[0].any(), "what was kept of the skipped step is still there"
    assert kept[1].any()
    assert buckets == 4
    regrouped = 1 + (mode == "static_graph")  # after so many passes; then all exchanges overlap with backward
    assert len(batches) == regrouped + 4 * (12 - regrouped)
    torch.testing.assert_close(torch.stack(received).double().sum(0) + left, produced, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mode", ["dynamic_graph", "static_graph"])
def test_a_first_step_of_several_passes_is_undone_as_a_whole(groups, mode):
    groups(2).run(skipped_in_two_passes, mode)


class Hookless(torch.optim.Optimizer):
    """Wraps an optimizer as some libraries do: without the constructor that gives ``step`` its hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, inner.defaults, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure=None):
        return self.inner.step(closure)


def with_a_wrapper(rank: int, world: int, given: str) -> None:
    """The scaler steps a wrapper; the exchange knows it, or the optimizer in it."""
    net = net_of_four_layers()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapper = Hookless(inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = attach(ddp, optimizer=inner if given == "inner" else wrapper, scaler=scaler, ratio=0.05)
    kept = []
    for step in range(5):
        before = held(state, net) if step else None
        inner.zero_grad()
        hooks = spoil(net, "inf") if step == 3 and rank == 0 else []
        scaler.scale(loss_of(ddp, rank, step)).backward()
        for hook in hooks:
            hook.remove()
        scaler.step(wrapper)
        scaler.update()
        kept.append((before, held(state, net)))
    state.close()
    for step, (before, after) in enumerate(kept):
        assert after.any()
        assert step == 0 or torch.equal(before, after) == (step == 3)


@pytest.mark.parametrize("given", ["inner", "wrapper"])
def test_an_optimizer_without_hooks_is_undone_when_the_scaler_skips_its_step(groups, given):
    groups(2).run(with_a_wrapper, given)


def copied_scaler(rank: int, world: int) -> None:
    net = net_of_four_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = attach(DistributedDataParallel(net), optimizer=optimizer, scaler=scaler, ratio=0.05)
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        net.zero_grad()
        other.scale(net(torch.ones(1, 20)).sum()).backward()
        other.step(optimizer)
        other.update()
        assert other.get_scale() == scaler.get_scale() == 1024
    dist.barrier()
    state.close()


def test_a_scaler_can_be_copied_and_pickled_and_the_copy_steps_by_itself(groups):
    groups(2).run(copied_scaler)


def two_optimizers(rank: int, world: int) -> None:
    """A bucket that two optimizers share: what one skips comes back, what the other takes stays taken."""
    net = net_of_four_layers()
    ddp = DistributedDataParallel(net)
    halves = [list(net[:2].parameters()), list(net[2:].parameters())]
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = attach(ddp, optimizer=lambda: optimizers, scaler=scaler, ratio=0.05)
    for step in range(4):
        if step == 2:
            optimizers[0] = torch.optim.SGD(halves[0], lr=0.1)  # a new optimizer's steps count as the old one's did
        for optimizer in optimizers:
            optimizer.zero_grad()
        before = held(state, net) if step else None
        scaler.scale(loss_of(ddp, rank, step)).backward()
        if step == 3:
            halves[1][0].grad.view(-1)[0] = torch.inf  # after the exchange: only the second optimizer skips
        sent = held(state, net)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    after = held(state, net)
    first = sum(p.numel() for p in halves[0])
    state.close()
    assert not torch.equal(before[:, first:], sent[:, first:])
    assert torch.equal(after[:, :first], sent[:, :first])
    assert torch.equal(after[:, first:], before[:, first:])


def test_a_step_skipped_by_one_of_two_optimizers_restores_its_parameters_only(groups):
    groups(2).run(two_optimizers)


def joined_late(rank: int, world: int) -> None:
    """A layer that the second optimizer gets later is undone with that optimizer's steps from then on."""
    net = net_of_four_layers()
    ddp = DistributedDataParallel(net)
    first, late = torch.optim.SGD(net[:2].parameters(), lr=0.1), [*net[3].parameters()]
    second = torch.optim.SGD(net[2].parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = attach(ddp, optimizer=[first, second], scaler=scaler, ratio=0.05)
    for step in range(4):
        if step == 2:
            second.add_param_group({"params": late})
        net.zero_grad()
        before = held(state, net) if step else None
        scaler.scale(loss_of(ddp, rank, step)).backward()
        if step == 3:
            late[0].grad.view(-1)[0] = torch.inf  # after the exchange
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()
    after = held(state, net)
    state.close()
    numel = sum(p.numel() for p in late)
    assert torch.equal(after[:, -numel:], before[:, -numel:])
    assert not torch.equal(after[:, :-numel], before[:, :-numel])


def test_a_layer_that_joins_an_optimizer_later_is_undone_with_it(groups):
    groups(2).run(joined_late)


class Branches(nn.Module):
    """Two branches, each used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([net_of_four_layers(), net_of_four_layers()])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](x)


def shared_bucket(rank: int, world: int) -> None:
    net = net_of_four_layers()
    ddp = DistributedDataParallel(net)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net[:2], net[2:])]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = attach(ddp, optimizer=lambda: optimizers, scaler=scaler, ratio=0.05)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        hooks = spoil(net, "inf") if step == 3 and rank == 0 else []
        before = held(state, net) if step else None
        scaler.scale(loss_of(ddp, rank, step)).backward()
        for hook in hooks:
            hook.remove()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    after = held(state, net)
    state.close()
    assert torch.equal(before, after)  # the bucket is spoilt as a whole, so that both skip


def test_both_optimizers_of_a_spoilt_bucket_skip(groups):
    groups(2).run(shared_bucket)


def scaled(rank: int, world: int, topology: str, bidirectional: bool) -> None:
    """The same run under three histories of the scale."""
    ends = []
    for scales in ([1.0] * 5, [65536.0] * 5, [2.0, 1024.0, 0.5, 8.0, 65536.0]):
        net = net_of_four_layers()
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        state = attach(
            ddp, optimizer=optimizer, scaler=scaler, ratio=0.05, topology=topology,
            bidirectional=bidirectional, clip_norm=1.0,
        )  # fmt: skip
        for step, scale in enumerate(scales):
            optimizer.zero_grad()
            scaler.update(scale) if scaler._scale is not None else scaler.scale(torch.ones(())) and scaler.update(scale)
            scaler.scale(loss_of(ddp, rank, step)).backward()
            scaler.step(optimizer)
        ends.append((held(state, net), nn.utils.parameters_to_vector(net.parameters())))
        state.close()
    for residuals, weights in ends[1:]:
        assert torch.equal(residuals, ends[0][0])
        assert torch.equal(weights, ends[0][1])


@routes
def test_residuals_do_not_depend_on_the_scales_history(groups, topology, bidirectional):
    groups(2).run(scaled, topology, bidirectional)


class Spoilt(Model):
    """Rank 1's gradient is infinite in the third step."""

    def on_before_backward(self, loss):
        self.spoil = self.trainer.global_step == 2 and self.global_rank == 1

    def configure_optimizers(self):
        for parameter in list(self.parameters())[:1]:
            parameter.register_hook(lambda grad: grad * torch.inf if self.spoil else grad)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Weights(Callback):
    """Compares weights and residuals before and after each step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.step, self.before = trainer.global_step, self.look(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        same = [torch.equal(a, b) for a, b in zip(self.before, self.look(trainer, pl_module), strict=True)]
        assert same == [self.step == 2 and trainer.precision_plugin.scaler is not None] * 2, (self.step, same)

    def look(self, trainer, pl_module):
        kept = trainer.strategy.topk_state.residuals.held()
        flat = [torch.cat([*kept.get(p, [torch.zeros(0)])]) for p in pl_module.parameters()]
        return nn.utils.parameters_to_vector(pl_module.parameters()).clone(), torch.cat(flat)


@pytest.mark.trainer
def test_a_trainer_with_a_scaler_goes_on_as_if_the_step_had_not_been(tmp_path):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    strategy = TopKStrategy(ratio=0.1, start_method="forkserver")
    _, logged = fit(tmp_path, Spoilt(), strategy, callbacks=[Weights()], plugins=plugin, max_steps=6)
    assert logged["topk/nonfinite_steps"] == 1


@pytest.mark.trainer
def test_without_a_scaler_nan_arrives_as_with_ddp_and_is_counted(tmp_path):
    _, logged = fit(tmp_path, Spoilt(), callbacks=[ExpectNaN()], max_steps=4)
    assert logged["topk/nonfinite_steps"] == 2  # the step after it is computed with NaN weights


class ExpectNaN(Callback):
    def on_train_end(self, trainer, pl_module):
        assert not nn.utils.parameters_to_vector(pl_module.parameters()).isfinite().all()
        for parts in trainer.strategy.topk_state.residuals.held().values():
            assert all(part.isfinite().all() for part in parts)


class Dtypes(Callback):
    def __init__(self, bucket: torch.dtype) -> None:
        self.bucket = bucket

    def on_after_backward(self, trainer, pl_module):
        assert {p.grad.dtype for p in pl_module.parameters()} == {self.bucket}
        kept = [part for parts in trainer.strategy.topk_state.residuals.held().values() for part in parts[:1]]
        assert {part.dtype for part in kept} == {torch.promote_types(self.bucket, torch.float32)}


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("precision", "bucket"),
    [("32-true", "float32"), ("bf16-mixed", "float32"), ("bf16-true", "bfloat16"), ("64-true", "float64")],
)
def test_every_precision_trains(tmp_path, precision, bucket):
    _, logged = fit(tmp_path, callbacks=[Dtypes(getattr(torch, bucket))], precision=precision, max_steps=4)
    assert logged["topk/nonfinite_steps"] == 0
