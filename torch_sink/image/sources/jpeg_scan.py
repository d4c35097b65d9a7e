"""Where a baseline file holds its only scan and the tables for it, and whether the JPEG kernels cover that file.

They cover what cameras, encoders and datasets write: Huffman-coded sequential files of 8 bits with one interleaved
scan, gray, or YCbCr with chroma at full size, or halved along either axis or both. Whatever else libjpeg reads is left
to it. Names of markers and layouts of segments: ITU-T T.81, annex B; color spaces as libjpeg-turbo's
`default_decompress_parms` (`jdapimin.c`) guesses them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

# Bits 0 to 3 of a table's kind are its number.
DC, AC, QUANTIZATION = 0x00, 0x10, 0x20

_LUMA_SAMPLINGS = frozenset((0x11, 0x21, 0x12, 0x22))  # horizontal factor in the high four bits
_CHROMA_SAMPLING = 0x11
_RGB_IDENTIFIERS = b"RGB"


class BaselineScan(NamedTuple):
    """Positions in a file that the kernels cover, counted in bytes; the scan ends at the last two bytes of the file.

    Attributes:
        begin: first byte of the entropy-coded data.
        sampling: horizontal and vertical factor of the luma; (1, 1) for a gray file, whatever it says.
        restart_interval: MCUs between two restart markers; 0 where there are none.
        quantization: for each component the byte before its 64 values, which says their precision.
        dc: for each component the counts of its DC codes, 16 bytes; the symbols follow.
        ac: for each component the counts of its AC codes.
    """

    begin: int
    sampling: tuple[int, int]
    restart_interval: int
    quantization: tuple[int, ...]
    dc: tuple[int, ...]
    ac: tuple[int, ...]


class _Layout(NamedTuple):
    """What the two headers say: the luma's sampling, and for each component the kinds of its tables."""

    sampling: tuple[int, int]
    quantization: tuple[int, ...]
    dc: tuple[int, ...]
    ac: tuple[int, ...]


def find_scan(
    begin: int, frame: bytes, scan: bytes, places: dict[int, int], restart_interval: int
) -> BaselineScan | None:
    """The scan of a sequential file, or None where the kernels do not cover it. Nobody looks into the tables here.

    Args:
        begin: first byte after the header of the scan.
        frame: the frame header, from the precision on.
        scan: the header of the scan, from the number of components on.
        places: for each kind of table where it lies: the counts of a Huffman table, the first byte of another one.
        restart_interval: as the last DRI segment says.
    """
    layout = _layout(frame[5:], scan)
    if layout is None or frame[0] != 8:
        return None
    quantization, dc, ac = (tuple([places[kind] for kind in kinds]) for kinds in layout[1:])
    return BaselineScan(begin, layout.sampling, restart_interval, quantization, dc, ac)


@functools.lru_cache(maxsize=256)
def _layout(frame: bytes, scan: bytes) -> _Layout | None:
    """What both headers say, from their number of components on; None where the kernels do not cover it."""
    count = frame[0]
    identifiers, samplings, tables = frame[1::3], frame[2::3], frame[3::3]
    if count not in (1, 3) or scan[0] != count or scan[1:-3:2] != identifiers:
        return None
    sampling = (1, 1)
    if count == 3:
        if samplings[0] not in _LUMA_SAMPLINGS or samplings[1] != _CHROMA_SAMPLING or samplings[2] != _CHROMA_SAMPLING:
            return None
        if identifiers == _RGB_IDENTIFIERS:
            return None
        sampling = samplings[0] >> 4, samplings[0] & 15
    choices = scan[2:-3:2]
    return _Layout(
        sampling,
        tuple(QUANTIZATION | table for table in tables),
        tuple(DC | choice >> 4 for choice in choices),
        tuple(AC | choice & 15 for choice in choices),
    )
