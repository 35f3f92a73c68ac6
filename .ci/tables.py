#!/usr/bin/env python3
"""Writes the tables of the README and the guides that come from the runs in examples/reproduced.

A table stands under a comment that names it: ``<!-- table: race -->``. ``--check`` writes nothing, and exits with
status 1 where a page is not up to date. ``--pictures`` draws saving-curves.svg, too, which needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from lightning_topk.lab.bench.race import RACERS
from lightning_topk.lab.papers import curves
from lightning_topk.lab.papers.learning import METHODS, OURS, TASKS, Task, run_key
from lightning_topk.lab.report import Result, draw, markdown
from lightning_topk.planning.quality import Point

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "examples" / "reproduced"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "examples" / "guides").glob("*.md")),
    ROOT / "examples" / "recipes" / "README.md",
]
LINKS = {"100mbit": "100 Mbit/s", "300mbit": "300 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
WORDS = {
    "saving 50": "**`saving=50`**",
    "saving 150": "`saving=150`",
    "saving 400": "`saving=400`",
    "ratio 0.001": "`ratio=0.001`",
    "auto": '`topology="auto"`',
    "ours": "**`saving=50`**",
    "ours, 0.001": "`ratio=0.001`",
    "ours, auto": '`topology="auto"`',
}


def runs(name: str) -> list[dict[str, Any]]:
    """The runs of a file."""
    return [json.loads(line) for line in (RUNS / name).read_text().splitlines()]


def race(name: str = "race.jsonl") -> str:
    """Seconds to the aim by link (median, least and most), and the steps and bytes that they take."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs(name):
        _, _, rate, racer, _ = run["key"]
        found.setdefault((racer, rate), []).append(run)
    rows = []
    for racer in (each for each in RACERS if (each, "1gbit") in found):
        row = {"": WORDS.get(racer, racer)}
        for rate, words in LINKS.items():
            if (racer, rate) not in found:
                continue
            here = found[racer, rate]
            seconds = [run["curve"][-1][0] for run in here]
            row[words] = "> " * (not all(run["reached"] for run in here)) + f"{median(seconds):.1f}"
            if len(seconds) > 1:
                row[words] += f" ({min(seconds):.0f} to {max(seconds):.0f})"
            if racer != "DDP":
                dense = median(run["curve"][-1][0] for run in found["DDP", rate])
                row[words] += f", {dense / median(seconds):.2f}x"
        here = found[racer, "1gbit"]
        row["steps"] = f"{median(run['curve'][-1][1] for run in here):.0f}"
        row["ms a step"] = f"{1000 * median(run['curve'][-1][0] / run['curve'][-1][1] for run in here):.0f}"
        row["MB a host and step"] = f"{median(run['sent'] / run['curve'][-1][1] for run in here) / 1e6:.3g}"
        rows.append(row)
    return markdown(rows)


def race_peers() -> str:
    """How many times as long as the default each racer takes, by medians; in bold where it is sooner."""
    rows: dict[str, dict[str, str]] = {}
    seconds = race_seconds()
    for (racer, rate), here in seconds.items():
        if racer == "saving 50" or rate not in LINKS:
            continue
        times = median(here) / median(seconds["saving 50", rate])
        row = rows.setdefault(racer, {"": WORDS.get(racer, racer)})
        row[LINKS[rate]] = f"**{times:.2f}x**" if times < 0.99 else f"{times:.2f}x"
    return markdown([rows[racer] for racer in RACERS if racer in rows])


def race_short() -> str:
    """Seconds to the aim of some racers."""
    seconds = race_seconds()
    shown = {"saving 50": "`saving=50`", "saving 150": "`saving=150`", "PowerSGD 2": "PowerSGD, rank 2"}
    shown |= {"fp16 hook": "fp16 hook", "DDP": "DDP"}
    rows = [
        {"seconds, median of 3 seeds": LINKS[rate]}
        | {words: f"{median(seconds[racer, rate]):.0f}" for racer, words in shown.items()}
        for rate in ("100mbit", "1gbit")
    ]
    return markdown(rows)


