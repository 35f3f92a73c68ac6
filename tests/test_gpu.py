"""Training on GPUs: NCCL with one rank and with all, gloo with several on one GPU, streams, scalers, large gradients.

``.ci/gpu`` runs all of it and reports. Where a test needs no bytes of other ranks, DDP is real and :func:`loopback`
stands for the network: so one GPU is enough.
"""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from groups import Group
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from lightning_topk import CompressionMonitor, TopKStrategy
from lightning_topk import attach as attach_any
from lightning_topk.core.layout import Layout
from lightning_topk.core.ops import reference
from lightning_topk.core.requests import AllGather
from lightning_topk.ddp import attach
from lightning_topk.runtime import collectives as drive

COUNT = torch.cuda.device_count()
WORLDS = sorted({1, COUNT})
TOPOLOGIES = ("sharded", "hierarchical", "single_server", "allgather", "dense")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason="needs a GPU")]
several = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")


@pytest.mark.parametrize("numel", [25_000_000, 2**31 + 12_345])
def test_kernels_choose_what_the_reference_chooses_whatever_the_size(numel):
    cuda = pytest.importorskip("lightning_topk.core.ops.cuda")
    if torch.cuda.mem_get_info()[0] < 50 * numel:
        pytest.skip(f"needs {50 * numel / 1e9:.0f} GB of a GPU's memory")
    layout, finite = Layout(numel, 8), torch.tensor(True, device="cuda")
    e, x = (torch.randn(numel, device="cuda") for _ in range(2))
    total = e + x
    found = cuda.add_and_select(e, x, finite, layout, numel // 8000)
    assert torch.equal(e, total)
    assert not x.any()
    expected = reference.add_and_select(e, x, finite, layout, numel // 8000)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 4000), nn.BatchNorm1d(4000), nn.ReLU(), nn.Linear(4000, 1))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("sync_batchnorm", [False, True])
def test_a_model_trains_on_a_gpu(tmp_path, precision, sync_batchnorm):
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=6,
        precision=precision,
        sync_batchnorm=sync_batchnorm,
        strategy=TopKStrategy(ratio=0.01, momentum=0.9),  # without momentum a single rank does not compress
        callbacks=[CompressionMonitor()],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = Model()
    before = model.net[3].weight.detach().clone()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(48, 20)), batch_size=8))
    assert trainer.global_step == 6
    assert not torch.equal(model.net[3].weight.cpu(), before)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert 0 < trainer.callback_metrics["topk/uplink_error"] < 1


