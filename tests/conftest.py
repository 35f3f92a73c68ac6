"""Spawned gloo groups, shared by all tests of one world size, since starting one is most of its cost."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing

import pytest
from groups import Group

# Spawned processes spend seconds on imports. A fork server imports once; it is as clean as a spawned process.
multiprocessing.set_forkserver_preload(
    [
        "lightning_topk.lightning.strategy",
        "lightning_topk.lightning.callback",
        "test_lightning",
        "test_gloo",
        "test_precision",
        "test_checkpoint",
        "test_features",
    ]
)


@pytest.fixture(scope="session")
def groups():
    """Groups by world size, started when first asked for."""
    started: dict[int, Group] = {}

    def group(world: int) -> Group:
        if world not in started:
            started[world] = Group(world)
        return started[world]

    yield group
    for each in started.values():
        each.stop()
