"""Residuals survive in checkpoints, at any world size."""

import copy
import itertools
import multiprocessing
import pickle
import threading
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import laws
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from groups import on_ranks
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from ranks import attached, four_layers, gradient, loss_of, mean_over_ranks, refusal, share, train, undelivered
from test_gloo import MODES
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainers import Module, fit, trainer_of

from lightning_topk import TopKStrategy
from lightning_topk.adapters.lightning import _resume
from lightning_topk.adapters.lightning._resume import entry_to_resume
from lightning_topk.runtime.checkpoint import EMPTY, KEY, absent


class MixedNet(nn.Module):
    """Parameters of three dtypes, and so three buckets from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = four_layers(), nn.Linear(20, 20, dtype=torch.float64)
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))  # a bucket of its own, never exchanged

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).double()) + self.empty.sum()


def trained(rank: int, world: int, settings: dict, mode: str, start: int, stop: int, saved: dict | None = None):
    """Trains from step ``start`` to ``stop``; returns the undelivered parts before and after, and rank 0's entry."""
    net = MixedNet() if mode == "mixed_dtypes" else four_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {"ratio": 0.05, "local_world_size": 1, **settings}
    ddp, state = attached(net, MODES.get(mode, MODES["several_buckets"]), optimizer=optimizer, **settings)
    if saved:
        net.load_state_dict(saved["weights"])
        state.load_state_dict(saved["residuals"])
    before = undelivered(state, net)
    train(ddp, rank, range(start, stop), optimizer)
    left = undelivered(state, net)
    if start % 4:
        state.close()  # it keeps its residuals, as a Trainer saves them after fit
    entry = copy.deepcopy({"weights": net.state_dict(), "residuals": state.state_dict()})
    return before.numpy(), left.numpy(), entry if rank == 0 else None


def on_nodes(local: int, **more: Any) -> dict[str, Any]:
    return {"topology": "hierarchical", "local_world_size": local, **more}


ONE_WAY = {"topology": "allgather", "bidirectional": False}
CHAINS = [
    *(
        [(4, {"topology": topology, "bidirectional": bidirectional}), *((world, then) for world in (2, 3, 1))]
        for (topology, bidirectional), then in zip(laws.ROUTES, itertools.cycle(({}, ONE_WAY)))
    ),
    [(6, on_nodes(2)), (6, on_nodes(3)), (4, on_nodes(2)), (6, on_nodes(2)), (3, {}), (4, on_nodes(2)),
     (2, on_nodes(2)), (4, {"topology": "dense"})],
]  # fmt: skip
"""Worlds and settings, each of which resumes the one before."""


@pytest.mark.parametrize(
    ("mode", "chain"),
    [*((mode, [(3, {})] * 2) for mode in (*MODES, "mixed_dtypes")), *(("several_buckets", chain) for chain in CHAINS)],
)
def test_a_run_resumes_with_one_copy_of_the_model_in_every_mode_and_topology(groups, mode, chain):
    saved, left = None, 0.0
    for number, (world, settings) in enumerate(chain):
        steps = 2 * number, 2 * number + 2
        before, now, saved = groups(world).run(trained, settings, mode, *steps, saved)[0]
        assert abs(before - left).max() < 1e-6, (world, settings)
        dense = settings.get("topology") == "dense" or world == settings.get("local_world_size", 1)
        assert abs(now).max() == 0 if dense else abs(now).max() > 1e-3  # dense delivers everything
        parts = [part for kept in saved["residuals"]["parameters"].values() for part in kept.values()]
        assert dense or sum(part.numel() for part in parts) == len(now)
        left = now


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        return self.b(self.a(x)) if branch else self.a(x)


