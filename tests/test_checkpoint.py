"""Residuals survive in checkpoints, at any world size."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import threading

import lightning as L
import pytest
import torch
import torch.distributed as dist
from laws import routes
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelPruning, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from ranks import four_layers, log, loss_of, mean_over_ranks, refusal, undelivered
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from trainers import QUIET
from trainers import Module as Model

from lightning_topk import TopKStrategy
from lightning_topk.ddp import attach
from lightning_topk.lightning._resume import entry_to_resume
from lightning_topk.runtime.checkpoint import EMPTY, KEY, absent
from lightning_topk.runtime.residuals import Progress, Residuals

MODES = {
    "several_buckets": {"bucket_cap_mb": 0.001},
    "static_graph": {"bucket_cap_mb": 0.001, "static_graph": True},
    "find_unused_parameters": {"bucket_cap_mb": 0.001, "find_unused_parameters": True},
    "mixed_dtypes": {"bucket_cap_mb": 0.001},
}


class MixedNet(nn.Module):
    """Parameters of three dtypes, and so three buckets from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = four_layers(), nn.Linear(20, 20, dtype=torch.float64)
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))  # a bucket of its own, never exchanged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).double()) + self.empty.sum()


def trained(
    rank: int,
    world: int,
    settings: dict,
    mode: str,
    start: int,
    stop: int,
    saved: dict | None = None,
):
    """Trains from step ``start`` to ``stop``; returns weights, undelivered gradient, and what a checkpoint holds.

    Rank 0 returns the checkpoint.
    """
    net = MixedNet() if mode == "mixed_dtypes" else four_layers()
    if saved:
        net.load_state_dict(saved["weights"])
    ddp = DistributedDataParallel(net, **MODES[mode])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = attach(ddp, optimizer=optimizer, **{"ratio": 0.05, "local_world_size": 1, **settings})
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        state.load_state_dict(saved["residuals"])
    left_at_start = undelivered(state, net)

    def saved_now() -> dict:
        entry = {"weights": net, "optimizer": optimizer, "schedule": schedule}
        entry = {name: copy.deepcopy(each.state_dict()) for name, each in entry.items()}
        return {**entry, "residuals": copy.deepcopy(state.state_dict())}

    for step in range(start, stop):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        schedule.step()
    left = undelivered(state, net)
    entry = saved_now()
    state.close()
    weights = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    return weights.numpy(), left_at_start.numpy(), left.numpy(), entry if rank == 0 else None


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_goes_on_with_what_is_left_in_every_mode_of_ddp(groups, mode):
    left, saved = groups(3).run(trained, {}, mode, 0, 3)[0][2:]
    found = groups(3).run(trained, {}, mode, 3, 5, saved)[0]
    assert abs(found[1] - left).max() < 1e-6
    assert abs(left).max() > 1e-3


def test_a_checkpoint_holds_one_copy_of_the_model(groups):
    entry = groups(3).run(trained, {}, "several_buckets", 0, 3)[0][3]["residuals"]
    numel = sum(p.numel() for p in four_layers().parameters())
    assert sum(part.numel() for kept in entry["parameters"].values() for part in kept.values()) == numel


def test_a_hierarchy_takes_over_what_is_left_and_hands_it_on(groups):
    def on(local, **more):
        return {"topology": "hierarchical", "local_world_size": local, **more}

    runs = [(6, on(3)), (4, on(2)), (6, on(2)), (3, {}), (4, on(2)), (2, on(2)), (4, {"topology": "dense"})]
    found = groups(6).run(trained, on(2), "several_buckets", 0, 3)[0]
    for number, (world, settings) in enumerate(runs):
        left, saved = found[2], found[3]
        found = groups(world).run(trained, settings, "several_buckets", 3 + 2 * number, 5 + 2 * number, saved)[0]
        if settings.get("topology") == "dense" or world == settings.get("local_world_size"):
            assert abs(found[2]).max() == 0  # all was delivered
        else:
            assert abs(found[1] - left).max() < 1e-6
            assert abs(left).max() > 1e-3


