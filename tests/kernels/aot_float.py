"""Compiles the float stage kernel ahead of time, without a GPU, as `aot.py` does the one on uint8."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import triton
from aot import ALIGNED, OUTPUTS, target, usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_sink.triton_kernels.float_stage import FLOAT_WARPS, float_stage_kernel
from torch_sink.triton_kernels.stage import tile_shape

FLAGS = ("IS_LAST", "HAS_STATISTIC", "IS_HEAVY")


def variants() -> list[dict[str, Any]]:
    """Every variant that `run_float_stage` can be asked for."""
    flags = itertools.product((False, True), repeat=3)
    return [
        {"output": output, **dict(zip(FLAGS, values, strict=True))}
        for values in flags
        for output in (OUTPUTS if values[0] else ("float32",))
    ]


def some_variants() -> list[dict[str, Any]]:
    """The largest variant: one takes ten seconds."""
    return [variant for variant in variants() if [variant[flag] for flag in FLAGS] == [False, True, True]]


def compile_variant(variant: dict[str, Any], where: GPUTarget) -> Any:
    """The compiled kernel of one variant."""
    constants = {name: variant[name] for name in FLAGS}
    constants["BLOCK_Y"], constants["BLOCK_X"] = tile_shape(interpreted=False)
    signature = {
        "workspace": "*u8",
        "floats": "*fp32",
        "output": OUTPUTS[variant["output"]],
        "jobs": "*i64",
        "operations": "*i32",
        "tables": "*i32",
        "tiles": "*i32",
        "records": "*i32",
        "gray_sums": "*i64",
        "value_tables": "*fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    attributes = {(position,): ALIGNED for position in range(10)}
    source = ASTSource(fn=float_stage_kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=where, options={"num_warps": FLOAT_WARPS, "enable_fp_fusion": False})


def float_usage(variant: dict[str, Any], where: GPUTarget) -> dict[str, Any]:
    """As `aot.usage`; float32 multiply-adds with one rounding, or two at a time, are what the kernel asks for."""
    used = usage(compile_variant(variant, where), where)
    return {**used, "inexact": [text for text in used["inexact"] if text not in ("fma.rn.f32", "fma.rn.f32x2")]}


def main(names: list[str]) -> None:
    chosen = some_variants() if names[0] == "--some" else variants()
    rows = []
    for name in names[names[0] == "--some" :]:
        for variant in chosen:
            rows.append({"target": name, **variant, **float_usage(variant, target(name))})
            print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