@pytest.mark.parametrize("topology", ["sharded", "single_server"])
@on_ranks(2)
def test_loaded_residuals_arrive_whatever_happens_before_the_first_step(rank, world, topology):
    entry = {"version": 1, "mode": "mean", "world_size": 2, "steps": 5}
    entry["parameters"] = {name: {"residual": torch.full((64,), 10.0)} for name in ("a.weight", "b.weight")}

    def made(net: nn.Module, unused: bool = False, **options: Any):
        options |= {"topology": topology, "ratio": 1.0, "wire": "fp32"}
        ddp, state = attached(net, {"find_unused_parameters": unused}, **options)
        if "residuals" not in options:
            state.load_state_dict(entry)
        return ddp, state

    def arrived(ddp: DistributedDataParallel, *use: bool) -> float:
        ddp.zero_grad()
        ddp(torch.zeros(4, 8), *use).sum().backward()
        return float(ddp.module.b.weight.grad.mean()) if ddp.module.b.weight.grad is not None else 0.0

    found, frozen = {}, Two()
    ddp, state = made(Two())
    found["seen before a step"] = float(undelivered(state, ddp.module).mean())
    state.close()
    found["after another state was made"] = arrived(made(ddp.module, residuals=state.residuals)[0])
    ddp, _ = made(Two(), unused=True)
    arrived(ddp, False)
    found["unused at first"] = arrived(ddp)
    frozen.a.weight.requires_grad_(False)
    found["its neighbour frozen"] = arrived(made(frozen)[0])
    assert found == dict.fromkeys(found, 10.0)


@pytest.mark.parametrize("settings", [{"topology": "dense"}, {"ratio": 0.1, "error_feedback": False}])
@on_ranks(2)
def test_a_run_that_keeps_no_residuals_drops_loaded_ones_and_warns(rank, world, settings):
    ddp, state = attached(Two(), ratio=0.1)
    ddp(torch.ones(4, 8)).sum().backward()
    entry, said = ranks.shared(state.state_dict()), []
    ddp, state = attached(Two(), announce=said.append, **settings)
    state.load_state_dict(entry)
    ddp(torch.zeros(4, 8)).sum().backward()
    state.close()
    assert not gradient(ddp.module).any()
    assert not undelivered(state, ddp.module).any()
    told = [line for line in said if "residuals of 2 parameters were dropped, since this run keeps none" in line]
    assert len(told) == (rank == 0)


@on_ranks(2)
def test_an_entry_that_one_rank_refuses_or_that_differs_changes_no_rank(rank, world):
    ddp, state = attached(four_layers(), ratio=0.05)
    loss_of(ddp, rank, 0).backward()
    good, before = ranks.shared(state.state_dict()), undelivered(state, ddp.module)
    name = next(iter(good["parameters"]))
    for times in (torch.nan, 2.0):
        bad = {"residual": good["parameters"][name]["residual"] * (times if rank else 1.0)}
        with pytest.raises(ValueError, match=r"NaN|with the same entry on every rank"):
            state.load_state_dict({**good, "steps": 700, "parameters": {**good["parameters"], name: bad}})
        assert state.steps == 1
        assert torch.equal(undelivered(state, ddp.module), before)
    loss_of(ddp, rank, 1).backward()


@on_ranks(2)
def test_residuals_of_parameters_that_are_no_longer_there_are_dropped_with_a_warning(rank, world):
    said = []
    ddp, state = attached(four_layers(), ratio=0.05)
    loss_of(ddp, rank, 0).backward()
    model, state = attached(four_layers(), ratio=0.05, residuals=state.residuals, announce=said.append)
    loss_of(model, rank, 1).backward()
    state.close()
    assert sum("of 8 parameters were dropped, since the model has no such" in each for each in said) == (rank == 0)


@on_ranks(2)
def test_a_damaged_or_foreign_entry_is_refused_with_a_remedy(rank, world):
    ddp, state = attached(four_layers(), ratio=0.05)
    loss_of(ddp, rank, 0).backward()
    good = ranks.shared(state.state_dict())
    name = next(iter(good["parameters"]))
    _, state = attached(four_layers(), ratio=0.05)

    def changed(**changes):
        return {**good, **changes}

    def holding(part):
        return changed(parameters={**good["parameters"], name: {"residual": part}})

    unsound = good["parameters"][name]["residual"].clone()
    unsound[0] = torch.nan
    cases = [
        ("it was not written by lightning_topk", {"state": 1}),
        ("converted from a folder", changed(mode="sharded")),
        ("from a rank other than 0", changed(mode="on rank 0", parameters={})),
        ("its mode is None", changed(mode=None)),
        ("version 99", changed(version=99)),
        ("steps='7' must be an integer", changed(steps="7")),
        ("no parameter 'other.weight'", changed(parameters={"other.weight": good["parameters"][name]})),
        ("damaged", holding([0.0] * 400)),
        ("is (2, 3) of torch.float32 instead of (", holding(torch.zeros(2, 3))),
        ("of torch.int64 instead of", holding(torch.zeros(len(unsound), dtype=torch.int64))),
        ("", holding(torch.zeros(len(unsound)).to_sparse())),
        ("has a NaN or an infinity", holding(unsound)),
    ]
    said = [(words, refusal(state.load_state_dict, entry)) for words, entry in cases]
    untouched = state.steps == 0 and not any(p in state.residuals for p in state.names)
    state.load_state_dict(changed(settings={"ratio": 0.05}, units={name: ["SGD", 0.1]}))  # as earlier versions wrote
    assert ranks.unsaid(said) == []
    assert all("residual_checkpoint=False" in found for _, found in said)
    assert max(len(found) for _, found in said) < 400
    assert untouched, "a refused entry changed the residuals"


