"""Warps of tensors of bytes: `grid_sample` on the grids that torchvision makes, rounded half to even.

`aten/native/cpu/GridSamplerKernel.cpp`, zeros outside, `align_corners=False`. The grid is a product of matrices whose
sums round after each step; the sampler fuses a multiply and an add into one rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch
from .program import DISPLACED, FILL_V2, NO_FILL, PERSPECTIVE


@triton.jit
def fused(a, b, c):
    """a * b + c in float32 with one rounding; float64 holds the product exactly."""
    return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


@triton.jit
def load_float(table, index):
    """A float32 of an int32 table."""
    return tl.load(table + index).to(tl.float32, bitcast=True)


@triton.jit
def grid_row(table, index, column, row):
    """column * a + row * b + c with the three entries of the table from `index` on."""
    return column * load_float(table, index) + row * load_float(table, index + 1) + load_float(table, index + 2)


@triton.jit
def grid_position(head, tables, x, y):
    """Where each output pixel comes from, in [-1, 1]; float32 [Y, X] each. `x` int32 [1, X], `y` int32 [Y, 1]."""
    kind = tl.load(head + 5)
    table = tables + tl.load(head + 10)
    if kind == DISPLACED:
        width = tl.load(head + 1)
        displacement = tables + tl.load(head + 11) + 2 * (y * width + x)
        u = load_float(table, x) + load_float(displacement, 0)
        v = load_float(table, width + y) + load_float(displacement, 1)
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
    half = size.to(tl.float32) * 0.5 + tl.zeros_like(position)
    pixels = fused(position + 1.0, half, tl.full((1, 1), -0.5, tl.float32))
    return tl.where((pixels > -2.0) & (pixels < size.to(tl.float32) + 1.0), pixels, -8.0)


@triton.jit
def nearest_even(value):
    """float32 -> the nearest int32, the even one of two."""
    whole = tl.floor(value)
    rest = value - whole
    number = whole.to(tl.int32)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (number % 2 != 0)), number + 1, number)


@triton.jit
def add_tap(view, column, row, width, height, weight, red, green, blue, mask):
    """Adds one weighted pixel to float32 sums, and its weight to the mask; zero outside the image."""
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    r, g, b = fetch(view, tl.where(inside, column, 0), tl.where(inside, row, 0))
    red = fused(tl.where(inside, r, 0), weight, red)
    green = fused(tl.where(inside, g, 0), weight, green)
    blue = fused(tl.where(inside, b, 0), weight, blue)
    return red, green, blue, fused(inside.to(tl.float32), weight, mask)


@triton.jit
def filled(value, mask, fill, is_nearest, rule):
    """The result of one channel: `mask` says how much of each value came from inside the image. int32."""
    smooth = tl.where(rule == FILL_V2, (value - fill) * mask + fill, value * mask + (1.0 - mask) * fill)
    nearest = tl.where(mask < 0.5, fill, value)
    value = tl.where(rule == NO_FILL, value, tl.where(is_nearest, nearest, smooth))
    return nearest_even(value)


@triton.jit
def sample_grid(view, head, tables, x, y, red, green, blue):
    """Warp by a grid. `x` int32 [1, X], `y` int32 [Y, 1]; `red`, `green`, `blue` int32 [Y, X]: anything."""
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    is_nearest = tl.load(head + 3) == 0
    u, v = grid_position(head, tables, x, y)
    across = source_position(u, width)
    down = source_position(v, height)
    left = tl.where(is_nearest, nearest_even(across), tl.floor(across).to(tl.int32))
    upper = tl.where(is_nearest, nearest_even(down), tl.floor(down).to(tl.int32))
    w_right = tl.where(is_nearest, 0.0, across - left.to(tl.float32))
    w_lower = tl.where(is_nearest, 0.0, down - upper.to(tl.float32))
    w_left = 1.0 - w_right
    w_upper = 1.0 - w_lower
    total_red = tl.zeros_like(red).to(tl.float32)
    total_green = tl.zeros_like(green).to(tl.float32)
    total_blue = tl.zeros_like(blue).to(tl.float32)
    mask = tl.zeros_like(total_red)
    for corner in range(tl.where(is_nearest, 1, 4)):
        to_right = corner % 2
        below = corner // 2
        weight = tl.where(below == 0, w_upper, w_lower) * tl.where(to_right == 0, w_left, w_right)
        total_red, total_green, total_blue, mask = add_tap(
            view, left + to_right, upper + below, width, height, weight, total_red, total_green, total_blue, mask
        )
    rule = tl.load(head + 4)
    red = filled(total_red, mask, load_float(head, 7), is_nearest, rule)
    green = filled(total_green, mask, load_float(head, 8), is_nearest, rule)
    blue = filled(total_blue, mask, load_float(head, 9), is_nearest, rule)
    return red, green, blue
