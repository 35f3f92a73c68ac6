"""The command ``bench``: joins the ranks that a launcher started, or starts some, times the steps, and reports."""

from __future__ import annotations

import json as jsons
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.utils._pytree import tree_leaves

from lightning_topk._version import __version__
from lightning_topk.bench import loop, peers
from lightning_topk.bench.loop import Contender, Ranks
from lightning_topk.bench.verdict import SURE, decide, ratio
from lightning_topk.config import SAVING, TopKConfig, check_name
from lightning_topk.env import processor, versions
from lightning_topk.plan import Row, counted, ddp_buckets, make_module, markdown, parameter_sizes
from lightning_topk.volume import Volume, volume

SECONDS = 60.0
"""No turn starts later than this."""
TIMEOUT = timedelta(minutes=2)
"""Timeout of a contender's collectives. The ranks wait longer for each other."""
COMMAND = (
    "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m lightning_topk bench"
)
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets."""
Amount = dict[str, float]
"""Of ours: ``saving`` or ``ratio``."""


@dataclass(frozen=True)
class Work:
    """What a step computes.

    Attributes:
        model: Name of a torchvision model; or
        module: path of a class that is called without arguments; or
        params: number of parameters of a model whose steps only exchange.
        input: Shape of an example.
        batch_size: Examples of a rank and step.
        precision: ``"32"``, or ``"bf16"`` for autocast.
    """

    model: str | None = None
    module: str | None = None
    params: int | None = None
    input: tuple[int, ...] = (3, 224, 224)
    batch_size: int = 32
    precision: Literal["32", "bf16"] = "32"

    @property
    def words(self) -> str:
        """The work in words."""
        if self.params is not None:
            return "exchanges alone, without a model"
        shape = " x ".join(map(str, self.input))
        precision = "bfloat16 autocast" if self.precision == "bf16" else "float32"
        return f"{self.model or self.module}, {self.batch_size} x {shape} a rank and step, {precision}"

    def net(self, rank: int, device: torch.device) -> nn.Module:
        """The model, with the same weights on all ranks."""
        torch.manual_seed(0)
        net = make_module(self.model, self.module) if self.params is None else peers.Noise(self.params, rank)
        return net.to(device)

    def backward(self, net: nn.Module, rank: int, device: torch.device) -> Callable[[nn.Module], None]:
        """A step's forward and backward: of the mean square of all outputs, for a random batch."""
        if isinstance(net, peers.Noise):
            return net.backward
        generator = torch.Generator().manual_seed(rank)
        batch = torch.randn(self.batch_size, *self.input, generator=generator).to(device)
        half = self.precision == "bf16"

        def backward(model: nn.Module) -> None:
            with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
                outputs = [each for each in tree_leaves(model(batch)) if isinstance(each, Tensor)]
            loss: Tensor = sum(each.float().square().mean() for each in outputs)  # type: ignore[assignment]
            loss.backward()

        return backward


def run(
    model: str | None = None,
    module: str | None = None,
    params: int | None = None,
    input: Sequence[int] = (3, 224, 224),
    batch_size: int = 32,
    precision: Literal["32", "bf16"] = "32",
    steps: int = 50,
    saving: float = SAVING,
    only: Sequence[str] = (),
    ranks: int | None = None,
    json: Path | None = None,
) -> str | None:
    """Times training steps on all ranks of a launcher; returns the report on rank 0.

    Without a launcher, starts ranks on this machine that run the same command.

    Raises:
        ValueError: An argument has a value that is not allowed, or this is the only rank.
        RuntimeError: A rank is gone.
    """
    TopKConfig(saving=saving)
    work = Work(model, module, params, tuple(input), batch_size, precision)
    for name in only:
        check_name("--only", name, [*exchanges(saving, (), "cpu")])
    if json is not None and os.environ.get("RANK", "0") == "0":
        json.open("a").close()  # fails now, if it does
    if "RANK" not in os.environ:
        _check_model(model, module, params)
        _start(ranks or 2)
        return None
    _check_launched(ranks)
    device = _device()
    _connect(device)
    try:
        return report(Bench(work, device, saving, only, steps), json)
    finally:
        dist.destroy_process_group()


