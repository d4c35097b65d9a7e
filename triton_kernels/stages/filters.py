"""Heads that read neighbors of a pixel: one axis of a resize or of a blur, sharpness, and AugMix's sum.

Resizes of bytes compute in whole numbers, as Pillow's `Resample.c` and torch's kernels for uint8 tensors. Filters of
floats are resizes, antialiased or not, and torch's Gaussian blur; torch adds the taps up in an order that depends on
the processor. Pillow's Gaussian blur is three box blurs (`BoxBlur.c`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import blend, cut, fused, load_float
from ..program import (
    FACTOR,
    FORMULA,
    JOB_COLUMNS,
    OPERATION_COLUMNS,
    TABLE,
    TARGET,
    TARGET_CHANNEL,
    TARGET_COLUMN,
    TARGET_ROW,
    TENSOR_V2,
)
from ..view import fetch, fetch_bytes


@triton.jit
def cut_byte(total, precision):
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
    return cut_byte(red_sum, precision), cut_byte(green_sum, precision), cut_byte(blue_sum, precision)


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


@triton.jit
def nearest_byte(total):
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
    return nearest_byte(red_sum), nearest_byte(green_sum), nearest_byte(blue_sum)


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


@triton.jit
def mix(view, workspace, jobs, head, x, y, IS_HEAVY: tl.constexpr):
    """The input and the branches, bytes, added up in order and cut off. `x` int32 [1, X], `y` int32 [Y, 1].

    The rows after `head` name the job that wrote each branch, an image of the size of this one.
    """
    weight = load_float(head, FACTOR)
    red, green, blue = fetch(view, x, y, IS_HEAVY)
    red, green, blue = red * weight, green * weight, blue * weight
    for number in range(1, tl.load(head + 1) + 1):
        branch = head + number * OPERATION_COLUMNS
        job = jobs + tl.load(branch + 1).to(tl.int64) * JOB_COLUMNS
        weight = load_float(branch, FACTOR)
        step = tl.load(job + TARGET_CHANNEL)
        pixel = workspace + tl.load(job + TARGET) + y * tl.load(job + TARGET_ROW) + x * tl.load(job + TARGET_COLUMN)
        red += tl.load(pixel).to(tl.float32) * weight
        green += tl.load(pixel + step).to(tl.float32) * weight
        blue += tl.load(pixel + 2 * step).to(tl.float32) * weight
    return tl.floor(red), tl.floor(green), tl.floor(blue)
