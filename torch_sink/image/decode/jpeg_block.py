"""JPEG files laid out as the kernels read them, and all that the kernels need to know of them, made in a data worker.

The block that a batch travels in begins with the files. Each stands there once, as it is, but for the gaps that make
its entropy-coded data begin at a multiple of 16 bytes: before the file, and after each restart marker. The tables of
the files follow. The block is copied to the device as a whole, and its bytes stay as they are on the way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.image.decode.jpeg_header import BaselineScan
from torch_sink.image.decode.source import EncodedSource, Source
from torch_sink.triton_kernels import jpeg_rows as rows

ALIGNMENT_BYTES = 16
# Between the end of a segment and the next: kernels load whole vectors, and write zeros after what they unstuff.
_SPARE_BYTES = 64
_TABLE_VALUES = 64
_HEADER_COLUMNS = 17
_WIDE_QUANTIZATION = 0x10
# The row of a Huffman table is a number of 16 bits; a file has six at most.
_MOST_TABLES = (1 << 16) - 6
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


def jpeg_file(source: EncodedSource) -> JpegFile | None:
    """A file for the kernels, or None where its data cannot be what the header announces, or the image is too large.

    A scan may be too short for the image's blocks, so that nothing is allocated for a size that is made up. Or its
    restart markers are others.
    """
    scan = source.header.scan
    if scan is None:
        return None
    header, (across, down), data = source.header, scan.sampling, source.data
    mcus = -(-header.width // (8 * across)) * -(-header.height // (8 * down))
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


class Headers(NamedTuple):
    """What the files of a batch say: numbers for every file, int64 [images], or [attributes, images]."""

    size: np.ndarray  # width and height, pixels
    components: np.ndarray  # 1 or 3
    sampling: np.ndarray  # luma blocks of an MCU across and down
    interval: np.ndarray  # MCUs between two restart markers; 0 where there are none
    segments: np.ndarray  # pieces of the scan
    channels: np.ndarray  # that are wanted
    tables: np.ndarray  # rows of the quantization, the DC and the AC tables, of three components each


class JpegFiles(NamedTuple):
    """The files of a block that the kernels decode; n of them, in the order of their bytes.

    Attributes:
        sources: int32 [n], position of each among the sources of the batch.
        headers: int32 [n, 17], `columns` gives them names.
        segments: int64 [segments, 2], first byte in the block and length of all pieces of entropy-coded data.
        huffman: first byte in the block, and number, of the Huffman tables; uint8 [HUFFMAN_COLUMNS] each.
        quantization: the same of the quantization tables; int32 [64] each, zigzag order.
        pieces: {position among the sources: begin and end of the pieces of that file in the block}: one after the other
            they are the file.
        chunks: what to write, at the beginning of the block.
    """

    sources: np.ndarray
    headers: np.ndarray
    segments: np.ndarray
    huffman: tuple[int, int]
    quantization: tuple[int, int]
    pieces: dict[int, list[tuple[int, int]]]
    chunks: Chunks

    def columns(self) -> Headers:
        """The headers, attribute by attribute."""
        columns = self.headers.T.astype(np.int64)
        return Headers._make([columns[:2], columns[2], columns[3:5], *columns[5:8], columns[8:]])

    def part(self, first: int, last: int) -> JpegFiles:
        """Some of them, up to the one before `last`."""
        begin, end = np.cumsum([0, *self.columns().segments])[[first, last]]
        headers, segments = self.headers[first:last], self.segments[begin:end]
        return self._replace(sources=self.sources[first:last], headers=headers, segments=segments)

    def whole_images(self) -> np.ndarray:
        """int32 [n, 4], the box that holds all of each image: left, top, width, height."""
        return np.pad(self.headers[:, :2], ((0, 0), (2, 0)))


class Chunks:
    """What will be written one after the other, in one go.

    Attributes:
        size: bytes of all of it.
    """

    def __init__(self) -> None:
        self.size = 0
        self._chunks: list[bytes | memoryview] = []

    def add(
        self, chunk: bytes | memoryview, alignment: int = ALIGNMENT_BYTES, spare: int = 0, lead: int = 0
    ) -> tuple[int, int]:
        """Adds a chunk behind `spare` bytes, its byte `lead` at a multiple of the alignment.

        Returns:
            Where it begins, and where it ends, in bytes.
        """
        begin = -(-(self.size + spare) // alignment) * alignment if self.size else 0
        begin += -lead % alignment
        self._chunks += [bytes(begin - self.size), chunk]
        self.size = begin + len(chunk)
        return begin, self.size

    def add_array(self, array: np.ndarray) -> int:
        """Where the values of an array begin."""
        return self.add(array.reshape(-1).view(np.uint8).data)[0]

    def write(self, memory: torch.Tensor) -> torch.Tensor:
        """Writes all of it to uint8 [size], on the host; returns that."""
        view, begin = memoryview(memory.numpy().data), 0
        for chunk in self._chunks:
            view[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        return memory


def lay_out_jpegs(sources: Sequence[Source]) -> JpegFiles:
    """Lays out those sources of a batch that the kernels decode, in order."""
    tables = _Tables()
    files: dict[int, JpegFile] = {}
    headers = []
    for at, source in enumerate(sources):
        file = jpeg_file(source) if isinstance(source, EncodedSource) else None
        if file is not None and len(tables.huffman) < _MOST_TABLES:
            files[at] = file
            header, scan, channels = file.source.header, file.scan, 1 if file.source.mode == "L" else 3
            about = header.width, header.height, len(scan.dc), *scan.sampling, scan.restart_interval
            headers.append((*about, len(file.cuts) - 1, channels, *tables.of_file(file.source.data, scan)))
    pieces, segments, chunks = _cut(files)
    first_table, _ = chunks.add(b"".join(tables.huffman), spare=_SPARE_BYTES)
    second_table = chunks.add_array(np.frombuffer(b"".join(tables.quantization), ">u2").astype(np.int32))
    return JpegFiles(
        np.array(list(files), np.int32),
        np.array(headers, np.int32).reshape(-1, _HEADER_COLUMNS),
        np.array(segments, np.int64).reshape(-1, 2),
        (first_table, len(tables.huffman)),
        (second_table, len(tables.quantization)),
        pieces,
        chunks,
    )


def aligned(size: Any) -> Any:
    """The next multiple of the alignment, of a number or an array."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def joined(block: np.ndarray, pieces: Sequence[tuple[int, int]]) -> bytes | memoryview:
    """A file whose pieces lie in a block, uint8 [bytes]; it is copied only where there are several."""
    found = [memoryview(block[begin:end]) for begin, end in pieces]  # type: ignore[arg-type]
    return found[0] if len(found) == 1 else b"".join(found)