def _check_model(model: str | None, module: str | None, params: int | None) -> None:
    """Refuses a model before processes start. A user's class is made on the CPU: not all can be made without data."""
    if module is None or model is not None or params is not None:
        parameter_sizes(model, module, params)
    else:
        make_module(module=module)


def _start(ranks: int) -> None:
    """Starts ranks of this command on this machine, by torchrun; returns when they have ended."""
    if ranks < 2:
        raise ValueError(f"--ranks {ranks} exchanges nothing: take 2 or more.")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    arguments = [word for word in sys.argv[1:] if not word.startswith("--ranks=")]
    if "--ranks" in arguments:
        at = arguments.index("--ranks")
        del arguments[at : at + 2]
    env = {"OMP_NUM_THREADS": "1", **os.environ}  # torchrun sets it, too, and says so at length
    done = subprocess.run([*launcher, "-m", "lightning_topk", *arguments], env=env, check=False)
    if done.returncode:
        raise RuntimeError("a rank failed; its message is above.")


def _check_launched(ranks: int | None) -> None:
    """Refuses a launch that is incomplete, or of one rank."""
    missing = [name for name in LAUNCHED if name not in os.environ]
    if missing:
        raise ValueError(
            f"RANK is set, but not {', '.join(missing)}. With srun, set what torchrun sets: "
            f"{', '.join(LAUNCHED)}. Or use torchrun: {COMMAND} --model resnet50"
        )
    if ranks is not None:
        raise ValueError(f"--ranks {ranks} starts ranks on this machine, but a launcher has: leave it out.")
    if int(os.environ["WORLD_SIZE"]) < 2:
        arguments = shlex.join(sys.argv[2:]) or "--model resnet50"
        raise ValueError(
            "this is the only rank, so there is nothing to exchange. Type on each of two machines, with the name of "
            f"the first for HOST: {COMMAND} {arguments}. To try it on this machine: python -m lightning_topk bench "
            f"{arguments}"
        )