def race_seconds() -> dict[tuple[str, str], list[float]]:
    """Seconds to the aim, by racer and link."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs("race.jsonl"):
        _, _, rate, racer, _ = run["key"]
        found.setdefault((racer, rate), []).append(run["curve"][-1][0])
    return found


def bench(name: str) -> dict[str, list[dict[str, Any]]]:
    """The tables that a bench wrote by ``--json bench-NAME.json``."""
    found: dict[str, list[dict[str, Any]]] = json.loads((RUNS / f"bench-{name}.json").read_text())["tables"]
    return found


def steps(*names: str, also: str = "", words: str = "") -> str:
    """Milliseconds of a step with each peer, and how many times those of the default, by link.

    Args:
        *names: The benches.
        also: One more figure of each peer and link.
        words: What it is.
    """
    rows: dict[str, dict[str, str]] = {}
    more: dict[str, list[str]] = {}
    for name in names:
        for rate, peers in bench(name).items():
            for peer in peers:
                cell = f"{peer['ms a step']:,.0f} ({peer['over ours']:.2g}x)"
                ahead = peer["over ours"] < 0.99 and "ours" not in peer["peer"] and "exchange" not in peer["peer"]
                row = rows.setdefault(peer["peer"], {"": WORDS.get(peer["peer"], peer["peer"])})
                row[LINKS[rate]] = f"**{cell}**" if ahead else cell
                if figure := peer.get(also):
                    more.setdefault(peer["peer"], []).append(figure if isinstance(figure, str) else f"{figure:.0f}")
    return markdown([row | {words: ", ".join(more.get(peer, []))} if words else row for peer, row in rows.items()])


def compress_step() -> str:
    """The compress step of a worker and of a server, in units of adding and clearing."""
    rows = []
    checks = json.loads((RUNS / "bench-select.json").read_text())["checks"]
    targets = {check["statement"]: f" ({check['expected']})" for check in checks}
    peaks = {check["statement"].partition("residuals")[2]: check for check in checks if "memory" in check["statement"]}
    for title, parts in bench("select").items():
        if title.startswith("Compress step at "):
            worker, _, server = (f"{part['of add_ + zero_']:.1f}" for part in parts)
            where = title.removeprefix("Compress step at ")
            row = {"density": where if "," in where else f"{where}, bf16"}
            for side, units in (("worker", worker), ("server", server)):
                target = targets.get(f"a {side}'s whole compress step at {where}, in units of add_ + zero_", "")
                row[f"{side} (target)"] = units + target
            peak = peaks.get({"0.001": "", "0.12, int4": " at 0.12, int4"}.get(where, where))
            rows.append(row | {"peak memory (target)": f"{peak['measured']} ({peak['expected']})" if peak else ""})
    return markdown(rows)


def ranks() -> str:
    """Milliseconds of a step, and the bytes that leave a host, with several ranks on each."""
    (peers,) = bench("ranks").values()
    rows = [
        {
            "1 Gbit/s between the hosts": {"ours": "ours, sharded"}.get(peer["peer"], peer["peer"]),
            "ms a step": f"{peer['ms a step']:,.0f}",
            "bytes a host sends": peer["bytes a host sends"],
        }
        for peer in peers
        if peer["peer"] != "ours, 0.001"  # all of them are
    ]
    return markdown(rows)


def predicted() -> str:
    """How far predicted times of exchanges are from those measured."""
    rows = []
    for rate, exchanges in bench("model").items():
        off = [abs(each["predicted ms"] / each["measured ms"] - 1) for each in exchanges]
        rows.append({"link": LINKS[rate], "median error": f"{median(off):.0%}", "largest": f"{max(off):.0%}"})
    return markdown(rows)


def fsdp() -> str:
    """Loss, time and bytes with HSDP and with ours."""
    rows = []
    for name in ("learn", "large", "small"):
        for setting, ways in bench(f"fsdp-{name}").items():
            for way in ways:
                parameters, _, length = setting.split(", ")
                row = {"model": parameters, "length": length, "between nodes": way["between nodes"]}
                sent = way.get("kB that leave a node in a step")
                row["held-out loss"] = "" if sent else f"{way['held-out loss']:.3f}"
                row["ms a step"] = f"{way['ms a step']:,.0f}" if sent else ""
                rows.append(row | {"kB a step that leave a node": f"{sent:,.0f}" if sent else ""})
    return markdown(rows)


def simulated() -> str:
    """What 1,024 simulated workers learn and send."""
    result = json.loads((RUNS / "simulate.json").read_text())
    return markdown(result["tables"]["After the last step"])


def positions() -> str:
    """Bits of a position against their entropy, and bytes of an entry by format, of 4 workers."""
    rows: dict[str, dict[str, str]] = {}
    for title, parts in bench("wire").items():
        density = title.split(" at ")[1].partition(" ")[0].rstrip(":")
        row = rows.setdefault(density, {"density": density})
        for part in parts:
            if part.get("workers") == 4:
                row["bits a position"] = f"{part['index bits an entry']:.1f} ({part['of entropy']:.2f}x its entropy)"
            elif "wire" in part:
                row[f"bytes an entry, {part['wire']}"] = f"{part['bytes an entry']:.2f}"
    return markdown([*rows.values()])


def gpu_bytes() -> str:
    """Bytes of memory traffic and launches of an exchange, which tests/test_fake_cuda.py counts."""
    counted = json.loads((RUNS / "gpu-bytes.json").read_text())
    return markdown(
        [
            {
                "density, wire": f"{row['ratio']:g}, int4" + (", momentum" if row["momentum"] else ""),
                "gradient": row["dtype"],
                "bytes, worker sends": str(row["worker"]),
                "bytes, whole exchange": str(row["exchange"]),
                "launches": row["launches"],
            }
            for row in counted
        ]
    )


def seeds(values: Sequence[float], style: str, unit: str = "") -> str:
    """Mean and standard error of several seeds, or the value of one."""
    if not values:
        return ""
    error = f" ± {stdev(values) / math.sqrt(len(values)):{style}}" if len(values) > 1 else ""
    return f"{mean(values):{style}}{error}{unit}" + " (1 seed)" * (len(values) == 1)


def filled_only(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table without rows and columns that have nothing but a name."""
    first, *others = dict.fromkeys(head for row in rows for head in row)
    there = [head for head in others if any(row.get(head) for row in rows)]
    return markdown([{head: row.get(head, "") for head in (first, *there)} for row in rows if any(map(row.get, there))])


