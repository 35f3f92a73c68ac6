"""Training on GPUs: NCCL between ranks, streams, scalers, large gradients.

One GPU is enough: where there are too few, several ranks share it, each as a node of its own (:mod:`groups`). They take
turns on the GPU, and sockets connect them: slow, but every collective, stream and communicator is real. With several
GPUs each rank has one. If a test needs no bytes of other ranks, :func:`loopback` stands for the network.

``.ci/gpu`` runs all of it and reports.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import test_fsdp
import torch
import torch.distributed as dist
from groups import Group
from ranks import Net, attach, attached, every_rank, loss_of, states_closed, undelivered, weights
from test_gloo import harness
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainers import InThisProcess, Normed, fit

from lab.bench.own_work import alone
from lightning_topk import TopKStrategy
from lightning_topk.core import ops
from lightning_topk.core.layout import Layout
from lightning_topk.core.link import deliver
from lightning_topk.core.ops import reference
from lightning_topk.core.wire import WIRES, Codec
from lightning_topk.optim.momentum import adapt_momentum
from lightning_topk.runtime import collectives as drive

COUNT = torch.cuda.device_count()
TWO, FOUR = (COUNT if COUNT > 1 else few for few in (2, 4))
"""Ranks over NCCL: one for each GPU, or several on one."""
TOPOLOGIES = ("sharded", "hierarchical", "single_server", "allgather", "dense")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason="needs a GPU")]


@pytest.mark.parametrize("numel", [25_000_000, 2**31 + 12_345])
def test_kernels_select_like_the_reference_at_any_size(numel):
    cuda = pytest.importorskip("lightning_topk.core.ops.cuda")
    if torch.cuda.mem_get_info()[0] < 50 * numel:
        pytest.skip(f"needs {50 * numel / 1e9:.0f} GB of a GPU's memory")
    layout = Layout(numel, 8)
    codec = Codec(WIRES["fp32"], layout.shard_size, numel // 8000)
    e, x = (torch.randn(numel, device="cuda") for _ in range(2))
    e += x
    expected = reference.shard_rows(e, layout)
    places = reference.topk_index(expected, codec.k)
    expected = expected.gather(1, places)
    payload = cuda.Send(e.sub_(x), layout, ops.Scratch())(x, codec.format(), None)
    found = codec.read(payload, torch.float32)
    assert not x.any()
    assert (found[0] == places).double().mean() > 0.9999  # e - x + x may differ from e in its last bit
    torch.testing.assert_close(found[1], expected)
    assert cuda.receive(payload, layout, codec.format(), 1, x)
    assert x.count_nonzero() == expected.count_nonzero()
    assert not e[x != 0].any()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_laws_hold_over_nccl(groups, topology):
    settings = {"device": "cuda", "local": 2 - FOUR % 2}
    groups(FOUR, "cuda").run(harness, topology, topology != "allgather", "several_buckets", settings)


def test_laws_hold_over_nccl_if_parameters_are_unused(groups):
    groups(TWO, "cuda").run(harness, "sharded", True, "find_unused_parameters", {"device": "cuda"})


def test_laws_hold_for_tensors_of_a_gpu_over_gloo(groups):
    groups(4, "cuda", "gloo").run(harness, "hierarchical", True, "several_buckets", {"device": "cuda", "local": 2})


class OneGpuEach(InThisProcess):
    """Each rank is a node of its own."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self._global_rank


def trained_by_lightning(rank: int, world: int, folder: str) -> None:
    """bf16-mixed with SyncBatchNorm, an epoch with a checkpoint, and a second one resumed from it."""
    ends = []
    for epochs in (1, 2):
        module, strategy = Normed(partial(torch.optim.AdamW, lr=0.001)), TopKStrategy(saving=5)
        strategy.cluster_environment = OneGpuEach(rank, world)
        options = {"accelerator": "gpu", "devices": 1, "num_nodes": world, "precision": "bf16-mixed"}
        options |= {"sync_batchnorm": True, "max_epochs": epochs, "log_every_n_steps": 1}
        path = Path(folder) / "last.ckpt"
        trainer, logged = fit(None, 1, module, strategy, ckpt_path=path if epochs > 1 else None, **options)
        trainer.save_checkpoint(path)
        assert logged["topk/saving"] > 1
        assert 0 < logged["topk/uplink_error"] < 1
        ends.append(every_rank(weights(module).cpu()))
    assert all(rows.eq(rows[0]).all() for rows in ends)
    assert not torch.equal(*ends)


# Lightning makes DDP on a stream of its own, of which torch warns once.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_trainer_trains_and_resumes_over_nccl(groups, tmp_path):
    groups(TWO, "cuda").run(trained_by_lightning, str(tmp_path))


