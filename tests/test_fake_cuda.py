"""Exchanges of gradients on a fake GPU: fake tensors have a device and no data.

Operations that need data on the host (``.item()``, ``nonzero``, a boolean index) or mix devices raise with fake
tensors. Copies between host and device do not raise: :class:`Copies` finds them.
"""

import contextlib
import inspect
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from laws import ON_NODES, ROUTES, SELECTED, WIRES
from streams import Kernel, replace_kernels, reply_to
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_topk.bucket import Bucket, plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core import guards, ops
from lightning_topk.core.endpoint import BucketPlan, Outcome
from lightning_topk.core.layout import Layout
from lightning_topk.core.link import COLUMNS, NOTHING, Clip, Measure, Step
from lightning_topk.core.ops import reference
from lightning_topk.core.wire import WIRES as WIRES_BY_NAME
from lightning_topk.core.wire import Codec
from lightning_topk.optim.applied import Clipping
from lightning_topk.optim.momentum import adapt_momentum
from lightning_topk.runtime import collectives
from lightning_topk.runtime.groups import Groups
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.runtime.telemetry import Report
from lightning_topk.systems import presets

CUDA = torch.device("cuda", 0)
WORLD, LOCAL = 4, 2
SIZES = (40_000, 7, 0, 25_001)
COUNTED = Path(__file__).parents[1] / "examples" / "reproduced" / "gpu-launches.json"
"""Launches of an exchange, shown in examples/lab/bench/compress-step.md."""
TOPOLOGIES = ("sharded", "hierarchical", "single_server")


