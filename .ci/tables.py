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
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from lightning_topk.lab.bench.peers import PEERS
from lightning_topk.lab.bench.race import RACERS
from lightning_topk.lab.papers import curves
from lightning_topk.lab.papers.learning import METHODS, OURS, TASKS, Task, run_key
from lightning_topk.lab.report import Result, draw, markdown

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
    "ours": "**`saving=50`**",
    "ours, 0.001": "`ratio=0.001`",
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
            for peer in (each for each in peers if each["peer"] in (*PEERS, "no exchange")):
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
        if peer["peer"] in (*PEERS, "no exchange") and peer["peer"] != "ours, 0.001"  # all of them are
    ]
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


def learning() -> str:
    """Final quality of the default, dense training and peers after 300 steps."""
    found = {run["key"]: run for run in runs("learning.jsonl")}
    names = {"char lstm": "character LSTM", "gpt": "small GPT", "lstm": "LSTM by rows", "cnn": "CNN"}

    def quality(task: Task, name: str) -> list[dict[str, float]]:
        return [found[run_key(task, name, METHODS[name], seed)] for seed in range(3)]

    def shown(task: Task, name: str) -> str:
        measured = [run["held" if task.text else "accuracy"] for run in quality(task, name)]
        return seeds(measured, ".3f") if task.text else seeds(measured, ".2f", " %")

    rows = []
    for task in (each for each in TASKS if each.steps == 300):
        dense, ours = (mean(r["held" if task.text else "accuracy"] for r in quality(task, n)) for n in ("dense", OURS))
        name = f"{names.get(task.model, task.model.replace('mlp', 'MLP'))}, {task.workers} workers"
        power = quality(task, "PowerSGD 1")[0]
        rows.append(
            {
                "model": f"{name} (loss)" if task.text else name,
                "dense": shown(task, "dense"),
                "`saving=50`": shown(task, OURS),
                "difference": behind(100 * (ours / dense - 1), " %") if task.text else behind(dense - ours),
                "unidirectional": shown(task, "unidirectional"),
                "all-gather": shown(task, "all-gather"),
                "PowerSGD 1 (its saving)": f"{shown(task, 'PowerSGD 1')} ({power['dense'] / power['bytes']:.0f}x)",
            }
        )
    return markdown(rows)


def behind(gap: float, unit: str = "") -> str:
    """A gap to dense training in words; in bold if it is above 1."""
    words = f"{abs(gap):.2f}{unit} {'behind' if gap > 0 else 'ahead'}"
    return f"**{words}**" if gap > 1 else words


def saving_curves() -> str:
    """The gap to dense training, by model, optimizer, length and what is sent."""
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    learners, rows = (*curves.LEARNERS, *curves.IMAGES), []
    points = curves.gaps(learners, curves.LENGTHS, curves.AMOUNTS, 3, found)
    for learner in learners:
        unit, what, style = ("%", "held", ".3f") if learner.text else ("points", "accuracy", ".2f")
        for steps in curves.LENGTHS:
            keys = (curves.run_key(curves.baseline(learner), steps, 0.0, seed) for seed in range(3))
            dense = seeds([found[key][what] for key in keys if key in found], style)
            cells = {_sent(amount): points.get((learner.name, steps, amount)) for amount in curves.AMOUNTS}
            row = {"model, optimizer": f"{learner.name} ({unit})", "steps": f"{steps:,}", "dense": dense}
            rows.append(row | {head: str(point or "") for head, point in cells.items()})
    return markdown([row for row in rows if any([*row.values()][3:])])


def _sent(amount: float) -> str:
    """The setting that sends so much."""
    return f"`saving={amount:g}`" if amount >= 1 else f"`ratio={amount:g}`"


def momentum() -> str:
    """How far behind dense training ``saving=50`` ends with adapted momentum, and without."""
    return _ways(50, {"adapted": "", "not adapted": " not adapted"})


def literal() -> str:
    """The same of ``ratio=0.001``, and of Deep Gradient Compression at that ratio."""
    return _ways(0.001, {"adapted": "", "not adapted": " not adapted", "preset `dgc`": None}, ("convnet",))


