"""Arithmetic of torchvision's kernels for uint8 tensors: float32, each step rounded. Values are int32 in [0, 255].

Sources: `transforms/_functional_tensor.py` (v1) and `transforms/v2/functional/_color.py` (v2). Where torch adds a
multiple of a tensor (`add_(other, alpha=...)`) its CPU kernel rounds once; `fused` does that in float64 rather than in
a fused instruction, so that Triton's interpreter and every device give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .program import TENSOR_V1

BYTE_SCALE = tl.constexpr(255.0 + 1.0 - 1e-3)  # what a float is multiplied by before it is cut off to a byte


@triton.jit
def fused(value, factor, addend):
    """`value * factor + addend`, rounded to float32 once: the product and, for whole values, the sum fit in float64."""
    return (value.to(tl.float64) * factor.to(tl.float64) + addend.to(tl.float64)).to(tl.float32)


@triton.jit
def as_byte(value):
    """float32, cut off at 0 and 255, truncated."""
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def tensor_gray(red, green, blue, formula):
    """0.2989 R + 0.587 G + 0.114 B, truncated."""
    green_weight = tl.full((), 0.587, tl.float32)
    blue_weight = tl.full((), 0.114, tl.float32)
    gray = red.to(tl.float32) * 0.2989
    if formula == TENSOR_V1:
        gray = gray + green.to(tl.float32) * green_weight
        gray = gray + blue.to(tl.float32) * blue_weight
    else:
        gray = fused(green, green_weight, gray)
        gray = fused(blue, blue_weight, gray)
    return gray.to(tl.int32)


@triton.jit
def tensor_blend(image, other, factor, rest, formula):
    """factor * image + rest * other, where rest is 1 - factor."""
    mixed = image.to(tl.float32) * factor
    mixed = mixed + other.to(tl.float32) * rest if formula == TENSOR_V1 else fused(other, rest, mixed)
    return as_byte(mixed)


@triton.jit
def tensor_sharpen(image, smooth, factor, rest, formula):
    """Blend with the smoothed image: v1 as every blend, v2 image + rest * (smooth - image)."""
    if formula == TENSOR_V1:
        mixed = image.to(tl.float32) * factor + smooth.to(tl.float32) * rest
    else:
        mixed = fused(smooth - image, rest, image)
    return as_byte(mixed)


@triton.jit
def unit(value, formula):
    """uint8 -> float32 in [0, 1]: v1 divides, v2 multiplies by the reciprocal.

    The division is a multiplication in float64: its error is too small to change the rounding to float32.
    """
    if formula == TENSOR_V1:
        scaled = (value.to(tl.float64) * (1.0 / 255.0)).to(tl.float32)
    else:
        scaled = value.to(tl.float32) * (1.0 / 255.0)
    return scaled


@triton.jit
def tensor_turn(sextant, formula):
    """Part of a turn in [0, 1) from sixths of a turn in [-1, 5]; v1 divides, v2 multiplies by the reciprocal."""
    if formula == TENSOR_V1:
        turn = (sextant.to(tl.float64) * (1.0 / 6.0)).to(tl.float32) + 1.0
    else:
        turn = sextant * (1.0 / 6.0) + 1.0
    return tl.where(turn >= 1.0, turn - 1.0, turn)


@triton.jit
def turned(turn, amount):
    """turn + amount modulo 1, as `remainder` gives it."""
    turn = turn + amount
    return tl.where(turn >= 1.0, turn - 1.0, tl.where(turn < 0.0, turn + 1.0, turn))


@triton.jit
def tensor_from_hsv(turn, saturation, value, formula):
    """HSV -> RGB, all in float32; int32 in [0, 255]."""
    rest = turn * 6.0
    sextant = tl.floor(rest)
    rest = rest - sextant
    sextant = sextant.to(tl.int32) % 6
    low = (1.0 - saturation) * value
    falling = (1.0 - saturation * rest) * value
    if formula == TENSOR_V1:
        rising = (1.0 - saturation * (1.0 - rest)) * value
    else:
        rising = (saturation * rest + (1.0 - saturation)) * value
    return by_sextant(
        sextant,
        as_byte(value * BYTE_SCALE),
        as_byte(low * BYTE_SCALE),
        as_byte(falling * BYTE_SCALE),
        as_byte(rising * BYTE_SCALE),
    )


@triton.jit
def by_sextant(sextant, value, low, falling, rising):
    """Red, green and blue of a color in a sextant of the color circle, 0 to 5."""
    red = tl.where(
        (sextant == 0) | (sextant == 5), value, tl.where(sextant == 1, falling, tl.where(sextant == 4, rising, low))
    )
    green = tl.where(
        (sextant == 1) | (sextant == 2), value, tl.where(sextant == 3, falling, tl.where(sextant == 0, rising, low))
    )
    blue = tl.where(
        (sextant == 3) | (sextant == 4), value, tl.where(sextant == 5, falling, tl.where(sextant == 2, rising, low))
    )
    return red, green, blue
