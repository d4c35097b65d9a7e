"""Baseline JPEG files -> pixels, by the JPEG kernels: memory on the device, and the launches, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch

from torch_sink.image.core.state import host_buffer, pins, to_device, to_host
from torch_sink.image.decode.jpeg_block import JpegBlock, lay_out_jpegs
from torch_sink.image.decode.jpeg_tables import COLUMN, JpegBatch, JpegPlan, plan_jpegs, split_tables
from torch_sink.image.decode.source import Box, Decoded, EncodedSource
from torch_sink.triton_kernels.jpeg import color, entropy, idct, lanes
from torch_sink.triton_kernels.launching import allocated
from torch_sink.triton_kernels.shapes import LaneShape, TileShape, tile_shape

_INT32_BYTES = 4


class Inputs(NamedTuple):
    """What the kernels read, on the device."""

    stream: torch.Tensor  # uint8 [bytes], the segments and what lies between them
    huffman: torch.Tensor  # uint8 [tables, HUFFMAN_COLUMNS]
    quantization: torch.Tensor  # int32 [tables, 64]
    images: torch.Tensor  # int32 [images, IMAGE_COLUMNS]
    segments: torch.Tensor  # int32 [segments, SEGMENT_COLUMNS]
    windows: torch.Tensor  # int32 [images, WINDOW_COLUMNS]

    @classmethod
    def of_block(cls, block: torch.Tensor, batch: JpegBatch) -> Inputs:
        """Views of a block that lies on the device, and the tables of a batch, which follow it in one transfer."""
        columns, sizes = COLUMN["HUFFMAN_COLUMNS"], batch.sizes
        stream = block.narrow(0, batch.first_byte, sizes.stream_bytes)
        huffman = block.narrow(0, batch.huffman, columns * sizes.huffman_tables).view(-1, columns)
        values = block.narrow(0, batch.quantization, 64 * _INT32_BYTES * sizes.quantization_tables)
        tables = split_tables(to_device(batch.tables, block.device), sizes.images, sizes.segments)
        return cls(stream, huffman, values.view(torch.int32).view(-1, 64), *tables)


class JpegDecoder:
    """The memory that the kernels need for a batch, and their launches.

    Args:
        batch: what to decode.
        inputs: of this batch; they are where the kernels run.
        shape: of the lanes; the batch was made with its `bits`.
        tile: how much a program of the pixel kernels makes; the batch was made with it. By default as here.
        spare_bytes: that there are behind the pixels.

    Attributes:
        pixels: uint8 [sizes.pixels_bytes + spare_bytes], the pixels of all boxes once they are decoded.
        coefficients: int16 [sizes.blocks, 64], quantized, zigzag order.
        status: int32 [images], 0 where the pixels of an image are libjpeg's.
    """

    def __init__(
        self, batch: JpegBatch, inputs: Inputs, shape: LaneShape, *, tile: TileShape | None = None, spare_bytes: int = 0
    ) -> None:
        self._inputs, self._shape, self._tile = inputs, shape, tile or tile_shape()
        sizes, device = batch.sizes, inputs.stream.device
        self._entropy = entropy.new_buffers(
            stream_bytes=sizes.stream_bytes,
            images=sizes.images,
            segments=sizes.segments,
            tables=sizes.huffman_tables,
            lanes=sizes.lanes,
            blocks=sizes.blocks,
            rounds=shape.rounds,
            device=device,
        )
        rooms = (
            ((sizes.planes_bytes,), torch.uint8),
            ((sizes.block_tiles,), torch.int32),
            ((sizes.pixel_tiles,), torch.int32),
        )
        self._planes, self._block_tiles, self._pixel_tiles = allocated(rooms, device)
        self.pixels = torch.empty(sizes.pixels_bytes + spare_bytes, dtype=torch.uint8, device=device)
        self.coefficients, self.status = self._entropy.coefficients, self._entropy.status

    def launch(self) -> None:
        """Decodes the batch, on the current stream; `pixels` and `status` hold the result afterwards."""
        self.decode_coefficients()
        self.make_pixels()

    def decode_coefficients(self) -> None:
        """The first half of `launch`: leaves `coefficients` and `status`, and deals out the tiles of the second."""
        inputs, tiles = self._inputs, (self._block_tiles, self._pixel_tiles)
        lanes.assign_owners(inputs.segments, inputs.windows, self._entropy.lane_segments, *tiles)
        steps = inputs.stream, inputs.images, inputs.segments, inputs.huffman
        entropy.decode_coefficients(*steps, self._entropy, shape=self._shape)

    def make_pixels(self) -> None:
        """The second half of `launch`: from `coefficients` to `pixels`."""
        tile, tables = self._tile, (self._inputs.images, self._inputs.windows)
        steps = self.coefficients, self._inputs.quantization
        idct.run_idct(*steps, self._planes, *tables, self._block_tiles, shape=tile)
        color.run_color(self._planes, self.pixels, *tables, self._pixel_tiles, shape=tile)


class LaunchedJpegs(NamedTuple):
    """Files whose kernels run: their pixels may be used by what is launched after them on the same stream.

    Attributes:
        plan: how they are decoded.
        owners: uint8 [bytes], which the pixels of each batch lie in.
        status: int32 [files] on the device; 0 where the pixels of an image are libjpeg's. Elsewhere they may be
            anything, and libjpeg has to look at the file.
    """

    plan: JpegPlan
    owners: tuple[torch.Tensor, ...]
    status: torch.Tensor

    @property
    def places(self) -> np.ndarray:
        """int64 [files, 4], as `JpegBatch.places`, with addresses of the pixels."""
        found = np.concatenate([batch.places for batch in self.plan.batches])
        counts = [len(batch.places) for batch in self.plan.batches]
        found[:, 0] += np.repeat([owner.data_ptr() for owner in self.owners], counts)
        return found

    def images(self) -> list[Decoded]:
        """The pixels of each image, planes of channels; waits for nothing."""
        found = []
        for owner, batch in zip(self.owners, self.plan.batches, strict=True):
            first, columns = COLUMN["BOX_LEFT"], [COLUMN["PIXELS"], COLUMN["CHANNELS"]]
            boxes = map(Box._make, batch.windows[:, first : first + 4].tolist())
            for box, (unit, channels) in zip(boxes, batch.windows[:, columns].tolist(), strict=True):
                begin, shape = unit * COLUMN["PIXELS_UNIT"], (channels, box.height, box.width)
                found.append(Decoded(owner[begin : begin + math.prod(shape)].view(shape), box))
        return found


def launch_jpegs(plan: JpegPlan, block: torch.Tensor, spare_bytes: int = 0) -> LaunchedJpegs:
    """Launches the decoding of files on the device where they lie, on its current stream; waits for nothing.

    Args:
        plan: of one file at least.
        block: uint8 [bytes] on the device; the CPU in a process with Triton's interpreter.
        spare_bytes: that each of the owners has behind its pixels.
    """
    owners, statuses = [], []  # and no decoder: what it has besides is used again by the next
    # Triton launches on the current device, wherever the tensors are.
    with torch.accelerator.device_index(block.device.index) if pins(block.device) else nullcontext():
        for batch in plan.batches:
            inputs = Inputs.of_block(block, batch)
            decoder = JpegDecoder(batch, inputs, plan.shape, tile=plan.tile, spare_bytes=spare_bytes)
            decoder.launch()
            owners.append(decoder.pixels)
            statuses.append(decoder.status)
    return LaunchedJpegs(plan, tuple(owners), statuses[0] if len(statuses) == 1 else torch.cat(statuses))


def decode_jpegs(
    sources: Sequence[EncodedSource],
    boxes: Sequence[Box | None],
    device: torch.device,
    shape: LaneShape | None = None,
) -> list[Decoded | None]:
    """Decodes files that lie in this process.

    Args:
        sources: the files.
        boxes: the part of each image that is wanted; None for all of it.
        device: where; the CPU in a process with Triton's interpreter.
        shape: of the lanes; by default what suits the size of the batch.

    Returns:
        The pixels of each image, planes of channels; None where a check failed, and libjpeg has to look at the file.
    """
    laid_out = lay_out_jpegs(sources)
    results: list[Decoded | None] = [None] * len(sources)
    if not len(laid_out.files.headers):
        return results
    wanted, places = laid_out.files.whole_images(), laid_out.files.sources.tolist()
    for row, at in enumerate(places):
        wanted[row] = boxes[at] or wanted[row]
    launched = launch_jpegs(plan_jpegs(laid_out.files, wanted, shape), block_on_device(laid_out, device))
    for at, image, status in zip(places, launched.images(), to_host(launched.status).tolist(), strict=True):
        results[at] = None if status else image
    return results


def block_on_device(laid_out: JpegBlock, device: torch.device) -> torch.Tensor:
    """uint8 [bytes], written on the host and copied to the device."""
    block = laid_out.chunks.write(host_buffer(laid_out.chunks.size, torch.uint8, device))
    return block.to(device, non_blocking=pins(device))
