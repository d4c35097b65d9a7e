"""Reading a stage's input through its view: flips, crops and a constant border cost nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from .pixel_math import color
from .program import (
    SOURCE,
    SOURCE_CHANNEL,
    SOURCE_COLUMN,
    SOURCE_ROW,
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
def load_view(workspace, job):
    """How a job sees its input: one pointer and one stride an axis, with the flips and the crop worked in."""
    row = tl.load(job + SOURCE_ROW)
    column = tl.load(job + SOURCE_COLUMN)
    origin = workspace + tl.load(job + SOURCE)
    origin += tl.load(job + VIEW_Y_OFFSET) * row + tl.load(job + VIEW_X_OFFSET) * column
    return (
        origin,
        tl.load(job + VIEW_Y_STEP) * row,
        tl.load(job + VIEW_X_STEP) * column,
        tl.load(job + SOURCE_CHANNEL),
        tl.load(job + VIEW_X_BEGIN).to(tl.int32),
        tl.load(job + VIEW_X_END).to(tl.int32),
        tl.load(job + VIEW_Y_BEGIN).to(tl.int32),
        tl.load(job + VIEW_Y_END).to(tl.int32),
        tl.load(job + VIEW_FILL),
    )


@triton.jit
def _locate(view, x, y):
    """(address of the first channel of the input pixel at (y, x), whether it lies inside the view)."""
    origin, row_step, column_step, _, x_begin, x_end, y_begin, y_end, _ = view
    inside = (x >= x_begin) & (x < x_end) & (y >= y_begin) & (y < y_end)
    return origin + y * row_step + x * column_step, inside


@triton.jit
def _value(view, pixel, inside, CHANNEL: tl.constexpr):
    step, fill = view[3], view[8]
    value = tl.load(pixel + CHANNEL * step, mask=inside, other=0).to(tl.int32)
    return tl.where(inside, value, color(fill, CHANNEL))


@triton.jit
def fetch_channel(view, x, y, CHANNEL: tl.constexpr):
    """One channel of the input pixels at (y, x), as `fetch`."""
    pixel, inside = _locate(view, x, y)
    return _value(view, pixel, inside, CHANNEL)


@triton.jit
def fetch(view, x, y):
    """Input pixels at (y, x) through the job's view: three int32 values, the view's fill outside.

    `x` and `y` int32, of shapes that broadcast to the tile.
    """
    pixel, inside = _locate(view, x, y)
    return _value(view, pixel, inside, 0), _value(view, pixel, inside, 1), _value(view, pixel, inside, 2)
