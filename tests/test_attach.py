"""``attach`` called by hand: valid and invalid arguments, warnings, and copies of an attached model."""

import copy
import io
import itertools
import logging
import os
import pickle
import re
import time
from datetime import timedelta
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from groups import on_ranks
from ranks import alike, attach, attached, batch, four_layers, gradient, loss_of, mean_over_ranks, refusal, train
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.swa_utils import AveragedModel

from lightning_topk import TopKConfig
from lightning_topk.adapters.checks import check_parameters
from lightning_topk.bucket import all_names_of, names_of
from lightning_topk.core import ops
from lightning_topk.runtime import groups as agreement
from lightning_topk.schedule import ExponentialWarmup, Schedule
from lightning_topk.volume import Volume


def test_a_bare_module_of_one_process_is_trained_alone(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script: pytest adds handlers
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    state = attach(nn.Linear(3, 3), ratio=0.1)
    assert state.report().bytes == state.predicted() == state.predicted(0) == Volume()
    state.load_state_dict({**state.state_dict(), "steps": 7, "parameters": {"weight": {}}})
    assert state.state_dict()["steps"] == 7
    said = capfd.readouterr().err
    assert said.startswith("lightning_topk: a single rank exchanges no gradients, so nothing is compressed.\n")
    assert "residuals are ignored" in said


def test_models_that_cannot_be_exchanged_are_refused_with_the_remedy():
    assert "must be a TopKConfig" in refusal(attach, nn.Linear(3, 3), 0.1)
    assert "did you mean 'timeout'?" in refusal(attach, nn.Linear(3, 3), tiemout=1)
    two_devices = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    message = refusal(check_parameters, names_of(two_devices))
    assert "parameters are on cpu, meta: the exchange runs on one device per" in message
    two_devices[1].requires_grad_(False)
    check_parameters(names_of(two_devices))


EVERYTHING = {"ratio": 1.0, "wire": "fp32"}


def halving(step: int) -> float:
    return max(0.5 / (1 + step), 0.01)


def short(step: int) -> float:
    return [0.5, 0.2][step]  # made for a run of two steps


def ddp(net: nn.Module | None = None, **options) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(3, 3) if net is None else net, **options)


def replicated() -> nn.Module:
    """A module that torch replicates on a mesh of one dimension, as FSDP2 does on a mesh of two."""
    if torch.__version__ < "2.10":  # there by DDP
        return replicate_by_ddp(nn.Linear(3, 3))
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (2,)))