def learning(peers: bool = True) -> str:
    """Final quality of the default, dense training and peers after 300 steps."""
    found = {run["key"]: run for run in runs("learning.jsonl")}
    names = {"char lstm": "character LSTM", "gpt": "small GPT", "lstm": "LSTM by rows", "cnn": "CNN"}

    def quality(task: Task, name: str) -> list[dict[str, float]]:
        return [found[run_key(task, name, METHODS[name], seed)] for seed in range(3)]

    def shown(task: Task, name: str) -> str:
        measured = [run["held" if task.text else "accuracy"] for run in quality(task, name)]
        return seeds(measured, ".3f") if task.text else seeds(measured, ".2f", " %")

    rows = []
    small = () if peers else (("mlp", 2), ("mlp", 8))
    for task in (each for each in TASKS if each.steps == 300 and (each.model, each.workers) not in small):
        dense, ours = (mean(r["held" if task.text else "accuracy"] for r in quality(task, n)) for n in ("dense", OURS))
        name = names.get(task.model, task.model.replace("mlp", "MLP"))
        if peers or task.workers != 8:
            name += f", {task.workers} workers"
        row = {
            "model": f"{name} (loss)" if task.text else name,
            "dense": shown(task, "dense"),
            "`saving=50`": shown(task, OURS),
            "difference": behind(100 * (ours / dense - 1), " %") if task.text else behind(dense - ours),
        }
        for peer in ("unidirectional", "all-gather") if peers else ():
            row[peer] = shown(task, peer)
        if peers:
            power = quality(task, "PowerSGD 1")[0]
            row["PowerSGD 1 (its saving)"] = f"{shown(task, 'PowerSGD 1')} ({power['dense'] / power['bytes']:.0f}x)"
        rows.append(row)
    if peers:
        return markdown(rows)
    return markdown([{**row, "model": f"{row['model']}, 300 steps"} for row in rows] + longest_on_images())


