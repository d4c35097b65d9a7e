"""What a compiled kernel uses, read from its machine code: registers, spills, shared memory, instructions, accesses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Results of these differ from those of the exact operations, which the interpreter computes.
INEXACT = re.compile(r"\b(?:div\.full|fma)\.\S+|\b\w+\.approx\S*")

# "        /*0a30*/  @!P0 STG.E.U8 desc[UR4][R2.64], R5 ;"
_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_AMDGCN = re.compile(r"^\t([a-z]\w+)(?:\s|$)", re.MULTILINE)
_SASS_BRANCH = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/[^;]*\bBRA\b[^;]*\b0x([0-9a-f]+)\s*;", re.MULTILINE)
_SASS_BYTES = 16  # of an instruction
# "; %bb.24:                                ;   in Loop: Header=BB0_23 Depth=1"
_AMD_BLOCK = re.compile(r"^(?:\.LBB\w+|; %bb\.\d+):.*(?:\n\s+;.*)*$", re.MULTILINE)
_AMD_BLOCK_OF_LOOP = re.compile(r"\bHeader=(\w+)|^\.L(\w+):[^=]*=>\s*This (?:Inner )?Loop Header\b")
_AMD_BITS = {"byte": 8, "ubyte": 8, "sbyte": 8, "short": 16, "ushort": 16, "sshort": 16, "dword": 32}
_AMD_BITS |= {f"dwordx{count}": 32 * count for count in (2, 3, 4)}


def target(name: str) -> GPUTarget:
    """ "cuda:90" or "hip:gfx942"."""
    backend, arch = name.split(":")
    return GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


def usage(kernel: Any, where: GPUTarget) -> dict[str, Any]:
    """What one compiled kernel uses.

    Args:
        kernel: as `triton.compile` returns it; it needs no device.
        where: the target it was compiled for.

    Returns:
        registers: of a thread.
        spills: bytes of a thread that lie in memory because they did not fit into registers. A scalar that moves to
            another kind of register (a lane of a vector register on AMD's GPUs, a register of a thread instead of a
            uniform one on NVIDIA's) is in none.
        shared: bytes of shared memory of a program.
        instructions: in the machine code, each counted once.
        loop: how many of them stand in the longest loop.
        loads, stores: {bits of one thread's access to global memory: how many instructions}.
        inexact: instructions whose results differ from the interpreter's.
    """
    found = _hip_usage(kernel) if where.backend == "hip" else _cuda_usage(kernel)
    return {**found, "shared": kernel.metadata.shared}


def _hip_usage(kernel: Any) -> dict[str, Any]:
    text = kernel.asm["amdgcn"]
    instructions = _AMDGCN.findall(text)
    return {
        "registers": max(map(int, re.findall(r"\.vgpr_count:\s*(\d+)", text))),
        "spills": sum(map(int, re.findall(r"\.private_segment_fixed_size:\s*(\d+)", text))),
        "instructions": len(instructions),
        "loop": _amd_loop(text),
        "loads": _counted(_amd_bits(name) for name in instructions if re.match(r"(global|buffer|flat)_load", name)),
        "stores": _counted(_amd_bits(name) for name in instructions if re.match(r"(global|buffer|flat)_store", name)),
        "inexact": [],
    }


def _amd_bits(name: str) -> int:
    """ "global_load_ubyte_d16" -> 8."""
    return next(_AMD_BITS[part] for part in name.split("_") if part in _AMD_BITS)


def _amd_loop(text: str) -> int:
    loops: Counter[str] = Counter()
    blocks = list(_AMD_BLOCK.finditer(text))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if loop := _AMD_BLOCK_OF_LOOP.search(block[0]):
            end = following.start() if following else len(text)
            loops[loop[1] or loop[2]] += len(_AMDGCN.findall(text, block.end(), end))
    return max(loops.values(), default=0)


def _cuda_usage(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        resources = _output_of("cuobjdump", "-res-usage", file.name)
        text = _output_of("cuobjdump", "-sass", file.name)
    instructions = _SASS.findall(text)
    figures = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", resources)}
    return {
        "registers": figures["REG"],
        "spills": figures["LOCAL"] + figures["STACK"],
        "instructions": len(instructions),
        "loop": _cuda_loop(text),
        "loads": _counted(_cuda_bits(name) for name in instructions if name.startswith("LDG")),
        "stores": _counted(_cuda_bits(name) for name in instructions if name.startswith("STG")),
        "inexact": sorted(set(INEXACT.findall(kernel.asm["ptx"]))),
    }


def _cuda_loop(text: str) -> int:
    branches = [(int(target, 16), int(place, 16)) for place, target in _SASS_BRANCH.findall(text)]
    # The last instruction of a kernel branches to itself, which ends nothing.
    return max(((end - begin) // _SASS_BYTES + 1 for begin, end in branches if begin < end), default=0)


def _cuda_bits(name: str) -> int:
    """ "STG.E.U8" -> 8, "LDG.E.64" -> 64; no width is said for 32."""
    widths = re.findall(r"\.[US]?(8|16|64|128|256)\b", name)
    return int(widths[0]) if widths else 32


def _counted(bits: Iterable[int]) -> dict[str, int]:
    return {str(width): count for width, count in sorted(Counter(bits).items())}


def _output_of(tool: str, *arguments: str) -> str:
    return subprocess.run([NVIDIA_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
