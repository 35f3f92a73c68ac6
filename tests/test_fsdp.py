"""The laws between replicas of an FSDP2 model, shard by shard, on gloo ranks; torch's own HSDP is the oracle."""

import copy
import itertools
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache, partial
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
from ranks import Net, alike, attach, batch, gradient, loss_of, mean_over_ranks, undelivered, weights
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lightning_topk.runtime import collectives
from lightning_topk.schedule import ExponentialWarmup

PARTS = ("first", "branch")


@cache
def mesh_of(nodes: int, local: int, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (nodes, local), mesh_dim_names=("replicate", "shard"))


def sharded(net: nn.Module, mesh: DeviceMesh, parts: tuple[str, ...] = PARTS, **options: Any) -> nn.Module:
    """Wraps some layers of a net, and the net itself."""
    for name in parts:
        fully_shard(net.get_submodule(name), mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def made(nodes: int, local: int, net: nn.Module | None = None, **settings: Any) -> tuple[nn.Module, Any]:
    mesh, options, parts = mesh_of(nodes, local), settings.pop("options", {}), settings.pop("parts", PARTS)
    net = sharded(Net(empty=False) if net is None else net, mesh["shard"], parts, **options)
    return net, attach(net, process_group=mesh["replicate"], **{"ratio": 0.05, **settings})


def as_hybrid(
    make: Callable[[DeviceMesh], nn.Module], train: Callable[[nn.Module], Tensor], mesh: DeviceMesh | None = None,
    atol: float = 1e-6, rtol: float = 1e-5, **settings: Any,
) -> Any:  # fmt: skip
    """Fails unless ``train`` returns the same with everything sent as with torch's HSDP; returns the state."""
    mesh = mesh_of(2, 2) if mesh is None else mesh
    expected = train(make(mesh["replicate", "shard"]))
    net = make(mesh["shard"])
    state = attach(net, process_group=mesh["replicate"], ratio=1.0, wire="fp32", **settings)
    found = train(net)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    return state


class Watched:
    """Sums the gradients that a state's hooks receive (as the mean over the replicas) and deliver, by parameter."""

    def __init__(self, state: Any) -> None:
        self.computed: dict = {}
        self.delivered: dict = {}
        self._state, self.exchange, state.exchange = state, state.exchange, self._watched

    def _watched(self, bucket: Any, g: Tensor, name: str, **options: Any) -> Any:
        sizes = [member.numel() for member in bucket]
        mean = mean_over_ranks(g, self._state.groups.all)
        future = self.exchange(bucket, g, name, **options)
        future.wait()
        for member, computed, arrived in zip(bucket, mean.split(sizes), g.double().split(sizes), strict=True):
            if computed.isfinite().all():
                self.computed[member] = self.computed.get(member, 0) + computed
                self.delivered[member] = self.delivered.get(member, 0) + arrived
        return future

    def check(self, tolerance: float = 1e-5) -> None:
        """Fails unless every received gradient was delivered or is held; every rank calls it."""
        state, members = self._state, [each for each in self._state.names if each in self.computed]
        shares = ranks.waiting(state.residuals, state.names, state.world)
        left = mean_over_ranks(torch.cat([shares[each] for each in members]), state.groups.all) * state.world
        computed, delivered = (torch.cat([by[each] for each in members]) for by in (self.computed, self.delivered))
        laws.check(computed[None], delivered[None, None], left, [], [], atol=tolerance, rtol=tolerance)


def harness(rank: int, world: int, nodes: int, local: int, settings: dict[str, Any]) -> None:
    """Checks the laws on some steps; every ``every``-th step leaves a branch out."""
    every, steps, patterns = settings.pop("every", 99), settings.pop("steps", 4), settings.get("dense_parameters", ())
    net, state = made(nodes, local, **settings)
    run = ranks.Run(rank, Net(empty=False), net, net, state)
    between = frozenset(dist.get_process_group_ranks(state.groups.all))
    with ranks.Counted() as counted:
        for step in range(steps):
            plan = state.predicted() if step and every > 4 else None
            counted.clear()
            run.backward(step, branch=(step + 1) % every != 0)
            collectives, seen = counted.bytes.get(between, 0), state.report().bytes
            names = ("uplink", "downlink", "inter_node", "intra_node")
            run.sent.append({"collectives": collectives, **{name: seen[name] for name in names}})
            both = seen["uplink"] + seen["downlink"]
            run.planned.append({**run.sent[-1], "collectives": both, "inter_node": local * both, "intra_node": 0})
            if plan is not None:
                run.planned[-1] |= {name: getattr(plan, name) for name in ("uplink", "downlink", "inter_node")}
    names = dict(net.named_parameters())
    uncompressed = {name: any(fnmatch(name, each) for each in patterns) for name in names}
    exact = torch.cat([torch.full((p.numel(),), uncompressed[name]) for name, p in names.items()])
    schedule = every <= 4 or isinstance(settings.get("ratio"), ExponentialWarmup)
    settled = None if schedule else int("saving" in settings)  # small groups are sent whole once all are known
    rows, left = run.check(exact=exact, settled=settled)
    assert (state.steps, {*state.names.values()}) == (steps, {*names})
    assert rows.any()
    assert left.any() == (nodes > 1)


@pytest.mark.parametrize(
    ("nodes", "local", "settings"),
    [
        *((*nodes, {"topology": topology, "bidirectional": bidirectional})
          for topology, bidirectional in laws.ROUTES
          if (topology, bidirectional) != ("single_server", False)
          for nodes in [(2, 2), (3, 1)]),
        (1, 4, {}),
        (2, 2, {"ratio": None, "saving": 8, "dense_parameters": ["*.bias", "scale"]}),
        (2, 2, {"ratio": None, "saving": 8, "steps": 14}),
        (2, 2, {"selector": "gaussiank", "wire": "bf16"}),
        (2, 2, {"selector": "randk", "wire": "fp32", "options": {"reshard_after_forward": False}}),
        (2, 2, {"ratio": ExponentialWarmup(0.05, steps=3), "wire": "int8"}),
        (2, 2, {"every": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_laws_hold_between_the_replicas_of_a_sharded_model(groups, nodes, local, settings):
    groups(nodes * local).run(harness, nodes, local, settings)


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (torch.float32, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}),
        (torch.float32, {"reduce_dtype": torch.float16}),
        (torch.bfloat16, {"reduce_dtype": torch.float32}),
        (torch.bfloat16, {}),
        (torch.float64, {}),
    ],
)
@on_ranks(4)
def test_nothing_is_lost_whatever_the_dtypes_of_parameters_and_reductions(rank, world, dtype, policy):
    net, state = made(2, 2, Net(empty=False).to(dtype), options={"mp_policy": MixedPrecisionPolicy(**policy)})
    watched, kinds = Watched(state), set()
    for step in range(4):
        net.zero_grad()
        net(batch(rank, step).to(dtype)).square().mean().backward()
        kinds |= {p.grad.dtype for p in net.parameters()}
    watched.check(1e-4)
    members = {member.dtype for bucket in state.last_buckets for member in bucket}
    assert (kinds, members) == ({dtype}, {policy.get("reduce_dtype", dtype)})


def learned(net: nn.Module, rank: int, wait: str, clip: bool, kind: type[torch.optim.Optimizer]) -> Tensor:
    """Weights after some steps of two backward passes each, the first of them without the exchange."""
    optimizer = kind(net.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for part in (0, 1):
            getattr(net, wait)(part == 1)
            (loss_of(net, rank, 2 * step + part, branch=step % 3 != 2) / 2).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize("wait", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.parametrize(
    ("options", "clip", "kind", "factor"),
    [
        ({}, False, torch.optim.SGD, 3.0),  # such as a number of tokens
        ({"reshard_after_forward": False}, True, torch.optim.AdamW, None),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, True, torch.optim.SGD, None),
    ],
)
@on_ranks(4)
def test_with_everything_sent_a_model_learns_as_with_hybrid_sharding(rank, world, wait, options, clip, kind, factor):
    def make(mesh: DeviceMesh) -> nn.Module:
        net = sharded(Net(empty=False), mesh, **options)
        for part in (net, net.first, net.branch) if factor else ():
            part.set_gradient_divide_factor(factor)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before summing
        return net

    state = as_hybrid(make, partial(learned, rank=rank, wait=wait, clip=clip, kind=kind))
    assert state.steps == 3, "accumulated gradients are exchanged once"


@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(torch.float32, 1e-6, 1e-5), (torch.float16, 5e-4, 0.01)])
@on_ranks(4)
def test_shards_accumulate_as_with_hybrid_sharding(rank, world, dtype, atol, rtol):
    """Also where some were exchanged before, and if a module is left out when the others are exchanged."""

    def train(net: nn.Module) -> Tensor:
        seen = []
        for step, exchanges in enumerate([False, False, True, True, False, True]):
            net.set_requires_all_reduce(exchanges)
            loss_of(net, rank, step, branch=step != 2).backward()
            seen.append(gradient(net))
            assert (step < 2) == all(p.grad is None for p in net.parameters())
        return torch.stack(seen)

    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    state = as_hybrid(lambda mesh: sharded(Net(empty=False), mesh, mp_policy=policy), train, atol=atol, rtol=rtol)
    assert state.steps == 3


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this FSDP2 cannot continue")
@on_ranks(4)
def test_a_reset_after_a_failed_pass_drops_accumulated_shards_as_with_hybrid_sharding(rank, world):
    def fail(grad: Tensor) -> None:
        raise KeyError("of the user")

    def train(net: nn.Module) -> Tensor:
        net.set_requires_all_reduce(False)
        loss_of(net, rank, 0).backward()
        x = batch(rank, 1).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(KeyError):
            net(x).square().mean().backward()
        net.reset_iter_state()
        net.zero_grad()
        loss_of(net, rank, 2).backward()
        net.set_requires_all_reduce(True)
        loss_of(net, rank, 3).backward()
        return gradient(net)

    as_hybrid(lambda mesh: sharded(Net(empty=False), mesh), train)


@on_ranks(4)
def test_accumulated_shards_are_delivered_or_stay_in_residuals(rank, world):
    net, state = made(2, 2)
    alone, total, computed = Net(empty=False), 0, 0
    for step in range(8):
        computed = computed + mean_over_ranks(ranks.local_gradient(alone, net, rank, step))
        net.set_requires_all_reduce(step % 4 == 3)
        loss_of(net, rank, step).backward()
        if step % 4 == 3:
            total = total + gradient(net).double()
            net.zero_grad()
    left = undelivered(state, net)
    assert state.steps == 2
    assert left.any()
    torch.testing.assert_close(total + left, computed, atol=1e-5, rtol=1e-5)


@on_ranks(4)
def test_shards_of_different_parameters_do_not_accumulate_nor_with_hybrid_sharding(rank, world):
    mesh, said = mesh_of(2, 2), []
    for first, second in [("scale", "last.bias"), ("last.bias", "scale")]:
        hybrid, (net, _) = sharded(Net(empty=False), mesh), made(2, 2)
        for each in (hybrid, net):
            each.set_requires_all_reduce(False)
            each.get_parameter(first).requires_grad_(False)
            loss_of(each, rank, 0).backward()
            each.reshard()
            each.set_requires_all_reduce(True)
            each.get_parameter(first).requires_grad_(True)
            each.get_parameter(second).requires_grad_(False)
            said.append(ranks.refusal(loss_of(each, rank, 1).backward))
    assert ranks.unsaid(zip(["must match", "gave gradients to different parameters"] * 2, said, strict=True)) == []


@on_ranks(4)
def test_layers_that_are_unfrozen_later_learn_as_with_hybrid_sharding(rank, world):
    def make(mesh: DeviceMesh) -> nn.Module:
        net = Net(empty=False)
        net.branch.requires_grad_(False)
        net.last.bias.requires_grad_(False)
        return sharded(net, mesh)

    def train(net: nn.Module) -> Tensor:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        ranks.train(net, rank, (0, 1), optimizer)
        net.requires_grad_(True).first.requires_grad_(False)
        ranks.train(net, rank, (2, 3, 4), optimizer)
        return weights(net)

    state = as_hybrid(make, train)
    kept = state.full_state_dict()["parameters"]
    state.load_state_dict(state.state_dict())
    assert rank or {"first.weight", "branch.weight"} <= kept.keys()


@on_ranks(4)
def test_small_scaled_gradients_arrive_as_with_hybrid_sharding(rank, world):
    """Gradients of about 1e-8, which float16 represents only with a GradScaler's scale."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def train(net: nn.Module) -> Tensor:
        scaler.scale(loss_of(net, rank, 0).float() * 1e-7).backward()
        found = gradient(net)
        assert (found / 2**24).abs().median() < 3e-8
        assert (found != 0).float().mean() > 0.9
        return found

    def make(mesh: DeviceMesh) -> nn.Module:
        return sharded(Net(empty=False), mesh, mp_policy=policy)

    as_hybrid(make, train, rtol=0.01, optimizer=list, scaler=scaler)


@on_ranks(4)
def test_tensor_parallel_halves_are_exchanged_as_shards_and_copies_whole(rank, world):
    """The two ranks of a node hold halves of a tensor and see the same rows; both hold the norms."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 20), nn.LayerNorm(20))
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))

    def make(shards: DeviceMesh) -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        net = parallelize_module(copy.deepcopy(layers), mesh["tensor"], plan)
        return fully_shard(net, mesh=shards)

    def train(net: nn.Module) -> Tensor:
        ranks.train(net, rank // 2, range(2), torch.optim.SGD(net.parameters(), lr=0.1))
        return weights(net)

    as_hybrid(make, train, mesh)
    net = make(mesh["shard"])
    state = attach(net, process_group=mesh["replicate"], saving=4)
    watched = Watched(state)
    train(net)
    watched.check()
    uncompressed = {state.names[member] for member in state.names.keys() - state.buckets.compressed}
    kept = state.full_state_dict()["parameters"]
    assert alike(torch.cat([p.to_local() for p in net[3].parameters()]).detach())
    assert uncompressed == {"3.weight", "3.bias", "2.bias"}
    assert rank or kept["0.weight"]["residual"].shape == (800,)


@on_ranks(4)
def test_a_pass_ends_with_fsdps_root_outside_the_model(rank, world):
    """The root is a module around the model, whose parts train in turn, with most elements uncompressed at times."""
    mesh = mesh_of(2, 2)
    net = sharded(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)), mesh["shard"], ("0", "1"))
    outer = fully_shard(nn.Sequential(net, nn.Tanh()), mesh=mesh["shard"])
    state = attach(net, process_group=mesh["replicate"], saving=20, dense_parameters="1.bias", optimizer=list)
    watched = Watched(state)
    for step in range(6):
        net[0].requires_grad_(step % 2 == 0)
        loss_of(outer, rank, step).backward()
        assert state.steps == step + 1
    watched.check()


