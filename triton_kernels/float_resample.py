"""Resizing float32 images as torch's CPU kernels do.

With antialiasing: one axis, as `aten/native/cpu/UpSampleKernel.cpp` (`_compute_indices_min_size_weights_aa` and
`interpolate_aa_single_dim`). Without: both axes at once, bilinear or bicubic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float_fetch import fetch_float
from .float_math import fused
from .program import BICUBIC


@triton.jit
def tap_weight(tap, first, count, center, inverse_scale, FILTER):
    """The weight of one tap before all are divided by their sum; float32 with torch's roundings."""
    distance = (first + tap).to(tl.float32) - center
    x = tl.abs(((distance.to(tl.float64) + 0.5) * inverse_scale.to(tl.float64)).to(tl.float32))
    weight = tl.where(x < 1.0, 1.0 - x, 0.0)
    if FILTER == BICUBIC:
        near = fused(fused(x, tl.full((1,), 1.5, tl.float32), tl.full((1,), -2.5, tl.float32)) * x, x, x * 0.0 + 1.0)
        far = fused(fused(x - 5.0, x, tl.full((1,), 8.0, tl.float32)), x, tl.full((1,), -4.0, tl.float32)) * -0.5
        weight = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(tap < count, weight, 0.0)


@triton.jit
def resample_float(view, head, x, y, is_x: tl.constexpr, red, green, blue):
    """One axis of an antialiased resize.

    `x` int32 [X], `y` int32 [Y]: positions of the head's output. `red`, `green`, `blue` float32 [Y, X]: zero.
    """
    in_size = tl.load(head + 1)
    out_size = tl.load(head + 2)
    taps = tl.load(head + 3)
    origin = tl.load(head + 5)
    FILTER = tl.load(head + 6)
    position = (x if is_x else y) + tl.load(head + 4)
    scale = tl.div_rn(in_size.to(tl.float32), out_size.to(tl.float32))
    stretch = tl.maximum(scale, 1.0)
    support = tl.where(FILTER == BICUBIC, 2.0, 1.0) * stretch
    inverse_scale = tl.div_rn(stretch * 0.0 + 1.0, stretch)
    center = ((position.to(tl.float64) + 0.5) * scale.to(tl.float64)).to(tl.float32)
    first = tl.maximum(((center - support).to(tl.float64) + 0.5).to(tl.int32), 0)
    count = tl.minimum(((center + support).to(tl.float64) + 0.5).to(tl.int32), in_size) - first
    # torch multiplies and adds after the first tap in groups of four, with two roundings; those left over, with one.
    in_groups = 1 + (count - 1) // 4 * 4
    total = tl.zeros_like(center)
    for tap in range(taps):
        total += tap_weight(tap, first, count, center, inverse_scale, FILTER)
    total = tl.where(total == 0.0, 1.0, total)
    for tap in range(taps):
        weight = tl.div_rn(tap_weight(tap, first, count, center, inverse_scale, FILTER), total)
        # Past the last tap the weight is zero; what lies there may never have been written.
        at = first + tl.minimum(tap, count - 1) - origin
        two_roundings = tap < in_groups
        if is_x:
            r, g, b = fetch_float(view, at[None, :], y[:, None])
            weight = weight[None, :]
            two_roundings = two_roundings[None, :]
        else:
            r, g, b = fetch_float(view, x[None, :], at[:, None])
            weight = weight[:, None]
            two_roundings = two_roundings[:, None]
        red = tl.where(two_roundings, red + r * weight, fused(r, weight, red))
        green = tl.where(two_roundings, green + g * weight, fused(g, weight, green))
        blue = tl.where(two_roundings, blue + b * weight, fused(b, weight, blue))
    return red, green, blue


@triton.jit
def linear_taps(position, in_size, out_size):
    """(first tap, second tap, weight of the first, of the second) of a bilinear resize without antialiasing."""
    scale = tl.div_rn(in_size.to(tl.float32), out_size.to(tl.float32))
    center = position.to(tl.float32) + 0.5
    real = tl.maximum(fused(center, scale + tl.zeros_like(center), tl.full((1,), -0.5, tl.float32)), 0.0)
    first = tl.minimum(real.to(tl.int32), in_size - 1)
    second = tl.minimum(first + 1, in_size - 1)
    weight = tl.minimum(tl.maximum(real - first.to(tl.float32), 0.0), 1.0)
    return first, second, 1.0 - weight, weight


@triton.jit
def bilinear_float(view, head, x, y, red, green, blue):
    """Both axes of a bilinear resize without antialiasing.

    `x` int32 [X], `y` int32 [Y]; `red`, `green`, `blue` float32 [Y, X]: zero.
    """
    left, right, w_left, w_right = linear_taps(x, tl.load(head + 1), tl.load(head + 2))
    upper, lower, w_upper, w_lower = linear_taps(y, tl.load(head + 3), tl.load(head + 4))
    # Upper right, upper left, lower left, lower right.
    for corner in range(4):
        is_right = (corner == 0) | (corner == 3)
        is_lower = corner >= 2
        column = tl.where(is_right, right, left)[None, :]
        row = tl.where(is_lower, lower, upper)[:, None]
        weight = tl.where(is_lower, w_lower, w_upper)[:, None] * tl.where(is_right, w_right, w_left)[None, :]
        r, g, b = fetch_float(view, column, row)
        red, green, blue = fused(r, weight, red), fused(g, weight, green), fused(b, weight, blue)
    return red, green, blue


@triton.jit
def cubic_float(view, head, tables, x, y, red, green, blue):
    """Both axes of a bicubic resize without antialiasing; a table holds four positions and weights a position.

    `x` int32 [X], `y` int32 [Y]; `red`, `green`, `blue` float32 [Y, X]: zero.
    """
    across = tables + tl.load(head + 8) + x * 8
    down = tables + tl.load(head + 9) + y * 8
    for step_down in range(4):
        # torch adds the first product to the second one.
        lower = tl.where(step_down < 2, 1 - step_down, step_down)
        row = tl.load(down + lower)[:, None]
        w_row = tl.load(down + 4 + lower).to(tl.float32, bitcast=True)[:, None]
        r_row = tl.zeros_like(red)
        g_row = tl.zeros_like(red)
        b_row = tl.zeros_like(red)
        for step_across in range(4):
            right = tl.where(step_across < 2, 1 - step_across, step_across)
            column = tl.load(across + right)[None, :]
            weight = tl.load(across + 4 + right).to(tl.float32, bitcast=True)[None, :]
            r, g, b = fetch_float(view, column, row)
            r_row, g_row, b_row = fused(r, weight, r_row), fused(g, weight, g_row), fused(b, weight, b_row)
        red, green, blue = fused(r_row, w_row, red), fused(g_row, w_row, green), fused(b_row, w_row, blue)
    return red, green, blue