def _ways(amount: float, ways: Mapping[str, str | None], models: Sequence[str] = ()) -> str:
    """The gap to dense training by way to step, where something is not adapted; None is DGC."""
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    learners = {each.name: each for each in (*curves.LEARNERS, *curves.IMAGES)}
    points = curves.gaps([*learners.values()], curves.LENGTHS, [amount], 3, found)
    rows = []
    for learner in (each for each in learners.values() if each.optimizer in ("SGD", "AdamW")):
        unit, what, style = ("%", "held", ".3f") if learner.text else ("points", "accuracy", ".2f")
        for steps in curves.LENGTHS:
            names = {
                head: f"{learner.model}, {'DGC' if end is None else learner.optimizer + end}"
                for head, end in ways.items()
            }
            cells = {head: points.get((name, steps, amount)) for head, name in names.items()}
            if all(cells.values()) if not models else cells["adapted"] and learner.model in models:
                keys = (curves.run_key(learner, steps, 0.0, seed) for seed in range(3))
                dense = seeds([found[key][what] for key in keys if key in found], style)
                row = {"model, optimizer": f"{learner.name} ({unit})", "steps": f"{steps:,}", "dense": dense}
                rows.append(row | {head: str(point or "") for head, point in cells.items()})
    return filled_only(rows)


SHOWN: Sequence[tuple[str, str, int, float]] = (
    ("ResNet-20, SGD", "resnet20, SGD", 3000, 50),
    ("ResNet-20, AdamW", "resnet20, AdamW", 3000, 50),
    ("convnet, SGD", "convnet, SGD", 3000, 50),
    ("convnet, SGD", "convnet, SGD", 10_000, 50),
    ("convnet, SGD, `ratio=0.001`", "convnet, SGD", 10_000, 0.001),
    ("convnet, AdamW", "convnet, AdamW", 3000, 50),
    ("GPT (loss), SGD", "gpt, SGD", 3000, 50),
    ("GPT (loss), AdamW", "gpt, AdamW", 3000, 50),
    ("GPT (loss), AdamW, 3 times the learning rate", "gpt, AdamW, 3 lr", 3000, 50),
    ("GPT (loss), AdamW, a third of it", "gpt, AdamW, lr / 3", 3000, 50),
    ("character LSTM (loss), SGD", "char lstm, SGD", 3000, 50),
    ("character LSTM (loss), AdamW", "char lstm, AdamW", 3000, 50),
    ("Transformers' GPT-2 (loss), AdamW, 2 workers", "gpt2, AdamW", 300, 50),
)
"""The README's results: words, learner, steps, and what is sent."""


def results() -> str:
    """The README's results: final quality of dense training and of ours, of the same seeds."""
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    learners, rows = {each.name: each for each in (*curves.LEARNERS, *curves.IMAGES)}, []
    for words, name, steps, amount in SHOWN:
        learner = learners[name]
        held = {0.0: curves.baseline(learner), amount: learner}
        both = [[found.get(curves.run_key(held[sent], steps, sent, n)) for sent in held] for n in range(3)]
        pairs = [pair for pair in both if all(pair)]
        if not pairs:
            continue
        what, style, unit = ("held", ".3f", "") if learner.text else ("accuracy", ".2f", " %")
        dense, ours = ([run[what] for run in each] for each in zip(*pairs, strict=True))
        gap = 100 * (mean(ours) / mean(dense) - 1) if learner.text else mean(dense) - mean(ours)
        row = {"model": f"{words}, {steps:,} steps", "dense": seeds(dense, style, unit)}
        rows.append(row | {"compressed": seeds(ours, style, unit), "difference": behind(gap, " %" * learner.text)})
    return markdown(rows)


def draw_saving_curves() -> None:
    """Draws the gap to dense training over the saving, learner by learner."""
    result = Result("saving-curves", "", "")
    found = {run["key"]: run for run in runs("saving-curves.jsonl")}
    curves.enter(result, (*curves.LEARNERS, *curves.IMAGES), curves.LENGTHS, curves.AMOUNTS, 3, found)
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


TABLES: dict[str, Callable[[], str]] = {
    "bench-hosts": lambda: steps("hosts", also="of them exchange", words="CPU ms of a rank, by link"),
    "bench-train": lambda: steps("train-100mbit", "train-1gbit", also="hidden", words="hidden, by link"),
    "bench-select": compress_step,
    "bench-wire": positions,
    "bench-ranks": ranks,
    "fsdp": fsdp,
    "gpu-bytes": gpu_bytes,
    "race": race,
    "race-short": race_short,
    "race-peers": race_peers,
    "race-images": lambda: race("race-images.jsonl"),
    "learning": learning,
    "results": results,
    "momentum": momentum,
    "literal": literal,
    "saving-curves": saving_curves,
    "newer": newer,
    "wires": wires,
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
