"""LazyImage: a Pillow image whose pixels do not exist yet."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import math
import operator
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from PIL import Image

from torch_sink.errors import DecodeError
from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import executing, is_executing, ledger, report_fallback
from torch_sink.image.core.ops import Op
from torch_sink.image.decode.source import (
    EncodedSource,
    PixelSource,
    Source,
    has_plain_palette,
    is_worth_keeping,
    made_here,
    replayed,
)
from torch_sink.image.handles.array import ArrayImage, pixels_of
from torch_sink.image.handles.names import PixelAccess, StockType, named_as, stays, unpickled
from torch_sink.image.handles.tensor import HANDLES, LazyTensor, LazyTVImage, give_pixels
from torch_sink.image.operations import RECORDERS

RECORDED_MODES = ("L", "RGB")
_LOADS_FOR_THE_HEADER = ("exif_transpose",)  # of Pillow's own functions


def _recording(name: str) -> Any:
    """A method of `LazyPixels` that records while its image does, and is Pillow's method of that name afterwards."""
    stock, record = getattr(Image.Image, name), RECORDERS[f"Image.{name}"]

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = self.lazy_handle()
        made = record(handle, *args, **kwargs) if handle is not None else NotImplemented
        return stock(self, *args, **kwargs) if made is NotImplemented else made

    return method


class LazyPixels(Image.Image):
    """The base of both kinds of lazy Pillow image: its pixels are made when they are first read."""

    @property
    def waits(self) -> bool:
        """False once the pixels were made."""
        raise NotImplementedError

    _load: Callable[[], Any]  # makes the pixels, and returns Pillow's access to them
    lazy_handle: Callable[[], LazyImage | None]  # the handle that calls are recorded on; None once there are pixels
    keep_pixels: Callable[[], None]  # makes the pixels of an image that is used again, so that no later use decodes

    crop = _recording("crop")
    filter = _recording("filter")
    point = _recording("point")
    resize = _recording("resize")
    transform = _recording("transform")
    transpose = _recording("transpose")

    def copy(self) -> Image.Image:
        handle = self.lazy_handle()
        return super().copy() if handle is None else handle.record()

    __copy__ = copy

    @property
    def im(self) -> Any:
        if self.waits:
            self._load()
        return Image.Image.im.fget(self)  # type: ignore[attr-defined]

    @im.setter
    def im(self, value: Any) -> None:
        if self.waits:
            self.info  # noqa: B018 - the file is asked for it while it is there
        self.__dict__["_im"] = value
        self._forget()

    def _forget(self) -> None:
        """Drops the file and the recorded calls, once the image has other pixels."""
        for field in ("lazy_source", "lazy_ops", "lazy_file_source", "lazy_used", "lazy_has_views", "lazy_first"):
            self.__dict__.pop(field, None)

    def note_read(self) -> None:
        """Notes that stock code would have read the file by now: its `draft`, `verify` or `close` come too late."""
        self.__dict__.setdefault("lazy_used", uses.batches)

    def load(self) -> Any:
        caller = sys._getframe(1)
        inside = caller.f_globals.get("__name__", "").startswith(("PIL.", "torch_sink.image."))
        goes_on = inside and caller.f_code.co_name not in _LOADS_FOR_THE_HEADER
        # Pillow and this package call `load()` to use the pixels next.
        if goes_on or is_executing() or not self.waits:
            return self._load()
        self.note_read()
        return PixelAccess(self._load)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # a cast to a class that expects pixels
            self._load()
            self._forget()
        super().__setattr__(name, value)