def longest_on_images() -> list[dict[str, str]]:
    """The rows of the longest runs on images: the seeds that dense training has too."""
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    learners = {each.name: each for each in curves.IMAGES}
    rows = []
    for name, words, steps in (
        ("convnet, SGD", "convnet on CIFAR-10, SGD", 10_000),
        ("convnet, SGD 0.5", "convnet, SGD, momentum 0.5", 10_000),
        ("convnet, AdamW", "convnet, AdamW", 10_000),
        ("resnet20, SGD", "ResNet-20, SGD", 3000),
        ("resnet20, SGD masked", "ResNet-20, SGD, `momentum_masking=True`", 3000),
        ("resnet20, AdamW", "ResNet-20, AdamW", 3000),
        ("resnet20, AdamW", "ResNet-20, AdamW", 10_000),
    ):
        held = {0: curves.baseline(learners[name]), 50: learners[name]}
        both = [[found.get(curves.run_key(held[saving], steps, saving, n)) for saving in held] for n in range(3)]
        pairs = [pair for pair in both if all(pair)]
        if pairs:
            dense, ours = ([run["accuracy"] for run in each] for each in zip(*pairs, strict=True))
            row = {"model": f"{words}, {steps:,} steps", "dense": seeds(dense, ".2f", " %")}
            rows.append(row | {"`saving=50`": seeds(ours, ".2f", " %"), "difference": behind(mean(dense) - mean(ours))})
    return rows


def behind(gap: float, unit: str = "") -> str:
    """A gap to dense training in words; in bold if it is above 1."""
    words = f"{abs(gap):.2f}{unit} {'behind' if gap > 0 else 'ahead'}"
    return f"**{words}**" if gap > 1 else words


def saving_curves() -> str:
    """The gap to dense training, by model, optimizer, length and saving."""
    points, rows = measured_points(), []
    for learner in (*curves.LEARNERS, *curves.IMAGES):
        unit = "% of the loss" if learner.text else "points"
        for steps in curves.LENGTHS:
            cells = {f"{saving:g}x": points.get((learner.name, steps, saving)) for saving in sorted(curves.SAVINGS)}
            shown = {head: str(point or "") for head, point in cells.items()}
            rows.append({"model, optimizer": f"{learner.name} ({unit})", "steps": f"{steps:,}"} | shown)
    return markdown([row for row in rows if any([*row.values()][2:])])


def measured_points() -> dict[tuple[str, int, float], Point]:
    """The gap to dense training of each learner, length and saving of ``saving-curves.jsonl``."""
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    return curves.gaps((*curves.LEARNERS, *curves.IMAGES), curves.LENGTHS, sorted(curves.SAVINGS), 3, found)


def how_far() -> str:
    """The largest saving that is near to dense training, and the next one, by model and length of the run."""
    points, rows = measured_points(), []
    for learner in (*curves.LEARNERS, *curves.IMAGES):
        row = {"model, optimizer": learner.name}
        for steps in curves.LENGTHS:
            mine = {s: points[key] for s in sorted(curves.SAVINGS) if (key := (learner.name, steps, s)) in points}
            near = [*takewhile(lambda each: each[1].gap + each[1].shown_error <= 1, mine.items())]
            words = [f"**{saving:g}x** ({point})" for saving, point in near[-1:]]
            words += [f"not {saving:g}x ({point})" for saving, point in [*mine.items()][len(near) :][:1]]
            row[f"{steps:,} steps"] = "; ".join(words)
        rows.append(row)
    return filled_only(rows)


