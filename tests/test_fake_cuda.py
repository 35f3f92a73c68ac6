"""Exchanges of gradients on a fake GPU: fake tensors have a device and no data.

Operations that need data on the host (``.item()``, ``nonzero``, a boolean index) or mix devices raise with fake
tensors. Copies between host and device do not raise: :class:`Copies` finds them.
"""

import contextlib
import itertools
import json
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

from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core import guards, ops
from lightning_topk.core.link import NOTHING, Measure
from lightning_topk.core.ops import reference
from lightning_topk.runtime.momentum import AdaptedMomentum, adapt_momentum
from lightning_topk.runtime.residuals import Residuals
from lightning_topk.systems import presets

CUDA = torch.device("cuda", 0)
WORLD, LOCAL = 4, 2
SIZES = (40_000, 7, 0, 25_001)
COUNTED = Path(__file__).parents[1] / "examples" / "reproduced" / "gpu-launches.json"
"""Launches and bytes of an exchange of 25 million entries, shown in the guide."""
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


LAUNCHED: list[tuple[str, dict[str, Any]]] = []
"""Names and arguments of launched kernels."""


def kernel(name: str, names: list[str]) -> Kernel:
    """Stands for a Triton kernel: its tensors must be contiguous and on the GPU."""

    def launch(*arguments: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        assert all(each.device == CUDA and each.is_contiguous() for each in tensors)
        LAUNCHED.append((name, dict(zip(names, arguments, strict=True))))

    return Kernel(launch)


SECTOR = 32
"""Bytes that a GPU reads or writes for one entry at a random place."""


class Traffic(TorchDispatchMode):
    """Counts kernels and their memory traffic in bytes, as if no cache survived from one kernel to the next."""

    SEVERAL: ClassVar[dict[str, int]] = {"topk": 20, "sort": 20, "cumsum": 2, "nonzero_static": 6}
    """Number of kernels, of operations with more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.launches = 0
        self.names: set[str] = set()
        LAUNCHED.clear()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function).split(".")[1]
        returned = [each.alias_info for each in function._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in returned)
        if view or "empty" in name or str(function).startswith("prim"):
            return result
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if name in ("zero_", "fill_"):
            self.nbytes += _size(read[0])
        elif name in ("index", "gather", "index_select"):
            whole, *rest = [*read, *made]
            self.nbytes += sum(map(_size, rest)) + min(_size(whole), SECTOR * read[-1].numel())
        elif name in ("scatter_add_", "index_copy_", "scatter_", "index_add_"):
            self.nbytes += sum(map(_size, read[1:])) + 2 * min(_size(read[0]), SECTOR * read[1].numel())
        else:
            self.nbytes += sum(map(_size, read)) + sum(map(_size, made)) * (name != "copy_")
        self.launches += self.SEVERAL.get(name, 1)
        self.names.add(name)
        return result

    def with_kernels(self) -> tuple[int, int]:
        """Bytes and kernels, including Triton's."""
        return self.nbytes + sum(itertools.starmap(_moved, LAUNCHED)), self.launches + len(LAUNCHED)


def _size(x: torch.Tensor) -> int:
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _moved(name: str, given: dict[str, Any]) -> int:
    """Bytes that a Triton kernel moves. Half of the capacity for candidates is used."""
    size = {key: _size(each) for key, each in given.items() if isinstance(each, torch.Tensor)}
    if name == "survey":
        return size["x"] + 2 * SECTOR * given["count"]
    if name == "move":
        return 2 * (size["e"] + size["x"]) + size["bitmap"] + size["counts"]
    if name == "gather":
        found = given["value"].numel() // 2
        return size["bitmap"] + size["counts"] + size["ends"] + 8 * found + min(size["e"], SECTOR * found)
    if name in ("tally", "count"):
        return size["value"] // 2 + size["digits"] + size.get("counts", 0)
    if name == "choose":
        chosen = size["index"] + size["chosen"]
        return size["value"] // 2 + min(size["place"] // 2, SECTOR * given["index"].numel()) + chosen + size["words"]
    if name == "write":
        return size["index"] + size["value"] + size["payload"] + min(2 * size["e"], SECTOR * given["value"].numel())
    if name == "catch_up":  # its tensors are in a table: the test counts them
        return size["table"] + size["owners"]
    if name in ("threshold", "weigh", "copy_parts"):
        return sum(size.values())
    assert name == "add"
    payloads = given["payload"] if given["BY_SHARD"] or given["SHARED"] else given["payload"][:1]
    return _size(payloads) + 2 * min(size["out"], SECTOR * len(payloads) * given["k"])


@pytest.fixture
def fake(monkeypatch):
    """Fake tensors, which lack pinned memory: code that asks for it is assumed to get it."""
    replace_kernels(monkeypatch.setattr, kernel)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    from lightning_topk.core.ops import cuda

    with FakeTensorMode():
        yield cuda


def copies_of(
    config: TopKConfig, *, rank: int = 0, dtype: torch.dtype = torch.float32, scaled: bool = False,
    voted: bool = False, uncompressed: bool = False, measure: Measure = NOTHING,
) -> list[str]:  # fmt: skip
    """The copies between host and device in a step, except those of the first step."""
    local = LOCAL if config.by_node else 1
    plan = plan_bucket(config, SIZES, WORLD, local, dtype.itemsize, (0,) if uncompressed else ())
    end = plan.endpoint(rank, dtype, CUDA)
    scale = torch.full((), 2.0**16, device=CUDA) if scaled else None
    watch = Copies()
    for step in range(2):
        codecs = plan.codecs(selector=end.uplink.selector)
        g = torch.empty(sum(SIZES), device=CUDA, dtype=dtype)
        used = torch.tensor([True, False, True, True]) if voted else None
        with watch if step else contextlib.nullcontext():
            path, reply = guards.exchange(end, g, codecs, step, scale, used, measure), None
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
    # Every topology with every selector, both ways and one way; wires and flags in turn.
    for number, ((topology, both), selector) in enumerate(itertools.product([*ROUTES, *ON_NODES], SELECTED)):
        settings = {"topology": topology, "bidirectional": both, "selector": selector, "wire": WIRES[number % 4]}
        given = dict(zip(("scaled", "voted", "uncompressed"), flags[number % 8], strict=True))
        yield settings, given, True
        if selector == "topk":
            yield settings, given, False
            yield settings, {"measure": Measure(error=True, per_layer=True)}, True
    # Every memory in every topology; ranks and dtypes in turn.
    for (i, topology), (j, memory) in itertools.product(enumerate(TOPOLOGIES), enumerate(MEMORIES)):
        given = {"rank": (i + j) % 2, "dtype": DTYPES[(i + j // 2) % 4], "scaled": True}
        yield {"topology": topology, **memory}, given, True
    for settings in presets.values():
        yield settings, {"voted": True, "scaled": True}, True


@pytest.mark.parametrize(("settings", "given", "with_triton"), [*cases()], ids=str)
def test_an_exchange_on_a_gpu_waits_for_nothing_and_mixes_no_devices(fake, monkeypatch, settings, given, with_triton):
    monkeypatch.setattr(ops, "fast", lambda device: fake if with_triton else None)
    assert copies_of(TopKConfig(**{"ratio": 0.01, **settings}), **given) == []


def test_a_new_endpoint_copies_no_zeros_from_the_host(fake, monkeypatch):
    monkeypatch.setattr(ops, "fast", lambda device: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    monkeypatch.setattr(torch.Tensor, "record_stream", mock.Mock())
    bucket = tuple(torch.empty(size, device=CUDA) for size in SIZES)
    with Copies() as watch:
        Residuals().endpoint(bucket, plan_bucket(TopKConfig(0.01), SIZES, WORLD))
    assert len(watch.found) == 1  # the sizes of the parameters


def counted(row: dict[str, Any], numel: int = 25_000_000, sizes: int = 1) -> dict[str, Any]:
    """Launches of an exchange, and bytes per entry of a worker's turn and of the exchange, between its collectives."""
    settings = dict(each.split("=") for each in row["amount"].split(", "))
    both = row["topology"] != "allgather"
    config = TopKConfig(
        topology=row["topology"], bidirectional=both, **{name: float(settings[name]) for name in settings}
    )
    nodes, local = (int(each) for each in row["nodes x ranks"].split(" x "))
    dtype, scaled = getattr(torch, row["dtype"].split(",")[0]), row["dtype"].endswith("scaled")
    plan = plan_bucket(config, [numel // sizes] * sizes, nodes * local, local, dtype.itemsize)
    end = plan.endpoint(0, dtype, CUDA)
    assert len(end.starts), "made once"
    assert len(end.pieces)
    scale = torch.full((), 2.0**16, device=CUDA) if scaled else None
    g, reply, moved = torch.empty(plan.numel, device=CUDA, dtype=dtype), None, []
    path = guards.exchange(end, g, plan.codecs(selector=end.uplink.selector), scale=scale)
    with Traffic() as traffic, contextlib.suppress(StopIteration):
        while True:
            request = path.send(reply)
            moved.append(traffic.with_kernels()[0])
            reply = reply_to(request, 0, nodes * local, local)
    total, launches = traffic.with_kernels()
    sent = moved[-2 if both else -1] if row["topology"] != "hierarchical" else moved[1]
    assert not {"topk", "sort", "count_nonzero"} & traffic.names
    return {"launches": launches, "worker": round(sent / numel, 1), "exchange": round(total / numel, 1)}


@pytest.mark.parametrize("row", json.loads(COUNTED.read_text()), ids=lambda row: " ".join([*row.values()][:4]))
def test_an_exchange_takes_the_launches_and_bytes_in_the_guide(fake, monkeypatch, row):
    """By arithmetic: adding and clearing alone take 16 bytes per entry."""
    monkeypatch.setattr(ops, "fast", lambda device: fake)
    found = counted(row)
    assert found == {name: row[name] for name in found}, f"enter this into {COUNTED}"


@pytest.mark.parametrize(
    ("nodes", "local", "parameters", "amount"),
    [
        *((nodes, 1, 1, amount) for nodes in (3, 4, 64) for amount in ("saving=50", "ratio=0.001")),
        *((4, local, parameters, "saving=50") for local in (2, 8) for parameters in (1, 300)),
    ],
)
def test_a_bucket_takes_as_many_launches_with_any_number_of_workers_and_parameters(
    fake, monkeypatch, nodes, local, parameters, amount
):
    """And 6 more where ranks share a node, however many do."""
    monkeypatch.setattr(ops, "fast", lambda device: fake)
    topology = "sharded" if local == 1 else "hierarchical"
    row = {"topology": topology, "nodes x ranks": f"{nodes} x {local}", "amount": amount, "dtype": "float32"}
    more = 6 * (local > 1) + (nodes == 3)  # dividing by 3 takes one more
    assert counted(row, sizes=parameters)["launches"] == 40 + more


STEPS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD, decay": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, capturable": (torch.optim.AdamW, {"capturable": True}),
    "Adam, decay": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 1e-4, "foreach": True}),
    "NAdam": (torch.optim.NAdam, {}),
}


@pytest.mark.parametrize(
    ("name", "with_triton"),
    [*((name, True) for name in STEPS), ("SGD, decay", False), ("AdamW, capturable", False)],
)
def test_adapted_momentum_waits_for_nothing_and_launches_one_kernel_for_all_parameters(
    fake, monkeypatch, name, with_triton
):
    monkeypatch.setattr(ops, "fast", lambda device: fake if with_triton else None)
    ops._kind.cache_clear()
    (kind, options), exchange = STEPS[name], torch.nn.Module()
    parameters = [torch.nn.Parameter(torch.empty(1000 + n, device=CUDA)) for n in range(30)]
    optimizer = kind([{"params": parameters[:10]}, {"params": parameters[10:], "lr": 0.2}], lr=0.1, **options)
    adapt_momentum([optimizer], exchange)
    for p in parameters:
        p.grad = torch.empty_like(p)
        optimizer.state[p] = {name: torch.empty_like(p) for name in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
    before = [{**optimizer.state[p]} for p in parameters]
    adapted = AdaptedMomentum.of(optimizer)
    adapted._adapt(optimizer)  # the first call makes the step counts, and copies the tables
    adapted._restore(optimizer)
    with Copies() as watch, Traffic() as traffic:
        adapted._adapt(optimizer)
    ops._kind.cache_clear()
    assert watch.found == []
    if with_triton:
        assert traffic.with_kernels()[1] == 1
    assert all(adapted._members[p].waited.nbytes == p.numel() for p in parameters)
    adapted._restore(optimizer)
    assert [optimizer.state[p] for p in parameters] == before


def test_copies_and_waits_are_detected(fake, monkeypatch):
    """The tests above would fail if there were any."""
    monkeypatch.setattr(ops, "fast", lambda device: None)
    with Copies() as watch:
        torch.ones(3).to(CUDA)
    assert len(watch.found) == 1
    waits = mock.patch.object(reference, "is_finite", lambda x: torch.tensor(bool(x.sum())))
    with waits, pytest.raises(DataDependentOutputException):
        copies_of(TopKConfig(0.01))


@pytest.mark.parametrize("topology", ["sharded", "single_server", "allgather"])
def test_workers_select_in_one_pass_if_servers_do_not_compress(fake, monkeypatch, topology):
    monkeypatch.setattr(ops, "fast", lambda device: fake)
    config = TopKConfig(ratio=0.01, topology=topology, bidirectional=False)
    end = plan_bucket(config, SIZES, WORLD).endpoint(0, torch.float32, CUDA)
    assert end.uplink._send is fake.send
    assert end.downlink is None or end.downlink._send is None
