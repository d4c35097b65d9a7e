"""How work is dealt out to lanes and programs, on a device and under the interpreter.

This module loads no kernel, so that a data worker can plan a batch.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple


class LaneShape(NamedTuple):
    """How the bits of JPEG files are dealt out to lanes."""

    bits: int  # of a lane; a power of two
    warm_up_bits: int  # how much earlier a lane begins
    rounds: int  # of corrections


class TileShape(NamedTuple):
    """How much of a JPEG file a program makes: of the inverse transform, blocks, and of the colors, pixels."""

    block_rows: int
    block_columns: int
    rows: int
    columns: int


# Long lanes waste less on synchronization, short ones fill a device with few images. The rounds suffice for 99 of 100
# photographs; the others are decoded elsewhere.
LANE_SHAPES = (LaneShape(1024, 512, 32), LaneShape(2048, 512, 16), LaneShape(4096, 1024, 8))
ENOUGH_LANES = 50_000
# The interpreter pays for the symbols that are decoded one after the other, not for lanes.
INTERPRETED_LANE_SHAPE = LaneShape(256, 512, 64)

# Larger tiles share more of what is computed once, and need more registers. Wide rather than square, because neighbors
# in memory are neighbors in a row.
TILE_SHAPE = TileShape(4, 8, 32, 64)
# The interpreter pays per operation, not per block or pixel.
INTERPRETED_TILE_SHAPE = TileShape(16, 32, 128, 128)

# Rows and columns of what a program makes of a stage.
STAGE_TILE = 8, 64
INTERPRETED_STAGE_TILE = 64, 256


def are_interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter, or would if it loaded them."""
    loaded = sys.modules.get(f"{__package__}.launching")
    return os.environ.get("TRITON_INTERPRET") == "1" if loaded is None else loaded.is_interpreted()


def choose_lane_shape(stream_bytes: int) -> LaneShape:
    """How to deal out a batch with so many bytes, stuffed or not."""
    if are_interpreted():
        return INTERPRETED_LANE_SHAPE
    fitting = [shape for shape in LANE_SHAPES if 8 * stream_bytes >= shape.bits * ENOUGH_LANES]
    return max(fitting, default=LANE_SHAPES[0])


def lane_count(segment_bytes: Any, lane_bits: int) -> Any:
    """Lanes of a segment, at least one, from its bytes before unstuffing; for numbers, arrays or tensors."""
    return 8 * segment_bytes // lane_bits + 1


def tile_shape() -> TileShape:
    """What a program makes of a JPEG file."""
    return INTERPRETED_TILE_SHAPE if are_interpreted() else TILE_SHAPE


def stage_tile() -> tuple[int, int]:
    """Rows and columns of what a program makes of a stage."""
    return INTERPRETED_STAGE_TILE if are_interpreted() else STAGE_TILE