ADVICE: dict[str, tuple[str, Sequence[tuple[str, str, int, int]]]] = {
    "text, AdamW": (
        "the defaults",
        [("GPT", "gpt, AdamW", 3000, 50), ("LSTM", "char lstm, AdamW", 3000, 50)],
    ),
    "the same, a slow link, 10,000 steps or more": (
        "`saving=200`",
        [("GPT", "gpt, AdamW", 10_000, 200), ("LSTM", "char lstm, AdamW", 10_000, 200)],
    ),
    "text, SGD with momentum 0.9": (
        "momentum 0.5 at five times the learning rate",
        [("GPT", "gpt, SGD 0.5", 1000, 50), ("LSTM", "char lstm, SGD 0.5", 1000, 50)],
    ),
    "a perceptron, SGD or AdamW": (
        "the defaults",
        [("wide MLP, SGD", "wide mlp, SGD", 1000, 50), ("AdamW", "wide mlp, AdamW", 1000, 50)],
    ),
    "a convolutional net, AdamW": (
        "the defaults",
        [("ResNet-20", "resnet20, AdamW", 3000, 50), ("convnet", "convnet, AdamW", 10_000, 50)],
    ),
    "a convolutional net, SGD with momentum 0.9, up to 10 epochs": (
        "`momentum_masking=True`",
        [("convnet", "convnet, SGD masked", 3000, 50), ("ResNet-20", "resnet20, SGD masked", 3000, 50)],
    ),
    "the same, more than 20 epochs": (
        "momentum 0.5 at five times the learning rate",
        [("convnet", "convnet, SGD 0.5", 10_000, 50)],
    ),
    "the same with batch norm": ("the defaults", [("convnet", "batch-norm convnet, SGD", 10_000, 50)]),
}
"""What to set, by kind of run; and the runs that say so: their name, learner, steps and saving."""


def advice() -> str:
    """What to set, and how far from dense training runs that did so ended."""
    points, rows = measured_points(), []
    for run, (setting, shown) in ADVICE.items():
        ended = [
            f"{name} {points[key]}{' %' * key[0].startswith(curves.TEXT)} after {key[1]:,} steps"
            for name, key in ((name, (learner, steps, saving)) for name, learner, steps, saving in shown)
            if key in points
        ]
        rows.append({"your run": run, "set": setting, "how far behind dense training ours ended": "; ".join(ended)})
    return markdown(rows)


def law() -> str:
    """How often an entry of each model must be sent for a gap of 1, and how well the others predict it."""
    result = Result("", "", "")
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    curves.enter(result, curves.LEARNERS, curves.LENGTHS, sorted(curves.SAVINGS), 3, found)
    title, rows = next((title, rows) for title, rows in result.tables.items() if title.startswith("gap = "))
    exponent = title.partition(" ^ ")[2].partition(",")[0]
    heads = {"sends for a gap of 1": f"n, where the gap is (n / sends) ^ {exponent}"}
    return markdown([{heads.get(head, head): cell for head, cell in row.items()} for row in rows])


def momentum() -> str:
    """What SGD with a momentum of 0.9 and of 0.5, at the same lr / (1 - momentum), costs text."""
    models = {"char lstm": "character LSTM", "gpt": "small GPT"}
    return ways(models, {"`saving=50`": "SGD", "and momentum 0.5": "SGD 0.5"}, "held", ".3f")


def images() -> str:
    """What ways to step with SGD cost images."""
    models = {"convnet": "convnet", "batch-norm convnet": "with batch norm", "resnet20": "ResNet-20"}
    optimizers = {
        "`saving=50`": "SGD",
        "and momentum 0.5": "SGD 0.5",
        "and `momentum_masking=True`": "SGD masked",
        "both": "SGD 0.5 masked",
        "AdamW instead": "AdamW",
    }
    return ways(models, optimizers, "accuracy", ".2f")


def ways(models: Mapping[str, str], optimizers: Mapping[str, str], what: str, style: str) -> str:
    """How far behind dense training of the same seeds models end with 50x, by length of the run and way to step.

    Args:
        models: How to name each.
        optimizers: Those of the learners, by the head of the column.
        what: What dense training, with a momentum of 0.9, is measured by.
        style: Of that number.
    """
    points, found = measured_points(), {run["key"]: run for run in runs("saving-curves.jsonl")}
    learners = {each.name: each for each in (*curves.LEARNERS, *curves.IMAGES)}
    rows = []
    for model, words in models.items():
        for steps in curves.LENGTHS:
            keys = [curves.run_key(learners[f"{model}, SGD"], steps, 0.0, seed) for seed in range(3)]
            row = {"model": words, "steps": f"{steps:,}"}
            row["dense"] = seeds([found[key][what] for key in keys if key in found], style)
            cells = {head: points.get((f"{model}, {name}", steps, 50)) for head, name in optimizers.items()}
            if any(cells.values()):
                rows.append(row | {head: str(point or "") for head, point in cells.items()})
    return filled_only(rows)


