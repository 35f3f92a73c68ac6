"""The strategy and the callback in a Trainer: logged values, and ways to start its processes."""

import csv
import math
import pickle
import re
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from groups import on_ranks, script
from laws import codecs_of
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, LearningRateFinder
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from ranks import batch, log
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from trainers import ELEMENTS, Gan, Module, Normed, fit

from lightning_topk import CompressionMonitor, ExponentialWarmup, TopKConfig, TopKStrategy
from lightning_topk.adapters.ddp import TopKState
from lightning_topk.adapters.lightning import callback
from lightning_topk.adapters.lightning.metrics import CompressionError, ExchangeVolume
from lightning_topk.messages import sent_message
from lightning_topk.runtime.state import HookState
from lightning_topk.volume import Volume, format_bytes, volume

ROOT = Path(__file__).parent.parent
NAMES = (
    "uplink_bytes downlink_bytes total_bytes saving density uplink_error downlink_error worker_residual_norm "
    "nonfinite_steps exchange_seconds hidden_share"
)
TIMES = ("exchange_seconds", "hidden_share")
KEYS = {f"topk/{name}" for name in NAMES.split()}
PLAN = volume(TopKConfig(), [ELEMENTS], world=2)
SENT = PLAN.uplink + PLAN.downlink
"""Bytes per step."""


def test_a_registered_name_trains_and_every_key_returns_after_spawn():
    _, logged = fit(None, 2, strategy="topk_spawn", max_steps=7)
    assert {key for key in logged if key.startswith("topk/")} == KEYS
    assert {*re.findall(r"``(topk/\w+)``  ", str(CompressionMonitor.__doc__))} == KEYS
    kept = 2 * codecs_of(TopKConfig(), ELEMENTS, 2).uplink.k / ELEMENTS
    sent = {"uplink_bytes": PLAN.uplink, "downlink_bytes": PLAN.downlink, "total_bytes": 7 * SENT}
    expected = {"saving": PLAN.saving, "density": kept}
    assert {name: logged[f"topk/{name}"] for name in expected} == pytest.approx(expected)
    assert {name: logged[f"topk/{name}"] for name in sent} == sent
    assert all(0 < logged[f"topk/{direction}_error"] < 1 for direction in ("uplink", "downlink"))
    assert logged["topk/worker_residual_norm"] > 0


@pytest.mark.parametrize(("every", "logged"), [(1, {*range(6)}), (3, {2, 3, 5}), (0, {3, 5})])  # 3 ends an epoch
@on_ranks(2)
def test_log_steps_alone_log_values_after_one_collective(rank, world, every, logged):
    strategy, module, totals, reduced, calls = TopKStrategy(), Module(), [], [], []
    reduce = strategy.reduce

    def counted(value, *args, **kwargs):
        reduced.append(getattr(value, "shape", None) == (5,))  # Lightning reduces scalars of its own
        return reduce(value, *args, **kwargs)

    def look(trainer, *_):
        totals.append(int(trainer.callback_metrics.get("topk/total_bytes", 0)))
        calls.append(module.log.call_count)
        module.log.reset_mock()

    strategy.reduce = counted
    with mock.patch.object(module, "log", wraps=module.log):
        callbacks = [LambdaCallback(on_train_batch_end=look)]
        fit(rank, world, module, strategy, callbacks, max_steps=6, log_every_n_steps=every)
    assert totals == [SENT * max([each + 1 for each in logged if each <= step], default=0) for step in range(6)]
    assert [count > 0 for count in calls] == [step in logged for step in range(6)]
    assert sum(reduced) == len(logged)


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@on_ranks(2)
def test_ranks_whose_epochs_differ_in_length_train_on(rank, world):
    """As with DDP, if max_steps ends the fit."""
    data = [(batch(rank, step, 12),) for step in range(4 + 3 * rank)]
    for batches in (data, Stream(data)):
        module, options = Module(), {"max_steps": 12, "max_epochs": -1, "use_distributed_sampler": False}
        module.train_dataloader = partial(DataLoader, batches, batch_size=None)
        trainer, _ = fit(rank, world, module, **options)
        assert trainer.global_step == 12