class Copies(TorchDispatchMode):
    """Lists the operations that copy between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if name.startswith(("aten._to_copy", "aten.copy_")):
            source, target = (args[1], args[0]) if name.startswith("aten.copy_") else (args[0], result)
            if source.device.type != target.device.type:
                self.found.append(f"{name} from {source.device} to {target.device}")
        return result


LAUNCHED: list[str] = []
"""Names of launched kernels of Triton."""


def kernel(name: str, names: list[str]) -> Kernel:
    """Stands for a Triton kernel: its tensors must be contiguous and on the GPU."""

    def launch(*arguments: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        assert all(each.device == CUDA and each.is_contiguous() for each in tensors)
        LAUNCHED.append(name)

    return Kernel(launch)


class Launches(TorchDispatchMode):
    """Counts the kernels that operations launch, and Triton's."""

    SEVERAL: ClassVar[dict[str, int]] = {"topk": 20, "sort": 20, "cumsum": 2, "nonzero_static": 6}
    """Number of kernels, of operations with more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        LAUNCHED.clear()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function).split(".")[1]
        returned = [each.alias_info for each in function._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in returned)
        none = "empty" in name or "record_function" in name or name == "promote_types"
        if not view and not none and not str(function).startswith("prim"):
            self.names.append(name)
        return result

    def count(self) -> int:
        return sum(self.SEVERAL.get(name, 1) for name in self.names) + len(LAUNCHED)


def pinned(x: torch.Tensor) -> torch.Tensor:
    assert x.device.type == "cpu", "torch pins only CPU tensors"
    return x


@pytest.fixture
def fake(monkeypatch):
    """Fake tensors, which lack pinned memory: code that asks for it is assumed to get it."""
    replace_kernels(monkeypatch.setattr, kernel)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock(cuda_stream=0))
    from lightning_topk.core.ops import cuda

    with FakeTensorMode():
        yield cuda


def copies_of(
    config: TopKConfig, *, rank: int = 0, dtype: torch.dtype = torch.float32, scaled: bool = False,
    voted: bool = False, uncompressed: bool = False, measure: Measure = NOTHING, limits: int = 0,
) -> list[str]:  # fmt: skip
    """The copies between host and device in a step, except those of the first step."""
    local = LOCAL if config.by_node else 1
    plan = plan_bucket(config, SIZES, WORLD, local, dtype.itemsize, (0,) if uncompressed else ())
    end = plan.endpoint(rank, dtype, CUDA)
    scale = torch.full((), 2.0**16, device=CUDA) if scaled else None
    watch, clip = Copies(), None
    if limits:
        of = None if limits == 1 else torch.zeros(len(SIZES), dtype=torch.int64, device=CUDA)
        clip = Clip(torch.zeros(limits, COLUMNS, device=CUDA), of)
    for step in range(2):
        codecs = plan.codecs(selector=end.uplink.selector)
        g = torch.empty(sum(SIZES), device=CUDA, dtype=dtype)
        used = [True, False, True, True] if voted else None
        with watch if step else contextlib.nullcontext():
            path, reply = guards.exchange(end, g, codecs, Step(step, scale, measure, 0.5, clip), used), None
            with contextlib.suppress(StopIteration):
                while True:
                    reply = reply_to(path.send(reply), rank, WORLD, LOCAL)
    return watch.found


MEMORIES = [
    {"error_feedback": False},
    {"error_feedback": "worker"},
    {"momentum": 0.9},
    {"clip_norm": 1.0},
    {"ratio": 1.0},
    {"ratio": 0.12},  # a dense selection
    {"ratio": 0.5},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def cases() -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
    """Settings and options of an exchange, and whether Triton is installed."""
    flags = [*itertools.product((False, True), repeat=3)]
    # Every topology with every selector, in both directions and in one; wires and flags in turn.
    for number, ((topology, both), selector) in enumerate(itertools.product([*ROUTES, *ON_NODES], SELECTED)):
        settings = {"topology": topology, "bidirectional": both, "selector": selector, "wire": WIRES[number % 4]}
        options: dict[str, Any] = dict(zip(("scaled", "voted", "uncompressed"), flags[number % 8], strict=True))
        options["limits"] = number % 3
        yield settings, options, True
        if selector == "topk":
            yield settings, options, False
            yield settings, {"measure": Measure(error=True, per_layer=True)}, True
    # Every memory in every topology; ranks and dtypes in turn.
    for (i, topology), (j, memory) in itertools.product(enumerate(TOPOLOGIES), enumerate(MEMORIES)):
        options = {"rank": (i + j) % 2, "dtype": DTYPES[(i + j // 2) % 4], "scaled": True}
        yield {"topology": topology, **memory}, options, True
    for settings in presets.values():
        yield settings, {"voted": True, "scaled": True}, True


@pytest.mark.parametrize(("settings", "options", "with_triton"), [*cases()], ids=str)
def test_an_exchange_on_a_gpu_waits_for_nothing_and_mixes_no_devices(fake, monkeypatch, settings, options, with_triton):
    monkeypatch.setattr(ops, "fast", lambda device: fake if with_triton else None)
    assert copies_of(TopKConfig(**{"ratio": 0.01, **settings}), **options) == []


def launches_of(
    plan: BucketPlan, dtype: torch.dtype, scaled: bool, fade: float = 1.0, clip: Clip | None = None
) -> Launches:
    """The launches of an exchange of rank 0, except those of the first step."""
    end, ranks = plan.endpoint(0, dtype, CUDA), (plan.workers, plan.local)
    assert len(end.starts), "made once"
    assert len(end.pieces)
    scale = torch.full((), 2.0**16, device=CUDA) if scaled else None
    g, step = torch.empty(plan.numel, device=CUDA, dtype=dtype), Step(scale=scale, fade=fade, clip=clip)
    for _ in range(2):
        path, reply = guards.exchange(end, g, plan.codecs(selector=end.uplink.selector), step), None
        with Launches() as launches, contextlib.suppress(StopIteration):
            while True:
                reply = reply_to(path.send(reply), 0, *ranks)
    return launches


@pytest.mark.parametrize("parameters", [1, 300])
@pytest.mark.parametrize("row", json.loads(COUNTED.read_text()), ids=lambda row: " ".join([*row.values()][:4]))
def test_an_exchange_takes_the_launches_in_the_guide_however_many_parameters_there_are(
    fake, monkeypatch, row, parameters
):
    monkeypatch.setattr(ops, "fast", lambda device: fake)
    name, amount = row["amount"].split("=")
    config = TopKConfig(topology=row["topology"], bidirectional=row["topology"] != "allgather", **{name: float(amount)})
    nodes, local = (int(each) for each in row["nodes x ranks"].split(" x "))
    dtype, scaled = getattr(torch, row["dtype"].split(",")[0]), row["dtype"].endswith("scaled")
    sizes = [25_000_000 // parameters] * parameters
    launches = launches_of(plan_bucket(config, sizes, nodes * local, local, dtype.itemsize), dtype, scaled)
    assert launches.count() == row["launches"], f"enter this into {COUNTED}"
    assert not {"topk", "sort", "count_nonzero"} & {*launches.names}


@pytest.mark.parametrize(("scaled", "more"), [(False, 2), (True, 3)])
def test_clipping_takes_the_launches_in_the_guide_and_fading_none(fake, monkeypatch, scaled, more):
    monkeypatch.setattr(ops, "fast", lambda device: fake)
    plan, clip = plan_bucket(TopKConfig(saving=50), [25_000_000], 4, 1), Clip(torch.zeros(1, COLUMNS, device=CUDA))
    counts = [launches_of(plan, torch.float32, scaled, *each).count() for each in ((), (0.5,), (0.5, clip))]
    assert counts == [counts[0], counts[0], counts[0] + more]


class Addresses(TorchDispatchMode):
    """Lists what operations and kernels are called with: numbers, and tensors by their memory.

    Memory that was allocated in this context is left out: a CUDA graph has its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[Any, ...]] = []
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = self.note(str(function), args, kwargs)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.made[each.untyped_storage()._cdata] = each
        return result

    def note(self, *call: Any) -> set[int]:
        """Notes a call; returns the memory of its tensors."""
        memory, noted = set(), []
        for each in tree_leaves(call):
            if isinstance(each, torch.Tensor):
                at = each.untyped_storage()._cdata
                memory.add(at)
                each = None if at in self.made else (at, each.storage_offset())
            noted.append(str(each) if isinstance(each, float) else each)  # NaN equals nothing
        self.called.append((*noted,))
        return memory


