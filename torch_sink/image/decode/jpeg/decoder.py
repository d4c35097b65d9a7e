"""Memory on the device for batches of JPEG files of limited size, and the launches that decode what lies in it."""

from __future__ import annotations

import numpy as np
import torch

from torch_sink.image.decode.jpeg.pack import Capacity, JpegBatch
from torch_sink.image.decode.jpeg.tables import COLUMN
from torch_sink.triton_kernels.jpeg import color, entropy, idct
from torch_sink.triton_kernels.jpeg.window import tile_shape


class JpegDecoder:
    """Decodes one batch after another in the same memory.

    Addresses, grids and all other arguments of the launches follow from the capacity alone. So `launch` can be captured
    in a CUDA graph, which is replayed after `load` for any batch that fits.

    Args:
        capacity: the largest batch, or more.
        shape: of the lanes; the batches are packed with its `bits`.
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

        self._stream = room(capacity.stream_bytes, dtype=torch.uint8)
        self._images = room(capacity.images, COLUMN["IMAGE_COLUMNS"])
        self._segments = room(capacity.segments, COLUMN["SEGMENT_COLUMNS"])
        self._quantization = room(capacity.quantization_tables, 64)
        self._huffman = room(capacity.huffman_tables, COLUMN["HUFFMAN_COLUMNS"], dtype=torch.uint8)
        self._windows = room(capacity.images, COLUMN["WINDOW_COLUMNS"])
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

    def load(self, batch: JpegBatch) -> None:
        """Copies a batch to the device, and padding after it.

        Raises:
            ValueError: it does not fit.
        """
        needed = batch.capacity._asdict()
        for name, available in self.capacity._asdict().items():
            if needed[name] > available:
                raise ValueError(f"the batch needs {needed[name]} {name}, there is room for {available}")
        self._stream[: len(batch.stream)].copy_(batch.stream, non_blocking=True)
        for room, table in (
            (self._images, batch.images),
            (self._segments, batch.segments),
            (self._quantization, batch.quantization),
            (self._huffman, batch.huffman),
            (self._windows, batch.windows),
        ):
            _copy_padded(room, table)

    def launch(self) -> None:
        """Decodes what was loaded, on the current stream; `pixels` and `status` hold the result afterwards."""
        self.decode_coefficients()
        self.make_pixels()

    def decode_coefficients(self) -> None:
        """The first half of `launch`: leaves `coefficients` and `status`."""
        entropy.decode_coefficients(
            self._stream,
            self._images,
            self._segments,
            self._huffman,
            self._entropy,
            shape=self._shape,
            interpreted=self._interpreted,
        )

    def make_pixels(self) -> None:
        """The second half of `launch`: from `coefficients` to `pixels`."""
        tile, tables = tile_shape(interpreted=self._interpreted), (self._images, self._windows)
        steps = self.coefficients, self._quantization
        idct.run_idct(*steps, self._planes, *tables, self._block_tiles, shape=tile)
        color.run_color(self._planes, self.pixels, *tables, self._pixel_tiles, shape=tile)


def _copy_padded(room: torch.Tensor, table: np.ndarray) -> None:
    """Copies a table to the device; the rows after it become 0."""
    on_host = torch.from_numpy(table)
    if room.device.type != "cpu":
        on_host = on_host.pin_memory()
    room[: len(table)].copy_(on_host, non_blocking=True)
    room[len(table) :].zero_()
