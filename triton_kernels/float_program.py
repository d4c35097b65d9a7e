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
GRAY = tl.constexpr(55)
SATURATION = tl.constexpr(56)
HUE = tl.constexpr(57)
PERMUTE = tl.constexpr(58)
TO_BYTE = tl.constexpr(59)
CONTRAST = tl.constexpr(70)
RESAMPLE_X = tl.constexpr(80)
RESAMPLE_Y = tl.constexpr(81)
BILINEAR = tl.constexpr(82)
WARP = tl.constexpr(83)
BLUR = tl.constexpr(84)
SHARPNESS = tl.constexpr(85)
TURN = tl.constexpr(86)
CUBIC = tl.constexpr(87)

# How an operation makes gray of red, green and blue.
CHANNEL_ITSELF = tl.constexpr(0)
GRAY_V1 = tl.constexpr(1)
GRAY_V2 = tl.constexpr(2)

# The sum of an image's gray values is kept in 64 bits with so many of them after the binary point.
SUM_SCALE = tl.constexpr(2.0**28)
