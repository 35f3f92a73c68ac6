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
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from lightning_topk.lab.bench.race import RACERS
from lightning_topk.lab.papers import curves
from lightning_topk.lab.papers.learning import METHODS, OURS, TASKS, Task, run_key
from lightning_topk.lab.report import Result, draw, markdown, spread

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
    """Seconds to the aim by link, and the steps and bytes that they take."""
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
            gave_up = "> " * (not all(run["reached"] for run in here))
            row[words] = gave_up + spread(seconds, ".1f")
            if racer != "DDP":
                dense = median(run["curve"][-1][0] for run in found["DDP", rate])
                row[words] += f" ({dense / median(seconds):.2f}x)"
        last = [run["curve"][-1][1] for run in found[racer, "1gbit"]]
        sent = [run["sent"] / run["curve"][-1][1] / 1e6 for run in found[racer, "1gbit"]]
        rows.append(row | {"steps": spread(last, ".0f"), "MB a host and step": f"{mean(sent):.3g}"})
    return markdown(rows)


def bench(name: str) -> dict[str, list[dict[str, Any]]]:
    """The tables that a bench wrote by ``--json bench-NAME.json``."""
    found: dict[str, list[dict[str, Any]]] = json.loads((RUNS / f"bench-{name}.json").read_text())["tables"]
    return found


def steps(*names: str) -> str:
    """Milliseconds of a step with each peer, and how many times those of the default, by link."""
    rows: dict[str, dict[str, str]] = {}
    for name in names:
        for rate, peers in bench(name).items():
            for peer in peers:
                cell = f"{peer['ms a step']:,.0f} ({peer['over ours']:.2g}x)"
                ahead = peer["over ours"] < 0.99 and "ours" not in peer["peer"] and "exchange" not in peer["peer"]
                row = rows.setdefault(peer["peer"], {"": WORDS.get(peer["peer"], peer["peer"])})
                row[LINKS[rate]] = f"**{cell}**" if ahead else cell
    return markdown([*rows.values()])


def compress_step() -> str:
    """The compress step of a worker and of a server, in units of adding and clearing."""
    rows = []
    for title, parts in bench("select").items():
        if title.startswith("Compress step at "):
            worker, _, server = (f"{part['of add_ + zero_']:.1f}" for part in parts)
            where = title.removeprefix("Compress step at ")
            rows.append({"density": where if "," in where else f"{where}, bf16", "worker": worker, "server": server})
    return markdown(rows)


def learning(peers: bool = True) -> str:
    """Final quality of the default, dense training and peers after 300 steps."""
    found = {run["key"]: run for run in runs("learning.jsonl")}
    names = {"char lstm": "character LSTM", "gpt": "small GPT", "lstm": "LSTM by rows", "cnn": "CNN"}

    def quality(task: Task, name: str) -> list[dict[str, float]]:
        return [found[run_key(task, name, METHODS[name], seed)] for seed in range(3)]

    def shown(task: Task, name: str) -> str:
        measured = [run["held" if task.text else "accuracy"] for run in quality(task, name)]
        return spread(measured, ".3f") if task.text else spread(measured, ".2f") + " %"

    rows = []
    for task in (each for each in TASKS if each.steps == 300):
        dense, ours = (mean(r["held" if task.text else "accuracy"] for r in quality(task, n)) for n in ("dense", OURS))
        gap = 100 * (ours / dense - 1) if task.text else dense - ours
        words = f"{abs(gap):.1f} %" if task.text else f"{abs(gap):.2f}"
        words = words + (" behind" if gap > 0 else " ahead")
        row = {
            "model, simulated workers": f"{names.get(task.model, task.model.replace('mlp', 'MLP'))}, {task.workers}",
            "dense": shown(task, "dense"),
            "`saving=50`": shown(task, OURS),
            "difference": f"**{words}**" if gap > 1 else words,
        }
        for peer in ("unidirectional", "all-gather") if peers else ():
            row[peer] = shown(task, peer)
        power = quality(task, "PowerSGD 1")
        row["PowerSGD 1 (its saving)"] = f"{shown(task, 'PowerSGD 1')} ({power[0]['dense'] / power[0]['bytes']:.0f}x)"
        rows.append(row)
    return markdown(rows)


def saving_curves() -> str:
    """The gap to dense training, by model, optimizer, length and saving."""
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    rows = []
    learners = (*curves.LEARNERS, *curves.IMAGES)
    savings = sorted(curves.SAVINGS)
    points = curves.gaps(learners, curves.LENGTHS, savings, 3, found)
    for learner in learners:
        for steps in curves.LENGTHS:
            mine = {saving: points.get((learner.name, steps, saving)) for saving in savings}
            if any(mine.values()):
                unit = "% of the loss" if learner.text else "points"
                cells = {f"{saving:g}x": str(point or "") for saving, point in mine.items()}
                rows.append({"model, optimizer": f"{learner.name} ({unit})", "steps": f"{steps:,}"} | cells)
    return markdown(rows)


