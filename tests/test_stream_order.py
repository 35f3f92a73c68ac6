"""Hook, lane and residuals on the streams of a fake GPU: the order of operations, and the reuse of memory.

See :mod:`streams`. Training is simulated: backward and optimizers are a few operations on the caller's stream.
"""

import logging
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import refusal
from streams import Event, Gpu, Kernel, Stream, replace_kernels, reply_to
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_topk.adapters import ddp
from lightning_topk.adapters.fsdp import hook
from lightning_topk.adapters.fsdp.param_groups import ParamGroup
from lightning_topk.config import TopKConfig
from lightning_topk.core import ops
from lightning_topk.runtime import collectives as drive
from lightning_topk.runtime import lanes
from lightning_topk.runtime.groups import Groups

CUDA = torch.device("cuda", 0)
WORLD, LOCAL = 4, 2
SIZES = (30_000, 300, 20_000, 17)


@dataclass
class Case:
    scaler: bool = False  # a GradScaler, which skips every other step
    votes: bool = False  # parameters may go unused
    hooks: bool = False  # gradients are accumulated on a stream of their own
    resumed: bool = False  # training starts with residuals of a checkpoint
    kernels: bool = False  # Triton's kernels run
    measured: bool = False  # without a report, which waits for the device and reads data
    read: bool = False  # the caller reads the number of nonfinite steps after every other step
    reads_within: bool = False  # and reports in the middle of backward, too
    together: bool = False  # the buckets are exchanged as one
    lifted: bool = False  # parameters are lifted from the second pass on, and residuals read after it
    max_norm: Any = None  # of clipping: one of all, or one for each optimizer


class Bucket:
    def __init__(self, buffer: torch.Tensor, parameters: list[torch.Tensor], index: int, last: bool) -> None:
        self.buffer, self.parameters = lambda: buffer, lambda: parameters
        self.index, self.is_last = lambda: index, lambda: last


