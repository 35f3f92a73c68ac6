"""``attach`` as it is called by hand: what it takes, what it refuses, and what a copy of a model is."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_topk import TopKConfig, attach
from lightning_topk.core import ops
from lightning_topk.lightning.fabric import TopKStrategy
from lightning_topk.runtime.lanes import IDLE, ThreadLane


def test_what_a_user_should_know_is_seen_without_any_setting_of_the_log(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script: pytest has some
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    attach(nn.Linear(3, 3), ratio=0.1).close()
    assert "nothing is sent and nothing is compressed" in capfd.readouterr().err


def test_a_bare_module_of_one_process_is_trained_alone():
    said: list[str] = []
    net = nn.Linear(3, 3)
    state = attach(net, ratio=0.1, announce=said.append)
    net(torch.randn(2, 3)).sum().backward()
    assert said == ["lightning_topk: there is one process only, so nothing is sent and nothing is compressed."]
    assert not state.exchanged
    assert set(state.report().bytes.values()) == {0}
    assert state.predicted().uplink == state.nonfinite_steps == 0
    entry = state.state_dict()
    state.load_state_dict(entry)
    assert len(said) == 1
    state.load_state_dict({**entry, "parameters": {"weight": {}}})
    assert "residuals are ignored" in said[1]
    state.close()


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((nn.Linear(3, 3), 0.1), {}, r"config=0\.1 is a float; it must be a TopKConfig\. .* such as ratio=0\.1"),
        ((nn.Linear(3, 3),), {"ratoi": 0.1}, r"unknown argument ratoi=0\.1; did you mean 'ratio'\?"),
        ((nn.Linear(3, 3),), {"tiemout": 1}, r"did you mean 'timeout'\?"),
        ((3,), {}, "takes a DistributedDataParallel model, not a int"),
    ],
)
def test_mistaken_arguments_are_named_with_the_remedy(arguments, settings, message):
    with pytest.raises(TypeError, match=message):
        attach(*arguments, **settings)


def other_models(rank: int, world: int) -> list[str]:
    messages = []
    for model in (nn.Linear(4, 4), FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))):
        with pytest.raises(TypeError) as raised:
            attach(model, ratio=0.1)
        messages.append(str(raised.value))
    return messages


def test_models_that_nothing_known_wraps_are_refused_in_words(groups):
    for bare, sharded in groups(2).run(other_models):
        assert "a bare Linear on one of 2 ranks. Pass attach(DistributedDataParallel(model), ...)" in bare
        assert "is FSDP1, which has no hook" in sharded


def without_numba(rank: int, world: int, failed: dict[str, str]) -> tuple[list[str], bool]:
    said: list[str] = []
    with mock.patch.object(ops, "fast", return_value=None), mock.patch.object(ops, "FAILED", failed):
        model = DistributedDataParallel(nn.Linear(30, 30))
        state = attach(model, ratio=0.1, announce=said.append)
        for _ in range(3):
            model(torch.randn(2, 30)).sum().backward()
        state.close()
    return [each for each in said if "numba" in each], bool(model.module.weight.grad.any())


def test_that_numba_is_missing_or_fails_is_said_once_with_the_remedy(groups):
    for failed, words in (({}, "pip install numba"), ({"numba": "OSError: no disk"}, "fails here: OSError: no disk")):
        (said, trained), (silent, _) = groups(2).run(without_numba, failed)
        assert len(said) == 1
        assert words in said[0]
        assert trained
        assert silent == []


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def emit(self, record):
        self.words.append(record.getMessage())


def copied(rank: int, world: int) -> tuple[int, list[str]]:
    """Copies of an attached model train as plain DDP models do; returns how many, and what was said."""
    logger, heard, copies = logging.getLogger("lightning_topk"), Heard(), []
    logger.addHandler(heard)
    for options in ({}, {"find_unused_parameters": True}):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20))
        plain = DistributedDataParallel(copy.deepcopy(net), **options)
        ddp = DistributedDataParallel(net, **options)
        state = attach(ddp, ratio=0.1)
        ddp(torch.randn(4, 20)).square().sum().backward()
        saved = io.BytesIO()
        torch.save(ddp, saved)
        saved.seek(0)
        made = [copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), torch.load(saved, weights_only=False)]
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(rank))
        for model in (plain, *made):
            model.load_state_dict(plain.state_dict())
            model.zero_grad()
            model(x).square().sum().backward()
            for given, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(given.grad, expected.grad)
        sent = state.report().bytes
        assert sent["uplink"] > 0
        state.close()
        again = attach(made[0], ratio=0.1)  # as the warning says
        made[0](x).square().sum().backward()
        assert again.report().bytes["uplink"] > 0
        again.close()
        copies += made
    logger.removeHandler(heard)
    return len(copies), heard.words


def test_an_attached_model_can_be_copied_and_its_copies_say_that_they_do_not_compress(groups):
    for count, words in groups(2).run(copied):
        assert count == 6
        assert sum("a copy of a DDP model has no communication hook" in line for line in words) == count


def uneven(rank: int, world: int) -> tuple[float, str]:
    """Under ``join`` with uneven inputs: the difference to DDP when all is sent, and the refusal."""
    weights = []
    for compressed in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(30, 20))
        state = attach(ddp, ratio=1.0, wire="fp32") if compressed else None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        with ddp.join():
            for _ in range(3 + 2 * rank):
                optimizer.zero_grad()
                ddp(torch.randn(4, 30, generator=generator)).square().mean().backward()
                optimizer.step()
        weights.append(ddp.module.weight.detach().clone())
    message = ""
    try:
        with ddp.join(divide_by_initial_world_size=False):
            ddp(torch.randn(4, 30))
    except ValueError as error:
        message = str(error)
    state.close()
    return float((weights[0] - weights[1]).abs().max()), message


def test_uneven_inputs_are_joined_as_by_ddp_or_refused(groups):
    for difference, message in groups(2).run(uneven):
        assert difference < 1e-6
        assert "join(divide_by_initial_world_size=False) is not supported" in message


def test_the_thread_of_a_lane_that_is_left_open_can_be_stopped_and_the_lane_works_again():
    """Lightning's tests stop daemon threads that have a ``stop``, and fail if any other is left."""
    lane, before = ThreadLane(abreast=2), set(threading.enumerate())

    def give(number):
        yield
        return torch.tensor(number)

    for number in range(3):
        promised, future = lane.promise()
        lane.submit(give(number), promised)
        assert int(future.wait()) == number
        (thread,) = set(threading.enumerate()) - before
        assert thread.daemon
        thread.stop()
        assert not thread.is_alive()
    assert lane.close()


