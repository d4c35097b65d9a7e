"""One axis of an antialiased resize, as Pillow's `Resample.c` computes it: float64 weights rounded to 22 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch
from .program import BICUBIC, BOX, FROM_TABLE


@triton.jit
def filter_value(x, FILTER):
    """The resampling filter at x, float64."""
    distance = tl.abs(x)
    value = tl.where(distance < 1.0, 1.0 - distance, 0.0)
    if FILTER == BICUBIC:
        near = ((-0.5 + 2.0) * distance - (-0.5 + 3.0)) * distance * distance + 1
        far = (((distance - 5) * distance + 8) * distance - 4) * -0.5
        value = tl.where(distance < 1.0, near, tl.where(distance < 2.0, far, 0.0))
    if FILTER == BOX:
        value = tl.where((x > -0.5) & (x <= 0.5), 1.0, 0.0).to(tl.float64)
    return value


@triton.jit
def filter_support(FILTER):
    """Half the width of the filter."""
    support = 1.0
    if FILTER == BICUBIC:
        support = 2.0
    if FILTER == BOX:
        support = 0.5
    return support


@triton.jit
def filter_scale_of(scale):
    """A filter is stretched when the image shrinks, and never squeezed."""
    return tl.where(scale < 1.0, 1.0, scale)


@triton.jit
def tap_span(position, scale, filter_scale, FILTER, in_size):
    """(center, first tap, number of taps) of each output position; float64, int32, int32."""
    center = (position.to(tl.float64) + 0.5) * scale
    support = filter_support(FILTER) * filter_scale
    first = tl.maximum((center - support + 0.5).to(tl.int32), 0)
    end = tl.minimum((center + support + 0.5).to(tl.int32), in_size)
    return center, first, end - first


@triton.jit
def tap_value(tap, center, first, count, filter_scale, FILTER):
    """The weight of one tap before all are divided by their sum; 0 past the last tap."""
    value = filter_value(((first + tap).to(tl.float64) - center + 0.5) * (1.0 / filter_scale), FILTER)
    return tl.where(tap < count, value, 0.0)


@triton.jit
def fixed_point(weight):
    """float64 -> int32 with 22 bits after the point, rounded half away from zero."""
    scaled = weight * 4194304.0
    return tl.where(scaled < 0.0, scaled - 0.5, scaled + 0.5).to(tl.int32)


@triton.jit
def resample(view, head, tables, x, y, is_x: tl.constexpr, red, green, blue):
    """One axis of a resize: weights in integers, the sum rounded to uint8 as Pillow does between its two passes.

    `x` int32 [X], `y` int32 [Y]: positions of the head's output. `red`, `green`, `blue` int32 [Y, X]: anything.
    """
    in_size = tl.load(head + 1)
    out_size = tl.load(head + 2)
    taps = tl.load(head + 3)
    origin = tl.load(head + 5)
    FILTER = tl.load(head + 6)
    precision = tl.load(head + 7)
    position = (x if is_x else y) + tl.load(head + 4)
    scale = in_size.to(tl.float64) / out_size.to(tl.float64)
    filter_scale = filter_scale_of(scale)
    center, first, count = tap_span(position, scale, filter_scale, FILTER, in_size)
    total = tl.zeros_like(center)
    if FILTER == FROM_TABLE:
        first = tl.load(tables + tl.load(head + 8) + position)
    else:
        for tap in range(taps):
            total += tap_value(tap, center, first, count, filter_scale, FILTER)
    total = tl.where(total == 0.0, 1.0, total)
    half = 1 << (precision - 1)
    red = tl.zeros_like(red) + half
    green = tl.zeros_like(green) + half
    blue = tl.zeros_like(blue) + half
    for tap in range(taps):
        if FILTER == FROM_TABLE:
            weight = tl.load(tables + tl.load(head + 9) + position * taps + tap)
        else:
            weight = fixed_point(tap_value(tap, center, first, count, filter_scale, FILTER) / total)
        # Past the last tap the weight is zero; the position only has to exist.
        at = tl.minimum(first + tap, in_size - 1) - origin
        if is_x:
            r, g, b = fetch(view, at[None, :], y[:, None])
            weight = weight[None, :]
        else:
            r, g, b = fetch(view, x[None, :], at[:, None])
            weight = weight[:, None]
        red += r * weight
        green += g * weight
        blue += b * weight
    red = tl.minimum(tl.maximum(red >> precision, 0), 255)
    green = tl.minimum(tl.maximum(green >> precision, 0), 255)
    blue = tl.minimum(tl.maximum(blue >> precision, 0), 255)
    return red, green, blue
