"""A weighted sum of an image and of the outputs of other jobs, in float32, as AugMix adds up its chains."""

from __future__ import annotations

import triton
import triton.language as tl

from .fetch import fetch
from .program import FACTOR, JOB_COLUMNS, OPERATION_COLUMNS, TARGET, TARGET_CHANNEL, TARGET_COLUMN, TARGET_ROW


@triton.jit
def weight_of(operation):
    return tl.load(operation + FACTOR).to(tl.float32, bitcast=True)


@triton.jit
def weighted(value, weight):
    """A byte times a weight, rounded to float32 before it is added to anything."""
    return value.to(tl.float32) * weight


@triton.jit
def mix(view, workspace, jobs, head, x, y):
    """The input and the branches, added up in order and cut off. `x` int32 [1, X], `y` int32 [Y, 1].

    The rows after `head` name the job that wrote each branch, an image of the size of this one.
    """
    weight = weight_of(head)
    red, green, blue = fetch(view, x, y)
    total_red, total_green, total_blue = weighted(red, weight), weighted(green, weight), weighted(blue, weight)
    for number in range(1, tl.load(head + 1) + 1):
        branch = head + number * OPERATION_COLUMNS
        job = jobs + tl.load(branch + 1).to(tl.int64) * JOB_COLUMNS
        weight = weight_of(branch)
        step = tl.load(job + TARGET_CHANNEL)
        pixel = workspace + tl.load(job + TARGET) + y * tl.load(job + TARGET_ROW) + x * tl.load(job + TARGET_COLUMN)
        total_red += weighted(tl.load(pixel), weight)
        total_green += weighted(tl.load(pixel + step), weight)
        total_blue += weighted(tl.load(pixel + 2 * step), weight)
    return total_red.to(tl.int32), total_green.to(tl.int32), total_blue.to(tl.int32)
