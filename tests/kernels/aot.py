"""Compiles the stage kernel ahead of time, without a GPU, and prints what each variant uses as JSON.

Run as a script, in a process where Triton's interpreter is off: `python tests/kernels/aot.py cuda:90 hip:gfx942`.
With `--some` as its first argument it leaves out what lies between the smallest and the largest variants.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_sink.triton_kernels.stage import FLOAT64_WARPS, WARPS, stage_kernel, tile_shape

ALIGNED = [["tt.divisibility", 16]]
OUTPUTS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "uint8": "*u8"}


def target(name: str) -> GPUTarget:
    """"cuda:90" or "hip:gfx942"."""
    backend, arch = name.split(":")
    return GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


def variants() -> list[dict[str, Any]]:
    """Every variant that `run_stage` can be asked for."""
    flags = itertools.product((False, True), repeat=4)
    return [
        {"output": output, "IS_LAST": last, "HAS_FLOAT64": hue, "HAS_STATISTIC": statistic, "HAS_ERASE": erase}
        for last, hue, statistic, erase in flags
        for output in (OUTPUTS if last else ("float32",))
    ]


def some_variants() -> list[dict[str, Any]]:
    """The smallest and the largest variants, those with histograms alone, and every output dtype once."""
    flags = ("HAS_FLOAT64", "HAS_STATISTIC", "HAS_ERASE")
    chosen = {(False, False, False), (False, True, False), (True, True, True)}
    return [
        variant
        for variant in variants()
        if tuple(variant[flag] for flag in flags) in chosen
        and (variant["output"] == "float32" or not any(variant[flag] for flag in flags))
    ]


def compile_variant(variant: dict[str, Any], where: GPUTarget) -> Any:
    """The compiled kernel of one variant."""
    constants = {name: variant[name] for name in ("IS_LAST", "HAS_FLOAT64", "HAS_STATISTIC", "HAS_ERASE")}
    constants["BLOCK_Y"], constants["BLOCK_X"] = tile_shape(interpreted=False)
    signature = {
        "workspace": "*u8",
        "output": OUTPUTS[variant["output"]],
        "jobs": "*i64",
        "operations": "*i32",
        "tables": "*i32",
        "tiles": "*i32",
        "histograms": "*i32",
        "value_tables": "*fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    attributes = {(position,): ALIGNED for position in range(8)}
    warps = FLOAT64_WARPS if variant["HAS_FLOAT64"] else WARPS
    source = ASTSource(fn=stage_kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=where, options={"num_warps": warps, "enable_fp_fusion": False})


def usage(kernel: Any, where: GPUTarget) -> dict[str, Any]:
    """Registers, spilled bytes, shared memory, and instructions that would break equal bits."""
    if where.backend == "hip":
        text = kernel.asm["amdgcn"]
        spills = sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text)))
        registers = max(map(int, re.findall(r"\.vgpr_count:\s*(\d+)", text)))
        return {"registers": registers, "spills": spills, "shared": kernel.metadata.shared, "inexact": []}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    local = int(re.search(r"LOCAL:(\d+)", report)[1])  # type: ignore[index]
    stack = int(re.search(r"STACK:(\d+)", report)[1])  # type: ignore[index]
    inexact = sorted(set(re.findall(r"\b(?:div\.full|fma)\.\S+|\b\w+\.approx\S*", kernel.asm["ptx"])))
    return {
        "registers": int(re.search(r"REG:(\d+)", report)[1]),  # type: ignore[index]
        "spills": local + stack,
        "shared": kernel.metadata.shared,
        "inexact": inexact,
    }


def main(names: list[str]) -> None:
    rows = []
    chosen = some_variants() if names[0] == "--some" else variants()
    for name in names[names[0] == "--some" :]:
        where = target(name)
        for variant in chosen:
            rows.append({"target": name, **variant, **usage(compile_variant(variant, where), where)})
            print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
