"""What files give while the backend is on, to `Image.open`, torchvision's loader and its decoders to tensors.

Of the decoders the operators that they call are replaced, not the functions themselves: functions that were imported by
name before the backend was set record as well, and their checks of arguments stay torchvision's own.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import os
import threading
import weakref
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torchvision.io import ImageReadMode

from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import executing, image_of, is_executing, ledger, report_fallback
from torch_sink.image.core.ops import Op, replay
from torch_sink.image.core.recording import Recording
from torch_sink.image.decode import jpeg_proof
from torch_sink.image.decode.encoded import (
    IN_MEMORY,
    START_OF_IMAGE,
    EncodedSource,
    encoded_source,
    read_file,
)
from torch_sink.image.decode.source import PixelSource, beginning, is_worth_keeping
from torch_sink.image.handles.image import RECORDED_MODES, LazyImage, LazyPixels, handle_of_file, lazy_image
from torch_sink.image.handles.names import StockType, named_as, stays
from torch_sink.image.handles.tensor import LazyTensor


class _StockFileType(StockType, ABCMeta):
    """The class of the class of lazy files: newer releases of Pillow have an abstract class of files."""


@named_as(JpegImageFile)
class LazyJpegImageFile(LazyPixels, JpegImageFile, metaclass=_StockFileType):
    """A `JpegImageFile` that is in memory, its file closed. The first recorded call makes a `LazyImage`.

    `format`, `info`, `draft`, `verify`, `load` and the rest are Pillow's own, and find what they would find in Pillow
    at that moment: see `note_read`.
    """

    lazy_file_source: EncodedSource
    lazy_tile: list[Any]  # `tile` when the file was opened; programs write to the list

    @property
    def is_recording(self) -> bool:
        if self._im is not None:
            return False
        fields = vars(self)  # `verify` and the end of a `with` block close the file
        return "lazy_used" in fields or (self.fp is not None and self.tile == fields.get("lazy_tile"))

    def lazy_handle(self) -> LazyImage | None:
        return lazy_image(self) if self.is_recording else None

    def note_read(self) -> None:
        if self.is_recording:
            vars(self).setdefault("lazy_used", uses.batches)
            vars(self).update(tile=[], fp=None)
            self.readonly = 0

    def records(self) -> bool:
        """True while calls on this file record. Its use in a second sample makes its pixels (`keep_pixels`)."""
        if not self.is_recording:
            return False
        fields, now = vars(self), uses.batches
        if fields.get("lazy_used", now) != now:
            fields["lazy_used"] = now
            self.keep_pixels()
        return self._im is None

    def keep_pixels(self) -> None:
        """Makes the pixels under the conditions of `LazyImage.keep_pixels`, if Pillow would have them by now."""
        source, pixel_bytes = vars(self).get("lazy_file_source"), self.width * self.height * len(self.mode)
        if "lazy_used" in vars(self) and source is not None and is_worth_keeping(source, pixel_bytes):
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                self._read(source)
                ledger.note_kept()

    def end(self) -> None:
        """Becomes the file that Pillow has by now, with its pixels or without."""
        if "lazy_used" in vars(self):
            self._read(self.lazy_file_source)
        self._forget()
        object.__setattr__(self, "__class__", JpegImageFile)

    def draft(self, mode: str | None, size: tuple[int, int] | None) -> Any:
        if self.is_recording and "lazy_used" not in vars(self):
            self.end()  # it changes the state
        return JpegImageFile.draft(self, mode, size)  # type: ignore[arg-type]

    def _read(self, source: EncodedSource) -> None:
        image = source.open()
        image.load()
        self.im = image.im

    def may_raise(self) -> bool:
        source = vars(self).get("lazy_file_source")
        return source is not None and not source.is_sound()

    def _load(self) -> Any:
        source = vars(self).get("lazy_file_source")
        if self._im is None:
            report_fallback("pixels of a Pillow image", "read by other code", inner_module="PIL")
            uses.batches += 1
            if "lazy_used" in vars(self) and source is not None:
                self._read(source)
        return JpegImageFile.load(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as Pillow's own file does: the pixels travel."""
        if stays(protocol):
            self.__class__ = JpegImageFile  # type: ignore[assignment]
            return self.__reduce_ex__(protocol)
        if settings.sends_pixels():
            with executing():
                self._load()
        return copyreg._reconstructor, (JpegImageFile, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        wanted, source = mode or self.mode, vars(self).get("lazy_file_source")
        if source is not None and not args and not kwargs and wanted in RECORDED_MODES and self.records():
            self.note_read()
            return handle_of_file(self, source._replace(mode=wanted))
        return super().convert(mode, *args, **kwargs)


def jpeg_factory(stock: Callable[..., Any], fp: Any, filename: Any = None) -> Any:
    """For the factory in `PIL.Image.OPEN["JPEG"]`."""
    image = stock(fp, filename)
    if type(image) is not JpegImageFile or is_executing():
        return image
    position = fp.tell()
    fp.seek(0)
    data = fp.read()
    name = filename or getattr(fp, "name", None)
    source = encoded_source(data, str(name or IN_MEMORY))
    if source is None:
        fp.seek(position)
        vars(image)["lazy_name"] = name  # for messages, when the file is closed
        return image
    image.__class__ = LazyJpegImageFile
    vars(image).update(lazy_file_source=source, lazy_tile=list(image.tile))
    if uses.begins_passes:
        uses.of_files[id(image)] = image
    image.fp = io.BytesIO(data)
    image.fp.seek(position)
    if filename:
        # `Image.open` opened this file itself, and would keep it open until the pixels are read.
        fp.close()
    return image


def _is_replaced(function: Any) -> bool:
    """True where another package, such as `mock`, has replaced `Image.open`, below or above this package's stand-in."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith("torch_sink."):
        function = function.__wrapped__
    return getattr(function, "__globals__", None) is not vars(Image)


def pil_loader(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the stand-in for `torchvision.datasets.folder.pil_loader`."""
    plain = None  # `Image.open`, once it is known to be nobody else's

    @functools.wraps(stock)
    def pil_loader(path: Any) -> Image.Image:
        nonlocal plain
        if (opens := Image.open) is not plain:
            if _is_replaced(opens):
                return stock(path)
            plain = opens
        try:
            data, name = read_file(path, START_OF_IMAGE), os.fsdecode(path)
        except (OSError, TypeError):
            return stock(path)  # raises what stock code raises; an open file's descriptor is read through `Image.open`
        source = None if data is None else encoded_source(data, name, "RGB")
        if source is not None:  # as `beginning`, without a call
            return LazyImage(Recording(source, (), (3, source.header.height, source.header.width), mode="RGB"))
        try:
            with executing():
                # What is no file, as a pipe, gives its bytes once.
                is_read = data is not None and not os.path.isfile(path)
                image = Image.open(io.BytesIO(data)).convert("RGB") if is_read else stock(path)  # type: ignore[arg-type]
                image.load()
        except (OSError, Image.DecompressionBombError) as error:
            if name in str(error):
                raise
            raise type(error)(f"{error} (in {name})") from error
        return LazyImage(beginning(PixelSource(image, name)))

    return pil_loader


# --- to tensors

# The calls that turn an image as the orientation in its EXIF data asks for.
_FLIP_X, _FLIP_Y = Op("v1.hflip"), Op("v1.vflip")
_LEFT, _RIGHT = Op("v2.quarter_turns", (1,)), Op("v2.quarter_turns", (3,))
_TURNS: tuple[tuple[Op, ...], ...] = (
    *((), (_FLIP_X,), (_FLIP_X, _FLIP_Y), (_FLIP_Y,)),
    *((_LEFT, _FLIP_Y), (_RIGHT,), (_LEFT, _FLIP_X), (_LEFT,)),
)
_last_read = threading.local()


class Operator:
    """Stand-in for an operator of `torch.ops.image`, with all other attributes of the stock operator."""

    def __init__(self, stock: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._stock, self._call = stock, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stock(*args, **kwargs) if is_executing() else self._call(self._stock, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def _read_file(stock: Callable[..., Any], path: str) -> torch.Tensor:
    """The bytes of a file; its path is known until the next file is read."""
    data = stock(path)
    _last_read.file = weakref.ref(data), path
    return data


def _decode_file(stock: Callable[..., Any], data: Any, mode: int, apply_exif_orientation: bool = False) -> Any:
    """A handle for a file that the JPEG kernels cover; any other file is decoded at once."""
    source = _source(data, mode) if type(data) is torch.Tensor else None
    if source is None:
        return _decode_pixels(stock, data, mode, apply_exif_orientation)
    turns = _turns(stock, source) if apply_exif_orientation else ()
    width, height = source.size[::-1] if {_LEFT, _RIGHT} & {*turns} else source.size
    shape = (1 if source.mode == "L" else 3, height, width)
    return LazyTensor(Recording(source, (Op("pil_to_tensor"), *turns), shape))


def _decode_pixels(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Pixels that stock code decoded, as a handle on which operations record."""
    path = _path_of(args[0])  # which an error's message takes from here
    pixels = stock(*args, **kwargs)
    if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[0] not in (1, 3):
        shape = "x".join(map(str, pixels.shape[:-2]))
        report_fallback("torchvision.io", f"no kernel for {pixels.dtype} tensors of shape {shape} x height x width")
        return pixels
    if not pixels.permute(1, 2, 0).is_contiguous():
        report_fallback("torchvision.io", "turned by its EXIF data")
        return pixels
    array = pixels.permute(1, 2, 0).numpy()
    source = PixelSource(image_of(array if len(pixels) == 3 else array[:, :, 0]), path or IN_MEMORY)
    return LazyTensor(Recording(source, (Op("pil_to_tensor"),), pixels.shape))


def _source(data: torch.Tensor, mode: int) -> EncodedSource | None:
    """The file whose decoded pixels a handle can stand for, or None where stock code should decode it, or raise."""
    unchanged, gray, rgb = (each.value for each in (ImageReadMode.UNCHANGED, ImageReadMode.GRAY, ImageReadMode.RGB))
    if mode not in (unchanged, gray, rgb) or data.dtype != torch.uint8 or data.ndim != 1 or data.device.type != "cpu":
        return None
    # Stock code raises here, so nothing may raise later.
    source = encoded_source(data.numpy().tobytes(), _path_of(data) or IN_MEMORY, thorough=True)
    if source is None or source.header.scan is None or source.header.scan.sampling in _samplings_of_their_own():
        return None
    if mode == rgb:
        return source._replace(mode="RGB")
    # The gray of a color file is its luma here, and another formula in Pillow.
    return source if mode == unchanged or source.mode == "L" else None


def _path_of(data: torch.Tensor) -> str:
    """The path of the file that was read last if these are its bytes, else ""."""
    file, path = getattr(_last_read, "file", (None, ""))
    return path if file is not None and file() is data else ""


@functools.cache
def _samplings_of_their_own() -> frozenset[tuple[int, int]]:
    """The samplings of which torchvision's libjpeg makes other pixels than Pillow's, and the kernels, do.

    For instance (1, 2) before torchvision 0.29, which repeats chroma rows where the newer libjpeg interpolates.
    """
    found = set()
    with executing():
        for source, _ in jpeg_proof.cases():
            data = torch.frombuffer(bytearray(source.data), dtype=torch.uint8)
            pixels = torch.ops.image.decode_jpeg(data, ImageReadMode.UNCHANGED.value)
            image = np.asarray(source.open())
            is_same = np.array_equal(pixels.permute(1, 2, 0).numpy().reshape(image.shape), image)
            if source.header.scan is not None and not is_same:
                found.add(source.header.scan.sampling)
    return frozenset(found)


def _turns(stock: Callable[..., Any], source: EncodedSource) -> tuple[Op, ...]:
    """The calls that turn an image as stock code turns it, found by decoding a tiny file with the same EXIF data."""
    exif = next((data for name, data in source.open().applist if name == "APP1"), None)  # type: ignore[attr-defined]
    if exif is None:
        return ()
    tiny, segment = _tiny_file(), b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    data = torch.frombuffer(bytearray(tiny[:2] + segment + tiny[2:]), dtype=torch.uint8)
    plain, turned = stock(data, 0, False), stock(data, 0, True)
    return next(turns for turns in _TURNS if torch.equal(replay(plain, turns), turned))


@functools.cache
def _tiny_file() -> bytes:
    """A gray JPEG file of 4 x 4 pixels that looks different from every side."""
    ramp = np.arange(0, 256, 16, dtype=np.uint8).reshape(4, 4)
    return jpeg_proof.encoded(image_of(ramp), quality=100)


# {name of an operator of `torch.ops.image`: its stand-in}.
OPERATORS: dict[str, Callable[..., Any]] = {
    "read_file": _read_file,
    "decode_image": _decode_file,
    "decode_jpeg": _decode_file,
    "decode_png": _decode_pixels,
    "decode_webp": _decode_pixels,
}
