"""Baseline JPEG files -> pixels, by the JPEG kernels, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch

from torch_sink.image.core.transfer import host_buffer, pins, to_host
from torch_sink.image.decode.jpeg.block import JpegBlock, JpegFiles, lay_out_jpegs
from torch_sink.image.decode.jpeg.decoder import Inputs, JpegDecoder
from torch_sink.image.decode.jpeg.tables import JpegBatch, batch_of
from torch_sink.image.sources.source import Box, Decoded, EncodedSource
from torch_sink.triton_kernels.jpeg.entropy import LaneShape, choose_lane_shape
from torch_sink.triton_kernels.jpeg.layout import TileShape, tile_shape
from torch_sink.triton_kernels.launching import is_interpreted

# Blocks of a launch: 1 GiB of coefficients, which 1,000 photographs of 500 x 375 have.
_MOST_BLOCKS = 1 << 23
_MOST_STREAM_BYTES = 1 << 29


class LaunchedJpegs(NamedTuple):
    """Files whose kernels run: their pixels may be used by what is launched after them on the same stream.

    Attributes:
        files: what a block holds.
        boxes: int32 [files, 4], the part of each image that is made, in pixels.
        owners: uint8 [bytes], which the pixels lie in.
        owner_of_file: int64 [files], which of these it is.
        offsets: int64 [files], where the pixels begin, uint8 [channels, box height, box width].
        status: int32 [files] on the device; 0 where the pixels of an image are libjpeg's. Elsewhere they may be
            anything, and libjpeg has to look at the file.
    """

    files: JpegFiles
    boxes: np.ndarray
    owners: tuple[torch.Tensor, ...]
    owner_of_file: np.ndarray
    offsets: np.ndarray
    status: torch.Tensor

    @property
    def places(self) -> np.ndarray:
        """int64 [files, 4], address of pixel (0, 0) of each image, bytes between its rows, columns and channels.

        Where only a box is made, as if the rest were there. One channel: 0 bytes.
        """
        left, top, width, height = self.boxes.T.astype(np.int64)
        first = np.array([owner.data_ptr() for owner in self.owners])[self.owner_of_file] + self.offsets
        has_planes = self.files.columns().channels > 1
        steps = width, np.ones_like(width), np.where(has_planes, width * height, 0)
        return np.stack([first - top * width - left, *steps], axis=1)

    def images(self) -> list[Decoded]:
        """The pixels of each image, planes of channels; waits for nothing."""
        sizes, channels = self.files.headers[:, :2].tolist(), self.files.columns().channels.tolist()
        memory = zip(self.owner_of_file.tolist(), self.offsets.tolist(), channels, strict=True)
        found = []
        for box, size, (owner, offset, count) in zip(map(Box._make, self.boxes.tolist()), sizes, memory, strict=True):
            shape = count, box.height, box.width
            pixels = self.owners[owner][offset : offset + count * box.height * box.width].view(shape)
            found.append(Decoded(pixels, False, box, (size[1], size[0])))
        return found

    def damaged(self) -> list[int]:
        """Which of `files` have to be decoded elsewhere; waits for the kernels."""
        return np.flatnonzero(to_host(self.status).numpy()).tolist()


def launch_jpegs(
    files: JpegFiles, boxes: np.ndarray, block: torch.Tensor, shape: LaneShape | None = None
) -> LaunchedJpegs:
    """Launches the decoding of files on the device where they lie, on its current stream; waits for nothing.

    Args:
        files: what the block holds, one at least.
        boxes: int32 [files, 4], left, top, width, height of what is wanted of each image, in pixels.
        block: uint8 [bytes] on the device; the CPU in a process with Triton's interpreter.
        shape: of the lanes; by default what suits the size of the batch.
    """
    interpreted = is_interpreted()
    shape = shape or choose_lane_shape(int(files.segments[:, 1].sum()), interpreted=interpreted)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    offsets, owner_of_file = [], []
    # Triton launches on the current device, wherever the tensors are.
    with torch.accelerator.device_index(block.device.index) if pins(block.device) else nullcontext():
        for batch in _batches(files, boxes, shape.bits, tile_shape(interpreted=interpreted)):
            decoder = JpegDecoder(batch.capacity, shape, block.device, interpreted=interpreted)
            decoder.load(batch, Inputs.of_block(block, batch))
            decoder.launch()
            owner_of_file += [len(results)] * len(batch.images)
            results.append((decoder.pixels, decoder.status))
            offsets.append(batch.pixel_offsets)
    owners, statuses = zip(*results, strict=True)
    status = statuses[0] if len(statuses) == 1 else torch.cat(statuses)
    return LaunchedJpegs(files, boxes, owners, np.array(owner_of_file), np.concatenate(offsets), status)


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
    launched = launch_jpegs(laid_out.files, wanted, block_on_device(laid_out, device), shape)
    for at, image in zip(places, launched.images(), strict=True):
        results[at] = image
    for row in launched.damaged():
        results[places[row]] = None
    return results


def block_on_device(laid_out: JpegBlock, device: torch.device) -> torch.Tensor:
    """uint8 [bytes], written on the host and copied to the device."""
    block = host_buffer(laid_out.size, torch.uint8, device)
    view, begin = memoryview(block.numpy().data), 0
    for chunk in laid_out.chunks:
        view[begin : begin + len(chunk)] = chunk
        begin += len(chunk)
    return block.to(device, non_blocking=pins(device))


def _batches(files: JpegFiles, boxes: np.ndarray, lane_bits: int, tile: TileShape) -> Iterator[JpegBatch]:
    """The files in batches that fit into a launch, in order; a larger file is a batch of its own."""
    batch, count = batch_of(files, boxes, lane_bits, tile), len(boxes)
    fits = batch.capacity.blocks <= _MOST_BLOCKS and batch.capacity.stream_bytes <= _MOST_STREAM_BYTES
    if fits or count == 1:
        yield batch
        return
    for first, last in ((0, count // 2), (count // 2, count)):
        yield from _batches(files.part(first, last), boxes[first:last], lane_bits, tile)
