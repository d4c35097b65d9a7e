"""Heads that read neighbors of a pixel: one axis of a resize or blur, sharpness, Pillow's kernels.

Resizes of bytes compute in integers, as Pillow's `Resample.c` and torch's kernels for uint8 tensors do. Filters of
floats are resizes, antialiased or not, and torch's Gaussian blur; torch sums the taps in an order that depends on the
processor. Pillow's Gaussian blur is three box blurs (`BoxBlur.c`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pixels import blend, clamp, cut, fetch, fetch_bytes, fused, load_float, reflected
from ..program import (
    ACROSS,
    DOWN,
    FACTOR,
    FIRST_INPUT,
    FIRST_OUTPUT,
    FORMULA,
    INPUT_HEIGHT,
    INPUT_WIDTH,
    KERNEL_SIZE,
    LAST_INPUT,
    MIRRORS,
    PART_WEIGHT,
    RADIUS,
    SMOOTHED_WEIGHT,
    TABLE,
    TAP_COUNT,
    TENSOR_V2,
    WEIGHT_BITS,
    WEIGHT_STRIDE,
    WHOLE_WEIGHT,
)


@triton.jit
def cut_byte(total, precision):
    """Converts the sum of weighted bytes to float32, clamped to [0, 255]."""
    return clamp(total >> precision, 0, 255).to(tl.float32)


@triton.jit
def filter_axis(
    view, head, tables, x, y, red,
    is_x: tl.constexpr, IS_WHOLE: tl.constexpr, IS_HEAVY: tl.constexpr,
):  # fmt: skip
    """Computes one axis of a resize or a blur, with weights [taps, positions] from tables.

    With `IS_WHOLE` the input is bytes, and the result is clamped to bytes, as by Pillow between two passes. Otherwise
    it is floats; a blur has the same weights [taps] for all positions, is centered on each of them, and mirrors the
    input at the border.

    Args:
        x, y: int32 [X] and [Y], positions of the head's output.
        red: float32 [Y, X], zeros.
    """
    last = tl.load(head + LAST_INPUT)
    stride = tl.load(head + WEIGHT_STRIDE)
    taps = tl.load(head + TAP_COUNT)
    origin = tl.load(head + FIRST_INPUT)
    kind = tl.load(head + (WEIGHT_BITS if IS_WHOLE else MIRRORS))
    position = (x if is_x else y) + tl.load(head + FIRST_OUTPUT)
    place = position if IS_WHOLE else tl.where(kind != 0, 0, position)
    first = tl.load(tables + tl.load(head + TABLE) + place)
    weights = tables + tl.load(head + TABLE + 1) + place
    if IS_WHOLE:
        red = tl.zeros_like(red).to(tl.int32) + (1 << (kind - 1))
    else:
        first = tl.where(kind != 0, position - taps // 2, first)
    green = red
    blue = red
    for tap in range(taps):
        weight = tl.load(weights + tap * stride)
        at = first + tap
        if IS_WHOLE:
            # After the last tap the weight is zero, but the position must be in the image.
            at = tl.minimum(at, last) - origin
        else:
            at = tl.where(kind != 0, reflected(at, last + 1), at)
            at = clamp(at, origin, last) - origin
        columns = (at if is_x else x)[None, :]
        rows = (y if is_x else at)[:, None]
        weight = weight[None, :] if is_x else weight[:, None]
        if IS_WHOLE:
            r, g, b = fetch_bytes(view, columns, rows, IS_HEAVY)
            red += r * weight
            green += g * weight
            blue += b * weight
        else:
            r, g, b = fetch(view, columns, rows, IS_HEAVY)
            weight = weight.to(tl.float32, bitcast=True)
            red, green, blue = fused(r, weight, red), fused(g, weight, green), fused(b, weight, blue)
    if IS_WHOLE:
        red, green, blue = cut_byte(red, kind), cut_byte(green, kind), cut_byte(blue, kind)
    return red, green, blue


@triton.jit
def nearest_byte(total):
    """Rounds 8.24 fixed point to the nearest whole float32."""
    return ((total + (1 << 23)) >> 24).to(tl.int32).to(tl.float32)


@triton.jit
def box_blur(view, head, x, y, red):
    """Computes a box blur in 8.24 fixed point, with a smaller weight for partly covered pixels; edges are repeated.

    `x` is int32 [1, X], `y` int32 [Y, 1], `red` float32 [Y, X] of zeros.
    """
    width = tl.load(head + INPUT_WIDTH)
    height = tl.load(head + INPUT_HEIGHT)
    radius = tl.load(head + RADIUS)
    whole = tl.load(head + WHOLE_WEIGHT).to(tl.int64)
    part = tl.load(head + PART_WEIGHT).to(tl.int64)
    across = tl.load(head + ACROSS)
    down = tl.load(head + DOWN)
    red_sum = tl.zeros_like(red).to(tl.int64)
    green_sum = red_sum
    blue_sum = red_sum
    for step in range(2 * radius + 3):
        offset = step - radius - 1
        column = clamp(x + offset * across, 0, width - 1)
        row = clamp(y + offset * down, 0, height - 1)
        r, g, b = fetch_bytes(view, column, row, True)
        weight = tl.where((step == 0) | (step == 2 * radius + 2), part, whole)
        red_sum += r * weight
        green_sum += g * weight
        blue_sum += b * weight
    return nearest_byte(red_sum), nearest_byte(green_sum), nearest_byte(blue_sum)


@triton.jit
def smooth(total, center, top, IS_HEAVY: tl.constexpr):
    """Computes `ImageFilter.SMOOTH`: the mean of 3 x 3 pixels, the center counted 5 times; whole numbers for bytes."""
    total = total + 4.0 * center
    made = tl.floor((2.0 * total + 13.5) * (1.0 / 26.0))
    if IS_HEAVY:
        made = tl.where(top > 1.0, made, total * (1.0 / 13.0))
    return made


@triton.jit
def sharpened(total, value, border, factor, rest, formula, top, IS_HEAVY: tl.constexpr):
    """Blends one channel with its smoothed version."""
    smoothed = tl.where(border, value, smooth(total, value, top, IS_HEAVY))
    mixed = blend(smoothed, value, factor, rest, formula, top, IS_HEAVY)
    if IS_HEAVY and formula == TENSOR_V2:
        mixed = cut(fused(smoothed - value, rest, value), top)
    return mixed


@triton.jit
def sharpen(view, head, x, y, red, top, IS_HEAVY: tl.constexpr):
    """Computes sharpness. `x` is int32 [1, X], `y` int32 [Y, 1], `red` float32 [Y, X] of zeros."""
    width = tl.load(head + INPUT_WIDTH)
    height = tl.load(head + INPUT_HEIGHT)
    rest = load_float(head, SMOOTHED_WEIGHT)
    factor = load_float(head, FACTOR)
    formula = tl.load(head + FORMULA)
    red_sum = red
    green_sum = red
    blue_sum = red
    for neighbor in range(9):
        column = clamp(x + neighbor % 3 - 1, 0, width - 1)
        row = clamp(y + neighbor // 3 - 1, 0, height - 1)
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
def convolve(view, head, tables, x, y, red):
    """Computes Pillow's kernels of 3 x 3 or 5 x 5 weights, summed line by line from the lowest, as in `Filter.c`.

    `x` is int32 [1, X], `y` int32 [Y, 1], `red` float32 [Y, X] of zeros.
    """
    width = tl.load(head + INPUT_WIDTH)
    height = tl.load(head + INPUT_HEIGHT)
    size = tl.load(head + KERNEL_SIZE)
    weights = tables + tl.load(head + TABLE)
    reach = size // 2
    border = (x < reach) | (y < reach) | (x >= width - reach) | (y >= height - reach)
    red_sum = tl.where(border, 0.0, load_float(head, FACTOR))
    green_sum = red_sum
    blue_sum = red_sum
    for line in range(size):
        row = clamp(y + reach - line, 0, height - 1)
        red_line = red
        green_line = red
        blue_line = red
        for place in range(size):
            r, g, b = fetch_bytes(view, clamp(x + place - reach, 0, width - 1), row, True)
            # Pixels of the border stay as they are.
            middle = tl.where((line == reach) & (place == reach), 1.0, 0.0)
            weight = tl.where(border, middle, load_float(weights, line * size + place))
            red_line += r.to(tl.float32) * weight
            green_line += g.to(tl.float32) * weight
            blue_line += b.to(tl.float32) * weight
        red_sum += red_line
        green_sum += green_line
        blue_sum += blue_line
    return cut(red_sum, 255.0), cut(green_sum, 255.0), cut(blue_sum, 255.0)
