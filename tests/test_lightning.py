"""The strategy and the callback in a Trainer, with spawned CPU workers."""

from __future__ import annotations

import csv
import itertools
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lightning as L
import pytest
import torch
from groups import script, torchrun
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from shapes import codecs_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MetricCollection

from lightning_topk import CompressionMonitor, ExponentialWarmup, TopKConfig, TopKStrategy, presets
from lightning_topk.lightning.callback import BUFFERS
from lightning_topk.lightning.metrics import CompressionError, ExchangeVolume
from lightning_topk.volume import format_bytes, volume

ROOT = Path(__file__).parent.parent
KEYS = {
    "topk/uplink_bytes", "topk/downlink_bytes", "topk/dense_bytes", "topk/saving", "topk/uplink_error",
    "topk/downlink_error", "topk/bound", "topk/worker_residual_norm", "topk/server_residual_norm", "topk/total_bytes",
    "topk/broadcast_bytes", "topk/ratio", "topk/selected_ratio", "topk/total_uplink_bytes",
    "topk/total_downlink_bytes", "topk/total_dense_bytes",
    "topk/total_broadcast_bytes", "topk/nonfinite_steps",
    "topk/exchange_seconds", "topk/hidden_share",
}  # fmt: skip
QUIET = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(BoringModel):
    """Boring, but large enough to compress, with batch norm on request."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64) if norm else nn.Tanh(), nn.Linear(64, 2))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(super().train_dataloader().dataset, batch_size=4)


ELEMENTS = 32 * 64 + 64 + 64 * 2 + 2


def fit(tmp_path, model=None, strategy=None, callbacks=(), **options):
    """Trains with two workers that are forked from a server which has imported everything already."""
    strategy = strategy or TopKStrategy(start_method="forkserver")
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        strategy=strategy,
        callbacks=[CompressionMonitor(), *callbacks],
        **{**QUIET, "max_steps": 5, **options},
    )
    trainer.fit(model or Model())
    return trainer, {key: float(value) for key, value in trainer.callback_metrics.items()}


def test_a_registered_name_trains_and_every_key_returns_after_spawn(tmp_path):
    _, logged = fit(tmp_path, strategy="topk_spawn")
    plan = volume(TopKConfig(), [ELEMENTS], world=2)
    assert set(logged) >= KEYS
    assert logged["topk/uplink_bytes"] == plan.uplink
    assert logged["topk/downlink_bytes"] == plan.downlink
    assert logged["topk/dense_bytes"] == plan.dense == ELEMENTS * 4
    assert logged["topk/saving"] == pytest.approx(plan.saving)
    assert logged["topk/total_bytes"] == 5 * (plan.uplink + plan.downlink)
    assert logged["topk/total_dense_bytes"] == 5 * plan.dense
    assert 0 < logged["topk/uplink_error"] < 1
    assert 0 < logged["topk/downlink_error"] < 1
    assert logged["topk/worker_residual_norm"] > 0
    assert logged["topk/server_residual_norm"] > 0
    kept = 2 * codecs_of(TopKConfig(), ELEMENTS, 2).uplink.kept
    assert logged["topk/bound"] == pytest.approx((1 - kept / ELEMENTS) ** 2)
    assert logged["topk/ratio"] == logged["topk/selected_ratio"] == pytest.approx(kept / ELEMENTS)


class Watch(Callback):
    """Counts the collectives of the callback, and writes what each step logged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer, pl_module):
        reduce = trainer.strategy.reduce
        self.reduced = 0

        def counted(value, *args, **kwargs):
            self.reduced += getattr(value, "shape", None) == (6,)  # Lightning reduces scalars of its own
            return reduce(value, *args, **kwargs)

        trainer.strategy.reduce = counted

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                metrics = trainer.callback_metrics
                row = (trainer.global_step, self.reduced, float(metrics.get("topk/total_bytes", -1)))
                file.write(",".join(map(str, row)) + "\n")


