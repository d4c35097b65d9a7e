"""The tables that describe a batch to the float stage kernel, where they differ from `program.py`.

Jobs and operations have the columns of `program.py`. Sources and targets that are not uint8 count float32 elements.
Maps keep their codes; what lies outside the image gets the float32 values in the columns FILL to FILL + 2. Floats are
stored in the int32 columns as their bits.
"""

from __future__ import annotations

import triton.language as tl

FILL = tl.constexpr(7)  # first of three columns of a map: the value of each channel outside

# Operation codes. Points, then statistics, then heads.
NORMALIZE = tl.constexpr(50)
SCALE = tl.constexpr(51)
INVERT = tl.constexpr(52)
SOLARIZE = tl.constexpr(53)
POSTERIZE = tl.constexpr(54)
GRAY = tl.constexpr(55)
SATURATION = tl.constexpr(56)
HUE = tl.constexpr(57)
PERMUTE = tl.constexpr(58)
TO_BYTE = tl.constexpr(59)
POWER = tl.constexpr(60)
CONTRAST = tl.constexpr(70)
AUTOCONTRAST = tl.constexpr(71)
EQUALIZE = tl.constexpr(72)
RESAMPLE_X = tl.constexpr(80)
RESAMPLE_Y = tl.constexpr(81)
BILINEAR = tl.constexpr(82)
WARP = tl.constexpr(83)
BLUR = tl.constexpr(84)
SHARPNESS = tl.constexpr(85)
TURN = tl.constexpr(86)
CUBIC = tl.constexpr(87)
MIX = tl.constexpr(88)

# How an operation makes gray of red, green and blue.
CHANNEL_ITSELF = tl.constexpr(0)
GRAY_V1 = tl.constexpr(1)
GRAY_V2 = tl.constexpr(2)

# Parts of the record of one image whose statistic is needed, int32: a histogram and a table for each channel, the
# largest value of each channel, and that of each channel's negative, both as `ordered` integers.
TABLES = tl.constexpr(3 * 256)
LARGEST = tl.constexpr(6 * 256)
LARGEST_NEGATED = tl.constexpr(6 * 256 + 3)
RECORD_ENTRIES = tl.constexpr(6 * 256 + 8)
# Where the gray values are added up in torch's order, instead of a histogram: how many tiles of the image are written,
# the float32 sum, and the sums of up to 256 parts of the image.
TILES_DONE = tl.constexpr(0)
SUM = tl.constexpr(1)
PART_SUMS = tl.constexpr(256)
# In any order, the sum of an image's gray values is kept in 64 bits with so many of them after the binary point.
SUM_SCALE = tl.constexpr(2.0**28)
NAN_BITS = tl.constexpr(0x7FC00000)  # of a float32