@routes
def test_every_world_size_and_topology_takes_over_what_is_left(groups, topology, bidirectional):
    settings = {"topology": topology, "bidirectional": bidirectional}
    first = groups(4).run(trained, settings, "several_buckets", 0, 3)[0]
    for then in (("sharded", True), ("allgather", False)):
        found = first
        for world in (2, 3, 1):
            settings = {"topology": then[0], "bidirectional": then[1]}
            left, saved = found[2], found[3]
            found = groups(world).run(trained, settings, "several_buckets", 3, 5, saved)[0]
            assert abs(found[1] - left).max() < 1e-6, (then, world)
            assert abs(left).max() > 1e-3, (then, world)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        return self.b(self.a(x)) if branch else self.a(x)


def taken_over(rank: int, world: int, topology: str) -> dict[str, list[float]]:
    """What is delivered of 10 in every element, when gradients are zero."""
    entry = {"version": 1, "mode": "mean", "world_size": 2, "steps": 5}
    entry["parameters"] = {name: {"residual": torch.full((64,), 10.0)} for name in ("a.weight", "b.weight")}

    def made(net: nn.Module, load: bool = True, **options):
        ddp = DistributedDataParallel(net, find_unused_parameters=options.pop("unused", False))
        state = attach(ddp, topology=topology, ratio=1.0, wire="fp32", local_world_size=1, **options)
        if load:
            state.load_state_dict(entry)
        return ddp, state

    def still(ddp, *args) -> float:
        ddp.zero_grad()
        ddp(torch.zeros(4, 8), *args).sum().backward()
        return float(ddp.module.b.weight.grad.mean()) if ddp.module.b.weight.grad is not None else 0.0

    found = {}
    ddp, state = made(Two())
    held = state.residuals.held()[ddp.module.a.weight]
    found["seen before a step"] = float(sum(mean_over_ranks(part).mean() for part in (held[0], held[1] * world)))
    state.close()
    ddp, state = made(ddp.module, load=False, residuals=state.residuals)
    found["after another state was made"] = still(ddp)
    state.close()

    ddp, state = made(Two(), unused=True)
    still(ddp, False)
    found["unused at first"] = still(ddp)
    state.close()

    frozen = Two()
    frozen.a.weight.requires_grad_(False)
    ddp, state = made(frozen)
    found["its neighbour frozen"] = still(ddp)
    state.close()

    net = Two()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    ddp, state = made(net, optimizer=optimizer, scaler=scaler)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.full((4, 8), float("inf") if rank == 1 and step == 0 else 0.0)
        scaler.scale(ddp(x).sum()).backward()
        scaler.unscale_(optimizer)
        found["the first step skipped"] = float(net.b.weight.grad.mean())
        scaler.step(optimizer)
        scaler.update()
    state.close()

    return found


@pytest.mark.parametrize("topology", ["sharded", "single_server", "dense"])
def test_loaded_residuals_arrive_whatever_happens_before_the_first_step(groups, topology):
    for found in groups(2).run(taken_over, topology):
        assert found == dict.fromkeys(found, 10.0)


def test_another_model_begins_with_the_first_step():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    residuals = Residuals()
    residuals.keep_only(first.parameters())
    residuals.progress.steps, residuals.progress.buckets = 7, (tuple(first.parameters()),)
    residuals.keep_only(first.parameters())
    assert residuals.progress.steps == 7
    residuals.keep_only(second.parameters())
    assert residuals.progress == Progress()


def damaged(rank: int, world: int, entries: list) -> list[str]:
    """How each entry is refused; what there was before stays."""
    net = four_layers()
    state = attach(DistributedDataParallel(net), ratio=0.05)
    said = [refusal(state.load_state_dict, entry) for entry in entries]
    untouched = (state.residuals.progress.steps, state.residuals.held()) == (0, {})
    state.close()
    assert untouched
    return said


