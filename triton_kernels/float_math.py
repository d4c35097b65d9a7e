"""Arithmetic on float32 pixels, each formula once, in the order in which torch rounds.

The formulas are those of `transforms._functional_tensor` and `transforms.v2.functional._color`. torch's CPU kernels
for `add(alpha=)`, interpolation and `grid_sample` fuse a multiply and an add into one rounding; where they do, `fused`
stands here. Everything else rounds after each operation.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from .float_program import CHANNEL_ITSELF, GRAY_V2

# Triton's interpreter rounds twice in `fma`. A product of two float32 is exact in float64.
_EMULATED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def fused(a, b, c):
    """a * b + c with one rounding."""
    if _EMULATED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def load_float(operation, column: tl.constexpr):
    """A float32 parameter of an operation."""
    return tl.load(operation + column).to(tl.float32, bitcast=True)


@triton.jit
def clamp(value, low, high):
    """Brings values into [low, high]."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def gray_of(red, green, blue, KIND):
    """Luminance: the image itself where it has one channel, else as `rgb_to_grayscale` of v1 or v2."""
    weighted_red = red * 0.2989
    gray = weighted_red + green * 0.587 + blue * 0.114
    if KIND == GRAY_V2:
        step = fused(green, tl.full((1, 1), 0.587, tl.float32), weighted_red)
        gray = fused(blue, tl.full((1, 1), 0.114, tl.float32), step)
    if KIND == CHANNEL_ITSELF:
        gray = red
    return gray


@triton.jit
def blend(image, other, ratio, rest, is_v2):
    """ratio * image + rest * other, cut off at 0 and 1; `rest` is 1 - ratio, rounded once."""
    scaled = image * ratio
    mixed = tl.where(is_v2, fused(other, rest + tl.zeros_like(other), scaled), scaled + other * rest)
    return clamp(mixed, 0.0, 1.0)