@on_ranks(2)
def test_a_state_dict_on_rank_0_alone_says_that_every_rank_must_call_it(rank, world):
    model, state = attached(four_layers(), ratio=0.05, timeout=timedelta(seconds=1))
    loss_of(model, rank, 0).backward()
    said = "" if rank else refusal(state.state_dict)
    dist.barrier()
    assert rank or "Call state_dict(), or the Trainer's save_checkpoint, on every rank at the same point" in said


@on_ranks(2)
def test_ranks_that_load_different_entries_are_told_to_load_the_same(rank, world):
    model, state = attached(four_layers(), ratio=0.05)
    loss_of(model, rank, 0).backward()
    entry = ranks.shared(state.state_dict())
    longer = refusal(state.load_state_dict, {**entry, "steps": 1 + rank})
    assert "the step count is 1 on rank 0 and 2 on rank 1" in longer
    name, *_ = entry["parameters"]
    entry["parameters"][name]["residual"][rank] += 1
    assert "the checksum of residuals is" in refusal(state.load_state_dict, entry)
    state.close()
    _, state = attached(four_layers(), ratio=0.05, timeout=timedelta(seconds=1))
    said = "" if rank else refusal(state.load_state_dict, entry)
    dist.barrier()
    assert rank or "Call load_state_dict with the same entry on every rank" in said


@on_ranks(2)
def test_a_state_is_neither_copied_nor_pickled(rank, world):
    _, state = attached(four_layers(), ratio=0.05)
    assert copy.deepcopy({"topk": state})["topk"] is state
    with pytest.raises(TypeError, match=r"Save what its state_dict\(\) returns"):
        pickle.dumps(state)


@on_ranks(2)
def test_torch_distributed_checkpoint_refuses_to_save_the_residuals_of_a_ddp_model(rank, world, tmp_path):
    """Every rank's entry can be saved in a file of its own, but only rank 0's can be loaded."""
    _, state = attached(four_layers(), ratio=0.05)
    file = tmp_path / str(rank)
    torch.save(state.state_dict(), file)
    said = refusal(state.load_state_dict, torch.load(file, weights_only=True))
    for saved in (state, state.state_dict()):
        with pytest.raises(CheckpointException, match=r"Save rank 0's state\.state_dict\(\) with torch\.save"):
            dcp.save({"topk": saved}, checkpoint_id=tmp_path / "folder")
    with pytest.raises(CheckpointException, match=r"Save rank 0's state\.state_dict\(\) with torch\.save"):
        dcp.async_save({"topk": state.state_dict()}, checkpoint_id=tmp_path / "later").result()
    assert ("it comes from a rank other than 0" in said) == (rank != 0)


