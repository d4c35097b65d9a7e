"""JPEG files as the kernels read them: how they lie in a block, and the tables that describe them.

The block that a batch travels in begins with the files. Each is there once and unchanged, except for gaps that make its
entropy-coded data begin at a multiple of 16 bytes: before the file, and after each restart marker. The tables of the
files follow. The block is copied to the device as a whole and unchanged.

A data worker makes both, and loads no kernel for that. `triton_kernels/jpeg_rows.py` has the columns of the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.image.decode.encoded import BaselineScan, EncodedSource
from torch_sink.image.decode.source import Source
from torch_sink.triton_kernels import jpeg_rows as rows
from torch_sink.triton_kernels.shapes import (
    TILE_SHAPE,
    LaneShape,
    TileShape,
    choose_lane_shape,
    lane_count,
    tile_shape,
)

ALIGNMENT_BYTES = 16
# Between the end of a segment and the next: kernels load whole vectors, and write zeros after what they unstuff.
_SPARE_BYTES = 64
_TABLE_VALUES = 64
_WIDE_QUANTIZATION = 0x10
# The kernels number Huffman tables with 16 bits; a file has six at most.
_MOST_TABLES = (1 << 16) - 6
MARKER_BYTES = 2
_RESTART_MARKER = re.compile(rb"\xff[\xd0-\xd7]")
# A block has at least a code for its DC coefficient and one for its end.
_LEAST_BITS_OF_A_BLOCK = 2
# The kernels count the samples of an image, and the bits of a scan, with 32 bits.
_MOST_BLOCKS_OF_AN_IMAGE = 1 << 25
_MOST_BYTES_OF_A_SCAN = 1 << 27


# Columns of a header: those of an image, where its first block is still 0, and these.
BLOCKS, SEGMENTS, CHANNELS, BLOCKS_OF_SEGMENT, HEADER_COLUMNS = (rows.IMAGE_COLUMNS + more for more in range(5))


class JpegFile(NamedTuple):
    """A file that the kernels decode.

    Attributes:
        source: the file; its header has a scan that the kernels cover.
        scan: the scan in the header.
        counts: MCUs in a row, blocks of an MCU, blocks of the image.
        cuts: first byte of each piece of the file, then its length. A piece ends with a marker of two bytes: a restart
            marker, or the end of the image. The first piece begins with the header.
    """

    source: EncodedSource
    scan: BaselineScan
    counts: tuple[int, int, int]
    cuts: list[int]


def jpeg_file(source: EncodedSource) -> JpegFile | None:
    """A file for the kernels; None where its data cannot be what the header announces, or the image is too large.

    The data are refused where they are too short for the image's blocks, so that nothing is allocated for a made-up
    size, and where restart markers are missing or out of order.
    """
    scan = source.header.scan
    if scan is None:
        return None
    header, (across, down), data = source.header, scan.sampling, source.data
    mcus_per_row, units = -(-header.width // (8 * across)), across * down + len(scan.dc) - 1
    mcus = mcus_per_row * -(-header.height // (8 * down))
    blocks = mcus * units
    end = len(data) - MARKER_BYTES
    scan_bytes = end - scan.begin
    if blocks > _MOST_BLOCKS_OF_AN_IMAGE or scan_bytes > _MOST_BYTES_OF_A_SCAN:
        return None
    if _LEAST_BITS_OF_A_BLOCK * blocks > 8 * scan_bytes:
        return None
    counts = mcus_per_row, units, blocks
    if not scan.restart_interval:
        return JpegFile(source, scan, counts, [0, len(data)])
    marks = [match.start() for match in _RESTART_MARKER.finditer(data, scan.begin, end)]
    in_order = all(data[mark + 1] == 0xD0 + number % 8 for number, mark in enumerate(marks))
    if not in_order or len(marks) + 1 != -(-mcus // scan.restart_interval):
        return None
    return JpegFile(source, scan, counts, [0, *(mark + MARKER_BYTES for mark in marks), len(data)])


class JpegFiles(NamedTuple):
    """The n files of a block that the kernels decode, in the order of their bytes.

    Attributes:
        sources: int32 [n], position of each among the sources of the batch.
        headers: int32 [n, HEADER_COLUMNS]: columns of an image, its blocks, its segments, the channels to decode, and
            the blocks of each segment but the last.
        segments: int64 [segments, 2], first byte in the block and length of each piece of entropy-coded data.
        huffman: first byte in the block, and number, of the Huffman tables; uint8 [HUFFMAN_COLUMNS] each.
        quantization: first byte in the block, and number, of the quantization tables; int32 [64] each, zigzag order.
        pieces: {position among the sources: begin and end in the block of each piece of that file}.
        chunks: the files and tables, to be written to the beginning of the block.
    """

    sources: np.ndarray
    headers: np.ndarray
    segments: np.ndarray
    huffman: tuple[int, int]
    quantization: tuple[int, int]
    pieces: dict[int, list[tuple[int, int]]]
    chunks: Chunks

    def part(self, first: int, last: int) -> JpegFiles:
        """The files from `first` up to, but without, `last`."""
        begin, end = np.cumsum([0, *self.headers[:, SEGMENTS]])[[first, last]]
        headers, segments = self.headers[first:last], self.segments[begin:end]
        return self._replace(sources=self.sources[first:last], headers=headers, segments=segments)

    def whole_images(self) -> np.ndarray:
        """int32 [n, 4], the box of each whole image: left, top, width, height."""
        return np.pad(self.headers[:, :2], ((0, 0), (2, 0)))


class Chunks:
    """Pieces of bytes that are collected, then written one after the other.

    Attributes:
        size: bytes of all of them, with the gaps between them.
    """

    def __init__(self) -> None:
        self.size = 0
        self._chunks: list[bytes | memoryview] = []

    def add(
        self, chunk: bytes | memoryview, alignment: int = ALIGNMENT_BYTES, spare: int = 0, lead: int = 0
    ) -> tuple[int, int]:
        """Adds a chunk after `spare` bytes, its byte `lead` at a multiple of the alignment.

        Returns:
            Begin and end of the chunk, in bytes.
        """
        begin = -(-(self.size + spare) // alignment) * alignment if self.size else 0
        begin += -lead % alignment
        self._chunks += [bytes(begin - self.size), chunk]
        self.size = begin + len(chunk)
        return begin, self.size

    def add_array(self, array: np.ndarray) -> int:
        """Adds an array; returns its first byte."""
        return self.add_arrays([array])[0]

    def add_arrays(self, arrays: Iterable[np.ndarray]) -> list[int]:
        """Adds arrays, as `add` does; returns the first byte of each."""
        begins = []
        for array in arrays:
            chunk = array.reshape(-1).view(np.uint8).data
            begin = -(-self.size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._chunks += [bytes(begin - self.size), chunk]
            self.size = begin + len(chunk)
            begins.append(begin)
        return begins

    def write(self, memory: torch.Tensor) -> torch.Tensor:
        """Writes all chunks to `memory`, uint8 [size] on the host, and returns it."""
        view, begin = memoryview(memory.numpy().data), 0
        for chunk in self._chunks:
            view[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        return memory


def lay_out_jpegs(sources: Sequence[Source]) -> JpegFiles:
    """Lays out, in order, those sources of a batch that the kernels decode."""
    tables = _Tables()
    files: dict[int, JpegFile] = {}
    headers = []
    for at, source in enumerate(sources):
        file = jpeg_file(source) if isinstance(source, EncodedSource) else None
        if file is not None and len(tables.huffman) < _MOST_TABLES:
            files[at] = file
            (_, _, header, mode), scan, (mcus_per_row, units, blocks), cuts = file
            about = header.width, header.height, len(scan.dc), *scan.sampling, mcus_per_row, units, 0
            segment = scan.restart_interval * units or blocks
            more = blocks, len(cuts) - 1, 1 if mode == "L" else 3, segment
            headers.append((*about, *tables.of_file(file.source.data, scan), *more))
    pieces, segments, chunks = _cut(files)
    first_table, _ = chunks.add(b"".join(tables.huffman), spare=_SPARE_BYTES)
    second_table = chunks.add_array(np.frombuffer(b"".join(tables.quantization), ">u2").astype(np.int32))
    return JpegFiles(
        np.array(list(files), np.int32),
        np.array(headers, np.int32).reshape(-1, HEADER_COLUMNS),
        np.array(segments, np.int64).reshape(-1, 2),
        (first_table, len(tables.huffman)),
        (second_table, len(tables.quantization)),
        pieces,
        chunks,
    )


def _aligned(size: Any) -> Any:
    """Rounds a number or an array up to multiples of `ALIGNMENT_BYTES`."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def joined(block: np.ndarray, pieces: Sequence[tuple[int, int]]) -> bytes | memoryview:
    """A file whose pieces lie in a block, uint8 [bytes]; it is copied only where there are several."""
    found = [memoryview(block[begin:end]) for begin, end in pieces]  # type: ignore[arg-type]
    return found[0] if len(found) == 1 else b"".join(found)


