"""One pass of a box blur along one axis, as Pillow's `BoxBlur.c`; three of them make its Gaussian blur."""

from __future__ import annotations

import triton
import triton.language as tl

from ..view import fetch_bytes


@triton.jit
def as_byte(total):
    """8.24 -> float32, to the nearest."""
    return ((total + (1 << 23)) >> 24).to(tl.int32).to(tl.float32)


@triton.jit
def box_blur(view, head, x, y, red):
    """The whole pixels of the box and the two that it covers in part, weighted in 8.24 integers; edges are repeated.

    `x` int32 [1, X], `y` int32 [Y, 1]; `red` float32 [Y, X]: zero.
    """
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    radius = tl.load(head + 3)
    whole = tl.load(head + 4).to(tl.int64)
    part = tl.load(head + 5).to(tl.int64)
    across = tl.load(head + 6)
    down = tl.load(head + 7)
    red_sum = tl.zeros_like(red).to(tl.int64)
    green_sum = red_sum
    blue_sum = red_sum
    for step in range(2 * radius + 3):
        offset = step - radius - 1
        column = tl.minimum(tl.maximum(x + offset * across, 0), width - 1)
        row = tl.minimum(tl.maximum(y + offset * down, 0), height - 1)
        r, g, b = fetch_bytes(view, column, row, True)
        weight = tl.where((step == 0) | (step == 2 * radius + 2), part, whole)
        red_sum += r * weight
        green_sum += g * weight
        blue_sum += b * weight
    return as_byte(red_sum), as_byte(green_sum), as_byte(blue_sum)
