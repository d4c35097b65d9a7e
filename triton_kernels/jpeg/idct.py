"""Dequantization and the inverse DCT: coefficients of blocks -> samples in planes.

The transform is the "slow but accurate" integer one of libjpeg (`jidctint.c`; Loeffler, Ligtenberg and Moschytz, 1989:
12 multiplications a row or column): first down the columns, with 2 more bits than the samples have, then along the
rows. Constants have 13 bits after the point. Only corrupt files hold coefficients so large that the 16 bits between
the steps matter. There the values wrap and saturate as in libjpeg-turbo's code for x86-64 (`jidctint-avx2.asm`).

A thread holds a column of a block, and after the first pass a row of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..options import compiler_options
from .layout import (
    BLOCK_TILES,
    FIRST_BLOCK,
    FIRST_BLOCK_TILE,
    MCU_LEFT,
    MCU_TOP,
    MCUS_PER_ROW,
    PLANES,
    PLANES_UNIT,
    QUANTIZATION,
    UNITS,
)
from .owners import assign_owners
from .window import TileShape, window_of


@triton.jit
def idct_kernel(coefficients, quantization, planes, images, windows, tile_images, BLOCKS: tl.constexpr):
    """Transforms a run of BLOCKS blocks of the window of one image.

    Args:
        coefficients: int16 [blocks, 64], zigzag order.
        quantization: int32 [tables, 64], zigzag order.
        planes: uint8 [bytes], written to.
        images: int32 [images, IMAGE_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
        tile_images: int32 [tiles], the image of each tile, or NO_OWNER.
    """
    number = tl.load(tile_images + tl.program_id(0))
    if number < 0:
        return
    image, window, across, down, luma_across, luma_down = window_of(number, images, windows)
    mcus = across * down
    units = tl.load(image + UNITS)
    luma_units = luma_across * luma_down

    index = (tl.program_id(0) - tl.load(window + FIRST_BLOCK_TILE)) * BLOCKS + tl.arange(0, BLOCKS)
    exists = index < mcus * units
    mcu, unit = index // units, index % units
    column, row = mcu % across, mcu // across
    mcu_of_image = tl.load(window + MCU_LEFT) + column
    mcu_of_image += (tl.load(window + MCU_TOP) + row) * tl.load(image + MCUS_PER_ROW)
    block = tl.load(image + FIRST_BLOCK) + mcu_of_image * units + unit

    is_luma = unit < luma_units
    component = tl.where(is_luma, 0, unit - luma_units + 1)
    table = tl.load(image + QUANTIZATION + component, mask=exists, other=0)
    column = tl.where(is_luma, column * luma_across + unit % luma_across, column)
    row = tl.where(is_luma, row * luma_down + unit // luma_across, row)
    stride = 8 * tl.where(is_luma, across * luma_across, across)
    # Planes before this one, in blocks: those of the luma, and one for each chroma component.
    before = mcus * tl.where(is_luma, 0, unit)
    target = planes + (tl.load(window + PLANES) + before).to(tl.int64) * PLANES_UNIT + row * (8 * stride) + column * 8

    at = tl.arange(0, 8)[None, :]
    source = coefficients + block.to(tl.int64)[:, None] * 64
    steps = quantization + table[:, None] * 64
    exists = exists[:, None]
    c0 = tl.load(source + _zigzag(0, at), mask=exists, other=0)
    c1 = tl.load(source + _zigzag(1, at), mask=exists, other=0)
    c2 = tl.load(source + _zigzag(2, at), mask=exists, other=0)
    c3 = tl.load(source + _zigzag(3, at), mask=exists, other=0)
    c4 = tl.load(source + _zigzag(4, at), mask=exists, other=0)
    c5 = tl.load(source + _zigzag(5, at), mask=exists, other=0)
    c6 = tl.load(source + _zigzag(6, at), mask=exists, other=0)
    c7 = tl.load(source + _zigzag(7, at), mask=exists, other=0)
    only_first_row = tl.max(((c1 | c2 | c3 | c4 | c5 | c6 | c7) != 0).to(tl.int32), axis=1)[:, None] == 0
    c0 = _dequantized(c0, steps, 0, at)
    c1 = _dequantized(c1, steps, 1, at)
    c2 = _dequantized(c2, steps, 2, at)
    c3 = _dequantized(c3, steps, 3, at)
    c4 = _dequantized(c4, steps, 4, at)
    c5 = _dequantized(c5, steps, 5, at)
    c6 = _dequantized(c6, steps, 6, at)
    c7 = _dequantized(c7, steps, 7, at)

    # The 13 bits of the constants, less the 2 that are kept.
    c0, c1, c2, c3, c4, c5, c6, c7 = _inverse_dct(c0, c1, c2, c3, c4, c5, c6, c7, 11)
    c0 = _between(c0, only_first_row)
    c1 = _between(c1, only_first_row)
    c2 = _between(c2, only_first_row)
    c3 = _between(c3, only_first_row)
    c4 = _between(c4, only_first_row)
    c5 = _between(c5, only_first_row)
    c6 = _between(c6, only_first_row)
    c7 = _between(c7, only_first_row)
    values = tl.trans(_together(c0, c1, c2, c3, c4, c5, c6, c7, BLOCKS), (0, 2, 1))
    c0, c1, c2, c3, c4, c5, c6, c7 = _apart(values, BLOCKS)
    # Those 13, those 2, and 3 for the scale of the transform.
    c0, c1, c2, c3, c4, c5, c6, c7 = _inverse_dct(c0, c1, c2, c3, c4, c5, c6, c7, 18)
    values = _together(c0, c1, c2, c3, c4, c5, c6, c7, BLOCKS)

    samples = tl.minimum(tl.maximum(values + 128, 0), 255).to(tl.uint8)
    at = tl.arange(0, 8)
    target = target[:, None, None] + at[None, :, None] * stride[:, None, None] + at[None, None, :]
    tl.store(target, samples, mask=exists[:, :, None])


@triton.jit
def _zigzag(ROW: tl.constexpr, column):
    """Position of a coefficient in zigzag order; diagonals with an odd number run downwards."""
    diagonal = ROW + column
    # The second half of the order is the first half backwards.
    flipped = diagonal > 7
    row = tl.where(flipped, 7 - ROW, ROW)
    column = tl.where(flipped, 7 - column, column)
    diagonal = row + column
    position = diagonal * (diagonal + 1) // 2 + tl.where(diagonal % 2 == 1, row, column)
    return tl.where(flipped, 63 - position, position)


@triton.jit
def _wrapped(value):
    """int32 -> what 16 bits keep of it."""
    return value.to(tl.int16).to(tl.int32)


@triton.jit
def _dequantized(coefficient, steps, ROW: tl.constexpr, column):
    return _wrapped(coefficient.to(tl.int32) * tl.load(steps + _zigzag(ROW, column)))


@triton.jit
def _between(value, only_first_row):
    """16 bits for the second pass: saturated, or wrapped where libjpeg-turbo takes its way for empty rows."""
    return tl.where(only_first_row, _wrapped(value), tl.minimum(tl.maximum(value, -32768), 32767))


@triton.jit
def _inverse_dct(c0, c1, c2, c3, c4, c5, c6, c7, SHIFT: tl.constexpr):
    """Eight values of one dimension, int32, rounded to the nearest after a shift."""
    # The even part; constants are sums of cosines times 2 ** 13.
    z1 = (c2 + c6) * 4433
    t2 = z1 - c6 * 15137
    t3 = z1 + c2 * 6270
    t0 = _wrapped(c0 + c4) << 13
    t1 = _wrapped(c0 - c4) << 13
    rounding: tl.constexpr = 1 << (SHIFT - 1)
    e0 = t0 + t3 + rounding
    e3 = t0 - t3 + rounding
    e1 = t1 + t2 + rounding
    e2 = t1 - t2 + rounding
    # The odd part.
    z3 = _wrapped(c7 + c3)
    z4 = _wrapped(c5 + c1)
    z5 = (z3 + z4) * 9633
    z3 = z5 - z3 * 16069
    z4 = z5 - z4 * 3196
    z1 = (c7 + c1) * 7373
    z2 = (c5 + c3) * 20995
    o0 = c7 * 2446 - z1 + z3
    o1 = c5 * 16819 - z2 + z4
    o2 = c3 * 25172 - z2 + z3
    o3 = c1 * 12299 - z1 + z4
    return (
        (e0 + o3) >> SHIFT,
        (e1 + o2) >> SHIFT,
        (e2 + o1) >> SHIFT,
        (e3 + o0) >> SHIFT,
        (e3 - o0) >> SHIFT,
        (e2 - o1) >> SHIFT,
        (e1 - o2) >> SHIFT,
        (e0 - o3) >> SHIFT,
    )


@triton.jit
def _together(c0, c1, c2, c3, c4, c5, c6, c7, BLOCKS: tl.constexpr):
    """Eight [BLOCKS, 8] as one [BLOCKS, 8, 8] with the last dimension in order."""
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.reshape(tl.join(even, odd), (BLOCKS, 8, 8))


@triton.jit
def _apart(values, BLOCKS: tl.constexpr):
    """The reverse of `_together`."""
    even, odd = tl.split(tl.reshape(values, (BLOCKS, 8, 2, 2, 2)))
    c04, c26 = tl.split(even)
    c15, c37 = tl.split(odd)
    c0, c4 = tl.split(c04)
    c2, c6 = tl.split(c26)
    c1, c5 = tl.split(c15)
    c3, c7 = tl.split(c37)
    return c0, c1, c2, c3, c4, c5, c6, c7


WARPS = 4


def run_idct(
    coefficients: torch.Tensor,
    quantization: torch.Tensor,
    planes: torch.Tensor,
    images: torch.Tensor,
    windows: torch.Tensor,
    tile_images: torch.Tensor,
    *,
    shape: TileShape,
) -> None:
    """Launches the inverse transform of a batch.

    Args:
        coefficients, quantization, planes, images, windows: as in `idct_kernel`.
        tile_images: int32 [tiles], written; it has room for the tiles of all windows.
        shape: of a tile, as the windows were counted out with.
    """
    if len(tile_images):
        assign_owners(windows, tile_images, first=FIRST_BLOCK_TILE, count=BLOCK_TILES)
        idct_kernel[(len(tile_images),)](
            coefficients, quantization, planes, images, windows, tile_images, BLOCKS=shape.blocks,
            **compiler_options(WARPS),
        )  # fmt: skip