@on_ranks(2)
def test_unsupported_models_and_settings_that_differ_by_rank_are_refused(rank, world):
    net, taken = nn.Linear(3, 3), ddp()
    delayed = {"delay_all_reduce_named_params": [("weight", net.weight)], "param_to_hook_all_reduce": net.bias}
    by_epoch = ExponentialWarmup(0.2, epochs=2)
    taken.register_comm_hook(None, allreduce_hook)
    cases = {
        "This is a Linear on one of 2 ranks. Pass the model that training calls": (net, {}),
        "FSDP1 has no hook for": (FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), {}),
        "already has another communication hook, and DDP takes only one": (taken, {}),
        "wrapped by torch's replicate()": (nn.Sequential(replicated()), {}),
        "Use DistributedDataParallel(model)": (replicate_by_ddp(nn.Linear(3, 3)), {}),
        "skip_all_reduce_unused_params=True is not supported with top-k exchange": (
            ddp(skip_all_reduce_unused_params=True, find_unused_parameters=True), {},
        ),
        "delay_all_reduce_named_params": (ddp(net, **delayed), {}),
        "complex64": (ddp(nn.Linear(3, 3, dtype=torch.complex64)), {}),
        "not both": (ddp(), {"config": TopKConfig(), "ratio": 0.1}),
        "Adam has momentum 0.9 of its own": (ddp(net), {"momentum": 0.9, "optimizer": Adam(net.parameters())}),
        "Pass optimizer=": (ddp(), {"momentum": 0.9}),
        "must be a torch optimizer, a list of them, or a function": (ddp(), {"optimizer": net.parameters()}),
        "the function optimizer= returned None, but must return a list of": (ddp(), {"optimizer": lambda: None}),
        "the function optimizer= returned [Linear(in_": (ddp(), {"optimizer": lambda: [net]}),
        "epochs=2) depends on the epoch": (ddp(), {"ratio": 0.1, "server_ratio": by_epoch}),
        "optimizer= is a function on rank 0 and missing on rank 1": (ddp(net), {"optimizer": None if rank else list}),
        "the optimizer of 'bias' is Adam on rank 0 and missing on rank 1": (
            ddp(net), {"optimizer": Adam([*net.parameters()][: 2 - rank])},
        ),
        "epoch=3 must be a function of no arguments": (ddp(), {"epoch": 3}),
        "optimizer=<class 'torch.optim.sgd.SGD'> must be a function of no arguments": (ddp(), {"optimizer": SGD}),
        "timeout=datetime.timedelta(0) must be a timedelta above 0": (ddp(), {"timeout": timedelta(0)}),
        "residuals=True must be the .residuals of an earlier state": (ddp(), {"residuals": True}),
        "scaler=True must be a GradScaler": (net, {"scaler": True}),
        "announce=False must be a function of a message": (net, {"announce": False}),
        "broadcast_weights=False applies only to models wrapped by fully_shard": (ddp(), {"broadcast_weights": False}),
        "2 ranks cannot be divided into nodes of 3": (ddp(), {"local_world_size": 3, "topology": "hierarchical"}),
        "local_world_size is 1 on rank 0 and 2 on rank 1": (ddp(), {"local_world_size": rank + 1}),
        "ratio is 0.1 on rank 0 and 0.2 on rank 1": (ddp(), {"ratio": 0.1 * (1 + rank)}),
        "ratio is [0.5, 0.25": (ddp(), {"ratio": 0.5 if rank else halving}),
    }  # fmt: skip
    said = [(words, refusal(attach, model, **settings)) for words, (model, settings) in cases.items()]
    fast, failed = (None, {"numba": "ImportError: no LLVM"}) if rank else (ops, {})
    with mock.patch.object(ops, "fast", return_value=fast), mock.patch.object(ops, "FAILED", failed):
        said.append(("numba is in use on rank 0 and broken on rank 1", refusal(attach, ddp())))
    for ratio in (halving, short):  # equal functions of different processes are equal
        attach(ddp(), ratio=ratio)
    assert ranks.unsaid(said) == []


STEPS = (
    "runtime.groups._own_group", "messages.start_message",
    "runtime.groups.Groups.connect", "optim.optimizers.Optimizers.start", "adapters.{}.described",
)  # fmt: skip


