"""The write pass, which stores the coefficients, and DC prediction.

Every lane decodes once more, from its known entry, and stores the coefficients, several neighbors at a time. The number
of blocks before a lane is the sum of the blocks that ended in earlier lanes. AC coefficients are final; a DC
coefficient is stored as its difference to the one before.

Each lane is checked: its entry is the final state of the lane before, which proves by induction that the result is that
of sequential decoding; each code exists; each coefficient lies in its block; and the last block ends in the last byte.

The DC coefficients are then prefix sums of their differences, for each component of each segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import (
    COMPONENTS,
    DATA_LEFT,
    DATA_MISSING,
    IMAGE_COLUMNS,
    NOT_CONVERGED,
    RUN_TOO_LONG,
    SEGMENT_BLOCKS,
    SEGMENT_COLUMNS,
    SEGMENT_FIRST_BLOCK,
    SEGMENT_IMAGE,
    UNITS,
    UNUSED_CODE,
)
from .symbols import (
    END,
    SYMBOLS_A_TURN,
    UNUSED,
    advance_of,
    load_lanes,
    load_words,
    look_up,
    move,
    next_place,
    size_of,
    step_of,
    unpack_state,
)

GROUP = tl.constexpr(4)  # coefficients that are stored together, 64 bits
GROUP_SHIFT = tl.constexpr(2)


@triton.jit
def value_of(bits, entry):
    """The value of a symbol, from the 32 bits that begin with its code (T.81, F.2.2.1, EXTEND); 0 without a value.

    The first bit of the value is 1 if it is positive; 2^size - 1 is added to a negative one.
    """
    size = size_of(entry)
    value_bits = (bits << (advance_of(entry) - size).to(tl.uint32)).to(tl.int32)
    # All ones for a negative value, whose bits are the inverted bits of its amount; otherwise 0.
    turned = ~(value_bits >> 31)
    # Two shifts, because a shift by 32 bits is not defined.
    amount = ((value_bits ^ turned).to(tl.uint32) >> 1) >> (31 - size).to(tl.uint32)
    return (amount.to(tl.int32) ^ turned) - turned


@triton.jit(do_not_specialize=["lane_bits"])
def write_kernel(
    unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks_before,
    coefficients, status,
    lane_bits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the coefficients of a block of lanes over zeros; the arguments are those of `EntropyBuffers`."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, begin, end, bits, tables, words = load_lanes(
        lane, unstuffed, segments, segment_bytes, lane_segments, images, lane_bits
    )
    # Includes the first lane of an empty segment, which detects that all blocks are missing.
    is_used = (begin < bits) | ((begin == 0) & (bits == 0))
    before = tl.load(blocks_before + lane)
    left = tl.load(row + SEGMENT_BLOCKS, mask=is_used, other=0) - before
    entry_state = tl.load(exits + lane - 1, mask=is_used & (begin > 0), other=0)
    is_settled = entry_state == tl.load(entries + lane, mask=is_used, other=0)
    overflow, unit, place = unpack_state(entry_state)
    position = begin + overflow

    first_block = tl.load(row + SEGMENT_FIRST_BLOCK, mask=is_used, other=0) + before
    target = coefficients + first_block.to(tl.int64) * 64
    groups = target.to(tl.pointer_type(tl.int64))
    # The lane before stores to this lane's first block too, so two lanes must not store to the same group.
    shared = (place > 0).to(tl.int32)
    group = shared * (64 // GROUP)
    collected = target.to(tl.int64) * 0
    first, second, third = load_words(words, position, is_used & (left > 0))
    ended = tl.zeros_like(lane)
    unused = tl.zeros_like(lane)
    outside = tl.zeros_like(lane)
    while tl.max(tl.where(ended < left, end - position, 0), axis=0) > 0:
        for _ in range(SYMBOLS_A_TURN):
            is_active = (position < end) & (ended < left)
            entry, here = look_up(lookups, tables, first, second, position, unit, place, is_active)
            step = step_of(entry)
            reached = place + step
            unused = tl.where(entry == UNUSED, UNUSED_CODE, unused)
            outside = tl.where((reached > 64) & (reached < END), RUN_TOO_LONG, outside)
            value = value_of(here, entry)
            has_value = (size_of(entry) > 0) & (reached <= 64)
            at = ended * 64 + reached - 1
            is_alone = ended >= shared
            tl.store(target + at, value.to(tl.int16), mask=has_value & (is_alone == 0))
            is_next = has_value & is_alone & ((at >> GROUP_SHIFT) != group)
            tl.store(groups + group, collected, mask=is_next)
            group = tl.where(is_next, at >> GROUP_SHIFT, group)
            # Without a value it is 0.
            added = tl.where(is_alone, value & 0xFFFF, 0).to(tl.int64) << ((at & (GROUP - 1)) * 16).to(tl.int64)
            collected = tl.where(is_next, 0, collected) | added
            first, second, third, position = move(words, first, second, third, position, advance_of(entry))
            place, unit, ends = next_place(place, unit, tables[0], step)
            ended += ends
    # The next lane may end the last block.
    for number in tl.static_range(GROUP):
        value = (collected >> (16 * number)).to(tl.int16)
        tl.store(target + group * GROUP + number, value, mask=value != 0)

    is_needed = is_used & (left > 0)
    is_complete = ended == left
    problems = unused | outside | tl.where(is_settled, 0, NOT_CONVERGED)
    problems |= tl.where(is_complete & (position > bits), DATA_MISSING, 0)
    problems |= tl.where(is_complete & (bits - position >= 8), DATA_LEFT, 0)
    problems |= tl.where((is_complete == 0) & (end == bits), DATA_MISSING, 0)
    image = tl.load(row + SEGMENT_IMAGE, mask=is_needed, other=0)
    tl.atomic_or(status + image, problems, mask=is_needed & (problems != 0), sem="relaxed")


@triton.jit
def dc_kernel(segments, images, coefficients, BLOCK: tl.constexpr):
    """Sums the differences of one component of one segment per program to coefficients, in place.

    Sums wrap to 16 bits, as in libjpeg.
    """
    segment = segments + tl.program_id(0) * SEGMENT_COLUMNS
    component = tl.program_id(1)
    image = images + tl.load(segment + SEGMENT_IMAGE) * IMAGE_COLUMNS
    components = tl.load(image + COMPONENTS)
    if component < components:
        units = tl.load(image + UNITS)
        luma = units - components + 1
        first_unit = tl.where(component == 0, 0, luma + component - 1)
        of_mcu = tl.where(component == 0, luma, 1)
        # A segment consists of whole MCUs.
        blocks = tl.load(segment + SEGMENT_BLOCKS) // units * of_mcu
        first = coefficients + tl.load(segment + SEGMENT_FIRST_BLOCK).to(tl.int64) * 64
        before = tl.zeros((), tl.int32)
        for begin in range(0, blocks, BLOCK):
            number = begin + tl.arange(0, BLOCK)
            block = number // of_mcu * units + first_unit + number % of_mcu
            at = first + block.to(tl.int64) * 64
            difference = tl.load(at, mask=number < blocks, other=0).to(tl.int32)
            tl.store(at, (before + tl.cumsum(difference, axis=0)).to(tl.int16), mask=number < blocks)
            before += tl.sum(difference, axis=0)
