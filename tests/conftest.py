"""Kinds of tests, the order in which they run, and the gloo groups that they share.

Every test has one kind, by which ``pytest -m`` selects it: the processes that it starts (CONTRIBUTING.md). A test's own
mark takes precedence, then its file's entry below, then the fixture ``groups``.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import multiprocessing
import sys
from pathlib import Path

import pytest

gc.disable()  # until the tests are collected: imports leave nothing to free

KINDS = ("process", "trainer", "gloo", "unit")
"""Kinds in the order in which they run: many short tests at the end keep both xdist workers busy until then."""
FILES = {
    "test_bench.py": "process",
    "test_examples.py": "trainer",
    "test_features.py": "trainer",
    "test_gpu.py": "process",
    "test_lightning.py": "trainer",
    "test_model_parallel.py": "trainer",
    "test_reproduce.py": "process",
}

# Spawned processes spend seconds on imports. A fork server imports once; it is as clean as a spawned process. It finds
# this folder's modules through the environment only (and skips modules that it does not find).
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
PRELOADED = (
    "lightning_topk.adapters.lightning.strategy lightning_topk.adapters.lightning.callback ranks trainers "
    "test_attach test_gloo test_lightning test_precision test_checkpoint test_features test_fsdp test_model_parallel "
    "test_watch warm"
)
multiprocessing.set_forkserver_preload(PRELOADED.split())


def kind_of(item: pytest.Item) -> str:
    """One of ``KINDS``."""
    for mark in item.iter_markers():
        if mark.name in KINDS:
            return mark.name
    return FILES.get(item.path.name, "gloo" if "groups" in item.fixturenames else "unit")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker(kind_of(item))
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, KINDS.index(kind_of(item))))


def pytest_collection_finish() -> None:
    gc.freeze()  # collections need not look at all that was imported
    gc.enable()


@pytest.fixture(autouse=True)
def _tests_draw_the_same_numbers_every_time():
    """Seeds the samples of the CPU's loops too."""
    import torch

    torch.manual_seed(0)
    module = sys.modules.get("lightning_topk.core.ops.cpu")
    if module is not None:
        module.salts.seed(0)


@pytest.fixture(scope="session")
def groups():
    """Groups by size, device and backend, started on first use, since starting one is most of its cost."""
    from groups import Group  # here, since xdist's controller needs no torch

    started: dict[tuple[int, str, str | None], Group] = {}

    def group(world: int, device: str = "cpu", backend: str | None = None) -> Group:
        key = world, device, backend
        if key not in started or not started[key].alive:
            started[key] = Group(*key)
        return started[key]

    yield group
    for each in started.values():
        each.close()
