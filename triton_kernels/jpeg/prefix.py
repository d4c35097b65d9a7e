"""Sums over the lanes before each lane of a segment."""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import FIRST_LANE, LANES, SEGMENT_COLUMNS


@triton.jit
def sum_before_kernel(counts, sums, totals, segments, BLOCK: tl.constexpr):
    """The exclusive prefix sums of one segment, a program a segment.

    Args:
        counts: int32 [lanes].
        sums: int32 [lanes], written: the sum over the earlier lanes of the same segment.
        totals: int32 [segments], written: the sum over all lanes of the segment.
        segments: int32 [segments, SEGMENT_COLUMNS].
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
