"""Stand-ins for Pillow's modules `ImageOps` and `ImageEnhance`, as other packages call them on handles.

Their other functions that the kernels know call methods that `LazyImage` records. What is no handle goes to Pillow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_sink.image.core.arguments import is_number
from torch_sink.image.core.exactness import is_rounded_by_torch
from torch_sink.image.core.ops import Op
from torch_sink.image.handles.image import LazyImage, is_recording_image


class ModuleStandIn:
    """A module with some of its functions replaced."""

    def __init__(self, stock: Any, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced)
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class _Enhancer:
    """One of `ImageEnhance`'s classes, on a handle."""

    def __init__(self, stock: Callable[[Any], Any], name: str, image: LazyImage) -> None:
        self._stock, self._name, self._image = stock, name, image

    def enhance(self, factor: Any) -> Any:
        if is_number(factor) and self._image.is_recording:
            if self._name == "pil.adjust_saturation" and self._image.mode == "L":
                return self._image.copy()
            return self._image.record(Op(self._name, (factor,)))
        return self._stock(self._image).enhance(factor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock(self._image), name)


def _is_colored(image: Any) -> bool:
    """True for a handle whose pixels are colors, and not numbers of colors."""
    return is_recording_image(image) and image.mode != "P"


def _enhancer(stock: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    def make(image: Any) -> Any:
        return _Enhancer(stock, name, image) if _is_colored(image) else stock(image)

    return make


def _operation(stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    def operation(image: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_colored(image) and not args and not kwargs and not is_rounded_by_torch(image):
            return image.record(Op(name))
        return stock(image, *args, **kwargs)

    return operation


_ENHANCERS = {
    "Color": "pil.adjust_saturation",
    "Contrast": "pil.adjust_contrast",
    "Brightness": "pil.adjust_brightness",
    "Sharpness": "pil.adjust_sharpness",
}


def image_enhance(stock: Any) -> ModuleStandIn:
    return ModuleStandIn(stock, {kind: _enhancer(getattr(stock, kind), name) for kind, name in _ENHANCERS.items()})


def image_ops(stock: Any) -> ModuleStandIn:
    names = "autocontrast", "equalize"
    return ModuleStandIn(stock, {name: _operation(getattr(stock, name), f"pil.{name}") for name in names})
