"""Hue of float32 images: to HSV, a turn, and back, as v1 and v2 of torchvision round it.

Saturation is a share of the largest channel. No value is below 0: of some of those torch makes NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float_math import clamp


@triton.jit
def hue_and_saturation(red, green, blue, largest, IS_V2):
    """Hue in [0, 1) and saturation; gray pixels have 0 and 0."""
    smallest = tl.minimum(red, tl.minimum(green, blue))
    is_gray = largest == smallest
    spread = largest - smallest
    saturation = tl.div_rn(spread, tl.where(is_gray, 1.0, largest))
    divisor = tl.where(is_gray, 1.0, spread)
    from_red = tl.div_rn(largest - red, divisor)
    from_green = tl.div_rn(largest - green, divisor)
    from_blue = tl.div_rn(largest - blue, divisor)
    in_red = from_blue - from_green
    in_green = from_red + 2.0 - from_blue
    in_blue = from_green + 4.0 - from_red
    sextant = tl.where(largest == red, in_red, tl.where(largest == green, in_green, in_blue))
    sixth = tl.where(IS_V2, sextant * (1.0 / 6.0), tl.div_rn(sextant, tl.full((1, 1), 6.0, tl.float32)))
    turn = sixth + 1.0
    return turn - tl.floor(turn), saturation


@triton.jit
def shift_hue_float(red, green, blue, amount, IS_V2):
    """RGB -> HSV, hue + amount modulo 1, HSV -> RGB."""
    largest = tl.maximum(red, tl.maximum(green, blue))
    hue, saturation = hue_and_saturation(red, green, blue, largest, IS_V2)
    hue += amount
    hue = tl.where(hue < 0.0, hue + 1.0, tl.where(hue >= 1.0, hue - 1.0, hue))
    sixfold = hue * 6.0
    whole = tl.floor(sixfold)
    rest = sixfold - whole
    sextant = whole.to(tl.int32) % 6
    of_rest = saturation * rest
    low = clamp(largest * (1.0 - saturation), 0.0, 1.0)
    falling = clamp(largest * (1.0 - of_rest), 0.0, 1.0)
    inner = tl.where(IS_V2, of_rest + (1.0 - saturation), 1.0 - saturation * (1.0 - rest))
    rising = clamp(largest * inner, 0.0, 1.0)
    new_red = tl.where(
        (sextant == 0) | (sextant == 5),
        largest,
        tl.where(sextant == 1, falling, tl.where(sextant == 4, rising, low)),
    )
    new_green = tl.where(
        (sextant == 1) | (sextant == 2),
        largest,
        tl.where(sextant == 3, falling, tl.where(sextant == 0, rising, low)),
    )
    new_blue = tl.where(
        (sextant == 3) | (sextant == 4),
        largest,
        tl.where(sextant == 5, falling, tl.where(sextant == 2, rising, low)),
    )
    return new_red, new_green, new_blue
