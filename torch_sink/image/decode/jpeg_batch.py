"""Baseline files -> the arrays that the JPEG kernels read. What each column means: `triton_kernels/jpeg/layout.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torch_sink.image.decode.decoded import Box
from torch_sink.image.decode.jpeg_scan import BaselineScan
from torch_sink.image.source import EncodedSource
from torch_sink.triton_kernels.jpeg import layout
from torch_sink.triton_kernels.jpeg import window as window_layout

_COLUMN = {name: value.value for name, value in vars(layout).items() if hasattr(value, "value")}
_WINDOW_COLUMN = {name: value.value for name, value in vars(window_layout).items() if hasattr(value, "value")}

_BLOCK_SAMPLES = 64
# Upsampling reads one chroma sample beside the box.
_CHROMA_MARGIN_PIXELS = 2
_PIXEL_ALIGNMENT_BYTES = 16
_STREAM_ALIGNMENT_BYTES = 16
_ZEROS = bytes(2 * _STREAM_ALIGNMENT_BYTES)
_RESTART_MARKER = re.compile(rb"\xff[\xd0-\xd7]")
_END_MARKER_BYTES = 2
_WIDE_QUANTISATION = 0x10
# A code for the DC coefficient and one for the end of the block.
_LEAST_BITS_OF_A_BLOCK = 2


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


class JpegBatch(NamedTuple):
    """A batch as the kernels read it.

    Attributes:
        stream: uint8 [bytes], the segments, each from a multiple of 16 bytes on and followed by 16 zeros or more.
        images: int32 [images, IMAGE_COLUMNS].
        segments: int32 [segments, SEGMENT_COLUMNS].
        quantisation: int32 [tables, 64], zigzag order; each table once.
        huffman: uint8 [tables, HUFFMAN_COLUMNS]; each table once.
        windows: int64 [images, WINDOW_COLUMNS].
        planes_bytes: for the samples of all windows.
        pixels_bytes: for the pixels of all boxes.
    """

    stream: torch.Tensor
    images: np.ndarray
    segments: np.ndarray
    quantisation: np.ndarray
    huffman: np.ndarray
    windows: np.ndarray
    planes_bytes: int
    pixels_bytes: int

    @property
    def lanes(self) -> int:
        """Lanes of all segments."""
        return int(self.segments[:, _COLUMN["LANES"]].sum())

    @property
    def blocks(self) -> int:
        """Blocks of all images."""
        return int(self.images[:, _COLUMN["BLOCKS"]].sum())

    @property
    def pixel_offsets(self) -> list[int]:
        """Where the pixels of each box begin."""
        return self.windows[:, _WINDOW_COLUMN["PIXELS"]].tolist()


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
    """One image of a batch, or None where the data cannot be what the header announces.

    Either the scan is too short for the image's blocks, so that nothing is allocated for sizes that are made up, or its
    restart markers are others.

    Args:
        source: a file whose header names a scan.
        box: the part that is wanted, by default all of it.
    """
    scan = source.header.scan
    assert scan is not None  # the caller has asked
    end = len(source.data) - _END_MARKER_BYTES
    if _LEAST_BITS_OF_A_BLOCK * block_count(source, scan) > 8 * (end - scan.begin):
        return None
    box = box or Box(0, 0, *source.size)
    if not scan.restart_interval:
        return JpegFile(source, scan, [(scan.begin, end - scan.begin)], box)
    marks = [match.start() for match in _RESTART_MARKER.finditer(source.data, scan.begin, end)]
    across, down = mcu_counts(source, scan)
    in_order = all(source.data[mark + 1] == 0xD0 + number % 8 for number, mark in enumerate(marks))
    if not in_order or len(marks) + 1 != -(-across * down // scan.restart_interval):
        return None
    begins, ends = [scan.begin, *(mark + 2 for mark in marks)], [*marks, end]
    return JpegFile(source, scan, [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)], box)


def pack_jpegs(files: Sequence[JpegFile], lane_bits: int, *, pinned: bool = False) -> JpegBatch:
    """The arrays of a batch.

    Args:
        files: its images.
        lane_bits: how many bits a lane decodes.
        pinned: the stream lies in pinned memory.
    """
    quantisation, huffman = _Tables(), _Tables()
    headers = []
    for file in files:
        data, scan = file.source.data, file.scan
        tables = [
            *(quantisation.row(_quantisation_values(data, at)) for at in _three(scan.quantisation)),
            *(huffman.row(_huffman_row(data, at, 0)) for at in _three(scan.dc)),
            *(huffman.row(_huffman_row(data, at, 1)) for at in _three(scan.ac)),
        ]
        header = *file.source.size, len(scan.dc), *scan.sampling, scan.restart_interval
        headers.append((*header, len(file.segments), file.channels, *file.box, *tables))
    table = np.array(headers, dtype=np.int64).reshape(len(files), -1)
    images = _image_rows(table)
    windows, planes_bytes, pixels_bytes = _window_rows(table, images)
    places = [place for file in files for place in file.segments]
    segments = _segment_rows(table, images, np.array(places, dtype=np.int64).reshape(-1, 2), lane_bits)
    return JpegBatch(
        _stream(files, segments, pinned),
        images.astype(np.int32),
        segments.astype(np.int32),
        np.frombuffer(b"".join(quantisation.rows), np.uint16).reshape(-1, _BLOCK_SAMPLES).astype(np.int32),
        np.frombuffer(b"".join(huffman.rows), np.uint8).reshape(-1, _COLUMN["HUFFMAN_COLUMNS"]).copy(),
        windows,
        planes_bytes,
        pixels_bytes,
    )


class _Tables:
    """Distinct tables, as bytes, in the order in which they first come."""

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}

    def row(self, table: bytes) -> int:
        return self.rows.setdefault(table, len(self.rows))


def _three(places: tuple[int, ...]) -> tuple[int, ...]:
    """A place for each of three components; a gray file repeats its own."""
    return places if len(places) == 3 else places * 3


def _quantisation_values(data: bytes, at: int) -> bytes:
    """The 64 values of a table as uint16 of this machine."""
    if data[at] >= _WIDE_QUANTISATION:
        return np.frombuffer(data, ">u2", _BLOCK_SAMPLES, at + 1).astype(np.uint16).tobytes()
    return np.frombuffer(data, np.uint8, _BLOCK_SAMPLES, at + 1).astype(np.uint16).tobytes()


def _huffman_row(data: bytes, at: int, table_class: int) -> bytes:
    used = _COLUMN["SYMBOLS"] + sum(data[at : at + _COLUMN["SYMBOLS"]])
    return data[at : at + used].ljust(_COLUMN["TABLE_CLASS"], b"\0") + bytes((table_class,))


# Columns of the table that `pack_jpegs` gathers; the nine table numbers follow.
_WIDTH, _HEIGHT, _COMPONENTS, _ACROSS, _DOWN, _INTERVAL, _SEGMENTS, _CHANNELS, _LEFT, _TOP, _BOX_WIDTH, _BOX_HEIGHT = (
    range(12)
)
_FIRST_TABLE = 12


def _image_rows(table: np.ndarray) -> np.ndarray:
    """int64 [images, IMAGE_COLUMNS]."""
    images = np.zeros((len(table), _COLUMN["IMAGE_COLUMNS"]), np.int64)
    across = -(-table[:, _WIDTH] // (8 * table[:, _ACROSS]))
    down = -(-table[:, _HEIGHT] // (8 * table[:, _DOWN]))
    units = table[:, _ACROSS] * table[:, _DOWN] + table[:, _COMPONENTS] - 1
    columns = {
        "WIDTH": table[:, _WIDTH],
        "HEIGHT": table[:, _HEIGHT],
        "COMPONENTS": table[:, _COMPONENTS],
        "SAMPLING_H": table[:, _ACROSS],
        "SAMPLING_V": table[:, _DOWN],
        "MCUS_PER_ROW": across,
        "MCU_ROWS": down,
        "UNITS": units,
        "FIRST_BLOCK": _starts(across * down * units),
        "BLOCKS": across * down * units,
        "FIRST_SEGMENT": _starts(table[:, _SEGMENTS]),
        "SEGMENTS": table[:, _SEGMENTS],
    }
    for name, values in columns.items():
        images[:, _COLUMN[name]] = values
    for number, name in enumerate(("QUANTISATION", "DC_TABLE", "AC_TABLE")):
        first = _FIRST_TABLE + 3 * number
        images[:, _COLUMN[name] : _COLUMN[name] + 3] = table[:, first : first + 3]
    return images


def _segment_rows(table: np.ndarray, images: np.ndarray, places: np.ndarray, lane_bits: int) -> np.ndarray:
    """int64 [segments, SEGMENT_COLUMNS]; `places` [segments, 2] are positions and lengths in the files."""
    image = np.repeat(np.arange(len(table)), table[:, _SEGMENTS])
    number = np.arange(len(places)) - images[image, _COLUMN["FIRST_SEGMENT"]]
    units, blocks = images[image, _COLUMN["UNITS"]], images[image, _COLUMN["BLOCKS"]]
    # Where there are no restart markers, the only segment holds everything.
    step = np.where(table[image, _INTERVAL] > 0, table[image, _INTERVAL] * units, blocks)
    lengths = places[:, 1]
    lanes = layout.lane_count(lengths, lane_bits)
    segments = np.zeros((len(places), _COLUMN["SEGMENT_COLUMNS"]), np.int64)
    columns = {
        "SEGMENT_IMAGE": image,
        "FIRST_BYTE": _starts(_padded(lengths)),
        "BYTES": lengths,
        "SEGMENT_FIRST_BLOCK": images[image, _COLUMN["FIRST_BLOCK"]] + number * step,
        "SEGMENT_BLOCKS": np.minimum(step, blocks - number * step),
        "FIRST_LANE": _starts(lanes),
        "LANES": lanes,
    }
    for name, values in columns.items():
        segments[:, _COLUMN[name]] = values
    return segments


def _window_rows(table: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, int, int]:
    """int64 [images, WINDOW_COLUMNS], and the bytes of all planes and of all pixels."""
    windows = np.zeros((len(table), _WINDOW_COLUMN["WINDOW_COLUMNS"]), np.int64)
    columns = {name: table[:, at] for name, at in (("BOX_LEFT", _LEFT), ("BOX_TOP", _TOP), ("CHANNELS", _CHANNELS))}
    columns |= {"BOX_WIDTH": table[:, _BOX_WIDTH], "BOX_HEIGHT": table[:, _BOX_HEIGHT]}
    for begin, length, size, factor, first, count in (
        (_LEFT, _BOX_WIDTH, _WIDTH, _ACROSS, "MCU_LEFT", "MCUS_ACROSS"),
        (_TOP, _BOX_HEIGHT, _HEIGHT, _DOWN, "MCU_TOP", "MCUS_DOWN"),
    ):
        mcu = 8 * table[:, factor]
        end = np.minimum(table[:, begin] + table[:, length] + _CHROMA_MARGIN_PIXELS, table[:, size])
        columns[first] = np.maximum(table[:, begin] - _CHROMA_MARGIN_PIXELS, 0) // mcu
        columns[count] = -(-end // mcu) - columns[first]
    blocks = columns["MCUS_ACROSS"] * columns["MCUS_DOWN"] * images[:, _COLUMN["UNITS"]]
    pixels = columns["CHANNELS"] * columns["BOX_WIDTH"] * columns["BOX_HEIGHT"]
    pixels = -(-pixels // _PIXEL_ALIGNMENT_BYTES) * _PIXEL_ALIGNMENT_BYTES
    columns |= {"PLANES": _starts(blocks), "PIXELS": _starts(pixels)}
    for name, values in columns.items():
        windows[:, _WINDOW_COLUMN[name]] = values
    return windows, int(blocks.sum()) * _BLOCK_SAMPLES, int(pixels.sum())


def _padded(lengths: np.ndarray) -> np.ndarray:
    """Bytes that a segment takes in the stream."""
    aligned = -(-lengths // _STREAM_ALIGNMENT_BYTES) * _STREAM_ALIGNMENT_BYTES
    return aligned + _STREAM_ALIGNMENT_BYTES


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each of several things begins that lie one after the other."""
    return np.cumsum(lengths) - lengths


