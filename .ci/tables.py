#!/usr/bin/env python3
"""Writes the tables of the README and of other pages that come from the runs in examples/reproduced.

A table stands under a comment that names it: ``<!-- table: results -->``. ``--pictures`` also draws saving-curves.svg,
at-size.svg, lag.svg, monitor.svg and race.svg, by matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from lab.bench import race, wire
from lab.data import LENGTH, LONG
from lab.models import LARGE, TEXT
from lab.papers import at_size, fine_tuning, lag, saving_curves, scripts
from lab.report import Panel, draw, in_words
from lab.training import Runs
from lightning_topk import plan
from lightning_topk.config import TopKConfig
from lightning_topk.plan import Row, markdown
from lightning_topk.volume import volume

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "examples" / "reproduced"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "examples" / "guides").glob("*.md")),
    ROOT / "examples" / "lab" / "bench" / "compress-step.md",
    RUNS / "archive.md",
]
DRAWN = ("saving 50", "fp16 hook", "DDP", "PowerSGD 4")
"""Racers in the picture."""
WORDS = {"100mbit": "100 Mbit/s", "300mbit": "300 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
WORDS["100mbit/20ms"] = "100 Mbit/s, 20 ms"
WORDS |= {"ours": "`saving=50`", "ours, 0.001": "`ratio=0.001`"}
LEARNERS = {each.name: each for each in (*saving_curves.LEARNERS, *saving_curves.IMAGES)}


def words(text: Any) -> Any:
    """A link, a peer or an amount as the pages write it."""
    return re.sub(r"^(saving|ratio) ([\d.]+)$", r"`\1=\2`", WORDS.get(text, text)) if isinstance(text, str) else text


def page(rows: Sequence[Row]) -> str:
    """A table as the pages write it."""
    return markdown([{words(head): words(cell) for head, cell in row.items()} for row in rows])


def raced() -> tuple[race.Raced, list[str], list[str]]:
    """The runs of the race, with their links and racers."""
    found = race.by_racer(Runs(RUNS / "race.jsonl"))
    rates = [rate for rate in WORDS if any(rate == each for each, _ in found)]
    return found, rates, [racer for racer in race.RACERS if any((rate, racer) in found for rate in rates)]


def bench(name: str) -> dict[str, list[Row]]:
    """The tables that a bench wrote by ``--json bench-NAME.json``."""
    found: dict[str, list[Row]] = json.loads((RUNS / f"bench-{name}.json").read_text())["tables"]
    return found


def steps(*names: str, also: str, title: str) -> str:
    """Milliseconds of a step with each peer, and their ratio to the default's, by link; and one more figure."""
    rows: dict[str, Row] = {}
    more: dict[str, list[str]] = {}
    for name in names:
        for rate, peers in bench(name).items():
            for peer in peers:
                cell, here = f"{peer['ms a step']:,.0f} ({peer['over ours']:.2g}x)", peer["peer"]
                ahead = peer["over ours"] < 0.99 and not here.startswith(("ours", "no exchange"))
                rows.setdefault(here, {"": here})[rate] = f"**{cell}**" if ahead else cell
                if figure := peer.get(also):
                    more.setdefault(here, []).append(figure if isinstance(figure, str) else f"{figure:.0f}")
    return page([row | {title: ", ".join(more.get(peer, []))} for peer, row in rows.items()])


def compress_step() -> str:
    """The compress step of a worker and of a server, in units of adding and clearing."""
    rows = []
    for title, parts in bench("select").items():
        if title.startswith("Compress step at "):
            worker, *_, server = (f"{part['of add_ + zero_']:.1f}" for part in parts)
            rows.append({"density": title.removeprefix("Compress step at "), "worker": worker, "server": server})
    return page(rows)


def wires() -> str:
    """Bits of a position against their entropy, and bytes of an entry by format, of 4 workers."""
    return page(wire.run(ratios=(0.001, 0.01, 0.06)).tables["An entry, of 4 workers"])