def exchanged(rank: int, world: int, topology: str) -> None:
    """With everything sent, DDP's mean."""
    torch.manual_seed(0)
    net = nn.Linear(50, 50).cuda()
    ddp = DistributedDataParallel(net)
    local = 2 if world % 2 == 0 else 1
    state = attach(
        ddp, ratio=1.0, wire="fp32", topology=topology, local_world_size=local, bidirectional=topology != "allgather"
    )
    pairs = []
    for step in range(3):
        x = torch.randn(4, 50, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
        alone = copy.deepcopy(net)
        alone(x).square().mean().backward()
        expected = torch.cat([p.grad.flatten() for p in alone.parameters()])
        dist.all_reduce(expected)
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        pairs.append((torch.cat([p.grad.flatten() for p in net.parameters()]).cpu(), expected.cpu() / world))
    state.close()
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ranks_that_share_a_gpu_exchange_over_gloo(groups, topology):
    groups(4, "cuda", "gloo").run(exchanged, topology)


@several
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_delivers_the_mean_over_nccl(groups, topology):
    groups(COUNT, "cuda").run(exchanged, topology)


class Branches(nn.Module):
    """A net of 2 million parameters, of which a part may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(1000, 1000), nn.Linear(1000, 1000)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.all(x).square().mean() + (self.some(x).square().mean() if both else 0)


def scaled(rank: int, world: int) -> None:
    """16-mixed in int4 with votes and a fused optimizer; the third step overflows on rank 0."""
    torch.manual_seed(0)
    net = Branches().cuda()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    state = attach(ddp, saving=50, optimizer=optimizer, scaler=scaler)
    seen = []
    for step in range(6):
        with torch.autocast("cuda", torch.float16):
            loss = ddp(torch.randn(8, 1000, device="cuda"), both=step % 2 == 0 or rank == 0)
        scaler.scale(loss * (torch.inf if step == 2 and rank == 0 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kept = [half.clone() for halves in state.residuals.held().values() for half in halves]
        seen.append(([p.detach().clone() for p in net.parameters()], kept))
    state.close()
    sums = torch.stack([p.double().sum() for p in net.parameters()]).cpu()
    rows = [None] * world
    dist.all_gather_object(rows, sums)
    assert all(torch.equal(row, sums) for row in rows)
    for before, after in zip(seen[1], seen[2], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert not torch.equal(seen[2][0][0], seen[3][0][0])
    assert all(half.isfinite().all() for _, kept in seen for half in kept)


def test_two_ranks_of_one_gpu_skip_a_step_that_overflows_and_lose_nothing(groups):
    groups(2, "cuda", "gloo").run(scaled)


@several
def test_all_gpus_skip_a_step_that_overflows_and_lose_nothing(groups):
    groups(COUNT, "cuda").run(scaled)


def normalised(rank: int, world: int) -> None:
    """Batch norm's collectives are on the default group, the exchange's on its own; every other rank's lane is late.

    So the GPUs start the kernels of two communicators in different orders.
    """
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000)) for _ in range(6)])
    ddp = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    state = attach(ddp, ratio=0.01, momentum=0.9, optimizer=optimizer)  # so that a single rank compresses too
    perform = drive.perform

    def late(*arguments):
        if rank % 2:
            torch.cuda._sleep(5_000_000)
        return perform(*arguments)

    with mock.patch.object(drive, "perform", late):
        for _ in range(5):
            ddp(torch.randn(8, 1000, device="cuda")).square().mean().backward()
        gradient = torch.cat([p.grad.flatten() for p in ddp.parameters()]).cpu()
    state.close()
    rows = [None] * world
    dist.all_gather_object(rows, gradient)
    assert gradient.isfinite().all()
    assert all(torch.equal(row, gradient) for row in rows)


@pytest.mark.parametrize("world", WORLDS)
def test_synchronised_batch_norm_runs_beside_the_lane(groups, world):
    groups(world, "cuda").run(normalised)


def failing(rank: int, world: int) -> float:
    """Seconds that the teardown takes after an exception on rank 0, while the others exchange."""
    ddp = DistributedDataParallel(nn.Linear(1000, 1000).cuda())
    state = attach(ddp, ratio=0.01)
    for step in range(3):
        if step == 2 and rank == 0:
            break
        ddp(torch.randn(8, 1000, device="cuda")).square().mean().backward()
    begin = time.monotonic()
    state.close()
    return time.monotonic() - begin


@several
def test_an_exception_on_one_rank_ends_every_rank_in_seconds():
    group = Group(COUNT, "cuda")
    try:
        assert max(group.run(failing)) < 15
    finally:
        group.stop()


def subset(rank: int, world: int) -> None:
    members = list(range(max(1, world - 1)))
    some = dist.new_group(members)
    if rank in members:
        ddp = DistributedDataParallel(nn.Linear(1000, 1000).cuda(), process_group=some)
        state = attach(ddp, ratio=0.01)
        for _ in range(3):
            ddp(torch.randn(8, 1000, device="cuda")).square().mean().backward()
        state.close()
        assert ddp.module.weight.grad.isfinite().all()


@several
def test_a_model_on_some_of_the_ranks_does_not_wait_for_the_others():
    group = Group(COUNT, "cuda")
    try:
        group.run(subset)
    finally:
        group.stop()


@pytest.fixture
def loopback(monkeypatch):
    """Four ranks, of which the other three would send what this one sends."""

    def perform(request, group, background):
        payload = request.payload
        return payload.expand(4, -1).contiguous() if isinstance(request, AllGather) else payload.clone(), None

    monkeypatch.setattr(drive, "perform", perform)
    if dist.is_initialized():
        dist.destroy_process_group()  # Lightning leaves that of a Trainer
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def trained(steps: int = 4):
    """A model that is trained on ``loopback``, and a function that makes a step."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(6)]).cuda()
    ddp = DistributedDataParallel(net, bucket_cap_mb=16)
    state, x = attach(ddp), torch.randn(64, 2000, device="cuda")

    def step() -> None:
        ddp(x).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.01)
                p.grad.zero_()

    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return net, state, step


