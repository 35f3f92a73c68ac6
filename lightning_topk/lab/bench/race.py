"""``bench race``: whole trainings on emulated hosts, up to the final quality of dense training.

The clock counts training alone: it stops while rank 0 evaluates. Each run is appended to a file when it ends, so an
interrupted command resumes where it stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_topk.config import check_name
from lightning_topk.lab import hosts as emulated
from lightning_topk.lab.bench.peers import PEERS, Register, bucket_cap, ours
from lightning_topk.lab.data import Data, digits, image_folder, source_code
from lightning_topk.lab.models import DIGIT, MODELS, mlp
from lightning_topk.lab.report import Result, Row
from lightning_topk.lab.training import Optimizer, Runs

OURS = "saving 50"
RACERS: dict[str, Register] = {
    OURS: ours(),
    "saving 150": ours(saving=150),
    "saving 400": ours(saving=400),
    "ratio 0.001": ours(ratio=0.001),
    **{name: PEERS[name] for name in ("DDP", "fp16 hook", "PowerSGD 1", "PowerSGD 2", "PowerSGD 4")},
}
SOONER = {"100mbit": 8, "300mbit": 3, "1gbit": 1.5}
"""Target speed-up of the default over DDP with digits, by link."""
NEAR = 0.01
"""Relative tolerance with which a run reaches the final quality of dense training."""


class Course(NamedTuple):
    """A model, and settings for its dense training: steps, learning rate, batch per worker, steps between evaluations.

    The optimizer is SGD with a momentum of 0.9, or AdamW. Every ``stride``-th held-out example is evaluated.
    """

    model: Callable[[], nn.Module]
    steps: int
    lr: float
    batch: int
    every: int
    adamw: bool = False
    stride: int = 1


COURSES = {
    "digits": Course(partial(mlp, DIGIT, 10, (3136, 3136)), steps=150, lr=0.05, batch=32, every=5),
    "images": Course(MODELS["vgg"], steps=300, lr=0.02, batch=32, every=20),
    "code": Course(MODELS["large gpt"], steps=300, lr=1e-3, batch=4, every=20, adamw=True, stride=8),
}


def run(
    hosts: int = 2,
    rates: Sequence[str] = tuple(SOONER),
    racers: Sequence[str] = (),
    course: str = "digits",
    data: Path | None = None,
    seeds: int = 1,
    budget: float = 300,
    out: Path = Path("race.jsonl"),
) -> Result:
    """Times training to the final quality of dense training, with ours and with each peer.

    An MLP of 10 million parameters learns digits; a VGG images, from the folder ``data``; a GPT of 10.8 million the
    source code of Python's library.
    """
    if hosts < 2:
        raise ValueError("a race needs at least 2 hosts: one exchanges nothing.")
    check_name("course", course, COURSES)
    if (course == "images") != (data is not None):
        raise ValueError("--course images needs --data, a folder of images; the other courses have data of their own.")
    racers = racers or [*RACERS]
    for racer in racers:
        check_name("racer", racer, RACERS)
    for rate in rates:
        emulated.link(rate)
    emulated.check_available()
    found, given = Runs(out), {"course": course, "images": str(data) if data else None}
    bar, aims = tqdm(total=seeds * (1 + len(rates) * len(racers)), desc="race", unit="run"), []

    def complete(
        group: AbstractContextManager[emulated.Hosts], rate: str, racer: str, seed: int, **options: Any
    ) -> dict[str, Any]:
        """Returns a run of the file; makes it if it is missing, or if it stopped at a smaller budget."""
        key = (course, hosts, rate, racer, seed)
        if key not in found or (not found[key]["reached"] and found[key]["budget"] < options["budget"]):
            bar.set_postfix_str(f"{rate}, {racer}")
            wanted = {**given, **options, "racer": racer, "seed": seed}
            with group as entered:
                measured = entered.run(race, wanted, timeout=3 * options["budget"] + 600)[0]
            found[key] = {"budget": options["budget"], **measured}
        bar.update()
        return found[key]

    for seed in range(seeds):
        free = nullcontext(emulated.local(hosts))  # dense training for all its steps, over free links
        dense = complete(free, "loopback", "DDP", seed, steps=COURSES[course].steps, budget=3600.0)
        aims.append(dense["curve"][-1][2])
        for rate in rates:
            for racer in racers:
                complete(emulated.emulate(hosts, rate), rate, racer, seed, aim=aims[-1], budget=budget)
    raced = by_racer(found, course, hosts)
    result = Result(
        "race",
        "the quality of dense training, sooner than with what a user would pick instead",
        f"{hosts} emulated hosts of one process and one thread each (network namespaces, tbf), gloo, "
        f"{'AdamW' if COURSES[course].adamw else 'SGD with momentum 0.9'}; {seeds} seeds. The aim is what dense "
        f"training ends with, to {NEAR:.0%}: {mean(aims):.3g} %.",
    )
    result.tables[f"{course}: seconds, median (least to most), and the speed-up over DDP"] = table(raced, rates, racers)
    for rate in rates:
        if course == "digits" and OURS in racers:
            _judge(result, rate, racers, raced)
        level, ylabel = mean(aims) * (1 - NEAR), "held-out accuracy %"
        curves = result.panel(f"{course}, {rate}", "seconds of training", xlog=True, ylabel=ylabel, level=level)
        for racer in racers:
            seconds, _, quality = zip(*raced[rate, racer][0]["curve"], strict=True)
            curves[racer] = (seconds, quality)
    return result


def race(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Trains one rank.

    Returns:
        ``curve``, seconds, steps and quality at each evaluation; ``reached``, whether it reached the aim; ``sent``,
        bytes that left this host.
    """
    racer, images, seed = options["racer"], options["images"], options["seed"]
    course = COURSES[options["course"]]
    data = image_folder(Path(images)) if images else source_code() if course.adamw else digits()
    torch.manual_seed(seed)
    net = course.model()
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_cap(racer, 25), gradient_as_bucket_view=True)
    optimizer = Optimizer(course.lr, 0.9, course.adamw).make(model.parameters())
    state = RACERS[racer](model, {"optimizer": optimizer})
    batches = torch.Generator().manual_seed(world * seed + rank)
    curve: list[tuple[float, int, float]] = []
    seconds, step, sent, ended, reached = 0.0, 0, emulated.sent_bytes(), torch.zeros(()), False
    while not ended:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(course.every):
            chosen = torch.randint(len(data.labels), (course.batch,), generator=batches)
            optimizer.zero_grad()
            scores, labels = model(data.examples[chosen]), data.labels[chosen]
            nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten()).backward()
            optimizer.step()
        dist.barrier()
        seconds, step = seconds + time.perf_counter() - begin, step + course.every
        if rank == 0:
            curve.append((round(seconds, 3), step, _accuracy(net, data, course.stride)))
            reached = curve[-1][2] >= options.get("aim", math.inf) * (1 - NEAR)
            ended.fill_(reached or step >= options.get("steps", math.inf) or seconds >= options["budget"])
        dist.broadcast(ended, 0)
    sent = emulated.sent_bytes() - sent
    if state is not None:
        state.close()
    return {"curve": curve, "reached": reached, "sent": sent}


