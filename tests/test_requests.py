"""What a topology asks for by arithmetic is what its generator asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from lightning_topk import build
from lightning_topk.config import TopKConfig
from lightning_topk.core.exchange import TOPOLOGIES, Exchange, exchange
from lightning_topk.core.requests import Begin, Begun, Request
from lightning_topk.core.select import SELECTORS
from lightning_topk.core.wire import WIRES
from lightning_topk.simulate import Cluster

SIZES = (700, 3, 1200)
WORLDS = [(1, 1), (3, 1), (4, 2)]
"""Ranks, and ranks of a node."""


def in_words(request: Request) -> tuple[str, str, str, int]:
    """What decides the bytes and the cost of a request."""
    return type(request).__name__, request.direction, request.among, request.payload.nbytes


def cases(topology: str) -> Iterator[tuple[TopKConfig, tuple[int, int], torch.dtype, tuple[int, ...], bool]]:
    """Settings, ranks, dtype, uncompressed parameters and votes: all that matter together, the others in turn."""
    both_ways = (True, False) if TOPOLOGIES[topology].has_servers else (False,)
    for number, (place, selector, both) in enumerate(itertools.product(WORLDS, SELECTORS, both_ways)):
        config = TopKConfig(
            0.01,
            both,
            selector=selector,
            wire=list(WIRES)[number % 4],
            topology=topology,
            error_feedback=number // 2 % 2 == 0,
        )
        dtype = (torch.float32, torch.bfloat16)[number // 3 % 2]
        yield config.on(*place), place, dtype, ((), (1,))[number // 5 % 2], number // 7 % 2 == 0


def noted(path: Exchange, asked: list[Request]) -> Exchange:
    """The same exchange, which notes what it asks for."""
    request = next(path)
    while True:
        if not isinstance(request, Begun):
            asked.append(request.request if isinstance(request, Begin) else request)
        try:
            request = path.send((yield request))
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("piece", [build.PIECE, 400])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_arithmetic_and_generator_ask_for_the_same(topology, piece, monkeypatch):
    monkeypatch.setattr(build, "PIECE", piece)
    for config, (world, local), dtype, skipped, votes in cases(topology):
        skipped = skipped if config.compresses else ()
        cluster = Cluster(config, world, sum(SIZES), dtype, local, SIZES, skipped)
        used = torch.ones(len(SIZES), dtype=torch.bool) if votes else None
        asked: list[list[Request]] = [[] for _ in range(world)]
        paths = []
        for end, mine in zip(cluster.endpoints, asked, strict=True):
            codecs = cluster.plan.codecs(selector=end.uplink.selector)
            paths.append(noted(exchange(end, torch.randn(sum(SIZES)).to(dtype), codecs, used=used), mine))
        cluster.drive(paths)
        expected = cluster.plan.requests(voters=len(SIZES) if votes else None)
        for mine in asked:
            assert [in_words(each) for each in mine] == [in_words(each) for each in expected], config
