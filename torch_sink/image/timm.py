"""Pillow's modules `ImageOps` and `ImageEnhance`, as timm's augmentations call them on handles.

Their other functions that the kernels know call methods that `LazyImage` records. What is no handle goes to Pillow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_sink.image.core.ops import RECORDERS, Recorder

_ENHANCERS = {
    "Color": "pil.adjust_saturation",
    "Contrast": "pil.adjust_contrast",
    "Brightness": "pil.adjust_brightness",
    "Sharpness": "pil.adjust_sharpness",
}


class ModuleStandIn:
    """A module with some of its functions replaced."""

    def __init__(self, stock: Any, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced)
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class _Enhancer:
    """One of `ImageEnhance`'s classes, on a handle."""

    def __init__(self, stock: Callable[[Any], Any], recorder: Recorder, image: Any) -> None:
        self._stock, self._recorder, self._image = stock, recorder, image

    def enhance(self, factor: Any) -> Any:
        made = self._recorder(self._image, factor) if _records(self._image) else NotImplemented
        return self._stock(self._image).enhance(factor) if made is NotImplemented else made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock(self._image), name)


def _records(image: Any) -> bool:
    """True for a handle whose pixels are colors, and not numbers of colors."""
    return getattr(image, "is_recording", False) and image.mode != "P"


def _enhancer(stock: Callable[[Any], Any], recorder: Recorder) -> Callable[[Any], Any]:
    return lambda image: _Enhancer(stock, recorder, image) if _records(image) else stock(image)


def _function(stock: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def operation(image: Any, *args: Any, **kwargs: Any) -> Any:
        made = recorder(image, *args, **kwargs) if _records(image) else NotImplemented
        return stock(image, *args, **kwargs) if made is NotImplemented else made

    return operation


def image_enhance(stock: Any) -> ModuleStandIn:
    return ModuleStandIn(
        stock, {kind: _enhancer(getattr(stock, kind), RECORDERS[place]) for kind, place in _ENHANCERS.items()}
    )


def image_ops(stock: Any) -> ModuleStandIn:
    names = "autocontrast", "equalize"
    return ModuleStandIn(stock, {name: _function(getattr(stock, name), RECORDERS[f"pil.{name}"]) for name in names})
