"""Baseline JPEG files -> pixels, by the JPEG kernels, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch

from torch_sink.image.core.transfer import host_buffer, pins, to_host
from torch_sink.image.decode.jpeg.block import JpegBlock, lay_out_jpegs
from torch_sink.image.decode.jpeg.decoder import Inputs, JpegDecoder
from torch_sink.image.decode.jpeg.tables import COLUMN, JpegPlan, plan_jpegs
from torch_sink.image.sources.source import Box, Decoded, EncodedSource
from torch_sink.triton_kernels.launching import is_interpreted
from torch_sink.triton_kernels.shapes import LaneShape


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
            windows, sizes = batch.windows, batch.images[:, [COLUMN["HEIGHT"], COLUMN["WIDTH"]]].tolist()
            boxes = windows[:, COLUMN["BOX_LEFT"] :][:, :4].tolist()
            memory = zip(batch.pixel_offsets.tolist(), windows[:, COLUMN["CHANNELS"]].tolist(), strict=True)
            for box, size, (offset, channels) in zip(map(Box._make, boxes), sizes, memory, strict=True):
                pixels = owner[offset:][: channels * box.height * box.width].view(channels, box.height, box.width)
                found.append(Decoded(pixels, False, box, tuple(size)))
        return found

    def damaged(self) -> list[int]:
        """Which of the files have to be decoded elsewhere; waits for the kernels."""
        return np.flatnonzero(to_host(self.status).numpy()).tolist()


def launch_jpegs(plan: JpegPlan, block: torch.Tensor) -> LaunchedJpegs:
    """Launches the decoding of files on the device where they lie, on its current stream; waits for nothing.

    Args:
        plan: of one file at least.
        block: uint8 [bytes] on the device; the CPU in a process with Triton's interpreter.
    """
    decoders = []
    # Triton launches on the current device, wherever the tensors are.
    with torch.accelerator.device_index(block.device.index) if pins(block.device) else nullcontext():
        for batch in plan.batches:
            decoder = JpegDecoder(
                batch.capacity, plan.shape, block.device, tile=plan.tile, interpreted=is_interpreted()
            )
            decoder.load(batch, Inputs.of_block(block, batch))
            decoder.launch()
            decoders.append(decoder)
    status = decoders[0].status if len(decoders) == 1 else torch.cat([decoder.status for decoder in decoders])
    return LaunchedJpegs(plan, tuple(decoder.pixels for decoder in decoders), status)


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
