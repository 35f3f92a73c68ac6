"""A function as a command: its signature gives the options, its docstring their help.

``def run(numel: int = 1000, ratios: Sequence[float] = (0.001,))`` takes ``--numel 1e3 --ratios 0.001 0.01``. Parameters
without a default are required. Keyword-only parameters are no options.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
import re
import shlex
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from lightning_topk.lab.report import Result


def add_command(commands: Any, name: str, function: Callable[..., Any]) -> argparse.ArgumentParser:
    """Declares a command that calls a function, see :func:`add_options`; its help is the docstring's first line.

    Args:
        commands: What ``ArgumentParser.add_subparsers`` returned.
        name: The command's name.
        function: The function.
    """
    about = _plain(inspect.getdoc(function) or "").partition("\n")[0]
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    add_options(parser, function)
    return parser


def add_options(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Declares an option for each parameter of a function, which :func:`call` then calls."""
    parser.set_defaults(function=function, prog=parser.prog)
    kinds, helps = get_type_hints(function), _helps(function)
    for parameter in _parameters(function):
        default, words = parameter.default, helps.get(parameter.name, "")
        if default not in (None, (), parameter.empty):
            words += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        given = {"required": True} if default is parameter.empty else {"default": default}
        flag = f"--{parameter.name.replace('_', '-')}"
        parser.add_argument(flag, help=words.replace("%", "%%"), **given, **_reader(kinds[parameter.name]))


def call(arguments: argparse.Namespace, **others: Any) -> Any:
    """Calls the command's function with its options.

    Args:
        arguments: What was parsed.
        **others: Keyword-only arguments; those that the function does not have are left out.
    """
    names = {parameter.name for parameter in _parameters(arguments.function)}
    known = inspect.signature(arguments.function).parameters
    options = {name: value for name, value in vars(arguments).items() if name in names}
    return arguments.function(**options, **{name: value for name, value in others.items() if name in known})


def finish(arguments: argparse.Namespace, command: str = "", **others: Any) -> Result:
    """Calls the command's function on one thread, and prints its result, with the time and the command that it took.

    Args:
        arguments: What was parsed.
        command: The command. Default: what this process was given, after ``python -m lightning_topk``.
        **others: See :func:`call`.
    """
    torch.set_num_threads(1)  # many small tensors; and one core is what every reader has
    begin = time.perf_counter()
    result: Result = call(arguments, **others)
    result.seconds = time.perf_counter() - begin
    result.command = command or f"python -m lightning_topk {shlex.join(sys.argv[1:])}"
    print(f"{result.text()}\n", flush=True)
    return result


def add_strict(parser: argparse.ArgumentParser) -> None:
    """Declares ``--strict``, which :func:`judge` obeys."""
    words = "exit with status 1 if anything is a FAIL"
    parser.add_argument("--strict", action="store_true", default=argparse.SUPPRESS, help=words)


def judge(arguments: argparse.Namespace, results: Sequence[Result]) -> None:
    """Ends with status 1 if ``--strict`` was given and a statement does not hold."""
    if getattr(arguments, "strict", False) and any(not check.holds for each in results for check in each.checks):
        raise SystemExit(1)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that are options."""
    return [each for each in inspect.signature(function).parameters.values() if each.kind is not each.KEYWORD_ONLY]


def _reader(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of a type: ``T``, ``T | None``, a Literal, or a Sequence of those."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) in (tuple, Sequence):
        return {"nargs": "+", **_reader(get_args(kind)[0])}
    return {"type": {int: count, float: number}.get(kind, kind), "metavar": kind.__name__.upper()}


def count(text: str) -> int:
    """A count of 1 or more, which may be written 25e6 or 25M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmgb]?)", text.lower())
    value = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}[found[2]] if found else 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no count of 1 or more; write it like 300, 25e6 or 25M")
    return int(value)


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def need(module: str, package: str | None = None) -> None:
    """Says that an optional package is missing, before any work is done.

    Args:
        module: What is imported.
        package: What pip calls it. Default: the same.

    Raises:
        ValueError: It is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"this needs {module}, which is not installed: pip install {package or module}.")


def check_folder(path: Path) -> None:
    """Makes a folder for results, before any work is done.

    Raises:
        ValueError: That is not possible.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be a folder for results: {error.strerror}.") from error


def check_file(path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Refuses a file that could not be written, before any work is done.

    Args:
        path: The file; None if none is wanted.
        suffixes: Those that it may have. Default: any.

    Raises:
        ValueError: Its folder does not exist, or its suffix is another.
    """
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}.")
    if path is not None and suffixes and path.suffix not in suffixes:
        raise ValueError(f"{path} must end in {', '.join(suffixes)}.")


def _helps(function: Callable[..., Any]) -> dict[str, str]:
    """The description of each parameter in a Google-style docstring."""
    _, _, section = (inspect.getdoc(function) or "").partition("Args:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {name: re.sub(r"\.$", "", _plain(re.sub(r"\s+", " ", words))) for name, words in found}


def _plain(text: str) -> str:
    """Text without reStructuredText's marks."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "")
