"""One stage of every image of a batch, in one launch.

A stage of an image is at most one head, which may read several pixels or arbitrary positions of its input (one axis
of a resize, a warp, sharpness), followed by any mix of maps, point operations and statistics. The images of a launch
may have different heads, operations and sizes: each program looks up its job.

A program walks the operations twice. Backwards over the maps, to find which position of the head's output each of its
pixels comes from, and where on that way it left the image; then forwards over the values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blur import blur, blur_axis
from .box import box_blur
from .erase import paste, position_in_box
from .fetch import fetch, load_view
from .grid import sample_grid
from .histogram import count_values, write_tables
from .mix import mix
from .options import compiler_options
from .pixel_math import color, gray_value, rounded
from .program import (
    AFFINE,
    BLUR,
    BLUR_X,
    BLUR_Y,
    BOX_BLUR,
    BRIGHTNESS,
    CHANNELS,
    CONTRAST,
    EQUALIZE,
    ERASE,
    GRID,
    HEAD,
    HEIGHT,
    HISTOGRAM_FORMULA,
    HISTOGRAM_READ,
    HISTOGRAM_WRITTEN,
    JOB_COLUMNS,
    MIX,
    OPERATION_COLUMNS,
    PASTE,
    RECORD_ENTRIES,
    REMAP,
    RESAMPLE_X,
    RESAMPLE_Y,
    RESIZE_X,
    RESIZE_Y,
    SHARPNESS,
    SHIFT,
    TABLES_WRITTEN,
    TAIL_BEGIN,
    TAIL_END,
    TARGET,
    TARGET_CHANNEL,
    TARGET_COLUMN,
    TARGET_ROW,
    VALUE_TABLE,
    WARP,
    WIDTH,
)
from .resample import resample
from .resize import resize_axis
from .sharpen import sharpen
from .tail import apply_point, apply_tables, map_axis
from .warp import warp_fixed, warp_float


@triton.jit
def stage_kernel(
    workspace, output,
    jobs, operations, tables, tiles, histograms, value_tables,
    IS_LAST: tl.constexpr, HAS_FLOAT64: tl.constexpr, HAS_STATISTIC: tl.constexpr, HAS_ERASE: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Makes one tile [BLOCK_Y, BLOCK_X] of one image of the batch.

    Args:
        workspace: uint8 [bytes], decoded images and the outputs of earlier stages.
        output: [N, C, H, W] in any layout, written by the last stage only.
        jobs: int64 [jobs, JOB_COLUMNS].
        operations: int32 [rows, OPERATION_COLUMNS].
        tables: int32 [entries], weights and index tables.
        tiles: int32 [tiles, 3], job, first row and first column of each tile.
        histograms: int32 [records, 7, 256], zero before the first stage.
        value_tables: float32 [tables, 3, 256], the value of each uint8 in each channel of the output.
    """
    # This program makes the tile that row `program_id` of `tiles` names.
    tile = tiles + tl.program_id(0) * 3
    job = jobs + tl.load(tile).to(tl.int64) * JOB_COLUMNS
    height = tl.load(job + HEIGHT).to(tl.int32)
    width = tl.load(job + WIDTH).to(tl.int32)
    rows = tl.load(tile + 1) + tl.arange(0, BLOCK_Y)
    columns = tl.load(tile + 2) + tl.arange(0, BLOCK_X)
    tail_begin = tl.load(job + TAIL_BEGIN).to(tl.int32)
    tail_end = tl.load(job + TAIL_END).to(tl.int32)

    if HAS_STATISTIC:
        # A statistic stands first in the tail: its tables are made before anything else, while registers are free.
        read = tl.load(job + HISTOGRAM_READ)
        if read >= 0:
            statistic = operations + tail_begin * OPERATION_COLUMNS
            written = histograms + tl.load(job + TABLES_WRITTEN) * RECORD_ENTRIES
            write_tables(statistic, histograms + read * RECORD_ENTRIES, written)

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
        if HAS_ERASE:
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

    red = tl.zeros((BLOCK_Y, BLOCK_X), tl.int32)
    green = tl.zeros((BLOCK_Y, BLOCK_X), tl.int32)
    blue = tl.zeros((BLOCK_Y, BLOCK_X), tl.int32)
    view = load_view(workspace, job)
    head_row = tl.load(job + HEAD).to(tl.int32)
    head = operations + tl.maximum(head_row, 0) * OPERATION_COLUMNS
    head_code = tl.load(head, mask=head_row >= 0, other=0)
    if head_code == RESAMPLE_X:
        red, green, blue = resample(view, head, tables, x, y, True, red, green, blue)
    elif head_code == RESAMPLE_Y:
        red, green, blue = resample(view, head, tables, x, y, False, red, green, blue)
    elif head_code == AFFINE:
        red, green, blue = warp_fixed(view, head, x[None, :], y[:, None])
    elif head_code == SHARPNESS:
        red, green, blue = sharpen(view, head, x[None, :], y[:, None], red, green, blue, HAS_FLOAT64)
    elif head_code == MIX:
        red, green, blue = mix(view, workspace, jobs, head, x[None, :], y[:, None])
    elif (head_code != WARP) & (head_code < BLUR):
        red, green, blue = fetch(view, x[None, :], y[:, None])
    if HAS_FLOAT64:
        if head_code == WARP:
            red, green, blue = warp_float(view, head, tables, x[None, :], y[:, None], red, green, blue)
        elif head_code == BLUR:
            red, green, blue = blur(view, head, tables, x[None, :], y[:, None], red, green, blue)
        elif head_code == BLUR_X:
            red, green, blue = blur_axis(view, head, tables, x[None, :], y[:, None], True, red, green, blue)
        elif head_code == BLUR_Y:
            sums = load_view(workspace.to(tl.pointer_type(tl.int32)), job)
            red, green, blue = blur_axis(sums, head, tables, x[None, :], y[:, None], False, red, green, blue)
        elif head_code == RESIZE_X:
            red, green, blue = resize_axis(view, head, tables, x, y, True, red, green, blue)
        elif head_code == RESIZE_Y:
            sums = load_view(workspace.to(tl.pointer_type(tl.int32)), job)
            red, green, blue = resize_axis(sums, head, tables, x, y, False, red, green, blue)
        elif head_code == GRID:
            red, green, blue = sample_grid(view, head, tables, x[None, :], y[:, None], red, green, blue)
        elif head_code == BOX_BLUR:
            red, green, blue = box_blur(view, head, x[None, :], y[:, None], red, green, blue)

    left_at = tl.maximum(tl.maximum(x_left_at[None, :], y_left_at[:, None]), erased_at)
    for index in range(tail_begin, tail_end):
        operation = operations + index * OPERATION_COLUMNS
        code = tl.load(operation)
        if (code == SHIFT) | (code == REMAP) | (code == ERASE):
            fill = tl.load(operation + 5)
            red = tl.where(left_at == index, color(fill, 0), red)
            green = tl.where(left_at == index, color(fill, 1), green)
            blue = tl.where(left_at == index, color(fill, 2), blue)
        elif (code >= BRIGHTNESS) & (code < CONTRAST):
            red, green, blue = apply_point(code, operation, tables, red, green, blue, HAS_FLOAT64)
        if HAS_ERASE:
            if code == PASTE:
                here = (left_at == index) & (tl.load(operation + 6) + tl.zeros_like(left_at) == 0)
                red, green, blue = paste(operation, tables, pasted_from, here, red, green, blue)
        if HAS_STATISTIC:
            if (code >= CONTRAST) & (code <= EQUALIZE):
                record = histograms + tl.load(job + TABLES_WRITTEN) * RECORD_ENTRIES
                red, green, blue = apply_tables(record, red, green, blue)

    inside = (rows < height)[:, None] & (columns < width)[None, :]
    channels = tl.load(job + CHANNELS).to(tl.int32)
    step = tl.load(job + TARGET_CHANNEL)
    target = (
        tl.load(job + TARGET)
        + rows[:, None] * tl.load(job + TARGET_ROW)
        + columns[None, :] * tl.load(job + TARGET_COLUMN)
    )
    color_inside = inside & (channels + tl.zeros_like(red) > 1)
    if IS_LAST:
        values = value_tables + tl.load(job + VALUE_TABLE) * 768
        element = output.dtype.element_ty
        first = tl.load(values + red)
        second = tl.load(values + 256 + green)
        third = tl.load(values + 512 + blue)
        if HAS_ERASE:
            for index in range(tail_begin, tail_end):
                operation = operations + index * OPERATION_COLUMNS
                code = tl.load(operation)
                here = (left_at == index) & (tl.load(operation + 6) + tl.zeros_like(left_at) != 0)
                if code == PASTE:
                    first, second, third = paste(operation, tables, pasted_from, here, first, second, third)
                elif code == ERASE:
                    first = tl.where(here, tl.load(operation + 7).to(tl.float32, bitcast=True), first)
                    second = tl.where(here, tl.load(operation + 8).to(tl.float32, bitcast=True), second)
                    third = tl.where(here, tl.load(operation + 9).to(tl.float32, bitcast=True), third)
        tl.store(output + target, rounded(first, element), mask=inside)
        tl.store(output + target + step, rounded(second, element), mask=color_inside)
        tl.store(output + target + 2 * step, rounded(third, element), mask=color_inside)
    elif (head_code == BLUR_X) | (head_code == RESIZE_X):
        sums = workspace.to(tl.pointer_type(tl.int32))
        tl.store(sums + target, red, mask=inside)
        tl.store(sums + target + step, green, mask=color_inside)
        tl.store(sums + target + 2 * step, blue, mask=color_inside)
    else:
        tl.store(workspace + target, red.to(tl.uint8), mask=inside)
        tl.store(workspace + target + step, green.to(tl.uint8), mask=color_inside)
        tl.store(workspace + target + 2 * step, blue.to(tl.uint8), mask=color_inside)
        if HAS_STATISTIC:
            written = tl.load(job + HISTOGRAM_WRITTEN)
            if written >= 0:
                histogram = histograms + written * RECORD_ENTRIES
                gray = gray_value(red, green, blue, tl.load(job + HISTOGRAM_FORMULA), HAS_FLOAT64)
                # A loop, because four counts in a row need more registers than there are.
                for plane in range(4):
                    value = tl.where(plane == 0, red, tl.where(plane == 1, green, tl.where(plane == 2, blue, gray)))
                    count_values(histogram + plane * 256, value, inside, BLOCK_Y * BLOCK_X)


