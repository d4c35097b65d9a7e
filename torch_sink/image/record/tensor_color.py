"""Recording on tensors: color. How a recorder works is said in `tensor.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_sink.image.core.arguments import is_number, permutation_of
from torch_sink.image.core.exactness import is_rounded_by_torch
from torch_sink.image.core.ops import Op

Recorder = Callable[..., Any]


def color_recorders(family: str) -> dict[str, Recorder]:
    """Color operations on uint8 tensors that take at most one argument, and that keep the shape."""

    def steep(name: str, accepts: Callable[..., bool]) -> Recorder:
        """For what would turn a rounding difference into a large one."""
        record = recorder(name, accepts)
        return lambda handle, *args, **kwargs: (
            NotImplemented if is_rounded_by_torch(handle) else record(handle, *args, **kwargs)
        )

    def recorder(name: str, accepts: Callable[..., bool]) -> Recorder:
        name = f"{family}.{name}"

        def record(handle: Any, *args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            if handle.sink_dtype != torch.uint8 or not accepts(*values):
                return NotImplemented
            return handle.record(Op(name, values))

        return record

    def on_colors(record: Recorder) -> Recorder:
        """Stock code gives an image of one channel back as it is."""
        return lambda handle, *args, **kwargs: _unless(handle.sink_shape[0] == 1, record, handle, *args, **kwargs)

    def on_inner_pixels(record: Recorder) -> Recorder:
        """Stock code gives an image without inner pixels back as it is."""
        return lambda handle, *args, **kwargs: _unless(min(handle.sink_shape[1:]) <= 2, record, handle, *args, **kwargs)

    return {
        "adjust_brightness": recorder("adjust_brightness", _is_factor),
        "adjust_contrast": recorder("adjust_contrast", _is_factor),
        "adjust_saturation": on_colors(recorder("adjust_saturation", _is_factor)),
        "adjust_hue": on_colors(recorder("adjust_hue", lambda part: is_number(part) and -0.5 <= part <= 0.5)),
        "adjust_sharpness": on_inner_pixels(recorder("adjust_sharpness", _is_factor)),
        "invert": recorder("invert", lambda: True),
        "posterize": steep("posterize", lambda bits: type(bits) is int and 0 <= bits <= 8),
        "solarize": steep("solarize", lambda threshold: is_number(threshold) and threshold <= 255),
        "autocontrast": steep("autocontrast", lambda: True),
        "equalize": steep("equalize", lambda: True),
    }


def _is_factor(factor: Any) -> bool:
    return is_number(factor) and factor >= 0


def _unless(unchanged: bool, record: Recorder, handle: Any, *args: Any, **kwargs: Any) -> Any:
    """What `record` gives, or the handle itself where the arguments are right and stock code changes nothing."""
    result = record(handle, *args, **kwargs)
    return handle if unchanged and result is not NotImplemented else result


def gamma(family: str, handle: Any, gamma: Any, gain: Any = 1) -> Any:
    if handle.sink_dtype != torch.uint8 or not (_is_factor(gamma) and is_number(gain)):
        return NotImplemented
    if is_rounded_by_torch(handle):
        return NotImplemented
    return handle.record(Op(f"{family}.adjust_gamma", (gamma, gain)))


def grayscale(family: str, handle: Any, num_output_channels: int = 1) -> Any:
    channels, height, width = handle.sink_shape
    if handle.sink_dtype != torch.uint8 or type(num_output_channels) is not int or num_output_channels not in (1, 3):
        return NotImplemented
    # The kernel of v1 leaves an image of one channel as it is.
    made = channels if family == "v1" and channels == 1 else num_output_channels
    return handle.record(Op(f"{family}.rgb_to_grayscale", (num_output_channels,)), shape=(made, height, width))


def grayscale_to_rgb(handle: Any) -> Any:
    channels, height, width = handle.sink_shape
    if channels == 3:
        return handle
    if handle.sink_dtype != torch.uint8:
        return NotImplemented
    return handle.record(Op("v2.grayscale_to_rgb"), shape=(3, height, width))


def permute_channels(handle: Any, permutation: Sequence[int]) -> Any:
    order = permutation_of(permutation, handle.sink_shape[0])
    if order is None or handle.sink_dtype != torch.uint8:
        return NotImplemented
    return handle.record(Op("v2.permute_channels", (order,)))