def draw_saving_curves() -> None:
    """Draws the gap to dense training over the saving, learner by learner."""
    result = Result("saving-curves", "", "")
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    curves.enter(result, (*curves.LEARNERS, *curves.IMAGES), curves.LENGTHS, sorted(curves.SAVINGS), 3, found)
    draw(result.panels, RUNS / "saving-curves.svg")


def recipes() -> str:
    """Loss on held-out data of all that was tried, after 300 steps with the first seed."""
    sys.path.append(str(ROOT / "examples" / "recipes"))
    from run import TRIED

    found = {run["key"]: run for run in runs("learning.jsonl")}
    names = {"wide mlp": "wide MLP", "cnn": "CNN", "char lstm": "character LSTM", "gpt": "small GPT"}
    tasks = [task for task in TASKS if task.model in names and (task.steps, task.workers) == (300, 8)]
    rows = []
    for method, tried in (METHODS | TRIED).items():
        here = {task: found[key] for task in tasks if (key := run_key(task, method, tried, 0)) in found}
        if here:
            cells = {names[task.model]: f"{here[task]['held']:.3f}" if task in here else "" for task in tasks}
            last = [*here.values()][-1]
            rows.append({"method": f"`{method}`"} | cells | {"saving": f"{last['dense'] / last['bytes']:.0f}x"})
    return markdown(rows)


def tried(model: str, steps: int, lr: float, method: str) -> list[dict[str, Any]]:
    """The runs of 8 workers with a method, of those in ``learning.jsonl``, seed by seed."""
    found = {}
    for run in runs("learning.jsonl"):
        key = json.loads(run["key"])
        if [*key[:4], key[6]] == [model, 8, steps, lr, method]:
            found[key[7]] = run
    return [found[seed] for seed in sorted(found)]


TRIED_ON = {
    "wide MLP": ("wide mlp", 0.1),
    "CNN": ("cnn", 0.03),
    "LSTM by rows": ("lstm", 0.1),
    "character LSTM": ("char lstm", 0.02),
    "small GPT": ("gpt", 0.01),
}
"""Models and their learning rates by the names of the pages."""


def compared(ways: Mapping[str, Sequence[str]], models: Sequence[str], what: str = "held") -> str:
    """What models end with after 300 steps, by way; of several methods the best.

    Args:
        ways: Names of methods, by the words for them.
        models: Names of :data:`TRIED_ON`.
        what: What counts, ``"held"`` (the loss on held-out data) or ``"accuracy"`` (%).
    """
    style, sign = (".3f", 1) if what == "held" else (".2f", -1)
    rows = []
    for words, methods in ways.items():
        row = {"": words}
        for name in models:
            model, lr = TRIED_ON[name]
            measured = [[run[what] for run in tried(model, 300, lr, method)] for method in methods]
            best = min((each for each in measured if each), key=lambda each: sign * mean(each), default=[])
            row[name] = seeds(best, style)
        rows.append(row)
    return filled_only(rows)


def newer() -> str:
    """Held-out loss with newer methods, the best of their settings, after 300 steps."""
    local = ("1, momentum 0", "0.7, momentum 0.9", "0.4, momentum 0.8")
    ways = {
        "dense": ["dense"],
        "`saving=50`": ["saving 50"],
        "4 local steps with an outer optimizer, 50x": [f"4 local steps, outer lr {each}" for each in local],
        "DeMo, 50x": [f"DeMo, lr {lr}" for lr in (0.003, 0.01, 0.03, 0.1)],
        "EF21-SGDM, 50x": ["EF21-SGDM"],
        "`saving=150`": ["saving 150"],
        "15 local steps with an outer optimizer, 109x to 113x": [f"15 local steps, outer lr {each}" for each in local],
    }
    return compared(ways, ("wide MLP", "CNN", "character LSTM", "small GPT"))


