"""Drives exchanges over process groups, one after the other, beside the backward pass.

Collectives issued from callbacks of several buckets interleave differently on different ranks, and then deadlock or pair
up wrongly (pytorch #48478). So whole exchanges run in order on a *lane* with a process group of its own: on CPU a
thread, on CUDA a side stream.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lightning_topk.core.exchange import AllGather, AllReduce, AllToAll, Among, Broadcast, Exchange, Gather, Request


class Meter:
    """Bytes that are sent to other ranks, by what they are for."""

    def __init__(self) -> None:
        self.bytes = {"uplink": 0, "downlink": 0, "broadcast": 0, "dense": 0, "intra_node": 0, "inter_node": 0}
        """By this rank: ``uplink`` and ``downlink`` of the exchanges, ``broadcast`` of weights and buffers by DDP, and ``dense``:
        what a ring all-reduce of the same gradients would have sent. By the ranks of its node together, in the exchanges: to
        each other, ``intra_node``, and to other nodes, ``inter_node``."""


@dataclass(frozen=True)
class Groups:
    """The process groups of a rank.

    Attributes:
        all: All ranks that exchange gradients.
        node: Those of this node; None if that makes no difference.
        peers: Those of the same local rank on every node; None if that makes no difference.
        local: Ranks of a node.
        partial: Whether there are other ranks beside these.
    """

    all: dist.ProcessGroup
    node: dist.ProcessGroup | None = None
    peers: dist.ProcessGroup | None = None
    local: int = 1
    partial: bool = False

    @classmethod
    def make(cls, parent: dist.ProcessGroup | None, timeout: timedelta | None) -> Groups:
        """Creates a group of all ranks, beside the one that exists; a collective.

        Args:
            parent: The ranks, and their backend. Default: all.
            timeout: After which a collective that some rank does not join fails. Default: the backend's own.
        """
        ranks = None if parent is None else dist.get_process_group_ranks(parent)
        return cls(_new_group(ranks, parent, timeout), partial=parent is not None)

    def divided(
        self, parent: dist.ProcessGroup | None, timeout: timedelta | None, local: int, hierarchy: bool
    ) -> Groups:
        """These groups on nodes of ``local`` consecutive ranks; a collective, as :meth:`make`.

        Args:
            parent: See :meth:`make`.
            timeout: See :meth:`make`.
            local: Ranks of a node.
            hierarchy: Whether there shall be groups inside nodes and between them.
        """
        if not hierarchy:
            return replace(self, local=local)
        ranks, mine = dist.get_process_group_ranks(self.all), dist.get_rank(self.all)
        nodes = [ranks[first : first + local] for first in range(0, len(ranks), local)]
        node = _own_group(nodes, mine // local, parent, timeout)
        peers = _own_group([ranks[each::local] for each in range(local)], mine % local, parent, timeout)
        return replace(self, node=node, peers=peers, local=local)

    def among(self, who: Among) -> dist.ProcessGroup:
        """The group of those who take part in a request."""
        group = {"all": self.all, "node": self.node, "peers": self.peers}[who]
        assert group is not None, who
        return group

    def destroy(self) -> None:
        """Gives them up, but for those of some of the ranks only: torch 2.9 would give the next one the same name."""
        if not self.partial:
            for group in (self.peers, self.node, self.all):
                if group is not None:
                    dist.destroy_process_group(group)


def _new_group(
    ranks: list[int] | None, parent: dist.ProcessGroup | None, timeout: timedelta | None
) -> dist.ProcessGroup:
    backend = None if parent is None else dist.get_backend(parent)
    group = dist.new_group(ranks, timeout, backend, use_local_synchronization=parent is not None)
    return cast("dist.ProcessGroup", group)


def _own_group(
    members: Sequence[list[int]], mine: int, parent: dist.ProcessGroup | None, timeout: timedelta | None
) -> dist.ProcessGroup:
    """One of several groups, of which every rank is in one. Where all ranks are here, all create all, in the same order."""
    if parent is not None:
        return _new_group(members[mine], parent, timeout)
    return [_new_group(each, None, timeout) for each in members][mine]


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, picklable. A collective."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, value, group=group)
    return rows


def drive(exchange: Exchange, groups: Groups, meter: Meter) -> None:
    """Runs an exchange to its end over process groups.

    Args:
        exchange: One rank's exchange; every rank drives its own.
        groups: The groups that carry it.
        meter: Takes note of the bytes sent.
    """
    place = dist.get_rank(groups.all), dist.get_world_size(groups.all), groups.local
    reply: Tensor | None = None
    while True:
        try:
            request = exchange.send(reply)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration:
            return
        group = groups.among(request.among)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        meter.bytes[request.direction] += request.sent_bytes(rank, world)
        inside, outside = request.node_bytes(*place)
        meter.bytes["intra_node"] += inside
        meter.bytes["inter_node"] += outside
        reply = perform(request, group, rank, world)


def perform(request: Request, group: dist.ProcessGroup, rank: int, world: int) -> Tensor | None:
    """Performs one request as a collective and returns its reply (see the request's class)."""
    payload = request.payload
    if payload.is_cuda and "cuda:gloo" in dist.get_backend_config(group):
        # gloo knows most collectives on the CPU only: there and back, and the host waits.
        reply = perform(replace(request, payload=payload.cpu()), group, rank, world)
        return None if reply is None else reply.to(payload.device)
    if isinstance(request, AllToAll):
        received = torch.empty_like(payload)
        dist.all_to_all_single(received, payload, group=group)
        return received
    if isinstance(request, AllGather):
        received = payload.new_empty(world, len(payload))
        dist.all_gather_into_tensor(received.view(-1), payload, group=group)
        return received
    if isinstance(request, AllReduce):
        dist.all_reduce(payload, group=group)
        return payload
    root = dist.get_global_rank(group, 0)
    if isinstance(request, Gather):
        rows = list(payload.new_empty(world, len(payload)).unbind()) if rank == 0 else None
        dist.gather(payload, rows, dst=root, group=group)
        return torch.stack(rows) if rows else None
    assert isinstance(request, Broadcast)
    # A scatter of equal rows: rank 0 sends to every other rank itself, as the parameter server of the papers does. A
    # broadcast would forward through a tree that depends on the backend, and no one could predict its bytes.
    received = torch.empty_like(payload)
    dist.scatter(received, [payload] * world if rank == 0 else None, src=root, group=group)
    return received


def check_agreement(mine: Mapping[str, Any], remedy: str, group: dist.ProcessGroup | None = None) -> None:
    """Compares what has to be the same on every rank. A collective; if ranks differ, it fails on all of them.

    Args:
        mine: This rank's values, by what they are called; picklable.
        remedy: What to do about a difference.
        group: The ranks. Default: all.

    Raises:
        ValueError: Two ranks differ; it shows both values.
    """
    rows = gathered(dict(mine), group)
    for rank, row in enumerate(rows):
        for name in [*rows[0], *(name for name in row if name not in rows[0])]:
            first, other = rows[0].get(name, "missing"), row.get(name, "missing")
            if first != other:
                raise ValueError(f"the ranks differ: {name} is {first} on rank 0 and {other} on rank {rank}. {remedy}")


def connect_after_restart(backend: str, rank: int, world: int, timeout: timedelta | None, device: torch.device) -> None:
    """Connects the ranks without the addresses of those that died, where torchrun restarts them; else does nothing.

    torch 2.15 gives restarted workers the store of the last attempt: whoever comes first would read the other rank's old
    address in it, and fail to connect.

    Args:
        backend: Of the default group.
        rank: This rank.
        world: Ranks.
        timeout: Of collectives. Default: torch's, 30 minutes.
        device: This rank's.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or dist.is_initialized():
        return
    timeout = timeout or default_pg_timeout
    store, *_ = next(rendezvous("env://", rank, world, timeout=timeout))
    life = _name_of_this_life(store, rank, world, timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(life, store),  # type: ignore[attr-defined]  # it is exported at run time
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )


def _name_of_this_life(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """A name that the living ranks agree on, and that no earlier life of theirs had.

    The store outlives the ranks, and no rank knows how often the others were restarted: torchrun counts on every node by itself. So each
    says hello with a word of its own, and rank 0 answers whatever it reads, be it of the dead, until all the living have replied.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"hello {rank}", mine)
        store.wait([f"answer {rank} {mine}"], timeout)
        life: str = store.get(f"answer {rank} {mine}").decode()
        store.set(f"heard {rank} {life}", "")
        return life
    silent = set(range(1, world))
    while silent:
        for other in [other for other in silent if store.check([f"hello {other}"])]:
            store.set(f"answer {other} {store.get(f'hello {other}').decode()}", mine)
        silent = {other for other in silent if not store.check([f"heard {other} {mine}"])}
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(silent)} did not connect within {timeout}.")
        time.sleep(0.01)
    return mine


