"""Operations that turn each float32 pixel into another."""

from __future__ import annotations

import triton
import triton.language as tl

from .float_hue import shift_hue_float
from .float_math import blend, clamp, gray_of, load_float
from .float_program import (
    GRAY,
    GRAY_V2,
    HUE,
    INVERT,
    NORMALIZE,
    PERMUTE,
    SATURATION,
    SCALE,
    TO_BYTE,
)


@triton.jit
def chosen(red, green, blue, channel):
    """One of three channels."""
    return tl.where(channel == 0, red, tl.where(channel == 1, green, blue))


@triton.jit
def to_byte(value, scale, rounds):
    """The whole number that a uint8 holds, as torch makes it.

    `rounds` is 0: cut off, modulo 256; 1: rounded and kept in [0, 255].
    """
    scaled = value * scale
    # Beyond 1.5 * 2 ** 23 float32 has no digits after the point: the addition rounds, halves to even.
    nearest = (clamp(scaled, -4194304.0, 4194303.0) + 12582912.0) - 12582912.0
    return tl.where(rounds == 0, (scaled.to(tl.int32) & 255).to(tl.float32), clamp(nearest, 0.0, 255.0))


@triton.jit
def normalize(value, operation, CHANNEL: tl.constexpr):
    return tl.div_rn(value - load_float(operation, 1 + CHANNEL), load_float(operation, 4 + CHANNEL) + value * 0.0)


@triton.jit
def apply_float_point(code, operation, red, green, blue, IS_HEAVY: tl.constexpr):
    """One operation that turns each pixel into another."""
    first = load_float(operation, 1)
    if code == NORMALIZE:
        red = normalize(red, operation, 0)
        green = normalize(green, operation, 1)
        blue = normalize(blue, operation, 2)
    elif code == SCALE:
        red, green, blue = clamp(red * first, 0.0, 1.0), clamp(green * first, 0.0, 1.0), clamp(blue * first, 0.0, 1.0)
    elif code == INVERT:
        red, green, blue = 1.0 - red, 1.0 - green, 1.0 - blue
    elif code == GRAY:
        red = gray_of(red, green, blue, tl.load(operation + 1))
        green = red
        blue = red
    elif code == SATURATION:
        kind = tl.load(operation + 3)
        gray = gray_of(red, green, blue, kind)
        rest = load_float(operation, 2)
        red = blend(red, gray, first, rest, kind == GRAY_V2)
        green = blend(green, gray, first, rest, kind == GRAY_V2)
        blue = blend(blue, gray, first, rest, kind == GRAY_V2)
    elif code == TO_BYTE:
        rounds = tl.load(operation + 2)
        red, green, blue = to_byte(red, first, rounds), to_byte(green, first, rounds), to_byte(blue, first, rounds)
    elif code == PERMUTE:
        new_red = chosen(red, green, blue, tl.load(operation + 1))
        new_green = chosen(red, green, blue, tl.load(operation + 2))
        blue = chosen(red, green, blue, tl.load(operation + 3))
        red = new_red
        green = new_green
    if IS_HEAVY:
        if code == HUE:
            red, green, blue = shift_hue_float(red, green, blue, first, tl.load(operation + 2) != 0)
    return red, green, blue
