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
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lab import hosts as emulated
from lab.bench.peers import BUCKETS, PEERS, Register, Settings, bucket_cap, ours
from lab.data import Data, digits, image_folder, source_code
from lab.models import DIGIT, MODELS, mlp
from lab.report import Panel, Result
from lab.training import Optimizer, Runs
from lightning_topk.config import check_name
from lightning_topk.plan import Row, link
from lightning_topk.runtime.state import HookState

OURS = "saving 50"
WARMUP = 40
"""Steps before post-local SGD stops averaging gradients."""


def post_local(period: int) -> Register:
    """Post-local SGD as Lightning's ``DDPStrategy(model_averaging_period=)`` runs it; returns the averager."""

    def register(model: DistributedDataParallel, settings: Settings) -> PeriodicModelAverager:
        state = post_localSGD_hook.PostLocalSGDState(None, None, WARMUP, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        return PeriodicModelAverager(period, WARMUP)

    return register


def alone(model: DistributedDataParallel, settings: Settings) -> None:
    """Exchanges nothing: each host trains by itself."""
    model.require_backward_grad_sync = False


RACERS: dict[str, Register] = {
    OURS: ours(),
    "saving 150": ours(saving=150),
    "saving 200": ours(saving=200),
    "saving 400": ours(saving=400),
    "ratio 0.001": ours(ratio=0.001),
    **{name: PEERS[name] for name in ("DDP", "fp16 hook", "PowerSGD 1", "PowerSGD 2", "PowerSGD 4")},
    "local 10": post_local(10),
    "local 50": post_local(50),
    "no exchange": alone,
}
SOONER = {"100mbit": 8, "300mbit": 3, "1gbit": 1.5}
"""Target speed-up of the default over DDP with digits, by link."""


class Course(NamedTuple):
    """A model, and settings for its dense training: steps, optimizer, batch per worker, steps between evaluations.

    Quality is held-out accuracy in percent, and the aim is 99 % of what dense training ends with. For a ``text``, in
    bf16-mixed precision, it is the held-out loss, the mean of three evaluations since it fluctuates, and the aim is the
    loss that dense training ends with. Every ``stride``-th held-out example is evaluated.
    """

    model: Callable[[], nn.Module]
    steps: int
    optimizer: Optimizer
    batch: int
    every: int
    text: bool = False
    stride: int = 1

    @property
    def measured(self) -> str:
        """Label of the quality measure."""
        return "held-out loss" if self.text else "held-out accuracy %"

    def smooth(self, curve: Sequence[Sequence[float]]) -> list[float]:
        """The quality at each evaluation, the last column of a run's ``curve``; smoothed for a text."""
        found = [row[-1] for row in curve]
        return [mean(found[max(0, end - 3) : end]) for end in range(1, len(found) + 1)] if self.text else found

    def aim(self, curve: Sequence[Sequence[float]]) -> float:
        """The quality that runs aim at, from the curve of dense training."""
        return self.smooth(curve)[-1] * (1 if self.text else 0.99)

    def reached(self, curve: Sequence[Sequence[float]], aim: float) -> bool:
        """Whether a run has reached the aim."""
        last = self.smooth(curve)[-1]
        return last <= aim if self.text else last >= aim


COURSES = {
    "digits": Course(
        partial(mlp, DIGIT, 10, (3136, 3136)), steps=150, optimizer=Optimizer(0.05, 0.9), batch=32, every=5
    ),
    "images": Course(MODELS["vgg"], steps=300, optimizer=Optimizer(0.02, 0.9), batch=32, every=20),
    "code": Course(
        MODELS["large gpt"],
        steps=240,
        optimizer=Optimizer(1e-3, 0.9, adamw=True, clip_norm=1.0, warmup=40),
        batch=4,
        every=20,
        text=True,
        stride=16,
    ),
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
    ran = COURSES[course]
    if (course == "images") != (data is not None):
        raise ValueError("--course images needs --data, a folder of images; the other courses have data of their own.")
    racers = racers or [*RACERS]
    for racer in racers:
        check_name("racer", racer, RACERS)
    for rate in rates:
        link(rate)
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
        dense = complete(free, "loopback", "DDP", seed, steps=ran.steps, budget=3600.0)
        aims.append(ran.aim(dense["curve"]))
        for rate in rates:
            for racer in racers:
                complete(emulated.emulate(hosts, rate), rate, racer, seed, aim=aims[-1], budget=budget)
    raced = by_racer(found, course, hosts)
    result = Result(
        "race",
        "the quality of dense training, sooner than with what a user would pick instead",
        f"{hosts} emulated hosts of one process and one thread each (network namespaces, tbf), gloo, "
        f"{'AdamW' if ran.optimizer.adamw else 'SGD with momentum 0.9'}; {BUCKETS}; {seeds} seeds. The aim is "
        f"{'what' if ran.text else '99 % of what'} dense training ends with: {ran.measured} {mean(aims):.4g}.",
    )
    result.tables[f"{course}: seconds, median (least to most), and the speed-up over DDP"] = table(raced, rates, racers)
    for rate in rates:
        if course == "digits" and OURS in racers:
            _judge(result, rate, racers, raced)
    result.panels = panels(ran, course, raced, rates, racers)
    return result


def race(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Trains one rank.

    Returns:
        ``curve``, seconds, steps and quality at each evaluation; ``reached``, whether it reached the aim; ``sent``,
        bytes that left this host.
    """
    racer, images, seed = options["racer"], options["images"], options["seed"]
    course = COURSES[options["course"]]
    data = image_folder(Path(images)) if images else source_code() if course.text else digits()
    torch.manual_seed(seed)
    net = course.model()
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_cap(racer), gradient_as_bucket_view=True)
    optimizer = course.optimizer.make(model.parameters())
    state = RACERS[racer](model, {"optimizer": optimizer})
    if isinstance(state, PeriodicModelAverager):
        optimizer = PostLocalSGDOptimizer(optimizer, state)
    batches = torch.Generator().manual_seed(world * seed + rank)
    curve: list[tuple[float, int, float]] = []
    seconds, step, sent, ended, reached = 0.0, 0, emulated.sent_bytes(), torch.zeros(()), False
    while not ended:
        dist.barrier()
        begin = time.perf_counter()
        for now in range(step, step + course.every):
            chosen = torch.randint(len(data.labels), (course.batch,), generator=batches)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=course.text):
                scores, labels = model(data.examples[chosen]), data.labels[chosen]
            _loss(scores, labels).backward()
            course.optimizer.step(optimizer, now, course.steps)
        dist.barrier()
        seconds, step = seconds + time.perf_counter() - begin, step + course.every
        if rank == 0:
            curve.append((round(seconds, 3), step, _quality(net, data, course)))
            reached = "aim" in options and course.reached(curve, options["aim"])
            ended.fill_(reached or step >= options.get("steps", math.inf) or seconds >= options["budget"])
        dist.broadcast(ended, 0)
    sent = emulated.sent_bytes() - sent
    if isinstance(state, HookState):
        state.close()
    return {"curve": curve, "reached": reached, "sent": sent}


def _loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.float().flatten(0, -2), labels.flatten())


@torch.no_grad()
def _quality(net: nn.Module, data: Data, course: Course) -> float:
    """Loss on held-out text, or accuracy in percent on other held-out examples."""
    net.eval()
    labels = data.held_labels[:: course.stride]
    with torch.autocast("cpu", torch.bfloat16, enabled=course.text):
        scores = torch.cat([net(part) for part in data.held_examples[:: course.stride].split(500)])
    net.train()
    return float(_loss(scores, labels) if course.text else 100 * (scores.argmax(-1) == labels).float().mean())


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
            dense = raced.get((rate, "DDP"))
            if racer != "DDP" and dense and _all(runs):
                row[rate] += f", {'' if _all(dense) else '> '}{_seconds(dense) / median(seconds):.2f}x"
        row["steps"] = f"{median(steps):.0f}"
        row["ms a step"] = f"{1000 * median(took / count for took, count in zip(seconds, steps, strict=True)):.0f}"
        sent = median(run["sent"] / count for run, count in zip(runs, steps, strict=True))
        rows.append(row | {"MB a host and step": f"{sent / 1e6:.3g}"})
    return rows


def panels(course: Course, title: str, raced: Raced, rates: Sequence[str], racers: Iterable[str]) -> list[Panel]:
    """Quality over seconds of training, of the first seed, by link; dashed, what the runs aim at."""
    drawn, aim = [], course.aim(raced["loopback", "DDP"][0]["curve"])
    for rate in rates:
        panel = Panel(f"{title}, {rate}", "seconds of training", xlog=True, ylabel=course.measured, level=aim)
        for racer in racers:
            curve = raced[rate, racer][0]["curve"]
            panel.curves[racer] = [seconds for seconds, *_ in curve], course.smooth(curve)
        drawn.append(panel)
    return drawn


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
