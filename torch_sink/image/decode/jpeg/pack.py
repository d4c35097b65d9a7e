"""Baseline files -> the arrays that the JPEG kernels read, and how much room these need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torch_sink.image.decode.jpeg.file import JpegFile
from torch_sink.image.decode.jpeg.tables import (
    COLUMN,
    Headers,
    image_rows,
    padded,
    segment_rows,
    window_rows,
)
from torch_sink.triton_kernels.jpeg.window import TILE_SHAPE, TileShape

_TABLE_VALUES = 64
_MOST_PADDING_BYTES = 32
_ZEROS = bytes(_MOST_PADDING_BYTES)
_WIDE_QUANTIZATION = 0x10


class Capacity(NamedTuple):
    """How large a batch is, or may be.

    Attributes:
        stream_bytes: of all segments, with the zeros between them.
        images: rows of the images and of the windows.
        segments: rows of the segments.
        quantization_tables: rows of these.
        huffman_tables: rows of these.
        lanes: of all segments.
        blocks: of all images.
        planes_bytes: for the samples of all windows.
        pixels_bytes: for the pixels of all boxes.
        block_tiles: of all windows.
        pixel_tiles: of all windows.
    """

    stream_bytes: int
    images: int
    segments: int
    quantization_tables: int
    huffman_tables: int
    lanes: int
    blocks: int
    planes_bytes: int
    pixels_bytes: int
    block_tiles: int
    pixel_tiles: int


class JpegBatch(NamedTuple):
    """A batch as the kernels read it.

    Attributes:
        stream: uint8 [bytes], the segments, each from a multiple of 16 bytes on and followed by 16 zeros or more.
        images: int32 [images, IMAGE_COLUMNS].
        segments: int32 [segments, SEGMENT_COLUMNS].
        quantization: int32 [tables, 64], zigzag order; each table once.
        huffman: uint8 [tables, HUFFMAN_COLUMNS]; each table once.
        windows: int32 [images, WINDOW_COLUMNS].
        capacity: what it needs.
    """

    stream: torch.Tensor
    images: np.ndarray
    segments: np.ndarray
    quantization: np.ndarray
    huffman: np.ndarray
    windows: np.ndarray
    capacity: Capacity

    @property
    def pixel_offsets(self) -> list[int]:
        """Where the pixels of each box begin, in bytes."""
        units = self.windows[:, COLUMN["PIXELS"]].astype(np.int64)
        return (units * COLUMN["PIXELS_UNIT"]).tolist()


def pack_jpegs(
    files: Sequence[JpegFile], lane_bits: int, tile: TileShape = TILE_SHAPE, *, pinned: bool = False
) -> JpegBatch:
    """The arrays of a batch.

    Args:
        files: its images.
        lane_bits: how many bits a lane decodes.
        tile: how much a program of the pixel kernels makes.
        pinned: the stream lies in pinned memory.
    """
    quantization, huffman = _Tables(_quantization_values), _Tables(_huffman_row)
    headers = Headers.of_files([_header(file, quantization, huffman) for file in files])
    images = image_rows(headers)
    windows, planes_bytes, pixels_bytes = window_rows(headers, images, tile)
    lengths = np.array([length for file in files for _, length in file.segments], dtype=np.int64)
    segments = segment_rows(headers, images, lengths, lane_bits)
    capacity = Capacity(
        stream_bytes=int(padded(lengths).sum()),
        images=len(images),
        segments=len(segments),
        quantization_tables=len(quantization.rows),
        huffman_tables=len(huffman.rows),
        lanes=int(segments[:, COLUMN["LANES"]].sum()),
        blocks=int(images[:, COLUMN["BLOCKS"]].sum()),
        planes_bytes=planes_bytes,
        pixels_bytes=pixels_bytes,
        block_tiles=int(windows[:, COLUMN["BLOCK_TILES"]].sum()),
        pixel_tiles=int(windows[:, COLUMN["PIXEL_TILES"]].sum()),
    )
    return JpegBatch(
        _stream(files, segments, capacity.stream_bytes, pinned),
        images.astype(np.int32),
        segments.astype(np.int32),
        np.frombuffer(b"".join(quantization.rows), ">u2").reshape(-1, _TABLE_VALUES).astype(np.int32),
        np.frombuffer(b"".join(huffman.rows), np.uint8).reshape(-1, COLUMN["HUFFMAN_COLUMNS"]).copy(),
        windows.astype(np.int32),
        capacity,
    )


class _Tables:
    """Distinct tables of a batch as bytes, in the order in which they first come."""

    def __init__(self, read: Callable[[bytes, int], bytes]) -> None:
        self.rows: dict[bytes, int] = {}
        self._read = read

    def of_file(self, data: bytes, places: Sequence[int]) -> list[int]:
        """The rows of a file's three components, from the places of their tables; a gray file repeats its own."""
        rows = {at: self.rows.setdefault(self._read(data, at), len(self.rows)) for at in dict.fromkeys(places)}
        return [rows[at] for at in places] * (3 // len(places))


def _header(file: JpegFile, quantization: _Tables, huffman: _Tables) -> tuple[int, ...]:
    """One row of `Headers.of_files`."""
    data, scan = file.source.data, file.scan
    sizes = *file.source.size, len(scan.dc), *scan.sampling, scan.restart_interval, len(file.segments), file.channels
    tables = (
        quantization.of_file(data, scan.quantization),
        huffman.of_file(data, scan.dc),
        huffman.of_file(data, scan.ac),
    )
    return *sizes, *file.box, *tables[0], *tables[1], *tables[2]


def _quantization_values(data: bytes, at: int) -> bytes:
    """The 64 values of a table, of two bytes each; `at` is the byte before, which says how many they have there."""
    if data[at] >= _WIDE_QUANTIZATION:
        return data[at + 1 : at + 1 + 2 * _TABLE_VALUES]
    values = bytearray(2 * _TABLE_VALUES)
    values[1::2] = data[at + 1 : at + 1 + _TABLE_VALUES]
    return bytes(values)


def _huffman_row(data: bytes, at: int) -> bytes:
    """A row of the Huffman tables; `at` is the first of the counts, and the byte before says the class."""
    used = COLUMN["SYMBOLS"] + sum(data[at : at + COLUMN["SYMBOLS"]])
    return data[at : at + used].ljust(COLUMN["TABLE_CLASS"], b"\0") + bytes((data[at - 1] >> 4,))


def _stream(files: Sequence[JpegFile], segments: np.ndarray, size: int, pinned: bool) -> torch.Tensor:
    starts, lengths = segments[:, COLUMN["FIRST_BYTE"]], segments[:, COLUMN["BYTES"]]
    stream = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    view = memoryview(stream.numpy().data)
    ends = (starts + lengths).tolist()
    following = (starts + padded(lengths)).tolist()
    number = 0
    for file in files:
        data = memoryview(file.source.data)
        for begin, length in file.segments:
            end = ends[number]
            view[end - length : end] = data[begin : begin + length]
            view[end : following[number]] = _ZEROS[: following[number] - end]
            number += 1
    return stream
