"""What dense training would apply: residuals in units of the learning rate, and the user's clipping, on real ranks."""

import math

import pytest
import ranks
import torch
from groups import on_ranks
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import LambdaCallback
from ranks import attach, attached, four_layers, gradient, loss_of, mean_over_ranks, shared, undelivered
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from trainers import InThisProcess, Module, fit

from lightning_topk import TopKStrategy, fabric
from lightning_topk.runtime.applied import Clipping, Rates, Unit

WARM = [0.0, 0.01, 0.1, 1.0, 1.0, 0.5, 0.005, 1.0]
"""Factors of the rate: a warm-up from 0, a decay, and a restart."""


def run_of(rank: int, groups: int = 1, lr: float = 0.05, **options) -> ranks.Run:
    """A run of four layers, by default each in a bucket of its own."""
    net = four_layers()
    parts = [net] if groups == 1 else [net[:2], net[2:]]
    optimizer = SGD([{"params": part.parameters()} for part in parts], lr=lr)
    ddp = options.pop("ddp", {"bucket_cap_mb": 0.001})
    model, state = attached(net, ddp, **{"ratio": 0.05, **options}, optimizer=optimizer)
    return ranks.Run(rank, four_layers(), net, model, state, optimizer)


def schedule(run: ranks.Run, *factors) -> LambdaLR:
    return LambdaLR(run.optimizer, [lambda step, own=own: own[min(step, len(own) - 1)] for own in factors])


def whole_at_times(step: int) -> float:
    return 1.0 if step % 3 == 2 else 0.05


@pytest.mark.parametrize(
    ("schedules", "options"),
    [(1, {}), (1, {"ddp": {}}), (2, {"ddp": {}}), (2, {"ddp": {"static_graph": True}}),
     (1, {"ratio": whole_at_times, "wire": "fp32"}), (1, {"ratio": whole_at_times}), (1, {"ratio": 1.0})],
)  # fmt: skip
@on_ranks(3)
def test_each_gradient_counts_at_the_rate_of_its_step(rank, world, schedules, options):
    """Also if groups in one bucket have schedules of their own, if the first rate is 0, and if every entry is sent."""
    run = run_of(rank, schedules, **options)
    scheduler = schedule(run, *[WARM, [1.0, 1.0, 0.3, 0.3, 0.2, 0.1, 0.1, 1.0]][:schedules])
    for step in range(len(WARM)):
        run.backward(step)
        first, waits = run.rates() == 0, run.own() - gradient(run.net)
        run.step()
        scheduler.step()  # what waits of a step at rate 0 counts at the next one
        run.computed[-1] = run.computed[-1] + torch.where(first, run.rates() * waits, 0.0)
    _, left = run.check(applied=True, rtol=1e-4)
    assert left.any()


@on_ranks(2)
def test_parameters_that_change_their_group_count_at_its_rate(rank, world):
    run = run_of(rank, groups=2)
    one, other = run.optimizer.param_groups
    other["lr"] = 0.01
    for step in range(6):
        if step == 3:
            one["params"], other["params"] = other["params"], one["params"]
        run.backward(step)
        run.step()
    run.check(applied=True, rtol=1e-4)


@on_ranks(2)
def test_a_rate_that_is_set_after_backward_counts_from_the_next_step_on(rank, world):
    """At first the optimizer has the rate that the warm-up leads to."""
    run = run_of(rank, lr=1.0)
    for step, rate in enumerate([0.01, 0.02, 0.02, 0.02]):
        run.backward(step)
        run.optimizer.param_groups[0]["lr"] = rate
        if step == 1:
            known = run.state.optimizers.rates.now
        run.step()
    assert known == (0.01,)
    assert {unit.rate for unit in run.state.residuals.units(run.state.optimizers.rates).values()} == {0.02}


@on_ranks(2)
def test_a_run_that_resumes_at_another_rate_delivers_what_waited_at_its_own(rank, world):
    run = run_of(rank)
    for step in range(3):
        run.backward(step)
        run.step()
    entry = shared(run.state.state_dict())
    assert {tuple(unit) for unit in entry["units"].values()} == {("SGD", 0.05)}
    waiting = undelivered(run.state, run.net)
    run.state.close()
    for kind, factor in (("SGD", 0.1), ("AdamW", 1.0)):  # rates of different optimizers do not compare
        optimizer = {"SGD": SGD, "AdamW": AdamW}[kind](run.net.parameters(), lr=0.5)
        state = attach(run.model, ratio=1.0, wire="fp32", optimizer=optimizer)
        state.load_state_dict(entry)
        run.backward(5)
        torch.testing.assert_close(gradient(run.net).double(), run.own() + factor * waiting, atol=1e-6, rtol=1e-4)
        state.close()


