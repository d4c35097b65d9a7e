"""The tables that describe a batch to the JPEG kernels, as NumPy arrays.

What each column means: `triton_kernels/jpeg/rows.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_sink.triton_kernels.jpeg import layout, rows
from torch_sink.triton_kernels.jpeg.window import TileShape

COLUMN = {name: value for name, value in vars(rows).items() if name.isupper()}

# Upsampling reads one chroma sample beside the box.
_CHROMA_MARGIN_PIXELS = 2
_STREAM_ALIGNMENT_BYTES = 16
_BLOCK_SAMPLES = 64


class Headers(NamedTuple):
    """What the files of a batch say: of each attribute a number for every file, int64 [images].

    Attributes:
        width: pixels.
        height: pixels.
        components: 1 or 3.
        across: luma blocks of an MCU across.
        down: luma blocks of an MCU down.
        interval: MCUs between two restart markers; 0 where there are none.
        segments: pieces of the scan.
        channels: that are wanted.
        left: the box that is wanted, in pixels.
        top: pixels.
        box_width: pixels.
        box_height: pixels.
        tables: [9, images], rows of the quantization, the DC and the AC tables, of three components each.
    """

    width: np.ndarray
    height: np.ndarray
    components: np.ndarray
    across: np.ndarray
    down: np.ndarray
    interval: np.ndarray
    segments: np.ndarray
    channels: np.ndarray
    left: np.ndarray
    top: np.ndarray
    box_width: np.ndarray
    box_height: np.ndarray
    tables: np.ndarray

    @classmethod
    def of_files(cls, rows: list[tuple[int, ...]]) -> Headers:
        """From a tuple for each file: the attributes in order, the nine tables last."""
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), -1).T
        return cls._make([*columns[:12], columns[12:]])


def image_rows(headers: Headers) -> np.ndarray:
    """int64 [images, IMAGE_COLUMNS]."""
    across = -(-headers.width // (8 * headers.across))
    down = -(-headers.height // (8 * headers.down))
    units = headers.across * headers.down + headers.components - 1
    images = _rows(
        COLUMN,
        "IMAGE_COLUMNS",
        WIDTH=headers.width,
        HEIGHT=headers.height,
        COMPONENTS=headers.components,
        SAMPLING_H=headers.across,
        SAMPLING_V=headers.down,
        MCUS_PER_ROW=across,
        MCU_ROWS=down,
        UNITS=units,
        FIRST_BLOCK=_starts(across * down * units),
        BLOCKS=across * down * units,
        FIRST_SEGMENT=_starts(headers.segments),
        SEGMENTS=headers.segments,
    )
    for number, name in enumerate(("QUANTIZATION", "DC_TABLE", "AC_TABLE")):
        images[:, COLUMN[name] : COLUMN[name] + 3] = headers.tables[3 * number : 3 * number + 3].T
    return images


def segment_rows(headers: Headers, images: np.ndarray, lengths: np.ndarray, lane_bits: int) -> np.ndarray:
    """int64 [segments, SEGMENT_COLUMNS]; `lengths` [segments] are bytes."""
    image = np.repeat(np.arange(len(images)), headers.segments)
    number = np.arange(len(lengths)) - images[image, COLUMN["FIRST_SEGMENT"]]
    units, blocks = images[image, COLUMN["UNITS"]], images[image, COLUMN["BLOCKS"]]
    interval = headers.interval[image]
    # Where there are no restart markers, the only segment holds everything.
    step = np.where(interval > 0, interval * units, blocks)
    lanes = layout.lane_count(lengths, lane_bits)
    return _rows(
        COLUMN,
        "SEGMENT_COLUMNS",
        SEGMENT_IMAGE=image,
        FIRST_BYTE=_starts(padded(lengths)),
        BYTES=lengths,
        SEGMENT_FIRST_BLOCK=images[image, COLUMN["FIRST_BLOCK"]] + number * step,
        SEGMENT_BLOCKS=np.minimum(step, blocks - number * step),
        FIRST_LANE=_starts(lanes),
        LANES=lanes,
    )


def window_rows(headers: Headers, images: np.ndarray, tile: TileShape) -> tuple[np.ndarray, int, int]:
    """int64 [images, WINDOW_COLUMNS], and the bytes of all planes and of all pixels."""
    left, right, first_column, last_column = _mcus(headers.left, headers.box_width, headers.width, headers.across)
    top, bottom, first_row, last_row = _mcus(headers.top, headers.box_height, headers.height, headers.down)
    blocks = (right - left) * (bottom - top) * images[:, COLUMN["UNITS"]]
    planes = blocks * _BLOCK_SAMPLES // COLUMN["PLANES_UNIT"]
    pixels = -(-headers.channels * headers.box_width * headers.box_height // COLUMN["PIXELS_UNIT"])
    luma_tiles = _block_tiles((right - left) * headers.across, (bottom - top) * headers.down, tile)
    block_tiles = luma_tiles + (headers.components - 1) * _block_tiles(right - left, bottom - top, tile)
    tiles_across = -(-last_column // tile.columns) - first_column // tile.columns
    pixel_tiles = tiles_across * (-(-last_row // tile.rows) - first_row // tile.rows)
    windows = _rows(
        COLUMN,
        "WINDOW_COLUMNS",
        MCU_LEFT=left,
        MCU_TOP=top,
        MCUS_ACROSS=right - left,
        MCUS_DOWN=bottom - top,
        PLANES=_starts(planes),
        PIXELS=_starts(pixels),
        BOX_LEFT=headers.left,
        BOX_TOP=headers.top,
        BOX_WIDTH=headers.box_width,
        BOX_HEIGHT=headers.box_height,
        CHANNELS=headers.channels,
        FIRST_BLOCK_TILE=_starts(block_tiles),
        BLOCK_TILES=block_tiles,
        FIRST_PIXEL_TILE=_starts(pixel_tiles),
        PIXEL_TILES=pixel_tiles,
    )
    sizes = planes.sum() * COLUMN["PLANES_UNIT"], pixels.sum() * COLUMN["PIXELS_UNIT"]
    return windows, int(sizes[0]), int(sizes[1])


def _block_tiles(columns: np.ndarray, rows: np.ndarray, tile: TileShape) -> np.ndarray:
    """Tiles of planes with so many blocks."""
    return -(-columns // tile.block_columns) * -(-rows // tile.block_rows)


def padded(lengths: np.ndarray) -> np.ndarray:
    """Bytes that segments of so many bytes take in the stream."""
    aligned = -(-lengths // _STREAM_ALIGNMENT_BYTES) * _STREAM_ALIGNMENT_BYTES
    return aligned + _STREAM_ALIGNMENT_BYTES


def _mcus(begin: np.ndarray, length: np.ndarray, size: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray, ...]:
    """One axis of the window around a box: its first MCU, the one after its last, the box in pixels of the window."""
    mcu = 8 * factor
    first = np.maximum(begin - _CHROMA_MARGIN_PIXELS, 0) // mcu
    end = -(-np.minimum(begin + length + _CHROMA_MARGIN_PIXELS, size) // mcu)
    return first, end, begin - first * mcu, begin + length - first * mcu


def _rows(columns: dict[str, int], width: str, **values: np.ndarray) -> np.ndarray:
    """A table with the given columns."""
    rows = np.zeros((len(next(iter(values.values()))), columns[width]), np.int64)
    for name, column in values.items():
        rows[:, columns[name]] = column
    return rows


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each of several things begins that lie one after the other."""
    return np.cumsum(lengths) - lengths
