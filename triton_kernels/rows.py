"""How the stage kernels are told what to do: columns of a job, codes and columns of an operation, as plain integers.

A job is one image in one launch: where it reads, what its head does, which operations follow, where it writes. This
module imports nothing, so that a data worker can plan a batch without loading a kernel.
"""

# Columns of a job, int64 on the device.
# Positions in the workspace count bytes, or float32 values between BLUR_X and BLUR_Y.
SOURCE = 0  # offset of its input in the workspace
SOURCE_ROW = 1  # strides; the channel stride of a one-channel image is 0
SOURCE_COLUMN = 2
SOURCE_CHANNEL = 3
TARGET = 4  # offset of its output in the workspace, or elements in the batch
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
VIEW_FILL = 19
HEAD = 20  # row of its head in the operations, or -1
TAIL_BEGIN = 21  # rows of its other operations
TAIL_END = 22
HISTOGRAM_READ = 23  # index of the histogram of its input, or -1
HISTOGRAM_WRITTEN = 24  # index of the histogram of its output, or -1
VALUE_TABLE = 25  # index of the table that turns uint8 into floats
FROM_BYTES = 26  # float stages: 1 where the input is uint8 and read through the table, else 0
STATISTIC = 27  # float stages: row of the operation whose statistic this job gathers, or -1
HISTOGRAM_FORMULA = 28  # uint8 stages: whose gray values the histogram that it writes counts
TABLES_WRITTEN = 29  # uint8 stages: the record for the tables made of the histogram that it reads
JOB_COLUMNS = 30

# Columns of an operation, int32: its code, then up to OPERATION_COLUMNS - 1 parameters.
OPERATION_COLUMNS = 12
FORMULA = 10  # whose formula, of those below
FACTOR = 11  # a float32

# Operation codes. Maps, then points, then statistics, then heads.
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
LOOKUP = 17
PERMUTE = 18
CONTRAST = 20
AUTOCONTRAST = 21
EQUALIZE = 22
RESAMPLE_X = 31
RESAMPLE_Y = 32
AFFINE = 33
SHARPNESS = 34
WARP = 35
BLUR = 40
BLUR_X = 41
BLUR_Y = 42
RESIZE_X = 44
RESIZE_Y = 45
MIX = 46
BOX_BLUR = 47
GRID = 43

# Whose formulas an operation uses: Pillow's, or those of torchvision's kernels for tensors, v1 or v2.
PILLOW = 0
TENSOR_V1 = 1
TENSOR_V2 = 2

# Parts of the record of one image whose histogram is needed, int32: four histograms, then three tables.
LUMINANCE = 3 * 256
TABLES = 4 * 256
RECORD_ENTRIES = 7 * 256

# Filters that the kernel computes itself; Pillow's numbers.
LANCZOS = 1
BILINEAR = 2
BICUBIC = 3
BOX = 4
FROM_TABLE = -1

# Kinds of grid, and how the fill is worked into what is sampled; an affine grid is 0.
PERSPECTIVE = 1
DISPLACED = 2
NO_FILL = 0
FILL_V2 = 2
