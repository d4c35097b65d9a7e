"""Where the pixels of a handle come from: the bytes of a file, a Pillow image, or a finished tensor."""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from torch_sink.damage.report import current_policy
from torch_sink.errors import DecodeError
from torch_sink.image.core import settings
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import Op, count_before_values, makes_floats, replay
from torch_sink.image.core.recording import Recording
from torch_sink.image.decode.jpeg_header import JpegHeader, read_jpeg_header

IN_MEMORY = "an image in memory"  # in the place of a path


class EncodedSource(NamedTuple):
    """A complete JPEG file that is not decoded yet."""

    data: bytes | memoryview  # the file; bytes, or a view of the block that a batch travels in
    path: str  # for messages
    header: JpegHeader
    mode: str  # "L" or "RGB", the mode to decode to

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.header.width, self.header.height

    def is_sound(self) -> bool:
        """Whether every byte of the file is such that `decode` cannot raise; what stock code decodes may be unsound."""
        return read_jpeg_header(bytes(self.data), thorough=True) is not None and _opens(self)

    def open(self) -> Image.Image:
        """The file as stock Pillow opens it: the header is read, with its `info`."""
        return JpegImageFile(io.BytesIO(self.data), self.path)

    def decode(self) -> Image.Image:
        """A plain Pillow image in `mode`.

        Raises:
            DecodeError: the scan of the file is damaged.
        """
        try:
            image = self.open()
            if image.mode != self.mode:
                return image.convert(self.mode)
            image.load()
            return image._new(image.im)  # like `copy`, but of the same memory
        except (OSError, SyntaxError, ValueError) as error:
            raise DecodeError(self.path, -1, str(error)) from error


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


def read_file(path: str | os.PathLike[str], beginning: bytes = b"") -> bytes | None:
    """The bytes of a file; None, where it can be read again, for one that begins with others than `beginning`."""
    descriptor = os.open(os.fspath(path), os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        about = os.fstat(descriptor)
        looks_first = beginning and stat.S_ISREG(about.st_mode) and hasattr(os, "pread")
        if looks_first and os.pread(descriptor, len(beginning), 0) != beginning:
            return None
        data = os.read(descriptor, about.st_size + 1)
        if len(data) == about.st_size:
            return data
        rest = iter(lambda: os.read(descriptor, 1 << 20), b"")  # a pipe, or a file that is being written
        return b"".join([data, *rest])
    except OSError as error:
        error.filename = os.fspath(path)  # of a folder, which can be opened
        raise
    finally:
        os.close(descriptor)


def encoded_source(data: bytes, path: str, mode: str | None = None, *, thorough: bool = False) -> EncodedSource | None:
    """A source for `data`; None when Pillow has to open it at once (no JPEG, damaged, or suspiciously large).

    Where broken files are skipped or replaced, a file that could raise later raises now: its sample is left out.

    With `thorough` it is None for files that could raise later, even where broken files raise. `mode` is "L" or "RGB",
    by default the file's own, or "RGB" for CMYK files.
    """
    thorough = thorough or current_policy() != "raise"
    header = read_jpeg_header(data, thorough=thorough)
    if header is None:
        return None
    if Image.MAX_IMAGE_PIXELS is not None and header.width * header.height > Image.MAX_IMAGE_PIXELS:
        return None
    if mode is None:
        mode = "RGB" if header.mode == "CMYK" else header.mode
    source = EncodedSource(data, path, header, mode)
    return source if not thorough or _opens(source) else None


def _opens(source: EncodedSource) -> bool:
    try:
        source.open()
    except Exception:
        return False
    return True


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
