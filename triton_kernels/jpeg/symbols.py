"""Look-up tables for the symbols of JPEG files, and functions that the decoding kernels share.

A Huffman table of JPEG is canonical: codes, padded with zeros to 16 bits, ascend in the order of their symbols. So the
16-bit values that begin with a code of up to n bits are exactly those below

    limit(n) = sum over l <= n of counts(l) * 2^(16 - l)

and a value v begins with a code of the first length n for which v < limit(n). The number of that code among all codes
is the number of shorter codes plus (v - limit(n - 1)) >> (16 - n).

The look-up table has two levels. The first is indexed by FIRST_BITS bits. Longer codes form one range of values, from
limit(FIRST_BITS) to limit(16), so their entries follow without gaps, in groups with the same first bits.

An entry is 16 bits:

    bits 0-4    bits to advance, of the code and of the value after it, at most 31; 0 for a longer code
    bits 5-8    bits of the value
    bits 9-15   step in the zigzag order to the place after this coefficient; END at the end of a block

In an entry for a longer code the bits from 5 on are the number of its group, counted from the start of the table. Bits
without a code advance by one bit, with step 0. So do all bits of a table that libjpeg does not accept, and codes in
groups after the last one; the status of the image then says that it has to be decoded elsewhere.

A symbol is a Huffman code and the bits of the value after it, at most 31 bits. So a lane finds each symbol in the 32
bits from its position on, cut from two words; a third word is loaded ahead to hide its latency. The state of a lane at
a symbol is its position, the unit of the MCU and the place in the zigzag order (`pack_state`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import bits_of_lanes
from .layout import (
    AC_TABLE,
    CODE_COUNTS,
    COMPONENTS,
    DC_TABLE,
    FIRST_BYTE,
    HUFFMAN_COLUMNS,
    IMAGE_COLUMNS,
    SEGMENT_IMAGE,
    SYMBOLS,
    TABLE_CLASS,
    UNITS,
)

FIRST_BITS = tl.constexpr(9)
FIRST_ENTRIES = tl.constexpr(512)
GROUP_ENTRIES = tl.constexpr(128)  # number of 16-bit values with the same FIRST_BITS bits
GROUPS = tl.constexpr(32)
LOOKUP_ENTRIES = tl.constexpr(FIRST_ENTRIES.value + GROUPS.value * GROUP_ENTRIES.value)

# Place + END is larger than any place of a run beyond the end of a block, which is 79 at most.
END = tl.constexpr(96)
UNUSED = tl.constexpr(1)  # the entry for bits without a code


@triton.jit
def advance_of(entry):
    """The number of bits of the code and its value."""
    return entry & 31


@triton.jit
def size_of(entry):
    """The number of bits of the value."""
    return (entry >> 5) & 15


@triton.jit
def step_of(entry):
    """The step in the zigzag order."""
    return entry >> 9


@triton.jit
def entry_of(symbol, length, is_ac):
    """The entry of a symbol, 0 to 255, with a code of `length` bits."""
    size = symbol & 15
    run = symbol >> 4
    # Without a value, a run of 15 skips 16 zeros, and any other ends the block.
    without_value = tl.where(run == 15, 16, END)
    step = tl.where(is_ac, tl.where(size == 0, without_value, run + 1), 1)
    return (length + size) | (size << 5) | (step << 9)


@triton.jit
def find_code(table, value):
    """Finds the code at the beginning of 16-bit values: its length, 17 for no code, and its number."""
    limit = tl.zeros((), tl.int32)
    number = tl.zeros((), tl.int32)
    length = tl.full(value.shape, 1, tl.int32)
    limit_before = tl.zeros(value.shape, tl.int32)
    number_before = tl.zeros(value.shape, tl.int32)
    for bits in range(1, 17):
        count = tl.load(table + CODE_COUNTS + bits - 1).to(tl.int32)
        limit += count << (16 - bits)
        number += count
        is_longer = value >= limit
        length = tl.where(is_longer, bits + 1, length)
        limit_before = tl.where(is_longer, limit, limit_before)
        number_before = tl.where(is_longer, number, number_before)
    return length, number_before + ((value - limit_before) >> tl.maximum(16 - length, 0))


@triton.jit
def lookup_kernel(huffman, lookups, BLOCK: tl.constexpr):
    """Makes the look-up table of one Huffman table per program.

    Args:
        huffman: uint8 [tables, HUFFMAN_COLUMNS].
        lookups: uint16 [tables, LOOKUP_ENTRIES], of which the entries in use are written.
    """
    table = huffman + tl.program_id(0) * HUFFMAN_COLUMNS
    lookup = lookups + tl.program_id(0) * LOOKUP_ENTRIES
    bits = 1 + tl.arange(0, 16)
    counts = tl.load(table + CODE_COUNTS - 1 + bits).to(tl.int32)
    values = counts << (16 - bits)
    limit, codes = tl.sum(values, axis=0), tl.sum(counts, axis=0)
    first_limit = tl.sum(tl.where(bits <= FIRST_BITS, values, 0), axis=0)
    # No code is all ones, and the value of a DC coefficient has at most 15 bits.
    at = tl.arange(0, 256)
    symbols = tl.load(table + SYMBOLS + at, mask=at < codes, other=0).to(tl.int32)
    is_ac = tl.load(table + TABLE_CLASS) != 0
    is_valid = (limit < 65536) & (codes <= 256) & (tl.max(symbols, axis=0) <= tl.where(is_ac, 255, 15))
    limit = tl.where(is_valid, limit, 0)

    groups = tl.minimum((limit - first_limit + GROUP_ENTRIES - 1) // GROUP_ENTRIES, GROUPS)
    end = FIRST_ENTRIES + tl.where(is_valid, groups * GROUP_ENTRIES, 0)
    for begin in range(0, end, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        is_first = index < FIRST_ENTRIES
        value = tl.where(is_first, index * GROUP_ENTRIES, first_limit + index - FIRST_ENTRIES)
        length, number = find_code(table, value)
        is_used = value < limit
        symbol = tl.load(table + SYMBOLS + number, mask=is_used, other=0).to(tl.int32)
        entry = tl.where(is_used, entry_of(symbol, length, is_ac), UNUSED)
        group = (FIRST_ENTRIES + value - first_limit) // GROUP_ENTRIES
        is_long = is_first & (length > FIRST_BITS) & is_used
        entry = tl.where(is_long, tl.where(group * GROUP_ENTRIES < LOOKUP_ENTRIES, group << 5, UNUSED), entry)
        tl.store(lookup + index, entry.to(tl.uint16), mask=index < end)


# Symbols between two tests whether any lane of the program continues.
SYMBOLS_A_TURN = tl.constexpr(4)


@triton.jit
def pack_state(overflow, unit, place):
    """Packs a lane's state to 16 bits: bits after a boundary, 0 to 30, unit of the MCU, place in the zigzag order."""
    return (overflow << 10) | (unit << 6) | place


