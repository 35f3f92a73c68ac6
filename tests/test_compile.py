"""The Triton kernels, compiled without a GPU: registers, spills and the width of loads."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_topk.bucket import plan_bucket
from lightning_topk.config import TopKConfig
from lightning_topk.core import ops
from lightning_topk.core.layout import Layout, k_of
from lightning_topk.core.link import COLUMNS
from lightning_topk.core.ops.reference import Rule, Stepped
from lightning_topk.core.wire import WIRES, Codec

triton = pytest.importorskip("triton")
from lightning_topk.core.ops import cuda, kernels  # noqa: E402 imports triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KINDS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.bool: "*i1", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
"""Triton's names of pointers."""
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this triton has no assembler"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted"),
]


class Launched:
    """Stands for a kernel, and records the arguments and options of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.launches.append((arguments, options))


def kind(value: Any) -> str:
    """Triton's name of an argument's type."""
    return KINDS[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"


def launched(
    numel: int, wire: str, ratios: list[float], dtype: torch.dtype = torch.float32, scaled: bool = False
) -> Iterator[Launched]:
    """The launched kernels in exchanges of a gradient ``[numel]``, and in a step of momentum."""
    found = {name: Launched(each) for name, each in vars(kernels).items() if isinstance(each, triton.JITFunction)}
    layout, e, x, scale = Layout(numel, 8), torch.zeros(numel), torch.zeros(numel), torch.ones(()) if scaled else None
    limit = (1.0, torch.ones(1, COLUMNS)) if scaled else None
    with mock.patch.multiple(kernels, **found), mock.patch.object(torch, "_assert_async"):
        for ratio in ratios:
            codec = Codec(WIRES[wire], layout.shard_size, layout.k_per_shard(k_of(numel, ratio)))
            delivered = torch.float16 if scaled else torch.float32
            cuda.Send(e, layout, ops.Scratch())(x.to(dtype), codec.format(delivered), delivered, scale, 1.0, limit)
            payloads = torch.zeros(8, codec.nbytes, dtype=torch.uint8)
            cuda.receive(payloads, Layout(layout.shard_size), codec.format(), 8, x[: layout.shard_size])
            cuda.receive(payloads, layout, codec.format(), 1, x, scale)
            end = plan_bucket(TopKConfig(topology="hierarchical"), [numel], 16, 8).endpoint(0, dtype, e.device)
            rows = torch.zeros(8, end.plan.parts.numel)
            for bad in (None, torch.zeros((), dtype=torch.bool)):
                cuda.copy_parts(x, rows, end.pieces, bad)
            cuda.nan_unless_(x.to(dtype), end.starts, torch.ones((), dtype=torch.bool))
            rule = Rule(0.9, 1.0, 1, 0.1, waits=True, squares=0.95)
            stepped = Stepped(e, torch.zeros(numel, dtype=torch.uint8), x, e, x, x)
            cuda.CatchUp([stepped])([x], [rule], torch.ones(()), torch.zeros(()))
            cuda.fold_signs_(torch.zeros(2, 16), torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, 8))
    return (each for each in found.values() if each.launches)


LAUNCHES = {}
"""Kernels, and arguments and options of their launches in an exchange, by name, wire and variant."""
for wire, dtype, scaled in (
    ("fp32", torch.float32, False),
    ("bf16", torch.bfloat16, False),
    ("int8", torch.float32, False),
    ("int4", torch.float32, False),
    ("fp32", torch.float16, True),
):
    for each in launched(100_000, wire, [0.001], dtype, scaled):
        name = each.kernel.__name__
        differs = ("write", "add", "move", "survey", "squares") if scaled or wire == "bf16" else ("write", "add")
        if (wire, scaled) == ("fp32", False) or name in differs:
            constants = [n for n, param in enumerate(each.kernel.params) if param.is_constexpr]
            made = {tuple(launch[0][n] for n in constants): launch for launch in each.launches}
            for number, launch in enumerate(made.values()):
                LAUNCHES[f"{name} {wire}{' scaled' * scaled}{f' {number}' * bool(number)}"] = each.kernel, *launch


def assembled(name: str, arch: int, aligned: bool, folder: Path) -> tuple[str, str]:
    """The assembler's report on a kernel, and its instructions, for a compute capability.

    The number of shards may be ``aligned``, a multiple of 16, for which Triton makes a variant.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, arguments, options = LAUNCHES[name]
    pairs = list(zip(function.params, arguments, strict=True))
    signature = {param.name: "constexpr" if param.is_constexpr else kind(value) for param, value in pairs}
    values = {(n,): value for n, (param, value) in enumerate(pairs) if param.is_constexpr}
    kinds = enumerate(signature.items())
    even = [n for n, (argument, kind) in kinds if kind[0] == "*" or (aligned and argument == "shards")]
    source = ASTSource(function, signature, values, {(n,): [["tt.divisibility", 16]] for n in even})
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    run = {"capture_output": True, "text": True, "check": True}
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", binary], **run)
    return usage.stdout + usage.stderr, subprocess.run([TOOLS / "cuobjdump", "-sass", binary], **run).stdout