def gaps() -> list[Row]:
    """The gap to dense training, by model, optimizer, length and what is sent."""
    found = Runs(RUNS / "saving-curves.jsonl")
    return saving_curves.table(found, [*LEARNERS.values()], saving_curves.LENGTHS, saving_curves.AMOUNTS)


def behind(gaps: Sequence[float], unit: str) -> str:
    """Mean gap to dense training, with its standard error; in bold if it is above 1."""
    words = in_words(gaps, "+.2f", unit)
    return f"**{words}**" if mean(gaps) > 1 else words


class Shown(NamedTuple):
    """A row of the README's results.

    Attributes:
        title: The model and the optimizer.
        model: Its name in the runs.
        steps: Steps of the run.
        batch: Examples a worker, if not the model's own.
        runs: The name of the file with its runs.
    """

    title: str
    model: str
    steps: int
    batch: int = 0
    runs: str = "at-size"


SHOWN = (
    Shown("GPT, 0.35 million parameters, usual settings", "tied gpt", 300),
    Shown("the same", "tied gpt", 3000),
    Shown("convnet, 0.2 million, CIFAR-10, SGD", "convnet", 1000),
    Shown("ResNet-18 of half the width, CIFAR-10, SGD", "narrow resnet18", 3000),
    Shown("GPT, 0.12 million, AdamW", "gpt", 1000),
    Shown("the same", "gpt", 500, batch=32),
    Shown("the same", "gpt", 1000, batch=32),
    Shown("diffusion, U-Net of 0.2 million, CIFAR-10, Adam", "diffusion", 300),
    Shown("GPT, 10.8 million, AdamW, tiny batch", "large gpt", 3000, runs="large-gpt-cpu"),
    Shown("the same, older rules", "large gpt", 3000, batch=16),
)
"""The README's results, by model."""
GRID = 3
"""Learning rates of dense training that make a grid, at least."""


def monitored() -> dict[str, dict[str, list[float]]]:
    """What CompressionMonitor logged every 50 steps, by run and value; the first is the step."""
    found: dict[str, dict[str, list[float]]] = json.loads((RUNS / "monitor.json").read_text())
    return found


def monitor() -> str:
    """Means of logged values over the first and the last 500 steps."""
    rows = []
    for name, run in monitored().items():
        row: Row = {"": f"`{name.partition(', ')[0]}`" + ", learning rate 0.03" * (", lr" in name)}
        for key in ("error", "server error", "residual norm", "loss"):
            row[key] = " → ".join(f"{mean(run[key][part]):.3g}" for part in ENDS)
        rows.append(row)
    return page(rows)


ENDS = (slice(10), slice(-10, None))
"""The first and the last 500 steps of :func:`monitored`."""


def results() -> str:
    """The README's results: final quality of dense training and of ours, of the same seeds."""
    return page([row for row in map(tuned, SHOWN) if row])


def tuned(shown: Shown) -> Row:
    """A result at the rate that is best for dense training."""
    found = Runs(RUNS / f"{shown.runs}.jsonl")
    model, setup = shown.model, at_size.setup(shown.model, shown.steps, shown.batch)
    dense, ours = (at_size.ends(found, setup, system) for system in at_size.BOTH)
    if not dense or (best := at_size.best_rate(model, dense)) not in ours:
        return {}
    rate = "tuned" if len(dense) >= GRID else f"tuned on {300 if model == 'tied gpt' else 1000:,} steps"
    rate = f"{best:g}, low" if model == "diffusion" else rate
    return result(shown, batch(model, setup.batch, setup.workers), rate, dense[best], ours[best])


def batch(model: str, examples: int, workers: int) -> str:
    """What all workers together read in a step; of text, in characters."""
    if model not in TEXT:
        return f"{examples * workers:,} images"
    return f"{examples * workers * (LONG if model in LARGE else LENGTH):,} characters"


