"""Heads that read arbitrary positions: affine and perspective transforms, and torch's `grid_sample`.

Pillow's (`Geometry.c`) compute in float64 without fused multiply-add, and nearest-neighbor affine ones in 16.16 fixed
point. torch's (`GridSamplerKernel.cpp`, zeros outside, `align_corners=False`) sample grids of torchvision, which are
products of matrices with rounding after each step; the sampler uses fused multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pixels import as_filtered, clamp, fetch, fetch_bytes, fused, load_byte, load_float, round_half_even
from ..program import (
    AFFINE_HEIGHT,
    AFFINE_MATRIX,
    AFFINE_WIDTH,
    BICUBIC,
    BILINEAR,
    DISPLACED,
    FILL,
    FORMULA,
    GRID_KIND,
    HAS_DEPTH,
    INPUT_HEIGHT,
    INPUT_WIDTH,
    NO_FILL,
    PERSPECTIVE,
    SAMPLING,
    TABLE,
    TENSOR_V2,
)


@triton.jit
def warp_fixed(view, head, x, y, IS_HEAVY: tl.constexpr):
    """Computes a nearest-neighbor affine transform in 16.16 fixed point. `x` is int32 [1, X], `y` int32 [Y, 1]."""
    matrix = head + AFFINE_MATRIX
    column = (tl.load(matrix) * x + tl.load(matrix + 1) * y + tl.load(matrix + 2)) >> 16
    row = (tl.load(matrix + 3) * x + tl.load(matrix + 4) * y + tl.load(matrix + 5)) >> 16
    width = tl.load(head + AFFINE_WIDTH)
    height = tl.load(head + AFFINE_HEIGHT)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    red, green, blue = fetch(view, tl.where(inside, column, 0), tl.where(inside, row, 0), IS_HEAVY)
    return or_fill(head, inside, red, green, blue)


@triton.jit
def or_fill(head, inside, red, green, blue):
    """Replaces values outside the image by the fill."""
    red = tl.where(inside, red, load_float(head, FILL))
    green = tl.where(inside, green, load_float(head, FILL + 1))
    blue = tl.where(inside, blue, load_float(head, FILL + 2))
    return red, green, blue


@triton.jit
def load_double(table, index):
    """Loads a float64 that an int32 table holds as two entries, the lower half first."""
    low = tl.load(table + 2 * index).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(table + 2 * index + 1).to(tl.int64) << 32
    return (high | low).to(tl.float64, bitcast=True)


@triton.jit
def cubic(first, second, third, fourth, distance):
    """Computes Pillow's BICUBIC macro: Catmull-Rom through four values, float64."""
    slope = third - first
    curve = 2.0 * (first - second) + third - fourth
    jerk = second - first - third + fourth
    return second + distance * (slope + distance * (curve + distance * jerk))


@triton.jit
def row_value(view, column, row, width, dx, channel, FILTER_KIND):
    """Filters one row with four taps or two, float64."""
    last = width - 1
    second = load_byte(view, clamp(column, 0, last), row, channel, True)
    third = load_byte(view, clamp(column + 1, 0, last), row, channel, True)
    value = second.to(tl.float64) + (third - second).to(tl.float64) * dx
    if FILTER_KIND == BICUBIC:
        first = load_byte(view, clamp(column - 1, 0, last), row, channel, True).to(tl.float64)
        fourth = load_byte(view, clamp(column + 2, 0, last), row, channel, True).to(tl.float64)
        value = cubic(first, second.to(tl.float64), third.to(tl.float64), fourth, dx)
    return value


@triton.jit
def filtered(view, column, row, width, height, dx, dy, channel, FILTER_KIND):
    """Filters one channel, int32. A row outside the image repeats the one before it."""
    first = tl.zeros_like(dx)
    second = first
    third = first
    fourth = first
    value = first
    is_cubic = FILTER_KIND == BICUBIC
    begin = tl.where(is_cubic, 0, 1)
    # Rows -1 to 2, or 0 and 1, in a loop, because four rows at once take twice the registers. Each row is selected by
    # its number, because Triton 3.9 miscompiles values that rotate in a loop, as in `second, third = third, value`.
    for number in range(begin, tl.where(is_cubic, 4, 3)):
        at = row + number - 1
        before = value
        value = row_value(view, column, clamp(at, 0, height - 1), width, dx, channel, FILTER_KIND)
        value = tl.where((number == begin) | ((at >= 0) & (at < height)), value, before)
        first = tl.where(number == 0, value, first)
        second = tl.where(number == 1, value, second)
        third = tl.where(number == 2, value, third)
        fourth = tl.where(number == 3, value, fourth)
    value = second + (third - second) * dy
    if is_cubic:
        value = clamp(cubic(first, second, third, fourth, dy), 0.0, 255.0)
    return value.to(tl.int32)


