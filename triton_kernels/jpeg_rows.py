"""The tables that describe a batch of JPEG files to the kernels: their columns and status bits, as plain integers.

Blocks are stored in the order of the scan: block = FIRST_BLOCK of the image + UNITS * number of the MCU + unit in the
MCU. The units of an MCU are its luma blocks row by row, then Cb, then Cr. The coefficients of a block are int16 [64] in
zigzag order.

A lane of a segment decodes the symbols that start within its `lane_bits` bits.

A window is the rectangle of whole MCUs that a box of pixels needs: the box, and the chroma samples next to it that
upsampling reads. Only the blocks of windows are transformed. Their samples are stored in planes of one byte per sample:
the luma plane of the window row by row, then those of Cb and Cr, each with the size of its blocks.

A program makes a tile. A tile of the inverse DCT has blocks of one plane; tiles are numbered plane by plane and row by
row. Tiles of pixels are those of a grid over the window that the box touches, row by row. Numbers continue through all
windows.

This module imports nothing, so that a data worker can lay files out without loading a kernel.
"""

# Columns of an image, int32.
WIDTH = 0  # pixels
HEIGHT = 1
COMPONENTS = 2  # 1 or 3
SAMPLING_H = 3  # luma blocks of an MCU across and down; 1 for a gray image, as for chroma
SAMPLING_V = 4
MCUS_PER_ROW = 5
UNITS = 6  # blocks of an MCU
FIRST_BLOCK = 7  # row of the first block in the coefficients; MCUs are stored whole
QUANTIZATION = 8  # three columns, one per component: row in the quantization tables, int32 [rows, 64]
DC_TABLE = 11  # three columns: row in the Huffman tables
AC_TABLE = 14  # three columns
IMAGE_COLUMNS = 17

# Columns of a segment, int32: the bytes between two restart markers, or the whole scan without markers.
# The bytes are stuffed. They start at a multiple of 16 in the stream, and at least 64 bytes lie between the end of a
# segment and the next one, with any content, so that whole vectors can be loaded there.
SEGMENT_IMAGE = 0
FIRST_BYTE = 1
BYTES = 2
SEGMENT_FIRST_BLOCK = 3
SEGMENT_BLOCKS = 4
FIRST_LANE = 5
LANES = 6  # `lane_count`
SEGMENT_COLUMNS = 7

# Columns of a Huffman table, uint8: the numbers of codes with 1 to 16 bits, the symbols in the order of their codes,
# and 0 for a table for DC, 1 for one for AC.
CODE_COUNTS = 0
SYMBOLS = 16
TABLE_CLASS = 272
HUFFMAN_COLUMNS = 273

# Columns of a window, int32.
MCU_LEFT = 0  # its first MCU in the image
MCU_TOP = 1
MCUS_ACROSS = 2
MCUS_DOWN = 3
PLANES = 4  # offset of the planes, in units of 64 bytes
PIXELS = 5  # offset of the pixels [channels, box height, box width], in units of 16 bytes
BOX_LEFT = 6  # the box, in pixels of the image
BOX_TOP = 7
BOX_WIDTH = 8
BOX_HEIGHT = 9
CHANNELS = 10  # channels of the result: 3 for RGB, 1 for gray
FIRST_BLOCK_TILE = 11  # tiles of the inverse DCT
BLOCK_TILES = 12
FIRST_PIXEL_TILE = 13
PIXEL_TILES = 14
WINDOW_COLUMNS = 15

PLANES_UNIT = 64  # the samples of a block
PIXELS_UNIT = 16

# Bits of an image's status, int32; 0 if its pixels are those of libjpeg. The checks may report a file that libjpeg
# reads without an error, but never miss one that it does not.
FOREIGN_MARKER = 1  # 0xFF and anything but 0x00 inside a segment
UNUSED_CODE = 2  # bits without a code, or an invalid Huffman table
RUN_TOO_LONG = 4  # more than 64 coefficients in a block
DATA_MISSING = 8  # fewer blocks than the header says
DATA_LEFT = 16  # at least a whole byte after the last block
NOT_CONVERGED = 32  # a lane with a wrong entry, which only a fault of the kernels leaves