@pytest.mark.parametrize(
    ("topology", "dtype", "scaled", "limits", "apart"),
    [
        ("sharded", torch.float32, False, 0, False),
        ("sharded", torch.float32, False, 1, False),
        ("sharded", torch.bfloat16, True, 0, True),
        ("sharded", torch.bfloat16, True, 1, False),
        ("sharded", torch.float32, True, 2, True),
        ("hierarchical", torch.float32, True, 1, True),
        ("hierarchical", torch.float32, False, 2, False),
        ("single_server", torch.float32, False, 1, False),
    ],
)
def test_a_pass_uses_the_memory_and_the_numbers_of_the_one_before(
    fake, monkeypatch, topology, dtype, scaled, limits, apart
):
    """So CUDA graphs could replay the segments of an exchange between its requests.

    Also if two parameters are treated ``apart``: one is not compressed, another one is lifted.
    """
    monkeypatch.setattr(ops, "fast", lambda device: fake)
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    config, sizes = TopKConfig(saving=50, topology=topology), [400_000, 300_000, 100]
    plan = plan_bucket(config, sizes, WORLD, LOCAL, dtype.itemsize, [2] if apart else ())
    end, groups = plan.endpoint(0, dtype, CUDA), Groups({}, 0, WORLD, CUDA, LOCAL, None)
    end.lift([1.0, 64.0, 1.0] if apart else ())
    bucket = Bucket([torch.nn.Parameter(torch.empty(size, device=CUDA)) for size in plan.parts.sizes])
    clipping = Clipping(WORLD)
    scale = torch.full((), 2.0**16, device=CUDA) if scaled else None
    g, passes = torch.empty(plan.numel, device=CUDA, dtype=dtype), list[Addresses]()
    told, buckets = ([1.0] * limits, {p: number % max(1, limits) for number, p in enumerate(bucket)}), [bucket]
    replace_kernels(monkeypatch.setattr, lambda name, _: Kernel(lambda *call: passes[-1].note(name, call)))
    for number in range(4):
        clipping.begin_pass(*told)
        step = Step(number, scale, clip=clipping.of(bucket, CUDA) if limits else None)
        passes.append(Addresses())
        with passes[-1], contextlib.suppress(StopIteration):
            path, reply = guards.exchange(end, g, plan.codecs(), step), None
            for place in itertools.count():
                request = path.send(reply)
                reply = reply_to(request, 0, WORLD, LOCAL)
                if reply is not None and reply is not request.payload:
                    reply = collectives._memory(groups, place, CUDA, *reply.shape)
        if limits:
            clipping.fold(buckets)
    assert passes[2].called == passes[3].called
    assert len(passes[2].called) > 20


