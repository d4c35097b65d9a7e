"""Weights of one axis of a resize: Pillow's `precompute_coeffs`, float64, rounded to whole numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..program import BICUBIC, BOX, FILTER, FIRST_AT, IN_SIZE, OUT_SIZE, PRECISION, TAPS, WEIGHTS_AT


@triton.jit
def filter_value(x, KIND):
    """The resampling filter at x, float64."""
    distance = tl.abs(x)
    value = tl.where(distance < 1.0, 1.0 - distance, 0.0)
    if KIND == BICUBIC:
        near = ((-0.5 + 2.0) * distance - (-0.5 + 3.0)) * distance * distance + 1
        far = (((distance - 5) * distance + 8) * distance - 4) * -0.5
        value = tl.where(distance < 1.0, near, tl.where(distance < 2.0, far, 0.0))
    if KIND == BOX:
        value = tl.where((x > -0.5) & (x <= 0.5), 1.0, 0.0).to(tl.float64)
    return value


@triton.jit
def tap_value(tap, center, first, count, inverse, KIND):
    """The weight of one tap before all are divided by their sum; 0 past the last tap."""
    value = filter_value(((first + tap).to(tl.float64) - center + 0.5) * inverse, KIND)
    return tl.where(tap < count, value, 0.0)


@triton.jit
def write_whole_weights(row, tables, BLOCK: tl.constexpr):
    """Writes the first source position of each output position, and the weights [taps, output positions]."""
    in_size = tl.load(row + IN_SIZE)
    out_size = tl.load(row + OUT_SIZE)
    taps = tl.load(row + TAPS)
    kind = tl.load(row + FILTER)
    unit = (1 << tl.load(row + PRECISION)).to(tl.float64)
    scale = in_size.to(tl.float64) / out_size.to(tl.float64)
    # A filter is stretched when the image shrinks, and never squeezed.
    stretch = tl.where(scale < 1.0, 1.0, scale)
    support = tl.where(kind == BICUBIC, 2.0, tl.where(kind == BOX, 0.5, 1.0)) * stretch
    inverse = 1.0 / stretch
    for begin in range(0, out_size, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        here = position < out_size
        center = (position.to(tl.float64) + 0.5) * scale
        first = tl.maximum((center - support + 0.5).to(tl.int32), 0)
        count = tl.minimum((center + support + 0.5).to(tl.int32), in_size) - first
        total = tl.zeros_like(center)
        for tap in range(taps):
            total += tap_value(tap, center, first, count, inverse, kind)
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(tables + tl.load(row + FIRST_AT) + position, first, mask=here)
        for tap in range(taps):
            scaled = tap_value(tap, center, first, count, inverse, kind) / total * unit
            whole = tl.where(scaled < 0.0, scaled - 0.5, scaled + 0.5).to(tl.int32)
            tl.store(tables + tl.load(row + WEIGHTS_AT) + tap * out_size + position, whole, mask=here)
