"""The Triton kernels, compiled for GPUs that need not be there: registers, spills and the width of loads."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from lightning_topk.core.layout import BLOCK

triton = pytest.importorskip("triton")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KERNELS = {
    "_move": ["*fp32", "*fp32", "*i1", "*fp32", "*i32", "*i32", "i32"],
    "_gather": ["*fp32", "*i32", "*i32", "*i64", "*fp32", "i32", "i32"],
}
"""The types of their arguments, but for the constants at the end."""
WARPS = {"_move": 4, "_gather": 16}
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this triton has no assembler"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted"),
]


def assembled(name: str, arch: int, aligned: bool, folder: Path) -> tuple[str, str]:
    """What the assembler says of a kernel, and its instructions.

    Args:
        name: The kernel.
        arch: The compute capability.
        aligned: Whether its integers are multiples of 16, which Triton makes a variant for.
        folder: Where to write files.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_topk.core.ops import kernels

    function, kinds = getattr(kernels, name), KERNELS[name]
    constants = {"TILE": kernels.TILE, "BLOCK": BLOCK}
    assert function.arg_names[len(kinds) :] == list(constants)
    signature = dict(zip(function.arg_names, [*kinds, "constexpr", "constexpr"], strict=True))
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(function.arg_names.index(constant),): value for constant, value in constants.items()},
        attrs={(n,): [["tt.divisibility", 16]] for n, kind in enumerate(kinds) if aligned or kind.startswith("*")},
    )
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": WARPS[name]})
    binary = folder / f"{name}.cubin"
    binary.write_bytes(made.asm["cubin"])
    run = {"capture_output": True, "text": True, "check": True}
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", binary], **run)
    return usage.stdout + usage.stderr, subprocess.run([TOOLS / "cuobjdump", "-sass", binary], **run).stdout


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_without_spills_and_moves_16_bytes_at_a_time(tmp_path, name, arch, aligned):
    usage, code = assembled(name, arch, aligned, tmp_path)
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= 128, usage
    assert re.search(r"STACK:0\b", usage), usage
    assert re.search(r"LOCAL:0\b", usage), usage
    assert "CALL" not in code  # such as a division of 64 bits
    if name == "_move":  # 32 elements a thread, of two vectors
        assert len(re.findall(r"LDG\.E\.128", code)) >= 16
        assert len(re.findall(r"STG\.E\.128", code)) >= 16
