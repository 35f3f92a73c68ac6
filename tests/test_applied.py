"""What dense training would apply, on real ranks: gradients wait as clipped, and shrink when the rate rises."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import ranks
import torch
from groups import on_ranks
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import Precision
from ranks import attach, attached, four_layers, gradient, log, loss_of, shared, undelivered
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR
from trainers import InThisProcess, Module, fit

from lightning_topk import TopKStrategy, fabric
from lightning_topk.bucket import Bucket
from lightning_topk.core.link import DELIVERED, ENTERED, SLOPE
from lightning_topk.messages import WarnOnce
from lightning_topk.optim.applied import Clipping
from lightning_topk.optim.clips import READ, UserClipping
from lightning_topk.runtime import residuals

WARM = [0.0, 0.01, 0.1, 1.0, 1.0, 0.5, 0.005, 1.0]
"""Factors of the rate: a warm-up from 0, a decay, and a restart."""
CLIP = nn.utils.clip_grad_norm_


def run_of(rank: int, groups: int = 1, lr: float = 0.05, **options) -> ranks.Run:
    """A run of four layers, by default each in a bucket of its own."""
    net = four_layers()
    parts = [net] if groups == 1 else [net[:2], net[2:]]
    optimizer = SGD([{"params": part.parameters()} for part in parts], lr=lr)
    ddp = options.pop("ddp", {"bucket_cap_mb": 0.001})
    model, state = attached(net, ddp, **{"ratio": 0.05, **options}, optimizer=optimizer)
    return ranks.Run(rank, four_layers(), net, model, state, optimizer)


# -------------------------------------------------------------------------------------------- rates


def whole_at_times(step: int) -> float:
    return 1.0 if step % 3 == 2 else 0.05


@pytest.mark.parametrize(
    ("schedules", "options"),
    [(1, {}), (1, {"ddp": {}}), (2, {"ddp": {}}), (2, {"ddp": {"static_graph": True}}),
     (1, {"ratio": whole_at_times, "wire": "fp32"}), (1, {"ratio": whole_at_times}), (1, {"ratio": 1.0})],
)  # fmt: skip
@on_ranks(3)
def test_what_waits_shrinks_when_the_rate_rises(rank, world, schedules, options):
    """Also if groups in one bucket have schedules of their own, if the first rate is 0, and if every entry is sent."""
    run = run_of(rank, schedules, **options)
    several = [WARM, [1.0, 1.0, 0.3, 0.3, 0.2, 0.1, 0.1, 1.0]][:schedules]
    scheduler = LambdaLR(run.optimizer, [own.__getitem__ for own in several])
    for step in range(len(WARM)):
        run.backward(step)
        run.step()
        scheduler.step() if step < len(WARM) - 1 else None
    _, left = run.check(rtol=1e-4)
    assert left.any()


@on_ranks(2)
def test_a_rate_that_is_set_after_backward_counts_from_the_next_step_on(rank, world):
    """At first the optimizer has the rate that the warm-up leads to."""
    run, seen = run_of(rank, lr=1.0), []
    fade = run.state.residuals.fade
    with mock.patch.object(run.state.residuals, "fade", lambda *given: seen.append(fade(*given)) or seen[-1]):
        for step, rate in enumerate([0.01, 0.02, 0.04, 0.04]):
            seen.clear()
            run.backward(step)
            run.optimizer.param_groups[0]["lr"] = rate
            run.step()
            assert seen == [{2: 0.5, 3: 0.5}.get(step, 1.0)] * len(seen)


@on_ranks(2)
def test_rates_before_a_checkpoint_was_loaded_do_not_count(rank, world):
    """The learning rate finder steps at large rates, and then loads a checkpoint from before."""
    run = run_of(rank, lr=10.0)
    before = shared(run.state.state_dict())
    ranks.train(run.model, rank, range(2), run.optimizer)
    run.state.load_state_dict(before)
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-3
    ranks.train(run.model, rank, range(2), run.optimizer)
    waited = undelivered(run.state, run.net)
    run.optimizer.param_groups[0]["lr"] = 2e-3
    run.backward(5)
    torch.testing.assert_close(undelivered(run.state, run.net) + gradient(run.net), run.own() + waited / 2)


@on_ranks(2)
def test_the_step_by_which_torch_initialises_an_optimizers_state_counts_for_nothing(rank, world):
    """It has a rate of 0 and gradients of zero: torch.distributed.checkpoint takes it to load an optimizer's state."""
    run = run_of(rank)
    ranks.train(run.model, rank, range(2), run.optimizer)
    entry, waiting = shared(run.state.state_dict()), undelivered(run.state, run.net)
    net = four_layers()
    optimizer = AdamW(net.parameters(), lr=0.05)
    model, state = attached(net, ratio=0.05, optimizer=optimizer)
    state.load_state_dict(entry)
    state.optimizers.clipping.first = 1.0  # as a Trainer tells
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state, "it took a step"
    (0.0 * loss_of(model, rank, 2)).backward()
    assert state.optimizers.clipping.estimate.limits == [1.0, math.inf]
    torch.testing.assert_close(undelivered(state, net) + gradient(net), waiting)


