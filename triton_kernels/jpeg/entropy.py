"""Decodes the bytes of the scans of a batch to quantized coefficients.

    stage               programs            result
    count unstuffed     blocks of lanes     bytes of each lane that stay, sums of them
    unstuff             blocks of lanes     the bytes without stuffing
    look-up tables      a table each        from bits to symbols
    warm up, compare    blocks of lanes     a guess of where each lane begins, the list of wrong guesses
    rounds              blocks of the list  corrected lanes, the next list
    count               a segment each      blocks before each lane, which segments are late
    finish, twice       a segment each      corrected lanes of the late ones, until none is left
                        blocks of lanes     coefficients and DC differences at their places, checks
    DC sums, DC         a part of a         coefficients
                        component each

The host never waits: the grid of every launch follows from the shapes of tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ..launching import Launcher, allocated
from ..shapes import LaneShape, are_interpreted
from .lanes import count_unstuffed_kernel, sum_before_kernel, unstuff_kernel
from .passes import (
    add_dc_kernel,
    compare_kernel,
    count_kernel,
    finish_kernel,
    round_kernel,
    sum_dc_kernel,
    warm_up_kernel,
)
from .symbols import FIRST_ENTRIES, LOOKUP_ENTRIES, lookup_kernel

# Lanes of a program that decodes: one warp, so that its lanes do not wait for those of other warps.
LANES_A_WARP = 64 if torch.version.hip else 32
BLOCK_BYTES = 2048  # lanes of a program that unstuffs
SUM_LANES, SUM_WARPS = 256, 1  # lanes of a program that sums over lanes; one warp needs no barriers
# Blocks that a program sums at once, and the most programs that share a component. Each then takes 6 steps for
# 12 megapixels in 4:2:0.
DC_BLOCKS, DC_PARTS = 1024, 32
# The interpreter takes time per operation, whatever the number of lanes.
INTERPRETED_LANES = 16384


_count_unstuffed, _unstuff = Launcher(count_unstuffed_kernel), Launcher(unstuff_kernel)
_sum_before = Launcher(sum_before_kernel, SUM_WARPS)
_look_up, _sum_dc, _add_dc = Launcher(lookup_kernel), Launcher(sum_dc_kernel), Launcher(add_dc_kernel)
_warm_up, _compare = Launcher(warm_up_kernel, warps=1), Launcher(compare_kernel, warps=1)
_decode_again, _count = Launcher(round_kernel, warps=1), Launcher(count_kernel, SUM_WARPS)
_finish = Launcher(finish_kernel, warps=1)


class EntropyBuffers(NamedTuple):
    """The tensors that pass results from stage to stage, and the final ones."""

    unstuffed: torch.Tensor  # uint8 [bytes], in words of four whose bytes are reversed
    kept: torch.Tensor  # int32 [lanes], bytes of each lane without stuffing
    kept_before: torch.Tensor  # int32 [lanes], in the earlier lanes of the segment
    segment_bytes: torch.Tensor  # int32 [segments], after unstuffing
    lookups: torch.Tensor  # uint16 [tables, LOOKUP_ENTRIES]
    lane_segments: torch.Tensor  # int32 [lanes], as `assign_owners` makes them
    entries: torch.Tensor  # int32 [lanes], the state from which a lane was decoded
    exits: torch.Tensor  # int32 [lanes], the state at its end
    blocks: torch.Tensor  # int32 [lanes], blocks that ended in a lane
    blocks_before: torch.Tensor  # int32 [lanes], in the earlier lanes of the segment
    late: torch.Tensor  # int32 [segments], lanes of a segment that the rounds for all have left
    items: torch.Tensor  # int64 [2, lanes], the list of a round and that of the next
    counts: torch.Tensor  # int32 [rounds + 1, 4], the length of each list, 16 bytes apart
    part_sums: torch.Tensor  # int32 [segments, 3, DC_PARTS], the sum of the DC differences in each part of a component
    coefficients: torch.Tensor  # int16 [blocks, 64], the result
    status: torch.Tensor  # int32 [images], the result

    @property
    def lanes(self) -> int:
        """The number of lanes for which there is room."""
        return len(self.exits)


def new_buffers(
    *,
    stream_bytes: int,
    images: int,
    segments: int,
    tables: int,
    lanes: int,
    blocks: int,
    rounds: int,
    device: torch.device | str,
) -> EntropyBuffers:
    """Allocates buffers for a batch, by the numbers of lanes, blocks of images and rows of tables."""
    program = lanes_of_program(lanes)
    lanes = triton.cdiv(lanes, program) * program

    of_lanes = ("kept", "kept_before", "lane_segments", "entries", "exits", "blocks", "blocks_before")
    parts = {
        "coefficients": ((blocks, 64), torch.int16),
        "counts": ((rounds + 1, 4), torch.int32),
        "items": ((2, lanes), torch.int64),
        "lookups": ((tables, LOOKUP_ENTRIES.value), torch.uint16),
        "unstuffed": ((triton.cdiv(stream_bytes, 16) * 16,), torch.uint8),
        "segment_bytes": ((segments,), torch.int32),
        "late": ((segments,), torch.int32),
        "part_sums": ((segments, 3 * DC_PARTS), torch.int32),
        **dict.fromkeys(of_lanes, ((lanes,), torch.int32)),
    }
    # Separate, because the status lives longer than the others.
    status = torch.empty(images, dtype=torch.int32, device=device)
    return EntropyBuffers(status=status, **dict(zip(parts, allocated(tuple(parts.values()), device), strict=True)))


def lanes_of_program(lanes: int) -> int:
    """Lanes that one program decodes, of so many."""
    return min(triton.next_power_of_2(lanes), INTERPRETED_LANES) if are_interpreted() else LANES_A_WARP


def parts_of_component(segments: int, blocks: int) -> int:
    """How many programs sum a component of a segment: so many that one step does in most segments of the batch."""
    return 1 if are_interpreted() else min(triton.cdiv(blocks, segments * DC_BLOCKS), DC_PARTS)


def decode_coefficients(
    stream: torch.Tensor,
    images: torch.Tensor,
    segments: torch.Tensor,
    huffman: torch.Tensor,
    buffers: EntropyBuffers,
    *,
    shape: LaneShape,
) -> None:
    """Launches the entropy decoding of a batch; `jpeg_rows` describes the tables and the status.

    Coefficients and status are written to `buffers`. The coefficients of an image whose status is not 0 are undefined.

    Args:
        stream: uint8 [bytes], the stuffed bytes of all segments.
        images: int32 [images, IMAGE_COLUMNS].
        segments: int32 [segments, SEGMENT_COLUMNS].
        huffman: uint8 [tables, HUFFMAN_COLUMNS].
        buffers: from `new_buffers`; only `lane_segments` has to be filled.
        shape: its `bits` are those by which LANES were counted, its `rounds` those of the buffers.
    """
    unstuffed, lookups, entries, exits = buffers.unstuffed, buffers.lookups, buffers.entries, buffers.exits
    segment_bytes, lane_segments = buffers.segment_bytes, buffers.lane_segments
    for buffer in (buffers.counts, buffers.coefficients, buffers.status):
        buffer.zero_()
    of_segments = segments.shape[:1]

    # There is room for whole programs of `most` lanes.
    most, interpreted = lanes_of_program(buffers.lanes), are_interpreted()
    lane_bytes = shape.bits // 8
    block = most if interpreted else min(BLOCK_BYTES // lane_bytes, most)
    of_lanes = (buffers.lanes // block,)
    constants: Any = {"LANE_BYTES": lane_bytes, "BLOCK": block}
    stuffed = (stream, segments, lane_segments)
    _count_unstuffed(of_lanes, (*stuffed, buffers.kept, buffers.status), **constants)
    kept = buffers.kept, buffers.kept_before, segment_bytes, segments
    _sum_before(of_segments, kept, BLOCK=SUM_LANES)
    _unstuff(of_lanes, (*stuffed, buffers.kept_before, segment_bytes, unstuffed), **constants)

    block = triton.next_power_of_2(LOOKUP_ENTRIES.value) if interpreted else FIRST_ENTRIES.value
    _look_up(huffman.shape[:1], (huffman, lookups), BLOCK=block)

    of_lanes = (buffers.lanes // most,)
    lanes = (segments, segment_bytes, lane_segments)
    coded = (unstuffed, *lanes, images, lookups, entries, exits)
    _warm_up(of_lanes, (*coded, buffers.blocks), (shape.bits, shape.warm_up_bits), BLOCK=most)
    items = [buffers.items.narrow(0, number, 1) for number in range(2)]
    lists = [(items[number % 2], count) for number, count in enumerate(buffers.counts)]
    _compare(of_lanes, (*lanes, entries, exits, *lists[0]), (shape.bits,), BLOCK=most)
    decode_again = _decode_again.prepared(
        of_lanes, (*coded, buffers.blocks, *lists[0], *lists[1]), (shape.bits,), BLOCK=most
    )
    for number in range(shape.rounds):
        if interpreted and not buffers.counts[number][0]:
            break  # the host does not know: on a device, a round without work still costs its launch
        decode_again(*coded, buffers.blocks, *lists[number], *lists[number + 1])
    marked = entries, exits, buffers.blocks, buffers.blocks_before, buffers.late, *lists[-1]
    _count(of_segments, (segments, segment_bytes, *marked), (shape.bits,), BLOCK=SUM_LANES)
    listed, following = items[shape.rounds % 2], items[(shape.rounds + 1) % 2]
    finished = buffers.blocks, buffers.blocks_before, buffers.late, listed, following
    finishing = (*coded, *finished, buffers.coefficients, buffers.status)
    settling = len(segments)
    _finish((settling + of_lanes[0],), finishing, (settling, shape.bits), BLOCK=most)
    if not interpreted or buffers.counts[-1][0]:
        _finish(of_lanes, finishing, (0, shape.bits), BLOCK=most)
    sums = segments, images, buffers.coefficients, buffers.part_sums
    of_parts = (*of_segments, 3, parts_of_component(len(segments), len(buffers.coefficients)))
    for launch in (_sum_dc, _add_dc):
        launch(of_parts, sums, PARTS=DC_PARTS, BLOCK=DC_BLOCKS)
