"""CONTRIBUTING's three ways name the files that run: of a step, of a save and load, and of the plan of a bucket."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from groups import on_ranks
from ranks import attached, batch, shared
from torch import nn

import lightning_topk
from lightning_topk.bucket import plan_step
from lightning_topk.config import TopKConfig
from lightning_topk.core.ops import fast

PACKAGE = Path(lightning_topk.__file__).parent
FILES = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
ELSEWHERE = re.compile(r"adapters/(fsdp|lightning)/|core/ops/(cuda|kernels)\.py")
"""Files that do not run on CPUs with DDP, which a list may name."""


def named(head: str) -> set[str]:
    """The package's files that the section below a heading of CONTRIBUTING names."""
    section = re.split(r"^## ", (PACKAGE.parent / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    (text,) = (each for each in section if each.startswith(f"{head}\n"))
    found = set()
    for name in re.findall(r"`([\w/]+\.py)`", text):
        (file,) = [name] if name in FILES else [each for each in FILES if each.endswith(f"/{name}")]
        found.add(file)
    return found


@contextmanager
def traced() -> Iterator[set[str]]:
    """Collects the package's files of which a function runs meanwhile, in this thread or in one that starts."""
    found = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.skipif(fast(torch.device("cpu")) is None, reason="the list names the files of numba's version")
@on_ranks(2)
def test_the_ways_of_a_gradient_and_of_a_residual_name_the_files_that_run(rank, world):
    net = nn.Sequential(*[nn.Linear(300, 300) for _ in range(3)])
    optimizer = torch.optim.AdamW(net.parameters())
    model, state = attached(net, {"bucket_cap_mb": 0.5}, saving=50, optimizer=optimizer)
    with traced() as step:
        for number in range(4):
            step.clear()  # the files of the last one remain
            optimizer.zero_grad()
            model(batch(rank, number, 300)).square().mean().backward()
            optimizer.step()
    with traced() as moved:
        state.load_state_dict(shared(state.state_dict()))
    assert len(state.last_buckets) == 2
    check("The path of a gradient", step)
    check("The way of a residual", moved, step)


def test_the_way_of_a_setting_names_the_files_that_run():
    with traced() as found:
        plan_step(TopKConfig(saving=50).resolve(4, 1), [([90_000, 10_300], 4, (), 0)], 4)[0].codecs(0)
    check("The way of a setting", found)


def check(head: str, ran: set[str], before: set[str] = frozenset()) -> None:
    """Fails unless a list names all files that ran, and no others, but for those that ran ``before``."""
    files = {file for file in named(head) if not ELSEWHERE.match(file)}
    wrong = sorted(ran - files), sorted(files - ran - before)
    assert wrong == ([], []), f"{head}: files that run and are not named, files that are named and do not run: {wrong}"
