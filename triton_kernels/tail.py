"""What may follow the head of a stage: maps of positions, operations on pixels, operations that need a histogram."""

from __future__ import annotations

import triton
import triton.language as tl

from .hue import shift_hue
from .pixel_math import blend, gray_value
from .program import (
    BRIGHTNESS,
    EDGE,
    FACTOR,
    FLIP,
    FORMULA,
    GRAY,
    HUE,
    INVERT,
    LOOKUP,
    PERMUTE,
    PILLOW,
    POSTERIZE,
    REFLECT,
    REMAP,
    SATURATION,
    SHIFT,
    SOLARIZE,
    SYMMETRIC,
    TABLES,
)
from .tensor_math import tensor_blend


@triton.jit
def map_axis(code, operation, is_x: tl.constexpr, tables, index, position, left_at):
    """One map on one axis: input position of each output position, and the row of the operation where it left.

    `position` int32 [B]; `left_at` int32 [B], -1 while inside.
    """
    axis: tl.constexpr = 0 if is_x else 1
    safe = tl.where(left_at < 0, position, 0)
    if code == FLIP:
        mirrored = tl.load(operation + 3 + axis) - 1 - position
        position = tl.where(tl.load(operation + 1 + axis) != 0, mirrored, position)
    elif code == REMAP:
        position = tl.load(tables + tl.load(operation + 2 + axis) + safe)
        left_at = tl.where((position < 0) & (left_at < 0), index, left_at)
    else:
        size = tl.load(operation + 3 + axis)
        position = position + tl.load(operation + 1 + axis)
        if code == SHIFT:
            left_at = tl.where(((position < 0) | (position >= size)) & (left_at < 0), index, left_at)
        elif code == EDGE:
            position = tl.minimum(tl.maximum(position, 0), size - 1)
        elif code == REFLECT:
            position = tl.abs(position)
            position = tl.where(position >= size, 2 * (size - 1) - position, position)
        elif code == SYMMETRIC:
            position = tl.where(position < 0, -1 - position, position)
            position = tl.where(position >= size, 2 * size - 1 - position, position)
    return position, left_at


@triton.jit
def saturated(gray, value, factor, rest, formula, HAS_FLOAT64: tl.constexpr):
    """One channel blended with the gray value; `rest` is 1 - factor."""
    mixed = blend(gray, value, factor)
    if HAS_FLOAT64:
        if formula != PILLOW:
            mixed = tensor_blend(value, gray, factor, rest, formula)
    return mixed


@triton.jit
def chosen(index, red, green, blue):
    """Channel number `index`."""
    return tl.where(index == 0, red, tl.where(index == 1, green, blue))


@triton.jit
def apply_point(code, operation, tables, red, green, blue, HAS_FLOAT64: tl.constexpr):
    """One operation that turns each pixel into another."""
    factor = tl.load(operation + FACTOR).to(tl.float32, bitcast=True)
    formula = tl.load(operation + FORMULA)
    value = tl.load(operation + 1)
    if code == BRIGHTNESS:
        black = tl.zeros_like(red)
        red, green, blue = blend(black, red, factor), blend(black, green, factor), blend(black, blue, factor)
    elif code == SATURATION:
        gray = gray_value(red, green, blue, formula, HAS_FLOAT64)
        rest = value.to(tl.float32, bitcast=True)
        red = saturated(gray, red, factor, rest, formula, HAS_FLOAT64)
        green = saturated(gray, green, factor, rest, formula, HAS_FLOAT64)
        blue = saturated(gray, blue, factor, rest, formula, HAS_FLOAT64)
    elif code == INVERT:
        red, green, blue = 255 - red, 255 - green, 255 - blue
    elif code == POSTERIZE:
        red, green, blue = red & value, green & value, blue & value
    elif code == SOLARIZE:
        red = tl.where(red < value, red, 255 - red)
        green = tl.where(green < value, green, 255 - green)
        blue = tl.where(blue < value, blue, 255 - blue)
    elif code == GRAY:
        red = gray_value(red, green, blue, formula, HAS_FLOAT64)
        green = red
        blue = red
    elif code == LOOKUP:
        red = tl.load(tables + tl.load(operation + 2) + red)
        green = tl.load(tables + tl.load(operation + 3) + green)
        blue = tl.load(tables + tl.load(operation + 4) + blue)
    elif code == PERMUTE:
        old_red, old_green, old_blue = red, green, blue
        red = chosen(value, old_red, old_green, old_blue)
        green = chosen(tl.load(operation + 2), old_red, old_green, old_blue)
        blue = chosen(tl.load(operation + 3), old_red, old_green, old_blue)
    if HAS_FLOAT64:
        if code == HUE:
            red, green, blue = shift_hue(red, green, blue, formula, value, factor)
    return red, green, blue


@triton.jit
def apply_tables(record, red, green, blue):
    """An operation that depends on the histogram of the stage's input, through the tables made of it."""
    tables = record + TABLES
    return tl.load(tables + red), tl.load(tables + 256 + green), tl.load(tables + 512 + blue)
