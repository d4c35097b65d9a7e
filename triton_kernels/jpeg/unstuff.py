"""Unstuffing: in the data of a scan an encoder writes a byte 0xFF as 0xFF 0x00, so that it is not read as a marker.

Two passes over the stuffed bytes, LANE_BITS / 8 of them a lane: the first counts what stays, the second moves it to
where the sums over earlier lanes say. Words of four bytes are stored with their bytes reversed, so that the first bit
of the stream is the highest of a word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import BYTES, FIRST_BYTE, FIRST_LANE, FOREIGN_MARKER, SEGMENT_COLUMNS, SEGMENT_IMAGE
from .owners import NO_OWNER

# Zeros after the end of a segment: a lane that ends there holds the words up to 15 bytes further on.
SPARE_BYTES = tl.constexpr(16)


@triton.jit
def load_stuffed(stream, lane, lane_segments, segments, LANE_BYTES: tl.constexpr):
    """The stuffed bytes of lanes, int32 [B, LANE_BYTES].

    Returns:
        Rows of the lanes' segments [B], the first byte of each segment [B], the place of each byte in its segment, the
        bytes, those before them, and which of them stay. What lies outside the segment is 0 and does not stay.
    """
    segment = tl.load(lane_segments + lane)
    is_used = segment != NO_OWNER
    row = segments + segment * SEGMENT_COLUMNS
    first_byte = tl.multiple_of(tl.load(row + FIRST_BYTE, mask=is_used, other=0), [16])
    first_lane = tl.load(row + FIRST_LANE, mask=is_used, other=0)
    size = tl.load(row + BYTES, mask=is_used, other=0)
    place = ((lane - first_lane) * LANE_BYTES)[:, None] + tl.arange(0, LANE_BYTES)[None, :]
    is_inside = place < size[:, None]
    at = stream + first_byte[:, None] + place
    byte = tl.load(at, mask=is_inside, other=0).to(tl.int32)
    before = tl.load(at - 1, mask=is_inside & (place > 0), other=0).to(tl.int32)
    return row, first_byte, place, byte, before, is_inside & ((before != 0xFF) | (byte != 0))


@triton.jit
def count_unstuffed_kernel(
    stream, segments, lane_segments, kept, status, LANE_BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    """How many bytes of each lane stay.

    Args:
        stream: uint8 [bytes], stuffed.
        segments: int32 [segments, SEGMENT_COLUMNS].
        lane_segments: int32 [lanes].
        kept: int32 [lanes], written.
        status: int32 [images]. FOREIGN_MARKER is set where 0xFF is followed by anything but 0, or by nothing.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, _, place, byte, before, stays = load_stuffed(stream, lane, lane_segments, segments, LANE_BYTES)
    tl.store(kept + lane, tl.sum(stays.to(tl.int32), axis=1))
    is_used = tl.load(lane_segments + lane) != NO_OWNER
    size = tl.load(row + BYTES, mask=is_used, other=0)
    is_marker = stays & (before == 0xFF) | (byte == 0xFF) & (place == size[:, None] - 1)
    has_marker = tl.max(is_marker.to(tl.int32), axis=1) > 0
    image = tl.load(row + SEGMENT_IMAGE, mask=is_used, other=0)
    tl.atomic_or(status + image, FOREIGN_MARKER, mask=has_marker, sem="relaxed")


@triton.jit
def unstuff_kernel(
    stream, segments, lane_segments, kept_before, segment_bytes, unstuffed,
    LANE_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves the bytes that stay together.

    Args:
        stream: uint8 [bytes], stuffed.
        segments: int32 [segments, SEGMENT_COLUMNS].
        lane_segments: int32 [lanes].
        kept_before: int32 [lanes], in earlier lanes of the segment.
        segment_bytes: int32 [segments], after unstuffing.
        unstuffed: uint8 [bytes], written: segments begin where they begin in `stream`, and zeros follow them.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, first_byte, _, byte, _, stays = load_stuffed(stream, lane, lane_segments, segments, LANE_BYTES)
    rank = tl.load(kept_before + lane)[:, None] + tl.cumsum(stays.to(tl.int32), axis=1) - 1
    tl.store(unstuffed + ((first_byte[:, None] + rank) ^ 3), byte.to(tl.uint8), mask=stays)

    segment = tl.load(lane_segments + lane)
    is_first = (segment != NO_OWNER) & (lane == tl.load(row + FIRST_LANE, mask=segment != NO_OWNER, other=-1))
    end = first_byte + tl.load(segment_bytes + segment, mask=is_first, other=0)
    spare = end[:, None] + tl.arange(0, SPARE_BYTES)[None, :]
    tl.store(unstuffed + (spare ^ 3), tl.zeros_like(spare).to(tl.uint8), mask=is_first[:, None])