@on_ranks(2)
def test_rates_before_a_checkpoint_was_loaded_do_not_count(rank, world):
    """The learning rate finder steps at large rates, and then loads a checkpoint from before."""
    net = four_layers()
    optimizer = AdamW(net.parameters(), lr=1.0)
    model, state = attached(net, ratio=0.05, optimizer=optimizer)
    before = shared(state.state_dict())
    ranks.train(model, rank, range(2), optimizer)
    state.load_state_dict(before)
    optimizer.param_groups[0]["lr"] = 1e-3
    ranks.train(model, rank, range(3), optimizer)
    assert {unit.rate for unit in state.residuals.units(state.optimizers.rates).values()} == {1e-3}


@on_ranks(2)
def test_a_checkpoint_without_units_resumes_with_gradients(rank, world):
    run = run_of(rank)
    run.backward(0)
    entry = shared(run.state.state_dict())
    del entry["units"]
    waiting = undelivered(run.state, run.net)
    run.optimizer.param_groups[0]["lr"] = 0.001
    run.state.close()
    state = attach(run.model, ratio=1.0, wire="fp32", optimizer=run.optimizer)
    state.load_state_dict(entry)
    run.backward(1)
    torch.testing.assert_close(gradient(run.net).double(), run.own() + waiting, atol=1e-6, rtol=1e-4)


def clips(run: ranks.Run, step: int, treat) -> torch.Tensor:
    """Clips of the next pass by bucket, after a step whose gradients are treated."""
    run.backward(step)
    treat(step, [*run.net.parameters()])
    run.optimizer.step()
    run.state.begin_pass()
    several = run.state.last_buckets
    return torch.stack([run.state.optimizers.clipping.of(bucket, torch.device("cpu")) for bucket in several])


def halved(step, parameters):
    for p in parameters:
        p.grad /= 2


def divided_by_tokens(step, parameters):
    for p in parameters:
        p.grad /= 100 + 7 * step


TREATED = {
    "nothing": (lambda step, parameters: None, False),
    "halved": (halved, False),
    "divided by varying counts": (divided_by_tokens, False),
    "clipped by value": (lambda step, parameters: torch.nn.utils.clip_grad_value_(parameters, 0.05), False),
    "clipped": (lambda step, parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e-2), True),
}


@pytest.mark.parametrize("name", TREATED)
@on_ranks(2)
def test_only_clipping_of_norms_counts_as_clipping(rank, world, name):
    """What users do to gradients between backward and step must not shrink what they get."""
    treat, clipped = TREATED[name]
    run = run_of(rank, lr=1e-3)
    for step in range(7):
        found = clips(run, step, treat)
    assert (found > 0).all().item() is clipped
    if clipped:
        assert math.isclose(run.state.optimizers.clipping.limit[0], 1e-2, rel_tol=1e-3)


@pytest.mark.parametrize("scaled", [False, True])
@on_ranks(2)
def test_a_spike_enters_the_residual_as_clipped_as_dense_training_would_apply_it(rank, world, scaled):
    """The gradient of one step is a hundred times as large. All residuals take in about the norm of clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    run = run_of(rank, lr=1e-3, scaler=scaler)
    for step in range(9):
        before = undelivered(run.state, run.net)
        run.net.zero_grad()
        scaler.scale(loss_of(run.model, rank, step) * (100 if step == 8 else 1)).backward()
        scaler.unscale_(run.optimizer)
        delivered = gradient(run.net).double()
        norm = float(torch.nn.utils.clip_grad_norm_(run.net.parameters(), 0.05))
        scaler.step(run.optimizer)
        scaler.update()
        entered = (undelivered(run.state, run.net) - before + delivered).norm()
    assert norm > 0.05, "clipping acts"
    own = mean_over_ranks(ranks.local_gradient(run.alone, run.net, rank, 8)).norm() * 100
    assert own > 10
    assert 0.02 < entered < 0.05 * 4**0.5 * 1.5, "of four buckets, each clipped by an estimate of its own"


def test_rates_of_groups_without_one_change_nothing():
    p, q = torch.ones(2), torch.ones(3)
    rates = Rates({p: 0}, ("SGD",), (0.0,), (0.1,))
    assert rates.of(p) == Unit("SGD", 0.1), "a rate of 0 applies nothing"
    assert rates.of(q).over(Unit("SGD", 0.1)) == 0
    assert Unit("SGD", 1.0).over(Unit("AdamW", 1.0)) == 0


def test_a_pass_that_is_not_finite_leaves_the_estimates():
    clipping, bucket, optimizer = Clipping(), (torch.nn.Parameter(torch.ones(3)),), SGD([torch.ones(1)], lr=0.1)
    for norms in ([1.0, 1.0], [math.inf, math.nan], [1.0, 1.0]):
        clipping.begin_pass()
        assert clipping.of(bucket, torch.device("cpu")).isfinite().all()
        clipping.fold([bucket], [torch.tensor([norms[0], *norms])])
        clipping.after_step(optimizer, lambda bucket: bucket)


class Turns(nn.Module):
    """Networks of which a pass uses one."""

    def __init__(self, nets: nn.ModuleList) -> None:
        super().__init__()
        self.nets = nets

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        return self.nets[turn](x)


class Clipped(Module):
    """The gradients of one batch are a hundred times as large."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: (step + 1) / 4), "interval": "step"}]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (100 if self.global_step == 6 else 1)


