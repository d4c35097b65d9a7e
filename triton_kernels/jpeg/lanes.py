"""Lanes and tiles: what programs work on, numbered through all segments, or through all images.

Restart markers make a batch of many short segments, a large photograph is one long segment: programs take blocks of
lanes without regard to where segments begin. A row of a table says which of them is its first, and how many it has.

Unstuffing deals them out first: in the data of a scan an encoder writes a byte 0xFF as 0xFF 0x00, so that it is not
read as a marker. Two passes over the stuffed bytes, LANE_BITS / 8 of them a lane: the first counts what stays, the
second moves it to where the sums over earlier lanes say. Both read words of four bytes and look at all four at once.
Words are stored with their bytes reversed, so that the first bit of the stream is the highest of a word.
"""

from __future__ import annotations

import torch
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
# Zeros after the end of a segment: a lane that ends there holds the words up to 15 bytes further on.
SPARE_BYTES = tl.constexpr(16)
FLAGS = tl.constexpr(0x80808080)  # the highest bit of each byte


@triton.jit(do_not_specialize=["lanes"])
def assign_kernel(segments, windows, lane_segments, block_tiles, pixel_tiles, lanes, BLOCK: tl.constexpr):
    """Tells the lanes of one segment, and the tiles of an image that begins with it, whose they are.

    Args:
        segments: int32 [segments, SEGMENT_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
        lane_segments: int32 [lanes], written to. The last segment has those beyond its own, with nothing in them.
        block_tiles: int32 [tiles], the image of each, written to.
        pixel_tiles: the same.
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


_assign = Launcher(assign_kernel, warps=1)


def assign_owners(
    segments: torch.Tensor,
    windows: torch.Tensor,
    lane_segments: torch.Tensor,
    block_tiles: torch.Tensor,
    pixel_tiles: torch.Tensor,
) -> None:
    """Launches what the stages that work on lanes and tiles begin with; the arguments are those of `assign_kernel`."""
    tensors = segments, windows, lane_segments, block_tiles, pixel_tiles
    _assign(segments.shape[:1], tensors, (len(lane_segments),), BLOCK=BLOCK)


@triton.jit
def bits_of_lanes(lane, lane_segments, segments, segment_bytes, lane_bits):
    """Where lanes [B] begin and end, in bits of their segments.

    Returns:
        The row of each lane's segment, then the lane's first bit, the bit after its last, and the bits of the
        segment. A lane to which unstuffing left nothing begins where the segment ends, or after that.
    """
    segment = tl.load(lane_segments + lane)
    row = segments + segment * SEGMENT_COLUMNS
    bits = 8 * tl.load(segment_bytes + segment)
    begin = (lane - tl.load(row + FIRST_LANE)) * lane_bits
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


@triton.jit
def flag_zeros(word):
    """The highest bit of each byte that is 0, uint32."""
    low = (word & 0x7F7F7F7F) + 0x7F7F7F7F
    return ((low | word) & FLAGS) ^ FLAGS


@triton.jit
def load_stuffed(stream, lane, lane_segments, segments, LANE_BYTES: tl.constexpr):
    """The stuffed bytes of lanes, in words of four, uint32 [B, LANE_BYTES / 4].

    Returns:
        Rows of the lanes' segments [B], the first byte of each segment [B], the words, then flags of their bytes: those
        that stay, and those that show a marker. What lies outside the segment does not stay.
    """
    row = segments + tl.load(lane_segments + lane) * SEGMENT_COLUMNS
    first_byte = tl.load(row + FIRST_BYTE)
    size = tl.load(row + BYTES)[:, None]
    place = ((lane - tl.load(row + FIRST_LANE)) * LANE_BYTES)[:, None] + tl.arange(0, LANE_BYTES // 4)[None, :] * 4
    # The byte after the last, too, taken for 0: a 0xFF before it is a marker. Loads end where runs of 16 bytes end.
    is_read = place < (size // 16 + 1) * 16
    at = stream.to(tl.pointer_type(tl.uint32)) + ((first_byte >> 2)[:, None] + (place >> 2))
    word = tl.load(at, mask=is_read, other=0)
    missing = (4 - clamp(size - place, 0, 4)).to(tl.uint32)
    # Two shifts, because a shift by 32 bits is not defined.
    inside = ((word * 0 + FLAGS) >> (4 * missing)) >> (4 * missing)
    # What follows a segment is of no interest, and may be a marker.
    word &= (inside >> 7) * 0xFF
    before = (word << 8) | (tl.load(at - 1, mask=(place > 0) & (place <= size), other=0) >> 24)
    # A byte of it is 0 where the one before is 0xFF.
    not_after = before ^ 0xFFFFFFFF
    stuffed = flag_zeros(word | not_after) & inside
    return row, first_byte, word, inside ^ stuffed, flag_zeros(not_after) ^ stuffed


@triton.jit
def count_flags(flags):
    """How many there are in each word, int32."""
    pairs = (flags >> 7) + (flags >> 23)
    return ((pairs + (pairs >> 8)) & 7).to(tl.int32)


@triton.jit
def count_unstuffed_kernel(
    stream, segments, lane_segments, kept, status, LANE_BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    """How many bytes of each lane are `kept`; FOREIGN_MARKER where 0xFF is followed by anything but 0."""
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
    """Moves the bytes that stay together: segments begin where they begin in `stream`, and zeros follow them."""
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
