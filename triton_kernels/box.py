"""One pass of a box blur along one axis, as Pillow's `BoxBlur.c`; three of them make its Gaussian blur."""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch


@triton.jit
def box_blur(view, head, x, y, red, green, blue):
    """The whole pixels of the box and the two that it covers in part, weighted in 8.24 integers; edges are repeated.

    `x` int32 [1, X], `y` int32 [Y, 1]; `red`, `green`, `blue` int32 [Y, X]: anything.
    """
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    radius = tl.load(head + 3)
    whole = tl.load(head + 4).to(tl.int64)
    part = tl.load(head + 5).to(tl.int64)
    across = tl.load(head + 6)
    down = tl.load(head + 7)
    total_red = tl.zeros_like(red).to(tl.int64)
    total_green = tl.zeros_like(green).to(tl.int64)
    total_blue = tl.zeros_like(blue).to(tl.int64)
    for step in range(2 * radius + 3):
        offset = step - radius - 1
        column = tl.minimum(tl.maximum(x + offset * across, 0), width - 1)
        row = tl.minimum(tl.maximum(y + offset * down, 0), height - 1)
        r, g, b = fetch(view, column, row)
        weight = tl.where((step == 0) | (step == 2 * radius + 2), part, whole)
        total_red += r * weight
        total_green += g * weight
        total_blue += b * weight
    half = 1 << 23
    red = ((total_red + half) >> 24).to(tl.int32)
    green = ((total_green + half) >> 24).to(tl.int32)
    blue = ((total_blue + half) >> 24).to(tl.int32)
    return red, green, blue
