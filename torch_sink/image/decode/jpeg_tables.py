"""The tables that describe files of a block to the JPEG kernels, as NumPy arrays.

What each column means: `triton_kernels/jpeg_rows.py`. They are made in a data worker, which loads no kernel for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from torch_sink.image.decode.jpeg_block import ALIGNMENT_BYTES, Headers, JpegFiles, aligned
from torch_sink.triton_kernels import jpeg_rows as rows
from torch_sink.triton_kernels.shapes import (
    TILE_SHAPE,
    LaneShape,
    TileShape,
    choose_lane_shape,
    lane_count,
    tile_shape,
)

COLUMN = {name: value for name, value in vars(rows).items() if name.isupper()}

# Upsampling reads one chroma sample beside the box.
_CHROMA_MARGIN_PIXELS = 2
_BLOCK_SAMPLES = 64
# Blocks of a launch: 1 GiB of coefficients, which 1,000 photographs of 500 x 375 have.
_MOST_BLOCKS = 1 << 23
_MOST_STREAM_BYTES = 1 << 29


class JpegBatch(NamedTuple):
    """Files that are decoded in one go: where their arrays begin in the block that holds them, and how large all is."""

    # First bytes in the block.
    stream: int  # the first segment
    huffman: int  # uint8 [tables, HUFFMAN_COLUMNS]
    quantization: int  # int32 [tables, 64]
    images: int  # int32 [images, IMAGE_COLUMNS]
    segments: int  # int32 [segments, SEGMENT_COLUMNS]
    windows: int  # int32 [images, WINDOW_COLUMNS]
    # Sizes.
    stream_bytes: int  # from the first segment to 16 bytes after the last
    image_rows: int  # of the images and of the windows
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
        """The batch with its last three tables behind a byte, from which they were counted."""
        images, segments, windows = self.images + first, self.segments + first, self.windows + first
        return self._replace(images=images, segments=segments, windows=windows)


class JpegPlan(NamedTuple):
    """How the JPEG files of a block are decoded."""

    size: int  # bytes of the block that the files and their tables take
    batches: tuple[JpegBatch, ...]  # the files, in order, in batches that fit into a launch
    shape: LaneShape  # of the lanes
    tile: TileShape  # how much a program of the pixel kernels makes
    encoded_bytes: int  # of all segments
    pixels_bytes: int  # for the pixels of all boxes, batch behind batch


def plan_jpegs(
    files: JpegFiles, boxes: np.ndarray, write: Callable[[np.ndarray], int], shape: LaneShape | None = None
) -> tuple[JpegPlan, np.ndarray]:
    """How files are decoded.

    Args:
        files: what a block holds; one at least.
        boxes: int32 [files, 4], left, top, width, height of what is wanted of each image, in pixels.
        write: writes an array to the block, behind what is there, and says where it begins; a multiple of 16 bytes.
        shape: of the lanes; by default what suits the size of the batch.

    Returns:
        The plan, and int64 [files, 4]: from the first byte of all pixels to pixel (0, 0) of each image, and bytes
        between its rows, columns and channels. Where only a box is made, as if the rest were there. One channel: 0.
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


# A batch, the tables of its images, segments and windows, from whose first byte it counts where these begin, and the
# places of its images from the first byte of its pixels.
_Laid = tuple[JpegBatch, np.ndarray, np.ndarray]


