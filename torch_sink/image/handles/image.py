"""LazyImage: a Pillow image whose pixels do not exist yet."""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

from PIL import Image, ImageFilter

from torch_sink.image.core import state
from torch_sink.image.core.exactness import is_rounded_by_torch
from torch_sink.image.core.fallback import executing, is_executing, ledger, report_fallback
from torch_sink.image.core.ops import Op, replay
from torch_sink.image.handles.palette import color_planes, has_plain_palette, palette_of
from torch_sink.image.handles.pixel_access import PixelAccess, asked_by_user
from torch_sink.image.lower.geometry import transform_fits
from torch_sink.image.sources.source import EncodedSource, PixelSource, Source

_RECORDED_MODES = ("L", "RGB")
_FILTERS = frozenset(range(6))  # Pillow 13 knows more; those are not recorded
_LARGEST_BLUR = 1000.0  # pixels
_FLIPS = frozenset(Image.Transpose)
_MATRIX_TRANSFORMS = (Image.Transform.AFFINE, Image.Transform.PERSPECTIVE)
_BLURS = {ImageFilter.GaussianBlur: "pil.gaussian_blur", ImageFilter.BoxBlur: "pil.box_blur"}
_KEEPS_INFO = frozenset(
    ("pil.convert", "pil.crop", "pil.resize", "pil.transpose", "pil.transform", "pil.point", *_BLURS.values(),
     "pil.adjust_saturation", "pil.adjust_sharpness", "pil.adjust_gamma", "pil.invert", "pil.posterize", "pil.solarize",
     "pil.autocontrast", "pil.equalize")
)  # fmt: skip


