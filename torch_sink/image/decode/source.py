"""Where the pixels of a handle come from: an encoded file, a Pillow image, or a finished tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image

from torch_sink.errors import DecodeError
from torch_sink.image.core import settings
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import Op, count_before_values, makes_floats, replay
from torch_sink.image.core.recording import Recording
from torch_sink.image.decode.encoded import IN_MEMORY, EncodedSource


class PixelSource(NamedTuple):
    """Pixels that exist already, in a Pillow image that is never written to; mode "L", "RGB" or "P"."""

    image: Image.Image
    path: str = IN_MEMORY

    @property
    def mode(self) -> str:
        return self.image.mode

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.image.size

    def decode(self) -> Image.Image:
        """The image, for stock code, which does not write to it."""
        return self.image

    def tobytes(self) -> bytes:
        """What `image.tobytes()` returns, without looking the encoder up by name and joining pieces."""
        image = self.image
        if 0 in image.size:
            return b""
        encoder = Image.core.raw_encoder(image.mode, image.mode)  # type: ignore[attr-defined]
        encoder.setimage(image.im, (0, 0, *image.size))
        _, error, pixels = encoder.encode(image.width * image.height * len(image.mode))
        return pixels if error == 1 else image.tobytes()  # all of it was written


# Mode "L" or "RGB", size, and the bytes of the pixels: `bytes`, or an array that the program may still write to.
Values = tuple[str, tuple[int, int], Any]


class BytesSource(PixelSource):
    """Pixels of which Pillow makes an image each time that one is asked for; its first field are their `Values`."""

    __slots__ = ()

    def __new__(cls, values: Values, path: str = IN_MEMORY) -> BytesSource:
        return tuple.__new__(cls, (values, path))

    @property
    def image(self) -> Image.Image:  # type: ignore[override]
        return Image.frombytes(*self[0])  # type: ignore[misc]

    @property
    def mode(self) -> str:
        return self[0][0]  # type: ignore[index,no-any-return]

    @property
    def size(self) -> tuple[int, int]:
        return self[0][1]  # type: ignore[index,no-any-return]

    def tobytes(self) -> bytes:
        return self[0][2]  # type: ignore[index,no-any-return]


class FinishedSource(NamedTuple):
    """A tensor that stock code made. No operation can be recorded on it; it is only sent with its batch."""

    tensor: torch.Tensor
    path: str = "a tensor in memory"

    def decode(self) -> torch.Tensor:
        return self.tensor


Source = EncodedSource | PixelSource | FinishedSource


def is_worth_keeping(source: Source, pixel_bytes: int) -> bool:
    """Whether an image that is used again keeps its pixels instead of its source.

    Always without a device, where each use would decode the file again. With one only where the pixels take no more
    bytes than the source: the device decodes faster than more bytes would be sent to it.
    """
    if not isinstance(source, (EncodedSource, PixelSource)):
        return False
    if settings.makes_pixels_here():
        return True
    held = len(source.data) if isinstance(source, EncodedSource) else math.prod(source.size) * len(source.mode)
    return pixel_bytes <= held


def replayed(source: Source, ops: Sequence[Op], in_place: bool = False) -> Any:
    """What `replay` makes of the pixels of a source.

    Raises:
        DecodeError: the file is damaged.
    """
    return replay(source.decode(), ops, in_place)


def beginning(source: EncodedSource | PixelSource) -> Recording:
    """The recording of an image on which nothing is recorded yet."""
    (width, height), mode = source.size, source.mode
    return Recording(source, (), (3 if mode == "RGB" else 1, height, width), mode=mode)


def made_here(recording: Recording) -> Recording:
    """For a machine without a device: decodes the file and runs calls now.

    Last calls that work value by value remain for the batch, where they run on many images together. So do all calls
    from the first one whose bits depend on the processor: fewer could be recorded after its values. All calls on a
    damaged file remain: the policy of its batch decides about its sample.
    """
    source, calls = recording.source, recording.calls
    count = count_before_values(calls)
    count = next((at for at, op in enumerate(calls[:count]) if op.promise.is_rounded or makes_floats(op)), count)
    if isinstance(source, FinishedSource) or not (count or isinstance(source, EncodedSource)):
        return recording
    try:
        with executing():
            made = replayed(source, calls[:count], in_place=True)
    except DecodeError:
        return recording
    return recording.of_pixels(source_of(made, source.path), calls[count:])


def source_of(made: torch.Tensor | Image.Image, path: str) -> Source:
    """The source of an ordinary tensor or Pillow image that was made of a file."""
    return FinishedSource(made, path) if isinstance(made, torch.Tensor) else PixelSource(made, path)


# --- palette images, whose pixels are indices of colors, or classes in the masks of segmentation datasets


def has_plain_palette(image: Image.Image) -> bool:
    """True for a loaded palette image whose colors have no alpha: operations keep such colors unchanged."""
    return image.mode == "P" and image.palette is not None and image.palette.mode == "RGB"


# --- results of decoding


class Box(NamedTuple):
    """A rectangle of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


class Decoded(NamedTuple):
    """Pixels of one image: uint8 in [0, 255], on the host or the device."""

    pixels: torch.Tensor  # [C, H, W], with any strides, but no gaps between its values
    box: Box | None = None  # the part of the image that they show; None for all of it

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Bytes from the first of `pixels` to where pixel (0, 0) of the image would lie, 0 or negative; and from row to
        row, column to column, and channel to channel (0 for one channel).
        """
        channel, row, column = self.pixels.stride()
        left, top = self.box[:2] if self.box is not None else (0, 0)
        return -(top * row + left * column), row, column, channel if len(self.pixels) > 1 else 0
