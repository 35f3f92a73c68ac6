"""The command line: ``python examples/lab`` ``bench NAME`` or ``reproduce NAME``.

A command calls a function of the lab with the given options. It imports the function only then, since torch takes
seconds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.papers import CLAIMS
from lightning_topk.__main__ import count
from lightning_topk._version import __version__

if TYPE_CHECKING:
    from lab.report import Result


OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"help": "torchvision model, such as resnet50"},
    "saving": {"type": float, "help": "how many times fewer bytes than all-reduce to send (default: 50)"},
    "ratio": {"type": float, "help": "fraction of the entries to send, instead of --saving"},
    "device": {"choices": ("cpu", "cuda"), "help": "device to compute on (default: cpu)"},
    "numel": {"type": count, "help": "elements of the gradient (default: 25e6)"},
    "ratios": {"type": float, "nargs": "+", "help": "fractions of the entries to send (default: 0.001 0.01)"},
    "hosts": {"type": count, "help": "emulated hosts (default: 4; race: 2)"},
    "ranks": {"type": count, "help": "processes per host (default: 1)"},
    "rates": {
        "nargs": "+",
        "help": "link speeds, such as 100mbit, or 1gbit/20ms with a round trip (default: three; race: two); "
        "reproduce: learning rates",
    },
    "rate": {"help": "link speed of emulated hosts, such as 1gbit/20ms (default: the workers share this host)"},
    "buckets": {"type": count, "help": "buckets, of a tiny layer each (default: 20)"},
    "seconds": {"type": float, "help": "time per peer; slow peers take longer (default: 10)"},
    "peers": {"nargs": "+", "help": "peers to time (default: all that apply)"},
    "workers": {
        "type": count,
        "help": "processes, simulated workers or emulated hosts (default: varies)",
    },
    "batch": {"type": count, "help": "examples per worker and step (default: the model's own; lag: 32)"},
    "batch_size": {"type": count, "help": "images per worker and step (default: 4)"},
    "image_size": {"type": count, "help": "height and width of an image, pixels (default: 64)"},
    "racers": {"nargs": "+", "help": "racers that take part (default: all)"},
    "budget": {"type": float, "help": "seconds of training after which a run stops (default: 300)"},
    "data": {"type": Path, "help": "folder of images to learn, train/<class>/* and test/<class>/*; takes long"},
    "models": {"nargs": "+", "help": "only these models"},
    "systems": {"nargs": "+", "help": 'only these systems, such as dense "saving 50" PowerSGD'},
    "optimizers": {"nargs": "+", "help": 'only these, such as SGD, AdamW, "SGD not adapted" (adapt_momentum=False)'},
    "savings": {"type": float, "nargs": "+", "help": "savings; a number below 1 is a ratio (default: varies)"},
    "lengths": {"type": count, "nargs": "+", "help": "steps of a run (default: varies)"},
    "steps": {"type": count, "help": "steps of a run; of bench train, timed steps (default: varies)"},
    "seeds": {"type": count, "help": "seeds of each run (default: varies)"},
    "minutes": {"type": float, "help": "time after which no run starts; the result covers finished runs"},
    "json": {"type": Path, "metavar": "FILE", "help": "file to write the result to"},
    "plot": {"type": Path, "metavar": "FILE", "help": "image file to draw"},
    "out": {"type": Path, "help": "output folder (default: reproduced); for a race, the file of its runs"},
    "all": {"action": "store_true", "help": "all claims of the papers, one after the other"},
    "strict": {"action": "store_true", "help": "exit with status 1 on any FAIL"},
}
"""Arguments of argparse for each option. The function's default applies to an option that is not given."""


