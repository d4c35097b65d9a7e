"""Sharpness: a blend with the smoothed image, whose border of one pixel is the image itself."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import blend, cut, fused, load_float
from ..program import FACTOR, FORMULA, TENSOR_V2
from ..view import fetch


@triton.jit
def smooth(total, center, top, IS_HEAVY: tl.constexpr):
    """`ImageFilter.SMOOTH`: the nine pixels, the center five times, over 13; of bytes the nearest whole number."""
    total = total + 4.0 * center
    made = tl.floor((2.0 * total + 13.5) * (1.0 / 26.0))
    if IS_HEAVY:
        made = tl.where(top > 1.0, made, total * (1.0 / 13.0))
    return made


@triton.jit
def sharpened(total, value, border, factor, rest, formula, top, IS_HEAVY: tl.constexpr):
    """One channel blended with its smoothed self."""
    smoothed = tl.where(border, value, smooth(total, value, top, IS_HEAVY))
    mixed = blend(smoothed, value, factor, rest, formula, top, IS_HEAVY)
    if IS_HEAVY:
        if formula == TENSOR_V2:
            mixed = cut(fused(smoothed - value, rest, value), top)
    return mixed


@triton.jit
def sharpen(view, head, x, y, red, top, IS_HEAVY: tl.constexpr):
    """`x` int32 [1, X], `y` int32 [Y, 1]; `red` float32 [Y, X]: zero."""
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    rest = load_float(head, 3)
    factor = load_float(head, FACTOR)
    formula = tl.load(head + FORMULA)
    red_sum = red
    green_sum = red
    blue_sum = red
    for neighbor in range(9):
        column = tl.minimum(tl.maximum(x + neighbor % 3 - 1, 0), width - 1)
        row = tl.minimum(tl.maximum(y + neighbor // 3 - 1, 0), height - 1)
        r, g, b = fetch(view, column, row, IS_HEAVY)
        red_sum += r
        green_sum += g
        blue_sum += b
    r, g, b = fetch(view, x, y, IS_HEAVY)
    border = (x == 0) | (y == 0) | (x == width - 1) | (y == height - 1)
    red = sharpened(red_sum, r, border, factor, rest, formula, top, IS_HEAVY)
    green = sharpened(green_sum, g, border, factor, rest, formula, top, IS_HEAVY)
    blue = sharpened(blue_sum, b, border, factor, rest, formula, top, IS_HEAVY)
    return red, green, blue
