"""Sharpness: a blend with the smoothed image."""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch
from .pixel_math import blend, smooth
from .program import FACTOR, FORMULA, PILLOW
from .tensor_math import tensor_sharpen


@triton.jit
def sharpened(smoothed, value, factor, rest, formula, HAS_FLOAT64: tl.constexpr):
    """One channel blended with its smoothed self; `rest` is 1 - factor."""
    mixed = blend(smoothed, value, factor)
    if HAS_FLOAT64:
        if formula != PILLOW:
            mixed = tensor_sharpen(value, smoothed, factor, rest, formula)
    return mixed


@triton.jit
def sharpen(view, head, x, y, red, green, blue, HAS_FLOAT64: tl.constexpr):
    """Pillow's sharpness or that of tensors: blend with the smoothed image, whose border is the image itself.

    `x` [1, X], `y` [Y, 1]; `red`, `green`, `blue` int32 [Y, X]: anything.
    """
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    factor = tl.load(head + FACTOR).to(tl.float32, bitcast=True)
    total_red = tl.zeros_like(red)
    total_green = tl.zeros_like(green)
    total_blue = tl.zeros_like(blue)
    for neighbor in range(9):
        column = tl.minimum(tl.maximum(x + neighbor % 3 - 1, 0), width - 1)
        row = tl.minimum(tl.maximum(y + neighbor // 3 - 1, 0), height - 1)
        r, g, b = fetch(view, column, row)
        total_red += r
        total_green += g
        total_blue += b
    red, green, blue = fetch(view, x, y)
    border = (x == 0) | (y == 0) | (x == width - 1) | (y == height - 1)
    smooth_red = tl.where(border, red, smooth(total_red, red))
    smooth_green = tl.where(border, green, smooth(total_green, green))
    smooth_blue = tl.where(border, blue, smooth(total_blue, blue))
    formula = tl.load(head + FORMULA)
    rest = tl.load(head + 3).to(tl.float32, bitcast=True)
    red = sharpened(smooth_red, red, factor, rest, formula, HAS_FLOAT64)
    green = sharpened(smooth_green, green, factor, rest, formula, HAS_FLOAT64)
    blue = sharpened(smooth_blue, blue, factor, rest, formula, HAS_FLOAT64)
    return red, green, blue
