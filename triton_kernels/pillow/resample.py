"""One axis of a resize in whole numbers, as `Resample.c` computes it; torch resizes uint8 tensors in the same way."""

from __future__ import annotations

import triton
import triton.language as tl

from ..program import TABLE
from ..view import fetch_bytes


@triton.jit
def as_byte(total, precision):
    """The sum of weighted bytes -> float32, cut off at 0 and 255."""
    return tl.minimum(tl.maximum(total >> precision, 0), 255).to(tl.float32)


@triton.jit
def resample(view, head, tables, x, y, is_x: tl.constexpr, red, IS_HEAVY: tl.constexpr):
    """Weights [taps, positions] come from tables; the result is rounded to bytes, as Pillow does between two passes.

    `x` int32 [X], `y` int32 [Y]: positions of the head's output. `red` float32 [Y, X]: zero.
    """
    last = tl.load(head + 1)
    out_size = tl.load(head + 2)
    taps = tl.load(head + 3)
    origin = tl.load(head + 7)
    precision = tl.load(head + 8)
    position = (x if is_x else y) + tl.load(head + 6)
    first = tl.load(tables + tl.load(head + TABLE) + position)
    weights = tables + tl.load(head + TABLE + 1) + position
    red_sum = tl.zeros_like(red).to(tl.int32) + (1 << (precision - 1))
    green_sum = red_sum
    blue_sum = red_sum
    for tap in range(taps):
        weight = tl.load(weights + tap * out_size)
        # Past the last tap the weight is zero; the position only has to exist.
        at = tl.minimum(first + tap, last) - origin
        if is_x:
            r, g, b = fetch_bytes(view, at[None, :], y[:, None], IS_HEAVY)
            weight = weight[None, :]
        else:
            r, g, b = fetch_bytes(view, x[None, :], at[:, None], IS_HEAVY)
            weight = weight[:, None]
        red_sum += r * weight
        green_sum += g * weight
        blue_sum += b * weight
    return as_byte(red_sum, precision), as_byte(green_sum, precision), as_byte(blue_sum, precision)
