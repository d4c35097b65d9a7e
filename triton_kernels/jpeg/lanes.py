"""Lanes and tiles: what programs work on, numbered through all segments, or through all images.

Restart markers make a batch of many short segments, a large photograph is one long segment: programs take blocks of
lanes without regard to where segments begin. A row of a table says which of them is its first, and how many it has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launching import compiler_options
from .layout import FIRST_LANE, LANES, SEGMENT_COLUMNS

NO_OWNER = tl.constexpr(-1)
BLOCK = 1024


@triton.jit(do_not_specialize=["columns", "first_column"])
def assign_kernel(table, owners, columns, first_column, BLOCK: tl.constexpr):
    """Tells everyone that belongs to one row of a table int32 [rows, columns], a program a row.

    Args:
        owners: int32 [lanes or tiles], NO_OWNER before; it stays where no row is in need.
        first_column: of the first that belongs to a row; the column after it says how many do.
    """
    number = tl.program_id(0)
    row = table + number * columns + first_column
    first, count = tl.load(row), tl.load(row + 1)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(owners + first + at, number + tl.zeros_like(at), mask=at < count)


def assign_owners(table: torch.Tensor, owners: torch.Tensor, first: tl.constexpr) -> None:
    """Fills in `owners`; the arguments are those of `assign_kernel`."""
    owners.fill_(NO_OWNER.value)
    columns = table.shape[1]
    assign_kernel[(len(table),)](table, owners, columns, first.value, BLOCK=BLOCK, **compiler_options(warps=1))


@triton.jit
def bits_of_lanes(lane, is_wanted, lane_segments, segments, segment_bytes, lane_bits):
    """Where lanes [B] begin and end, in bits of their segments; one that is not wanted is as one without a segment.

    Returns:
        The row of each lane's segment, then the lane's first bit, the bit after its last, and the bits of the
        segment; 0, -1 and -1 for a lane without a segment. A lane to which unstuffing left nothing begins where the
        segment ends, or after that.
    """
    segment = tl.load(lane_segments + lane, mask=is_wanted, other=NO_OWNER)
    is_used = segment != NO_OWNER
    row = segments + segment * SEGMENT_COLUMNS
    first = tl.load(row + FIRST_LANE, mask=is_used, other=0)
    bits = tl.where(is_used, 8 * tl.load(segment_bytes + segment, mask=is_used, other=0), -1)
    begin = tl.where(is_used, (lane - first) * lane_bits, 0)
    return row, begin, tl.minimum(begin + lane_bits, bits), bits


@triton.jit
def sum_before_kernel(counts, sums, totals, segments, BLOCK: tl.constexpr):
    """Of `counts` [lanes] the `sums` over the earlier lanes of the same segment, and the `totals` [segments].

    A program a segment; all are int32.
    """
    segment = tl.program_id(0)
    first = tl.load(segments + segment * SEGMENT_COLUMNS + FIRST_LANE)
    lanes = tl.load(segments + segment * SEGMENT_COLUMNS + LANES)
    total = tl.zeros((), tl.int32)
    for begin in range(0, lanes, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        count = tl.load(counts + first + lane, mask=lane < lanes, other=0)
        tl.store(sums + first + lane, total + tl.cumsum(count, axis=0) - count, mask=lane < lanes)
        total += tl.sum(count, axis=0)
    tl.store(totals + segment, total)