def test_a_damaged_or_foreign_entry_is_refused_with_a_remedy(groups):
    good = groups(2).run(trained, {}, "several_buckets", 0, 3)[0][3]["residuals"]
    name = next(iter(good["parameters"]))

    def changed(**changes):
        return {**good, **changes}

    def holding(part):
        return changed(parameters={**good["parameters"], name: {"residual": part}})

    unsound = good["parameters"][name]["residual"].clone()
    unsound[0] = torch.nan
    cases = [
        ("not written by lightning_topk", {"state": 1}),
        ("not written by lightning_topk", None),
        ("converted from a folder", {"version": 1, "mode": "sharded"}),
        ("version 99", changed(version=99)),
        ("it was damaged", changed(version=torch.ones(2))),
        ("parameters is missing", {k: v for k, v in good.items() if k != "parameters"}),
        ("no parameter 'other.weight'", changed(parameters={"other.weight": good["parameters"][name]})),
        ("is (2, 3) instead of (", holding(torch.zeros(2, 3))),
        ("is None instead of (", holding(None)),
        ("is of torch.int64", holding(torch.zeros(len(unsound), dtype=torch.int64))),
        ("is of torch.float32 and torch.sparse_coo", holding(torch.zeros(len(unsound)).to_sparse())),
        ("torch.strided on meta", holding(torch.zeros(len(unsound), device="meta"))),
        ("has a NaN or an infinity", holding(unsound)),
        ("it was damaged", changed(parameters=[1, 2])),
        ("it was damaged", changed(parameters={name: None})),
        ("steps=None", changed(steps=None)),
        ("steps=-1", changed(steps=-1)),
        ("world_size=0", changed(world_size=0)),
        ("its mode is 'full'", changed(mode="full", world_size=0)),
        ("its mode is None", changed(mode=None)),
        ("its settings are None", changed(settings=None)),
        ("its settings are {'ratio': tensor(", changed(settings={"ratio": torch.ones(2)})),
        ("its settings are {'ratio': [tensor(", changed(settings={"ratio": [torch.ones(2)] * 6})),
        ("of another rank than 0", changed(mode="on rank 0", parameters={})),
    ]
    for said in groups(2).run(damaged, [entry for _, entry in cases]):
        for (words, _), message in zip(cases, said, strict=True):
            assert words in message
            assert "residual_checkpoint=False" in message


def reordered(rank: int, world: int) -> None:
    """What a channels_last model left is delivered to the same entries of a contiguous one, and the reverse."""
    data = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
    for before, after in itertools.permutations([torch.contiguous_format, torch.channels_last]):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Conv2d(3, 4, 2, bias=False).to(memory_format=before))
        state = attach(model, ratio=0.1, wire="fp32")
        model(data).square().sum().backward()
        mine = model.module.weight.grad.clone()
        box = [state.state_dict()]
        state.close()
        alone = nn.Conv2d(3, 4, 2, bias=False)
        alone.load_state_dict(model.module.state_dict())
        alone(data).square().sum().backward()
        kept = alone.weight.grad.clone()
        dist.all_reduce(kept)
        kept = kept / world - mine
        dist.broadcast_object_list(box)
        model = DistributedDataParallel(nn.Conv2d(3, 4, 2, bias=False).to(memory_format=after))
        state = attach(model, ratio=1.0, wire="fp32")
        state.load_state_dict(box[0])
        (0 * model(data)).sum().backward()
        assert kept.abs().max() > 0.1
        torch.testing.assert_close(model.module.weight.grad, kept, rtol=1e-4, atol=1e-4)
        state.close()


def test_a_checkpoint_is_of_any_memory_format(groups):
    groups(2).run(reordered)


def reformatted(rank: int, world: int) -> list[str]:
    """A convolution gets another memory format between two wrappings: its residual alone starts at zero."""
    said: list[str] = []
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    data = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(rank))
    ddp = DistributedDataParallel(net)
    state = attach(ddp, ratio=0.1, wire="fp32")
    ddp(data).square().sum().backward()
    state.close()

    def left(p: torch.Tensor) -> torch.Tensor:
        worker, server = state.residuals.held()[p]
        return mean_over_ranks(worker + world * server)

    others = net[0].weight, net[0].bias, net[1].bias
    before = [left(p) for p in others]
    net[1].to(memory_format=torch.channels_last)
    state = attach(
        DistributedDataParallel(net), ratio=0.1, wire="fp32", residuals=state.residuals, announce=said.append
    )
    after, known = [left(p) for p in others], state.residuals.held()
    state.close()
    assert net[1].weight not in known
    torch.testing.assert_close(after, before)
    return [line for line in said if "memory format" in line]


def test_a_parameter_of_another_memory_format_starts_at_zero_and_is_said_to(groups):
    (said,), other = groups(2).run(reformatted)
    assert "1 parameter has another size or memory format than before" in said
    assert other == []


