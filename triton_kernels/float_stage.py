"""One float stage of every image of a batch, in one launch: what follows the conversion to float32 tensors.

Built as the stage kernel of `stage.py`: at most one head, then maps, point operations and statistics, found in the
same tables. Between stages an image is float32, three planes. The first float stage of an image reads uint8 through
the table of the values that stock code makes of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .erase import paste, position_in_box
from .float_blur import blur_float, sharpen_float
from .float_fetch import fetch_float, load_float_view
from .float_math import load_float
from .float_program import (
    BILINEAR,
    BLUR,
    CONTRAST,
    CUBIC,
    FILL,
    NORMALIZE,
    RESAMPLE_X,
    RESAMPLE_Y,
    SHARPNESS,
    TURN,
    WARP,
)
from .float_resample import bilinear_float, cubic_float, resample_float
from .float_statistics import add_gray_values, apply_contrast
from .float_tail import apply_float_point
from .float_warp import turn, warp_grid
from .options import compiler_options
from .pixel_math import rounded
from .program import (
    CHANNELS,
    ERASE,
    HEAD,
    HEIGHT,
    HISTOGRAM_READ,
    HISTOGRAM_WRITTEN,
    JOB_COLUMNS,
    OPERATION_COLUMNS,
    PASTE,
    REMAP,
    SHIFT,
    STATISTIC,
    TAIL_BEGIN,
    TAIL_END,
    TARGET,
    TARGET_CHANNEL,
    TARGET_COLUMN,
    TARGET_ROW,
    WIDTH,
)
from .tail import map_axis


@triton.jit
def float_stage_kernel(
    workspace, floats, output,
    jobs, operations, tables, tiles, gray_sums, value_tables,
    IS_LAST: tl.constexpr, HAS_STATISTIC: tl.constexpr, IS_HEAVY: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Makes one tile [BLOCK_Y, BLOCK_X] of one image of the batch.

    Args:
        workspace: uint8 [bytes], decoded images and the outputs of the uint8 stages.
        floats: float32 [elements], the outputs of all float stages but the last.
        output: [N, C, H, W] in any layout, written by the last stage only.
        jobs: int64 [jobs, JOB_COLUMNS].
        operations: int32 [rows, OPERATION_COLUMNS].
        tables: int32 [entries], index tables and matrices.
        tiles: int32 [tiles, 3], job, first row and first column of each tile.
        gray_sums: int64 [images with a statistic], zero before the first stage.
        value_tables: float32 [tables, 3, 256], the value of each uint8 in each channel.
    """
    tile = tiles + tl.program_id(0) * 3
    job = jobs + tl.load(tile).to(tl.int64) * JOB_COLUMNS
    height = tl.load(job + HEIGHT).to(tl.int32)
    width = tl.load(job + WIDTH).to(tl.int32)
    rows = tl.load(tile + 1) + tl.arange(0, BLOCK_Y)
    columns = tl.load(tile + 2) + tl.arange(0, BLOCK_X)
    tail_begin = tl.load(job + TAIL_BEGIN).to(tl.int32)
    tail_end = tl.load(job + TAIL_END).to(tl.int32)

    y = tl.minimum(rows, height - 1)
    x = tl.minimum(columns, width - 1)
    y_left_at = tl.full((BLOCK_Y,), -1, tl.int32)
    x_left_at = tl.full((BLOCK_X,), -1, tl.int32)
    erased_at = tl.full((BLOCK_Y, BLOCK_X), -1, tl.int32)
    pasted_from = tl.zeros((BLOCK_Y, BLOCK_X), tl.int32)
    for step in range(tail_end - tail_begin):
        index = tail_end - 1 - step
        operation = operations + index * OPERATION_COLUMNS
        code = tl.load(operation)
        if IS_HEAVY:
            if (code == ERASE) | (code == PASTE):
                inside_box, at = position_in_box(operation, x, y)
                erased_here = inside_box & (erased_at < 0)
                erased_at = tl.where(erased_here, index, erased_at)
                pasted_from = tl.where(erased_here, at, pasted_from)
        if code <= REMAP:
            x, x_left_at = map_axis(code, operation, True, tables, index, x, x_left_at)
            y, y_left_at = map_axis(code, operation, False, tables, index, y, y_left_at)
    x = tl.where(x_left_at < 0, x, 0)
    y = tl.where(y_left_at < 0, y, 0)

    view = load_float_view(workspace, floats, value_tables, operations, job)
    head_row = tl.load(job + HEAD)
    head = operations + tl.maximum(head_row, 0) * OPERATION_COLUMNS
    head_code = tl.where(head_row < 0, 0, tl.load(head, mask=head_row >= 0, other=0))
    red = tl.zeros((BLOCK_Y, BLOCK_X), tl.float32)
    green = tl.zeros((BLOCK_Y, BLOCK_X), tl.float32)
    blue = tl.zeros((BLOCK_Y, BLOCK_X), tl.float32)
    if head_code == RESAMPLE_X:
        red, green, blue = resample_float(view, head, x, y, True, red, green, blue)
    elif head_code == RESAMPLE_Y:
        red, green, blue = resample_float(view, head, x, y, False, red, green, blue)
    elif head_code == 0:
        red, green, blue = fetch_float(view, x[None, :], y[:, None])
    if IS_HEAVY:
        if head_code == BILINEAR:
            red, green, blue = bilinear_float(view, head, x, y, red, green, blue)
        elif head_code == CUBIC:
            red, green, blue = cubic_float(view, head, tables, x, y, red, green, blue)
        elif head_code == WARP:
            red, green, blue = warp_grid(view, head, tables, x[None, :], y[:, None], red, green, blue)
        elif head_code == BLUR:
            red, green, blue = blur_float(view, head, tables, x[None, :], y[:, None], red, green, blue)
        elif head_code == TURN:
            red, green, blue = turn(view, head, x[None, :], y[:, None])
        elif head_code == SHARPNESS:
            red, green, blue = sharpen_float(view, head, x[None, :], y[:, None], red, green, blue)

    left_at = tl.maximum(tl.maximum(x_left_at[None, :], y_left_at[:, None]), erased_at)
    for index in range(tail_begin, tail_end):
        operation = operations + index * OPERATION_COLUMNS
        code = tl.load(operation)
        if (code == SHIFT) | (code == REMAP) | (code == ERASE):
            red = tl.where(left_at == index, load_float(operation, FILL), red)
            green = tl.where(left_at == index, load_float(operation, FILL + 1), green)
            blue = tl.where(left_at == index, load_float(operation, FILL + 2), blue)
        elif (code >= NORMALIZE) & (code < CONTRAST):
            red, green, blue = apply_float_point(code, operation, red, green, blue, IS_HEAVY)
        if IS_HEAVY:
            if code == PASTE:
                red, green, blue = paste(operation, tables, pasted_from, left_at == index, red, green, blue)
        if HAS_STATISTIC:
            if code == CONTRAST:
                gray_sum = gray_sums + tl.load(job + HISTOGRAM_READ)
                red, green, blue = apply_contrast(operation, gray_sum, red, green, blue)

    inside = (rows < height)[:, None] & (columns < width)[None, :]
    color_inside = inside & (tl.load(job + CHANNELS).to(tl.int32) + tl.zeros_like(x)[None, :] > 1)
    step = tl.load(job + TARGET_CHANNEL)
    target = (
        tl.load(job + TARGET)
        + rows[:, None] * tl.load(job + TARGET_ROW)
        + columns[None, :] * tl.load(job + TARGET_COLUMN)
    )
    if IS_LAST:
        element = output.dtype.element_ty
        tl.store(output + target, rounded(red, element), mask=inside)
        tl.store(output + target + step, rounded(green, element), mask=color_inside)
        tl.store(output + target + 2 * step, rounded(blue, element), mask=color_inside)
    else:
        tl.store(floats + target, red, mask=inside)
        tl.store(floats + target + step, green, mask=inside)
        tl.store(floats + target + 2 * step, blue, mask=inside)
        if HAS_STATISTIC:
            written = tl.load(job + HISTOGRAM_WRITTEN)
            if written >= 0:
                operation = operations + tl.load(job + STATISTIC) * OPERATION_COLUMNS
                add_gray_values(operation, gray_sums + written, red, green, blue, inside)


# Half as many pixels a thread as a light uint8 stage has, so that no registers are spilled.
FLOAT_WARPS = 8
# Left to itself, NVIDIA's assembler spills a few bytes to keep to 64 registers.
FLOAT_REGISTERS = 128


def run_float_stage(
    workspace: torch.Tensor,
    floats: torch.Tensor,
    output: torch.Tensor,
    jobs: torch.Tensor,
    operations: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    gray_sums: torch.Tensor,
    value_tables: torch.Tensor,
    *,
    is_last: bool,
    has_statistic: bool,
    is_heavy: bool,
    rows_and_columns: tuple[int, int],
) -> None:
    """Launches one float stage of all images; the arguments are those of `float_stage_kernel`."""
    if not len(tiles):
        return
    block_y, block_x = rows_and_columns
    float_stage_kernel[(len(tiles),)](
        workspace, floats, output, jobs, operations, tables, tiles, gray_sums, value_tables,
        IS_LAST=is_last, HAS_STATISTIC=has_statistic, IS_HEAVY=is_heavy,
        BLOCK_Y=block_y, BLOCK_X=block_x, **compiler_options(FLOAT_WARPS, FLOAT_REGISTERS),
    )  # fmt: skip