@triton.jit
def warp_float(view, head, tables, x, y, red):
    """Computes an affine or perspective transform in float64.

    `x` is int32 [1, X], `y` int32 [Y, 1], `red` float32 [Y, X] of zeros.
    """
    width = tl.load(head + INPUT_WIDTH)
    height = tl.load(head + INPUT_HEIGHT)
    filter_kind = tl.load(head + SAMPLING)
    matrix = tables + tl.load(head + TABLE)
    column = x.to(tl.float64) + 0.5
    row = y.to(tl.float64) + 0.5
    u = load_double(matrix, 0) * column + load_double(matrix, 1) * row + load_double(matrix, 2)
    v = load_double(matrix, 3) * column + load_double(matrix, 4) * row + load_double(matrix, 5)
    if tl.load(head + HAS_DEPTH) != 0:
        depth = load_double(matrix, 6) * column + load_double(matrix, 7) * row + 1.0
        u = u / depth
        v = v / depth
    inside = (u >= 0.0) & (u < width.to(tl.float64)) & (v >= 0.0) & (v < height.to(tl.float64))
    u = tl.where(inside, u, 0.0)
    v = tl.where(inside, v, 0.0)
    whole_red = tl.zeros_like(red).to(tl.int32)
    whole_green = whole_red
    whole_blue = whole_red
    if (filter_kind == BILINEAR) | (filter_kind == BICUBIC):
        left = tl.floor(u - 0.5)
        upper = tl.floor(v - 0.5)
        dx = u - 0.5 - left
        dy = v - 0.5 - upper
        # A loop, because three copies of this would be much code.
        for channel in range(3):
            value = filtered(view, left.to(tl.int32), upper.to(tl.int32), width, height, dx, dy, channel, filter_kind)
            whole_red = tl.where(channel == 0, value, whole_red)
            whole_green = tl.where(channel == 1, value, whole_green)
            whole_blue = tl.where(channel == 2, value, whole_blue)
    else:
        whole_red, whole_green, whole_blue = fetch_bytes(view, u.to(tl.int32), v.to(tl.int32), True)
    return or_fill(head, inside, whole_red.to(tl.float32), whole_green.to(tl.float32), whole_blue.to(tl.float32))


@triton.jit
def grid_row(table, index: tl.constexpr, column, row):
    """Computes column * a + row * b + c with the three entries of the table from `index` on."""
    return column * load_float(table, index) + row * load_float(table, index + 1) + load_float(table, index + 2)


@triton.jit
def grid_position(head, tables, x, y):
    """Computes the source of each output pixel in [-1, 1], float32 [Y, X]. `x` is int32 [1, X], `y` int32 [Y, 1]."""
    kind = tl.load(head + GRID_KIND)
    table = tables + tl.load(head + TABLE)
    if kind == DISPLACED:
        width = tl.load(head + INPUT_WIDTH)
        displacement = tables + tl.load(head + TABLE + 1) + 2 * (y * width + x)
        u = load_float(table, x) + load_float(displacement, 0)
        v = load_float(table + width, y) + load_float(displacement, 1)
    else:
        column = x.to(tl.float32) + load_float(table, 0)
        row = y.to(tl.float32) + load_float(table, 1)
        u = grid_row(table, 2, column, row)
        v = grid_row(table, 5, column, row)
        if kind == PERSPECTIVE:
            depth = grid_row(table, 8, column, row)
            u = tl.div_rn(u, depth) - 1.0
            v = tl.div_rn(v, depth) - 1.0
    return u, v


@triton.jit
def source_position(position, size):
    """Converts a position in [-1, 1] to pixels; one out of reach of the filter becomes one far outside."""
    pixels = fused(position + 1.0, size.to(tl.float32) * 0.5, -0.5)
    return tl.where((pixels > -2.0) & (pixels < size.to(tl.float32) + 1.0), pixels, -8.0)


@triton.jit
def with_fill(value, mask, fill, is_nearest, rule):
    """Blends a sampled value with the fill as torchvision does; the mask is the share from inside the image."""
    smooth = tl.where(rule == TENSOR_V2, (value - fill) * mask + fill, value * mask + (1.0 - mask) * fill)
    nearest = tl.where(mask < 0.5, fill, value)
    return tl.where(rule == NO_FILL, value, tl.where(is_nearest, nearest, smooth))


@triton.jit
def sample_grid(view, head, tables, x, y, red, top):
    """Computes a warp by a grid. `x` is int32 [1, X], `y` int32 [Y, 1], `red` float32 [Y, X] of zeros."""
    width = tl.load(head + INPUT_WIDTH)
    height = tl.load(head + INPUT_HEIGHT)
    is_nearest = tl.load(head + SAMPLING) == 0
    u, v = grid_position(head, tables, x, y)
    across = source_position(u, width)
    down = source_position(v, height)
    left = tl.where(is_nearest, round_half_even(across), tl.floor(across))
    upper = tl.where(is_nearest, round_half_even(down), tl.floor(down))
    to_right = tl.where(is_nearest, 0.0, across - left)
    downward = tl.where(is_nearest, 0.0, down - upper)
    left = left.to(tl.int32)
    upper = upper.to(tl.int32)
    green = red
    blue = red
    mask = red
    for corner in range(tl.where(is_nearest, 1, 4)):
        column = left + corner % 2
        row = upper + corner // 2
        weight = tl.where(corner // 2 == 0, 1.0 - downward, downward)
        weight *= tl.where(corner % 2 == 0, 1.0 - to_right, to_right)
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        weight = tl.where(inside, weight, 0.0)
        r, g, b = fetch(view, tl.where(inside, column, 0), tl.where(inside, row, 0), True)
        red, green, blue, mask = fused(r, weight, red), fused(g, weight, green), fused(b, weight, blue), mask + weight
    rule = tl.load(head + FORMULA)
    red = as_filtered(with_fill(red, mask, load_float(head, FILL), is_nearest, rule), top)
    green = as_filtered(with_fill(green, mask, load_float(head, FILL + 1), is_nearest, rule), top)
    blue = as_filtered(with_fill(blue, mask, load_float(head, FILL + 2), is_nearest, rule), top)
    return red, green, blue
