"""Baseline JPEG files -> pixels: allocates the memory of the JPEG kernels and launches them, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from torch_sink.common.transfer import host_buffer, pins, to_host
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.jpeg_block import JpegBatch, JpegFiles, JpegPlan, lay_out_jpegs, plan_jpegs
from torch_sink.image.decode.source import Box, Decoded
from torch_sink.triton_kernels import jpeg_rows as rows
from torch_sink.triton_kernels.jpeg import color, entropy, idct, lanes
from torch_sink.triton_kernels.launching import allocated
from torch_sink.triton_kernels.shapes import LaneShape, TileShape, tile_shape

_INT32_BYTES = 4
_TABLE_VALUES = 64
BESIDE_ROUNDS = 14  # launches of a decoder; a test counts them


class Inputs(NamedTuple):
    """The inputs of the kernels, on the device."""

    stream: torch.Tensor  # uint8 [bytes], the segments and the bytes between them
    huffman: torch.Tensor  # uint8 [tables, HUFFMAN_COLUMNS]
    quantization: torch.Tensor  # int32 [tables, 64]
    images: torch.Tensor  # int32 [images, IMAGE_COLUMNS]
    segments: torch.Tensor  # int32 [segments, SEGMENT_COLUMNS]
    windows: torch.Tensor  # int32 [images, WINDOW_COLUMNS]

    @classmethod
    def of_block(cls, block: torch.Tensor, batch: JpegBatch) -> Inputs:
        """Views into a block on the device."""
        huffman = block.narrow(0, batch.huffman, rows.HUFFMAN_COLUMNS * batch.huffman_rows)

        def table(begin: int, count: int, columns: int) -> torch.Tensor:
            return block.narrow(0, begin, _INT32_BYTES * count * columns).view(torch.int32).view(count, columns)

        return cls(
            block.narrow(0, batch.stream, batch.stream_bytes),
            huffman.view(-1, rows.HUFFMAN_COLUMNS),
            table(batch.quantization, batch.quantization_rows, _TABLE_VALUES),
            table(batch.images, batch.image_rows, rows.IMAGE_COLUMNS),
            table(batch.segments, batch.segment_rows, rows.SEGMENT_COLUMNS),
            table(batch.windows, batch.image_rows, rows.WINDOW_COLUMNS),
        )


class JpegDecoder:
    """The memory that the kernels need for a batch, and their launches.

    Args:
        batch: the files to decode.
        inputs: inputs of this batch; the kernels run on their device.
        shape: shape of the lanes; the batch was made with its `bits`.
        tile: how much a program of the pixel kernels makes; the batch was made with it. Default: this device's.
        pixels: uint8 [batch.pixels_bytes], written to; by default new memory.

    Attributes:
        pixels: the pixels of all boxes, once decoded.
        coefficients: int16 [batch.blocks, 64], quantized, zigzag order.
        status: int32 [images], 0 where the pixels of an image equal libjpeg's.
    """

    def __init__(
        self,
        batch: JpegBatch,
        inputs: Inputs,
        shape: LaneShape,
        *,
        tile: TileShape | None = None,
        pixels: torch.Tensor | None = None,
    ) -> None:
        self._inputs, self._shape, self._tile = inputs, shape, tile or tile_shape()
        device = inputs.stream.device
        self._entropy = entropy.new_buffers(
            stream_bytes=batch.stream_bytes,
            images=batch.image_rows,
            segments=batch.segment_rows,
            tables=batch.huffman_rows,
            lanes=batch.lanes,
            blocks=batch.blocks,
            rounds=shape.rounds,
            device=device,
        )
        rooms = (
            ((batch.planes_bytes,), torch.uint8),
            ((batch.block_tiles,), torch.int32),
            ((batch.pixel_tiles,), torch.int32),
        )
        self._planes, self._block_tiles, self._pixel_tiles = allocated(rooms, device)
        self.pixels = torch.empty(batch.pixels_bytes, dtype=torch.uint8, device=device) if pixels is None else pixels
        self.coefficients, self.status = self._entropy.coefficients, self._entropy.status

    def launch(self) -> None:
        """Decodes the batch, on the current stream; `pixels` and `status` hold the result afterwards."""
        self.decode_coefficients()
        self.make_pixels()

    def decode_coefficients(self) -> None:
        """The first half of `launch`: writes `coefficients` and `status`, and assigns the tiles of the second half."""
        inputs, owners = self._inputs, self._entropy.lane_segments
        tensors = inputs.segments, inputs.windows, owners, self._block_tiles, self._pixel_tiles
        lanes.assign_owners(inputs.segments.shape[:1], tensors, (len(owners),), BLOCK=lanes.BLOCK)
        steps = inputs.stream, inputs.images, inputs.segments, inputs.huffman
        entropy.decode_coefficients(*steps, self._entropy, shape=self._shape)

    def make_pixels(self) -> None:
        """The second half of `launch`: from `coefficients` to `pixels`."""
        tile, tables = self._tile, (self._inputs.images, self._inputs.windows)
        blocks = self.coefficients, self._inputs.quantization, self._planes, *tables, self._block_tiles
        idct.make_samples(self._block_tiles.shape, blocks, BLOCK_ROWS=tile.block_rows, BLOCK_COLUMNS=tile.block_columns)
        planes = self._planes, self.pixels, *tables, self._pixel_tiles
        color.make_pixels(self._pixel_tiles.shape, planes, BLOCK_Y=tile.rows, BLOCK_X=tile.columns)


def launches_of(plan: JpegPlan) -> int:
    """How many kernels `launch_jpegs` launches."""
    return len(plan.batches) * (plan.shape.rounds + BESIDE_ROUNDS)


def launch_jpegs(plan: JpegPlan, block: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Launches the decoding of files on the current stream of their device, without waiting.

    Later launches on the same stream may read the pixels.

    Args:
        plan: the plan of these files.
        block: uint8 [bytes] on the device; the CPU in a process with Triton's interpreter.
        pixels: uint8 [pixels_bytes], written to.

    Returns:
        int32 [files] on the device; 0 where the pixels of an image equal libjpeg's. Elsewhere they are undefined, and
        libjpeg has to decode the file.
    """
    statuses, begin = [], 0  # decoders are not kept, so the next one reuses their memory
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if block.device.type == "cpu" else torch.accelerator.device_index(block.device.index):
        for batch in plan.batches:
            part = pixels.narrow(0, begin, batch.pixels_bytes)
            decoder = JpegDecoder(batch, Inputs.of_block(block, batch), plan.shape, tile=plan.tile, pixels=part)
            decoder.launch()
            statuses.append(decoder.status)
            begin += len(part)
    return statuses[0] if len(statuses) == 1 else torch.cat(statuses)


