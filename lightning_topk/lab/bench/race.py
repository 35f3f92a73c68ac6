"""``bench race``: whole trainings on emulated hosts, until they are as good as dense training is at its end.

The clock counts training alone: it stands still while rank 0 evaluates. Runs are appended to a file as they end; an
interrupted command goes on where it stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_topk.config import check_count, check_name
from lightning_topk.lab import hosts as emulated
from lightning_topk.lab.bench.ddp import bucket_cap, sent_bytes
from lightning_topk.lab.bench.peers import PEERS, Register, ours
from lightning_topk.lab.data import Data, digits, image_folder
from lightning_topk.lab.models import DIGIT, mlp, small_vgg
from lightning_topk.lab.report import Panel, Result, spread

OURS = "saving 50"
RACERS: dict[str, Register] = {
    OURS: ours(),
    "saving 150": ours(saving=150),
    "saving 400": ours(saving=400),
    "ratio 0.001": ours(ratio=0.001),
    **{name: PEERS[name] for name in ("DDP", "fp16 hook", "PowerSGD 1", "PowerSGD 2", "PowerSGD 4")},
}
SOONER = {"100mbit": 8, "300mbit": 3, "1gbit": 1.5}
"""How many times sooner than DDP the default shall be, by link, where the gradient outweighs the computing."""
NEAR = 0.01
"""How far, relatively, from what dense training ends with is as good."""


@dataclass(frozen=True)
class Course:
    """A model, what it learns, and the hyper-parameters that suit dense training of it.

    Attributes:
        model: Makes the model.
        steps: Steps of dense training: what it ends with is the aim.
        lr: Learning rate of SGD with momentum 0.9.
        batch: Examples of each worker in a step.
        every: Steps between two evaluations.
        heavy: Whether the gradient outweighs the computing.
    """

    model: Callable[[], nn.Module]
    steps: int
    lr: float
    batch: int
    every: int
    heavy: bool


COURSES = {
    "digits": Course(partial(mlp, DIGIT, 10, (3136, 3136)), steps=150, lr=0.05, batch=32, every=5, heavy=True),
    "images": Course(small_vgg, steps=300, lr=0.02, batch=32, every=20, heavy=False),
}


def run(
    hosts: int = 2,
    rates: Sequence[str] = tuple(SOONER),
    racers: Sequence[str] = (),
    data: Path | None = None,
    seeds: int = 1,
    budget: float = 300,
    out: Path = Path("race.jsonl"),
) -> Result:
    """Trains to the quality that dense training ends with, and takes the time, with ours and with each peer.

    Args:
        hosts: Number of emulated hosts, of one process each.
        rates: Rates of their links, as tc writes them.
        racers: Who takes part. Default: all.
        data: Folder of images to train a VGG on, instead of an MLP of 10 million parameters on digits:
            train/<class>/*, test/<class>/*.
        seeds: Runs of each.
        budget: Seconds of training after which a run is given up.
        out: File of the runs.

    Raises:
        RuntimeError: Hosts cannot be emulated here.
        ValueError: A racer or a rate is unknown, or there is one host only.
    """
    check_count("seeds", seeds)
    if hosts < 2:
        raise ValueError("a race takes 2 hosts or more: one exchanges nothing.")
    name, racers = "digits" if data is None else "images", racers or [*RACERS]
    course = COURSES[name]
    for racer in racers:
        check_name("racer", racer, RACERS)
    for rate in rates:
        emulated.bits_per_second(rate)
    if not emulated.available():
        raise RuntimeError("Network namespaces need root, and ip and tc of iproute2.")
    result = Result(
        "race",
        "the quality of dense training, sooner than with what a user would pick instead",
        f"{hosts} emulated hosts of one process and one thread each (network namespaces, tbf), gloo, SGD with momentum "
        f"0.9; {seeds} seeds (mean ± half the range). The aim is what dense training ends with, to {NEAR:.0%}.",
    )
    runs = _Runs(out, hosts, budget, str(data) if data else None, seeds * (1 + len(rates) * len(racers)))
    aims = []
    for seed in range(seeds):
        aims.append(runs.dense(name, course.steps, seed)["curve"][-1][2])
        for rate in rates:
            for racer in racers:
                runs.race(name, rate, racer, seed, aims[-1])
    for rate in rates:
        raced = {racer: [runs.found[name, hosts, rate, racer, seed] for seed in range(seeds)] for racer in racers}
        _enter(result, f"{name}, {rate}", raced, aims)
        if course.heavy:
            _judge(result, f"{name}, {rate}", raced, SOONER.get(rate, 1.0))
    return result


class _Runs:
    """The runs of a file, and those that are missing in it."""

    def __init__(self, path: Path, hosts: int, budget: float, images: str | None, count: int) -> None:
        self.path, self.hosts, self.budget, self.images = path, hosts, budget, images
        lines = path.read_text().splitlines() if path.exists() else []
        self.found: dict[tuple[Any, ...], dict[str, Any]] = {
            tuple(entry["key"]): entry for entry in map(json.loads, lines)
        }
        self._bar = tqdm(total=count, desc="race", unit="run")

    def dense(self, course: str, steps: int, seed: int) -> dict[str, Any]:
        """Dense training where links cost nothing, for all steps of a course."""
        group = nullcontext(emulated.local(self.hosts))
        return self._run(group, (course, self.hosts, "loopback", "DDP", seed), {"steps": steps, "budget": 3600.0})

    def race(self, course: str, rate: str, racer: str, seed: int, aim: float) -> dict[str, Any]:
        """Training over links of a rate, until the aim is reached or the budget is over."""
        group = emulated.emulate(self.hosts, rate)
        return self._run(group, (course, self.hosts, rate, racer, seed), {"aim": aim, "budget": self.budget})

    def _run(
        self, group: AbstractContextManager[emulated.Hosts], key: tuple[Any, ...], options: dict[str, Any]
    ) -> dict[str, Any]:
        if key not in self.found or (not self.found[key]["reached"] and self.found[key]["budget"] < options["budget"]):
            course, _, rate, racer, seed = key
            self._bar.set_postfix_str(f"{course}, {rate}, {racer}")
            given = {"course": course, "racer": racer, "seed": seed, "images": self.images, **options}
            with group as entered:
                measured = entered.run(race, given, timeout=3 * options["budget"] + 600)[0]
            self.found[key] = {"key": key, "budget": options["budget"], **measured}
            with self.path.open("a") as file:
                file.write(json.dumps(self.found[key]) + "\n")
            self._bar.update()
        return self.found[key]


def race(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """One rank's training.

    Returns:
        ``curve``, seconds, steps and quality at each evaluation; ``reached``, whether the aim was; ``sent``, bytes that
        left this host.
    """
    racer, images, seed = options["racer"], options["images"], options["seed"]
    course, data = COURSES[options["course"]], digits() if images is None else image_folder(Path(images))
    torch.manual_seed(seed)
    net = course.model()
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_cap(racer, 25), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), course.lr, 0.9)
    state = RACERS[racer](model, {"optimizer": optimizer})
    batches = torch.Generator().manual_seed(world * seed + rank)
    curve: list[tuple[float, int, float]] = []
    seconds, step, sent, ended, reached = 0.0, 0, sent_bytes(), torch.zeros(()), False
    while not ended:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(course.every):
            chosen = torch.randint(len(data.labels), (course.batch,), generator=batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.examples[chosen]), data.labels[chosen]).backward()
            optimizer.step()
        dist.barrier()
        seconds, step = seconds + time.perf_counter() - begin, step + course.every
        if rank == 0:
            curve.append((round(seconds, 3), step, _accuracy(net, data)))
            reached = curve[-1][2] >= options.get("aim", math.inf) * (1 - NEAR)
            ended.fill_(reached or step >= options.get("steps", math.inf) or seconds >= options["budget"])
        dist.broadcast(ended, 0)
    sent = sent_bytes() - sent
    if state is not None:
        state.close()
    return {"curve": curve, "reached": reached, "sent": sent}


@torch.no_grad()
def _accuracy(net: nn.Module, data: Data) -> float:
    """Accuracy in percent on held-out data."""
    net.eval()
    scores: Tensor = torch.cat([net(part) for part in data.held_examples.split(500)])
    net.train()
    return 100 * float((scores.argmax(1) == data.held_labels).float().mean())


def _enter(result: Result, where: str, raced: Mapping[str, list[dict[str, Any]]], aims: list[float]) -> None:
    """Enters the table and the curves of one kind of link."""
    result.tables[f"{where}: the aim is accuracy % {spread(aims, '.3g')}"] = [
        {
            "racer": racer,
            "seconds": spread([run["curve"][-1][0] for run in runs], ".1f")
            if _all(runs)
            else f"> {_seconds(runs):.0f}",
            "sooner than DDP": _sooner(raced, "DDP", racer) if "DDP" in raced else "",
            "steps": spread([run["curve"][-1][1] for run in runs], ".0f"),
            "ms a step": 1000 * mean(run["curve"][-1][0] / run["curve"][-1][1] for run in runs),
            "final accuracy %": spread([run["curve"][-1][2] for run in runs], ".3g"),
            "MB a host and step": mean(run["sent"] / run["curve"][-1][1] for run in runs) / 1e6,
        }
        for racer, runs in raced.items()
    ]
    aim = mean(aims) * (1 - NEAR)
    panel = Panel(where, "seconds of training", xlog=True, ylabel="held-out accuracy %", level=aim)
    for racer, runs in raced.items():
        seconds, _, quality = zip(*runs[0]["curve"], strict=True)
        panel.curves[racer] = (seconds, quality)
    result.panels.append(panel)


def _judge(result: Result, where: str, raced: Mapping[str, list[dict[str, Any]]], target: float) -> None:
    """Holds the default against each peer."""
    if OURS not in raced:
        return
    for peer, runs in raced.items():
        if peer in PEERS:
            least = target if peer == "DDP" else 1.0
            seen = _seconds(runs) / _seconds(raced[OURS])
            holds = _all(raced[OURS]) and seen >= least
            statement = f"{where}: sooner than {peer}"
            result.check(statement, f">= {least:g}x", _sooner(raced, peer, OURS), holds)


def _all(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether all runs reached the aim."""
    return all(run["reached"] for run in runs)


def _seconds(runs: Sequence[dict[str, Any]]) -> float:
    """Seconds until the end of a run, the median."""
    return float(median(run["curve"][-1][0] for run in runs))


def _sooner(raced: Mapping[str, list[dict[str, Any]]], peer: str, racer: str) -> str:
    """How many times sooner a racer is than a peer; a bound if the peer gave up, nothing if the racer did."""
    if not _all(raced[racer]):
        return ""
    return f"{'> ' * (not _all(raced[peer]))}{_seconds(raced[peer]) / _seconds(raced[racer]):.2f}x"