@pytest.mark.parametrize("error", [KeyError, TypeError, KeyboardInterrupt])
@on_ranks(2)
def test_whatever_attach_raises_leaves_nothing_open(rank, world, error):
    """A user's function, a library or Ctrl+C may raise anything, at the second call of a step."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    sharded = fully_shard(four_layers(), mesh=mesh["shard"])
    wrappers = {"ddp": (ddp(), {}), "fsdp.hook": (sharded, {"process_group": mesh["replicate"]})}
    attach(sharded, process_group=mesh["replicate"], ratio=0.1).close()  # groups of some ranks are kept
    before, hooks = ranks.open_now()[2], len(_global_optimizer_post_hooks)
    for (wrapper, (model, options)), step in itertools.product(wrappers.items(), STEPS):
        path = f"lightning_topk.{step.format(wrapper)}"
        if wrapper == "ddp" or "_own_group" not in path:
            with mock.patch(path, side_effect=error), pytest.raises(error):
                attach(model, ratio=0.1, announce=lambda words: None, **options)
        assert (ranks.open_now()[2], len(_global_optimizer_post_hooks)) == (before, hooks), (wrapper, step)
    for model, options in wrappers.values():
        attach(model, ratio=0.1, **options)


@on_ranks(2)
def test_a_rank_that_fails_in_attach_does_not_keep_the_others_waiting(rank, world):
    before = time.monotonic()
    with mock.patch("lightning_topk.adapters.ddp.all_names_of", side_effect=KeyError if rank else all_names_of):
        if rank:
            with pytest.raises(KeyError):
                attach(ddp(), ratio=0.1)
        else:
            assert refusal(attach, ddp(), ratio=0.1)
    assert time.monotonic() - before < 10


@on_ranks(2)
def test_parameters_that_ddp_ignores_may_differ_by_rank(rank, world):
    """Each rank has its shard of an embedding, which hybrid-parallel models exchange themselves."""
    net = nn.Sequential(nn.Embedding((60, 40)[rank], 20), nn.Linear(20, 20))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    state = attach(model := ddp(net), **EVERYTHING, optimizer=SGD(net.parameters(), lr=0.1))
    model(torch.tensor([rank])).sum().backward()
    assert {*state.names.values()} == {"1.weight", "1.bias"}
    assert alike(net[1].weight.grad)
    frozen = ddp(nn.Linear(3, 3))
    frozen.module.bias.requires_grad_(rank == 0)
    assert "bias is (3,) torch.float32 on rank 0 and (3,) torch.float32, frozen on rank 1" in refusal(attach, frozen)


@on_ranks(2)
def test_arguments_of_ddp_that_change_its_buckets_must_be_the_same_on_every_rank(rank, world):
    for name, values in {"find_unused_parameters": (False, True), "static_graph": (True, False)}.items():
        model = DistributedDataParallel(four_layers(), **{name: values[rank]})
        assert f"{name} is {values[0]} on rank 0 and {values[1]} on rank 1" in refusal(attach, model)
    model = DistributedDataParallel(four_layers(), bucket_cap_mb=1 + rank)
    assert "bucket_bytes_cap is 1048576 on rank 0 and 2097152 on rank 1" in refusal(attach, model)
    if hasattr(model, "bucket_bytes_cap_list"):  # not in torch 2.9
        model = DistributedDataParallel(four_layers(), bucket_cap_mb_list=[2, 1 + rank])
        message = "bucket_bytes_cap_list is [2097152, 1048576] on rank 0 and [2097152, 2097152] on rank 1"
        assert message in refusal(attach, model)


@on_ranks(2)
def test_an_attach_on_rank_0_alone_says_that_every_rank_must_attach(rank, world):
    model = DistributedDataParallel(four_layers(), process_group=dist.new_group([0, 1], timedelta(seconds=1)))
    said = "" if rank else refusal(attach, model)
    dist.barrier()
    dist.destroy_process_group(model.process_group)
    assert rank or "comparing settings failed: some rank did not take part" in said
    assert rank or "Every rank must attach its model" in said


@on_ranks(2)
def test_an_error_while_bytes_are_shared_out_says_so(rank, world):
    net = four_layers()
    model, _ = attached(net, {"bucket_cap_mb": 0.001}, saving=5)
    words = r"dividing a step's bytes among its buckets failed: some rank did not take part \(closed\)"
    with mock.patch("lightning_topk.runtime.state.gathered", side_effect=RuntimeError("closed")):
        said = refusal(train, model, rank, range(12), SGD(net.parameters(), lr=0.01))
    assert re.search(words, said)


@on_ranks(2)
def test_an_epoch_that_is_no_count_is_refused(rank, world):
    model, _ = attached(four_layers(), ratio=0.05, epoch=lambda: None)
    with pytest.raises(TypeError, match="the function epoch= returned None; it must return the number of"):
        loss_of(model, rank, 0).backward()


@on_ranks(2)
def test_ranks_at_different_steps_do_not_mix_positions_that_they_do_not_send(rank, world):
    model, state = attached(four_layers(), ratio=0.05, selector="randk")
    state.steps = rank
    with pytest.raises(RuntimeError, match="was sent for another bucket, ratio or step"):
        loss_of(model, rank, 0).backward()


@on_ranks(2)
def test_dense_parameters_may_name_a_tied_weight_by_any_of_its_names(rank, world):
    net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    net[1].weight = net[0].weight
    for name in ("0.weight", "1.weight"):
        state = attach(ddp(net), ratio=0.1, dense_parameters=name)
        assert {state.names[p] for p in state.buckets.compressed} == {"0.bias", "1.bias"}
    net = nn.ParameterDict({"a[0]": torch.ones(20), "b": torch.ones(20)})
    state = attach(ddp(net), ratio=0.1, dense_parameters="a[0]")  # a name, though as a pattern it would be "a0"
    assert {state.names[p] for p in state.buckets.compressed} == {"b"}


@on_ranks(2)
def test_own_schedules_and_functions_of_the_step_agree_across_ranks_or_are_refused(rank, world):
    class Uneven(Schedule):
        def at(self, step: int, epoch: int) -> float:
            return 0.2 if (step, rank) == (100, 1) else 0.1

    def short(step: int) -> float:
        if step < 600:
            return 0.5
        raise LookupError(f"no value for step {step} on rank {rank}")

    for ratio in (short, lambda step: 0.5 - step / 1000):
        loss_of(attached(four_layers(), ratio=ratio)[0], rank, 0).backward()
    said = refusal(attach, ddp(), ratio=Uneven())
    assert "the ranks differ: ratio is [0.1, 0.1, 0.1, 0.1, 0.1, 0.1] on rank 0 and [0.1, 0.1, 0.1, 0.2," in said


@pytest.mark.parametrize(
    ("sizes", "argument", "local"),
    [([2] * 4, None, 2), ([1] * 4, 2, 2), ([4] * 4, None, 4), ([0] * 4, None, 1), (["two"] * 4, None, 1),
     ([8] * 4, None, 1), ([3, 3, 3, 1], None, 1), ([1] * 4, 3, 1)],
)  # fmt: skip
@on_ranks(4)
def test_nodes_come_from_torchrun_and_those_of_several_gpus_are_one_worker(rank, world, sizes, argument, local):
    """On CPUs and on fake GPUs, with LOCAL_WORLD_SIZE by rank; uneven nodes stay sharded, with a message."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(sizes[rank])}):
        for gpus in (False, True):
            said: list[str] = []
            with mock.patch.object(agreement, "on_gpus", return_value=gpus):
                state = attach(ddp(), local_world_size=argument, announce=said.append, ratio=0.001)
            topology = "hierarchical" if gpus and local == 2 else "sharded"
            assert (state.config.topology, state.local) == (topology, local)
            assert rank or any(f"(topology={topology!r})" in line for line in said)
            warns = rank == 0 and local == 1 and (gpus or argument is not None)
            assert sum("topology='sharded' is in force, since" in line for line in said) == warns, said
        if argument is None and local == 1:
            refused = refusal(attach, ddp(), topology="hierarchical")
            assert "needs the same number of ranks on every node, but LOCAL_WORLD_SIZE is [" in refused


