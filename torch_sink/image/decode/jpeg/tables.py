"""The tables that describe files of a block to the JPEG kernels, as NumPy arrays.

What each column means: `triton_kernels/jpeg/rows.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_sink.image.decode.jpeg.block import Headers, JpegFiles
from torch_sink.triton_kernels.jpeg import rows
from torch_sink.triton_kernels.jpeg.layout import lane_count
from torch_sink.triton_kernels.jpeg.window import TILE_SHAPE, TileShape

COLUMN = {name: value for name, value in vars(rows).items() if name.isupper()}

# Upsampling reads one chroma sample beside the box.
_CHROMA_MARGIN_PIXELS = 2
_BLOCK_SAMPLES = 64
# A lane that ends where a segment does holds the words after it.
_SPARE_BYTES = 16


class Capacity(NamedTuple):
    """How large a batch is, or may be.

    Attributes:
        stream_bytes: from the first segment to 16 bytes after the last.
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
    """Files as the kernels read them, next to the block that holds their bytes.

    Attributes:
        first_byte: in the block, where the stream begins: its first segment.
        huffman: first byte in the block of uint8 [tables, HUFFMAN_COLUMNS].
        quantization: first byte in the block of int32 [tables, 64].
        images: int32 [images, IMAGE_COLUMNS].
        segments: int32 [segments, SEGMENT_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
        capacity: what it needs.
    """

    first_byte: int
    huffman: int
    quantization: int
    images: np.ndarray
    segments: np.ndarray
    windows: np.ndarray
    capacity: Capacity

    @property
    def pixel_offsets(self) -> np.ndarray:
        """int64 [images], where the pixels of each box begin, in bytes."""
        return self.windows[:, COLUMN["PIXELS"]].astype(np.int64) * COLUMN["PIXELS_UNIT"]


def batch_of(files: JpegFiles, boxes: np.ndarray, lane_bits: int, tile: TileShape = TILE_SHAPE) -> JpegBatch:
    """The tables of a batch, made without a look at any single file.

    Args:
        files: what a block holds, or a part of it.
        boxes: [files, 4], left, top, width and height of what is wanted, in pixels.
        lane_bits: how many bits a lane decodes.
        tile: how much a program of the pixel kernels makes.
    """
    headers = files.columns()
    images = _image_rows(headers)
    segments = _segment_rows(headers, images, files.segments, lane_bits)
    windows, planes_bytes, pixels_bytes = _window_rows(headers, boxes.T.astype(np.int64), images, tile)
    capacity = Capacity(
        stream_bytes=int(segments[-1, COLUMN["FIRST_BYTE"]] + _padded(segments[-1, COLUMN["BYTES"]])),
        images=len(images),
        segments=len(segments),
        quantization_tables=files.quantization[1],
        huffman_tables=files.huffman[1],
        lanes=int(segments[:, COLUMN["LANES"]].sum()),
        blocks=int(images[:, COLUMN["BLOCKS"]].sum()),
        planes_bytes=planes_bytes,
        pixels_bytes=pixels_bytes,
        block_tiles=int(windows[:, COLUMN["BLOCK_TILES"]].sum()),
        pixel_tiles=int(windows[:, COLUMN["PIXEL_TILES"]].sum()),
    )
    return JpegBatch(
        int(files.segments[0, 0]),
        files.huffman[0],
        files.quantization[0],
        images.astype(np.int32),
        segments.astype(np.int32),
        windows.astype(np.int32),
        capacity,
    )


def block_counts(headers: Headers) -> np.ndarray:
    """int64 [images], blocks of each; all MCUs are whole."""
    across, down, units = _mcu_counts(headers)
    return across * down * units


