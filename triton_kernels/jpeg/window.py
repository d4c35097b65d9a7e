"""Which part of each image the pixel kernels make, its window, and the tiles that it is dealt out in.

A window is the rectangle of whole MCUs that a box of pixels needs: the box, and the chroma samples next to it that
upsampling reads. Inverse transforms run for its blocks only. What they give lies in planes of one byte a sample: the
luma plane of the window row by row, then those of Cb and Cr, each as large as its blocks.

A program makes a tile, a rectangle: of the inverse transform, blocks of one plane, counted plane by plane and row by
row; of the pixels, those that the box touches of a grid in the window, row by row. Tiles are numbered through all
windows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .layout import IMAGE_COLUMNS, MCUS_ACROSS, MCUS_DOWN, SAMPLING_H, SAMPLING_V, WINDOW_COLUMNS


class TileShape(NamedTuple):
    """How much a program makes.

    Attributes:
        block_rows: of the inverse transform.
        block_columns: of the inverse transform.
        rows: of pixels.
        columns: of pixels.
    """

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


@triton.jit
def window_of(number, images, windows):
    """Pointers to an image's row and its window's row, the window's MCUs across and down, the luma's factors likewise.

    Args:
        number: of the image.
        images: int32 [images, IMAGE_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
    """
    image = images + number * IMAGE_COLUMNS
    window = windows + number * WINDOW_COLUMNS
    across, down = tl.load(window + MCUS_ACROSS), tl.load(window + MCUS_DOWN)
    return image, window, across, down, tl.load(image + SAMPLING_H), tl.load(image + SAMPLING_V)
