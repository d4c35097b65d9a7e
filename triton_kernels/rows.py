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
PASTED = 5  # where those of a PASTE begin
FILL = 7  # a float32 for each of three channels
FORMULA = 10  # whose formula, of those below
FACTOR = 11  # a float32


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
