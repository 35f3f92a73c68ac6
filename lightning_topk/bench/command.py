"""The command ``bench``: joins the ranks that a launcher started, or starts some, times the steps, and reports."""

from __future__ import annotations

import json as jsons
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.run as torchrun
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils._pytree import tree_leaves

from lightning_topk._version import __version__
from lightning_topk.bench import loop, peers
from lightning_topk.bench.loop import Contender, gather
from lightning_topk.bench.processes import BACKENDS, TIMEOUT, ContenderError, Runners
from lightning_topk.bench.verdict import SURE, Times, decide, ratio
from lightning_topk.config import SAVING, TopKConfig, check_name
from lightning_topk.consensus import check_agreement
from lightning_topk.env import count, processor, versions
from lightning_topk.models import CONTEXT, GPTS, VOCABULARY, make_module
from lightning_topk.plan import Row, counted, ddp_buckets, markdown
from lightning_topk.volume import volume

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
THEIRS = ("no exchange", "DDP", "16-bit hook", "PowerSGD")


@dataclass(frozen=True)
class Work:
    """What to time: a ``model`` by name, a class ``module``, or exchanges of ``params`` parameters without a model.

    ``input`` is the shape of an example (for a GPT, its number of tokens); the verdict is about ``saving``; ``only``
    lists the exchanges to time.
    """

    model: str | None = None
    module: str | None = None
    params: int | None = None
    input: tuple[int, ...] = (3, 224, 224)
    batch_size: int = 32
    precision: Literal["32", "bf16"] = "32"
    steps: int = 50
    saving: float = SAVING
    only: Sequence[str] = ()

    def __post_init__(self) -> None:
        TopKConfig(saving=self.saving)
        for name in self.only:
            check_name("--only", name, (*THEIRS, *self.ours))

    def __str__(self) -> str:
        if self.params is not None:
            return "exchanges alone, without a model"
        shape = " x ".join(map(str, self.input))
        precision = "bfloat16 autocast" if self.precision == "bf16" else "float32"
        return f"{self.model or self.module}, {self.batch_size} x {shape} a rank and step, {precision}"

    @property
    def ours(self) -> dict[str, dict[str, float]]:
        """Our settings by name: the verdict's, and two that send less."""
        first = {f"saving={self.saving:g}": {"saving": self.saving}}
        return first | {"saving=150": {"saving": 150}, "ratio=0.001": {"ratio": 0.001}}

    def training(self, rank: int, device: torch.device) -> tuple[nn.Module, peers.Backward]:
        """Returns the model, with the same weights on all ranks, and backward of the mean square of all outputs."""
        if self.params is not None:
            return peers.noise(self.params, rank, device)
        torch.manual_seed(0)
        net = make_module(self.model, self.module).to(device)
        size, generator = (self.batch_size, *self.input), torch.Generator().manual_seed(rank)
        drawn = partial(torch.randint, VOCABULARY) if self.model in GPTS else torch.randn
        batch = drawn(size, generator=generator).to(device)

        def backward(model: nn.Module) -> None:
            with torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext():
                outputs = [each for each in tree_leaves(model(batch)) if isinstance(each, Tensor)]
            torch.stack([each.float().square().mean() for each in outputs]).sum().backward()

        return net, backward

    def exchanges(self, shapes: Sequence[Sequence[int]]) -> dict[str, peers.Peer]:
        """The exchanges to time, by name, for a model with parameters of these shapes."""
        # On gloo, too, bfloat16 is faster than float16: 6 million elements take 19 ms instead of 52 (torch 2.14).
        low_rank = peers.power_sgd(peers.power_sgd_rank(shapes, self.saving))
        known = dict(zip(THEIRS, (peers.ALONE, peers.DENSE, peers.BF16, low_rank), strict=True))
        known |= {name: peers.ours(**amount) for name, amount in self.ours.items()}
        return {name: peer for name, peer in known.items() if name in (self.only or known)}


