"""Boxes that are written over: one color a channel, or given pixels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def position_in_box(operation, x, y):
    """Which positions an ERASE or PASTE writes, and the place of each in its box. `x` int32 [X], `y` int32 [Y]."""
    left = tl.load(operation + 1)
    top = tl.load(operation + 2)
    right = tl.load(operation + 3)
    across = (x >= left) & (x < right)
    down = (y >= top) & (y < tl.load(operation + 4))
    return down[:, None] & across[None, :], (y - top)[:, None] * (right - left) + (x - left)[None, :]


@triton.jit
def paste(operation, tables, place, here, red, green, blue):
    """The pixels of a PASTE where `here`, three planes of a table: int32, or float32 by their bits."""
    pixels = tables + tl.load(operation + 8) + place
    area = tl.load(operation + 5)
    r = tl.load(pixels, mask=here, other=0)
    g = tl.load(pixels + area, mask=here, other=0)
    b = tl.load(pixels + 2 * area, mask=here, other=0)
    element: tl.constexpr = red.dtype
    red = tl.where(here, r.to(element, bitcast=True), red)
    green = tl.where(here, g.to(element, bitcast=True), green)
    blue = tl.where(here, b.to(element, bitcast=True), blue)
    return red, green, blue