@pytest.mark.parametrize("other", ["SyncBatchNorm's collectives", "collectives of 'experts', if backward has any,"])
@on_ranks(2)
def test_other_collectives_of_nccl_in_backward_ask_for_one_order_of_launches(rank, world, other):
    """On fake GPUs: DDP refuses synchronised layers on CPUs."""
    said, others = list[str](), list[dist.ProcessGroup]()

    def check(gpus: bool = True, variable: str = "0") -> bool:
        known = dict.fromkeys([dist.group.WORLD, model.process_group, *state.groups.among.values(), *others])
        with (
            mock.patch.object(dist.distributed_c10d, "_pg_map", known),
            mock.patch("lightning_topk.adapters.ddp.on_gpus", return_value=gpus),
            mock.patch.dict(os.environ, {"NCCL_LAUNCH_ORDER_IMPLICIT": variable}),
        ):
            state.check_launch_order(model)
        return any(f"{other} and the exchange use different" in line and "IMPLICIT=1" in line for line in said)

    model = ddp(process_group=dist.new_group([0, 1]))
    state = attach(model, announce=said.append)
    check()
    assert not any("beside" in line for line in said), "there are only DDP's group and ours"
    if "experts" in other:
        others.append(dist.new_group([0, 1], group_desc="experts"))
    else:
        model.module = nn.SyncBatchNorm(3)
    assert not check(gpus=False)
    assert not check(variable="1")
    assert check() == (rank == 0)


@on_ranks(2)
def test_a_cuda_graph_of_a_whole_step_is_refused_before_its_forward_pass(rank, world):
    """Of a fake GPU. A graph without an exchange is captured, such as one of inference."""
    model = ddp(four_layers())
    attach(model, ratio=0.1)
    model.device = torch.device("cuda", 0)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        message = refusal(loss_of, model, rank, 0)
        with torch.no_grad():
            loss_of(model, rank, 0)
        with model.no_sync():
            loss_of(model, rank, 0)
    assert "a CUDA graph captures a step" in message
    assert "make_graphed_callables" in message