def decode_jpegs(
    sources: Sequence[EncodedSource],
    boxes: Sequence[Box | None],
    device: torch.device,
    shape: LaneShape | None = None,
) -> list[Decoded | None]:
    """Decodes files in the memory of this process.

    Args:
        sources: the files.
        boxes: the part of each image that is wanted; None for all of it.
        device: where to decode; the CPU in a process with Triton's interpreter.
        shape: shape of the lanes; by default chosen for the size of the batch.

    Returns:
        The pixels of each image, planes of channels; None where a check failed, and libjpeg has to decode the file.
    """
    laid_out = lay_out_jpegs(sources)
    results: list[Decoded | None] = [None] * len(sources)
    if not len(laid_out.headers):
        return results
    wanted, numbers = laid_out.whole_images(), laid_out.sources.tolist()
    for row, at in enumerate(numbers):
        wanted[row] = boxes[at] or wanted[row]
    plan, places = plan_jpegs(laid_out, wanted, laid_out.chunks.add_array, shape)
    pixels = torch.empty(plan.pixels_bytes, dtype=torch.uint8, device=device)
    status = to_host(launch_jpegs(plan, block_on_device(laid_out, device), pixels)).tolist()
    for at, is_damaged, place, part in zip(numbers, status, places.tolist(), wanted.tolist(), strict=True):
        if not is_damaged:
            results[at] = _decoded(pixels, place, Box(*part), 1 if sources[at].mode == "L" else 3)
    return results


def _decoded(pixels: torch.Tensor, place: Sequence[int], box: Box, channels: int) -> Decoded:
    """The pixels of a box, at the place that `plan_jpegs` returned for its image."""
    begin, row, column, _ = place
    shape = (channels, box.height, box.width)
    return Decoded(pixels.narrow(0, begin + box.top * row + box.left * column, math.prod(shape)).view(shape), box)


def block_on_device(laid_out: JpegFiles, device: torch.device) -> torch.Tensor:
    """The block of laid-out files, uint8 [bytes], written on the host and copied to the device."""
    block = laid_out.chunks.write(host_buffer(laid_out.chunks.size, torch.uint8, device))
    return block.to(device, non_blocking=pins(device))
