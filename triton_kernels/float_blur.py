"""Gaussian blur and sharpness of float32 images: torch's convolution, tap by tap in its order.

oneDNN fuses each multiply and add into one rounding; what torch does for small images of one channel rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blur import mirrored
from .float_fetch import fetch_float
from .float_math import blend, clamp, fused, load_float


@triton.jit
def add_product(total, value, weight, is_fused):
    """total + value * weight."""
    return tl.where(is_fused, fused(value, weight + tl.zeros_like(value), total), total + value * weight)


@triton.jit
def blur_float(view, head, tables, x, y, red, green, blue):
    """All taps of the kernel, row by row. `x` [1, X], `y` [Y, 1]; `red`, `green`, `blue` float32 [Y, X]: zero."""
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    across = tl.load(head + 3)
    down = tl.load(head + 4)
    is_fused = tl.load(head + 5) != 0
    weights = tables + tl.load(head + 8)
    for tap in range(across * down):
        weight = tl.load(weights + tap).to(tl.float32, bitcast=True)
        column = mirrored(x + tap % across - across // 2, width)
        row = mirrored(y + tap // across - down // 2, height)
        r, g, b = fetch_float(view, column, row)
        red = add_product(red, r, weight, is_fused)
        green = add_product(green, g, weight, is_fused)
        blue = add_product(blue, b, weight, is_fused)
    return red, green, blue


@triton.jit
def sharpened(value, smooth, is_border, factor, rest, is_v2):
    """The image blended with the smoothed one, whose border of one pixel is the image itself."""
    difference = tl.where(is_border, 0.0, smooth - value)
    in_v2 = clamp(fused(difference, rest + tl.zeros_like(difference), value), 0.0, 1.0)
    return tl.where(is_v2, in_v2, blend(value, tl.where(is_border, value, smooth), factor, rest, False))


@triton.jit
def sharpen_float(view, head, x, y, red, green, blue):
    """Sharpness. `x` [1, X], `y` [Y, 1]; `red`, `green`, `blue` float32 [Y, X]: zero."""
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    is_fused = tl.load(head + 3) != 0
    is_v2 = tl.load(head + 4) != 0
    for tap in range(9):
        column = tl.minimum(tl.maximum(x + tap % 3 - 1, 0), width - 1)
        row = tl.minimum(tl.maximum(y + tap // 3 - 1, 0), height - 1)
        weight = tl.where(tap == 4, 5.0 / 13.0, 1.0 / 13.0)
        r, g, b = fetch_float(view, column, row)
        red = add_product(red, r, weight, is_fused)
        green = add_product(green, g, weight, is_fused)
        blue = add_product(blue, b, weight, is_fused)
    border = (x == 0) | (y == 0) | (x == width - 1) | (y == height - 1)
    factor = load_float(head, 5)
    rest = load_float(head, 6)
    r, g, b = fetch_float(view, x, y)
    return (
        sharpened(r, red, border, factor, rest, is_v2),
        sharpened(g, green, border, factor, rest, is_v2),
        sharpened(b, blue, border, factor, rest, is_v2),
    )
