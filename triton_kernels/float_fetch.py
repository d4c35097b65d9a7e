"""Reading a float stage's input through its view: uint8 through the table of its values, or float32."""

from __future__ import annotations

import triton
import triton.language as tl

from .float_program import FILL
from .program import (
    FROM_BYTES,
    OPERATION_COLUMNS,
    SOURCE,
    SOURCE_CHANNEL,
    SOURCE_COLUMN,
    SOURCE_ROW,
    VALUE_TABLE,
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
def load_float_view(workspace, floats, value_tables, operations, job):
    """How a job sees its input: pointers and one stride an axis, with the flips and the crop worked in."""
    row = tl.load(job + SOURCE_ROW)
    column = tl.load(job + SOURCE_COLUMN)
    origin = tl.load(job + SOURCE) + tl.load(job + VIEW_Y_OFFSET) * row + tl.load(job + VIEW_X_OFFSET) * column
    fill_row = tl.load(job + VIEW_FILL)
    fill = operations + tl.maximum(fill_row, 0) * OPERATION_COLUMNS + FILL
    return (
        tl.load(job + FROM_BYTES),
        workspace + origin,
        floats + origin,
        value_tables + tl.load(job + VALUE_TABLE) * 768,
        tl.load(job + VIEW_Y_STEP) * row,
        tl.load(job + VIEW_X_STEP) * column,
        tl.load(job + SOURCE_CHANNEL),
        tl.load(job + VIEW_X_BEGIN).to(tl.int32),
        tl.load(job + VIEW_X_END).to(tl.int32),
        tl.load(job + VIEW_Y_BEGIN).to(tl.int32),
        tl.load(job + VIEW_Y_END).to(tl.int32),
        tl.load(fill, mask=fill_row >= 0, other=0),
        tl.load(fill + 1, mask=fill_row >= 0, other=0),
        tl.load(fill + 2, mask=fill_row >= 0, other=0),
    )


@triton.jit
def fetch_float(view, x, y):
    """Input pixels at (y, x) through the job's view: three float32 values, the view's fill outside.

    `x` and `y` int32, of shapes that broadcast to the tile.
    """
    (
        from_bytes, bytes_origin, floats_origin, values, row_step, column_step, step,
        x_begin, x_end, y_begin, y_end, fill_red, fill_green, fill_blue,
    ) = view  # fmt: skip
    inside = (x >= x_begin) & (x < x_end) & (y >= y_begin) & (y < y_end)
    at = y * row_step + x * column_step
    if from_bytes != 0:
        red = tl.load(values + tl.load(bytes_origin + at, mask=inside, other=0).to(tl.int32))
        green = tl.load(values + 256 + tl.load(bytes_origin + at + step, mask=inside, other=0).to(tl.int32))
        blue = tl.load(values + 512 + tl.load(bytes_origin + at + 2 * step, mask=inside, other=0).to(tl.int32))
    else:
        red = tl.load(floats_origin + at, mask=inside, other=0.0)
        green = tl.load(floats_origin + at + step, mask=inside, other=0.0)
        blue = tl.load(floats_origin + at + 2 * step, mask=inside, other=0.0)
    red = tl.where(inside, red, fill_red.to(tl.float32, bitcast=True))
    green = tl.where(inside, green, fill_green.to(tl.float32, bitcast=True))
    blue = tl.where(inside, blue, fill_blue.to(tl.float32, bitcast=True))
    return red, green, blue
