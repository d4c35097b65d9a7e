"""How a stage reads its input, and the formulas on pixels.

Values are float32. Those of byte images are whole numbers in [0, 255], and results are truncated to whole numbers.
`top` is the largest value: 255 for byte images, 1 for float images. Pillow's formulas are those of `Blend.c`,
`Convert.c` and `Filter.c`; those of tensors are `_functional_tensor.py` (v1) and `v2/functional/_color.py` (v2) of
torchvision, in the order in which torch rounds.

A stage reads its input through a view, in which flips, crops and a constant border are free. Only a heavy stage has a
border around its input; others do not mask loads, so their positions have to lie in the view.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .program import (
    FILL,
    FLOATS,
    OPERATION_COLUMNS,
    PILLOW,
    SOURCE,
    SOURCE_CHANNEL,
    SOURCE_COLUMN,
    SOURCE_KIND,
    SOURCE_ROW,
    SOURCE_VALUES,
    TENSOR_V1,
    VALUED,
    VIEW_FILL,
    VIEW_X_BEGIN,
    VIEW_X_END,
    VIEW_X_OFFSET,
    VIEW_X_STEP,
    VIEW_Y_BEGIN,
    VIEW_Y_END,
    VIEW_Y_OFFSET,
    VIEW_Y_STEP,
)

# Triton's interpreter rounds twice in `fma`; a product of two float32 is exact in float64.
_EMULATED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def load_float(pointer, index):
    """Loads a float32 whose bits are stored as an int32."""
    return tl.load(pointer + index).to(tl.float32, bitcast=True)


@triton.jit
def fused(a, b, c):
    """a * b + c with one rounding, as torch's CPU kernels for `add(alpha=)`, interpolation and `grid_sample`."""
    b = b + tl.zeros_like(a)
    c = c + tl.zeros_like(a)
    if _EMULATED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def clamp(value, low, high):
    """Clamps values to [low, high]."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def cut(value, top):
    """Clamps values to [0, top]; those of bytes are truncated to whole numbers."""
    value = clamp(value, 0.0, top)
    return tl.where(top > 1.0, tl.floor(value), value)


@triton.jit
def reflected(position, size):
    """Reflects a position up to `size` - 1 beyond either end into the image, without repeating the border."""
    position = tl.abs(position)
    return tl.where(position >= size, 2 * (size - 1) - position, position)


@triton.jit
def round_half_even(value):
    """Rounds float32 in [-2 ** 22, 2 ** 22) to the nearest whole number, halves to even."""
    # Above 1.5 * 2 ** 23, float32 has no fractional part, so the addition rounds.
    return (value + 12582912.0) - 12582912.0


@triton.jit
def as_filtered(value, top):
    """Converts the result of a float filter: values of bytes are rounded to the nearest whole number."""
    return tl.where(top > 1.0, round_half_even(clamp(value, 0.0, 255.0)), value)


@triton.jit
def blend(other, image, factor, rest, formula, top, IS_HEAVY: tl.constexpr):
    """Blends an image with another one: `factor` of it, and `rest` = 1 - factor of the other."""
    mixed = other + factor * (image - other)
    if IS_HEAVY and formula != PILLOW:
        scaled = image * factor
        once = fused(other + tl.zeros_like(image), rest, scaled)
        mixed = tl.where(formula == TENSOR_V1, scaled + other * rest, once)
    return cut(mixed, top)


@triton.jit
def luminance(red, green, blue):
    """Computes the ITU-R 601-2 luma of bytes in 16.16 fixed point, int32."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def gray_value(red, green, blue, formula, top, IS_HEAVY: tl.constexpr):
    """Computes gray values by a formula: Pillow's (`luminance`), v1's or v2's."""
    # Exact: all sums are whole numbers below 2 ** 24.
    gray = tl.floor((red * 19595.0 + green * 38470.0 + blue * 7471.0 + 32768.0) * (1.0 / 65536.0))
    if IS_HEAVY and formula != PILLOW:
        weighted = red * 0.2989
        once = fused(blue, 0.114, fused(green, 0.587, weighted))
        gray = tl.where(formula == TENSOR_V1, weighted + green * 0.587 + blue * 0.114, once)
        gray = tl.where(top > 1.0, tl.floor(gray), gray)
    return gray