def run(ranks: int = 2, json: Path | None = None, **work: Any) -> str | None:
    """Times :class:`Work` on all ranks of a launcher; returns the report on rank 0.

    Without a launcher, starts ranks on this machine that run the same command.
    """
    of_gpt = {"input": (CONTEXT,), "batch_size": 4} if work.get("model") in GPTS else {}
    wanted = Work(**{**of_gpt, **work})
    if json is not None and os.environ.get("RANK", "0") == "0":
        json.open("a").close()  # fails now if it cannot be written
    if "RANK" not in os.environ:
        if wanted.params is None:
            make_module(wanted.model, wanted.module)  # fails before ranks start
        _start(ranks)
        return None
    if missing := [name for name in LAUNCHED if name not in os.environ]:
        raise ValueError(f"RANK is set, but not {', '.join(missing)}. Use torchrun, or with srun set what it sets.")
    _, world, local, here, _ = (count(name, least=0) for name in LAUNCHED if name != "MASTER_ADDR")
    if world < 2:
        raise ValueError(
            "this is the only rank, so there is nothing to exchange. Run this on each of two machines, with the first "
            "one's name as HOST: torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m lightning_topk "
            "bench ... To try it on this machine only, leave torchrun out."
        )
    device = torch.device("cuda", local) if torch.cuda.device_count() >= here else torch.device("cpu")
    dist.init_process_group("gloo", timeout=4 * TIMEOUT)
    try:
        return report(wanted, device, json)
    finally:
        dist.destroy_process_group()


