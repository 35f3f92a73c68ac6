"""Command line: ``python -m lightning_topk`` ``plan``, ``reproduce NAME``, ``bench NAME`` or ``simulate``."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightning_topk.config import START, TopKConfig
from lightning_topk.lab import scale
from lightning_topk.lab.bench import BENCHES, bench
from lightning_topk.lab.papers import CLAIMS, EXPERIMENTS, report, reproduce
from lightning_topk.lab.report import markdown
from lightning_topk.planning.advice import Hardware, forecasts, parameter_sizes, sentence, table
from lightning_topk.planning.costs import Links, bytes_per_second, load_costs

TRAINED = ("convergence", *EXPERIMENTS)
"""Commands whose runs may be of other data, or shorter."""


def main() -> None:
    """Runs the command that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m lightning_topk", description="Top-k gradient exchange.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    claims = commands.add_parser("reproduce", help="the claims of the papers, reproduced or refuted")
    claims.add_argument(
        "names", nargs="*", choices=[*CLAIMS, *EXPERIMENTS, []], metavar="NAME", help=", ".join([*CLAIMS, *EXPERIMENTS])
    )
    claims.add_argument("--all", action="store_true", help="all of them")
    claims.add_argument(
        "--data", type=Path, help="images for convergence and recipes: train/<class>/*, test/<class>/*; takes hours"
    )
    claims.add_argument(
        "--steps",
        type=int,
        help="length of the runs of convergence (default: 200 on digits, 1000 on images) and recipes",
    )
    claims.add_argument("--models", nargs="+", help="of recipes: only these")
    claims.add_argument("--recipes", nargs="+", help="of recipes: only these, and dense")
    claims.add_argument("--seeds", type=int, help="of recipes: runs of each (default: 3)")
    claims.add_argument("--lr", type=float, help="of recipes: peak learning rate, instead of each task's own")
    claims.add_argument(
        "--workers", type=int, nargs="+", help="of recipes: numbers of workers, instead of each task's own"
    )
    claims.add_argument("--out", type=Path, default=Path("reproduced"), help="folder for files (default: %(default)s)")
    _add_bench(commands)
    _add_simulate(commands)
    arguments = parser.parse_args()
    if arguments.command == "bench":
        run_bench(arguments)
        return
    if arguments.command == "simulate":
        run_simulate(arguments)
        return
    if arguments.command == "reproduce":
        names = CLAIMS if arguments.all else arguments.names
        if not names:
            claims.error(f"name a claim ({', '.join(CLAIMS)}) or pass --all")
        experiments = ("models", "recipes", "seeds", "lr", "workers")
        takers = {"data": TRAINED, "steps": TRAINED, **dict.fromkeys(experiments, EXPERIMENTS)}
        options = {key: getattr(arguments, key) for key in takers if getattr(arguments, key) is not None}
        for key in options:
            if not set(takers[key]) & set(names):
                claims.error(f"--{key}: for {' and '.join(takers[key])} only")
        for name in names:
            try:
                reproduce(name, arguments.out, **{key: value for key, value in options.items() if name in takers[key]})
            except ValueError as error:
                raise SystemExit(f"reproduce {name}: {error}") from error
        report(arguments.out)
        print(f"report: {arguments.out / 'report.md'}")
        return
    print_plan(arguments)


def _add_plan(commands: Any) -> None:
    """Declares ``plan``."""
    plan = commands.add_parser("plan", help="bytes, times and memory of every topology, before the run")
    plan.add_argument("--model", help="of torchvision, such as resnet50")
    plan.add_argument("--module", help="a class such as mine.models.Net, called without arguments")
    plan.add_argument("--params", type=_count, help="parameters of the model, such as 25e6")
    plan.add_argument("--nodes", "--workers", type=int, required=True, help="how many")
    plan.add_argument("--gpus-per-node", type=int, default=1, help="ranks on each (default: %(default)s)")
    plan.add_argument("--inter", default="10gbit", help="speed of a node's network (default: %(default)s)")
    plan.add_argument(
        "--intra", default="300gbyte", help="speed of a rank's link inside its node (default: %(default)s)"
    )
    plan.add_argument("--ratio", type=float, nargs="+", default=[0.001, 0.01], help="fractions that workers send")
    plan.add_argument("--server-ratio", type=float, help="fraction that servers send (default: the same)")
    plan.add_argument("--wire", help="format of values (default: bf16; with --steps the recipe's)")
    plan.add_argument(
        "--steps", type=int, help="planned: means over a run by the default recipe, which begins with more"
    )
    plan.add_argument("--compute-ms", type=float, default=0, help="time of forward, backward and optimizer")
    plan.add_argument("--bucket-cap-mb", type=float, default=25, help="DDP's buckets, MiB (default: %(default)s)")
    plan.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="where gradients live")
    plan.add_argument("--costs", type=Path, help="file of constants, instead of the one that bench costs wrote")