def result(shown: Shown, batch: str, rate: str, dense: dict[int, float], ours: dict[int, float]) -> Row:
    """One of the README's results; empty where runs are missing. Of text it is a loss."""
    both = [(dense[seed], ours[seed]) for seed in ours if seed in dense]
    if not both:
        return {}
    text = not at_size.COURSES[shown.model].points
    style, unit = (".3f", "") if text else (".2f", " %")
    gaps = [100 * (now / before - 1) if text else before - now for before, now in both]
    row = {"model": shown.title, "steps": f"{shown.steps:,}", "batch": batch, "rate": rate, "seeds": len(both)}
    means = (f"{mean(values):{style}}{unit}" for values in zip(*both, strict=True))
    row |= dict(zip(("DDP", "saving 50"), means, strict=True))
    return row | {"behind DDP": behind(gaps, " %" if text else " points")}


def rates() -> str:
    """Final quality of dense training and of ours by learning rate, with the gaps at this rate and at dense's best."""
    found, rows = Runs(RUNS / "at-size.jsonl"), []
    for each in at_size.known(found):
        model, (dense, ours) = each.model, (at_size.ends(found, each, system) for system in at_size.BOTH)
        if each.optimizer != at_size.COURSES[model].optimizer.kind or not dense:
            continue
        best = {name: at_size.best_rate(model, ends) for name, ends in (("dense", dense), ("ours", ours)) if ends}
        for rate in dense:
            points, here = at_size.COURSES[model].points, ours.get(rate, {})
            row: Row = {"model": f"{model} ({'points' if points else '%'})", "examples": each.batch}
            row |= {"steps": f"{each.steps:,}", "learning rate": f"{rate:g}"}
            for title, ends, name in (("dense", dense[rate], "dense"), ("saving 50", here, "ours")):
                words = in_words([*ends.values()], ".2f" if points else ".3f")
                row[title] = f"{words}, best" if rate == best.get(name) and len(dense) >= GRID and words else words
            row["behind dense, same seeds and rate"] = in_words(at_size.gaps(model, here, dense[rate]), "+.2f")
            row["behind its best, same seeds"] = in_words(at_size.gaps(model, here, dense[best["dense"]]), "+.2f")
            rows.append(row)
    return page(rows)


MOMENTUM = {"SGD": "adapted", "AdamW": "adapted", "Muon": "own; AdamW's part adapted", "Lion": "own"}
MOMENTUM |= {"schedule-free": "none; averages the weights"}
"""What becomes of the momentum of an optimizer; the others have none."""


def optimizers() -> str:
    """The small GPT with each optimizer: dense training at its best rate of at least three, and ours at that rate."""
    found, rows = Runs(RUNS / "at-size.jsonl"), []
    for each in at_size.known(found):
        dense, ours, plain = (at_size.ends(found, each, name) for name in (*at_size.BOTH, "saving 50 not adapted"))
        if each[0] == "gpt" and each.batch == at_size.COURSES["gpt"].batch and len(dense) >= GRID and ours:
            rate = at_size.best_rate("gpt", dense)
            row: Row = {"optimizer": each.optimizer, "momentum": MOMENTUM.get(each.optimizer, "none")}
            row |= {"rate": f"{rate:g}", "dense": in_words([*dense[rate].values()], ".3f")}
            for title, runs in (("`saving=50`, behind %", ours), ("not adapted, behind %", plain)):
                row[title] = in_words(at_size.gaps("gpt", runs.get(rate, {}), dense[rate]), "+.2f")
            rows.append(row)
    return page(rows)


def diloco() -> str:
    """DiLoCo and ours, by bytes, after equal steps of the small GPT."""
    found, rows = Runs(RUNS / "at-size.jsonl"), []
    for each in at_size.known(found):
        dense = at_size.ends(found, each, "dense")
        names = [name for name in at_size.SYSTEMS if name.startswith("DiLoCo") and at_size.ends(found, each, name)]
        if not names:
            continue
        least, peers = dense[at_size.best_rate(each.model, dense)], ("dense", *at_size.OURS, "ratio 0.001", *names)
        for name in peers:
            if by_rate := at_size.ends(found, each, name):
                rate = at_size.best_rate(each.model, by_rate)
                ends = by_rate[rate]
                run = found[at_size.run_key(each, name, rate, min(ends))]
                row: Row = {"examples": each.batch, "": name, "rate": f"{rate:g}"}
                row |= {"fewer bytes": f"{run['saving']:,.0f}x", "held-out loss": in_words([*ends.values()], ".3f")}
                gaps = at_size.gaps(each.model, ends, least) if name != "dense" else []
                rows.append(row | {"behind dense, same seeds, %": in_words(gaps, "+.2f")})
    return page(rows)


