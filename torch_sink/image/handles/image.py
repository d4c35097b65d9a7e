"""LazyImage: a Pillow image whose pixels do not exist yet."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from PIL import Image

from torch_sink.errors import DecodeError
from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import executing, is_executing, ledger, report_fallback
from torch_sink.image.core.ops import STOCK, Op, Recorder, made_by
from torch_sink.image.core.recording import Recording
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.source import (
    PixelSource,
    beginning,
    has_plain_palette,
    is_worth_keeping,
    made_here,
    replayed,
)
from torch_sink.image.handles.array import ArrayImage, agrees, pixels_of
from torch_sink.image.handles.names import PixelAccess, StockType, named_as, stays, stock_type, unpickled
from torch_sink.image.handles.tensor import HANDLES, LazyTensor
from torch_sink.image.operations import RECORDERS

RECORDED_MODES = ("L", "RGB")
# What Pillow's methods write to an image besides its pixels.
_STATE = frozenset(("_mode", "_size", "palette", "tile", "decoderconfig", "__class__"))
_LOADS_FOR_THE_HEADER = ("exif_transpose",)  # of Pillow's own functions


def _recording(name: str) -> Any:
    """A method of `LazyPixels` that records while its image does, and is Pillow's method of that name afterwards."""
    stock, record = getattr(Image.Image, name), RECORDERS[f"Image.{name}"]

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = self.lazy_handle()
        made = handle.record(record, *args, **kwargs) if handle is not None else NotImplemented
        return stock(self, *args, **kwargs) if made is NotImplemented else made

    return method


class LazyPixels(Image.Image):
    """The base of both kinds of lazy Pillow image: its pixels are made when they are first read.

    What is recorded begins with the state in which an image was made. Whatever writes to that state ends the recording
    first: the image then is what it is in stock code, and Pillow's own code goes on with it. `info` is a dict that
    programs write to, so each recorded call takes it along.
    """

    @property
    def is_recording(self) -> bool:
        """False once the pixels were made."""
        raise NotImplementedError

    may_raise: Callable[[], bool]  # whether making the pixels could, because of a damaged file
    _load: Callable[[], Any]  # makes the pixels, and returns Pillow's access to them
    lazy_handle: Callable[[], LazyImage | None]  # the handle that calls are recorded on; None once there are pixels
    keep_pixels: Callable[[], None]  # makes the pixels of an image that is used again, so that no later use decodes
    end: Callable[[], None]  # stops recording, before its state changes

    crop = _recording("crop")
    filter = _recording("filter")
    point = _recording("point")
    resize = _recording("resize")
    transform = _recording("transform")
    transpose = _recording("transpose")

    def copy(self) -> Image.Image:
        handle = self.lazy_handle()
        return super().copy() if handle is None else handle.record(Recording.copied)

    __copy__ = copy

    @property
    def im(self) -> Any:
        if self.is_recording:
            self._load()
        return Image.Image.im.fget(self)  # type: ignore[attr-defined]

    @im.setter
    def im(self, value: Any) -> None:
        if self.is_recording:
            self.info, self.palette  # noqa: B018 - the source is asked for them while it is there
        self.__dict__["_im"] = value
        self._forget()

    def _forget(self) -> None:
        """Drops the file and the recorded calls, once the image has other pixels."""
        for field in _FIELDS:
            self.__dict__.pop(field, None)

    def note_read(self) -> None:
        """Notes that stock code would have read the file by now: its `draft`, `verify` or `close` come too late."""
        self.__dict__.setdefault("lazy_used", uses.batches)

    def load(self) -> Any:
        caller = sys._getframe(1)
        inside = caller.f_globals.get("__name__", "").startswith(("PIL.", "torch_sink.image."))
        goes_on = inside and caller.f_code.co_name not in _LOADS_FOR_THE_HEADER
        # Pillow and this package call `load()` to use the pixels next; other code, to have the errors of a file here.
        if goes_on or is_executing() or not self.is_recording or self.may_raise():
            return self._load()
        self.note_read()
        return PixelAccess(self._load)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _STATE and self.is_recording:
            self.end()
        if name == "__class__":
            LazyPixels._forget(self)  # of a file the class has changed by now
        object.__setattr__(self, name, value)

    def __eq__(self, other: Any) -> bool:
        if stock_type(type(self)) is not stock_type(type(other)) or (self.mode, self.size) != (other.mode, other.size):
            return False
        return _as_pillows(self) == _as_pillows(other)

    __hash__ = None  # type: ignore[assignment]


_FIELDS = ("lazy_recording", "lazy_file_source", "lazy_tile", "lazy_used", "lazy_was_file")


def _as_pillows(image: Image.Image) -> Image.Image:
    """An image of Pillow's class with the pixels and the other fields of `image`."""
    image.load()
    made = Image.Image()
    made.__dict__.update(image.__dict__)
    return made