@pytest.mark.unit
def test_the_monitor_warns_if_it_has_nothing_to_monitor():
    with pytest.warns(UserWarning, match="CompressionMonitor logs nothing: the strategy is SingleDeviceStrategy"):
        _, logged = fit(None, 1, strategy="auto", max_steps=1)
    assert not KEYS & set(logged)


@on_ranks(2)
def test_loggers_and_early_stopping_see_all_keys_layers_and_a_summary(rank, world, tmp_path):
    monitor, words = CompressionMonitor(per_layer=True), []
    ended = LambdaCallback(on_train_end=lambda *_: words.append(monitor.summary()))
    speed = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    stop = EarlyStopping("topk/saving", stopping_threshold=2.0, mode="max", check_on_train_epoch_end=True)
    options = {"logger": CSVLogger(tmp_path, name="", version=""), "max_epochs": 5, "log_every_n_steps": 2}
    callbacks = [monitor, ended, stop, speed]
    trainer, logged = fit(rank, world, None, TopKStrategy(ratio=0.1), callbacks, monitor=False, **options)
    assert trainer.global_step == 4, "stopped after the first epoch"
    names = [name for name, _ in Module().named_parameters()]
    assert sum(logged[f"topk/payload_share/{name}"] for name in names) == pytest.approx(1)
    assert all(0 <= logged[f"topk/error/{name}"] <= 1 for name in names)
    squares = sum(logged[f"topk/residual_norm/{name}"] ** 2 for name in names)
    assert squares == pytest.approx(logged["topk/worker_residual_norm"] ** 2)
    plan = volume(TopKConfig(ratio=0.1), [ELEMENTS], world=2)
    up, down, dense = (format_bytes(4 * sent) for sent in (plan.uplink, plan.downlink, plan.dense))
    assert f"in 4 steps this rank sent {up} up and {down} down instead of {dense} ({plan.saving:.1f}x less)" in words[0]
    if rank == 0:
        rows = [*csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())]
        ours = [row for row in rows if row["topk/saving"]]
        assert {int(row["step"]) for row in ours} == {1, 3}
        assert all(row[key] for row in ours for key in KEYS)
        assert any("batches_per_sec" in key for key in rows[0])


class TwoLosses(Module):
    """The second output's loss has little weight, and layers of its own."""

    weight = 1.0

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(12, 40), nn.Linear(12, 40)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        large, small = (layer(batch[0]).square().mean() for layer in self.net)
        return large + self.weight * small


@on_ranks(2)
def test_the_summary_names_starved_parameters(rank, world):
    for weight, words in ((1e-3, "almost nothing is sent of 2 parameters ('net.1."), (1.0, None)):
        module, monitor, told = TwoLosses(), CompressionMonitor(per_layer=True), []
        module.weight = weight
        end = LambdaCallback(on_train_end=lambda *_, monitor=monitor, told=told: told.append(monitor.summary()))
        fit(
            rank,
            world,
            module,
            TopKStrategy(ratio=0.1),
            [monitor, end],
            monitor=False,
            max_steps=4,
            log_every_n_steps=2,
        )
        assert (words in told[0]) if words else "almost nothing" not in told[0]
    monitor._starved = ["net.1.weight"]
    assert "almost nothing is sent of 1 parameter ('net.1.weight' for one)" in monitor.summary()


@pytest.mark.parametrize(("every", "timed"), [(1, [0, 1, 2, 3, 4, 5]), (3, [None, None, 1, 1, 1, 4])])
@on_ranks(2)
def test_times_are_those_of_the_latest_step_that_did_not_measure(rank, world, every, timed):
    """Of this step if every one measures. The fourth step ends an epoch."""
    reports, seen, report = [], [], HookState.report

    def kept(state):
        reports.append(report(state))
        return reports[-1]

    def look(trainer, *_):
        logged = trainer.callback_metrics
        seen.append([float(logged[f"topk/{name}"]) for name in TIMES] if "topk/hidden_share" in logged else None)

    monitor, look = CompressionMonitor(), LambdaCallback(on_train_batch_end=look)
    with mock.patch.object(HookState, "report", kept):
        fit(rank, world, callbacks=[monitor, look], monitor=False, max_steps=6, log_every_n_steps=every)
    assert [bool(each.measured) for each in reports] == [every == 1 or step in (2, 3, 5) for step in range(6)]
    times = [(took, 1 - exposed / took) for took, exposed in (each.times for each in reports)]
    assert seen == [None if step is None else pytest.approx(times[step]) for step in timed]
    shown = median(times[step][0] for step, each in zip(timed, reports, strict=True) if each.measured)
    assert f"exchange {1000 * shown:.1f} ms per step including waits for other ranks" in monitor.summary()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@on_ranks(2)