A100, H100 = (80, False), (90, True)
"""Compute capability, and whether the number of shards is a multiple of 16."""
ON = {"fp32": (A100, H100), "bf16": (H100,), "int8": (A100,), "int4": (H100,), "scaled": (A100,)}
"""Other wires have the code of fp32 but for a rounding."""


@pytest.mark.parametrize(
    ("name", "arch", "aligned"),
    [(name, *target) for name in LAUNCHES for target in ON["scaled" if "scaled" in name else name.split()[1]]],
)
def test_a_kernel_compiles_with_next_to_no_spills_and_moves_16_bytes_at_a_time(tmp_path, name, arch, aligned):
    usage, code = assembled(name, arch, aligned, tmp_path)
    # 16 warps fit into a multiprocessor. `move` keeps a thread's elements in flight instead: with 215 registers two
    # blocks fit, and reach 4 TB/s on an H200.
    if triton.__version__ >= "3.8":  # older ones use up to 240
        assert int(re.search(r"REG:(\d+)", usage)[1]) <= (224 if name.startswith("move") else 128), usage
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 8, usage  # Triton 3.8 spills one value of one kernel, once
    assert re.search(r"LOCAL:0\b", usage), usage
    if not name.startswith("write") and "scaled" not in name:  # these round quotients as IEEE 754 does
        assert "CALL" not in code  # such as a 64-bit division
    if name == "move fp32":  # 32 elements per thread, of two vectors
        assert len(re.findall(r"LDG\.E\.128", code)) >= 16
        assert len(re.findall(r"STG\.E\.128", code)) >= 16


def variants(each: Launched, by_integers: bool) -> set[tuple]:
    """Keys of the variants that Triton compiles: constants, types, options, and properties of integers.

    Unless ``by_integers``, only those of the number of shards.
    """
    found = set()
    for arguments, options in each.launches:
        key: list[Any] = [*options.items()]
        for param, value in zip(each.kernel.params, arguments, strict=True):
            if param.is_constexpr or kind(value) != "i32":
                key.append(value if param.is_constexpr else kind(value))
            elif param.name == "shards" or (by_integers and not param.do_not_specialize):
                key.append((value == 1, value % 16 == 0))
        found.add(tuple(key))
    return found


def test_a_kernel_is_compiled_once_for_all_sizes():
    """A schedule changes k in every step: each variant would take a second or two of the lane's time."""
    by_name: dict[str, Launched] = {}
    for numel in (100_000, 54_321, 262_144):
        for each in launched(numel, "bf16", [0.1 * 0.9**step for step in range(30)], scaled=True):
            by_name.setdefault(each.kernel.__name__, each).launches += each.launches
    assert {*by_name} == {name.split()[0] for name in LAUNCHES}
    for name, each in by_name.items():
        assert len(variants(each, True)) == len(variants(each, False)), name