def scaled(rank: int, world: int) -> None:
    """16-mixed in int4 with votes and a fused optimizer; the third step overflows on rank 0."""
    net = Net().cuda()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.01, fused=True), torch.amp.GradScaler("cuda")
    options, seen = {"find_unused_parameters": True}, []
    ddp, state = attached(net, options, ratio=0.05, optimizer=optimizer, scaler=scaler)
    for step in range(6):
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(ddp, rank, step, branch=step % 2 == 0 or rank == 0)
        scaler.scale(loss * (torch.inf if step == 2 and rank == 0 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((weights(net), undelivered(state, net)))
    rows = every_rank(weights(net))
    assert all(torch.equal(row, rows[0]) for row in rows)
    assert torch.equal(seen[1][0], seen[2][0])
    assert not torch.equal(seen[2][0], seen[3][0])
    assert all(left.isfinite().all() for _, left in seen)


def test_ranks_skip_a_step_that_overflows_over_nccl(groups):
    groups(TWO, "cuda").run(scaled)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam])
def test_adapted_momentum_steps_on_a_gpu_as_on_a_cpu(kind, captured):
    """In one launch for all parameters, also in a CUDA graph; with weight decay."""
    if captured and kind is torch.optim.SGD:
        pytest.skip("SGD has no capturable")
    ends, generator = [], torch.Generator().manual_seed(0)
    steps = [[torch.randn(n, generator=generator) * (torch.rand(n, generator=generator) < 0.2) for n in (3, 5000)]
             for _ in range(8)]  # fmt: skip
    for device in ("cpu", "cuda"):
        parameters, owner = [nn.Parameter(torch.ones(n, device=device)) for n in (3, 5000)], nn.Module()
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {"capturable": captured and device == "cuda"}
        optimizer = kind(parameters, lr=0.01, weight_decay=0.1, **options)
        adapt_momentum([optimizer], owner)
        for p in parameters:
            p.grad = torch.zeros_like(p)
        graph = None
        for number, gradients in enumerate(steps):
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad.copy_(gradient)
            if device == "cuda" and captured and number == 3:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            (graph.replay if graph else optimizer.step)()
        ends.append([p.detach().cpu() for p in parameters])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def backward(ddp: nn.Module) -> None:
    ddp(torch.randn(8, 1000, device="cuda")).square().mean().backward()


def normalised(rank: int, world: int) -> None:
    """Batch norm uses the default group, the exchange its own; every other rank's lane is late.

    The GPUs therefore start the kernels of two communicators in different orders.
    """
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000)) for _ in range(6)])
    ddp = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    attach(ddp, ratio=0.01, momentum=0.9, optimizer=optimizer)  # so that a single rank compresses too
    perform = drive.perform

    def late(*arguments):
        if rank % 2:
            torch.cuda._sleep(5_000_000)
        return perform(*arguments)

    with mock.patch.object(drive, "perform", late):
        for _ in range(5):
            backward(ddp)
        gradient = torch.cat([p.grad.flatten() for p in ddp.parameters()]).cpu()
    assert gradient.isfinite().all()
    assert every_rank(gradient).eq(gradient).all()


@pytest.mark.parametrize("world", [1, TWO])
def test_synchronised_batch_norm_runs_beside_the_lane(groups, world):
    groups(world, "cuda").run(normalised)