@on_ranks(2)
def test_notices_are_given_once_and_on_one_rank(rank, world):
    """Of missing numba, and of momentum that is adapted or not; momentum that a scheduler sets later is refused."""
    said: list[str] = []
    with mock.patch.object(ops, "fast", return_value=None):
        train(attached(ranks.Net(), ratio=0.1, announce=said.append)[0], rank, range(3))
    net = four_layers()
    pair = [AdamW(part.parameters()) for part in (net[:2], net[2:])]
    model, state = attached(net, saving=20, optimizer=pair, announce=said.append)
    for step in range(3):
        loss_of(model, rank, step).backward()
    sent, summary = state.predicted(), state.summary()
    with pytest.raises(ValueError, match="rank=2 must be from 0 to 1"):
        state.predicted(2)
    state.close()
    assert (
        summary == f"lightning_topk: this rank sent {sent.sent} B instead of 6.72 kB a step ({sent.saving:.1f}x less)."
    )
    for words in ("attach was called without optimizer=, so momentum is not adapted", "numba: pip install numba.",
                  summary, "gradients are compressed (saving=20) and exchanged among 2 ranks; each rank averages one",
                  "Without a torch optimizer, pass adapt_momentum=False",
                  "the momentum of AdamW is adapted to compression"):  # fmt: skip
        assert sum(words in line for line in said) == (rank == 0), said
    assert len(said) == 6 * (rank == 0), said  # and what is in force, for the first model
    optimizer = SGD(net.parameters(), lr=0.1)
    model, _ = attached(net, ratio=0.1, momentum=0.9, optimizer=optimizer)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    later = refusal(loss_of(model, rank, 0).backward)
    assert model.module[0].weight.grad.any()
    assert "SGD has momentum 0.95 of its own and would apply it again" in later
    assert "a scheduler such as OneCycleLR (cycle_momentum=False) has set it" in later


@on_ranks(2)
def test_layers_frozen_before_attach_are_exchanged_once_they_are_trained(rank, world):
    net = four_layers()
    model, _ = ddp(net), net[1].requires_grad_(False)
    attach(model, **EVERYTHING)
    assert not net[1].weight.requires_grad
    net[1].requires_grad_(True)
    alone = copy.deepcopy(net)
    train(model, rank, [2])
    expected = mean_over_ranks(ranks.local_gradient(alone, net, rank, 2))
    torch.testing.assert_close(gradient(net).double(), expected, atol=1e-6, rtol=0)


