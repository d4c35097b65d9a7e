"""One stage of every image of one or more batches, in one launch.

A stage of an image has at most one head, which may read several pixels or arbitrary positions of its input (one axis of
a resize, a warp, sharpness), followed by any mix of maps and point operations. The images of a launch may have
different heads, operations and sizes, and may be bytes or floats: each program looks up its job.

A program goes through the operations twice: backward over the maps, to find the position of the head's output for each
of its pixels, or the map at which the position leaves the image; then forward over the values, which are float32 in
registers, in which bytes are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launching import Launcher
from ..pixels import as_element, as_filtered, fetch, load_float, load_view
from ..program import (
    AFFINE,
    BOX_BLUR,
    BRIGHTNESS,
    CHANNELS,
    CONVOLUTION,
    ERASE,
    FILL,
    FILTER_X,
    FILTER_Y,
    FLOATS,
    GRID,
    HEAD,
    HEIGHT,
    JOB_COLUMNS,
    OPERATION_COLUMNS,
    OUTPUT,
    PASTE,
    PASTED,
    REMAP,
    RESAMPLE_X,
    RESAMPLE_Y,
    SHARPNESS,
    SHIFT,
    TAIL_BEGIN,
    TAIL_END,
    TARGET,
    TARGET_CHANNEL,
    TARGET_COLUMN,
    TARGET_KIND,
    TARGET_ROW,
    TILE_COLUMN,
    TILE_COLUMNS,
    TILE_JOB,
    TILE_ROW,
    TOP,
    WARP,
    WIDTH,
)
from .filters import box_blur, convolve, filter_axis, sharpen
from .points import apply_point, in_box, map_axis, place_in_box
from .warps import sample_grid, warp_fixed, warp_float


@triton.jit(do_not_specialize=("first_tile",))
def stage_kernel(
    workspace, output,
    jobs, operations, tables, tiles,
    first_tile,
    IS_HEAVY: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Makes one tile [BLOCK_Y, BLOCK_X] of one image.

    Args:
        workspace: uint8 [bytes], decoded images and the outputs of earlier stages, bytes or float32.
        output: the first batch [N, C, H, W] in any layout, written, as others are, by the last stage of each image.
        jobs: int64 [jobs, JOB_COLUMNS].
        operations: int32 [rows, OPERATION_COLUMNS].
        tables: int32 [entries], with weights, index tables, values of bytes, and pixels of pastes.
        tiles: int32 [tiles, 3], job, first row and first column of each tile.
        first_tile: row of the tile that the first program makes.
        IS_HEAVY: whether floats, formulas of tensors, and operations in float64 or int64 are included.
    """
    tile = tiles + (first_tile + tl.program_id(0)).to(tl.int64) * TILE_COLUMNS
    job = jobs + tl.load(tile + TILE_JOB).to(tl.int64) * JOB_COLUMNS
    height = tl.load(job + HEIGHT).to(tl.int32)
    width = tl.load(job + WIDTH).to(tl.int32)
    rows = tl.load(tile + TILE_ROW) + tl.arange(0, BLOCK_Y)
    columns = tl.load(tile + TILE_COLUMN) + tl.arange(0, BLOCK_X)
    tail_begin = tl.load(job + TAIL_BEGIN).to(tl.int32)
    tail_end = tl.load(job + TAIL_END).to(tl.int32)

    y = tl.minimum(rows, height - 1)
    x = tl.minimum(columns, width - 1)
    y_left_at = tl.full((BLOCK_Y,), -1, tl.int32)
    x_left_at = tl.full((BLOCK_X,), -1, tl.int32)
    erased_at = tl.full((BLOCK_Y, BLOCK_X), -1, tl.int32)
    # The place in the pixels of a PASTE; a stage has at most one.
    pasted_y = tl.zeros((BLOCK_Y,), tl.int32)
    pasted_x = tl.zeros((BLOCK_X,), tl.int32)
    for step in range(tail_end - tail_begin):
        index = tail_end - 1 - step
        operation = operations + index * OPERATION_COLUMNS
        code = tl.load(operation)
        if (code == ERASE) | (code == PASTE):
            erased_at = tl.where(in_box(operation, x, y) & (erased_at < 0), index, erased_at)
            if code == PASTE:
                pasted_y, pasted_x = place_in_box(operation, x, y)
        if code <= REMAP:
            x, x_left_at = map_axis(code, operation, True, tables, index, x, x_left_at)
            y, y_left_at = map_axis(code, operation, False, tables, index, y, y_left_at)
    x = tl.where(x_left_at < 0, x, 0)
    y = tl.where(y_left_at < 0, y, 0)

    red = tl.zeros((BLOCK_Y, BLOCK_X), tl.float32)
    green = red
    blue = red
    view = load_view(workspace, tables, operations, job)
    top = tl.load(job + TOP).to(tl.float32)
    head = operations + tl.load(job + HEAD) * OPERATION_COLUMNS
    head_code = tl.load(head)
    if head_code == RESAMPLE_X:
        red, green, blue = filter_axis(view, head, tables, x, y, red, True, True, IS_HEAVY)
    elif head_code == RESAMPLE_Y:
        red, green, blue = filter_axis(view, head, tables, x, y, red, False, True, IS_HEAVY)
    elif head_code == AFFINE:
        red, green, blue = warp_fixed(view, head, x[None, :], y[:, None], IS_HEAVY)
    elif head_code == SHARPNESS:
        red, green, blue = sharpen(view, head, x[None, :], y[:, None], red, top, IS_HEAVY)
    elif head_code == 0:
        red, green, blue = fetch(view, x[None, :], y[:, None], IS_HEAVY)
    if IS_HEAVY:
        if head_code == FILTER_X:
            red, green, blue = filter_axis(view, head, tables, x, y, red, True, False, True)
        elif head_code == FILTER_Y:
            red, green, blue = filter_axis(view, head, tables, x, y, red, False, False, True)
            red, green, blue = as_filtered(red, top), as_filtered(green, top), as_filtered(blue, top)
        elif head_code == GRID:
            red, green, blue = sample_grid(view, head, tables, x[None, :], y[:, None], red, top)
        elif head_code == WARP:
            red, green, blue = warp_float(view, head, tables, x[None, :], y[:, None], red)
        elif head_code == BOX_BLUR:
            red, green, blue = box_blur(view, head, x[None, :], y[:, None], red)
        elif head_code == CONVOLUTION:
            red, green, blue = convolve(view, head, tables, x[None, :], y[:, None], red)

    left_at = tl.maximum(tl.maximum(x_left_at[None, :], y_left_at[:, None]), erased_at)
    if IS_HEAVY:  # loaded again, as below
        tail_begin = tl.load(job + TAIL_BEGIN, volatile=True).to(tl.int32)
        tail_end = tl.load(job + TAIL_END, volatile=True).to(tl.int32)
    for step in range(tail_end - tail_begin):
        index = tail_begin + step
        operation = operations + index * OPERATION_COLUMNS
        code = tl.load(operation)
        if (code == SHIFT) | (code == REMAP) | (code == ERASE):
            here = left_at == index
            red = tl.where(here, load_float(operation, FILL), red)
            green = tl.where(here, load_float(operation, FILL + 1), green)
            blue = tl.where(here, load_float(operation, FILL + 2), blue)
        elif code == PASTE:
            pixels = tables + tl.load(operation + PASTED)
            area = tl.load(operation + PASTED + 1)
            here = left_at == index
            place = tl.where(here, pasted_y[:, None] + pasted_x[None, :], 0)
            red = tl.where(here, load_float(pixels, place), red)
            green = tl.where(here, load_float(pixels + area, place), green)
            blue = tl.where(here, load_float(pixels + 2 * area, place), blue)
        elif code >= BRIGHTNESS:
            red, green, blue, top = apply_point(code, operation, tables, red, green, blue, top, IS_HEAVY)

    # Loaded again, because values that are kept take registers; `volatile` keeps the compiler from reusing them.
    rows = tl.load(tile + TILE_ROW, volatile=True) + tl.arange(0, BLOCK_Y)
    columns = tl.load(tile + TILE_COLUMN, volatile=True) + tl.arange(0, BLOCK_X)
    height = tl.load(job + HEIGHT, volatile=True).to(tl.int32)
    width = tl.load(job + WIDTH, volatile=True).to(tl.int32)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    color_inside = inside & (tl.load(job + CHANNELS).to(tl.int32) + tl.zeros_like(left_at) > 1)
    step = tl.load(job + TARGET_CHANNEL)
    target = (
        tl.load(job + TARGET)
        + rows[:, None] * tl.load(job + TARGET_ROW)
        + columns[None, :] * tl.load(job + TARGET_COLUMN)
    )
    target_kind = tl.load(job + TARGET_KIND)
    if target_kind == OUTPUT:
        store(output + target, step, red, green, blue, inside, color_inside)
    elif IS_HEAVY and target_kind == FLOATS:
        floats = workspace.to(tl.pointer_type(tl.float32))
        store(floats + target, step, red, green, blue, inside, color_inside)
    else:
        store(workspace + target, step, red, green, blue, inside, color_inside)