_Places = list[tuple[int, int]]


def _cut(files: dict[int, JpegFile]) -> tuple[dict[int, _Places], _Places, Chunks]:
    """The pieces of each file (begin, end), all segments of entropy-coded data (begin, length), and the chunks."""
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
        huffman: {bytes of a table: its number}, in the order of their first use.
        quantization: the same for quantization tables, which have 64 values of two bytes.
    """

    def __init__(self) -> None:
        self.huffman: dict[bytes, int] = {}
        self.quantization: dict[bytes, int] = {}
        # {bytes in a file: numbers of the tables that they define}: two, as the same bytes may be codes or values.
        self._known_codes: dict[bytes, tuple[int, ...]] = {}
        self._known_values: dict[bytes, int] = {}

    def of_file(self, data: bytes | memoryview, scan: BaselineScan) -> tuple[int, ...]:
        """Numbers of the quantization, DC and AC tables of three components; a gray file repeats its own."""
        # From the first table to the scan, these bytes define all codes, and which component uses which.
        codes = bytes(data[min(scan.dc + scan.ac) - 1 : scan.begin])
        known = self._known_codes.get(codes)
        if known is None:
            found, numbers_at = self.huffman, dict[int, int]()
            for at in {*scan.dc, *scan.ac}:  # the byte before the counts says the table's class
                used = rows.SYMBOLS + sum(data[at : at + rows.SYMBOLS])
                row = bytes(data[at : at + used]).ljust(rows.TABLE_CLASS, b"\0") + bytes([data[at - 1] >> 4 > 0])
                numbers_at[at] = found.setdefault(row, len(found))
            each = scan.dc * (3 // len(scan.dc)) + scan.ac * (3 // len(scan.ac))
            known = self._known_codes[codes] = tuple(map(numbers_at.__getitem__, each))
        numbers: list[int] = []
        for at_values in scan.quantization:  # the byte before the values, which says how wide they are
            is_wide = data[at_values] >= _WIDE_QUANTIZATION
            values = bytes(data[at_values : at_values + 1 + (2 if is_wide else 1) * _TABLE_VALUES])
            number = self._known_values.get(values)
            if number is None:
                wide = bytearray(2 * _TABLE_VALUES)
                wide[0 if is_wide else 1 :: 1 if is_wide else 2] = values[1:]
                number = self._known_values[values] = self.quantization.setdefault(bytes(wide), len(self.quantization))
            numbers.append(number)
        return *numbers * (3 // len(numbers)), *known


# --- the tables of a plan

# Upsampling reads one chroma sample outside the box.
_CHROMA_MARGIN_PIXELS = 2
# Blocks of a launch: 1 GiB of coefficients, those of 1,000 photographs of 500 x 375 pixels.
_MOST_BLOCKS = 1 << 23
_MOST_STREAM_BYTES = 1 << 29


class JpegBatch(NamedTuple):
    """Files that are decoded together: where their arrays begin in the block, and the sizes of everything."""

    # First bytes in the block.
    stream: int  # uint8 [stream_bytes], from the first segment on
    huffman: int  # uint8 [tables, HUFFMAN_COLUMNS]
    quantization: int  # int32 [tables, 64]
    images: int  # int32 [images, IMAGE_COLUMNS]
    segments: int  # int32 [segments, SEGMENT_COLUMNS]
    windows: int  # int32 [images, WINDOW_COLUMNS]
    # Sizes.
    stream_bytes: int  # from the first segment to 16 bytes after the last
    image_rows: int  # rows of the images, and of the windows
    segment_rows: int
    quantization_rows: int
    huffman_rows: int
    lanes: int  # of all segments
    blocks: int  # of all images
    planes_bytes: int  # for the samples of all windows
    pixels_bytes: int  # for the pixels of all boxes
    block_tiles: int  # of all windows
    pixel_tiles: int  # of all windows

    def moved(self, first: int) -> JpegBatch:
        """The batch, where its last three tables were counted from byte 0 and now begin at `first`."""
        images, segments, windows = self.images + first, self.segments + first, self.windows + first
        return self._replace(images=images, segments=segments, windows=windows)


class JpegPlan(NamedTuple):
    """How the JPEG files of a block are decoded."""

    size: int  # bytes of the block up to the end of the files' tables
    batches: tuple[JpegBatch, ...]  # the files, in order, in batches that fit into a launch
    shape: LaneShape  # shape of the lanes
    tile: TileShape  # how much a program of the pixel kernels makes
    encoded_bytes: int  # in all segments
    pixels_bytes: int  # for the pixels of all boxes, batch after batch


def plan_jpegs(
    files: JpegFiles, boxes: np.ndarray, write: Callable[[np.ndarray], int], shape: LaneShape | None = None
) -> tuple[JpegPlan, np.ndarray]:
    """Plans the decoding of files.

    Args:
        files: the files of a block, at least one.
        boxes: int32 [files, 4], left, top, width, height of the part of each image to decode, in pixels.
        write: appends an array to the block and returns its first byte, a multiple of 16.
        shape: shape of the lanes; by default chosen for the size of the batch.

    Returns:
        The plan, and int64 [files, 4]: bytes from the first of all pixels to where pixel (0, 0) of each image would lie
        if all of it were decoded, and between its rows, columns and channels (0 for one channel).
    """
    encoded_bytes = int(files.segments[:, 1].sum())
    shape = shape or choose_lane_shape(encoded_bytes)
    tile, size, pixels_bytes = tile_shape(), 0, 0
    batches, places = [], []
    for batch, tables, of_batch in _batches(files, boxes, shape.bits, tile):
        begin = write(tables)
        batches.append(batch.moved(begin))
        of_batch[:, 0] += pixels_bytes
        places.append(of_batch)
        size, pixels_bytes = begin + tables.nbytes, pixels_bytes + batch.pixels_bytes
    return JpegPlan(size, tuple(batches), shape, tile, encoded_bytes, pixels_bytes), np.concatenate(places)


# A batch; the tables of its images, segments and windows, whose beginnings the batch counts from the first of these
# bytes; and the places of its images, from the first byte of its pixels.
_Laid = tuple[JpegBatch, np.ndarray, np.ndarray]


def _batches(files: JpegFiles, boxes: np.ndarray, lane_bits: int, tile: TileShape) -> list[_Laid]:
    """The files in batches that fit into a launch; a larger file is alone in its batch."""
    laid, count = batch_of(files, boxes, lane_bits, tile), len(boxes)
    batch, *_ = laid
    if count == 1 or (batch.blocks <= _MOST_BLOCKS and batch.stream_bytes <= _MOST_STREAM_BYTES):
        return [laid]
    found = []
    for first, last in ((0, count // 2), (count // 2, count)):
        found += _batches(files.part(first, last), boxes[first:last], lane_bits, tile)
    return found


def batch_of(files: JpegFiles, boxes: np.ndarray, lane_bits: int, tile: TileShape = TILE_SHAPE) -> _Laid:
    """A batch, its tables, and the places of its pixels, computed for all files at once.

    Args:
        files: the files of a block, or some of them.
        boxes: [files, 4], left, top, width and height of the part of each image to decode, in pixels.
        lane_bits: how many bits a lane decodes.
        tile: how much a program of the pixel kernels makes.
    """
    headers, boxes, (first_byte, lengths) = files.headers.astype(np.int64), boxes.astype(np.int64), files.segments.T
    shapes = (len(boxes), rows.IMAGE_COLUMNS), (len(lengths), rows.SEGMENT_COLUMNS), (len(boxes), rows.WINDOW_COLUMNS)
    sizes = np.array(shapes).prod(axis=1)
    ends: list[int] = _aligned(4 * sizes).cumsum().tolist()
    begins, tables = [0, *ends[:-1]], np.zeros(ends[-1] // 4, np.int32)
    images, segments, windows = [
        tables[begin // 4 :][:size].reshape(shape) for begin, size, shape in zip(begins, sizes, shapes, strict=True)
    ]
    blocks, segments_of_image, _, blocks_of_segment = headers.T[rows.IMAGE_COLUMNS :]
    (first_block, first_segment), (all_blocks, _) = _starts(blocks, segments_of_image)
    images[:] = headers[:, : rows.IMAGE_COLUMNS]
    images[:, rows.FIRST_BLOCK] = first_block

    image = np.repeat(np.arange(len(blocks)), segments_of_image)
    before = (np.arange(len(image)) - first_segment[image]) * blocks_of_segment[image]
    lanes = lane_count(lengths, lane_bits)
    (first_lane,), (all_lanes,) = _starts(lanes)
    count = np.minimum(blocks_of_segment[image], blocks[image] - before)
    segments.T[:] = image, first_byte - first_byte[0], lengths, first_block[image] + before, count, first_lane, lanes

    planes, pixels, block_tiles, pixel_tiles = _fill_windows(windows, headers, boxes, tile)
    batch = JpegBatch(
        stream=int(first_byte[0]),
        huffman=files.huffman[0],
        quantization=files.quantization[0],
        images=begins[0],
        segments=begins[1],
        windows=begins[2],
        stream_bytes=int(_aligned(first_byte[-1] - first_byte[0] + lengths[-1])) + ALIGNMENT_BYTES,
        image_rows=len(images),
        segment_rows=len(segments),
        quantization_rows=files.quantization[1],
        huffman_rows=files.huffman[1],
        lanes=all_lanes,
        blocks=all_blocks,
        planes_bytes=planes * rows.PLANES_UNIT,
        pixels_bytes=pixels * rows.PIXELS_UNIT,
        block_tiles=block_tiles,
        pixel_tiles=pixel_tiles,
    )
    return batch, tables, _places(windows, boxes)


def _fill_windows(windows: np.ndarray, headers: np.ndarray, boxes: np.ndarray, tile: TileShape) -> list[int]:
    """Fills the table of windows; returns the sums of PLANES_UNITs, PIXELS_UNITs, block tiles, and pixel tiles.

    Args:
        windows: int32 [images, WINDOW_COLUMNS], written to.
        headers: int64 [images, HEADER_COLUMNS].
        boxes: int64 [images, 4].
        tile: how much a program makes.
    """
    # Both axes at once: [images, 2].
    begins, lengths, sampling = boxes[:, :2], boxes[:, 2:], headers[:, rows.SAMPLING_H : rows.SAMPLING_V + 1]
    mcu, channels = 8 * sampling, headers[:, CHANNELS]
    first = np.maximum(begins - _CHROMA_MARGIN_PIXELS, 0) // mcu
    mcus = -(-np.minimum(begins + lengths + _CHROMA_MARGIN_PIXELS, headers[:, : rows.HEIGHT + 1]) // mcu) - first
    units = mcus.prod(axis=1) * headers[:, rows.UNITS]
    pixels = -(-channels * lengths.prod(axis=1) // rows.PIXELS_UNIT)
    luma_tiles, chroma_tiles = (-(-np.stack([mcus * sampling, mcus]) // (tile.block_columns, tile.block_rows))).prod(2)
    block_tiles = luma_tiles + (headers[:, rows.COMPONENTS] - 1) * chroma_tiles
    # Where the box begins in the window, in pixels.
    inside, pixel_shape = begins - first * mcu, (tile.columns, tile.rows)
    pixel_tiles = (-(-(inside + lengths) // pixel_shape) - inside // pixel_shape).prod(axis=1)
    starts, totals = _starts(units, pixels, block_tiles, pixel_tiles)
    windows[:, rows.MCU_LEFT : rows.MCUS_ACROSS], windows[:, rows.MCUS_ACROSS : rows.PLANES] = first, mcus
    windows[:, rows.BOX_LEFT : rows.CHANNELS], windows[:, rows.CHANNELS] = boxes, channels
    windows[:, [rows.PLANES, rows.PIXELS, rows.FIRST_BLOCK_TILE, rows.FIRST_PIXEL_TILE]] = starts.T
    windows[:, rows.BLOCK_TILES], windows[:, rows.PIXEL_TILES] = block_tiles, pixel_tiles
    return totals


def _places(windows: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """The places that `plan_jpegs` returns; boxes: int64 [images, 4]."""
    left, top, width, height = boxes.T
    places = np.ones((len(boxes), 4), np.int64)
    places[:, 0] = windows[:, rows.PIXELS].astype(np.int64) * rows.PIXELS_UNIT - top * width - left
    places[:, 1], places[:, 3] = width, np.where(windows[:, rows.CHANNELS] > 1, width * height, 0)
    return places


def _starts(*lengths: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Exclusive running sums of each kind of lengths, int64 [kinds, lengths], and the total of each kind."""
    together = np.array(lengths)
    ends = together.cumsum(axis=1)
    return ends - together, ends[:, -1].tolist()
