"""The Triton kernels, compiled without a GPU: registers, spills and the width of loads."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_topk.core.layout import BLOCK, Layout, k_of
from lightning_topk.core.wire import WIRES, Codec

triton = pytest.importorskip("triton")
from lightning_topk.core.ops import cuda, kernels  # noqa: E402 imports triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """A kernel with the types of its arguments, values of its constants and the number of warps of a launch."""

    kinds: str
    constants: dict[str, int]
    warps: int = 4


TILES = {"TILE": cuda.TILE, "BLOCK": BLOCK}
CODED = [(32, 10), (16, 10), (8, 6), (4, 4)]
"""Bits of values, and of low parts of positions."""
KERNELS = {
    **{
        f"move {name}": Compiled(f"*fp32 *{name} *i1 *fp32 *i32 *i32 i32 i32 i32", TILES, warps)
        for name, warps in (("fp32", 4), ("bf16", 8))
    },
    "is_finite": Compiled("*fp32 *i1 i32", {"TILE": cuda.TILE}),
    "sample": Compiled("*fp32 *fp32 *i1 *fp32 i32 i32 i32", {"TILE": cuda.SLOTS}),
    "gather": Compiled("*fp32 *i32 *i32 *i32 *i32 *fp32 i32 i32 i32", TILES, warps=16),
    "count": Compiled("*fp32 *fp32 *i32 i32 i32", {"TILE": cuda.SLOTS}),
    "choose": Compiled("*i32 *fp32 *fp32 *i32 *i32 *i32 *fp32 i32 i32 i32 i32", {"TILE": cuda.SLOTS}),
    **{
        f"write {bits}": Compiled(
            "*fp32 *i1 *i32 *fp32 *u8 i32 i32 i32 fp32 i32 i32 i32",
            {"BITS": bits, "LOW": low, "DELIVERED": 17, "SLOTS": cuda.SLOTS, "BLOCK": BLOCK},
            warps=8,
        )
        for bits, low in CODED
    },
    "catch_up": Compiled(
        "*fp32 *u8 *fp32 *fp32 *fp32 *fp32 i32 fp32 fp32 fp32 fp32 fp32",
        {"DECAY": 1, "SKIPPABLE": 1, "TILE": cuda.SLOTS},
    ),
    "mark": Compiled("*i32 *i32 i32 i32 i32", {"LOW": 10, "SLOTS": cuda.SLOTS}),
    "count_bits": Compiled("*u8 *i32 i32 i32 i32 i32", {"TILE": cuda.OCTETS}),
    **{
        f"add {bits}": Compiled(
            "*u8 *i32 *i32 *fp32 *i1 i32 i32 i32 i32 fp32 i32 i32 i32 i32 i32",
            {"BITS": bits, "LOW": low, "DEALT": 1, "TILE": cuda.OCTETS, "BLOCK": BLOCK},
        )
        for bits, low in CODED
    },
}
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this triton has no assembler"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted"),
]


def assembled(name: str, arch: int, aligned: bool, folder: Path) -> tuple[str, str]:
    """The assembler's report on a kernel, and its instructions, for a compute capability.

    The number of shards may be ``aligned``, a multiple of 16, for which Triton makes a variant.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, given = getattr(kernels, name.split()[0]), KERNELS[name]
    kinds, constants = given.kinds.split(), given.constants
    assert function.arg_names[len(kinds) :] == list(constants)
    signature = dict(zip(function.arg_names, [*kinds, *["constexpr"] * len(constants)], strict=True))
    values = {(function.arg_names.index(constant),): value for constant, value in constants.items()}
    even = [n for n, kind in enumerate(kinds) if kind[0] == "*" or (aligned and function.arg_names[n] == "shards")]
    source = ASTSource(function, signature, values, {(n,): [["tt.divisibility", 16]] for n in even})
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": given.warps, **cuda.EXACT})
    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    run = {"capture_output": True, "text": True, "check": True}
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", binary], **run)
    return usage.stdout + usage.stderr, subprocess.run([TOOLS / "cuobjdump", "-sass", binary], **run).stdout


@pytest.mark.parametrize(("arch", "aligned"), [(80, False), (90, True)])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_with_next_to_no_spills_and_moves_16_bytes_at_a_time(tmp_path, name, arch, aligned):
    usage, code = assembled(name, arch, aligned, tmp_path)
    # Triton 3.5 (torch 2.9) allocates more for one kernel on sm_80, and 3.8 (torch 2.14) 215 for `move fp32` on sm_90.
    # That leaves 8 warps on a processor; their loads in flight, 256 bytes per thread, should keep its memory busy.
    many = triton.__version__.startswith(("3.5", "3.8"))
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= (255 if many else 128), usage
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 8, usage  # Triton 3.8 spills one value of one kernel, once
    assert re.search(r"LOCAL:0\b", usage), usage
    if "DELIVERED" not in KERNELS[name].constants:  # `write` rounds quotients as IEEE 754 does
        assert "CALL" not in code  # such as a 64-bit division
    if name == "move fp32":  # 32 elements per thread, of two vectors
        assert len(re.findall(r"LDG\.E\.128", code)) >= 16
        assert len(re.findall(r"STG\.E\.128", code)) >= 16


class Variants:
    """Stands for a kernel, and records the variants that Triton would compile."""

    def __init__(self, kernel) -> None:
        self._params = kernel.params
        self.compiled: set[tuple] = set()
        """Keys of the variants: constants, types, and properties of integers on which Triton specialises."""
        self.needed: set[tuple] = set()
        """The same keys without properties of integers, except of the number of shards."""

    def __getitem__(self, grid):
        def launch(*arguments, **options) -> None:
            both = [self._keys(*each) for each in zip(self._params, arguments, strict=True)]
            for found, keys in zip((self.compiled, self.needed), zip(*both, strict=True), strict=True):
                found.add((*keys, *options.items()))

        return launch

    def _keys(self, param, value) -> tuple:
        if param.is_constexpr:
            return value, value
        if isinstance(value, torch.Tensor | float):
            kind = getattr(value, "dtype", float)
            return kind, kind
        special = (value == 1, value % 16 == 0)
        return None if param.do_not_specialize else special, special if param.name == "shards" else None


def test_a_kernel_is_compiled_once_for_all_sizes(monkeypatch):
    """A schedule changes k in every step: each variant would take a second or two of the lane's time."""
    kinds = {name: Variants(each) for name, each in vars(kernels).items() if isinstance(each, triton.JITFunction)}
    for name, each in kinds.items():
        monkeypatch.setattr(kernels, name, each)
    finite = torch.tensor(True)
    for numel in (100_000, 54_321, 262_144):
        layout, e, x = Layout(numel, 8), torch.zeros(numel), torch.zeros(numel)
        for step in range(30):
            codec = Codec(WIRES["bf16"], layout.shard_size, layout.k_per_shard(k_of(numel, 0.1 * 0.9**step)))
            cuda.is_finite(x)
            cuda.send(e, x, finite, layout, codec.format(torch.float32), torch.float32)
            payloads = torch.zeros(8, codec.nbytes, dtype=torch.uint8)
            cuda.receive(payloads, Layout(layout.shard_size), codec.format(), 8, x[: layout.shard_size])
            cuda.receive(payloads, layout, codec.format(), 1, x)
            cuda.catch_up_(e, torch.zeros(numel, dtype=torch.uint8), x, x, 0.9, 1.0, 0.0, None, e)
    used = {name: each for name, each in kinds.items() if each.compiled}
    assert {*used} == {name.split()[0] for name in KERNELS}
    for name, each in used.items():
        assert len(each.compiled) == len(each.needed), name
