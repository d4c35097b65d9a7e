"""The operations after a head: maps of positions, boxes that are overwritten, and functions of each pixel.

Hue is changed in HSV: with 8-bit integers as in Pillow (`Convert.c`), or in float32 as in torchvision, whose v1 and v2
round differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pixels import blend, clamp, cut, gray_value, load_float, reflected
from ..program import (
    BLEND_MEAN,
    BOX_BOTTOM,
    BOX_LEFT,
    BOX_RIGHT,
    BOX_TOP,
    BRIGHTNESS,
    DEVIATION,
    EDGE,
    FACTOR,
    FLIP,
    FORMULA,
    GRAY,
    HUE,
    HUE_TURN,
    INVERT,
    LOOKUP,
    MAP_SIZE,
    MEAN,
    NORMALIZE,
    OFFSET,
    PERMUTE,
    PERMUTED,
    PILLOW,
    POSTERIZE,
    POSTERIZE_STEP,
    REFLECT,
    REMAP,
    SATURATION,
    SHIFT,
    SOLARIZE,
    TABLE,
    TENSOR_V1,
    VALUE,
)

BYTE_SCALE = tl.constexpr(255.0 + 1.0 - 1e-3)  # factor of a float before it is truncated to a byte
# Hues that are whole numbers but become slightly less in Pillow's float32, so that it truncates them to one less
# (found by trying all 2 ** 24 colors).
_ROUNDED_DOWN = (
    *range(1, 32),
    *(88, 92, 96, 100, 104, *range(129, 151, 2), 153, 157, 161, 165, 169),
    *(173, 176, 177, 181, 184, 185, 189, 193, 197, 201, 205, 209),
)


def _word(number: int) -> tl.constexpr:
    """An int32 of 32 of the 256 bits that tell which hues are rounded down."""
    bits = sum(1 << hue % 32 for hue in _ROUNDED_DOWN if hue // 32 == number)
    return tl.constexpr(bits - (1 << 32) if bits >> 31 else bits)


_WORD_0, _WORD_2, _WORD_3 = _word(0), _word(2), _word(3)
_WORD_4, _WORD_5, _WORD_6 = _word(4), _word(5), _word(6)


@triton.jit
def by_sextant(sextant, value, low, falling, rising):
    """Computes red, green and blue of a color from its sextant of the color circle, 0 to 5."""
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
    """Whether Pillow truncates this whole hue to one less, 1 or 0."""
    word = hue >> 5
    bits = tl.where(word == 0, _WORD_0, tl.where(word == 2, _WORD_2, tl.where(word == 3, _WORD_3, 0)))
    bits = tl.where(word == 4, _WORD_4, tl.where(word == 5, _WORD_5, tl.where(word == 6, _WORD_6, bits)))
    return (bits >> (hue & 31)) & 1


@triton.jit
def hue_of(red, green, blue, value, spread):
    """Computes the hue in [0, 255], int32; undefined for gray. The float32 inputs hold whole numbers."""
    # Sixths of a turn, times `spread`: whole numbers from 0 to 6 spreads.
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
    """Turns the color circle by `amount` 256ths, for bytes as float32."""
    value = tl.maximum(red, tl.maximum(green, blue))
    spread = value - tl.minimum(red, tl.minimum(green, blue))
    hue = (hue_of(red, green, blue, value, spread) + amount) & 255
    saturation = tl.floor(tl.div_rn(255.0 * spread + 0.5, tl.maximum(value, 1.0))).to(tl.int32)
    byte = value.to(tl.int32)
    sextant = 6 * hue // 255
    rest = 6 * hue - 255 * sextant
    low = (2 * byte * (255 - saturation) + 255) // 510
    falling = (2 * byte * (65025 - saturation * rest) + 65025) // 130050
    rising = (2 * byte * (65025 - saturation * (255 - rest)) + 65025) // 130050
    # For gray all four are equal.
    red, green, blue = by_sextant(sextant % 6, byte, low, falling, rising)
    return red.to(tl.float32), green.to(tl.float32), blue.to(tl.float32)


@triton.jit
def unit(value, is_v1, top):
    """Scales to [0, 1]: v1 divides bytes, v2 multiplies them by the reciprocal."""
    scaled = tl.where(is_v1, tl.div_rn(value, tl.full((1, 1), 255.0, tl.float32)), value * (1.0 / 255.0))
    return tl.where(top > 1.0, scaled, value)


@triton.jit
def turn_of(red, green, blue, largest, spread, is_v1):
    """Computes the hue in [0, 1); undefined for gray."""
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
    """Turns the color circle by `part` of 1, for bytes, or for floats of at least 0: torch makes NaN of some below."""
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


@triton.jit
def map_axis(code, operation, is_x: tl.constexpr, tables, index, position, left_at):
    """Applies a map on one axis: returns the input positions, and the operation's row for those that leave the image.

    `position` is int32 [B]; `left_at` is int32 [B], -1 for positions inside the image.
    """
    axis: tl.constexpr = 0 if is_x else 1
    if code == FLIP:
        mirrored = tl.load(operation + MAP_SIZE + axis) - 1 - position
        position = tl.where(tl.load(operation + OFFSET + axis) != 0, mirrored, position)
    elif code == REMAP:
        safe = tl.where(left_at < 0, position, 0)
        position = tl.load(tables + tl.load(operation + TABLE + axis) + safe)
        left_at = tl.where((position < 0) & (left_at < 0), index, left_at)
    else:
        size = tl.load(operation + MAP_SIZE + axis)
        position = position + tl.load(operation + OFFSET + axis)
        if code == SHIFT:
            left_at = tl.where(((position < 0) | (position >= size)) & (left_at < 0), index, left_at)
        elif code == EDGE:
            position = clamp(position, 0, size - 1)
        elif code == REFLECT:
            position = reflected(position, size)
        else:
            position = tl.where(position < 0, -1 - position, position)
            position = tl.where(position >= size, 2 * size - 1 - position, position)
    return position, left_at


@triton.jit
def in_box(operation, x, y):
    """The mask of positions that an ERASE or PASTE overwrites. `x` is int32 [X], `y` int32 [Y]."""
    across = (x >= tl.load(operation + BOX_LEFT)) & (x < tl.load(operation + BOX_RIGHT))
    down = (y >= tl.load(operation + BOX_TOP)) & (y < tl.load(operation + BOX_BOTTOM))
    return down[:, None] & across[None, :]


@triton.jit
def place_in_box(operation, x, y):
    """Offsets of rows and columns of a box in the pixels of a PASTE."""
    left = tl.load(operation + BOX_LEFT)
    return (y - tl.load(operation + BOX_TOP)) * (tl.load(operation + BOX_RIGHT) - left), x - left


@triton.jit
def chosen(index, red, green, blue):
    """Selects channel `index`."""
    return tl.where(index == 0, red, tl.where(index == 1, green, blue))


@triton.jit
def posterized(value, share, step):
    """Rounds down to a multiple of `step`, a power of two; `share` is 1 / `step`."""
    return tl.floor(value * share) * step


@triton.jit
def solarized(value, threshold):
    return tl.where(value < threshold, value, 255.0 - value)


@triton.jit
def normalized(value, operation, CHANNEL: tl.constexpr):
    return tl.div_rn(
        value - load_float(operation, MEAN + CHANNEL), load_float(operation, DEVIATION + CHANNEL) + value * 0.0
    )


@triton.jit
def apply_point(code, operation, tables, red, green, blue, top, IS_HEAVY: tl.constexpr):
    """Applies an operation to each pixel; returns the values and `top`. `IS_HEAVY` includes formulas of tensors."""
    factor = load_float(operation, FACTOR)
    formula = tl.load(operation + FORMULA)
    first = load_float(operation, VALUE)
    if code == BRIGHTNESS:
        red, green, blue = cut(red * factor, top), cut(green * factor, top), cut(blue * factor, top)
    elif code == SATURATION:
        gray = gray_value(red, green, blue, formula, top, IS_HEAVY)
        red = blend(gray, red, factor, first, formula, top, IS_HEAVY)
        green = blend(gray, green, factor, first, formula, top, IS_HEAVY)
        blue = blend(gray, blue, factor, first, formula, top, IS_HEAVY)
    elif code == INVERT:
        red, green, blue = top - red, top - green, top - blue
    elif code == POSTERIZE:
        step = load_float(operation, POSTERIZE_STEP)
        red, green, blue = posterized(red, first, step), posterized(green, first, step), posterized(blue, first, step)
    elif code == SOLARIZE:
        red, green, blue = solarized(red, first), solarized(green, first), solarized(blue, first)
    elif code == GRAY:
        red = gray_value(red, green, blue, formula, top, IS_HEAVY)
        green = red
        blue = red
    elif code == HUE:
        if IS_HEAVY and formula != PILLOW:
            red, green, blue = turn_tensor_hue(red, green, blue, formula, factor, top)
        else:
            red, green, blue = turn_hue(red, green, blue, tl.load(operation + HUE_TURN))
    elif code == PERMUTE:
        old_red, old_green, old_blue = red, green, blue
        red = chosen(tl.load(operation + PERMUTED), old_red, old_green, old_blue)
        green = chosen(tl.load(operation + PERMUTED + 1), old_red, old_green, old_blue)
        blue = chosen(tl.load(operation + PERMUTED + 2), old_red, old_green, old_blue)
    elif (code >= LOOKUP) & (code < BLEND_MEAN):
        red = load_float(tables + tl.load(operation + TABLE), red.to(tl.int32))
        green = load_float(tables + tl.load(operation + TABLE + 1), green.to(tl.int32))
        blue = load_float(tables + tl.load(operation + TABLE + 2), blue.to(tl.int32))
        top = first
    if IS_HEAVY:
        if code == NORMALIZE:
            red = normalized(red, operation, 0)
            green = normalized(green, operation, 1)
            blue = normalized(blue, operation, 2)
        elif code == BLEND_MEAN:
            mean = load_float(tables + tl.load(operation + TABLE), 0)
            red = blend(mean, red, factor, first, formula, top, True)
            green = blend(mean, green, factor, first, formula, top, True)
            blue = blend(mean, blue, factor, first, formula, top, True)
    return red, green, blue, top
