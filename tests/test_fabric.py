"""The Fabric strategy."""

import gc
import itertools
import pickle
import warnings
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from groups import on_ranks
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from ranks import alike, four_layers, log, loss_of, undelivered, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from trainers import InThisProcess

from lightning_topk.adapters.lightning.fabric import TopKStrategy


def fabric_of(rank: int, world: int, scaled: bool = False, **settings: Any) -> Fabric:
    warnings.simplefilter("ignore")
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0)) if scaled else None
    strategy = TopKStrategy(cluster_environment=InThisProcess(rank, world), bucket_cap_mb=0.001, **settings)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=plugin)
    fabric.launch()
    return fabric


def nets(fabric: Fabric, count: int = 2) -> list[tuple]:
    made = [four_layers() for _ in range(count)]
    return [fabric.setup(net, SGD(net.parameters(), lr=0.1)) for net in made]


def train(fabric: Fabric, pairs: list[tuple], rank: int, steps: range) -> None:
    """Trains steps of two passes each."""
    for step in steps:
        for number, (model, optimizer) in enumerate(pairs):
            optimizer.zero_grad()
            with fabric.no_backward_sync(model):
                fabric.backward(loss_of(model, rank, 100 * number + 2 * step))
            fabric.backward(loss_of(model, rank, 100 * number + 2 * step + 1))
            optimizer.step()


@on_ranks(2)
def test_several_fabric_modules_learn_as_with_ddp_and_accumulate(rank, world):
    fabric = fabric_of(rank, world, ratio=1.0, wire="fp32")
    pairs = nets(fabric)
    train(fabric, pairs, rank, range(4))
    exchanged = [state.steps for state in fabric.strategy.topk_states]
    for number, (model, _) in enumerate(pairs):
        alone = four_layers()
        optimizer = SGD(alone.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            for part, worker in ((part, worker) for part in (0, 1) for worker in range(world)):
                (loss_of(alone, worker, 100 * number + 2 * step + part) / world).backward()
            optimizer.step()
        torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=1e-6)
    assert exchanged == [4, 4]  # once per step: gradients accumulate


def test_without_a_process_group_a_module_is_set_up_as_by_ddp_strategy(monkeypatch):
    """Fabric's own tests replace DDP by a mock, and start no ranks."""
    made = mock.Mock()
    monkeypatch.setattr("lightning.fabric.strategies.ddp.DistributedDataParallel", made)
    strategy = TopKStrategy(parallel_devices=[torch.device("cpu")] * 2, find_unused_parameters=True)
    net = nn.Linear(1, 1)
    assert strategy.setup_module(net) is made.return_value
    made.assert_called_once_with(module=net, device_ids=None, find_unused_parameters=True)


@pytest.mark.parametrize("ignored", [False, True])
@on_ranks(2)
def test_a_module_that_is_set_up_again_keeps_what_waits_of_the_layers_that_stay(rank, world, ignored):
    """Each time with another head, and with a parameter that DDP ignores. A variable holds the model before."""
    fabric, net, seen = fabric_of(rank, world, ratio=0.05), four_layers(), []
    for number in range(3):
        net[3] = nn.Linear(20, 20)
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.bias"])
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
        state = fabric.strategy.state_of(model)
        seen.append((state.steps, net[0].weight in state.residuals, len(fabric.strategy.topk_states)))
        train(fabric, [(model, optimizer)], rank, range(2 * number, 2 * number + 2))
    assert seen == [(0, False, 1), (2, True, 1), (4, True, 1)]


@on_ranks(2)
def test_residuals_are_saved_and_loaded_under_the_users_keys(rank, world, tmp_path):
    path, kept = tmp_path / "fabric.ckpt", []
    for steps, load in ((range(4), False), (range(4, 6), True)):
        fabric = fabric_of(rank, world, ratio=0.05)
        pairs, state = nets(fabric), {}
        for number, (model, optimizer) in enumerate(pairs):
            objects = {"net": model, "opt": optimizer, "topk": fabric.strategy.state_of(model)}
            state |= {f"{name}{number}": each for name, each in objects.items()}
        if load:
            fabric.load(path, state)
            kept.append([undelivered(state[f"topk{number}"], model.module) for number, (model, _) in enumerate(pairs)])
        train(fabric, pairs, rank, steps)
        if not load:
            kept.append([undelivered(state[f"topk{number}"], model.module) for number, (model, _) in enumerate(pairs)])
            fabric.save(path, state)
            fabric.barrier()
    assert alike(torch.stack([weights(model) for model, _ in pairs]))
    assert all(each.any() for each in kept[0])
    torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-6)
    assert [each.steps for each in fabric.strategy.topk_states] == [6, 6]


@on_ranks(2)
def test_unused_modules_and_optimizers_are_released(rank, world):
    fabric = fabric_of(rank, world, ratio=0.05)
    optimizers = weakref.WeakSet()
    for _ in range(4):
        ((model, optimizer),) = nets(fabric, 1)
        optimizers.add(optimizer.optimizer)
        train(fabric, [(model, optimizer)], rank, range(2))
    gc.collect()
    assert len(fabric.strategy.topk_states) <= 2, "the last, and the previous one that a variable held"
    for _ in range(3):
        optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.1))
        optimizers.add(optimizer.optimizer)
        train(fabric, [(model, optimizer)], rank, range(2))
    gc.collect()
    assert len(optimizers) == 1


