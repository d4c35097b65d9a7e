"""The tables that say which part of each image the pixel kernels make: columns of a window, and of a tile.

A window is the rectangle of whole MCUs that a box of pixels needs: the box, and the chroma samples next to it that
upsampling reads. Inverse transforms run for its blocks only. What they give lies in planes of one byte a sample: the
luma plane of the window row by row, then those of Cb and Cr, each as large as its blocks.

All tables may have more rows than the batch needs; a padding row of tiles has TILE_IMAGE -1.
"""

from __future__ import annotations

import triton.language as tl

# Columns of a window, int64.
MCU_LEFT = tl.constexpr(0)  # its first MCU in the image
MCU_TOP = tl.constexpr(1)
MCUS_ACROSS = tl.constexpr(2)
MCUS_DOWN = tl.constexpr(3)
PLANES = tl.constexpr(4)  # where its planes begin, in units of 64 bytes
PIXELS = tl.constexpr(5)  # where the pixels of the box begin, in bytes: [channels, box height, box width]
BOX_LEFT = tl.constexpr(6)  # the box, in pixels of the image
BOX_TOP = tl.constexpr(7)
BOX_WIDTH = tl.constexpr(8)
BOX_HEIGHT = tl.constexpr(9)
CHANNELS = tl.constexpr(10)  # that are wanted: 3 for RGB, 1 for gray
WINDOW_COLUMNS = tl.constexpr(11)

# Columns of a tile, int32. A tile of the inverse transform is a run of blocks: TILE_ROW is the first of them, counted
# MCU by MCU through the window. A tile of the colour kernel is a rectangle: its first row and column in the window.
TILE_IMAGE = tl.constexpr(0)
TILE_ROW = tl.constexpr(1)
TILE_COLUMN = tl.constexpr(2)
TILE_COLUMNS = tl.constexpr(3)