class _StockType(type):
    """Makes every Pillow image an instance of `LazyImage`, as it is one of the class that stock code would have.

    Libraries look at that: they cast the result of a call to the class of its argument where that is a subclass.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Image.Image)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, Image.Image)


class LazyImage(Image.Image, metaclass=_StockType):
    """A `PIL.Image.Image` that holds a source and the calls recorded on it.

    `size`, `mode` and `getbands()` answer at once. `resize`, `crop`, `transpose`, `convert`, `copy`, `point` by a table
    and an affine or perspective `transform` return a new handle with one more call recorded. Everything else that
    Pillow offers goes through `im` or `load()`, which decode the source, replay the calls and leave an ordinary image
    behind; later writes to it never reach handles that were recorded earlier.
    """

    sink_source: EncodedSource | PixelSource
    sink_ops: tuple[Op, ...]

    def __init__(self, source: Source, ops: tuple[Op, ...], size: tuple[int, int], mode: str) -> None:
        # The fields of Image.Image, filled directly: its __init__ would run through the `im` setter.
        self.__dict__.update(
            _im=None,
            _mode=mode,
            _size=size,
            palette=palette_of(source) if mode == "P" else None,
            _readonly=0,
            _exif=None,
            sink_source=source,
            sink_ops=ops,
        )
        ledger.note_recorded()

    @property
    def is_recording(self) -> bool:
        """False once somebody has asked for the pixels."""
        return self.__dict__["_im"] is None

    def record(self, op: Op, size: tuple[int, int] | None = None, mode: str | None = None) -> LazyImage:
        """A new handle with one more call; `size` (width, height) and `mode` where the call changes them."""
        fields = self.__dict__
        recorded = LazyImage(
            fields["sink_source"], (*fields["sink_ops"], op), size or fields["_size"], mode or fields["_mode"]
        )
        if "info" in fields and _keeps_info(op):
            recorded.__dict__["info"] = dict(fields["info"])
        return recorded

    def _materialize(self) -> None:
        report_fallback("pixels of a Pillow image", "read by other code", inner_module="PIL")
        with executing():
            image = replay(self.sink_source.decode(), self.sink_ops)
        fields = self.__dict__
        fields.setdefault("info", image.info)
        fields["_im"] = image.im

    @property
    def im(self) -> Any:
        if self.__dict__["_im"] is None:
            self._materialize()
        return Image.Image.im.fget(self)  # type: ignore[attr-defined]

    @im.setter
    def im(self, value: Any) -> None:
        self.__dict__["_im"] = value

    def load(self) -> Any:
        if self.is_recording and asked_by_user():
            return PixelAccess(self._load)
        return self._load()

    def _load(self) -> Any:
        """The pixels themselves, as Pillow gives access to them."""
        if self.is_recording:
            self._materialize()
        return super().load()

    @property
    def info(self) -> dict[Any, Any]:
        fields = self.__dict__
        if "info" not in fields:
            if all(map(_keeps_info, fields["sink_ops"])):
                source = fields["sink_source"]
                fields["info"] = dict((source.open() if isinstance(source, EncodedSource) else source.image).info)
            else:
                with executing():
                    self.load()
        return fields["info"]

    @info.setter
    def info(self, value: dict[Any, Any]) -> None:
        self.__dict__["info"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_recording and not state.sends_pixels():
            fields = self.__dict__
            info = {"info": fields["info"]} if "info" in fields else None
            return LazyImage, (self.sink_source, self.sink_ops, self._size, self._mode), info
        with executing():
            return copyreg._reconstructor, (Image.Image, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        self.__dict__.update(state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # a cast to a class that knows nothing of pixels that do not exist
            self._load()
            del self.sink_source, self.sink_ops
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        # Stock code would have two objects of the class `Image`; Pillow compares classes first.
        if type(other) not in (LazyImage, Image.Image):
            return False
        image: Any = other
        return (
            (self.mode, self.size, self.info) == (image.mode, image.size, image.info)
            and self.getpalette() == image.getpalette()
            and self.tobytes() == image.tobytes()
        )

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Image.Image:
        if not self.is_recording:
            return super().copy()
        fields = self.__dict__
        copied = LazyImage(fields["sink_source"], fields["sink_ops"], fields["_size"], fields["_mode"])
        if "info" in fields:
            copied.__dict__["info"] = dict(fields["info"])
        return copied

    __copy__ = copy

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        if self.is_recording and not args and not kwargs:
            if mode == self._mode or (mode is None and self._mode != "P"):
                return self.copy()
            if mode in _RECORDED_MODES:
                return self._colored(mode) if self._mode == "P" else self.record(Op("pil.convert", (mode,)), mode=mode)
        return super().convert(mode, *args, **kwargs)

    def _colored(self, mode: str) -> Image.Image:
        """The colors of a palette image: its numbers, looked up in a table for each channel."""
        if "transparency" in self.info:
            return super().convert(mode)
        numbers = self.record(Op("pil_to_tensor"))
        if mode == "RGB":
            numbers = numbers.record(Op("v2.grayscale_to_rgb"))
        table = color_planes(self.sink_source, mode)
        colored = numbers.record(Op("to_pil_image")).record(Op("pil.point", (table,)), mode=mode)
        colored.info = dict(self.info)
        return colored

    def crop(self, box: Sequence[float] | None = None) -> Image.Image:
        if not self.is_recording or (box is not None and len(box) != 4):
            return super().crop(box)  # type: ignore[arg-type]
        if box is None:
            return self.copy()
        left, upper, right, lower = map(int, map(round, box))
        if right <= left or lower <= upper:
            return super().crop(box)  # type: ignore[arg-type]
        return self.record(Op("pil.crop", ((left, upper, right, lower),)), size=(right - left, lower - upper))

    def resize(  # type: ignore[override]
        self,
        size: Sequence[int],
        resample: int | None = None,
        box: tuple[float, float, float, float] | None = None,
        reducing_gap: float | None = None,
    ) -> Image.Image:
        if resample is None:
            resample = Image.Resampling.BICUBIC
        sides = _sides(size)
        plain = box is None and reducing_gap is None
        if not self.is_recording or resample not in _FILTERS or not plain or sides is None:
            return super().resize(size, resample, box, reducing_gap)  # type: ignore[arg-type]
        if sides == self._size:
            return self.copy()
        return self.record(Op("pil.resize", (sides, int(self._filter(resample)))), size=sides)

    def _filter(self, resample: int) -> int:
        """The filter that Pillow uses: no color lies between two numbers of colors."""
        return Image.Resampling.NEAREST if self._mode == "P" else resample

    def transpose(self, method: Image.Transpose) -> Image.Image:
        if not self.is_recording or method not in _FLIPS:
            return super().transpose(method)
        width, height = self._size
        turned = method not in (0, 1, 3)  # FLIP_LEFT_RIGHT, FLIP_TOP_BOTTOM, ROTATE_180 keep the shape
        return self.record(Op("pil.transpose", (int(method),)), size=(height, width) if turned else self._size)

    def transform(
        self,
        size: tuple[int, int],
        method: Any,
        data: Any = None,
        resample: int = Image.Resampling.NEAREST,
        fill: int = 1,
        fillcolor: Any = None,
    ) -> Image.Image:
        known = method in _MATRIX_TRANSFORMS and data is not None
        if self.is_recording and known and _fill_fits(self._mode, fillcolor):
            width, height = size
            matrix, resample = tuple(map(float, data)), self._filter(resample)
            if transform_fits(method, matrix, resample, (width, height)):
                args = (width, height), int(method), matrix, int(resample), fillcolor
                return self.record(Op("pil.transform", args), size=(width, height))
        return super().transform(size, method, data, resample, fill, fillcolor)

    def filter(self, filter: Any) -> Image.Image:
        kind = filter if isinstance(filter, type) else type(filter)
        if self.is_recording and kind in _BLURS and self._mode != "P":
            radii = _radii(filter() if isinstance(filter, type) else filter)
            if radii is not None:
                return self.record(Op(_BLURS[kind], (radii,))) if any(radii) else self.copy()
        return super().filter(filter)

    def split(self) -> tuple[Image.Image, ...]:
        if not self.is_recording:
            return super().split()
        return tuple(map(self.getchannel, range(3))) if self._mode == "RGB" else (self.copy(),)

    def getchannel(self, channel: int | str) -> Image.Image:
        """Recorded as an image of which all channels are this one, of which the gray values are the channel's."""
        number = "RGB".find(channel) if isinstance(channel, str) and len(channel) == 1 else channel
        if not self.is_recording or self._mode != "RGB" or type(number) is not int or not 0 <= number < 3:
            return super().getchannel(channel)
        same = self.record(Op("pil_to_tensor")).record(Op("v2.permute_channels", ((number,) * 3,)))
        recorded = same.record(Op("to_pil_image")).record(Op("pil.convert", ("L",)), mode="L")
        recorded.info = dict(self.info)
        return recorded

    def point(self, lut: Any, mode: str | None = None) -> Image.Image:
        if self.is_recording and mode in (None, self._mode) and self._mode != "P":
            table = _byte_table(lut, 3 if self._mode == "RGB" else 1)
            if table is not None and not is_rounded_by_torch(self):
                return self.record(Op("pil.point", (table,)))
        return super().point(lut, mode)