# Rows and columns of a tile. Wide rather than square: neighbors in memory are neighbors in a row.
TILE_ROWS = 8
TILE_COLUMNS = 64
# The interpreter pays per operation, not per pixel.
INTERPRETED_TILE_ROWS = 64
INTERPRETED_TILE_COLUMNS = 256
WARPS = 4
# Float64 takes two registers a value: half as many pixels a thread, so that none are spilled.
FLOAT64_WARPS = 8
# Without float64 and erasing. Left to itself, NVIDIA's assembler spills a few bytes on sm_80 to keep to 72.
LIGHT_REGISTERS = 80


def tile_shape(*, interpreted: bool) -> tuple[int, int]:
    """(rows, columns) of a tile on a device, or under the interpreter."""
    return (INTERPRETED_TILE_ROWS, INTERPRETED_TILE_COLUMNS) if interpreted else (TILE_ROWS, TILE_COLUMNS)


def most_registers(*, has_float64: bool, has_erase: bool) -> int | None:
    """`maxnreg` on NVIDIA's GPUs, None where the compiler may choose."""
    return None if has_float64 or has_erase else LIGHT_REGISTERS


def run_stage(
    workspace: torch.Tensor,
    output: torch.Tensor,
    jobs: torch.Tensor,
    operations: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    histograms: torch.Tensor,
    value_tables: torch.Tensor,
    *,
    is_last: bool,
    has_float64: bool,
    has_statistic: bool,
    has_erase: bool,
    rows_and_columns: tuple[int, int],
) -> None:
    """Launches one stage of all images; the arguments are those of `stage_kernel`. Nothing to do without tiles."""
    if not len(tiles):
        return
    block_y, block_x = rows_and_columns
    registers = most_registers(has_float64=has_float64, has_erase=has_erase)
    stage_kernel[(len(tiles),)](
        workspace, output, jobs, operations, tables, tiles, histograms, value_tables,
        IS_LAST=is_last, HAS_FLOAT64=has_float64, HAS_STATISTIC=has_statistic, HAS_ERASE=has_erase,
        BLOCK_Y=block_y, BLOCK_X=block_x, **compiler_options(FLOAT64_WARPS if has_float64 else WARPS, registers),
    )  # fmt: skip
