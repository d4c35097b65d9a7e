"""Antialiased resizing of bytes in float32, rounded at the end: how `transforms` (v1) resizes uint8 tensors.

torch's float kernel, `aten/native/cpu/UpSampleKernel.cpp`, in two launches with float32 values in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch
from .pixel_math import round_half_even
from .tensor_math import fused


@triton.jit
def accumulate(total, value, weight, two_roundings):
    """total + value * weight in float32, rounded twice or once."""
    return tl.where(two_roundings, total + value * weight, fused(value, weight, total))


@triton.jit
def as_rounded_byte(value):
    """float32, cut off at 0 and 255, rounded half to even."""
    return round_half_even(tl.minimum(tl.maximum(value, 0.0), 255.0))


@triton.jit
def resize_axis(view, head, tables, x, y, is_x: tl.constexpr, red, green, blue):
    """One axis: bytes to float32 values along x, and those to bytes along y. Float32 values go by their bits.

    `x` int32 [X], `y` int32 [Y]: positions of the head's output. `red`, `green`, `blue` int32 [Y, X]: anything.
    """
    last = tl.load(head + 1) - 1
    taps = tl.load(head + 2)
    position = x if is_x else y
    first = tl.load(tables + tl.load(head + 8) + position)
    grouped = tl.load(tables + tl.load(head + 9) + position)
    weights = tables + tl.load(head + 10) + position * taps
    total_red = tl.zeros_like(red).to(tl.float32)
    total_green = tl.zeros_like(green).to(tl.float32)
    total_blue = tl.zeros_like(blue).to(tl.float32)
    for tap in range(taps):
        weight = tl.load(weights + tap).to(tl.float32, bitcast=True)
        # Past the last tap the weight is zero; the position only has to exist.
        at = tl.minimum(first + tap, last)
        two_roundings = tap < grouped
        if is_x:
            r, g, b = fetch(view, at[None, :], y[:, None])
            weight = weight[None, :]
            two_roundings = two_roundings[None, :]
            total_red = accumulate(total_red, r.to(tl.float32), weight, two_roundings)
            total_green = accumulate(total_green, g.to(tl.float32), weight, two_roundings)
            total_blue = accumulate(total_blue, b.to(tl.float32), weight, two_roundings)
        else:
            r, g, b = fetch(view, x[None, :], at[:, None])
            weight = weight[:, None]
            two_roundings = two_roundings[:, None]
            total_red = accumulate(total_red, r.to(tl.float32, bitcast=True), weight, two_roundings)
            total_green = accumulate(total_green, g.to(tl.float32, bitcast=True), weight, two_roundings)
            total_blue = accumulate(total_blue, b.to(tl.float32, bitcast=True), weight, two_roundings)
    if is_x:
        red = total_red.to(tl.int32, bitcast=True)
        green = total_green.to(tl.int32, bitcast=True)
        blue = total_blue.to(tl.int32, bitcast=True)
    else:
        red, green, blue = as_rounded_byte(total_red), as_rounded_byte(total_green), as_rounded_byte(total_blue)
    return red, green, blue