@pytest.mark.parametrize("heads", [False, True])
@on_ranks(4)
def test_networks_and_heads_that_train_in_turn_share_bytes_out(rank, world, heads):
    """Each pass sends as many bytes as before, and plans nothing anew."""
    mesh = mesh_of(2, 2)
    nets = nn.Sequential(*(nn.Sequential(nn.Linear(20, 80), nn.Linear(80, 90)) for _ in range(2)))
    for net in nets:
        sharded(net, mesh["shard"], ("0", "1"))
    if heads:
        nets = nn.Sequential(
            *(nn.Sequential(nets[0], fully_shard(nn.Linear(90, n), mesh=mesh["shard"])) for n in (40, 70))
        )
    state = attach(nets, process_group=mesh["replicate"], saving=20, optimizer=list)
    watched, plans, sent = Watched(state), [], []
    for step in range(22):
        loss_of(nets[step % 2], rank, step).backward()
        plans.append([state.buckets.plan_of(bucket) for bucket in state.last_buckets])
        sent.append(state.report().bytes.sent)
    watched.check()
    groups = [*state.shares._passes]
    assert [*map(len, groups)] == ([1, 2, 1] if heads else [2, 2])
    for buckets in groups:
        assert (len(buckets) == 1) == (buckets[0].weights is None)
    assert plans[-1] == plans[-3] != plans[5]
    assert plans[-2] == plans[-4] != plans[4]
    assert len({*sent[2::2]}) == len({*sent[3::2]}) == 1