def resized(rank: int, world: int) -> None:
    """A parameter that got another size begins with nothing, is said to, and the others go on."""
    said: list[str] = []
    net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    data = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))
    ddp = DistributedDataParallel(net)
    state = attach(ddp, ratio=0.1)
    ddp(data).square().sum().backward()
    state.close()
    residuals = state.residuals
    del ddp, state
    gc.collect()  # autograd remembers a parameter's size as long as DDP's reducer does
    net[1].weight.data, net[1].bias.data = torch.randn(7, 20), torch.zeros(7)
    net.zero_grad()
    ddp = DistributedDataParallel(net)
    state = attach(ddp, ratio=1.0, wire="fp32", residuals=residuals, announce=said.append)
    (0 * ddp(data)).sum().backward()
    state.close()
    assert not net[1].weight.grad.any()
    assert net[0].weight.grad.any()
    assert ["2 parameters have another size" in line for line in said] == [True] * (rank == 0)


def test_a_parameter_of_another_size_begins_with_nothing_and_is_said_to(groups):
    groups(2).run(resized)


def renamed(rank: int, world: int) -> None:
    """A checkpoint does not depend on what wraps a model's layers, nor on what pruning calls their parameters later."""

    def wrapped(net: nn.Module) -> nn.Module:
        net[0], net[1] = checkpoint_wrapper(net[0]), torch.compile(net[1], backend="eager")
        return net

    def pruned(net: nn.Module) -> nn.Module:
        prune.l1_unstructured(net[3], "weight", 0.5)
        return net

    found, box = [], [None]
    for wrap in (wrapped, copy.copy, wrapped, pruned):
        net = wrap(four_layers())
        model = DistributedDataParallel(net)
        state = attach(model, ratio=0.05, dense_parameters="1.bias")
        if box[0] is None:
            loss_of(model, rank, 0).backward()
        else:
            state.load_state_dict(box[0])
        prune.l1_unstructured(net[2], "weight", 0.5)
        held = state.residuals.held()
        by_name = {name: held[p][0] + world * held[p][1] for p, name in state.names.items()}
        found.append(mean_over_ranks(torch.cat([by_name[name] for name in sorted(by_name)])))
        box = [state.state_dict()]
        dist.broadcast_object_list(box)
        state.close()
    assert found[0].any()
    torch.testing.assert_close(found, found[:1] * 4)


def test_a_checkpoint_knows_parameters_whatever_wraps_or_prunes_them(groups):
    groups(2).run(renamed)


@pytest.mark.unit
def test_a_run_that_starts_from_zero_says_why():
    entry = {"version": 1, "mode": "mean", "parameters": {"a": {}}}
    cases = {
        "residuals in the checkpoint are ignored (residual_checkpoint=False)": (entry, False),
        "the checkpoint has no residuals (it was saved by another strategy, or with": (None, True),
        "the checkpoint has no residuals (out of luck)": (absent("out of luck"), True),
        "the checkpoint has no residuals (for no reason that it gives)": ({"mode": "none"}, False),
    }
    with log("lightning.pytorch.utilities.rank_zero") as said:
        assert [entry_to_resume(*given) for given in cases.values()] == [EMPTY] * 4
        assert entry_to_resume(entry, True) is entry
    for words, line in zip(cases, said, strict=True):
        assert line.startswith(f"lightning_topk: {words}")
        assert line.endswith("; starting from zero.")


class Held(Callback):
    """Tells how much the residuals hold at the start of training, and the weights at its end."""

    def __init__(self) -> None:
        self.start, self.sums = multiprocessing.get_context("forkserver").Array("d", 2), None

    def on_train_start(self, trainer, pl_module):
        kept = trainer.strategy.topk_state.residuals.held().values()
        self.start[trainer.global_rank] = sum(float(part.abs().sum()) for parts in kept for part in parts)


def saving(folder, **options):
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)


def strategy(**settings) -> TopKStrategy:
    return TopKStrategy(**{"ratio": 0.05, "start_method": "forkserver", "bucket_cap_mb": 0.001, **settings})


def epochs(tmp_path, count, plugin, callbacks=(), ckpt_path=None, **options):
    """Trains whole epochs of three steps."""
    trainer = L.Trainer(
        default_root_dir=tmp_path, strategy=plugin, callbacks=list(callbacks), max_epochs=count, limit_train_batches=3,
        **QUIET | {"devices": 2, "enable_checkpointing": True} | options,
    )  # fmt: skip
    L.seed_everything(0, workers=True, verbose=False)  # in the workers as well, where the data is made
    model = Model()
    trainer.fit(model, ckpt_path=ckpt_path)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.trainer
