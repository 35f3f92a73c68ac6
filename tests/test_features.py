"""TopKStrategy does all that Lightning's DDPStrategy does: with everything sent, the weights are the same."""

import itertools
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import laws
import numpy as np
import pytest
import torch
from groups import on_ranks
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from ranks import alike, log, weights
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainers import Gan, Keeper, Module, Normed, fit, trainer_of

from lightning_topk import CompressionMonitor, TopKStrategy, presets
from lightning_topk.adapters.lightning.metrics import KINDS


def adam(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
    return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


class Repeated(torch.optim.SGD):
    def step(self, closure):
        with torch.enable_grad():
            closure()
        return super().step(closure)


class Branch(Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        y = self(x) + (self.branch(x) if batch_idx % 2 else 0)
        return (y - x[:, :1]).square().mean()


class Tied(Module):
    """Two layers share a weight; activations of the first one are computed twice."""

    def build(self):
        first, second = nn.Linear(12, 12), nn.Linear(12, 12)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)

    def forward(self, x):
        return self.net[1:](checkpoint(self.net[0], x, use_reentrant=False))


class ChannelsLast(Module):
    def build(self):
        layers = [nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(8, 1)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)


class Sparse(Module):
    automatic_optimization = False

    def build(self):
        self.table = nn.Embedding(50, 4, sparse=True)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.ones(0))
        return nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        entries = self.table((x[:, 0].abs() * 20).long().clamp(max=49))
        y = self.net(torch.cat([x, entries], dim=1)) * self.scale.float() + self.nothing.sum()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward((y - x[:, :1]).square().mean())
        assert self.table.weight.grad.is_sparse
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        dense = [p for name, p in self.named_parameters() if name != "table.weight"]
        return [torch.optim.SGD(dense, lr=0.1), torch.optim.SparseAdam([self.table.weight], lr=0.1)]


class Compiled(Module):
    def configure_model(self):
        self.net.compile(backend="aot_eager")


class SteppedLate(Module):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        (x,) = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for sign in (1, -1):
            self.manual_backward((self(sign * x) - x[:, :1]).square().mean())
        optimizer.step()


class Averaging(SteppedLate):
    """Keeps an average of a weight, without no_grad."""

    def build(self):
        self.average = nn.Parameter(torch.zeros(24, 64), requires_grad=False)
        return super().build()

    def on_train_batch_end(self, *_):
        self.average.lerp_(self.net[2].weight, 0.1)


