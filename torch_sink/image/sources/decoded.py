"""What decoding gives: the pixels of an image, or of the part of it that is needed."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Box(NamedTuple):
    """A rectangle of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


class Decoded(NamedTuple):
    """Pixels of one image: uint8 in [0, 255], on the host or the device."""

    pixels: torch.Tensor  # [H, W, C] when `channels_last`, else [C, H, W]; contiguous
    channels_last: bool
    box: Box | None = None  # the part of the image that they are; None for all of it
    image_size: tuple[int, int] | None = None  # (height, width) of the image where they are a part of it

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the image."""
        if self.image_size is not None:
            return self.image_size
        shape = self.pixels.shape
        return (shape[0], shape[1]) if self.channels_last else (shape[1], shape[2])

    @property
    def channels(self) -> int:
        return self.pixels.shape[2 if self.channels_last else 0]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes from row to row, column to column, channel to channel; the last is 0 for one channel."""
        height, width = self.pixels.shape[:2] if self.channels_last else self.pixels.shape[1:]
        if self.channels_last:
            return width * self.channels, self.channels, int(self.channels > 1)
        return width, 1, height * width if self.channels > 1 else 0

    @property
    def origin(self) -> int:
        """Bytes from the first of the pixels to where pixel (0, 0) of the image would lie; 0, or negative."""
        if self.box is None:
            return 0
        row, column, _ = self.strides
        return -(self.box.top * row + self.box.left * column)
