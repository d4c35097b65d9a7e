"""How a batch is laid out: the integers of `rows.py` as compile-time constants, lanes, windows and tiles.

A lane of a segment decodes the symbols that start within its `lane_bits` bits.

A window is the rectangle of whole MCUs that a box of pixels needs: the box, and the chroma samples next to it that
upsampling reads. Inverse transforms run for its blocks only. What they give lies in planes of one byte a sample: the
luma plane of the window row by row, then those of Cb and Cr, each as large as its blocks.

A program makes a tile, a rectangle: of the inverse transform, blocks of one plane, counted plane by plane and row by
row; of the pixels, those that the box touches of a grid in the window, row by row. Tiles are numbered through all
windows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from . import rows

globals().update({name: tl.constexpr(value) for name, value in vars(rows).items() if name.isupper()})


def lane_count(segment_bytes: Any, lane_bits: int) -> Any:
    """Lanes of a segment, at least one, from its bytes before unstuffing; for numbers, arrays or tensors."""
    return 8 * segment_bytes // lane_bits + 1


class TileShape(NamedTuple):
    """How much a program makes: of the inverse transform, blocks, and of the colors, pixels."""

    block_rows: int
    block_columns: int
    rows: int
    columns: int


# Larger tiles share more of what is computed once, and need more registers. Wide rather than square, because neighbors
# in memory are neighbors in a row.
TILE_SHAPE = TileShape(4, 8, 32, 64)
# The interpreter pays per operation, not per block or pixel.
INTERPRETED_TILE_SHAPE = TileShape(16, 32, 128, 128)


def tile_shape(*, interpreted: bool) -> TileShape:
    """How much a program makes on a device, or under the interpreter."""
    return INTERPRETED_TILE_SHAPE if interpreted else TILE_SHAPE
