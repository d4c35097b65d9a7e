"""Reading a stage's input through its view: flips, crops and a constant border cost nothing.

Only a heavy stage has a border around its input; nothing is masked elsewhere, so positions have to lie in the view.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import load_float
from .program import (
    FILL,
    FLOATS,
    OPERATION_COLUMNS,
    SOURCE,
    SOURCE_CHANNEL,
    SOURCE_COLUMN,
    SOURCE_KIND,
    SOURCE_ROW,
    SOURCE_VALUES,
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


@triton.jit
def load_view(workspace, tables, operations, job):
    """How a job sees its input: the first pixel as bytes and as floats, strides with the flips worked in, and more."""
    row = tl.load(job + SOURCE_ROW)
    column = tl.load(job + SOURCE_COLUMN)
    origin = tl.load(job + SOURCE) + tl.load(job + VIEW_Y_OFFSET) * row + tl.load(job + VIEW_X_OFFSET) * column
    return (
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
    """One channel, int32."""
    pixel = view[0] + y * view[2] + x * view[3] + channel * view[4]
    if IS_HEAVY:
        inside = (x >= view[7]) & (x < view[8]) & (y >= view[9]) & (y < view[10])
        value = tl.load(pixel, mask=inside, other=0).to(tl.int32)
        value = tl.where(inside, value, load_float(view[11], channel).to(tl.int32))
    else:
        value = tl.load(pixel).to(tl.int32)
    return value


@triton.jit
def fetch_bytes(view, x, y, IS_HEAVY: tl.constexpr):
    """Three int32 values, for heads that compute in integers. `x` and `y` broadcast to the tile."""
    red = load_byte(view, x, y, 0, IS_HEAVY)
    green = load_byte(view, x, y, 1, IS_HEAVY)
    return red, green, load_byte(view, x, y, 2, IS_HEAVY)


@triton.jit
def fetch(view, x, y, IS_HEAVY: tl.constexpr):
    """Three float32 values. `x` and `y` int32, of shapes that broadcast to the tile."""
    if IS_HEAVY:
        if view[5] == FLOATS:
            pixel = view[1] + y * view[2] + x * view[3]
            red = tl.load(pixel)
            green = tl.load(pixel + view[4])
            blue = tl.load(pixel + 2 * view[4])
        else:
            r, g, b = fetch_bytes(view, x, y, IS_HEAVY)
            red, green, blue = r.to(tl.float32), g.to(tl.float32), b.to(tl.float32)
            if view[5] == VALUED:
                red, green, blue = load_float(view[6], r), load_float(view[6] + 256, g), load_float(view[6] + 512, b)
    else:
        r, g, b = fetch_bytes(view, x, y, IS_HEAVY)
        red, green, blue = r.to(tl.float32), g.to(tl.float32), b.to(tl.float32)
    return red, green, blue