def _batches(files: JpegFiles, boxes: np.ndarray, lane_bits: int, tile: TileShape) -> Iterator[_Laid]:
    """The files in batches that fit into a launch; a larger file is alone in its batch."""
    laid, count = batch_of(files, boxes, lane_bits, tile), len(boxes)
    batch, *_ = laid
    if count == 1 or (batch.blocks <= _MOST_BLOCKS and batch.stream_bytes <= _MOST_STREAM_BYTES):
        yield laid
        return
    for first, last in ((0, count // 2), (count // 2, count)):
        yield from _batches(files.part(first, last), boxes[first:last], lane_bits, tile)


def batch_of(files: JpegFiles, boxes: np.ndarray, lane_bits: int, tile: TileShape = TILE_SHAPE) -> _Laid:
    """A batch, the tables that it needs, and where its pixels will lie; made without a look at any single file.

    Args:
        files: what a block holds, or a part of it.
        boxes: [files, 4], left, top, width and height of what is wanted, in pixels.
        lane_bits: how many bits a lane decodes.
        tile: how much a program of the pixel kernels makes.
    """
    headers, (first_byte, lengths) = files.columns(), files.segments.T
    columns = rows.IMAGE_COLUMNS, rows.SEGMENT_COLUMNS, rows.WINDOW_COLUMNS
    shapes = list(zip((len(boxes), len(lengths), len(boxes)), columns, strict=True))
    *begins, end = list(itertools.accumulate((aligned(4 * count * width) for count, width in shapes), initial=0))
    tables = np.zeros(end // 4, np.int32)
    images, segments, windows = (
        tables[begin // 4 :][: count * width].reshape(count, width)
        for begin, (count, width) in zip(begins, shapes, strict=True)
    )
    mcus = -(-headers.size // (8 * headers.sampling))
    units = _product(headers.sampling) + headers.components - 1
    blocks = _product(mcus) * units
    starts, (all_blocks, _) = _starts(blocks, headers.segments)
    _fill(
        images,
        WIDTH=headers.size,
        COMPONENTS=headers.components,
        SAMPLING_H=headers.sampling,
        MCUS_PER_ROW=mcus[0],
        UNITS=units,
        FIRST_BLOCK=starts[0],
        QUANTIZATION=headers.tables,
    )
    # Where there are no restart markers, the only segment holds everything.
    steps = np.where(headers.interval > 0, headers.interval * units, blocks)
    image = np.repeat(np.arange(len(blocks)), headers.segments)
    before = (np.arange(len(image)) - starts[1, image]) * steps[image]
    lanes = lane_count(lengths, lane_bits)
    first_lanes, (all_lanes,) = _starts(lanes)
    _fill(
        segments,
        SEGMENT_IMAGE=image,
        FIRST_BYTE=first_byte - first_byte[0],
        BYTES=lengths,
        SEGMENT_FIRST_BLOCK=starts[0, image] + before,
        SEGMENT_BLOCKS=np.minimum(steps[image], blocks[image] - before),
        FIRST_LANE=first_lanes,
        LANES=lanes,
    )
    box = boxes.T.astype(np.int64)
    planes, pixels, block_tiles, pixel_tiles = _fill_windows(windows, headers, box, units, tile)
    batch = JpegBatch(
        stream=int(first_byte[0]),
        huffman=files.huffman[0],
        quantization=files.quantization[0],
        images=begins[0],
        segments=begins[1],
        windows=begins[2],
        stream_bytes=int(aligned(first_byte[-1] - first_byte[0] + lengths[-1])) + ALIGNMENT_BYTES,
        image_rows=len(images),
        segment_rows=len(segments),
        quantization_rows=files.quantization[1],
        huffman_rows=files.huffman[1],
        lanes=all_lanes,
        blocks=all_blocks,
        planes_bytes=planes * COLUMN["PLANES_UNIT"],
        pixels_bytes=pixels * COLUMN["PIXELS_UNIT"],
        block_tiles=block_tiles,
        pixel_tiles=pixel_tiles,
    )
    return batch, tables, _places(windows, box)


def _fill_windows(
    windows: np.ndarray, headers: Headers, boxes: np.ndarray, units: np.ndarray, tile: TileShape
) -> list[int]:
    """Fills int32 [images, WINDOW_COLUMNS], and says how many units and tiles all planes and all pixels have.

    Args:
        windows: written to.
        headers: of the files.
        boxes: [4, images].
        units: of an MCU.
        tile: how much a program makes.
    """
    begins, lengths, mcu = boxes[:2], boxes[2:], 8 * headers.sampling
    first = np.maximum(begins - _CHROMA_MARGIN_PIXELS, 0) // mcu
    mcus = -(-np.minimum(begins + lengths + _CHROMA_MARGIN_PIXELS, headers.size) // mcu) - first
    planes = _product(mcus) * units * _BLOCK_SAMPLES // COLUMN["PLANES_UNIT"]
    pixels = -(-headers.channels * _product(lengths) // COLUMN["PIXELS_UNIT"])
    block_shape = np.array([[tile.block_columns], [tile.block_rows]])
    luma_tiles, chroma_tiles = (_product(-(-size // block_shape)) for size in (mcus * headers.sampling, mcus))
    block_tiles = luma_tiles + (headers.components - 1) * chroma_tiles
    # The box in pixels of the window.
    inside, pixel_shape = begins - first * mcu, np.array([[tile.columns], [tile.rows]])
    pixel_tiles = _product(-(-(inside + lengths) // pixel_shape) - inside // pixel_shape)
    starts, totals = _starts(planes, pixels, block_tiles, pixel_tiles)
    _fill(
        windows,
        MCU_LEFT=first,
        MCUS_ACROSS=mcus,
        PLANES=starts[:2],
        BOX_LEFT=boxes,
        CHANNELS=headers.channels,
        FIRST_BLOCK_TILE=starts[2],
        BLOCK_TILES=block_tiles,
        FIRST_PIXEL_TILE=starts[3],
        PIXEL_TILES=pixel_tiles,
    )
    return totals


def _places(windows: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Where pixels lie, as `plan_jpegs` says it; boxes: int64 [4, images]."""
    left, top, width, height = boxes
    first = windows[:, COLUMN["PIXELS"]].astype(np.int64) * COLUMN["PIXELS_UNIT"] - top * width - left
    plane = np.where(windows[:, COLUMN["CHANNELS"]] > 1, width * height, 0)
    return np.stack([first, width, np.ones_like(width), plane], axis=1)


def _product(both_axes: np.ndarray) -> np.ndarray:
    return both_axes[0] * both_axes[1]


def _fill(table: np.ndarray, **values: np.ndarray) -> None:
    """Writes columns, those of a value [columns, rows] from the named one on."""
    for name, value in values.items():
        begin = COLUMN[name]
        if value.ndim == 1:
            table[:, begin] = value
        else:
            table[:, begin : begin + len(value)] = value.T


def _starts(*lengths: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Where things begin that lie one after the other, int64 [kinds of things, things], and where each kind ends."""
    together = np.stack(lengths)
    ends = together.cumsum(axis=1)
    return ends - together, ends[:, -1].tolist()
