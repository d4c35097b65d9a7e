"""Lanes and tiles, the units of work of programs, numbered through all segments or all images; and unstuffing.

A batch may have many short segments between restart markers, or one long segment per photograph. So programs work on
blocks of lanes wherever segments begin: the row of a segment holds its first lane and the number of its lanes.

Unstuffing comes first: in the data of a scan an encoder writes a byte 0xFF as 0xFF 0x00, so that it is not read as a
marker. There are two passes over the stuffed bytes, LANE_BITS / 8 of them per lane: the first counts the bytes that
stay, the second moves them to the positions given by the sums over earlier lanes. Both read words of four bytes and
test all four at once. Words are stored with reversed bytes, so that the first bit of the stream is a word's highest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import Launcher
from ..pixels import clamp
from .layout import (
    BLOCK_TILES,
    BYTES,
    FIRST_BLOCK_TILE,
    FIRST_BYTE,
    FIRST_LANE,
    FIRST_PIXEL_TILE,
    FOREIGN_MARKER,
    LANES,
    PIXEL_TILES,
    SEGMENT_COLUMNS,
    SEGMENT_IMAGE,
    WINDOW_COLUMNS,
)

BLOCK = 256
# Zeros after the end of a segment: a lane that ends there reads words up to 15 bytes after it.
SPARE_BYTES = tl.constexpr(16)
FLAGS = tl.constexpr(0x80808080)  # the highest bit of each byte


@triton.jit(do_not_specialize=["lanes"])
def assign_kernel(segments, windows, lane_segments, block_tiles, pixel_tiles, lanes, BLOCK: tl.constexpr):
    """Writes the number of a segment to its lanes, and that of an image to its tiles; a program per segment.

    Args:
        segments: int32 [segments, SEGMENT_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
        lane_segments: int32 [lanes], written. The last segment also gets the empty lanes after its own.
        block_tiles: int32 [tiles], the image of each tile of the inverse DCT, written.
        pixel_tiles: int32 [tiles], the image of each tile of pixels, written.
    """
    number = tl.program_id(0)
    segment = segments + number * SEGMENT_COLUMNS
    first = tl.load(segment + FIRST_LANE)
    is_last = number == tl.num_programs(0) - 1
    _tell(lane_segments + first, tl.where(is_last, lanes - first, tl.load(segment + LANES)), number, BLOCK)
    image = tl.load(segment + SEGMENT_IMAGE)
    if tl.load(segment - SEGMENT_COLUMNS + SEGMENT_IMAGE, mask=number > 0, other=-1) != image:
        window = windows + image * WINDOW_COLUMNS
        _tell(block_tiles + tl.load(window + FIRST_BLOCK_TILE), tl.load(window + BLOCK_TILES), image, BLOCK)
        _tell(pixel_tiles + tl.load(window + FIRST_PIXEL_TILE), tl.load(window + PIXEL_TILES), image, BLOCK)


@triton.jit
def _tell(owners, count, owner, BLOCK: tl.constexpr):
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(owners + at, owner + tl.zeros_like(at), mask=at < count)


assign_owners = Launcher(assign_kernel, warps=1)


@triton.jit
def bits_of_lanes(lane, lane_segments, segments, segment_bytes, lane_bits):
    """Computes where lanes [B] begin and end, in bits of their segments.

    Returns:
        The row of each lane's segment, then the lane's first bit, the bit after its last, and the bits of the
        segment. A lane that is empty after unstuffing begins at or after the segment's end.
    """
    segment = tl.load(lane_segments + lane)
    row = segments + segment * SEGMENT_COLUMNS
    bits = 8 * tl.load(segment_bytes + segment)
    begin = (lane - tl.load(row + FIRST_LANE)) * lane_bits
    return row, begin, tl.minimum(begin + lane_bits, bits), bits


@triton.jit
def sum_before(counts, sums, first, lanes, BLOCK: tl.constexpr):
    """Stores the sums of `counts` over the earlier ones of so many lanes from the first on; returns their total."""
    total = tl.zeros((), tl.int32)
    for begin in range(0, lanes, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        count = tl.load(counts + first + number, mask=number < lanes, other=0)
        tl.store(sums + first + number, total + tl.cumsum(count, axis=0) - count, mask=number < lanes)
        total += tl.sum(count, axis=0)
    return total


@triton.jit
def sum_before_kernel(counts, sums, totals, segments, BLOCK: tl.constexpr):
    """Computes the `sums` of `counts` [lanes] over earlier lanes of the same segment, and the `totals` [segments].

    One program per segment; all are int32.
    """
    segment = tl.program_id(0)
    first = tl.load(segments + segment * SEGMENT_COLUMNS + FIRST_LANE)
    lanes = tl.load(segments + segment * SEGMENT_COLUMNS + LANES)
    tl.store(totals + segment, sum_before(counts, sums, first, lanes, BLOCK))


@triton.jit
def flag_zeros(word):
    """Sets the highest bit of each byte that is 0, uint32."""
    low = (word & 0x7F7F7F7F) + 0x7F7F7F7F
    return ((low | word) & FLAGS) ^ FLAGS


@triton.jit
def load_stuffed(stream, lane, lane_segments, segments, LANE_BYTES: tl.constexpr):
    """Loads the stuffed bytes of lanes in words of four, uint32 [B, LANE_BYTES / 4].

    Returns:
        Rows of the lanes' segments [B], the first byte of each segment [B], the words, and flags of the bytes that
        stay and of those that belong to a marker. Bytes outside the segment do not stay.
    """
    row = segments + tl.load(lane_segments + lane) * SEGMENT_COLUMNS
    first_byte = tl.load(row + FIRST_BYTE)
    size = tl.load(row + BYTES)[:, None]
    place = ((lane - tl.load(row + FIRST_LANE)) * LANE_BYTES)[:, None] + tl.arange(0, LANE_BYTES // 4)[None, :] * 4
    # The byte after the last one counts as 0 and is loaded too, to see a marker. Loads end at multiples of 16 bytes.
    is_read = place < (size // 16 + 1) * 16
    at = stream.to(tl.pointer_type(tl.uint32)) + ((first_byte >> 2)[:, None] + (place >> 2))
    word = tl.load(at, mask=is_read, other=0)
    missing = (4 - clamp(size - place, 0, 4)).to(tl.uint32)
    # Two shifts, because a shift by 32 bits is not defined.
    inside = ((word * 0 + FLAGS) >> (4 * missing)) >> (4 * missing)
    # The bytes after a segment do not count, and may be a marker.
    word &= (inside >> 7) * 0xFF
    before = (word << 8) | (tl.load(at - 1, mask=(place > 0) & (place <= size), other=0) >> 24)
    # A byte of this is 0 if the one before is 0xFF.
    not_after = before ^ 0xFFFFFFFF
    stuffed = flag_zeros(word | not_after) & inside
    return row, first_byte, word, inside ^ stuffed, flag_zeros(not_after) ^ stuffed


@triton.jit
def count_flags(flags):
    """Counts the flags in each word, int32."""
    pairs = (flags >> 7) + (flags >> 23)
    return ((pairs + (pairs >> 8)) & 7).to(tl.int32)


@triton.jit
def count_unstuffed_kernel(
    stream, segments, lane_segments, kept, status, LANE_BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts the bytes of each lane that are `kept`; sets FOREIGN_MARKER if 0xFF is followed by anything but 0."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, _, _, stays, markers = load_stuffed(stream, lane, lane_segments, segments, LANE_BYTES)
    tl.store(kept + lane, tl.sum(count_flags(stays), axis=1))
    has_marker = tl.max((markers != 0).to(tl.int32), axis=1) > 0
    image = tl.load(row + SEGMENT_IMAGE, mask=has_marker, other=0)
    tl.atomic_or(status + image, FOREIGN_MARKER, mask=has_marker, sem="relaxed")


@triton.jit
def unstuff_kernel(
    stream, segments, lane_segments, kept_before, segment_bytes, unstuffed,
    LANE_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the bytes that stay without gaps: segments begin as in `stream`, and zeros follow them."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, first_byte, word, stays, _ = load_stuffed(stream, lane, lane_segments, segments, LANE_BYTES)
    segment = tl.load(lane_segments + lane)
    is_first = lane == tl.load(row + FIRST_LANE)
    end = first_byte + tl.load(segment_bytes + segment, mask=is_first, other=0)
    spare = end[:, None] + tl.arange(0, SPARE_BYTES)[None, :]
    tl.store(unstuffed + (spare ^ 3), tl.zeros_like(spare).to(tl.uint8), mask=is_first[:, None])

    count = count_flags(stays)
    at = (first_byte + tl.load(kept_before + lane))[:, None] + tl.cumsum(count, axis=1) - count
    for number in tl.static_range(4):
        stay = (stays >> (8 * number + 7)) & 1
        tl.store(unstuffed + (at ^ 3), (word >> (8 * number)).to(tl.uint8), mask=stay != 0)
        at += stay.to(tl.int32)
