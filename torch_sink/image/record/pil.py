"""Stand-ins that record: functionals on Pillow images.

Each takes the arguments of the stock function it stands in for. On anything that cannot be recorded it calls the
stock function, which then finds an ordinary image, raises its own errors, or makes the handle's pixels itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from PIL import Image
from torchvision.transforms.v2.functional._geometry import (
    _center_crop_compute_crop_anchor,
    _center_crop_compute_padding,
)

from torch_sink.image.core.arguments import color_of, cropped_size, is_number, sides_of, size_of, with_numbers
from torch_sink.image.core.exactness import is_rounded_by_torch
from torch_sink.image.core.ops import Op
from torch_sink.image.handles.image import LazyImage, lazy_image

Recorder = Callable[..., Any]


def through_methods(stock: Recorder) -> Recorder:
    """For functionals whose stock code calls Pillow methods that `LazyImage` records."""

    @functools.wraps(stock)
    def stand_in(img: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(img, Image.Image):
            img = lazy_image(img, palettes=True) or img
        return stock(img, *args, **kwargs)

    return stand_in


def _pil_recorder(name: str, accepts: Callable[..., bool], mode: Callable[..., str | None] | None = None) -> Any:
    """A stand-in that records `name` with its positional arguments when `accepts(handle, *args)`."""

    def make(stock: Recorder) -> Recorder:
        @functools.wraps(stock)
        def stand_in(img: Any, *args: Any, **kwargs: Any) -> Any:
            handle = lazy_image(img) if isinstance(img, Image.Image) else None
            if handle is not None:
                values = args if not kwargs else _positional(stock, args, kwargs)
                if values is not None and accepts(handle, *values):
                    return handle.record(Op(name, values), mode=mode(*values) if mode else None)
            return stock(img, *args, **kwargs)

        return stand_in

    return make


def _positional(stock: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    names = _argument_names(stock)[1:]
    if len(args) + len(kwargs) > len(names) or any(name not in kwargs for name in names[len(args) :]):
        return None
    return (*args, *(kwargs[name] for name in names[len(args) :]))


@functools.cache
def _argument_names(stock: Recorder) -> tuple[str, ...]:
    return stock.__code__.co_varnames[: stock.__code__.co_argcount]


def _factor(handle: LazyImage, *args: Any) -> bool:
    return len(args) == 1 and is_number(args[0])


def _by_factor(name: str, accepts: Callable[..., bool] = _factor) -> Callable[[Recorder], Recorder]:
    """`_pil_recorder` for functionals that blend by a factor."""
    make = _pil_recorder(name, accepts)
    return lambda stock: with_numbers(make(stock))


def _color_factor(handle: LazyImage, *args: Any) -> bool:
    return handle.mode == "RGB" and _factor(handle, *args)


def _hue(handle: LazyImage, *args: Any) -> bool:
    return _color_factor(handle, *args) and -0.5 <= args[0] <= 0.5


def _is_exact(handle: LazyImage) -> bool:
    """False after a blur or a deformation through torch's floats, of which a threshold would show the last bits."""
    return not is_rounded_by_torch(handle)


def _threshold(handle: LazyImage, *args: Any) -> bool:
    return _factor(handle, *args) and _is_exact(handle)


def _bits(handle: LazyImage, *args: Any) -> bool:
    return _is_exact(handle) and len(args) == 1 and type(args[0]) is int and 1 <= args[0] <= 8


def _no_arguments(handle: LazyImage, *args: Any) -> bool:
    return not args


def _statistics(handle: LazyImage, *args: Any) -> bool:
    return not args and _is_exact(handle)


def _gray_channels(handle: LazyImage, *args: Any) -> bool:
    return len(args) == 1 and args[0] in (1, 3)