@on_ranks(1)
def test_fabric_is_pickled_without_states_for_the_workers_of_a_data_loader(rank, world):
    fabric = fabric_of(rank, world, ratio=0.05)
    in_use = nets(fabric, 1)
    copied = pickle.loads(pickle.dumps(fabric))
    assert [len(each.strategy.topk_states) for each in (copied, fabric)] == [0, len(in_use)]


@on_ranks(2)
def test_a_closed_state_neither_clips_nor_adapts_later_steps_of_its_module_alone(rank, world):
    fabric = fabric_of(rank, world, ratio=0.05)
    ((model, optimizer),) = nets(fabric, 1)
    state = fabric.strategy.state_of(model)
    for step in range(4):
        if step == 3:
            state.close()
        optimizer.zero_grad()
        fabric.backward(loss_of(model if step < 3 else model.module, rank, step), model=model)
        fabric.clip_gradients(model, optimizer, max_norm=0.01)
        optimizer.step()
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 0.0101
    fabric.setup_optimizers(SGD(model.parameters(), lr=0.1))
    assert not state.optimizers.watched


@on_ranks(2)
def test_a_module_set_up_again_keeps_its_residuals_and_leaves_no_groups(rank, world):
    fabric = fabric_of(rank, world, ratio=0.05)
    net, open_groups, kept = nn.Linear(20, 20), [], []
    for turn in range(3):
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
        kept.append(model)  # as a notebook keeps earlier models
        state = fabric.strategy.state_of(model)
        assert state.steps == 2 * turn, "the residuals of the previous turn"
        assert fabric.strategy.topk_states == [state]
        train(fabric, [(model, optimizer)], rank, range(2))
        open_groups.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(open_groups)) == 1, open_groups
    assert fabric.strategy.state_of(fabric.setup(torch.compile(net, backend="eager"))).residuals is state.residuals
    with pytest.raises(KeyError, match="this Linear was not set up with this strategy"):
        fabric.strategy.state_of(nn.Linear(2, 2))


def launched(fabric: Fabric) -> None:
    train(fabric, nets(fabric, 1), fabric.global_rank, range(1))


@pytest.mark.process
def test_fabric_can_start_its_processes():
    strategy = TopKStrategy(ratio=0.1, start_method="forkserver")
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(launched)


@on_ranks(2)
def test_momentum_is_adapted_in_fabric_too(rank, world):
    """One optimizer for an exchanged module and a parameter of no module: only the module stands still."""
    fabric = fabric_of(rank, world, saving=20)
    net, alone = four_layers(), nn.Parameter(torch.ones(3))
    optimizer = SGD([{"params": net.parameters()}, {"params": [alone]}], lr=0.1, momentum=0.9)
    train(fabric, [fabric.setup(net, optimizer)], rank, range(2))
    for gradient in (1.0, 0.0):
        before = [p.detach().clone() for p in (*net.parameters(), alone)]
        for p in (*net.parameters(), alone):
            p.grad = torch.full_like(p, gradient if p is alone else 0.0)
        optimizer.step()
    moved = [not torch.equal(p, was) for p, was in zip((*net.parameters(), alone), before, strict=True)]
    assert moved == [False] * (len(moved) - 1) + [True]


@on_ranks(2)
def test_parameters_in_the_second_of_two_optimizers_are_not_called_idle(rank, world):
    fabric, net = fabric_of(rank, world, ratio=0.1), four_layers()
    with log() as said:
        model, *optimizers = fabric.setup(net, SGD(net[:2].parameters(), lr=0.1), SGD(net[2:].parameters(), lr=0.1))
        fabric.backward(loss_of(model, rank, 0))
    assert len(optimizers) == 2
    assert not said


@on_ranks(2)
def test_a_step_that_the_scaler_skips_also_leaves_a_module_that_shares_the_optimizer(rank, world):
    fabric, made = fabric_of(rank, world, scaled=True, ratio=0.05), [four_layers(), four_layers()]
    optimizer = SGD([p for net in made for p in net.parameters()], lr=0.1)
    models = [fabric.setup_module(net) for net in made]
    optimizer, states, seen = fabric.setup_optimizers(optimizer), fabric.strategy.topk_states, []
    for step in range(3):
        optimizer.zero_grad()
        for model, spoilt in zip(models, ((rank, step) == (0, 1), False), strict=True):
            fabric.backward(loss_of(model, rank, step) * (torch.inf if spoilt else 1.0))
        optimizer.step()
        seen.append(torch.stack([*map(weights, made)]))
    left = torch.stack([undelivered(state, net) for state, net in zip(states, made, strict=True)])
    assert [torch.equal(*pair) for pair in itertools.pairwise(seen)] == [True, False]
    assert left.isfinite().all()
    assert [state.nonfinite_steps for state in states] == [1, 0]