def test_the_summary_is_printed_once_when_training_ends(rank, world, error):
    words: list[str] = []

    def fail(trainer, *_):
        if error is not None and trainer.global_step == 3:
            raise error

    handler = signal.getsignal(signal.SIGINT)
    ends = nullcontext() if error is None else pytest.raises((ValueError, SystemExit))
    with mock.patch.object(callback, "rank_zero_info", words.append), ends:
        fit(rank, world, callbacks=[LambdaCallback(on_train_batch_start=fail)], max_steps=5)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl+C from the first on
    (said,) = words
    assert said.startswith(f"lightning_topk: in {3 if error else 5} steps this rank sent")


@on_ranks(2)
def test_without_the_monitor_a_fit_ends_with_what_a_step_sent_also_if_layers_are_unfrozen_meanwhile(rank, world):
    module = Module()
    layer = module.net[0].requires_grad_(False)
    thaw = LambdaCallback(on_train_epoch_start=lambda trainer, _: layer.requires_grad_(trainer.current_epoch > 0))
    ends = []
    for options in ({"callbacks": [thaw], "max_epochs": 2}, {}, {"monitor": True}):
        with log("lightning.pytorch.utilities.rank_zero") as said:
            fit(rank, world, module, **{"monitor": False, **options})
        ends.append([line for line in said if "this rank sent" in line])
    assert [len(each) for each in ends] == [rank == 0] * 3, ends
    if rank == 0:
        whole = f"sent {format_bytes(SENT)} instead of {format_bytes(PLAN.dense)} a step ({PLAN.saving:.1f}x less)."
        assert ends[1][0] == f"lightning_topk: this rank {whole}"
        assert whole not in ends[0][0], "half of the steps had a frozen layer"
        assert "in 5 steps this rank sent" in ends[2][0]


@on_ranks(1)
def test_one_worker_trains_as_without_compression_and_is_told_so(rank, world):
    ours, plain = (Module(partial(torch.optim.AdamW, lr=0.01)) for _ in range(2))
    with log("lightning_topk") as said, log("lightning.pytorch.utilities.rank_zero") as noted:
        _, logged = fit(rank, world, ours)
    assert not any("this rank sent" in line for line in noted)
    fit(rank, world, plain, DDPStrategy(), monitor=False)
    assert [logged[f"topk/{name}"] for name in ("total_bytes", "saving", "uplink_error")] == [0, 1, 0]
    assert sum("so nothing is compressed" in line for line in said) == 1
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


class Pickles(Callback):
    """Keeps a pickled copy of the Trainer at the end of each epoch."""

    def __init__(self) -> None:
        self.copies: list[bytes] = []

    def on_train_epoch_end(self, trainer, *_):
        self.copies.append(pickle.dumps(trainer))


@on_ranks(1)
def test_a_trainer_is_pickled_without_states_for_the_workers_of_a_data_loader(rank, world):
    """A dataset refers to it, and each epoch, as well as trainer.test, passes it to workers, if not forked ones."""
    pickles = Pickles()
    trainer, _ = fit(rank, world, callbacks=[pickles], max_epochs=2, gradient_clip_val=1.0)
    for copied in map(pickle.loads, [*pickles.copies, pickle.dumps(trainer)]):
        assert (copied.strategy._last, type(trainer.strategy._last)) == (None, TopKState)


def share_nothing(trainer, module):
    """Fails if ranks share weights, as torch does between processes of a fork server."""
    assert not any(tensor.is_shared() for tensor in (*module.parameters(), *module.buffers()))