def test_sends_are_bound_once_and_use_the_same_memory_in_every_pass(fake, monkeypatch):
    """Until a payload's format changes, or another bucket needs more memory; buckets share it."""
    passed: list[tuple[str, list[int]]] = []

    class Compiled:
        """Stands for a kernel, and for what Triton makes of it."""

        function = packed_metadata = None

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **_: (self.run(*[None] * 9, *arguments), self)[1]

        def run(self, *arguments: Any) -> None:
            tensors = [each for each in arguments[9:] if isinstance(each, torch.Tensor)]
            passed.append((self.name, [id(each.untyped_storage()) for each in tensors]))

    for name, each in vars(fake.kernels).items():
        if isinstance(each, Kernel):
            monkeypatch.setattr(fake.kernels, name, Compiled(name))
    scratch, g = ops.Scratch(), torch.empty(100_000, device=CUDA)
    layouts, codec = [Layout(numel, 4) for numel in (100_000, 90_000)], Codec(WIRES_BY_NAME["int4"], 25_000, 500)
    sends = [fake.Send(torch.empty(each.numel, device=CUDA), each, scratch) for each in layouts]

    def launched(x: torch.Tensor = g, form: Any = codec.form, send: Any = sends[0]) -> list[tuple[str, list[int]]]:
        passed.clear()
        for fade in (1.0, 0.5):
            send(x, form, None, None, fade)
        first, second = passed[: len(passed) // 2], passed[len(passed) // 2 :]
        assert first == second
        return first

    bind = mock.Mock(side_effect=fake.Send._bind)
    monkeypatch.setattr(fake.Send, "_bind", lambda *arguments: bind(*arguments))
    before = launched()
    assert len(before) == 10
    assert launched() == before
    assert bind.call_count == 2, "compiled, then bound"
    other = torch.empty_like(g)
    assert [name for (name, own), (_, its) in zip(before, launched(other), strict=True) if own != its] == [
        "survey",
        "move",
    ]
    assert bind.call_count == 2
    smaller = launched(g[:90_000], Codec(codec.wire, 22_500, 450).form, sends[1])
    assert smaller[1][1][0] == before[1][1][0], "the same memory"
    assert launched() == before
    assert bind.call_count == 3
    launched(form=Codec(codec.wire, 25_000, 5_000).form)  # k by a schedule
    assert bind.call_count == 5
    launched(g[:90_000], Codec(codec.wire, 22_500, 450).form, sends[1])
    assert bind.call_count == 6, "the memory is another"


def test_triton_looks_up_the_kernels_for_tensors_of_two_gigabytes(fake, monkeypatch):
    """For smaller ones AMD's compiler counts bytes with 32 bits: these kernels would read and write elsewhere."""
    kernels = {name: mock.MagicMock() for name, each in vars(fake.kernels).items() if isinstance(each, Kernel)}
    monkeypatch.setattr(fake, "kernels", mock.Mock(**kernels))
    for numel, expected in ((1 << 20, 0), (1 << 29, 13)):
        layout, (e, g) = Layout(numel, 4), torch.empty(2, numel, device=CUDA)
        codec, starts = Codec(WIRES_BY_NAME["int4"], layout.shard_size, numel >> 8), torch.zeros(1, device=CUDA)
        send = fake.Send(e, layout, ops.Scratch())
        for _ in range(3):
            before = sum(each.__getitem__.call_count for each in kernels.values())
            finite = fake.receive(send(g, codec.form, None), layout, codec.form, 1, g, bound=codec.bound)
            fake.nan_unless_(g, starts, finite)
        assert sum(each.__getitem__.call_count for each in kernels.values()) - before == expected


STEPS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD, decay": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, capturable": (torch.optim.AdamW, {"capturable": True}),
    "Adam, decay": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 1e-4, "foreach": True}),
    "NAdam": (torch.optim.NAdam, {}),
}


