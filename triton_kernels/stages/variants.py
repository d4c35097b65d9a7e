"""Every variant of the kernels that the launchers can choose, as the arguments of an ahead-of-time compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..options import WARPS
from .prologue import PROLOGUE_BLOCK, prologue_kernel
from .stage import HEAVY_REGISTERS, HEAVY_WARPS, LIGHT_REGISTERS, LIGHT_WARPS, stage_kernel, tile_shape
from .statistics import STATISTICS_BLOCK, STATISTICS_WARPS, statistics_kernel

# dtype of the batch -> Triton's name of a pointer to it
OUTPUTS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "uint8": "*u8"}

_STAGE_POINTERS = {
    "workspace": "*u8",
    "output": "",
    "jobs": "*i64",
    "operations": "*i32",
    "tables": "*i32",
    "tiles": "*i32",
}
_PROLOGUE_POINTERS = dict.fromkeys(("work", "tables", "tiles"), "*i32")
_STATISTICS_POINTERS = {
    "workspace": "*u8",
    "jobs": "*i64",
    "operations": "*i32",
    "tables": "*i32",
    "statistics": "*i32",
}


class Variant(NamedTuple):
    """One kernel with its compile-time constants.

    Attributes:
        kernel: the function under `triton.jit`.
        output: dtype of the batch; "" for a kernel that does not write it.
        flags: compile-time constants that the launcher chooses.
        shape: its other compile-time constants.
        pointers: Triton's type of each argument that is a pointer; all are aligned to 16 bytes.
        warps: `num_warps`.
        registers: `maxnreg` on NVIDIA's GPUs, None where the compiler may choose.
        fuses: the kernel itself asks for multiply-adds with one rounding, as torch's kernels have them.
    """

    kernel: Any
    output: str
    flags: dict[str, bool]
    shape: dict[str, int]
    pointers: dict[str, str]
    warps: int
    registers: int | None
    fuses: bool

    @property
    def name(self) -> str:
        """For instance "stage, light, bfloat16"."""
        name = self.kernel.__name__.removesuffix("_kernel")
        weight = ["heavy" if self.flags["IS_HEAVY"] else "light"] if self.flags else []
        return ", ".join([name, *weight, *([self.output] if self.output else [])])

    @property
    def constants(self) -> dict[str, Any]:
        """Every compile-time constant."""
        return {**self.flags, **self.shape}

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of every argument."""
        pointers = {name: kind or OUTPUTS[self.output] for name, kind in self.pointers.items()}
        return {**pointers, **dict.fromkeys(self.constants, "constexpr")}


def variants() -> Iterator[Variant]:
    """All of them."""
    block_y, block_x = tile_shape(interpreted=False)
    tile = {"BLOCK_Y": block_y, "BLOCK_X": block_x}
    for is_heavy in (False, True):
        warps, registers = (HEAVY_WARPS, HEAVY_REGISTERS) if is_heavy else (LIGHT_WARPS, LIGHT_REGISTERS)
        for output in OUTPUTS:
            flags = {"IS_HEAVY": is_heavy}
            yield Variant(stage_kernel, output, flags, tile, _STAGE_POINTERS, warps, registers, fuses=is_heavy)
    shape = {**tile, "BLOCK": PROLOGUE_BLOCK}
    yield Variant(prologue_kernel, "", {}, shape, _PROLOGUE_POINTERS, WARPS, None, fuses=True)
    shape = {"BLOCK": STATISTICS_BLOCK}
    yield Variant(statistics_kernel, "", {}, shape, _STATISTICS_POINTERS, STATISTICS_WARPS, None, fuses=True)


def some_variants() -> Iterator[Variant]:
    """Those for float32, and what does not depend on the batch."""
    yield from (variant for variant in variants() if variant.output in ("", "float32"))