def test_ranks_of_a_fork_server_have_own_weights_that_are_restored(tmp_path):
    """The main process restores a checkpoint after its module has lost its Trainer."""
    strategy, look = TopKStrategy(start_method="forkserver"), LambdaCallback(on_train_start=share_nothing)
    trainer, _ = fit(None, 2, Normed(), strategy, [look], default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = strategy.load_checkpoint(tmp_path / "last.ckpt")["state_dict"]
    weight = strategy.lightning_module.net[0].weight
    torch.nn.init.zeros_(weight)
    trainer._checkpoint_connector.restore(tmp_path / "last.ckpt")
    assert torch.equal(weight, saved["net.0.weight"])


@on_ranks(2)
def test_the_learning_rate_finder_leaves_no_bytes_and_no_residuals(rank, world, tmp_path):
    class Overflows(Module):
        """Gradients are infinite at the smallest learning rates, which only the finder tries."""

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * (math.inf if self.optimizers().param_groups[0]["lr"] < 1e-7 else 1.0)

    found = []

    def look(trainer, module):
        state = trainer.strategy.topk_state
        found.append((state.steps, sum(p in state.residuals for p in module.parameters())))

    finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None, update_attr=False)
    callbacks = [finder, LambdaCallback(on_train_start=look, on_train_end=look)]
    _, logged = fit(rank, world, Overflows(), callbacks=callbacks, log_every_n_steps=1, default_root_dir=tmp_path)
    assert logged["topk/total_bytes"] == 5 * SENT
    assert logged["topk/saving"] == PLAN.saving
    assert logged["topk/nonfinite_steps"] == 0
    assert found == [(0, 0), (5, 6)]


class TakesIterator(Module):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_accumulation_iterators_and_two_optimizers_log_what_they_exchange(rank, world):
    _, logged = fit(rank, world, max_epochs=1, accumulate_grad_batches=3)
    assert logged["topk/total_bytes"] == 2 * SENT, "four batches are a window and a partial one"
    _, logged = fit(rank, world, TakesIterator())
    assert logged["topk/total_bytes"] == 5 * SENT
    _, logged = fit(rank, world, Gan(), TopKStrategy(find_unused_parameters=True), max_steps=6)
    plan = volume(TopKConfig(), [ELEMENTS + 13], world=2, parameters=[8])
    assert logged["topk/uplink_bytes"] == 2 * plan.uplink, "two backward passes per batch"
    assert logged["topk/saving"] == pytest.approx(plan.saving)


