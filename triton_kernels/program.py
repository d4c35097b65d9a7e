"""The tables that describe a batch to the stage kernel: columns of a job, codes and columns of an operation.

A job is one image in one launch: where it reads, what its head does, which operations follow, where it writes.
"""

from __future__ import annotations

import triton.language as tl

# Columns of a job, int64.
# Positions in the workspace count bytes, or float32 values between BLUR_X and BLUR_Y.
SOURCE = tl.constexpr(0)  # offset of its input in the workspace
SOURCE_ROW = tl.constexpr(1)  # strides; the channel stride of a one-channel image is 0
SOURCE_COLUMN = tl.constexpr(2)
SOURCE_CHANNEL = tl.constexpr(3)
TARGET = tl.constexpr(4)  # offset of its output in the workspace, or elements in the batch
TARGET_ROW = tl.constexpr(5)
TARGET_COLUMN = tl.constexpr(6)
TARGET_CHANNEL = tl.constexpr(7)
HEIGHT = tl.constexpr(8)  # of its output
WIDTH = tl.constexpr(9)
CHANNELS = tl.constexpr(10)
VIEW_X_STEP = tl.constexpr(11)  # input column = step * x + offset for begin <= x < end, else the view's fill
VIEW_X_OFFSET = tl.constexpr(12)
VIEW_X_BEGIN = tl.constexpr(13)
VIEW_X_END = tl.constexpr(14)
VIEW_Y_STEP = tl.constexpr(15)
VIEW_Y_OFFSET = tl.constexpr(16)
VIEW_Y_BEGIN = tl.constexpr(17)
VIEW_Y_END = tl.constexpr(18)
VIEW_FILL = tl.constexpr(19)
HEAD = tl.constexpr(20)  # row of its head in the operations, or -1
TAIL_BEGIN = tl.constexpr(21)  # rows of its other operations
TAIL_END = tl.constexpr(22)
HISTOGRAM_READ = tl.constexpr(23)  # index of the histogram of its input, or -1
HISTOGRAM_WRITTEN = tl.constexpr(24)  # index of the histogram of its output, or -1
VALUE_TABLE = tl.constexpr(25)  # index of the table that turns uint8 into floats
FROM_BYTES = tl.constexpr(26)  # float stages: 1 where the input is uint8 and read through the table, else 0
STATISTIC = tl.constexpr(27)  # float stages: row of the operation whose statistic this job gathers, or -1
HISTOGRAM_FORMULA = tl.constexpr(28)  # uint8 stages: whose gray values the histogram that it writes counts
TABLES_WRITTEN = tl.constexpr(29)  # uint8 stages: the record for the tables made of the histogram that it reads
JOB_COLUMNS = tl.constexpr(30)

# Columns of an operation, int32: its code, then up to OPERATION_COLUMNS - 1 parameters.
OPERATION_COLUMNS = tl.constexpr(12)
FORMULA = tl.constexpr(10)  # whose formula, of those below
FACTOR = tl.constexpr(11)  # a float32

# Operation codes. Maps, then points, then statistics, then heads.
SHIFT = tl.constexpr(1)
FLIP = tl.constexpr(2)
EDGE = tl.constexpr(3)
REFLECT = tl.constexpr(4)
SYMMETRIC = tl.constexpr(5)
REMAP = tl.constexpr(6)
ERASE = tl.constexpr(7)
PASTE = tl.constexpr(8)
BRIGHTNESS = tl.constexpr(10)
SATURATION = tl.constexpr(11)
INVERT = tl.constexpr(12)
POSTERIZE = tl.constexpr(13)
SOLARIZE = tl.constexpr(14)
GRAY = tl.constexpr(15)
HUE = tl.constexpr(16)
LOOKUP = tl.constexpr(17)
PERMUTE = tl.constexpr(18)
CONTRAST = tl.constexpr(20)
AUTOCONTRAST = tl.constexpr(21)
EQUALIZE = tl.constexpr(22)
RESAMPLE_X = tl.constexpr(31)
RESAMPLE_Y = tl.constexpr(32)
AFFINE = tl.constexpr(33)
SHARPNESS = tl.constexpr(34)
WARP = tl.constexpr(35)
BLUR = tl.constexpr(40)
BLUR_X = tl.constexpr(41)
BLUR_Y = tl.constexpr(42)
RESIZE_X = tl.constexpr(44)
RESIZE_Y = tl.constexpr(45)
MIX = tl.constexpr(46)
BOX_BLUR = tl.constexpr(47)
GRID = tl.constexpr(43)

# Whose formulas an operation uses: Pillow's, or those of torchvision's kernels for tensors, v1 or v2.
PILLOW = tl.constexpr(0)
TENSOR_V1 = tl.constexpr(1)
TENSOR_V2 = tl.constexpr(2)

# Parts of the record of one image whose histogram is needed, int32: four histograms, then three tables.
LUMINANCE = tl.constexpr(3 * 256)
TABLES = tl.constexpr(4 * 256)
RECORD_ENTRIES = tl.constexpr(7 * 256)

# Filters that the kernel computes itself; Pillow's numbers.
LANCZOS = tl.constexpr(1)
BILINEAR = tl.constexpr(2)
BICUBIC = tl.constexpr(3)
BOX = tl.constexpr(4)
FROM_TABLE = tl.constexpr(-1)

# Kinds of grid, and how the fill is worked into what is sampled; an affine grid is 0.
PERSPECTIVE = tl.constexpr(1)
DISPLACED = tl.constexpr(2)
NO_FILL = tl.constexpr(0)
FILL_V2 = tl.constexpr(2)
