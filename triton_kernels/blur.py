"""Gaussian blur of bytes, with the image mirrored at its border: torch's float32 convolution, rounded half to even.

Small kernels in one launch, tap by tap in torch's order; large ones in two, one axis each, with float32 in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch
from .pixel_math import round_half_even


@triton.jit
def mirrored(position, size):
    """A position up to `size` - 1 beyond either end, reflected into the image; the border itself is not repeated."""
    position = tl.abs(position)
    return tl.where(position >= size, 2 * (size - 1) - position, position)


@triton.jit
def accumulate(total, value, weight, fused):
    """total + value * weight in float32, rounded once where `fused`, else twice; float64 holds the product exactly."""
    product = value.to(tl.float64) * weight.to(tl.float64)
    product = tl.where(fused != 0, product, product.to(tl.float32).to(tl.float64))
    return (total.to(tl.float64) + product).to(tl.float32)


@triton.jit
def blur(view, head, tables, x, y, red, green, blue):
    """The whole kernel at once. `x` [1, X], `y` [Y, 1]; `red`, `green`, `blue` int32 [Y, X]: anything."""
    width = tl.load(head + 1)
    height = tl.load(head + 2)
    across = tl.load(head + 3)
    down = tl.load(head + 4)
    fused = tl.load(head + 5)
    weights = tables + tl.load(head + 8)
    total_red = tl.zeros_like(red).to(tl.float32)
    total_green = tl.zeros_like(green).to(tl.float32)
    total_blue = tl.zeros_like(blue).to(tl.float32)
    for tap in range(across * down):
        weight = tl.load(weights + tap).to(tl.float32, bitcast=True)
        column = mirrored(x + tap % across - across // 2, width)
        row = mirrored(y + tap // across - down // 2, height)
        r, g, b = fetch(view, column, row)
        total_red = accumulate(total_red, r, weight, fused)
        total_green = accumulate(total_green, g, weight, fused)
        total_blue = accumulate(total_blue, b, weight, fused)
    return round_half_even(total_red), round_half_even(total_green), round_half_even(total_blue)


@triton.jit
def blur_axis(view, head, tables, x, y, is_x: tl.constexpr, red, green, blue):
    """One axis: bytes to float32 values along x, and those to bytes along y. Float32 values go by their bits.

    `x` [1, X], `y` [Y, 1]; `red`, `green`, `blue` int32 [Y, X]: anything.
    """
    size = tl.load(head + (1 if is_x else 2))
    taps = tl.load(head + 3)
    weights = tables + tl.load(head + 8)
    total_red = tl.zeros_like(red).to(tl.float32)
    total_green = tl.zeros_like(green).to(tl.float32)
    total_blue = tl.zeros_like(blue).to(tl.float32)
    for tap in range(taps):
        weight = tl.load(weights + tap).to(tl.float32, bitcast=True)
        if is_x:
            r, g, b = fetch(view, mirrored(x + tap - taps // 2, size), y)
            total_red += r.to(tl.float32) * weight
            total_green += g.to(tl.float32) * weight
            total_blue += b.to(tl.float32) * weight
        else:
            r, g, b = fetch(view, x, mirrored(y + tap - taps // 2, size))
            total_red += r.to(tl.float32, bitcast=True) * weight
            total_green += g.to(tl.float32, bitcast=True) * weight
            total_blue += b.to(tl.float32, bitcast=True) * weight
    if is_x:
        red = total_red.to(tl.int32, bitcast=True)
        green = total_green.to(tl.int32, bitcast=True)
        blue = total_blue.to(tl.int32, bitcast=True)
    else:
        red, green, blue = round_half_even(total_red), round_half_even(total_green), round_half_even(total_blue)
    return red, green, blue
