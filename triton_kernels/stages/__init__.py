"""The kernels that transform images: the prologue, the stages, and the statistics that some stages need."""

from __future__ import annotations

from collections.abc import Iterator

from ..launching import Variant
from ..shapes import STAGE_TILE
from .prologue import PROLOGUE_BLOCK, prologue_kernel
from .stage import HEAVY_REGISTERS, HEAVY_WARPS, LIGHT_REGISTERS, LIGHT_WARPS, stage_kernel
from .statistics import STATISTICS_BLOCK, STATISTICS_WARPS, statistics_kernel

# dtype of the batch -> Triton's name of a pointer to it
OUTPUTS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "uint8": "*u8"}


def variants() -> Iterator[Variant]:
    """Every variant of these kernels that the launchers can choose."""
    tile = dict(zip(("BLOCK_Y", "BLOCK_X"), STAGE_TILE, strict=True))
    for is_heavy in (False, True):
        warps, registers = (HEAVY_WARPS, HEAVY_REGISTERS) if is_heavy else (LIGHT_WARPS, LIGHT_REGISTERS)
        for dtype, output in OUTPUTS.items():
            name = f"stage, {'heavy' if is_heavy else 'light'}, {dtype}"
            yield Variant(stage_kernel, name, {"IS_HEAVY": is_heavy, **tile}, warps, registers, is_heavy, output)
    yield Variant(prologue_kernel, "prologue", {**tile, "BLOCK": PROLOGUE_BLOCK}, fuses=True)
    yield Variant(statistics_kernel, "statistics", {"BLOCK": STATISTICS_BLOCK}, STATISTICS_WARPS, fuses=True)
