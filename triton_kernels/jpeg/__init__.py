"""A batched decoder of baseline JPEG files, bit-exact to libjpeg-turbo.

`jpeg_rows.py` describes the tables of a batch, and `lanes` divides the work. `entropy` decodes the bytes of the scans
to coefficients, `idct` and `color` compute pixels from them. The docstring of each file describes its algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..launching import Variant
from ..shapes import LANE_SHAPES, TILE_SHAPE
from .color import color_kernel
from .entropy import BLOCK_BYTES, DC_BLOCKS, DC_PARTS, SUM_LANES, SUM_WARPS
from .idct import WARPS as IDCT_WARPS
from .idct import idct_kernel
from .lanes import BLOCK as OWNERS_BLOCK
from .lanes import assign_kernel, count_unstuffed_kernel, sum_before_kernel, unstuff_kernel
from .passes import (
    add_dc_kernel,
    compare_kernel,
    count_kernel,
    finish_kernel,
    round_kernel,
    sum_dc_kernel,
    warm_up_kernel,
)
from .symbols import FIRST_ENTRIES, lookup_kernel


def jpeg_variants(threads_of_warp: int) -> Iterator[Variant]:
    """Every variant that the launchers can choose on a device with such warps, in the order of their launches."""
    yield Variant(assign_kernel, "jpeg owners", {"BLOCK": OWNERS_BLOCK}, 1)
    for shape in LANE_SHAPES:
        lane_bytes = shape.bits // 8
        constants = {"LANE_BYTES": lane_bytes, "BLOCK": BLOCK_BYTES // lane_bytes}
        yield Variant(count_unstuffed_kernel, f"jpeg count, {shape.bits} bits", constants)
        yield Variant(unstuff_kernel, f"jpeg unstuff, {shape.bits} bits", constants)
    yield Variant(sum_before_kernel, "jpeg sums", {"BLOCK": SUM_LANES}, SUM_WARPS)
    yield Variant(lookup_kernel, "jpeg tables", {"BLOCK": FIRST_ENTRIES.value})
    lanes = {"BLOCK": threads_of_warp}  # a program that decodes has a lane for each thread
    yield Variant(warm_up_kernel, "jpeg warm-up", lanes, 1)
    yield Variant(compare_kernel, "jpeg compare", lanes, 1)
    yield Variant(round_kernel, "jpeg round", lanes, 1)
    yield Variant(count_kernel, "jpeg count blocks", {"BLOCK": SUM_LANES}, SUM_WARPS)
    yield Variant(finish_kernel, "jpeg finish", lanes, 1)
    parts = {"PARTS": DC_PARTS, "BLOCK": DC_BLOCKS}
    yield Variant(sum_dc_kernel, "jpeg DC sums", parts)
    yield Variant(add_dc_kernel, "jpeg DC", parts)
    constants = {"BLOCK_ROWS": TILE_SHAPE.block_rows, "BLOCK_COLUMNS": TILE_SHAPE.block_columns}
    yield Variant(idct_kernel, "jpeg inverse transform", constants, IDCT_WARPS)
    constants = {"BLOCK_Y": TILE_SHAPE.rows, "BLOCK_X": TILE_SHAPE.columns}
    yield Variant(color_kernel, "jpeg color", constants)
