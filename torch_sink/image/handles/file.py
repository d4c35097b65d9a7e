"""What `Image.open` and torchvision's loader give for a complete JPEG file while the backend is on."""

from __future__ import annotations

import copyreg
import functools
import io
import os
from collections.abc import Callable
from typing import Any

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from torch_sink.damage.report import broken_file
from torch_sink.damage.samples import is_reading_stream, note_placeholder, opening
from torch_sink.image.core import state
from torch_sink.image.core.fallback import executing, is_executing, report_fallback
from torch_sink.image.handles.image import RECORDED_MODES, LazyImage, LazyPixels, handle_of_file, lazy_image
from torch_sink.image.sources.source import BrokenSource, EncodedSource, PixelSource, encoded_source, read_file

# Pixels of an image whose sample will be left out; stock code's own checks must accept it.
_PLACEHOLDER_SIZE = (1024, 1024)


class LazyJpegImageFile(LazyPixels, JpegImageFile):
    """A `JpegImageFile` that has read its bytes and closed its file; its first operation gives a handle.

    `format`, `info`, `draft`, `verify`, `load` and the rest are Pillow's own.
    """

    sink_file_source: EncodedSource

    @property
    def waits(self) -> bool:
        return self._im is None and bool(self.tile)

    def _load(self) -> Any:
        if self.waits:
            report_fallback("pixels of a Pillow image", "read by other code", inner_module="PIL")
        return JpegImageFile.load(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As Pillow's own file, whose pixels travel."""
        if state.sends_pixels():
            with executing():
                self._load()
        return copyreg._reconstructor, (JpegImageFile, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        wanted = mode or self.mode
        if self._im is None and not self.decoderconfig and not args and not kwargs and wanted in RECORDED_MODES:
            return handle_of_file(self, self.sink_file_source._replace(mode=wanted))
        return super().convert(mode, *args, **kwargs)


def _through_handle(name: str) -> Callable[..., Any]:
    """Pillow's method of that name; on a handle where one can stand for the file."""
    stock = getattr(JpegImageFile, name)

    @functools.wraps(stock)
    def method(self: LazyJpegImageFile, *args: Any, **kwargs: Any) -> Any:
        handle = lazy_image(self) if self._im is None and not self.decoderconfig else None
        return stock(self, *args, **kwargs) if handle is None else getattr(handle, name)(*args, **kwargs)

    return method


for _name in ("copy", "crop", "resize", "transpose", "transform"):
    setattr(LazyJpegImageFile, _name, _through_handle(_name))


def jpeg_factory(stock: Callable[..., Any], fp: Any, filename: Any = None) -> Any:
    """For the factory in `PIL.Image.OPEN["JPEG"]`."""
    image = stock(fp, filename)
    if type(image) is not JpegImageFile:
        return image
    position = fp.tell()
    fp.seek(0)
    data = fp.read()
    name = filename or getattr(fp, "name", None)
    source = encoded_source(data, str(name or "an image in memory"))
    if source is None:
        fp.seek(position)
        vars(image)["sink_name"] = name  # for messages, when the file is closed
        return image
    image.__class__ = LazyJpegImageFile
    image.sink_file_source = source  # type: ignore[attr-defined]
    image.fp = io.BytesIO(data)
    image.fp.seek(position)
    if filename:
        # `Image.open` opened this file itself, and would keep it open until the pixels are read.
        fp.close()
    return image


def opener(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For `PIL.Image.open` where broken files are skipped or replaced; it does something in streams only."""

    def loaded(*args: Any, **kwargs: Any) -> Any:
        image = stock(*args, **kwargs)
        if type(image) is not LazyJpegImageFile:
            with executing():
                image.load()  # later its exception would end the stream
        return image

    return stock(*args, **kwargs) if is_executing() else _or_placeholder(stock, loaded, *args, **kwargs)


def _or_placeholder(load: Callable[..., Any], in_stream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `load` returns, or in a stream a placeholder for a broken file; `in_stream` is `load` there.

    In a stream all that can be broken has to raise at once.
    """
    if not is_reading_stream():
        return load(*args, **kwargs)
    with opening() as wants_placeholder:
        if not wants_placeholder:
            return load(*args, **kwargs)
        try:
            return in_stream(*args, **kwargs)
        except Exception as error:
            broken = broken_file(error, "")
            if broken is None:
                raise
    note_placeholder()
    source: Any = BrokenSource(broken, _PLACEHOLDER_SIZE)
    placeholder = LazyImage(source, (), _PLACEHOLDER_SIZE, "RGB")
    placeholder.__dict__["info"] = {}
    return placeholder


def pil_loader(stock: Callable[..., Any], path: Any) -> Image.Image:
    """For `torchvision.datasets.folder.pil_loader`."""
    return _or_placeholder(_loaded, _loaded, stock, path)


def _loaded(stock: Callable[..., Any], path: Any) -> Image.Image:
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