def test_an_idle_lane_has_no_thread_and_works_again():
    lane, found = ThreadLane(), []

    def give(number):
        yield
        return torch.tensor(number)

    for number in range(3):
        promised, future = lane.promise()
        lane.submit(give(number), promised)
        found.append(int(future.wait()))
        assert lane._thread is not None
        deadline = time.monotonic() + 20 * IDLE
        while lane._thread is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lane._thread is None
    assert found == [0, 1, 2]
    assert lane.close()


def test_fabric_sets_up_a_module_without_processes_as_ddp_strategy_does():
    strategy = TopKStrategy()
    strategy.parallel_devices = [torch.device("cpu")]
    with mock.patch("lightning.fabric.strategies.ddp.DistributedDataParallel") as ddp:
        strategy.setup_module(mock.Mock())
    assert ddp.called
    assert strategy.topk_states == []


def test_fabric_takes_a_config_or_settings_and_not_both():
    assert TopKStrategy(TopKConfig(saving=20)).config == TopKStrategy(saving=20).config
    with pytest.raises(ValueError, match="either config or the settings"):
        TopKStrategy(TopKConfig(saving=20), wire="fp32")


def with_optimizers(rank: int, world: int) -> list[str]:
    """What is said of several optimizers, and what is refused: no optimizer, and momentum that comes later."""
    found: list[str] = []
    net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    pair = [torch.optim.AdamW(part.parameters()) for part in net]
    ddp = DistributedDataParallel(net)
    state = attach(ddp, saving=20, optimizer=pair, announce=found.append)
    ddp(torch.randn(2, 20)).sum().backward()
    for optimizer in pair:
        optimizer.step()
    state.close()
    for wrong in (net.parameters(), [net], pair[0].param_groups):
        with pytest.raises(TypeError, match="must be a torch optimizer, a list of them, or a function"):
            attach(DistributedDataParallel(net), saving=20, optimizer=wrong)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = DistributedDataParallel(net)
    state = attach(ddp, ratio=0.1, momentum=0.9, optimizer=optimizer)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    with pytest.raises(ValueError, match="would apply it again") as raised:
        ddp(torch.randn(2, 20)).sum().backward()
    found.append(str(raised.value))
    state.close()
    return found


def test_several_optimizers_are_taken_and_what_is_none_and_momentum_that_comes_later_are_refused(groups):
    (said, later), (other,) = groups(2).run(with_optimizers)
    assert said.startswith("lightning_topk: the momentum of AdamW is adapted to compression")
    assert other == later
    assert "SGD has momentum 0.95 of its own" in later
    assert "a scheduler such as OneCycleLR (cycle_momentum=False) has set it" in later


def resumed(rank: int, world: int) -> list[str]:
    """What is said when a run goes on with other settings."""
    net, said = nn.Linear(40, 40), []
    state = attach(DistributedDataParallel(net), ratio=0.1)
    (entry,) = [state.state_dict()]
    entries = [entry]
    torch.distributed.broadcast_object_list(entries, src=0)
    state.close()
    for config in (
        TopKConfig(0.1),
        TopKConfig(0.1, wire="int4"),
        TopKConfig(0.2, wire="bf16"),
        TopKConfig(topology="single_server", error_feedback=False),
        TopKConfig(lambda step: 0.1),
    ):
        state = attach(DistributedDataParallel(net), config, announce=said.append)
        state.load_state_dict(entries[0])
        state.close()
    return [words for words in said if "goes on" in words]


def test_a_run_that_goes_on_with_other_settings_says_so(groups):
    said, silent = groups(2).run(resumed)
    assert silent == []
    begin = "lightning_topk: the run goes on with other settings than the checkpoint's: "
    assert said[:2] == [
        f"{begin}ratio=0.2 instead of 0.1, wire='bf16' instead of 'int4'.",
        f"{begin}ratio=None instead of 0.1, saving=50 instead of None, wire='bf16' instead of 'int4', "
        "topology='single_server' instead of 'sharded', error_feedback=False instead of True.",
    ]
    assert said[2].startswith(f"{begin}ratio=[0.1, ")
    assert len(said) == 3
