"""One JPEG file as the kernels decode it: where it is cut, and whether its data can be what the header announces."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch_sink.image.sources.jpeg_header import BaselineScan
from torch_sink.image.sources.source import EncodedSource

MARKER_BYTES = 2
_RESTART_MARKER = re.compile(rb"\xff[\xd0-\xd7]")
# A code for the DC coefficient and one for the end of the block.
_LEAST_BITS_OF_A_BLOCK = 2
# The kernels count the samples of an image, and the bits of a scan, with 32 bits.
_MOST_BLOCKS_OF_AN_IMAGE = 1 << 25
_MOST_BYTES_OF_A_SCAN = 1 << 27


class JpegFile(NamedTuple):
    """A file that the kernels decode.

    Attributes:
        source: the file; its header names a scan that the kernels cover.
        scan: that scan.
        cuts: where its pieces begin, and its length, in bytes. Each piece ends with a marker of two bytes: a restart
            marker, or the end of the image. The first one begins with the header.
    """

    source: EncodedSource
    scan: BaselineScan
    cuts: list[int]

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Position and length of the entropy-coded data of each piece, in bytes."""
        begins = [self.scan.begin, *self.cuts[1:-1]]
        return [(begin, end - MARKER_BYTES - begin) for begin, end in zip(begins, self.cuts[1:], strict=True)]

    @property
    def channels(self) -> int:
        """That are wanted."""
        return 1 if self.source.mode == "L" else 3


def jpeg_file(source: EncodedSource) -> JpegFile | None:
    """A file for the kernels, or None where its data cannot be what the header announces, or the image is too large.

    A scan may be too short for the image's blocks, so that nothing is allocated for a size that is made up. Or its
    restart markers are others.
    """
    scan = source.header.scan
    if scan is None:
        return None
    (width, height), (across, down), data = source.size, scan.sampling, source.data
    mcus = -(-width // (8 * across)) * -(-height // (8 * down))
    blocks = mcus * (across * down + len(scan.dc) - 1)
    end = len(data) - MARKER_BYTES
    scan_bytes = end - scan.begin
    if blocks > _MOST_BLOCKS_OF_AN_IMAGE or scan_bytes > _MOST_BYTES_OF_A_SCAN:
        return None
    if _LEAST_BITS_OF_A_BLOCK * blocks > 8 * scan_bytes:
        return None
    if not scan.restart_interval:
        return JpegFile(source, scan, [0, len(data)])
    marks = [match.start() for match in _RESTART_MARKER.finditer(data, scan.begin, end)]
    in_order = all(data[mark + 1] == 0xD0 + number % 8 for number, mark in enumerate(marks))
    if not in_order or len(marks) + 1 != -(-mcus // scan.restart_interval):
        return None
    return JpegFile(source, scan, [0, *(mark + MARKER_BYTES for mark in marks), len(data)])
