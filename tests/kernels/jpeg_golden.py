"""The entropy decoding of a baseline scan in plain Python, one symbol after the other, as T.81 describes it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Damaged(Exception):
    """The data are not what an encoder writes."""


def decode_segment(data: bytes, components: list[tuple[int, bytes, bytes]], mcus: int) -> np.ndarray:
    """The coefficients between two restart markers.

    Args:
        data: the bytes between them, stuffed.
        components: of each component, the blocks of an MCU and the DC and AC tables: 16 counts, then the symbols.
        mcus: how many MCUs there are.

    Returns:
        int16 [blocks, 64], zigzag order in a block, the blocks in the order of the scan.
    """
    bits = Bits(data)
    codes = [(units, codes_of(dc), codes_of(ac)) for units, dc, ac in components]
    predictions = [0] * len(components)
    blocks = []
    for _ in range(mcus):
        for number, (units, dc, ac) in enumerate(codes):
            for _ in range(units):
                block = decode_block(bits, dc, ac)
                predictions[number] += block[0]
                blocks.append([predictions[number], *block[1:]])
    if bits.left >= 8:
        raise Damaged("data are left")
    return np.array(blocks, np.int64).reshape(-1, 64).astype(np.int16)


def decode_block(bits: Bits, dc: dict[tuple[int, int], int], ac: dict[tuple[int, int], int]) -> list[int]:
    """The difference of the DC coefficient, then the AC coefficients."""
    block = [0] * 64
    block[0] = bits.value(bits.symbol(dc))
    place = 1
    while place < 64:
        run, size = divmod(bits.symbol(ac), 16)
        if size == 0 and run < 15:
            break
        place += run
        if place > 63:
            raise Damaged("a run goes beyond the block")
        block[place] = bits.value(size)
        place += 1
    return block


def codes_of(table: bytes) -> dict[tuple[int, int], int]:
    """{(length, code): symbol} of a table: T.81, annex C."""
    symbols: Iterator[int] = iter(table[16:])
    codes = {}
    code = 0
    for length, count in enumerate(table[:16], start=1):
        for _ in range(count):
            codes[length, code] = next(symbols)
            code += 1
        if code >= 1 << length:
            raise Damaged("a code of ones only")
        code <<= 1
    return codes


class Bits:
    """The bits of a segment, from the first to the last."""

    def __init__(self, data: bytes) -> None:
        if b"\xff" in data.replace(b"\xff\x00", b""):
            raise Damaged("a marker in the data")
        unstuffed = data.replace(b"\xff\x00", b"\xff")
        self._bits = np.unpackbits(np.frombuffer(unstuffed, np.uint8)).tolist()
        self._position = 0

    @property
    def left(self) -> int:
        """How many have not been read."""
        return len(self._bits) - self._position

    def symbol(self, codes: dict[tuple[int, int], int]) -> int:
        """The next symbol."""
        code = 0
        for length in range(1, 17):
            code = 2 * code + self._next()
            if (length, code) in codes:
                return codes[length, code]
        raise Damaged("an unused code")

    def value(self, size: int) -> int:
        """The next value of `size` bits: T.81, F.2.2.1, EXTEND."""
        value = 0
        for _ in range(size):
            value = 2 * value + self._next()
        return value if size == 0 or value >> (size - 1) else value - (1 << size) + 1

    def _next(self) -> int:
        if self._position == len(self._bits):
            raise Damaged("data are missing")
        self._position += 1
        return self._bits[self._position - 1]
