"""Arithmetic on pixels, each formula once. Values are int32 in [0, 255].

The formulas are Pillow's: `Blend.c`, `Convert.c`, `Filter.c`, `ImageOps.py`, `ImageEnhance.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def colour(packed, channel: tl.constexpr):
    """One channel of a packed colour."""
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
def smooth(total, centre):
    """`ImageFilter.SMOOTH`: `total` is the sum of the nine pixels, the centre counts five times."""
    return (2 * (total + 4 * centre) + 13) // 26


@triton.jit
def hue_of(red, green, blue, largest, smallest):
    """The 8-bit hue; float32 stores and float64 expressions exactly as in `rgb2hsv_row`."""
    spread = tl.where(largest == smallest, 1, largest - smallest).to(tl.float32)
    from_red = tl.div_rn((largest - red).to(tl.float32), spread)
    from_green = tl.div_rn((largest - green).to(tl.float32), spread)
    from_blue = tl.div_rn((largest - blue).to(tl.float32), spread)
    in_red = from_blue - from_green
    in_green = ((from_red.to(tl.float64) + 2.0) - from_blue.to(tl.float64)).to(tl.float32)
    in_blue = ((from_green.to(tl.float64) + 4.0) - from_red.to(tl.float64)).to(tl.float32)
    sextant = tl.where(red == largest, in_red, tl.where(green == largest, in_green, in_blue))
    turn = sextant.to(tl.float64) / 6.0 + 1.0
    turn = tl.where(turn >= 1.0, turn - 1.0, turn).to(tl.float32)
    hue = (turn.to(tl.float64) * 255.0).to(tl.int32)
    return tl.where(largest == smallest, 0, tl.minimum(tl.maximum(hue, 0), 255))


@triton.jit
def shift_hue(red, green, blue, amount):
    """RGB -> HSV, hue + amount modulo 256, HSV -> RGB. The way back is exact in integers."""
    largest = tl.maximum(red, tl.maximum(green, blue))
    smallest = tl.minimum(red, tl.minimum(green, blue))
    saturation = 255 * (largest - smallest) // tl.maximum(largest, 1)
    hue = (hue_of(red, green, blue, largest, smallest) + amount) & 255
    sextant = 6 * hue // 255
    rest = 6 * hue - 255 * sextant
    low = (2 * largest * (255 - saturation) + 255) // 510
    falling = (2 * largest * (65025 - saturation * rest) + 65025) // 130050
    rising = (2 * largest * (65025 - saturation * (255 - rest)) + 65025) // 130050
    sextant = tl.where(sextant == 6, 0, sextant)
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
    gray = saturation == 0
    return tl.where(gray, largest, new_red), tl.where(gray, largest, new_green), tl.where(gray, largest, new_blue)
