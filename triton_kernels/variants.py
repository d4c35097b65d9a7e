"""Every variant of the kernels that the launchers can choose, as the arguments of an ahead-of-time compilation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from .float_stage import FLOAT_REGISTERS, FLOAT_WARPS, float_stage_kernel
from .stage import FLOAT64_WARPS, WARPS, most_registers, stage_kernel, tile_shape

# dtype of the batch -> Triton's name of a pointer to it
OUTPUTS = {"float32": "*fp32", "float64": "*fp64", "float16": "*fp16", "bfloat16": "*bf16", "uint8": "*u8"}

_STAGE_POINTERS = {
    "workspace": "*u8",
    "output": "",
    "jobs": "*i64",
    "operations": "*i32",
    "tables": "*i32",
    "tiles": "*i32",
    "histograms": "*i32",
    "value_tables": "*fp32",
}
_FLOAT_STAGE_POINTERS = {
    "workspace": "*u8",
    "floats": "*fp32",
    "output": "",
    "jobs": "*i64",
    "operations": "*i32",
    "tables": "*i32",
    "tiles": "*i32",
    "gray_sums": "*i64",
    "value_tables": "*fp32",
}


class Variant(NamedTuple):
    """One kernel with its compile-time constants.

    Attributes:
        kernel: the function under `triton.jit`.
        output: dtype of the batch; what a launch that is not the last writes does not depend on it.
        flags: compile-time constants that the launcher chooses.
        pointers: Triton's type of each argument that is a pointer; all are aligned to 16 bytes.
        warps: `num_warps`.
        registers: `maxnreg` on NVIDIA's GPUs, None where the compiler may choose.
        fuses: the kernel itself asks for multiply-adds with one rounding, as torch's kernels have them.
    """

    kernel: Any
    output: str
    flags: dict[str, bool]
    pointers: dict[str, str]
    warps: int
    registers: int | None
    fuses: bool

    @property
    def name(self) -> str:
        """For instance "stage, last, erase, bfloat16"."""
        flags = [flag.lower().replace("has_", "").replace("is_", "") for flag, is_set in self.flags.items() if is_set]
        name = self.kernel.__name__.removesuffix("_kernel").replace("_", " ")
        return ", ".join([name, *flags, *([self.output] if self.flags["IS_LAST"] else [])])

    @property
    def constants(self) -> dict[str, Any]:
        """Every compile-time constant."""
        block_y, block_x = tile_shape(interpreted=False)
        return {**self.flags, "BLOCK_Y": block_y, "BLOCK_X": block_x}

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of every argument."""
        pointers = {name: kind or OUTPUTS[self.output] for name, kind in self.pointers.items()}
        return {**pointers, **dict.fromkeys(self.constants, "constexpr")}


def variants() -> Iterator[Variant]:
    """All of them."""
    for last, float64, statistic, erase in itertools.product((False, True), repeat=4):
        flags = {"IS_LAST": last, "HAS_FLOAT64": float64, "HAS_STATISTIC": statistic, "HAS_ERASE": erase}
        for output in OUTPUTS if last else ("float32",):
            warps, registers = FLOAT64_WARPS if float64 else WARPS, most_registers(has_float64=float64, has_erase=erase)
            yield Variant(stage_kernel, output, flags, _STAGE_POINTERS, warps, registers, fuses=False)
    for last, statistic, heavy in itertools.product((False, True), repeat=3):
        flags = {"IS_LAST": last, "HAS_STATISTIC": statistic, "IS_HEAVY": heavy}
        for output in OUTPUTS if last else ("float32",):
            if output == "uint8" and statistic:
                continue  # a contrast on floats, which are not turned back into bytes
            yield Variant(
                float_stage_kernel, output, flags, _FLOAT_STAGE_POINTERS, FLOAT_WARPS, FLOAT_REGISTERS, fuses=True
            )


def some_variants() -> Iterator[Variant]:
    """Those for float32 that differ most: the largest, with float64 and without, and the smallest of each kernel."""
    for variant in variants():
        if variant.output != "float32":
            continue
        flags = dict(variant.flags)
        last, float64 = flags.pop("IS_LAST"), flags.pop("HAS_FLOAT64", False)
        if all(flags.values()) or (last and not float64 and not any(flags.values())):
            yield variant