def others() -> str:
    """The large GPT with other amounts and other methods, at dense training's best rate."""
    rows = at_size.table(Runs(RUNS / "at-size.jsonl"), at_size.setup("large gpt", 1000))
    dense = next(row for row in rows if row["learning rate"].endswith("(best)"))
    rest = [row for row in rows if row[""] not in at_size.BOTH]
    ours = next(row for row in rows if row[""] == "saving 50" and row["learning rate"].endswith("(best)"))
    heads = ("", "held-out loss", "behind dense at its best, %")
    return page([{head: row.get(head, "") for head in heads} for row in (dense, ours, *rest)])


COMPARED = {"gpt": 0.01, "large gpt": 0.001}
"""Models that other methods trained too, 1,000 steps, and dense training's best rate."""
SHORT = {"MLP, 300 steps": "wide mlp, SGD", "LSTM, 300": "char lstm, AdamW", "GPT, 300": "gpt, AdamW"}
"""Models whose runs of 300 steps with dense training and our exchange are in the folder."""
METHODS = ("dense", "saving 50", "PowerSGD", "local 10", "local 50", "DiLoCo 30 at 0.7", "DiLoCo 100 at 1.0")
"""Methods of these models."""


def methods() -> str:
    """Held-out losses of all methods on all models; ours in bold where another one's is lower."""
    rows = {row[""]: row for row in json.loads((RUNS / "methods.json").read_text())}
    runs = Runs(RUNS / "saving-curves.jsonl")
    for (head, name), (system, saving) in itertools.product(SHORT.items(), {"dense": 0.0, "saving 50": 50.0}.items()):
        keys = [saving_curves.run_key(LEARNERS[name], 300, saving, seed) for seed in range(3)]
        rows[system][head] = in_words([runs[key]["held"] for key in keys], ".3f")
    runs = Runs(RUNS / "at-size.jsonl")
    for model, rate in COMPARED.items():
        for system in METHODS:
            if ends := at_size.ends(runs, at_size.setup(model, 1000), system).get(rate):
                row = rows.setdefault(system, {"": system})
                row[f"{model.replace('gpt', 'GPT')}, 1,000"] = in_words([*ends.values()], ".3f")
    for head, ours in rows["saving 50"].items():
        least = [float(row[head].split()[0]) for row in rows.values() if head and head in row and row[""] != "dense"]
        if head and min(least) < float(ours.split()[0]):
            rows["saving 50"][head] = f"**{ours}**"
    heads = dict.fromkeys(head for row in rows.values() for head in row)
    return page([{head: row.get(head, "") for head in heads} for row in rows.values()])


def preempted() -> str:
    """Runs that lose in the middle what waits, and runs that do not."""
    found, rows = Runs(RUNS / "preempted.jsonl"), []
    for each in at_size.known(found):
        for rate, lost in at_size.ends(found, each, "saving 50 preempted").items():
            kept = at_size.ends(found, each, "saving 50")[rate]
            row: Row = {"model": each.model, "steps": f"{each.steps:,}", "kept": in_words([*kept.values()], ".3f")}
            row["lost once"] = in_words([*lost.values()], ".3f")
            rows.append(row | {"behind, %": in_words(at_size.gaps(each.model, lost, kept), "+.2f")})
    return page(rows)


LEFT_OUT = ("no exchange", "saving=150", "ratio=0.001", "DiLoCo")
"""Rows of the bench's output that the README leaves out."""


def pasted() -> str:
    """What the package's bench printed, in part: the table, and the sentence that decides."""
    said = (RUNS / "bench-1gbit.txt").read_text().strip().splitlines()
    rows = [line for line in said if line.startswith("|") and not line[2:].startswith(LEFT_OUT)]
    notes = [line for line in said if line.startswith("PowerSGD")]
    decides = said[-1].partition(" In runs of many thousand steps,")[0]
    wrapped = (textwrap.wrap(line, 120) for line in (*notes, decides))
    return "\n".join(["```text", *rows, *itertools.chain(*wrapped), "```"])