@pytest.mark.parametrize("formats", [("contiguous_format", "channels_last"), ("channels_last", "contiguous_format")])
@on_ranks(2)
def test_a_checkpoint_does_not_depend_on_the_memory_format(rank, world, formats):
    before, after = (getattr(torch, name) for name in formats)
    data = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
    net, alone = nn.Conv2d(3, 4, 2, bias=False), nn.Conv2d(3, 4, 2, bias=False)
    model, state = attached(net.to(memory_format=before), ratio=0.1, wire="fp32")
    alone.load_state_dict(net.state_dict())
    model(data).square().sum().backward()
    alone(data).square().sum().backward()
    kept = mean_over_ranks(alone.weight.grad) - net.weight.grad
    entry = ranks.shared(state.state_dict())
    model, state = attached(nn.Conv2d(3, 4, 2, bias=False).to(memory_format=after), ratio=1.0, wire="fp32")
    state.load_state_dict(entry)
    (0 * model(data)).sum().backward()
    assert kept.abs().max() > 0.1
    torch.testing.assert_close(model.module.weight.grad.double(), kept, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_a_checkpoint_knows_parameters_whatever_wraps_or_prunes_them(rank, world):
    def wrapped(net: nn.Module) -> nn.Module:
        net[0], net[1] = checkpoint_wrapper(net[0]), torch.compile(net[1], backend="eager")
        return net

    def pruned(net: nn.Module) -> nn.Module:
        prune.l1_unstructured(net[3], "weight", 0.5)
        return net

    found, entry = [], None
    for wrap in (wrapped, copy.copy, wrapped, pruned):
        net = wrap(four_layers())
        model, state = attached(net, ratio=0.05, dense_parameters="1.bias")
        if entry is None:
            loss_of(model, rank, 0).backward()
        else:
            state.load_state_dict(entry)
        prune.l1_unstructured(net[2], "weight", 0.5)
        entry = ranks.shared(state.state_dict())
        found.append({name: kept["residual"] for name, kept in entry["parameters"].items()})
    assert found[0]["0.weight"].any()
    torch.testing.assert_close(found, found[:1] * 4)


@pytest.mark.parametrize(
    ("checkpoint", "use", "words", "steps"),
    [
        ({KEY: {"version": 1, "mode": "mean", "steps": 7, "parameters": {}}}, False, "residual_checkpoint=False", 7),
        ({"lr_schedulers": []}, True, "saved by another strategy", 0),
        ({}, True, "weights-only", 0),
        ({KEY: absent("out of luck", 7)}, True, "out of luck", 7),
    ],
)
def test_a_run_that_starts_from_zero_says_why(monkeypatch, checkpoint, use, words, steps):
    said: list[str] = []
    monkeypatch.setattr(_resume, "rank_zero_info", said.append)  # whatever level other tests set
    assert entry_to_resume({"lr_schedulers": [], **checkpoint} if checkpoint else {}, use) == {**EMPTY, "steps": steps}
    assert [words in line and line.endswith("; residuals start at zero.") for line in said] == [True]


def epochs(
    rank: int | None, world: int, folder: Path | None, count: int, strategy: str | dict = "topk",
    ckpt: Path | None = None, options: dict | None = None, **checkpoint: Any,
) -> float:  # fmt: skip
    """Trains whole epochs of three steps and saves each in a folder; returns the sum of its first residuals."""
    found = [0.0]

    def look(trainer: Any, module: nn.Module) -> None:
        state = getattr(trainer.strategy, "topk_state", None)
        found[0] = 0.0 if state is None else float(share(state, module).abs().sum())

    settings = {"ratio": 0.05, **(strategy if isinstance(strategy, dict) else {})}
    ours = DDPStrategy() if strategy == "ddp" else strategy if rank is None else TopKStrategy(**settings)
    saves = [ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **checkpoint)] if folder else []
    fit(
        rank, world, None, ours, [LambdaCallback(on_train_start=look), *saves], ckpt, monitor=False,
        max_epochs=count, limit_train_batches=3, enable_checkpointing=folder is not None, **(options or {}),
    )  # fmt: skip
    return found[0]


def entry_of(path: Path) -> Any:
    return torch.load(path, weights_only=True).get(KEY)


@pytest.mark.trainer
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_trainer_resumes_with_residuals_also_from_and_to_plain_ddp(groups, tmp_path):
    def run(folder: str, count: int, *arguments: Any, world: int = 2) -> list[float]:
        return groups(world).run(epochs, tmp_path / folder, count, *arguments)

    run("ddp", 1, "ddp")
    (tmp_path / "topk").mkdir()  # Lightning makes the link here, perhaps before the thread makes the folder
    assert groups(2).run(linked, tmp_path / "topk", tmp_path / "ddp/step=3.ckpt") == [0, 0]
    last = tmp_path / "topk/last.ckpt"
    assert last.is_symlink()
    assert entry_of(last)["steps"] == 3  # steps with an exchange
    kept = sum(float(part["residual"].abs().sum()) for part in entry_of(last)["parameters"].values())
    assert run("same", 3, "topk", last) == [pytest.approx(kept / 2)] * 2
    assert entry_of(tmp_path / "same/step=9.ckpt")["steps"] == 6
    run("back", 3, "ddp", last)
    assert run("one", 3, "topk", last, world=1)[0] > 0
    assert run("none", 3, {"residual_checkpoint": False}, last) == [0, 0]
    left_out = entry_of(tmp_path / "none/step=9.ckpt")
    assert (left_out["mode"], left_out["steps"]) == ("none", 6), "without residuals, but schedules go on"
    epochs(None, 1, tmp_path / "single", 3, "auto", last)  # a Trainer without this package ignores the entry
    groups(2).run(partial(epochs, save_weights_only=True), tmp_path / "weights", 1)
    assert entry_of(tmp_path / "weights/step=3.ckpt") is None


