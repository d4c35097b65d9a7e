"""ArrayImage: what `Image.fromarray` and `Image.frombuffer` return, before Pillow has made pixels of the bytes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from torch_sink.common import after_fork_in_child
from torch_sink.image.core import settings
from torch_sink.image.core.fallback import executing, is_executing
from torch_sink.image.decode.source import BytesSource, PixelSource, Values
from torch_sink.image.handles.names import StockType, named_as

_BYTES = np.dtype(np.uint8)
_making = threading.RLock()  # held while an image becomes ordinary


def _begin_in_child() -> None:
    """After a fork: another thread of the parent may have held the lock."""
    global _making
    _making = threading.RLock()


after_fork_in_child(_begin_in_child)


class _Pixels:
    """The `_im` of an `ArrayImage`, which has no such field until something reads its pixels."""

    def __get__(self, image: Any, kind: type) -> Any:
        _ordinary(image)
        return image._im


@named_as(Image.Image)
class ArrayImage(Image.Image, metaclass=StockType):
    """An ordinary Pillow image; whoever reads its pixels, or sets an attribute, makes it one of the stock class.

    Only what records looks at `lazy_values`: a batch takes the bytes as they are, and Pillow never unpacks them.
    """

    lazy_values: Values

    _im = _Pixels()

    def __setattr__(self, name: str, value: Any) -> None:
        _ordinary(self)
        setattr(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _ordinary(self)
        return self.__reduce_ex__(protocol)

    def __eq__(self, other: object) -> bool:
        _ordinary(self)
        return self == other

    __hash__ = None  # type: ignore[assignment]


def _ordinary(image: Image.Image) -> None:
    """Makes the pixels of an `ArrayImage`, which is of the stock class from then on; a no-op for other images."""
    with _making:
        if type(image) is ArrayImage:
            mode, size, values = image.lazy_values
            with executing():
                image.__dict__["_im"] = Image.frombuffer(mode, size, values, "raw", mode, 0, 1).im
            object.__setattr__(image, "__class__", Image.Image)
            del image.__dict__["lazy_values"]


ORDINARY = (ArrayImage, Image.Image)  # the classes of images that Pillow makes in memory


def from_array(stock: Callable[..., Image.Image], *args: Any, **kwargs: Any) -> Image.Image:
    """For `Image.fromarray`: of bytes in "L" or "RGB" it calls `Image.frombuffer` as Pillow does, in less time."""
    if len(args) != 1 or kwargs or type(obj := args[0]) is not np.ndarray or obj.dtype != _BYTES:
        return stock(*args, **kwargs)
    shape = obj.shape
    if len(shape) != 2 and shape[2:] != (3,):
        return stock(obj)
    mode, size = ("L" if len(shape) == 2 else "RGB"), shape[1::-1]
    data = obj if obj.flags.c_contiguous else obj.tobytes()
    is_ours = getattr(Image.frombuffer, "__globals__", None) is globals()  # and no program's, or another package's
    if not is_ours or 0 in size or not _is_on():
        return Image.frombuffer(mode, size, data, "raw", mode, 0, 1)
    return _array_image(mode, size, data)


def from_buffer(stock: Callable[..., Image.Image]) -> Callable[..., Image.Image]:
    """Stand-in for `Image.frombuffer`: of bytes and of arrays it makes an `ArrayImage`.

    As in Pillow, an image in "L" shares the memory of its array, and any other one has a copy.
    """

    @functools.wraps(stock)
    def stand_in(*args: Any, **kwargs: Any) -> Image.Image:
        if len(args) != 7 or kwargs or not _is_on():
            return stock(*args, **kwargs)
        mode, size, data, decoder, raw_mode, stride, step = args
        if (decoder, raw_mode, stride, step) != ("raw", mode, 0, 1) or mode not in ("L", "RGB"):
            return stock(*args)
        is_bytes = type(data) is bytes
        is_known = is_bytes or (type(data) is np.ndarray and data.flags.c_contiguous)
        is_size = type(size) is tuple and len(size) == 2 and type(size[0]) is type(size[1]) is int and min(size) > 0
        if not (is_known and is_size) or size[0] * size[1] * len(mode) != (len(data) if is_bytes else data.nbytes):
            return stock(*args)
        return _array_image(mode, size, data)

    return stand_in


def _is_on() -> bool:
    active = settings.active
    return active is not None and bool(active.device) and not active.interpreted and not is_executing()


def _array_image(mode: str, size: tuple[int, int], data: Any) -> Image.Image:
    """The image of bytes, or of a contiguous array, whose number is right."""
    image, shares = ArrayImage.__new__(ArrayImage), mode == "L"
    fields = image.__dict__  # those of Image.Image, filled directly: its __init__ would use `__setattr__`
    fields["_mode"], fields["_size"], fields["palette"], fields["info"] = mode, size, None, {}
    fields["_readonly"], fields["_exif"] = 1 if shares else 0, None
    fields["lazy_values"] = mode, size, data if shares or type(data) is bytes else data.tobytes()
    return image


def agrees(image: Image.Image) -> bool:
    """False where a program has written to the mode, the size, the palette or the `im` of a loaded image alone."""
    if type(image) is ArrayImage:
        return True
    pixels: Any = image.__dict__.get("_im")
    is_whole = getattr(pixels, "mode", None) == image.mode and pixels.size == image.size
    return is_whole and (image.palette is None or image.mode == "P")


def pixels_of(image: Image.Image) -> PixelSource:
    """A source of a copy of an ordinary image's pixels, which later writes to the image do not change."""
    values = image.__dict__.get("lazy_values")  # which another thread may drop
    if values is None or image.info:  # bytes have no `info`
        return PixelSource(image._new(image.im.copy()))
    return BytesSource(values if type(values[2]) is bytes else (*values[:2], values[2].tobytes()))
