"""One JPEG file as the kernels decode it: the pieces of its scan, and whether they can be what the header announces."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch_sink.image.sources.decoded import Box
from torch_sink.image.sources.jpeg_scan import BaselineScan
from torch_sink.image.sources.source import EncodedSource

_RESTART_MARKER = re.compile(rb"\xff[\xd0-\xd7]")
_END_MARKER_BYTES = 2
# A code for the DC coefficient and one for the end of the block.
_LEAST_BITS_OF_A_BLOCK = 2
# The kernels count the samples of an image, and the bits of a scan, with 32 bits.
_MOST_BLOCKS_OF_AN_IMAGE = 1 << 25
_MOST_BYTES_OF_A_SCAN = 1 << 27


class JpegFile(NamedTuple):
    """One image of a batch.

    Attributes:
        source: the file; its header names a scan that the kernels cover.
        scan: that scan.
        segments: position and length of each piece of entropy-coded data between restart markers, in bytes.
        box: the part that is wanted.
    """

    source: EncodedSource
    scan: BaselineScan
    segments: list[tuple[int, int]]
    box: Box

    @property
    def channels(self) -> int:
        """That are wanted."""
        return 1 if self.source.mode == "L" else 3


def mcu_counts(source: EncodedSource, scan: BaselineScan) -> tuple[int, int]:
    """MCUs of a scan, across and down."""
    width, height = source.size
    across, down = scan.sampling
    return -(-width // (8 * across)), -(-height // (8 * down))


def block_count(source: EncodedSource, scan: BaselineScan) -> int:
    """Blocks of a scan; all MCUs are whole."""
    across, down = mcu_counts(source, scan)
    return across * down * (scan.sampling[0] * scan.sampling[1] + len(scan.dc) - 1)


def jpeg_file(source: EncodedSource, box: Box | None) -> JpegFile | None:
    """One image of a batch, or None where the data cannot be what the header announces, or the image is too large.

    A scan may be too short for the image's blocks, so that nothing is allocated for a size that is made up. Or its
    restart markers are others.

    Args:
        source: a file whose header names a scan.
        box: the part that is wanted, by default all of it.
    """
    scan = source.header.scan
    assert scan is not None  # the caller has asked
    end = len(source.data) - _END_MARKER_BYTES
    blocks, scan_bytes = block_count(source, scan), end - scan.begin
    if blocks > _MOST_BLOCKS_OF_AN_IMAGE or scan_bytes > _MOST_BYTES_OF_A_SCAN:
        return None
    if _LEAST_BITS_OF_A_BLOCK * blocks > 8 * scan_bytes:
        return None
    box = box or Box(0, 0, *source.size)
    if not scan.restart_interval:
        return JpegFile(source, scan, [(scan.begin, scan_bytes)], box)
    marks = [match.start() for match in _RESTART_MARKER.finditer(source.data, scan.begin, end)]
    across, down = mcu_counts(source, scan)
    in_order = all(source.data[mark + 1] == 0xD0 + number % 8 for number, mark in enumerate(marks))
    if not in_order or len(marks) + 1 != -(-across * down // scan.restart_interval):
        return None
    begins, ends = [scan.begin, *(mark + 2 for mark in marks)], [*marks, end]
    return JpegFile(source, scan, [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)], box)
