"""Sharpness: a blend with the smoothed image."""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch
from .pixel_math import blend, smooth


@triton.jit
def sharpen(view, head, x, y, red, green, blue):
    """`ImageEnhance.Sharpness`: blend with the smoothed image, whose border of one pixel is the image itself.

    `x` [1, X], `y` [Y, 1]; `red`, `green`, `blue` int32 [Y, X]: anything.
    """
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    factor = tl.load(head + 11).to(tl.float32, bitcast=True)
    total_red = tl.zeros_like(red)
    total_green = tl.zeros_like(green)
    total_blue = tl.zeros_like(blue)
    for neighbour in range(9):
        column = tl.minimum(tl.maximum(x + neighbour % 3 - 1, 0), width - 1)
        row = tl.minimum(tl.maximum(y + neighbour // 3 - 1, 0), height - 1)
        r, g, b = fetch(view, column, row)
        total_red += r
        total_green += g
        total_blue += b
    red, green, blue = fetch(view, x, y)
    border = (x == 0) | (y == 0) | (x == width - 1) | (y == height - 1)
    smooth_red = tl.where(border, red, smooth(total_red, red))
    smooth_green = tl.where(border, green, smooth(total_green, green))
    smooth_blue = tl.where(border, blue, smooth(total_blue, blue))
    return blend(smooth_red, red, factor), blend(smooth_green, green, factor), blend(smooth_blue, blue, factor)