class _Palette:
    """The `palette` of a handle of colors that a palette holds: programs write to it, so it comes with the pixels."""

    def __get__(self, image: Any, kind: type) -> Any:
        if image is None:
            return self
        image.end()
        return image.__dict__["palette"]


@named_as(Image.Image)
class LazyImage(LazyPixels, metaclass=StockType):
    """A `PIL.Image.Image` that holds a `Recording`.

    `size`, `mode` and `getbands()` answer at once. The methods of which operations have recorders return a new handle
    with one more call recorded. Everything else that Pillow offers, and arguments that these do not support, go through
    `im` or `load()`, which leave an ordinary image behind; writes to it never reach handles that were recorded earlier.
    """

    lazy_class: ClassVar[tuple[str, str]]
    lazy_recording: Recording

    def __init__(self, recording: Recording) -> None:
        # The fields of Image.Image, filled directly: its __init__ would use the `im` setter, and `update` is slow.
        fields, mode = self.__dict__, recording.mode
        _, height, width = recording.shape
        fields["_im"], fields["_mode"], fields["_size"] = None, mode, (width, height)
        if mode != "P":
            fields["palette"] = None
        fields["_readonly"], fields["_exif"] = 0, None
        fields["lazy_recording"] = recording
        if type(recording.source) is EncodedSource and uses.begins_passes:
            uses.of_files[id(self)] = self
        if not ledger.has_recorded:
            ledger.note_recorded()

    @property
    def is_recording(self) -> bool:
        """False once the pixels were made."""
        return self.__dict__["_im"] is None

    palette: Any = _Palette()

    def end(self) -> None:
        self._load()

    def may_raise(self) -> bool:
        source = self.lazy_recording.source
        return isinstance(source, EncodedSource) and not source.is_sound()

    def lazy_handle(self) -> LazyImage | None:
        return self if self.is_recording else None

    def record(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        """What a recorder makes of this image and of other arguments, as a handle, or `NotImplemented`."""
        begun: Recording = self.__dict__["lazy_recording"]
        return self.handle_of(made_by(recorder, begun, *args, **kwargs), begun)

    def handle_of(self, made: Any, begun: Recording, kind: Any = None) -> Any:
        """The handle of what a recorder made of `begun`, the recording of this image; `NotImplemented` as it is.

        `kind` is that of the handle of a tensor, by default `LazyTensor`.
        """
        if made is begun:
            return self
        if made is NotImplemented:
            return made
        fields, ops = self.__dict__, made.calls[len(begun.calls) :]
        is_this_sample = fields.setdefault("lazy_used", uses.batches) == uses.batches
        if not is_this_sample or not settings.is_for_device or "lazy_file" in fields:  # else there is nothing to do
            now = self.used()
            if now is not begun:
                begun, made = now, made.of_pixels(now.source, now.calls + ops)
        if made.mode is None:
            return (kind or LazyTensor)(made)
        if "lazy_was_file" in fields:  # what is made of its pixels may be much less
            made = made_here(made)
        recorded = LazyImage(made)
        if "info" in fields or (type(begun.source) is PixelSource and "transparency" in begun.source.image.info):
            recorded.__dict__["info"] = _info_after(ops, _copied_info(self), fields["_mode"])
        return recorded

    def used(self) -> Recording:
        """The recording that a new handle of this image begins with.

        Without a device, the file is decoded here, and the image keeps its pixels. With one, an image that belongs to a
        second sample does so, under the conditions of `keep_pixels`.
        """
        fields = self.__dict__
        if "lazy_file" in fields:
            fields.pop("lazy_file").note_read()
        recording: Recording = fields["lazy_recording"]
        is_file = type(recording.source) is EncodedSource
        if is_file and not settings.is_for_device and settings.makes_pixels_here():
            recording = made_here(recording)
            fields.update({"lazy_recording": recording, "lazy_was_file": True})
        elif (is_file or recording.calls) and fields.setdefault("lazy_used", uses.batches) != uses.batches:
            fields["lazy_used"] = uses.batches
            self.keep_pixels()
            recording = fields["lazy_recording"]
        return recording

    def keep_pixels(self) -> None:
        """Makes the pixels, with which new handles begin from now on, and drops the file.

        Where a device makes pixels, the file is kept if it takes less memory than the pixels. A damaged file is always
        kept: the policy of its batch decides about its sample.
        """
        recording = self.lazy_recording
        source, calls = recording.source, recording.calls
        if (calls or not isinstance(source, PixelSource)) and is_worth_keeping(source, math.prod(recording.shape)):
            with contextlib.suppress(DecodeError), executing():
                self.__dict__["lazy_recording"] = recording.of_pixels(PixelSource(replayed(source, calls), source.path))
                ledger.note_kept()

    def _load(self) -> Any:
        if self.is_recording:
            report_fallback("pixels of a Pillow image", "read by other code", inner_module="PIL")
            uses.batches += 1
            recording = self.lazy_recording
            source = recording.source
            if "lazy_file" in self.__dict__:
                self.__dict__.pop("lazy_file").note_read()
            with executing():
                image = replayed(source, recording.calls)
                if type(source) is PixelSource and image is source.image:
                    image = image.copy()  # the program may write to this image
            self.__dict__.setdefault("info", image.info)
            self.__dict__.setdefault("palette", image.palette)
            # In one step: another thread may be recording on this image.
            pixels = recording.of_pixels(PixelSource(image, source.path))
            self.__dict__.update({"_im": image.im, "lazy_recording": pixels})
        return Image.Image.load(self)

    def close(self) -> None:
        self.palette  # noqa: B018 - it outlives the pixels
        super().close()

    @property
    def info(self) -> dict[Any, Any]:
        fields = self.__dict__
        if "info" not in fields:
            source: Any = self.lazy_recording.source
            ops = self.lazy_recording.calls
            is_kept = all(op.name.startswith("pil.") for op in ops)
            opened = (source.open() if isinstance(source, EncodedSource) else source.image) if is_kept else None
            fields.setdefault("info", {} if opened is None else _info_after(ops, _copied_info(opened), source.mode))
        return fields["info"]

    @info.setter
    def info(self, value: dict[Any, Any]) -> None:
        self.__dict__["info"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        if stays(protocol):
            self.__class__ = Image.Image  # type: ignore[assignment]
            return self.__reduce_ex__(protocol)
        if self.is_recording and not settings.sends_pixels():
            recording = self.used()
            uses.batches += 1
            info = {"info": self.info} if "info" in self.__dict__ else None
            return unpickled, (self.lazy_class, {}, recording), info
        with executing():
            return copyreg._reconstructor, (Image.Image, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        self.__dict__.update(state)

    convert = _recording("convert")


for _kind in HANDLES:
    _kind.image_class = LazyImage

# The `info` of a new image: a copy, of whose lists the newest releases of Pillow make copies too.
_copied_info: Callable[[Any], dict[Any, Any]] = getattr(Image.Image, "_copy_info", lambda image: image.info.copy())


def _info_after(ops: Sequence[Op], info: dict[Any, Any], mode: str) -> dict[Any, Any]:
    """The `info` of what calls on a Pillow image make of it; `info` and `mode` are those before the calls.

    A transparent color becomes another one where colors do: stock code converts it, with an image of one pixel.
    """
    for op in ops:
        if not op.name.startswith("pil."):
            info = {}
        elif "transparency" in info:
            image = Image.new(mode, (1, 1))
            image.info = info
            with executing():
                image = STOCK[op.name](image, *op.args)
            info, mode = image.info, image.mode
        elif op.operation.loses_info(op):
            info = {}
    return info


def record_on_array(image: Any, recorder: Recorder, args: Sequence[Any], kwargs: Any, kind: Any = None) -> Any:
    """As `LazyImage.handle_of`, for an `ArrayImage`, of which no handle is made; it stays as it is."""
    begun = beginning(pixels_of(image))
    made = made_by(recorder, begun, *args, **kwargs)
    if made is begun:
        return image
    if made is NotImplemented:
        return made
    if made.mode is None:
        return (kind or LazyTensor)(made)
    recorded = LazyImage(made)
    if image.info:
        recorded.__dict__["info"] = _info_after(made.calls, _copied_info(image), image.mode)
    return recorded


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
    if type(image) is ArrayImage:
        return LazyImage(beginning(pixels_of(image)))
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
    if is_known or (palettes and image.mode == "P"):
        with executing():
            image.load()  # an unread file of another format, or a handle of a palette image
        if not agrees(image):
            report_fallback("Pillow image", "its mode, size or palette was changed, and its pixels were not")
            return None
    if not is_known and not (palettes and has_plain_palette(image)):
        # The values of a palette image may be classes, which a conversion would destroy.
        advice = "" if image.mode == "P" else ": convert it to 'RGB' or 'L' first"
        report_fallback("Pillow image", f"no kernel for mode {image.mode!r}{advice}")
        return None
    return None if 0 in image.size else LazyImage(beginning(pixels_of(image)))


def handle_of_file(image: Image.Image, source: EncodedSource) -> LazyImage:
    """The handle of an open file whose pixels were not read, with the file's `info` as the program left it."""
    handle = LazyImage(beginning(source))
    converted = () if source.mode == image.mode else (Op("pil.convert", (source.mode,)),)
    handle.__dict__["info"] = _info_after(converted, _copied_info(image), image.mode)
    return handle