def many_nodes() -> str:
    """Messages and bytes of a step of GPT-2 on many nodes of 8 GPUs, and their times on links of three speeds."""
    sizes = plan.parameter_sizes(params=GPT2)
    rows = []
    for nodes in (2, 8, 64, 512):
        sent = volume(TopKConfig(topology="hierarchical"), plan.exchanged_buckets(sizes), 8 * nodes, local=8)
        row: Row = {"nodes of 8 GPUs": nodes, "messages of a GPU": f"{sent.messages // 8:,}"}
        row |= {"bytes of each": f"{sent.inter_node / sent.messages:,.0f}"}
        row["ms of messages"] = f"{1000 * plan.MESSAGE * sent.messages / 8:,.1f}"
        times = (f"{8e-6 * sent.inter_node / gbit:,.1f}" for gbit in (1, 10, 100))
        row["of bytes at 1, 10, 100 Gbit/s"] = " / ".join(times)
        rows.append(row)
    return page(rows)


GPT2 = 124_000_000
"""Parameters of the small GPT-2."""


BACKWARD = 2 / 3
"""Share of a step that backward takes, about: it computes twice as much as forward."""


def calculated(model: str, parameters: int) -> Row:
    """Milliseconds of a step on the H200 that was timed without a network, and of its bytes between two nodes.

    An exchange overlaps with backward. Ours adds what it was measured to add.
    """
    timed = json.loads((RUNS / "bench-own-work-gpu.json").read_text())["tables"]["A step"]
    alone, with_ours = (
        next(row["ms"] for row in timed if (row["model"], row["exchange"]) == (model, exchange))
        for exchange in ("none", "saving=50")
    )
    buckets = plan.exchanged_buckets(plan.parameter_sizes(params=parameters))
    dense, ours = (volume(each, buckets, 2).inter_node for each in (TopKConfig(topology="dense"), TopKConfig()))
    cells = {}
    for gbit in (1, 10, 25, 100):
        exposed = (max(0.0, 8e-6 * sent / gbit - BACKWARD * alone) for sent in (dense, dense / 2, ours))
        three = [step + late for step, late in zip((alone, alone, with_ours), exposed, strict=True)]
        cells[f"{gbit} Gbit/s"] = compared(*three)
    return cells


def compared(dense: float, half: float, ours: float) -> str:
    """Milliseconds with DDP, its 16-bit hook and ours; ours in bold if it is the shortest."""
    words = f"{ours:,.0f}"
    return f"{dense:,.0f} / {half:,.0f} / {f'**{words}**' if ours < min(dense, half) else words}"


def decided() -> str:
    """Milliseconds of a step between two nodes: measured on CPUs, calculated for GPUs."""
    names = ("DDP", "fp16 hook", "ours")
    small: Row = {}
    for name in ("train-100mbit", "train-1gbit"):
        for rate, peers in bench(name).items():
            by_peer = {peer["peer"]: peer["ms a step"] for peer in peers}
            small[words(rate)] = compared(*(by_peer[each] for each in names))
    found, rates, _ = raced()
    racers = ("DDP", "fp16 hook", race.OURS)
    large = {words(rate): compared(*(1000 * race.pace(found[rate, each][0]) for each in racers)) for rate in rates}
    alone = {}
    for rate, peers in bench("hosts").items():
        by_peer = {peer["peer"]: peer["ms a step"] for peer in peers}
        alone[words(rate)] = compared(*(by_peer[each] for each in names))
    rows = {
        "ResNet-18, 4 small images, CPUs: measured": small,
        "GPT, 10.8 million, CPUs: measured": large,
        "25 million, exchange alone, CPUs: measured": alone,
        "ResNet-50, 64 images, H200: calculated": calculated("resnet50", 25_600_000),
        "GPT-2, 8 texts, H200: calculated": calculated("gpt2", GPT2),
    }
    heads = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "100 Gbit/s")
    return page([{"": name} | {head: row.get(head, "") for head in heads} for name, row in rows.items()])


