"""Command line: ``python -m lightning_topk`` ``plan``, ``bench`` or ``env``. More benches are in ``examples/lab``."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from lightning_topk._version import __version__


def count(text: str) -> int:
    """Parses a count of 1 to 2**53, such as 300, 25e6 or 25M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmgb]?)", text.lower())
    value = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}[found[2]] if found else 0.0
    if not 1 <= value <= 2**53 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count from 1 to 2**53; write it like 300, 25e6 or 25M")
    return int(value)


def shape(text: str) -> tuple[int, ...]:
    """Parses the shape of an example, such as 3,224,224."""
    try:
        return tuple(map(count, text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write it like 3,224,224") from error


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser. An option that is left out stays unset."""
    elsewhere = "More benches, and reproductions of the papers' claims, are in examples/lab of the repository."
    parser = argparse.ArgumentParser(
        prog="python -m lightning_topk", description="Plans and times top-k gradient exchange.", epilog=elsewhere
    )
    parser.add_argument("--version", action="version", version=f"lightning_topk {__version__}")
    both = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    add = both.add_mutually_exclusive_group(required=True).add_argument
    add("--model", help="model of torchvision, such as resnet50; or gpt2, gpt2-medium, gpt2-large, gpt2-xl")
    add("--module", help="model class, such as mine.models.Net; called without arguments")
    add("--params", type=count, help="number of parameters, such as 25e6; bench then times exchanges alone")
    both.add_argument("--saving", type=float, help="how many times fewer bytes than all-reduce to send (default: 50)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(name: str, about: str, *parents: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
        made = commands.add_parser(
            name, help=about, description=about, parents=parents, argument_default=argparse.SUPPRESS
        )
        return made.add_argument

    add = command("plan", "Predicts the exact bytes of a step with each topology.", both)
    add("--nodes", type=count, required=True, help="number of nodes")
    add("--gpus-per-node", type=count, help="ranks on each node (default: 1)")
    add("--inter", help="speed of the links between nodes (default: 1gbit)")
    add("--ratio", type=float, help="fraction of the entries to send, instead of --saving")
    about = "Times steps with DDP, its hooks and top-k on your machines. Start it with torchrun, like your training."
    add = command("bench", about, both)
    add("--input", type=shape, help="shape of an example (default: 3,224,224; for a GPT: 1024)")
    add("--batch-size", type=count, help="examples per rank and step (default: 32; for a GPT: 4)")
    add("--precision", choices=("32", "bf16"), help="bf16 uses autocast (default: 32)")
    add("--steps", type=count, help="approximate number of timed steps per exchange (default: 50)")
    add("--only", nargs="+", metavar="NAME", help='exchanges to time, such as DDP "16-bit hook" PowerSGD saving=50')
    add("--ranks", type=count, help="ranks to start on this machine, without torchrun (default: 2)")
    add("--json", type=Path, metavar="FILE", help="file to write all times to")
    command("env", "Versions, devices and launch settings, to paste into a bug report.")
    return parser


def main() -> None:
    """Runs the requested command; exits with an error message if it fails."""
    parser = make_parser()
    options = vars(parser.parse_args())
    command = options.pop("command")
    module = {"plan": "lightning_topk.plan", "bench": "lightning_topk.bench.command", "env": "lightning_topk.env"}
    try:
        if said := import_module(module[command]).run(**options):  # imported only now: torch takes seconds
            print(said)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and re.fullmatch(r"[1-9]\d*", os.environ.get("LOCAL_RANK", "")):
            raise SystemExit(2) from error  # the node's first rank prints it
        raise SystemExit(f"{parser.prog} {command}: {error}") from error


if __name__ == "__main__":
    main()