def linked(rank: int, world: int, folder: Path, ckpt: Path) -> float:
    return epochs(rank, world, folder, 2, "topk", ckpt, {"plugins": AsyncCheckpointIO()}, save_last="link")


@pytest.mark.trainer
@on_ranks(2)
def test_a_fit_that_fails_before_the_model_is_wrapped_leaves_nothing_to_the_next(rank, world, tmp_path):
    def found(trainer: Any, module: nn.Module) -> None:
        seen.append((trainer.strategy.topk_state.steps, bool(share(trainer.strategy.topk_state, module).any())))

    path, seen = tmp_path / "one.ckpt", []
    fit(rank, world, max_steps=3)[0].save_checkpoint(path)
    look = LambdaCallback(on_train_start=found)
    trainer = trainer_of(rank, world, TopKStrategy(ratio=0.05), [look], max_steps=9)
    with mock.patch.object(DistributedDataParallel, "__init__", side_effect=KeyError), pytest.raises(KeyError):
        trainer.fit(Module(), ckpt_path=path)
    trainer.fit(Module())
    assert seen == [(0, False)]


def fail(trainer: Any, *_: Any) -> None:
    if trainer.global_step == 2 and trainer.global_rank == 0:
        raise ValueError("out of luck")


@pytest.mark.trainer
def test_a_failing_ranks_own_checkpoint_neither_hangs_nor_holds_residuals(groups, tmp_path):
    threads, children = threading.active_count(), set(multiprocessing.active_children())
    failing = TopKStrategy(ratio=0.05, start_method="forkserver")
    callbacks = [OnExceptionCheckpoint(tmp_path), LambdaCallback(on_train_batch_start=fail)]
    with pytest.raises(Exception, match="out of luck"):
        fit(None, 2, strategy=failing, callbacks=callbacks, enable_checkpointing=True)
    assert threading.active_count() <= threads
    assert set(multiprocessing.active_children()) <= children
    (path,) = tmp_path.glob("*.ckpt")
    assert entry_of(path)["mode"] == "none"
    assert "had ended" in entry_of(path)["reason"]  # the spawning process saves last
    assert groups(2).run(epochs, None, 2, "topk", path) == [0, 0]


class Storages(TorchDispatchMode):
    """The most bytes of new storages that were alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = weakref.WeakValueDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each._base is None:
                self.alive[id(each)] = each
        kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self.alive.values()}
        self.most = max(self.most, sum(kept.values()))
        return out


@pytest.mark.parametrize("settings", [{}, {"topology": "hierarchical", "local_world_size": 2}], ids=str)
@on_ranks(4)
def test_a_checkpoint_takes_one_bucket_more_and_a_collective_a_bucket(rank, world, settings):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(200, 200) for _ in range(12)])
    model, state = attached(net, {"bucket_cap_mb": 0.16}, ratio=0.05, **settings)
    for step in range(3):
        train(nn.Sequential(nn.Linear(20, 200), model), rank, [step])
    buckets = len(state.last_buckets)
    assert buckets >= 5
    reduce, calls = dist.reduce, []
    with Storages() as storages, mock.patch.object(dist, "reduce", lambda *a, **k: (calls.append(a), reduce(*a, **k))):
        entry = state.state_dict()
    model_bytes = 4 * sum(p.numel() for p in net.parameters())
    own = model_bytes if rank == 0 else 0  # the entry itself
    assert storages.most - own < 2 * model_bytes / buckets, "a bucket, and a parameter of it"
    assert len(calls) == buckets
    assert len(entry["parameters"]) == (24 if rank == 0 else 0)
