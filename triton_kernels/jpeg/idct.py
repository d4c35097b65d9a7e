"""Dequantizes coefficients and computes the inverse DCT: coefficients of blocks -> samples in planes.

The transform is the "slow but accurate" integer one of libjpeg (`jidctint.c`; Loeffler, Ligtenberg and Moschytz, 1989:
12 multiplications per row or column): first down the columns, with 2 more bits than the samples have, then along the
rows. Constants have 13 fractional bits. Only corrupt files have coefficients so large that the 16 bits between the
steps overflow. Their values wrap and saturate as in libjpeg-turbo's code for x86-64 (`jidctint-avx2.asm`).

A thread has a column of a block, and after the first pass a row of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import Launcher
from ..pixels import clamp
from .layout import (
    FIRST_BLOCK,
    FIRST_BLOCK_TILE,
    IMAGE_COLUMNS,
    MCU_LEFT,
    MCU_TOP,
    MCUS_ACROSS,
    MCUS_DOWN,
    MCUS_PER_ROW,
    PLANES,
    PLANES_UNIT,
    QUANTIZATION,
    SAMPLING_H,
    SAMPLING_V,
    UNITS,
    WINDOW_COLUMNS,
)


@triton.jit
def window_of(tile_images, images, windows):
    """The rows of a tile's image and window, the window's MCUs across and down, and the luma's sampling factors."""
    number = tl.load(tile_images + tl.program_id(0))
    image = images + number * IMAGE_COLUMNS
    window = windows + number * WINDOW_COLUMNS
    across, down = tl.load(window + MCUS_ACROSS), tl.load(window + MCUS_DOWN)
    return image, window, across, down, tl.load(image + SAMPLING_H), tl.load(image + SAMPLING_V)


