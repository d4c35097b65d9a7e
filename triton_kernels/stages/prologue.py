"""What the stages need to be made first, in one launch: weights of resizes, and which tile each program makes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..options import compiler_options
from ..pillow.weights import write_whole_weights
from ..program import (
    FIRST_TILE,
    PRECISION,
    PROLOGUE_COLUMNS,
    TILED_JOB,
    TILES_ACROSS,
    TILES_DOWN,
    WEIGHTS,
    WORK,
)
from ..tensor.weights import write_float_weights


@triton.jit
def write_tiles(row, tiles, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr):
    """Writes job, first row and first column of each tile of one job."""
    across = tl.load(row + TILES_ACROSS)
    count = tl.load(row + TILES_DOWN) * across
    first = tiles + tl.load(row + FIRST_TILE).to(tl.int64) * 3
    job = tl.load(row + TILED_JOB)
    for begin in range(0, count, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        here = number < count
        tl.store(first + number * 3, job + number * 0, mask=here)
        tl.store(first + number * 3 + 1, number // across * BLOCK_Y, mask=here)
        tl.store(first + number * 3 + 2, number % across * BLOCK_X, mask=here)


@triton.jit
def prologue_kernel(
    work, tables, tiles,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Does the work of one row.

    Args:
        work: int32 [rows, PROLOGUE_COLUMNS].
        tables: int32 [entries], written where rows of resizes say.
        tiles: int32 [tiles, 3], written.
    """
    row = work + tl.program_id(0) * PROLOGUE_COLUMNS
    if tl.load(row + WORK) != WEIGHTS:
        write_tiles(row, tiles, BLOCK_Y, BLOCK_X, BLOCK)
    elif tl.load(row + PRECISION) != 0:
        write_whole_weights(row, tables, BLOCK)
    else:
        write_float_weights(row, tables, BLOCK)


PROLOGUE_BLOCK = 256


def run_prologue(
    work: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, rows_and_columns: tuple[int, int]
) -> None:
    """Launches the prologue of a batch; the arguments are those of `prologue_kernel`."""
    block_y, block_x = rows_and_columns
    prologue_kernel[(len(work),)](
        work, tables, tiles, BLOCK_Y=block_y, BLOCK_X=block_x, BLOCK=PROLOGUE_BLOCK, **compiler_options()
    )
