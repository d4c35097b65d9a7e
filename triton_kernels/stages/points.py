"""What may follow a head: maps of positions, boxes that are written over, and operations on each pixel."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import blend, clamp, cut, gray_value, load_float, reflected, round_half_even
from ..program import (
    BLEND_MEAN,
    BRIGHTNESS,
    CLAMP,
    EDGE,
    FACTOR,
    FLIP,
    FORMULA,
    GRAY,
    HUE,
    INVERT,
    LOOKUP,
    NORMALIZE,
    PERMUTE,
    PILLOW,
    POSTERIZE,
    REFLECT,
    REMAP,
    SATURATION,
    SHIFT,
    SOLARIZE,
    SYMMETRIC,
    TABLE,
    TO_BYTE,
)
from .hue import turn_hue, turn_tensor_hue


@triton.jit
def map_axis(code, operation, is_x: tl.constexpr, tables, index, position, left_at):
    """One map on one axis: input position of each output position, and the row of the operation where it left.

    `position` int32 [B]; `left_at` int32 [B], -1 while inside.
    """
    axis: tl.constexpr = 0 if is_x else 1
    if code == FLIP:
        mirrored = tl.load(operation + 3 + axis) - 1 - position
        position = tl.where(tl.load(operation + 1 + axis) != 0, mirrored, position)
    elif code == REMAP:
        safe = tl.where(left_at < 0, position, 0)
        position = tl.load(tables + tl.load(operation + TABLE + axis) + safe)
        left_at = tl.where((position < 0) & (left_at < 0), index, left_at)
    else:
        size = tl.load(operation + 3 + axis)
        position = position + tl.load(operation + 1 + axis)
        if code == SHIFT:
            left_at = tl.where(((position < 0) | (position >= size)) & (left_at < 0), index, left_at)
        elif code == EDGE:
            position = tl.minimum(tl.maximum(position, 0), size - 1)
        elif code == REFLECT:
            position = reflected(position, size)
        elif code == SYMMETRIC:
            position = tl.where(position < 0, -1 - position, position)
            position = tl.where(position >= size, 2 * size - 1 - position, position)
    return position, left_at


@triton.jit
def in_box(operation, x, y):
    """Which positions an ERASE or PASTE writes. `x` int32 [X], `y` int32 [Y]."""
    across = (x >= tl.load(operation + 1)) & (x < tl.load(operation + 3))
    down = (y >= tl.load(operation + 2)) & (y < tl.load(operation + 4))
    return down[:, None] & across[None, :]


@triton.jit
def place_in_box(operation, x, y):
    """What the row and the column of a position in its box add to its place among the pixels of a PASTE."""
    left = tl.load(operation + 1)
    return (y - tl.load(operation + 2)) * (tl.load(operation + 3) - left), x - left


@triton.jit
def pasted(pixels, place, here, value):
    """`value`, but the given pixels where `here`."""
    return tl.where(here, load_float(pixels, tl.where(here, place, 0)), value)


@triton.jit
def chosen(index, red, green, blue):
    """Channel number `index`."""
    return tl.where(index == 0, red, tl.where(index == 1, green, blue))


@triton.jit
def posterized(value, share, step):
    """`share` is 1 / `step`, a power of two."""
    return tl.floor(value * share) * step


@triton.jit
def solarized(value, threshold):
    return tl.where(value < threshold, value, 255.0 - value)


@triton.jit
def normalized(value, operation, CHANNEL: tl.constexpr):
    return tl.div_rn(value - load_float(operation, 1 + CHANNEL), load_float(operation, 4 + CHANNEL) + value * 0.0)


@triton.jit
def to_byte(value, scale, rounds):
    """Floats to bytes as torch does it: cut off modulo 256, or rounded and kept in [0, 255]."""
    scaled = value * scale
    nearest = clamp(round_half_even(clamp(scaled, -4194304.0, 4194303.0)), 0.0, 255.0)
    return tl.where(rounds == 0, (scaled.to(tl.int32) & 255).to(tl.float32), nearest)


@triton.jit
def apply_point(code, operation, tables, red, green, blue, top, IS_HEAVY: tl.constexpr):
    """One operation that turns each pixel into another, and `top` after it. `IS_HEAVY`: with those of tensors."""
    factor = load_float(operation, FACTOR)
    formula = tl.load(operation + FORMULA)
    first = load_float(operation, 1)
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
        step = load_float(operation, 2)
        red, green, blue = posterized(red, first, step), posterized(green, first, step), posterized(blue, first, step)
    elif code == SOLARIZE:
        red, green, blue = solarized(red, first), solarized(green, first), solarized(blue, first)
    elif code == GRAY:
        red = gray_value(red, green, blue, formula, top, IS_HEAVY)
        green = red
        blue = red
    elif code == HUE:
        if IS_HEAVY:
            if formula == PILLOW:
                red, green, blue = turn_hue(red, green, blue, tl.load(operation + 1))
            else:
                red, green, blue = turn_tensor_hue(red, green, blue, formula, factor, top)
        else:
            red, green, blue = turn_hue(red, green, blue, tl.load(operation + 1))
    elif code == PERMUTE:
        old_red, old_green, old_blue = red, green, blue
        red = chosen(tl.load(operation + 1), old_red, old_green, old_blue)
        green = chosen(tl.load(operation + 2), old_red, old_green, old_blue)
        blue = chosen(tl.load(operation + 3), old_red, old_green, old_blue)
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
        elif code == CLAMP:
            last = load_float(operation, 2)
            red, green, blue = clamp(red, first, last), clamp(green, first, last), clamp(blue, first, last)
        elif code == TO_BYTE:
            rounds = tl.load(operation + 2)
            red, green, blue = to_byte(red, first, rounds), to_byte(green, first, rounds), to_byte(blue, first, rounds)
            top = 255.0
    return red, green, blue, top
