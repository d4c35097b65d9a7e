"""Hue of tensors: to HSV in float32, a turn, and back, as v1 and v2 of torchvision round it."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import by_sextant, cut
from ..program import TENSOR_V1

BYTE_SCALE = tl.constexpr(255.0 + 1.0 - 1e-3)  # what a float is multiplied by before it is cut off to a byte


@triton.jit
def unit(value, is_v1, top):
    """In [0, 1]: v1 divides bytes, v2 multiplies them by the reciprocal."""
    scaled = tl.where(is_v1, tl.div_rn(value, tl.full((1, 1), 255.0, tl.float32)), value * (1.0 / 255.0))
    return tl.where(top > 1.0, scaled, value)


@triton.jit
def turn_of(red, green, blue, largest, spread, is_v1):
    """Hue in [0, 1); of gray anything."""
    divisor = tl.where(spread == 0.0, 1.0, spread)
    from_red = tl.div_rn(largest - red, divisor)
    from_green = tl.div_rn(largest - green, divisor)
    from_blue = tl.div_rn(largest - blue, divisor)
    in_green = from_red + 2.0 - from_blue
    in_blue = from_green + 4.0 - from_red
    sextant = tl.where(largest == red, from_blue - from_green, tl.where(largest == green, in_green, in_blue))
    turn = tl.where(is_v1, tl.div_rn(sextant, tl.full((1, 1), 6.0, tl.float32)), sextant * (1.0 / 6.0)) + 1.0
    return turn - tl.floor(turn)


@triton.jit
def turn_tensor_hue(red, green, blue, formula, part, top):
    """Turns the color circle by `part` of 1. Bytes, or floats, none below 0: of some of those torch makes NaN."""
    is_v1 = formula == TENSOR_V1
    red, green, blue = unit(red, is_v1, top), unit(green, is_v1, top), unit(blue, is_v1, top)
    largest = tl.maximum(red, tl.maximum(green, blue))
    spread = largest - tl.minimum(red, tl.minimum(green, blue))
    saturation = tl.div_rn(spread, tl.where(spread == 0.0, 1.0, largest))
    turn = turn_of(red, green, blue, largest, spread, is_v1) + part
    turn = tl.where(turn < 0.0, turn + 1.0, tl.where(turn >= 1.0, turn - 1.0, turn)) * 6.0
    whole = tl.floor(turn)
    rest = turn - whole
    of_rest = saturation * rest
    inner = tl.where(is_v1, 1.0 - saturation * (1.0 - rest), of_rest + (1.0 - saturation))
    scale = tl.where(top > 1.0, BYTE_SCALE, 1.0)
    low = cut(largest * (1.0 - saturation) * scale, top)
    falling = cut(largest * (1.0 - of_rest) * scale, top)
    rising = cut(largest * inner * scale, top)
    value = tl.where(top > 1.0, cut(largest * scale, top), largest)
    return by_sextant(whole.to(tl.int32) % 6, value, low, falling, rising)
