"""The current device, which is the first GPU on every rank unless the user sets it, decides nothing.

NCCL sends objects through it. So every object collective of the package asks which device is current.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from groups import on_ranks
from ranks import attach, four_layers, loss_of, train
from test_fsdp import made
from test_model_parallel import fit as fit_sharded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainers import fit

import lightning_topk
from lightning_topk import consensus
from lightning_topk.adapters.fsdp import hook
from lightning_topk.adapters.lightning import model_parallel
from lightning_topk.core import ops

OBJECTS = [name for name in dir(c10d) if name.endswith(("_object", "_object_list")) and not name.startswith("_")]
CPU = torch.device("cpu")


@contextmanager
def asked(current: Callable[[], Any]) -> Iterator[list[Any]]:
    """Notes the current device in each object collective that the package calls, itself or through torch."""
    seen: list[Any] = []

    def asks(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        frame: Any = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(str(Path(lightning_topk.__file__).parent)):
            seen.append(current())
        return function(*args, **options)

    with ExitStack() as patches:
        for name in OBJECTS:
            for module in (dist, c10d):
                patches.enter_context(mock.patch.object(module, name, partial(asks, getattr(module, name))))
        yield seen


@contextmanager
def asked_on_cpus() -> Iterator[list[Any]]:
    """As :func:`asked`, of ranks without GPUs: the device is None unless the package makes the model's current."""
    current: list[Any] = [None]

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    with ExitStack() as patches:
        for module in (consensus, hook, model_parallel):
            patches.enter_context(mock.patch.object(module, "on_device", on_device))
        yield patches.enter_context(asked(lambda: current[-1]))


def ddp(rank: int, world: int, tmp_path: Path) -> None:
    net = four_layers()
    model = DistributedDataParallel(net)
    for _ in range(2):
        state = attach(model, saving=20, optimizer=SGD(net.parameters(), lr=0.1, momentum=0.9))
        train(model, rank, range(2))
        state.report()
        state.load_state_dict({**state.state_dict(), "mode": "mean", "parameters": {}})


def fsdp(rank: int, world: int, tmp_path: Path) -> None:
    net, state = made(2, 2)
    loss_of(net, rank, 0, branch=False).backward()
    state.load_state_dict(state.state_dict())
    state.full_state_dict()


def trainer(rank: int, world: int, tmp_path: Path) -> None:
    trainer, _ = fit(rank, world)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    fit(rank, world, ckpt_path=tmp_path / "one.ckpt", max_steps=7)


def sharded_trainer(rank: int, world: int, tmp_path: Path) -> None:
    trainer, _ = fit_sharded(rank, world)
    trainer.save_checkpoint(tmp_path / "sharded")
    fit_sharded(rank, world, ckpt=tmp_path / "sharded", max_steps=6)


@pytest.mark.parametrize("train", [ddp, fsdp, trainer, sharded_trainer])
@on_ranks(4)
def test_objects_are_sent_through_the_models_device_in_every_way_to_train(rank, world, train, tmp_path):
    with asked_on_cpus() as seen:
        train(rank, world, tmp_path)
    assert set(seen) == {CPU}, seen
    assert len(seen) > 3


@pytest.mark.parametrize("some", [False, True])
def test_attach_sends_objects_through_the_second_gpu_if_the_model_is_there(monkeypatch, some):
    """On a fake GPU: the module inside a DDP model of the CPU is replaced."""
    current: list[Any] = [0]

    @contextmanager
    def device(entered: torch.device) -> Iterator[None]:
        current.append(entered.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    fast = mock.Mock(return_value=None)
    monkeypatch.setattr(ops, "fast", fast)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name in OBJECTS:
        monkeypatch.setattr(dist, name, lambda rows, value, group: rows.__setitem__(slice(None), [value] * len(rows)))
    try:
        model = DistributedDataParallel(nn.Linear(20, 20), process_group=dist.new_group([0, 1]) if some else None)
        with FakeTensorMode(), mock.patch.object(nn.Linear, "reset_parameters"):  # it draws on the GPU
            model.module = nn.Linear(20, 20, device="cuda:1")
            optimizer = SGD(model.module.parameters(), lr=0.1, momentum=0.9)
        with asked(lambda: current[-1]) as seen:
            state = lightning_topk.attach(model, saving=10, optimizer=optimizer, local_world_size=1)
            state.close()
    finally:
        dist.destroy_process_group()
    assert set(seen) == {1}, seen
    assert len(seen) == 7 + some
    assert {call.args for call in fast.call_args_list} == {(torch.device("cuda", 1),)}, "kernels are tried there"