class Scaler:
    """A GradScaler with its scale on the GPU."""

    def __init__(self) -> None:
        self._scale, self._skips = torch.full((), 2.0**16, device=CUDA), False

    def is_enabled(self) -> bool:
        return True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._skips = not self._skips
        if not self._skips:
            optimizer.step()

    def update(self) -> None:
        self._scale.mul_(2.0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU to follow, and one rank of four; the replies of the others are zeros."""
    followed = Gpu()
    followed.install(monkeypatch.setattr)
    replace_kernels(monkeypatch.setattr, lambda *_: Kernel(followed.launch))
    monkeypatch.setattr(ddp, "GradBucket", Bucket)

    def perform(request, groups, place, wait):
        reply = reply_to(request, 0, WORLD, LOCAL)
        return reply if reply is None else reply.zero_()

    monkeypatch.setattr(drive, "perform", perform)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield followed
    dist.destroy_process_group()


def train(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, case: Case, topology: str, **settings: Any) -> None:
    from lightning_topk.core.ops import cuda

    monkeypatch.setattr(ops, "fast", lambda device: cuda if case.kernels else None)
    settings = {"ratio": 0.01, "wire": "fp32", "bidirectional": topology != "allgather", **settings}
    config = TopKConfig(topology=topology, **settings)
    fake = FakeTensorMode()
    with fake:
        parameters = [torch.nn.Parameter(torch.empty(size, device=CUDA)) for size in SIZES]
        optimizers = [torch.optim.SGD(each, 0.1, foreach=False) for each in (parameters[:2], parameters[2:])]
        scaler = Scaler() if case.scaler else None
    told = {"scaler": scaler, "max_norm": case.max_norm}
    state = ddp.TopKState(config, CUDA, optimizers=lambda: optimizers, local_world_size=LOCAL, **told)
    state.buckets.learn_names({p: f"p{number}" for number, p in enumerate(parameters)})
    if case.together:
        state.exchange_together(mock.Mock(bucket_bytes_cap=1 << 30, bucket_bytes_cap_default=True), parameters)
    if case.votes:
        state.watch_use([])
    state.telemetry.measure = state.telemetry.measure_layers = case.measured
    hooks = torch.cuda.Stream() if case.hooks else gpu.current
    with fake, gpu:
        if case.resumed:
            state.residuals.restore({p: {"residual": torch.zeros(p.numel(), device=CUDA)} for p in parameters})
        for step in range(3):
            groups = [parameters[2:], parameters[:2]] if step else [parameters]
            backward(gpu, hooks, state, groups, case.votes, case.reads_within)
            for optimizer in optimizers:
                (scaler or optimizer).step(*[optimizer] * bool(scaler))
            if scaler is not None:
                scaler.update()
            if case.lifted:
                for bucket in state.last_buckets:
                    bucket.lifts = [4.0, 1.0]
                if step:
                    state.residuals._lower()
            if case.read and step % 2 == 0:
                assert state.nonfinite_steps == 0
        state.close()
        state.residuals.offload_to_cpu()
        torch.zeros(1, device=CUDA)
    assert gpu.operations > 200


def backward(
    gpu: Gpu, hooks: Stream, state: ddp.TopKState, groups: list[list[torch.Tensor]], votes: bool, reads: bool = False
) -> None:
    """A backward pass: writes gradients to buckets, which are exchanged meanwhile, and copies them from there."""
    waiting = []
    for index, group in enumerate(groups):
        buffer = torch.empty(sum(p.numel() for p in group), device=CUDA)
        buffer.add_(torch.ones_like(buffer))
        if votes:
            state.used.update(group[:1])
        hooks.wait_stream(gpu.current)
        with gpu.on(hooks):
            future = state.launch(Bucket(buffer, group, index, index == len(groups) - 1))
        waiting.append((future, group))
        torch.zeros(64, device=CUDA)  # backward continues and allocates memory
        if reads and index < len(groups) - 1:
            assert (state.nonfinite_steps, state.telemetry.exchanged, state.predicted().sent > 0) == (0, True, True)
            assert state.report().elements == sum(SIZES)
            with mock.patch.object(torch._C, "_current_graph_task_id", return_value=0):  # of autograd's task
                assert "between two backward passes" in refusal(state.state_dict)
    gpu.current.wait_stream(hooks)
    for future, group in waiting:
        for p, piece in zip(group, future.wait().split([p.numel() for p in group]), strict=True):
            p.grad = piece.clone()


PLAYED = [
    ("sharded", Case(kernels=True), {}),
    ("sharded", Case(kernels=True), {"momentum": 0.9}),
    ("sharded", Case(hooks=True, kernels=True), {"ratio": None, "saving": 50}),  # weighs its buckets
    ("sharded", Case(scaler=True, resumed=True, kernels=True), {}),
    ("sharded", Case(votes=True, hooks=True), {}),
    ("sharded", Case(measured=True), {}),
    ("sharded", Case(votes=True, hooks=True, kernels=True, together=True), {}),
    ("sharded", Case(hooks=True, read=True), {}),
    ("sharded", Case(hooks=True, reads_within=True), {}),
    ("sharded", Case(hooks=True, max_norm=1.0), {}),
    ("sharded", Case(hooks=True, kernels=True, lifted=True, max_norm=1.0), {}),
    ("hierarchical", Case(lifted=True, measured=True), {}),
    ("hierarchical", Case(scaler=True, hooks=True, kernels=True, max_norm=(1.0, 0.1)), {"dense_parameters": ("p0",)}),
    ("hierarchical", Case(scaler=True, votes=True), {"dense_parameters": ("p0",)}),
    ("hierarchical", Case(scaler=True, hooks=True), {"wire": "int4"}),
    ("hierarchical", Case(scaler=True, votes=True, kernels=True), {}),
    ("single_server", Case(scaler=True, resumed=True, kernels=True), {}),
    ("single_server", Case(scaler=True, hooks=True), {"clip_norm": 1.0}),
    ("allgather", Case(votes=True, hooks=True), {}),
]


@pytest.mark.parametrize(("topology", "case", "settings"), PLAYED, ids=str)
def test_all_that_streams_share_is_ordered_and_freed_in_time(gpu, monkeypatch, topology, case, settings):
    train(gpu, monkeypatch, case, topology, **settings)
    assert (gpu.races, gpu.reuses) == (set(), set())


class Shards:
    """A parameter group of FSDP2, whose gradient is computed on the caller's stream."""

    accumulate_, add_accumulated_, end_pass = ParamGroup.accumulate_, ParamGroup.add_accumulated_, ParamGroup.end_pass

    def __init__(self, gpu: Gpu, number: int) -> None:
        self.members = [torch.nn.Parameter(torch.empty(size, device=CUDA)) for size in SIZES[number : number + 2]]
        self.names = {member: f"{number}.{place}" for place, member in enumerate(self.members)}
        self.proxies, self.trained = dict(self.names), self.members
        self.user_divides, self.exchanges, self._waiting, self._without = False, True, ((), None), []
        self._group = mock.Mock(_partial_reduce_output=None)
        self.stream, self.device = gpu.current, CUDA
        self.bucket = lambda g: tuple(self.members)
        sharded = {member: mock.Mock(device_mesh=torch.empty(()), placements=()) for member in self.members}
        self.sharded = sharded.__getitem__
        self.watches: list[Any] = []
        self.shards = None


def test_exchanges_of_shards_are_ordered_and_timed(gpu, monkeypatch):
    """Simulates FSDP: it waits for the gradient, calls its hook on the hook's stream, and waits for that stream."""
    from lightning_topk.core.ops import cuda

    monkeypatch.setattr(ops, "fast", lambda device: cuda)
    monkeypatch.setattr(hook, "check_agreement", lambda *_: None)
    fake = FakeTensorMode()
    with fake:
        units: list[Any] = [Shards(gpu, 0), Shards(gpu, 2)]
    arguments = dict.fromkeys(("timeout", "earlier", "epoch", "optimizers", "scaler", "announce"))
    state = hook.ShardState(torch.nn.Module(), units, dist.group.WORLD, config=TopKConfig(ratio=0.01), **arguments)
    with fake, gpu:
        state.learn_names()
        hooks, state.telemetry.timing = state.lane(CUDA).stream, True
        for number in range(4):
            for unit in units:
                unit.exchanges = number != 1
                g = torch.empty(sum(member.numel() for member in unit.members), device=CUDA)
                g.add_(1.0)
                hooks.wait_stream(gpu.current)
                with gpu.on(hooks):
                    state.exchange_shard(unit, g)
                unit._group._partial_reduce_output = None
                torch.zeros(64, device=CUDA)  # backward continues and allocates memory
            gpu.current.wait_stream(hooks)
            g.add_(1.0)  # FSDP copies it to the parameters
            for unit in units:
                unit.end_pass()
            state.backward_ended()
        report = state.report()
        jobs, ready = report.timed[-1]
        assert min(report.times) > 0, "read once both marks have come"
        state.close()
        torch.zeros(1, device=CUDA)
    assert (gpu.races, gpu.reuses) == (set(), set())
    assert len(jobs) == 2
    assert ready.clock[hooks] < jobs[-1].ended.clock[hooks]


def test_streams_that_do_not_wait_for_each_other_are_detected(gpu, monkeypatch):
    with mock.patch.object(Stream, "wait_stream"):
        train(gpu, monkeypatch, Case(), "sharded")
    assert any("not after test_stream_order.py" in race for race in gpu.races), "the lane does not wait"
    assert any(race.startswith("test_stream_order.py") for race in gpu.races), "the caller does not wait"


def test_memory_freed_while_another_stream_uses_it_is_detected(gpu, monkeypatch):
    """Residuals of a checkpoint, without ``record_stream``."""
    keep = torch.Tensor.record_stream

    def record_stream(tensor, stream):
        if not sys._getframe(2).f_code.co_filename.endswith("residuals.py"):  # above ops.use_here
            keep(tensor, stream)

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    train(gpu, monkeypatch, Case(resumed=True), "sharded")
    assert gpu.reuses


def test_the_log_names_bucket_and_step_before_each_collective(gpu, monkeypatch, caplog):
    """NCCL's watchdog, which ends the process after a timeout, reports neither."""
    caplog.set_level(logging.DEBUG, "lightning_topk")
    train(gpu, monkeypatch, Case(kernels=True), "sharded")
    lines = [record.message.split(" of ")[1:] for record in caplog.records if "step 2, bucket 1" in record.message]
    assert [line[0] for line in lines] == ["4, step 2, bucket 1: AllToAll", "4, step 2, bucket 1: AllGather"]
    assert [line[1].split(" elements ")[1] for line in lines] == ["among all, uplink", "among all, downlink"]


@pytest.mark.parametrize("ends", [True, False, RuntimeError("device-side assert triggered")])
def test_closing_a_gpu_lane_returns_whether_its_work_has_ended(gpu, monkeypatch, ends):
    monkeypatch.setattr(lanes, "PATIENCE", 0.1)
    lane, asked = lanes.StreamLane(CUDA, mock.Mock()), []

    def query(event):
        asked.append(event.clock[lane.stream])
        if isinstance(ends, Exception):
            raise ends
        return ends

    monkeypatch.setattr(Event, "query", query)
    with FakeTensorMode(), gpu, gpu.on(lane.stream):
        torch.zeros(1, device=CUDA)  # work that a failed job queued counts too
    assert lane.close() is (ends is True)
    assert asked[0] == gpu.operations == 1


def test_a_gpu_lane_takes_no_job_after_a_failed_one(gpu):
    """Other ranks still wait in the failed exchange, and the next job would answer it."""
    lane, ran = lanes.StreamLane(CUDA, mock.Mock()), []

    def run(name: str, groups: Any):
        ran.append(name)
        if name == "second":
            raise MemoryError
        return []

    jobs = [mock.Mock(run=partial(run, name)) for name in ("first", "second", "third")]
    lane.submit(jobs[0])
    for job in jobs[1:]:
        with pytest.raises(MemoryError):
            lane.submit(job)
    assert ran == ["first", "second"]


def test_a_group_of_some_ranks_is_not_split_off_the_communicator_of_all(monkeypatch):
    """NCCL splits a bound group's communicator on all its ranks, but ranks that do not train the model never join."""
    split = mock.Mock(side_effect=AssertionError("a split"))
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", split)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        some = dist.new_group([0, 1], use_local_synchronization=True)
        bound = dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        ours = Groups.make(some, torch.device("cpu"), None, local=1, hierarchy=True)
        made = [*ours.among.values()]
        assert [dist.get_process_group_ranks(each) for each in made] == [[0, 1], [0], [0, 1]]
        assert [each.bound_device_id for each in made] == [bound] * 3
        assert dist.group.WORLD.bound_device_id == bound
    finally:
        dist.destroy_process_group()
    assert not split.called
