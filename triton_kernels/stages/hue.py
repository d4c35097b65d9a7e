"""Hue: to HSV, a turn of the color circle, and back; Pillow's in whole numbers, torchvision's in float32.

Pillow's (`Convert.c`) is of 8 bits each; v1 and v2 of torchvision differ in their roundings.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import cut
from ..program import TENSOR_V1

BYTE_SCALE = tl.constexpr(255.0 + 1.0 - 1e-3)  # what a float is multiplied by before it is cut off to a byte
# Hues that are whole before Pillow truncates them, which its float32 in between keeps as a little less (found by
# going through all 2 ** 24 colors).
_ROUNDED_DOWN = (
    *range(1, 32),
    *(88, 92, 96, 100, 104, *range(129, 151, 2), 153, 157, 161, 165, 169),
    *(173, 176, 177, 181, 184, 185, 189, 193, 197, 201, 205, 209),
)


def _word(number: int) -> tl.constexpr:
    """32 of the 256 bits that say which hues are rounded down, as an int32."""
    bits = sum(1 << hue % 32 for hue in _ROUNDED_DOWN if hue // 32 == number)
    return tl.constexpr(bits - (1 << 32) if bits >> 31 else bits)


_WORD_0, _WORD_2, _WORD_3 = _word(0), _word(2), _word(3)
_WORD_4, _WORD_5, _WORD_6 = _word(4), _word(5), _word(6)


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


@triton.jit
def is_rounded_down(hue):
    """1 for a hue that Pillow makes one less of where it is whole, else 0."""
    word = hue >> 5
    bits = tl.where(word == 0, _WORD_0, tl.where(word == 2, _WORD_2, tl.where(word == 3, _WORD_3, 0)))
    bits = tl.where(word == 4, _WORD_4, tl.where(word == 5, _WORD_5, tl.where(word == 6, _WORD_6, bits)))
    return (bits >> (hue & 31)) & 1


@triton.jit
def hue_of(red, green, blue, value, spread):
    """Hue in [0, 255], int32; anything for gray. All float32 hold whole numbers."""
    # Sixths of a turn, times `spread`: whole, from 0 to 6 spreads.
    in_green = blue - red + 2.0 * spread
    in_blue = red - green + 4.0 * spread
    turn = tl.where(red == value, green - blue, tl.where(green == value, in_green, in_blue))
    turn = tl.where(turn < 0.0, turn + 6.0 * spread, turn) * 85.0
    divisor = tl.maximum(2.0 * spread, 1.0)
    hue = tl.floor(tl.div_rn(turn + 0.5, divisor))
    whole = hue.to(tl.int32)
    return tl.where(hue * divisor == turn, whole - is_rounded_down(whole), whole)


@triton.jit
def turn_hue(red, green, blue, amount):
    """Turns the color circle by `amount` of 256. Bytes, as float32."""
    value = tl.maximum(red, tl.maximum(green, blue))
    spread = value - tl.minimum(red, tl.minimum(green, blue))
    hue = tl.where(spread == 0.0, 0, hue_of(red, green, blue, value, spread))
    hue = (hue + amount) & 255
    saturation = tl.floor(tl.div_rn(255.0 * spread + 0.5, tl.maximum(value, 1.0))).to(tl.int32)
    byte = value.to(tl.int32)
    sextant = 6 * hue // 255
    rest = 6 * hue - 255 * sextant
    low = (2 * byte * (255 - saturation) + 255) // 510
    falling = (2 * byte * (65025 - saturation * rest) + 65025) // 130050
    rising = (2 * byte * (65025 - saturation * (255 - rest)) + 65025) // 130050
    new_red, new_green, new_blue = by_sextant(sextant % 6, byte, low, falling, rising)
    is_gray = saturation == 0
    red = tl.where(is_gray, value, new_red.to(tl.float32))
    green = tl.where(is_gray, value, new_green.to(tl.float32))
    blue = tl.where(is_gray, value, new_blue.to(tl.float32))
    return red, green, blue


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