_Places = list[tuple[int, int]]


def _cut(files: dict[int, JpegFile]) -> tuple[dict[int, _Places], _Places, Chunks]:
    """Where the pieces of each file lie, first byte and length of all entropy-coded data, and what to write."""
    pieces: dict[int, _Places] = {}
    segments: _Places = []
    chunks = Chunks()
    for at, file in files.items():
        pieces[at] = []
        data, lead = memoryview(file.source.data), file.scan.begin  # bytes before the entropy-coded data
        for first, last in pairwise(file.cuts):
            begin, end = chunks.add(data[first:last], spare=_SPARE_BYTES, lead=lead)
            pieces[at].append((begin, end))
            segments.append((begin + lead, last - first - lead - MARKER_BYTES))
            lead = 0
    return pieces, segments, chunks


class _Tables:
    """The distinct tables of a batch, which most of its files share.

    Attributes:
        huffman: {row of a table: its number}, in the order in which they first come.
        quantization: the same; a row has 64 values of two bytes.
    """

    def __init__(self) -> None:
        self.huffman: dict[bytes, int] = {}
        self.quantization: dict[bytes, int] = {}
        # What a file says of either -> their numbers. Bytes of one kind may be those of the other.
        self._known_codes: dict[bytes, tuple[int, ...]] = {}
        self._known_values: dict[bytes, int] = {}

    def of_file(self, data: bytes | memoryview, scan: BaselineScan) -> tuple[int, ...]:
        """Rows of the quantization, the DC and the AC tables of three components; a gray file repeats its own."""
        # From the first of the codes on, these bytes say all of them, and which component has which.
        codes = bytes(data[min(scan.dc + scan.ac) - 1 : scan.begin])
        known = self._known_codes.get(codes)
        if known is None:
            at = {place: _numbered(self.huffman, _huffman_row(data, place)) for place in {*scan.dc, *scan.ac}}
            known = tuple(at[place] for of_class in (scan.dc, scan.ac) for place in of_class * (3 // len(of_class)))
            self._known_codes[codes] = known
        numbers: list[int] = []
        for at_values in scan.quantization:  # the byte before the values, which says how many bytes these have
            is_wide = data[at_values] >= _WIDE_QUANTIZATION
            values = bytes(data[at_values : at_values + 1 + (2 if is_wide else 1) * _TABLE_VALUES])
            number = self._known_values.get(values)
            if number is None:
                row = bytearray(2 * _TABLE_VALUES)
                row[0 if is_wide else 1 :: 1 if is_wide else 2] = values[1:]
                number = self._known_values[values] = _numbered(self.quantization, bytes(row))
            numbers.append(number)
        return *numbers * (3 // len(numbers)), *known


def _numbered(numbers: dict[bytes, int], row: bytes) -> int:
    return numbers.setdefault(row, len(numbers))


def _huffman_row(data: bytes | memoryview, at: int) -> bytes:
    """`at` is the first of the counts of a table; the byte before says its class."""
    used = rows.SYMBOLS + sum(data[at : at + rows.SYMBOLS])
    return bytes(data[at : at + used]).ljust(rows.TABLE_CLASS, b"\0") + (b"\1" if data[at - 1] >> 4 else b"\0")