@named_as(Image.Image)
class LazyImage(LazyPixels, metaclass=StockType):
    """A `PIL.Image.Image` that holds a source and the calls recorded on it.

    `size`, `mode` and `getbands()` answer at once. The methods of which operations have recorders return a new handle
    with one more call recorded. Everything else that Pillow offers, and arguments that these do not support, go through
    `im` or `load()`, which leave an ordinary image behind; writes to it never reach handles that were recorded earlier.
    """

    lazy_class: ClassVar[tuple[str, str]]
    lazy_source: EncodedSource | PixelSource
    lazy_ops: tuple[Op, ...]
    lazy_dtype = torch.uint8

    def __init__(self, source: Source, ops: tuple[Op, ...], size: tuple[int, int], mode: str) -> None:
        # The fields of Image.Image, filled directly: its __init__ would use the `im` setter, and `update` is slow.
        fields = self.__dict__
        fields["_im"], fields["_mode"], fields["_size"] = None, mode, size
        fields["palette"] = source.image.palette.copy() if mode == "P" else None  # type: ignore[union-attr]
        fields["_readonly"], fields["_exif"] = 0, None
        fields["lazy_source"], fields["lazy_ops"] = source, ops
        if not ledger.has_recorded:
            ledger.note_recorded()

    @property
    def is_recording(self) -> bool:
        """False once the pixels were made."""
        return self.__dict__["_im"] is None

    waits = is_recording

    def lazy_handle(self) -> LazyImage | None:
        return self if self.is_recording else None

    @property
    def lazy_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of the tensor that the image would become."""
        width, height = self._size
        return 3 if self._mode == "RGB" else 1, height, width

    def record(self, *ops: Op, size: tuple[int, int] | None = None, mode: str | None = None) -> LazyImage:
        """A new handle with more calls; `size` (width, height) and `mode` are given where the calls change them."""
        source, before = self.recipe()
        fields, is_here = self.__dict__, isinstance(source, EncodedSource) and ops and settings.makes_pixels_here()
        if is_here and before:
            source, before = self.recipe()  # a crop that has waited gets its pixels
        calls, waits = before + ops, is_here and not before and [op.name for op in ops] == ["pil.crop"]
        if "lazy_has_views" in fields or (is_here and not waits):
            source, calls = made_here(source, calls)
        recorded = LazyImage(source, calls, size or fields["_size"], mode or fields["_mode"])
        if waits:  # for its own rows, or for those that a second view needs as well
            fields["lazy_first"] = weakref.ref(recorded), threading.get_ident()
        return recorded._with_info(self) if "info" in fields and all(map(_keeps_info, ops)) else recorded

    def _with_info(self, other: Image.Image) -> LazyImage:
        """This handle with a copy of the `info` of another image, where that was read or written."""
        if "info" in other.__dict__:
            self.__dict__["info"] = dict(other.info)
        return self

    def recipe(self) -> tuple[Source, tuple[Op, ...]]:
        """The source and the calls that a new handle begins with; a second sample's begins with finished pixels.

        Without a device, a second view of one sample makes the pixels, and the first one takes them too.
        """
        fields, now = self.__dict__, uses.batches
        if "lazy_file" in fields:
            fields.pop("lazy_file").note_read()
        if fields.get("lazy_used", now) != now:
            fields.pop("lazy_first", None)
            self.keep_pixels()
        elif "lazy_used" in fields and settings.makes_pixels_here():
            source, ops = made_here(*_source_and_ops(fields))
            give_pixels(fields.pop("lazy_first", None), source, len(fields["lazy_ops"]) - len(ops))
            fields.update({"lazy_source": source, "lazy_ops": ops, "lazy_has_views": True})
        fields["lazy_used"] = now
        return _source_and_ops(fields)

    def keep_pixels(self) -> None:
        """Makes the pixels, with which new handles begin from now on, and drops the file.

        Where a device makes pixels, the file is kept if it takes less memory than the pixels. A damaged file is always
        kept: the policy of its batch decides about its sample.
        """
        source, ops = _source_and_ops(self.__dict__)
        if (ops or not isinstance(source, PixelSource)) and is_worth_keeping(source, math.prod(self.lazy_shape)):
            with contextlib.suppress(DecodeError), executing():
                self.__dict__.update({"lazy_source": PixelSource(replayed(source, ops), source.path), "lazy_ops": ()})
                ledger.note_kept()

    def _load(self) -> Any:
        if self.is_recording:
            report_fallback("pixels of a Pillow image", "read by other code", inner_module="PIL")
            uses.batches += 1
            source, ops = _source_and_ops(self.__dict__)
            if "lazy_file" in self.__dict__:
                self.__dict__.pop("lazy_file").note_read()
            with executing():
                image = replayed(source, ops)
                if isinstance(source, PixelSource) and image is source.image:
                    image = image.copy()  # the program may write to this image
            self.__dict__.setdefault("info", image.info)
            # In one step: another thread may be recording on this image.
            self.__dict__.update({"_im": image.im, "lazy_source": PixelSource(image, source.path), "lazy_ops": ()})
        return Image.Image.load(self)

    @property
    def info(self) -> dict[Any, Any]:
        fields = self.__dict__
        if "info" not in fields:
            if all(map(_keeps_info, fields["lazy_ops"])):
                source = fields["lazy_source"]
                fields["info"] = dict((source.open() if isinstance(source, EncodedSource) else source.image).info)
            else:
                with executing():
                    self.load()
        return fields["info"]

    @info.setter
    def info(self, value: dict[Any, Any]) -> None:
        self.__dict__["info"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        if stays(protocol):
            self.__class__ = Image.Image  # type: ignore[assignment]
            return self.__reduce_ex__(protocol)
        if self.is_recording and not settings.sends_pixels():
            source, ops = self.recipe()
            uses.batches += 1
            info = {"info": self.info} if "info" in self.__dict__ else None
            return unpickled, (self.lazy_class, source, ops, self._size, self._mode), info
        with executing():
            return copyreg._reconstructor, (Image.Image, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        self.__dict__.update(state)

    def __eq__(self, other: Any) -> bool:
        # Pillow compares classes first, and both objects would be of the class `Image` in stock code.
        is_image = type(other) in (LazyImage, ArrayImage, Image.Image)
        return is_image and self._new(self.im) == (other._new(other.im) if type(other) is LazyImage else other)

    __hash__ = None  # type: ignore[assignment]

    convert = _recording("convert")

    def as_tensor(self, op: Op, dtype: torch.dtype, *, as_tv_image: bool = False) -> LazyTensor | LazyTVImage:
        """The handle of the tensor [C, H, W] that a conversion makes of the image."""
        source, before = self.recipe()
        made = (LazyTVImage if as_tv_image else LazyTensor)(source, (*before, op), self.lazy_shape, dtype)
        self.__dict__["lazy_first"] = weakref.ref(made), threading.get_ident()  # the first view, for `recipe`
        return made


for _kind in HANDLES:
    _kind.image_class = LazyImage

# Reads both fields in one step, so that another thread cannot replace one of them in between.
_source_and_ops = operator.itemgetter("lazy_source", "lazy_ops")


def _keeps_info(op: Op) -> bool:
    """True for a call whose result has the `info` of the image that it is called on."""
    return op.name.startswith("pil.") and not op.operation.loses_info(op)


def lazy_image(image: Image.Image, *, palettes: bool = False) -> LazyImage | None:
    """The handle on which calls on `image` are recorded, or None where they run in stock code.

    A handle that still records is returned as it is. An ordinary image of mode "L" or "RGB" (and a handle whose
    pixels were read) is copied into a new handle, so that later writes to it are not seen. An image of another
    package's class keeps its type, and never records. `palettes` are for operations that only move pixels.
    """
    if type(image) is LazyImage and image.is_recording and (palettes or image.mode != "P"):
        return image
    if is_executing():
        return None
    source = getattr(image, "lazy_file_source", None)
    if source is not None and source.mode == image.mode and image.records():  # type: ignore[attr-defined]
        handle = handle_of_file(image, source)
        handle.__dict__["lazy_file"] = image  # until a call is recorded on it
        return handle
    if not type(image).__module__.startswith(("PIL.", "torch_sink.image.")):  # Pillow's plugins are of the former
        name = f"{type(image).__module__}.{type(image).__qualname__}"
        report_fallback("Pillow image", f"{name} is a class of its own, which a recorded image would not be")
        return None
    if (getattr(image, "tile", ()) and getattr(image, "fp", ()) is None) or hasattr(vars(image).get("_im"), "ex"):
        return None  # it was closed, which stock code says where it needs the pixels
    is_known = image.mode in RECORDED_MODES
    if type(image) is not ArrayImage and (is_known or (palettes and image.mode == "P")):
        with executing():
            image.load()  # an unread file of another format, or a handle of a palette image
    if not is_known and not (palettes and has_plain_palette(image)):
        # The values of a palette image may be classes, which a conversion would destroy.
        advice = "" if image.mode == "P" else ": convert it to 'RGB' or 'L' first"
        report_fallback("Pillow image", f"no kernel for mode {image.mode!r}{advice}")
        return None
    return None if 0 in image.size else LazyImage(pixels_of(image), (), image.size, image.mode)


def handle_of_file(image: Image.Image, source: EncodedSource) -> LazyImage:
    """The handle of an open file whose pixels were not read, with the file's `info` as the program left it."""
    return LazyImage(source, (), source.size, source.mode)._with_info(image)