@triton.jit
def unpack_state(state):
    """Unpacks a state: bits after the boundary, unit of the MCU, place in the zigzag order."""
    return state >> 10, (state >> 6) & 15, state & 63


@triton.jit
def load_tables(row, images):
    """Loads the number of units of an MCU, the number of its luma units, and the Huffman tables of each component.

    The rows of a component's two tables are one uint32: DC in the low half, AC in the high one.
    """
    image = images + tl.load(row + SEGMENT_IMAGE) * IMAGE_COLUMNS
    units = tl.load(image + UNITS)
    luma = units - tl.load(image + COMPONENTS) + 1
    y = tl.load(image + DC_TABLE) | (tl.load(image + AC_TABLE) << 16)
    cb = tl.load(image + DC_TABLE + 1) | (tl.load(image + AC_TABLE + 1) << 16)
    cr = tl.load(image + DC_TABLE + 2) | (tl.load(image + AC_TABLE + 2) << 16)
    return units, luma, y.to(tl.uint32), cb.to(tl.uint32), cr.to(tl.uint32)


@triton.jit
def load_words(words, position, is_wanted):
    """Loads three words from the bit at `position` on; `words` points to the third word of each lane's segment."""
    at = words + (position >> 5)
    first = tl.load(at - 2, mask=is_wanted, other=0)
    second = tl.load(at - 1, mask=is_wanted, other=0)
    return first, second, tl.load(at, mask=is_wanted, other=0)


@triton.jit
def move(words, first, second, third, position, bits):
    """Advances the position by `bits`, 0 to 31, and the three words."""
    moved = position + bits
    is_next = (moved >> 5) != (position >> 5)
    first = tl.where(is_next, second, first)
    second = tl.where(is_next, third, second)
    third = tl.load(words + (moved >> 5), mask=is_next, other=third)
    return first, second, third, moved


@triton.jit
def look_up(lookups, tables, first, second, position, unit, place, is_active):
    """Finds the entry of the symbol at each lane's position, int32, and the 32 bits from there on.

    `tables` are those of `load_tables`, `first` and `second` the words from `position` on. Entries of inactive lanes
    are 0, so that they do not advance.
    """
    _, luma, y, cb, cr = tables
    # Two shifts, because a shift by 32 bits is not defined; compilers know this as one shift of both words.
    into = (position & 31).to(tl.uint32)
    bits = (first << into) | ((second >> 1) >> (into ^ 31))
    pair = tl.where(unit < luma, y, tl.where(unit == luma, cb, cr))
    lookup = tl.where(place == 0, pair & 0xFFFF, pair >> 16).to(tl.int32) * LOOKUP_ENTRIES
    prefix = (bits >> (32 - FIRST_BITS)).to(tl.int32)
    entry = tl.load(lookups + (lookup + prefix), mask=is_active, other=0).to(tl.int32)
    is_long = is_active & (advance_of(entry) == 0)
    # GROUP_ENTRIES times the group, whose number stands above five zero bits.
    in_group = (entry << 2) + ((bits >> 16).to(tl.int32) & (GROUP_ENTRIES - 1))
    long_entry = tl.load(lookups + (lookup + in_group), mask=is_long, other=0).to(tl.int32)
    return tl.where(is_long, long_entry, entry), bits


@triton.jit
def next_place(place, unit, units, step):
    """Computes place and unit after a symbol with this step, and whether it ended a block, 0 or 1."""
    place += step
    ends = place >= 64
    unit = tl.where(ends, tl.where(unit + 1 == units, 0, unit + 1), unit)
    return tl.where(ends, 0, place), unit, ends.to(tl.int32)


@triton.jit
def load_lanes(lane, unstuffed, segments, segment_bytes, lane_segments, images, lane_bits):
    """Loads what lanes need to decode: `bits_of_lanes`, `load_tables`, and the `words` for `load_words`."""
    row, begin, end, bits = bits_of_lanes(lane, lane_segments, segments, segment_bytes, lane_bits)
    words = unstuffed.to(tl.pointer_type(tl.uint32)) + ((tl.load(row + FIRST_BYTE) + 8) >> 2)
    return row, begin, end, bits, load_tables(row, images), words