@pytest.mark.parametrize(
    ("name", "triton"), [*((name, True) for name in STEPS), ("SGD, decay", False), ("AdamW, capturable", False)]
)
def test_adapted_momentum_waits_for_nothing_and_launches_one_kernel_for_all_parameters_and_one_for_their_signs(
    fake, monkeypatch, name, triton
):
    monkeypatch.setattr(ops, "fast", lambda device: fake if triton else None)
    (kind, options), exchange = STEPS[name], torch.nn.Module()
    parameters = [torch.nn.Parameter(torch.empty(1000 + n, device=CUDA)) for n in range(30)]
    optimizer = kind([{"params": parameters[:10]}, {"params": parameters[10:], "lr": 0.2}], lr=0.1, **options)
    adapt_momentum([optimizer], exchange)
    for p in parameters:
        p.grad = torch.empty_like(p)
        names = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        optimizer.state[p] = {name: torch.empty_like(p) for name in names}
        for name in ("step", "mu_product"):
            optimizer.state[p][name] = torch.zeros((), device=CUDA if options.get("capturable") else "cpu")
    before = [{**optimizer.state[p]} for p in parameters]
    steps = sys.modules[inspect.unwrap(kind.step).__module__]
    with mock.patch.object(steps, steps.__name__.rpartition(".")[2]):  # what remains is ours
        optimizer.step()  # the first one makes the step counts, and copies the tables
        with Copies() as watch, Launches() as launches:
            optimizer.step()
    assert watch.found == []
    if triton:
        assert launches.count() == (1 if kind is torch.optim.SGD else 2)
    assert [optimizer.state[p] for p in parameters] == before


def test_a_users_default_device_changes_nothing(fake, monkeypatch):
    """Reports are on the CPU, and so are tables until they are copied to the GPU."""
    monkeypatch.setattr(ops, "fast", lambda device: fake)
    with torch.device(CUDA):
        parameter, exchange = torch.nn.Parameter(torch.empty(1000)), torch.nn.Module()
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        adapt_momentum([optimizer], exchange)
        parameter.grad = torch.empty_like(parameter)
        for _ in range(2):
            optimizer.step()
        outcome = Outcome(torch.ones((), dtype=torch.bool), [torch.ones(2, dtype=torch.float64)])
        assert Report(measured=[(Bucket([parameter]), outcome)]).energy.device.type == "cpu"
        assert Residuals().worker_energy().device.type == "cpu"


def test_copies_and_waits_are_detected(fake, monkeypatch):
    """The tests above would fail if there were any."""
    monkeypatch.setattr(ops, "fast", lambda device: None)
    with Copies() as watch:
        torch.ones(3).to(CUDA)
    assert len(watch.found) == 1
    waits = mock.patch.object(reference, "is_finite", lambda x: torch.tensor(bool(x.sum())))
    with waits, pytest.raises(DataDependentOutputException):
        copies_of(TopKConfig(0.01))


@pytest.mark.parametrize("limits", [[1.0], [1.0, 2.0]])
def test_the_norm_of_offloaded_gradients_meets_those_of_the_exchange(fake, monkeypatch, limits):
    """With FSDP2's CPUOffloadPolicy, the user clips gradients on the CPU that a GPU exchanged."""
    bucket = Bucket([torch.nn.Parameter(torch.empty(8, device=CUDA))])
    clipping = Clipping(2)
    told = limits, dict.fromkeys(bucket, 0)
    for _ in range(2):
        clipping.begin_pass(*told)
        clip = clipping.of(bucket, CUDA)
        assert clip.rows.device.type == "cuda"
        clipping.fold([bucket])
        clipping.note(0, torch.ones(()))
    clipping.begin_pass(*told)