@triton.jit
def as_element(value, element: tl.constexpr):
    """Converts float32 to the element type of the result, rounding to nearest, halves to even."""
    if element == tl.uint8:
        return value.to(tl.int32).to(tl.uint8)
    if _EMULATED and element == tl.bfloat16:
        # Triton's interpreter truncates to bfloat16 instead of rounding.
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = bits.to(tl.float32, bitcast=True)
    return value.to(element)


class View(NamedTuple):
    """The view through which a job reads its input. Strides include flips; positions outside the bounds are filled."""

    bytes: Any  # pointers to the first pixel
    floats: Any
    row: Any  # strides
    column: Any
    channel: Any
    kind: Any  # BYTES, FLOATS or VALUED
    table: Any  # pointer to the table that maps VALUED bytes to floats
    left: Any  # bounds
    right: Any
    top: Any
    bottom: Any
    fill: Any  # pointer to three float32, stored as int32


@triton.jit
def load_view(workspace, tables, operations, job):
    """Loads the view of a job."""
    row = tl.load(job + SOURCE_ROW)
    column = tl.load(job + SOURCE_COLUMN)
    origin = tl.load(job + SOURCE) + tl.load(job + VIEW_Y_OFFSET) * row + tl.load(job + VIEW_X_OFFSET) * column
    return View(
        workspace + origin,
        workspace.to(tl.pointer_type(tl.float32)) + origin,
        tl.load(job + VIEW_Y_STEP) * row,
        tl.load(job + VIEW_X_STEP) * column,
        tl.load(job + SOURCE_CHANNEL),
        tl.load(job + SOURCE_KIND).to(tl.int32),
        tables + tl.load(job + SOURCE_VALUES),
        tl.load(job + VIEW_X_BEGIN).to(tl.int32),
        tl.load(job + VIEW_X_END).to(tl.int32),
        tl.load(job + VIEW_Y_BEGIN).to(tl.int32),
        tl.load(job + VIEW_Y_END).to(tl.int32),
        operations + tl.load(job + VIEW_FILL) * OPERATION_COLUMNS + FILL,
    )


@triton.jit
def load_byte(view, x, y, channel, IS_HEAVY: tl.constexpr):
    """Loads one channel, int32."""
    pixel = view.bytes + y * view.row + x * view.column + channel * view.channel
    if IS_HEAVY:
        inside = (x >= view.left) & (x < view.right) & (y >= view.top) & (y < view.bottom)
        value = tl.load(pixel, mask=inside, other=0).to(tl.int32)
        value = tl.where(inside, value, load_float(view.fill, channel).to(tl.int32))
    else:
        value = tl.load(pixel).to(tl.int32)
    return value


@triton.jit
def fetch_bytes(view, x, y, IS_HEAVY: tl.constexpr):
    """Loads three channels, int32, for heads that compute in integers. `x` and `y` broadcast to the tile."""
    red = load_byte(view, x, y, 0, IS_HEAVY)
    green = load_byte(view, x, y, 1, IS_HEAVY)
    return red, green, load_byte(view, x, y, 2, IS_HEAVY)


@triton.jit
def fetch(view, x, y, IS_HEAVY: tl.constexpr):
    """Loads three channels, float32. `x` and `y` are int32, of shapes that broadcast to the tile."""
    if IS_HEAVY and view.kind == FLOATS:
        pixel = view.floats + y * view.row + x * view.column
        red = tl.load(pixel)
        green = tl.load(pixel + view.channel)
        blue = tl.load(pixel + 2 * view.channel)
    else:
        r, g, b = fetch_bytes(view, x, y, IS_HEAVY)
        red, green, blue = r.to(tl.float32), g.to(tl.float32), b.to(tl.float32)
        if IS_HEAVY and view.kind == VALUED:
            red = load_float(view.table, r)
            green = load_float(view.table + 256, g)
            blue = load_float(view.table + 512, b)
    return red, green, blue
