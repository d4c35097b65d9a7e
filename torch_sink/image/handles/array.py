"""ArrayImage: what `Image.fromarray` returns, before Pillow has made an image of the array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import is_executing
from torch_sink.image.decode.source import BytesSource, PixelSource, Values
from torch_sink.image.handles.names import named_as

_BYTES = np.dtype(np.uint8)


@named_as(Image.Image)
class ArrayImage(Image.Image):
    """An ordinary Pillow image; whoever reads its pixels, or sets an attribute, makes it one of the stock class.

    Only what records looks at `lazy_values`: a batch takes the bytes as they are, and Pillow never unpacks them.
    """

    lazy_values: Values

    def _become_ordinary(self) -> None:
        fields = self.__dict__
        mode, size, values = fields["lazy_values"]
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
    """For `Image.fromarray`: of bytes in "L" or "RGB" it makes an `ArrayImage`, where another device makes pixels.

    As in Pillow, an image in "L" of a contiguous array shares its memory, and any other one has a copy.
    """
    active = settings.active
    is_elsewhere = active is not None and active.device not in ("", "cpu")
    if not is_elsewhere or mode is not None or type(obj) is not np.ndarray or obj.dtype != _BYTES or is_executing():
        return stock(obj, mode)
    shape: Any = obj.shape
    is_gray = len(shape) == 2
    if not (is_gray or (len(shape) == 3 and shape[2] == 3)) or 0 in shape:
        return stock(obj, mode)
    values = obj if is_gray and obj.flags.c_contiguous else obj.tobytes()
    size, mode = (shape[1], shape[0]), "L" if is_gray else "RGB"
    image = ArrayImage.__new__(ArrayImage)
    fields = image.__dict__  # those of Image.Image, filled directly: its __init__ would use `__setattr__`
    fields["_im"], fields["_mode"], fields["_size"], fields["palette"], fields["info"] = None, mode, size, None, {}
    fields["_readonly"], fields["_exif"], fields["lazy_values"] = int(is_gray), None, (mode, size, values)
    return image


def pixels_of(image: Image.Image) -> PixelSource:
    """A source of a copy of an ordinary image's pixels, which later writes to the image do not change."""
    uses.note_opened()
    if type(image) is not ArrayImage:
        return PixelSource(image._new(image.im.copy()))
    values = image.lazy_values
    return BytesSource(values if type(values[2]) is bytes else (*values[:2], values[2].tobytes()))