@triton.jit
def store(target, step, red, green, blue, inside, color_inside):
    """Stores three channels, or only the first one."""
    element: tl.constexpr = target.dtype.scalar.element_ty
    tl.store(target, as_element(red, element), mask=inside)
    tl.store(target + step, as_element(green, element), mask=color_inside)
    tl.store(target + 2 * step, as_element(blue, element), mask=color_inside)


# Warps of a program, and the maximum of registers per thread, at which nothing is spilled. An SM runs six programs of
# the light variant. In the heavy one a thread has half as many pixels, because a float64 takes two registers.
LIGHT_WARPS, LIGHT_REGISTERS = 4, 80
HEAVY_WARPS, HEAVY_REGISTERS = 8, 128
_light = Launcher(stage_kernel, LIGHT_WARPS, LIGHT_REGISTERS)
_heavy = Launcher(stage_kernel, HEAVY_WARPS, HEAVY_REGISTERS)


def run_stage(
    workspace: torch.Tensor,
    output: torch.Tensor,
    jobs: torch.Tensor,
    operations: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    *,
    begin: int,
    end: int,
    is_heavy: bool,
    rows_and_columns: tuple[int, int],
) -> None:
    """Launches one stage of all images whose tiles are in a range; the tensors are those of `stage_kernel`."""
    block_y, block_x = rows_and_columns
    tensors, constants = (workspace, output, jobs, operations, tables, tiles), {"BLOCK_Y": block_y, "BLOCK_X": block_x}
    (_heavy if is_heavy else _light)((end - begin,), tensors, (begin,), IS_HEAVY=is_heavy, **constants)
