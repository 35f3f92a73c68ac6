"""``bench race``: whole trainings on emulated hosts, up to the final loss of dense training.

The clock counts training alone: it stops during evaluations. Each run is appended to a file when it ends, so an
interrupted command resumes where it stopped.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from lab.bench.peers import BUCKETS, PEERS
from lab.data import Data, source_code
from lab.models import MODELS
from lab.report import Panel, Result, processor
from lab.training import Optimizer, Runs
from lightning_topk.bench.peers import Peer, Weights, ours
from lightning_topk.config import check_name
from lightning_topk.plan import Row, link
from lightning_topk.runtime.state import HookState

OURS = "saving 50"
WARMUP = 40
"""Steps before post-local SGD stops averaging gradients."""
OUTER_RATE = 0.7
"""Learning rate of DiLoCo's outer optimizer."""
TOLERANCE = 0.001
"""How far above the loss of dense training a run may end, as a fraction of that loss: less than its seeds differ by."""


def post_local(period: int) -> Peer:
    """Post-local SGD as Lightning's ``DDPStrategy(model_averaging_period=)`` runs it. Its state is the averager."""

    def register(model: DistributedDataParallel, settings: Mapping[str, Any]) -> PeriodicModelAverager:
        state = post_localSGD_hook.PostLocalSGDState(None, None, WARMUP, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        return PeriodicModelAverager(period, WARMUP)

    return Peer(register)


def diloco(period: int, exchange: Peer) -> Peer:
    """DiLoCo (Douillard et al. 2023): local steps, and an outer SGD, see :class:`lab.training.DiLoCo`.

    ``exchange`` is how the gradient of the outer SGD, the movement of ``period`` steps, reaches the other ranks.
    """

    def register(model: DistributedDataParallel, settings: Mapping[str, Any]) -> Any:
        model.require_backward_grad_sync = False
        inner = [*model.parameters()]
        outer = DistributedDataParallel(Weights(p.detach().clone() for p in inner))
        optimizer = torch.optim.SGD(outer.parameters(), OUTER_RATE, 0.9, nesterov=True)
        state, steps = exchange.register(outer, {"optimizer": optimizer}), itertools.count(1)

        def stepped(*_: Any) -> None:
            if next(steps) % period:
                return
            optimizer.zero_grad()
            with torch.enable_grad():
                weights = outer()
                moved = [start.detach() - now.detach() for start, now in zip(weights, inner, strict=True)]
                torch.autograd.backward(weights, moved)
            optimizer.step()
            with torch.no_grad():
                for now, start in zip(inner, outer.parameters(), strict=True):
                    now.copy_(start)

        settings["optimizer"].register_step_post_hook(stepped)
        return state

    return Peer(register)


RACERS: dict[str, Peer] = {
    OURS: ours(),
    "saving 150": ours(saving=150),
    "saving 200": ours(saving=200),
    "saving 400": ours(saving=400),
    "ratio 0.001": ours(ratio=0.001),
    **{name: PEERS[name] for name in ("DDP", "fp16 hook", "PowerSGD 1", "PowerSGD 2", "PowerSGD 4")},
    "local 10": post_local(10),
    "local 50": post_local(50),
    "DiLoCo 30": diloco(30, PEERS["DDP"]),
    "DiLoCo 100": diloco(100, PEERS["DDP"]),
    "DiLoCo 30, saving 50": diloco(30, ours()),
    "no exchange": PEERS["no exchange"],
}


class Course(NamedTuple):
    """A model, its data, and settings for its dense training: steps, optimizer, batch per worker.

    The held-out loss is evaluated every so many steps, on every ``stride``-th held-out example.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    steps: int
    optimizer: Optimizer
    batch: int
    every: int
    stride: int = 1


ADAMW = Optimizer(3.5e-4, 0.9, kind="AdamW", clip_norm=1.0, warmup=40)
COURSE = Course(MODELS["large gpt"], source_code, steps=240, optimizer=ADAMW, batch=2, every=20, stride=32)


def run(
    hosts: int = 2,
    rates: Sequence[str] = ("100mbit", "1gbit"),
    racers: Sequence[str] = (),
    seeds: int = 1,
    budget: float = 300,
    out: Path = Path("race.jsonl"),
) -> Result:
    """Times training to the final loss of dense training, with ours and with each peer.

    A GPT of 10.8 million parameters learns the source code of Python's library.
    """
    if hosts < 2:
        raise ValueError("a race needs at least 2 hosts: one exchanges nothing.")
    racers = racers or [*RACERS]
    for racer in racers:
        check_name("racer", racer, RACERS)
    for rate in rates:
        link(rate)
    emulated.check_available()
    found, aims = Runs(out), []
    bar = tqdm(total=seeds * (1 + len(rates) * len(racers)), desc="race", unit="run")

    def complete(
        group: AbstractContextManager[emulated.Hosts], rate: str, racer: str, seed: int, **options: Any
    ) -> dict[str, Any]:
        """Returns a run of the file; makes it if it is missing, or if it stopped at a smaller budget."""
        key = (hosts, rate, racer, seed)
        if key not in found or (not found[key]["reached"] and found[key]["budget"] < options["budget"]):
            bar.set_postfix_str(f"{rate}, {racer}")
            wanted = {**options, "racer": racer, "seed": seed}
            with group as entered:
                measured = entered.run(race, wanted, timeout=3 * options["budget"] + 600)[0]
            found[key] = {"budget": options["budget"], **measured}
        bar.update()
        return found[key]

    for seed in range(seeds):
        free = nullcontext(emulated.local(hosts))  # dense training for all its steps, over free links
        dense = complete(free, "loopback", "DDP", seed, steps=COURSE.steps, budget=3600.0)
        aims.append(aim_of(dense))
        for rate in rates:
            for racer in racers:
                complete(emulated.emulate(hosts, rate), rate, racer, seed, aim=aims[-1], budget=budget)
    raced = by_racer(found, hosts)
    where = {run["where"] for runs in raced.values() for run in runs.values() if "where" in run}
    result = Result(
        "race",
        "the loss of dense training, sooner than with what a user would pick instead",
        f"{hosts} emulated hosts of one process and one thread each (network namespaces, tbf), gloo, AdamW; {BUCKETS}; "
        f"{seeds} seeds; {', '.join(sorted(where))}. The aim is what dense training ends with, and {TOLERANCE:.1%} "
        f"more: {mean(aims):.4g}.",
    )
    title = "Seconds, median (least to most), and DDP's median over it; ~ extrapolated, > stopped"
    result.tables[title] = table(raced, rates, racers)
    for rate in rates:
        if OURS in racers:
            _judge(result, rate, racers, raced)
    result.panels = panels(raced, rates, racers)
    return result


def race(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Trains one rank.

    Returns:
        ``curve``, seconds, steps and held-out loss at each evaluation; ``reached``, whether it reached the aim;
        ``sent``, bytes that left this host; ``where``, the processor and torch's version.
    """
    racer, seed, course = options["racer"], options["seed"], COURSE
    data = course.data()
    torch.manual_seed(seed)
    net = course.model()
    model = DistributedDataParallel(net, bucket_cap_mb=RACERS[racer].bucket_mb, gradient_as_bucket_view=True)
    optimizer: Any
    (optimizer,) = course.optimizer.make(dict(model.named_parameters()))
    state = RACERS[racer].register(model, {"optimizer": optimizer})
    if isinstance(state, PeriodicModelAverager):
        optimizer = PostLocalSGDOptimizer(optimizer, state)
    batches = torch.Generator().manual_seed(world * seed + rank)
    curve: list[tuple[float, int, float]] = []
    seconds, step, sent, ended, reached = 0.0, 0, 0, torch.zeros(()), False
    while not ended:
        dist.barrier()
        begin, before = time.perf_counter(), emulated.sent_bytes()
        for now in range(step, step + course.every):
            chosen = torch.randint(len(data.labels), (course.batch,), generator=batches)
            optimizer.zero_grad()
            _loss(model(data.examples[chosen]), data.labels[chosen]).backward()
            course.optimizer.step([optimizer], now, course.steps)
        dist.barrier()
        seconds, step = seconds + time.perf_counter() - begin, step + course.every
        sent += emulated.sent_bytes() - before
        evaluated = _mean(net) if racer.startswith(("local", "DiLoCo")) else net
        curve.append((round(seconds, 3), step, _held_out(evaluated, data, course.stride)))
        reached = "aim" in options and smooth(curve)[-1] <= options["aim"]
        ended.fill_(reached or step >= options.get("steps", math.inf) or seconds >= options["budget"])
        dist.broadcast(ended, 0)
    if isinstance(state, HookState):
        state.close()
    return {"curve": curve, "reached": reached, "sent": sent, "where": f"{processor()}, torch {torch.__version__}"}


def _loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


@torch.no_grad()
def _mean(net: nn.Module) -> nn.Module:
    """A copy with the mean of all ranks' weights: what methods of local steps end with."""
    mean = copy.deepcopy(net)
    for parameter in mean.parameters():
        dist.all_reduce(parameter.div_(dist.get_world_size()))
    return mean


@torch.no_grad()
def _held_out(net: nn.Module, data: Data, stride: int) -> float:
    """Loss on held-out data; each rank evaluates its share."""
    world = dist.get_world_size()
    share = slice(stride * dist.get_rank(), None, stride * world)
    net.eval()
    scores = torch.cat([net(part) for part in data.held_examples[share].split(500)])
    net.train()
    loss = _loss(scores, data.held_labels[share])
    dist.all_reduce(loss)
    return float(loss / world)


def smooth(curve: Sequence[Sequence[float]]) -> list[float]:
    """The loss at each evaluation, the last column of a run's ``curve``: means of three, since it fluctuates."""
    found = [row[-1] for row in curve]
    return [mean(found[max(0, end - 3) : end]) for end in range(1, len(found) + 1)]


def aim_of(dense: Mapping[str, Any]) -> float:
    """The loss to reach: that at the end of a run of dense training, and :data:`TOLERANCE`."""
    return (1 + TOLERANCE) * smooth(dense["curve"])[-1]


def until(curve: Sequence[Sequence[float]], aim: float) -> Sequence[Sequence[float]]:
    """A curve up to the first evaluation that reaches the aim; empty if none does."""
    return next((curve[: end + 1] for end, loss in enumerate(smooth(curve)) if loss <= aim), [])


Raced = Mapping[tuple[str, str], Mapping[int, dict[str, Any]]]
"""Runs by link and racer, and by seed."""


def by_racer(found: Runs, hosts: int = 2) -> Raced:
    """Groups the runs between so many hosts."""
    raced: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for (count, rate, racer, seed), run in found.items():
        if count == hosts:
            raced.setdefault((rate, racer), {})[seed] = run
    return raced


class Time(NamedTuple):
    """Seconds to the aim by seed; ``mark`` is "~ " if some are extrapolated, "> " if a run stopped before the aim."""

    seconds: Mapping[int, float]
    mark: str = ""

    def median(self, seeds: Collection[int]) -> float:
        """The median of the seconds of some seeds."""
        return float(median(self.seconds[seed] for seed in seeds))

    def words(self, seeds: Collection[int]) -> str:
        """The median of some seeds, with the least and the most of all; empty if there are no runs."""
        if not self.seconds:
            return ""
        least, most = min(self.seconds.values()), max(self.seconds.values())
        return f"{self.mark}{self.median(seeds):.0f}" + f" ({least:.0f} to {most:.0f})" * (len(self.seconds) > 1)

    def over(self, ours: Time, seeds: Collection[int]) -> str:
        """How many times as long as ``ours`` these runs took, by the medians of some seeds; empty if unknown."""
        known = self.seconds and ours.seconds and ours.mark != "> "
        return f"{self.mark}{self.median(seeds) / ours.median(seeds):.2g}x" if known else ""


def pace(run: Mapping[str, Any]) -> float:
    """Seconds of a step, after the first evaluation: PowerSGD's first two steps are dense."""
    (begin, first, _), (end, last, _) = run["curve"][0], run["curve"][-1]
    return float(end - begin) / (last - first) if last > first else end / last


class Completed(NamedTuple):
    """The curve of a run to the aim: points of which ``measured`` were measured and the rest extrapolated.

    ``mark`` is "~ " if some are extrapolated, "> " if the run stopped before the aim and nothing tells how it goes on.
    """

    curve: Sequence[Sequence[float]]
    measured: int
    mark: str = ""


def completed(raced: Raced, rate: str, racer: str, seed: int) -> Completed:
    """The curve of a run to the aim of its seed.

    A run that stopped before the aim goes on at its pace, as the same racer and seed did on another link, since links
    change no gradient.
    """
    run, aim = raced[rate, racer][seed], aim_of(raced["loopback", "DDP"][seed])
    mine = run["curve"]
    if ended := until(mine, aim):
        return Completed(ended, len(ended))
    others = (until(runs[seed]["curve"], aim) for (_, name), runs in raced.items() if name == racer and seed in runs)
    whole = next(filter(None, others), None)
    if whole is None:
        return Completed(mine, len(mine), "> ")
    took, steps, _ = mine[-1]
    rest = [(took + (step - steps) * pace(run), step, quality) for _, step, quality in whole if step > steps]
    return Completed([*mine, *rest], len(mine), "~ ")


def time_of(raced: Raced, rate: str, racer: str) -> Time:
    """Seconds to the aim on a link, see :func:`completed`."""
    found = {seed: completed(raced, rate, racer, seed) for seed in raced.get((rate, racer), ())}
    seconds = {seed: each.curve[-1][0] for seed, each in found.items()}
    return Time(seconds, min((each.mark for each in found.values() if each.mark), default=""))


def shared_seeds(raced: Raced, rates: Iterable[str], racers: Iterable[str]) -> list[int]:
    """The seeds that all racers ran on all links where they ran: figures of the same seeds compare."""
    seeds = [raced[rate, racer].keys() for rate in rates for racer in racers if (rate, racer) in raced]
    return sorted(set.intersection(*map(set, seeds)))


def table(raced: Raced, rates: Sequence[str], racers: Sequence[str]) -> list[Row]:
    """Seconds to the aim by link; the steps that this took, milliseconds of a step, and bytes.

    Figures are medians over :func:`shared_seeds`, brackets have the least and the most of all seeds.
    """
    rows, seeds = [], shared_seeds(raced, rates, racers)
    for racer in racers:
        row: Row = {"": racer}
        runs = [[raced[rate, racer][seed] for seed in seeds] for rate in rates if (rate, racer) in raced]
        for rate in rates:
            ours, dense = (time_of(raced, rate, each) for each in (racer, "DDP"))
            sooner = dense.over(ours, seeds) if racer != "DDP" else ""
            row[rate] = ours.words(seeds) + f", {sooner}" * bool(sooner)
        ended = {
            seed: end.curve[-1][1]
            for rate in rates
            for seed in seeds
            if (rate, racer) in raced and (end := completed(raced, rate, racer, seed)).mark != "> "
        }
        row["steps"] = f"{median(ended.values()):.0f}" if ended else ""
        row["ms a step, by link"] = ", ".join(f"{1000 * median(map(pace, each)):.0f}" for each in runs)
        # PowerSGD's first two steps are dense: its shortest runs would show more.
        sent = min(median(run["sent"] / run["curve"][-1][1] for run in each) for each in runs)
        rows.append(row | {"MB a host and step": f"{sent / 1e6:.3g}"})
    return rows


def panels(raced: Raced, rates: Sequence[str], racers: Iterable[str]) -> list[Panel]:
    """Held-out loss over seconds of training, of the first seed, by link, see :func:`completed`; a line at the aim."""
    drawn, aim = [], aim_of(raced["loopback", "DDP"][0])
    for rate in rates:
        panel = Panel(rate, "seconds of training", xlog=True, ylabel="held-out loss", level=aim)
        ended = {racer: completed(raced, rate, racer, 0) for racer in racers if (rate, racer) in raced}
        for racer, end in ended.items():
            label = f"{racer}: {end.mark}{end.curve[-1][0]:.0f} s"
            panel.curves[label] = [seconds for seconds, *_ in end.curve], smooth(end.curve)
            panel.measured[label] = end.measured
        drawn.append(panel)
    return drawn


def _judge(result: Result, rate: str, racers: Iterable[str], raced: Raced) -> None:
    """Compares the default with each peer."""
    for peer in (racer for racer in racers if racer in PEERS):
        ours, theirs = time_of(raced, rate, OURS), time_of(raced, rate, peer)
        seeds = shared_seeds(raced, [rate], [OURS, peer])
        seen = theirs.over(ours, seeds)
        holds = bool(seen) and theirs.median(seeds) >= ours.median(seeds)
        result.check(f"{rate}: sooner than {peer}", ">= 1x", seen, holds)