@triton.jit
def idct_kernel(
    coefficients, quantization, planes, images, windows, tile_images,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Transforms BLOCK_ROWS x BLOCK_COLUMNS blocks of one plane of the window of one image.

    Args:
        coefficients: int16 [blocks, 64], zigzag order.
        quantization: int32 [tables, 64], zigzag order.
        planes: uint8 [bytes], written to.
        images: int32 [images, IMAGE_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
        tile_images: int32 [tiles], the image of each tile.
    """
    image, window, across, down, luma_across, luma_down = window_of(tile_images, images, windows)
    # The tiles of the luma come first, then those of Cb, then those of Cr.
    tile = tl.program_id(0) - tl.load(window + FIRST_BLOCK_TILE)
    luma_tiles = _tiles(across * luma_across, down * luma_down, BLOCK_ROWS, BLOCK_COLUMNS)
    chroma_tiles = _tiles(across, down, BLOCK_ROWS, BLOCK_COLUMNS)
    is_luma = tile < luma_tiles
    chroma = tl.where(tile >= luma_tiles + chroma_tiles, 1, 0)
    tile -= tl.where(is_luma, 0, luma_tiles + chroma * chroma_tiles)
    component = tl.where(is_luma, 0, 1 + chroma)
    first_unit = tl.where(is_luma, 0, luma_across * luma_down + chroma)
    factor_x = tl.where(is_luma, luma_across, 1)
    factor_y = tl.where(is_luma, luma_down, 1)
    columns = across * factor_x
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)

    # Blocks of the plane. Both factors are 1 or 2.
    BLOCKS: tl.constexpr = BLOCK_ROWS * BLOCK_COLUMNS
    index = tl.arange(0, BLOCKS)
    column = tile % tiles_across * BLOCK_COLUMNS + index % BLOCK_COLUMNS
    row = tile // tiles_across * BLOCK_ROWS + index // BLOCK_COLUMNS
    exists = (column < columns) & (row < down * factor_y)
    mcu_column = tl.load(window + MCU_LEFT) + (column >> (factor_x - 1))
    mcu_row = tl.load(window + MCU_TOP) + (row >> (factor_y - 1))
    mcu = mcu_row * tl.load(image + MCUS_PER_ROW) + mcu_column
    unit = first_unit + (row & (factor_y - 1)) * factor_x + (column & (factor_x - 1))
    block = tl.load(image + FIRST_BLOCK) + mcu * tl.load(image + UNITS) + unit
    stride = 8 * columns
    plane = planes + (tl.load(window + PLANES) + across * down * first_unit).to(tl.int64) * PLANES_UNIT
    target = plane + (row * (8 * stride) + column * 8)

    source = coefficients + block.to(tl.int64)[:, None] * 64
    steps = quantization + tl.load(image + QUANTIZATION + component) * 64
    exists = exists[:, None]
    # Places of the rows in zigzag order, those of a row in the bytes of two numbers.
    c0, s0 = _row(source, steps, exists, 0x06050100, 0x1C1B0F0E)
    c1, s1 = _row(source, steps, exists, 0x0D070402, 0x2A1D1A10)
    c2, s2 = _row(source, steps, exists, 0x110C0803, 0x2B291E19)
    c3, s3 = _row(source, steps, exists, 0x18120B09, 0x352C281F)
    c4, s4 = _row(source, steps, exists, 0x2017130A, 0x36342D27)
    c5, s5 = _row(source, steps, exists, 0x26211614, 0x3C37332E)
    c6, s6 = _row(source, steps, exists, 0x2F252215, 0x3D3B3832)
    c7, s7 = _row(source, steps, exists, 0x31302423, 0x3F3E3A39)
    only_first_row = tl.max(((c1 | c2 | c3 | c4 | c5 | c6 | c7) != 0).to(tl.int32), axis=1)[:, None] == 0
    c0, c1, c2, c3 = _wrapped(c0 * s0), _wrapped(c1 * s1), _wrapped(c2 * s2), _wrapped(c3 * s3)
    c4, c5, c6, c7 = _wrapped(c4 * s4), _wrapped(c5 * s5), _wrapped(c6 * s6), _wrapped(c7 * s7)
    # The first pass turns a column with zeros below c0 into 4 * c0. If all columns are such, libjpeg-turbo takes a
    # shortcut that keeps 16 bits of this value.
    c0 = tl.where(only_first_row, (c0 << 18) >> 18, c0)

    # The 13 fractional bits of the constants, less the 2 that are kept.
    c0, c1, c2, c3, c4, c5, c6, c7 = _inverse_dct(c0, c1, c2, c3, c4, c5, c6, c7, 11)
    values = _together(c0, c1, c2, c3, c4, c5, c6, c7, BLOCKS)
    values = tl.trans(clamp(values, -32768, 32767), (0, 2, 1))
    c0, c1, c2, c3, c4, c5, c6, c7 = _apart(values, BLOCKS)
    # These 13 bits, these 2, and 3 for the scale of the transform.
    c0, c1, c2, c3, c4, c5, c6, c7 = _inverse_dct(c0, c1, c2, c3, c4, c5, c6, c7, 18)
    values = _together(c0, c1, c2, c3, c4, c5, c6, c7, BLOCKS)

    samples = clamp(values + 128, 0, 255).to(tl.uint8)
    at = tl.arange(0, 8)
    target = target[:, None, None] + (at[:, None] * stride + at[None, :])[None, :, :]
    tl.store(target, samples, mask=exists[:, :, None])


@triton.jit
def _tiles(columns, rows, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    return tl.cdiv(columns, BLOCK_COLUMNS) * tl.cdiv(rows, BLOCK_ROWS)


@triton.jit
def _row(source, steps, exists, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Loads one row of each block, int32 [B, 8], and its quantization steps [1, 8]."""
    column = tl.arange(0, 8)[None, :]
    place = (tl.where(column < 4, LEFT, RIGHT) >> (column % 4 * 8)) & 0xFF
    return tl.load(source + place, mask=exists, other=0).to(tl.int32), tl.load(steps + place)


@triton.jit
def _wrapped(value):
    """Wraps an int32 to 16 bits."""
    return value.to(tl.int16).to(tl.int32)


@triton.jit
def _inverse_dct(c0, c1, c2, c3, c4, c5, c6, c7, SHIFT: tl.constexpr):
    """Computes the inverse DCT of eight values, int32, with a shift that rounds to nearest."""
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
    """Joins eight tensors [BLOCKS, 8] to one [BLOCKS, 8, 8], with the last dimension in order."""
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


WARPS = 2
make_samples = Launcher(idct_kernel, WARPS)
