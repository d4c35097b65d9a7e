"""Formulas on pixels, each once. Values are float32; those of bytes are whole, in [0, 255], and cut off to bytes.

`top` is the largest value: 255 while an image is of bytes, 1 while it is of floats. Pillow's formulas are those of
`Blend.c`, `Convert.c` and `Filter.c`; those of tensors are `_functional_tensor.py` (v1) and
`v2/functional/_color.py` (v2) of torchvision, in the order in which torch rounds.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from .program import PILLOW, TENSOR_V1

# Triton's interpreter rounds twice in `fma`. A product of two float32 is exact in float64.
_EMULATED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def load_float(pointer, index):
    """A float32 among int32."""
    return tl.load(pointer + index).to(tl.float32, bitcast=True)


@triton.jit
def fused(a, b, c):
    """a * b + c with one rounding: as torch's CPU kernels for `add(alpha=)`, interpolation and `grid_sample`."""
    b = b + tl.zeros_like(a)
    c = c + tl.zeros_like(a)
    if _EMULATED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def clamp(value, low, high):
    """Brings values into [low, high]."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def cut(value, top):
    """Into [0, top]; bytes are truncated."""
    value = clamp(value, 0.0, top)
    return tl.where(top > 1.0, tl.floor(value), value)


@triton.jit
def reflected(position, size):
    """A position up to `size` - 1 beyond either end, brought into the image; the border itself is not repeated."""
    position = tl.abs(position)
    return tl.where(position >= size, 2 * (size - 1) - position, position)


@triton.jit
def round_half_even(value):
    """float32 in [-2 ** 22, 2 ** 22) -> the nearest whole one, the even one of two."""
    # Beyond 1.5 * 2 ** 23 float32 has no digits after the point: the addition rounds.
    return (value + 12582912.0) - 12582912.0


@triton.jit
def as_filtered(value, top):
    """What a filter of floats leaves: bytes are rounded to the nearest."""
    return tl.where(top > 1.0, round_half_even(clamp(value, 0.0, 255.0)), value)


@triton.jit
def blend(other, image, factor, rest, formula, top, IS_HEAVY: tl.constexpr):
    """`factor` of the image and `rest` = 1 - factor of the other one."""
    mixed = other + factor * (image - other)
    if IS_HEAVY:
        if formula != PILLOW:
            scaled = image * factor
            once = fused(other + tl.zeros_like(image), rest, scaled)
            mixed = tl.where(formula == TENSOR_V1, scaled + other * rest, once)
    return cut(mixed, top)


@triton.jit
def luminance(red, green, blue):
    """ITU-R 601-2 luma of bytes in 16.16 integers. int32."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def gray_value(red, green, blue, formula, top, IS_HEAVY: tl.constexpr):
    """Gray as Pillow makes it, `luminance`, or as v1 or v2 do."""
    # Exact: all sums are whole numbers below 2 ** 24.
    gray = tl.floor((red * 19595.0 + green * 38470.0 + blue * 7471.0 + 32768.0) * (1.0 / 65536.0))
    if IS_HEAVY:
        if formula != PILLOW:
            weighted = red * 0.2989
            once = fused(blue, 0.114, fused(green, 0.587, weighted))
            gray = tl.where(formula == TENSOR_V1, weighted + green * 0.587 + blue * 0.114, once)
            gray = tl.where(top > 1.0, tl.floor(gray), gray)
    return gray


@triton.jit
def as_element(value, element: tl.constexpr):
    """float32 -> the element type of the result, to the nearest, halves to even."""
    if element == tl.uint8:
        return value.to(tl.int32).to(tl.uint8)
    if element == tl.bfloat16:
        # Triton's interpreter cuts off what bfloat16 cannot hold.
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = bits.to(tl.float32, bitcast=True)
    return value.to(element)