def _start(ranks: int) -> None:
    """Starts ranks of this command on this machine, as torchrun does; returns when they have ended."""
    if ranks < 2:
        raise ValueError(f"--ranks {ranks} exchanges nothing: use 2 or more.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it too, with a long warning
    launch = ["--standalone", f"--nproc-per-node={ranks}", "-m", "lightning_topk", *sys.argv[1:]]
    try:
        torchrun.run(torchrun.parse_args(launch))
    except ChildFailedError as error:
        raise RuntimeError("a rank failed; its message is above.") from error


def report(work: Work, device: torch.device, json: Path | None = None) -> str | None:
    """Measures, writes the file, and returns the report on rank 0. A collective."""
    world, failed = dist.get_world_size(), dict[str, str]()
    shapes, local = _agreed(work, device)
    while True:
        try:
            times, sent, hidden = _measured(work, device, shapes, local, failed)
            break
        except ContenderError as error:
            if error.name == THEIRS[0] and not failed:
                raise RuntimeError(f"a step fails even without an exchange, on {error.reason}. See --input.") from error
            failed[error.name] = error.reason
    notes = [f"{name} failed on {reason}" for name, reason in failed.items()]
    if not times:
        raise RuntimeError("; ".join(notes))
    if dist.get_rank():
        return None
    judged, *less = work.ours
    verdict = decide(times, judged, [name for name in less if name in sent and sent[name] < sent.get(judged, 0)])
    setting = (
        f"{work}: {sum(map(math.prod, shapes)):,} parameters; {counted(world // local, 'node')} of "
        f"{counted(local, 'rank')}, {BACKENDS[device.type]}, torch {torch.__version__}, {processor(device)}"
    )
    if json is not None:
        kept = {"setting": setting, "versions": versions(), "seconds": times, "bytes": sent, "hidden": hidden}
        json.write_text(jsons.dumps({**kept, "failed": failed, "verdict": verdict}, indent=1) + "\n")
    if "PowerSGD" in times:
        own = "; one bucket, since its hook hangs on gloo with several" if device.type == "cpu" else ""
        rank = peers.power_sgd_rank(shapes, work.saving)
        notes.append(f"PowerSGD: rank {rank}, whose bytes are nearest to those of {judged}{own}.")
    if device.type == "cpu" and torch.cuda.is_available():
        notes.append(f"{torch.cuda.device_count()} GPUs are too few for {local} ranks, which ran on CPUs.")
    if (turns := min(map(len, times.values()))) < SURE:
        notes.append(f"Only {turns} turns each: intervals compare the fastest of one with the slowest of the other.")
    if local == world:
        notes.append("All ranks are on this machine: no network was measured.")
    table = rows(work, times, sent, hidden, f"MB a {'rank' if local == world else 'node'} sends")
    return "\n\n".join([setting, markdown(table), *notes, verdict])


def _agreed(work: Work, device: torch.device) -> tuple[list[tuple[int, ...]], int]:
    """Shapes of the trained parameters, and ranks per node (1 if nodes differ). Refuses ranks that differ."""
    net, _ = work.training(dist.get_rank(), torch.device("cpu"))
    shapes = [tuple(each.shape) for each in net.parameters() if each.requires_grad]
    here = gather(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    same = {"the work": repr(work), "the number of parameters": sum(map(math.prod, shapes)), "the device": device.type}
    remedy = (
        "Start the same command on every rank, with the same versions. Every node needs a GPU for each of its ranks, "
        "and a torch that finds it; or set CUDA_VISIBLE_DEVICES= on all nodes."
    )
    check_agreement(same | {"lightning_topk": __version__, "torch": torch.__version__}, remedy, torch.device("cpu"))
    return shapes, here[0] if len({*here}) == 1 else 1


def _measured(
    work: Work, device: torch.device, shapes: Sequence[tuple[int, ...]], local: int, failed: Mapping[str, str]
) -> tuple[dict[str, list[float]], dict[str, int], dict[str, str]]:
    """Seconds of a step by turn, bytes that a node sends, and shares hidden behind backward; not of ``failed``.

    A collective; raises ContenderError if one fails, which ends all of them.
    """
    names = [name for name in work.exchanges(shapes) if name not in failed]
    if not names:
        return {}, {}, {}
    ours = [name for name in names if name in work.ours and work.params is None]
    with Runners(partial(_contender, work, shapes, device), device, len(failed)) as runners:
        times = loop.measure(runners.ask, names, work.steps)
        sent = {name: max(runners.ask(name, partial(_sent, name, work, shapes, local))) for name in names}
        hidden = {name: f"{1 - max(runners.ask(name, Contender.watch)):.0%}" for name in ours}
    return times, sent, hidden


def _contender(work: Work, shapes: Sequence[tuple[int, ...]], device: torch.device, name: str) -> Contender:
    """Makes a contender."""
    net, backward = work.training(dist.get_rank(), device)
    trained = work.params is None
    optimizer = partial(torch.optim.SGD, lr=1e-4, momentum=0.9) if trained else None
    settings, peer = {"adapt_momentum": trained}, work.exchanges(shapes)[name]
    return Contender(peer, net, backward, optimizer, settings, gradient_as_bucket_view=not trained)


def _sent(name: str, work: Work, shapes: Sequence[tuple[int, ...]], local: int, contender: Contender) -> int:
    """Bytes of a step that this node sends to others; on a single node, that this rank sends."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if name == "no exchange":
        return 0
    if contender.state is not None:
        counted = contender.state.predicted()
    else:
        sizes, itemsize = [*map(math.prod, shapes)], 2 if name == "16-bit hook" else 4
        if name == "PowerSGD":
            sizes = [peers.power_sgd_elements(shapes, peers.power_sgd_rank(shapes, work.saving))]
        counted = volume(TopKConfig(topology="dense"), ddp_buckets(sizes), world, rank, itemsize, local=local)
    return int(counted.inter_node if local < world else counted.sent)


def rows(work: Work, times: Times, sent: Mapping[str, int], hidden: Mapping[str, str], sends: str) -> list[Row]:
    """The table: a row per exchange, and computed rows of DiLoCo, which exchanges in one of H steps."""
    table: list[Row] = []
    middle, judged = {name: median(each) for name, each in times.items()}, f"saving={work.saving:g}"
    for name, each in times.items():
        row: Row = {"exchange": name, "ms a step": f"{1000 * middle[name]:.4g}"}
        row["least to most"] = f"{1000 * min(each):.4g} to {1000 * max(each):.4g}"
        row["of DDP's time"] = f"{ratio(times, name, 'DDP').middle:.2f}" if "DDP" in times else ""
        row[sends] = f"{sent[name] / 1e6:.4g}"
        if work.params is None:
            row["hidden behind backward"] = hidden.get(name, "")
            examples = dist.get_world_size() * work.batch_size / middle[name]
            row["examples a second" if work.module or work.model in GPTS else "images a second"] = f"{examples:.4g}"
        table.append(row)
    for period, exchange in ((30, "DDP"), (100, "DDP"), (30, judged)):
        if {"no exchange", exchange, "DDP"} <= middle.keys():
            seconds = middle["no exchange"] + max(0.0, middle[exchange] - middle["no exchange"]) / period
            row = {"exchange": f"DiLoCo, H={period}" + f", {exchange}" * (exchange == judged) + " (computed)"}
            row |= {"ms a step": f"{1000 * seconds:.4g}", "of DDP's time": f"{seconds / middle['DDP']:.2f}"}
            table.append(row | {sends: f"{sent[exchange] / period / 1e6:.4g}"})
    return table
