"""Baseline JPEG files -> pixels, by the JPEG kernels, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from torch_sink.image.core.transfer import host_buffer
from torch_sink.image.decode.jpeg.decoder import JpegDecoder
from torch_sink.image.decode.jpeg.file import JpegFile, block_count, jpeg_file
from torch_sink.image.decode.jpeg.pack import pack_jpegs
from torch_sink.image.sources.decoded import Box, Decoded
from torch_sink.image.sources.source import EncodedSource
from torch_sink.triton_kernels.interpreter import is_interpreted
from torch_sink.triton_kernels.jpeg.entropy import LaneShape, choose_lane_shape
from torch_sink.triton_kernels.jpeg.window import tile_shape

# Blocks of a launch: 1 GiB of coefficients, which 1,000 photographs of 500 x 375 have.
_MOST_BLOCKS = 1 << 23
_MOST_STREAM_BYTES = 1 << 29


class _Launched(NamedTuple):
    """A batch whose kernels run.

    Attributes:
        files: its images.
        pixels: uint8, those of all boxes.
        offsets: where those of each box begin.
        status: int32 [images] on the host once `copied`; 0 where the pixels of an image are libjpeg's.
        copied: when `status` has arrived; None where it is there already.
    """

    files: Sequence[JpegFile]
    pixels: torch.Tensor
    offsets: list[int]
    status: torch.Tensor
    copied: torch.Event | None


def decode_jpegs(
    sources: Sequence[EncodedSource],
    boxes: Sequence[Box | None],
    device: torch.device,
    shape: LaneShape | None = None,
) -> list[Decoded | None]:
    """Decodes files whose headers name a scan.

    Args:
        sources: the files.
        boxes: the part of each image that is wanted; None for all of it.
        device: where; the CPU in a process with Triton's interpreter.
        shape: of the lanes; by default what suits the size of the batch.

    Returns:
        The pixels of each image, planes of channels; None where a check failed, and libjpeg has to look at the file.
    """
    found = [jpeg_file(source, box) for source, box in zip(sources, boxes, strict=True)]
    places = [at for at, file in enumerate(found) if file is not None]
    results: list[Decoded | None] = [None] * len(sources)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        launched = [_launch(files, device, shape) for files in _chunks([file for file in found if file is not None])]
    decoded = iter([image for batch in launched for image in _finish(batch)])
    for at in places:
        image = next(decoded)
        if image is not None and boxes[at] is not None:
            width, height = sources[at].size
            image = image._replace(box=boxes[at], image_size=(height, width))
        results[at] = image
    return results


def _chunks(files: Sequence[JpegFile]) -> Iterator[list[JpegFile]]:
    """The files in groups that fit into a launch; a larger file is a group of its own."""
    group: list[JpegFile] = []
    blocks = stream_bytes = 0
    for file in files:
        file_blocks = block_count(file.source, file.scan)
        file_bytes = len(file.source.data)
        if group and (blocks + file_blocks > _MOST_BLOCKS or stream_bytes + file_bytes > _MOST_STREAM_BYTES):
            yield group
            group, blocks, stream_bytes = [], 0, 0
        group.append(file)
        blocks, stream_bytes = blocks + file_blocks, stream_bytes + file_bytes
    if group:
        yield group


def _launch(files: Sequence[JpegFile], device: torch.device, shape: LaneShape | None) -> _Launched:
    interpreted, on_host = is_interpreted(), device.type == "cpu"
    if shape is None:
        scan_bytes = sum(length for file in files for _, length in file.segments)
        shape = choose_lane_shape(scan_bytes, interpreted=interpreted)
    batch = pack_jpegs(files, shape.bits, tile_shape(interpreted=interpreted), pinned=not on_host)
    decoder = JpegDecoder(batch.capacity, shape, device, interpreted=interpreted)
    decoder.load(batch)
    decoder.launch()
    status = decoder.status
    copied = None
    if not on_host:
        # It travels while the host prepares the next chunk.
        arriving = host_buffer(status.shape, status.dtype, device)
        arriving.copy_(status, non_blocking=True)
        copied = torch.Event(device)
        copied.record()
        status = arriving
    return _Launched(files, decoder.pixels, batch.pixel_offsets, status, copied)


def _finish(batch: _Launched) -> Iterator[Decoded | None]:
    if batch.copied is not None:
        batch.copied.synchronize()  # host sync
    for file, offset, status in zip(batch.files, batch.offsets, batch.status.tolist(), strict=True):
        if status:
            yield None
            continue
        shape = file.channels, file.box.height, file.box.width
        size = file.channels * file.box.height * file.box.width
        yield Decoded(batch.pixels[offset : offset + size].view(shape), channels_last=False)