def _add_bench(commands: Any) -> None:
    """Declares ``bench`` and what each bench takes."""
    benches = commands.add_parser("bench", help="speed, against memory, links and what you would use instead")
    names = benches.add_subparsers(dest="name", required=True)
    for name in BENCHES:
        one = names.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.add_argument("--json", type=Path, help="file to write the result to")
        one.add_argument("--plot", type=Path, help="picture to draw")
        if name in ("select", "wire"):
            one.add_argument("--numel", type=_count, default=25_000_000, help="elements of the gradient")
            one.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where")
            one.add_argument("--ratios", type=float, nargs="+", default=[0.001, 0.01], help="kept fractions")
            one.add_argument("--threads", type=int, default=1, help="of the CPU")
            continue
        if name == "costs":
            one.add_argument("--workers", type=int, default=4, help="processes at a time: the ranks of a node")
            one.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where gradients live")
            one.add_argument("--out", type=Path, help="file of constants, instead of the one that plan reads")
            continue
        if name == "model":
            one.add_argument("--hosts", type=int, default=2, help="how many")
            one.add_argument("--ranks", type=int, default=2, help="on each host")
            one.add_argument("--rates", "--rate", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="of links")
            one.add_argument("--costs", type=Path, help="file of constants, instead of the one that bench costs wrote")
            continue
        one.add_argument("--ratio", type=float, default=0.001, help="kept fraction")
        cap = 25 if name == "train" else 128
        one.add_argument("--bucket-cap-mb", type=float, default=cap, help="DDP's buckets, MiB")
        if name == "train":
            one.add_argument("--model", default="resnet18", help="of torchvision")
            one.add_argument("--batch-size", type=int, default=4, help="images a worker and step")
            one.add_argument("--image-size", type=int, default=64, help="pixels")
            one.add_argument("--steps", type=int, default=12, help="of which the first four are not counted")
        else:
            one.add_argument("--numel", type=_count, default=25_000_000, help="parameters")
            one.add_argument("--seconds", type=float, default=10, help="time for each peer, about")
            one.add_argument("--peers", nargs="+", default=argparse.SUPPRESS, help="default: all")
        if name == "hosts":
            one.add_argument("--hosts", type=int, default=4, help="how many")
            one.add_argument("--ranks", type=int, default=1, help="on each host")
            one.add_argument("--rates", "--rate", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="of links")
        else:
            one.add_argument("--workers", type=int, default=2, help="processes")
        if name == "train":
            one.add_argument("--rate", help="of the links of emulated hosts, such as 1gbit; else they share this host")


def _add_simulate(commands: Any) -> None:
    """Declares ``simulate``."""
    one = commands.add_parser(
        "simulate", help="many workers in one process", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    one.add_argument("--workers", type=int, default=64, help="simulated workers")
    one.add_argument("--gpus-per-node", type=int, default=1, help="workers on each node")
    one.add_argument("--ratio", type=float, default=0.001, help="fraction that workers send")
    one.add_argument("--topology", default="sharded", choices=["sharded", "hierarchical", "single_server", "allgather"])
    one.add_argument("--model", default="wide mlp", choices=["mlp", "wide mlp", "cnn", "lstm"], help="learns digits")
    one.add_argument("--steps", type=int, default=60, help="of training")
    one.add_argument("--lr", type=float, default=0.3, help="learning rate of SGD")
    one.add_argument("--batch-size", type=int, default=10, help="examples a worker and step")
    one.add_argument(
        "--time-params", type=_count, default=25_000_000, help="parameters of the model in the plot of times"
    )
    one.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="whose constants predict times")
    one.add_argument("--out", type=Path, default=Path("simulated"), help="folder for files")


def run_simulate(arguments: argparse.Namespace) -> None:
    """Simulates and prints; ends with a sentence if it cannot."""
    options = {key: value for key, value in vars(arguments).items() if key not in ("command", "out")}
    begin = time.perf_counter()
    try:
        result = scale.run(**options)
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"simulate: {error}") from error
    result.seconds, result.command = time.perf_counter() - begin, " ".join(["simulate", *sys.argv[2:]])
    result.write(arguments.out)
    print(f"{result.text()}\n\nfiles: {arguments.out / 'simulate.json'}, {arguments.out / 'simulate.png'}")


def _count(text: str) -> int:
    """A number of elements, which may be written 25e6."""
    return int(float(text))


def run_bench(arguments: argparse.Namespace) -> None:
    """Runs the bench that was asked for; ends with a sentence if it cannot."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that emulated hosts are removed
    options = {key: value for key, value in vars(arguments).items() if key not in ("command", "name", "json", "plot")}
    try:
        bench(arguments.name, arguments.json, arguments.plot, **options)
    except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"bench {arguments.name}: {error}") from error


def _densities(steps: int | None) -> str:
    """What the ratios of a plan mean."""
    if steps is None:
        return "Ratios are taken literally; --steps N plans a run by the default recipe, which begins with a higher density."
    return (
        f"Means over a run of {steps:,} steps by the default recipe, which descends to the ratios if they are below {START}; speeds below "
        "which it pays are those of its middle."
    )


def print_plan(arguments: argparse.Namespace) -> None:
    """Prints what every topology will cost, and which to use; ends with a sentence if it cannot."""
    try:
        sizes = parameter_sizes(arguments.model, arguments.module, arguments.params)
        if arguments.nodes < 1 or arguments.gpus_per_node < 1 or arguments.nodes * arguments.gpus_per_node < 2:
            raise ValueError("--nodes x --gpus-per-node must be at least 2: one rank exchanges nothing.")
        links = Links(bytes_per_second(arguments.inter), bytes_per_second(arguments.intra))
        costs = load_costs(arguments.device, arguments.costs)
        hardware = Hardware(arguments.nodes, arguments.gpus_per_node, links, costs)
        base = TopKConfig(server_ratio=arguments.server_ratio, wire=arguments.wire)
        compute = arguments.compute_ms / 1000
        found = forecasts(sizes, hardware, arguments.ratio, compute, base, arguments.bucket_cap_mb, arguments.steps)
    except ValueError as error:
        raise SystemExit(f"plan: {error}") from error
    print(
        f"{sum(sizes):,} parameters, float32; {arguments.nodes} nodes of {arguments.gpus_per_node} ranks, {arguments.inter} between, "
        f"{arguments.intra} inside.\nTimes are predictions; constants: {costs.source}.\n{_densities(arguments.steps)}\n"
    )
    print(f"{markdown(table(found, compute))}\n\n{sentence(found, compute)}")


if __name__ == "__main__":
    main()
