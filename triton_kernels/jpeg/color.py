"""Upsamples chroma and converts colors: planes of samples -> pixels.

Upsampling is libjpeg's "fancy" one (`jdsample.c`), a triangle filter: a pixel lies a quarter of the way between the two
nearest chroma samples, so it takes 3/4 of the nearer and 1/4 of the other, on each axis that is halved. One formula
with clamped neighbors covers libjpeg's special cases at the edges. Colors are converted as in JFIF, in 16.16 fixed
point (`jdcolor.c`); gray is Pillow's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import Launcher
from ..pixels import clamp, luminance
from .idct import window_of
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
    PIXELS,
    PIXELS_UNIT,
    PLANES,
    PLANES_UNIT,
    WIDTH,
)

# Packs two samples of a byte each into the halves of 32 bits.
HALVES = tl.constexpr(0x00FF00FF)
ONES = tl.constexpr(0x00010001)


@triton.jit
def color_kernel(planes, pixels, images, windows, tile_images, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr):
    """Makes the pixels of one box that lie in one tile [BLOCK_Y, BLOCK_X] of its window, four neighbors at a time.

    Args:
        planes: uint8 [bytes], samples.
        pixels: uint8 [bytes], written to.
        images: int32 [images, IMAGE_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
        tile_images: int32 [tiles], the image of each tile.
    """
    image, window, across, down, luma_across, luma_down = window_of(tile_images, images, windows)
    top = tl.load(window + MCU_TOP) * 8
    left = tl.load(window + MCU_LEFT) * 8
    box_width = tl.load(window + BOX_WIDTH)
    box_height = tl.load(window + BOX_HEIGHT)
    # The box in the window.
    box_top = tl.load(window + BOX_TOP) - top * luma_down
    box_left = tl.load(window + BOX_LEFT) - left * luma_across
    tiles_across = tl.cdiv(box_left + box_width, BLOCK_X) - box_left // BLOCK_X
    tile = tl.program_id(0) - tl.load(window + FIRST_PIXEL_TILE)

    # Positions in the window, whose rows begin at multiples of 8 bytes. Positions outside read the last sample.
    rows, samples = down * 8, across * 8
    y = (box_top // BLOCK_Y + tile // tiles_across) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    word = (box_left // BLOCK_X + tile % tiles_across) * (BLOCK_X // 4) + tl.arange(0, BLOCK_X // 4)
    row, column = y - box_top, word * 4 - box_left
    y = tl.minimum(y, rows * luma_down - 1)
    word = tl.minimum(word, samples * luma_across // 4 - 1)

    plane = planes + tl.load(window + PLANES).to(tl.int64) * PLANES_UNIT
    luma = tl.load(_words(plane) + (y[:, None] * (samples * luma_across // 4) + word[None, :]))
    # A gray file counts as one with chroma 128 everywhere.
    even_cb = tl.full((BLOCK_Y, BLOCK_X // 4), 128 * ONES, tl.int32)
    odd_cb, even_cr, odd_cr = even_cb, even_cb, even_cb
    if tl.load(image + COMPONENTS) == 3:
        cb_plane = plane + rows * samples * luma_across * luma_down
        cr_plane = cb_plane + rows * samples
        # libjpeg repeats the samples of planes of half width that have only one or two columns.
        width = (tl.load(image + WIDTH) + 1) // 2
        repeats = (luma_across == 2) & (width <= 2)
        near, far = _rows(y, luma_down, repeats, tl.load(image + HEIGHT) - top * luma_down, rows)
        if luma_across == 1:
            even_cb, odd_cb = _upsampled_down(cb_plane, samples, near, far, word, y, luma_down)
            even_cr, odd_cr = _upsampled_down(cr_plane, samples, near, far, word, y, luma_down)
        else:
            last = tl.minimum(width - left, samples) - 1
            even_cb, odd_cb = _upsampled(cb_plane, samples, near, far, word, last, repeats, luma_down)
            even_cr, odd_cr = _upsampled(cr_plane, samples, near, far, word, last, repeats, luma_down)

    target = pixels + tl.load(window + PIXELS).to(tl.int64) * PIXELS_UNIT
    target += row[:, None] * box_width + column[None, :]
    step = box_height.to(tl.int64) * box_width
    is_gray = tl.load(window + CHANNELS) == 1
    for PIXEL in tl.static_range(4):
        cb, cr = (even_cb, even_cr) if PIXEL % 2 == 0 else (odd_cb, odd_cr)
        red, green, blue = _rgb(_high_byte(luma, PIXEL), _half(cb, PIXEL // 2), _half(cr, PIXEL // 2))
        at = column + PIXEL
        inside = ((row >= 0) & (row < box_height))[:, None] & ((at >= 0) & (at < box_width))[None, :]
        if is_gray:
            # The gray of a gray file is its luma.
            tl.store(target + PIXEL, luminance(red, green, blue).to(tl.uint8), mask=inside)
        else:
            tl.store(target + PIXEL, red.to(tl.uint8), mask=inside)
            tl.store(target + step + PIXEL, green.to(tl.uint8), mask=inside)
            tl.store(target + 2 * step + PIXEL, blue.to(tl.uint8), mask=inside)


@triton.jit
def _words(plane):
    return plane.to(tl.pointer_type(tl.int32))


@triton.jit
def _high_byte(word, BYTE: tl.constexpr):
    """Selects one byte of four, shifted left by 16 bits."""
    if BYTE < 2:
        return (word << (16 - 8 * BYTE)) & 0xFF0000
    else:
        return (word >> (8 * BYTE - 16)) & 0xFF0000


@triton.jit
def _half(pair, HALF: tl.constexpr):
    return pair >> 16 if HALF else pair & 0xFF


@triton.jit
def _rows(y, factor, repeats, height, rows):
    """The two rows of chroma samples next to each row of pixels, the nearer first; the same row twice at full height.

    `factor` is 1 or 2, the rows of pixels per row of samples; `height` is the image's, from the window's first row on.
    """
    near = y >> (factor - 1)
    last = tl.minimum((height + factor - 1) >> (factor - 1), rows) - 1
    far = clamp(near + 2 * (y & 1) - 1, 0, last)
    return near, tl.where((factor == 2) & (repeats == 0), far, near)


@triton.jit
def _upsampled_down(plane, samples, near, far, word, y, factor):
    """Upsamples a chroma component of full width, for words of four pixels.

    Returns:
        The samples of the even pixels, and those of the odd ones, int32 [Y, X], two in a value.
    """
    near_four = tl.load(_words(plane) + (near[:, None] * (samples // 4) + word[None, :]))
    even, odd = near_four & HALVES, (near_four >> 8) & HALVES
    if factor == 2:
        far_four = tl.load(_words(plane) + (far[:, None] * (samples // 4) + word[None, :]))
        # One half, alternately less, so that halves are rounded up and down in turn.
        rounding = ((1 + (y & 1)) * ONES)[:, None]
        even = ((3 * even + (far_four & HALVES) + rounding) >> 2) & HALVES
        odd = ((3 * odd + ((far_four >> 8) & HALVES) + rounding) >> 2) & HALVES
    return even, odd


@triton.jit
def _upsampled(plane, samples, near, far, word, last, repeats, factor):
    """Upsamples a chroma component of half width: first between rows, as `_upsampled_down`, then between columns."""
    two = plane.to(tl.pointer_type(tl.uint16))
    own = 3 * _spread(tl.load(two + (near[:, None] * (samples // 2) + word[None, :])))
    own += _spread(tl.load(two + (far[:, None] * (samples // 2) + word[None, :])))
    before = _blended(plane, samples, near, far, tl.maximum(2 * word - 1, 0))
    after = _blended(plane, samples, near, far, tl.minimum(2 * word + 2, last))
    swapped = (own << 16) | (own >> 16)
    # The two are neighbors of each other.
    own_or_first = tl.where((repeats | (2 * word >= last))[None, :], swapped, own)
    # In sixteenths; half of one is added, or slightly less, in turn.
    even = 3 * own + ((own_or_first << 16) | before) + tl.where(factor == 2, 8 * ONES, 4 * ONES)
    odd = 3 * own + ((own_or_first >> 16) | (after << 16)) + tl.where(factor == 2, 7 * ONES, 8 * ONES)
    return (even >> 4) & HALVES, (odd >> 4) & HALVES


@triton.jit
def _spread(two):
    """Spreads two bytes of a uint16 to the halves of an int32."""
    two = two.to(tl.int32)
    return (two | (two << 8)) & HALVES


@triton.jit
def _blended(plane, samples, near, far, column):
    """Blends two rows of samples: three quarters of the nearer one, one of the other; in quarters."""
    near_one = tl.load(plane + (near[:, None] * samples + column[None, :])).to(tl.int32)
    return 3 * near_one + tl.load(plane + (far[:, None] * samples + column[None, :])).to(tl.int32)


@triton.jit
def _rgb(luma, cb, cr):
    """Converts YCbCr to RGB, int32 in [0, 255]; `luma` is shifted left by 16 bits, `cb` and `cr` are in [0, 255]."""
    red = luma + 91881 * cr + (32768 - 128 * 91881)
    green = luma - 22554 * cb - 46802 * cr + (32768 + 128 * (22554 + 46802))
    blue = luma + 116130 * cb + (32768 - 128 * 116130)
    return clamp(red >> 16, 0, 255), clamp(green >> 16, 0, 255), clamp(blue >> 16, 0, 255)


make_pixels = Launcher(color_kernel)
