"""Lanes: what decodes in parallel. A lane of a segment decodes the symbols that start within its LANE_BITS bits.

Restart markers make a batch of many short segments, a large photograph is one long segment: lanes of all segments are
numbered through, and programs take blocks of lanes without regard to where segments begin.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import FIRST_LANE, LANES, SEGMENT_COLUMNS

NO_SEGMENT = tl.constexpr(-1)


@triton.jit
def assign_lanes_kernel(segments, lane_segments, BLOCK: tl.constexpr):
    """Each lane learns its segment, a program a segment.

    Args:
        segments: int32 [segments, SEGMENT_COLUMNS].
        lane_segments: int32 [lanes], NO_SEGMENT before; it stays in lanes that the batch does not need.
    """
    segment = tl.program_id(0)
    first = tl.load(segments + segment * SEGMENT_COLUMNS + FIRST_LANE)
    lanes = tl.load(segments + segment * SEGMENT_COLUMNS + LANES)
    for begin in range(0, lanes, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        tl.store(lane_segments + first + lane, segment + tl.zeros_like(lane), mask=lane < lanes)


@triton.jit
def bits_of_lanes(lane, is_wanted, lane_segments, segments, segment_bytes, LANE_BITS: tl.constexpr):
    """Where lanes begin and end, in bits of their segments.

    Args:
        lane: int32 [B].
        is_wanted: bool [B]; other lanes are treated as those without a segment.
        lane_segments: int32 [lanes].
        segments: int32 [segments, SEGMENT_COLUMNS].
        segment_bytes: int32 [segments], after unstuffing.

    Returns:
        The row of each lane's segment, then the lane's first bit, the bit after its last, and the bits of the
        segment; 0, -1 and -1 for a lane without a segment. A lane to which unstuffing left nothing begins where the
        segment ends, or after that.
    """
    segment = tl.load(lane_segments + lane, mask=is_wanted, other=NO_SEGMENT)
    is_used = segment != NO_SEGMENT
    row = segments + segment * SEGMENT_COLUMNS
    first = tl.load(row + FIRST_LANE, mask=is_used, other=0)
    bits = tl.where(is_used, 8 * tl.load(segment_bytes + segment, mask=is_used, other=0), -1)
    begin = tl.where(is_used, (lane - first) * LANE_BITS, 0)
    return row, begin, tl.minimum(begin + LANE_BITS, bits), bits