def test_hook_and_lane_never_wait_for_the_gpu(loopback):
    net, state, step = trained()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    state.close()
    assert all(p.isfinite().all() for p in net.parameters())


def test_the_replicas_of_a_sharded_model_exchange_without_waiting_for_the_gpu(loopback):
    mesh = init_device_mesh("cuda", (4, 1), mesh_dim_names=("replicate", "shard"))
    net = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(6)]).cuda()
    for part in (*net, net):
        fully_shard(part, mesh=mesh["shard"])
    optimizer, x = torch.optim.SGD(net.parameters(), lr=0.01), torch.randn(64, 2000, device="cuda")
    state = attach_any(net, process_group=mesh["replicate"], saving=50, optimizer=optimizer)
    state.timing = True
    for step in range(4):
        loss = net(x).square().mean()
        try:
            torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        optimizer.zero_grad()
        report = state.report()
        assert report.exchanges == 6
        assert 0 <= report.exposed_seconds <= report.seconds
    state.close()
    print(f"\n{report.exposed_seconds / report.seconds:.0%} of the exchange of a sharded model is after backward")
    assert all(p.to_local().isfinite().all() for p in net.parameters())


def sharded(rank: int, world: int) -> None:
    """With everything sent, torch's own sharding with replicas."""
    mesh, found = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard")), []
    for hybrid in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(50, 301), nn.Linear(301, 50)).cuda()
        for part in (*net, net):
            fully_shard(part, mesh=mesh if hybrid else mesh["shard"])
        state = None if hybrid else attach_any(net, process_group=mesh["replicate"], ratio=1.0, wire="fp32")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(8, 50, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.full_tensor().detach().flatten().cpu() for p in net.parameters()]))
    state.close()
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(COUNT < 2 or COUNT % 2 == 1, reason="needs two GPUs, or another even number")
def test_a_sharded_model_learns_as_with_torchs_hybrid_sharding_over_nccl(groups):
    groups(COUNT, "cuda").run(sharded)


def test_a_step_is_captured_as_a_graph_or_refused(loopback):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        net, state, step = trained(12)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                step()
        except RuntimeError as error:
            pytest.xfail(f"a step is not captured: {error}")
    before = net[0].weight.detach().clone()
    graph.replay()
    torch.cuda.synchronize()
    state.close()
    assert net[0].weight.isfinite().all()
    assert not torch.equal(net[0].weight, before)


def test_exchanges_overlap_with_backward_on_a_stream_of_their_own(loopback, tmp_path):
    _, state, step = trained()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    buckets = len(state.residuals.progress.buckets)
    state.close()
    trace = Path(os.environ.get("LIGHTNING_TOPK_TRACE", tmp_path / "trace.json"))
    profile.export_chrome_trace(str(trace))
    kernels = [each for each in profile.profiler.kineto_results.events() if each.device_type().name == "CUDA"]
    streams: dict[int, list] = {}
    for each in kernels:
        streams.setdefault(each.device_resource_id(), []).append(each)
    lane = min(streams.values(), key=lambda found: sum(each.duration_ns() for each in found))
    peak = torch.cuda.max_memory_allocated() - held
    print(f"\n{len(lane) / buckets:.0f} launches a bucket on the lane; {peak / 1e6:.0f} MB above what is held; {trace}")
    assert len(streams) >= 2
