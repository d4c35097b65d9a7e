"""Memory on the device for batches of JPEG files of limited size, and the launches that decode what lies in it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_sink.image.core.transfer import to_device
from torch_sink.image.decode.jpeg.tables import COLUMN, Capacity, JpegBatch, split_tables
from torch_sink.triton_kernels.jpeg import color, entropy, idct
from torch_sink.triton_kernels.shapes import LaneShape, TileShape, tile_shape

_INT32_BYTES = 4


class Inputs(NamedTuple):
    """What the kernels read, on the device.

    Attributes:
        stream: uint8 [bytes], the segments and what lies between them.
        huffman: uint8 [tables, HUFFMAN_COLUMNS].
        quantization: int32 [tables, 64].
        images: int32 [images, IMAGE_COLUMNS].
        segments: int32 [segments, SEGMENT_COLUMNS].
        windows: int32 [images, WINDOW_COLUMNS].
    """

    stream: torch.Tensor
    huffman: torch.Tensor
    quantization: torch.Tensor
    images: torch.Tensor
    segments: torch.Tensor
    windows: torch.Tensor

    @classmethod
    def of_block(cls, block: torch.Tensor, batch: JpegBatch) -> Inputs:
        """Views of a block that lies on the device, and the tables of a batch, which follow it in one transfer."""
        columns, capacity = COLUMN["HUFFMAN_COLUMNS"], batch.capacity
        stream = block.narrow(0, batch.first_byte, capacity.stream_bytes)
        huffman = block.narrow(0, batch.huffman, columns * capacity.huffman_tables).view(-1, columns)
        values = block.narrow(0, batch.quantization, 64 * _INT32_BYTES * capacity.quantization_tables)
        tables = split_tables(to_device(batch.tables, block.device), capacity.images, capacity.segments)
        return cls(stream, huffman, values.view(torch.int32).view(-1, 64), *tables)


class JpegDecoder:
    """Decodes one batch after another in the same memory.

    Grids and all other arguments of the launches follow from the capacity alone, but for the addresses of `Inputs`.
    Where those stay as well, a CUDA graph that captured `launch` is replayed after `load` for any batch that fits.

    Args:
        capacity: the largest batch, or more.
        shape: of the lanes; the batches are made with its `bits`.
        device: where the kernels run.
        tile: how much a program of the pixel kernels makes; the batches are made with it. By default as here.
        interpreted: they run in Triton's interpreter, on the CPU.

    Attributes:
        pixels: uint8 [capacity.pixels_bytes], the pixels of all boxes once they are decoded.
        coefficients: int16 [capacity.blocks, 64], quantized, zigzag order.
        status: int32 [capacity.images], 0 where the pixels of an image are libjpeg's.
    """

    def __init__(
        self,
        capacity: Capacity,
        shape: LaneShape,
        device: torch.device,
        *,
        tile: TileShape | None = None,
        interpreted: bool = False,
    ) -> None:
        self.capacity = capacity
        self._tile = tile or tile_shape(interpreted=interpreted)
        self._shape = shape
        self._interpreted = interpreted

        def room(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._entropy = entropy.new_buffers(
            stream_bytes=capacity.stream_bytes,
            images=capacity.images,
            segments=capacity.segments,
            tables=capacity.huffman_tables,
            lanes=capacity.lanes,
            blocks=capacity.blocks,
            rounds=shape.rounds,
            device=device,
            interpreted=interpreted,
        )
        self._planes = room(capacity.planes_bytes, dtype=torch.uint8)
        self._block_tiles = room(capacity.block_tiles)
        self._pixel_tiles = room(capacity.pixel_tiles)
        self.pixels = room(capacity.pixels_bytes, dtype=torch.uint8)
        self.coefficients, self.status = self._entropy.coefficients, self._entropy.status

    def load(self, batch: JpegBatch, inputs: Inputs) -> None:
        """Makes a batch the next that is decoded.

        Args:
            batch: what to decode.
            inputs: of this batch; in a graph, with rows of 0 up to the capacity.

        Raises:
            ValueError: it does not fit.
        """
        for name, needed, available in zip(Capacity._fields, batch.capacity, self.capacity, strict=True):
            if needed > available:
                raise ValueError(f"the batch needs {needed} {name}, there is room for {available}")
        self._inputs = inputs

    def launch(self) -> None:
        """Decodes what was loaded, on the current stream; `pixels` and `status` hold the result afterwards."""
        self.decode_coefficients()
        self.make_pixels()

    def decode_coefficients(self) -> None:
        """The first half of `launch`: leaves `coefficients` and `status`."""
        inputs = self._inputs
        entropy.decode_coefficients(
            inputs.stream,
            inputs.images,
            inputs.segments,
            inputs.huffman,
            self._entropy,
            shape=self._shape,
            interpreted=self._interpreted,
        )

    def make_pixels(self) -> None:
        """The second half of `launch`: from `coefficients` to `pixels`."""
        tile, tables = self._tile, (self._inputs.images, self._inputs.windows)
        steps = self.coefficients, self._inputs.quantization
        idct.run_idct(*steps, self._planes, *tables, self._block_tiles, shape=tile)
        color.run_color(self._planes, self.pixels, *tables, self._pixel_tiles, shape=tile)
