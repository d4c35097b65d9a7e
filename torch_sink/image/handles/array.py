"""ArrayImage: what `Image.fromarray` and `Image.frombuffer` return, before Pillow has made pixels of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import executing, is_executing
from torch_sink.image.decode.source import BytesSource, PixelSource, Values
from torch_sink.image.handles.names import named_as

_BYTES = np.dtype(np.uint8)


@named_as(Image.Image)
class ArrayImage(Image.Image):
    """An ordinary Pillow image; whoever reads its pixels, or sets an attribute, makes it one of the stock class.

    Only what records looks at `lazy_values`: a batch takes the bytes as they are, and Pillow never unpacks them.
    """

    lazy_values: Values

    unused = 0  # how many in a row became ordinary, and were not recorded

    def _become_ordinary(self) -> None:
        ArrayImage.unused += 1
        fields = self.__dict__
        mode, size, values = fields["lazy_values"]
        with executing():
            fields["_im"] = Image.frombuffer(mode, size, values, "raw", mode, 0, 1).im
        object.__setattr__(self, "__class__", Image.Image)

    @property  # type: ignore[misc]  # `__setattr__` stands for its setter
    def im(self) -> Any:
        self._become_ordinary()
        return self.im

    def load(self) -> Any:
        self._become_ordinary()
        return self.load()

    def __setattr__(self, name: str, value: Any) -> None:
        self._become_ordinary()
        setattr(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._become_ordinary()
        return self.__reduce_ex__(protocol)

    def __eq__(self, other: object) -> bool:
        self._become_ordinary()
        return self == other

    __hash__ = None  # type: ignore[assignment]


ORDINARY = (ArrayImage, Image.Image)  # the classes of images that Pillow makes in memory


def from_array(stock: Callable[..., Image.Image], obj: Any, mode: Any = None) -> Image.Image:
    """For `Image.fromarray`: calls `Image.frombuffer` for bytes in "L" or "RGB" as Pillow does, which takes longer."""
    if mode is not None or type(obj) is not np.ndarray or obj.dtype != _BYTES:
        return stock(obj, mode)
    if obj.ndim != 2 and obj.shape[2:] != (3,):
        return stock(obj, mode)
    mode, size, data = ("L", "RGB")[obj.ndim - 2], obj.shape[1::-1], obj if obj.flags.c_contiguous else obj.tobytes()
    return Image.frombuffer(mode, size, data, "raw", mode, 0, 1)


def from_buffer(stock: Callable[..., Image.Image], mode: Any, size: Any, data: Any, *args: Any) -> Image.Image:
    """For `Image.frombuffer`: of bytes and of arrays it makes an `ArrayImage`, where another device makes pixels.

    As in Pillow, an image in "L" shares the memory of its array, and any other one has a copy.
    """
    active, is_bytes = settings.active, type(data) is bytes
    is_elsewhere = active is not None and active.device not in ("", "cpu")
    if not is_elsewhere or args != ("raw", mode, 0, 1) or mode not in ("L", "RGB") or is_executing():
        return stock(mode, size, data, *args)
    is_known = is_bytes or (type(data) is np.ndarray and data.flags.c_contiguous)
    is_size = type(size) is tuple and len(size) == 2 and type(size[0]) is type(size[1]) is int and min(size) > 0
    if ArrayImage.unused >= 16 and ArrayImage.unused % 256:  # what fell back so often will again; tried at times
        ArrayImage.unused += 1
        return stock(mode, size, data, *args)
    if not (is_known and is_size) or size[0] * size[1] * len(mode) != (len(data) if is_bytes else data.nbytes):
        return stock(mode, size, data, *args)
    image, shares = ArrayImage.__new__(ArrayImage), mode == "L"
    fields = image.__dict__  # those of Image.Image, filled directly: its __init__ would use `__setattr__`
    fields["_im"], fields["_mode"], fields["_size"], fields["palette"], fields["info"] = None, mode, size, None, {}
    fields["_readonly"], fields["_exif"] = int(shares), None
    fields["lazy_values"] = mode, size, data if shares or is_bytes else data.tobytes()
    return image


def pixels_of(image: Image.Image) -> PixelSource:
    """A source of a copy of an ordinary image's pixels, which later writes to the image do not change."""
    uses.note_opened()
    if type(image) is not ArrayImage:
        return PixelSource(image._new(image.im.copy()))
    values, ArrayImage.unused = image.lazy_values, 0
    return BytesSource(values if type(values[2]) is bytes else (*values[:2], values[2].tobytes()))
