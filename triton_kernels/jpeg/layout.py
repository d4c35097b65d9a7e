"""The tables that describe a batch of JPEG files to the kernels: columns, order of blocks, bits of the status.

All tables may have more rows than the batch needs, so that a captured graph serves every batch that fits. Such padding
rows are zero.

Blocks stand in the order of the scan: block = FIRST_BLOCK of the image + UNITS * number of the MCU + unit in the MCU.
The units of an MCU are its luma blocks row by row, then Cb, then Cr. The coefficients of a block are int16 [64] in
zigzag order.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

# Columns of an image, int32.
WIDTH = tl.constexpr(0)  # pixels
HEIGHT = tl.constexpr(1)
COMPONENTS = tl.constexpr(2)  # 1 or 3
SAMPLING_H = tl.constexpr(3)  # luma blocks of an MCU across and down; chroma has one, and so has a gray image
SAMPLING_V = tl.constexpr(4)
MCUS_PER_ROW = tl.constexpr(5)
MCU_ROWS = tl.constexpr(6)
UNITS = tl.constexpr(7)  # blocks of an MCU
FIRST_BLOCK = tl.constexpr(8)  # row in the coefficients
BLOCKS = tl.constexpr(9)  # all MCUs are whole
FIRST_SEGMENT = tl.constexpr(10)
SEGMENTS = tl.constexpr(11)
QUANTIZATION = tl.constexpr(12)  # three columns, one a component: row in the quantization tables, int32 [rows, 64]
DC_TABLE = tl.constexpr(15)  # three columns: row in the Huffman tables
AC_TABLE = tl.constexpr(18)  # three columns
IMAGE_COLUMNS = tl.constexpr(21)

# Columns of a segment, int32: what lies between two restart markers, or the whole scan where there are none.
# Its bytes start at a multiple of 16 in the stream and are followed by at least 16 zeros; they are still stuffed.
SEGMENT_IMAGE = tl.constexpr(0)
FIRST_BYTE = tl.constexpr(1)
BYTES = tl.constexpr(2)
SEGMENT_FIRST_BLOCK = tl.constexpr(3)
SEGMENT_BLOCKS = tl.constexpr(4)
FIRST_LANE = tl.constexpr(5)
LANES = tl.constexpr(6)  # `lane_count`
SEGMENT_COLUMNS = tl.constexpr(7)

# Columns of a Huffman table, uint8: how many codes have 1 ... 16 bits, the symbols in the order of their codes, and
# 0 where it is a table for DC, 1 where it is one for AC.
CODE_COUNTS = tl.constexpr(0)
SYMBOLS = tl.constexpr(16)
TABLE_CLASS = tl.constexpr(272)
HUFFMAN_COLUMNS = tl.constexpr(273)

# Bits of an image's status, int32; 0 where its pixels are those of libjpeg. A cheap test may fail for a file that
# libjpeg reads without complaint, never the other way round.
FOREIGN_MARKER = tl.constexpr(1)  # 0xFF and anything but 0x00 inside a segment
UNUSED_CODE = tl.constexpr(2)  # bits that no code begins with, or a table that is no Huffman table
RUN_TOO_LONG = tl.constexpr(4)  # a coefficient after the 64th
DATA_MISSING = tl.constexpr(8)  # fewer blocks than the header says
DATA_LEFT = tl.constexpr(16)  # a whole byte or more after the last block
NOT_CONVERGED = tl.constexpr(32)  # the lanes did not agree after the last round
OUT_OF_RANGE = tl.constexpr(64)  # a coefficient that 16 bits do not hold once it is dequantized


def lane_count(segment_bytes: Any, lane_bits: int) -> Any:
    """Lanes of a segment, at least one, from its bytes before unstuffing; for numbers, arrays or tensors.

    A lane decodes the symbols that start within `lane_bits` bits.
    """
    return 8 * segment_bytes // lane_bits + 1
