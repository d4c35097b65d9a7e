"""How the kernels are told what to do: columns of their rows and codes of operations, as plain integers.

A job is one stage of one image: where it reads, what its head does, which operations follow, where it writes. This
module imports no Triton, so that a data worker can plan a batch without loading a kernel.
"""

from __future__ import annotations

import enum
import functools

# Columns of a job, int64. Offsets and strides in the workspace count values of the kind that lies there.
# A job that reads a decoded image or writes to the batch is planned without their places: until the prologue has
# written these, SOURCE or TARGET is NAMED, and the next column holds the number of the image, or of the row.
SOURCE = 0  # offset of its input in the workspace
SOURCE_ROW = 1  # strides; the channel stride of a one-channel image is 0
SOURCE_COLUMN = 2
SOURCE_CHANNEL = 3
TARGET = 4  # offset of its output in the workspace, or in the batch
TARGET_ROW = 5
TARGET_COLUMN = 6
TARGET_CHANNEL = 7
HEIGHT = 8  # of its output
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
VIEW_FILL = 19  # row of the operation that holds it
SOURCE_KIND = 20  # BYTES, FLOATS or VALUED
SOURCE_VALUES = 21  # entry of the tables that turns VALUED bytes into floats
TARGET_KIND = 22  # BYTES, FLOATS or OUTPUT
TOP = 23  # largest value before its operations: 255, of bytes, or 1, of floats
HEAD = 24  # row of its head in the operations; row 0 is no head
TAIL_BEGIN = 25  # rows of its other operations
TAIL_END = 26
JOB_COLUMNS = 27

NAMED = -1  # in the place of an offset
# Columns of a place, int64: where pixel (0, 0) of a decoded image lies in the workspace, and strides, as of a job.
PLACE_COLUMNS = 4

# What lies in the workspace, or where a job writes.
BYTES = 0
FLOATS = 1
VALUED = 2  # bytes that are read as the floats of a table
OUTPUT = 2  # the batch

# Columns of an operation, int32: its code, then up to OPERATION_COLUMNS - 1 parameters. Floats lie there by their bits.
OPERATION_COLUMNS = 12
TABLE = 4  # entries where its tables begin; the next columns hold those of its further tables
PASTED = 5  # where those of a PASTE begin; the next column holds the pixels of its box
FILL = 7  # a float32 for each of three channels
FORMULA = 10  # whose formula, of those below
FACTOR = 11  # a float32
# Of maps, a column for each axis, x first.
OFFSET = 1  # input position = output position + offset; of FLIP, whether the axis is turned
MAP_SIZE = 3  # positions of the input
# Of ERASE and PASTE: the box that is written over.
BOX_LEFT = 1
BOX_TOP = 2
BOX_RIGHT = 3
BOX_BOTTOM = 4
# Of points.
VALUE = 1  # a float32: the weight of what is blended in, a threshold, a share, or the largest value that follows
POSTERIZE_STEP = 2  # a float32
CONTRAST_REST = 2  # a float32, the weight of the mean
GRAY_CHANNELS = 3  # of the image whose mean is taken
HUE_TURN = 1  # of 256
PERMUTED = 1  # three columns, the number of the channel that goes to each
MEAN = 1  # three columns, float32
DEVIATION = 4  # three columns, float32
# Of heads.
INPUT_WIDTH = 1
INPUT_HEIGHT = 2
AFFINE_MATRIX = 1  # six columns, 16.16
AFFINE_WIDTH = 10  # of the input
AFFINE_HEIGHT = 11
SMOOTHED_WEIGHT = 3  # of SHARPNESS, a float32
SAMPLING = 3  # the filter of a WARP, or of a GRID, where 0 is the nearest pixel
HAS_DEPTH = 5  # whether a WARP divides by a third coordinate
GRID_KIND = 6
KERNEL_SIZE = 3  # of CONVOLUTION: 3 or 5 weights a line
RADIUS = 3  # of BOX_BLUR, whole pixels
WHOLE_WEIGHT = 4  # of these, and of the two that the box covers in part: 8.24
PART_WEIGHT = 5
ACROSS = 6  # 1 and 0, or 0 and 1: the direction of the blur
DOWN = 7
BRANCHES = 1  # of MIX: how many rows follow it
BRANCH_JOB = 1  # of such a row: the job that wrote the branch
# Of one axis of a resize or a filter.
LAST_INPUT = 1  # the last position of the input
WEIGHT_STRIDE = 2  # output positions, for each of which every tap has a weight
TAP_COUNT = 3
FIRST_OUTPUT = 6  # the output position that is made first
FIRST_INPUT = 7  # the first position of the input that exists
WEIGHT_BITS = 8  # after the point of whole weights
MIRRORS = 8  # of floats: whether it is a blur, whose input is mirrored at the border

# Columns of a tile, int32.
TILE_JOB = 0
TILE_ROW = 1  # its first row and column
TILE_COLUMN = 2
TILE_COLUMNS = 3


class Kind(enum.IntEnum):
    """Operation codes: maps first, then points, then what looks values up in tables, then heads."""

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
    MIX = 35
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
        """Whether only the heavy variant of the kernel does it, whatever the formula."""
        heads = Kind.FILTER_X, Kind.FILTER_Y, Kind.GRID, Kind.WARP, Kind.BOX_BLUR, Kind.CONVOLUTION
        return self in (*heads, Kind.NORMALIZE, Kind.BLEND_MEAN)


class Formula(enum.IntEnum):
    """Whose arithmetic an operation follows: Pillow's, or that of torchvision's kernels for tensors."""

    PILLOW = 0
    TENSOR_V1 = 1
    TENSOR_V2 = 2


# Columns of what the prologue does, int32. WEIGHTS: of one axis of a resize; JOB: tiles and places of one job.
WORK = 0  # WEIGHTS or JOB
IN_SIZE = 1
OUT_SIZE = 2
TAPS = 3
FILTER = 4
FIRST_AT = 5  # entry of the tables where the first source position of each output position goes
WEIGHTS_AT = 6  # and the weights, [taps, output positions]
PRECISION = 7  # bits after the point of whole weights; 0: float32 as torch rounds them
TILED_JOB = 1
FIRST_TILE = 2
TILES_DOWN = 3
TILES_ACROSS = 4
READ_IMAGE = 5  # the decoded image that the job reads, or NAMED where it reads none
WRITTEN_ROW = 6  # the row of the batch that it writes, or NAMED
PROLOGUE_COLUMNS = 8
WEIGHTS = 0
JOB = 1

# Columns of a statistic, int32.
MEASURED_JOB = 0  # whose output it measures
STATISTIC = 1  # row of the operation whose table it makes
MEASURED_CHANNEL = 2
STATISTIC_COLUMNS = 4  # 16 bytes, so that those of each launch are aligned

# Filters; Pillow's numbers.
BILINEAR = 2
BICUBIC = 3
BOX = 4

# Kinds of grid.
MATRIX = 0
PERSPECTIVE = 1
DISPLACED = 2
NO_FILL = 0  # in the place of the formula by which a fill is worked into what is sampled