@pytest.mark.parametrize("unit", ["steps", "epochs"])
@on_ranks(2)
def test_a_schedule_follows_the_trainers_steps_or_epochs(rank, world, unit):
    ratio, seen = ExponentialWarmup(0.01, start=0.5, **{unit: 2}), []
    look = LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.callback_metrics["topk/density"]))
    options = {"limit_train_batches": 2, "log_every_n_steps": 1, "max_epochs": 3}
    fit(rank, world, None, TopKStrategy(ratio=ratio), [look], **options)
    assert [*map(float, seen)] == pytest.approx([ratio.at(step, step // 2) for step in range(6)], rel=0.03)


SCRIPT = """
import lightning as L, lightning_topk, torch.distributed as dist, trainers
from lightning.pytorch.demos.boring_classes import BoringModel
from ranks import waiting

def norms(state):
    return {id(p): float(share.norm()) for p, share in waiting(state.residuals, state.names, 2).items()}

class First(trainers.Keeper):
    def on_train_start(self, trainer, pl_module):
        self.at_start = norms(self.state)

if __name__ == "__main__":
    first, model = First(), BoringModel()
    callbacks = [first, lightning_topk.CompressionMonitor()]
    options = {"devices": 2, "max_steps": 3, "callbacks": callbacks, **trainers.QUIET}
    trainer = L.Trainer(strategy=lightning_topk.TopKStrategy(ratio=0.01), **options)
    left = {}
    for number, model, steps in ((1, model, 3), (2, model, 6), (3, BoringModel(), 3)):
        trainer.fit_loop.epoch_loop.max_steps = 3 * number
        trainer.fit(model)
        assert trainer.world_size == 2 and trainer.global_step == 3 * number, trainer.global_step
        # The same parameters keep their residuals; another model starts without, and at step 0.
        assert first.at_start == ({} if number == 3 else left), (number, first.at_start, left)
        left = norms(first.state)
        assert all(norm > 0 for norm in left.values()) and left
        assert first.state.steps == steps
    print(f"rank {trainer.global_rank} trained\\n", end="", flush=True)
    dist.barrier()  # rank 0, which started the other one, ends it when it ends
"""


def test_a_script_starts_its_ranks_and_fits_three_times(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    output = script(path, log=tmp_path / "log", folder=tmp_path)
    steps = ["3 steps", "3 steps since step 3", "3 steps since step 6"]
    assert re.findall(r"topk: in (.*) this rank sent", output) == steps
    assert {*re.findall("rank . trained", output)} == {"rank 0 trained", "rank 1 trained"}


CLI = ROOT / "examples/cli"


def test_lightning_cli_configures_the_strategy_by_yaml_and_by_options(tmp_path):
    options = ["--trainer.max_steps=3", "--trainer.devices=1", "--trainer.strategy.init_args.start_method=popen"]
    output = script(CLI / "main.py", "fit", "--config", "config.yaml", *options, log=tmp_path / "log", folder=CLI)
    assert "TopKConfig(ratio=0.01, bidirectional=True, server_ratio=0.02" in output


@pytest.mark.parametrize("topology", ["single_server", "hierarchical"])
@on_ranks(4)
def test_the_summary_tells_who_sends_what_and_at_what_density(rank, world, topology):
    monitor, ratio = CompressionMonitor(), ExponentialWarmup(0.1, start=0.5, steps=2)
    assert monitor.summary() == "lightning_topk: nothing was exchanged."
    strategy = TopKStrategy(ratio=ratio, topology=topology, local_world_size=2)
    _, logged = fit(rank, world, None, strategy, [monitor], monitor=False, max_steps=3)
    sent = {name: format_bytes(float(nbytes)) for name, nbytes in monitor.volume.compute().items()}
    ours = f"this rank sent {sent['uplink_bytes']} up and {sent['downlink_bytes']} down"
    if topology == "hierarchical":
        ours = f"this node sent {sent['inter_node_bytes']} to others (and {sent['intra_node_bytes']} inside)"
    assert (
        f"in 3 steps {ours} instead of {sent['dense_bytes']} ({logged['topk/saving']:.1f}x less); " in monitor.summary()
    )
    assert f"; density {logged['topk/density']:.3g} at the end; compression error" in monitor.summary()
    assert logged["topk/density"] == pytest.approx(0.1, rel=0.03)


@pytest.mark.unit
def test_a_state_sums_up_the_bytes_that_saving_counts():
    sent = Volume(uplink=10, downlink=30, dense=4000, inter_node=80)
    said = [sent_message(TopKConfig(topology=topology), sent, 10) for topology in ("sharded", "hierarchical", "dense")]
    assert said == [
        "lightning_topk: this rank sent 4 B instead of 400 B a step (100.0x less).",
        "lightning_topk: this node sent 8 B to others instead of 400 B a step (50.0x less).",
        "",
    ]


@pytest.mark.unit
def test_layers_are_logged_by_pattern():
    with pytest.raises(TypeError, match="per_layer=3 must be True, False, a name pattern"):
        CompressionMonitor(3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'details'"):
        CompressionMonitor(details=True)
    assert CompressionMonitor(name for name in ["layer.*"]).per_layer == ["layer.*"]
    monitor = CompressionMonitor("layer.7")
    with pytest.raises(ValueError, match=r"per_layer='layer\.7'.*no parameter's name matches.*layer\.weight"):
        monitor.on_fit_start(mock.Mock(), BoringModel())
    frozen = BoringModel()
    frozen.layer.requires_grad_(False)  # until a later epoch, perhaps
    CompressionMonitor("layer.*").on_fit_start(mock.Mock(), frozen)


@pytest.mark.unit
def test_metrics_count_exactly():
    volume, error = ExchangeVolume(), CompressionError()
    volume.update(uplink=10, downlink=30, dense=4000)
    assert [volume.compute()[name] for name in ("total_bytes", "saving")] == [40, 100]
    volume.update(uplink=2**24 + 1, downlink=2**40 + 1, dense=0)
    assert int(volume.compute()["total_bytes"]) == 2**24 + 2**40 + 42
    between = ExchangeVolume(by_node=True)
    between.update(**vars(Volume(uplink=10, downlink=30, dense=4000, intra_node=70, inter_node=80)))
    assert [between.compute()[name] for name in ("intra_node_bytes", "inter_node_bytes", "saving")] == [70, 80, 50]
    error.update(0, 0)
    assert error.compute() == 0
    error.update(torch.tensor(4.0), torch.tensor(1.0))
    error.update(4, 2)
    assert error.compute() == 3 / 8