def _stream(files: Sequence[JpegFile], segments: np.ndarray, pinned: bool) -> torch.Tensor:
    starts, lengths = segments[:, _COLUMN["FIRST_BYTE"]], segments[:, _COLUMN["BYTES"]]
    stream = torch.empty(int(_padded(lengths).sum()), dtype=torch.uint8, pin_memory=pinned)
    view = memoryview(stream.numpy().data)
    ends = (starts + lengths).tolist()
    following = (starts + _padded(lengths)).tolist()
    number = 0
    for file in files:
        data = memoryview(file.source.data)
        for begin, length in file.segments:
            end = ends[number]
            view[end - length : end] = data[begin : begin + length]
            view[end : following[number]] = _ZEROS[: following[number] - end]
            number += 1
    return stream


def idct_tiles(batch: JpegBatch, blocks: int) -> np.ndarray:
    """int32 [tiles, TILE_COLUMNS]: runs of `blocks` blocks of each window."""
    windows = batch.windows
    counts = windows[:, _WINDOW_COLUMN["MCUS_ACROSS"]] * windows[:, _WINDOW_COLUMN["MCUS_DOWN"]]
    counts = -(-counts * batch.images[:, _COLUMN["UNITS"]] // blocks)
    image, number = _numbered(counts)
    return np.stack([image, number * blocks, np.zeros_like(image)], axis=1).astype(np.int32)


def colour_tiles(batch: JpegBatch, rows: int, columns: int) -> np.ndarray:
    """int32 [tiles, TILE_COLUMNS]: rectangles that cover each box, aligned in the windows."""
    windows, images = batch.windows, batch.images
    ranges = []
    for begin, length, first, factor, step in (
        ("BOX_TOP", "BOX_HEIGHT", "MCU_TOP", "SAMPLING_V", rows),
        ("BOX_LEFT", "BOX_WIDTH", "MCU_LEFT", "SAMPLING_H", columns),
    ):
        mcu = 8 * images[:, _COLUMN[factor]]
        start = windows[:, _WINDOW_COLUMN[begin]] - windows[:, _WINDOW_COLUMN[first]] * mcu
        end = start + windows[:, _WINDOW_COLUMN[length]]
        ranges.append((start // step, -(-end // step)))
    (top, bottom), (left, right) = ranges
    across = right - left
    image, number = _numbered((bottom - top) * across)
    row, column = np.divmod(number, across[image])
    return np.stack([image, (top[image] + row) * rows, (left[image] + column) * columns], axis=1).astype(np.int32)


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [2, 3]: [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(_starts(counts), counts)