def test_the_trainer_resumes_with_what_is_left(tmp_path):
    epochs(tmp_path, 2, strategy(), [saving(tmp_path / "half")])
    held = Held()
    epochs(tmp_path, 4, strategy(), [saving(tmp_path / "rest"), held], tmp_path / "half/step=6.ckpt")
    half, rest = (
        torch.load(tmp_path / name, weights_only=True)[KEY] for name in ("half/step=6.ckpt", "rest/step=12.ckpt")
    )
    assert rest["steps"] == 12
    kept = sum(float(part["residual"].abs().sum()) for part in half["parameters"].values())
    assert list(held.start) == [pytest.approx(kept)] * 2


@pytest.mark.trainer
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_checkpoints_go_from_and_to_plain_ddp_other_world_sizes_and_weights_only(tmp_path):
    """Also with last.ckpt as a link, and written by a thread."""
    plain = saving(tmp_path / "ddp")
    epochs(tmp_path, 1, DDPStrategy(start_method="forkserver"), [plain])
    held = Held()
    (tmp_path / "topk").mkdir()  # Lightning makes the link here, perhaps before the thread has made the folder
    ours = saving(tmp_path / "topk", save_last="link")
    epochs(tmp_path, 2, strategy(), [ours, held], tmp_path / "ddp/step=3.ckpt", plugins=AsyncCheckpointIO())
    assert list(held.start) == [0, 0]
    last = tmp_path / "topk/last.ckpt"
    assert last.is_symlink()
    assert torch.load(last, weights_only=True)[KEY]["steps"] == 3  # those that the exchange carried
    epochs(tmp_path, 3, DDPStrategy(start_method="forkserver"), [saving(tmp_path / "back")], last)
    assert KEY not in torch.load(tmp_path / "back/step=9.ckpt", weights_only=True)
    held = Held()
    epochs(tmp_path, 3, strategy(), [saving(tmp_path / "one"), held], last, devices=1)
    assert held.start[0] > 0
    held = Held()
    epochs(tmp_path, 3, strategy(residual_checkpoint=False), [saving(tmp_path / "none"), held], last)
    assert list(held.start) == [0, 0]
    assert KEY not in torch.load(tmp_path / "none/step=9.ckpt", weights_only=True)
    single = saving(tmp_path / "single")
    epochs(tmp_path, 3, "auto", [single], last, devices=1)  # a Trainer without us does not mind
    epochs(tmp_path, 1, strategy(), [saving(tmp_path / "weights", save_weights_only=True)])
    assert KEY not in torch.load(tmp_path / "weights/step=3.ckpt", weights_only=True)


@pytest.mark.trainer
def test_a_run_whose_layers_are_pruned_resumes(tmp_path):
    started, resumed = Held(), Held()

    def pruning() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.1)

    epochs(tmp_path, 2, strategy(), [started, pruning(), saving(tmp_path)])
    epochs(tmp_path, 3, strategy(), [resumed, pruning()], tmp_path / "step=6.ckpt")
    assert not any(started.start)
    assert all(resumed.start)


class Raise(Callback):
    """One rank fails in the middle of an epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2 and trainer.global_rank == 0:
            raise ValueError("out of luck")


@pytest.mark.trainer
def test_a_checkpoint_saved_by_the_failing_rank_alone_neither_hangs_nor_pretends(tmp_path):
    threads, children = threading.active_count(), set(multiprocessing.active_children())
    with pytest.raises(Exception, match="out of luck"):
        epochs(tmp_path, 1, strategy(), [OnExceptionCheckpoint(tmp_path), Raise()])
    (path,) = tmp_path.glob("*.ckpt")
    entry = torch.load(path, weights_only=True)[KEY]
    assert entry["mode"] == "none"
    assert "had ended" in entry["reason"]  # it is the spawning process that saves last
    held = Held()
    epochs(tmp_path, 2, strategy(), [saving(tmp_path / "next"), held], path)
    assert list(held.start) == [0, 0]
    assert threading.active_count() <= threads
    assert set(multiprocessing.active_children()) <= children