@on_ranks(4)
def test_two_models_may_share_a_frozen_module_that_stays_frozen(rank, world):
    mesh, base = mesh_of(2, 2), nn.Linear(20, 20).requires_grad_(False)
    fully_shard(base, mesh=mesh["shard"])
    nets = [nn.Sequential(nn.Linear(20, 20).requires_grad_(False), base, nn.Linear(20, 3)) for _ in range(2)]
    for net in nets:
        fully_shard(net[2], mesh=mesh["shard"])
    states = [attach(net, process_group=mesh["replicate"], ratio=0.1) for net in nets]
    for net in nets:
        loss_of(net, rank, 0).backward()
    assert [state.steps for state in states] == [1, 1]
    nets[0][0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0\.\w+' \(one of 2\) is not sharded by fully_shard"):
        loss_of(nets[0], rank, 1).backward()


@on_ranks(4)
def test_the_residual_of_a_frozen_parameter_goes_to_no_other_of_its_size(rank, world):
    """Two parameters of one size in one module; the second trains after the first."""
    net = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Tanh(), nn.Linear(20, 20, bias=False))
    net[2].requires_grad_(False)
    _, state = made(2, 2, net, parts=(), ratio=0.1)
    watched = Watched(state)
    for step in range(6):
        if step == 3:
            net[0].requires_grad_(False)
            net[2].requires_grad_(True)
        net.zero_grad()
        (loss_of(net, rank, step) * (step != 3)).backward()
        assert step != 3 or not net[2].weight.grad.full_tensor().any()  # the other's residual does not arrive here
    watched.check()


