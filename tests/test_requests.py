"""What a topology asks for by arithmetic is what its generator asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from lightning_topk.build import make_codecs, make_endpoint, make_shape
from lightning_topk.config import TopKConfig
from lightning_topk.core.exchange import TOPOLOGIES, Endpoint, Exchange, exchange, requests
from lightning_topk.core.requests import AllReduce, AllToAll, Broadcast, Request
from lightning_topk.core.select import SELECTORS
from lightning_topk.core.wire import WIRES

SIZES = (700, 3, 1200)
WORLDS = [(1, 1), (3, 1), (4, 2)]
"""Ranks, and ranks of a node."""


def reply_to(request: Request, end: Endpoint) -> torch.Tensor:
    """A reply of the right shape, without content."""
    world = {"all": end.workers, "node": end.parts.count, "peers": end.world}[request.among]
    if isinstance(request, AllToAll | AllReduce | Broadcast):
        return torch.empty_like(request.payload)
    return request.payload.new_empty(world, *request.payload.shape)


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


def asked_by(path: Exchange, end: Endpoint) -> list[Request]:
    """What a generator asks for."""
    asked: list[Request] = []
    reply = None
    try:
        while True:
            asked.append(path.send(reply))
            reply = reply_to(asked[-1], end)
    except StopIteration:
        return asked


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_arithmetic_and_generator_ask_for_the_same(topology):
    for config, (world, local), dtype, skipped, votes in cases(topology):
        shape = make_shape(config, SIZES, world, local)
        skipped = skipped if config.compresses else ()
        for rank in {0, world - 1}:
            end = make_endpoint(config, shape, rank, dtype, torch.device("meta"), skipped)
            codecs = make_codecs(config, end, selector=end.uplink.selector)
            used = torch.ones(len(SIZES), dtype=torch.bool, device="meta") if votes else None
            path = exchange(end, torch.empty(sum(SIZES), dtype=dtype, device="meta"), codecs, used=used)
            expected = requests(
                shape, codecs, dtype.itemsize, sum(SIZES[n] for n in skipped), len(SIZES) if votes else None
            )
            assert [in_words(each) for each in asked_by(path, end)] == [in_words(each) for each in expected], config