def _keeps_info(op: Op) -> bool:
    """True for calls whose result has the `info` of the image that they are called on."""
    return op.name in _KEEPS_INFO or op == Op("pil.to_grayscale", (1,))


def _radii(blur: Any) -> tuple[float, float] | None:
    """The radii of a blur across and down, or None where stock code should look at them."""
    radii = blur.radius if isinstance(blur.radius, (tuple, list)) else (blur.radius, blur.radius)
    fits = len(radii) == 2 and all(isinstance(radius, (int, float)) and 0 <= radius < _LARGEST_BLUR for radius in radii)
    return tuple(map(float, radii)) if fits else None  # type: ignore[return-value]


def _fill_fits(mode: str, fill: Any) -> bool:
    """True for a color given as stock code gives it: three numbers for "RGB", one for "L", or None for black."""
    if fill is None:
        return True
    values = fill if isinstance(fill, tuple) else (fill,)
    return len(values) == (3 if mode == "RGB" else 1) and all(isinstance(value, int) for value in values)


def _byte_table(lut: Any, channels: int) -> bytes | None:
    """What `point` makes of each value of each channel, or None where stock code should look at it."""
    if not isinstance(lut, (list, tuple)) or len(lut) != 256 * channels:
        return None
    if not all(type(value) in (int, float) and abs(value) < 2**31 for value in lut):
        return None
    return bytes(min(max(round(value), 0), 255) for value in lut)


def _sides(size: Any) -> tuple[int, int] | None:
    """A size as two positive integers, or None where stock code should look at it."""
    try:
        width, height = map(operator.index, size)
    except (TypeError, ValueError):
        return None
    return (width, height) if width > 0 and height > 0 else None


def is_recording_image(image: Any) -> TypeGuard[LazyImage]:
    """True for a handle whose pixels nobody has asked for."""
    return type(image) is LazyImage and image.is_recording


def lazy_image(image: Image.Image, *, palettes: bool = False) -> LazyImage | None:
    """The handle to record on for `image`, or None where none can stand for it.

    A handle that still records is returned as it is. An ordinary image of mode "L" or "RGB" (and a handle whose
    pixels were read) is copied into a new handle, so that later writes to it are not seen. An image of another
    package's class keeps its type: no handle stands for it.

    Args:
        image: any Pillow image.
        palettes: also take images of mode "P", for operations that only move pixels.
    """
    if is_recording_image(image) and (palettes or image.mode != "P"):
        return image
    if is_executing():
        return None
    source = getattr(image, "sink_file_source", None)
    if source is not None and image._im is None and not image.decoderconfig and source.mode == image.mode:  # type: ignore[attr-defined]
        return handle_of_file(image, source)
    if not _is_known(type(image)):
        name = f"{type(image).__module__}.{type(image).__qualname__}"
        report_fallback("Pillow image", f"{name} is a class of its own, which a recorded image would not be")
        return None
    with executing():
        image.load()  # the file of another format, which nobody has read yet, or what was recorded on a palette
    if image.mode not in _RECORDED_MODES and not (palettes and has_plain_palette(image)):
        # The values of a palette image may be classes, which a conversion would destroy.
        advice = "" if image.mode == "P" else ": convert it to 'RGB' or 'L' first"
        report_fallback("Pillow image", f"no kernel for mode {image.mode!r}{advice}")
        return None
    if not image.width or not image.height:
        return None
    plain = image._new(image.im.copy())
    return LazyImage(PixelSource(plain), (), plain.size, plain.mode)


def _is_known(kind: type) -> bool:
    """True for Pillow's own classes of images, those of its plugins included, and for those of this package."""
    return kind.__module__.startswith(("PIL.", "torch_sink.image."))


def handle_of_file(image: Image.Image, source: EncodedSource) -> LazyImage:
    """The handle for an open file that nobody has read, with what somebody may have written to its `info`."""
    handle = LazyImage(source, (), source.size, source.mode)
    handle.__dict__["info"] = dict(image.info)
    return handle
