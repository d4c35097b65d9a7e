"""How work is divided among lanes and programs, on a device and under Triton's interpreter.

This module loads no kernel, so that a data worker can plan a batch.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple


class LaneShape(NamedTuple):
    """How the bits of JPEG files are divided among lanes."""

    bits: int  # bits of a lane, a power of two
    warm_up_bits: int  # how many bits before its first one a lane begins to decode
    rounds: int  # rounds of corrections for all files at once; who needs more goes on while the others are written


class TileShape(NamedTuple):
    """The part of a JPEG file that one program makes: blocks in the inverse DCT, pixels in the colors."""

    block_rows: int
    block_columns: int
    rows: int
    columns: int


# Long lanes waste less on synchronization, short ones fill a device with few images. After the rounds nine photographs
# in ten have no wrong lane, and the others few: docs/inside/jpeg.md has the counts.
LANE_SHAPES = (LaneShape(1024, 512, 10), LaneShape(2048, 512, 5), LaneShape(4096, 1024, 3))
# Encoded bytes of a batch from which on each is chosen. The longest waste no less than the middle ones, so they are for
# batches that keep a large device busy all the same: about 130,000 lanes. `make gpu` times all three.
LEAST_BYTES = (0, 50_000 * 2048 // 8, 130_000 * 4096 // 8)
# The interpreter takes time for each symbol of a lane, whatever the number of lanes.
INTERPRETED_LANE_SHAPE = LaneShape(256, 512, 64)

# Larger tiles compute less twice and need more registers. They are wide, because rows are contiguous in memory.
TILE_SHAPE = TileShape(4, 8, 32, 64)
# The interpreter takes time for each operation, whatever the number of blocks or pixels.
INTERPRETED_TILE_SHAPE = TileShape(16, 32, 128, 128)

# Rows and columns of the tile that a program of the stage kernel makes.
STAGE_TILE = 8, 64
INTERPRETED_STAGE_TILE = 64, 256


def are_interpreted() -> bool:
    """Whether kernels of this process run in Triton's interpreter, or will once they are loaded."""
    loaded = sys.modules.get(f"{__package__}.launching")
    return os.environ.get("TRITON_INTERPRET") == "1" if loaded is None else loaded.is_interpreted()


def choose_lane_shape(stream_bytes: int) -> LaneShape:
    """Choose the lanes for a batch with so many bytes, stuffed or not."""
    if are_interpreted():
        return INTERPRETED_LANE_SHAPE
    return [shape for shape, least in zip(LANE_SHAPES, LEAST_BYTES, strict=True) if stream_bytes >= least][-1]


def lane_count(segment_bytes: Any, lane_bits: int) -> Any:
    """The number of lanes, at least one, of a segment with so many stuffed bytes; takes numbers, arrays or tensors."""
    return 8 * segment_bytes // lane_bits + 1


def tile_shape() -> TileShape:
    """The part of a JPEG file that one program makes in this process."""
    return INTERPRETED_TILE_SHAPE if are_interpreted() else TILE_SHAPE


def stage_tile() -> tuple[int, int]:
    """Rows and columns of the tile of the stage kernel in this process."""
    return INTERPRETED_STAGE_TILE if are_interpreted() else STAGE_TILE