@pytest.mark.parametrize(("every", "reductions"), [(1, 6), (3, 2), (50, 1), (0, 1)])
def test_bytes_are_logged_at_every_step_and_one_collective_at_log_steps(tmp_path, every, reductions):
    path = tmp_path / "steps.csv"
    fit(tmp_path, callbacks=[Watch(path)], max_steps=6, log_every_n_steps=every)
    rows = [[float(cell) for cell in line.split(",")] for line in path.read_text().splitlines()]
    plan = volume(TopKConfig(), [ELEMENTS], world=2)
    assert [total for *_, total in rows] == [(step + 1) * (plan.uplink + plan.downlink) for step in range(6)]
    assert rows[-1][1] == reductions


def test_accumulation_exchanges_once_a_window_and_with_the_partial_last_one(tmp_path):
    _, logged = fit(tmp_path, max_steps=-1, max_epochs=1, limit_train_batches=7, accumulate_grad_batches=3)
    plan = volume(TopKConfig(), [ELEMENTS], world=2)
    assert logged["topk/total_bytes"] == 3 * (plan.uplink + plan.downlink)


def test_loggers_and_early_stopping_see_the_keys(tmp_path):
    stop = EarlyStopping("topk/saving", stopping_threshold=2.0, mode="max", check_on_train_epoch_end=True)
    logger = CSVLogger(tmp_path, name="", version="")
    fit(
        tmp_path,
        callbacks=[stop],
        logger=logger,
        log_every_n_steps=2,
        max_steps=-1,
        max_epochs=5,
        limit_train_batches=4,
    )
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert {int(row["step"]) for row in rows} == {1, 3}  # stopped after the first epoch
    assert all(row[key] for row in rows for key in KEYS)


def test_broadcasts_of_buffers_are_counted_apart_from_the_exchange(tmp_path):
    model = Model(norm=True)
    size = sum(buffer.nbytes for buffer in model.buffers())
    _, logged = fit(tmp_path, model, max_steps=4)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert logged["topk/broadcast_bytes"] == size
    link = 2 * 64 + 2 * weights  # two ranks time two all-reduces twice, a small one and one of the largest bucket
    assert logged["topk/total_broadcast_bytes"] == weights + size + 4 * size + link
    sent = logged["topk/total_uplink_bytes"] + logged["topk/total_downlink_bytes"]
    assert logged["topk/total_bytes"] == sent
    strategy = TopKStrategy(start_method="forkserver", **{BUFFERS: False})  # as the monitor advises
    _, logged = fit(tmp_path, Model(norm=True), strategy=strategy, max_steps=4)
    first = weights + size * (BUFFERS == "forward_sync_buffers")
    assert logged["topk/total_broadcast_bytes"] == first + link


def test_the_monitor_says_that_it_has_nothing_to_monitor(tmp_path):
    with pytest.warns(UserWarning, match="CompressionMonitor logs nothing: the strategy is SingleDeviceStrategy"):
        _, logged = fit(tmp_path, strategy="auto", devices=1, max_steps=1)
    assert not KEYS & set(logged)


class Writer(CSVLogger):
    """A logger that takes histograms, as TensorBoard's does."""

    @property
    def experiment(self):
        found = super().experiment
        found.add_histogram = lambda name, values, step: drawn(Path(self.save_dir) / "drawn.txt", name, values, step)
        return found


def drawn(path, name, values, step):
    assert values.numel() > 0
    with path.open("a") as file:
        file.write(f"{step} {name}\n")


class Summary(Callback):
    def on_train_end(self, trainer, pl_module):
        monitor = next(callback for callback in trainer.callbacks if isinstance(callback, CompressionMonitor))
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, "summary.txt").write_text(monitor.summary())