def _mcu_counts(headers: Headers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """MCUs across and down, and units of one."""
    across = -(-headers.width // (8 * headers.across))
    down = -(-headers.height // (8 * headers.down))
    return across, down, headers.across * headers.down + headers.components - 1


def _image_rows(headers: Headers) -> np.ndarray:
    """int64 [images, IMAGE_COLUMNS]."""
    across, down, units = _mcu_counts(headers)
    images = _rows(
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


def _segment_rows(headers: Headers, images: np.ndarray, places: np.ndarray, lane_bits: int) -> np.ndarray:
    """int64 [segments, SEGMENT_COLUMNS]; `places` [segments, 2] are first byte and bytes of each."""
    first, lengths = places.T
    image = np.repeat(np.arange(len(images)), headers.segments)
    number = np.arange(len(lengths)) - images[image, COLUMN["FIRST_SEGMENT"]]
    units, blocks = images[image, COLUMN["UNITS"]], images[image, COLUMN["BLOCKS"]]
    interval = headers.interval[image]
    # Where there are no restart markers, the only segment holds everything.
    step = np.where(interval > 0, interval * units, blocks)
    lanes = lane_count(lengths, lane_bits)
    return _rows(
        "SEGMENT_COLUMNS",
        SEGMENT_IMAGE=image,
        FIRST_BYTE=first - first[0],
        BYTES=lengths,
        SEGMENT_FIRST_BLOCK=images[image, COLUMN["FIRST_BLOCK"]] + number * step,
        SEGMENT_BLOCKS=np.minimum(step, blocks - number * step),
        FIRST_LANE=_starts(lanes),
        LANES=lanes,
    )


def _window_rows(
    headers: Headers, boxes: np.ndarray, images: np.ndarray, tile: TileShape
) -> tuple[np.ndarray, int, int]:
    """int64 [images, WINDOW_COLUMNS], and the bytes of all planes and of all pixels; `boxes` are [4, images]."""
    box_left, box_top, box_width, box_height = boxes
    left, right, first_column, last_column = _mcus(box_left, box_width, headers.width, headers.across)
    top, bottom, first_row, last_row = _mcus(box_top, box_height, headers.height, headers.down)
    blocks = (right - left) * (bottom - top) * images[:, COLUMN["UNITS"]]
    planes = blocks * _BLOCK_SAMPLES // COLUMN["PLANES_UNIT"]
    pixels = -(-headers.channels * box_width * box_height // COLUMN["PIXELS_UNIT"])
    luma_tiles = _block_tiles((right - left) * headers.across, (bottom - top) * headers.down, tile)
    block_tiles = luma_tiles + (headers.components - 1) * _block_tiles(right - left, bottom - top, tile)
    tiles_across = -(-last_column // tile.columns) - first_column // tile.columns
    pixel_tiles = tiles_across * (-(-last_row // tile.rows) - first_row // tile.rows)
    windows = _rows(
        "WINDOW_COLUMNS",
        MCU_LEFT=left,
        MCU_TOP=top,
        MCUS_ACROSS=right - left,
        MCUS_DOWN=bottom - top,
        PLANES=_starts(planes),
        PIXELS=_starts(pixels),
        BOX_LEFT=box_left,
        BOX_TOP=box_top,
        BOX_WIDTH=box_width,
        BOX_HEIGHT=box_height,
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


def _padded(length: int) -> int:
    """Bytes that the last segment takes in the stream."""
    return -(-length // _SPARE_BYTES) * _SPARE_BYTES + _SPARE_BYTES


def _mcus(begin: np.ndarray, length: np.ndarray, size: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray, ...]:
    """One axis of the window around a box: its first MCU, the one after its last, the box in pixels of the window."""
    mcu = 8 * factor
    first = np.maximum(begin - _CHROMA_MARGIN_PIXELS, 0) // mcu
    end = -(-np.minimum(begin + length + _CHROMA_MARGIN_PIXELS, size) // mcu)
    return first, end, begin - first * mcu, begin + length - first * mcu


def _rows(width: str, **values: np.ndarray) -> np.ndarray:
    """A table with the given columns."""
    rows = np.zeros((len(next(iter(values.values()))), COLUMN[width]), np.int64)
    for name, column in values.items():
        rows[:, COLUMN[name]] = column
    return rows


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each of several things begins that lie one after the other."""
    return np.cumsum(lengths) - lengths
