"""The passes that decode symbols: they find where each lane begins, and store its coefficients.

A lane does not know which of its bits is the first of a symbol, nor the unit of the MCU and the place in the block of
that symbol: this is the state in which the lane before it ends. But a decoder that begins in a wrong state usually
reaches the right one after a few hundred bits: Huffman codes synchronize by themselves (Weissenberger and Schmidt,
arXiv 2111.09219).

1. `warm_up_kernel`: each lane begins `warm_up_bits` before its first bit, in state 0. The state at its first bit is its
   guessed entry, from which it decodes to its last bit. Most guesses are right.
2. `compare_kernel`: lanes whose entry differs from the final state of the lane before are put on a list, with that
   state.
3. `round_kernel`, a few times: the lanes of the list decode again from that state. If this changes their final state,
   the next lane is put on the list of the next round.
4. `count_kernel`: the number of blocks before a lane is the sum of the blocks that ended in earlier lanes. A segment
   with a lane on the last list is marked as late.
5. `finish_kernel`, twice. The first launch has a program for each segment, which goes on with the rounds of a late one
   until its list is empty, and programs that write the lanes of all other segments. The second launch writes the late
   ones. To write, a lane decodes once more, from its known entry, and stores the coefficients, several neighbors at a
   time. AC coefficients are final; a DC coefficient is stored as its difference to the one before.
6. `sum_dc_kernel`, `add_dc_kernel`: the DC coefficients are prefix sums of their differences, for each component of
   each segment. Several programs share a component: each first sums its part, then adds the parts before it.

A list holds no lane twice, and only one program writes the results of a lane, so they do not depend on the order in
which programs run, unlike the order of the lists.

The rounds of a segment end: the first lane of a list is right from then on, so the next list begins further right.
Most files need two or three rounds, and few need many, one lane after the other. The first rounds run on the whole
device, a launch each. The later ones have few lanes, so a program for each late segment will do, beside the writing of
all others, and no launch is needed for a round that only one file needs.

Writing checks each lane: its entry is the final state of the lane before, which proves by induction that the
result is that of sequential decoding; each code exists; each coefficient lies in its block; and the last block ends in
the last byte.

`jpeg_rows.py` and `EntropyBuffers` describe the tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import bits_of_lanes, sum_before
from .layout import (
    COMPONENTS,
    DATA_LEFT,
    DATA_MISSING,
    FIRST_LANE,
    IMAGE_COLUMNS,
    LANES,
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
    pack_state,
    size_of,
    step_of,
    unpack_state,
)

GROUP = tl.constexpr(4)  # coefficients that are stored together, 64 bits
GROUP_SHIFT = tl.constexpr(2)


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
    """Puts lanes with their states on a list that other programs put lanes on, too; `count` is its length."""
    begin = tl.atomic_add(count, tl.sum(is_wanted.to(tl.int32), axis=0), sem="relaxed")
    put(items + begin, lane, state, is_wanted)


@triton.jit
def put(items, lane, state, is_wanted):
    """Stores lanes with their states as int64 items, the lane above the 16 bits of its state.

    Returns:
        The number of lanes that were stored.
    """
    wanted = is_wanted.to(tl.int32)
    item = (lane.to(tl.int64) << 16) | state.to(tl.int64)
    tl.store(items + tl.cumsum(wanted, axis=0) - wanted, item, mask=is_wanted)
    return tl.sum(wanted, axis=0)


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
    begin = tl.program_id(0) * BLOCK
    length = tl.load(count)
    if begin < length:
        lane, state, changes = decode_again(
            unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks,
            items, begin + tl.arange(0, BLOCK), length, lane_bits,
        )  # fmt: skip
        push(next_items, next_count, lane + 1, state, changes)


@triton.jit
def decode_again(
    unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks,
    items, number, length, lane_bits,
):  # fmt: skip
    """Decodes the lanes of those items of a list, of so many, that have these numbers.

    Returns:
        The lanes, their final states, and whether the next lane has to be decoded again from there.
    """
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
    return lane, state, changes & (begin + lane_bits < bits)


@triton.jit(do_not_specialize=["lane_bits"])
def count_kernel(
    segments, segment_bytes, entries, exits, blocks, blocks_before, late, items, count,
    lane_bits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the blocks of each lane's earlier lanes, and lists the lanes with a wrong entry; a program per segment.

    Args:
        blocks_before: int32 [lanes], written.
        late: int32 [segments], the number of lanes that were listed, written.
        items: room for an item of each lane, with any content; those of a segment begin at its first lane.
        count: the length of the batch's last list. If it is 0, no lane is compared.
    """
    segment = tl.program_id(0)
    first = tl.load(segments + segment * SEGMENT_COLUMNS + FIRST_LANE)
    lanes = tl.load(segments + segment * SEGMENT_COLUMNS + LANES)
    sum_before(blocks, blocks_before, first, lanes, BLOCK)
    length = tl.zeros((), tl.int32)
    if tl.load(count) > 0:
        bits = 8 * tl.load(segment_bytes + segment)
        for begin in range(0, lanes, BLOCK):
            number = begin + tl.arange(0, BLOCK)
            lane = first + number
            has_left = (number > 0) & (number < lanes) & (number * lane_bits < bits)
            left = tl.load(exits + lane - 1, mask=has_left, other=0)
            entry = tl.load(entries + lane, mask=has_left, other=0)
            length += put(items + first + length, lane, left, left != entry)
    tl.store(late + segment, length)