COMMANDS = {
    "bench select": ("bench.select:run", "the compress step in passes over memory; peak memory", "numel device ratios"),
    "bench wire": ("bench.wire:run", "bits and bytes of payloads against the entropy of positions", "numel ratios"),
    "bench hosts": (
        "bench.steps:hosts",
        "an exchange alone on emulated hosts, with bytes counted at their interfaces",
        "hosts ranks rates numel ratio saving seconds peers",
    ),
    "bench train": (
        "bench.steps:train",
        "whole training steps of a torchvision model, on this host or on emulated hosts",
        "model workers rate ratio saving batch_size image_size steps peers",
    ),
    "bench overhead": (
        "bench.overhead:run",
        "the host's time for tiny layers in many buckets, beside DDP's",
        "workers buckets steps device",
    ),
    "bench own-work": (
        "bench.own_work:run",
        "what an exchange itself adds to a whole step, on one GPU",
        "models steps workers device",
    ),
    "bench race": (
        "bench.race:run",
        "whole trainings on emulated hosts, up to the final loss of dense training; resumable",
        "hosts rates racers seeds budget out",
    ),
    "reproduce counterexample": ("papers.counterexample:run", "where compressing the downlink too helps", ""),
    "reproduce saving": ("papers.saving:run", "the union of the workers' selections as their number grows", ""),
    "reproduce bound": ("papers.vectors:bound", "how much top-k loses, against two bounds", ""),
    "reproduce distribution": ("papers.vectors:distribution", "the shape of gradients, alone and with residuals", ""),
    "reproduce operators": ("papers.operators:run", "the time of the selectors, and how much they keep", ""),
    "reproduce convergence": ("papers.tuning:convergence", "every system, with tuned learning rates", ""),
    "reproduce tuning": ("papers.tuning:tuning", "one-way against two-way, at equal k and at equal bytes", ""),
    "reproduce speedup": ("papers.speedup:run", "the time of an exchange on links of three speeds", ""),
    "reproduce saving-curves": (
        "papers.saving_curves:run",
        "final quality over saving, by length, model and optimizer; resumable",
        "data models optimizers savings lengths seeds minutes",
    ),
    "reproduce at-size": (
        "papers.at_size:run",
        "final quality over the learning rate, up to 85 million parameters; hours per run; resumable",
        "data models systems rates optimizers workers batch steps seeds minutes device",
    ),
    "reproduce lag": (
        "papers.lag:run",
        "how many steps compression costs, by what is sent and length; hours per run; resumable",
        "data models savings lengths rates batch seeds minutes device",
    ),
    "reproduce fine-tuning": (
        "papers.fine_tuning:run",
        "what compression costs where a trained model goes on with other data; resumable",
        "data models lengths seeds minutes",
    ),
    "reproduce first-script": (
        "papers.first_script:run",
        "a GPT with everyone's settings between real ranks, with DDP and with saving=50",
        "workers steps seeds",
    ),
    "reproduce scripts": (
        "papers.scripts:run",
        "published optimizers and schedules between real ranks, with DDP and with saving=50; resumable",
        "data models systems seeds minutes",
    ),
    "reproduce decay": (
        "papers.decay:run",
        "whether SGD's weight decay arrives with compression",
        "data steps seeds",
    ),
    "reproduce agreement": (
        "papers.agreement:run",
        "how far an optimizer moves an entry whose gradients agree, by signal over noise",
        "steps",
    ),
    "reproduce deliveries": (
        "papers.deliveries:run",
        "what delivered gradients do beside dense training's: Adam's second moment by wait; movement and age by layer",
        "optimizers rates steps",
    ),
}
"""The function, the help and the options of each command."""


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands."""
    about = "Measures top-k gradient exchange, and reproduces the papers' claims."
    parser = argparse.ArgumentParser(prog="python examples/lab", description=about)
    parser.add_argument("--version", action="version", version=f"lightning_topk {__version__}")
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "speed, against memory, links and the alternatives"
    bench = kinds.add_parser("bench", help=about, description=f"Measures {about}.")
    about = "the claims of the papers, reproduced or refuted"
    claims = kinds.add_parser("reproduce", help=about, description=f"Measures {about}, and writes a report.")
    claims.set_defaults(command="reproduce")
    add_options(claims, "all out strict")
    groups = {"bench": bench.add_subparsers(required=True, metavar="NAME")}
    groups["reproduce"] = claims.add_subparsers(metavar="NAME")
    more = {"bench": " json plot strict", "reproduce": " out strict"}
    for name, (_, about, options) in COMMANDS.items():
        group, _, last = name.partition(" ")
        one = groups[group].add_parser(last, help=about, description=f"Measures {about}.")
        add_options(one, options + more[group])
        one.set_defaults(command=name)
    return parser


def add_options(parser: argparse.ArgumentParser, names: str) -> None:
    """Adds some of the :data:`OPTIONS`. An option that is not given stays unset."""
    for name in names.split():
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **OPTIONS[name])


def main() -> None:
    """Runs the requested command; exits with a message if it fails, and with 1 if a statement does and ``--strict``."""
    parser = make_parser()
    given = vars(parser.parse_args())
    command, strict = given.pop("command"), given.pop("strict", False)
    group, _, name = command.partition(" ")
    try:
        results = _bench(name, given) if group == "bench" else _reproduce(name, given)
    except (ImportError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise SystemExit(f"{parser.prog} {command}: {error}") from error
    if strict and any(not check.holds for result in results for check in result.checks):
        raise SystemExit(1)


def _bench(name: str, given: dict[str, Any]) -> list[Result]:
    """Runs one bench, and writes its result."""
    from lab.report import draw

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that emulated hosts are removed
    json, plot = given.pop("json", None), given.pop("plot", None)
    if plot is not None:
        need("matplotlib")
        if plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"{plot} must end in .png, .svg, .pdf.")
    if given.get("workers", 2) < 2:
        raise ValueError("--workers 1 exchanges nothing: use 2 or more.")
    for path in filter(None, (json, plot)):
        path.touch()  # fail now rather than after the work
    result = finish(function_of(f"bench {name}"), given)
    if json is not None:
        json.write_text(result.json())
    if plot is not None:
        draw(result.panels, plot)
    return [result]


def _reproduce(name: str, given: dict[str, Any]) -> list[Result]:
    """Runs one claim or all, and writes their results and the report."""
    from lab.report import write_report

    whole, out = given.pop("all", False), given.pop("out", Path("reproduced"))
    if not whole and not name:
        raise ValueError(f"name a claim ({', '.join(CLAIMS)}) or pass --all.")
    need("matplotlib")  # the pictures
    need("sklearn", "scikit-learn")  # the digits
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for each in CLAIMS if whole else [name]:
        function = function_of(f"reproduce {each}")
        resumable = "out" in inspect.signature(function).parameters
        results.append(finish(function, {**given, "out": out} if resumable else given))
        results[-1].write(out)
        if each in CLAIMS:
            write_report(out)  # now, since a later claim may fail
    if whole or name in CLAIMS:
        print(f"report: {out / 'report.md'}")
    return results


def finish(function: Callable[..., Result], given: Mapping[str, Any]) -> Result:
    """Calls a function on one thread, and prints its result, with its time and this command."""
    import torch

    if given.get("device") == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here.")
    torch.set_num_threads(1)  # tensors are small, and every reader has one core
    begin = time.perf_counter()
    result = function(**given)
    result.seconds = time.perf_counter() - begin
    result.command = f"python examples/lab {shlex.join(sys.argv[1:])}"
    print(f"{result.text()}\n", flush=True)
    return result


def function_of(name: str) -> Callable[..., Any]:
    """Imports the function of a command."""
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"lab.{module}"), function)


def need(module: str, package: str | None = None) -> None:
    """Raises before any work is done if an optional package is missing; ``package`` is its name for pip."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"this needs {module}, which is not installed: pip install {package or module}.")


def check_names(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses names after an option that are not known."""
    from lightning_topk.config import check_name

    for name in names:
        check_name(option, name, known)