@on_ranks(4)
def test_freezing_a_parameter_takes_nothing_from_the_next_checkpoint(rank, world):
    net, state = made(2, 2)
    ranks.train(net, rank, range(4))
    before = undelivered(state, net)
    net.first.bias.requires_grad_(False)
    assert torch.equal(undelivered(state, net), before)


class Apart(nn.Sequential):
    """Layers that a step uses or not; the last one's gradients are the largest."""

    def forward(self, x: Tensor, used: int) -> Tensor:
        return sum(10 ** (2 * number) * self[number](x).square().mean() for number in range(used))


@on_ranks(4)
def test_steps_that_leave_a_module_out_have_the_bytes_of_their_own_parameters(rank, world):
    """Before them, the module's large gradients got most bytes. The first such step sends less: it was not foreseen."""
    torch.manual_seed(0)
    parts = ("0", "1", "2")
    net, state = made(2, 2, Apart(*[nn.Linear(20, 900) for _ in parts]), parts=parts, ratio=None, saving=20)
    savings = []
    for step in range(18):
        net(batch(rank, 0), 3 if step < 12 or step % 2 else 2).backward()
        savings.append(state.report().bytes.saving)
    assert savings[1:12] + savings[13:] == pytest.approx([20.0] * 16, rel=0.02)


