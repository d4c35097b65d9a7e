"""Chroma at full size, and colors: planes of samples -> pixels.

Upsampling is libjpeg's "fancy" one (`jdsample.c`), a triangle filter: a sample of the image lies a quarter of the way
between the two nearest chroma samples, so it takes 3/4 of the nearer and 1/4 of the other, on each axis that was
halved. Written as one formula with clamped neighbors, the special cases at libjpeg's edges need no code. Colors are
those of JFIF in 16.16 integers (`jdcolor.c`), gray is Pillow's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..options import compiler_options
from ..pixel_math import luminance
from .layout import (
    BOX_HEIGHT,
    BOX_LEFT,
    BOX_TOP,
    BOX_WIDTH,
    CHANNELS,
    COMPONENTS,
    FIRST_PIXEL_TILE,
    HEIGHT,
    MCU_LEFT,
    MCU_TOP,
    PIXEL_TILES,
    PIXELS,
    PIXELS_UNIT,
    PLANES,
    PLANES_UNIT,
    WIDTH,
)
from .owners import assign_owners
from .window import TileShape, window_of


@triton.jit
def color_kernel(planes, pixels, images, windows, tile_images, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr):
    """Makes the pixels of one box that lie in one tile [BLOCK_Y, BLOCK_X] of its window.

    Args:
        planes: uint8 [bytes], samples.
        pixels: uint8 [bytes], written to.
        images: int32 [images, IMAGE_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
        tile_images: int32 [tiles], the image of each tile, or NO_OWNER.
    """
    number = tl.load(tile_images + tl.program_id(0))
    if number < 0:
        return
    image, window, across, down, luma_across, luma_down = window_of(number, images, windows)
    top = tl.load(window + MCU_TOP)
    left = tl.load(window + MCU_LEFT)
    box_width = tl.load(window + BOX_WIDTH)
    box_height = tl.load(window + BOX_HEIGHT)
    # The box in the window.
    box_top = tl.load(window + BOX_TOP) - top * luma_down * 8
    box_left = tl.load(window + BOX_LEFT) - left * luma_across * 8
    tiles_across = tl.cdiv(box_left + box_width, BLOCK_X) - box_left // BLOCK_X
    tile = tl.program_id(0) - tl.load(window + FIRST_PIXEL_TILE)

    # Rows and columns in the window, where the samples of a row begin at a multiple of 8 bytes; then in the box.
    y = (box_top // BLOCK_Y + tile // tiles_across) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    x = (box_left // BLOCK_X + tile % tiles_across) * BLOCK_X + tl.arange(0, BLOCK_X)
    row = y - box_top
    column = x - box_left
    inside = ((row >= 0) & (row < box_height))[:, None] & ((column >= 0) & (column < box_width))[None, :]

    luma_plane = planes + tl.load(window + PLANES).to(tl.int64) * PLANES_UNIT
    stride = across * 8
    # All the samples of the window may be read, several at once.
    readable = (y < down * luma_down * 8)[:, None] & (x < stride * luma_across)[None, :]
    luma = tl.load(luma_plane + y[:, None] * (stride * luma_across) + x[None, :], mask=readable, other=0).to(tl.int32)
    red, green, blue = luma, luma, luma
    if tl.load(image + COMPONENTS) == 3:
        cb_plane = luma_plane + across * down * (luma_across * luma_down * 64)
        cr_plane = cb_plane + across * down * 64
        if luma_across * luma_down == 1:
            at = y[:, None] * stride + x[None, :]
            cb = tl.load(cb_plane + at, mask=readable, other=0).to(tl.int32)
            cr = tl.load(cr_plane + at, mask=readable, other=0).to(tl.int32)
        else:
            # libjpeg repeats the samples of a plane that is one or two columns wide.
            chroma_width = (tl.load(image + WIDTH) + luma_across - 1) // luma_across
            chroma_height = (tl.load(image + HEIGHT) + luma_down - 1) // luma_down
            repeats = (luma_across == 2) & (chroma_width <= 2)
            columns = _neighbors(x, luma_across, repeats, left * 8, chroma_width)
            rows = _neighbors(y, luma_down, repeats, top * 8, chroma_height)
            # A half, less or more in turn, so that the halves do not all go one way.
            along_y = (4 + 4 * (y % 2))[:, None]
            along_x = tl.where(luma_down == 2, 8 - x % 2, 4 + 4 * (x % 2))[None, :]
            rounding = tl.where(repeats, 0, tl.where(luma_across == 2, along_x, along_y))
            cb = _upsampled(cb_plane, stride, rows, columns, rounding, inside)
            cr = _upsampled(cr_plane, stride, rows, columns, rounding, inside)
        red, green, blue = _rgb(luma, cb - 128, cr - 128)

    target = pixels + tl.load(window + PIXELS).to(tl.int64) * PIXELS_UNIT
    target += row.to(tl.int64)[:, None] * box_width + column[None, :]
    if tl.load(window + CHANNELS) == 1:
        # A gray file is its own gray.
        tl.store(target, luminance(red, green, blue).to(tl.uint8), mask=inside)
    else:
        step = box_height.to(tl.int64) * box_width
        tl.store(target, red.to(tl.uint8), mask=inside)
        tl.store(target + step, green.to(tl.uint8), mask=inside)
        tl.store(target + 2 * step, blue.to(tl.uint8), mask=inside)


@triton.jit
def _neighbors(position, factor, repeats, first, size):
    """The two chroma samples next to positions of one axis of the window, and the second one's weight in quarters.

    Args:
        position: int32 [B], in the window.
        factor: 1 or 2, luma samples for a chroma sample.
        repeats: the nearer sample alone counts.
        first: the chroma sample of the image that the window begins with.
        size: chroma samples of the image.
    """
    near = position // factor
    far = tl.minimum(tl.maximum(first + near + 2 * (position % 2) - 1, 0), size - 1) - first
    blends = (factor == 2) & (repeats == 0)
    return near, tl.where(blends, far, near), tl.where(blends, 1, 0)


@triton.jit
def _upsampled(plane, stride, rows, columns, rounding, inside):
    """One chroma component at full size, int32 [Y, X]; `rows` and `columns` as `_neighbors` gives them."""
    near_y, far_y, weight_y = rows
    near_x, far_x, weight_x = columns
    near_row = plane + near_y[:, None] * stride
    far_row = plane + far_y[:, None] * stride
    near = (4 - weight_y) * tl.load(near_row + near_x[None, :], mask=inside, other=0)
    near += weight_y * tl.load(far_row + near_x[None, :], mask=inside, other=0)
    far = (4 - weight_y) * tl.load(near_row + far_x[None, :], mask=inside, other=0)
    far += weight_y * tl.load(far_row + far_x[None, :], mask=inside, other=0)
    return ((4 - weight_x) * near + weight_x * far + rounding) >> 4


@triton.jit
def _rgb(luma, cb, cr):
    """YCbCr -> RGB, int32 in [0, 255]; `cb` and `cr` in [-128, 127]."""
    red = luma + ((91881 * cr + 32768) >> 16)
    green = luma + ((-22554 * cb - 46802 * cr + 32768) >> 16)
    blue = luma + ((116130 * cb + 32768) >> 16)
    return (
        tl.minimum(tl.maximum(red, 0), 255),
        tl.minimum(tl.maximum(green, 0), 255),
        tl.minimum(tl.maximum(blue, 0), 255),
    )


WARPS = 4


def run_color(
    planes: torch.Tensor,
    pixels: torch.Tensor,
    images: torch.Tensor,
    windows: torch.Tensor,
    tile_images: torch.Tensor,
    *,
    shape: TileShape,
) -> None:
    """Launches upsampling and colors of a batch.

    Args:
        planes, pixels, images, windows: as in `color_kernel`.
        tile_images: int32 [tiles], written; it has room for the tiles of all windows.
        shape: of a tile, as the windows were counted out with.
    """
    if len(tile_images):
        assign_owners(windows, tile_images, first=FIRST_PIXEL_TILE, count=PIXEL_TILES)
        color_kernel[(len(tile_images),)](
            planes, pixels, images, windows, tile_images, BLOCK_Y=shape.rows, BLOCK_X=shape.columns,
            **compiler_options(WARPS),
        )  # fmt: skip