def wires() -> str:
    """Held-out loss in two formats, by ratio."""
    ways = {f"{ratio} in {wire}": [f"{ratio} in {wire}"] for ratio in (0.001, 0.01, 0.06) for wire in ("bf16", "int4")}
    return compared(ways, ("wide MLP", "CNN", "character LSTM"))


def beta1() -> str:
    """Held-out loss of text with AdamW's beta1, and with a beta1 of 0."""
    ways = {"dense": "dense", "`saving=50`": "saving 50", "`saving=50, beta1=0.9`": "AdamW's own beta1"}
    return compared({words: [method] for words, method in ways.items()}, ("character LSTM", "small GPT"))


def masking_digits() -> str:
    """Accuracy on digits with and without masking."""
    ways = {"`saving=50`": ["saving 50"], "and `momentum_masking=True`": ["SGD's momentum, masked"]}
    return compared(ways, ("LSTM by rows", "wide MLP", "CNN"), what="accuracy")


def masking() -> str:
    """Accuracy of the convnet after 1,000 steps with the first seed, with masking and with other ways to that end."""
    curve = {run["key"]: run for run in runs("saving-curves.jsonl")}
    learner = next(each for each in curves.IMAGES if each.name == "convnet, SGD masked")
    ways = {
        "dense": (0.05, "dense"),
        "`saving=50`": (0.05, "saving 50"),
        "**`momentum_masking=True`**": (0.05, None),
        "`momentum=0.9` in the strategy (DGC, masked), none in the optimizer": (0.05, "momentum correction"),
        "the same without masking (`momentum_masking=False`)": (0.05, "momentum correction unmasked"),
        "the first convolution uncompressed": (0.05, "first layer dense"),
        "the optimizer's momentum 0.5 at lr 0.25": (0.05, "SGD's momentum 0.5"),
        "no momentum, lr 0.5": (0.05, "SGD's momentum 0"),
        "no momentum, lr 0.05": (0.005, "SGD's momentum 0"),
        "lr 0.02: dense": (0.02, "dense"),
        "lr 0.02: `saving=50`": (0.02, "saving 50"),
        "lr 0.1: `momentum=0.9` in the strategy": (0.1, "momentum correction"),
    }
    rows = []
    for words, (lr, method) in ways.items():
        run = tried("convnet", 1000, lr, method)[0] if method else curve[curves.run_key(learner, 1000, 50, 0)]
        rows.append({"": words, "accuracy, %": f"{run['accuracy']:.2f}"})
    return markdown(rows)


Way = tuple[str, str, str, float]
"""Words; a method and a learning rate, or a learner and its saving."""


def longest() -> str:
    """Accuracy of the convnet after 10,000 steps, seed by seed."""
    return by_seed(
        "convnet",
        10_000,
        [
            ("dense, lr 0.05", "", "convnet, SGD", 0.0),
            ("dense, lr 0.1", "dense", "", 0.1),
            ("`saving=50`, lr 0.05", "", "convnet, SGD", 50.0),
            ("momentum 0.5, lr 0.25", "", "convnet, SGD 0.5", 50.0),
            ("momentum 0.5, lr 0.25, `momentum_masking=True`", "", "convnet, SGD 0.5 masked", 50.0),
            ("`momentum_masking=True`, lr 0.05", "", "convnet, SGD masked", 50.0),
            ("`momentum_masking=True`, lr 0.1", "SGD's momentum, masked", "", 0.1),
            ("`momentum_masking=True`, lr 0.2", "SGD's momentum, masked", "", 0.2),
            ("the same at lr 0.1, `saving=25`", "masked, saving 25", "", 0.1),
            ("the same at lr 0.05, `lr_ratio=True`", "masked, lr ratio", "", 0.05),
            ("`momentum=0.9` in the strategy, none in the optimizer, lr 0.05", "momentum correction", "", 0.05),
            ("batch norm: dense, lr 0.05", "", "batch-norm convnet, SGD", 0.0),
            ("batch norm: `momentum_masking=True`, lr 0.05", "", "batch-norm convnet, SGD masked", 50.0),
            ("weight decay 0.0005: dense, lr 0.05", "", "convnet, SGD decay", 0.0),
            ("weight decay 0.0005: `momentum_masking=True`, lr 0.05", "", "convnet, SGD decay masked", 50.0),
            ("AdamW: dense, lr 0.003", "", "convnet, AdamW", 0.0),
            ("AdamW: `saving=50`, lr 0.003", "", "convnet, AdamW", 50.0),
        ],
    )


