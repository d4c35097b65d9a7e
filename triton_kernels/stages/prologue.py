"""The launch before the stages of batches: computes weights of resizes and tiles, and writes places into jobs.

Weights are those of Pillow's `precompute_coeffs`, in float64 and rounded to integers, or those of torch's antialiased
resize of floats, `_compute_indices_min_size_weights_aa`, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import Launcher
from ..pixels import fused
from ..program import (
    BICUBIC,
    BOX,
    FILTER,
    FIRST_AT,
    FIRST_TILE,
    IN_SIZE,
    JOB_COLUMNS,
    LAYOUT_CHANNEL,
    LAYOUT_COLUMN,
    LAYOUT_COLUMNS,
    LAYOUT_IMAGE,
    LAYOUT_OFFSET,
    LAYOUT_ROW,
    OUT_SIZE,
    PLACE_COLUMNS,
    PRECISION,
    PROLOGUE_COLUMNS,
    READ_IMAGE,
    SOURCE,
    TAPS,
    TARGET,
    TARGET_CHANNEL,
    TARGET_COLUMN,
    TARGET_ROW,
    TILE_COLUMN,
    TILE_COLUMNS,
    TILE_JOB,
    TILE_ROW,
    TILED_JOB,
    TILES_ACROSS,
    TILES_DOWN,
    WEIGHTS,
    WEIGHTS_AT,
    WORK,
    WRITTEN_BATCH,
    WRITTEN_ROW,
)


@triton.jit
def tap_weight(tap, center, first, count, inverse, KIND, IS_WHOLE: tl.constexpr):
    """The weight of one tap before the division by the sum, 0 after the last tap; of the dtype of `center`."""
    distance = (first + tap).to(center.dtype) - center
    offset = ((distance.to(tl.float64) + 0.5) * inverse.to(tl.float64)).to(center.dtype)
    x = tl.abs(offset)
    weight = tl.where(x < 1.0, 1.0 - x, 0.0)
    if KIND == BICUBIC:
        if IS_WHOLE:
            near = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1
            far = (((x - 5) * x + 8) * x - 4) * -0.5
        else:
            near = fused(fused(x, 1.5, -2.5) * x, x, 1.0)
            far = fused(fused(x - 5.0, x, 8.0), x, -4.0) * -0.5
        weight = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    if IS_WHOLE and KIND == BOX:
        weight = tl.where((offset > -0.5) & (offset <= 0.5), 1.0, 0.0).to(tl.float64)
    return tl.where(tap < count, weight, 0.0)


@triton.jit
def write_weights(row, tables, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the first source position of each output position, and the weights [taps, output positions], of one axis.

    With `IS_WHOLE` they are Pillow's integer weights, with the number of fractional bits in the row.
    """
    in_size = tl.load(row + IN_SIZE)
    out_size = tl.load(row + OUT_SIZE)
    taps = tl.load(row + TAPS)
    kind = tl.load(row + FILTER)
    unit = (1 << tl.load(row + PRECISION)).to(tl.float64)
    # A filter is wider if the image shrinks, but never narrower.
    if IS_WHOLE:
        scale = in_size.to(tl.float64) / out_size.to(tl.float64)
        stretch = tl.where(scale < 1.0, 1.0, scale)
        inverse = 1.0 / stretch
    else:
        scale = tl.div_rn(in_size.to(tl.float32), out_size.to(tl.float32))
        stretch = tl.maximum(scale, 1.0)
        inverse = tl.div_rn(stretch * 0.0 + 1.0, stretch)
    support = tl.where(kind == BICUBIC, 2.0, tl.where(kind == BOX, 0.5, 1.0)) * stretch
    for begin in range(0, out_size, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        here = position < out_size
        center = ((position.to(tl.float64) + 0.5) * scale.to(tl.float64)).to(scale.dtype)
        first = tl.maximum(((center - support).to(tl.float64) + 0.5).to(tl.int32), 0)
        count = tl.minimum(((center + support).to(tl.float64) + 0.5).to(tl.int32), in_size) - first
        total = tl.zeros_like(center)
        for tap in range(taps):
            total += tap_weight(tap, center, first, count, inverse, kind, IS_WHOLE)
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(tables + tl.load(row + FIRST_AT) + position, first, mask=here)
        for tap in range(taps):
            weight = tap_weight(tap, center, first, count, inverse, kind, IS_WHOLE)
            if IS_WHOLE:
                scaled = weight / total * unit
                entry = tl.where(scaled < 0.0, scaled - 0.5, scaled + 0.5).to(tl.int32)
            else:
                entry = tl.div_rn(weight, total).to(tl.int32, bitcast=True)
            tl.store(tables + tl.load(row + WEIGHTS_AT) + tap * out_size + position, entry, mask=here)


@triton.jit
def write_tiles(row, tiles, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr):
    """Writes job, first row and first column of each tile of one job."""
    across = tl.load(row + TILES_ACROSS)
    count = tl.load(row + TILES_DOWN) * across
    first = tiles + tl.load(row + FIRST_TILE).to(tl.int64) * TILE_COLUMNS
    job = tl.load(row + TILED_JOB)
    for begin in range(0, count, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        here = number < count
        tile = first + number * TILE_COLUMNS
        tl.store(tile + TILE_JOB, job + number * 0, mask=here)
        tl.store(tile + TILE_ROW, number // across * BLOCK_Y, mask=here)
        tl.store(tile + TILE_COLUMN, number % across * BLOCK_X, mask=here)


@triton.jit
def write_places(row, places, layouts, jobs):
    """Writes into one job the place of its decoded image, and that of its row of a batch."""
    job = jobs + tl.load(row + TILED_JOB).to(tl.int64) * JOB_COLUMNS
    image = tl.load(row + READ_IMAGE)
    if image >= 0:
        columns = tl.arange(0, PLACE_COLUMNS)
        tl.store(job + SOURCE + columns, tl.load(places + image.to(tl.int64) * PLACE_COLUMNS + columns))
    written = tl.load(row + WRITTEN_ROW)
    if written >= 0:
        layout = layouts + tl.load(row + WRITTEN_BATCH).to(tl.int64) * LAYOUT_COLUMNS
        first = tl.load(layout + LAYOUT_OFFSET)
        tl.store(job + TARGET, first + written.to(tl.int64) * tl.load(layout + LAYOUT_IMAGE))
        tl.store(job + TARGET_ROW, tl.load(layout + LAYOUT_ROW))
        tl.store(job + TARGET_COLUMN, tl.load(layout + LAYOUT_COLUMN))
        tl.store(job + TARGET_CHANNEL, tl.load(layout + LAYOUT_CHANNEL))


@triton.jit
def prologue_kernel(
    work, places, layouts, jobs, tables, tiles,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Does the work of one row of the prologue.

    Args:
        work: int32 [rows, PROLOGUE_COLUMNS].
        places: int64 [images, PLACE_COLUMNS], of the decoded images.
        layouts: int64 [batches, LAYOUT_COLUMNS].
        jobs: int64 [jobs, JOB_COLUMNS], completed.
        tables: int32 [entries], to which weights are written.
        tiles: int32 [tiles, 3], written.
    """
    row = work + tl.program_id(0) * PROLOGUE_COLUMNS
    if tl.load(row + WORK) != WEIGHTS:
        write_tiles(row, tiles, BLOCK_Y, BLOCK_X, BLOCK)
        write_places(row, places, layouts, jobs)
    elif tl.load(row + PRECISION) != 0:
        write_weights(row, tables, True, BLOCK)
    else:
        write_weights(row, tables, False, BLOCK)


PROLOGUE_BLOCK = 256
run_prologue = Launcher(prologue_kernel)