@on_ranks(4)
def test_replicas_that_use_different_parameters_raise(rank, world):
    for use in ("scale", "branch"):  # a parameter of a module, and a module
        net, state = made(2, 2)
        message = ranks.refusal(loss_of(net, rank, 0, **{use: rank < 2}).backward)
        state.close()
        assert "the ranks differ: the next gradient is" in message
        assert "set_reduce_scatter_unused_params(True) on the FSDP modules (torch 2.14 and later)" in message


@on_ranks(4)
def test_gradients_of_different_modules_of_equal_size_are_not_mixed_up(rank, world):
    mesh, net = mesh_of(2, 2), nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)])
    for part in net:
        fully_shard(part, mesh=mesh["shard"])
    attach(net, process_group=mesh["replicate"], ratio=0.1)
    said = [ranks.refusal(loss_of(net[used], rank, 0).backward) for used in (0, 1, 0 if rank < 2 else 1)]
    assert ["was sent for another bucket, ratio or step" in message for message in said] == [False, False, True]


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this FSDP2 cannot")
@on_ranks(4)
def test_ranks_may_use_different_parameters_if_fsdp_reduces_unused_ones(rank, world):
    net, state = made(2, 2)
    net.set_reduce_scatter_unused_params(True)
    watched = Watched(state)
    for step in range(6):
        net.zero_grad()
        loss_of(net, rank, step, scale=(step + rank) % 3 == 0).backward()
    watched.check()
    assert len(watched.computed) == len(list(net.parameters()))


UNWRAPPED = nn.Identity()