def _device() -> torch.device:
    """This rank's GPU; the CPU if this machine has fewer GPUs than ranks."""
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < here:
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _connect(device: torch.device) -> None:
    """Connects the ranks: over NCCL with GPUs, else over gloo.

    Raises:
        ValueError: Some ranks have a GPU, and others have none: the two backends would wait for each other.
    """
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    store.set(f"device of {rank}", device.type)
    kinds = [store.get(f"device of {each}").decode() for each in range(world)]
    if len({*kinds}) > 1:
        raise ValueError(
            f"ranks differ: rank {kinds.index('cuda')} has a GPU, rank {kinds.index('cpu')} has none. Every node needs "
            "a GPU for each of its ranks, and a torch that finds it; or set CUDA_VISIBLE_DEVICES= on all nodes."
        )
    backend, store = "nccl" if device.type == "cuda" else "gloo", PrefixStore("ranks", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def exchanges(saving: float, shapes: Sequence[Sequence[int]], device: str) -> dict[str, peers.Register | str]:
    """The exchanges by name; of those that are left out, the reason."""
    rank = peers.power_sgd_rank(shapes, saving)
    # On gloo, too, bfloat16 is faster than float16: 6 million elements take 19 ms instead of 52 (loopback, torch 2.14).
    half = peers.BF16 if device == "cpu" or torch.cuda.is_bf16_supported() else peers.FP16
    return {
        "no exchange": peers.alone,
        "DDP": peers.dense,
        "16-bit hook": half,
        "PowerSGD": "it would compress no parameter" if rank is None else peers.power_sgd(rank),
        **{name: peers.ours(**amount) for name, amount in amounts(saving).items()},
    }


def amounts(saving: float) -> dict[str, Amount]:
    """Ours by name: the one that is judged, and two that send less."""
    return {f"saving={saving:g}": {"saving": saving}, "saving=150": {"saving": 150}, "ratio=0.001": {"ratio": 0.001}}


class Bench:
    """The contenders of one work on this rank.

    Args:
        work: What a step computes.
        device: This rank's device.
        saving: The amount that is judged.
        only: Names of the exchanges to time. Default: all.
        steps: Timed steps of each, about; three turns at least.
    """

    def __init__(
        self, work: Work, device: torch.device, saving: float, only: Sequence[str] = (), steps: int = 50
    ) -> None:
        self.work, self.device, self.saving, self.steps = work, device, saving, steps
        beside: Any = dist.new_group(backend="gloo", timeout=3 * TIMEOUT)
        self.ranks = Ranks(beside)
        net = work.net(self.ranks.rank, torch.device("cpu"))
        self.shapes = [tuple(each.shape) for each in net.parameters() if each.requires_grad]
        self.sizes = [each.numel() for each in net.parameters() if each.requires_grad]
        here = self.ranks.gather(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.local = here[0] if len({*here}) == 1 else 1
        self._check_same(only)
        found = exchanges(saving, self.shapes, device.type)
        self.failed = {name: why for name, why in found.items() if isinstance(why, str) and name in (only or found)}
        self.exchanges = {
            name: each for name, each in found.items() if not isinstance(each, str) and name in (only or found)
        }
        # A hook that fails may leave a collective unfinished, in a group of its own. Ours has groups of its own anyway,
        # and overlaps two exchanges on gloo only if the model has the default group. Made here, since all ranks must
        # make them, and none has failed yet.
        self._groups: dict[str, Any] = {
            name: {"process_group": dist.new_group(timeout=TIMEOUT)}
            for name in self.exchanges
            if name not in amounts(saving)
        }

    def _check_same(self, only: Sequence[str]) -> None:
        """Compares what the ranks were asked for."""
        mine = f"{self.work.words}, saving={self.saving:g}, lightning_topk {__version__}, torch {torch.__version__}"
        mine += (
            f", {sum(self.sizes):,} parameters, {self.device.type}, {self.steps} steps of {', '.join(only) or 'all'}"
        )
        for rank, other in enumerate(self.ranks.gather(mine)):
            if other != mine:
                raise ValueError(f"ranks differ. Rank {self.ranks.rank}: {mine}. Rank {rank}: {other}.")

    def measure(self) -> list[Contender]:
        """Times the contenders; returns those that did not fail."""
        begin = time.perf_counter()
        makers = {name: partial(self._make, name, register) for name, register in self.exchanges.items()}
        contenders = loop.made(makers, self.ranks, self.failed)
        left = SECONDS - (time.perf_counter() - begin)
        return loop.measure(contenders, self.ranks, self.failed, self.steps, left)

    def _make(self, name: str, register: peers.Register) -> Contender:
        net = self.work.net(self.ranks.rank, self.device)
        backward = self.work.backward(net, self.ranks.rank, self.device)
        trained = self.work.params is None
        optimizer = partial(torch.optim.SGD, lr=1e-4, momentum=0.9) if trained else None
        ddp = {"gradient_as_bucket_view": not trained, **self._groups.get(name, {})}
        return Contender(name, register, net, backward, optimizer, {"adapt_momentum": trained}, **ddp)

    def sent(self, contender: Contender) -> int:
        """Bytes of a step that this node sends to others; on a single node, that this rank sends."""
        counted = self._volume(contender)
        return counted.inter_node if self.local < self.ranks.world else counted.sent

    def _volume(self, contender: Contender) -> Volume:
        if contender.name == "no exchange":
            return Volume()
        if contender.name in amounts(self.saving):
            planned: Volume = contender.state.predicted()
            return planned
        sizes, itemsize = self.sizes, 2 if "hook" in contender.name else 4
        if contender.name == "PowerSGD":
            sizes = [peers.power_sgd_elements(self.shapes, peers.power_sgd_rank(self.shapes, self.saving) or 1)]
        dense = TopKConfig(topology="dense")
        return volume(dense, ddp_buckets(sizes), self.ranks.world, self.ranks.rank, itemsize, local=self.local)


def report(bench: Bench, json: Path | None = None) -> str | None:
    """Measures, writes the file, and returns the report; a collective."""
    ranks, work = bench.ranks, bench.work
    contenders = bench.measure()
    ours = [each for each in contenders if work.params is None and each.name in amounts(bench.saving)]
    hidden = {each.name: _hidden(each, bench) for each in ours}
    hosts = ranks.gather(f"{socket.gethostname()}, {processor(bench.device)}")
    times = {each.name: each.seconds for each in contenders}
    sent = {each.name: max(ranks.gather(bench.sent(each))) for each in contenders}
    for each in contenders:
        each.close()
    if ranks.rank:
        return None
    alone = bench.local == ranks.world
    rows: list[Row] = []
    for name in (*bench.exchanges, *(name for name in bench.failed if name not in bench.exchanges)):
        row: Row = {"exchange": name, "ms a step": "failed" if name in bench.exchanges else "left out"}
        if name in times:
            middle = median(times[name])
            row["ms a step"] = f"{1000 * middle:.4g}"
            row["least to most"] = f"{1000 * min(times[name]):.4g} to {1000 * max(times[name]):.4g}"
            row["of DDP's time"] = f"{ratio(times, name, 'DDP').middle:.2f}" if "DDP" in times else ""
            row[f"MB a {'rank' if alone else 'node'} sends"] = f"{sent[name] / 1e6:.4g}"
            if work.params is None:
                row["hidden behind backward"] = hidden.get(name, "")
                row["images a second" if work.model else "examples a second"] = (
                    f"{ranks.world * work.batch_size / middle:.4g}"
                )
        rows.append(row)
    judged, *less = amounts(bench.saving)
    rows += local_steps(times, sent, judged, f"MB a {'rank' if alone else 'node'} sends")
    line = decide(times, judged, [name for name in less if name in sent and sent[name] < sent.get(judged, 0)])
    head = (
        f"{work.words}: {sum(bench.sizes):,} parameters; {counted(ranks.world // bench.local, 'node')} of "
        f"{counted(bench.local, 'rank')}, "
        f"{dist.get_backend()}, torch {torch.__version__}, {hosts[0].partition(', ')[2]}"
    )
    notes = [f"{name}: {reason}" for name, reason in bench.failed.items()]
    if "PowerSGD" in times:
        rank = peers.power_sgd_rank(bench.shapes, bench.saving)
        own = "; one bucket, since its hook hangs on gloo with several" if bench.device.type == "cpu" else ""
        notes.append(f"PowerSGD: rank {rank}, whose bytes are nearest to those of {judged}{own}.")
    if bench.device.type == "cpu" and torch.cuda.is_available():
        notes.append(f"{torch.cuda.device_count()} GPUs are too few for {bench.local} ranks, which ran on CPUs.")
    if times and (turns := min(map(len, times.values()))) < SURE:
        notes.append(f"Only {turns} turns of each: intervals compare the least of one with the most of the other.")
    if alone:
        notes.append("All ranks are on this machine: no network was measured.")
    if json is not None:
        kept = {"setting": head, "hosts": hosts, "versions": versions(), "seconds": times, "bytes": sent}
        kept |= {"hidden": hidden, "failed": bench.failed, "verdict": line}
        json.write_text(jsons.dumps(kept, indent=1) + "\n")
    return "\n\n".join([head, markdown(rows), *notes, line])


def local_steps(times: Mapping[str, Sequence[float]], sent: Mapping[str, int], judged: str, volume: str) -> list[Row]:
    """Rows of DiLoCo, computed: an exchange in one of H steps, and none in the others."""
    rows: list[Row] = []
    for period, exchange in ((30, "DDP"), (100, "DDP"), (30, judged)):
        if {"no exchange", exchange, "DDP"} <= times.keys():
            alone, exchanged, dense = (median(times[name]) for name in ("no exchange", exchange, "DDP"))
            seconds = alone + max(0.0, exchanged - alone) / period
            row: Row = {"exchange": f"DiLoCo, H={period}" + f", {exchange}" * (exchange == judged) + " (computed)"}
            row |= {"ms a step": f"{1000 * seconds:.4g}", "of DDP's time": f"{seconds / dense:.2f}"}
            rows.append(row | {volume: f"{sent[exchange] / period / 1e6:.4g}"})
    return rows


def _hidden(contender: Contender, bench: Bench) -> str:
    """The fraction of the exchange that passes while backward still runs; the least of all ranks. A collective."""
    shares, reason = bench.ranks.attempt(lambda: loop.hidden(contender.watch()))
    return "" if reason else f"{min(shares):.0%}"
