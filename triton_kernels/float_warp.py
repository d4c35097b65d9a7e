"""Affine and perspective transforms of float32 images: `grid_sample` on the grids that torchvision makes.

`aten/native/cpu/GridSamplerKernel.cpp`, zeros outside, `align_corners=False`; the grid is a product of matrices whose
sums round after each step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float_fetch import fetch_float
from .float_math import fused, load_float
from .float_program import FILL
from .float_resample import four_taps

_NEAREST = tl.constexpr(0)
_NO_FILL = tl.constexpr(0)
_FILL_V2 = tl.constexpr(2)


@triton.jit
def grid_row(table, index: tl.constexpr, column, row):
    """column * a + row * b + c with the three entries of the table from `index` on."""
    a = load_float(table, index)
    b = load_float(table, index + 1)
    return column * a + row * b + load_float(table, index + 2)


@triton.jit
def source_position(grid, size):
    """Grid in [-1, 1] -> position in pixels; positions that no filter reaches from become one far outside."""
    half = size.to(tl.float32) * 0.5
    position = fused(grid + 1.0, half + tl.zeros_like(grid), tl.full((1, 1), -0.5, tl.float32))
    reachable = (position > -2.0) & (position < size.to(tl.float32) + 1.0)
    return tl.where(reachable, position, -8.0)


@triton.jit
def tap(view, column, row, width, height):
    """Pixels at (row, column), zero outside, and whether they are inside as a float."""
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    red, green, blue = fetch_float(view, tl.where(inside, column, 0), tl.where(inside, row, 0))
    mask = inside.to(tl.float32)
    return tl.where(inside, red, 0.0), tl.where(inside, green, 0.0), tl.where(inside, blue, 0.0), mask


@triton.jit
def round_half_even(position):
    """float32 -> int32."""
    whole = tl.floor(position)
    rest = position - whole
    number = whole.to(tl.int32)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (number % 2 != 0)), number + 1, number)


@triton.jit
def filled(value, mask, fill, IS_NEAREST, KIND):
    """What torchvision makes of a sampled value where the mask says how much of it came from inside the image."""
    smooth = tl.where(KIND == _FILL_V2, (value - fill) * mask + fill, value * mask + (1.0 - mask) * fill)
    nearest = tl.where(mask < 0.5, fill, value)
    return tl.where(KIND == _NO_FILL, value, tl.where(IS_NEAREST, nearest, smooth))


@triton.jit
def warp_grid(view, head, tables, x, y):
    """Affine or perspective transform. `x` int32 [1, X], `y` int32 [Y, 1]."""
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    table = tables + tl.load(head + 10)
    column = x.to(tl.float32) + load_float(table, 0)
    row = y.to(tl.float32) + load_float(table, 1)
    u = grid_row(table, 2, column, row)
    v = grid_row(table, 5, column, row)
    if tl.load(head + 5) != 0:
        depth = grid_row(table, 8, column, row)
        u = tl.div_rn(u, depth) - 1.0
        v = tl.div_rn(v, depth) - 1.0
    return sample_grid(view, head, u, v, width, height)


@triton.jit
def sample_grid(view, head, u, v, width, height):
    """`grid_sample` at (u, v), float32 [Y, X] in [-1, 1], and the fill."""
    across = source_position(u, width)
    down = source_position(v, height)
    is_nearest = tl.load(head + 3) == _NEAREST
    if is_nearest:
        red, green, blue, mask = tap(view, round_half_even(across), round_half_even(down), width, height)
    else:
        left = tl.floor(across)
        upper = tl.floor(down)
        w_right = across - left
        w_lower = down - upper
        w_left = 1.0 - w_right
        w_upper = 1.0 - w_lower
        at_x = left.to(tl.int32)
        at_y = upper.to(tl.int32)
        r1, g1, b1, m1 = tap(view, at_x, at_y, width, height)
        r2, g2, b2, m2 = tap(view, at_x + 1, at_y, width, height)
        r3, g3, b3, m3 = tap(view, at_x, at_y + 1, width, height)
        r4, g4, b4, m4 = tap(view, at_x + 1, at_y + 1, width, height)
        w1, w2, w3, w4 = w_upper * w_left, w_upper * w_right, w_lower * w_left, w_lower * w_right
        red = four_taps(r1, r2, r3, r4, w1, w2, w3, w4)
        green = four_taps(g1, g2, g3, g4, w1, w2, w3, w4)
        blue = four_taps(b1, b2, b3, b4, w1, w2, w3, w4)
        mask = four_taps(m1, m2, m3, m4, w1, w2, w3, w4)
    kind = tl.load(head + 4)
    red = filled(red, mask, load_float(head, FILL), is_nearest, kind)
    green = filled(green, mask, load_float(head, FILL + 1), is_nearest, kind)
    blue = filled(blue, mask, load_float(head, FILL + 2), is_nearest, kind)
    return red, green, blue