def blocks(
    rank: int, around: Callable = UNWRAPPED, beyond: Callable = UNWRAPPED, reentrant: bool = False, **options: Any
) -> Tensor:
    """Weights after some steps, with one wrapper applied to each block before sharding and one after it."""
    torch.manual_seed(0)
    mesh, net = mesh_of(2, 2), nn.Sequential(*[nn.Sequential(nn.Linear(20, 20), nn.ReLU()) for _ in range(2)])
    for number, block in enumerate(net):
        net[number] = beyond(fully_shard(around(block), mesh=mesh["shard"], **options))
    fully_shard(net, mesh=mesh["shard"], **options)
    state = attach(net, process_group=mesh["replicate"], ratio=ExponentialWarmup(0.05, steps=2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = batch(rank, step).requires_grad_()
        (checkpoint(net, x, use_reentrant=True) if reentrant else net(x)).square().mean().backward()
        optimizer.step()
    assert state.steps == 3
    return weights(net)


@on_ranks(4)
def test_checkpointed_and_offloaded_blocks_learn_the_same_bits(rank, world):
    nested = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)  # a backward pass in another one
    wrappers = [(place, wrap) for place in ("around", "beyond") for wrap in (checkpoint_wrapper, nested)]
    cases = [*({place: wrap} for place, wrap in wrappers), {"reentrant": True}]
    cases.append({"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    expected, found = blocks(rank), [blocks(rank, **options) for options in cases]
    assert [options for options, learned in zip(cases, found, strict=True) if not torch.equal(learned, expected)] == []


@on_ranks(4)
def test_what_cannot_be_exchanged_is_refused_with_the_remedy(rank, world):
    mesh, other = mesh_of(2, 2), mesh_of(4, 1)
    crossed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
    inside, between, net = mesh["shard"], mesh["replicate"], partial(Net, empty=False)
    several, partly, taken, fully = net(), net(), sharded(net(), inside), sharded(net(), inside)
    fully_shard(several.first, mesh=other["shard"])
    fully_shard(several, mesh=inside)
    fully_shard(partly.first, mesh=inside)
    attach(taken, process_group=between, ratio=0.1)
    cases = {
        "one dimension of a device mesh. Pass the dimension across nodes": (fully, {"ratio": 0.1}),
        "must hold the same shard, one rank per node": (fully, {"process_group": inside}),
        "with a replicate dimension": (sharded(net(), mesh), {"process_group": between}),
        "on several meshes": (several, {"process_group": between}),
        "'scale' (one of 5) is not sharded": (partly, {"process_group": between}),
        "no gradient to exchange": (sharded(net().requires_grad_(False), inside), {"process_group": between}),
        "clip every shard by its own norm": (fully, {"process_group": between, "clip_norm": 1.0}),
        "Close the earlier state first": (taken, {"process_group": between}),
        "local_world_size=2 applies only to DDP models": (fully, {"process_group": between, "local_world_size": 2}),
        "process_group= applies only to models wrapped by fully_shard": (net(), {"process_group": between}),
        "the index of the shard is": (fully, {"process_group": crossed["replicate"]}),
    }
    said = [(words, ranks.refusal(attach, model, **arguments)) for words, (model, arguments) in cases.items()]
    tied = ranks.four_layers()
    tied[1].weight = tied[0].weight
    state = attach(fully_shard(tied, mesh=inside), process_group=between, ratio=0.1, dense_parameters="1.weight")
    assert "0.weight" not in {state.names[p] for p in state.buckets.compressed}
    assert ranks.unsaid(said) == []


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this FSDP2 cannot continue")
@on_ranks(4)
def test_training_goes_on_after_a_failed_backward_pass_and_with_a_new_state(rank, world):
    """The second pass fails on every rank, after some exchanges; the last one, since the state was closed."""
    said: list[str] = []
    net, state = made(2, 2, announce=said.append)
    watched = Watched(state)
    loss_of(net, rank, 0).backward()

    def fail(grad: Tensor) -> None:
        raise KeyError("of the user")

    h = net.first(torch.randn(8, 20))
    h.register_hook(fail)
    with pytest.raises(KeyError):
        net.branch(h).square().mean().backward()
    net.reset_iter_state()
    ranks.train(net, rank, (1, 2))
    watched.check()
    state.exchange = watched.exchange
    kept = undelivered(state, net)
    state.close()
    message = ranks.refusal(loss_of(net, rank, 1).backward)
    net.reset_iter_state()
    again = attach(net, process_group=mesh_of(2, 2)["replicate"], ratio=0.1, residuals=state.residuals)
    assert state.steps == 4, "the failed pass counts, since it delivered something"
    assert "this ShardState was closed" in message
    assert torch.equal(undelivered(again, net), kept)
    expected = ["exchanged among 2 ranks", "attach was called without optimizer=", "this rank sent"] * (rank == 0)
    assert ranks.unsaid(zip(expected, said, strict=True)) == []


@on_ranks(4)
def test_a_state_that_was_closed_after_an_exchange_failed_gives_its_residuals(rank, world):
    net, state = made(2, 2)
    ranks.train(net, rank, range(2))
    with mock.patch.object(collectives, "perform", mock.Mock(side_effect=MemoryError("no memory left"))):
        assert "no memory left" in ranks.refusal(loss_of(net, rank, 2).backward)
    kept = undelivered(state, net)
    state.close()
    assert torch.equal(undelivered(state, net), kept)


@on_ranks(4)
def test_residuals_of_a_layer_that_was_replaced_are_dropped_with_a_warning(rank, world):
    said: list[str] = []
    net, state = made(2, 2)
    ranks.train(net, rank, range(3))
    kept = undelivered(state, net)
    state.close()
    other = Net(empty=False)
    other.last = nn.Linear(51, 7)
    other, again = made(2, 2, other, residuals=state.residuals, announce=said.append)
    left = undelivered(again, other)
    loss_of(other, rank, 3).backward()
    same = sum(p.numel() for name, p in other.named_parameters() if not name.startswith("last"))
    assert kept[:same].any()
    assert torch.equal(left[:same], kept[:same])
    assert not left[same:].any()
    dropped = [line for line in said if "the residuals of 2 parameters were dropped" in line]
    assert len(dropped) == (rank == 0), said


@on_ranks(4)
def test_shards_of_residuals_on_another_mesh_are_refused_and_whole_ones_converted(rank, world):
    net, state = made(2, 2)
    ranks.train(net, rank, range(3))
    kept, whole = undelivered(state, net), ranks.shared(state.full_state_dict())
    state.close()
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    other, again = sharded(Net(empty=False), mesh["shard"]), {"process_group": mesh["replicate"], "ratio": 0.05}
    assert "come from another mesh" in ranks.refusal(attach, other, residuals=state.residuals, **again)
    again = attach(other, **again)
    again.load_state_dict(whole)
    torch.testing.assert_close(undelivered(again, other), kept)


@on_ranks(4)
def test_shards_skip_a_step_together(rank, world):
    scaler = torch.amp.GradScaler("cpu")
    net, state = made(2, 2, optimizer=lambda: [optimizer], scaler=scaler)
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, rank, step) * (torch.inf if (rank, step) == (3, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(torch.stack([weights(net).double(), undelivered(state, net)]))
    learned, left = torch.stack(seen, 1)
    assert [torch.equal(*pair) for pair in itertools.pairwise(learned)] == [True, False]
    assert left[1].any(), "what was not delivered stays"
    assert left.isfinite().all()
    assert state.nonfinite_steps == 1


@on_ranks(4)
def test_momentum_of_shards_stands_still_where_nothing_is_delivered(rank, world):
    net, _ = made(2, 2, ratio=0.1, dense_parameters="*.bias", optimizer=lambda: [optimizer])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    ranks.train(net, rank, range(3), optimizer)

    def look(p: nn.Parameter) -> Tensor:
        return torch.stack([each.to_local().clone() for each in (p, optimizer.state[p]["momentum_buffer"])])

    ranks.train(net, rank, (3,))
    before = {p: look(p) for p in net.parameters()}
    optimizer.step()
    for name, p in net.named_parameters():
        still = (p.grad.to_local() == 0) & (not name.endswith("bias"))
        assert still.any() or "weight" not in name
        assert torch.equal(look(p)[:, still], before[p][:, still])
        assert (look(p)[0] != before[p][0])[~still].all()


@on_ranks(4)
def test_what_waits_of_shards_shrinks_when_the_rate_rises(rank, world):
    """Weights and biases, which share buckets, have schedules of their own, one a warm-up, a decay and a restart."""
    net, state = made(2, 2, optimizer=lambda: [optimizer])
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    others = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": others}, {"params": biases}], lr=0.05)
    factors = [0.01, 0.1, 1.0, 1.0, 0.5, 0.005, 1.0, 1.0], [1.0, 1.0, 0.3, 0.3, 0.2, 0.1, 0.1, 0.1]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [own.__getitem__ for own in factors])
    run = ranks.Run(rank, Net(empty=False), net, net, state, optimizer)
    for step in range(7):
        run.backward(step)
        run.step()
        scheduler.step()
    _, left = run.check(rtol=1e-4)
    assert left.any()


@on_ranks(4)
def test_a_spike_enters_the_residuals_of_all_shards_as_clipped(rank, world):
    """All shards and buckets estimate the norm of the whole gradient, each from its own part of it."""
    net, state = made(2, 2, optimizer=lambda: [optimizer], max_norm=0.02)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(9):
        before = undelivered(state, net)
        net.zero_grad()
        (loss_of(net, rank, step) * (100 if step == 8 else 1)).backward()
        delivered = ranks.gradient(net).double()
        entered = (undelivered(state, net) - before + delivered).norm()
        optimizer.step()
    assert 0.5 < entered / 0.02 < 1.5


def stepped(rank: int, in_backward: bool) -> Tensor:
    """Weights after steps of an optimizer for each parameter, as soon as its gradient arrives or after backward."""
    optimizers: dict[Tensor, torch.optim.Optimizer] = {}
    net, _ = made(
        2, 2, ratio=lambda step: 1.0 if step == 2 else 0.1, wire="fp32", dense_parameters="*.bias",
        optimizer=lambda: [*optimizers.values()],
    )  # fmt: skip

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        optimizers[p] = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        if in_backward:
            p.register_post_accumulate_grad_hook(step)
    for number in range(5):
        loss_of(net, rank, number).backward()
        for p in () if in_backward else net.parameters():
            step(p)
    return weights(net)


@on_ranks(4)
def test_optimizers_in_backward_step_as_after_it(rank, world):
    """Also if one pass delivers everything, which torch steps as it is."""
    expected, found = stepped(rank, False), stepped(rank, True)
    assert torch.equal(found, expected)


def trained(rank: int, **settings: Any) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A net on two nodes of two ranks after three steps, its state, and rank 0's entry for a checkpoint file."""
    net, state = made(2, 2, **settings)
    ranks.train(net, rank, range(3))
    return net, state, ranks.shared(state.full_state_dict())


def saved(rank: int, world: int, folder: Path, momentum: float) -> None:
    net, state, entry = trained(rank, momentum=momentum, optimizer=list)
    dcp.save({"model": net.state_dict(), "topk": state}, checkpoint_id=folder)
    if rank == 0:
        torch.save(entry, folder / "entry.pt")


def loaded(rank: int, world: int, nodes: int, local: int, frozen: bool, folder: Path, full: bool, momentum: float):
    net = Net(empty=False)
    net.branch.requires_grad_(not frozen)
    net, state = made(nodes, local, net, momentum=momentum, optimizer=list)
    entry = torch.load(folder / "entry.pt", weights_only=True)
    if full:
        state.load_state_dict(entry)
    else:
        dcp.load({"model": (model := net.state_dict()), "topk": state}, checkpoint_id=folder)
        net.load_state_dict(model)
    found, steps = state.full_state_dict()["parameters"], state.steps
    loss_of(net, rank, 9).backward()
    assert steps == 3
    if rank == 0:
        expected = {name: sides for name, sides in entry["parameters"].items() if not (frozen and "branch" in name)}
        assert found.keys() == expected.keys()
        for name, sides in expected.items():
            assert found[name].keys() == sides.keys()
            torch.testing.assert_close(found[name]["residual"], sides["residual"], atol=1e-7, rtol=1e-6)
            assert sides["residual"].any() or name == "scale"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_residuals_of_shards_resume_on_other_nodes_and_with_layers_frozen(groups, tmp_path, momentum):
    groups(4).run(saved, tmp_path, momentum)
    for nodes, local, frozen in [(2, 2, True), (3, 1, False)]:
        for full in (False, True):
            groups(nodes * local).run(loaded, nodes, local, frozen, tmp_path, full, momentum)


@on_ranks(4)
def test_a_resumed_run_keeps_its_saving_and_residuals_in_the_reduce_dtype(rank, world):
    def ratios(state: Any) -> list[float]:
        return [state.buckets.plan_of(bucket).density() for bucket in state.last_buckets]

    for dtype in (torch.bfloat16, torch.float16):
        settings = {"ratio": None, "saving": 4, "options": {"mp_policy": MixedPrecisionPolicy(dtype, dtype)}}
        net, state, entry = trained(rank, **settings)
        expected, left = ratios(state), undelivered(state, net)
        net, state = made(2, 2, **settings)
        state.load_state_dict(entry)
        torch.testing.assert_close(undelivered(state, net), left)
        loss_of(net, rank, 3).backward()
        assert ratios(state) == expected


@on_ranks(4)
def test_rank_0s_part_of_a_sharded_entry_is_refused_on_all_ranks(rank, world):
    """As torch.save on rank 0, and Fabric's save, keep it."""
    net, state, _ = trained(rank)
    kept = undelivered(state, net)
    message = ranks.refusal(state.load_state_dict, ranks.shared(state.state_dict()))
    assert "have loaded the residuals of the same shard" in message
    assert torch.equal(undelivered(state, net), kept)


@on_ranks(4)
def test_a_sharded_run_resumes_the_residuals_of_a_ddp_run(rank, world):
    ddp, state = ranks.attached(Net(empty=False), ratio=0.05)
    ranks.train(ddp, rank, range(3))
    entry = ranks.shared(state.state_dict())
    _, state = made(2, 2)
    state.load_state_dict(entry)
    found = state.full_state_dict()["parameters"]
    if rank == 0:
        torch.testing.assert_close(found, entry["parameters"])
