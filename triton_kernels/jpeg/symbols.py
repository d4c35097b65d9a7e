"""One symbol of a lane: what the kernels that decode have in common.

A symbol is a Huffman code and the bits of the value after it, at most 31 bits. So a lane finds each of them in the 32
bits from its position on, cut from two words; a third word is loaded ahead, so that nobody waits for it.

What a lane knows at a symbol is its position, the unit of the MCU and the place in the zigzag order: `pack_state`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import AC_TABLE, COMPONENTS, DC_TABLE, FIRST_BYTE, IMAGE_COLUMNS, SEGMENT_IMAGE, UNITS
from .lookup import FIRST_BITS, GROUP_ENTRIES, LOOKUP_ENTRIES, advance_of

# Symbols between two looks at whether any lane of the program goes on.
SYMBOLS_A_TURN = tl.constexpr(4)


@triton.jit
def pack_state(overflow, unit, place):
    """The state of a lane, 16 bits: bits beyond a boundary, 0 ... 30, unit of the MCU, place in the zigzag order."""
    return (overflow << 10) | (unit << 6) | place


@triton.jit
def unpack_state(state):
    """Bits beyond the boundary, unit of the MCU, place in the zigzag order."""
    return state >> 10, (state >> 6) & 15, state & 63


@triton.jit
def load_tables(row, images, is_wanted):
    """What to decode lanes with: units of an MCU, how many of them are luma, and the tables of each component.

    The rows of a component's two tables are one uint32: the one for DC in the low half, the one for AC in the high.
    Lanes that are not wanted get those of the first image.
    """
    image = images + tl.load(row + SEGMENT_IMAGE, mask=is_wanted, other=0) * IMAGE_COLUMNS
    units = tl.load(image + UNITS)
    luma = units - tl.load(image + COMPONENTS) + 1
    y = tl.load(image + DC_TABLE) | (tl.load(image + AC_TABLE) << 16)
    cb = tl.load(image + DC_TABLE + 1) | (tl.load(image + AC_TABLE + 1) << 16)
    cr = tl.load(image + DC_TABLE + 2) | (tl.load(image + AC_TABLE + 2) << 16)
    return units, luma, y.to(tl.uint32), cb.to(tl.uint32), cr.to(tl.uint32)


@triton.jit
def load_words(words, position, is_wanted):
    """The three words from the bit at `position` on; `words` points to the third word of each lane's segment."""
    at = words + (position >> 5)
    first = tl.load(at - 2, mask=is_wanted, other=0)
    second = tl.load(at - 1, mask=is_wanted, other=0)
    return first, second, tl.load(at, mask=is_wanted, other=0)


@triton.jit
def move(words, first, second, third, position, bits):
    """The position `bits` bits further on, 0 ... 31, and the three words from there on."""
    moved = position + bits
    is_next = (moved >> 5) != (position >> 5)
    first = tl.where(is_next, second, first)
    second = tl.where(is_next, third, second)
    third = tl.load(words + (moved >> 5), mask=is_next, other=third)
    return first, second, third, moved


@triton.jit
def look_up(lookups, tables, first, second, position, unit, place, is_active):
    """The entry of the symbol at each lane's position, int32, and the 32 bits from there on.

    Args:
        lookups: uint16 [tables, LOOKUP_ENTRIES].
        tables: as `load_tables` returns them.
        first, second: the words from `position` on.
        position, unit, place: of each lane.
        is_active: which lanes go on; the entries of the others are 0, so that nothing moves them.
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
    # GROUP_ENTRIES times the group, whose number is above five zeros.
    in_group = (entry << 2) + ((bits >> 16).to(tl.int32) & (GROUP_ENTRIES - 1))
    long_entry = tl.load(lookups + (lookup + in_group), mask=is_long, other=0).to(tl.int32)
    return tl.where(is_long, long_entry, entry), bits


@triton.jit
def next_place(place, unit, units, step):
    """The zigzag place and the unit after a symbol with the given step, and whether it ended a block, 0 or 1."""
    place += step
    ends = place >= 64
    unit = tl.where(ends, tl.where(unit + 1 == units, 0, unit + 1), unit)
    return tl.where(ends, 0, place), unit, ends.to(tl.int32)


@triton.jit
def words_of(row, unstuffed, is_wanted):
    """A pointer to the third word of each lane's segment; `unstuffed` is uint8 [bytes], in words of four."""
    return unstuffed.to(tl.pointer_type(tl.uint32)) + ((tl.load(row + FIRST_BYTE, mask=is_wanted, other=0) + 8) >> 2)
