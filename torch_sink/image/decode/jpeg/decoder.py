"""Memory on the device for batches of JPEG files of limited size, and the launches that decode what lies in it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_sink.image.core.transfer import host_buffer
from torch_sink.image.decode.jpeg.tables import COLUMN, Capacity, JpegBatch
from torch_sink.triton_kernels.jpeg import color, entropy, idct
from torch_sink.triton_kernels.jpeg.window import tile_shape

_INT32_BYTES = 4
# A tensor that does not begin at a multiple of 16 bytes would need another variant of each kernel.
_ALIGNED_VALUES = 4


class Inputs(NamedTuple):
    """What the kernels read of a block.

    Attributes:
        stream: uint8 [bytes], the segments and what lies between them.
        huffman: uint8 [tables, HUFFMAN_COLUMNS].
        quantization: int32 [tables, 64].
    """

    stream: torch.Tensor
    huffman: torch.Tensor
    quantization: torch.Tensor

    @classmethod
    def of_block(cls, block: torch.Tensor, batch: JpegBatch) -> Inputs:
        """Views of a block."""
        columns, capacity = COLUMN["HUFFMAN_COLUMNS"], batch.capacity
        stream = block[batch.first_byte :][: capacity.stream_bytes]
        huffman = block[batch.huffman :][: columns * capacity.huffman_tables].view(-1, columns)
        values = block[batch.quantization :][: 64 * _INT32_BYTES * capacity.quantization_tables].view(torch.int32)
        return cls(stream, huffman, values.view(-1, 64))


class JpegDecoder:
    """Decodes one batch after another in the same memory.

    Grids and all other arguments of the launches follow from the capacity alone, but for the addresses of `Inputs`.
    Where those stay as well, a CUDA graph that captured `launch` is replayed after `load` for any batch that fits.

    Args:
        capacity: the largest batch, or more.
        shape: of the lanes; the batches are made with its `bits`.
        device: where the kernels run.
        interpreted: they run in Triton's interpreter, on the CPU.

    Attributes:
        pixels: uint8 [capacity.pixels_bytes], the pixels of all boxes once they are decoded.
        coefficients: int16 [capacity.blocks, 64], quantized, zigzag order.
        status: int32 [capacity.images], 0 where the pixels of an image are libjpeg's.
    """

    def __init__(
        self, capacity: Capacity, shape: entropy.LaneShape, device: torch.device, *, interpreted: bool = False
    ) -> None:
        self.capacity = capacity
        self._shape = shape
        self._interpreted = interpreted

        def room(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._tables = room(sum(map(_room_of, self._table_shapes())))
        self._images, self._segments, self._windows = self._split(self._tables)
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

    def _table_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the images, the segments and the windows."""
        images, segments = self.capacity.images, self.capacity.segments
        columns = COLUMN["IMAGE_COLUMNS"], COLUMN["SEGMENT_COLUMNS"], COLUMN["WINDOW_COLUMNS"]
        return tuple(zip((images, segments, images), columns, strict=True))

    def _split(self, together: torch.Tensor) -> list[torch.Tensor]:
        """The three tables that lie in one tensor."""
        shapes = self._table_shapes()
        parts = together.split([_room_of(shape) for shape in shapes])
        return [part[: rows * columns].view(rows, columns) for part, (rows, columns) in zip(parts, shapes, strict=True)]

    def load(self, batch: JpegBatch, inputs: Inputs) -> None:
        """Makes a batch the next that is decoded.

        Args:
            batch: its tables, which go to the device in one transfer, with rows of 0 after them.
            inputs: what they describe, on the device.

        Raises:
            ValueError: it does not fit.
        """
        needed = batch.capacity._asdict()
        for name, available in self.capacity._asdict().items():
            if needed[name] > available:
                raise ValueError(f"the batch needs {needed[name]} {name}, there is room for {available}")
        on_host = host_buffer(self._tables.shape, torch.int32, self._tables.device).zero_()
        for room, table in zip(self._split(on_host), (batch.images, batch.segments, batch.windows), strict=True):
            room[: len(table)] = torch.from_numpy(table)
        self._tables.copy_(on_host, non_blocking=True)
        self._inputs = inputs

    def launch(self) -> None:
        """Decodes what was loaded, on the current stream; `pixels` and `status` hold the result afterwards."""
        self.decode_coefficients()
        self.make_pixels()

    def decode_coefficients(self) -> None:
        """The first half of `launch`: leaves `coefficients` and `status`."""
        entropy.decode_coefficients(
            self._inputs.stream,
            self._images,
            self._segments,
            self._inputs.huffman,
            self._entropy,
            shape=self._shape,
            interpreted=self._interpreted,
        )

    def make_pixels(self) -> None:
        """The second half of `launch`: from `coefficients` to `pixels`."""
        tile, tables = tile_shape(interpreted=self._interpreted), (self._images, self._windows)
        steps = self.coefficients, self._inputs.quantization
        idct.run_idct(*steps, self._planes, *tables, self._block_tiles, shape=tile)
        color.run_color(self._planes, self.pixels, *tables, self._pixel_tiles, shape=tile)


def _room_of(shape: tuple[int, int]) -> int:
    """Values that a table takes, with those up to where the next one may begin."""
    return -(-shape[0] * shape[1] // _ALIGNED_VALUES) * _ALIGNED_VALUES
