"""The sum of an image's gray values in torch's order, for results that depend on its last bit.

The order is that of `aten/src/ATen/native/cpu/SumKernel.cpp` of PyTorch on x86-64, of one thread or of several.
`torch_sink/image/sum_order.py` says it in NumPy. Whoever finishes the last tile of an image adds up all of it: only
what begins at zero in torch too can be added side by side, here 64 steps of 16 rows of 32 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float_math import gray_of
from .float_program import PART_SUMS, SUM, TILES_DONE

_LANES = tl.constexpr(8)
_VECTORS = tl.constexpr(4)  # in a row, each with sums of its own
_COLUMNS = tl.constexpr(32)
_STEP = tl.constexpr(16)  # rows of a step, steps of a group, groups of a large group
_GROUPS = tl.constexpr(4)  # at once


@triton.jit
def numbers_at(image, step, kind, record, pixels, at, inside):
    """Gray values of an image of so many pixels, or with none the sums of its parts; 0 where not `inside`."""
    of_image = inside & (at < pixels)
    red = tl.load(image + at, mask=of_image, other=0.0)
    green = tl.load(image + at + step, mask=of_image, other=0.0)
    blue = tl.load(image + at + 2 * step, mask=of_image, other=0.0)
    sums = tl.load(record + PART_SUMS + at, mask=inside & (at >= pixels), other=0)
    return gray_of(red, green, blue, kind) + sums.to(tl.float32, bitcast=True)


@triton.jit
def picked(numbers, index, at, AXIS: tl.constexpr):
    """The numbers that have the index `at` on one axis."""
    return tl.sum(tl.where(index == at, numbers, 0.0), axis=AXIS)


@triton.jit
def sum_of_columns(image, step, kind, record, pixels, begin, rows, columns, offset, used):
    """float32 [32]: the sum of each column of so many rows of numbers."""
    steps = rows // _STEP
    unfinished = tl.zeros((_COLUMNS,), tl.float32)
    of_steps = tl.zeros((_COLUMNS,), tl.float32)
    of_groups = tl.zeros((_COLUMNS,), tl.float32)
    of_large_groups = tl.zeros((_COLUMNS,), tl.float32)
    in_block = tl.arange(0, _GROUPS * _STEP)
    in_group = tl.arange(0, _STEP)[None, :, None]
    number = tl.arange(0, _GROUPS)[:, None]
    for block in range(tl.cdiv(rows, _GROUPS * _STEP * _STEP)):
        at_step = block * _GROUPS * _STEP + in_block
        sums = tl.zeros((_GROUPS * _STEP, _COLUMNS), tl.float32)
        for at_row in range(_STEP):
            row = at_step * _STEP + at_row
            at = begin + row[:, None] * columns + offset[None, :]
            sums += numbers_at(image, step, kind, record, pixels, at, (row < rows)[:, None] & used[None, :])
        is_whole = (at_step < steps)[:, None]
        unfinished += tl.sum(tl.where(is_whole, 0.0, sums), axis=0)  # of one step at most
        by_group = tl.reshape(tl.where(is_whole, sums, 0.0), (_GROUPS, _STEP, _COLUMNS))
        groups = tl.zeros((_GROUPS, _COLUMNS), tl.float32)
        for place in range(_STEP):
            groups += picked(by_group, in_group, place, 1)
        for at_group in range(_GROUPS):
            group = picked(groups, number, at_group, 0)
            end = block * _GROUPS + at_group + 1
            group_is_whole = end * _STEP <= steps
            of_steps += tl.where(group_is_whole, 0.0, group)
            of_groups += tl.where(group_is_whole, group, 0.0)
            ends_large_group = group_is_whole & (end % _STEP == 0)
            of_large_groups += tl.where(ends_large_group, of_groups, 0.0)
            of_groups = tl.where(ends_large_group, 0.0, of_groups)
    return unfinished + of_steps + of_groups + of_large_groups


@triton.jit
def sum_of_part(image, step, kind, record, pixels, begin, count):
    """The sum of `count` numbers, as one thread of torch makes it: fewer than 8 without vectors."""
    lanes = tl.where(count < _LANES, 1, _LANES)
    columns = _VECTORS * lanes
    column = tl.arange(0, _COLUMNS)
    offset = column // _LANES * lanes + column % _LANES
    used = column % _LANES < lanes
    rows = count // columns
    sums = sum_of_columns(image, step, kind, record, pixels, begin, rows, columns, offset, used)
    sums = tl.reshape(sums, (_VECTORS, _LANES))
    # What fills no row: vectors, then numbers.
    vector = tl.arange(0, _VECTORS)[:, None]
    lane = tl.arange(0, _LANES)
    at = rows * columns + vector * lanes + lane[None, :]
    rest = numbers_at(image, step, kind, record, pixels, begin + at, (lane < lanes)[None, :] & (at < count))
    vectors = (count - rows * columns) // lanes
    in_lanes = picked(sums, vector, 0, 0)
    for index in range(vectors):
        in_lanes += picked(rest, vector, index, 0)
    for index in range(1, _VECTORS):
        in_lanes += picked(sums, vector, index, 0)
    numbers = picked(rest, vector, vectors, 0)
    total = tl.full((), 0.0, tl.float32)
    for index in range(count - rows * columns - vectors * lanes):
        total += picked(numbers, lane, index, 0)
    for index in range(lanes):
        total += picked(in_lanes, lane, index, 0)
    return total


@triton.jit
def write_sum_in_order(operation, record, image, step, tiles):
    """Adds up an image once all its tiles are written: float32 planes from `image` on, `step` numbers apart.

    The operation holds the kind of gray and the number of pixels in the columns 4 and 5, then how many threads torch
    has, how many of them add, and how many numbers each.
    """
    tl.debug_barrier()  # all threads of this program have written
    if tl.atomic_add(record + TILES_DONE, 1) == tiles - 1:
        kind = tl.load(operation + 4)
        pixels = tl.load(operation + 5)
        threads = tl.load(operation + 6)
        parts = tl.load(operation + 7)
        longest = tl.load(operation + 8)
        for part in range(tl.where(parts > 1, parts + 1, 1)):
            # After the parts their sums, which are numbers like others.
            begin, count, of_image = part * longest, tl.minimum(longest, pixels - part * longest), pixels
            if part == parts:
                begin, count, of_image = 0, threads, 0
            total = sum_of_part(image, step, kind, record, of_image, begin, count).to(tl.int32, bitcast=True)
            tl.store(record + PART_SUMS + part, total, mask=part < parts)
            tl.store(record + SUM, total)
            tl.debug_barrier()