@dataclass(frozen=True)
class DenseCost:
    """What an all-reduce costs on a link.

    Attributes:
        latency: Seconds, whatever its size.
        seconds_per_byte: Seconds for each byte of the tensor.
    """

    latency: float
    seconds_per_byte: float

    def seconds(self, nbytes: Sequence[int]) -> float:
        """Estimated seconds of all-reduces of tensors of these sizes, one after the other."""
        return len(nbytes) * self.latency + sum(nbytes) * self.seconds_per_byte


def dense_cost(nbytes: int, device: torch.device, group: dist.ProcessGroup, meter: Meter) -> DenseCost:
    """Times all-reduces, a very small one and one of a size; a collective, after which all ranks know the same.

    Args:
        nbytes: The size.
        device: Where the tensors live; a GPU is waited for.
        group: The ranks.
        meter: Takes note of the bytes sent, as ``broadcast``: they are no gradients.
    """
    world, took = dist.get_world_size(group), []
    for count in (16, max(32, nbytes // 4)):
        x = torch.zeros(count, device=device)
        for timed in (False, True):  # the first one sets up connections
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            dist.all_reduce(x, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            meter.bytes["broadcast"] += 2 * (world - 1) * x.nbytes // world
            if timed:
                took.append(time.perf_counter() - begin)
    slowest = torch.tensor(took, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    small, large = slowest.tolist()
    return DenseCost(small, max(0.0, large - small) / x.nbytes)


Future = torch.futures.Future[Tensor]


class Lane(Protocol):
    """Runs jobs one after the other, in the order of submission, beside the caller."""

    def promise(self) -> tuple[Future, Future]:
        """Two ends of one result: the first is for :meth:`submit` to fulfil, the second for DDP to wait for."""
        ...

    def submit(self, job: Callable[[], Sequence[Tensor]], promised: Sequence[Future]) -> None:
        """Queues a job; its results, or its error, fulfil the promises."""
        ...

    def mark(self) -> Any:
        """A moment in the work of the caller: the host's clock, or an event in the current stream."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks. Waits for the device."""
        ...

    def close(self) -> bool:
        """Ends the lane when what was submitted is done; returns whether that was soon."""
        ...


class ThreadLane:
    """A lane for CPU tensors: one daemon thread, so that a rank stuck in a collective can still exit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lightning_topk-lane", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def promise(self) -> tuple[Future, Future]:
        """See :meth:`Lane.promise`."""
        done: Future = torch.futures.Future()
        # DDP waits in C++, where an exception set from Python would arrive as an odd value. A callback that raises it
        # turns it into an error of the future that DDP sees.
        return done, done.then(lambda future: future.value())

    def submit(self, job: Callable[[], Sequence[Tensor]], promised: Sequence[Future]) -> None:
        """See :meth:`Lane.submit`."""

        def run() -> None:
            try:
                if self._error is not None:
                    # Another rank may be waiting in the exchange that failed here: the next one would answer it.
                    raise self._error
                results = job()
            except Exception as error:
                self._error = error
                for future in promised:
                    future.set_exception(error)  # type: ignore[arg-type]  # torch annotates the result's type
            else:
                for future, result in zip(promised, results, strict=True):
                    future.set_result(result)

        self._jobs.put(run)

    def mark(self) -> float:
        """See :meth:`Lane.mark`."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """See :meth:`Lane.seconds`."""
        return end - start

    def close(self) -> bool:
        """See :meth:`Lane.close`."""
        self._jobs.put(None)
        self._thread.join(timeout=5)
        return not self._thread.is_alive()


class StreamLane:
    """A lane for CUDA tensors: a side stream. Jobs are enqueued at once; the host waits for nothing.

    Args:
        device: The tensors' device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def promise(self) -> tuple[Future, Future]:
        """See :meth:`Lane.promise`. Errors are raised by ``submit`` itself."""
        done: Future = torch.futures.Future(devices=[self._device])
        return done, done

    def submit(self, job: Callable[[], Sequence[Tensor]], promised: Sequence[Future]) -> None:
        """See :meth:`Lane.submit`. Futures record the side stream, so that who waits for them waits on the GPU."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for future, result in zip(promised, job(), strict=True):
                future.set_result(result)

    def mark(self) -> torch.cuda.Event:
        """See :meth:`Lane.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See :meth:`Lane.seconds`."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def close(self) -> bool:
        """See :meth:`Lane.close`. Nothing to wait for: whoever needs a result waits for its future."""
        return True


def lane_for(device: torch.device) -> Lane:
    """The lane that suits tensors of a device.

    Raises:
        TypeError: There is none.
    """
    if device.type not in ("cpu", "cuda"):
        raise TypeError(f"gradients are on {device}; the exchange knows CPU and CUDA tensors only.")
    return StreamLane(device) if device.type == "cuda" else ThreadLane()
