"""Pillow's hue: RGB to HSV of 8 bits each, a turn of the color circle, and back; `Convert.c`, in whole numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import by_sextant

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