FEATURES: dict[str, tuple[Callable[[], Module], dict[str, Any], dict[str, Any]]] = {
    "fused AdamW, a schedule, accumulation with a partial last window": (
        partial(Module, adam), {"accumulate_grad_batches": 3}, {},
    ),
    "channels_last, clipping, no inference mode": (
        ChannelsLast, {"gradient_clip_val": 0.01, "inference_mode": False, "limit_val_batches": 2},
        {"gradient_as_bucket_view": True},
    ),
    "closures called more than once, stochastic weight averaging": (
        partial(Module, partial(Repeated, lr=0.1)),
        {"callbacks": lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)]}, {},
    ),
    "manual optimization of two networks": (Gan, {}, {"find_unused_parameters": True}),
    "two backward passes a step, an average with a history": (Averaging, {}, {}),
    "a branch that is left out at times": (Branch, {}, {"find_unused_parameters": True}),
    "tied weights, activation checkpointing, a static graph": (Tied, {}, {"static_graph": True}),
    "sparse embeddings, mixed dtypes, empty parameters": (Sparse, {}, {}),
    "torch.compile": (Compiled, {}, {"bucket_cap_mb": 25}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
@on_ranks(2, timeout=100)
def test_with_everything_sent_training_gives_the_weights_of_ddp(rank, world, name):
    module, options, ddp = FEATURES[name]
    ddp, ends = {"bucket_cap_mb": 0.001, **ddp}, []
    for strategy in (DDPStrategy(**ddp), TopKStrategy(ratio=1.0, wire="fp32", **ddp), TopKStrategy(ratio=0.1, **ddp)):
        model, callbacks = module(), options.get("callbacks", list)()
        arguments = {"max_epochs": 2, **options, "callbacks": callbacks, "monitor": isinstance(strategy, TopKStrategy)}
        fit(rank, world, model, strategy, **arguments)
        ends.append(weights(model).double())
    plain, everything, compressed = ends
    assert alike(torch.stack(ends))
    torch.testing.assert_close(everything, plain, rtol=1e-4, atol=1e-5)
    assert not torch.equal(compressed, plain)
    assert compressed.isfinite().all()


@pytest.mark.parametrize("settings", [*presets.values(), {"wire": "fp32", "bucket_cap_mb": 0.001}], ids=str)
@on_ranks(2)
def test_every_preset_trains_and_logs_the_bytes_that_are_predicted(rank, world, settings):
    model, monitor, planned, sent = Module(), CompressionMonitor(), [], []

    def predict(trainer, *_):
        planned.append(vars(trainer.strategy.topk_state.predicted()))

    def look(trainer, *_):
        sent.append(monitor.volume.compute())

    callback = LambdaCallback(on_train_batch_start=predict, on_train_batch_end=look)
    _, logged = fit(rank, world, model, TopKStrategy(**settings), [monitor, callback], monitor=False)
    assert alike(weights(model))
    assert len(sent) == 5
    assert all(logged[f"topk/{way}_bytes"] == planned[-1][way] for way in ("uplink", "downlink"))
    for kind in KINDS:  # DDP regroups its buckets after the first step
        counted = [
            int(after[f"{kind}_bytes"] - before[f"{kind}_bytes"]) for before, after in itertools.pairwise(sent[1:])
        ]
        assert counted == [plan[kind] for plan in planned[2:]]


@on_ranks(4)
def test_random_states_are_those_of_ddp_with_every_topology_and_selector(rank, world, tmp_path):
    def drawn(strategy: DDPStrategy, **options: Any) -> list[float]:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(1)
        module = Module()
        module.net.append(nn.Dropout(0.5))
        trainer, _ = fit(rank, world, module, strategy, max_steps=3, log_every_n_steps=1, **options)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return [float(torch.rand(())), np.random.random(), random.random()]

    plain = drawn(DDPStrategy(), monitor=False)
    topologies = {"dense": True, **dict(laws.ROUTES), "hierarchical": True}
    for topology, selector in zip(topologies, itertools.cycle(laws.SELECTED)):
        settings = {"topology": topology, "bidirectional": topology != "allgather", "selector": selector}
        strategy = TopKStrategy(ratio=0.1, local_world_size=2, **settings)
        assert drawn(strategy, callbacks=[CompressionMonitor(per_layer=True)], monitor=False) == plain, settings


@on_ranks(2, timeout=100)
def test_momentum_is_adapted_in_every_fit_and_not_in_checkpoints(rank, world, tmp_path):
    names = {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    for make in (partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True), adam):
        ends = []
        for adapts in (True, False):
            model, strategy = Module(make), TopKStrategy(saving=40, adapt_momentum=adapts)
            trainer = trainer_of(rank, world, strategy, max_epochs=2, gradient_clip_val=0.5)
            for _ in range(2):  # the second fit has an optimizer of its own
                trainer.fit(model)
                trainer.fit_loop.max_epochs += 1
            trainer.save_checkpoint(tmp_path / "last.ckpt")
            saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["optimizer_states"][0]
            assert {key for state in saved["state"].values() for key in state} <= names
            ends.append(weights(model))
        assert not torch.equal(*ends)


@on_ranks(2)
def test_no_step_of_a_fit_or_a_resumed_one_moves_what_was_not_delivered(rank, world, tmp_path):
    """The first backward pass runs inside the first step, whose hooks must exist by then."""
    before, moved = [], []

    def look(trainer, module, optimizer):
        still = torch.cat([p.grad.flatten() for p in module.parameters()]) == 0
        before[:] = [weights(module), still]

    def compare(trainer, module, *_):
        moved.append(int((weights(module) != before[0])[before[1]].sum()))

    seen, file = LambdaCallback(on_before_optimizer_step=look, on_train_batch_end=compare), tmp_path / "last.ckpt"
    for path in (None, file):
        module = Module(partial(torch.optim.Adam, lr=0.01))
        strategy, steps = TopKStrategy(saving=10), 2 if path is None else 4
        trainer, _ = fit(rank, world, module, strategy, [seen], ckpt_path=path, max_steps=steps)
        trainer.save_checkpoint(file)
    assert moved == [0] * 4


@on_ranks(2)
def test_lbfgs_is_refused_unless_whole_gradients_are_sent(rank, world):
    newton = partial(torch.optim.LBFGS, lr=0.01, max_iter=3, tolerance_grad=0, tolerance_change=0)
    with pytest.raises(ValueError, match=r"LBFGS evaluates its closure several times.*Pass topology='dense'"):
        fit(rank, world, Module(newton), TopKStrategy())
    ends = []
    for strategy in (DDPStrategy(), TopKStrategy(topology="dense")):
        model = Module(newton)
        fit(rank, world, model, strategy)
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def thawed_in_the_second_epoch(model: Module) -> LambdaCallback:
    layer = model.net[0].requires_grad_(False)
    return LambdaCallback(on_train_epoch_start=lambda trainer, _: layer.requires_grad_(trainer.current_epoch > 0))


class FineTuning(BaseFinetuning):
    """Trains a network with batch norm from the second epoch on, as Lightning's example does."""

    def __init__(self, train_bn: bool) -> None:
        super().__init__()
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[:2], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer, train_bn=self.train_bn)