def test_layers_histograms_and_a_summary_on_request(tmp_path):
    logger = Writer(tmp_path, name="", version="")
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        strategy=TopKStrategy(ratio=0.1, start_method="forkserver"),
        callbacks=[CompressionMonitor(per_layer=True), Summary()],
        log_every_n_steps=2,
        **QUIET | {"logger": logger, "max_steps": 4},
    )
    trainer.fit(Model())
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    names = ["layer.0.weight", "layer.0.bias", "layer.2.weight", "layer.2.bias"]
    assert sum(logged[f"topk/payload_share/{name}"] for name in names) == pytest.approx(1)
    assert all(0 <= logged[f"topk/error/{name}"] <= 1 for name in names)
    squares = sum(logged[f"topk/residual_norm/{name}"] ** 2 for name in names)
    assert squares == pytest.approx(logged["topk/worker_residual_norm"] ** 2)
    rows = (tmp_path / "drawn.txt").read_text().split("\n")[:-1]
    assert sorted(rows) == sorted(f"{step} topk/residual/{name}" for step in (2, 4) for name in names)
    plan = volume(TopKConfig(ratio=0.1), [ELEMENTS], world=2)
    words = (tmp_path / "summary.txt").read_text()
    up, down, dense = (format_bytes(4 * sent) for sent in (plan.uplink, plan.downlink, plan.dense))
    assert f"in 4 steps each rank sent {up} up and {down} down instead of {dense} ({plan.saving:.1f}x less)" in words
    assert "hidden behind backward (2 steps measured)" in words


class Heard(Callback):
    """Writes down what rank 0 is told."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer, pl_module, stage):
        if trainer.is_global_zero:
            logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.FileHandler(self.path))


class WithAdam(Model):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Weights(Callback):
    """Keeps the weights of a spawned run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_end(self, trainer, pl_module):
        torch.save(pl_module.state_dict(), self.path)


def test_one_worker_trains_as_without_compression_and_is_told_so(tmp_path):
    """With Adam, too, which keeps its momentum."""
    found = {}
    for name, strategy in {
        "ours": TopKStrategy(start_method="forkserver"),
        "plain": DDPStrategy(start_method="forkserver"),
    }.items():
        torch.manual_seed(0)
        heard = Heard(tmp_path / "said.txt")
        trainer = L.Trainer(
            default_root_dir=tmp_path,
            strategy=strategy,
            callbacks=[Weights(tmp_path / name), heard, *[CompressionMonitor()] * (name == "ours")],
            **{**QUIET, "max_steps": 4, "devices": 1},
        )
        trainer.fit(WithAdam())
        found[name] = torch.load(tmp_path / name)
        if name == "ours":
            assert trainer.callback_metrics["topk/total_bytes"] == 0
            assert trainer.callback_metrics["topk/saving"] == 1
            assert trainer.callback_metrics["topk/uplink_error"] == 0
            assert (tmp_path / "said.txt").read_text().count("so nothing is sent and nothing is compressed") == 1
    for key, weight in found["plain"].items():
        assert torch.equal(found["ours"][key], weight)


def test_a_checkpoint_is_restored_after_a_spawned_fit(tmp_path):
    """By the main process, whose module has no Trainer then."""
    trainer, _ = fit(tmp_path)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    saved = trainer.strategy.load_checkpoint(path)["state_dict"]
    module = trainer.strategy.lightning_module
    torch.nn.init.zeros_(module.layer[0].weight)
    trainer._checkpoint_connector.restore(path)
    assert torch.equal(module.layer[0].weight, saved["layer.0.weight"])


class Overflows(Model):
    """At the smallest learning rates, which only the finder tries, gradients are infinite."""

    lr = 0.01

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (math.inf if self.optimizers().param_groups[0]["lr"] < 1e-7 else 1.0)


def test_steps_of_the_learning_rate_finder_are_in_no_figure_of_the_monitor(tmp_path):
    finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None, update_attr=False)
    _, logged = fit(tmp_path, Overflows(), callbacks=[finder], log_every_n_steps=1)
    plan = volume(TopKConfig(), [ELEMENTS], world=2)
    assert logged["topk/total_bytes"] == 5 * (plan.uplink + plan.downlink)
    assert logged["topk/total_dense_bytes"] == 5 * plan.dense
    assert logged["topk/nonfinite_steps"] == 0


