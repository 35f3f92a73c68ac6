"""Command line: ``python -m lightning_topk plan``. The benches are in ``examples/lab`` of the repository."""

from __future__ import annotations

import argparse
import re

from lightning_topk._version import __version__


def count(text: str) -> int:
    """Parses a count of at least 1, such as 300, 25e6 or 25M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmgb]?)", text.lower())
    value = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}[found[2]] if found else 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of at least 1; write it like 300, 25e6 or 25M")
    return int(value)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser. An option that is not given stays unset."""
    elsewhere = "Benches, and reproductions of the papers' claims, are in examples/lab of the repository."
    parser = argparse.ArgumentParser(
        prog="python -m lightning_topk", description="Plans top-k gradient exchange.", epilog=elsewhere
    )
    parser.add_argument("--version", action="version", version=f"lightning_topk {__version__}")
    about = "the bytes and the approximate time of a step with each topology"
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    plan = commands.add_parser("plan", help=about, description=f"Measures {about}.", argument_default=argparse.SUPPRESS)
    add = plan.add_argument
    add("--nodes", type=count, required=True, help="number of nodes")
    add("--gpus-per-node", type=count, help="ranks on each node (default: 1)")
    add("--model", help="torchvision model, such as resnet50")
    add("--module", help="class such as mine.models.Net, called without arguments")
    add("--params", type=count, help="number of parameters, such as 25e6")
    add("--inter", help="speed of the links between nodes (default: 1gbit)")
    add("--saving", type=float, help="how many times fewer bytes than all-reduce to send (default: 50)")
    add("--ratio", type=float, help="fraction of the entries to send, instead of --saving")
    add("--device", choices=("cpu", "cuda"), help="device to compute on (default: cpu)")
    return parser


def main() -> None:
    """Runs the requested command; exits with an error message if it fails."""
    parser = make_parser()
    given = vars(parser.parse_args())
    command = given.pop("command")
    try:
        from lightning_topk.plan import run  # imports torch, which takes seconds

        print(run(**given))
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"{parser.prog} {command}: {error}") from error


if __name__ == "__main__":
    main()