@on_ranks(2)
def test_unfrozen_parameters_in_no_optimizer_are_named_with_the_remedy_for_fine_tuning(rank, world):
    def trained(parameters):
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    with log() as said:
        fit(rank, world, Normed(trained), TopKStrategy(ratio=0.1), [FineTuning(train_bn=True)], max_epochs=3)
        assert not said
        fit(rank, world, Normed(trained), TopKStrategy(ratio=0.1), [FineTuning(train_bn=False)], max_epochs=3)
    words = "2 of 6 trained parameters ('net.1.weight' for one) are in no optimizer that was passed to attach."
    assert [words in line and "train_bn=True" in line for line in said] == [True] * (rank == 0), said


@on_ranks(2)
def test_an_error_about_unused_parameters_names_this_strategys_remedy(rank, world):
    with pytest.raises(RuntimeError) as caught:
        fit(rank, world, Gan(), max_steps=6)
    assert "TopKStrategy(find_unused_parameters=True)" in str(caught.value)
    assert "toggle_optimizer" in str(caught.value)
    assert "DDPStrategy" not in str(caught.value)


@on_ranks(2)
def test_layers_that_are_unfrozen_later_are_exchanged_too(rank, world):
    """DDP ignores parameters that were frozen when it was built; ranks would drift apart."""
    model, alone = (Module() for _ in range(2))
    thaw = thawed_in_the_second_epoch(model)
    strategy = TopKStrategy(ratio=1.0, wire="fp32", bucket_cap_mb=0.001)
    # Every rank sees all data, so the mean equals one process's gradient.
    fit(rank, world, model, strategy, [thaw], max_epochs=2, use_distributed_sampler=False)
    optimizer = alone.configure_optimizers()
    for epoch in range(2):
        alone.net[0].requires_grad_(epoch > 0)
        for batch in alone.train_dataloader():
            optimizer.zero_grad()
            alone.training_step(batch, 0).backward()
            optimizer.step()
    torch.testing.assert_close(weights(model), weights(alone), rtol=1e-4, atol=1e-5)


class EarlyBranch(Branch):
    """Uses its branch in the first of two micro-batches only."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx + 1)


@on_ranks(2)
def test_gradients_are_exchanged_that_were_accumulated_before_ddp_is_rebuilt(rank, world):
    model, strategy = EarlyBranch(), TopKStrategy(ratio=0.1, find_unused_parameters=True)
    fit(rank, world, model, strategy, [thawed_in_the_second_epoch(model)], max_epochs=2, accumulate_grad_batches=2)
    assert alike(weights(model))


@pytest.mark.skipif(torch.__version__ < "2.10", reason="DDP exchanges nothing there")
@on_ranks(2)
def test_a_static_graph_is_exchanged_after_every_rebuild_in_manual_optimization(rank, world):
    """Lightning launches the first exchange of a static graph by hand, but only once for a strategy."""
    model, strategy, last = SteppedLate(), TopKStrategy(ratio=0.1, static_graph=True), Keeper()
    trainer, _ = fit(rank, world, model, strategy, [thawed_in_the_second_epoch(model), last], max_epochs=2)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    assert alike(weights(model))
    assert last.state.steps == 2 * 3 * 4  # two passes a step, three epochs of four steps


class Thawing(Module):
    def build(self):
        net = super().build()
        net[0].requires_grad_(False)
        return net

    def training_step(self, batch, index):
        self.net[0].requires_grad_(index > 0)
        return super().training_step(batch, index)


@on_ranks(2)
def test_a_training_step_that_unfreezes_a_layer_is_refused(rank, world):
    with pytest.raises(RuntimeError, match="training_step unfroze a parameter"):
        fit(rank, world, Thawing(), TopKStrategy(ratio=0.1))


@on_ranks(2)
def test_validate_test_and_predict_work_before_and_without_fit(rank, world):
    warnings.simplefilter("ignore")
    model = Module()
    limits = {"limit_val_batches": 2, "limit_test_batches": 2, "limit_predict_batches": 2}
    trainer = trainer_of(rank, world, TopKStrategy(ratio=0.1), max_epochs=2, **limits)
    before = trainer.validate(model, verbose=False)[0]["val_loss"]
    trainer.test(model, verbose=False)
    assert len(trainer.predict(model)) == 2
    trainer.fit(model)
    assert trainer.validate(model, verbose=False)[0]["val_loss"] != before