class TakesIterator(Model):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_the_monitor_logs_steps_that_take_the_dataloaders_iterator(tmp_path):
    _, logged = fit(tmp_path, TakesIterator())
    plan = volume(TopKConfig(), [ELEMENTS], world=2)
    assert logged["topk/total_bytes"] == 5 * (plan.uplink + plan.downlink)


class Manual(Model):
    """Two optimizers that step in turn, as in a GAN, and one branch that is left out at times."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(32, 2)

    def training_step(self, batch, batch_idx):
        for optimizer, net in zip(self.optimizers(), (self.layer, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(net(batch)))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.layer, self.other)]


def test_manual_optimization_with_two_optimizers(tmp_path):
    strategy = TopKStrategy(start_method="forkserver", find_unused_parameters=True)
    _, logged = fit(tmp_path, Manual(), strategy=strategy, max_steps=6)
    elements = ELEMENTS + 32 * 2 + 2
    plan = volume(TopKConfig(), [elements], world=2, parameters=[6])
    assert logged["topk/uplink_bytes"] == 2 * plan.uplink  # two backward passes a batch
    assert logged["topk/total_dense_bytes"] == 6 * plan.dense


def test_schedules_follow_the_trainers_epochs(tmp_path):
    strategy = TopKStrategy(ratio=ExponentialWarmup(0.01, start=0.5, epochs=2), start_method="forkserver")
    logger = CSVLogger(tmp_path, name="", version="")
    fit(
        tmp_path,
        strategy=strategy,
        max_steps=-1,
        max_epochs=3,
        limit_train_batches=2,
        logger=logger,
        log_every_n_steps=1,
    )
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    ratios = [float(row["topk/ratio"]) for row in rows]
    assert ratios == pytest.approx([0.5, 0.5, 0.0707, 0.0707, 0.01, 0.01], rel=0.03)


def ratios_of(tmp_path, strategy, **options):
    """The density of each step."""
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    _, logged = fit(tmp_path, strategy=strategy, logger=logger, log_every_n_steps=1, **options)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    return logged, [float(row["topk/ratio"]) for row in rows if row["topk/ratio"]]


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.cycle(torch.ones(10, 32))


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.should_stop = trainer.global_step == 3


class OnEndless(Model):
    def train_dataloader(self):
        return DataLoader(Endless())


FORMS = {
    "default": ({}, 50),
    "saving": ({"saving": 20}, 20),
    "a saving one way": ({"saving": 10, "bidirectional": False}, 10),
    "ratio": ({"ratio": 0.02}, None),
    "schedule": ({"ratio": ExponentialWarmup(0.01, start=0.5, steps=2)}, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_measured_is_what_was_asked_for(tmp_path, form):
    """In runs of any length: of some steps, and of unknown ones."""
    settings, saving = FORMS[form]
    found = []
    for model, options in ((Model(), {"max_steps": 3}), (OnEndless(), {"max_steps": -1, "callbacks": [Stop()]})):
        strategy = TopKStrategy(**settings, start_method="forkserver")
        logged, ratios = ratios_of(tmp_path, strategy, model=model, **options)
        found.append((logged["topk/saving"], ratios))
    assert found[0] == found[1]
    seen, ratios = found[0]
    if saving is not None:
        assert seen == pytest.approx(saving, rel=0.02)
    ratio = settings.get("ratio")
    asked = 3 * [ratio] if isinstance(ratio, float) else [ratio.at(step, 0) for step in range(3)] if ratio else ratios
    assert len(ratios) == 3
    assert ratios == pytest.approx(asked, rel=0.02)


@pytest.mark.parametrize("name", presets)
def test_every_preset_trains_and_ranks_agree(tmp_path, name):
    strategy = TopKStrategy(**presets[name], start_method="forkserver")
    _, logged = fit(tmp_path, strategy=strategy, callbacks=[SameWeights()])
    config = strategy.config
    kept = volume(config, [ELEMENTS], world=2, step=4)
    assert logged["topk/uplink_bytes"] + logged["topk/downlink_bytes"] == kept.uplink + kept.downlink


class SharesNothing(Callback):
    """Fails if two ranks step on the same weights, as torch shares those of processes from a fork server."""

    def on_train_start(self, trainer, pl_module):
        assert not any(tensor.is_shared() for tensor in (*pl_module.parameters(), *pl_module.buffers()))


def test_workers_of_a_fork_server_have_weights_of_their_own(tmp_path):
    fit(tmp_path, Model(norm=True), callbacks=[SharesNothing()], max_steps=1)


class Momentum(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_momentum_in_the_optimizer_and_in_the_strategy_is_refused(tmp_path):
    strategy = TopKStrategy(momentum=0.9, start_method="forkserver")
    with pytest.raises(Exception, match=r"SGD has momentum 0.9 of its own.*momentum=0"):
        fit(tmp_path, Momentum(), strategy=strategy)


class SameWeights(Callback):
    """Fails unless all ranks end with the same weights."""

    def on_train_end(self, trainer, pl_module):
        flat = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
        gathered = [torch.empty_like(flat) for _ in range(trainer.world_size)]
        torch.distributed.all_gather(gathered, flat)
        assert torch.equal(*gathered)
        assert trainer.strategy.topk_state.residuals.progress.steps == trainer.global_step


@pytest.mark.parametrize(
    "strategy",
    [
        "topk_fork",
        TopKStrategy(start_method="forkserver", topology="single_server", static_graph=True),
        TopKStrategy(
            start_method="forkserver", topology="allgather", bidirectional=False, gradient_as_bucket_view=True
        ),
        TopKStrategy(start_method="forkserver", wire="fp32", bucket_cap_mb=0.001),
    ],
)
def test_ranks_end_with_the_same_weights(tmp_path, strategy):
    fit(tmp_path, strategy=strategy, callbacks=[SameWeights()])


SCRIPT = """
import lightning as L, lightning_topk, sys, torch
from lightning.pytorch.demos.boring_classes import BoringModel

