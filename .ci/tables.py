#!/usr/bin/env python3
"""Writes the tables of the README and the guides that come from the runs in examples/reproduced.

A table stands under a comment that names it: ``<!-- table: results -->``. ``--pictures`` also draws saving-curves.svg,
at-size.svg, monitor.svg and race.svg, by matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from lab.bench import race, wire
from lab.papers import at_size, saving_curves
from lab.report import Panel, draw, in_words, standard_error
from lab.training import Runs
from lightning_topk.plan import Row, markdown

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "examples" / "reproduced"
PAGES = [ROOT / "README.md", *sorted((ROOT / "examples" / "guides").glob("*.md"))]
DRAWN = ("saving 50", "fp16 hook", "DDP", "PowerSGD 4")
"""Racers in the README's picture and table."""
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


def momentum() -> str:
    """How far behind dense training ``saving=50`` ends with adapted momentum, and without."""
    rows, found = [], {(row["model, optimizer"], row["steps"]): row for row in gaps()}
    for (name, length), row in found.items():
        other = found.get((name.replace(" (", " not adapted ("), length), {})
        if row["saving 50"] and other.get("saving 50"):
            cells = {"adapted": row["saving 50"], "not adapted": other["saving 50"]}
            rows.append({head: row[head] for head in ("model, optimizer", "steps", "dense")} | cells)
    return page(rows)


def behind(gaps: Sequence[float], unit: str = "") -> str:
    """Mean gap to dense training in words, with its standard error; in bold if it is above 1."""
    error = f" ± {standard_error(gaps):.2f}" if len(gaps) > 1 else ""
    words = f"{abs(mean(gaps)):.2f}{error}{unit} {'behind' if mean(gaps) > 0 else 'ahead'}"
    return f"**{words}**" if mean(gaps) > 1 else words


TUNED = (
    ("GPT of 10.8 million parameters (loss), AdamW", "large gpt", 3000),
    ("ResNet-18 of 2.8 million parameters, SGD", "narrow resnet18", 3000),
    ("convnet of 0.2 million parameters, SGD", "convnet", 1000),
    ("GPT of 0.1 million parameters, on other text (loss), AdamW", "gpt", 1000),
)
"""The README's first results, at the learning rate that is best for dense training: titles, models and steps."""
SHOWN: Sequence[tuple[str, str, int, float]] = (
    ("convnet, SGD", "convnet, SGD", 10_000, 50),
    ("convnet, SGD, `ratio=0.001`", "convnet, SGD", 30_000, 0.001),
    ("GPT of 0.1 million, on other text (loss), AdamW, a third of the best rate", "gpt, AdamW, lr / 3", 3000, 50),
    ("Transformers' GPT-2 of 0.1 million (loss), AdamW, 2 workers", "gpt2, AdamW", 300, 50),
)
"""The README's results: titles, large models or learners, steps, and what is sent."""


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
    found, rows = Runs(RUNS / "at-size.jsonl"), []
    for title, model, steps in TUNED:
        dense, ours = (at_size.ends(found, model, system, steps) for system in at_size.BOTH)
        if both := {*dense} & {*ours}:
            best = at_size.best_rate(model, {rate: dense[rate] for rate in both})
            rows.append(result(f"{title}, {steps:,} steps", dense[best], ours[best], not at_size.COURSES[model].images))
    found = Runs(RUNS / "saving-curves.jsonl")
    for title, name, length, amount in SHOWN:
        dense, ours = (saving_curves.ends(found, LEARNERS[name], length, each) for each in (0.0, amount))
        rows.append(result(f"{title}, {length:,} steps", dense, ours, LEARNERS[name].text))
    return page([row for row in rows if row])


def result(title: str, dense: dict[int, float], ours: dict[int, float], text: bool) -> Row:
    """One of the README's results; empty where runs are missing. Of text it is a loss."""
    both = [(dense[seed], ours[seed]) for seed in ours if seed in dense]
    if not both:
        return {}
    ends = [*zip(*both, strict=True)]
    style, unit = (".3f", "") if text else (".2f", " %")
    gaps = [100 * (now / before - 1) if text else before - now for before, now in both]
    row = {"model": title}
    row |= {head: in_words(values, style, unit) for head, values in zip(("dense", "compressed"), ends, strict=True)}
    return row | {"difference": behind(gaps, " %" * text)}


def rates(images: bool) -> str:
    """Final quality at several learning rates, by model, length and system; of models of images, or of text."""
    found = Runs(RUNS / "at-size.jsonl")
    lengths = sorted({run["steps"] for run in found.values()})
    return page(
        [
            {"model": model, "steps": f"{steps:,}", **row}
            for model, course in at_size.COURSES.items()
            if course.images == images
            for steps in lengths
            for row in at_size.table(found, model, steps)
        ]
    )


def race_in_short() -> str:
    """The README's race: seconds by method and link."""
    found, rates, _ = raced()
    times = {racer: {rate: race.time_of(found, rate, racer).words for rate in rates} for racer in DRAWN}
    return page([{"seconds to dense training's loss": racer, **cells} for racer, cells in times.items()])


TABLES: dict[str, Callable[[], str]] = {
    "at-size": lambda: rates(images=False),
    "at-size-images": lambda: rates(images=True),
    "bench-hosts": lambda: steps("hosts", also="CPU ms a rank", title="CPU ms of a rank, by link"),
    "bench-train": lambda: steps("train-100mbit", "train-1gbit", also="hidden", title="hidden, by link"),
    "bench-select": compress_step,
    "bench-wire": wires,
    "gpu-launches": lambda: page(json.loads((RUNS / "gpu-launches.json").read_text())),
    "race": lambda: page(race.table(*raced())),
    "race-in-short": race_in_short,
    "results": results,
    "momentum": momentum,
    "monitor": monitor,
    "saving-curves": lambda: page(gaps()),
}


def filled(text: str) -> str:
    """A page with its tables as the runs have them."""
    pattern = r"(<!-- table: ([\w-]+) -->)\s*(?:\|.*\n)*\n*"
    return re.sub(pattern, lambda found: f"{found[1]}\n\n{TABLES[found[2]]()}\n\n", text).rstrip("\n") + "\n"


def main() -> None:
    """Writes the tables and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    if parser.parse_args().pictures:
        found = Runs(RUNS / "saving-curves.jsonl")
        curves = saving_curves.panels(found, [*LEARNERS.values()], saving_curves.LENGTHS)
        draw(curves, RUNS / "saving-curves.svg")
        found = Runs(RUNS / "at-size.jsonl")
        lengths = {model: 1000 if at_size.ends(found, model, "saving 50", 1000) else 3000 for model in at_size.COURSES}
        drawn = [each for model, steps in lengths.items() for each in at_size.panels(found, [model], steps)]
        draw(drawn, RUNS / "at-size.svg")
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
        titles = [f"GPT, {words(rate)}: 2 emulated hosts, one CPU core each, seed 0" for rate in rates]
        titled = [replace(each, title=title, inside="upper right") for each, title in zip(panels, titles, strict=True)]
        draw(titled, RUNS / "race.svg", columns=1)
    for each in PAGES:
        each.write_text(filled(each.read_text()))


if __name__ == "__main__":
    main()
