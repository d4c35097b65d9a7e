"""Where each lane begins: self-synchronization of Huffman codes (Weissenberger and Schmidt, arXiv 2111.09219).

A lane does not know which of its bits is the first of a symbol, nor the unit of the MCU and the place in the block of
that symbol: this is the state in which the lane before it ends. But a decoder that begins in a wrong state usually
reaches the right one after a few hundred bits.

1. `warm_up_kernel`: each lane begins `warm_up_bits` before its first bit, in state 0. The state at its first bit is its
   guessed entry, from which it decodes to its last bit. Most guesses are right.
2. `compare_kernel`: lanes whose entry differs from the final state of the lane before are put on a list, with that
   state.
3. `round_kernel`, once per round: the lanes of the list decode again from that state. If this changes their final
   state, the next lane is put on the list of the next round.

A list holds no lane twice, and only one program writes the results of a lane, so they do not depend on the order in
which programs run, unlike the order of the lists. The write pass detects lanes that are still wrong after the last
round.

`jpeg_rows.py` and `EntropyBuffers` describe the tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import bits_of_lanes
from .symbols import (
    SYMBOLS_A_TURN,
    advance_of,
    load_lanes,
    load_words,
    look_up,
    move,
    next_place,
    pack_state,
    step_of,
    unpack_state,
)


@triton.jit
def skip(words, lookups, tables, position, end, unit, place):
    """Decodes the symbols that start before `end`, without storing coefficients.

    Returns:
        The position, unit and place after the last symbol, and the number of blocks that ended.
    """
    units = tables[0]
    first, second, third = load_words(words, position, position < end)
    blocks = tl.zeros_like(position)
    while tl.max(end - position, axis=0) > 0:
        for _ in range(SYMBOLS_A_TURN):
            is_active = position < end
            entry, _bits = look_up(lookups, tables, first, second, position, unit, place, is_active)
            first, second, third, position = move(words, first, second, third, position, advance_of(entry))
            place, unit, ends = next_place(place, unit, units, step_of(entry))
            blocks += ends
    return position, unit, place, blocks


@triton.jit
def push(items, count, lane, state, is_wanted):
    """Puts lanes with their states on a list: int64 items, the lane above the 16 bits of its state."""
    wanted = is_wanted.to(tl.int32)
    begin = tl.atomic_add(count, tl.sum(wanted, axis=0), sem="relaxed")
    item = (lane.to(tl.int64) << 16) | state.to(tl.int64)
    tl.store(items + begin + tl.cumsum(wanted, axis=0) - wanted, item, mask=is_wanted)


@triton.jit(do_not_specialize=["lane_bits", "warm_up_bits"])
def warm_up_kernel(
    unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks,
    lane_bits, warm_up_bits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Guesses the entry of every lane, and decodes the lane from there; writes `entries`, `exits` and `blocks`."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, begin, end, bits, tables, words = load_lanes(
        lane, unstuffed, segments, segment_bytes, lane_segments, images, lane_bits
    )
    zero = tl.zeros_like(lane)
    early = tl.where(begin < bits, tl.maximum(begin - warm_up_bits, 0), begin)
    position, unit, place, until = early, zero, zero, begin
    # A loop, so that the decoding is compiled only once.
    for part in range(2):
        position, unit, place, ended = skip(words, lookups, tables, position, until, unit, place)
        state = pack_state(position - until, unit, place)
        if part == 0:
            tl.store(entries + lane, state)
        else:
            tl.store(exits + lane, state)
            tl.store(blocks + lane, ended)
        until = end


@triton.jit(do_not_specialize=["lane_bits"])
def compare_kernel(
    segments, segment_bytes, lane_segments, entries, exits, items, count,
    lane_bits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the lanes whose entry differs from the final state of the lane before.

    Writes the list, `items` [lanes], and its length, `count` [1], which is 0 before.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, begin, _, bits = bits_of_lanes(lane, lane_segments, segments, segment_bytes, lane_bits)
    has_left = (begin > 0) & (begin < bits)
    left = tl.load(exits + lane - 1, mask=has_left, other=0)
    entry = tl.load(entries + lane, mask=has_left, other=0)
    push(items, count, lane, left, left != entry)


@triton.jit(do_not_specialize=["lane_bits"])
def round_kernel(
    unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks,
    items, count, next_items, next_count,
    lane_bits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decodes the lanes of a list again, and writes the list of the next round; lists are as in `compare_kernel`."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(count)
    if tl.program_id(0) * BLOCK < length:
        is_listed = number < length
        item = tl.load(items + number, mask=is_listed, other=0)
        lane = (item >> 16).to(tl.int32)
        entry = (item & 0xFFFF).to(tl.int32)
        _, begin, end, bits, tables, words = load_lanes(
            lane, unstuffed, segments, segment_bytes, lane_segments, images, lane_bits
        )
        overflow, unit, place = unpack_state(entry)
        position = tl.where(is_listed, begin + overflow, end)
        position, unit, place, ended = skip(words, lookups, tables, position, end, unit, place)
        state = pack_state(position - end, unit, place)
        changes = is_listed & (state != tl.load(exits + lane, mask=is_listed, other=0))
        tl.store(entries + lane, entry, mask=is_listed)
        tl.store(exits + lane, state, mask=is_listed)
        tl.store(blocks + lane, ended, mask=is_listed)
        push(next_items, next_count, lane + 1, state, changes & (begin + lane_bits < bits))
