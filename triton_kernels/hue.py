"""Hue: RGB to HSV, a turn of the color circle, and back. Values are int32 in [0, 255]."""

from __future__ import annotations

import triton
import triton.language as tl

from .program import PILLOW
from .tensor_math import by_sextant, tensor_from_hsv, tensor_turn, turned, unit


@triton.jit
def pillow_hue(sextant, amount):
    """The 8-bit hue, turned by `amount` modulo 256; float32 stores and float64 expressions as in `rgb2hsv_row`."""
    turn = sextant.to(tl.float64) / 6.0 + 1.0
    turn = tl.where(turn >= 1.0, turn - 1.0, turn).to(tl.float32)
    hue = (turn.to(tl.float64) * 255.0).to(tl.int32)
    return (tl.minimum(tl.maximum(hue, 0), 255) + amount) & 255


@triton.jit
def pillow_from_hsv(hue, saturation, value):
    """HSV of 8 bits each -> RGB: exact in integers."""
    sextant = 6 * hue // 255
    rest = 6 * hue - 255 * sextant
    low = (2 * value * (255 - saturation) + 255) // 510
    falling = (2 * value * (65025 - saturation * rest) + 65025) // 130050
    rising = (2 * value * (65025 - saturation * (255 - rest)) + 65025) // 130050
    red, green, blue = by_sextant(sextant % 6, value, low, falling, rising)
    gray = saturation == 0
    return tl.where(gray, value, red), tl.where(gray, value, green), tl.where(gray, value, blue)


@triton.jit
def shift_hue(red, green, blue, formula, amount, part):
    """Turns the color circle: by `amount` of 256 for Pillow images, by `part` of 1 for tensors."""
    value = tl.maximum(red, tl.maximum(green, blue))
    lowest = tl.minimum(red, tl.minimum(green, blue))
    if formula == PILLOW:
        first, second, third = red.to(tl.float32), green.to(tl.float32), blue.to(tl.float32)
    else:
        first, second, third = unit(red, formula), unit(green, formula), unit(blue, formula)
    largest = tl.maximum(first, tl.maximum(second, third))
    spread = largest - tl.minimum(first, tl.minimum(second, third))
    is_gray = value == lowest
    divisor = tl.where(is_gray, 1.0, spread)
    from_red = tl.div_rn(largest - first, divisor)
    from_green = tl.div_rn(largest - second, divisor)
    from_blue = tl.div_rn(largest - third, divisor)
    in_red = from_blue - from_green
    if formula == PILLOW:
        in_green = ((from_red.to(tl.float64) + 2.0) - from_blue.to(tl.float64)).to(tl.float32)
        in_blue = ((from_green.to(tl.float64) + 4.0) - from_red.to(tl.float64)).to(tl.float32)
    else:
        in_green = (from_red + 2.0) - from_blue
        in_blue = (from_green + 4.0) - from_red
    sextant = tl.where(red == value, in_red, tl.where(green == value, in_green, in_blue))
    if formula == PILLOW:
        hue = tl.where(is_gray, amount & 255, pillow_hue(sextant, amount))
        saturation = 255 * (value - lowest) // tl.maximum(value, 1)
        red, green, blue = pillow_from_hsv(hue, saturation, value)
    else:
        turn = turned(tensor_turn(sextant, formula), part)
        red, green, blue = tensor_from_hsv(turn, tl.div_rn(spread, tl.where(is_gray, 1.0, largest)), largest, formula)
    return red, green, blue
