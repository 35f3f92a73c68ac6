"""A GPU's streams without a GPU: vector clocks order every operation on a fake CUDA tensor.

The host enqueues an operation on the current stream. A stream's clock says how far each stream had come when the
stream's own last operation began; waits join clocks. :class:`Gpu` finds

- races: a stream uses a storage, and nothing orders that use after the storage's last write (or, for a write, its
  reads) on another stream;
- reuse: the host frees a storage while another stream may still use it (no ``record_stream``), and the stream that
  allocated it, to whose pool it returns, allocates again without having waited for that use.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_topk.core import ops
from lightning_topk.core.requests import AllGather, AllReduce, AllToAll, Gather

OURS = tuple(str(Path(__file__).parents[1] / folder) + os.sep for folder in ("lightning_topk", "tests"))


class Clock:
    """How far each stream has come, to the knowledge of a stream or at an event."""

    def __init__(self, gpu: Gpu, *options: Any, **others: Any) -> None:
        self.gpu = gpu
        self.clock: Counter[Stream] = Counter()

    def synchronize(self) -> None:
        self.gpu.host |= self.clock


class Stream(Clock):
    """A stream of a :class:`Gpu`; stands for ``torch.cuda.Stream``. Its own entry counts operations enqueued so far."""

    cuda_stream = property(id)

    def wait_stream(self, other: Clock) -> None:
        self.clock |= other.clock

    def wait_event(self, event: Event) -> None:
        self.wait_stream(event)


class Event(Clock):
    """A moment in a stream; stands for ``torch.cuda.Event``. A query always finds it completed."""

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Counter((stream or self.gpu.current).clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        if not self.clock | other.clock <= self.gpu.host:
            raise RuntimeError("the host has not waited for both events")  # as CUDA does
        return 1000.0 * (other.clock.total() - self.clock.total())


class Future:
    """Stands for ``torch.futures.Future(devices=...)``: the waiting stream comes after the one that set the result."""

    def __init__(self, gpu: Gpu, devices: Any = None) -> None:
        self.done = Event(gpu)

    def set_result(self, result: Tensor) -> None:
        self.result = result
        self.done.record()

    def wait(self) -> Tensor:
        stream = self.done.gpu.current
        stream.wait_event(self.done)
        self.result.record_stream(stream)
        return self.result


@dataclass
class Use:
    stream: Stream
    when: int
    place: str

    def before(self, stream: Stream) -> bool:
        """Whether the next operation of ``stream`` comes after it."""
        return stream is self.stream or stream.clock[self.stream] >= self.when


@dataclass
class Block:
    """The memory of a storage, and its uses since its last write."""

    storage: StorageWeakRef
    owner: Stream
    place: str
    write: Use | None = None
    reads: dict[Stream, Use] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)

    @property
    def uses(self) -> Iterable[Use]:
        return [*([self.write] if self.write else []), *self.reads.values()]


class Gpu(TorchDispatchMode):
    """Follows the operations that are enqueued inside this context, and describes the races and reuses found."""

    def __init__(self) -> None:
        super().__init__()
        self.races: set[str] = set()
        self.reuses: set[str] = set()
        self.operations = 0
        self.host: Counter[Stream] = Counter()  # what the host has waited for
        self._streams = [Stream(self)]
        self._blocks: dict[int, Block] = {}
        self._freed: list[Block] = []

    @property
    def current(self) -> Stream:
        return self._streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Stands for ``torch.cuda.stream``."""
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    def install(self, setattr: Callable[..., None]) -> None:
        """Replaces torch's classes by the stand-ins, through a monkeypatch's ``setattr``."""
        setattr(torch.cuda, "Stream", partial(Stream, self))
        setattr(torch.cuda, "Event", partial(Event, self))
        setattr(torch.cuda, "stream", self.on)
        setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        setattr(torch.futures, "Future", partial(Future, self))
        setattr(torch.Tensor, "record_stream", lambda x, stream: self._block(x).recorded.add(stream))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for key in [key for key, block in self._blocks.items() if block.storage.expired()]:
            self._freed.append(self._blocks.pop(key))
        if function is torch.ops.aten._local_scalar_dense.default:  # ``.item()``: the host waits for a number
            self.use(_cuda(args), [])
            self.current.synchronize()
            return 0
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.detach.default, torch.ops.prim.device.default):
            return result
        inputs, made = _cuda((args, kwargs)), _cuda(result)
        returns = function._schema.returns
        if any(each.alias_info and not each.alias_info.is_write for each in returns):
            return result  # a view
        pairs = zip(function._schema.arguments, args, strict=False)
        changed = [value for argument, value in pairs if argument.alias_info and argument.alias_info.is_write]
        written = _cuda((changed, (kwargs or {}).get("out")))
        written += [x for x in made if x.untyped_storage()._cdata not in self._blocks]
        self.use(inputs, written)
        if inputs and any(isinstance(x, Tensor) and x.device.type == "cpu" for x in tree_leaves(result)):
            self.current.synchronize()  # the host waits for a copy to it
        return result

    def launch(self, *arguments: Any) -> None:
        """Launches a Triton kernel, which may read and write all its arguments."""
        self.use([], _cuda(arguments))

    def use(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Records an operation on the current stream."""
        stream = self.current
        stream.clock |= self.host
        stream.clock[stream] += 1
        self.operations += 1
        use = Use(stream, stream.clock[stream], _place())
        changed = {id(block): block for block in map(self._block, written)}
        for block in {id(block): block for block in map(self._block, read)}.values():
            if id(block) not in changed:
                self._check(block, use, [block.write] if block.write else [])
                block.reads[stream] = use
        for block in changed.values():
            self._check(block, use, block.uses)
            block.write, block.reads = use, {}

    def _check(self, block: Block, use: Use, earlier: Iterable[Use]) -> None:
        for each in earlier:
            if not each.before(use.stream):
                self.races.add(f"{use.place}, not after {each.place}, of memory of {block.place}")

    def _block(self, tensor: Tensor) -> Block:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._allocate()
            self._blocks[storage._cdata] = Block(StorageWeakRef(storage), self.current, _place())
        return self._blocks[storage._cdata]

    def _allocate(self) -> None:
        """Allocates from the current stream's pool, perhaps the memory of a freed block."""
        for block in [block for block in self._freed if block.owner is self.current]:
            self._freed.remove(block)
            for use in block.uses:
                if use.stream not in block.recorded and not use.before(self.current):
                    self.reuses.add(f"{_place()} may get memory of {block.place}, in use at {use.place}")


def replace_kernels(setattr: Callable[..., None], stand_in: Callable[[str, list[str]], Any]) -> None:
    """Replaces Triton's kernels, and features that fake tensors lack: a current device, addresses and pinned memory.

    ``stand_in`` makes the stand-in of a kernel from its name and argument names.
    """
    if torch.__version__ < "2.13":
        pytest.skip("this torch asks the driver about fake CUDA tensors")
    kernels = pytest.importorskip("lightning_topk.core.ops.kernels")
    for name, value in vars(kernels).items():
        if type(value).__module__.startswith("triton.runtime"):
            setattr(kernels, name, stand_in(name, value.arg_names))
    for name in ("device", "device_of"):
        setattr(torch.cuda, name, lambda x: contextlib.nullcontext())
    setattr(FakeTensor, "data_ptr", lambda self: id(self.untyped_storage()))
    setattr(ops, "to_device", lambda x, device: torch.empty(x.shape, dtype=x.dtype, device=device))


class Kernel:
    """Stands for a Triton kernel; calls ``launch`` with the arguments of each launch."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: self._launch(*arguments)


def reply_to(request: Any, rank: int, world: int, local: int) -> Any:
    """A reply of the right shape to what an exchange on a GPU asks."""
    payload, count = request.payload, {"all": world, "node": local, "peers": world // local}[request.among]
    assert payload.is_cuda
    assert payload.is_contiguous()
    if isinstance(request, AllToAll):
        assert len(payload) == count
        return torch.empty_like(payload)
    if isinstance(request, AllGather) or (isinstance(request, Gather) and rank == 0):
        return payload.new_empty(count, len(payload))
    if isinstance(request, AllReduce):
        return payload
    return None if isinstance(request, Gather) else torch.empty_like(payload)


def _cuda(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.device.type == "cuda"]


def _place() -> str:
    """The line of this repository that is running."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or not frame.f_code.co_filename.startswith(OURS)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
