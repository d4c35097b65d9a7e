"""Boxes that are written over: one color a channel, or given pixels."""

from __future__ import annotations

import triton
import triton.language as tl

from ..view import load_value


@triton.jit
def in_box(operation, x, y):
    """Which positions an ERASE or PASTE writes. `x` int32 [X], `y` int32 [Y]."""
    across = (x >= tl.load(operation + 1)) & (x < tl.load(operation + 3))
    down = (y >= tl.load(operation + 2)) & (y < tl.load(operation + 4))
    return down[:, None] & across[None, :]


@triton.jit
def place_in_box(operation, x, y):
    """What the row and the column of a position in its box add to its place among the pixels of a PASTE."""
    left = tl.load(operation + 1)
    return (y - tl.load(operation + 2)) * (tl.load(operation + 3) - left), x - left


@triton.jit
def pasted(pixels, place, here, value):
    """`value`, but the given pixels where `here`."""
    return tl.where(here, load_value(pixels, tl.where(here, place, 0)), value)
