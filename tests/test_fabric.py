"""The Fabric strategy."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from ranks import (
    beside,
    every_rank,
    four_layers,
    local_gradient,
    loss_of,
    mean_over_ranks,
    undelivered,
    without,
)
from torch import nn
from trainers import InThisProcess

from lightning_topk.config import TopKConfig
from lightning_topk.lightning.fabric import TopKStrategy


def fabric_of(rank: int, world: int, **settings) -> Fabric:
    warnings.simplefilter("ignore")
    plugins = settings.pop("plugins", None)
    strategy = TopKStrategy(cluster_environment=InThisProcess(rank, world), bucket_cap_mb=0.001, **settings)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=plugins)
    fabric.launch()
    return fabric


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def nets(fabric: Fabric, count: int = 2) -> list[tuple]:
    found = []
    for _ in range(count):
        net = four_layers()
        found.append(fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    return found


def train(fabric: Fabric, pairs: list[tuple], rank: int, steps: range) -> None:
    for step in steps:
        for number, (model, optimizer) in enumerate(pairs):
            optimizer.zero_grad()
            with fabric.no_backward_sync(model):
                fabric.backward(loss_of(model, rank, 1000 * number + 2 * step))
            fabric.backward(loss_of(model, rank, 1000 * number + 2 * step + 1))
            optimizer.step()


def dense(rank: int, world: int) -> None:
    """With everything sent, two modules learn what one process with the mean gradient learns."""
    fabric = fabric_of(rank, world, ratio=1.0, wire="fp32")
    pairs = nets(fabric)
    train(fabric, pairs, rank, range(4))
    ends = []
    for number in range(2):
        alone = four_layers()
        for step in range(4):
            alone.zero_grad()
            for part in (0, 1):
                for worker in range(world):
                    (loss_of(alone, worker, 1000 * number + 2 * step + part) / world).backward()
            with torch.no_grad():
                for p in alone.parameters():
                    p -= 0.1 * p.grad
        ends.append(flat(alone))
    exchanged = [state.residuals.progress.steps for state in fabric.strategy.topk_states]
    for (model, _), end in zip(pairs, ends, strict=True):
        torch.testing.assert_close(flat(model), end, rtol=1e-5, atol=1e-6)
    assert exchanged == [4, 4]  # once each step, accumulated gradients


def test_several_fabric_modules_learn_as_with_ddp_and_accumulate(groups):
    groups(2).run(dense)


def saved_and_loaded(rank: int, world: int, folder: str) -> None:
    """As Fabric saves anything that has a state: each module's residuals under a key of the user's."""
    path = Path(folder) / "fabric.ckpt"

    def made() -> tuple[Fabric, list[tuple], dict]:
        fabric = fabric_of(rank, world, ratio=0.05)
        pairs = nets(fabric)
        state = {}
        for number, (model, optimizer) in enumerate(pairs):
            state |= {
                f"net{number}": model,
                f"opt{number}": optimizer,
                f"topk{number}": fabric.strategy.state_of(model),
            }
        return fabric, pairs, state

    def left(fabric: Fabric, pairs: list[tuple]) -> list[torch.Tensor]:
        found = []
        for model, _ in pairs:
            kept = fabric.strategy.state_of(model).residuals.held()
            found.append(torch.cat([kept[p][0] + world * kept[p][1] for p in model.parameters()]))
        return [mean_over_ranks(each) for each in found]

    fabric, pairs, state = made()
    train(fabric, pairs, rank, range(4))
    fabric.save(path, state)
    fabric.barrier()
    saved = left(fabric, pairs)
    fabric, pairs, state = made()
    fabric.load(path, state)
    loaded = left(fabric, pairs)
    train(fabric, pairs, rank, range(4, 6))
    rows = every_rank(torch.stack([flat(model) for model, _ in pairs]))
    assert all(each.any() for each in saved)
    torch.testing.assert_close(loaded, saved, rtol=1e-5, atol=1e-6)
    assert torch.equal(rows[0], rows[1])
    assert [each.residuals.progress.steps for each in fabric.strategy.topk_states] == [6, 6]


def test_residuals_are_saved_and_loaded_by_the_users_keys(groups, tmp_path):
    groups(2).run(saved_and_loaded, str(tmp_path))


def set_up_anew(rank: int, world: int) -> None:
    """As in cross-validation: each model and optimizer takes the place of the last."""
    fabric = fabric_of(rank, world, ratio=0.05)
    optimizers = weakref.WeakSet()
    for _ in range(4):
        ((model, optimizer),) = nets(fabric, 1)
        optimizers.add(optimizer.optimizer)
        train(fabric, [(model, optimizer)], rank, range(2))
    gc.collect()
    assert len(fabric.strategy.topk_states) <= 2, "the last, and the one that its variable held meanwhile"
    for _ in range(3):
        optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.1))
        optimizers.add(optimizer.optimizer)
        train(fabric, [(model, optimizer)], rank, range(2))
    gc.collect()
    assert len(optimizers) == 1


def test_modules_and_optimizers_that_are_not_used_any_more_are_let_go(groups):
    groups(2).run(set_up_anew)


def set_up_again(rank: int, world: int) -> None:
    """Three times the same module, and then compiled."""
    fabric = fabric_of(rank, world, ratio=0.05)
    net, open_groups, kept = nn.Linear(20, 20), [], []
    for turn in range(3):
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = fabric.setup(net, sgd)
        kept.append(model)  # also of the turns before, as a notebook does
        state = fabric.strategy.state_of(model)
        assert state.residuals.progress.steps == 2 * turn, "residuals are those of the turn before"
        assert fabric.strategy.topk_states == [state]
        train(fabric, [(model, optimizer)], rank, range(2))
        open_groups.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(open_groups)) == 1, open_groups
    assert fabric.strategy.state_of(fabric.setup(torch.compile(net, backend="eager"))).residuals is state.residuals
    with pytest.raises(KeyError, match="this Linear was not set up with this strategy"):
        fabric.strategy.state_of(nn.Linear(2, 2))


def test_a_module_that_is_set_up_again_keeps_its_residuals_and_no_groups_stay_open(groups):
    groups(2).run(set_up_again)


def launched(fabric: Fabric) -> None:
    net = nn.Linear(20, 20)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.randn(4, 20)).sum())
    optimizer.step()


def test_a_module_without_processes_is_set_up_as_by_ddp_strategy():
    strategy = TopKStrategy()
    strategy.parallel_devices = [torch.device("cpu")]
    with mock.patch("lightning.fabric.strategies.ddp.DistributedDataParallel") as ddp:
        strategy.setup_module(mock.Mock())
    assert ddp.called
    assert strategy.topk_states == []


@pytest.mark.process
def test_fabric_can_spawn_its_processes():
    strategy = TopKStrategy(ratio=0.1, start_method="spawn")
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(launched)


def scaled(rank: int, world: int) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    fabric = fabric_of(rank, world, ratio=0.05, plugins=plugin)
    ((model, optimizer),) = nets(fabric, 1)
    (state,) = fabric.strategy.topk_states
    train(fabric, [(model, optimizer)], rank, range(2))

    def look():
        return flat(model), undelivered(state, model.module)

    before, lost = look(), beside(state, "1.weight") if rank == 1 else []
    own = sum(local_gradient(four_layers(), model.module, rank, step) for step in (4, 5))
    own = mean_over_ranks(without(own, model.module, lost))
    hook = model.module[1].weight.register_hook(lambda grad: grad * torch.inf) if rank == 1 else None
    train(fabric, [(model, optimizer)], rank, range(2, 3))
    if hook:
        hook.remove()
    after = look()
    train(fabric, [(model, optimizer)], rank, range(3, 4))
    last = look()
    assert torch.equal(before[0], after[0])
    torch.testing.assert_close(after[1], before[1] + own, atol=1e-3, rtol=0)  # computed in float16
    assert not torch.equal(last[0], after[0])
    assert state.nonfinite_steps == 1


def test_a_scalers_skipped_step_is_undone(groups):
    groups(2).run(scaled)


def test_fabric_refuses_unknown_arguments_and_momentum_twice(groups):
    with pytest.raises(TypeError, match=r"unknown argument ratoi=0\.1; did you mean 'ratio'"):
        TopKStrategy(ratoi=0.1)
    assert TopKStrategy(TopKConfig(saving=20)).config == TopKStrategy(saving=20).config
    with pytest.raises(ValueError, match="either config or the settings"):
        TopKStrategy(TopKConfig(saving=20), wire="fp32")
    groups(2).run(momentum_twice)


def momentum_twice(rank: int, world: int) -> None:
    fabric = fabric_of(rank, world, ratio=0.1, momentum=0.9)
    net = four_layers()
    with pytest.raises(ValueError, match=r"SGD has momentum 0\.5 of its own"):
        fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5))


def adapted_in_part(rank: int, world: int) -> None:
    """One optimizer for an exchanged module and for a parameter of no module: only the first stands still."""
    fabric = fabric_of(rank, world, saving=20)
    net, alone = four_layers(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": net.parameters()}, {"params": [alone]}], lr=0.1, momentum=0.9)
    model, wrapped = fabric.setup(net, optimizer)
    train(fabric, [(model, wrapped)], rank, range(2))
    for gradient in (1.0, 0.0):
        before = [p.detach().clone() for p in (*net.parameters(), alone)]
        for p in (*net.parameters(), alone):
            p.grad = torch.full_like(p, gradient if p is alone else 0.0)
        optimizer.step()
    moved = [not torch.equal(p, was) for p, was in zip((*net.parameters(), alone), before, strict=True)]
    assert moved == [False] * (len(moved) - 1) + [True]


def test_momentum_is_adapted_in_fabric_too(groups):
    groups(2).run(adapted_in_part)


def shared_optimizer(rank: int, world: int, folder: str) -> None:
    """Two modules, one optimizer: a gradient of the first that is not finite undoes what the second sent, too."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    fabric = fabric_of(rank, world, ratio=0.05, plugins=plugin)
    nets = [four_layers() for _ in range(2)]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    models = [fabric.setup_module(net) for net in nets]
    optimizer = fabric.setup_optimizers(optimizer)

    def look():
        states = fabric.strategy.topk_states
        return torch.stack([undelivered(state, net) for state, net in zip(states, nets, strict=True)])

    for step in range(3):
        before, spoilt = look(), step == 2 and rank == 0
        lost = [beside(fabric.strategy.topk_states[0], "1.weight") if spoilt else [], []]
        own = [
            mean_over_ranks(without(local_gradient(four_layers(), net, rank, step), net, names))
            for net, names in zip(nets, lost, strict=True)
        ]
        hook = nets[0][1].weight.register_hook(lambda grad: grad * torch.inf) if spoilt else None
        optimizer.zero_grad()
        for model in models:
            fabric.backward(loss_of(model, rank, step))
        optimizer.step()
        if hook:
            hook.remove()
    after = look()
    fabric.load_raw(_saved(fabric, folder), four_layers())
    loaded = look()
    torch.testing.assert_close(after, before + torch.stack(own), atol=1e-3, rtol=0)  # computed in float16
    torch.testing.assert_close(loaded, after)


def _saved(fabric: Fabric, folder: str) -> str:
    path = f"{folder}/weights.ckpt"
    if fabric.is_global_zero:
        torch.save(four_layers().state_dict(), path)
    fabric.barrier()
    return path


def test_a_step_that_one_optimizer_of_two_modules_skips_is_undone_in_both_and_loading_weights_keeps_residuals(
    groups, tmp_path
):
    groups(2).run(shared_optimizer, str(tmp_path))
