"""Affine and perspective transforms, as Pillow's `Geometry.c` computes them.

Nearest-neighbor affine transforms work in 16.16 integers; everything else in float64, without fused multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch, fetch_channel
from .pixel_math import color
from .program import BICUBIC, BILINEAR


@triton.jit
def warp_fixed(view, head, x, y):
    """Nearest-neighbor affine transform in 16.16 integers. `x` [1, X], `y` [Y, 1]."""
    column = (tl.load(head + 1) * x + tl.load(head + 2) * y + tl.load(head + 3)) >> 16
    row = (tl.load(head + 4) * x + tl.load(head + 5) * y + tl.load(head + 6)) >> 16
    width = tl.load(head + 7)
    height = tl.load(head + 8)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    red, green, blue = fetch(view, tl.where(inside, column, 0), tl.where(inside, row, 0))
    fill = tl.load(head + 9)
    red = tl.where(inside, red, color(fill, 0))
    green = tl.where(inside, green, color(fill, 1))
    blue = tl.where(inside, blue, color(fill, 2))
    return red, green, blue


@triton.jit
def load_double(table, index):
    """A float64 that lies in an int32 table as two entries, the lower half first."""
    low = tl.load(table + 2 * index).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(table + 2 * index + 1).to(tl.int64) << 32
    return (high | low).to(tl.float64, bitcast=True)


@triton.jit
def cubic(first, second, third, fourth, distance):
    """Pillow's BICUBIC macro: Catmull-Rom through four values, float64."""
    slope = third - first
    curve = 2.0 * (first - second) + third - fourth
    jerk = second - first - third + fourth
    return second + distance * (slope + distance * (curve + distance * jerk))


@triton.jit
def cubic_row(view, column, row, width, dx, CHANNEL: tl.constexpr):
    """One row of a bicubic filter: float64."""
    first = fetch_channel(view, tl.minimum(tl.maximum(column, 0), width - 1), row, CHANNEL).to(tl.float64)
    second = fetch_channel(view, tl.minimum(tl.maximum(column + 1, 0), width - 1), row, CHANNEL).to(tl.float64)
    third = fetch_channel(view, tl.minimum(tl.maximum(column + 2, 0), width - 1), row, CHANNEL).to(tl.float64)
    fourth = fetch_channel(view, tl.minimum(tl.maximum(column + 3, 0), width - 1), row, CHANNEL).to(tl.float64)
    return cubic(first, second, third, fourth, dx)


@triton.jit
def bicubic_channel(view, column, row, width, height, dx, dy, CHANNEL: tl.constexpr):
    """One channel through the bicubic filter; a row below the image repeats the one before it."""
    column = column - 1
    row = row - 1
    first = cubic_row(view, column, tl.minimum(tl.maximum(row, 0), height - 1), width, dx, CHANNEL)
    below = row + 1
    second = cubic_row(view, column, tl.minimum(tl.maximum(below, 0), height - 1), width, dx, CHANNEL)
    second = tl.where((below >= 0) & (below < height), second, first)
    below = row + 2
    third = cubic_row(view, column, tl.minimum(tl.maximum(below, 0), height - 1), width, dx, CHANNEL)
    third = tl.where((below >= 0) & (below < height), third, second)
    below = row + 3
    fourth = cubic_row(view, column, tl.minimum(tl.maximum(below, 0), height - 1), width, dx, CHANNEL)
    fourth = tl.where((below >= 0) & (below < height), fourth, third)
    value = cubic(first, second, third, fourth, dy)
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def bilinear_channel(view, column, row, width, height, dx, dy, CHANNEL: tl.constexpr):
    """One channel through the bilinear filter; a row outside the image repeats the one before it."""
    left = tl.minimum(tl.maximum(column, 0), width - 1)
    right = tl.minimum(tl.maximum(column + 1, 0), width - 1)
    upper = tl.minimum(tl.maximum(row, 0), height - 1)
    below = row + 1
    lower = tl.minimum(tl.maximum(below, 0), height - 1)
    a = fetch_channel(view, left, upper, CHANNEL)
    b = fetch_channel(view, right, upper, CHANNEL)
    first = a.to(tl.float64) + (b - a).to(tl.float64) * dx
    a = fetch_channel(view, left, lower, CHANNEL)
    b = fetch_channel(view, right, lower, CHANNEL)
    second = a.to(tl.float64) + (b - a).to(tl.float64) * dx
    second = tl.where((below >= 0) & (below < height), second, first)
    return (first + (second - first) * dy).to(tl.int32)


@triton.jit
def warp_float(view, head, tables, x, y, red, green, blue):
    """Affine or perspective transform in float64. `x` [1, X], `y` [Y, 1]; `red`, `green`, `blue` [Y, X]: anything."""
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    fill = tl.load(head + 3)
    FILTER = tl.load(head + 4)
    matrix = tables + tl.load(head + 8)
    column = x.to(tl.float64) + 0.5
    row = y.to(tl.float64) + 0.5
    u = load_double(matrix, 0) * column + load_double(matrix, 1) * row + load_double(matrix, 2)
    v = load_double(matrix, 3) * column + load_double(matrix, 4) * row + load_double(matrix, 5)
    if tl.load(head + 5) != 0:
        depth = load_double(matrix, 6) * column + load_double(matrix, 7) * row + 1.0
        u = u / depth
        v = v / depth
    inside = (u >= 0.0) & (u < width.to(tl.float64)) & (v >= 0.0) & (v < height.to(tl.float64))
    u = tl.where(inside, u, 0.0)
    v = tl.where(inside, v, 0.0)
    if (FILTER == BILINEAR) | (FILTER == BICUBIC):
        u = u - 0.5
        v = v - 0.5
        left = tl.floor(u)
        upper = tl.floor(v)
        dx = u - left
        dy = v - upper
        at_x = left.to(tl.int32)
        at_y = upper.to(tl.int32)
        if FILTER == BILINEAR:
            red = bilinear_channel(view, at_x, at_y, width, height, dx, dy, 0)
            green = bilinear_channel(view, at_x, at_y, width, height, dx, dy, 1)
            blue = bilinear_channel(view, at_x, at_y, width, height, dx, dy, 2)
        else:
            red = bicubic_channel(view, at_x, at_y, width, height, dx, dy, 0)
            green = bicubic_channel(view, at_x, at_y, width, height, dx, dy, 1)
            blue = bicubic_channel(view, at_x, at_y, width, height, dx, dy, 2)
    else:
        red, green, blue = fetch(view, u.to(tl.int32), v.to(tl.int32))
    red = tl.where(inside, red, color(fill, 0))
    green = tl.where(inside, green, color(fill, 1))
    blue = tl.where(inside, blue, color(fill, 2))
    return red, green, blue