@torch.no_grad()
def _accuracy(net: nn.Module, data: Data, stride: int) -> float:
    """Accuracy in percent on every ``stride``-th held-out example."""
    net.eval()
    found: Tensor = torch.cat([net(part).argmax(-1) for part in data.held_examples[::stride].split(500)])
    net.train()
    return 100 * float((found == data.held_labels[::stride]).float().mean())


Raced = Mapping[tuple[str, str], list[dict[str, Any]]]
"""Runs by link and racer, one for each seed."""


def by_racer(found: Runs, course: str = "digits", hosts: int = 2) -> Raced:
    """Groups the runs of a course."""
    raced: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (name, count, rate, racer, _), run in found.items():
        if (name, count) == (course, hosts):
            raced.setdefault((rate, racer), []).append(run)
    return raced


def table(raced: Raced, rates: Sequence[str], racers: Iterable[str]) -> list[Row]:
    """Seconds to the aim by link, and the steps and bytes on the last link."""
    rows = []
    for racer in racers:
        row: Row = {"": racer}
        for rate in rates:
            runs = raced[rate, racer]
            seconds, steps = ([run["curve"][-1][which] for run in runs] for which in (0, 1))
            row[rate] = "> " * (not _all(runs)) + f"{median(seconds):.1f}"
            row[rate] += f" ({min(seconds):.0f} to {max(seconds):.0f})" if len(seconds) > 1 else ""
            if racer != "DDP" and (rate, "DDP") in raced:
                row[rate] += f", {_seconds(raced[rate, 'DDP']) / median(seconds):.2f}x"
        row["steps"] = f"{median(steps):.0f}"
        row["ms a step"] = f"{1000 * median(took / count for took, count in zip(seconds, steps, strict=True)):.0f}"
        sent = median(run["sent"] / count for run, count in zip(runs, steps, strict=True))
        rows.append(row | {"MB a host and step": f"{sent / 1e6:.3g}"})
    return rows


def _judge(result: Result, rate: str, racers: Iterable[str], raced: Raced) -> None:
    """Compares the default with each peer."""
    for peer in (racer for racer in racers if racer in PEERS):
        ours, theirs = raced[rate, OURS], raced[rate, peer]
        least, seen = SOONER.get(rate, 1.0) if peer == "DDP" else 1.0, _seconds(theirs) / _seconds(ours)
        measured = "> " * (not _all(theirs)) + f"{seen:.2f}x" if _all(ours) else ""
        result.check(f"{rate}: sooner than {peer}", f">= {least:g}x", measured, bool(measured) and seen >= least)


def _all(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether all runs reached the aim."""
    return all(run["reached"] for run in runs)


def _seconds(runs: Sequence[dict[str, Any]]) -> float:
    """Median of the seconds until the end of a run."""
    return float(median(run["curve"][-1][0] for run in runs))
