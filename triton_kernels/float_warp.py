"""Affine, perspective and elastic transforms of float32 images: `grid_sample` on the grids that torchvision makes.

The positions are those of `grid.py`; zeros outside, `align_corners=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float_fetch import fetch_float
from .float_math import fused, load_float
from .float_program import FILL
from .grid import grid_position, nearest_even, source_position
from .program import FILL_V2, NO_FILL


@triton.jit
def add_tap(view, column, row, width, height, weight, red, green, blue, mask):
    """Adds one weighted pixel to the sums, and its weight to the mask; zero outside the image."""
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    r, g, b = fetch_float(view, tl.where(inside, column, 0), tl.where(inside, row, 0))
    red = fused(tl.where(inside, r, 0.0), weight, red)
    green = fused(tl.where(inside, g, 0.0), weight, green)
    blue = fused(tl.where(inside, b, 0.0), weight, blue)
    return red, green, blue, fused(inside.to(tl.float32), weight, mask)


@triton.jit
def filled(value, mask, fill, is_nearest, rule):
    """What torchvision makes of a sampled value where the mask says how much of it came from inside the image."""
    smooth = tl.where(rule == FILL_V2, (value - fill) * mask + fill, value * mask + (1.0 - mask) * fill)
    nearest = tl.where(mask < 0.5, fill, value)
    return tl.where(rule == NO_FILL, value, tl.where(is_nearest, nearest, smooth))


@triton.jit
def turn(view, head, x, y):
    """A quarter turn: rows become columns. `x` int32 [1, X], `y` int32 [Y, 1]."""
    column = tl.load(head + 1) * y + tl.load(head + 2)
    row = tl.load(head + 3) * x + tl.load(head + 4)
    return fetch_float(view, column, row)


@triton.jit
def warp_grid(view, head, tables, x, y, red, green, blue):
    """`grid_sample` and the fill. `x` int32 [1, X], `y` int32 [Y, 1]; `red`, `green`, `blue` float32 [Y, X]: zero."""
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
    mask = tl.zeros_like(red)
    for corner in range(tl.where(is_nearest, 1, 4)):
        to_right = corner % 2
        below = corner // 2
        weight = tl.where(below == 0, w_upper, w_lower) * tl.where(to_right == 0, w_left, w_right)
        red, green, blue, mask = add_tap(
            view, left + to_right, upper + below, width, height, weight, red, green, blue, mask
        )
    rule = tl.load(head + 4)
    red = filled(red, mask, load_float(head, FILL), is_nearest, rule)
    green = filled(green, mask, load_float(head, FILL + 1), is_nearest, rule)
    blue = filled(blue, mask, load_float(head, FILL + 2), is_nearest, rule)
    return red, green, blue