def longest_resnet() -> str:
    """Accuracy of ResNet-20 after 3,000 steps, seed by seed."""
    return by_seed(
        "resnet20",
        3000,
        [
            ("dense, lr 0.02", "", "resnet20, SGD", 0.0),
            ("dense, lr 0.01", "dense", "", 0.01),
            ("dense, lr 0.05", "dense", "", 0.05),
            ("`saving=50`, lr 0.02", "", "resnet20, SGD", 50.0),
            ("momentum 0.5, lr 0.1", "", "resnet20, SGD 0.5", 50.0),
            ("`momentum_masking=True`, lr 0.02", "", "resnet20, SGD masked", 50.0),
            ("`momentum_masking=True`, lr 0.05", "SGD's momentum, masked", "", 0.05),
            ("`momentum_masking=True`, lr 0.1", "SGD's momentum, masked", "", 0.1),
            ("AdamW: dense, lr 0.003", "", "resnet20, AdamW", 0.0),
            ("AdamW: `saving=50`, lr 0.003", "", "resnet20, AdamW", 50.0),
        ],
    )


def by_seed(model: str, steps: int, ways: Sequence[Way]) -> str:
    """Accuracy of a model, seed by seed."""
    curve = {run["key"]: run for run in runs("saving-curves.jsonl")}
    learners = {each.name: each for each in curves.IMAGES}
    rows = []
    for words, method, name, value in ways:
        keys = (curves.run_key(learners[name], steps, value, seed) for seed in range(3)) if name else ()
        known = tried(model, steps, value, method) if method else [curve[key] for key in keys if key in curve]
        rows.append({"": words, "accuracy, %": ", ".join(f"{run['accuracy']:.2f}" for run in known)})
    return filled_only(rows)


TABLES: dict[str, Callable[[], str]] = {
    "bench-hosts": lambda: steps("hosts", also="of them exchange", words="CPU ms of a rank, by link"),
    "bench-train": lambda: steps("train-100mbit", "train-1gbit", also="hidden", words="hidden, by link"),
    "bench-select": compress_step,
    "bench-wire": positions,
    "bench-ranks": ranks,
    "bench-model": predicted,
    "fsdp": fsdp,
    "simulate": simulated,
    "gpu-bytes": gpu_bytes,
    "race": race,
    "race-short": race_short,
    "race-peers": race_peers,
    "race-images": lambda: race("race-images.jsonl"),
    "learning": learning,
    "learning-short": lambda: learning(peers=False),
    "saving-curves": saving_curves,
    "advice": advice,
    "how-far": how_far,
    "law": law,
    "images": images,
    "momentum": momentum,
    "masking": masking,
    "longest": longest,
    "longest-resnet": longest_resnet,
    "newer": newer,
    "wires": wires,
    "beta1": beta1,
    "masking-digits": masking_digits,
    "recipes": recipes,
}


def filled(text: str) -> str:
    """A page with its tables as the runs have them."""
    pattern = r"(<!-- table: ([\w-]+) -->)\s*(?:\|.*\n)*\n*"
    return re.sub(pattern, lambda found: f"{found[1]}\n\n{TABLES[found[2]]()}\n\n", text).rstrip("\n") + "\n"


def main() -> None:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    options = parser.parse_args()
    check, old = options.check, []
    if options.pictures:
        draw_saving_curves()
    for page in PAGES:
        text = page.read_text()
        if filled(text) != text:
            old.append(page.name)
            if not check:
                page.write_text(filled(text))
    if check and old:
        sys.exit(f"not up to date: {', '.join(old)}. Run python .ci/tables.py.")


if __name__ == "__main__":
    main()
