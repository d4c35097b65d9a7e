"""A weighted sum of an image and of the outputs of other jobs, in float32, as AugMix adds up its chains."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import load_float
from ..program import FACTOR, JOB_COLUMNS, OPERATION_COLUMNS, TARGET, TARGET_CHANNEL, TARGET_COLUMN, TARGET_ROW
from ..view import fetch


@triton.jit
def mix(view, workspace, jobs, head, x, y, IS_HEAVY: tl.constexpr):
    """The input and the branches, bytes, added up in order and cut off. `x` int32 [1, X], `y` int32 [Y, 1].

    The rows after `head` name the job that wrote each branch, an image of the size of this one.
    """
    weight = load_float(head, FACTOR)
    red, green, blue = fetch(view, x, y, IS_HEAVY)
    red, green, blue = red * weight, green * weight, blue * weight
    for number in range(1, tl.load(head + 1) + 1):
        branch = head + number * OPERATION_COLUMNS
        job = jobs + tl.load(branch + 1).to(tl.int64) * JOB_COLUMNS
        weight = load_float(branch, FACTOR)
        step = tl.load(job + TARGET_CHANNEL)
        pixel = workspace + tl.load(job + TARGET) + y * tl.load(job + TARGET_ROW) + x * tl.load(job + TARGET_COLUMN)
        red += tl.load(pixel).to(tl.float32) * weight
        green += tl.load(pixel + step).to(tl.float32) * weight
        blue += tl.load(pixel + 2 * step).to(tl.float32) * weight
    return tl.floor(red), tl.floor(green), tl.floor(blue)
