"""The tables that describe files of a block to the JPEG kernels, as NumPy arrays.

For the columns see `triton_kernels/jpeg_rows.py`. A data worker makes the tables, and loads no kernel for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from torch_sink.image.decode.jpeg_block import ALIGNMENT_BYTES, CHANNELS, JpegFiles, aligned
from torch_sink.triton_kernels import jpeg_rows as rows
from torch_sink.triton_kernels.shapes import (
    TILE_SHAPE,
    LaneShape,
    TileShape,
    choose_lane_shape,
    lane_count,
    tile_shape,
)

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
    *begins, end = [0, *aligned(4 * sizes).cumsum().tolist()]
    tables = np.zeros(end // 4, np.int32)
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
        stream_bytes=int(aligned(first_byte[-1] - first_byte[0] + lengths[-1])) + ALIGNMENT_BYTES,
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
