"""Look-up tables: from the next bits of the stream to the symbol that they begin with.

A Huffman table of JPEG is canonical: written as 16 bits, filled up with zeros, codes ascend in the order of their
symbols. So the codes of up to n bits are exactly the values below

    limit(n) = sum over l <= n of counts(l) * 2^(16 - l)

and a value v of 16 bits begins with a code of the first length n for which v < limit(n); its number among all codes is
the number of shorter codes plus (v - limit(n - 1)) >> (16 - n).

The table has two levels. The first is indexed by FIRST_BITS bits. Codes that are longer form one range of values, from
limit(FIRST_BITS) to limit(16), so their entries follow without gaps, in groups that share the first bits.

An entry is 16 bits:

    bits 0-4    bits to advance, of the code and of the value after it, at most 31; 0 for a longer code
    bits 5-8    bits of the value
    bits 9-15   step: how far to go in the zigzag order, to the place after this coefficient; END at the end of a block

In an entry for a longer code the bits from 5 on are the number of its group, counted from the start of the table. Bits
that no code begins with advance by one bit, with step 0. So do all bits if the table is none that libjpeg takes, and
the codes in groups beyond the last; the status of the image tells then that it has to be decoded elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import CODE_COUNTS, HUFFMAN_COLUMNS, SYMBOLS, TABLE_CLASS

FIRST_BITS = tl.constexpr(9)
FIRST_ENTRIES = tl.constexpr(512)
GROUP_ENTRIES = tl.constexpr(128)  # values of 16 bits with the same FIRST_BITS bits
GROUPS = tl.constexpr(32)
LOOKUP_ENTRIES = tl.constexpr(FIRST_ENTRIES.value + GROUPS.value * GROUP_ENTRIES.value)

# Place + END tells the end of a block from a run that goes beyond it, which reaches 79 at most.
END = tl.constexpr(96)
UNUSED = tl.constexpr(1)  # the entry for bits that no code begins with


@triton.jit
def advance_of(entry):
    """Bits of the code and its value."""
    return entry & 31


@triton.jit
def size_of(entry):
    """Bits of the value."""
    return (entry >> 5) & 15


@triton.jit
def step_of(entry):
    """How far to go in the zigzag order."""
    return entry >> 9


@triton.jit
def entry_of(symbol, length, is_ac):
    """The entry for a symbol, 0 ... 255, after a code of `length` bits."""
    size = symbol & 15
    run = symbol >> 4
    # Without a value, 15 skips 16 zeros, and whatever else ends the block.
    without_value = tl.where(run == 15, 16, END)
    step = tl.where(is_ac, tl.where(size == 0, without_value, run + 1), 1)
    return (length + size) | (size << 5) | (step << 9)


@triton.jit
def find_code(table, value):
    """The code that values of 16 bits begin with: its length, 17 where there is none, and its number."""
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
def entries_of(table, value, limit):
    """The lengths of the codes at values of 16 bits, and their entries; from `limit` on there are no codes."""
    length, number = find_code(table, value)
    is_used = value < limit
    symbol = tl.load(table + SYMBOLS + number, mask=is_used, other=0).to(tl.int32)
    is_ac = tl.load(table + TABLE_CLASS) + tl.zeros_like(symbol) != 0
    return length, tl.where(is_used, entry_of(symbol, length, is_ac), UNUSED)


@triton.jit
def lookup_kernel(tables, lookups, BLOCK: tl.constexpr):
    """The look-up table of one Huffman table, a program a table.

    Args:
        tables: uint8 [tables, HUFFMAN_COLUMNS].
        lookups: uint16 [tables, LOOKUP_ENTRIES], written as far as it is read.
    """
    table = tables + tl.program_id(0) * HUFFMAN_COLUMNS
    lookup = lookups + tl.program_id(0) * LOOKUP_ENTRIES
    limit = tl.zeros((), tl.int32)
    first_limit = tl.zeros((), tl.int32)
    codes = tl.zeros((), tl.int32)
    for bits in range(1, 17):
        count = tl.load(table + CODE_COUNTS + bits - 1).to(tl.int32)
        limit += count << (16 - bits)
        codes += count
        first_limit = tl.where(bits == FIRST_BITS, limit, first_limit)
    # No code is all ones, and the value of a DC coefficient has at most 15 bits.
    number = tl.arange(0, 256)
    symbol = tl.load(table + SYMBOLS + number, mask=number < codes, other=0).to(tl.int32)
    largest = tl.where(tl.load(table + TABLE_CLASS) == 0, 15, 255)
    is_valid = (limit < 65536) & (codes <= 256) & (tl.max(symbol, axis=0) <= largest)
    limit = tl.where(is_valid, limit, 0)

    groups = tl.minimum((limit - first_limit + GROUP_ENTRIES - 1) // GROUP_ENTRIES, GROUPS)
    end = FIRST_ENTRIES + tl.where(is_valid, groups * GROUP_ENTRIES, 0)
    for begin in range(0, end, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        is_first = index < FIRST_ENTRIES
        value = tl.where(is_first, index * GROUP_ENTRIES, first_limit + index - FIRST_ENTRIES)
        length, entry = entries_of(table, value, limit)
        group = (FIRST_ENTRIES + value - first_limit) // GROUP_ENTRIES
        is_long = is_first & (length > FIRST_BITS) & (value < limit)
        entry = tl.where(is_long, tl.where(group * GROUP_ENTRIES < LOOKUP_ENTRIES, group << 5, UNUSED), entry)
        tl.store(lookup + index, entry.to(tl.uint16), mask=index < end)
