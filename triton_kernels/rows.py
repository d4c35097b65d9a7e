"""The tables that tell the stage kernels what to do: columns and operation codes, as plain integers.

A job is one stage of one image: where it reads, its head, the operations that follow, and where it writes. This
module imports no Triton, so that a data worker can plan a batch without loading a kernel.
"""

from __future__ import annotations

import enum
import functools

# Columns of a job, int64. Offsets and strides in the workspace count values, bytes or floats.
# A job that reads a decoded image or writes to a batch is planned without addresses: until the prologue writes them,
# SOURCE or TARGET is NAMED. The next column then holds the number of the image, or the next two hold the batch's row
# and the number of the batch.
SOURCE = 0  # offset of the input in the workspace
SOURCE_ROW = 1  # strides; the channel stride of a one-channel image is 0
SOURCE_COLUMN = 2
SOURCE_CHANNEL = 3
TARGET = 4  # offset of the output in the workspace, or from the first value of the launch's first batch
TARGET_ROW = 5
TARGET_COLUMN = 6
TARGET_CHANNEL = 7
HEIGHT = 8  # size of the output
WIDTH = 9
CHANNELS = 10
VIEW_X_STEP = 11  # input column = step * x + offset for begin <= x < end, else the view's fill
VIEW_X_OFFSET = 12
VIEW_X_BEGIN = 13
VIEW_X_END = 14
VIEW_Y_STEP = 15
VIEW_Y_OFFSET = 16
VIEW_Y_BEGIN = 17
VIEW_Y_END = 18
VIEW_FILL = 19  # row of the operation that holds the fill
SOURCE_KIND = 20  # BYTES, FLOATS or VALUED
SOURCE_VALUES = 21  # first entry of the table that maps VALUED bytes to floats
TARGET_KIND = 22  # BYTES, FLOATS or OUTPUT
TOP = 23  # largest value before the operations: 255 for bytes, 1 for floats
HEAD = 24  # row of the head in the operations; 0 for no head
TAIL_BEGIN = 25  # rows of the other operations
TAIL_END = 26
JOB_COLUMNS = 27

NAMED = -1  # stored in the place of an offset
# Columns of a place, int64: offset of pixel (0, 0) of a decoded image in the workspace, and strides, as in a job.
PLACE_COLUMNS = 4

# Columns of a layout, int64: where a batch [N, C, H, W] lies, and its strides, in elements.
LAYOUT_OFFSET = 0  # from the first value of the launch's first batch
LAYOUT_IMAGE = 1
LAYOUT_CHANNEL = 2
LAYOUT_ROW = 3
LAYOUT_COLUMN = 4
LAYOUT_COLUMNS = 5

# The kind of values in the workspace, or of the output of a job.
BYTES = 0
FLOATS = 1
VALUED = 2  # bytes that a table maps to floats
OUTPUT = 2  # written to a batch

# Columns of an operation, int32: its code, then up to OPERATION_COLUMNS - 1 parameters. Floats are stored as bits.
OPERATION_COLUMNS = 12
TABLE = 4  # first entry of its table; the next columns are for further tables
PASTED = 5  # first entry of the pixels of a PASTE; the next column holds their number
FILL = 7  # three columns, float32, one for each channel
FORMULA = 10  # one of `Formula`
FACTOR = 11  # a float32
# Columns of maps; each is followed by the one for y.
OFFSET = 1  # input position = output position + offset; for FLIP, whether the axis is flipped
MAP_SIZE = 3  # size of the input
# Columns of ERASE and PASTE: the box that is overwritten.
BOX_LEFT = 1
BOX_TOP = 2
BOX_RIGHT = 3
BOX_BOTTOM = 4
# Columns of points.
VALUE = 1  # a float32: weight of a blend, threshold, share, or the new largest value
POSTERIZE_STEP = 2  # a float32
CONTRAST_REST = 2  # a float32, the weight of the mean
GRAY_CHANNELS = 3  # channels of the image whose mean is computed
HUE_TURN = 1  # in 256ths of a turn
PERMUTED = 1  # three columns, the input channel of each output channel
MEAN = 1  # three columns, float32
DEVIATION = 4  # three columns, float32
# Columns of heads.
INPUT_WIDTH = 1
INPUT_HEIGHT = 2
AFFINE_MATRIX = 1  # six columns, 16.16 fixed point
AFFINE_WIDTH = 10  # size of the input
AFFINE_HEIGHT = 11
SMOOTHED_WEIGHT = 3  # for SHARPNESS, a float32
SAMPLING = 3  # filter of a WARP or GRID; 0 is nearest for a GRID
HAS_DEPTH = 5  # whether a WARP divides by a third coordinate
GRID_KIND = 6
KERNEL_SIZE = 3  # for CONVOLUTION: 3 or 5 weights per line
RADIUS = 3  # for BOX_BLUR, in whole pixels
WHOLE_WEIGHT = 4  # weight of these, and of the two partly covered pixels, in 8.24 fixed point
PART_WEIGHT = 5
ACROSS = 6  # ACROSS and DOWN are the direction of the blur: 1 and 0, or 0 and 1
DOWN = 7
# Columns of one axis of a resize or a filter.
LAST_INPUT = 1  # the last position of the input
WEIGHT_STRIDE = 2  # number of output positions, the stride between the taps of the weights
TAP_COUNT = 3
FIRST_OUTPUT = 6  # first output position
FIRST_INPUT = 7  # first position of the input
WEIGHT_BITS = 8  # fractional bits of integer weights
MIRRORS = 8  # for floats: whether it is a blur, which mirrors the input at the border