def norms(strategy):
    held = strategy._residuals.held()
    return {id(p): float(sum(part.norm() for part in parts)) for p, parts in held.items()}

class First(L.Callback):
    def on_train_start(self, trainer, pl_module):
        self.at_start = norms(trainer.strategy)

if __name__ == "__main__":
    first, strategy, model = First(), lightning_topk.TopKStrategy(ratio=0.01), BoringModel()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[first])
    trainer.fit(model)
    assert first.at_start == {}
    left = norms(strategy)
    assert all(norm > 0 for norm in left.values()) and left
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(BoringModel() if "--other" in sys.argv else model)
    assert trainer.world_size == 2 and trainer.global_step == 6, trainer.global_step
    # The same parameters go on with their residuals; another model has nothing to do with them.
    assert first.at_start == ({} if "--other" in sys.argv else left), (first.at_start, left)
    print(f"rank {trainer.global_rank} trained\\n", end="", flush=True)
"""


def command(arguments, **kwargs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **kwargs.pop("env", {})}
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=200, env=environment, check=False, **kwargs
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_script_is_started_by_lightning_or_torchrun_and_fits_twice(tmp_path, launcher):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    if launcher == "torchrun":
        output = torchrun(path, "--other", logs=tmp_path / "logs")
    else:
        output = script(path, log=tmp_path / "log", folder=tmp_path)
    assert "rank 0 trained" in output
    assert "rank 1 trained" in output


def test_lightning_cli_configures_the_strategy_by_yaml(tmp_path):
    folder = ROOT / "examples/cli"
    output = script(
        folder / "main.py", "fit", "--config", "config.yaml", "--trainer.max_steps=3", "--trainer.devices=1",
        "--trainer.strategy.init_args.start_method=popen",
        log=tmp_path / "log", folder=folder,
    )  # fmt: skip
    assert "TopKConfig(ratio=0.01, bidirectional=True, server_ratio=0.02" in output


@pytest.mark.slow
def test_lightning_cli_takes_the_strategy_from_the_command_line():
    output = command(
        [sys.executable, "main.py", "fit", "--config", "config.yaml", "--trainer.max_steps=2",
         "--trainer.strategy=TopKStrategy", "--trainer.strategy.ratio=0.5", "--trainer.strategy.start_method=spawn"],
        cwd=ROOT / "examples/cli",
    )  # fmt: skip
    assert "TopKConfig(ratio=0.5" in output


@pytest.mark.unit
def test_metrics_can_be_held_by_users():
    metrics = MetricCollection({"volume": ExchangeVolume()})
    metrics["volume"].update(uplink=10, downlink=30, dense=4000)
    metrics["volume"].update(uplink=10, downlink=30, dense=4000, broadcast=5)
    computed = metrics.compute()
    assert computed["total_bytes"] == 80
    assert computed["broadcast_bytes"] == 5
    assert computed["saving"] == 100
    error = CompressionError()
    error.update(0, 0)
    assert error.compute() == 0
    error.update(torch.tensor(4.0), torch.tensor(1.0))
    error.update(4, 2)
    assert error.compute() == 3 / 8


@pytest.mark.unit
def test_counts_beyond_2_to_24_are_exact():
    metric = ExchangeVolume()
    metric.update(uplink=2**24 + 1, downlink=2**40 + 1, dense=0)
    assert int(metric.compute()["total_bytes"]) == 2**24 + 2**40 + 2


def summary_of(topology: str, since: int = 0) -> str:
    monitor = CompressionMonitor()
    sent = {"uplink": 0, "downlink": 3_000_000, "dense": 90_000_000, "broadcast": 0}
    monitor._total.update(**sent, intra_node=8_000_000, inter_node=1_500_000)
    monitor._steps, monitor._since = 1000, since
    state = SimpleNamespace(
        config=TopKConfig(topology=topology),
        world=4,
        predicted=lambda rank: volume(TopKConfig(0.01, topology=topology), [100_000], 4, rank),
    )
    return monitor.summary(state)


@pytest.mark.unit
def test_the_summary_tells_who_sends_what_and_since_when():
    words = summary_of("single_server", since=2000)
    assert "in 1,000 steps since step 2,000 rank 0, which serves all, sent 3 MB down" in words
    up = format_bytes(1000 * volume(TopKConfig(0.01, topology="single_server"), [100_000], 4, rank=3).uplink)
    assert f"each other rank about {up} up, instead of 90 MB (30.0x less)" in words
    words = summary_of("hierarchical")
    assert "each node sent 1.5 MB to others (and 8 MB inside) instead of 90 MB (60.0x less)" in words
    assert "each rank sent 0 B up and 3 MB down instead of 90 MB (30.0x less)" in summary_of("sharded")


@pytest.mark.unit
def test_layers_are_logged_by_pattern():
    assert CompressionMonitor().per_layer == []
    assert CompressionMonitor(True).per_layer == ["*"]
    assert CompressionMonitor("*.weight").per_layer == ["*.weight"]
    assert CompressionMonitor(["a", "b"]).per_layer == ["a", "b"]
    for wrong in ([1], 3):
        with pytest.raises(TypeError, match=rf"per_layer={re.escape(str(wrong))} must be True, False, a pattern of"):
            CompressionMonitor(wrong)
    monitor = CompressionMonitor("layer.7")
    with pytest.raises(ValueError, match=r"per_layer='layer\.7'.*no parameter's name matches.*layer\.weight"):
        monitor.on_fit_start(mock.Mock(), BoringModel())
    frozen = BoringModel()
    frozen.layer.requires_grad_(False)  # until a later epoch, perhaps
    CompressionMonitor("layer.*").on_fit_start(mock.Mock(), frozen)
    CompressionMonitor(True).setup(mock.Mock(strategy=mock.Mock(topk_state=None)), nn.Module(), "fit")  # no layers yet