def pad_pil(stock: Recorder) -> Recorder:
    """Stand-in for `_functional_pil.pad`."""

    @functools.wraps(stock)
    def stand_in(img: Any, padding: Any, fill: Any = 0, padding_mode: Any = "constant") -> Any:
        handle = lazy_image(img, palettes=True) if isinstance(img, Image.Image) else None
        sides = sides_of(padding)
        if handle is not None and sides is not None and isinstance(padding_mode, str):
            width, height = handle.size
            unused = padding_mode != "constant" and (fill is None or isinstance(fill, (int, float, tuple, list)))
            color = color_of(0 if unused else fill, 3 if handle.mode == "RGB" else 1)
            size = width + sides[0] + sides[2], height + sides[1] + sides[3]
            known = padding_mode in ("constant", "edge", "reflect", "symmetric")
            if color is not None and known and min(size) > 0 and min(cropped_size(sides, height, width)) > 0:
                return handle.record(Op("pil.pad", (sides, color, padding_mode)), size=size)
        return stock(img, padding, fill, padding_mode)

    return stand_in


def _saturation(stock: Recorder) -> Recorder:
    """Stand-in for `_functional_pil.adjust_saturation`, which gives a copy of a gray image."""
    record = _by_factor("pil.adjust_saturation", _color_factor)(stock)

    @functools.wraps(stock)
    def stand_in(img: Any, saturation_factor: Any) -> Any:
        handle = lazy_image(img) if isinstance(img, Image.Image) else None
        if handle is not None and handle.mode == "L" and is_number(saturation_factor):
            return handle.copy()
        return record(img, saturation_factor)

    return stand_in


def _gamma(stock: Recorder) -> Recorder:
    """Stand-in for `_functional_pil.adjust_gamma`."""

    @functools.wraps(stock)
    def stand_in(img: Any, gamma: Any, gain: Any = 1.0) -> Any:
        handle = lazy_image(img) if isinstance(img, Image.Image) else None
        if handle is not None and is_number(gamma) and gamma >= 0 and is_number(gain) and _is_exact(handle):
            return handle.record(Op("pil.adjust_gamma", (gamma, gain)))
        return stock(img, gamma, gain)

    return stand_in


def center_crop(stock: Recorder) -> Recorder:
    """Stand-in for the kernel of `v2.functional.center_crop` on Pillow images, which binds stock code's `pad`."""

    @functools.wraps(stock)
    def stand_in(image: Any, output_size: Any) -> Any:
        handle = lazy_image(image, palettes=True) if isinstance(image, Image.Image) else None
        size = size_of(output_size)
        if handle is not None and size is not None:
            width, height = handle.size
            if size[0] > height or size[1] > width:
                sides = tuple(_center_crop_compute_padding(*size, height, width))
                width, height = width + sides[0] + sides[2], height + sides[1] + sides[3]
                color = color_of(0, 3 if handle.mode == "RGB" else 1)
                handle = handle.record(Op("pil.pad", (sides, color, "constant")), size=(width, height))
                if size == (height, width):
                    return handle
            top, left = _center_crop_compute_crop_anchor(*size, height, width)
            return handle.crop((left, top, left + size[1], top + size[0]))
        return stock(image, output_size)

    return stand_in


PIL_RECORDERS: dict[str, Callable[[Recorder], Recorder]] = {
    **dict.fromkeys(("hflip", "vflip", "crop", "resize", "affine", "rotate", "perspective"), through_methods),
    "pad": pad_pil,
    "adjust_brightness": _by_factor("pil.adjust_brightness"),
    "adjust_contrast": _by_factor("pil.adjust_contrast"),
    "adjust_saturation": _saturation,
    "adjust_hue": _pil_recorder("pil.adjust_hue", _hue),
    "adjust_gamma": _gamma,
    "adjust_sharpness": _by_factor("pil.adjust_sharpness"),
    "to_grayscale": _pil_recorder("pil.to_grayscale", _gray_channels, mode=lambda n: "L" if n == 1 else "RGB"),
    "invert": _pil_recorder("pil.invert", _no_arguments),
    "posterize": _pil_recorder("pil.posterize", _bits),
    "solarize": _pil_recorder("pil.solarize", _threshold),
    "autocontrast": _pil_recorder("pil.autocontrast", _statistics),
    "equalize": _pil_recorder("pil.equalize", _statistics),
}
