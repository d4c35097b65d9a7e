"""Every variant of the JPEG kernels that the launchers can choose, as the arguments of an ahead-of-time compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..options import WARPS
from .color import WARPS as COLOR_WARPS
from .color import color_kernel
from .dc import dc_kernel
from .entropy import BLOCK_BYTES, DC_BLOCKS, LANE_SHAPES, SUM_LANES, SUM_WARPS
from .idct import WARPS as IDCT_WARPS
from .idct import idct_kernel
from .lookup import FIRST_ENTRIES, lookup_kernel
from .owners import BLOCK as OWNERS_BLOCK
from .owners import assign_kernel
from .prefix import sum_before_kernel
from .synchronize import compare_kernel, round_kernel, warm_up_kernel
from .unstuff import count_unstuffed_kernel, unstuff_kernel
from .window import TILE_SHAPE
from .write import write_kernel

# Arguments that are numbers, int32; they come after the tensors.
_NUMBERS = ("columns", "first_column", "lane_bits", "warm_up_bits")
# Triton's type of each tensor, wherever it is an argument; all others are int32.
_TYPES = {
    "stream": "*u8",
    "unstuffed": "*u8",
    "tables": "*u8",
    "lookups": "*u16",
    "items": "*i64",
    "next_items": "*i64",
    "coefficients": "*i16",
    "planes": "*u8",
    "pixels": "*u8",
}


class JpegVariant(NamedTuple):
    """One kernel with its compile-time constants; the names are those of `Variant`.

    Attributes:
        kernel: the function under `triton.jit`.
        name: for instance "jpeg write".
        constants: every compile-time constant.
        warps: `num_warps`.
        registers: the compiler may choose.
        fuses: integers only.
    """

    kernel: Any
    name: str
    constants: dict[str, int]
    warps: int
    registers: None = None
    fuses: bool = False

    @property
    def pointers(self) -> dict[str, str]:
        """Triton's type of each argument that is a pointer; all are aligned to 16 bytes."""
        names = [name for name in self.kernel.arg_names if name not in (*self.constants, *_NUMBERS)]
        return {name: _TYPES.get(name, "*i32") for name in names}

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of every argument."""
        numbers = [name for name in self.kernel.arg_names if name in _NUMBERS]
        return {**self.pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(self.constants, "constexpr")}


def jpeg_variants(threads_of_warp: int) -> Iterator[JpegVariant]:
    """All of them, in the order of their launches.

    Args:
        threads_of_warp: on the device; the kernels that decode have a lane for each.
    """
    yield JpegVariant(assign_kernel, "jpeg owners", {"BLOCK": OWNERS_BLOCK}, 1)
    for shape in LANE_SHAPES:
        lane_bytes = shape.bits // 8
        constants = {"LANE_BYTES": lane_bytes, "BLOCK": max(1, BLOCK_BYTES // lane_bytes)}
        yield JpegVariant(count_unstuffed_kernel, f"jpeg count, {shape.bits} bits", constants, WARPS)
        yield JpegVariant(unstuff_kernel, f"jpeg unstuff, {shape.bits} bits", constants, WARPS)
    yield JpegVariant(sum_before_kernel, "jpeg sums", {"BLOCK": SUM_LANES}, SUM_WARPS)
    yield JpegVariant(lookup_kernel, "jpeg tables", {"BLOCK": FIRST_ENTRIES.value}, WARPS)
    lanes = {"BLOCK": threads_of_warp}
    yield JpegVariant(warm_up_kernel, "jpeg warm-up", lanes, 1)
    yield JpegVariant(compare_kernel, "jpeg compare", lanes, 1)
    yield JpegVariant(round_kernel, "jpeg round", lanes, 1)
    yield JpegVariant(write_kernel, "jpeg write", lanes, 1)
    yield JpegVariant(dc_kernel, "jpeg DC", {"BLOCK": DC_BLOCKS}, WARPS)
    constants = {"BLOCK_ROWS": TILE_SHAPE.block_rows, "BLOCK_COLUMNS": TILE_SHAPE.block_columns}
    yield JpegVariant(idct_kernel, "jpeg inverse transform", constants, IDCT_WARPS)
    constants = {"BLOCK_Y": TILE_SHAPE.rows, "BLOCK_X": TILE_SHAPE.columns}
    yield JpegVariant(color_kernel, "jpeg color", constants, COLOR_WARPS)


def some_jpeg_variants(threads_of_warp: int) -> Iterator[JpegVariant]:
    """Those for large batches."""
    shorter = tuple(f"{shape.bits} bits" for shape in LANE_SHAPES[:-1])
    for variant in jpeg_variants(threads_of_warp):
        if not variant.name.endswith(shorter):
            yield variant