@triton.jit
def settle(
    segment, unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks,
    blocks_before, late, items, next_items,
    lane_bits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Goes on with the rounds of a late segment until none of its lanes is left, and sums its blocks again."""
    length = tl.load(late + segment)
    if length > 0:
        first = tl.load(segments + segment * SEGMENT_COLUMNS + FIRST_LANE)
        lanes = tl.load(segments + segment * SEGMENT_COLUMNS + LANES)
        # No other program has lanes of this segment.
        listed, following = items + first, next_items + first
        while length > 0:
            next_length = tl.zeros((), tl.int32)
            for begin in range(0, length, BLOCK):
                lane, state, changes = decode_again(
                    unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks,
                    listed, begin + tl.arange(0, BLOCK), length, lane_bits,
                )  # fmt: skip
                next_length += put(following + next_length, lane + 1, state, changes)
            listed, following = following, listed
            length = next_length
            # The threads of this program read what others of it have stored.
            tl.debug_barrier()
        sum_before(blocks, blocks_before, first, lanes, BLOCK)


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


@triton.jit(do_not_specialize=["settling", "lane_bits"])
def finish_kernel(
    unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks,
    blocks_before, late, items, next_items, coefficients, status,
    settling, lane_bits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Settles the late segments while the others are written, or writes the late ones.

    The arguments are those of `EntropyBuffers`, and:

    Args:
        settling: the number of segments in the first launch, whose first programs settle one each; 0 in the second.
    """
    program = tl.program_id(0)
    if program < settling:
        settle(
            program, unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks,
            blocks_before, late, items, next_items, lane_bits, BLOCK,
        )  # fmt: skip
    else:
        lane = (program - settling) * BLOCK + tl.arange(0, BLOCK)
        is_late = tl.load(late + tl.load(lane_segments + lane)) > 0
        write(
            lane, is_late != (settling > 0), unstuffed, segments, segment_bytes, lane_segments, images, lookups,
            entries, exits, blocks_before, coefficients, status, lane_bits,
        )  # fmt: skip


@triton.jit
def write(
    lane, is_wanted, unstuffed, segments, segment_bytes, lane_segments, images, lookups, entries, exits, blocks_before,
    coefficients, status, lane_bits,
):  # fmt: skip
    """Stores the coefficients of the wanted ones of these lanes over zeros."""
    row, begin, end, bits, tables, words = load_lanes(
        lane, unstuffed, segments, segment_bytes, lane_segments, images, lane_bits
    )
    # Includes the first lane of an empty segment, which detects that all blocks are missing.
    is_used = is_wanted & ((begin < bits) | ((begin == 0) & (bits == 0)))
    before = tl.load(blocks_before + lane, mask=is_used, other=0)
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
def dc_of_part(segments, images, BLOCK: tl.constexpr):
    """Finds the part of a component's blocks that a program of the grid [segments, 3, parts] sums.

    Returns:
        The first block of the segment; the numbers of the part's first block and of the one after its last among the
        component's; and what `load_dc` needs: blocks of an MCU, the component's first and how many it has there.
    """
    segment = segments + tl.program_id(0) * SEGMENT_COLUMNS
    component = tl.program_id(1)
    image = images + tl.load(segment + SEGMENT_IMAGE) * IMAGE_COLUMNS
    components = tl.load(image + COMPONENTS)
    units = tl.load(image + UNITS)
    luma = units - components + 1
    first_unit = tl.where(component == 0, 0, luma + component - 1)
    of_mcu = tl.where(component == 0, luma, 1)
    # A segment consists of whole MCUs.
    blocks = tl.where(component < components, tl.load(segment + SEGMENT_BLOCKS) // units * of_mcu, 0)
    of_all_parts = tl.num_programs(2) * BLOCK
    size = (blocks + of_all_parts - 1) // of_all_parts * BLOCK
    begin = tl.program_id(2) * size
    first = tl.load(segment + SEGMENT_FIRST_BLOCK)
    return first, begin, tl.minimum(begin + size, blocks), (units, first_unit, of_mcu)


@triton.jit
def load_dc(coefficients, first, number, end, units):
    """Loads the DC values of a component's blocks with these numbers; returns where they are, too."""
    of_mcu = units[2]
    block = number // of_mcu * units[0] + units[1] + number % of_mcu
    at = coefficients + (first + block).to(tl.int64) * 64
    return at, tl.load(at, mask=number < end, other=0).to(tl.int32)


@triton.jit
def sum_dc_kernel(segments, images, coefficients, part_sums, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the DC differences of each part of a component, for `add_dc_kernel`.

    Writes `part_sums`, int32 [segments, 3, PARTS]; PARTS is the most parts that there may be.
    """
    first, begin, end, units = dc_of_part(segments, images, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for at in range(begin, end, BLOCK):
        total += load_dc(coefficients, first, at + tl.arange(0, BLOCK), end, units)[1]
    part = (tl.program_id(0) * 3 + tl.program_id(1)) * PARTS + tl.program_id(2)
    tl.store(part_sums + part, tl.sum(total, axis=0))


@triton.jit
def add_dc_kernel(segments, images, coefficients, part_sums, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the DC differences of each part of a component to coefficients, in place, after the parts before it.

    Sums wrap to 16 bits, as in libjpeg.
    """
    first, begin, end, units = dc_of_part(segments, images, BLOCK)
    part = tl.arange(0, PARTS)
    of_component = part_sums + (tl.program_id(0) * 3 + tl.program_id(1)) * PARTS
    before = tl.sum(tl.load(of_component + part, mask=part < tl.program_id(2), other=0), axis=0)
    for at in range(begin, end, BLOCK):
        number = at + tl.arange(0, BLOCK)
        place, difference = load_dc(coefficients, first, number, end, units)
        tl.store(place, (before + tl.cumsum(difference, axis=0)).to(tl.int16), mask=number < end)
        before += tl.sum(difference, axis=0)
