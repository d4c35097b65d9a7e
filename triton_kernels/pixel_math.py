"""Arithmetic on pixels, each formula once. Values are int32 in [0, 255].

The formulas are Pillow's: `Blend.c`, `Convert.c`, `Filter.c`, `ImageOps.py`, `ImageEnhance.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .program import PILLOW
from .tensor_math import tensor_gray


@triton.jit
def color(packed, channel: tl.constexpr):
    """One channel of a packed color."""
    return ((packed >> (8 * channel)) & 255).to(tl.int32)


@triton.jit
def blend(degenerate, image, factor):
    """degenerate + factor * (image - degenerate) in float32, cut off at 0 and 255, truncated."""
    mixed = degenerate.to(tl.float32) + factor * (image - degenerate).to(tl.float32)
    return tl.minimum(tl.maximum(mixed, 0.0), 255.0).to(tl.int32)


@triton.jit
def round_half_even(value):
    """float32 in [0, 255.5) -> the nearest integer, the even one of two, as `torch.round`."""
    # Beyond 2 ** 23 float32 has no digits after the point: the addition rounds.
    return ((value + 8388608.0) - 8388608.0).to(tl.int32)


@triton.jit
def luminance(red, green, blue):
    """ITU-R 601-2 luma in 16.16 integers."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def gray_value(red, green, blue, formula, HAS_FLOAT64: tl.constexpr):
    """The gray value by Pillow's formula, or by that of the kernels for tensors."""
    gray = luminance(red, green, blue)
    if HAS_FLOAT64:
        if formula != PILLOW:
            gray = tensor_gray(red, green, blue, formula)
    return gray


@triton.jit
def smooth(total, center):
    """`ImageFilter.SMOOTH`: `total` is the sum of the nine pixels, the center counts five times."""
    return (2 * (total + 4 * center) + 13) // 26


@triton.jit
def rounded(value, element: tl.constexpr):
    """float32 -> the element type of the result, to the nearest, halves to even."""
    if element == tl.bfloat16:
        # Triton's interpreter cuts off what bfloat16 cannot hold.
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = bits.to(tl.float32, bitcast=True)
    return value.to(element)
