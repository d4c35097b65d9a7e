"""One axis of a separable filter of float32 values: resizes, antialiased or not, and Gaussian blur.

Bytes are rounded after the second axis. torch adds the taps up in an order that depends on the processor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import fused
from ..program import TABLE
from ..view import fetch


@triton.jit
def mirrored(position, size):
    """A position up to `size` - 1 beyond either end, reflected into the image; the border itself is not repeated."""
    position = tl.abs(position)
    return tl.where(position >= size, 2 * (size - 1) - position, position)


@triton.jit
def filter_axis(view, head, tables, x, y, is_x: tl.constexpr, red):
    """Weights [taps, positions] come from tables; beyond the border the last position counts.

    A blur, which has the same weights [taps] for all positions, lies around each of them and is mirrored at the border.

    `x` int32 [X], `y` int32 [Y]: positions of the head's output. `red` float32 [Y, X]: zero.
    """
    last = tl.load(head + 1)
    out_size = tl.load(head + 2)
    taps = tl.load(head + 3)
    origin = tl.load(head + 7)
    is_blur = tl.load(head + 8) != 0
    position = (x if is_x else y) + tl.load(head + 6)
    place = tl.where(is_blur, 0, position)
    first = tl.where(is_blur, position - taps // 2, tl.load(tables + tl.load(head + TABLE) + place))
    weights = tables + tl.load(head + TABLE + 1) + place
    green = red
    blue = red
    for tap in range(taps):
        weight = tl.load(weights + tap * out_size).to(tl.float32, bitcast=True)
        at = first + tap
        at = tl.where(is_blur, mirrored(at, last + 1), at)
        at = tl.minimum(tl.maximum(at, origin), last) - origin
        if is_x:
            r, g, b = fetch(view, at[None, :], y[:, None], True)
            weight = weight[None, :]
        else:
            r, g, b = fetch(view, x[None, :], at[:, None], True)
            weight = weight[:, None]
        red, green, blue = fused(r, weight, red), fused(g, weight, green), fused(b, weight, blue)
    return red, green, blue
