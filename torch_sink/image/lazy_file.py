"""What `Image.open` and torchvision's loader give for a complete JPEG file while the backend is on."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from typing import Any

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from torch_sink.image.fallback import executing, report_fallback
from torch_sink.image.lazy_image import LazyImage, handle_of_file, lazy_image
from torch_sink.image.pixel_access import PixelAccess, asked_by_user
from torch_sink.image.source import EncodedSource, PixelSource, encoded_source, read_file

_RECORDED_MODES = ("L", "RGB")


class LazyJpegImageFile(JpegImageFile):
    """A `JpegImageFile` that has read its bytes and closed its file; its first operation gives a handle.

    `format`, `info`, `draft`, `verify`, `load` and the rest are Pillow's own.
    """

    sink_file_source: EncodedSource

    def _handle(self) -> LazyImage | None:
        return lazy_image(self) if self._im is None and not self.decoderconfig else None

    @property
    def im(self) -> Any:
        if self._im is None and self.tile:
            self._load()
        return JpegImageFile.im.fget(self)  # type: ignore[attr-defined]

    @im.setter
    def im(self, value: Any) -> None:
        self._im = value

    def load(self) -> Any:
        if self._im is None and self.tile and not self.decoderconfig and asked_by_user():
            return PixelAccess(self._load)
        return self._load()

    def _load(self) -> Any:
        """The pixels themselves, as Pillow gives access to them."""
        if self._im is None and self.tile:
            report_fallback("pixels of a Pillow image", "read by other code", inner_module="PIL")
        return super().load()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # a cast to a class that knows nothing of pixels that do not exist
            self._load()
            del self.sink_file_source
        super().__setattr__(name, value)

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        wanted = mode or self.mode
        if self._im is None and not self.decoderconfig and not args and not kwargs and wanted in _RECORDED_MODES:
            return handle_of_file(self, self.sink_file_source._replace(mode=wanted))
        return super().convert(mode, *args, **kwargs)


def _through_handle(name: str) -> Callable[..., Any]:
    stock = getattr(JpegImageFile, name)

    @functools.wraps(stock)
    def method(self: LazyJpegImageFile, *args: Any, **kwargs: Any) -> Any:
        handle = self._handle()
        return stock(self, *args, **kwargs) if handle is None else getattr(handle, name)(*args, **kwargs)

    return method


for _name in ("copy", "crop", "resize", "transpose", "transform"):
    setattr(LazyJpegImageFile, _name, _through_handle(_name))


def jpeg_factory(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for the factory in `PIL.Image.OPEN["JPEG"]`."""

    @functools.wraps(stock)
    def factory(fp: Any, filename: Any = None) -> Any:
        image = stock(fp, filename)
        if type(image) is not JpegImageFile:
            return image
        position = fp.tell()
        fp.seek(0)
        data = fp.read()
        source = encoded_source(data, str(filename or getattr(fp, "name", "an image in memory")))
        if source is None:
            fp.seek(position)
            return image
        image.__class__ = LazyJpegImageFile
        image.sink_file_source = source  # type: ignore[attr-defined]
        image.fp = io.BytesIO(data)
        image.fp.seek(position)
        if filename:
            # `Image.open` opened this file itself, and would keep it open until the pixels are read.
            fp.close()
        return image

    return factory


def pil_loader(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `torchvision.datasets.folder.pil_loader`."""

    @functools.wraps(stock)
    def loader(path: Any) -> Image.Image:
        try:
            data, name = read_file(path), os.fsdecode(path)
        except (OSError, TypeError):
            return stock(path)  # raises what stock code raises; an open file's descriptor is read through `Image.open`
        source = encoded_source(data, name, "RGB")
        if source is not None:
            return LazyImage(source, (), source.size, "RGB")
        try:
            with executing():
                image = stock(path)
                image.load()
        except (OSError, Image.DecompressionBombError) as error:
            if name in str(error):
                raise
            raise type(error)(f"{error} (in {name})") from error
        return LazyImage(PixelSource(image, name), (), image.size, "RGB")

    return loader