def fine_tuned() -> str:
    """Fine-tuning by optimizer, schedule and length."""
    found = Runs(RUNS / "fine-tuning.jsonl")
    tables = {kind: fine_tuning.table(found, kind, (100, 300, 1000), range(3)) for kind in fine_tuning.TUNED}
    return page(
        [{"optimizer": kind} | row for kind, rows in tables.items() for row in rows if row["saving 50, behind %"]]
    )


TABLES: dict[str, Callable[[], str]] = {
    "fine-tuning": fine_tuned,
    "scripts": lambda: page(scripts.table(Runs(RUNS / "scripts.jsonl"))),
    "decided": decided,
    "many-nodes": many_nodes,
    "bench": pasted,
    "at-size": rates,
    "at-size-others": others,
    "methods": methods,
    "preempted": preempted,
    "optimizers": optimizers,
    "diloco": diloco,
    "bench-hosts": lambda: steps("hosts", also="CPU ms a rank", title="CPU ms of a rank, by link"),
    "bench-train": lambda: steps("train-100mbit", "train-1gbit", also="hidden", title="hidden, by link"),
    "bench-select": compress_step,
    "bench-wire": wires,
    "gpu-launches": lambda: page(json.loads((RUNS / "gpu-launches.json").read_text())),
    "race": lambda: page(race.table(*raced())),
    "results": results,
    "monitor": monitor,
    "saving-curves": lambda: page(gaps()),
}


def filled(text: str) -> str:
    """A page with its tables as the runs have them."""
    pattern = r"(<!-- table: ([\w-]+) -->)\s*(?:```text\n[^`]*```\n|(?:\|.*\n)*)\n*"

    def fill(found: re.Match[str]) -> str:
        table = TABLES[found[2]]()
        return f"{found[1]}\n" + "\n" * table.startswith("|") + f"{table}\n\n"

    return re.sub(pattern, fill, text).rstrip("\n") + "\n"


def main() -> None:
    """Writes the tables and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    if parser.parse_args().pictures:
        found = Runs(RUNS / "saving-curves.jsonl")
        curves = saving_curves.panels(found, [*LEARNERS.values()], saving_curves.LENGTHS)
        draw(curves, RUNS / "saving-curves.svg")
        found = Runs(RUNS / "at-size.jsonl")
        setups = [at_size.setup(model, 1000) for model in at_size.COURSES]
        setups = [each if at_size.ends(found, each, "saving 50") else each._replace(steps=3000) for each in setups]
        draw(at_size.panels(found, setups), RUNS / "at-size.svg")
        draw([at_size.gap_over_steps(found, "gpt")], RUNS / "batch.svg")
        found, lags = Runs(RUNS / "lag.jsonl"), []
        for model, batch, rates in (("gpt", 4, [0.01]), ("gpt", 32, [0.017, 0.01]), ("convnet", 128, [0.03])):
            lags.append(lag.empty_panel(model, batch))
            for rate in rates:
                lag.table(found, model, batch, rate, (500, 1000, 2000), (10, 25, 50, 100, 200), lags[-1])
        draw(lags, RUNS / "lag.svg")
        values = (
            ("error", "topk/uplink_error"),
            ("residual norm", "topk/worker_residual_norm"),
            ("loss", "train_loss"),
        )
        logged = [
            Panel(title, "step", {name: (run["step"], run[key]) for name, run in monitored().items()}, inside=None)
            for key, title in values
        ]
        logged[1].ylog, logged[2].inside = True, "upper right"
        draw(logged, RUNS / "monitor.svg")
        found, rates, _ = raced()
        panels = race.panels(found, rates, DRAWN)
        titles = [f"{words(rate)} between 2 emulated hosts, seed 0" for rate in rates]
        titled = [replace(each, title=title, inside="upper right") for each, title in zip(panels, titles, strict=True)]
        draw(titled, RUNS / "race.svg")
    for each in PAGES:
        each.write_text(filled(each.read_text()))


if __name__ == "__main__":
    main()
