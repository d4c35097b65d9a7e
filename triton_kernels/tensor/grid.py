"""Warps of tensors: `grid_sample` on the grids that torchvision makes.

`aten/native/cpu/GridSamplerKernel.cpp`, zeros outside, `align_corners=False`. The grid is a product of matrices whose
sums round after each step; the sampler fuses a multiply and an add into one rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import as_filtered, fused, load_float, round_half_even
from ..program import DISPLACED, FILL, FILL_V2, FORMULA, NO_FILL, PERSPECTIVE, TABLE
from ..view import fetch, load_value


@triton.jit
def grid_row(table, index: tl.constexpr, column, row):
    """column * a + row * b + c with the three entries of the table from `index` on."""
    return column * load_float(table, index) + row * load_float(table, index + 1) + load_float(table, index + 2)


@triton.jit
def grid_position(head, tables, x, y):
    """Where each output pixel comes from, in [-1, 1]; float32 [Y, X] each. `x` int32 [1, X], `y` int32 [Y, 1]."""
    kind = tl.load(head + 6)
    table = tables + tl.load(head + TABLE)
    if kind == DISPLACED:
        width = tl.load(head + 1)
        displacement = tables + tl.load(head + TABLE + 1) + 2 * (y * width + x)
        u = load_value(table, x) + load_value(displacement, 0)
        v = load_value(table + width, y) + load_value(displacement, 1)
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
    """Position in [-1, 1] -> in pixels; one that no filter reaches the image from becomes one far outside."""
    pixels = fused(position + 1.0, size.to(tl.float32) * 0.5, -0.5)
    return tl.where((pixels > -2.0) & (pixels < size.to(tl.float32) + 1.0), pixels, -8.0)


@triton.jit
def filled(value, mask, fill, is_nearest, rule):
    """What torchvision makes of a sampled value where the mask says how much of it came from inside the image."""
    smooth = tl.where(rule == FILL_V2, (value - fill) * mask + fill, value * mask + (1.0 - mask) * fill)
    nearest = tl.where(mask < 0.5, fill, value)
    return tl.where(rule == NO_FILL, value, tl.where(is_nearest, nearest, smooth))


@triton.jit
def sample_grid(view, head, tables, x, y, red, top):
    """Warp by a grid. `x` int32 [1, X], `y` int32 [Y, 1]; `red` float32 [Y, X]: zero."""
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    is_nearest = tl.load(head + 3) == 0
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
    red = as_filtered(filled(red, mask, load_float(head, FILL), is_nearest, rule), top)
    green = as_filtered(filled(green, mask, load_float(head, FILL + 1), is_nearest, rule), top)
    blue = as_filtered(filled(blue, mask, load_float(head, FILL + 2), is_nearest, rule), top)
    return red, green, blue