@pytest.mark.parametrize("variable", ["NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_synchronised_batch_norm_runs_beside_the_lane_in_the_hosts_order(variable):
    with closing(Group(TWO, "cuda", environment={variable: "1"})) as group:
        group.run(normalised)


def failing(rank: int, world: int) -> float:
    """Seconds of the teardown after an exception on rank 0, while the others exchange."""
    ddp, state = attached(nn.Linear(1000, 1000).cuda(), ratio=0.01)
    for _ in range(2 if rank == 0 else 3):
        backward(ddp)
    begin = time.monotonic()
    state.close()
    return time.monotonic() - begin


def test_an_exception_on_one_rank_ends_every_rank_in_seconds():
    with closing(Group(TWO, "cuda")) as group:
        assert max(group.run(failing)) < 15


def dying(rank: int, world: int) -> None:
    """Rank 0 is killed; the others exchange once more, and wait for the result."""
    ddp, _ = attached(nn.Linear(1000, 1000).cuda(), ratio=0.01)
    backward(ddp)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    backward(ddp)
    torch.cuda.synchronize()


def test_a_rank_that_is_killed_ends_the_others():
    """Their process group times out after 30 seconds."""
    with closing(Group(TWO, "cuda")) as group:
        begin = time.monotonic()
        with pytest.raises((AssertionError, EOFError, ConnectionError, TimeoutError)):
            group.run(dying, timeout=150, ranks=range(1, TWO))
        assert time.monotonic() - begin < 150


def damaged(rank: int, world: int) -> str:
    codec = Codec(WIRES["int4"], 100_000, 100)
    layout, out = Layout(codec.universe), torch.zeros(codec.universe, device="cuda")
    payload = torch.full((1, codec.nbytes), 3, dtype=torch.uint8, device="cuda")
    try:
        deliver(payload, codec, layout, out)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_damaged_payload_fails_on_the_device():
    """In a process of its own, which CUDA cannot use any more."""
    with closing(Group(1, "cuda")) as group:
        assert "assert" in group.run(damaged)[0]


@pytest.fixture
def loopback():
    """Simulates four ranks, of which the other three send what this one sends."""
    if dist.is_initialized():
        dist.destroy_process_group()  # Lightning leaves a Trainer's group
    with alone(4), states_closed():
        yield


def trained():
    """A model trained for four steps on ``loopback``, its state, and a function that takes a step."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(6)]).cuda()
    (ddp, state), x = attached(net, {"bucket_cap_mb": 16}), torch.randn(64, 2000, device="cuda")

    def step() -> None:
        ddp(x).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.01)
                p.grad.zero_()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    return net, state, step


def test_hook_and_lane_never_wait_for_the_gpu(loopback):
    net, _, step = trained()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in net.parameters())


def test_the_replicas_of_a_sharded_model_exchange_without_waiting_for_the_gpu(loopback):
    mesh = init_device_mesh("cuda", (4, 1), mesh_dim_names=("replicate", "shard"))
    net = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(6)]).cuda()
    for part in (*net, net):
        fully_shard(part, mesh=mesh["shard"])
    optimizer, x = torch.optim.SGD(net.parameters(), lr=0.01), torch.randn(64, 2000, device="cuda")
    state = attach(net, process_group=mesh["replicate"], saving=50, optimizer=optimizer)
    state.telemetry.timing = True
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
        assert len(report.timed[0][0]) == 6
        assert 0 <= report.times[1] <= report.times[0]
    print(f"\n{report.times[1] / report.times[0]:.0%} of the exchange of a sharded model is after backward")
    assert all(p.to_local().isfinite().all() for p in net.parameters())


def sharded(rank: int, world: int) -> None:
    """Compares with torch's own HSDP, with everything sent."""

    def make(mesh: DeviceMesh) -> nn.Module:
        return test_fsdp.sharded(Net(empty=False).cuda(), mesh)

    train = partial(test_fsdp.learned, rank=rank, wait="set_requires_gradient_sync", clip=False, kind=torch.optim.SGD)
    test_fsdp.as_hybrid(make, train, test_fsdp.mesh_of(2, world // 2, "cuda"), 1e-5, 1e-4)


@pytest.mark.skipif(FOUR % 2 == 1, reason="needs an even number of GPUs, or one")
def test_a_sharded_model_learns_as_with_torchs_hybrid_sharding_over_nccl(groups):
    groups(FOUR, "cuda").run(sharded)


def test_an_exchange_and_its_step_pass_torchs_sanitizer_of_streams():
    """It follows torch's operations, not Triton's kernels, in a process of its own."""
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        pytest.skip("it is the sanitizer's process")
    options = ["-m", "gpu", "-n", "0", "-q", "-p", "no:cacheprovider", "-k", "never_wait"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    env = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_exchanges_begin_before_backward_ends_on_a_stream_of_their_own(loopback, tmp_path):
    net, state, step = trained()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with torch.profiler.profile(acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    buckets = len(state.last_buckets)
    trace = Path(os.environ.get("LIGHTNING_TOPK_TRACE", tmp_path / "trace.json"))
    profile.export_chrome_trace(str(trace))
    kernels = [each for each in profile.profiler.kineto_results.events() if each.device_type().name == "CUDA"]
    streams: dict[int, list] = {}
    for each in kernels:
        streams.setdefault(each.device_resource_id(), []).append(each)
    lane, *_, main = sorted(streams.values(), key=lambda found: sum(each.duration_ns() for each in found))
    last = max(each.start_ns() for each in main if "gemm" in each.name().lower() or "cutlass" in each.name().lower())
    before = sum(each.start_ns() < last for each in lane)
    peak = torch.cuda.max_memory_allocated() - held
    print(f"\n{len(lane) / buckets:.0f} launches a bucket on the lane; {peak / 1e6:.0f} MB above what is held; {trace}")
    print(f"{before / len(lane):.0%} of the lane's kernels start before backward's last matrix product")
    assert 0 < before < len(lane)
    assert state.lane(net[0].weight.device).stream.priority < 0, "before the kernels of backward"