@pytest.mark.parametrize("saved", [None, 0.05])
@on_ranks(2)
def test_a_checkpoint_resumes_with_gradients_whatever_the_rate(rank, world, saved):
    """Earlier ones have the rate of a residual, or none."""
    run = run_of(rank)
    run.backward(0)
    run.step()
    entry, waiting = shared(run.state.state_dict()), undelivered(run.state, run.net)
    assert "units" not in entry
    if saved is not None:
        entry["units"] = {name: ["SGD", saved] for name in entry["parameters"]}
    run.optimizer.param_groups[0]["lr"] = 0.001
    run.state.close()
    state = attach(run.model, ratio=1.0, wire="fp32", optimizer=run.optimizer)
    state.load_state_dict(entry)
    run.backward(1)
    torch.testing.assert_close(gradient(run.net).double(), run.own() + waiting, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("options", [{"ratio": 0.1}, {"ratio": 1.0, "wire": "fp32"}])
@on_ranks(2)
def test_a_rate_that_falls_tenfold_in_every_step_trains_as_with_ddp(rank, world, options):
    """To 1e-60, far below what float32 holds."""
    run = run_of(rank, lr=0.1, ddp={}, **options)
    scheduler = StepLR(run.optimizer, 1, 0.1)
    for step in range(60):
        run.backward(step % 5)
        run.step()
        scheduler.step()
    shared(run.state.state_dict())
    assert ranks.weights(run.net).isfinite().all()
    assert gradient(run.net).norm() < 3 * run.own().norm()


@on_ranks(2)
def test_groups_with_other_base_rates_and_a_least_rate_fade_together(rank, world):
    """No slice of a residual is scaled apart."""
    net = four_layers()
    optimizer = SGD([{"params": net[:2].parameters(), "lr": 0.1}, {"params": net[2:].parameters(), "lr": 1e-3}])
    model, _ = attached(net, ratio=0.1, optimizer=optimizer)
    with mock.patch.object(residuals, "multiply_", side_effect=AssertionError):
        for step in range(30):
            for base, group in zip((0.1, 1e-3), optimizer.param_groups, strict=True):
                rising = min(1.0, (step + 1) / 10)
                group["lr"] = base * rising * (1 + math.cos(step / 10)) / 2 + 1e-7 * rising
            ranks.train(model, rank, [step], optimizer)


# -------------------------------------------------------------------------------------------- clipping


Treat = Callable[[nn.Module], object]


def moved(rank: int, steps: int, treat: Treat, make=None, ddp=None, told=None, lr: float = 1e-3, **options) -> Tensor:
    """How far weights move along DDP's movement, over DDP's, for gradients that ``treat`` changes before each step.

    ``[parameters]``, for each of four layers' weights and biases.
    """
    ends = []
    for compressed in (False, True):
        net = four_layers()
        begin = copy.deepcopy(net)
        optimizers = [SGD(net.parameters(), lr=lr)] if make is None else make(net)
        model = DistributedDataParallel(net, **(ddp or {}))
        state = attach(model, optimizer=optimizers, max_norm=told, **options) if compressed else None
        for step in range(steps):
            net.zero_grad()
            loss_of(model, rank, step % 5).backward()
            treat(net)
            for optimizer in optimizers:
                optimizer.step()
        ends.append([p.detach() - q.detach() for p, q in zip(net.parameters(), begin.parameters(), strict=True)])
        if state is not None:
            state.close()
    return torch.stack([(ours * theirs).sum() / theirs.square().sum() for theirs, ours in zip(*ends, strict=True)])


class Entering:
    """What enters the residuals in a pass: the change of what waits, and what was delivered."""

    def __init__(self, state, net: nn.Module) -> None:
        self.state, self.net, self.before = state, net, undelivered(state, net)

    def take(self) -> Tensor:
        """The gradient ``[numel]`` that has entered since."""
        return undelivered(self.state, self.net) - self.before + gradient(self.net).double()


class Beside(nn.Sequential):
    """Layers beside each other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self]).mean(0)


@pytest.mark.parametrize("buckets", [1, 4, 36])
@on_ranks(2)
def test_a_spike_enters_as_clipped_however_many_buckets_there_are(rank, world, buckets):
    """The gradient of one step is a hundred times as large, on one rank."""
    torch.manual_seed(0)
    net = Beside(*[nn.Linear(20, 20, bias=False) for _ in range(buckets)])
    optimizer = SGD(net.parameters(), lr=1e-4)
    ddp = {"bucket_cap_mb": 0.001} if buckets > 1 else {}
    model, state = attached(net, ddp, ratio=0.05, optimizer=optimizer, max_norm=0.01)
    for step in range(9):
        net.zero_grad()
        entering = Entering(state, net)
        (loss_of(model, rank, step) * (100 if step == 8 and rank == 0 else 1)).backward()
        entered = entering.take().norm() / 0.01
        optimizer.step()
    assert len(state.last_buckets) == buckets
    assert 0.4 < entered < 1.5, entered


@pytest.mark.parametrize("optimizer", [None, list], ids=["none", "none yet"])
@on_ranks(2)
def test_gradients_enter_as_clipped_from_the_first_pass_on_also_without_an_optimizer(rank, world, optimizer):
    net, found = Beside(*[nn.Linear(20, 20, bias=False) for _ in range(36)]), []
    ddp = {"bucket_cap_mb": 0.001, "find_unused_parameters": True}
    model, state = attached(net, ddp, ratio=0.05, max_norm=0.001, adapt_momentum=False, optimizer=optimizer)
    for step in range(2):
        net.zero_grad()
        entering = Entering(state, net)
        loss_of(model, rank, step).backward()
        found.append(float(entering.take().norm() / 0.001))
    assert max(found) < 1.5, found


@on_ranks(4)
def test_slices_of_a_nodes_mean_are_clipped_by_their_own_norms(rank, world):
    """Two nodes of two: one rank's gradient is a hundred times as large, and both slices hold half of the mean."""
    net = nn.Linear(20, 40, bias=False)
    with torch.no_grad():
        net.weight.fill_(0.1)
    optimizer = SGD(net.parameters(), lr=1e-4)
    state = attach(
        (model := DistributedDataParallel(net)), ratio=0.1, topology="hierarchical", local_world_size=2,
        optimizer=optimizer, max_norm=0.01,
    )  # fmt: skip
    for step in range(4):
        net.zero_grad()
        entering = Entering(state, net)
        (loss_of(model, rank, step) * (100 if step == 3 and rank == 0 else 1)).backward()
        first, second = entering.take().chunk(2)
        optimizer.step()
    assert math.isclose(first.norm(), second.norm(), rel_tol=0.3)
    assert 0.003 < first.norm() < 0.012, (first.norm(), second.norm())


class Turns(nn.Module):
    """Networks of which a pass uses one."""

    def __init__(self, nets: nn.ModuleList) -> None:
        super().__init__()
        self.nets = nets

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.nets[turn](x)


@on_ranks(2)
def test_two_networks_in_one_model_are_clipped_by_a_norm_of_their_own(rank, world):
    """A critic to 0.01 five times, and a generator to 1e-4 once, in turns."""
    torch.manual_seed(0)
    nets = nn.ModuleList([nn.Linear(20, 30), nn.Linear(20, 30)])
    optimizers = [SGD(net.parameters(), lr=1e-3) for net in nets]
    model, state = attached(
        Turns(nets), {"find_unused_parameters": True}, ratio=0.1, optimizer=optimizers, max_norm=[1e-2, 1e-4]
    )
    found = []
    for step in range(24):
        turn = int(step % 6 == 5)
        nets.zero_grad()
        entering = Entering(state, nets)
        model(ranks.batch(rank, step), turn).square().mean().backward()
        found.append(entering.take().norm() / (1e-2, 1e-4)[turn])
        CLIP(nets[turn].parameters(), (1e-2, 1e-4)[turn])
        optimizers[turn].step()
    assert all(0.5 < each < 1.5 for each in found[6:]), found


@on_ranks(2)
def test_a_step_whose_gradients_the_user_zeroes_loses_nothing_of_the_next_pass(rank, world):
    run = run_of(rank, lr=1e-4, ddp={}, max_norm=0.02)
    for step in range(8):
        entering = Entering(run.state, run.net)
        run.backward(step)
        if step == 6:
            run.net.zero_grad(set_to_none=False)
        else:
            entered = entering.take().norm()
        CLIP(run.net.parameters(), 0.02)
        run.step()
    assert 0.01 < entered < 0.03


@on_ranks(2)
def test_gradients_that_are_divided_before_they_are_clipped_move_as_far_as_with_ddp(rank, world):
    """By a number of tokens, in a common loop of fine-tuning: nothing is told then."""

    def treat(net: nn.Module) -> None:
        for p in net.parameters():
            p.grad /= 100 + torch.randint(20, (), generator=generator)
        CLIP(net.parameters(), 1e-4)

    generator = torch.Generator().manual_seed(0)
    assert moved(rank, 60, treat, ratio=0.3).min() > 0.6


@on_ranks(2)
def test_uncompressed_parameters_are_clipped_with_the_others(rank, world):
    """Clipped to a 200th of the norm: if they were not, they would use up the user's norm."""
    found = moved(
        rank, 60, lambda net: CLIP(net.parameters(), 5e-3), told=5e-3, ratio=0.2, dense_parameters="*.bias"
    )  # fmt: skip
    assert found[::2].min() > 0.6
    assert found.max() < 1.3


@on_ranks(2)
def test_the_first_gradients_of_a_bucket_that_is_not_compressed_are_clipped_by_the_user(rank, world):
    """Nothing is known of later buckets when the first one is exchanged."""
    net = four_layers()
    optimizer = SGD(net.parameters(), lr=1e-4)
    ddp = {"bucket_cap_mb": 0.001, "find_unused_parameters": True}
    model, state = attached(net, ddp, ratio=0.05, dense_parameters="3.*", optimizer=optimizer)
    state.optimizers.clipping.first = 0.02  # as a Trainer tells
    loss_of(model, rank, 0).backward()
    assert gradient(net[3]).norm() > 0.05, gradient(net[3]).norm()
    state.optimizers.clip(optimizer, 0.02, lambda limit: CLIP(net.parameters(), limit))
    assert gradient(net).norm() < 0.0201


@on_ranks(2)
def test_a_part_that_is_not_clipped_is_not_clipped_in_the_exchange(rank, world):
    """The encoder's gradients are clipped, the head's are not; with both in one bucket or apart."""

    def make(net):
        return [SGD(net[:3].parameters(), lr=1e-3), SGD(net[3:].parameters(), lr=1e-3)]

    for ddp in ({}, {"bucket_cap_mb": 0.001}):
        found = moved(
            rank, 60, lambda net: CLIP(net[:3].parameters(), 0.05), make, ddp, told=[0.05, None], ratio=0.2
        )  # fmt: skip
        assert found[6:].min() > 0.8
        assert 0.4 < found[:6].min() <= found[:6].max() < 1.3, found


@on_ranks(2)
def test_clipping_a_second_time_what_is_delivered_costs_agreeing_gradients_half_of_their_movement(rank, world):
    ends = []
    for clips, told in ((True, None), (True, 0.01), (False, 0.01)):
        net = four_layers()
        begin, optimizer = ranks.weights(net), SGD(net.parameters(), lr=1e-2)
        model = DistributedDataParallel(net)
        state = None if told is None else attach(model, ratio=0.05, optimizer=optimizer, max_norm=told)
        for _ in range(80):
            net.zero_grad()
            loss_of(model, rank, 0).backward()
            if clips:
                CLIP(net.parameters(), 0.01)
            optimizer.step()
        ends.append(ranks.weights(net) - begin)
        if state is not None:
            state.close()
    dense, twice, once = ends
    assert 0.3 < dense @ twice / dense.square().sum() < 0.75
    assert 0.8 < dense @ once / dense.square().sum() < 1.1


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_bfloat16_gradients_are_clipped_as_told(rank, world, default):
    """Also where that is the default dtype, as in Lightning's bf16-true with manual optimization."""
    net = four_layers().bfloat16()
    optimizer = SGD(net.parameters(), lr=1e-4)
    model, state = attached(net, ratio=0.05, wire="bf16", optimizer=optimizer, max_norm=0.02)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for step in range(4):
            net.zero_grad()
            entering = Entering(state, net)
            model(ranks.batch(rank, step).bfloat16()).square().mean().backward()
            entered = entering.take().norm()
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert 0.01 < entered < 0.03


def test_the_limit_may_change_from_pass_to_pass_and_be_given_up():
    bucket, clipping, slopes = Bucket([nn.Parameter(torch.ones(8))]), Clipping(1), []
    numbers = dict.fromkeys(bucket, 0)
    for limits in ([2.0], [4.0], (), [4.0], [5.0]):
        clipping.begin_pass(limits, numbers)
        if limits:
            rows, _ = clipping.of(bucket, torch.device("cpu"))
            slopes.append(float(rows[0, SLOPE]))
            rows[:, ENTERED] = rows[:, DELIVERED] = 3.0
            clipping.fold([bucket])
    assert slopes == pytest.approx([1 / 2, 1 / 4, 1 / 4, 1 / 5])


def test_an_optimizer_at_the_address_of_an_earlier_one_is_not_clipped_to_its_norm():
    p, estimate = nn.Parameter(torch.ones(8)), Clipping(1)
    clipping = UserClipping(None, estimate, False, WarnOnce(None, 0))
    for norm in (2.0, 1.0):
        optimizer = SGD([p], lr=0.1)
        clipping.find([optimizer], {p: p})
        clipping.begin_pass([optimizer])
        assert not estimate.limits, norm
        clipping.clip(optimizer, norm, torch.tensor)
        del optimizer


def test_a_norm_for_each_optimizer_clips_nothing_until_they_exist():
    p, estimate = nn.Parameter(torch.ones(8)), Clipping(1)
    clipping = UserClipping([1.0, None], estimate, False, WarnOnce(None, 0))
    for optimizers, slope in (([], 0.0), ([SGD([p], lr=0.1), SGD([nn.Parameter(torch.ones(8))], lr=0.1)], 1.0)):
        clipping.find(optimizers, {p: p})
        clipping.begin_pass(optimizers)
        rows, _ = estimate.of(Bucket([p]), torch.device("cpu"))
        assert float(rows[0, SLOPE]) == slope


@pytest.mark.parametrize("scaled", [False, True])
@on_ranks(2)
def test_a_loss_scale_changes_nothing_about_clipping(rank, world, scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    run = run_of(rank, lr=1e-3, scaler=scaler, max_norm=0.05)
    for step in range(9):
        run.net.zero_grad()
        entering = Entering(run.state, run.net)
        scaler.scale(loss_of(run.model, rank, step) * (100 if step == 8 else 1)).backward()
        scaler.unscale_(run.optimizer)
        entered = entering.take().norm()
        scaler.step(run.optimizer)
        scaler.update()
    assert 0.025 < entered < 0.075


@on_ranks(2)
def test_nothing_is_measured_after_steps_if_a_norm_was_told_however_many_optimizers_there_are(rank, world):
    net = four_layers()
    optimizers = [SGD([p], lr=1e-3) for p in net.parameters()]
    model, _ = attached(net, ratio=0.05, optimizer=optimizers, max_norm=0.02)
    loss_of(model, rank, 0).backward()
    with mock.patch.object(torch, "_foreach_norm", side_effect=AssertionError):
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(2)
def test_where_everything_is_sent_the_users_clipping_alone_acts(rank, world):
    found = moved(rank, 5, lambda net: CLIP(net.parameters(), 1e-3), told=1e-3, ratio=1.0, wire="fp32")
    torch.testing.assert_close(found, torch.ones(8), rtol=1e-4, atol=0)


# -------------------------------------------------------------------------------------------- the hint


def by_norm(net: nn.Module) -> None:
    CLIP(net.parameters(), 1e-2)


def by_value(net: nn.Module) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 1e-3)


@pytest.mark.parametrize(
    ("treat", "options", "hinted"),
    [
        (by_norm, {}, True),
        (by_norm, {"max_norm": 1e-2}, False),
        (by_norm, {"ratio": 1.0, "wire": "fp32"}, False),
        (by_value, {}, False),
        (nn.Module.train, {}, False),
    ],
)
@on_ranks(2)
def test_clipping_that_was_not_told_is_named_once_if_gradients_wait(rank, world, treat, options, hinted):
    with log() as words:
        run = run_of(rank, lr=1e-3, ddp={}, **options)
        for step in range(READ[0] + 2):
            run.backward(step % 7)
            treat(run.net)
            run.step()
        measured = mock.patch.object(torch.nn.utils, "get_total_norm", side_effect=AssertionError)
        with measured if hinted else nullcontext():
            run.backward(0)
            run.step()
    found = [each for each in words if "pass max_norm=0.01" in each]
    assert len(found) == (hinted and rank == 0)


@on_ranks(2)
def test_gradients_that_have_one_norm_by_themselves_are_not_taken_for_clipped(rank, world):
    net, batch = nn.Linear(50, 2), torch.ones(1, 50)
    optimizer, total_norm = SGD(net.parameters(), lr=1e-3), torch.nn.utils.get_total_norm
    with log() as words, mock.patch.object(torch.nn.utils, "get_total_norm", wraps=total_norm) as measured:
        model, _ = attached(net, ratio=1.0, wire="bf16", optimizer=optimizer)
        for _ in range(READ[0] + 2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    assert not any("are clipped" in each for each in words)
    assert measured.call_count == 2 * READ[0] * (rank == 0), "once they are known, no more are measured"


@pytest.mark.parametrize(
    ("max_norm", "error"),
    [
        ("1", TypeError),
        (True, TypeError),
        (0, ValueError),
        ([1.0, -1.0], ValueError),
        ([1.0, 2.0], ValueError),
        pytest.param(10**400, ValueError, id="10^400"),
    ],
)
@on_ranks(2)
def test_norms_that_cannot_be_are_refused(rank, world, max_norm, error):
    net = four_layers()
    with pytest.raises(error, match="max_norm="):
        attached(net, ratio=0.1, optimizer=[SGD(net.parameters())], max_norm=max_norm)
    with pytest.raises(ValueError, match="pass optimizer="):
        attached(net, ratio=0.1, max_norm=[1.0])


# -------------------------------------------------------------------------------------------- the strategies


class Clipped(Module):
    """The gradients of one batch are a hundred times as large."""

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=1e-3)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (100 if self.global_step == 6 else 1)


class ByHand(Clipped):
    """Clips in its own loop."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()


def fitted(rank: int, world: int, module: Module, **options) -> tuple[list[float], list[tuple[float, ...]]]:
    """What enters by steps, and the limits that the exchange knows."""
    entered, limits, before = [], [], []

    def begin(trainer, *_):
        before[:] = [undelivered(trainer.strategy.topk_state, trainer.lightning_module)]

    def end(trainer, *_):
        state = trainer.strategy.topk_state
        left, delivered = undelivered(state, trainer.lightning_module), gradient(trainer.lightning_module)
        entered.append(float((left - before[0] + delivered.double()).norm()))
        limits.append(tuple(state.optimizers.clipping.estimate.limits))

    callback = LambdaCallback(on_train_batch_start=begin, on_train_batch_end=end)
    fit(rank, world, module, TopKStrategy(ratio=0.05), [callback], monitor=False, max_steps=8, **options)
    return entered, limits


@on_ranks(2)
def test_a_trainer_tells_of_its_clipping_and_leaves_out_what_the_exchange_has_done(rank, world):
    entered, limits = fitted(rank, world, Clipped(), gradient_clip_val=0.05)
    assert limits == [(0.05, math.inf)] * 8
    assert all(0.02 < each < 0.08 for each in entered), entered


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@on_ranks(2)
def test_manual_optimization_tells_of_its_clipping_from_the_second_pass_on(rank, world, precision):
    """With bf16-true, bfloat16 is the default dtype in training_step."""
    entered, limits = fitted(rank, world, ByHand(), precision=precision)
    assert limits == [()] + [(0.05, math.inf)] * 7
    assert all(0.02 < each < 0.08 for each in entered[1:]), entered


class OwnRule(Clipped):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        CLIP([*self.parameters()][:1], gradient_clip_val)


class OwnPrecision(Precision):
    def clip_grad_by_norm(self, optimizer, clip_val):
        CLIP(self.main_params(optimizer), clip_val, norm_type=1.0)


@pytest.mark.parametrize("rule", ["by value", "of the module", "of the precision plugin"])
@on_ranks(2)
def test_clipping_by_value_or_by_a_users_own_rule_is_not_told(rank, world, rule):
    module, options = OwnRule() if rule == "of the module" else Clipped(), {}
    if rule == "of the precision plugin":
        options["plugins"] = [OwnPrecision()]
    algorithm = "value" if rule == "by value" else "norm"
    _, limits = fitted(rank, world, module, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm, **options)
    assert limits == [()] * 8


@on_ranks(2)
def test_a_trainers_agreeing_gradients_move_as_far_as_with_ddp(rank, world):
    """Clipping acts in every step; what is delivered is a sum, and is not clipped again."""

    class Same(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step((torch.ones(1, 12) * (self.global_rank + 1),), 0)

    ends = []
    for strategy in ("ddp", TopKStrategy(ratio=0.05)):
        module = Same(lambda parameters: SGD(parameters, lr=1e-3))
        begin = ranks.weights(module)
        if strategy == "ddp":
            from lightning.pytorch.strategies import DDPStrategy

            strategy = DDPStrategy()
        fit(rank, world, module, strategy, monitor=False, max_steps=60, max_epochs=60, gradient_clip_val=0.01)
        ends.append(ranks.weights(module) - begin)
    dense, ours = ends
    assert 0.8 < dense @ ours / dense.square().sum() < 1.1


def of_fabric(rank: int, world: int, lr: float = 1e-3, kind: type[Optimizer] = SGD):
    strategy = fabric.TopKStrategy(ratio=0.05)
    lite = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[InThisProcess(rank, world)])
    lite.launch()
    net = four_layers()
    model, optimizer = lite.setup(net, kind(net.parameters(), lr=lr))
    return lite, net, model, optimizer, strategy.state_of(model)


@on_ranks(2)
def test_fabric_tells_of_its_clipping_and_returns_the_norm_until_it_is_given_up(rank, world):
    lite, net, model, optimizer, state = of_fabric(rank, world)
    entered, limits, norms = [], [], []
    for step in range(8):
        optimizer.zero_grad()
        entering = Entering(state, net)
        lite.backward(loss_of(model, rank, step))
        entered.append(float(entering.take().norm()))
        limits.append(tuple(state.optimizers.clipping.estimate.limits))
        if step < 5:
            before = gradient(net).norm()
            norms.append((lite.clip_gradients(model, optimizer, max_norm=0.02), before, gradient(net).norm()))
        optimizer.step()
    assert limits == [()] + [(0.02, math.inf)] * 5 + [()] * 2
    assert all(0.01 < each < 0.03 for each in entered[1:6]), entered
    assert min(entered[6:]) > 0.1
    assert all(torch.isclose(norm, before, rtol=1e-4) for norm, before, _ in norms)
    assert norms[0][2] < 0.0201
    assert all(torch.isclose(after, before) for _, before, after in norms[1:]), "left out"


class OwnAdamW(AdamW):
    def step(self, closure=None):
        return super().step(closure)


@on_ranks(2)
def test_a_subclass_whose_step_calls_its_base_classs_is_clipped_in_every_pass(rank, world):
    """Hooks are called in both, once an optimizer of the base class was made."""
    AdamW([nn.Parameter(torch.ones(1))])
    lite, _, model, optimizer, state = of_fabric(rank, world, kind=OwnAdamW)
    for step in range(4):
        optimizer.zero_grad()
        lite.backward(loss_of(model, rank, step))
        lite.clip_gradients(model, optimizer, max_norm=0.02)
        optimizer.step()
    assert state.optimizers.clipping.estimate.limits == [0.02, math.inf]


@pytest.mark.parametrize("again", [False, True])
@on_ranks(2)
def test_fabrics_gradients_that_are_divided_before_they_are_clipped_enter_as_large_as_they_should(rank, world, again):
    """Divided by 100, a gradient is clipped to 0.02 if it is above 2; also if all is set up again, as in notebooks."""
    lite, net, model, optimizer, state = of_fabric(rank, world)
    if again:
        model, optimizer = lite.setup(net, optimizer.optimizer)
        state = lite.strategy.state_of(model)
    for step in range(6):
        optimizer.zero_grad()
        entering = Entering(state, net)
        lite.backward(loss_of(model, rank, step) * 100)
        entered = entering.take().norm()
        for p in net.parameters():
            p.grad /= 100
        lite.clip_gradients(model, optimizer, max_norm=0.02)
        optimizer.step()
    assert 1.0 < entered < 3.0


@on_ranks(2)
def test_what_waits_for_adam_grows_no_more_than_for_sgd_while_the_rate_falls(rank, world):
    for kind in (SGD, AdamW):
        net, seen = four_layers(), []
        optimizer = kind(net.parameters(), lr=1e-4)
        model, state = attached(net, {"bucket_cap_mb": 0.001}, ratio=0.05, optimizer=optimizer)
        scheduler = LambdaLR(optimizer, lambda step: 0.8**step)
        for step in range(40):
            ranks.train(model, rank, [step % 5], optimizer)
            scheduler.step()
            seen.append(gradient(net).abs().max())
        assert max(seen[-5:]) < 2 * max(seen[10:20])
        state.close()