@on_ranks(2)
def test_a_trainers_clipping_and_schedule_are_found(rank, world):
    found, entered = [], []

    def look(trainer, *_):
        state = trainer.strategy.topk_state
        found.append((state.optimizers.clipping.limit, state.optimizers.rates.now))
        entered.append(undelivered(state, trainer.lightning_module).norm())

    strategy, callback = TopKStrategy(ratio=0.05), LambdaCallback(on_train_batch_end=look)
    fit(rank, world, Clipped(), strategy, [callback], monitor=False, max_steps=8, gradient_clip_val=0.05)
    norm, _, evidence, _ = found[-1][0]
    assert math.isclose(norm, 0.05, rel_tol=1e-2)
    assert evidence > 0
    assert [rates[0] for _, rates in found] == pytest.approx([1e-3 * (step + 1) / 4 for step in range(8)])
    assert entered[6] < 2 * entered[5] + 0.2, "the spike was clipped"


@on_ranks(2)
def test_clipping_of_two_networks_in_turn_is_found(rank, world):
    """Each optimizer zeroes and clips its own gradients; the other network's wait meanwhile."""
    nets = nn.ModuleList([nn.Linear(20, 30), nn.Linear(20, 30)])
    optimizers = [SGD(net.parameters(), lr=1e-3) for net in nets]
    model, state = attached(Turns(nets), {"find_unused_parameters": True}, ratio=0.1, optimizer=optimizers)
    for step in range(12):
        net, optimizer = nets[step % 2], optimizers[step % 2]
        optimizer.zero_grad()
        model(ranks.batch(rank, step), step % 2).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
        optimizer.step()
    state.begin_pass()
    norm, _, evidence, _ = state.optimizers.clipping.limit
    assert math.isclose(norm, 1e-2, rel_tol=1e-2)
    assert evidence > 0


@on_ranks(2)
def test_fabrics_clipping_is_found(rank, world):
    strategy = fabric.TopKStrategy(ratio=0.05)
    lite = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[InThisProcess(rank, world)])
    lite.launch()
    net = four_layers()
    model, optimizer = lite.setup(net, SGD(net.parameters(), lr=1e-3))
    for step in range(5):
        optimizer.zero_grad()
        lite.backward(loss_of(model, rank, step))
        lite.clip_gradients(model, optimizer, max_norm=0.02)
        optimizer.step()
    model(ranks.batch(rank, 5)).sum().backward()
    norm, _, evidence, _ = strategy.state_of(model).optimizers.clipping.limit
    assert math.isclose(norm, 0.02, rel_tol=1e-2)
    assert evidence > 0


@on_ranks(2)
def test_clipping_that_the_user_gives_up_ends(rank, world):
    """The exchange keeps delivered norms below the user's; without slack it would never see that there is none."""
    run, found = run_of(rank, lr=1e-3), []
    for step in range(100):
        if step < 6:
            clips(run, step, TREATED["clipped"][0])
        else:
            clips(run, step % 6, TREATED["nothing"][0])
        found.append(gradient(run.net).norm())
    assert found[6] < 0.05
    assert found[-1] > 0.5 * run.own().norm()


@on_ranks(2)
def test_what_waits_for_adam_grows_little_while_the_rate_falls(rank, world):
    """It would spoil Adam's second moment; what waits for SGD grows, as dense training has applied it."""
    grown = []
    for kind in (SGD, AdamW):
        net, seen = four_layers(), []
        optimizer = kind(net.parameters(), lr=1e-4)
        model, state = attached(net, {"bucket_cap_mb": 0.001}, ratio=0.05, optimizer=optimizer)
        scheduler = CosineAnnealingLR(optimizer, 40)
        for step in range(40):
            ranks.train(model, rank, [step % 5], optimizer)
            scheduler.step()
            seen.append(gradient(net).abs().max())
        grown.append(max(seen[-5:]) / max(seen[10:20]))
        state.close()
    assert grown[0] > 30
    assert grown[1] < 15


@on_ranks(2)
def test_a_group_without_a_rate_keeps_its_gradients_while_others_warm_up(rank, world):
    """A frozen backbone in the same bucket, and one that no known optimizer steps."""
    for known in (True, False):
        net, seen = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 40)), []
        groups = [{"params": net[1].parameters(), "lr": 1e-6}]
        if known:
            groups.append({"params": net[0].parameters(), "lr": 0.0})
        optimizer = SGD(groups, lr=0.1)
        model, state = attached(net, ratio=0.1, optimizer=optimizer)
        for step, rate in enumerate([1e-6, 1e-5, 1e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-5, 1e-5, 1e-5]):
            optimizer.param_groups[0]["lr"] = rate
            if known and step >= 5:
                optimizer.param_groups[1]["lr"] = 1e-3
            ranks.train(model, rank, [step % 3], optimizer)
            seen.append(net[0].weight.grad.abs().max().item())
        assert max(seen[3:]) < 10 * max(seen[:3]) + 0.2
        state.close()