# Columns of a tile, int32.
TILE_JOB = 0
TILE_ROW = 1  # first row and column
TILE_COLUMN = 2
TILE_COLUMNS = 3


class Kind(enum.IntEnum):
    """Operation codes: maps, points, lookups in tables, and heads, in this order."""

    SHIFT = 1
    FLIP = 2
    EDGE = 3
    REFLECT = 4
    SYMMETRIC = 5
    REMAP = 6
    ERASE = 7
    PASTE = 8
    BRIGHTNESS = 10
    SATURATION = 11
    INVERT = 12
    POSTERIZE = 13
    SOLARIZE = 14
    GRAY = 15
    HUE = 16
    PERMUTE = 17
    NORMALIZE = 18
    LOOKUP = 21
    VALUES = 22
    CONTRAST = 23
    AUTOCONTRAST = 24
    EQUALIZE = 25
    BLEND_MEAN = 26
    RESAMPLE_X = 31
    RESAMPLE_Y = 32
    AFFINE = 33
    SHARPNESS = 34
    FILTER_X = 40
    FILTER_Y = 41
    GRID = 42
    WARP = 43
    BOX_BLUR = 44
    CONVOLUTION = 45

    @functools.cached_property
    def role(self) -> str:
        """ "map", "point", "statistic" or "gather"."""
        return "map" if self < 10 else "point" if self < 23 else "statistic" if self < 30 else "gather"

    @functools.cached_property
    def is_heavy(self) -> bool:
        """Whether the operation needs the heavy variant of the kernel, whatever its formula."""
        heads = Kind.FILTER_X, Kind.FILTER_Y, Kind.GRID, Kind.WARP, Kind.BOX_BLUR, Kind.CONVOLUTION
        return self in (*heads, Kind.NORMALIZE, Kind.BLEND_MEAN)


class Formula(enum.IntEnum):
    """The arithmetic of an operation: Pillow's, or that of torchvision's v1 or v2 kernels for tensors."""

    PILLOW = 0
    TENSOR_V1 = 1
    TENSOR_V2 = 2


# Columns of the work of the prologue, int32: WEIGHTS of one axis of a resize, or tiles and places of one JOB.
WORK = 0  # WEIGHTS or JOB
IN_SIZE = 1
OUT_SIZE = 2
TAPS = 3
FILTER = 4
FIRST_AT = 5  # first entry of the table for the first source position of each output position
WEIGHTS_AT = 6  # first entry of the weights, [taps, output positions]
PRECISION = 7  # fractional bits of integer weights; 0 for float32 weights, rounded as by torch
TILED_JOB = 1
FIRST_TILE = 2
TILES_DOWN = 3
TILES_ACROSS = 4
READ_IMAGE = 5  # number of the decoded image that the job reads, or NAMED for none
WRITTEN_ROW = 6  # row of the batch that the job writes, or NAMED for none
WRITTEN_BATCH = 7  # number of that batch
PROLOGUE_COLUMNS = 8
WEIGHTS = 0
JOB = 1

# Columns of a statistic, int32.
MEASURED_JOB = 0  # job whose output is measured
STATISTIC = 1  # row of the operation that gets the table
MEASURED_CHANNEL = 2
STATISTIC_COLUMNS = 4  # 16 bytes, so that the rows of each launch are aligned

# Filters, with Pillow's numbers.
BILINEAR = 2
BICUBIC = 3
BOX = 4

# Kinds of grid.
MATRIX = 0
PERSPECTIVE = 1
DISPLACED = 2
NO_FILL = 0  # stored in the place of the formula for fills
