"""Lanes: what decodes in parallel. A lane of a segment decodes the symbols that start within its `lane_bits` bits.

Restart markers make a batch of many short segments, a large photograph is one long segment: lanes of all segments are
numbered through, and programs take blocks of lanes without regard to where segments begin.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import FIRST_LANE, SEGMENT_COLUMNS
from .owners import NO_OWNER
from .symbols import load_tables, words_of


@triton.jit
def bits_of_lanes(lane, is_wanted, lane_segments, segments, segment_bytes, lane_bits):
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
    segment = tl.load(lane_segments + lane, mask=is_wanted, other=NO_OWNER)
    is_used = segment != NO_OWNER
    row = segments + segment * SEGMENT_COLUMNS
    first = tl.load(row + FIRST_LANE, mask=is_used, other=0)
    bits = tl.where(is_used, 8 * tl.load(segment_bytes + segment, mask=is_used, other=0), -1)
    begin = tl.where(is_used, (lane - first) * lane_bits, 0)
    return row, begin, tl.minimum(begin + lane_bits, bits), bits


@triton.jit
def load_lanes(lane, is_wanted, unstuffed, segments, segment_bytes, lane_segments, images, lane_bits):
    """What lanes decode, and with which tables: `bits_of_lanes`, then `load_tables` and `words_of`."""
    row, begin, end, bits = bits_of_lanes(lane, is_wanted, lane_segments, segments, segment_bytes, lane_bits)
    is_used = bits >= 0
    return row, begin, end, bits, load_tables(row, images, is_used), words_of(row, unstuffed, is_used)