def images() -> str:
    """Accuracy on images, with and without masking of SGD's momentum."""
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    learners = {each.name: each for each in curves.IMAGES}
    rows = []
    for model, words in (("convnet", "convnet"), ("resnet20", "ResNet-20")):
        plain, masked = learners[f"{model}, SGD"], learners[f"{model}, SGD masked"]
        ways = {"dense": (plain, 0.0), "`saving=50`": (plain, 50.0), "and `momentum_masking=True`": (masked, 50.0)}
        for steps in curves.LENGTHS:
            row: dict[str, Any] = {"model": words, "steps": f"{steps:,}"}
            for way, (learner, saving) in ways.items():
                keys = (curves.run_key(learner, steps, saving, seed) for seed in range(3))
                measured = [found[key]["accuracy"] for key in keys if key in found]
                error = f" ± {stdev(measured) / math.sqrt(len(measured)):.2f}" if len(measured) > 1 else " (1 seed)"
                row[way] = f"{mean(measured):.2f}{error}" if measured else ""
            if any(row[way] for way in ways):
                rows.append(row)
    return markdown(rows)


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


def tried(model: str, steps: int, lr: float, *methods: str, seed: int = 0) -> list[dict[str, Any]]:
    """The runs of 8 workers with some methods, of those in ``learning.jsonl``."""
    keys = {run["key"]: json.loads(run["key"]) for run in runs("learning.jsonl")}
    wanted = [[model, 8, steps, lr, method, seed] for method in methods]
    return [run for run in runs("learning.jsonl") if [*(key := keys[run["key"]])[:4], *key[6:8]] in wanted]


def newer() -> str:
    """Held-out loss with newer methods, the best of their settings, after 300 steps with the first seed."""
    local = ("1, momentum 0", "0.7, momentum 0.9", "0.4, momentum 0.8")
    kinds = {
        "dense": ["dense"],
        "`saving=50`": ["saving 50"],
        "4 local steps with an outer optimizer, 50x": [f"4 local steps, outer lr {each}" for each in local],
        "DeMo, 50x to 55x": [f"DeMo, lr {lr}" for lr in (0.003, 0.001)],
        "`saving=150`": ["saving 150"],
        "15 local steps with an outer optimizer, 109x to 113x": [f"15 local steps, outer lr {each}" for each in local],
    }
    models = {"wide MLP": ("wide mlp", 0.1), "CNN": ("cnn", 0.03), "character LSTM": ("char lstm", 0.02)}
    models["small GPT"] = ("gpt", 0.01)
    rows = [
        {"": kind}
        | {
            words: f"{min(run['held'] for run in tried(model, 300, lr, *methods)):.3f}"
            for words, (model, lr) in models.items()
        }
        for kind, methods in kinds.items()
    ]
    return markdown(rows)


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


def longest() -> str:
    """Accuracy of the convnet after 10,000 steps, at two learning rates."""
    curve = {run["key"]: run for run in runs("saving-curves.jsonl")}
    learners = {each.name: each for each in curves.IMAGES}
    plain, masked = learners["convnet, SGD"], learners["convnet, SGD masked"]
    ways = {"dense": (plain, 0.0, "dense", 1), "`saving=50`, masked": (masked, 50.0, "SGD's momentum, masked", 2)}
    rows = []
    for words, (learner, saving, method, seeds) in ways.items():
        keys = (curves.run_key(learner, 10_000, saving, seed) for seed in range(3))
        at_half = [f"{curve[key]['accuracy']:.2f}" for key in keys if key in curve]
        at_full = [
            f"{run['accuracy']:.2f}" for n in range(seeds) for run in tried("convnet", 10_000, 0.1, method, seed=n)
        ]
        rows.append({"seeds 0, 1, %": words, "lr 0.05": " ".join(at_half), "lr 0.1": " ".join(at_full)})
    return markdown(rows)


TABLES: dict[str, Callable[[], str]] = {
    "bench-hosts": lambda: steps("hosts"),
    "bench-train": lambda: steps("train-100mbit", "train-1gbit"),
    "bench-select": compress_step,
    "race": race,
    "race-images": lambda: race("race-images.jsonl"),
    "learning": learning,
    "learning-short": lambda: learning(peers=False),
    "saving-curves": saving_curves,
    "images": images,
    "masking": masking,
    "longest": longest,
    "newer": newer,
    "recipes": recipes,
}


def filled(text: str) -> str:
    """A page with its tables as the runs have them."""
    pattern = r"(<!-- table: ([\w-]+) -->\n\n)(?:\|.*\n)*"
    return re.sub(pattern, lambda found: f"{found[1]}{TABLES[found[2]]()}\n", text)


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