@on_ranks(2)
def test_copies_of_an_attached_model_train_with_plain_ddp_and_warn(rank, world):
    words = "a copy of an attached DDP model is trained. It has no communication hook"
    with ranks.log() as said:
        for options in ({}, {"find_unused_parameters": True}):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20))
            plain, model, announced = ddp(copy.deepcopy(net), **options), ddp(net, **options), []
            state = attach(model, ratio=0.1, announce=announced.append)
            loss_of(model, rank, 0).backward()
            saved = io.BytesIO()
            torch.save(model, saved)
            saved.seek(0)
            made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
            made.append(copy.deepcopy(made[0]))
            average = AveragedModel(model)
            average.update_parameters(model)
            average.eval()(batch(rank, 0))
            assert not any(words in line for line in (*said, *announced)), "none is trained"
            for each in (plain, *made):
                each.load_state_dict(plain.state_dict())
                each.zero_grad()
                loss_of(each, rank, 1).backward()
                for found, expected in zip(each.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(found.grad, expected.grad)
            assert state.report().bytes["uplink"] > 0
            again = attach(made[0], ratio=0.1)  # as the warning says
            loss_of(made[0], rank, 2).backward()
            assert again.report().bytes["uplink"] > 0
            found = [sum(words in line for line in lines) for lines in (said, announced)]
            assert found == [2 * (rank == 0), rank == 0], "two copies have been pickled"
            said.clear()


@on_ranks(2)
def test_a_model_is_attached_again_whether_its_state_is_open_or_closed(rank, world):
    for closed, options in itertools.product((True, False), ({}, {"find_unused_parameters": True})):
        net, alone = four_layers(), four_layers()
        model, first = attached(net, options, ratio=0.1, optimizer=Adam(net.parameters()))
        loss_of(model, rank, 0).backward()
        kept = ranks.undelivered(first, net)
        if closed:
            first.close()
            assert "this TopKState was closed. " in refusal(loss_of(model, rank, 1).backward)
            assert not first.optimizers.watched, "a closed state adapts no optimizer"
        before = ranks.open_now()
        again = attach(model, residuals=first.residuals, **EVERYTHING, optimizer=SGD(net.parameters(), lr=0.1))
        first.close()  # changes nothing
        net.zero_grad()
        loss_of(model, rank, 1).backward()
        expected = kept + mean_over_ranks(ranks.local_gradient(alone, net, rank, 1))
        torch.testing.assert_close(gradient(net).double(), expected, atol=1e-6, rtol=0)
        assert again.report().bytes["uplink"] > 0
        assert not ranks.undelivered(again, net).any()
        assert closed or ranks.open_now()[2] == before[2]


@on_ranks(2)
def test_a_model_is_attached_again_in_the_middle_of_an_accumulation(rank, world):
    for wrapped_anew in (False, True):
        net, alone, options = ranks.Net(), ranks.Net(), {"find_unused_parameters": True}
        model, first = attached(net, options, **EVERYTHING)
        with model.no_sync():
            loss_of(model, rank, 0).backward()  # the branch is only used here
        net.empty.requires_grad_(False)
        if wrapped_anew:
            first.close()
            model = ddp(net, **options)
        attach(model, residuals=first.residuals, **EVERYTHING)
        loss_of(model, rank, 1, branch=False).backward()
        each = [ranks.local_gradient(alone, net, rank, step, branch=step == 0) for step in (0, 1)]
        torch.testing.assert_close(gradient(net).double(), mean_over_ranks(sum(each)), atol=1e-6, rtol=0)


@on_ranks(2)
def test_uneven_inputs_are_joined_as_by_ddp_or_refused(rank, world):
    ends = []
    for compressed in (False, True):
        model = ddp(four_layers())
        if compressed:
            attach(model, **EVERYTHING)
        with model.join():
            train(model, rank, range(3 + 2 * rank), SGD(model.parameters(), lr=0.1))
        ends.append(ranks.weights(model))
    with model.join(divide_by_initial_world_size=False):
        message = refusal(loss_of, model, rank, 0)
    torch.testing.assert_close(*ends, atol=1e-6, rtol=0)
    assert "join(divide_by_initial_world_size=False) is not supported" in message


class TwoLosses(nn.Module):
    """The loss of two layers, of which the first counts little, and an empty parameter in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(2))
        self.empty = nn.Parameter(torch.ones(0, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (layer(x).square().sum() for layer in self.layers)
        return first / 1000 + second + self.empty.sum()


@on_ranks(2)
def test_a_loss_of_small_weight_is_lifted_and_nothing_is_lost(rank, world):
    """A checkpoint has residuals in their own units."""
    torch.manual_seed(0)
    net = TwoLosses()
    model, parameters = ddp(net), [*net.parameters()]
    state, left, few = attach(model, saving=20), torch.zeros(()), []
    for step in range(30):
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(2 * step + rank))
        own = torch.cat([g.flatten() for g in torch.autograd.grad(net(x), parameters)])
        model.zero_grad()
        model(x).backward()
        delivered = torch.cat([p.grad.flatten() for p in parameters])
        left = left + mean_over_ranks(own) - delivered
        few.append(int(delivered[:900].count_nonzero()))
        if step % 10 == 9:
            torch.testing.assert_close(ranks.undelivered(state, net), left.double(), atol=1e-4, rtol=1e-4)
    bucket = max(state.last_buckets, key=len)
    assert dict(zip(map(state.names.get, bucket), bucket.lifts, strict=True))["layers.0.weight"] >= 128
    assert sum(few[:8]) < 10 < sum(few[20:])


@on_ranks(2)
def test_without_saving_nothing_is_decided_about_shares(rank, world):
    model, state = attached(four_layers(), ratio=0.1)
    with mock.patch.object(type(state), "_share_out") as share_out:
        train(model, rank, range(18))
    assert not share_out.called


@on_ranks(2)
def test_a_rank_without_data_shares_bytes_out_as_the_others_do(rank, world):
    """Its learning rate stays behind."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 60), nn.Linear(60, 60))
    model, optimizer = ddp(net, bucket_cap_mb=0.01), SGD(net.parameters(), lr=0.1)
    state = attach(model, saving=20, optimizer=optimizer)
    scheduler = ExponentialLR(optimizer, 0.8)
    with model.join():
        for step in range(4 + 16 * rank):
            train(model, rank, [step], optimizer)
            scheduler.step()
    first, second = (state.buckets.plan_of(bucket).density() for bucket in state.last_buckets)
    assert first != second, "a decision was made"
    assert alike(ranks.weights(net))
